//! The jail, from outside and from inside: it boots, it holds, it leaves nothing.
//!
//! Needs root, `atoll-jailer` and `atoll-guest` built with the `guest` profile, and an EROFS image with a Debian root
//! (`ATOLL_TEST_IMAGE`). Without them every test says loudly that it was skipped.

#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test stops at the first thing that is not as expected"
)]

mod house;
mod life;
mod limits;
mod mounting;
mod saving;
mod walls;

//! Runs from outside: by value, feature by feature, and by simulation, seed by seed.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    deprecated,
    reason = "a test fails by panicking"
)]

mod behaviour;
mod pausing;
mod schedules;
mod set_back;
mod simulation;
mod sizes;
mod support;

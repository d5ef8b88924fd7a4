//! The vault as its callers see it, and as a crash, a full disk or a bad disk leaves it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod collect;
mod crash;
mod damage;
mod full;
mod growing;
mod keys;
mod lending;
mod model;
mod portable;
mod saves;
mod support;

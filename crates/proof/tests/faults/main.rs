//! The server dies, in every way and at every moment: nothing that was acknowledged is lost, nothing is left over.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod adoption;
mod chaos;
mod downtime;
mod state;

//! What Atoll does for those who use it as intended: every operation of the API, on every tier.
//!
//! One binary with a module per theme; each test is written once and made into one per tier by `on_every_tier!`.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod artifacts;
mod bench;
mod builds;
mod cli;
mod commands;
mod confinement;
mod deadlines;
mod demo;
mod disk;
mod exec;
mod files;
mod keys;
mod ledger;
mod ordinary;
mod pools;
mod ports;
mod quota;
mod refusals;
mod run;
mod sandboxes;
mod sessions;
mod snapshots;
mod state;
mod telemetry;
mod templates;
mod transfer;
mod volumes;
mod waking;
mod watch;

//! The store from outside: what it promises to the application, each promise a test.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod artifacts;
mod crash;
mod instances;
mod ledger;
mod models;
mod names;
mod network;
mod rows;
mod sandboxes;
mod secrets;
mod snapshots;
mod support;
mod trimming;
mod upgrade;
mod volumes;

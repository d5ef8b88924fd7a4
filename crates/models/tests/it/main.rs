//! The gateway from outside, against providers that are told what to do.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests panic as tests do"
)]

mod budgets;
mod cache;
mod calls;
mod conversations;
mod evasion;
mod guards;
mod isolation;
mod long;
mod places;
mod readings;
mod support;

//! A server from the outside: what the command line, the demo and the benchmarks share.
//!
//! ```text
//!   command line ─┐            ┌─ Client          /v1 over HTTP, server-sent events
//!   demo ─────────┼─ this ─────┼─ WorkflowClient  durable workflows over gRPC
//!   benchmarks ───┘            ├─ ServerProcess   this very program, started as a server
//!                              └─ output          what people and programs are told
//! ```
//!
//! What must hold:
//! - It knows of a server what the public APIs say, and what the server writes into its data directory for its neighbours
//!   ([`local`]): nothing of how it works inside.
//! - A key is shown to the server that it belongs to and to no other.

mod child;
mod client;
pub mod local;
pub mod output;
pub mod template;
pub mod transfer;
mod workflow;

pub use atoll_http_rules::segment;
pub use child::{ServerProcess, find_in_path, scratch};
pub use client::{Client, events, from_wire, text};
pub use workflow::WorkflowClient;

//! The proof of Atoll: the real server as a real process, driven through its public API, on every tier of this machine.
//!
//! ```text
//!   a test ── Sandbox, Client ── HTTP, WebSocket ──> atoll server (child process, own data directory and cgroups)
//!      │                                                 │
//!      └── host: processes, mounts, cgroups, files <─────┘   looked at from outside, before and after
//! ```
//!
//! What must hold:
//! - **Every behaviour is proven on every tier.** A test is written once, as a function over [`Server`], and
//!   [`on_every_tier!`] makes one named test per tier of it. A tier that this machine lacks is skipped, which `./test`
//!   says at its end; one that doctor finds working and a test does not get is a failure.
//! - **Every test ends with nothing left.** [`Server::finish`] ends all sandboxes and asserts that no process, mount,
//!   cgroup, directory or FIFO remains; it runs after each test, not only in tests about leaks.
//! - **Nothing sleeps.** Whoever waits, waits for a condition, with a deadline: [`wait`].
//! - **Tests do not meet.** Each has its own server, data directory, port and cgroup; only immutable templates are shared.
//!
//! Where things are found: `ATOLL_BIN` (default: the newest of `target/{release,debug}/atoll`), `ATOLL_TEMPLATES` (default:
//! `templates` in `ATOLL_CACHE` or `/var/cache/atoll`) with the template `base`, `ATOLL_RUNSC`.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a harness fails by panicking, with all it knows"
)]

mod cli;
pub mod client;
pub mod host;
mod leaks;
pub mod ordinary;
pub mod random;
mod sandbox;
mod server;
pub mod stream;
mod terminal;
mod tier;
pub mod wait;
mod world;

pub use cli::printed;
pub use client::{Answer, Client};
pub use sandbox::{Output, Sandbox, from_base64, to_base64};
pub use server::{Options, Server, binary, templates};
pub use terminal::Terminal;
pub use tier::{Tier, on};
pub use world::World;

/// Gives a JSON value; every request body is one.
pub use serde_json::{Value, json};

pub const KIB: u64 = 1024;
pub const MIB: u64 = 1024 * KIB;
pub const GIB: u64 = 1024 * MIB;

/// A name for a cgroup or a network namespace. What a killed test left behind has another one, also when a process of the
/// same number comes again.
fn unique_name() -> String {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = since.map_or(0, |since| since.as_micros()) & 0xff_ffff;
    format!("atoll-proof-{}-{now:x}-{count}", std::process::id())
}

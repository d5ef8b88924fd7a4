//! `atoll-guest`: PID 1 inside a sandbox. It starts commands, reaps what dies, reads and writes files, and forwards
//! ports, all on behalf of the host at the other end of its stdin and stdout.
//!
//! ```text
//!   main ──> agent (the loop) ──> requests ──> a job per stream:  attach  files/*  connect  watch  ports  usage
//!              │ mux, poll                          │
//!              └── protocol frames                  └── commands ──> command, log, spawn, terminal
//! ```
//! What must hold:
//! - **Small and quiet.** One thread, at most 3 MB, no wake-up when nothing happens: a thousand of these share two cores.
//! - **It outlives its host.** A host may vanish between two bytes and another take over; commands go on.
//! - **The user's code is the enemy.** It runs as children without the channel's descriptors, may fill every table and
//!   disk, and must at worst earn an error.
//!
//! `--confine` is for tiers whose kernel is the host's: children lose every capability, cannot gain any, and run under
//! the seccomp program read from `--seccomp-fd`. Without it children keep what the container gives them.
//!
//! `atoll-guest apply-layer` is another program in the same file, for hosts that bring files back: see `layer`.

#![cfg_attr(not(test), no_main)]
#![expect(
    unsafe_code,
    reason = "PID 1 talks to the kernel: clone on a stack of its own, signals, terminals"
)]

mod acting;
mod agent;
mod attach;
mod command;
mod commands;
mod configure;
mod connect;
mod environment;
mod failure;
mod files;
mod follow;
mod job;
mod layer;
mod log;
mod long;
mod mux;
mod network;
mod path;
mod poll;
mod requests;
mod setup;
mod spawn;
mod terminal;
mod usage;
mod users;

use std::ffi::{CStr, c_char, c_int};

/// The C entry point. Rust's own would open descriptors, change SIGPIPE and map a signal stack first: a dozen system
/// calls that cost a cold start in gVisor 50 us and that children would have to undo.
///
/// # Safety
/// For the C runtime only: `count` pointers to zero-terminated strings that live as long as the process.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn main(count: c_int, arguments: *const *const c_char) -> c_int {
    let arguments: Vec<String> = (1..usize::try_from(count).unwrap_or(0))
        .map(|index| {
            // SAFETY: `index` is below `count`, and so the caller vouches for it.
            let argument = unsafe { CStr::from_ptr(*arguments.add(index)) };
            argument.to_string_lossy().into_owned()
        })
        .collect();
    if arguments.first().is_some_and(|argument| argument == layer::APPLY) {
        return layer::main();
    }
    let served = setup::Options::parse(&arguments).and_then(|options| setup::agent(&options)?.run());
    match served {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("atoll-guest: {error}");
            1
        }
    }
}

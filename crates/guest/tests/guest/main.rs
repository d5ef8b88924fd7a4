//! Drives the real agent as an ordinary child process, over two pipes, the way a host does.

#![expect(clippy::panic, reason = "the helpers of a test fail by panicking")]

mod client;
mod commands;
mod files;
mod measure;
mod ports;

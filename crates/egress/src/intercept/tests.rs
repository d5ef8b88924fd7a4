//! Connections through the interceptor, with real servers and real clients on loopback and in memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attacks;
mod certificates;
mod http1;
mod http2;
mod open;
mod secrets;
mod streams;
mod tools;
mod websockets;
mod world;

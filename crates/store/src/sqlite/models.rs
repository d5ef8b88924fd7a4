//! The model gateway's memory, in SQLite.

mod bodies;
mod calls;
mod setup;
pub(crate) mod trimmed;

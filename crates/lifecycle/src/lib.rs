//! What happens to a sandbox, decided by value: admission of a request, and every change of state after it.
//!
//! What must hold: same input, same answer. No clock (the caller hands in `now`), no randomness, no I/O, no async. The
//! caller persists what is decided here, and only then performs its effects.

pub mod admission;
mod machine;
mod work;

pub use admission::{Admitted, Limits, Missing, Tier, admit, admit_timeout};
pub use machine::{
    Boot, DeadlineKind, Effect, Extension, Happening, Input, InstanceFate, Liveness, NewRecord, Policy,
    Record, Refused, Transition, change, create, next_deadline, step,
};
pub use work::{CpuMark, WORKS_FROM_PER_MILLE, Work};

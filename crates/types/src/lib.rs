//! The words of Atoll: ids, units, specifications and lifecycle states that every other crate speaks.
//!
//! What must hold: no I/O, no clock, no randomness, no async and no knowledge of any wire. A word lives here only when
//! three or more crates say it; otherwise it lives with the crate that owns the idea.

mod fault;
mod id;
mod sandbox;
mod template;
mod units;
mod usage;

pub use fault::{Fault, FaultKind};
pub use id::{
    ArtifactId, CommandId, Id, IdError, InstanceId, KeyId, Kind, ProjectId, RequestId, SandboxId, TemplateId,
};
pub use sandbox::{
    DiskBacking, EndReason, IdleAction, IdlePolicy, Isolation, Resources, SandboxSpec, SandboxState,
};
pub use template::{ReadyCheck, StartCommand, TemplateManifest, TemplateSource};
pub use units::{GIB, KIB, MIB, Timestamp, format_bytes, parse_bytes};
pub use usage::Usage;

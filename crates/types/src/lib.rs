//! The words of Atoll: ids, units, specifications and lifecycle states that every other crate speaks.
//!
//! What must hold: no I/O, no clock, no randomness, no async and no knowledge of any wire. A word lives here only when
//! three or more crates say it; otherwise it lives with the crate that owns the idea.

mod code;
mod fault;
mod id;
mod life;
mod models;
mod money;
mod name;
mod network;
mod owner;
mod page;
mod sandbox;
mod saving;
mod template;
mod units;
mod usage;

pub use code::Code;
pub use fault::{Fault, FaultKind};
pub use id::{
    ArtifactId, BudgetId, CommandId, Id, IdError, InstanceId, KeyId, Kind, ModelCallId, ProjectId, RequestId,
    SandboxId, SecretId, SnapshotId, TemplateId, VolumeId,
};
pub use life::{EndReason, SandboxState};
pub use models::{BudgetScope, BudgetWindow, CallOutcome, ModelUsage, ProviderKind};
pub use money::{Usd, UsdError};
pub use name::SandboxName;
pub use network::{
    EgressVerdict, Injection, NetworkLimits, NetworkPolicy, NetworkRule, PortRange, Preset, Protocol,
    RuleAction, SecretBinding, SecretRef, SecretUse,
};
pub use owner::{OwnedBy, Owner, OwnerKind, WorkflowOwner};
pub use page::{Cursor, MAX_PAGE, Page};
pub use sandbox::{
    DiskBacking, Hook, Hooks, IdleAction, IdlePolicy, Isolation, Resources, ResourcesAsked, SandboxSpec,
    TimeoutAction, VolumeMount,
};
pub use saving::{SaveKind, Saved, Saving, SnapshotOwner, TimeLeft};
pub use template::{ImageCommand, ReadyCheck, StartCommand, TemplateManifest, TemplateSource};
pub use units::{GIB, KIB, MIB, Timestamp, format_bytes, parse_bytes};
pub use usage::Usage;

/// The task queue of durable workflows whose activities the server itself carries out.
pub const STEPS_QUEUE: &str = "atoll";

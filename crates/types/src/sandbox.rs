//! What a sandbox is asked to be, and the states it passes through.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::{GIB, MIB};

/// The strength of the wall around a sandbox, weakest first: `a < b` means that `b` isolates better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    /// Namespaces, seccomp and Landlock on the host's own kernel. **Not a tenant boundary.**
    Jail,
    /// A user-space kernel (gVisor) between the guest and the host.
    Gvisor,
    /// A guest kernel of its own on hardware virtualization.
    Microvm,
}

impl Isolation {
    pub const ALL: [Self; 3] = [Self::Jail, Self::Gvisor, Self::Microvm];

    pub fn name(self) -> &'static str {
        match self {
            Self::Jail => "jail",
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        }
    }

    /// Whether hostile tenants may share a machine behind this wall.
    pub fn is_tenant_boundary(self) -> bool {
        self > Self::Jail
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isolation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|tier| tier.name() == text)
            .ok_or_else(|| format!("unknown isolation `{text}`; one of jail, gvisor, microvm"))
    }
}

/// Where the private writable layer of a sandbox lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskBacking {
    /// In memory, counted against the sandbox's memory: fastest to start, nothing left after a kill.
    #[default]
    Memory,
    /// In a file on the host's disk: room for more data than memory.
    Disk,
}

/// Hard limits. Every one is enforced by the host, none by the guest's good will.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Resources {
    /// Thousandths of a CPU core.
    pub cpu_millis: u32,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
    pub disk_backing: DiskBacking,
    /// Processes and threads.
    pub pids: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            cpu_millis: 1000,
            memory_bytes: 512 * MIB,
            disk_bytes: GIB,
            disk_backing: DiskBacking::Memory,
            pids: 512,
        }
    }
}

/// What happens to a sandbox that nobody has used for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    pub after_millis: u64,
    pub action: IdleAction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdleAction {
    Kill,
}

/// Everything that defines a sandbox at its creation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Name or id of the template, as the caller gave it.
    pub template: String,
    pub resources: Resources,
    /// Lifetime from creation or from the last extension; `None` only where the operator allows it.
    pub timeout_millis: Option<u64>,
    pub idle: Option<IdlePolicy>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// The weakest isolation that the caller accepts. The server refuses rather than go below it.
    pub isolation_floor: Option<Isolation>,
}

/// ```text
///  create ──> Starting ──> Running ── kill, timeout, idle, death ──> Deleting ──┬──> Deleted   it was asked to end
///                 └── error, kill ────────────────────────────────────^         └──> Failed    it broke; kill ──> Deleted
/// ```
/// Every state accepts kill. `Deleted` and `Failed` hold nothing on the host: the row stays as a record. The decisions
/// behind the picture are in the lifecycle crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    Starting,
    Running,
    Deleting,
    Deleted,
    Failed,
}

impl SandboxState {
    pub const ALL: [Self; 5] = [
        Self::Starting,
        Self::Running,
        Self::Deleting,
        Self::Deleted,
        Self::Failed,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Deleting => "deleting",
            Self::Deleted => "deleted",
            Self::Failed => "failed",
        }
    }

    /// Whether the sandbox may hold anything on the host.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Deleting)
    }
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SandboxState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|state| state.name() == text)
            .ok_or_else(|| {
                format!("unknown state `{text}`; one of starting, running, deleting, deleted, failed")
            })
    }
}

/// Why a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason", content = "detail")]
pub enum EndReason {
    /// Somebody asked for it.
    Killed,
    /// Its lifetime was over.
    TimedOut,
    /// Nobody used it for as long as its idle policy allows.
    Idle,
    /// It exceeded its memory limit and was killed for it.
    OutOfMemory,
    /// Its first process ended, or broke the protocol.
    GuestDied(String),
    /// It could not be started.
    StartFailed(String),
    /// It was gone when the server came back (a reboot, for instance).
    Lost,
}

impl EndReason {
    /// The stable machine-readable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::TimedOut => "timed_out",
            Self::Idle => "idle",
            Self::OutOfMemory => "out_of_memory",
            Self::GuestDied(_) => "guest_died",
            Self::StartFailed(_) => "start_failed",
            Self::Lost => "lost",
        }
    }

    /// One sentence for a person.
    pub fn explain(&self) -> String {
        match self {
            Self::Killed => "killed on request".into(),
            Self::TimedOut => "its timeout was reached".into(),
            Self::Idle => "it was idle for longer than its idle policy allows".into(),
            Self::OutOfMemory => {
                "it exceeded its memory limit and was killed; create it with more memory".into()
            }
            Self::GuestDied(detail) => format!("its first process ended: {detail}"),
            Self::StartFailed(detail) => format!("it could not be started: {detail}"),
            Self::Lost => "it was no longer running when the server came back".into(),
        }
    }
}

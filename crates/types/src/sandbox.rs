//! What a sandbox is asked to be.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::units::GIB;
use crate::{NetworkPolicy, Owner, SandboxId, SandboxName, SecretUse};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskBacking {
    /// In memory, counted against the sandbox's memory.
    Memory,
    /// In a file on the host's disk: room for more data than memory. What is written stays in the page cache as long as there
    /// is room for it.
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
    /// Room for real work: a package manager, a compiler, a data set. The memory also pays for the kernel that a guest may have
    /// of its own (gVisor's sentry) and for what that keeps about files. Nothing of it is taken before it is used.
    fn default() -> Self {
        Self {
            cpu_millis: 2000,
            memory_bytes: GIB,
            disk_bytes: 10 * GIB,
            disk_backing: DiskBacking::Disk,
            pids: 512,
        }
    }
}

/// What was asked for of [`Resources`]; what was not is as usual where it is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourcesAsked {
    pub cpu_millis: Option<u32>,
    pub memory_bytes: Option<u64>,
    pub disk_bytes: Option<u64>,
    pub disk_backing: Option<DiskBacking>,
    pub pids: Option<u32>,
}

impl ResourcesAsked {
    /// With what is usual for the rest.
    #[must_use]
    pub fn over(self, usual: Resources) -> Resources {
        Resources {
            cpu_millis: self.cpu_millis.unwrap_or(usual.cpu_millis),
            memory_bytes: self.memory_bytes.unwrap_or(usual.memory_bytes),
            disk_bytes: self.disk_bytes.unwrap_or(usual.disk_bytes),
            disk_backing: self.disk_backing.unwrap_or(usual.disk_backing),
            pids: self.pids.unwrap_or(usual.pids),
        }
    }
}

/// All of it, and nothing as usual.
impl From<Resources> for ResourcesAsked {
    fn from(all: Resources) -> Self {
        Self {
            cpu_millis: Some(all.cpu_millis),
            memory_bytes: Some(all.memory_bytes),
            disk_bytes: Some(all.disk_bytes),
            disk_backing: Some(all.disk_backing),
            pids: Some(all.pids),
        }
    }
}

impl Resources {
    /// With the disk that is really there. One in memory is charged to the memory's limit, and whoever exceeds that is
    /// killed; so it is kept below it, where a full disk is an error and not the end.
    #[must_use]
    pub fn with_room_for_disk(self) -> Self {
        let disk_bytes = match self.disk_backing {
            DiskBacking::Disk => self.disk_bytes,
            DiskBacking::Memory => self.disk_bytes.min(self.memory_bytes / 4 * 3),
        };
        Self { disk_bytes, ..self }
    }
}

/// What happens to a sandbox that nobody has used for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    pub after_millis: u64,
    pub action: IdleAction,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdleAction {
    #[default]
    Kill,
    /// Keep what the tier can keep: memory, or at least the filesystem.
    Pause,
    /// Keep the filesystem.
    Stop,
}

/// What happens to a sandbox whose lifetime is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeoutAction {
    #[default]
    Kill,
    /// Keep what the tier can keep: memory, or at least the filesystem.
    Pause,
    /// Keep the filesystem.
    Stop,
}

/// A command that the server runs in a sandbox at a turn of its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    pub argv: Vec<String>,
    /// It is killed when it takes longer.
    pub timeout_millis: u64,
}

/// Run one after the other, in the order given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// Before the creation is answered.
    pub on_create: Vec<Hook>,
    /// After every resume or start, before it is answered.
    pub on_resume: Vec<Hook>,
}

impl Hooks {
    pub fn is_empty(&self) -> bool {
        self.on_create.is_empty() && self.on_resume.is_empty()
    }
}

/// A volume as one sandbox sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Name or id.
    pub volume: String,
    /// Where it appears in the sandbox: absolute.
    pub path: String,
    #[serde(default)]
    pub read_only: bool,
}

/// Everything that defines a sandbox at its creation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// What it is called among the living sandboxes of its project.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<SandboxName>,
    /// Name or id of the template, as the caller gave it.
    pub template: String,
    pub resources: Resources,
    /// Lifetime from creation or from the last extension, without the time that it rests; anew when it rested because
    /// that was over. `None` only where the operator allows it.
    pub timeout_millis: Option<u64>,
    /// What happens when it is over.
    #[serde(default)]
    pub on_timeout: TimeoutAction,
    pub idle: Option<IdlePolicy>,
    /// Whether a use of it while it is paused or stopped resumes it, rather than being refused.
    #[serde(default)]
    pub auto_resume: bool,
    /// Whether its files are also kept apart from its memory, so that it can come back on them, with its processes
    /// started anew, where its memory cannot be used (another runtime, another CPU).
    #[serde(default)]
    pub fallback_to_files: bool,
    /// How long it may rest paused or stopped before it is deleted; `None`: until somebody deletes it.
    #[serde(default)]
    pub retention_millis: Option<u64>,
    /// Whom it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// The weakest isolation that the caller accepts. The server refuses rather than go below it.
    pub isolation_floor: Option<Isolation>,
    #[serde(default)]
    pub hooks: Hooks,
    #[serde(default)]
    pub volumes: Vec<VolumeMount>,
    /// What it may reach; `None` means what its template says, else what the operator's default is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkPolicy>,
    /// The secrets that it may use without ever holding them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretUse>,
    /// The sandbox whose memory it went on from: whose certificates its programs trust and whose placeholders of secrets
    /// they hold. `None` means its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<SandboxId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_asked_for_is_as_usual() {
        let usual = Resources {
            disk_bytes: 7,
            ..Resources::default()
        };
        assert_eq!(ResourcesAsked::default().over(usual), usual);
        let asked = ResourcesAsked {
            memory_bytes: Some(5),
            disk_backing: Some(DiskBacking::Memory),
            ..ResourcesAsked::default()
        };
        let memory = Resources {
            memory_bytes: 5,
            disk_backing: DiskBacking::Memory,
            ..usual
        };
        assert_eq!(asked.over(usual), memory);
        assert_eq!(ResourcesAsked::from(usual).over(Resources::default()), usual);
    }

    #[test]
    fn a_spec_of_an_earlier_version_means_what_it_meant() {
        // Rows are kept across upgrades.
        let old = r#"{"template":"base","resources":{"cpu_millis":1,"memory_bytes":2,"disk_bytes":3,
            "disk_backing":"memory","pids":4},"timeout_millis":5,"idle":{"after_millis":6,"action":"kill"},
            "env":{},"labels":{},"isolation_floor":null}"#;
        let spec: SandboxSpec = serde_json::from_str(old).unwrap();
        assert_eq!(spec.on_timeout, TimeoutAction::Kill);
        assert_eq!((spec.auto_resume, spec.retention_millis), (false, None));
        assert!(spec.hooks.is_empty() && spec.volumes.is_empty());
        assert!(spec.network.is_none() && spec.secrets.is_empty() && spec.name.is_none());
    }
}

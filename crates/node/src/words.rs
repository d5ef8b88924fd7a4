//! What control and node say to each other: plain values, which a wire could carry.

use std::path::PathBuf;
use std::pin::Pin;

use atoll_egress::EgressEvent;
use atoll_guest_protocol::{Configure, Request};
use atoll_lifecycle::{InstanceFate, Limits};
use atoll_policy::{Floor, Name};
use atoll_runtime::Saves;
use atoll_runtime::channel::{ChannelError, Stream};
use atoll_runtime::probe::Probe;
use atoll_types::{
    Fault, InstanceId, Isolation, NetworkPolicy, ProjectId, Resources, SandboxId, SaveKind, SnapshotId,
    TemplateId, Timestamp, VolumeMount,
};

/// Bytes on their way, with back-pressure.
pub type ByteStream = Pin<Box<dyn futures_util::Stream<Item = Result<bytes::Bytes, Fault>> + Send>>;

/// Bytes that are read as they are needed, on a thread that may wait for them.
pub type ByteSource = Box<dyn std::io::Read + Send>;

/// What a node is told once, when it starts.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Below it lies what this machine keeps, but templates.
    pub data_dir: PathBuf,
    /// What one instance may be.
    pub limits: Limits,
    /// Instances that are booted ahead.
    pub pools: Vec<PoolSetting>,
    /// By whose names their templates are found: the project of those who run the server. Who else may use such a template is
    /// served from its pool as well.
    pub pools_of: ProjectId,
    /// Whether saved state is on the disk itself before a save is answered.
    pub durable_saves: bool,
    /// With less than that free on the disk of the data directory no instance with its writable layer there is started.
    pub min_free_disk: u64,
    /// What a step of a Dockerfile gets.
    pub build_resources: Resources,
    /// The wall clock; tests bring their own.
    pub now: fn() -> Timestamp,
}

/// Keep this many instances of a template and size ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSetting {
    pub template: String,
    pub size: usize,
    pub resources: Resources,
    /// `None`: the tier that a request without a floor would get.
    pub isolation: Option<Isolation>,
}

#[derive(Debug, Clone)]
pub struct PoolView {
    pub template: String,
    /// Known once the first instance was booted.
    pub isolation: Option<Isolation>,
    pub ready: usize,
    pub target: usize,
}

/// What a machine can do. It does not change while a node runs.
#[derive(Debug, Clone)]
pub struct Offer {
    /// Each tier, and whether it works here.
    pub tiers: Vec<Probe>,
    /// What those that work can save, strongest first.
    pub saves: Vec<(Isolation, Saves)>,
    /// The way out, or why there is none and what to do about it.
    pub network: Result<NetworkOffer, String>,
}

/// What holds for whatever leaves this machine's sandboxes.
#[derive(Debug, Clone)]
pub struct NetworkOffer {
    /// What no sandbox may reach, whatever its policy says.
    pub floor: Floor,
    /// For sandboxes that say nothing, and whose template does not either.
    pub default: NetworkPolicy,
    /// The name under which sandboxes find the model gateway, where there is one. Internal to the floor.
    pub models: Option<Name>,
}

/// What a pooled instance has to be, exactly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub template: TemplateId,
    pub isolation: Isolation,
    pub resources: Resources,
}

/// A pooled instance that is the caller's from now on, and the name of the sandbox that it was told it will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    pub instance: InstanceId,
    pub sandbox: SandboxId,
}

/// An instance that is to run.
#[derive(Debug, Clone)]
pub struct Boot {
    pub instance: InstanceId,
    /// Whose it is, `None`: the server's own. Each has places of its own to boot in.
    pub project: Option<ProjectId>,
    pub isolation: Isolation,
    /// Which image is below it, by its digest.
    pub image: String,
    pub resources: Resources,
    pub hostname: String,
    /// What it goes on from; `None`: it starts anew.
    pub origin: Option<Origin>,
    /// By id. They are attached already.
    pub volumes: Vec<VolumeMount>,
    /// Where its cable leads, from its first instruction on; `None`: nowhere.
    pub admission: Option<Admission>,
}

/// What an instance goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    pub kind: SaveKind,
    pub state: State,
}

/// Where state lies that an instance goes on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It was saved ([`crate::Node::save`]).
    Saved(SnapshotId),
    /// It was captured for a moment ([`crate::Node::capture`]).
    Captured(SnapshotId),
}

/// An instance that is to be held still and written down.
#[derive(Debug, Clone)]
pub struct Save {
    pub instance: InstanceId,
    pub isolation: Isolation,
    /// What its state will be known by.
    pub snapshot: SnapshotId,
    /// Whose it is: chunks are shared within a project and with nobody else.
    pub project: ProjectId,
    pub kind: SaveKind,
    /// With memory, also files in a form that can be used without it.
    pub files_apart: bool,
}

/// How much was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedBytes {
    /// All of it.
    pub total_bytes: u64,
    /// What that added to the disk; the rest is shared with earlier saves.
    pub stored_bytes: u64,
}

/// What a collection of saved state removed, or would.
#[derive(Debug, Clone, Default)]
pub struct SavedGarbage {
    /// Ids of the saves that went.
    pub saves: Vec<String>,
    /// Bytes of disk that came free.
    pub bytes: u64,
    /// Saves that cannot be read; while they are there, no space can be reclaimed.
    pub unreadable: Vec<String>,
}

/// What there is to know of a volume's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeLook {
    /// By files, as its filesystem counts.
    pub used_bytes: u64,
    /// On the host's disk.
    pub on_host_bytes: u64,
    /// It was sealed and is only ever read.
    pub sealed: bool,
}

/// Who a sandbox is at the way out, and what its programs are told of it.
#[derive(Debug, Clone)]
pub struct Admission {
    /// Ids, what it may reach, what it has used. The policy is compiled, which a wire would do again from its words.
    pub tenant: atoll_egress::Tenant,
    /// Variables with placeholders of secrets.
    pub env: Vec<(String, String)>,
}

/// The first words to a guest.
#[derive(Debug, Clone)]
pub struct Greeting {
    pub instance: InstanceId,
    /// Who it is. The node knows what time it is and how the network looks, and adds that.
    pub identity: Configure,
    pub admission: Option<Admission>,
    /// What it is to run, told in the same breath.
    pub command: Option<Request>,
}

/// A command that a guest was told to run, and the ends that it will tell of.
#[derive(Debug)]
pub struct Begins {
    pub command: Result<Stream, ChannelError>,
    pub ends: Stream,
}

/// Why something about an instance did not work out.
#[derive(Debug, Clone)]
pub enum Failed {
    /// Its guest could not be reached, or refused. Why that is may be told of its sandbox.
    Guest(ChannelError),
    Fault(Fault),
}

impl From<ChannelError> for Failed {
    fn from(error: ChannelError) -> Self {
        Self::Guest(error)
    }
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Guest(error) => error.fmt(f),
            Self::Fault(fault) => fault.fmt(f),
        }
    }
}

/// What happened on a node without anybody having asked.
#[derive(Debug, Clone)]
pub enum Event {
    /// An instance is over that somebody attends to ([`crate::Node::attend`]).
    Ended {
        sandbox: SandboxId,
        instance: InstanceId,
        fate: InstanceFate,
    },
    /// Something happened at the way out.
    Saw {
        event: EgressEvent,
        /// Whether it was a sandbox. The steps of a build are at the way out without being one.
        is_sandbox: bool,
    },
}

/// What went through the way out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetworkUsage {
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub connections: u64,
}

/// Milliseconds since the epoch, as the host's clock says.
pub fn wall_clock() -> Timestamp {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

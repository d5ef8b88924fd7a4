//! Runtimes: the walls around untrusted code, behind one trait.
//!
//! A [`Runtime`] boots, finds again, measures and destroys *instances*. It knows nothing of sandboxes, projects or
//! deadlines; those live above. Talking to the agent inside is the same for every tier: [`channel::Guest`].
//!
//! What must hold:
//! - An instance outlives the server. Everything needed to find it again stands in its directory
//!   `<state>/instances/<id>/`, written before the first process starts, so that a crash at any point leaves either a
//!   whole instance to adopt or a directory to clean.
//! - [`Runtime::destroy`] is idempotent, needs only the id, and leaves nothing: no process, mount, namespace, cgroup or
//!   directory.
//! - A runtime that cannot build its whole wall refuses to start the instance; it never starts a weaker one.

pub mod agent;
mod cause;
pub mod cgroup;
pub mod channel;
mod ending;
pub mod gvisor;
mod instance_dir;
pub mod jail;
pub mod probe;
mod process;
mod saving;
#[cfg(feature = "testing")]
pub mod scripted;
mod uids;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
pub use atoll_types::SaveKind;
use atoll_types::{InstanceId, Isolation, Resources, Usage};
pub use cause::{Cause, Kind, Told};
pub use saving::{Growing, Mount, MountSource, Restore, SaveSink, SaveSource, Saves};
use tokio::sync::watch;

/// Where a runtime keeps its things and finds its tools.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory for instance state; on a local filesystem, private to this server.
    pub state_dir: PathBuf,
    /// The static guest agent.
    pub guest_binary: PathBuf,
    /// An EROFS image whose only file is `/atoll-guest`.
    pub guest_image: PathBuf,
    /// The static program that builds a jail and becomes the agent.
    pub jailer_binary: PathBuf,
    /// `runsc`, if one was found.
    pub runsc: Option<PathBuf>,
    /// Name of the parent cgroup of all instances, e.g. `atoll`; tests use their own.
    pub cgroup_parent: String,
}

/// What to boot.
#[derive(Debug, Clone)]
pub struct InstanceSpec {
    pub id: InstanceId,
    /// The template's EROFS image; shared, never written. A plain one, or one with a device table, followed by the files that the
    /// table lists, in its order. What gVisor takes there, a layer on others, the kernel does not: whoever asks knows the tier.
    pub image: Vec<PathBuf>,
    pub resources: Resources,
    pub hostname: String,
    /// What an earlier instance was, to go on from.
    pub restore: Option<Restore>,
    /// What else is to be seen inside; no two within each other.
    pub mounts: Vec<Mount>,
    /// The way out. Without one there is loopback and nothing else.
    pub network: Option<Network>,
}

/// A network namespace that is ready for one instance: `lo` is up, and `eth0` has its addresses, routes and neighbour. Whoever
/// made it decides where that leads; the instance cannot change it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// `/proc/<process>/fd/<n>`, open at least until the instance has started.
    pub namespace: PathBuf,
    pub mtu: u32,
    /// The ends of its cable, as they are in the namespace; for instances whose packets do not go through its kernel.
    pub guest: CableEnd,
    pub gateway: CableEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CableEnd {
    pub mac: [u8; 6],
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

/// A running instance. Dropping it does nothing to the instance: only [`Runtime::destroy`] ends one.
#[derive(Debug, Clone)]
pub struct Instance {
    pub id: InstanceId,
    pub isolation: Isolation,
    pub guest: channel::Guest,
    /// Becomes `Some` once, when the instance is over.
    pub end: watch::Receiver<Option<InstanceEnd>>,
}

/// How an instance ended, as the host saw it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum InstanceEnd {
    /// The kernel killed it for exceeding its memory limit.
    OutOfMemory,
    /// Its first process is gone, for the reason given.
    Died(String),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was started, or everything that was has been removed again.
    #[error("the {isolation} instance could not be started: {source}")]
    Start { isolation: Isolation, source: Cause },
    #[error("instance {0} is not here")]
    NotFound(InstanceId),
    #[error("instance {id} could not be adopted: {source}")]
    Adopt { id: InstanceId, source: Cause },
    /// Its agent answers, but not in our words.
    #[error(
        "instance {id} could not be adopted: its agent speaks protocol generation {guest}, this server {host}"
    )]
    Generation { id: InstanceId, host: u32, guest: u32 },
    /// It runs on as if nothing had been asked, unless it is gone.
    #[error("instance {id} could not be saved: {source}")]
    Save { id: InstanceId, source: Cause },
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }

    /// Why an instance could not be adopted.
    pub(crate) fn adopt(id: &InstanceId, source: impl Into<Cause>) -> Self {
        let id = id.clone();
        match source.into() {
            Cause::Channel(channel::ChannelError::Generation { host, guest }) => {
                Self::Generation { id, host, guest }
            }
            source => Self::Adopt { id, source },
        }
    }
}

#[async_trait]
pub trait Runtime: Send + Sync + std::fmt::Debug + 'static {
    fn isolation(&self) -> Isolation;

    /// Boots an instance and waits until its agent has answered. On error nothing of it is left.
    async fn start(&self, spec: InstanceSpec) -> Result<Instance, Error>;

    /// Ids of everything of this runtime that is on this machine, whole or half-made.
    async fn discover(&self) -> Result<Vec<InstanceId>, Error>;

    /// Takes over an instance that an earlier server started. `Error::Adopt` and `Error::Generation` mean:
    /// destroy it.
    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error>;

    /// Changes the limits of a running instance (a pooled one gets its sandbox's size). The disk limit and its backing
    /// are fixed at start and ignored here.
    async fn resize(&self, id: &InstanceId, resources: &Resources) -> Result<(), Error>;

    /// What it has consumed, read on the host.
    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error>;

    /// What this runtime can save, and what a restore has to match.
    fn saves(&self) -> Saves;

    /// Holds the instance still, if it is not already, and writes it into the sink.
    ///
    /// On success it stays still until [`Runtime::thaw`] or [`Runtime::destroy`], also over the end of this server. On
    /// error it runs on; whoever was interrupted half way (a crash, a dropped future) calls `thaw`.
    async fn save(&self, id: &InstanceId, kind: SaveKind, sink: Arc<dyn SaveSink>) -> Result<(), Error>;

    /// Lets an instance go on that [`Runtime::save`] holds still. Succeeds when it runs already.
    async fn thaw(&self, id: &InstanceId) -> Result<(), Error>;

    /// Kills it and removes every trace. Succeeds when there is nothing.
    async fn destroy(&self, id: &InstanceId) -> Result<(), Error>;
}

/// The one stream of files saved without memory: a tar archive of what was changed of the template, with overlayfs' whiteouts.
pub const LAYER: &str = "layer";

/// The runtimes that work on this machine, strongest first, as [`probe::probe`] found them.
pub type Runtimes = Vec<Arc<dyn Runtime>>;

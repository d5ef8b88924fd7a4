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

pub mod cgroup;
pub mod channel;
mod ending;
pub mod gvisor;
mod instance_dir;
pub mod jail;
pub mod probe;
mod process;
mod uids;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use atoll_types::{InstanceId, Isolation, Resources, Usage};
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
    /// The template's EROFS image; shared, never written.
    pub image: PathBuf,
    pub resources: Resources,
    pub hostname: String,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceEnd {
    /// The kernel killed it for exceeding its memory limit.
    OutOfMemory,
    /// Its first process is gone, for the reason given.
    Died(String),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was started, or everything that was has been removed again.
    #[error("the {isolation} instance could not be started: {reason}")]
    Start { isolation: Isolation, reason: String },
    #[error("instance {0} is not here")]
    NotFound(InstanceId),
    #[error("instance {id} could not be adopted: {reason}")]
    Adopt { id: InstanceId, reason: String },
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
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

    /// Takes over an instance that an earlier server started. `Error::Adopt` means: destroy it.
    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error>;

    /// Changes the limits of a running instance (a pooled one gets its sandbox's size). The disk limit and its backing
    /// are fixed at start and ignored here.
    async fn resize(&self, id: &InstanceId, resources: &Resources) -> Result<(), Error>;

    /// What it has consumed, read on the host.
    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error>;

    /// Kills it and removes every trace. Succeeds when there is nothing.
    async fn destroy(&self, id: &InstanceId) -> Result<(), Error>;
}

/// The runtimes that work on this machine, strongest first, as [`probe::probe`] found them.
pub type Runtimes = Vec<Arc<dyn Runtime>>;

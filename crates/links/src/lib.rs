//! Links: the only way from a sandbox to anywhere.
//!
//! ```text
//!   sandbox's namespace (one each)                    gateway's namespace (one, no way out, kept by a mount)
//!   ┌──────────────────────────────────┐  veth pair  ┌────────────────────────────────────────────────────────┐
//!   │ eth0  198.19.x.y, fd61:…:19::n   │─────────────│ s<n>  source check: every packet is from the guest     │
//!   │ default route, no ARP            │             │       of this very link, or dropped                    │
//!   └──────────────────────────────────┘             │ every address is ours; `sk_lookup` hands TCP, DNS and  │
//!                                                    │ other UDP to sockets of the server                     │
//!                                                    └────────────────────────────────────────────────────────┘
//! ```
//! The server gets the sockets ([`Sockets`]) and dials out from its own namespace. There is no forwarding, no address
//! translation and no firewall: what the server does not carry itself goes nowhere.
//!
//! What must hold:
//! - Who sent something is known by the link that it came from. Addresses follow from the link's slot by arithmetic
//!   ([`Slot`]), and the kernel drops what comes with another's; so afterwards a source address *is* an identity.
//! - Without the server there is nothing: its sockets and its choice of sockets go with it, and guests are refused.
//! - Running sandboxes keep their links when the server is killed and started again. The only record is what is written
//!   on the gateway's end of a link, its alias: the instance's id.
//! - A namespace that nobody uses vanishes with its link. Ready ones are held by the server only, a running instance holds
//!   its own.
//! - The namespaces belong to the host's user namespace: root in a jail cannot change its network.
//!
//! Needs root and Linux 5.9; see [`Links::probe`].

mod bpf;
mod error;
mod gateway;
mod namespace;
mod netlink;
mod slot;
mod sys;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, PoisonError, RwLock};

use atoll_types::InstanceId;
use rustix::fs::FlockOperation;
use tokio::sync::oneshot;

use error::Doing;
pub use error::{Error, Result};
pub use gateway::Sockets;
pub use slot::{GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, MTU, Slot};
use worker::{Job, Worker};

type Leased = RwLock<HashMap<Slot, InstanceId>>;

#[derive(Debug, Clone)]
pub struct LinksConfig {
    /// Where the gateway is kept (`gateway`) and this server says that it is here (`lock`).
    pub state_dir: PathBuf,
    /// How many links are made ahead.
    pub ready: usize,
}

/// All links of this server. Clones are the same.
///
/// When the last one is dropped, the sockets get nothing any more, ready links vanish, and those of running instances
/// stay for the next server.
#[derive(Debug, Clone)]
pub struct Links(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    jobs: Sender<Job>,
    leased: Arc<Leased>,
    gateway: OwnedFd,
    /// Held.
    _lock: File,
}

/// One instance's way to the gateway.
#[derive(Debug)]
pub struct Link {
    instance: InstanceId,
    slot: Slot,
    namespace: Option<OwnedFd>,
}

impl Links {
    /// Opens the gateway, which is made if there is none, takes over the links of running instances and removes others.
    pub async fn start(config: LinksConfig) -> Result<(Self, Sockets)> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Unsupported("this server does not run as root".into()));
        }
        let LinksConfig { state_dir, ready } = config;
        let lock = {
            fs::create_dir_all(&state_dir).doing(|| format!("making {}", state_dir.display()))?;
            let path = state_dir.join("lock");
            let lock = File::create(&path).doing(|| format!("making {}", path.display()))?;
            rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
                .map_err(|_| Error::InUse(state_dir.display().to_string()))?;
            lock
        };
        let (jobs, queue) = mpsc::channel();
        let leased = Arc::new(Leased::default());
        let (opened, open) = oneshot::channel();
        let (path, known) = (state_dir.join("gateway"), Arc::clone(&leased));
        thread(move || match Worker::open(&path, ready, known, queue) {
            Ok((worker, gateway, sockets)) => {
                if opened.send(Ok((gateway, sockets))).is_ok() {
                    worker.run();
                }
            }
            Err(error) => drop(opened.send(Err(error))),
        })?;
        let (gateway, sockets) = open.await.map_err(|_| Error::Closed)??;
        let inner = Inner {
            jobs,
            leased,
            gateway,
            _lock: lock,
        };
        Ok((Self(Arc::new(inner)), sockets))
    }

    /// A link for this instance: one that is ready, else one is made. It is the instance's until it is released.
    pub async fn lease(&self, instance: &InstanceId) -> Result<Link> {
        self.ask(|answer| Job::Lease(instance.clone(), answer)).await?
    }

    /// The link that an instance had when this server started, or got since.
    pub fn adopt(&self, instance: &InstanceId) -> Option<Link> {
        let leased = self.0.leased.read().unwrap_or_else(PoisonError::into_inner);
        let mut slots = leased.iter();
        let (slot, _) = slots.find(|(_, leased)| *leased == instance)?;
        Some(Link::new(instance.clone(), *slot, None))
    }

    /// Whose links exist.
    pub async fn discover(&self) -> Result<Vec<InstanceId>> {
        self.ask(Job::Discover).await?
    }

    /// Cuts the instance's link, if there is one.
    pub async fn release(&self, instance: &InstanceId) -> Result<()> {
        self.ask(|answer| Job::Release(instance.clone(), answer)).await?
    }

    /// The place of the guest behind this source address. (By arithmetic alone: whether anybody is there says
    /// [`Links::instance_of`].)
    pub fn slot_of(&self, source: IpAddr) -> Option<Slot> {
        Slot::of_source(source)
    }

    pub fn instance_of(&self, slot: Slot) -> Option<InstanceId> {
        let leased = self.0.leased.read().unwrap_or_else(PoisonError::into_inner);
        leased.get(&slot).cloned()
    }

    /// A socket that sends to guests from `asked`, an address that one of them sent a datagram to. Nothing is received on
    /// it. Blocks for a fraction of a millisecond.
    pub fn answer_from(&self, asked: SocketAddr) -> io::Result<UdpSocket> {
        namespace::within(&self.0.gateway, || gateway::answering(asked))
    }

    /// Removes ready links, and the gateway if no instance has a link; says whether it did. Nothing works afterwards.
    pub async fn close(&self) -> Result<bool> {
        self.ask(Job::Close).await?
    }

    /// Whether this machine can do it all, by doing it once; leaves nothing behind.
    pub fn probe() -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Unsupported("needs root".into()));
        }
        let tried = thread(gateway::Gateway::rehearse)?.join();
        tried
            .unwrap_or(Err(Error::Closed))
            .map_err(|error| Error::Unsupported(error.to_string()))
    }

    async fn ask<T>(&self, job: impl FnOnce(oneshot::Sender<T>) -> Job) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        self.0.jobs.send(job(answer)).map_err(|_| Error::Closed)?;
        answered.await.map_err(|_| Error::Closed)
    }
}

/// A thread that is never given to anybody else.
pub(crate) fn thread<T: Send + 'static>(
    task: impl FnOnce() -> T + Send + 'static,
) -> Result<std::thread::JoinHandle<T>> {
    std::thread::Builder::new()
        .name("atoll-links".into())
        .spawn(task)
        .doing(|| "starting the thread for links")
}

impl Link {
    fn new(instance: InstanceId, slot: Slot, namespace: Option<OwnedFd>) -> Self {
        Self {
            instance,
            slot,
            namespace,
        }
    }

    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// From which the guest's addresses follow.
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Where to start the instance; a path that is good while this lives. `None` of an adopted link: it has started.
    pub fn namespace(&self) -> Option<PathBuf> {
        let descriptor = self.namespace.as_ref()?.as_raw_fd();
        Some(format!("/proc/{}/fd/{descriptor}", std::process::id()).into())
    }
}

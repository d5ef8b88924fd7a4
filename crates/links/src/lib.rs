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
mod elsewhere;
mod error;
mod gateway;
mod namespace;
mod netlink;
mod slot;
mod sys;
#[cfg(test)]
mod tests;
mod worker;

use parking_lot::RwLock;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use atoll_types::InstanceId;
use rustix::fs::FlockOperation;
use tokio::sync::oneshot;

pub use elsewhere::Elsewhere;
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
    leased: Arc<Leased>,
    made: Made,
}

/// Who makes them.
#[derive(Debug)]
enum Made {
    Here {
        jobs: Sender<Job>,
        gateway: OwnedFd,
        /// Held.
        _lock: File,
    },
    Elsewhere(Box<dyn Elsewhere>),
}

/// One instance's way to the gateway.
#[derive(Debug)]
pub struct Link {
    instance: InstanceId,
    slot: Slot,
    namespace: Namespace,
}

#[derive(Debug)]
enum Namespace {
    /// Ready for an instance to be started in.
    Ready(OwnedFd),
    /// The same, in the process that makes links, which starts the instance too.
    Elsewhere,
    /// Some instance is in it.
    InUse,
}

/// Takes the lock, waiting a moment for a server that was just killed: a process that it had forked and that has not started its
/// program yet holds it, too. A server that gave up at once would let its sandboxes reach nothing for as long as it lives.
async fn lock_soon(lock: &File) -> bool {
    const TRIES: u32 = 200;
    const PAUSE: Duration = Duration::from_millis(50);
    for attempt in 0..TRIES {
        if attempt > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        if rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
    }
    false
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
            if !lock_soon(&lock).await {
                return Err(Error::InUse(state_dir.display().to_string()));
            }
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
        let made = Made::Here {
            jobs,
            gateway,
            _lock: lock,
        };
        Ok((Self(Arc::new(Inner { leased, made })), sockets))
    }

    /// Links that another process makes, and those that are leased there already.
    pub fn elsewhere(
        maker: Box<dyn Elsewhere>,
        leased: impl IntoIterator<Item = (Slot, InstanceId)>,
    ) -> Self {
        let leased = Arc::new(Leased::new(leased.into_iter().collect()));
        let made = Made::Elsewhere(maker);
        Self(Arc::new(Inner { leased, made }))
    }

    /// Which links are leased to whom.
    pub fn leases(&self) -> Vec<(Slot, InstanceId)> {
        let leased = self.0.leased.read();
        leased.iter().map(|(slot, id)| (*slot, id.clone())).collect()
    }

    /// A link for this instance: one that is ready, else one is made. It is the instance's until it is released.
    pub async fn lease(&self, instance: &InstanceId) -> Result<Link> {
        let Made::Elsewhere(maker) = &self.0.made else {
            return self.ask(|answer| Job::Lease(instance.clone(), answer)).await?;
        };
        let slot = maker.lease(instance).await?;
        let mut leased = self.0.leased.write();
        leased.insert(slot, instance.clone());
        Ok(Link::new(instance.clone(), slot, Namespace::Elsewhere))
    }

    /// The link that an instance had when this server started, or got since.
    pub fn adopt(&self, instance: &InstanceId) -> Option<Link> {
        let leased = self.0.leased.read();
        let mut slots = leased.iter();
        let (slot, _) = slots.find(|(_, leased)| *leased == instance)?;
        Some(Link::new(instance.clone(), *slot, Namespace::InUse))
    }

    /// Whose links exist.
    pub async fn discover(&self) -> Result<Vec<InstanceId>> {
        match &self.0.made {
            Made::Here { .. } => self.ask(Job::Discover).await?,
            Made::Elsewhere(maker) => maker.discover().await,
        }
    }

    /// Cuts the instance's link, if there is one.
    pub async fn release(&self, instance: &InstanceId) -> Result<()> {
        let Made::Elsewhere(maker) = &self.0.made else {
            return self.ask(|answer| Job::Release(instance.clone(), answer)).await?;
        };
        maker.release(instance).await?;
        let mut leased = self.0.leased.write();
        leased.retain(|_, owner| owner != instance);
        Ok(())
    }

    /// The place of the guest behind this source address. (By arithmetic alone: whether anybody is there says
    /// [`Links::instance_of`].)
    pub fn slot_of(&self, source: IpAddr) -> Option<Slot> {
        Slot::of_source(source)
    }

    pub fn instance_of(&self, slot: Slot) -> Option<InstanceId> {
        let leased = self.0.leased.read();
        leased.get(&slot).cloned()
    }

    /// A socket that sends to guests from `asked`, an address that one of them sent a datagram to. Nothing is received on
    /// it. Blocks for a fraction of a millisecond.
    pub fn answer_from(&self, asked: SocketAddr) -> io::Result<UdpSocket> {
        match &self.0.made {
            Made::Here { gateway, .. } => namespace::within(gateway, || gateway::answering(asked)),
            Made::Elsewhere(maker) => maker.answer_from(asked),
        }
    }

    /// Removes ready links, and the gateway if no instance has a link; says whether it did. Nothing works afterwards.
    pub async fn close(&self) -> Result<bool> {
        match &self.0.made {
            Made::Here { .. } => self.ask(Job::Close).await?,
            Made::Elsewhere(maker) => maker.close().await,
        }
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
        let Made::Here { jobs, .. } = &self.0.made else {
            return Err(Error::Closed);
        };
        let (answer, answered) = oneshot::channel();
        jobs.send(job(answer)).map_err(|_| Error::Closed)?;
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
    fn new(instance: InstanceId, slot: Slot, namespace: Namespace) -> Self {
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

    /// Where to start the instance; a path that is good while this lives, and empty where the process that starts the
    /// instance knows. `None` of an adopted link: it has started.
    pub fn namespace(&self) -> Option<PathBuf> {
        match &self.namespace {
            Namespace::Ready(open) => {
                Some(format!("/proc/{}/fd/{}", std::process::id(), open.as_raw_fd()).into())
            }
            Namespace::Elsewhere => Some(PathBuf::new()),
            Namespace::InUse => None,
        }
    }
}

//! The thread that makes links. It lives in the gateway's namespace, does one thing at a time, and makes links ahead
//! whenever nobody waits. A second one removes them, as that is slow.
//!
//! ```text
//!   free ── make ──> ready ── lease ──> leased ── release ──> leaving ── removed ──> free
//!                      └───────────── close, crash ──────────────┘
//! ```

use parking_lot::{Mutex, MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;

use atoll_types::InstanceId;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::gateway::{self, Gateway, Remover, Sockets};
use crate::slot::Slot;
use crate::{Leased, Link, Namespace, thread};

#[derive(Debug)]
pub(crate) enum Job {
    Lease(InstanceId, oneshot::Sender<Result<Link>>),
    Discover(oneshot::Sender<Result<Vec<InstanceId>>>),
    Release(InstanceId, oneshot::Sender<Result<()>>),
    /// The answer says whether the gateway is gone too.
    Close(oneshot::Sender<Result<bool>>),
}

#[derive(Debug)]
pub(crate) struct Worker {
    gateway: Gateway,
    path: PathBuf,
    leased: Arc<Leased>,
    ready: VecDeque<(Slot, OwnedFd)>,
    want: usize,
    leaving: Leaving,
    /// Where to look for a free place. It goes round, so that an address is not used again at once.
    next: Slot,
    jobs: Receiver<Job>,
}

impl Worker {
    /// On the thread that is to be the worker's: opens the gateway and finds what is there.
    pub(crate) fn open(
        path: &Path,
        want: usize,
        leased: Arc<Leased>,
        jobs: Receiver<Job>,
    ) -> Result<(Self, OwnedFd, Sockets)> {
        let (gateway, sockets) = Gateway::open(path)?;
        let namespace = gateway.namespace()?;
        let mut worker = Self {
            leaving: Leaving::start(gateway.remover()?)?,
            gateway,
            path: path.to_owned(),
            leased,
            ready: VecDeque::new(),
            want,
            next: Slot::FIRST,
            jobs,
        };
        worker.take_over()?;
        Ok((worker, namespace, sockets))
    }

    /// Keeps the links of running instances; removes all others.
    fn take_over(&mut self) -> Result<()> {
        let mut orphans = Vec::new();
        for (slot, owner) in self.gateway.links()? {
            let checked = |owner: &InstanceId| match self.gateway.check_again(slot) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(instance = %owner, %error, "a link that cannot be checked is cut");
                    false
                }
            };
            match owner.filter(checked) {
                Some(owner) => drop(self.leased_mut().insert(slot, owner)),
                None => orphans.push(slot),
            }
            self.next = self.next.max(slot.next());
        }
        if !orphans.is_empty() {
            tracing::info!(links = orphans.len(), "removing links that nobody owns");
        }
        self.leave(&orphans)
    }

    /// Works until it is closed or all handles are gone.
    pub(crate) fn run(mut self) {
        // After a failure only when somebody asks for one again.
        let mut refill = true;
        loop {
            let job = match self.jobs.try_recv() {
                Ok(job) => job,
                Err(TryRecvError::Empty) if refill && self.ready.len() < self.want => {
                    if let Err(error) = self.make().map(|link| self.ready.push_back(link)) {
                        tracing::warn!(%error, "no link can be made ahead");
                        refill = false;
                    }
                    continue;
                }
                Err(TryRecvError::Empty) => match self.jobs.recv() {
                    Ok(job) => job,
                    Err(_) => return,
                },
                Err(TryRecvError::Disconnected) => return,
            };
            match job {
                Job::Lease(instance, answer) => {
                    refill = true;
                    if let Err(Ok(link)) = answer.send(self.lease(&instance)) {
                        // Whoever asked does not wait any more.
                        if let Err(error) = self.release(link.instance()) {
                            tracing::warn!(%instance, %error, "a link that nobody waited for stays");
                        }
                    }
                }
                Job::Discover(answer) => drop(answer.send(self.discover())),
                Job::Release(instance, answer) => drop(answer.send(self.release(&instance))),
                Job::Close(answer) => {
                    drop(answer.send(self.close()));
                    return;
                }
            }
        }
    }

    fn lease(&mut self, instance: &InstanceId) -> Result<Link> {
        if self.leased().values().any(|leased| leased == instance) {
            return Err(Error::Leased(instance.clone()));
        }
        let (slot, namespace) = match self.ready.pop_front() {
            Some(ready) => ready,
            None => self.make()?,
        };
        if let Err(error) = self.gateway.give(slot, instance) {
            let _ = self.leave(&[slot]);
            return Err(error);
        }
        self.leased_mut().insert(slot, instance.clone());
        Ok(Link::new(instance.clone(), slot, Namespace::Ready(namespace)))
    }

    /// In a place that is free.
    fn make(&mut self) -> Result<(Slot, OwnedFd)> {
        for _ in 0..Slot::COUNT {
            let slot = self.next;
            self.next = slot.next();
            if self.leased().contains_key(&slot)
                || self.leaving.slots().contains(&slot)
                || self.ready.iter().any(|(ready, _)| *ready == slot)
            {
                continue;
            }
            match self.gateway.make(slot) {
                // A namespace that ended takes a moment to go, and its link with it.
                Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EEXIST) => {}
                made => return made.map(|namespace| (slot, namespace)),
            }
        }
        Err(Error::Full(Slot::COUNT))
    }

    /// As the kernel knows them: the link of an instance that ended is gone with its namespace.
    fn discover(&self) -> Result<Vec<InstanceId>> {
        let links = self.gateway.links()?;
        Ok(links.into_iter().filter_map(|(_, owner)| owner).collect())
    }

    fn release(&self, instance: &InstanceId) -> Result<()> {
        let leased = self.leased();
        let of_instance = leased.iter().filter(|(_, leased)| *leased == instance);
        let slots: Vec<Slot> = of_instance.map(|(slot, _)| *slot).collect();
        drop(leased);
        self.leave(&slots)?;
        self.leased_mut().retain(|_, leased| leased != instance);
        Ok(())
    }

    fn leave(&self, slots: &[Slot]) -> Result<()> {
        self.gateway.leave(slots)?;
        self.leaving.add(slots);
        Ok(())
    }

    /// Removes what is ready, and the gateway if nobody has a link.
    fn close(&mut self) -> Result<bool> {
        let ready: Vec<Slot> = self.ready.drain(..).map(|(slot, _)| slot).collect();
        self.leave(&ready)?;
        self.leaving.finish();
        let unused = self.gateway.links()?.is_empty();
        if unused {
            gateway::forget(&self.path)?;
        }
        Ok(unused)
    }

    fn leased(&self) -> RwLockReadGuard<'_, HashMap<Slot, InstanceId>> {
        self.leased.read()
    }

    fn leased_mut(&self) -> RwLockWriteGuard<'_, HashMap<Slot, InstanceId>> {
        self.leased.write()
    }
}

/// Links that are being removed, and the thread that does it.
#[derive(Debug)]
struct Leaving {
    slots: Arc<Mutex<HashSet<Slot>>>,
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Leaving {
    fn start(remover: Remover) -> Result<Self> {
        let slots = Arc::new(Mutex::new(HashSet::new()));
        let (wake, woken) = mpsc::channel();
        let shared = Arc::clone(&slots);
        let thread = thread(move || {
            while woken.recv().is_ok() {
                // All that came meanwhile go together; whoever comes later wakes it again.
                while woken.try_recv().is_ok() {}
                let going = shared.lock().clone();
                match remover.remove() {
                    Ok(()) => shared.lock().retain(|slot| !going.contains(slot)),
                    // Their places stay taken until others leave, or the server starts again.
                    Err(error) => tracing::warn!(%error, "links of ended instances stay"),
                }
            }
        })?;
        Ok(Self {
            slots,
            wake: Some(wake),
            thread: Some(thread),
        })
    }

    fn slots(&self) -> MutexGuard<'_, HashSet<Slot>> {
        self.slots.lock()
    }

    fn add(&self, slots: &[Slot]) {
        if slots.is_empty() {
            return;
        }
        self.slots().extend(slots);
        if let Some(wake) = &self.wake {
            let _ = wake.send(());
        }
    }

    /// Waits until all are gone; none may come any more.
    fn finish(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

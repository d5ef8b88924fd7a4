//! One live sandbox in memory: the owner of its row and of the way to its guest.
//!
//! What must hold: whoever changes the row holds its lock from the decision until the commit, so decisions on one
//! sandbox happen one after the other; `seen` shows what was committed last and never waits. A new sandbox's cell is there,
//! locked, from before its commit: whoever can know of the row finds its cell.

use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use atoll_lifecycle::{CpuMark, Record};
use atoll_store::{SandboxRow, SandboxStore};
use atoll_types::{Code, Fault, InstanceId, ProjectId, SandboxId, SandboxState, Timestamp};

use crate::endings::OpenCommands;
use crate::guest::Guest;
use crate::replies::{Attempt, Reply};
use crate::shown::Shown;

/// How long to wait for the reason of an end that was just noticed.
const REASON_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) id: SandboxId,
    pub(crate) project: ProjectId,
    /// The row as committed; locked while a transition is decided and written.
    pub(crate) row: tokio::sync::Mutex<SandboxRow>,
    /// The same, for readers.
    pub(crate) seen: Shown<SandboxRow>,
    /// The instance that runs now, while there is a guest to talk to. A resumed sandbox has another one.
    instance: RwLock<Option<Guest>>,
    /// Held while the instance is held still to be saved: one save at a time.
    pub(crate) saving: tokio::sync::Mutex<()>,
    /// Held while the guest is told of its network.
    pub(crate) telling: tokio::sync::Mutex<()>,
    /// The save or restore that was decided on last, for whoever joins those who wait for it.
    under_way: Mutex<Option<Reply>>,
    pub(crate) commands: OpenCommands,
    /// What the ledger has been told of its consumption.
    pub(crate) metered: Mutex<Metered>,
    /// What its CPU time is counted from when it is looked at for work.
    cpu_mark: Mutex<CpuMark>,
    /// Operations under way. A sandbox that is in use is not idle, however long the operation takes.
    active: AtomicUsize,
    /// When it was last used, as far as this server knows; the row learns of it later.
    last_used: AtomicI64,
}

/// How much of its life was accounted for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Metered {
    pub(crate) wall_millis: u64,
    pub(crate) cpu_micros: u64,
    /// Memory at the last sample, to integrate from.
    pub(crate) memory_bytes: u64,
}

impl Cell {
    pub(crate) fn uses_secret(&self, project: &ProjectId, name: &str) -> bool {
        self.project == *project
            && self
                .seen
                .borrow()
                .spec
                .secrets
                .iter()
                .any(|used| used.secret == name)
    }

    pub(crate) fn new(row: SandboxRow) -> Arc<Self> {
        Arc::new(Self {
            id: row.id.clone(),
            project: row.project.clone(),
            seen: Shown::new(row.clone()),
            row: tokio::sync::Mutex::new(row),
            instance: RwLock::default(),
            saving: tokio::sync::Mutex::default(),
            telling: tokio::sync::Mutex::default(),
            under_way: Mutex::default(),
            commands: OpenCommands::default(),
            metered: Mutex::default(),
            cpu_mark: Mutex::new(CpuMark::NONE),
            active: AtomicUsize::new(0),
            last_used: AtomicI64::new(i64::MIN),
        })
    }

    pub(crate) fn last_seen(&self) -> SandboxRow {
        self.seen.borrow().clone()
    }

    /// The record as it stands now, with the uses that are not written yet.
    pub(crate) fn record(&self) -> Record {
        let mut record = self.seen.borrow().record.clone();
        record.last_used_at = record
            .last_used_at
            .max(Timestamp(self.last_used.load(Ordering::Relaxed)));
        record
    }

    /// Notes a use, if anybody cares.
    pub(crate) fn touch(&self, store: &dyn SandboxStore, now: Timestamp) {
        if self.seen.borrow().record.policy.idle.is_some() {
            self.last_used.fetch_max(now.0, Ordering::Relaxed);
            store.note_sandbox_used(&self.id, now);
        }
    }

    pub(crate) fn instance(&self) -> Option<Guest> {
        self.instance.read().clone()
    }

    pub(crate) fn set_instance(&self, instance: Guest) {
        *self.instance.write() = Some(instance);
        self.seen.look_again();
    }

    /// Waits while it runs and nobody can talk to it yet: its row may be written before its guest knows who it is.
    pub(crate) async fn reachable(&self) -> SandboxRow {
        let settled =
            |row: &SandboxRow| row.record.state != SandboxState::Running || self.instance().is_some();
        self.seen.wait_for(settled).await
    }

    /// Hangs up, so that whoever is in the middle of something hears of it. Only if it is this instance that is here.
    pub(crate) fn let_go_of(&self, id: &InstanceId) {
        let mut instance = self.instance.write();
        if instance.as_ref().is_some_and(|here| here.id == *id)
            && let Some(gone) = instance.take()
        {
            gone.hang_up();
        }
    }

    /// To be called before the row that says so is shown.
    pub(crate) fn begins(&self, reply: Reply) {
        *self.under_way.lock() = Some(reply);
    }

    /// The reply of the save or restore that this row waits for; `None` if the row is out of date, or waits for neither.
    pub(crate) fn reply(&self, row: &SandboxRow) -> Option<Reply> {
        let wanted = Attempt::of(&row.record)?;
        let under_way = self.under_way.lock();
        under_way.clone().filter(|reply| *reply.attempt() == wanted)
    }

    /// By an operation, or by a command that somebody started through an API and that runs still.
    pub(crate) fn is_in_use(&self) -> bool {
        self.active.load(Ordering::Relaxed) > 0 || self.commands.any_runs()
    }

    /// The host was asked for its CPU time, for whatever reason. The sooner after its last use the better.
    pub(crate) fn note_cpu(&self, seen: CpuMark) {
        let record = self.record();
        let Some(idle) = record.policy.idle else {
            return;
        };
        // While it is in use, no idle time runs.
        let last_used_at = if self.is_in_use() {
            seen.at
        } else {
            record.last_used_at
        };
        let mut mark = self.cpu_mark.lock();
        *mark = mark.moved_to(seen, last_used_at, idle.after_millis);
    }

    pub(crate) fn cpu_mark(&self) -> CpuMark {
        *self.cpu_mark.lock()
    }

    pub(crate) fn set_cpu_mark(&self, mark: CpuMark) {
        *self.cpu_mark.lock() = mark;
    }

    pub(crate) fn metered(&self) -> Metered {
        *self.metered.lock()
    }

    pub(crate) fn set_metered(&self, metered: Metered) {
        *self.metered.lock() = metered;
    }

    /// Whether this is its instance, and is to stay it.
    pub(crate) fn still_has(&self, instance: &InstanceId) -> bool {
        let seen = self.seen.borrow();
        seen.record.instance.as_ref() == Some(instance) && seen.record.end.is_none()
    }

    /// Its instance is gone in the middle of something: says why, as soon as that is known.
    pub(crate) async fn explain_end(&self) -> Fault {
        let settled = |row: &SandboxRow| {
            row.record.end.is_some()
                || matches!(row.record.state, SandboxState::Paused | SandboxState::Stopped)
        };
        let ended = tokio::time::timeout(REASON_WITHIN, self.seen.wait_for(settled)).await;
        let why = match ended {
            Ok(row) if row.record.end.is_none() => {
                let (code, hint) = match row.record.state {
                    SandboxState::Stopped => (Code::SandboxStopped, "start it, then do it again"),
                    _ => (
                        Code::SandboxPaused,
                        "resume it; commands go on from where they were, attach to them again",
                    ),
                };
                let message = format!(
                    "sandbox {} was {} during this operation",
                    self.id, row.record.state
                );
                return Fault::new(code, message).hint(hint);
            }
            Ok(row) => row.record.end.as_ref().map(|end| (end.name(), end.explain())),
            Err(_) => None,
        };
        let (code, why) = match why {
            Some(("out_of_memory", why)) => (Code::SandboxOutOfMemory, why),
            Some((_, why)) => (Code::SandboxEnded, why),
            None => (Code::SandboxEnded, "its instance is gone".into()),
        };
        Fault::new(
            code,
            format!("sandbox {} ended during this operation: {why}", self.id),
        )
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        let instance = self.instance.get_mut();
        // Nobody could find the way to it any more.
        if let Some(instance) = instance.take() {
            instance.hang_up();
        }
    }
}

/// Marks a sandbox as in use for as long as it lives.
pub(crate) struct InUse {
    cell: Arc<Cell>,
    store: Arc<dyn SandboxStore>,
    now: fn() -> Timestamp,
}

impl InUse {
    pub(crate) fn new(cell: Arc<Cell>, store: Arc<dyn SandboxStore>, now: fn() -> Timestamp) -> Self {
        cell.active.fetch_add(1, Ordering::Relaxed);
        let guard = Self { cell, store, now };
        guard.note();
        guard
    }

    fn note(&self) {
        self.cell.touch(&*self.store, (self.now)());
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.cell.active.fetch_sub(1, Ordering::Relaxed);
        self.note();
    }
}

impl std::fmt::Debug for InUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "InUse({})", self.cell.id)
    }
}

//! The sandbox use cases: create, exec, files, ports, artifacts, templates; and the loops that keep promises while
//! nobody calls: deadlines, metering, recovery.
//!
//! ```text
//!   front end ──> Sandboxes ──┬─> lifecycle (decides)      what happens is written down as facts
//!                             ├─> store     (records)  <── before the caller is told
//!                             └─> node      (performs; byte streams go straight through to guests, one hop)
//! ```
//! This is control: rows, decisions, quotas, names, idempotency, deadlines, facts, replies, and who may. What a machine does
//! lies behind [`atoll_node::Node`], which alone knows runtimes, links, the proxy, pools, volumes and the vault.
//!
//! What must hold:
//! - Rows are the truth, instances follow: an instance that no live row names, and that is neither pooled nor building a
//!   template, is destroyed.
//! - A success is durable: the row (and its facts) is committed before the caller hears of it.
//! - Whatever changes a sandbox runs to its end in a task of the server's own; a caller who hangs up changes nothing.
//! - Nothing here knows a wire, or how a caller was let in.

mod artifacts;
mod build_jobs;
mod builds;
mod catalogue;
mod cell;
mod changes;
mod create;
mod endings;
mod events;
mod exec;
mod faults;
mod files;
mod fitness;
mod forks;
mod garbage;
mod guest;
mod idleness;
mod keyed;
mod lives;
mod loops;
mod names;
mod network;
mod owners;
mod places;
mod port_io;
mod portable;
mod ports;
mod processes;
mod recovery;
mod replies;
mod request;
mod resuming;
mod run;
mod running;
mod saving;
mod secrets;
mod sessions;
mod settings;
mod shown;
mod snapshots;
mod starting;
mod streams;
mod uploads;
mod views;
mod volume_files;
mod volumes;

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use atoll_broker::Broker;
use atoll_identity::{Action, Caller, Identity, Opens};
use atoll_image::Templates;
use atoll_lifecycle::Tier;
use atoll_node::{Node, Saves, blocking, entropy};
use atoll_store::{Cursor, Fact, NewFact, Stores};
use atoll_types::{
    Code, Fault, InstanceId, Isolation, NetworkPolicy, ProjectId, SandboxId, SandboxState, TemplateId,
    Timestamp,
};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[cfg(feature = "testing")]
pub use atoll_node::testing;
pub use atoll_node::{
    BuildEvent, BuildFrom, BuildStart, BuildTemplate, ByteStream, NetworkUsage, PoolSetting, PoolView,
    RegistryLogin, Template, wall_clock,
};
pub use build_jobs::{
    BegunAlready, BuildJob, BuildJobs, BuildLine, BuildState, BuildStatus, LineLevel, OpenBuild, StepFailed,
};
pub use builds::BuildStream;
pub use changes::{ChangeIdle, ChangeSandbox, OWN_LABELS};
pub use exec::{ExecEvents, ExecInput, Execution};
pub use files::Watch;
pub use forks::{ForkSandbox, MAX_COPIES};
pub use garbage::Collected;
pub use keyed::keyed_command;
pub use names::Obtained;
pub use network::{ExplainNetwork, NetworkExplanation, NetworkView, PolicySource};
pub use owners::Belongs;
pub use port_io::PortIo;
pub use ports::{PortReader, PortStream, PortWriter};
pub use processes::{
    Kept, ListedProcess, Process, ProcessEvent, ProcessEvents, ProcessSaid, Processes, StartProcess,
    WhichProcess,
};
pub use request::*;
pub use run::{Ran, Removal};
pub use secrets::{PrivateSecret, SecretView, SetSecret};
pub use settings::Settings;
pub use snapshots::{Snapshot, TakeSnapshot};
pub use uploads::UploadRoom;
pub use views::{FactView, Overview, TierView, UsageTotal};
pub use volume_files::{EntryKind, VolumeEntry, VolumeMetadata, WriteInVolume};
pub use volumes::{CreateVolume, Volume};

use cell::{Cell, InUse};
use guest::Guest;

/// Lets whoever asked pay for so many bytes more that are gathered for them, or says why not.
pub type Pay<'a> = dyn FnMut(u64) -> Result<(), Fault> + Send + 'a;

/// The service. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Sandboxes {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    store: Stores,
    /// The catalogue; the images are the node's.
    templates: Templates,
    broker: Arc<Broker>,
    node: Arc<dyn Node>,
    live: Mutex<BTreeMap<SandboxId, Arc<Cell>>>,
    /// Instances that no row names yet, or ever, and that are here on purpose.
    held: Mutex<HashSet<InstanceId>>,
    /// Rung when a deadline may have come closer.
    deadlines: Notify,
    /// When deadlines will be looked at next; the end of time while they are.
    next_look: AtomicI64,
    /// Snapshots that are being written and have no row yet.
    unfinished: Mutex<HashSet<String>>,
    /// Volumes of sandboxes that are being made, and are not among the live ones yet; one for each that wants it.
    expected_volumes: Mutex<Vec<String>>,
    /// Rung when something became garbage.
    garbage: Notify,
    /// Held while volumes are attached or let go, so that none is let go that was just attached.
    volume_lock: Arc<tokio::sync::Mutex<()>>,
    /// Instances and builds that count as sandboxes of their projects and have no row.
    places: Arc<places::Places>,
    /// Who changes the catalogue of templates.
    template_turns: atoll_turns::Turns<ProjectId>,
    /// What templates say about the network of sandboxes. An id stands for the same words in every project.
    template_policies: Mutex<HashMap<TemplateId, Option<NetworkPolicy>>>,
    /// Held while a secret changes, so that of two values the later one stays.
    secret_lock: tokio::sync::Mutex<()>,
    /// Secrets without a name of their own that a request is about to use, and how often.
    held_secrets: Mutex<HashMap<(ProjectId, String), usize>>,
    facts: mpsc::Sender<NewFact>,
    artifact_lock: tokio::sync::Mutex<()>,
    uploads: Arc<uploads::Uploads>,
    streams: atoll_memory::Slots,
    usage: views::Summed,
    identity: Identity,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// Everything that outlives the server.
#[derive(Debug)]
pub struct Storage {
    pub store: Stores,
    pub templates: Templates,
    /// Seals secrets, and lends them to whoever sends requests.
    pub broker: Arc<Broker>,
}

impl Sandboxes {
    /// Takes over what an earlier server left, then starts the loops.
    pub async fn start(
        settings: Settings,
        storage: Storage,
        identity: Identity,
        node: Arc<dyn Node>,
    ) -> Result<Self, Fault> {
        let Storage {
            store,
            templates,
            broker,
        } = storage;
        prepare_data_dir(&settings)?;
        let (facts, queue) = mpsc::channel(16 * 1024);
        let events = node.events();
        let service = Self {
            inner: Arc::new(Inner {
                settings,
                store,
                templates,
                broker,
                node,
                live: Mutex::default(),
                held: Mutex::default(),
                deadlines: Notify::new(),
                next_look: AtomicI64::new(i64::MAX),
                unfinished: Mutex::default(),
                expected_volumes: Mutex::default(),
                garbage: Notify::new(),
                volume_lock: Arc::default(),
                places: Arc::default(),
                template_turns: catalogue::turns(),
                template_policies: Mutex::default(),
                secret_lock: tokio::sync::Mutex::default(),
                held_secrets: Mutex::default(),
                facts,
                uploads: Arc::default(),
                streams: streams::slots(),
                usage: views::Summed::default(),
                artifact_lock: tokio::sync::Mutex::new(()),
                identity,
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        };
        service.load_secrets().await?;
        service.recover().await?;
        service.start_loops(queue, events);
        Ok(service)
    }

    /// Stops accepting work, destroys pooled instances, flushes. Running sandboxes go on without the server.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        self.node().stop();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.node().close().await;
        self.inner.store.database.close().await;
    }

    fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    fn store(&self) -> &Stores {
        &self.inner.store
    }

    fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    fn now(&self) -> Timestamp {
        (self.inner.settings.now)()
    }

    fn node(&self) -> &dyn Node {
        &*self.inner.node
    }

    /// What a tier of the node can save.
    fn saves(&self, isolation: Isolation) -> Result<&Saves, Fault> {
        let mut tiers = self.node().offer().saves.iter();
        tiers
            .find(|(tier, _)| *tier == isolation)
            .map(|(_, saves)| saves)
            .ok_or_else(|| Fault::internal(format!("there is no {isolation} runtime")))
    }

    /// The tiers of the node, as admission wants to know them.
    fn tiers(&self) -> Vec<Tier> {
        self.node().offer().tiers()
    }

    /// The way to the agent of an instance.
    fn guest(&self, instance: InstanceId) -> Guest {
        Guest::new(Arc::clone(&self.inner.node), instance)
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Arc<Cell>>> {
        self.inner.live.lock()
    }

    fn held(&self) -> MutexGuard<'_, HashSet<InstanceId>> {
        self.inner.held.lock()
    }

    /// Ids of snapshots that are being written and have no row yet.
    fn unfinished(&self) -> MutexGuard<'_, HashSet<String>> {
        self.inner.unfinished.lock()
    }

    fn live_cell(&self, id: &SandboxId) -> Option<Arc<Cell>> {
        self.live().get(id).cloned()
    }

    /// The way to a running sandbox's guest, for one operation. One that rests and asks for it is woken first.
    async fn enter(&self, caller: &Caller, id: &SandboxId) -> Result<(Arc<Cell>, Guest, InUse), Fault> {
        let cell = self
            .live_cell(id)
            .filter(|cell| cell.project == *caller.project());
        let Some(cell) = cell else {
            let row = self.row(caller, id).await?;
            return Err(
                match atoll_lifecycle::step(&row.record, atoll_lifecycle::Input::Touched, self.now()) {
                    Err(refused) => refused.into(),
                    Ok(_) => Fault::internal("a running sandbox is not looked after"),
                },
            );
        };
        let (state, asks_for_it) = {
            let seen = cell.seen.borrow();
            (seen.record.state, seen.spec.auto_resume)
        };
        match state {
            // Somebody has woken it already.
            SandboxState::Resuming => drop(self.wake(&cell, None).await?),
            SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopping | SandboxState::Stopped
                if asks_for_it =>
            {
                self.wake(&cell, None).await?;
            }
            _ => {}
        }
        // A sandbox that is in use is not idle, however long that takes.
        if cell.is_in_use() {
            cell.touch(&*self.store().sandboxes, self.now());
        }
        let touched = atoll_lifecycle::step(&cell.record(), atoll_lifecycle::Input::Touched, self.now());
        touched.map_err(Fault::from)?;
        cell.reachable().await;
        let Some(guest) = cell.instance() else {
            return Err(cell.explain_end().await);
        };
        let in_use = InUse::new(
            Arc::clone(&cell),
            self.store().sandboxes.clone(),
            self.settings().now,
        );
        Ok((cell, guest, in_use))
    }

    /// Queues a fact that goes with no row. The ledger gets it within a moment.
    fn append(&self, cell: &Cell, fact: Fact) {
        self.queue_fact(self.fact(cell, fact));
    }

    fn queue_fact(&self, fact: NewFact) {
        if let Err(mpsc::error::TrySendError::Full(fact)) = self.inner.facts.try_send(fact) {
            let queue = self.inner.facts.clone();
            self.inner.tasks.spawn(async move {
                let _ = queue.send(fact).await;
            });
        }
    }

    /// The same for a fact of a project that is about no sandbox.
    pub fn note(&self, project: &ProjectId, fact: Fact) {
        self.queue_fact(NewFact {
            at: self.now(),
            project: project.clone(),
            sandbox: None,
            fact,
        });
    }

    fn fact(&self, cell: &Cell, fact: Fact) -> NewFact {
        NewFact {
            at: self.now(),
            project: cell.project.clone(),
            sandbox: Some(cell.id.clone()),
            fact,
        }
    }

    fn artifact_dir(&self) -> PathBuf {
        artifact_dir(self.settings())
    }

    async fn artifact_lock(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.inner.artifact_lock.lock().await
    }
}

fn artifact_dir(settings: &Settings) -> PathBuf {
    settings.data_dir.join("artifacts")
}

/// Makes what a server finds in its data directory, for one that may not make it itself.
pub fn prepare(settings: &Settings) -> Result<(), Fault> {
    prepare_data_dir(settings)
}

/// Makes the directories, and sweeps what an interrupted save left.
fn prepare_data_dir(settings: &Settings) -> Result<(), Fault> {
    use std::os::unix::fs::DirBuilderExt as _;
    let failed = |what: &str, e: &std::io::Error| Fault::internal(format!("{what}: {e}"));
    let artifacts = artifact_dir(settings);
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&artifacts)
        .map_err(|e| failed("making the data directory", &e))?;
    for entry in std::fs::read_dir(&artifacts)
        .map_err(|e| failed("reading the artifacts", &e))?
        .flatten()
    {
        if entry.file_name().as_encoded_bytes().starts_with(b"tmp-") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn parse_cursor(cursor: Option<String>) -> Result<Option<Cursor>, Fault> {
    cursor
        .map(|text| {
            text.parse()
                .map_err(|why: String| Fault::new(Code::CursorInvalid, why))
        })
        .transpose()
}

//! What a simulated server stands on: a clock, a machine, storage; all but the clock outlive it.

use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::{Broker, MasterKey};
use atoll_identity::{Caller, Identity};
use atoll_image::Templates;
use atoll_node::{Bytes, LocalNode, Outside, Recorder};
use atoll_runtime::probe::{Probe, Verdict};
use atoll_runtime::scripted::{Answer, How, Scripted, Step};
use atoll_sandboxes::{PoolSetting, Sandboxes, Settings, Storage};
use atoll_store::sqlite::Memory;
use atoll_store::{SandboxRow, Stores};
use atoll_types::{
    Fault, Isolation, ProjectId, Resources, SandboxId, TemplateId, TemplateManifest, TemplateSource,
    Timestamp,
};
use atoll_vault::Vault;
use atoll_volumes::Volumes;
use tokio::runtime::Runtime;

use crate::chance::Chance;

pub(crate) const TEMPLATE: &str = "base";
pub(crate) const MAX_LIVE: u64 = 5;
/// More than counts as work over any time that is looked at.
const COMPUTES_MICROS: u64 = 60_000_000;

thread_local! {
    /// When the server of now was started, in simulated milliseconds.
    static STARTED_AT: Cell<i64> = const { Cell::new(0) };
    static STARTED: Cell<Option<tokio::time::Instant>> = const { Cell::new(None) };
}

/// The wall clock.
fn now() -> Timestamp {
    Timestamp(STARTED_AT.get() + elapsed())
}

fn elapsed() -> i64 {
    let since = STARTED.get().map(|started| started.elapsed().as_millis());
    since.map_or(0, |millis| i64::try_from(millis).unwrap())
}

/// A directory for one thread's worlds, one after the other.
pub(crate) struct Home {
    dir: tempfile::TempDir,
    store: Memory,
    templates: Templates,
    broker: Arc<Broker>,
}

impl Home {
    pub(crate) fn new() -> Self {
        let memory = PathBuf::from("/dev/shm");
        let dir = tempfile::tempdir_in(memory)
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        std::fs::create_dir_all(dir.path().join("data/scratch")).unwrap();
        let templates = Templates::open(dir.path().join("templates")).unwrap();
        let id = TemplateId::from_entropy([7; 20]);
        let manifest = TemplateManifest {
            id: id.clone(),
            digest: "0".repeat(64),
            size_bytes: 1,
            layer_bytes: None,
            created_at: Timestamp(0),
            source: TemplateSource::Debian {
                suite: "none".into(),
                packages: Vec::new(),
            },
            env: BTreeMap::new(),
            workdir: "/".into(),
            user: "user".into(),
            start: None,
            command: None,
            exposed_ports: Vec::new(),
            network: None,
            resources: None,
        };
        let path = templates.dir().join("manifests").join(format!("{id}.json"));
        std::fs::write(path, serde_json::to_vec(&manifest).unwrap()).unwrap();
        std::fs::write(templates.dir().join("names").join(TEMPLATE), id.as_str()).unwrap();
        Self {
            dir,
            store: Memory::open().unwrap(),
            templates,
            broker: Arc::new(Broker::new(&MasterKey::new([1; 32])).unwrap()),
        }
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }
}

/// What happened, in order.
#[derive(Clone, Default)]
pub(crate) struct Trace(Rc<RefCell<Vec<String>>>);

impl Trace {
    pub(crate) fn note(&self, what: impl std::fmt::Display) {
        let at = STARTED_AT.get() + elapsed();
        self.0.borrow_mut().push(format!("{at:>9} {what}"));
    }

    pub(crate) fn take(&self) -> Vec<String> {
        self.0.take()
    }
}

/// What callers were told, which must stay true.
#[derive(Default)]
pub(crate) struct Told {
    /// Commands that ran.
    pub(crate) ran: BTreeMap<SandboxId, BTreeSet<String>>,
    pub(crate) killed: BTreeSet<SandboxId>,
    pub(crate) sandboxes: Vec<SandboxId>,
    pub(crate) snapshots: Vec<String>,
    pub(crate) broken: Vec<String>,
    /// When each has last computed.
    pub(crate) computed: BTreeMap<SandboxId, Timestamp>,
}

pub(crate) struct World<'a> {
    home: &'a Home,
    pub(crate) machine: Scripted,
    pub(crate) trace: Trace,
    pub(crate) told: Arc<Mutex<Told>>,
    /// How many instances are booted ahead.
    pub(crate) pool: usize,
    store: Memory,
    /// The versions of rows that were looked at.
    looked_at: RefCell<BTreeMap<SandboxId, i64>>,
}

/// A server that runs, and what it runs in.
pub(crate) struct Server {
    pub(crate) runtime: Runtime,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) store: Stores,
    pub(crate) vault: Vault,
    pub(crate) caller: Caller,
}

impl<'a> World<'a> {
    pub(crate) fn new(home: &'a Home, seed: u64, trace: &Trace) -> Self {
        atoll_sandboxes::testing::determined_by(seed);
        STARTED_AT.set(1_000_000);
        STARTED.set(None);
        home.store.empty().unwrap();
        // Of a world that came to a bad end.
        let _ = std::fs::remove_dir_all(home.data().join("vault/manifests"));
        let mut chance = Chance::new(seed, 1);
        let pool = if chance.one_in(4) { 2 } else { 0 };
        let isolation = Isolation::Gvisor;
        Self {
            home,
            machine: Scripted::new(isolation, true, move |step, _: &_| answer(&mut chance, step)),
            trace: trace.clone(),
            told: Arc::default(),
            pool,
            store: home.store.clone(),
            looked_at: RefCell::default(),
        }
    }

    /// Whatever was scripted: from now on everything works at once.
    pub(crate) fn calm(&self) {
        self.machine.follow(|_, _: &_| Answer::AT_ONCE);
        self.machine.release();
        self.store.fill_disk(false);
    }

    pub(crate) fn trouble_again(&self, seed: u64, epoch: u64) {
        let mut chance = Chance::new(seed, 100 + epoch);
        self.machine.follow(move |step, _: &_| answer(&mut chance, step));
    }

    pub(crate) fn fill_disk(&self, full: bool) {
        self.trace.note(if full {
            "the disk is full"
        } else {
            "the disk has room"
        });
        self.store.fill_disk(full);
    }

    /// A program that nobody asked for takes a processor for a while, in one of these.
    pub(crate) fn compute(&self, row: &SandboxRow) {
        let runs = row.record.running_instance();
        let Some((instance, look)) = runs.and_then(|id| Some((id, self.machine.instances().remove(id)?)))
        else {
            return;
        };
        if look.whole && look.alive && !look.still {
            self.trace.note(format!("{} computes", row.id));
            self.machine.spend(instance, COMPUTES_MICROS);
            self.told.lock().computed.insert(row.id.clone(), now());
        }
    }

    /// Waits for something that may hang, but not for ever.
    pub(crate) async fn releasing<T>(&self, work: impl Future<Output = T>) -> T {
        let release = async {
            loop {
                tokio::time::sleep(Duration::from_secs(30)).await;
                self.machine.release();
            }
        };
        tokio::select! {
            biased;
            done = work => done,
            never = release => never,
        }
    }

    /// A server on what the last one left.
    pub(crate) fn start(&mut self) -> Result<Server, Fault> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        self.store = self.store.again().unwrap();
        // On a full disk it does not start, and says so.
        self.store.fill_disk(false);
        let store = self.store.stores();
        let vault = Vault::open(self.home.data().join("vault"), None).unwrap();
        let started: Result<_, Fault> = runtime.block_on(async {
            STARTED.set(Some(tokio::time::Instant::now()));
            let mut settings = Settings::new(self.home.data());
            settings.now = now;
            settings.max_live_per_project = MAX_LIVE;
            settings.durable_saves = false;
            // Of the real disk nothing may depend.
            settings.min_free_disk = 0;
            settings.limits.max_timeout_millis = None;
            if self.pool > 0 {
                settings.pools.push(PoolSetting {
                    template: TEMPLATE.into(),
                    size: self.pool,
                    resources: Resources::default(),
                    isolation: None,
                });
            }
            let storage = Storage {
                store: store.clone(),
                templates: self.home.templates.clone(),
                broker: Arc::clone(&self.home.broker),
            };
            let bytes = Bytes {
                templates: self.home.templates.clone(),
                vault: vault.clone(),
                volumes: Volumes::open(self.home.data().join("volumes")).unwrap(),
            };
            let outside = Outside {
                way: Err("this machine is simulated".into()),
                recorder: Arc::new(Recorder::default()),
            };
            let probes = vec![Probe {
                isolation: Isolation::Gvisor,
                verdict: Verdict::Works {
                    detail: "scripted".into(),
                    no_disk: None,
                },
            }];
            let runtimes: atoll_runtime::Runtimes = vec![Arc::new(self.machine.clone())];
            // Its id is the same in every world.
            let project = ProjectId::from_entropy([1; 20]);
            store.identity.ensure_project("default", project, now()).await?;
            let rows = Arc::clone(&store.identity);
            let identity = Identity::open(rows, &self.home.data(), now).await?;
            let caller = identity.server(identity.default_project().clone());
            let node = LocalNode::new(settings.node(caller.project()), runtimes, probes, bytes, outside);
            let start = Sandboxes::start(settings, storage, identity, Arc::new(node));
            Ok((self.releasing(start).await?, caller))
        });
        let (sandboxes, caller) = started?;
        Ok(Server {
            runtime,
            sandboxes,
            store,
            vault,
            caller,
        })
    }

    /// The server is gone, this moment; what it stood on is as it was.
    pub(crate) fn gone(&self, server: Server, how: &str, down: Duration) {
        let Server {
            runtime, sandboxes, ..
        } = server;
        let lived = {
            let _clock = runtime.enter();
            self.trace.note(how);
            elapsed()
        };
        drop(sandboxes);
        drop(runtime);
        STARTED_AT.set(STARTED_AT.get() + lived + i64::try_from(down.as_millis()).unwrap());
        STARTED.set(None);
    }

    /// Whether a row is another one than at the last look.
    pub(crate) fn is_new(&self, row: &SandboxRow) -> bool {
        let before = self.looked_at.borrow_mut().insert(row.id.clone(), row.version);
        before != Some(row.version)
    }
}

/// What becomes of a step: mostly it works, at once or later.
fn answer(chance: &mut Chance, step: Step) -> Answer {
    let how = match (step, chance.below(40)) {
        (_, 0..=2) => How::Fails,
        (_, 3) => How::Hangs,
        (Step::Save | Step::Thaw | Step::Configure | Step::Exec | Step::Adopt, 4) => How::Dies,
        _ => How::Works,
    };
    let after = Duration::from_millis(match chance.below(8) {
        0..=3 => 0,
        4..=6 => chance.below(20),
        _ => chance.below(5000),
    });
    Answer { after, how }
}

pub(crate) fn project(server: &Server) -> ProjectId {
    server.caller.project().clone()
}

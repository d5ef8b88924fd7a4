//! The node that is this machine, in this process.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use atoll_image::Templates;
use atoll_lifecycle::{Missing, Tier};
use atoll_runtime::probe::{Probe, Verdict};
use atoll_runtime::{Instance, Runtime, Runtimes, SaveSource};
use atoll_turns::Turns;
use atoll_types::{Fault, InstanceId, Isolation, ProjectId, SnapshotId, TemplateManifest, Timestamp};
use atoll_vault::Vault;
use atoll_volumes::Volumes;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::boots::Boots;
use crate::builds::{BuildEvent, BuildTemplate, Builder};
use crate::cables::Outside;
use crate::faults::from_image;
use crate::node::Node;
use crate::pool::Pools;
use crate::words::{Event, NetworkOffer, Offer, PoolView, Settings};

/// How many events may wait for control.
const EVENTS: usize = 16 * 1024;

/// What a node keeps and outlives it.
#[derive(Debug)]
pub struct Bytes {
    pub templates: Templates,
    pub vault: Vault,
    pub volumes: Volumes,
}

/// Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct LocalNode {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) settings: Settings,
    pub(crate) runtimes: Runtimes,
    pub(crate) offer: Offer,
    pub(crate) templates: Templates,
    pub(crate) vault: Vault,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) outside: Outside,
    /// Those with a guest to talk to.
    instances: Mutex<HashMap<InstanceId, Instance>>,
    /// Instances that are the node's own: being booted for a pool, of builds, or claimed and not greeted yet.
    held: Mutex<HashSet<InstanceId>>,
    pub(crate) pools: Pools,
    /// State that was captured, until it is released.
    captured: Mutex<BTreeMap<SnapshotId, Arc<dyn SaveSource>>>,
    pub(crate) boots: Boots,
    /// Instances of builds under way, of each project.
    pub(crate) builds: Turns<ProjectId>,
    pub(crate) events: mpsc::Sender<Event>,
    /// Until somebody listens.
    unheard: Mutex<Option<mpsc::Receiver<Event>>>,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
}

impl LocalNode {
    /// What is found on the machine stays as it is, until control says what it knows.
    pub fn new(
        settings: Settings,
        runtimes: Runtimes,
        tiers: Vec<Probe>,
        bytes: Bytes,
        outside: Outside,
    ) -> Self {
        let (events, unheard) = mpsc::channel(EVENTS);
        outside.recorder.tell(events.clone());
        let offer = Offer {
            tiers,
            saves: runtimes
                .iter()
                .map(|runtime| (runtime.isolation(), runtime.saves()))
                .collect(),
            network: match &outside.way {
                Ok(way) => Ok(NetworkOffer {
                    floor: way.floor.clone(),
                    default: way.default.clone(),
                    models: way.models.clone(),
                }),
                Err(why) => Err(why.clone()),
            },
        };
        Self {
            inner: Arc::new(Inner {
                pools: Pools::new(&settings.pools),
                settings,
                runtimes,
                offer,
                templates: bytes.templates,
                vault: bytes.vault,
                volumes: Arc::new(bytes.volumes),
                outside,
                instances: Mutex::default(),
                held: Mutex::default(),
                captured: Mutex::default(),
                boots: Boots::new(boots_at_once()),
                builds: Turns::new(boots_at_once(), CROWD * boots_at_once()),
                events,
                unheard: Mutex::new(Some(unheard)),
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    pub(crate) fn now(&self) -> Timestamp {
        (self.inner.settings.now)()
    }

    pub(crate) fn runtime(&self, isolation: Isolation) -> Result<&Arc<dyn Runtime>, Fault> {
        self.inner
            .runtimes
            .iter()
            .find(|runtime| runtime.isolation() == isolation)
            .ok_or_else(|| Fault::internal(format!("there is no {isolation} runtime")))
    }

    /// The files of an image, as the runtime wants them. One that is not there is for the runtime to miss.
    pub(crate) fn image(&self, isolation: Isolation, digest: &str) -> Result<Vec<PathBuf>, Fault> {
        let templates = &self.inner.templates;
        let files = match isolation {
            Isolation::Jail => templates.kernel_files(digest),
            Isolation::Gvisor | Isolation::Microvm => templates.image_files(digest),
        };
        files.map_err(|error| from_image(&error))
    }

    pub(crate) fn tiers(&self) -> Vec<Tier> {
        self.inner.offer.tiers()
    }

    pub(crate) fn instances(&self) -> MutexGuard<'_, HashMap<InstanceId, Instance>> {
        self.inner.instances.lock()
    }

    pub(crate) fn held(&self) -> MutexGuard<'_, HashSet<InstanceId>> {
        self.inner.held.lock()
    }

    pub(crate) fn captured(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, Arc<dyn SaveSource>>> {
        self.inner.captured.lock()
    }

    /// Keeps an instance that no row will name from being taken for an orphan.
    pub(crate) fn hold(&self, id: InstanceId) -> Held {
        self.held().insert(id.clone());
        Held {
            node: self.clone(),
            id,
        }
    }
}

/// See [`LocalNode::hold`].
#[derive(Debug)]
pub(crate) struct Held {
    node: LocalNode,
    id: InstanceId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.node.held().remove(&self.id);
    }
}

impl Offer {
    /// The tiers of this machine, as admission wants to know them.
    pub fn tiers(&self) -> Vec<Tier> {
        self.tiers
            .iter()
            .map(|probe| Tier {
                isolation: probe.isolation,
                no_disk: match &probe.verdict {
                    Verdict::Works { no_disk, .. } => no_disk.clone(),
                    Verdict::Unavailable { .. } => None,
                },
                missing: match &probe.verdict {
                    Verdict::Works { .. } => None,
                    Verdict::Unavailable { reason, remedy } => Some(Missing {
                        why: reason.clone(),
                        remedy: remedy
                            .clone()
                            .unwrap_or_else(|| "use a machine that offers it".into()),
                    }),
                },
            })
            .collect()
    }
}

/// So many projects have to take all of their own places before others wait. A place is mostly held while its guest is waited for,
/// so more places than processors cost little.
pub(crate) const CROWD: usize = 8;

fn boots_at_once() -> usize {
    std::thread::available_parallelism().map_or(4, |cores| 2 * cores.get())
}

#[async_trait]
impl Node for LocalNode {
    fn offer(&self) -> &Offer {
        &self.inner.offer
    }

    fn events(&self) -> mpsc::Receiver<Event> {
        let mut unheard = self.inner.unheard.lock();
        // Whoever comes second hears nothing.
        unheard.take().unwrap_or_else(|| mpsc::channel(1).1)
    }

    async fn recovered(&self, kept: &HashSet<InstanceId>) {
        self.unplug_all_but(kept).await;
    }

    fn start(&self) {
        self.start_pools();
    }

    fn stop(&self) {
        self.inner.stop.cancel();
    }

    async fn close(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.close_network().await;
    }

    async fn pools(&self) -> Vec<PoolView> {
        self.inner.pools.views()
    }

    fn templates_changed(&self) {
        self.inner.pools.look_again();
    }

    async fn build(
        &self,
        request: BuildTemplate,
        builder: Builder,
        progress: mpsc::Sender<Result<BuildEvent, Fault>>,
    ) -> Result<TemplateManifest, Fault> {
        self.build_template(request, builder, progress).await
    }
}

//! Holding an instance still, saving it, and letting it go on.
//!
//! ```text
//!   hold back what is asked ── guest has taken what was asked ── pause ── we have read what it said ── checkpoint
//!          ▲                                                       │                                     │
//!          └───────────── release, ping <── resume <── thaw, or any failure of these ────────────────────┘
//! ```
//! A memory save is the sentry's checkpoint: `checkpoint` (its state), `pages_meta` and `pages`; a layer on disk is among the
//! pages. A filesystem save is a tar archive of the writable layer, `layer`, wherever that is, so any version of any tier can
//! read it. It does not hold `/dev/shm`, which is a mount of its own.
//!
//! What must hold:
//! - Nothing is in the FIFOs when memory is saved. The sentry would take unread bytes of both into the image: what the
//!   guest said would be lost, what it was asked would be done by every copy.
//! - Between pause and thaw no task of the guest runs, also while and after the sentry writes its checkpoint: pauses are
//!   counted, and the checkpoint ends only its own.
//! - A resume too many kills the sentry, one too few leaves the guest still for ever. So the mark in the instance's
//!   directory says which it is, and says `unsure` while that changes; whoever finds `unsure` asks the guest first.
//! - A save that failed or was abandoned half way ends in a running instance: it goes on in a task of its own, and
//!   [`Gvisor::thaw_instance`] waits for it.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Seek};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use atoll_types::{InstanceId, MIB, Resources, SaveKind};

use super::control::Control;
use super::{Gvisor, host_limits};
use crate::agent::Agent;
use crate::cause::Doing;
use crate::cgroup::{CgroupError, Group};
use crate::instance_dir::Record;
use crate::{Cause, Error, Kind, LAYER, SaveSink};

/// The memory itself.
pub(super) const PAGES: &str = "pages";
/// The parts of a memory save, in the order in which the sentry wants their files.
pub(super) const MEMORY: [&str; 3] = ["checkpoint", "pages_meta", PAGES];

/// How long a guest may take to read what it was sent; one that does not gets it again after a restore.
const TAKING: Duration = Duration::from_millis(100);
/// How long we may take to read what a paused guest has said.
const READING: Duration = Duration::from_secs(10);
/// How long the sentry may take to write gigabytes.
const WRITING: Duration = Duration::from_secs(1800);
/// How long a guest that may be paused is given to prove that it is not.
const ANSWERING: Duration = Duration::from_secs(2);

/// Where an instance's directory says that it is paused.
const MARK: &str = "still";
const STILL: &str = "still";
const UNSURE: &str = "unsure";

/// What is known of the instances that run, beyond what stands in their directories.
#[derive(Debug, Clone, Default)]
pub(super) struct Residents(Arc<Mutex<HashMap<InstanceId, Resident>>>);

#[derive(Debug, Clone)]
struct Resident {
    agent: Option<Arc<dyn Agent>>,
    /// Held by whoever pauses, saves or resumes it.
    stillness: Stillness,
    /// What was charged to it before it was saved.
    charged: Option<u64>,
}

pub(super) type Stillness = Arc<tokio::sync::Mutex<()>>;

impl Residents {
    fn all(&self) -> parking_lot::MutexGuard<'_, HashMap<InstanceId, Resident>> {
        self.0.lock()
    }

    fn get(&self, id: &InstanceId) -> Resident {
        let mut all = self.all();
        let resident = all.entry(id.clone()).or_insert_with(|| Resident {
            agent: None,
            stillness: Arc::default(),
            charged: None,
        });
        resident.clone()
    }

    fn note_charged(&self, id: &InstanceId, bytes: u64) {
        if let Some(resident) = self.all().get_mut(id) {
            resident.charged = Some(bytes);
        }
    }

    pub(super) fn stillness(&self, id: &InstanceId) -> Stillness {
        self.get(id).stillness
    }

    pub(super) fn enter(&self, id: &InstanceId, agent: &Arc<dyn Agent>) {
        self.get(id);
        if let Some(resident) = self.all().get_mut(id) {
            resident.agent = Some(Arc::clone(agent));
        }
    }

    pub(super) fn leave(&self, id: &InstanceId) {
        self.all().remove(id);
    }
}

/// Whether the tasks of a guest are paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Runs,
    /// Somebody was about to change it.
    Unsure,
    Still,
}

impl Mark {
    pub(super) fn read(dir: &Path) -> Self {
        match fs::read_to_string(dir.join(MARK)) {
            Ok(text) if text == STILL => Self::Still,
            Err(error) if error.kind() == ErrorKind::NotFound => Self::Runs,
            // Also torn by a crash.
            _ => Self::Unsure,
        }
    }

    fn write(self, dir: &Path) -> Result<(), Cause> {
        let mark = dir.join(MARK);
        let written = match self {
            Self::Still => fs::write(mark, STILL),
            Self::Unsure => fs::write(mark, UNSURE),
            Self::Runs => fs::remove_file(mark),
        };
        written.doing(|| "noting whether it is paused")
    }
}

fn pause(dir: &Path, id: &InstanceId) -> Result<(), Cause> {
    if Mark::read(dir) == Mark::Still {
        return Ok(());
    }
    let mut control = Control::connect(dir, id)?;
    Mark::Unsure.write(dir)?;
    control.pause()?;
    Mark::Still.write(dir)
}

/// Of one that is known to be paused.
pub(super) fn resume(dir: &Path, id: &InstanceId) -> Result<(), Cause> {
    let mut control = Control::connect(dir, id)?;
    Mark::Unsure.write(dir)?;
    control.resume()?;
    Mark::Runs.write(dir)
}

/// A guest answered, so it runs, whatever the mark says.
pub(super) fn runs(dir: &Path) -> Result<(), Cause> {
    match Mark::read(dir) {
        Mark::Runs => Ok(()),
        _ => Mark::Runs.write(dir),
    }
}

impl Gvisor {
    pub(super) async fn save_instance(
        &self,
        id: &InstanceId,
        kind: SaveKind,
        sink: Arc<dyn SaveSink>,
    ) -> Result<(), Error> {
        let record = self.record(id)?;
        let fail = |source| Error::Save {
            id: id.clone(),
            source,
        };
        let resident = self.residents.get(id);
        let agent = resident.agent.filter(|agent| agent.is_open());
        let agent = agent.ok_or_else(|| fail(unadopted("it was not adopted")))?;
        let (this, id) = (self.clone(), id.clone());
        // Its own task: if nobody waits for it any more, it must still come to an end that is known.
        let saving = tokio::spawn(async move {
            let _one_at_a_time = resident.stillness.lock().await;
            let saved = this.save_still(&record, kind, sink, &*agent).await;
            if saved.is_err()
                && let Err(error) = this.let_go(&id, Some(&*agent)).await
            {
                tracing::warn!(instance = %id, %error, "an instance that could not be saved does not go on");
            }
            saved
        });
        saving.await.map_err(Cause::from).flatten().map_err(fail)
    }

    async fn save_still(
        &self,
        record: &Record,
        kind: SaveKind,
        sink: Arc<dyn SaveSink>,
        agent: &dyn Agent,
    ) -> Result<(), Cause> {
        let names: &[&str] = match kind {
            SaveKind::Memory => &MEMORY,
            SaveKind::Filesystem => &[LAYER],
        };
        let (dir, id) = (self.dirs.dir(&record.id), record.id.clone());
        // An archive is written from its beginning to its end, so whoever keeps it can read along.
        let in_order = kind == SaveKind::Filesystem;
        let mut growing = None;
        let mut files: Vec<File> = names
            .iter()
            .map(|name| {
                if in_order {
                    return sink.stream(name).map(File::from);
                }
                // The sentry writes pages one after the other and never again (seen on the pinned build), and they are most
                // of it.
                if *name == PAGES
                    && let Some((file, taken)) = sink.growing(name)?
                {
                    growing = Some(taken);
                    return Ok(file);
                }
                sink.scratch()
            })
            .collect::<Result<_, _>>()
            .doing(|| "making room for it")?;
        agent.hold().await;
        agent.taken(TAKING).await;
        {
            let (dir, id) = (dir.clone(), id.clone());
            blocking(move || pause(&dir, &id)).await?;
        }
        if !agent.delivered(READING).await {
            let why = "what its agent has said could not be read in time";
            return Err(Cause::new(Kind::TimedOut, why));
        }
        let group = Group::named(&self.config.cgroup_parent, id.as_str())?;
        let roomy = while_saving(&record.resources);
        let usage = group.usage()?;
        self.residents.note_charged(&id, usage.memory_bytes);
        let written = blocking(move || {
            group.resize(&roomy)?;
            write(&dir, &id, &files)?;
            if in_order {
                return Ok(());
            }
            let keeping = |name, kept: std::io::Result<()>| kept.doing(|| format!("keeping its {name}"));
            // Those that grow come last in the list, and are the largest.
            if let Some(growing) = &growing {
                files.pop();
                growing.whole();
            }
            for (name, mut file) in MEMORY.into_iter().zip(files) {
                keeping(name, file.rewind().and_then(|()| sink.part(name, file)))?;
            }
            growing.map_or(Ok(()), |growing| keeping(PAGES, growing.finish()))
        });
        written.await
    }

    /// Lets an instance go on, whether it is paused or not.
    pub(super) async fn thaw_instance(&self, id: &InstanceId) -> Result<(), Error> {
        self.record(id)?;
        let resident = self.residents.get(id);
        let agent = resident.agent.filter(|agent| agent.is_open());
        let _one_at_a_time = resident.stillness.lock().await;
        self.let_go(id, agent.as_deref())
            .await
            .map_err(|cause| Error::io(format!("letting {id} go on"), cause))
    }

    async fn let_go(&self, id: &InstanceId, agent: Option<&dyn Agent>) -> Result<(), Cause> {
        let (dir, id) = (self.dirs.dir(id), id.clone());
        let mark = Mark::read(&dir);
        if mark != Mark::Runs
            && let (Ok(Some(record)), Ok(group)) = (self.dirs.read(&id), self.group(&id))
        {
            // Before it goes on; afterwards it could fill the room.
            let usage = group.usage()?;
            let resident = self.residents.get(&id);
            let extra = usage.memory_bytes.saturating_sub(resident.charged.unwrap_or(0));
            tighten(&group, record.resources.memory_bytes, extra, resident.stillness)?;
        }
        match (mark, agent) {
            (Mark::Runs, _) => {}
            (Mark::Unsure, None) => return Err(unadopted("it has to be adopted first")),
            (Mark::Unsure, Some(agent))
                if {
                    agent.release().await;
                    agent.answers(ANSWERING).await
                } =>
            {
                runs(&dir)?;
            }
            (Mark::Unsure | Mark::Still, _) => blocking(move || resume(&dir, &id)).await?,
        }
        if let Some(agent) = agent {
            agent.release().await;
        }
        Ok(())
    }

    fn record(&self, id: &InstanceId) -> Result<Record, Error> {
        match self.dirs.read(id) {
            Ok(Some(record)) => Ok(record),
            Ok(None) => Err(Error::NotFound(id.clone())),
            Err(error) => Err(Error::io(format!("reading the record of {id}"), error)),
        }
    }
}

fn unadopted(why: &str) -> Cause {
    Cause::new(Kind::State, why)
}

fn write(dir: &Path, id: &InstanceId, files: &[File]) -> Result<(), Cause> {
    let mut control = Control::connect(dir, id)?;
    match files {
        [layer] => control.tar_layer(id, layer.as_fd(), WRITING),
        [state, meta, pages] => control.checkpoint(&[state.as_fd(), meta.as_fd(), pages.as_fd()], WRITING),
        _ => unreachable!("saves have one or three parts"),
    }
}

/// The limits while the sentry writes. What it writes is charged to it as long as it is in memory, and an archive is made
/// of copies of the files. The guest is paused, so it gains nothing by that.
fn while_saving(resources: &Resources) -> Resources {
    let limits = host_limits(resources);
    Resources {
        memory_bytes: limits.memory_bytes.saturating_mul(3).saturating_add(256 * MIB),
        ..limits
    }
}

/// Takes back what [`while_saving`] gave: at once all but the `extra` that the sentry itself holds since, and that too as
/// soon as it is free. Not while it is being saved again.
///
/// The sentry frees memory when it thinks fit, after minutes maybe. A limit below what it holds and the guest may use would
/// kill a guest that did no wrong; a guest that uses the extra for itself is not let have it for long.
pub(super) fn tighten(group: &Group, limit: u64, extra: u64, stillness: Stillness) -> Result<(), Cause> {
    const SLACK: u64 = 16 * MIB;
    const TRIES: u32 = 600;
    let lowered = group.lower_memory(limit.saturating_add(extra))?;
    if lowered && extra == 0 {
        return Ok(());
    }
    let group = group.clone();
    tokio::spawn(async move {
        let mut tries = 0;
        while group.exists() {
            tokio::time::sleep(Duration::from_millis(500)).await;
            tries += 1;
            let _not_being_saved = stillness.lock().await;
            let group = group.clone();
            let tighter = move || -> Result<bool, CgroupError> {
                if group.lower_memory(limit)? {
                    return Ok(true);
                }
                if tries > TRIES {
                    let used = group.usage()?.memory_bytes;
                    group.lower_memory(limit.max(used.saturating_add(SLACK)))?;
                }
                Ok(false)
            };
            if let Ok(Ok(true) | Err(_)) = tokio::task::spawn_blocking(tighter).await {
                break;
            }
        }
    });
    Ok(())
}

pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Cause> + Send + 'static,
) -> Result<T, Cause> {
    tokio::task::spawn_blocking(work).await?
}

//! The gVisor tier: one sandbox process (`runsc`, systrap platform) per instance.
//!
//! ```text
//!   server ── clone ──> cgroup, namespaces, empty root ── exec ──> sentry, the sandbox process
//!     ├── StartRoot, over its control socket ──────────────────────> agent, PID 1 in it
//!     └── Hello, at once; waits in the FIFO until the agent is up ──────> Welcome
//! ```
//! The root is the template's EROFS image, shared by all, under a private writable layer in memory, or in a file without a
//! name. The agent comes from a second EROFS image at `/.atoll`. Nothing of the host's filesystem is reachable but the
//! volumes it is lent ([`volumes`]), and those through a gofer, a process more: then `runsc run` starts both ([`launch`]).
//! Without one we start the sentry ourselves ([`boot`]).
//!
//! An instance that goes on from saved memory is created empty and filled ([`restore`]); it is as any other afterwards.
//!
//! What must hold:
//! - `runsc exec` is never used: sessions that it opens would break a later checkpoint. Everything goes through the
//!   agent.
//! - Every process of an instance is in its cgroup from before `exec` on, so killing the cgroup kills the instance.
//! - Each instance has a range of host uids of its own (a user namespace; costs nothing measurable and no gofer). This
//!   rules out `--directfs=false`, which runs every sentry as `nobody` instead; without a gofer there are no host files
//!   that directfs could reach, and with one there are its volumes.
//! - The network is a stack of gVisor's own, with loopback and at most one cable ([`network`]).
//! - The guest sees as much memory as it may use. The sentry is told; `runsc run --ignore-cgroups` takes the figure from
//!   `/proc/meminfo`, so it is shown one of ours. Letting runsc manage the cgroup would cost 10 ms per controller and start.

mod boot;
mod bundle;
mod control;
mod launch;
mod network;
mod restore;
mod save;
mod volumes;

#[cfg(test)]
mod tests;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use atoll_types::{DiskBacking, InstanceId, Isolation, Resources, Usage};

use crate::agent::{Greeted, Greeter, Here, Raised, Raiser};
use crate::cause::Doing;
use crate::cgroup::{CgroupError, Group};
use crate::channel::{AgentState, ChannelError, Connect, Fifos};
use crate::instance_dir::{InstanceDirs, Record};
use crate::process::Process;
use crate::{
    Cause, Config, Error, Instance, InstanceSpec, Kind, Restore, Runtime, SaveKind, SaveSink, Saves, Told,
    ending, uids,
};
use launch::Starting;
use restore::Boot;
use save::{Mark, Residents, blocking};

pub use launch::version;
pub use restore::apply as unpack_layer;

/// How long an agent may take to answer that goes on from its memory, once that is there.
const AWAKE: Duration = Duration::from_secs(30);
/// How long a boot may take; it takes 40 ms on an idle machine.
const BOOT: Duration = Duration::from_secs(60);
/// How long an adopted agent may take to answer.
const ADOPT: Duration = Duration::from_secs(15);
/// How long an agent that may have been left paused is given to prove that it was not.
const PAUSED: Duration = Duration::from_secs(2);
/// Threads and stub processes that the sentry needs beside those of the guest.
const SENTRY_PIDS: u32 = 128;
/// A boot gets at least this much CPU, whatever the sandbox is given afterwards.
const BOOT_CPU_MILLIS: u32 = 4000;

/// Runs instances with `runsc`.
#[derive(Debug, Clone)]
pub struct Gvisor {
    config: Arc<Config>,
    dirs: InstanceDirs,
    runsc: PathBuf,
    residents: Residents,
    saves: Arc<OnceLock<Saves>>,
}

impl Gvisor {
    /// Whether `runsc` works is for [`crate::probe`] to find out.
    pub fn new(config: Arc<Config>, runsc: PathBuf) -> Result<Self, Error> {
        let dirs = InstanceDirs::open(&config.state_dir)
            .map_err(|error| Error::io(format!("opening {}", config.state_dir.display()), error))?;
        Ok(Self {
            config,
            dirs,
            runsc,
            residents: Residents::default(),
            saves: Arc::default(),
        })
    }

    fn group(&self, id: &InstanceId) -> Result<Group, Error> {
        Group::named(&self.config.cgroup_parent, id.as_str())
            .map_err(|error| Error::io("finding the cgroup", error))
    }

    /// Everything after the directory exists; the caller cleans up after an error.
    async fn boot(
        &self,
        spec: &InstanceSpec,
        record: Record,
        greeter: &Arc<dyn Greeter>,
    ) -> Result<Raised, Cause> {
        crate::jail::extras::check(&spec.mounts)?;
        let boot = Self::prepare(spec)?;
        let launched = {
            let (this, spec) = (self.clone(), spec.clone());
            let dir = this.dirs.dir(&spec.id);
            blocking(move || {
                let counts_files = launch::counts_files(&this.saves().runtime_version);
                launch::launch(&this.config, dir, &this.runsc, &spec, boot, counts_files, record)
            })
            .await?
        };
        let launch::Launched {
            dir,
            mut record,
            group,
            fifos,
            mut starting,
            wire,
        } = launched;
        let memory = match &spec.restore {
            Some(Restore {
                kind: SaveKind::Memory,
                source,
            }) => Some(source),
            _ => None,
        };
        let how = match memory {
            Some(_) => Connect {
                agent: AgentState::Restored,
                within: restore::READING,
            },
            None => Connect {
                agent: AgentState::Booting,
                within: BOOT,
            },
        };
        let connect = greeter.greet(&spec.id, &fifos, how);
        tokio::pin!(connect);
        let mut process = None;
        let mut early = None;
        if let Some(source) = memory {
            let fill = restore::fill(&dir, &spec.id, &mut starting, &wire, source);
            tokio::pin!(fill);
            // The greeting waits in the FIFO; whoever wakes up answers at once, maybe before the sentry says that it is
            // done.
            tokio::select! {
                filled = &mut fill => filled?,
                connected = &mut connect => {
                    early = Some(connected);
                    fill.await?;
                }
            }
        }
        let connected = match early {
            Some(connected) => connected,
            // Its memory is there, and whoever runs in it answers at once, or was told not to.
            None if memory.is_some() => match tokio::time::timeout(AWAKE, &mut connect).await {
                Ok(connected) => connected,
                Err(_) => {
                    let why = "what was restored does not answer: its agent was stopped or changed before it was saved";
                    return Err(Cause::new(Kind::Silent, why));
                }
            },
            None => tokio::select! {
                connected = &mut connect => connected,
                up = starting.up(&dir, &spec.id) => {
                    up?;
                    // The agent is only just starting, so this delays nobody.
                    process = Some(self.take_down(&starting, &dir, &mut record)?);
                    connect.await
                }
            },
        };
        let greeted = connected.map_err(|error| Cause::from(error).with("; ", launch::complaint(&dir)))?;
        if let (Boot::Fresh, Some(Restore { source, .. })) = (boot, &spec.restore) {
            greeter.unpack(&greeted, source).await?;
        }
        // What a boot is given beyond the instance's own limits is CPU alone.
        group.limit_cpu(spec.resources.cpu_millis)?;
        let process = match process {
            Some(process) => process,
            None => self.take_down(&starting, &dir, &mut record)?,
        };
        self.instance(&spec.id, process, greeted, group)
    }

    /// Records the sandbox process.
    fn take_down(
        &self,
        starting: &Starting,
        dir: &Path,
        record: &mut Record,
    ) -> Result<Option<Process>, Cause> {
        record.process = starting.process(dir)?;
        self.dirs.update(record).doing(|| "recording its process")?;
        Ok(record.process.clone())
    }

    /// Greets the agent of an instance that an earlier server may have left paused.
    async fn greet_again(
        &self,
        id: &InstanceId,
        fifos: &Fifos,
        greeter: &Arc<dyn Greeter>,
    ) -> Result<Greeted, Cause> {
        let greet = |within| {
            let how = Connect {
                agent: AgentState::Running,
                within,
            };
            greeter.greet(id, fifos, how)
        };
        let dir = self.dirs.dir(id);
        let resume = || {
            let (dir, id) = (dir.clone(), id.clone());
            blocking(move || save::resume(&dir, &id))
        };
        let patience = match Mark::read(&dir) {
            Mark::Runs => ADOPT,
            Mark::Unsure => PAUSED,
            Mark::Still => {
                resume().await?;
                ADOPT
            }
        };
        let mut greeted = greet(patience).await;
        if patience == PAUSED && matches!(greeted, Err(ChannelError::TimedOut(_))) {
            resume().await?;
            greeted = greet(ADOPT).await;
        }
        let greeted = greeted?;
        save::runs(&dir)?;
        Ok(greeted)
    }

    fn instance(
        &self,
        id: &InstanceId,
        process: Option<Process>,
        greeted: Greeted,
        group: Group,
    ) -> Result<Raised, Cause> {
        let process = process.and_then(|process| process.open()).ok_or_else(gone)?;
        let dir = self.dirs.dir(id);
        let pids = group.clone();
        let explain = move || match pids.pids_refused() {
            // The sentry cannot go on when the host gives it no thread for a guest's.
            Ok(1..) => "it exceeded its limit of processes and threads".to_owned(),
            _ => launch::post_mortem(&dir),
        };
        let end = ending::watch(process, group, Arc::clone(&greeted.agent), explain);
        self.residents.enter(id, &greeted.agent);
        Ok(Raised {
            id: id.clone(),
            isolation: Isolation::Gvisor,
            greeted,
            end,
        })
    }
}

fn gone() -> Cause {
    Cause::new(Kind::State, "its process is gone")
}

/// The limits of the cgroup for a guest with these limits.
fn host_limits(resources: &Resources) -> Resources {
    Resources {
        pids: resources.pids.saturating_add(SENTRY_PIDS),
        ..*resources
    }
}

/// The same while it boots: a small CPU quota would be spent on starting the sentry.
fn boot_limits(resources: &Resources) -> Resources {
    Resources {
        cpu_millis: resources.cpu_millis.max(BOOT_CPU_MILLIS),
        ..host_limits(resources)
    }
}

#[async_trait]
impl Runtime for Gvisor {
    fn isolation(&self) -> Isolation {
        Isolation::Gvisor
    }

    async fn start(&self, spec: InstanceSpec) -> Result<Instance, Error> {
        self.raise(spec, Arc::new(Here)).await?.here()
    }

    async fn discover(&self) -> Result<Vec<InstanceId>, Error> {
        let listed = self.dirs.list(Isolation::Gvisor);
        let listed = listed.map_err(|error| Error::io("listing the instances", error))?;
        Ok(listed.into_iter().map(|(id, _)| id).collect())
    }

    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error> {
        self.take_over(id, Arc::new(Here)).await?.here()
    }

    async fn resize(&self, id: &InstanceId, resources: &Resources) -> Result<(), Error> {
        let record = self.dirs.read(id);
        let record = record.map_err(|error| Error::io(format!("reading the record of {id}"), error))?;
        let mut record = record.ok_or_else(|| Error::NotFound(id.clone()))?;
        record.resources = Resources {
            disk_bytes: record.resources.disk_bytes,
            disk_backing: record.resources.disk_backing,
            ..*resources
        };
        self.group(id)?
            .resize(&host_limits(&record.resources))
            .map_err(|error| Error::io(format!("resizing {id}"), error))?;
        self.dirs
            .update(&record)
            .map_err(|error| Error::io(format!("recording the size of {id}"), error))
    }

    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error> {
        let group = self.group(id)?;
        let usage = group.usage().map_err(|error| {
            if group.exists() {
                Error::io(format!("reading the usage of {id}"), error)
            } else {
                Error::NotFound(id.clone())
            }
        })?;
        let disk_bytes = self.dirs.read(id).ok().flatten().and_then(|record| {
            let on_disk = record.resources.disk_backing == DiskBacking::Disk;
            let process = record
                .process
                .filter(|process| on_disk && process.open().is_some())?;
            layer_bytes(process.pid, &self.dirs.dir(id).join("disk"))
        });
        Ok(Usage { disk_bytes, ..usage })
    }

    fn saves(&self) -> Saves {
        let found = self.saves.get_or_init(|| Saves {
            memory: true,
            runtime_version: version(&self.runsc).unwrap_or_default(),
            cpu_features: launch::cpu_features(&self.runsc),
        });
        found.clone()
    }

    async fn save(&self, id: &InstanceId, kind: SaveKind, sink: Arc<dyn SaveSink>) -> Result<(), Error> {
        self.save_instance(id, kind, sink).await
    }

    async fn thaw(&self, id: &InstanceId) -> Result<(), Error> {
        self.thaw_instance(id).await
    }

    async fn destroy(&self, id: &InstanceId) -> Result<(), Error> {
        self.residents.leave(id);
        let group = self.group(id)?;
        let fail = |error: CgroupError| Error::io(format!("destroying {id}"), error);
        group.kill_all().await.map_err(fail)?;
        group.remove().await.map_err(fail)?;
        uids::release(&self.config.state_dir, id)
            .map_err(|error| Error::io(format!("releasing the uids of {id}"), error))?;
        self.dirs
            .remove(id)
            .map_err(|error| Error::io(format!("removing the directory of {id}"), error))
    }
}

/// What the writable layer takes on disk: its file has no name, but the sentry has it open. A layer in memory is counted as
/// memory.
fn layer_bytes(sentry: u32, dir: &Path) -> Option<u64> {
    let open = std::fs::read_dir(format!("/proc/{sentry}/fd")).ok()?;
    let files = open.filter_map(Result::ok).filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|file| {
            file.starts_with(dir) && file.as_os_str().as_encoded_bytes().ends_with(b" (deleted)")
        })
    });
    // The same file may be open more than once.
    let sizes: std::collections::BTreeMap<u64, u64> = files
        .filter_map(|entry| std::fs::metadata(entry.path()).ok())
        .map(|metadata| (metadata.ino(), metadata.blocks() * 512))
        .collect();
    (!sizes.is_empty()).then(|| sizes.values().sum())
}

#[async_trait]
impl Raiser for Gvisor {
    async fn raise(&self, spec: InstanceSpec, greeter: Arc<dyn Greeter>) -> Result<Raised, Error> {
        let fail = |source| Error::Start {
            isolation: Isolation::Gvisor,
            source,
        };
        let record = launch::claim(&self.dirs, &spec)
            .doing(|| format!("making the directory of {}", spec.id))
            .map_err(fail)?;
        match self.boot(&spec, record, &greeter).await {
            Ok(raised) => Ok(raised),
            Err(cause) => {
                let uncleaned = self.destroy(&spec.id).await.err();
                let uncleaned = uncleaned.map(|error| Told::new(error.kind(), error.to_string()));
                Err(fail(cause.with("; and cleaning up failed: ", uncleaned)))
            }
        }
    }

    async fn take_over(&self, id: &InstanceId, greeter: Arc<dyn Greeter>) -> Result<Raised, Error> {
        let fail = |cause: Cause| Error::adopt(id, cause);
        let unfit = |why| fail(Cause::new(Kind::State, why));
        let record = match self.dirs.read(id).doing(|| "its record cannot be read") {
            Ok(Some(record)) if record.isolation == Isolation::Gvisor => record,
            Ok(None) if !self.dirs.dir(id).exists() => return Err(Error::NotFound(id.clone())),
            Ok(Some(_)) => return Err(unfit("it belongs to another tier")),
            Ok(None) => return Err(unfit("it has no record")),
            Err(cause) => return Err(fail(cause)),
        };
        // Before the greeting, which a dead instance would never answer.
        if record.process.as_ref().and_then(Process::open).is_none() {
            return Err(fail(gone()));
        }
        let group = self.group(id)?;
        let fifos = Fifos::in_dir(&self.dirs.dir(id));
        let greeted = self.greet_again(id, &fifos, &greeter).await.map_err(fail)?;
        // The server may have died while it was booting, or being saved.
        let limits = host_limits(&record.resources);
        if group.resize(&limits).is_err() {
            let extra = group.usage().map_or(0, |usage| usage.memory_bytes);
            save::tighten(&group, limits.memory_bytes, extra, self.residents.stillness(id)).map_err(fail)?;
        }
        self.instance(id, record.process, greeted, group).map_err(fail)
    }
}

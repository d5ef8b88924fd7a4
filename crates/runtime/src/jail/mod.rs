//! The `jail` tier: the host's own kernel, with as much of it taken away as it lets us. **Not a tenant boundary.**
//!
//! `atoll-jailer` builds each jail (its documentation draws the processes and the mounts); this module gives it what it
//! needs and looks after the result.
//!
//! ```text
//!   <state>/instances/<id>/
//!     instance.json    record; names the id range, and PID 1 of the jail once it runs
//!     in, out          the channel
//!     root/            stays empty: the jail's tree is put together on it, in a mount namespace of its own
//!     disk.ext4        the writable layer, if it is on disk
//!     agent.log        the agent's stderr
//!   <cgroup parent>/<id>    everything the jail is charged for, the writable layer in memory included
//! ```
//! What must hold:
//! - The cgroup, with its limits, exists before the jailer runs, and the jailer enters it first. Killing the cgroup's
//!   processes therefore ends an instance at any stage of its making.
//! - Nothing on the host refers to a jail but its processes, its cgroup and its directory. When the processes are gone the
//!   kernel drops mounts, loop device and namespaces; the rest is removed by `destroy`.

mod blank;
mod check;
mod extracted;
pub(crate) mod extras;
mod memory;
mod save;
mod shared;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_jailer::spec::{Ids, Lower, Spec, Upper};
use atoll_types::{DiskBacking, InstanceId, Isolation, Resources, Usage};

use crate::agent::{Greeted, Greeter, Here, Raised, Raiser};
use crate::cause::Doing;
use crate::cgroup::{CgroupError, Group};
use crate::channel::{AgentState, Connect, Fifos};
use crate::instance_dir::{InstanceDirs, Record};
use crate::process::Process;
use crate::{
    Cause, Config, Error, Instance, InstanceSpec, Kind, Runtime, SaveKind, SaveSink, Saves, Told, ending,
    uids,
};

pub use check::{Lacking, check, trial};

/// How long a jail may take to answer for the first time. It takes milliseconds; a machine may be busy.
const BOOT_WITHIN: Duration = Duration::from_secs(20);
const ADOPT_WITHIN: Duration = Duration::from_secs(10);
/// What lies about half-made for this long is nobody's any more.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Runs instances with `atoll-jailer`.
#[derive(Debug)]
pub struct Jail {
    config: Arc<Config>,
    dirs: InstanceDirs,
    privilege: Privilege,
    mounts: Arc<shared::SharedMounts>,
    blanks: Arc<blank::Blanks>,
    extracted: Arc<extracted::Extracted>,
}

/// What the server may do, and hence what its jails are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Privilege {
    /// Images are mounted, every jail has ids of its own.
    Root,
    /// Images are extracted; the jail's root is the user who runs the server, and there is no other user inside. The
    /// writable layer is in memory. Limits need a cgroup that was delegated to that user.
    Ordinary,
}

impl Privilege {
    fn own() -> Self {
        if rustix::process::geteuid().is_root() {
            Self::Root
        } else {
            Self::Ordinary
        }
    }
}

impl Jail {
    /// Whether jails work here is for [`check`] to say.
    pub fn new(config: Arc<Config>) -> Result<Self, Error> {
        let fail = |error| Error::io(format!("preparing {}", config.state_dir.display()), error);
        Ok(Self {
            dirs: InstanceDirs::open(&config.state_dir).map_err(fail)?,
            blanks: Arc::new(blank::Blanks::open(&config.state_dir).map_err(fail)?),
            extracted: Arc::new(extracted::Extracted::open(&config.state_dir).map_err(fail)?),
            privilege: Privilege::own(),
            mounts: Arc::default(),
            config,
        })
    }

    fn group(&self, id: &InstanceId) -> Result<Group, CgroupError> {
        Group::named(&self.config.cgroup_parent, id.as_str())
    }

    /// Everything after the directory exists; the caller cleans up after an error.
    async fn boot(
        &self,
        mut record: Record,
        dir: &Path,
        wanted: &InstanceSpec,
        greeter: &Arc<dyn Greeter>,
    ) -> Result<Raised, Cause> {
        let group = Group::create(&self.config.cgroup_parent, record.id.as_str(), &record.resources)?;
        let extras = extras::Extras::of(self, wanted).await?;
        let (mut spec, _mounts) = self.plan(&record, &wanted.image, dir, &group).await?;
        extras.add_to(&mut spec);
        let fifos = Fifos::in_dir(dir);
        let connect = Connect {
            agent: AgentState::Booting,
            within: extras.within(),
        };
        let connected = greeter.greet(&wanted.id, &fifos, connect);
        let started = run_jailer(&self.config.jailer_binary, &spec);
        tokio::pin!(connected, started);
        // The greeting waits in the pipe while the jail is built; the agent may answer before the jailer is gone.
        let (process, guest) = tokio::select! {
            process = &mut started => {
                let process = process?;
                let running = process.open().ok_or_else(ended_at_once)?;
                let guest = tokio::select! {
                    guest = connected => guest?,
                    _ = running.ended() => {
                        return Err(Cause::new(Kind::Agent, "the agent ended before it answered"));
                    }
                };
                (process, guest)
            }
            guest = &mut connected => {
                let guest = guest?;
                (started.await?, guest)
            }
        };
        record.process = Some(process.clone());
        self.dirs.update(&record).doing(|| "recording its process")?;
        instance(record.id, &process, guest, group)
    }

    /// The jailer's orders. The shared mounts have to be held until it is done.
    async fn plan(
        &self,
        record: &Record,
        files: &[PathBuf],
        dir: &Path,
        group: &Group,
    ) -> Result<(Spec, Vec<shared::SharedMount>), Cause> {
        let image = files.to_vec();
        let (lower, agent) = match self.privilege {
            Privilege::Root => {
                let (mounts, guest) = (Arc::clone(&self.mounts), vec![self.config.guest_image.clone()]);
                let both = blocking(move || Ok((mounts.get(&image), mounts.get(&guest)))).await;
                both.doing(|| "mounting its images")?
            }
            Privilege::Ordinary => (None, None),
        };
        let lower_spec = match (&lower, self.privilege) {
            (Some(mount), _) => Lower::Tree(mount.path()),
            (None, Privilege::Root) => Lower::Image(files.to_vec()),
            (None, Privilege::Ordinary) => {
                let (extracted, image) = (Arc::clone(&self.extracted), files.to_vec());
                let got = blocking(move || extracted.get(&image)).await;
                Lower::Directory(got.doing(|| "extracting its template")?)
            }
        };
        let upper = match record.resources.disk_backing {
            DiskBacking::Memory => Upper::Memory {
                bytes: record.resources.disk_bytes,
            },
            DiskBacking::Disk if self.privilege == Privilege::Ordinary => {
                let why = "a writable layer on disk needs a server run by root; ask for one in memory";
                return Err(Cause::new(Kind::Unsupported, why));
            }
            DiskBacking::Disk => {
                let (blanks, file, bytes) = (
                    Arc::clone(&self.blanks),
                    dir.join("disk.ext4"),
                    record.resources.disk_bytes,
                );
                let made = blocking(move || blanks.copy_to(&file, bytes).map(|()| file)).await;
                Upper::File(made.doing(|| "making its writable layer")?)
            }
        };
        let fifos = Fifos::in_dir(dir);
        let spec = Spec {
            stage: dir.join("root"),
            input: fifos.to_guest,
            output: fifos.from_guest,
            log: dir.join("agent.log"),
            agent: match &agent {
                Some(mount) => mount.path(),
                None => self.config.guest_binary.clone(),
            },
            hostname: record.hostname.clone(),
            lower: lower_spec,
            upper,
            ids: record.id_base.map_or(Ids::Own, |base| Ids::Range { base }),
            cgroups: group.procs_files().iter().map(|file| entrance(file)).collect(),
            shm_bytes: record.resources.memory_bytes / 2,
            layer: None,
            mounts: Vec::new(),
            network: None,
        };
        Ok((spec, lower.into_iter().chain(agent).collect()))
    }

    fn record(&self, id: &InstanceId) -> Result<Record, Error> {
        self.dirs
            .read(id)
            .map_err(|error| Error::io(format!("reading the record of {id}"), error))?
            .filter(|record| record.isolation == Isolation::Jail)
            .ok_or_else(|| Error::NotFound(id.clone()))
    }
}

impl Jail {
    /// A range of user ids of its own, where this user has any to give.
    fn take_ids(&self, record: &mut Record) -> std::io::Result<()> {
        if self.privilege == Privilege::Root {
            record.id_base = Some(uids::take(&self.config.state_dir, &record.id)?);
            self.dirs.update(record)?;
        }
        Ok(())
    }
}

#[async_trait]
impl Runtime for Jail {
    fn isolation(&self) -> Isolation {
        Isolation::Jail
    }

    async fn start(&self, spec: InstanceSpec) -> Result<Instance, Error> {
        self.raise(spec, Arc::new(Here)).await?.here()
    }

    async fn discover(&self) -> Result<Vec<InstanceId>, Error> {
        let found = self
            .dirs
            .list(Isolation::Jail)
            .map_err(|error| Error::io("listing instances", error))?;
        Ok(found.into_iter().map(|(id, _)| id).collect())
    }

    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error> {
        self.take_over(id, Arc::new(Here)).await?.here()
    }

    async fn resize(&self, id: &InstanceId, resources: &Resources) -> Result<(), Error> {
        let mut record = self.record(id)?;
        record.resources = Resources {
            disk_bytes: record.resources.disk_bytes,
            disk_backing: record.resources.disk_backing,
            ..*resources
        };
        let fail = |error: CgroupError| Error::io(format!("resizing {id}"), error);
        self.group(id)
            .and_then(|group| group.resize(&record.resources))
            .map_err(fail)?;
        self.dirs
            .update(&record)
            .map_err(|error| Error::io(format!("writing the record of {id}"), error))
    }

    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error> {
        let record = self.record(id)?;
        let fail = |error: CgroupError| Error::io(format!("reading the usage of {id}"), error);
        let usage = self.group(id).and_then(|group| group.usage()).map_err(fail)?;
        // An overlay answers for its writable layer.
        let disk_bytes = record
            .process
            .filter(|process| process.open().is_some())
            .and_then(|process| {
                let root = rustix::fs::statvfs(format!("/proc/{}/root", process.pid)).ok()?;
                Some((root.f_blocks - root.f_bfree) * root.f_frsize)
            });
        Ok(Usage { disk_bytes, ..usage })
    }

    fn saves(&self) -> Saves {
        // Files are files: they come back under any version and on any processor.
        Saves {
            memory: false,
            runtime_version: format!("jail {}", env!("CARGO_PKG_VERSION")),
            cpu_features: Vec::new(),
        }
    }

    async fn save(&self, id: &InstanceId, kind: SaveKind, sink: Arc<dyn SaveSink>) -> Result<(), Error> {
        self.save_layer(id, kind, sink).await
    }

    async fn thaw(&self, id: &InstanceId) -> Result<(), Error> {
        self.let_go_on(id)
    }

    async fn destroy(&self, id: &InstanceId) -> Result<(), Error> {
        let fail = |what: &str, error: io::Error| Error::io(format!("destroying {id}: {what}"), error);
        // A record that cannot be read names nobody; the cgroup still does.
        let record = self.dirs.read(id).ok().flatten();
        if record
            .as_ref()
            .is_some_and(|record| record.isolation != Isolation::Jail)
        {
            return Ok(());
        }
        let process = record
            .as_ref()
            .and_then(|record| record.process.as_ref())
            .and_then(Process::open);
        if let Some(process) = process {
            // Takes everything in its pid namespace along, at once; `kill_all` waits until it is gone.
            process
                .kill()
                .map_err(|error| fail("killing its first process", error))?;
        }
        let group = self
            .group(id)
            .map_err(|error| fail("finding its cgroup", error.into()))?;
        group
            .kill_all()
            .await
            .map_err(|error| fail("killing what is left", error.into()))?;
        group
            .remove()
            .await
            .map_err(|error| fail("removing its cgroup", error.into()))?;
        uids::release(&self.config.state_dir, id).map_err(|error| fail("releasing its ids", error))?;
        self.dirs
            .remove(id)
            .map_err(|error| fail("removing its directory", error))
    }
}

#[async_trait]
impl Raiser for Jail {
    async fn raise(&self, spec: InstanceSpec, greeter: Arc<dyn Greeter>) -> Result<Raised, Error> {
        let fail = |source| Error::Start {
            isolation: Isolation::Jail,
            source,
        };
        let mut record = Record {
            id: spec.id.clone(),
            isolation: Isolation::Jail,
            image: spec.image.first().cloned().unwrap_or_default(),
            hostname: spec.hostname.clone(),
            resources: spec.resources,
            id_base: None,
            process: None,
        };
        let dir = self
            .dirs
            .create(&record, |dir| {
                Fifos::create(dir)?;
                std::fs::create_dir(dir.join("root"))
            })
            .doing(|| "its directory could not be made")
            .map_err(fail)?;
        // After the directory, so that whatever a crash leaves is found by it.
        let booted = match self.take_ids(&mut record).doing(|| "its user ids") {
            Ok(()) => self.boot(record, &dir, &spec, &greeter).await,
            Err(cause) => Err(cause),
        };
        match booted {
            Ok(raised) => Ok(raised),
            Err(cause) => {
                let log = last_words(&dir.join("agent.log"));
                if let Err(error) = self.destroy(&spec.id).await {
                    tracing::error!(%error, id = %spec.id, "a failed start could not be cleaned up");
                }
                Err(fail(cause.with("; the agent said: ", log)))
            }
        }
    }

    async fn take_over(&self, id: &InstanceId, greeter: Arc<dyn Greeter>) -> Result<Raised, Error> {
        let fail = |cause: Cause| Error::adopt(id, cause);
        let record = self.record(id)?;
        let process = record
            .process
            .ok_or_else(|| fail(Cause::new(Kind::State, "its start was interrupted")))?;
        // Before the greeting, which a dead instance would never answer.
        process.open().ok_or_else(|| fail(gone()))?;
        let group = self.group(id).map_err(|error| fail(error.into()))?;
        // Whoever held it still to save it is gone, and it could not answer.
        group.thaw().map_err(|error| fail(error.into()))?;
        let fifos = Fifos::in_dir(&self.dirs.dir(id));
        let connect = Connect {
            agent: AgentState::Running,
            within: ADOPT_WITHIN,
        };
        let guest = greeter
            .greet(id, &fifos, connect)
            .await
            .map_err(|error| Error::adopt(id, error))?;
        instance(id.clone(), &process, guest, group).map_err(fail)
    }
}

/// A running jail and what looks after it until its end.
fn instance(id: InstanceId, process: &Process, greeted: Greeted, group: Group) -> Result<Raised, Cause> {
    let open = || process.open().ok_or_else(gone);
    memory::guard(id.clone(), open()?, group.clone());
    let end = ending::watch(open()?, group, Arc::clone(&greeted.agent), || {
        "the jail's first process is gone".into()
    });
    Ok(Raised {
        id,
        isolation: Isolation::Jail,
        greeted,
        end,
    })
}

fn gone() -> Cause {
    Cause::new(Kind::State, "its first process is gone")
}

fn ended_at_once() -> Cause {
    Cause::new(Kind::Agent, "the agent ended at once")
}

/// Starts the jailer and waits until it has done its work and gone.
async fn run_jailer(jailer: &Path, spec: &Spec) -> Result<Process, Cause> {
    // No `pre_exec`, no inherited descriptors: so the standard library uses `posix_spawn`, whose cost does not grow with
    // the server's memory.
    let output = tokio::process::Command::new(jailer)
        .args(spec.to_args())
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .await
        .doing(|| format!("{} could not be run", jailer.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let why = format!("{}{}", said.trim_end(), complaint.trim_end());
        let why = match why.as_str() {
            // By the kernel, most likely: what it restores counts as the jail's memory.
            "" => format!(
                "the jailer ended with {}; is the memory limit too low?",
                output.status
            ),
            _ => why,
        };
        // If it has found a disk full, then that of the jail.
        return Err(Told::by(Kind::Program, &why).into());
    }
    said.strip_prefix("pid ")
        .and_then(|pid| pid.trim_end().parse().ok())
        .and_then(Process::of)
        .ok_or_else(ended_at_once)
}

/// The file through which the jailer enters a cgroup cheaply; see [`Spec::cgroups`].
fn entrance(procs: &Path) -> PathBuf {
    let tasks = procs.with_file_name("tasks");
    if tasks.exists() { tasks } else { procs.to_owned() }
}

/// What the agent said before it died, for the error message.
fn last_words(log: &Path) -> Option<Told> {
    const MOST: usize = 2000;
    let bytes = std::fs::read(log).ok().filter(|bytes| !bytes.is_empty())?;
    let tail = &bytes[bytes.len().saturating_sub(MOST)..];
    Some(Told::by(Kind::Agent, String::from_utf8_lossy(tail).trim()))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}

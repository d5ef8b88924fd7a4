//! The gVisor tier: one sandbox process (`runsc`, systrap platform) per instance.
//!
//! ```text
//!   server ── fork ──> enters the cgroup, own mount namespace ── exec ──> runsc run -detach ──> sandbox process
//!     │                                                                      (gone in 50 ms)      agent is PID 1 in it
//!     └── Hello, at once; waits in the FIFO until the agent is up ──────────────────────────────────> Welcome
//! ```
//! The root is the template's EROFS image, shared by all, under a private writable layer in memory, or on disk (then
//! with one gofer process more). The agent comes from a second EROFS image at `/.atoll`. Nothing of the host's
//! filesystem is reachable: there is no bind mount, and the gofer of a disk-backed instance serves one empty directory.
//!
//! What must hold:
//! - `runsc exec` is never used: sessions that it opens would break a later checkpoint. Everything goes through the
//!   agent.
//! - Every process of an instance is in its cgroup from before `exec` on, so killing the cgroup kills the instance.
//! - Each instance has a range of host uids of its own (a user namespace; costs nothing measurable and no gofer). This
//!   rules out `--directfs=false`, which runs every sentry as `nobody` instead; without a gofer there are no host files
//!   that directfs could reach, and with one there is a single empty directory.
//! - The network is gVisor's own loopback and nothing else.
//! - The guest sees as much memory as it may use. `runsc --ignore-cgroups` takes that figure from `/proc/meminfo`, so it
//!   is shown one of ours; letting runsc manage the cgroup would cost 10 ms per controller and start.

mod bundle;
mod launch;

#[cfg(test)]
mod tests;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_types::{InstanceId, Isolation, Resources, Usage};

use crate::cgroup::Group;
use crate::channel::{Connect, Fifos, Guest};
use crate::instance_dir::{InstanceDirs, Record};
use crate::process::Process;
use crate::{Config, Error, Instance, InstanceSpec, Runtime, ending, uids};

pub use launch::version;

/// How long a boot may take; it takes 50 ms on an idle machine.
const BOOT: Duration = Duration::from_secs(60);
/// How long an adopted agent may take to answer.
const ADOPT: Duration = Duration::from_secs(15);
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
}

impl Gvisor {
    /// Whether `runsc` works is for [`crate::probe`] to find out.
    pub fn new(config: Arc<Config>, runsc: PathBuf) -> Result<Self, Error> {
        let dirs = InstanceDirs::open(&config.state_dir)
            .map_err(|error| Error::io(format!("opening {}", config.state_dir.display()), error))?;
        Ok(Self { config, dirs, runsc })
    }

    fn group(&self, id: &InstanceId) -> Result<Group, Error> {
        Group::named(&self.config.cgroup_parent, id.as_str())
            .map_err(|error| Error::io("finding the cgroup", std::io::Error::other(error)))
    }

    /// Everything after the directory exists; the caller cleans up after an error.
    async fn boot(&self, spec: &InstanceSpec, record: Record) -> Result<Instance, String> {
        let launched = {
            let (this, spec) = (self.clone(), spec.clone());
            let dir = this.dirs.dir(&spec.id);
            tokio::task::spawn_blocking(move || launch::launch(&this.config, dir, &this.runsc, &spec, record))
                .await
                .map_err(|error| error.to_string())??
        };
        let launch::Launched {
            dir,
            mut record,
            group,
            fifos,
            mut child,
        } = launched;
        let connect = Guest::connect(
            &fifos.to_guest,
            &fifos.from_guest,
            Connect {
                fresh: true,
                within: BOOT,
            },
        );
        let exit = async {
            match child.wait().await {
                Ok(status) if status.success() => std::future::pending().await,
                Ok(status) => format!("runsc ended with {status}: {}", launch::complaint(&dir)),
                Err(error) => format!("waiting for runsc: {error}"),
            }
        };
        let guest = tokio::select! {
            guest = connect => guest.map_err(|error| match launch::complaint(&dir) {
                complaint if complaint.is_empty() => error.to_string(),
                complaint => format!("{error}; {complaint}"),
            })?,
            failure = exit => return Err(failure),
        };
        // runsc may still be saying goodbye; tokio reaps it.
        drop(child);
        group
            .resize(&host_limits(&spec.resources))
            .map_err(|error| error.to_string())?;
        let pid = fs::read_to_string(dir.join(launch::PID_FILE))
            .map_err(|error| format!("reading the pid that runsc should have written: {error}"))?;
        let process = pid.trim().parse().ok().and_then(Process::of);
        record.process = process.clone();
        self.dirs
            .update(&record)
            .map_err(|error| format!("recording its process: {error}"))?;
        self.instance(&spec.id, process, guest, group)
    }

    fn instance(
        &self,
        id: &InstanceId,
        process: Option<Process>,
        guest: Guest,
        group: Group,
    ) -> Result<Instance, String> {
        let process = process
            .and_then(|process| process.open())
            .ok_or("its process is gone")?;
        let dir = self.dirs.dir(id);
        let pids = group.clone();
        let explain = move || match pids.pids_refused() {
            // The sentry cannot go on when the host gives it no thread for a guest's.
            Ok(1..) => "it exceeded its limit of processes and threads".to_owned(),
            _ => launch::post_mortem(&dir),
        };
        let end = ending::watch(process, group, guest.clone(), explain);
        Ok(Instance {
            id: id.clone(),
            isolation: Isolation::Gvisor,
            guest,
            end,
        })
    }
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
        let fail = |reason| Error::Start {
            isolation: Isolation::Gvisor,
            reason,
        };
        let record = launch::claim(&self.dirs, &spec)
            .map_err(|error| fail(format!("making the directory of {}: {error}", spec.id)))?;
        match self.boot(&spec, record).await {
            Ok(instance) => Ok(instance),
            Err(reason) => Err(fail(match self.destroy(&spec.id).await {
                Ok(()) => reason,
                Err(error) => format!("{reason}; and cleaning up failed: {error}"),
            })),
        }
    }

    async fn discover(&self) -> Result<Vec<InstanceId>, Error> {
        let listed = self.dirs.list(Isolation::Gvisor);
        let listed = listed.map_err(|error| Error::io("listing the instances", error))?;
        Ok(listed.into_iter().map(|(id, _)| id).collect())
    }

    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error> {
        let fail = |reason: String| Error::Adopt {
            id: id.clone(),
            reason,
        };
        let record = match self.dirs.read(id) {
            Ok(Some(record)) if record.isolation == Isolation::Gvisor => record,
            Ok(None) if !self.dirs.dir(id).exists() => return Err(Error::NotFound(id.clone())),
            Ok(Some(_)) => return Err(fail("it belongs to another tier".into())),
            Ok(None) => return Err(fail("it has no record".into())),
            Err(error) => return Err(fail(format!("its record cannot be read: {error}"))),
        };
        // Before the greeting, which a dead instance would never answer.
        if record.process.as_ref().and_then(Process::open).is_none() {
            return Err(fail("its process is gone".into()));
        }
        let group = self.group(id)?;
        let fifos = Fifos::in_dir(&self.dirs.dir(id));
        let how = Connect {
            fresh: false,
            within: ADOPT,
        };
        let guest = Guest::connect(&fifos.to_guest, &fifos.from_guest, how)
            .await
            .map_err(|error| fail(error.to_string()))?;
        // The server may have died while it was booting.
        group
            .resize(&host_limits(&record.resources))
            .map_err(|error| fail(error.to_string()))?;
        self.instance(id, record.process, guest, group).map_err(fail)
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
            .map_err(|error| Error::io(format!("resizing {id}"), std::io::Error::other(error)))?;
        self.dirs
            .update(&record)
            .map_err(|error| Error::io(format!("recording the size of {id}"), error))
    }

    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error> {
        let group = self.group(id)?;
        group.usage().map_err(|error| {
            if group.exists() {
                Error::io(format!("reading the usage of {id}"), std::io::Error::other(error))
            } else {
                Error::NotFound(id.clone())
            }
        })
    }

    async fn destroy(&self, id: &InstanceId) -> Result<(), Error> {
        let group = self.group(id)?;
        let fail = |error: crate::cgroup::CgroupError| {
            Error::io(format!("destroying {id}"), std::io::Error::other(error))
        };
        group.kill_all().await.map_err(fail)?;
        group.remove().await.map_err(fail)?;
        uids::release(&self.config.state_dir, id)
            .map_err(|error| Error::io(format!("releasing the uids of {id}"), error))?;
        self.dirs
            .remove(id)
            .map_err(|error| Error::io(format!("removing the directory of {id}"), error))
    }
}

//! Instances of this machine: booted, taken over, watched, destroyed.
//!
//! What must hold: an instance is in the list from when its agent has answered until somebody hangs up or destroys it; and
//! nothing leaves one that is being destroyed.

use std::time::Duration;

use async_trait::async_trait;
use atoll_lifecycle::{InstanceFate, Liveness};
use atoll_runtime::{Error, Instance, InstanceEnd, InstanceSpec, Mount, MountSource, Restore};
use atoll_types::{
    Code, DiskBacking, Fault, InstanceId, Isolation, ProjectId, Resources, SandboxId, Usage, VolumeMount,
    format_bytes,
};

use crate::faults::{from_runtime, server_full};
use crate::node::{Cables as _, Instances};
use crate::words::{Admission, Boot, Claimed, Event, Wanted};
use crate::{LocalNode, state_files};

#[async_trait]
impl Instances for LocalNode {
    async fn claim(&self, wanted: &Wanted) -> Option<Claimed> {
        self.claim_pooled(wanted)
    }

    async fn boot(&self, boot: Boot) -> Result<(), Fault> {
        let restore = match boot.origin {
            Some(origin) => Some(Restore {
                kind: origin.kind,
                source: self.state(&origin.state).await?,
            }),
            None => None,
        };
        let spec = InstanceSpec {
            id: boot.instance,
            image: self.image(boot.isolation, &boot.image)?,
            resources: boot.resources,
            hostname: boot.hostname,
            restore,
            mounts: self.mounts(boot.volumes).await?,
            network: None,
        };
        self.start_instance(boot.isolation, spec, boot.project, boot.admission)
            .await
            .map(drop)
    }

    async fn discover(&self, isolation: Isolation) -> Result<Vec<InstanceId>, Fault> {
        let found = self.runtime(isolation)?.discover().await;
        let mut found = found.map_err(|e| from_runtime(&e))?;
        found.retain(|id| !self.is_own(id));
        Ok(found)
    }

    async fn adopt(&self, isolation: Isolation, instance: &InstanceId) -> Liveness {
        let adopted = match self.runtime(isolation) {
            Ok(runtime) => runtime.adopt(instance).await,
            Err(fault) => {
                tracing::warn!(%instance, %fault, "a running instance could not be taken over");
                return Liveness::Gone;
            }
        };
        match adopted {
            Ok(adopted) => {
                self.instances().insert(instance.clone(), adopted);
                Liveness::Alive
            }
            Err(error) => {
                tracing::warn!(%instance, %error, "a running instance could not be taken over");
                match error {
                    Error::Generation { host, guest, .. } => Liveness::Incompatible {
                        agent: guest,
                        server: host,
                    },
                    _ => Liveness::Gone,
                }
            }
        }
    }

    fn attend(&self, sandbox: &SandboxId, instance: &InstanceId) {
        let Some(mut end) = self.instances().get(instance).map(|known| known.end.clone()) else {
            return;
        };
        let (sandbox, instance) = (sandbox.clone(), instance.clone());
        let (events, stop) = (self.inner.events.clone(), self.inner.stop.clone());
        self.inner.tasks.spawn(async move {
            let told = async {
                let fate = match end.wait_for(Option::is_some).await.as_deref() {
                    Ok(Some(InstanceEnd::OutOfMemory)) => InstanceFate::OutOfMemory,
                    Ok(Some(InstanceEnd::Died(why))) => InstanceFate::Died(why.clone()),
                    _ => return,
                };
                let ended = Event::Ended {
                    sandbox,
                    instance,
                    fate,
                };
                // Nobody hears it when all is over.
                let _ = events.send(ended).await;
            };
            tokio::select! {
                biased;
                () = told => {}
                () = stop.cancelled() => {}
            }
        });
    }

    async fn destroy(&self, isolation: Isolation, instance: &InstanceId) {
        self.inner.boots.give_up(instance);
        self.dismiss(instance);
        self.instances().remove(instance);
        let mut pause = Duration::from_millis(50);
        loop {
            let destroyed = match self.runtime(isolation) {
                Ok(runtime) => runtime.destroy(instance).await.map_err(|error| error.to_string()),
                Err(fault) => Err(fault.to_string()),
            };
            let Err(error) = destroyed else {
                self.unplug(instance).await;
                self.held().remove(instance);
                return;
            };
            tracing::error!(%instance, error, "an instance could not be destroyed; trying again");
            tokio::select! {
                biased;
                () = tokio::time::sleep(pause) => {}
                () = self.inner.stop.cancelled() => return,
            }
            pause = (pause * 2).min(Duration::from_secs(30));
        }
    }

    async fn resize(
        &self,
        isolation: Isolation,
        instance: &InstanceId,
        resources: &Resources,
    ) -> Result<(), Fault> {
        let set = self.runtime(isolation)?.resize(instance, resources).await;
        set.map_err(|e| from_runtime(&e))
    }

    async fn usage(&self, isolation: Isolation, instance: &InstanceId) -> Result<Usage, Fault> {
        let usage = self.runtime(isolation)?.usage(instance).await;
        usage.map_err(|e| from_runtime(&e))
    }
}

impl LocalNode {
    /// Layers on disk grow as they are written, so nobody knows what those that exist will take. What is left when little is left
    /// is for them and for the server: nobody new begins to write.
    fn check_room(&self, resources: &Resources) -> Result<(), Fault> {
        let needed = self.settings().min_free_disk;
        if resources.disk_backing == DiskBacking::Memory || needed == 0 {
            return Ok(());
        }
        let disk = rustix::fs::statvfs(&self.settings().data_dir)
            .map_err(|error| Fault::internal(format!("looking at the server's disk: {error}")))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free >= needed {
            return Ok(());
        }
        Err(server_full(format!(
            "{} are free on the server's disk, and nothing is started with less than {} (`min_free_disk`)",
            format_bytes(free),
            format_bytes(needed)
        )))
    }

    /// Boots an instance, when it is its turn, with a cable that leads where `admission` says; without one, nowhere.
    pub(crate) async fn start_instance(
        &self,
        isolation: Isolation,
        mut spec: InstanceSpec,
        whose: Option<ProjectId>,
        admission: Option<Admission>,
    ) -> Result<Instance, Fault> {
        let turn = self.inner.boots.take(whose, &spec.id).await;
        let _turn = turn.ok_or_else(|| {
            let message = "the sandbox ended before it was its turn to start";
            Fault::new(Code::SandboxEnded, message)
        })?;
        let runtime = self.runtime(isolation)?;
        self.check_room(&spec.resources)?;
        let source = spec
            .restore
            .as_ref()
            .map(|restore| std::sync::Arc::clone(&restore.source));
        let cable = self.plug_in(&spec.id, admission).await?;
        spec.network = cable.as_ref().map(|cable| cable.network.clone());
        let id = spec.id.clone();
        let error = match runtime.start(spec).await {
            Ok(instance) => {
                self.instances().insert(id, instance.clone());
                return Ok(instance);
            }
            Err(error) => error,
        };
        self.unplug(&id).await;
        let unreadable = match source {
            Some(source) => state_files::why_unreadable(&*source).await,
            None => None,
        };
        Err(unreadable.unwrap_or_else(|| from_runtime(&error)))
    }

    /// What an instance is to see of volumes.
    async fn mounts(&self, volumes: Vec<VolumeMount>) -> Result<Vec<Mount>, Fault> {
        let mut mounts = Vec::with_capacity(volumes.len());
        for VolumeMount {
            volume,
            path,
            read_only,
        } in volumes
        {
            // It is there already; this says where.
            let attached = self.on_volumes(move |volumes| volumes.attach(&volume)).await?;
            let (source, sealed) = match attached.kind {
                atoll_volumes::Kind::Disk => (MountSource::Directory(attached.path), false),
                atoll_volumes::Kind::Sealed => (MountSource::Erofs(attached.path), true),
            };
            mounts.push(Mount {
                source,
                path,
                read_only: read_only || sealed,
            });
        }
        Ok(mounts)
    }

    /// Whether an instance is here on purpose although no row names it.
    fn is_own(&self, id: &InstanceId) -> bool {
        let held = self.held();
        held.contains(id) || self.inner.pools.is_pooled(id)
    }

    /// Destroys an instance that nobody got to see.
    pub(crate) fn discard(&self, isolation: Isolation, id: InstanceId) {
        let node = self.clone();
        self.inner
            .tasks
            .spawn(async move { node.destroy(isolation, &id).await });
    }
}

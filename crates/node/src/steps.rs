//! Lends sandboxes to Dockerfile builds: one instance per `RUN`, without a row, held while it lives.
//!
//! What must hold: whatever happens to the build, its instance is destroyed. Dropping the sandbox does it; a server that
//! dies leaves an instance that no row names, which recovery destroys. A step's code may have taken over its agent, so how long
//! it takes and how much comes out of it is measured here.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use atoll_guest_protocol::{CommandState, Configure, Exec, FailureKind, Message, Network, Request};
use atoll_image::{BuildSandbox, Exported, Output, RunCommand, StepRunner};
use atoll_runtime::channel::{ChannelError, Incoming};
use atoll_runtime::{Instance, InstanceSpec};
use atoll_turns::Turn;
use atoll_types::{CommandId, InstanceId, Isolation, ProjectId, SandboxSpec};
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, timeout_at};

use crate::local::Held;
use crate::node::Instances as _;
use crate::stand_in::StandIn;
use crate::{LocalNode, entropy};

/// The longest that one step may take. Its agent sees to that; an agent that the step has taken over gets `GRACE` more.
const STEP_LIMIT_MILLIS: u64 = 2 * 60 * 60 * 1000;
const GRACE: Duration = Duration::from_secs(60);
/// The longest that the result of a step may take to come out, and the most of it.
const EXPORT_WITHIN: Duration = Duration::from_secs(30 * 60);
const MOST_EXPORTED: u64 = 32 << 30;

#[derive(Debug)]
pub(crate) struct Steps {
    node: LocalNode,
    /// As whom they are known at the way out.
    stand_in: StandIn,
    /// Who builds.
    project: ProjectId,
    /// Whether one of them could not run because its user is not there.
    user_is_missing: Arc<AtomicBool>,
}

impl Steps {
    pub(crate) fn new(node: &LocalNode, stand_in: StandIn, project: ProjectId) -> Self {
        Self {
            node: node.clone(),
            stand_in,
            project,
            user_is_missing: Arc::default(),
        }
    }

    /// Whether one could not be run as whom the Dockerfile says.
    pub(crate) fn user_is_missing(&self) -> bool {
        self.user_is_missing.load(Ordering::Relaxed)
    }

    /// What they tried to reach and were refused.
    pub(crate) fn refused(&self) -> Vec<String> {
        self.stand_in.refused()
    }
}

#[async_trait]
impl StepRunner for Steps {
    async fn start(&self, image: &Path) -> Result<Box<dyn BuildSandbox>, String> {
        let node = &self.node;
        let spec = SandboxSpec {
            template: "build".into(),
            resources: node.settings().build_resources,
            timeout_millis: Some(node.settings().limits.min_timeout_millis),
            ..SandboxSpec::default()
        };
        let admitted = atoll_lifecycle::admit(spec, &node.settings().limits, &node.tiers())
            .map_err(|fault| fault.to_string())?;
        // A build has one at a time, and counts as one sandbox of its project. A step may take hours, so a project waits for
        // its own alone.
        let turn = node.inner.builds.take(&self.project).await;
        let id: InstanceId = entropy::id();
        let held = node.hold(id.clone());
        let spec = InstanceSpec {
            id,
            image: image.to_owned(),
            resources: admitted.spec.resources,
            hostname: "build".into(),
            restore: None,
            mounts: Vec::new(),
            network: None,
        };
        let admission = self.stand_in.admission().map_err(|fault| fault.to_string())?;
        let network = node
            .guest_network(admission.as_ref())
            .map_err(|fault| fault.to_string())?;
        let whose = Some(self.project.clone());
        let instance = node
            .start_instance(admitted.isolation, spec, whose, admission)
            .await
            .map_err(|fault| fault.to_string())?;
        let step = Step {
            node: node.clone(),
            isolation: admitted.isolation,
            instance: Some((instance, held)),
            user_is_missing: Arc::clone(&self.user_is_missing),
            _turn: turn,
        };
        let configure = Request::Configure(Configure {
            hostname: "build".into(),
            user: "root".into(),
            workdir: "/".into(),
            now_millis: u64::try_from(crate::wall_clock().0).unwrap_or(0),
            network,
            ..Configure::default()
        });
        step.instance()?
            .guest
            .call(&configure)
            .await
            .map_err(|error| error.to_string())?;
        Ok(Box::new(step))
    }
}

struct Step {
    node: LocalNode,
    isolation: Isolation,
    instance: Option<(Instance, Held)>,
    user_is_missing: Arc<AtomicBool>,
    _turn: Turn,
}

impl Step {
    fn instance(&self) -> Result<&Instance, String> {
        self.instance
            .as_ref()
            .map(|(instance, _)| instance)
            .ok_or_else(|| "the build sandbox is gone".into())
    }
}

#[async_trait]
impl BuildSandbox for Step {
    async fn run(&mut self, command: RunCommand, output: &Output<'_>) -> Result<i32, String> {
        let request = Request::Exec(Exec {
            command: entropy::id::<CommandId>().to_string(),
            argv: command.argv.into_iter().map(String::into_bytes).collect(),
            env: command.env.into_iter().collect(),
            cwd: Some(command.workdir.into_bytes()),
            user: Some(command.user),
            pty: None,
            stdin: false,
            timeout_millis: Some(STEP_LIMIT_MILLIS),
            log_bytes: 64 * 1024,
            wait_for_reader: true,
            kill_on_close: true,
        });
        let failed = |error: ChannelError| {
            if let ChannelError::Failed(failure) = &error
                && failure.kind == FailureKind::NoSuchUser
            {
                self.user_is_missing.store(true, Ordering::Relaxed);
            }
            error.to_string()
        };
        let mut stream = self.instance()?.guest.open(&request).await.map_err(failed)?;
        let too_long = || "the step took longer than two hours and was stopped".to_owned();
        let until = Instant::now() + Duration::from_millis(STEP_LIMIT_MILLIS) + GRACE;
        while let Some(incoming) = timeout_at(until, stream.next()).await.map_err(|_| too_long())? {
            match incoming.map_err(failed)? {
                Incoming::Data { bytes, .. } => output(&bytes),
                Incoming::Message(Message::Exited(CommandState::Exited { code })) => return Ok(code),
                Incoming::Message(Message::Exited(CommandState::Signaled { signal })) => {
                    return Ok(signal.saturating_add(128));
                }
                Incoming::Message(Message::Exited(CommandState::TimedOut)) => return Err(too_long()),
                Incoming::Message(_) => {}
            }
        }
        Err("the build sandbox ended before the step did".into())
    }

    async fn export(&mut self, archive: &Path) -> Result<Exported, String> {
        // Whom it trusts is the step's own affair, and nothing to hand down.
        let nobody = Request::Network(Network::default());
        let forgotten = self.instance()?.guest.call(&nobody).await;
        forgotten.map_err(|error| error.to_string())?;
        let request = Request::TarOut {
            path: b"/".to_vec(),
            user: None,
            one_file_system: true,
        };
        let mut stream = self
            .instance()?
            .guest
            .open(&request)
            .await
            .map_err(|error| error.to_string())?;
        let failed = |error: std::io::Error| format!("writing the step's filesystem: {error}");
        let mut file = tokio::fs::File::create_new(archive).await.map_err(failed)?;
        let mut room = room_beside(archive).map_err(|error| failed(error.into()))?;
        let until = Instant::now() + EXPORT_WITHIN;
        let slow = |_| "the step's filesystem did not come out of the build sandbox in time".to_owned();
        while let Some(incoming) = timeout_at(until, stream.next()).await.map_err(slow)? {
            if let Incoming::Data { bytes, .. } = incoming.map_err(|error| error.to_string())? {
                room = room.checked_sub(bytes.len() as u64).ok_or(
                    "the step left more than a template may hold, or than this machine has room for",
                )?;
                file.write_all(&bytes).await.map_err(failed)?;
            }
        }
        file.flush().await.map_err(failed)?;
        Ok(Exported::Whole)
    }

    async fn destroy(mut self: Box<Self>) {
        if let Some((instance, _held)) = self.instance.take() {
            self.node.destroy(self.isolation, &instance.id).await;
        }
    }
}

/// How much may be written there: never more than half of what is free, which is not the build's alone.
fn room_beside(archive: &Path) -> rustix::io::Result<u64> {
    let disk = rustix::fs::statvfs(archive)?;
    Ok(MOST_EXPORTED.min(disk.f_bavail.saturating_mul(disk.f_frsize) / 2))
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some((instance, held)) = self.instance.take() {
            let (node, isolation) = (self.node.clone(), self.isolation);
            self.node.inner.tasks.spawn(async move {
                node.destroy(isolation, &instance.id).await;
                drop(held);
            });
        }
    }
}

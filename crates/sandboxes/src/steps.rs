//! Lends sandboxes to Dockerfile builds: one instance per `RUN`, without a row, held while it lives.
//!
//! What must hold: whatever happens to the build, its instance is destroyed. Dropping the sandbox does it; a server that
//! dies leaves an instance that no row names, which recovery destroys.

use std::path::Path;

use async_trait::async_trait;
use atoll_guest_protocol::{CommandState, Configure, Exec, Message, Network, Request};
use atoll_image::{BuildSandbox, Exported, Output, RunCommand, StepRunner};
use atoll_runtime::channel::Incoming;
use atoll_runtime::{Instance, InstanceSpec};
use atoll_types::{CommandId, InstanceId, Isolation, SandboxSpec};
use tokio::io::AsyncWriteExt as _;

use crate::create::Held;
use crate::network::StandIn;
use crate::{Sandboxes, entropy};

/// The longest that one step may take.
const STEP_LIMIT_MILLIS: u64 = 2 * 60 * 60 * 1000;

#[derive(Debug)]
pub(crate) struct Steps {
    service: Sandboxes,
    /// As whom they are known at the way out.
    stand_in: StandIn,
}

impl Steps {
    pub(crate) fn new(service: &Sandboxes, stand_in: StandIn) -> Self {
        Self {
            service: service.clone(),
            stand_in,
        }
    }

    /// What they tried to reach and were refused.
    pub(crate) fn refused(&self) -> Vec<String> {
        self.stand_in.refused()
    }
}

#[async_trait]
impl StepRunner for Steps {
    async fn start(&self, image: &Path) -> Result<Box<dyn BuildSandbox>, String> {
        let service = &self.service;
        let spec = SandboxSpec {
            template: "build".into(),
            resources: service.settings().build_resources,
            timeout_millis: Some(service.settings().limits.min_timeout_millis),
            ..SandboxSpec::default()
        };
        let admitted = atoll_lifecycle::admit(spec, &service.settings().limits, &service.tiers())
            .map_err(|fault| fault.to_string())?;
        let id: InstanceId = entropy::id();
        let held = service.hold(id.clone());
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
        let network = service
            .guest_network(admission.as_ref())
            .map_err(|fault| fault.to_string())?;
        let instance = service
            .boot(admitted.isolation, spec, admission)
            .await
            .map_err(|fault| fault.to_string())?;
        let step = Step {
            service: service.clone(),
            isolation: admitted.isolation,
            instance: Some((instance, held)),
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
    service: Sandboxes,
    isolation: Isolation,
    instance: Option<(Instance, Held)>,
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
        let mut stream = self
            .instance()?
            .guest
            .open(&request)
            .await
            .map_err(|error| error.to_string())?;
        while let Some(incoming) = stream.next().await {
            match incoming.map_err(|error| error.to_string())? {
                Incoming::Data { bytes, .. } => output(&bytes),
                Incoming::Message(Message::Exited(CommandState::Exited { code })) => return Ok(code),
                Incoming::Message(Message::Exited(CommandState::Signaled { signal })) => {
                    return Ok(128 + signal);
                }
                Incoming::Message(Message::Exited(CommandState::TimedOut)) => {
                    return Err("the step took longer than two hours and was stopped".into());
                }
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
        while let Some(incoming) = stream.next().await {
            if let Incoming::Data { bytes, .. } = incoming.map_err(|error| error.to_string())? {
                file.write_all(&bytes).await.map_err(failed)?;
            }
        }
        file.flush().await.map_err(failed)?;
        Ok(Exported::Whole)
    }

    async fn destroy(mut self: Box<Self>) {
        if let Some((instance, _held)) = self.instance.take() {
            self.service.destroy_surely(self.isolation, &instance.id).await;
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some((instance, held)) = self.instance.take() {
            let (service, isolation) = (self.service.clone(), self.isolation);
            self.service.inner.tasks.spawn(async move {
                service.destroy_surely(isolation, &instance.id).await;
                drop(held);
            });
        }
    }
}

//! Lends sandboxes to Dockerfile builds: one instance per `RUN`, without a row, held while it lives.
//!
//! What must hold: whatever happens to the build, its instance is destroyed. Dropping the sandbox does it; a server that
//! dies leaves an instance that no row names, which recovery destroys. A step's code may have taken over its agent, so how long
//! it takes and how much comes out of it is measured here.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use atoll_guest_protocol::{CommandState, Configure, Exec, FailureKind, Message, Network, Request};
use atoll_image::{BuildSandbox, Output, Room, RunCommand, StepRunner, Whiteouts};
use atoll_runtime::channel::{ChannelError, Incoming};
use atoll_runtime::{Instance, InstanceSpec, SaveKind, SaveSink};
use atoll_turns::Turn;
use atoll_types::{CommandId, InstanceId, Isolation, ProjectId, SandboxSpec};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
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
/// How much of it is taken at a time.
const PIECE: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct Steps {
    node: LocalNode,
    /// As whom they are known at the way out.
    stand_in: StandIn,
    /// Who builds.
    project: ProjectId,
    /// What may still be stored for it.
    room: Option<Arc<dyn Room>>,
    /// Whether one of them could not run because its user is not there.
    user_is_missing: Arc<AtomicBool>,
}

impl Steps {
    pub(crate) fn new(
        node: &LocalNode,
        stand_in: StandIn,
        project: ProjectId,
        room: Option<Arc<dyn Room>>,
    ) -> Self {
        Self {
            node: node.clone(),
            stand_in,
            project,
            room,
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
    async fn start(&self, image: &str) -> Result<Box<dyn BuildSandbox>, String> {
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
            image: node
                .image(admitted.isolation, image)
                .map_err(|fault| fault.to_string())?,
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
            room: self.room.clone(),
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
    room: Option<Arc<dyn Room>>,
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

    async fn export(&mut self, archive: &Path) -> Result<Whiteouts, String> {
        // Whom it trusts is the step's own affair, and nothing to hand down.
        let nobody = Request::Network(Network::default());
        let forgotten = self.instance()?.guest.call(&nobody).await;
        forgotten.map_err(|error| error.to_string())?;
        let runtime = self
            .node
            .runtime(self.isolation)
            .map_err(|fault| fault.to_string())?;
        let id = self.instance()?.id.clone();
        let most = self.room.as_ref().map_or(u64::MAX, |room| room.left());
        // An archive has more than what is in it; what is a little too much is refused in the words of the quota.
        let most = most.saturating_add(most / 8).saturating_add(64 << 20);
        let kept_free = self.node.settings().min_free_disk;
        let archive = Archive::create(archive, most, kept_free).map_err(|error| written(&error))?;
        let sink = Arc::new(archive);
        let exported = async {
            let saved = runtime.save(&id, SaveKind::Filesystem, Arc::clone(&sink) as Arc<dyn SaveSink>);
            let saved = saved.await;
            // Why it could not be written is better known here.
            sink.finish().await.map_err(|error| written(&error))?;
            saved.map_err(|error| error.to_string())
        };
        match timeout_at(Instant::now() + EXPORT_WITHIN, exported).await {
            Ok(exported) => exported.map(|()| Whiteouts::Overlay),
            Err(_) => Err("what the step changed did not come out of the build sandbox in time".into()),
        }
    }

    async fn destroy(mut self: Box<Self>) {
        if let Some((instance, _held)) = self.instance.take() {
            self.node.destroy(self.isolation, &instance.id).await;
        }
    }
}

fn written(error: &io::Error) -> String {
    format!("writing what the step changed: {error}")
}

/// The one stream of what a step changed, into a file, as far as there is room for it. It comes through a pipe, so that
/// whoever writes it, who may be the step's, is told when it is too much.
#[derive(Debug)]
struct Archive {
    path: PathBuf,
    file: File,
    most: u64,
    kept_free: u64,
    copying: Mutex<Option<JoinHandle<io::Result<()>>>>,
}

impl Archive {
    fn create(path: &Path, most: u64, kept_free: u64) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: File::create_new(path)?,
            most: most.min(MOST_EXPORTED),
            kept_free,
            copying: Mutex::default(),
        })
    }

    /// Waits until all that was written is in the file.
    async fn finish(&self) -> io::Result<()> {
        let copying = self.copying.lock().take();
        match copying {
            Some(copying) => copying.await.map_err(io::Error::other)?,
            None => Ok(()),
        }
    }
}

impl SaveSink for Archive {
    fn stream(&self, _name: &str) -> io::Result<OwnedFd> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut to = self.file.try_clone()?;
        let (path, most, kept_free) = (self.path.clone(), self.most, self.kept_free);
        let copying = tokio::task::spawn_blocking(move || {
            let mut from = File::from(read);
            let mut done = 0;
            loop {
                // Others write, too, so this is asked again and again.
                if free_beside(&path)? < kept_free.saturating_add(2 * PIECE) {
                    return Err(io::Error::other("this machine has no room for it"));
                }
                match io::copy(&mut (&mut from).take(PIECE), &mut to)? {
                    0 => return Ok(()),
                    copied => done += copied,
                }
                if done > most {
                    return Err(io::Error::other(
                        "it is more than a template may hold, or than its project may store",
                    ));
                }
            }
        });
        *self.copying.lock() = Some(copying);
        Ok(write)
    }

    fn scratch(&self) -> io::Result<File> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    fn part(&self, _name: &str, _whole: File) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }
}

fn free_beside(archive: &Path) -> rustix::io::Result<u64> {
    let disk = rustix::fs::statvfs(archive)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
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

//! A runtime without walls and without processes, for tests of those above it: what becomes of each step is scripted.
//!
//! ```text
//!   Script ── Answer: after how long, and how ──> Scripted: start, adopt, save, thaw, destroy
//!                                            └──> the agent of each instance: configure, exec
//! ```
//! What must hold:
//! - It keeps the promises of [`Runtime`]: an instance that was begun is found again, a failed start leaves nothing, a
//!   failed save runs on, a saved one stays still, destroying succeeds when there is nothing.
//! - Instances outlive the server, and whatever tokio runtime it was in: they are plain data.
//! - It notes what no caller may do ([`Scripted::misuses`]), so that a test of those above sees it.
//! - Same script, same calls, same answers: no clock but tokio's, no randomness, no threads.

mod agent;

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read as _, Seek as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_types::{InstanceId, Isolation, Resources, Usage};
use tokio::sync::Notify;

use crate::cause::Doing;
use crate::channel::line::Line;
use crate::channel::{AgentState, Connect, Guest};
use crate::{Cause, Error, Instance, InstanceEnd, InstanceSpec, Kind, Runtime, SaveKind, SaveSink, Saves};
use agent::{Body, Memory};

/// What is about to be done to an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    Start,
    Restore,
    Adopt,
    Save,
    Thaw,
    Destroy,
    /// By its agent.
    Configure,
    /// By its agent.
    Exec,
}

/// What becomes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub after: Duration,
    pub how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Works,
    /// As the runtime's contract says that this step fails.
    Fails,
    /// The same, because the host's disk is full.
    Full,
    /// Nothing happens until [`Scripted::release`]; then it works.
    Hangs,
    /// The instance is gone instead.
    Dies,
}

impl How {
    /// Why a step fails.
    fn cause(self) -> Cause {
        let kind = match self {
            Self::Full => Kind::HostFull,
            Self::Works | Self::Fails | Self::Hangs | Self::Dies => Kind::Program,
        };
        Cause::new(kind, "as the script says")
    }
}

impl Answer {
    pub const AT_ONCE: Self = Self {
        after: Duration::ZERO,
        how: How::Works,
    };
}

/// Decides what becomes of each step.
pub trait Script: Send {
    fn answer(&mut self, step: Step, instance: &InstanceId) -> Answer;
}

impl<F: FnMut(Step, &InstanceId) -> Answer + Send> Script for F {
    fn answer(&mut self, step: Step, instance: &InstanceId) -> Answer {
        self(step, instance)
    }
}

/// An instance as whoever stands beside the machine sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Its start has come to an end.
    pub whole: bool,
    pub alive: bool,
    /// Held still by a save.
    pub still: bool,
    /// As it was told.
    pub hostname: Option<String>,
    /// The commands that were run in it, or in what it was restored from, in order.
    pub ran: Vec<String>,
}

/// The machine. Clones are the same one.
#[derive(Clone)]
pub struct Scripted {
    isolation: Isolation,
    keeps_memory: bool,
    machine: Arc<Machine>,
}

struct Machine {
    script: Mutex<Box<dyn Script>>,
    instances: Mutex<BTreeMap<InstanceId, Arc<Body>>>,
    misuses: Mutex<Vec<String>>,
    /// Lets those go on who hang, in the order in which they came.
    released: Notify,
}

impl Machine {
    fn answer(&self, step: Step, id: &InstanceId) -> Answer {
        self.script.lock().answer(step, id)
    }

    /// Lets the time of an answer pass, and says how it ends.
    async fn wait(&self, answer: Answer) -> How {
        if !answer.after.is_zero() {
            tokio::time::sleep(answer.after).await;
        }
        if answer.how != How::Hangs {
            return answer.how;
        }
        self.released.notified().await;
        How::Works
    }

    fn misuse(&self, what: String) {
        self.misuses.lock().push(what);
    }

    fn find(&self, id: &InstanceId) -> Option<Arc<Body>> {
        self.instances.lock().get(id).cloned()
    }
}

impl Scripted {
    pub fn new(isolation: Isolation, keeps_memory: bool, script: impl Script + 'static) -> Self {
        Self {
            isolation,
            keeps_memory,
            machine: Arc::new(Machine {
                script: Mutex::new(Box::new(script)),
                instances: Mutex::default(),
                misuses: Mutex::default(),
                released: Notify::new(),
            }),
        }
    }

    /// From now on.
    pub fn follow(&self, script: impl Script + 'static) {
        *self.machine.script.lock() = Box::new(script);
    }

    /// Everything on this machine, whole or half-made.
    pub fn instances(&self) -> BTreeMap<InstanceId, Look> {
        let all = self.machine.instances.lock();
        all.iter().map(|(id, body)| (id.clone(), body.look())).collect()
    }

    /// What nobody may do and somebody did.
    pub fn misuses(&self) -> Vec<String> {
        self.machine.misuses.lock().clone()
    }

    /// Lets all go on that hang.
    pub fn release(&self) {
        self.machine.released.notify_waiters();
    }

    /// What runs in an instance takes so much CPU time, this moment.
    pub fn spend(&self, id: &InstanceId, micros: u64) {
        if let Some(body) = self.machine.find(id) {
            body.spend(micros);
        }
    }

    /// Ends an instance from outside, as the host sees it.
    pub fn end(&self, id: &InstanceId, how: InstanceEnd) {
        if let Some(body) = self.machine.find(id) {
            body.end(how);
        }
    }

    async fn connect(&self, id: &InstanceId, body: &Arc<Body>, agent: AgentState) -> Result<Instance, Error> {
        let how = Connect {
            agent,
            within: Duration::from_secs(10),
        };
        let line = Line::to(agent::of(&self.machine, id, body));
        let guest = Guest::on_line(line, how)
            .await
            .map_err(|error| Error::adopt(id, error))?;
        body.spoken_with(&guest);
        Ok(Instance {
            id: id.clone(),
            isolation: self.isolation,
            guest,
            end: body.ending(),
        })
    }
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}

fn part(kind: SaveKind) -> &'static str {
    match kind {
        SaveKind::Memory => "memory",
        SaveKind::Filesystem => "layer",
    }
}

#[async_trait]
impl Runtime for Scripted {
    fn isolation(&self) -> Isolation {
        self.isolation
    }

    async fn start(&self, spec: InstanceSpec) -> Result<Instance, Error> {
        let machine = &self.machine;
        let id = &spec.id;
        let step = match spec.restore {
            Some(_) => Step::Restore,
            None => Step::Start,
        };
        // Something of it is there before anything runs, and stays if the server goes now.
        let body = Arc::new(Body::new());
        if machine
            .instances
            .lock()
            .insert(id.clone(), Arc::clone(&body))
            .is_some()
        {
            machine.misuse(format!("{id} was started twice"));
        }
        let how = machine.wait(machine.answer(step, id)).await;
        let memory = match &spec.restore {
            Some(restore) => read(restore).await,
            None => Ok(Memory::default()),
        };
        // Whoever destroys it meanwhile cancels the start.
        let here = machine.find(id).is_some_and(|found| Arc::ptr_eq(&found, &body));
        let memory = match memory {
            Ok(memory) if here && how == How::Works => memory,
            failed => {
                if here {
                    machine.instances.lock().remove(id);
                }
                let isolation = self.isolation;
                let source = failed.err().unwrap_or_else(|| how.cause());
                return Err(Error::Start { isolation, source });
            }
        };
        body.begin(memory);
        let agent = match step {
            Step::Restore => AgentState::Restored,
            _ => AgentState::Booting,
        };
        self.connect(id, &body, agent).await
    }

    async fn discover(&self) -> Result<Vec<InstanceId>, Error> {
        Ok(self.machine.instances.lock().keys().cloned().collect())
    }

    async fn adopt(&self, id: &InstanceId) -> Result<Instance, Error> {
        let machine = &self.machine;
        let body = machine.find(id).ok_or_else(|| Error::NotFound(id.clone()))?;
        let how = machine.wait(machine.answer(Step::Adopt, id)).await;
        if how != How::Works {
            body.end(InstanceEnd::Died("it was found dead".into()));
        }
        let look = body.look();
        if !look.whole || !look.alive {
            return Err(Error::adopt(id, Cause::new(Kind::State, "it is gone")));
        }
        // Whoever held it still to save it is gone, and it could not answer.
        body.go_on();
        // No frame is torn on a line.
        self.connect(id, &body, AgentState::Booting).await
    }

    async fn resize(&self, id: &InstanceId, _: &Resources) -> Result<(), Error> {
        let found = self.machine.find(id);
        found.map(drop).ok_or_else(|| Error::NotFound(id.clone()))
    }

    async fn usage(&self, id: &InstanceId) -> Result<Usage, Error> {
        let body = self.machine.find(id);
        let body = body.ok_or_else(|| Error::NotFound(id.clone()))?;
        Ok(Usage {
            cpu_micros: body.cpu_micros(),
            memory_bytes: 1 << 20,
            ..Usage::default()
        })
    }

    fn saves(&self) -> Saves {
        Saves {
            memory: self.keeps_memory,
            runtime_version: "scripted".into(),
            cpu_features: Vec::new(),
        }
    }

    async fn save(&self, id: &InstanceId, kind: SaveKind, sink: Arc<dyn SaveSink>) -> Result<(), Error> {
        let machine = &self.machine;
        let failed = |source| Error::Save {
            id: id.clone(),
            source,
        };
        let unfit = |why| failed(Cause::new(Kind::State, why));
        let body = machine.find(id).ok_or_else(|| unfit("it is not here"))?;
        let Some(_saving) = body.begin_saving() else {
            machine.misuse(format!("{id} was saved twice at once"));
            return Err(unfit("it is being saved"));
        };
        match machine.wait(machine.answer(Step::Save, id)).await {
            How::Dies => body.end(InstanceEnd::Died("it broke while it was saved".into())),
            how @ (How::Fails | How::Full) => {
                body.go_on();
                return Err(failed(how.cause()));
            }
            How::Works | How::Hangs => {}
        }
        let look = body.look();
        if machine.find(id).is_none() || !look.alive || !look.whole {
            return Err(unfit("it is gone"));
        }
        if !look.still {
            machine.misuse(format!("{id} went on while it was saved"));
        }
        let written = sink.scratch().and_then(|mut file| {
            file.write_all(&body.memory(kind).encode())?;
            file.rewind()?;
            sink.part(part(kind), file)
        });
        written.doing(|| "keeping it").map_err(|cause| {
            body.go_on();
            failed(cause)
        })
    }

    async fn thaw(&self, id: &InstanceId) -> Result<(), Error> {
        let machine = &self.machine;
        let gone = || Error::NotFound(id.clone());
        let body = machine.find(id).ok_or_else(gone)?;
        if body.is_being_saved() {
            machine.misuse(format!("{id} was let go on while it was saved"));
        }
        match machine.wait(machine.answer(Step::Thaw, id)).await {
            How::Works | How::Hangs => {}
            // Only one that is broken cannot go on.
            How::Fails | How::Full | How::Dies => {
                body.end(InstanceEnd::Died("it could not be let go on".into()));
                return Err(gone());
            }
        }
        body.go_on();
        Ok(())
    }

    async fn destroy(&self, id: &InstanceId) -> Result<(), Error> {
        let machine = &self.machine;
        if machine.find(id).is_none() {
            return Ok(());
        }
        let how = machine.wait(machine.answer(Step::Destroy, id)).await;
        if matches!(how, How::Fails | How::Full) {
            return Err(Error::io(format!("destroying {id}"), how.cause()));
        }
        let gone = machine.instances.lock().remove(id);
        if let Some(body) = gone {
            body.end(InstanceEnd::Died("it was destroyed".into()));
        }
        Ok(())
    }
}

async fn read(restore: &crate::Restore) -> Result<Memory, Cause> {
    let reading = || "reading what was saved";
    let mut file = restore.source.file(part(restore.kind)).await.doing(reading)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).doing(reading)?;
    Memory::decode(&bytes)
}

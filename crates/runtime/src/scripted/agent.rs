//! An instance as data, and the agent in it: answers what the guest protocol asks for, without running anything.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_guest_protocol::{
    CommandInfo, CommandState, Decoder, Exec, Failure, FailureKind, FrameKind, GENERATION, Hello, Message,
    Request, Welcome, decode, encode,
};
use atoll_types::InstanceId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{How, Look, Machine, Step};
use crate::channel::line::{Hears, Line};
use crate::channel::{Guest, WeakGuest};
use crate::{Cause, InstanceEnd, Kind, SaveKind};

/// A command with this name goes on until it is signalled.
const SLEEP: &[u8] = b"sleep";

/// What a save keeps.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) ran: Vec<String>,
    /// Not of files alone.
    commands: BTreeMap<String, CommandInfo>,
}

impl Memory {
    pub(super) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Cause> {
        decode(bytes).map_err(|error| Cause::new(Kind::Saved, error.to_string()))
    }
}

/// One instance.
#[derive(Debug)]
pub(super) struct Body {
    state: Mutex<State>,
    end: watch::Sender<Option<InstanceEnd>>,
}

#[derive(Default)]
struct State {
    whole: bool,
    still: bool,
    saving: bool,
    /// CPU time that was spent in it, beside that of its commands.
    spent_micros: u64,
    hostname: Option<String>,
    memory: Memory,
    /// Who tells the channel that the instance is over.
    guest: Option<WeakGuest>,
    /// The line of the host of now, and what of it was not understood yet.
    line: Option<Arc<Line>>,
    decoder: Option<Decoder>,
    follower: Option<u32>,
    /// What is to be done when it goes on.
    waiting: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

/// While it lives, the instance is being saved.
pub(super) struct Saving<'a>(&'a Body);

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.0.lock().saving = false;
    }
}

impl Body {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            end: watch::Sender::new(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn look(&self) -> Look {
        let state = self.lock();
        Look {
            whole: state.whole,
            alive: self.is_alive(),
            still: state.still,
            hostname: state.hostname.clone(),
            ran: state.memory.ran.clone(),
        }
    }

    fn is_alive(&self) -> bool {
        self.end.borrow().is_none()
    }

    pub(super) fn begin(&self, memory: Memory) {
        let mut state = self.lock();
        state.whole = true;
        state.memory = memory;
    }

    pub(super) fn memory(&self, kind: SaveKind) -> Memory {
        let memory = self.lock().memory.clone();
        match kind {
            SaveKind::Memory => memory,
            SaveKind::Filesystem => Memory {
                commands: BTreeMap::new(),
                ..memory
            },
        }
    }

    pub(super) fn spend(&self, micros: u64) {
        self.lock().spent_micros += micros;
    }

    pub(super) fn cpu_micros(&self) -> u64 {
        let state = self.lock();
        state.spent_micros + 1000 * state.memory.ran.len() as u64
    }

    pub(super) fn ending(&self) -> watch::Receiver<Option<InstanceEnd>> {
        self.end.subscribe()
    }

    pub(super) fn spoken_with(&self, guest: &Guest) {
        self.lock().guest = Some(guest.downgrade());
    }

    /// Once; what comes later is not heard.
    pub(super) fn end(&self, how: InstanceEnd) {
        if !self.is_alive() {
            return;
        }
        self.end.send_replace(Some(how));
        let mut state = self.lock();
        state.waiting.clear();
        let guest = state.guest.take();
        drop(state);
        if let Some(guest) = guest.and_then(|guest| guest.upgrade()) {
            guest.finish();
        }
    }

    /// `None` while another save is under way.
    pub(super) fn begin_saving(&self) -> Option<Saving<'_>> {
        let mut state = self.lock();
        if state.saving {
            return None;
        }
        state.saving = true;
        state.still = true;
        Some(Saving(self))
    }

    pub(super) fn is_being_saved(&self) -> bool {
        self.lock().saving
    }

    /// Lets it run, and does what it was asked meanwhile.
    pub(super) fn go_on(&self) {
        let mut state = self.lock();
        state.still = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for work in waiting {
            work();
        }
    }

    /// Now, or when it goes on; never if it is gone.
    fn when_it_runs(&self, work: Box<dyn FnOnce() + Send>) {
        if !self.is_alive() {
            return;
        }
        let mut state = self.lock();
        if state.still {
            state.waiting.push(work);
            return;
        }
        drop(state);
        work();
    }
}

/// The agent in an instance.
pub(super) fn of(machine: &Arc<Machine>, id: &InstanceId, body: &Arc<Body>) -> Arc<dyn Hears> {
    Arc::new(Agent {
        machine: Arc::clone(machine),
        id: id.clone(),
        body: Arc::clone(body),
    })
}

#[derive(Clone)]
struct Agent {
    machine: Arc<Machine>,
    id: InstanceId,
    body: Arc<Body>,
}

impl Hears for Agent {
    fn hears(&self, line: &Arc<Line>, bytes: &[u8]) {
        let (agent, line, bytes) = (self.clone(), Arc::clone(line), bytes.to_vec());
        self.body
            .when_it_runs(Box::new(move || agent.understand(&line, &bytes)));
    }
}

fn say(line: &Line, stream: u32, message: &Message) {
    line.say(FrameKind::Message, stream, &encode(message));
}

fn end(line: &Line, stream: u32, how: &Result<(), Failure>) {
    line.say(FrameKind::End, stream, &encode(how));
}

impl Agent {
    fn understand(&self, line: &Arc<Line>, bytes: &[u8]) {
        let mut decoder = {
            let mut state = self.body.lock();
            // A new host: whatever the last one asked for is forgotten.
            if !state.line.as_ref().is_some_and(|now| Arc::ptr_eq(now, line)) {
                state.line = Some(Arc::clone(line));
                state.decoder = None;
                state.follower = None;
            }
            state.decoder.take().unwrap_or_default()
        };
        let mut rest = bytes;
        while !rest.is_empty() {
            let space = decoder.space();
            let count = space.len().min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            decoder.filled(count);
            rest = &rest[count..];
            while let Some(frame) = decoder.next_frame() {
                match frame.kind {
                    FrameKind::Hello => {
                        if let Ok(Hello { nonce, .. }) = decode(frame.payload) {
                            let generation = GENERATION;
                            line.say(FrameKind::Welcome, 0, &encode(&Welcome { generation, nonce }));
                        }
                    }
                    FrameKind::Ping => line.say(FrameKind::Pong, 0, frame.payload),
                    FrameKind::Open => match decode(frame.payload) {
                        Ok(request) => self.open(line, frame.stream, request),
                        Err(_) => end(line, frame.stream, &Err(refusal(FailureKind::Invalid))),
                    },
                    FrameKind::Close => {
                        let mut state = self.body.lock();
                        state.follower = state.follower.filter(|stream| *stream != frame.stream);
                    }
                    _ => {}
                }
            }
        }
        self.body.lock().decoder = Some(decoder);
    }

    fn open(&self, line: &Arc<Line>, stream: u32, request: Request) {
        match request {
            Request::Configure(configure) => {
                self.scripted(line, stream, Step::Configure, move |agent, line| {
                    agent.body.lock().hostname = Some(configure.hostname);
                    end(line, stream, &Ok(()));
                });
            }
            Request::Exec(exec) => {
                self.scripted(line, stream, Step::Exec, move |agent, line| {
                    agent.run(line, stream, &exec);
                });
            }
            Request::FollowCommands => {
                let known = self.known();
                self.body.lock().follower = Some(stream);
                say(line, stream, &Message::Commands(known));
                say(line, stream, &Message::Watching);
            }
            Request::ListCommands => {
                say(line, stream, &Message::Commands(self.known()));
                end(line, stream, &Ok(()));
            }
            Request::ListPorts => {
                say(line, stream, &Message::Ports(Vec::new()));
                end(line, stream, &Ok(()));
            }
            Request::Network(_) => end(line, stream, &Ok(())),
            Request::Signal { command, signal } => {
                let known = self.finish(&command, CommandState::Signaled { signal });
                let missing = || refusal(FailureKind::NotFound);
                end(line, stream, &known.map(drop).ok_or_else(missing));
            }
            _ => end(line, stream, &Err(refusal(FailureKind::Unsupported))),
        }
    }

    /// Does the work as the script says, in time.
    fn scripted(
        &self,
        line: &Arc<Line>,
        stream: u32,
        step: Step,
        work: impl FnOnce(&Self, &Arc<Line>) + Send + 'static,
    ) {
        let answer = self.machine.answer(step, &self.id);
        let (agent, line) = (self.clone(), Arc::clone(line));
        let act = move |how| match how {
            How::Works | How::Hangs => work(&agent, &line),
            How::Fails | How::Full => end(&line, stream, &Err(refusal(FailureKind::Io))),
            How::Dies => agent.body.end(InstanceEnd::Died("its agent died".into())),
        };
        if answer.after.is_zero() && answer.how != How::Hangs {
            act(answer.how);
            return;
        }
        // With the server goes whoever waits for this answer.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (machine, body) = (Arc::clone(&self.machine), Arc::clone(&self.body));
            runtime.spawn(async move {
                let how = machine.wait(answer).await;
                body.when_it_runs(Box::new(move || act(how)));
            });
        }
    }

    fn known(&self) -> Vec<CommandInfo> {
        self.body.lock().memory.commands.values().cloned().collect()
    }

    fn run(&self, line: &Arc<Line>, stream: u32, exec: &Exec) {
        let info = CommandInfo {
            command: exec.command.clone(),
            pid: 2,
            argv: exec.argv.clone(),
            state: CommandState::Running,
            started_millis: 0,
            ended_millis: None,
            pty: false,
            input_bytes: 0,
            output_bytes: 0,
            log_start: 0,
        };
        {
            let mut state = self.body.lock();
            let words = exec.argv.iter().map(|word| String::from_utf8_lossy(word));
            state.memory.ran.push(words.collect::<Vec<_>>().join(" "));
            state.memory.commands.insert(exec.command.clone(), info);
        }
        say(line, stream, &Message::Started { pid: 2 });
        if exec.argv.first().is_some_and(|program| program == SLEEP) {
            return;
        }
        let state = CommandState::Exited { code: 0 };
        // Those who follow hear of it before those who are attached.
        self.finish(&exec.command, state);
        say(line, stream, &Message::Exited(state));
        end(line, stream, &Ok(()));
    }

    fn finish(&self, command: &str, how: CommandState) -> Option<CommandInfo> {
        let mut state = self.body.lock();
        let info = state.memory.commands.get_mut(command)?;
        if info.state == CommandState::Running {
            info.state = how;
            info.ended_millis = Some(info.started_millis);
        }
        let info = info.clone();
        let told = (state.line.clone(), state.follower);
        drop(state);
        if let (Some(line), Some(stream)) = told {
            say(&line, stream, &Message::Commands(vec![info.clone()]));
        }
        Some(info)
    }
}

fn refusal(kind: FailureKind) -> Failure {
    Failure {
        kind,
        message: "as the script says".into(),
    }
}

//! Processes that several callers listen to, and that are found by pid or tag: what APIs have that know processes rather
//! than commands.
//!
//! ```text
//!   agent ── one stream ──> pump ──┬──> listener (who started it)
//!                                  ├──> listener (who came later)
//!                                  └──> nobody: thrown away
//! ```
//!
//! What must hold:
//! - A process goes on when its listeners hang up, and never waits when there are none; as long as there are, output
//!   waits for the slowest of them.
//! - Its end is known for a while after it, for those who come late.
//! - What is remembered of a process is paid for as long as it is ([`StartProcess::kept`]).
//! - What is here is only a way to the process. A server that was restarted finds it again in the agent's list.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use atoll_guest_protocol::{CommandState, PtySize};
use atoll_identity::Caller;
use atoll_types::{Code, CommandId, Fault, SandboxId};
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::{Command, ExecEvent, ExecEvents, ExecInput, ExecSpec, Execution, OutputStream, Pay, Sandboxes};

/// How long the end of a process is remembered.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Events that may wait for a slow listener: the first, the last, and some between.
const WAITING: usize = 4;
/// What one event carries at most.
const CHUNK: usize = 32 * 1024;

/// What happens to a process, in order. After `Ended` nothing follows; an error is the last word, too: the way to the
/// process broke, as it does when its sandbox ends or rests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    Started { pid: u32 },
    Output { stream: OutputStream, bytes: Bytes },
    Ended(CommandState),
}

/// What is heard of a process.
pub type ProcessEvents = mpsc::Receiver<Result<ProcessEvent, Fault>>;

/// Whatever pays for what is remembered.
pub trait Kept: Debug + Send + Sync {}

impl<T: Debug + Send + Sync> Kept for T {}

/// What whoever started a process said of it, for whoever asks later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessSaid {
    pub argv: Vec<String>,
    /// What the caller gave, not all that it finds.
    pub env: HashMap<String, String>,
    pub cwd: Option<String>,
}

/// A process to be started. It goes on when nobody listens.
#[derive(Debug)]
pub struct StartProcess {
    pub spec: ExecSpec,
    pub said: ProcessSaid,
    /// A name that the caller gives it.
    pub tag: Option<String>,
    pub kept: Box<dyn Kept>,
}

/// How a caller names a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhichProcess {
    Pid(u32),
    Tag(String),
}

/// A process that runs, as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedProcess {
    pub pid: u32,
    pub said: ProcessSaid,
    pub tag: Option<String>,
}

impl ListedProcess {
    /// The bytes that it takes, in a list that grows by doubling.
    fn weight(&self) -> u64 {
        let ProcessSaid { argv, env, cwd } = &self.said;
        let text = |text: &String| size_of::<String>() + text.len();
        let words = argv.iter().map(text).sum::<usize>();
        let variables = env.iter().map(|(name, value)| 2 * (text(name) + text(value)));
        let others = [cwd, &self.tag].into_iter().flatten().map(String::len);
        let texts = words + variables.sum::<usize>() + others.sum::<usize>();
        (texts + 2 * size_of::<Self>()) as u64
    }
}

/// The way to a process.
#[derive(Debug)]
pub struct Process {
    pub command: CommandId,
    pub pid: u32,
    pub said: ProcessSaid,
    pub tag: Option<String>,
    /// Whether it has a terminal.
    pub pty: bool,
    /// Whether it reads what is sent to it.
    pub stdin: bool,
    input: tokio::sync::Mutex<ExecInput>,
    hub: Hub,
    _kept: Box<dyn Kept>,
}

impl Process {
    pub fn is_over(&self) -> bool {
        self.hub.state().over.is_some()
    }

    /// Everything from now on, after the news that it runs.
    pub fn listen(&self) -> ProcessEvents {
        self.hub.listen(self.pid)
    }

    /// Waits while it does not read.
    pub async fn write(&self, bytes: Bytes) -> Result<(), Fault> {
        self.input.lock().await.write(bytes).await
    }

    /// The end of what it reads.
    pub async fn close_stdin(&self) -> Result<(), Fault> {
        self.input.lock().await.close().await
    }

    pub async fn resize(&self, size: PtySize) -> Result<(), Fault> {
        self.input.lock().await.resize(size).await
    }
}

/// Who listens to one process.
#[derive(Debug, Default)]
struct Hub(Mutex<HubState>);

#[derive(Debug, Default)]
struct HubState {
    listeners: Vec<mpsc::Sender<Result<ProcessEvent, Fault>>>,
    /// The last word.
    over: Option<Result<ProcessEvent, Fault>>,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, HubState> {
        self.0.lock()
    }

    fn listen(&self, pid: u32) -> ProcessEvents {
        let (sender, receiver) = mpsc::channel(WAITING);
        let mut state = self.state();
        // There is room for two.
        let _ = sender.try_send(Ok(ProcessEvent::Started { pid }));
        match state.over.clone() {
            Some(over) => drop(sender.try_send(over)),
            None => state.listeners.push(sender),
        }
        receiver
    }

    async fn publish(&self, event: &ProcessEvent) {
        let listeners = self.state().listeners.clone();
        let mut left = false;
        for listener in &listeners {
            left |= listener.send(Ok(event.clone())).await.is_err();
        }
        if left {
            self.state().listeners.retain(|listener| !listener.is_closed());
        }
    }

    async fn finish(&self, last: Result<ProcessEvent, Fault>) {
        let listeners = {
            let mut state = self.state();
            state.over = Some(last.clone());
            std::mem::take(&mut state.listeners)
        };
        for listener in listeners {
            let _ = listener.send(last.clone()).await;
        }
    }

    async fn output(&self, stream: OutputStream, mut bytes: Bytes) {
        while !bytes.is_empty() {
            let bytes = bytes.split_to(bytes.len().min(CHUNK));
            self.publish(&ProcessEvent::Output { stream, bytes }).await;
        }
    }
}

/// The processes that somebody started or asked for by this server. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Processes {
    service: Sandboxes,
    known: Known,
}

/// By sandbox, then by pid.
type ByPid = HashMap<SandboxId, HashMap<u32, Arc<Process>>>;

#[derive(Debug, Clone, Default)]
struct Known(Arc<Mutex<ByPid>>);

impl Known {
    fn all(&self) -> MutexGuard<'_, ByPid> {
        self.0.lock()
    }

    /// Those of one sandbox.
    fn of(&self, sandbox: &SandboxId) -> Vec<Arc<Process>> {
        let all = self.all();
        let processes = all.get(sandbox);
        processes.map_or_else(Vec::new, |processes| processes.values().cloned().collect())
    }

    /// Whether it was not there yet. Of two ways to one process the first is kept.
    fn keep(&self, sandbox: &SandboxId, process: &Arc<Process>) -> Result<(), Arc<Process>> {
        let mut all = self.all();
        let processes = all.entry(sandbox.clone()).or_default();
        match processes.get(&process.pid) {
            Some(known) if known.command == process.command => Err(Arc::clone(known)),
            // The pid was another's, which is over.
            _ => {
                processes.insert(process.pid, Arc::clone(process));
                Ok(())
            }
        }
    }

    fn forget(&self, sandbox: &SandboxId, process: &Arc<Process>) {
        let mut all = self.all();
        let Some(processes) = all.get_mut(sandbox) else {
            return;
        };
        // Its number may be another's by now.
        if processes
            .get(&process.pid)
            .is_some_and(|kept| Arc::ptr_eq(kept, process))
        {
            processes.remove(&process.pid);
        }
        if processes.is_empty() {
            all.remove(sandbox);
        }
    }
}

impl Processes {
    pub fn new(service: Sandboxes) -> Self {
        Self {
            service,
            known: Known::default(),
        }
    }

    /// Starts a process, and listens to it from its beginning.
    pub async fn start(
        &self,
        caller: &Caller,
        id: &SandboxId,
        request: StartProcess,
    ) -> Result<ProcessEvents, Fault> {
        let spec = ExecSpec {
            background: true,
            lossless: true,
            ..request.spec
        };
        let (pty, stdin) = (spec.pty.is_some(), spec.pty.is_some() || spec.stdin);
        let mut execution = self.service.exec(caller, id, spec).await?;
        let pid = execution.events.started().await?;
        let process = Process {
            command: execution.command,
            pid,
            said: request.said,
            tag: request.tag,
            pty,
            stdin,
            input: tokio::sync::Mutex::new(execution.input),
            hub: Hub::default(),
            _kept: request.kept,
        };
        let (_, listener) = self.look_after(id, process, execution.events);
        Ok(listener)
    }

    /// The process that a caller names, if there is one: one that is known here, or one that the agent knows. `keep` makes what
    /// pays for remembering the latter.
    pub async fn find<E: From<Fault>>(
        &self,
        caller: &Caller,
        id: &SandboxId,
        which: &WhichProcess,
        keep: impl FnOnce(&ProcessSaid) -> Result<Box<dyn Kept>, E>,
    ) -> Result<Option<Arc<Process>>, E> {
        let found = self.known.of(id).into_iter().find(|process| match which {
            WhichProcess::Pid(pid) => process.pid == *pid,
            WhichProcess::Tag(tag) => process.tag.as_ref() == Some(tag),
        });
        match (found, which) {
            (Some(process), _) => Ok(Some(process)),
            (None, WhichProcess::Pid(pid)) => self.rediscover(caller, id, *pid, keep).await,
            // The agent knows no tags.
            (None, WhichProcess::Tag(_)) => Ok(None),
        }
    }

    /// A process that was started before this server, before its sandbox rested, or as a command.
    async fn rediscover<E: From<Fault>>(
        &self,
        caller: &Caller,
        id: &SandboxId,
        pid: u32,
        keep: impl FnOnce(&ProcessSaid) -> Result<Box<dyn Kept>, E>,
    ) -> Result<Option<Arc<Process>>, E> {
        let found = self.service.find_command(caller, id, |command| {
            command.pid == pid && command.state == CommandState::Running
        });
        let Some(command) = found.await? else {
            return Ok(None);
        };
        let said = ProcessSaid::of(&command);
        let kept = keep(&said)?;
        let Execution { events, input, .. } = self
            .service
            .attach(caller, id, &command.id, command.output_bytes)
            .await?;
        let process = Process {
            command: command.id,
            pid,
            said,
            tag: None,
            pty: command.pty,
            stdin: true,
            input: tokio::sync::Mutex::new(input),
            hub: Hub::default(),
            _kept: kept,
        };
        Ok(Some(self.look_after(id, process, events).0))
    }

    /// What runs in a sandbox. What is gathered is paid for with `pay` before it is kept.
    pub async fn list(
        &self,
        caller: &Caller,
        id: &SandboxId,
        pay: &mut Pay<'_>,
    ) -> Result<Vec<ListedProcess>, Fault> {
        let known = self.known.of(id);
        let commands = self.service.commands(caller, id, pay).await?;
        let running = commands
            .into_iter()
            .filter(|command| command.state == CommandState::Running);
        let mut listed = Vec::new();
        for command in running {
            let known = known.iter().find(|process| process.command == command.id);
            let process = ListedProcess {
                pid: command.pid,
                said: known.map_or_else(|| ProcessSaid::of(&command), |process| process.said.clone()),
                tag: known.and_then(|process| process.tag.clone()),
            };
            pay(process.weight())?;
            listed.push(process);
        }
        Ok(listed)
    }

    /// Hands on what a process says from now on. Its first listener must be there before that, so that nothing is lost.
    fn look_after(
        &self,
        id: &SandboxId,
        process: Process,
        events: ExecEvents,
    ) -> (Arc<Process>, ProcessEvents) {
        let process = Arc::new(process);
        if let Err(known) = self.known.keep(id, &process) {
            let listener = known.listen();
            return (known, listener);
        }
        let listener = process.listen();
        let (known, id, pumped) = (self.known.clone(), id.clone(), Arc::clone(&process));
        // Ends with the process, or with the stream to it.
        tokio::spawn(async move {
            if pump(&pumped.hub, events).await {
                tokio::time::sleep(REMEMBERED).await;
            }
            known.forget(&id, &pumped);
        });
        (process, listener)
    }
}

/// Hands on what a process says; whether it came to its end.
async fn pump(hub: &Hub, mut events: ExecEvents) -> bool {
    loop {
        match events.next().await {
            Some(Ok(ExecEvent::Started { .. } | ExecEvent::Dropped { .. })) => {}
            Some(Ok(ExecEvent::Output { stream, bytes })) => hub.output(stream, bytes).await,
            Some(Ok(ExecEvent::Exited(state))) => {
                hub.finish(Ok(ProcessEvent::Ended(state))).await;
                return true;
            }
            Some(Err(fault)) => {
                hub.finish(Err(fault)).await;
                return false;
            }
            None => {
                let message = "the output ended before the process did";
                hub.finish(Err(Fault::new(Code::GuestProtocol, message))).await;
                return false;
            }
        }
    }
}

impl ProcessSaid {
    /// As far as the agent's list tells.
    fn of(command: &Command) -> Self {
        let words = command.argv.iter();
        Self {
            argv: words
                .map(|word| String::from_utf8_lossy(word).into_owned())
                .collect(),
            ..Self::default()
        }
    }
}

impl ExecEvents {
    /// Waits for the news that a command runs, which comes first, and tells its pid.
    pub async fn started(&mut self) -> Result<u32, Fault> {
        let broken = |message: &str| Err(Fault::new(Code::GuestProtocol, message));
        match self.next().await {
            Some(Ok(ExecEvent::Started { pid })) => Ok(pid),
            Some(Err(fault)) => Err(fault),
            Some(Ok(_)) => broken("the guest reported something before the start"),
            None => broken("the guest did not report a start"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    const ENDED: ProcessEvent = ProcessEvent::Ended(CommandState::Exited { code: 3 });

    fn output(text: &'static str) -> ProcessEvent {
        ProcessEvent::Output {
            stream: OutputStream::Stdout,
            bytes: Bytes::from_static(text.as_bytes()),
        }
    }

    async fn heard(mut events: ProcessEvents) -> Vec<Result<ProcessEvent, Code>> {
        let mut heard = Vec::new();
        while let Some(event) = events.recv().await {
            heard.push(event.map_err(|fault| fault.code));
        }
        heard
    }

    /// What somebody said when they started it is in every list of it, and as long as they liked.
    #[test]
    fn all_that_is_told_of_a_process_is_weighed() {
        let long = || "x".repeat(1000);
        let bare = ListedProcess {
            pid: 1,
            said: ProcessSaid::default(),
            tag: None,
        };
        let mut listed = ListedProcess {
            tag: Some(long()),
            ..bare
        };
        let mut before = listed.weight();
        assert!(before > 1000);
        listed.said.argv = vec![long(), long()];
        assert!(listed.weight() > before + 2000);
        before = listed.weight();
        listed.said.env.insert(long(), long());
        assert!(listed.weight() > before + 2000);
        before = listed.weight();
        listed.said.cwd = Some(long());
        assert_eq!(listed.weight(), before + 1000);
    }

    #[tokio::test]
    async fn each_listener_hears_all_from_when_it_came_and_the_late_ones_the_end() {
        let hub = Hub::default();
        let first = hub.listen(7);
        hub.publish(&output("a")).await;
        let second = hub.listen(7);
        hub.publish(&output("b")).await;
        hub.finish(Ok(ENDED)).await;
        let late = hub.listen(7);
        let started = || Ok(ProcessEvent::Started { pid: 7 });
        assert_eq!(
            heard(first).await,
            [started(), Ok(output("a")), Ok(output("b")), Ok(ENDED)]
        );
        assert_eq!(heard(second).await, [started(), Ok(output("b")), Ok(ENDED)]);
        assert_eq!(heard(late).await, [started(), Ok(ENDED)]);
    }

    #[tokio::test]
    async fn a_way_that_broke_is_the_last_word() {
        let hub = Hub::default();
        let listener = hub.listen(1);
        hub.finish(Err(Fault::new(Code::SandboxDeleted, "it is gone")))
            .await;
        for events in [listener, hub.listen(1)] {
            let last = heard(events).await.pop();
            assert_eq!(last, Some(Err(Code::SandboxDeleted)));
        }
    }

    #[tokio::test]
    async fn output_waits_for_who_listens_and_for_nobody_else() {
        let hub = Hub::default();
        // Nobody: it is thrown away.
        for _ in 0..100 {
            hub.publish(&output("x")).await;
        }
        let gone = hub.listen(1);
        let mut slow = hub.listen(1);
        drop(gone);
        for _ in 1..WAITING {
            hub.publish(&output("x")).await;
        }
        assert_eq!(hub.state().listeners.len(), 1, "who hung up is forgotten");
        let waits = output("y");
        let mut waiting = pin!(hub.publish(&waits));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        assert!(slow.recv().await.is_some());
        waiting.await;
    }

    #[tokio::test]
    async fn much_output_comes_in_pieces() {
        let hub = Hub::default();
        let events = hub.listen(1);
        let listening = tokio::spawn(heard(events));
        hub.output(OutputStream::Stderr, Bytes::from(vec![b'x'; 2 * CHUNK + 1]))
            .await;
        hub.finish(Ok(ENDED)).await;
        let sizes: Vec<usize> = listening
            .await
            .unwrap()
            .into_iter()
            .filter_map(|event| match event {
                Ok(ProcessEvent::Output { bytes, .. }) => Some(bytes.len()),
                _ => None,
            })
            .collect();
        assert_eq!(sizes, [CHUNK, CHUNK, 1]);
    }
}

//! The processes that this wire looks after, found by pid or tag.
//!
//! ```text
//!   agent ── one stream ──> pump ──┬──> subscriber (Start)
//!                                  ├──> subscriber (Connect)
//!                                  └──> nobody: thrown away
//! ```
//!
//! What must hold:
//! - A process goes on when its subscribers hang up, and never waits when there are none; as long as there are, output
//!   waits for the slowest of them.
//! - Its end is known for a while after it, for those who come late.
//! - What is remembered of a process is paid for as long as it is.
//! - What is here is only a way to the process. A server that was restarted finds it again in the agent's list.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use atoll_front::{Permit, Refused};
use atoll_guest_protocol::CommandState;
use atoll_sandboxes::{Command, ExecEvent, ExecEvents, ExecInput, Execution, OutputStream};
use atoll_types::{CommandId, SandboxId};
use bytes::Bytes;
use prost::Message as _;
use tokio::sync::mpsc;

use super::Call;
use super::connect::{Code, Error};
use super::messages::{DataEvent, EndEvent, Event, Output, ProcessConfig, Selector, StartEvent};

/// How long the end of a process is remembered.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Events that may wait for a slow subscriber.
const WAITING: usize = 4;
/// What one event carries at most.
const CHUNK: usize = 32 * 1024;

type Update = Result<Event, Error>;

#[derive(Debug, Default)]
pub(crate) struct Processes(Mutex<HashMap<SandboxId, HashMap<u32, Arc<Process>>>>);

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) command: CommandId,
    pub(crate) pid: u32,
    pub(crate) config: ProcessConfig,
    pub(crate) tag: Option<String>,
    pub(crate) pty: bool,
    /// Whether it reads what is sent to it.
    pub(crate) stdin: bool,
    pub(crate) input: tokio::sync::Mutex<ExecInput>,
    hub: Mutex<Hub>,
    _permit: Permit,
}

#[derive(Debug, Default)]
struct Hub {
    subscribers: Vec<mpsc::Sender<Update>>,
    /// The last word.
    over: Option<Update>,
}

/// What is known of a process before it runs.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) config: ProcessConfig,
    pub(crate) tag: Option<String>,
    pub(crate) pty: bool,
    pub(crate) stdin: bool,
    pub(crate) permit: Permit,
}

/// Lets the sandbox pay for what is remembered of a process.
pub(crate) fn pay(call: &Call, config: &ProcessConfig) -> Result<Permit, Error> {
    let texts = 2 + config.args.len() + 2 * config.envs.len();
    let weight = config.encoded_len() + texts * 2 * size_of::<String>();
    let mut permit = call.visit.permit()?;
    permit.grow(weight as u64).map_err(Refused::Full)?;
    Ok(permit)
}

impl Process {
    fn hub(&self) -> MutexGuard<'_, Hub> {
        self.hub.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.hub().over.is_some()
    }

    /// Everything from now on, after the news that it runs.
    pub(crate) fn subscribe(&self) -> mpsc::Receiver<Update> {
        let (sender, receiver) = mpsc::channel(WAITING);
        let mut hub = self.hub();
        // There is room for two.
        let _ = sender.try_send(Ok(Event::Start(StartEvent { pid: self.pid })));
        match hub.over.clone() {
            Some(over) => drop(sender.try_send(over)),
            None => hub.subscribers.push(sender),
        }
        receiver
    }

    async fn publish(&self, update: &Update) {
        let subscribers = self.hub().subscribers.clone();
        let mut left = false;
        for subscriber in &subscribers {
            left |= subscriber.send(update.clone()).await.is_err();
        }
        if left {
            self.hub()
                .subscribers
                .retain(|subscriber| !subscriber.is_closed());
        }
    }

    async fn finish(&self, last: Update) {
        let subscribers = {
            let mut hub = self.hub();
            hub.over = Some(last.clone());
            std::mem::take(&mut hub.subscribers)
        };
        for subscriber in subscribers {
            let _ = subscriber.send(last.clone()).await;
        }
    }
}

impl Processes {
    fn all(&self) -> MutexGuard<'_, HashMap<SandboxId, HashMap<u32, Arc<Process>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of one sandbox.
    pub(crate) fn of(&self, sandbox: &SandboxId) -> Vec<Arc<Process>> {
        let all = self.all();
        all.get(sandbox)
            .map(|processes| processes.values().cloned().collect())
            .unwrap_or_default()
    }

    fn keep(&self, sandbox: &SandboxId, process: &Arc<Process>) {
        let mut all = self.all();
        let processes = all.entry(sandbox.clone()).or_default();
        processes.insert(process.pid, Arc::clone(process));
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

/// Looks after a process that was just started or found. Its first subscriber must be there before the pump runs, so that
/// nothing is lost: hence the receiver.
pub(crate) fn adopt(
    call: &Call,
    pid: u32,
    execution: Execution,
    described: Description,
) -> (Arc<Process>, mpsc::Receiver<Update>) {
    let process = Arc::new(Process {
        command: execution.command,
        pid,
        config: described.config,
        tag: described.tag,
        pty: described.pty,
        stdin: described.stdin,
        input: tokio::sync::Mutex::new(execution.input),
        hub: Mutex::default(),
        _permit: described.permit,
    });
    let receiver = process.subscribe();
    call.app.processes.keep(&call.target.id, &process);
    let (app, sandbox, pumped) = (call.app.clone(), call.target.id.clone(), Arc::clone(&process));
    // Ends with the process, or with the stream to it.
    tokio::spawn(async move {
        let gone = pump(&pumped, execution.events).await;
        if !gone {
            tokio::time::sleep(REMEMBERED).await;
        }
        app.processes.forget(&sandbox, &pumped);
    });
    (process, receiver)
}

/// Hands on what a process says; whether the way to it broke.
async fn pump(process: &Process, mut events: ExecEvents) -> bool {
    while let Some(event) = events.next().await {
        match event {
            Ok(ExecEvent::Started { .. } | ExecEvent::Dropped { .. }) => {}
            Ok(ExecEvent::Output { stream, mut bytes }) => {
                while !bytes.is_empty() {
                    let chunk = bytes.split_to(bytes.len().min(CHUNK));
                    let output = output(process.pty, stream, chunk);
                    let event = Event::Data(DataEvent { output: Some(output) });
                    process.publish(&Ok(event)).await;
                }
            }
            Ok(ExecEvent::Exited(state)) => {
                process.finish(last_word(state)).await;
                return false;
            }
            Err(fault) => {
                let error = Error {
                    gone: true,
                    ..Error::from(fault)
                };
                process.finish(Err(error)).await;
                return true;
            }
        }
    }
    true
}

fn output(pty: bool, stream: OutputStream, bytes: Bytes) -> Output {
    match (pty, stream) {
        (true, _) => Output::Pty(bytes),
        (false, OutputStream::Stdout) => Output::Stdout(bytes),
        (false, OutputStream::Stderr) => Output::Stderr(bytes),
    }
}

fn last_word(state: CommandState) -> Update {
    let end = |exit_code, exited, status: String| {
        Ok(Event::End(EndEvent {
            exit_code,
            exited,
            error: (exit_code != 0).then(|| status.clone()),
            status,
        }))
    };
    match state {
        CommandState::Exited { code } => end(code, true, format!("exit status {code}")),
        CommandState::Signaled { signal } => end(-1, false, format!("signal: {}", signal_name(signal))),
        CommandState::TimedOut => Err(Error::new(
            Code::DeadlineExceeded,
            "the process was killed because its time was over",
        )),
        CommandState::Running => Err(Error::new(Code::Internal, "a process that runs has no end")),
    }
}

/// As Go's `os` package says it.
fn signal_name(signal: i32) -> String {
    match signal {
        1 => "hangup".into(),
        2 => "interrupt".into(),
        3 => "quit".into(),
        6 => "aborted".into(),
        9 => "killed".into(),
        11 => "segmentation fault".into(),
        13 => "broken pipe".into(),
        15 => "terminated".into(),
        other => format!("signal {other}"),
    }
}

/// The process that a request names: one that is looked after, or one that the agent knows.
pub(crate) async fn find(call: &Call, selector: Option<&Selector>) -> Result<Arc<Process>, Error> {
    let known = call.app.processes.of(&call.target.id);
    match selector {
        None => Err(Error::invalid("`process` names neither a pid nor a tag")),
        Some(Selector::Tag(tag)) => known
            .into_iter()
            .find(|process| process.tag.as_ref() == Some(tag))
            .ok_or_else(|| Error::not_found(format!("process with tag {tag} not found"))),
        Some(&Selector::Pid(pid)) => match known.into_iter().find(|process| process.pid == pid) {
            Some(process) => Ok(process),
            None => rediscover(call, pid).await,
        },
    }
}

/// A process that was started before this server, or before the sandbox rested.
async fn rediscover(call: &Call, pid: u32) -> Result<Arc<Process>, Error> {
    let found = call
        .app
        .sandboxes
        .find_command(&call.target.caller, &call.target.id, |command| {
            command.pid == pid && command.state == CommandState::Running
        })
        .await?;
    let command = found.ok_or_else(|| Error::not_found(format!("process with pid {pid} not found")))?;
    let execution = call
        .app
        .sandboxes
        .attach(
            &call.target.caller,
            &call.target.id,
            &command.id,
            command.output_bytes,
        )
        .await?;
    let config = config_of(&command);
    let described = Description {
        permit: pay(call, &config)?,
        config,
        tag: None,
        pty: command.pty,
        stdin: true,
    };
    let (process, _nobody) = adopt(call, pid, execution, described);
    Ok(process)
}

/// What the agent's list tells of a process.
pub(crate) fn config_of(command: &Command) -> ProcessConfig {
    let mut words = command
        .argv
        .iter()
        .map(|word| String::from_utf8_lossy(word).into_owned());
    ProcessConfig {
        cmd: words.next().unwrap_or_default(),
        args: words.collect(),
        ..ProcessConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_in_the_words_of_the_original() {
        let Ok(Event::End(end)) = last_word(CommandState::Exited { code: 3 }) else {
            unreachable!("an exit is an end");
        };
        assert_eq!(
            (end.exit_code, end.exited, end.status.as_str()),
            (3, true, "exit status 3")
        );
        assert_eq!(end.error.as_deref(), Some("exit status 3"));
        let Ok(Event::End(end)) = last_word(CommandState::Signaled { signal: 9 }) else {
            unreachable!("a signal is an end");
        };
        assert_eq!((end.exit_code, end.status.as_str()), (-1, "signal: killed"));
        let late = last_word(CommandState::TimedOut).unwrap_err();
        assert_eq!(late.code, Code::DeadlineExceeded);
    }
}

//! Commands: start, attach, list, signal. Bytes go straight through to the guest's stream, with its back-pressure.

use std::sync::Arc;
use std::time::Duration;

use atoll_guest_protocol::{CommandInfo, CommandState, Exec, Message, PtySize, Request, SUB_STDERR};
use atoll_node::{ChannelError, Incoming, Stream, StreamReceiver, StreamSender};
use atoll_store::Fact;
use atoll_types::{Code, CommandId, Fault, SandboxId, Timestamp};
use bytes::Bytes;

use crate::cell::{Cell, InUse};
use crate::faults::{ANSWER_WITHIN, from_channel, server_full, unexpected, unreachable_guest};
use crate::guest::Guest;
use crate::{Caller, Command, ExecEvent, ExecSpec, OutputStream, Pay, Sandboxes};

/// What a command's log keeps for those who attach later.
const LOG_BYTES: u32 = 1024 * 1024;
/// A foreground command's log is only a window to its one reader.
const FOREGROUND_LOG_BYTES: u32 = 256 * 1024;
/// After this long without a word from a command, its agent is asked whether it is there at all.
const SILENT: Duration = Duration::from_secs(15);
/// No honest guest has more to say of its commands than this.
const MAX_LISTED: usize = 32 << 20;

impl Sandboxes {
    /// Starts a command and attaches to it.
    pub async fn exec(&self, caller: &Caller, id: &SandboxId, spec: ExecSpec) -> Result<Execution, Fault> {
        check_argv(&spec.argv)?;
        let Some(key) = &spec.idempotency_key else {
            return self.exec_as(caller, id, spec, crate::entropy::id()).await;
        };
        if spec.stdin || spec.pty.is_some() {
            return Err(Fault::new(
                Code::IdempotencyKeyWithInput,
                "an idempotency key goes with commands that read no input and have no terminal",
            )
            .hint("put the input into a file of the sandbox first"));
        }
        let command = crate::keyed::id(id, key)?;
        let argv = spec.argv.clone();
        if let Some(found) = self.rejoin(caller, id, &command, &argv).await? {
            return Ok(found);
        }
        match self.exec_as(caller, id, spec, command.clone()).await {
            // Somebody with the same key was faster.
            Err(fault) if fault.code == Code::AlreadyExists => self
                .rejoin(caller, id, &command, &argv)
                .await?
                .ok_or_else(|| begun(&command)),
            other => other,
        }
    }

    /// Attaches to the command that the same key started before, if there is one.
    async fn rejoin(
        &self,
        caller: &Caller,
        id: &SandboxId,
        command: &CommandId,
        argv: &[Vec<u8>],
    ) -> Result<Option<Execution>, Fault> {
        let Some(found) = self.command(caller, id, command).await? else {
            return Ok(None);
        };
        if found.argv != argv {
            return Err(Fault::new(
                Code::IdempotencyConflict,
                format!("this idempotency key has started another command, {command}"),
            )
            .hint("use a new key for a new request"));
        }
        let mut execution = self.attach(caller, id, command, 0).await?;
        execution.events.first = Some(ExecEvent::Started { pid: found.pid });
        Ok(Some(execution))
    }

    /// Starts a command under this id.
    async fn exec_as(
        &self,
        caller: &Caller,
        id: &SandboxId,
        spec: ExecSpec,
        command: CommandId,
    ) -> Result<Execution, Fault> {
        let (cell, guest, in_use) = self.enter(caller, id).await?;
        let (planned, request) = Planned::new(spec, command);
        self.follow_commands(&cell, &guest).await?;
        self.expect(&cell, &planned)?;
        let opened = guest.open(&request).await;
        self.begun(cell, guest, in_use, planned, opened).await
    }

    /// The agent is about to hear of a command, or has this moment.
    pub(crate) fn expect(&self, cell: &Cell, planned: &Planned) -> Result<(), Fault> {
        // Facts wait in memory while they cannot be written, but not without end.
        if self.inner.facts.capacity() == 0 {
            let message = "the server cannot write down what happens, so it starts nothing";
            return Err(server_full(message.into()));
        }
        cell.commands
            .begin(&planned.command, planned.started.clone(), self.now())
    }

    /// The agent was told to start a command that is expected: waits until it runs.
    pub(crate) async fn begun(
        &self,
        cell: Arc<Cell>,
        guest: Guest,
        in_use: InUse,
        planned: Planned,
        opened: Result<Stream, ChannelError>,
    ) -> Result<Execution, Fault> {
        let Planned {
            command, background, ..
        } = planned;
        let (sender, receiver) = match opened {
            Ok(stream) => stream.split(),
            Err(error) => {
                cell.commands.never_began(&command);
                return Err(from_channel(&cell, error).await);
            }
        };
        let mut events = ExecEvents {
            service: self.clone(),
            cell,
            guest,
            receiver,
            first: None,
            over: false,
            _in_use: in_use,
        };
        // Whether it could be started is the answer to this call, not an event.
        match tokio::time::timeout(ANSWER_WITHIN, events.advance()).await {
            Ok(Some(Ok(started @ ExecEvent::Started { .. }))) => events.first = Some(started),
            Ok(Some(Ok(_)) | None) => return Err(unexpected()),
            Ok(Some(Err(fault))) => {
                events.cell.commands.never_began(&command);
                return Err(fault);
            }
            Err(_) => return Err(unreachable_guest()),
        }
        self.record_start(&events.cell, &command, background).await?;
        Ok(Execution {
            command,
            input: ExecInput {
                cell: Arc::clone(&events.cell),
                sender,
            },
            events,
        })
    }

    /// Attaches to a command that runs or ran; output follows from the offset `from` of its log.
    pub async fn attach(
        &self,
        caller: &Caller,
        id: &SandboxId,
        command: &CommandId,
        from: u64,
    ) -> Result<Execution, Fault> {
        let (cell, guest, in_use) = self.enter(caller, id).await?;
        let request = Request::Attach {
            command: command.to_string(),
            from,
        };
        let (sender, receiver) = match guest.open(&request).await {
            Ok(stream) => stream.split(),
            Err(error) => return Err(from_channel(&cell, error).await),
        };
        let events = ExecEvents {
            service: self.clone(),
            cell,
            guest: guest.clone(),
            receiver,
            first: None,
            over: false,
            _in_use: in_use,
        };
        // A command that is unknown fails at once; anything else waits until there is something to say. Ask the list
        // rather than wait, so that attaching to a silent command answers immediately.
        let mut is_known = false;
        each(&events.cell, &guest, |info| {
            is_known |= info.command == command.as_str();
            Ok(())
        })
        .await?;
        if !is_known {
            return Err(Fault::new(
                Code::CommandNotFound,
                format!("there is no command {command} in {id}"),
            )
            .hint("`atoll ps` lists the commands of a sandbox; the oldest ended ones are forgotten"));
        }
        Ok(Execution {
            command: command.clone(),
            input: ExecInput {
                cell: Arc::clone(&events.cell),
                sender,
            },
            events,
        })
    }

    /// All commands that its agent knows. What is gathered is paid for with `pay` before it is kept.
    pub async fn commands(
        &self,
        caller: &Caller,
        id: &SandboxId,
        pay: &mut Pay<'_>,
    ) -> Result<Vec<Command>, Fault> {
        let mut commands = Vec::new();
        self.each_command(caller, id, |command, weight| {
            // The list grows by doubling, so each may take the place of two.
            pay((weight + size_of::<Command>()) as u64)?;
            commands.push(command);
            Ok(())
        })
        .await?;
        Ok(commands)
    }

    /// The one with this id, if its agent knows it.
    pub async fn command(
        &self,
        caller: &Caller,
        id: &SandboxId,
        command: &CommandId,
    ) -> Result<Option<Command>, Fault> {
        self.find_command(caller, id, |known| known.id == *command).await
    }

    /// The first command that is the one looked for; no others are kept meanwhile.
    pub async fn find_command(
        &self,
        caller: &Caller,
        id: &SandboxId,
        mut is_it: impl FnMut(&Command) -> bool + Send,
    ) -> Result<Option<Command>, Fault> {
        let mut found = None;
        self.each_command(caller, id, |command, _| {
            if found.is_none() && is_it(&command) {
                found = Some(command);
            }
            Ok(())
        })
        .await?;
        Ok(found)
    }

    /// Hands on every command with its weight.
    async fn each_command(
        &self,
        caller: &Caller,
        id: &SandboxId,
        mut take: impl FnMut(Command, usize) -> Result<(), Fault> + Send,
    ) -> Result<(), Fault> {
        let (cell, guest, _in_use) = self.enter(caller, id).await?;
        each(&cell, &guest, |info| {
            let weight = weigh(&info);
            // The guest may name its commands as it likes; what is not an id of ours is not listed.
            let Ok(id) = info.command.parse() else {
                return Ok(());
            };
            let command = Command {
                id,
                argv: info.argv,
                pid: info.pid,
                pty: info.pty,
                state: info.state,
                started_at: timestamp(info.started_millis),
                ended_at: info.ended_millis.map(timestamp),
                output_bytes: info.output_bytes,
            };
            take(command, weight)
        })
        .await
    }

    /// Signals a command's whole process group.
    pub async fn signal(
        &self,
        caller: &Caller,
        id: &SandboxId,
        command: &CommandId,
        signal: i32,
    ) -> Result<(), Fault> {
        check_signal(signal)?;
        let (cell, guest, _in_use) = self.enter(caller, id).await?;
        match guest
            .call(&Request::Signal {
                command: command.to_string(),
                signal,
            })
            .await
        {
            Ok(_) => Ok(()),
            Err(error) => Err(from_channel(&cell, error).await),
        }
    }
}

/// A command that is decided on, in the words of the ledger.
#[derive(Debug)]
pub(crate) struct Planned {
    command: CommandId,
    background: bool,
    started: Fact,
}

impl Planned {
    /// And in the words of the agent.
    pub(crate) fn new(spec: ExecSpec, command: CommandId) -> (Self, Request) {
        let stays = spec.background || spec.idempotency_key.is_some();
        let started = Fact::CommandStarted {
            command: command.clone(),
            program: String::from_utf8_lossy(&spec.argv[0]).chars().take(200).collect(),
            arguments: spec.argv.len() as u64 - 1,
            argument_bytes: spec.argv.iter().map(|word| word.len() as u64).sum(),
            background: spec.background,
        };
        let request = Request::Exec(Exec {
            command: command.to_string(),
            argv: spec.argv,
            env: spec.env,
            cwd: spec.cwd,
            user: spec.user,
            pty: spec.pty,
            stdin: spec.stdin,
            timeout_millis: spec.timeout_millis,
            log_bytes: if stays { LOG_BYTES } else { FOREGROUND_LOG_BYTES },
            wait_for_reader: !spec.background || spec.lossless,
            kill_on_close: !stays,
        });
        let planned = Self {
            command,
            background: spec.background,
            started,
        };
        (planned, request)
    }
}

/// Nothing else may be planned.
pub(crate) fn check_argv(argv: &[Vec<u8>]) -> Result<(), Fault> {
    match argv.first() {
        Some(program) if !program.is_empty() => Ok(()),
        _ => Err(Fault::new(
            Code::ArgvEmpty,
            "a command needs at least the name of a program",
        )),
    }
}

/// Hands on all that the guest says of its commands, in as many messages as it takes.
async fn each(
    cell: &Cell,
    guest: &Guest,
    mut take: impl FnMut(CommandInfo) -> Result<(), Fault> + Send,
) -> Result<(), Fault> {
    let mut stream = match guest.open(&Request::ListCommands).await {
        Ok(stream) => stream,
        Err(error) => return Err(from_channel(cell, error).await),
    };
    let mut weight = 0;
    // In all, since a guest could say nothing, slowly, for ever.
    let until = tokio::time::Instant::now() + ANSWER_WITHIN;
    while let Some(incoming) = tokio::time::timeout_at(until, stream.next())
        .await
        .map_err(|_| unreachable_guest())?
    {
        match incoming {
            Ok(Incoming::Message(Message::Commands(batch))) => {
                weight += batch.iter().map(weigh).sum::<usize>();
                if weight > MAX_LISTED {
                    return Err(unexpected());
                }
                for info in batch {
                    take(info)?;
                }
            }
            Ok(_) => return Err(unexpected()),
            Err(error) => return Err(from_channel(cell, error).await),
        }
    }
    Ok(())
}

/// What the news of a command takes in memory, nearly.
fn weigh(info: &CommandInfo) -> usize {
    let arguments: usize = info
        .argv
        .iter()
        .map(|argument| argument.len() + size_of::<Vec<u8>>())
        .sum();
    arguments + info.command.len() + size_of::<CommandInfo>()
}

fn begun(command: &CommandId) -> Fault {
    Fault::new(
        Code::CommandBegins,
        format!("{command} is being started by another request with the same idempotency key"),
    )
    .hint("ask again")
}

fn check_signal(signal: i32) -> Result<(), Fault> {
    if (1..=64).contains(&signal) {
        Ok(())
    } else {
        Err(Fault::new(
            Code::SignalInvalid,
            format!("{signal} is not a signal; use a number from 1 to 64"),
        ))
    }
}

fn timestamp(millis: u64) -> Timestamp {
    Timestamp(i64::try_from(millis).unwrap_or(i64::MAX))
}

/// A command that one is attached to. Dropping it detaches (and ends a foreground command).
#[derive(Debug)]
pub struct Execution {
    pub command: CommandId,
    pub events: ExecEvents,
    pub input: ExecInput,
}

/// What the command says.
#[derive(Debug)]
pub struct ExecEvents {
    service: Sandboxes,
    cell: Arc<Cell>,
    guest: Guest,
    receiver: StreamReceiver,
    first: Option<ExecEvent>,
    over: bool,
    _in_use: InUse,
}

impl ExecEvents {
    /// What happens next; `None` after `Exited` was delivered. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, Fault>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        self.advance().await
    }

    async fn advance(&mut self) -> Option<Result<ExecEvent, Fault>> {
        if self.over {
            return None;
        }
        let event = match self.incoming().await {
            Err(fault) => {
                self.over = true;
                return Some(Err(fault));
            }
            Ok(incoming) => incoming,
        };
        let event = match event {
            Some(Ok(Incoming::Data { sub, bytes })) => {
                let stream = if sub == SUB_STDERR {
                    OutputStream::Stderr
                } else {
                    OutputStream::Stdout
                };
                Ok(ExecEvent::Output { stream, bytes })
            }
            Some(Ok(Incoming::Message(Message::Started { pid }))) => Ok(ExecEvent::Started { pid }),
            Some(Ok(Incoming::Message(Message::Dropped { bytes, .. }))) => Ok(ExecEvent::Dropped { bytes }),
            Some(Ok(Incoming::Message(Message::Exited(state)))) => {
                self.over = true;
                // A kill for memory takes the whole sandbox; its first victim may be heard of before that is noticed.
                if state == (CommandState::Signaled { signal: 9 })
                    && self.service.ran_out_of_memory(&self.cell).await
                {
                    Err(self.cell.explain_end().await)
                } else {
                    Ok(ExecEvent::Exited(state))
                }
            }
            Some(Ok(Incoming::Message(_))) | None => {
                self.over = true;
                Err(unexpected())
            }
            Some(Err(error)) => {
                self.over = true;
                Err(from_channel(&self.cell, error).await)
            }
        };
        Some(event)
    }

    /// A command may be silent for as long as it likes, but not for an agent that is no more.
    async fn incoming(&mut self) -> Result<Option<Result<Incoming, ChannelError>>, Fault> {
        loop {
            if let Ok(incoming) = tokio::time::timeout(SILENT, self.receiver.next()).await {
                return Ok(incoming);
            }
            tokio::select! {
                biased;
                incoming = self.receiver.next() => return Ok(incoming),
                silent = self.guest.is_silent(ANSWER_WITHIN) => {
                    // Of one that ended, the stream says why.
                    if silent {
                        return Err(unreachable_guest());
                    }
                }
            }
        }
    }
}

/// What the caller says to the command. May be moved to another task; dropping it does not close stdin, `close` does.
#[derive(Debug)]
pub struct ExecInput {
    cell: Arc<Cell>,
    sender: StreamSender,
}

impl ExecInput {
    /// Waits while the command does not read.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), Fault> {
        match self.sender.send_data(bytes).await {
            Ok(()) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }

    /// End of stdin. That of a command that is over has ended.
    pub async fn close(&mut self) -> Result<(), Fault> {
        match self.sender.send_end().await {
            Ok(()) | Err(ChannelError::Ended) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }

    pub async fn resize(&mut self, size: PtySize) -> Result<(), Fault> {
        self.message(&Message::Resize(size)).await
    }

    pub async fn signal(&mut self, signal: i32) -> Result<(), Fault> {
        check_signal(signal)?;
        self.message(&Message::Signal(signal)).await
    }

    async fn message(&mut self, message: &Message) -> Result<(), Fault> {
        match self.sender.send_message(message).await {
            Ok(()) => Ok(()),
            Err(error) => Err(from_channel(&self.cell, error).await),
        }
    }
}

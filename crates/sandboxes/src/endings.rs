//! How commands end, for the ledger: every command that was started gets exactly one `command.exited`.
//!
//! ```text
//!   exec ──> open ──┬── its agent tells how it ended ──────────────> command.exited
//!                   └── its sandbox ends, or its agent forgot it ──> command.exited, lost
//! ```
//! The agent knows how a command ended also when nobody was attached to it, and when there was no server; one stream per
//! instance ([`Request::FollowCommands`]), opened with the first command, brings it here.
//!
//! What must hold:
//! - A command is open from before its agent hears of it until its end is recorded, and what ends it takes it out: once.
//! - What is open can be read from the ledger: a start without an end. So it can after a restart; to that end, the start
//!   of a background command is durable before anybody learns its id. (One in the foreground ends with its server.)
//! - A command outlives its server, and a pause with memory. Whenever a sandbox gets an agent that may not know a command
//!   that is open, the agent is asked; one that it does not know is lost.
//! - Whatever is open when its sandbox ends is recorded with that end, in one transaction.
//! - What the agent tells of commands that are not open means nothing.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_guest_protocol::{CommandInfo, CommandState, Message, Request};
use atoll_node::{ChannelError, Incoming, Stream};
use atoll_store::{CommandEnd, Fact, NewFact};
use atoll_types::{Code, CommandId, Fault, InstanceId, Timestamp};
use tokio::task::JoinHandle;

use crate::Sandboxes;
use crate::cell::Cell;
use crate::faults::{from_channel, from_store};
use crate::guest::Guest;

/// No honest agent runs as many commands at once. One that never tells of an end must not make us remember without end.
const MOST_OPEN: usize = 4096;

/// The commands of one sandbox that have not ended, as far as the ledger knows.
#[derive(Debug, Default)]
pub(crate) struct OpenCommands {
    open: Mutex<BTreeMap<CommandId, Open>>,
    follower: tokio::sync::Mutex<Option<Follower>>,
}

/// Listens to one instance's agent.
#[derive(Debug)]
struct Follower {
    instance: InstanceId,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Open {
    started_at: Timestamp,
    /// Its `command.started`, until that was recorded.
    start: Option<Fact>,
    /// It was open before the agent of now was there, which may not know it.
    inherited: bool,
}

impl OpenCommands {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<CommandId, Open>> {
        self.open.lock()
    }

    /// What the ledger knows of an earlier server's commands.
    pub(crate) fn restore(&self, open: Vec<(CommandId, Timestamp)>) {
        let entry = |(id, started_at)| {
            let open = Open {
                started_at,
                start: None,
                inherited: true,
            };
            (id, open)
        };
        self.lock().extend(open.into_iter().map(entry));
    }

    /// A command is about to be started; `start` is what the ledger will say once it is known to run.
    pub(crate) fn begin(&self, id: &CommandId, start: Fact, started_at: Timestamp) -> Result<(), Fault> {
        let mut open = self.lock();
        if open.len() >= MOST_OPEN {
            return Err(Fault::new(
                Code::SandboxBusy,
                format!("{MOST_OPEN} commands of this sandbox have not ended"),
            )
            .hint("wait for one to end, or kill the sandbox"));
        }
        if open.contains_key(id) {
            return Err(Fault::new(Code::AlreadyExists, format!("{id} has begun")));
        }
        let entry = Open {
            started_at,
            start: Some(start),
            inherited: false,
        };
        open.insert(id.clone(), entry);
        Ok(())
    }

    /// Whether one is known to run. Of one that has not been confirmed, whoever starts it uses the sandbox.
    pub(crate) fn any_runs(&self) -> bool {
        self.lock().values().any(|open| open.start.is_none())
    }

    /// It could not be started, so there is nothing to record.
    pub(crate) fn never_began(&self, id: &CommandId) {
        self.lock().remove(id);
    }

    /// Their ends were recorded with the sandbox's own.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// Waits until all is recorded that arrived before the channel was closed.
    pub(crate) async fn hang_up(&self) {
        if let Some(follower) = self.follower.lock().await.take() {
            let _ = follower.task.await;
        }
    }
}

impl Sandboxes {
    /// A sandbox has a new agent: finds out what became of the commands that it had before.
    pub(crate) fn resume_commands(&self, cell: &Arc<Cell>, guest: &Guest) {
        if cell.commands.lock().is_empty() {
            return;
        }
        let (service, cell, guest) = (self.clone(), Arc::clone(cell), guest.clone());
        self.inner.tasks.spawn(async move {
            if let Err(fault) = service.follow_commands(&cell, &guest).await {
                tracing::warn!(sandbox = %cell.id, %fault, "its commands could not be asked how they ended");
            }
        });
    }

    /// Has the agent tell of every end, unless it does already. What is sent to it afterwards is covered.
    pub(crate) async fn follow_commands(&self, cell: &Arc<Cell>, guest: &Guest) -> Result<(), Fault> {
        let mut follower = cell.commands.follower.lock().await;
        if let Some(now) = follower.as_mut() {
            if !now.task.is_finished() && now.instance == guest.id {
                return Ok(());
            }
            let _ = (&mut now.task).await;
            *follower = None;
        }
        match guest.open(&Request::FollowCommands).await {
            Ok(told) => *follower = Some(self.follower(cell, guest, told)),
            Err(error) => return Err(from_channel(cell, error).await),
        }
        Ok(())
    }

    /// The same for a sandbox that is new, whose agent was asked before the sandbox was written down.
    pub(crate) async fn follow_from_the_first(&self, cell: &Arc<Cell>, guest: &Guest, told: Stream) {
        *cell.commands.follower.lock().await = Some(self.follower(cell, guest, told));
    }

    fn follower(&self, cell: &Arc<Cell>, guest: &Guest, told: Stream) -> Follower {
        let (service, cell) = (self.clone(), Arc::clone(cell));
        let listen = async move { service.hear_of_ends(&cell, told).await };
        Follower {
            instance: guest.id.clone(),
            task: self.inner.tasks.spawn(listen),
        }
    }

    async fn hear_of_ends(&self, cell: &Cell, mut stream: Stream) {
        loop {
            let incoming = tokio::select! {
                // What has arrived is recorded, also when the server stops.
                biased;
                incoming = stream.next() => incoming,
                () = self.inner.stop.cancelled() => return,
            };
            match incoming {
                Some(Ok(Incoming::Message(Message::Commands(told)))) => {
                    for info in told {
                        // The template's start command and such have names that are not ids of ours.
                        if let Ok(id) = info.command.parse() {
                            self.hear_of(cell, &id, &info);
                        }
                    }
                }
                // The agent has named all that it knew at first.
                Some(Ok(Incoming::Message(Message::Watching))) => {
                    let mut open = cell.commands.lock();
                    let unknown: Vec<_> = open
                        .iter()
                        .filter(|(_, open)| open.inherited)
                        .map(|(id, _)| id.clone())
                        .collect();
                    for (id, unknown) in unknown.iter().filter_map(|id| open.remove_entry(id)) {
                        self.append(cell, self.lost(&id, &unknown));
                    }
                }
                Some(Err(ChannelError::Closed)) => {
                    for open in cell.commands.lock().values_mut() {
                        open.inherited = true;
                    }
                    return;
                }
                other => {
                    tracing::warn!(sandbox = %cell.id, ?other, "the agent stopped telling how commands end");
                    return;
                }
            }
        }
    }

    /// The command runs.
    pub(crate) async fn record_start(
        &self,
        cell: &Cell,
        id: &CommandId,
        background: bool,
    ) -> Result<(), Fault> {
        // The end of a sandbox records the ends of what is known to run, under the same lock: before that, or not at all.
        let _no_end_meanwhile = cell.row.lock().await;
        // It may have ended already, and was recorded as a whole.
        let start = cell
            .commands
            .lock()
            .get_mut(id)
            .and_then(|open| open.start.take());
        let Some(start) = start else {
            return Ok(());
        };
        if !background {
            self.append(cell, start);
            return Ok(());
        }
        let durable = self.fact(cell, start.clone());
        let written = self.store().ledger.append_facts(vec![durable]).await;
        if written.is_err()
            && let Some(open) = cell.commands.lock().get_mut(id)
        {
            // Recorded with its end, if it is heard of.
            open.start = Some(start);
        }
        written.map_err(|e| from_store(&e))
    }

    fn hear_of(&self, cell: &Cell, id: &CommandId, info: &CommandInfo) {
        let mut open = cell.commands.lock();
        let (state, exit_code, signal) = match info.state {
            CommandState::Running => {
                if let Some(open) = open.get_mut(id) {
                    open.inherited = false;
                }
                return;
            }
            CommandState::Exited { code } => (CommandEnd::Exited, Some(code), None),
            CommandState::Signaled { signal } => (CommandEnd::Signaled, None, Some(signal)),
            CommandState::TimedOut => (CommandEnd::TimedOut, None, None),
        };
        let Some(ended) = open.remove(id) else {
            return;
        };
        drop(open);
        // It was in use until now.
        cell.touch(&*self.store().sandboxes, self.now());
        if let Some(start) = ended.start {
            self.append(cell, start);
        }
        let ended_millis = info.ended_millis.unwrap_or(info.started_millis);
        let fact = Fact::CommandExited {
            command: id.clone(),
            state,
            exit_code,
            signal,
            duration_millis: ended_millis.saturating_sub(info.started_millis),
            bytes_in: info.input_bytes,
            bytes_out: info.output_bytes,
        };
        self.append(cell, fact);
    }

    /// The sandbox ends: what the ledger has to say of the commands that are open still.
    pub(crate) fn commands_lost_with(&self, cell: &Cell) -> Vec<NewFact> {
        let open = cell.commands.lock();
        // Of one whose start was never confirmed, nobody knows that it ran.
        let ran = open.iter().filter(|(_, open)| open.start.is_none());
        ran.map(|(id, open)| self.fact(cell, self.lost(id, open)))
            .collect()
    }

    fn lost(&self, command: &CommandId, open: &Open) -> Fact {
        Fact::CommandExited {
            command: command.clone(),
            state: CommandEnd::Lost,
            exit_code: None,
            signal: None,
            duration_millis: self.now().millis_since(open.started_at),
            bytes_in: 0,
            bytes_out: 0,
        }
    }
}

//! Background commands that the server has started, so that they can be listed after a restart.
//!
//! The guest is the truth about a command that runs; this table is the truth about which ones there were.

use std::fmt;
use std::str::FromStr;

use atoll_types::{CommandId, SandboxId, Timestamp};
use rusqlite::Row;

use crate::{Error, NewFact, Store, facts, sql};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandRow {
    pub id: CommandId,
    pub sandbox: SandboxId,
    /// Enough of the argument list for a person to recognise it.
    pub summary: String,
    pub state: CommandState,
    pub exit_code: Option<i32>,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub bytes_out: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommandState {
    /// As far as the server knows; ask the guest.
    Running,
    Exited,
    /// Ended by a signal.
    Signaled,
    /// Killed because its own timeout was over.
    TimedOut,
    /// Its sandbox ended first.
    Lost,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandEnd {
    pub state: CommandState,
    pub exit_code: Option<i32>,
    pub ended_at: Timestamp,
    pub bytes_out: u64,
}

impl Store {
    pub async fn insert_command(&self, command: CommandRow, facts: Vec<NewFact>) -> Result<(), Error> {
        self.write("note the command", move |db| {
            sql::execute(
                db,
                "INSERT INTO commands (id, sandbox, summary, state, exit_code, started_at, ended_at, bytes_out)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                &[
                    &command.id.as_str(),
                    &command.sandbox.as_str(),
                    &command.summary,
                    &command.state.name(),
                    &command.exit_code,
                    &command.started_at.0,
                    &command.ended_at.map(|at| at.0),
                    &sql::as_count(command.bytes_out),
                ],
            )?;
            facts::append(db, &facts)?;
            Ok(())
        })
        .await
    }

    /// Notes the end of a command. False, and no facts, when it was noted before or the command is not known.
    pub async fn finish_command(
        &self,
        id: &CommandId,
        end: CommandEnd,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error> {
        let id = id.clone();
        self.write("note the end of the command", move |db| {
            let changed = sql::execute(
                db,
                "UPDATE commands SET state = ?2, exit_code = ?3, ended_at = ?4, bytes_out = ?5
                 WHERE id = ?1 AND state = 'running'",
                &[
                    &id.as_str(),
                    &end.state.name(),
                    &end.exit_code,
                    &end.ended_at.0,
                    &sql::as_count(end.bytes_out),
                ],
            )?;
            if changed > 0 {
                facts::append(db, &facts)?;
            }
            Ok(changed > 0)
        })
        .await
    }

    pub async fn command(&self, id: &CommandId) -> Result<Option<CommandRow>, Error> {
        let id = id.clone();
        self.read("read the command", move |db| {
            sql::row(db, "SELECT * FROM commands WHERE id = ?1", &[&id.as_str()], read)
        })
        .await
    }

    /// The last thousand commands of a sandbox, oldest first.
    pub async fn commands(&self, sandbox: &SandboxId) -> Result<Vec<CommandRow>, Error> {
        let sandbox = sandbox.clone();
        self.read("list commands", move |db| {
            let mut newest_first = sql::rows(
                db,
                "SELECT * FROM commands WHERE sandbox = ?1 ORDER BY started_at DESC, id DESC LIMIT 1000",
                &[&sandbox.as_str()],
                read,
            )?;
            newest_first.reverse();
            Ok(newest_first)
        })
        .await
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<CommandRow> {
    Ok(CommandRow {
        id: sql::word(row, "id")?,
        sandbox: sql::word(row, "sandbox")?,
        summary: row.get("summary")?,
        state: sql::word(row, "state")?,
        exit_code: row.get("exit_code")?,
        started_at: sql::time(row, "started_at")?,
        ended_at: sql::maybe_time(row, "ended_at")?,
        bytes_out: sql::count(row, "bytes_out")?,
    })
}

impl CommandState {
    const ALL: [Self; 5] = [
        Self::Running,
        Self::Exited,
        Self::Signaled,
        Self::TimedOut,
        Self::Lost,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Exited => "exited",
            Self::Signaled => "signaled",
            Self::TimedOut => "timed_out",
            Self::Lost => "lost",
        }
    }
}

impl fmt::Display for CommandState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CommandState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|state| state.name() == text)
            .ok_or_else(|| format!("unknown command state `{text}`"))
    }
}

//! The ledger: what happened, once, in order, for good. Metering, audit and metrics read it here.
//!
//! What must hold: `seq` grows with every fact in the order in which commits become visible, so that a reader who asks for
//! everything after the last `seq` it saw misses nothing.
//!
//! What is committed together: the facts of one write, and the rows that it changes, whichever domain they belong to. Only
//! facts without a row come through [`LedgerStore::append_facts`].
//!
//! What is kept in front of it, and how that stays true: nothing but the number of the last fact
//! ([`LedgerStore::ledger_growth`]), which is a hint to look again and may be late. An implementation for several servers has
//! to tell each of what the others commit.
//!
//! Callers hold no lock for it. What meters and the network tell is queued in memory first, and lost if the server dies.

mod facts;

use std::fmt;

use async_trait::async_trait;
use atoll_types::{CommandId, ProjectId, SandboxId, Timestamp};

use crate::{Error, SpendQuery};

pub use facts::{CommandEnd, Fact, ModelCallFact, NetworkDecision, NewFact};

/// A fact as it stands in the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct FactRow {
    pub seq: i64,
    pub at: Timestamp,
    pub project: ProjectId,
    pub sandbox: Option<SandboxId>,
    pub fact: Fact,
}

#[derive(Debug, Clone)]
pub struct FactQuery {
    pub project: ProjectId,
    pub sandbox: Option<SandboxId>,
    /// Only these, as [`Fact::kind`] names them; all when empty.
    pub kinds: Vec<String>,
    /// Only what came after this one; 0 for everything.
    pub after_seq: i64,
    /// At most 1000.
    pub limit: usize,
}

/// A part of the ledger.
#[derive(Debug, Clone, PartialEq)]
pub struct FactPage {
    pub rows: Vec<FactRow>,
    /// What to ask on after; `None` where all has been looked at. There may be more even if this page has none.
    pub next: Option<i64>,
}

/// Whose usage to sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    Project(ProjectId),
    Sandbox(ProjectId, SandboxId),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageTotal {
    pub wall_millis: u64,
    pub cpu_micros: u64,
    pub memory_byte_seconds: u64,
    pub disk_byte_seconds: u64,
}

impl UsageTotal {
    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            wall_millis: self.wall_millis.saturating_add(other.wall_millis),
            cpu_micros: self.cpu_micros.saturating_add(other.cpu_micros),
            memory_byte_seconds: self.memory_byte_seconds.saturating_add(other.memory_byte_seconds),
            disk_byte_seconds: self.disk_byte_seconds.saturating_add(other.disk_byte_seconds),
        }
    }
}

#[async_trait]
pub trait LedgerStore: fmt::Debug + Send + Sync + 'static {
    /// Records facts that go with no row; those that do are handed to the method that writes the row.
    async fn append_facts(&self, facts: Vec<NewFact>) -> Result<(), Error>;

    /// The facts of a page, for those who do not go on.
    async fn facts(&self, query: FactQuery) -> Result<Vec<FactRow>, Error> {
        Ok(self.facts_page(query).await?.rows)
    }

    /// Facts in the order in which they were recorded: as many as were asked for, or those that were found among so many as
    /// one answer may look at.
    async fn facts_page(&self, query: FactQuery) -> Result<FactPage, Error>;

    /// Commands of a sandbox whose start is in the ledger and whose end is not, with the time of the start.
    async fn open_commands(&self, sandbox: &SandboxId) -> Result<Vec<(CommandId, Timestamp)>, Error>;

    /// Changes with every growth of the ledger, to the number of its last fact, or soon after.
    fn ledger_growth(&self) -> tokio::sync::watch::Receiver<i64>;

    /// The number of the last fact; 0 when there is none.
    async fn last_seq(&self) -> Result<i64, Error>;

    /// Sums the usage recorded from `from` (inclusive) to `to` (exclusive).
    async fn usage_total(&self, scope: Scope, from: Timestamp, to: Timestamp) -> Result<UsageTotal, Error>;

    /// Sums what a project used in the facts behind `seen`, and says which one is the last of those: whoever remembers both has
    /// only new ones summed the next time.
    async fn usage_behind(&self, project: &ProjectId, seen: i64) -> Result<(UsageTotal, i64), Error>;

    /// The one way in which facts go: retention. Removes at most `limit` facts that are older than `before` and says how
    /// many; call it again while it removes as many as it may. As many instances go that ended before.
    async fn expire_facts(&self, before: Timestamp, limit: usize) -> Result<usize, Error>;

    /// Sums what sandboxes used by the groups of a query for model spending. Empty where there is nothing to set beside it:
    /// by what only calls have, or of some calls only.
    async fn compute_beside(&self, query: SpendQuery) -> Result<Vec<(String, UsageTotal)>, Error>;
}

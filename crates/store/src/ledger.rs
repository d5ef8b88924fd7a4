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
//! What it keeps of one project is bounded, in time ([`LedgerStore::expire_facts`]) and in bytes ([`LedgerStore::trim_ledger`]): else
//! whoever has a key could fill the disk with what they do. What goes is the oldest, and the sums that are made of facts stay what
//! they were.
//!
//! Callers hold no lock for it. What meters and the network tell is queued in memory first, and lost if the server dies.

mod facts;

use std::fmt;

use async_trait::async_trait;
use atoll_types::{CommandId, InstanceId, ProjectId, SandboxId, Timestamp};

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
    /// One instance of a sandbox, and what facts that name no instance say of the sandbox.
    Instance(ProjectId, SandboxId, InstanceId),
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

    /// Changes with every growth of the ledger, or of one project's part of it, to the number of the last fact by then, or soon
    /// after.
    fn ledger_growth(&self, project: Option<&ProjectId>) -> tokio::sync::watch::Receiver<i64>;

    /// The number of the last fact; 0 when there is none.
    async fn last_seq(&self) -> Result<i64, Error>;

    /// Sums the usage recorded from `from` (inclusive) to `to` (exclusive); of a sandbox, that of the instances which began then; of
    /// an instance, all of its own.
    /// Of days of which facts were trimmed, all or nothing is in the sum.
    async fn usage_total(&self, scope: Scope, from: Timestamp, to: Timestamp) -> Result<UsageTotal, Error>;

    /// What a project used in all, and the last fact that is in that sum: whoever remembers both has only new ones summed the next
    /// time. Who knows nothing says so with 0.
    async fn usage_since(
        &self,
        project: &ProjectId,
        known: (UsageTotal, i64),
    ) -> Result<(UsageTotal, i64), Error>;

    /// One of two ways in which facts go: retention. Removes at most `limit` facts that are older than `before` and says how
    /// many; call it again while it removes as many as it may. As many instances go that ended before.
    async fn expire_facts(&self, before: Timestamp, limit: usize) -> Result<usize, Error>;

    /// Projects of which more than `most` bytes are left: of facts, instances, model calls and ended sandboxes, or of facts about
    /// decisions alone. Counted with each row, so this is cheap.
    async fn oversized_ledgers(&self, most: u64) -> Result<Vec<ProjectId>, Error>;

    /// The other way: removes some of the oldest of what is left of a project's doings, where that is more than `most` bytes, and
    /// says whether there is more to be removed. Facts about decisions ([`Fact::is_decision`]) are counted and removed apart. At
    /// the end [`Fact::LedgerTrimmed`] takes the place of the one before.
    async fn trim_ledger(&self, project: &ProjectId, most: u64, now: Timestamp) -> Result<bool, Error>;

    /// Something of a project from before this time is gone, by retention or trimming; `None`: nothing ever was.
    async fn complete_from(&self, project: &ProjectId) -> Result<Option<Timestamp>, Error>;

    /// Sums what sandboxes used by the groups of a query for model spending. Empty where there is nothing to set beside it:
    /// by what only calls have, or of some calls only.
    async fn compute_beside(&self, query: SpendQuery) -> Result<Vec<(String, UsageTotal)>, Error>;
}

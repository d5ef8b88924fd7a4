//! Sandboxes: what each was asked to be, and where its life stands.
//!
//! What must hold:
//! - A row changes only from the version that its writer has read; two that decided on the same version cannot both win.
//!   (A noted use is no decision and does not count as a version; it only ever moves the last use forward.)
//! - A sandbox is due when [`atoll_lifecycle::next_deadline`] says so of its record with the uses that were noted.
//! - The volumes that a row's spec names are attached from its insertion to its end; the hidden snapshot that its record
//!   names exists, and no other of it does (see [`crate::SnapshotRow`]).
//! - What it was asked to be is as it was at creation, but for what it may reach.
//! - A name belongs to one living sandbox of its project, from the commit that gives it to the one that ends the sandbox.
//! - An idempotency key belongs to one sandbox of its project for as long as that row exists. One that could not be started
//!   gives its key up: whoever asks again under it gets another.

use std::fmt;

use async_trait::async_trait;
use atoll_lifecycle::{Happening, Record};
use atoll_types::{
    EndReason, Isolation, OwnedBy, ProjectId, SandboxId, SandboxName, SandboxSpec, SandboxState, TemplateId,
    Timestamp,
};

use crate::{Cursor, Error, Fact, NewFact, Page};

#[derive(Debug, Clone, PartialEq)]
pub struct SandboxRow {
    pub id: SandboxId,
    pub project: ProjectId,
    pub spec: SandboxSpec,
    /// The template that `spec.template` meant at creation.
    pub template: TemplateId,
    pub isolation: Isolation,
    /// Where its life stands. Its policy is the spec's.
    pub record: Record,
    /// Counts the changes; the store counts, callers hand back what they read.
    pub version: i64,
}

#[derive(Debug, Clone)]
pub struct NewSandbox {
    /// Its version is ignored.
    pub row: SandboxRow,
    pub idempotency: Option<Idempotency>,
    /// Refuse if the project has this many sandboxes with processes already; those that rest do not count. Exact, however many are created at once.
    pub max_live: Option<u64>,
    pub facts: Vec<NewFact>,
}

/// A caller's promise that requests under one key are one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    pub key: String,
    /// SHA-256 of the request, to notice when the promise is broken.
    pub request: [u8; 32],
}

#[derive(Debug, Clone, PartialEq)]
pub enum Inserted {
    New(SandboxRow),
    /// The key was used before, for the same request; nothing was written.
    Existing(SandboxRow),
}

#[derive(Debug, Clone)]
pub struct SandboxQuery {
    pub project: ProjectId,
    /// Every one of these must match.
    pub labels: Vec<(String, String)>,
    pub owner: Option<OwnedBy>,
    /// Any of these; all when empty.
    pub states: Vec<SandboxState>,
    pub after: Option<Cursor>,
    /// At most [`crate::MAX_PAGE`].
    pub limit: usize,
}

impl SandboxRow {
    /// Whether it ended, or is about to, without ever having run.
    pub fn could_not_start(&self) -> bool {
        matches!(self.record.end, Some(EndReason::StartFailed(_)))
    }

    /// What the ledger is told about a transition of this sandbox.
    pub fn facts(&self, happenings: &[Happening], at: Timestamp) -> Vec<NewFact> {
        // A cold sandbox is created in one transition and starts in a later one.
        let warm = happenings.contains(&Happening::Created);
        let fact = |happening: &Happening| match happening.clone() {
            Happening::Created => Fact::SandboxCreated {
                template: self.template.clone(),
                isolation: self.isolation,
                resources: self.spec.resources,
            },
            Happening::Started { instance } => Fact::SandboxStarted {
                instance,
                took_millis: at.millis_since(self.record.created_at),
                warm,
            },
            Happening::Extended { deadline } => Fact::SandboxExtended { deadline },
            Happening::Paused {
                snapshot,
                kind,
                bytes,
                took_millis,
            } => Fact::SandboxPaused {
                kind,
                snapshot,
                bytes,
                took_millis,
            },
            Happening::Stopped {
                snapshot,
                bytes,
                took_millis,
            } => Fact::SandboxStopped {
                snapshot,
                bytes,
                took_millis,
            },
            Happening::SaveFailed { why } => Fact::SandboxSaveFailed { why },
            Happening::Resumed {
                instance,
                took_millis,
            } => Fact::SandboxResumed {
                instance,
                took_millis,
            },
            Happening::ResumeFailed { why } => Fact::SandboxResumeFailed { why },
            Happening::Ended { reason } => Fact::SandboxEnded { end: reason },
            Happening::Failed { reason } => Fact::SandboxFailed { end: reason },
        };
        happenings
            .iter()
            .map(|happening| NewFact {
                at,
                project: self.project.clone(),
                sandbox: Some(self.id.clone()),
                fact: fact(happening),
            })
            .collect()
    }
}

#[async_trait]
pub trait SandboxRowStore: fmt::Debug + Send + Sync + 'static {
    /// Writes a new sandbox with its labels and facts, or finds the one that its idempotency key made before.
    async fn insert_sandbox(&self, new: NewSandbox) -> Result<Inserted, Error>;

    /// The sandbox that an idempotency key made; an error when it was made by a different request.
    async fn sandbox_by_idempotency(
        &self,
        project: &ProjectId,
        idempotency: Idempotency,
    ) -> Result<Option<SandboxRow>, Error>;

    async fn sandbox(&self, project: &ProjectId, id: &SandboxId) -> Result<Option<SandboxRow>, Error>;

    /// The living sandbox of a project that has this name.
    async fn sandbox_named(
        &self,
        project: &ProjectId,
        name: &SandboxName,
    ) -> Result<Option<SandboxId>, Error>;

    /// The sandbox, whichever project it belongs to: for port hosts and the server's own loops.
    async fn sandbox_of_any_project(&self, id: &SandboxId) -> Result<Option<SandboxRow>, Error>;

    /// Writes the record of a row together with facts, if its version is still the one that was read. Gives back the row
    /// as it stands now. What it was asked to be (spec, template, isolation) does not change with this. A hidden snapshot
    /// that the record does not name any more is forgotten with this; the caller removes its bytes.
    async fn update_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error>;

    /// The same for several, all or none: the copies of a fork that come to run together.
    async fn update_sandboxes(
        &self,
        changes: Vec<(SandboxRow, Vec<NewFact>)>,
    ) -> Result<Vec<SandboxRow>, Error>;

    /// The same for a sandbox that is to have processes again: refused if the project has `max_live` of those already.
    async fn update_sandbox_within(
        &self,
        row: SandboxRow,
        facts: Vec<NewFact>,
        max_live: u64,
    ) -> Result<SandboxRow, Error>;

    /// The same with the spec and its labels, some of which may be changed later.
    async fn change_sandbox(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error>;

    /// Writes what a sandbox may reach, and with which secrets, as the row's spec says it. Under the same condition as
    /// [`Self::update_sandbox`], and nothing else of the row is written.
    async fn set_sandbox_network(&self, row: SandboxRow, facts: Vec<NewFact>) -> Result<SandboxRow, Error>;

    /// Newest first.
    async fn sandboxes(&self, query: SandboxQuery) -> Result<Page<SandboxRow>, Error>;

    /// Every sandbox that may hold something on the host, of all projects: what a restarted server has to look after.
    async fn live_sandboxes(&self) -> Result<Vec<SandboxRow>, Error>;

    /// Those that have processes, as limits count them.
    async fn count_live_sandboxes(&self, project: &ProjectId) -> Result<u64, Error>;

    /// Sandboxes whose next deadline has come, the longest overdue first. Noted uses are taken into account.
    async fn due_sandboxes(&self, now: Timestamp, limit: usize) -> Result<Vec<SandboxRow>, Error>;

    /// When to look for due sandboxes next, unless something changes before.
    async fn next_due(&self) -> Result<Option<Timestamp>, Error>;

    /// Notes a use of the sandbox: moves the end of its idle time. Returns at once; written with a later batch, lost if
    /// the server dies before (see [`atoll_lifecycle::Liveness`] for why that is fine).
    fn note_sandbox_used(&self, id: &SandboxId, at: Timestamp);

    /// Retention: forgets at most `limit` sandboxes that ended before that time, with their labels, commands and
    /// idempotency keys, and says how many. Their facts stay.
    async fn forget_sandboxes(&self, ended_before: Timestamp, limit: usize) -> Result<usize, Error>;
}

//! Instances: each time that a sandbox ran, from when to when, why it ended, and what it used.
//!
//! What must hold: a row follows from facts alone, and is committed with them, whoever records them. A sandbox that
//! runs has exactly one without an end, any other has none; so one that was open when the server died goes on where its
//! sandbox does, and ends as `lost` where that does. They go with the facts of their time
//! ([`expire_facts`](crate::LedgerStore::expire_facts), [`trim_ledger`](crate::LedgerStore::trim_ledger)).

use std::fmt;

use async_trait::async_trait;
use atoll_types::{InstanceId, Isolation, ProjectId, SandboxId, Timestamp};

use crate::{Cursor, Error, Page, UsageTotal};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceRow {
    pub id: InstanceId,
    pub sandbox: SandboxId,
    pub project: ProjectId,
    pub isolation: Isolation,
    pub started_at: Timestamp,
    /// When its sandbox rested, or nothing of it was left.
    pub ended_at: Option<Timestamp>,
    /// Why: `paused`, `stopped`, or as [`atoll_types::EndReason::name`] says it of the sandbox.
    pub reason: Option<String>,
    /// As far as the ledger has been told.
    pub usage: UsageTotal,
}

#[derive(Debug, Clone)]
pub struct InstanceQuery {
    pub project: ProjectId,
    pub sandbox: SandboxId,
    pub after: Option<Cursor>,
    /// At most [`crate::MAX_PAGE`].
    pub limit: usize,
}

#[async_trait]
pub trait InstanceStore: fmt::Debug + Send + Sync + 'static {
    /// The instances of a sandbox, newest first.
    async fn instances(&self, query: InstanceQuery) -> Result<Page<InstanceRow>, Error>;
}

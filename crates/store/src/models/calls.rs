//! One row for each call of a model: written when it begins, with what is reserved for it, and completed when it has ended.
//!
//! What must hold: a row that is open is completed exactly once, by whoever served the call or, after a crash, by the next
//! server. What a call cost counts at the time at which it began. Rows go by age, and when the project has too much
//! ([`trim_ledger`](crate::LedgerStore::trim_ledger)); what budgets have counted stays.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{
    BudgetScope, BudgetWindow, CallOutcome, KeyId, ModelCallId, ModelUsage, ProjectId, SandboxId, Timestamp,
    Usd,
};

use crate::{Cursor, Error, NewFact, Page};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelCallRow {
    pub id: ModelCallId,
    pub project: ProjectId,
    pub key: Option<KeyId>,
    pub sandbox: Option<SandboxId>,
    pub workflow: Option<String>,
    pub run: Option<String>,
    /// Whom the caller says that it acts for.
    pub end_user: Option<String>,
    pub tags: Vec<String>,
    /// The wire that it was asked on.
    pub dialect: String,
    /// The model, as the caller named it.
    pub asked: String,
    pub provider: String,
    /// The model, as the provider knows it.
    pub model: String,
    pub streamed: bool,
    pub started_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub outcome: CallOutcome,
    pub attempts: u32,
    pub first_byte_millis: Option<u64>,
    pub finish: Option<String>,
    pub error: Option<String>,
    pub usage: ModelUsage,
    /// Nobody counted the tokens.
    pub estimated: bool,
    /// `None`: the model has no price.
    pub price_version: Option<String>,
    pub reserved: Usd,
    pub cost: Usd,
}

/// By what calls are summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpendBy {
    Total,
    Day,
    Hour,
    Model,
    Provider,
    Key,
    Sandbox,
    Workflow,
    Run,
    User,
    Tag,
}

#[derive(Debug, Clone)]
pub struct SpendQuery {
    pub project: ProjectId,
    pub from: Timestamp,
    /// Exclusive.
    pub to: Timestamp,
    pub by: SpendBy,
    pub model: Option<String>,
    pub provider: Option<String>,
    pub sandbox: Option<SandboxId>,
    pub key: Option<KeyId>,
    pub user: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpendRow {
    /// Empty for calls that have none of what is asked for.
    pub group: String,
    pub calls: u64,
    pub usage: ModelUsage,
    pub cost: Usd,
    /// Calls whose model has no price.
    pub unpriced: u64,
    pub estimated: u64,
    pub failed: u64,
}

#[async_trait]
pub trait ModelCallStore: fmt::Debug + Send + Sync + 'static {
    async fn open_model_call(&self, call: ModelCallRow) -> Result<(), Error>;

    /// More may have to be paid for a call than was thought when it began.
    async fn raise_model_call(&self, id: ModelCallId, reserved: Usd) -> Result<(), Error>;

    /// Completes a row. One that is no longer open, or was never written, is left alone and its facts with it.
    async fn close_model_call(&self, call: ModelCallRow, facts: Vec<NewFact>) -> Result<bool, Error>;

    /// Calls that an earlier server left open.
    async fn open_model_calls(&self) -> Result<Vec<ModelCallRow>, Error>;

    async fn model_call(&self, project: &ProjectId, id: &ModelCallId) -> Result<Option<ModelCallRow>, Error>;

    /// Newest first.
    async fn model_calls(
        &self,
        project: &ProjectId,
        sandbox: Option<&SandboxId>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ModelCallRow>, Error>;

    /// What each subject of a budget has spent since its window began, at `from`, in no order; of more than `most` subjects,
    /// those that called last. Calls that are open count with nothing, those whose rows are gone as if they were there.
    async fn model_spent(
        &self,
        project: &ProjectId,
        scope: BudgetScope,
        subject: Option<&str>,
        window: BudgetWindow,
        from: Timestamp,
        most: usize,
    ) -> Result<Vec<(String, Usd)>, Error>;

    /// Removes at most `limit` calls that began before `before` and have ended, and says how many; call it again while it
    /// removes as many as it may.
    async fn expire_model_calls(&self, before: Timestamp, limit: usize) -> Result<usize, Error>;

    /// Sums over calls, the dearest group first; by time, the earliest.
    async fn model_spend(&self, query: SpendQuery) -> Result<Vec<SpendRow>, Error>;
}

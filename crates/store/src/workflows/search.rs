//! Finding workflow runs by a tree of conditions, which whoever asks has chosen.

use std::fmt;

use async_trait::async_trait;

use crate::{Error, WorkflowRunRow};

/// Something that is let go when the store is done with a question, which may be after its caller has gone.
pub type Place = Box<dyn Send>;

/// What a condition may be about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkflowField {
    Column(WorkflowColumn),
    /// A member of the search object.
    Attribute(String),
    /// A member of the search object that is a list.
    List(String),
    /// A member of the search object that is a sentence, compared word by word.
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkflowColumn {
    WorkflowId,
    RunId,
    WorkflowType,
    StartedAt,
    ExecutionAt,
    ClosedAt,
    Status,
    TaskQueue,
    HistoryLength,
    HistoryBytes,
    Transitions,
    Duration,
    ParentId,
    ParentRunId,
    RootId,
    RootRunId,
}

#[derive(Debug, Clone, PartialEq)]
pub enum WorkflowValue {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

#[derive(Debug, Clone, PartialEq)]
pub enum WorkflowTest {
    Equal(WorkflowValue),
    NotEqual(WorkflowValue),
    Less(WorkflowValue),
    LessOrEqual(WorkflowValue),
    Greater(WorkflowValue),
    GreaterOrEqual(WorkflowValue),
    In(Vec<WorkflowValue>),
    NotIn(Vec<WorkflowValue>),
    Between(WorkflowValue, WorkflowValue),
    NotBetween(WorkflowValue, WorkflowValue),
    StartsWith(String),
    NotStartsWith(String),
    IsNull,
    IsNotNull,
}

#[derive(Debug, Clone, PartialEq)]
pub enum WorkflowFilter {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Is(WorkflowField, WorkflowTest),
}

/// A field, and whether the largest comes first.
pub type WorkflowOrder = (WorkflowField, bool);

#[derive(Debug, Clone, Default)]
pub struct WorkflowPage {
    /// Skip as many.
    pub offset: usize,
    pub limit: usize,
    /// Without any: open ones first, then the last closed, then the last started.
    pub order: Vec<WorkflowOrder>,
}

#[async_trait]
pub trait WorkflowSearchStore: fmt::Debug + Send + Sync + 'static {
    /// A page of them, which ends early where its rows are large; and whether there are more behind it. `place` is held while
    /// a thread is at it, which may be for longer than the caller waits.
    async fn find_workflow_runs(
        &self,
        namespace: String,
        filter: WorkflowFilter,
        page: WorkflowPage,
        place: Place,
    ) -> Result<(Vec<WorkflowRunRow>, bool), Error>;

    /// How many there are, per status. `place` is as above.
    async fn count_workflow_runs(
        &self,
        namespace: String,
        filter: WorkflowFilter,
        place: Place,
    ) -> Result<Vec<(i32, i64)>, Error>;
}

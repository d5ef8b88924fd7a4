//! Runs of durable workflows: a row per run, and its events beside it.
//!
//! What must hold:
//! - At most one run of a workflow id is current.
//! - Events are only ever added, and go when their run goes.
//! - What a namespace keeps is counted in the commit that adds or deletes it, so that nobody has to look through all of it.
//!
//! States and events are opaque here: whoever decides about workflows writes and reads them.

use std::fmt;

use async_trait::async_trait;

use crate::Error;

/// A run as it is to be written.
#[derive(Debug, Clone)]
pub struct WorkflowRunWrite {
    pub row: WorkflowRunRow,
    /// The run was not there before.
    pub is_new: bool,
    pub is_open: bool,
    pub is_ready: bool,
    pub deadline: Option<i64>,
    /// When that is: later than now for whoever reads it only where the clock was set back.
    pub written_at: i64,
    /// The id of the first of the new events, and all of them.
    pub events: Option<(i64, Vec<u8>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowRunRow {
    pub run_id: String,
    pub namespace: String,
    pub workflow_id: String,
    pub is_current: bool,
    pub status: i32,
    pub workflow_type: String,
    pub task_queue: String,
    pub started_at: i64,
    pub execution_at: i64,
    pub closed_at: Option<i64>,
    pub history_length: i64,
    pub history_bytes: i64,
    pub transitions: i64,
    /// Workflow and run that started it.
    pub parent: Option<(String, String)>,
    pub root: Option<(String, String)>,
    /// A JSON object.
    pub search: String,
    pub state: Vec<u8>,
}

/// A run that a server which starts has to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenWorkflowRun {
    pub namespace: String,
    pub workflow_id: String,
    pub run_id: String,
    pub is_ready: bool,
    pub deadline: Option<i64>,
    pub written_at: i64,
}

#[async_trait]
pub trait WorkflowRunStore: fmt::Debug + Send + Sync + 'static {
    /// All or nothing. The runs that stop being current come before the one that becomes it. Says by how many bytes what is
    /// kept has grown; less than none, if it has shrunk.
    async fn write_workflow_runs(&self, runs: Vec<WorkflowRunWrite>) -> Result<i64, Error>;

    /// What each namespace keeps of its workflows, in bytes.
    async fn workflow_bytes(&self) -> Result<Vec<(String, i64)>, Error>;

    async fn workflow_run(&self, run_id: String) -> Result<Option<WorkflowRunRow>, Error>;

    async fn current_workflow_run(
        &self,
        namespace: String,
        workflow_id: String,
    ) -> Result<Option<WorkflowRunRow>, Error>;

    /// The batches of events of a run, oldest first.
    async fn workflow_events(&self, run_id: String) -> Result<Vec<Vec<u8>>, Error>;

    async fn open_workflow_runs(&self) -> Result<Vec<OpenWorkflowRun>, Error>;

    async fn has_open_workflow_runs(&self, namespace: String) -> Result<bool, Error>;

    /// Closed runs of a namespace that ended before `closed_before`, as workflow id and run id.
    async fn expired_workflow_runs(
        &self,
        namespace: String,
        closed_before: i64,
        limit: usize,
    ) -> Result<Vec<(String, String)>, Error>;

    /// How many bytes are free now. None: it was not there.
    async fn delete_workflow_run(&self, run_id: String) -> Result<Option<i64>, Error>;

    /// Every namespace that a run or an item is in, registered or not.
    async fn workflow_namespaces(&self) -> Result<Vec<String>, Error>;

    /// Deletes some runs of a namespace, open or closed, with their events: so many, or fewer if they are large, because all
    /// others who write wait for it. Says how many, and how many bytes are free now; zero runs: there are none.
    async fn delete_workflow_runs(&self, namespace: String, limit: usize) -> Result<(usize, i64), Error>;

    /// The last of a namespace: everything that is in it goes, and in the same commit the item by which it was known, so
    /// that no name is free while something is left behind it.
    async fn delete_workflow_namespace(&self, kind: &'static str, namespace: String) -> Result<(), Error>;
}

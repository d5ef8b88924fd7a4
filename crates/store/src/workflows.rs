//! Durable workflows: runs with their events, a few items per namespace, and search over runs.
//!
//! What is committed together:
//! - All runs of one [`WorkflowRunStore::write_workflow_runs`]: a run from one state to the next, row and new events together,
//!   and with them the run that follows it; and what their namespaces keep, in bytes.
//! - The last of a namespace and the item by which it was known. Other items are written alone.
//! - Nothing here goes into the ledger, so workflows may have a database of their own.
//!
//! What is kept in front of it, and how that stays true (all in `atoll-workflows`):
//! - Runs in memory: a cell per workflow id, which holds what was committed last and is dropped when a commit fails. One
//!   server at a time writes the runs of a workflow id; rows have no version that would tell.
//! - Namespaces, schedules, batches, approvals and the clock's last time, read as a whole at the start
//!   ([`WorkflowItemStore::workflow_items`]) and changed after each commit by whoever made it.
//! - Task queues and timers, filled from [`WorkflowRunStore::open_workflow_runs`].
//!
//! What the locks of callers protect: a cell's lock lets transitions of one workflow id happen one after the other; the hold of
//! a namespace keeps its name from meaning another one between the first look and the last write. Both are good for one server:
//! several have to share workflow ids out among them before they write.

mod items;
mod runs;
mod search;

pub use items::{WorkflowItem, WorkflowItemStore};
pub use runs::{OpenWorkflowRun, WorkflowRunRow, WorkflowRunStore, WorkflowRunWrite};
pub use search::{
    Place, WorkflowColumn, WorkflowField, WorkflowFilter, WorkflowOrder, WorkflowPage, WorkflowSearchStore,
    WorkflowTest, WorkflowValue,
};

use crate::Database;

/// All that is remembered of workflows, and the database that holds nothing else.
pub trait WorkflowStore: WorkflowRunStore + WorkflowItemStore + WorkflowSearchStore + Database {}

impl<T: WorkflowRunStore + WorkflowItemStore + WorkflowSearchStore + Database> WorkflowStore for T {}

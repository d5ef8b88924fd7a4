//! What Atoll remembers: rows of the present and a ledger of the past, in one store per domain.
//!
//! ```text
//!              identity   sandboxes   saved   models   ledger        workflows       traits: rows and facts, no SQL
//!                  └──────────┴─────────┼───────┴────────┘               │
//!                                    atoll.db                       workflows.db     `sqlite`: one engine per file
//! ```
//!
//! | domain | trait | rows |
//! |---|---|---|
//! | identity | [`IdentityStore`], in `atoll-identity` | projects, keys, sessions |
//! | sandboxes | [`SandboxStore`] | sandboxes with labels, idempotency keys and last uses; instances; secrets; network totals; artifacts |
//! | saved state | [`SavedStore`] | snapshots, volumes and who sees them, what a project has on disk |
//! | models | [`ModelStore`] | the gateway's setup, calls, what was asked and answered |
//! | ledger | [`LedgerStore`] | facts, and sums over them |
//! | workflows | [`WorkflowStore`] | runs and their events, items of namespaces, search |
//!
//! What must hold of every implementation:
//! - Success means durable. The one exception is the `note_*_used` family, which says so.
//! - Each write is all or nothing, and the facts that are handed to it go into the ledger in the same commit as its rows. So
//!   the domains of [`Stores`] share one database; workflows tell the ledger nothing and have their own.
//! - A write that was answered is seen by every read that begins afterwards, whoever wrote it.
//! - The ledger is append-only.
//! - Nothing here reads a clock or decides about a sandbox's life.
//! - No async caller ever blocks its thread.
//!
//! Dropping the future of a write after its first poll does not undo the write; treat it as "may have happened".
//!
//! The module of each domain says what is committed together, how the caches in front of it are kept true, and what each lock
//! of its callers protects, so that an implementation for several servers knows what it takes over. The rules that rows must
//! keep however many servers write (versions, unique names, quotas) are kept by the stores and never by a caller's lock.

mod error;
pub mod ledger;
pub mod models;
pub mod sandboxes;
pub mod saved;
pub mod sqlite;
pub mod workflows;

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

pub use atoll_identity::IdentityStore;
pub use atoll_types::{Cursor, MAX_PAGE, Page};
pub use error::Error;
pub use ledger::{
    CommandEnd, Fact, FactPage, FactQuery, FactRow, LedgerStore, ModelCallFact, NetworkDecision, NewFact,
    Scope, UsageTotal,
};
pub use models::{
    ModelBodies, ModelBodyStore, ModelBudgetRow, ModelCallRow, ModelCallStore, ModelGuards, ModelGuardsRow,
    ModelKeyRow, ModelPriceRow, ModelProviderRow, ModelRates, ModelRouteRow, ModelSetup, ModelSetupStore,
    ModelStore, ModelTarget, ScreenRule, SpendBy, SpendQuery, SpendRow,
};
pub use sandboxes::{
    ArtifactKind, ArtifactRow, ArtifactStore, Idempotency, Inserted, InstanceQuery, InstanceRow,
    InstanceStore, NetworkTotal, NetworkUsageStore, NewSandbox, SandboxQuery, SandboxRow, SandboxRowStore,
    SandboxStore, SecretRow, SecretStore,
};
pub use saved::{
    Attachment, ProjectStorage, SavedStore, SnapshotRow, SnapshotStore, VolumeRow, VolumeState, VolumeStore,
};
pub use workflows::{
    OpenWorkflowRun, Place, WorkflowColumn, WorkflowField, WorkflowFilter, WorkflowItem, WorkflowItemStore,
    WorkflowOrder, WorkflowPage, WorkflowRunRow, WorkflowRunStore, WorkflowRunWrite, WorkflowSearchStore,
    WorkflowStore, WorkflowTest, WorkflowValue,
};

/// The server's main database, by domain. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Stores {
    pub identity: Arc<dyn IdentityStore>,
    pub sandboxes: Arc<dyn SandboxStore>,
    pub saved: Arc<dyn SavedStore>,
    pub models: Arc<dyn ModelStore>,
    pub ledger: Arc<dyn LedgerStore>,
    /// What they are all in.
    pub database: Arc<dyn Database>,
}

/// What the stores of one database have in common: its end.
#[async_trait]
pub trait Database: fmt::Debug + Send + Sync + 'static {
    /// Finishes every write that is queued and lets the database go. Later calls of its stores answer [`Error::Closed`].
    /// Without it nothing acknowledged is lost either; the next open only has a little more to do.
    async fn close(&self);
}

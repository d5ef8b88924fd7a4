//! What Atoll remembers: rows of the present and a ledger of the past, in one SQLite file.
//!
//! ```text
//!   async callers ──> bounded queue ──> one writer thread ── BEGIN, many jobs, COMMIT, fsync ──> answers
//!                └──> bounded queue ──> reader threads (snapshots of the last commit)
//! ```
//!
//! What must hold:
//! - A write is answered only after its `COMMIT` reached the disk (WAL, `synchronous=FULL`): success means durable. The
//!   one exception is the `note_*_used` family, which says so.
//! - Each write is all or nothing, and its facts go into the ledger in the same transaction as its rows.
//! - A write that fails takes nothing down with it, though it shares its transaction with others.
//! - The ledger is append-only. The database itself refuses to change a fact.
//! - Nobody outside of this crate speaks SQL, and nothing here reads a clock or decides about a sandbox's life.
//! - No async caller ever blocks its thread: SQLite runs on threads of its own.
//!
//! Dropping the future of a write after its first poll does not undo the write; treat it as "may have happened".

mod artifacts;
mod engine;
mod error;
mod facts;
mod identity;
mod keys;
mod models;
mod network;
mod page;
mod projects;
mod sandboxes;
mod schema;
mod secrets;
mod sessions;
mod snapshots;
mod sql;
mod touches;
mod volumes;
mod workflow_search;
mod workflows;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use artifacts::{ArtifactKind, ArtifactRow};
pub use error::Error;
pub use facts::{
    CommandEnd, Fact, FactPage, FactQuery, FactRow, ModelCallFact, NetworkDecision, NewFact, Scope,
    UsageTotal,
};
pub use models::bodies::ModelBodies;
pub use models::calls::{ModelCallRow, SpendBy, SpendQuery, SpendRow};
pub use models::guards::{ModelGuards, ModelGuardsRow, ScreenRule};
pub use models::{
    ModelBudgetRow, ModelKeyRow, ModelPriceRow, ModelProviderRow, ModelRates, ModelRouteRow, ModelSetup,
    ModelTarget,
};
pub use network::NetworkTotal;
pub use page::{Cursor, MAX_PAGE, Page};
pub use sandboxes::{Idempotency, Inserted, NewSandbox, SandboxQuery, SandboxRow};
pub use secrets::SecretRow;
pub use snapshots::{ProjectStorage, SnapshotRow};
pub use volumes::{Attachment, VolumeRow, VolumeState};
pub use workflow_search::{
    WorkflowColumn, WorkflowField, WorkflowFilter, WorkflowOrder, WorkflowPage, WorkflowTest, WorkflowValue,
};
pub use workflows::{OpenWorkflowRun, WorkflowItem, WorkflowRunRow, WorkflowRunWrite};

use engine::Engine;
use touches::Touches;

/// A handle to the open database; cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    touches: Arc<Touches>,
    path: PathBuf,
}

impl Store {
    /// Opens the database at `path`, creating or upgrading it as needed. Blocks: call it before serving, or from a
    /// blocking thread. That only one server uses the file is the caller's business.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let touches = Arc::new(Touches::default());
        let engine = Engine::open(path, Arc::clone(&touches))?;
        Ok(Self {
            inner: Arc::new(Inner {
                engine,
                touches,
                path: path.to_owned(),
            }),
        })
    }

    /// A database in memory, for tests: without threads, so that the same calls are answered in the same order.
    #[cfg(feature = "testing")]
    pub fn in_memory() -> Result<Self, Error> {
        let touches = Arc::new(Touches::default());
        let engine = Engine::in_memory(Arc::clone(&touches))?;
        Ok(Self::on(engine, touches))
    }

    /// The same database, of one in memory, as a server finds it whose predecessor was killed.
    #[cfg(feature = "testing")]
    pub fn again(&self) -> Option<Self> {
        let touches = Arc::new(Touches::default());
        let engine = self.inner.engine.again(Arc::clone(&touches))?;
        Some(Self::on(engine, touches))
    }

    /// Forgets everything that is in a database in memory.
    #[cfg(feature = "testing")]
    pub fn empty(&self) -> Result<(), Error> {
        self.inner.engine.empty()
    }

    /// The disk under a database in memory is full, or has room again.
    #[cfg(feature = "testing")]
    pub fn fill_disk(&self, full: bool) {
        self.inner.engine.fill(full);
    }

    #[cfg(feature = "testing")]
    fn on(engine: Engine, touches: Arc<Touches>) -> Self {
        Self {
            inner: Arc::new(Inner {
                engine,
                touches,
                path: ":memory:".into(),
            }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Finishes every write that is queued and closes the file. Later calls answer [`Error::Closed`]. Without it nothing
    /// acknowledged is lost either; the next open only has a little more to read.
    pub async fn close(&self) {
        self.inner.engine.close().await;
    }

    /// Writes what the `note_*_used` family has gathered. Cheap when there is nothing.
    pub async fn flush(&self) -> Result<(), Error> {
        if self.inner.touches.is_empty() {
            return Ok(());
        }
        // Any job will do: the writer takes the gathered touches along with every batch.
        self.write("flush", |_| Ok(())).await
    }

    async fn write<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&rusqlite::Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.inner.engine.write(what, work).await
    }

    async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&rusqlite::Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.inner.engine.read(what, work).await
    }
}

//! The stores in SQLite files.
//!
//! ```text
//!   async callers ──> bounded queue ──> one writer thread ── BEGIN, many jobs, COMMIT, fsync ──> answers
//!                └──> bounded queue ──> reader threads (snapshots of the last commit)
//! ```
//!
//! What must hold:
//! - A write is answered only after its `COMMIT` reached the disk (WAL, `synchronous=FULL`).
//! - A write that fails takes nothing down with it, though it shares its transaction with others.
//! - The stores of one file share its engine: what several domains write at once is one group, and one fsync.
//! - A file has the tables of the domains that it is opened for, and no others ([`schema`]).
//! - Nobody outside of this module speaks SQL. SQLite runs on threads of its own.

mod artifacts;
mod bounded;
mod engine;
mod error;
mod facts;
mod groups;
mod identity;
mod instances;
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
mod trimming;
mod volumes;
mod workflow_search;
mod workflows;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use atoll_types::ProjectId;
use rusqlite::Connection;

use crate::{Database, Error, Stores, WorkflowStore};
use engine::Engine;
use touches::Touches;

/// Opens the server's main database at `path`, creating or upgrading it as needed. Blocks: call it before serving, or from a
/// blocking thread. That only one server uses the file is the caller's business.
pub fn open(path: &Path) -> Result<Stores, Error> {
    Ok(File::open(path, schema::MAIN)?.stores())
}

/// The same for the database of workflows.
pub fn open_workflows(path: &Path) -> Result<Arc<dyn WorkflowStore>, Error> {
    let file = File::open(path, schema::WORKFLOWS)?;
    Ok(Arc::new(Workflows { file }))
}

/// An open file; cheap to clone.
#[derive(Debug, Clone)]
struct File {
    engine: Arc<Engine>,
    touches: Arc<Touches>,
}

#[derive(Debug)]
struct Identity {
    file: File,
}

#[derive(Debug)]
struct Sandboxes {
    file: File,
}

#[derive(Debug)]
struct Saved {
    file: File,
}

#[derive(Debug)]
struct Models {
    file: File,
}

#[derive(Debug)]
struct Ledger {
    file: File,
}

#[derive(Debug)]
struct Workflows {
    file: File,
}

impl File {
    fn open(path: &Path, domains: schema::Domains) -> Result<Self, Error> {
        let touches = Arc::new(Touches::default());
        let engine = Arc::new(Engine::open(path, domains, Arc::clone(&touches))?);
        Ok(Self { engine, touches })
    }

    fn stores(&self) -> Stores {
        let file = || self.clone();
        Stores {
            identity: Arc::new(Identity { file: file() }),
            sandboxes: Arc::new(Sandboxes { file: file() }),
            saved: Arc::new(Saved { file: file() }),
            models: Arc::new(Models { file: file() }),
            ledger: Arc::new(Ledger { file: file() }),
            database: Arc::new(file()),
        }
    }

    /// Writes what the `note_*_used` family has gathered. Cheap when there is nothing.
    async fn flush(&self) -> Result<(), Error> {
        if self.touches.is_empty() {
            return Ok(());
        }
        // Any job will do: the writer takes the gathered touches along with every batch.
        self.write("flush", |_| Ok(())).await
    }

    async fn write<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.engine.write(what, work).await
    }

    async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.engine.read(what, work).await
    }

    /// See [`Engine::report`].
    async fn report<T: Send + 'static>(
        &self,
        project: &ProjectId,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.engine.report(project.as_str(), what, work).await
    }
}

#[async_trait]
impl Database for File {
    async fn close(&self) {
        self.engine.close().await;
    }
}

#[async_trait]
impl Database for Workflows {
    async fn close(&self) {
        self.file.close().await;
    }
}

/// A main database in memory, for tests: without threads, so that the same calls are answered in the same order.
#[cfg(feature = "testing")]
#[derive(Debug, Clone)]
pub struct Memory {
    file: File,
}

#[cfg(feature = "testing")]
impl Memory {
    pub fn open() -> Result<Self, Error> {
        let touches = Arc::new(Touches::default());
        let engine = Engine::in_memory(schema::MAIN, Arc::clone(&touches))?;
        Ok(Self::on(engine, touches))
    }

    pub fn stores(&self) -> Stores {
        self.file.stores()
    }

    /// The same database as a server finds it whose predecessor was killed.
    pub fn again(&self) -> Option<Self> {
        let touches = Arc::new(Touches::default());
        let engine = self.file.engine.again(Arc::clone(&touches))?;
        Some(Self::on(engine, touches))
    }

    /// Forgets everything that is in it.
    pub fn empty(&self) -> Result<(), Error> {
        self.file.engine.empty()
    }

    /// The disk under it is full, or has room again.
    pub fn fill_disk(&self, full: bool) {
        self.file.engine.fill(full);
    }

    fn on(engine: Engine, touches: Arc<Touches>) -> Self {
        let engine = Arc::new(engine);
        Self {
            file: File { engine, touches },
        }
    }
}

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

    /// See [`Engine::sum`].
    async fn sum<T: Send + 'static>(
        &self,
        project: &ProjectId,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.engine.sum(project.as_str(), what, work).await
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_types::{BudgetScope, BudgetWindow, Id, SandboxId, Timestamp};
    use tokio::sync::oneshot;

    use super::*;
    use crate::{LedgerStore as _, ModelCallStore as _, Scope, SpendBy, SpendQuery, UsageTotal};

    const LONG: Duration = Duration::from_secs(60);

    /// How long they take is up to the project that they are of, so nobody else may wait for them.
    #[tokio::test(flavor = "multi_thread")]
    async fn sums_of_a_project_are_not_read_by_the_readers_of_all() {
        let directory = tempfile::tempdir().unwrap();
        let file = File::open(&directory.path().join("atoll.db"), schema::MAIN).unwrap();
        // All readers are busy until this is dropped.
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(parking_lot::Mutex::new(held));
        let mut reading = Vec::new();
        for _ in 0..engine::READERS {
            let (begin, begun) = oneshot::channel();
            let (engine, held) = (Arc::clone(&file.engine), Arc::clone(&held));
            reading.push(tokio::spawn(async move {
                let read = engine.read("hold", move |_| {
                    let _ = begin.send(());
                    let _ = held.lock().recv();
                    Ok(())
                });
                read.await.unwrap();
            }));
            begun.await.unwrap();
        }
        let (ledger, models) = (Ledger { file: file.clone() }, Models { file: file.clone() });
        let project: ProjectId = Id::from_entropy([1; 20]);
        let sandbox: SandboxId = Id::from_entropy([2; 20]);
        let (from, to) = (Timestamp(0), Timestamp(i64::MAX));
        let query = SpendQuery {
            project: project.clone(),
            from,
            to,
            by: SpendBy::Day,
            model: None,
            provider: None,
            sandbox: None,
            user: None,
            key: None,
        };
        let sums = async {
            ledger.compute_beside(query).await.unwrap();
            for scope in [
                Scope::Project(project.clone()),
                Scope::Sandbox(project.clone(), sandbox),
            ] {
                ledger.usage_total(scope, from, to).await.unwrap();
            }
            let none = (UsageTotal::default(), 0);
            ledger.usage_since(&project, none).await.unwrap();
            let (scope, window) = (BudgetScope::Project, BudgetWindow::Total);
            let spent = models.model_spent(&project, scope, None, window, from, 1);
            spent.await.unwrap();
        };
        let summed = tokio::time::timeout(LONG, sums).await;
        drop(release);
        for read in reading {
            read.await.unwrap();
        }
        assert!(summed.is_ok(), "a sum waits for a reader");
    }
}

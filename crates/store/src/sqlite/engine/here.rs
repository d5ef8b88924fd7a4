//! A database in memory, worked on where the caller is: for simulations, in which nothing may depend on threads.
//!
//! What must hold: a job is all or nothing, its caller is told after it, and others get a turn before and after it. All jobs
//! are parts of one transaction, whose end makes the database empty again: that is cheaper than a new one by far.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::Connection;
use tokio::sync::mpsc;

use super::{Engine, WriteJob, named};
use crate::Error;
use crate::sqlite::schema::{self, Domains};
use crate::sqlite::touches::Touches;

pub(super) struct Here {
    connection: Arc<Mutex<Connection>>,
    touches: Arc<Touches>,
    closed: AtomicBool,
    /// Of the disk, which outlives whoever works on the database.
    full: Arc<AtomicBool>,
}

impl Here {
    /// Answers by dropping the job when it is closed.
    pub(super) async fn write(&self, job: WriteJob) {
        tokio::task::yield_now().await;
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        {
            let connection = self.connection.lock();
            if self.full.load(Ordering::Relaxed) {
                job.refuse(Error::Full { what: "commit" });
            } else {
                self.touches.write(&connection);
                job.run(&connection)(Ok(()));
            }
        }
        tokio::task::yield_now().await;
    }

    pub(super) async fn read<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        tokio::task::yield_now().await;
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed);
        }
        let read = {
            let connection = self.connection.lock();
            work(&connection).map_err(|error| named(what, error))
        };
        tokio::task::yield_now().await;
        read
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

impl Engine {
    pub(crate) fn in_memory(domains: Domains, touches: Arc<Touches>) -> Result<Self, Error> {
        let connection = schema::in_memory(domains)?;
        connection.execute_batch("BEGIN")?;
        Ok(Self::here(
            Arc::new(Mutex::new(connection)),
            touches,
            Arc::default(),
        ))
    }

    /// Forgets everything. Whoever else uses this database finds it empty.
    pub(crate) fn empty(&self) -> Result<(), Error> {
        let Some(here) = &self.here else { return Ok(()) };
        let connection = here.connection.lock();
        connection.execute_batch("ROLLBACK; BEGIN")?;
        here.full.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// From now on nothing more can be written, or everything again.
    pub(crate) fn fill(&self, full: bool) {
        if let Some(here) = &self.here {
            here.full.store(full, Ordering::Relaxed);
        }
    }

    /// Another one on the same database, as after a crash of the first.
    pub(crate) fn again(&self, touches: Arc<Touches>) -> Option<Self> {
        let here = self.here.as_ref()?;
        let (connection, full) = (Arc::clone(&here.connection), Arc::clone(&here.full));
        Some(Self::here(connection, touches, full))
    }

    fn here(connection: Arc<Mutex<Connection>>, touches: Arc<Touches>, full: Arc<AtomicBool>) -> Self {
        Self {
            writer: mpsc::channel(1).0,
            reports: mpsc::channel(1).0,
            turns: super::Turns::each(1),
            readers: mpsc::channel(1).0,
            growth: Arc::default(),
            here: Some(Here {
                connection,
                touches,
                closed: AtomicBool::new(false),
                full,
            }),
        }
    }
}

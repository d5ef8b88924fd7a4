//! The threads that own the connections: one writer with group commit, a few readers.
//!
//! While the writer waits for the disk, jobs queue up; it then takes all of them (up to [`MAX_BATCH`]) into the next
//! transaction. A lone writer pays for one fsync, a hundred at once share it. Each job runs in a savepoint, so that a
//! failing one rolls back only itself; answers go out after `COMMIT`.
//!
//! What must hold: a caller sees `Ok` only if the transaction that holds its work was committed. SQLite may roll back
//! the whole transaction on its own (disk full, I/O error); the writer looks for that after each failed job.

mod growth;
#[cfg(feature = "testing")]
mod here;

use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use atoll_turns::Turns;
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot, watch};

use self::growth::Growth;
use super::bounded::{Bounds, Waits, bounded};
use super::schema::{self, Domains};
use super::touches::Touches;
use crate::Error;

/// Jobs that share one transaction at most: bounds how long the first of them waits.
const MAX_BATCH: usize = 256;
/// Jobs that wait for a thread; beyond it callers wait for room, asynchronously.
const QUEUE: usize = 1024;
pub(crate) const READERS: usize = 3;
/// How long a report may take. Whoever asks for one chooses how much is read for it.
const REPORT: Bounds = Bounds {
    steps: u64::MAX,
    time: Duration::from_secs(10),
};

/// The same for a sum that has to be known, however much it is of.
const SUM: Bounds = Bounds {
    steps: u64::MAX,
    time: Duration::from_secs(60),
};

/// One write that somebody waits for.
trait Write: Send {
    /// Runs inside of the open transaction; gives back how to answer once its fate is known.
    fn run(self: Box<Self>, connection: &Connection) -> Answer;
    /// Answers without having run.
    fn refuse(self: Box<Self>, error: Error);
}

struct Job<T, W> {
    what: &'static str,
    work: W,
    tell: oneshot::Sender<Result<T, Error>>,
}

type WriteJob = Box<dyn Write>;
type Answer = Box<dyn FnOnce(Result<(), Error>) + Send>;
type ReadJob = Box<dyn FnOnce(&Connection) + Send>;

enum Message<J> {
    Job(J),
    /// Finish what came before, close the connection, then say so.
    Close(oneshot::Sender<()>),
}

pub(crate) struct Engine {
    writer: mpsc::Sender<Message<WriteJob>>,
    readers: mpsc::Sender<Message<ReadJob>>,
    /// A thread of its own, so that nobody waits for reports but those who want some.
    reports: mpsc::Sender<Message<ReadJob>>,
    /// Who wants a report: one at a time of each project.
    turns: Turns<String>,
    growth: Arc<Growth>,
    /// Instead of the threads.
    #[cfg(feature = "testing")]
    here: Option<here::Here>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl<T, W> Write for Job<T, W>
where
    T: Send + 'static,
    W: FnOnce(&Connection) -> Result<T, Error> + Send,
{
    fn run(self: Box<Self>, connection: &Connection) -> Answer {
        let Self { what, work, tell } = *self;
        let result = in_savepoint(connection, work).map_err(|error| named(what, error));
        Box::new(move |committed| {
            // Nobody listens any more when the caller has gone away.
            let _ = tell.send(match committed {
                Ok(()) => result,
                // Its own error explains more than the group's.
                Err(group) => Err(result.err().unwrap_or(group)),
            });
        })
    }

    fn refuse(self: Box<Self>, error: Error) {
        let _ = self.tell.send(Err(error));
    }
}

impl Engine {
    pub(crate) fn open(path: &Path, domains: Domains, touches: Arc<Touches>) -> Result<Self, Error> {
        let connection = schema::open_writer(path, domains)?;
        let growth = Arc::<Growth>::default();
        let grown = schema::has_ledger(domains).then(|| Arc::clone(&growth));
        if let Some(growth) = &grown {
            growth.tell(&connection);
        }
        let (writer, inbox) = mpsc::channel(QUEUE);
        spawn("store-writer", path, move || {
            write_loop(connection, inbox, &touches, grown.as_deref());
        })?;

        let (readers, inbox) = mpsc::channel(QUEUE);
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..READERS {
            let connection = schema::open_reader(path)?;
            let inbox = Arc::clone(&inbox);
            spawn("store-reader", path, move || read_loop(connection, &inbox))?;
        }
        let (reports, inbox) = mpsc::channel(QUEUE);
        let connection = schema::open_reader(path)?;
        spawn("store-reports", path, move || {
            read_loop(connection, &Mutex::new(inbox));
        })?;
        Ok(Self {
            writer,
            readers,
            reports,
            turns: Turns::each(1),
            growth,
            #[cfg(feature = "testing")]
            here: None,
        })
    }

    pub(crate) fn growth(&self, project: Option<&str>) -> watch::Receiver<i64> {
        self.growth.subscribe(project)
    }

    pub(crate) async fn write<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (tell, told) = oneshot::channel();
        let job: WriteJob = Box::new(Job { what, work, tell });
        #[cfg(feature = "testing")]
        if let Some(here) = &self.here {
            here.write(job).await;
            return told.await.map_err(|_| Error::Closed)?;
        }
        self.writer
            .send(Message::Job(job))
            .await
            .map_err(|_| Error::Closed)?;
        told.await.map_err(|_| Error::Closed)?
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        #[cfg(feature = "testing")]
        if let Some(here) = &self.here {
            return here.read(what, work).await;
        }
        ask(&self.readers, what, work).await
    }

    /// Reads what may take long: one at a time of each project, on a thread for all of them.
    pub(crate) async fn report<T: Send + 'static>(
        &self,
        project: &str,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.report_within(REPORT, project, what, work).await
    }

    /// The same for a sum that something depends on.
    pub(crate) async fn sum<T: Send + 'static>(
        &self,
        project: &str,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.report_within(SUM, project, what, work).await
    }

    async fn report_within<T: Send + 'static>(
        &self,
        bounds: Bounds,
        project: &str,
        what: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        #[cfg(feature = "testing")]
        if let Some(here) = &self.here {
            return here.read(what, work).await;
        }
        let _turn = self.turns.take(&project.to_owned()).await;
        let waits = Waits::default();
        let _waiter = waits.waiter();
        ask(&self.reports, what, move |db| {
            bounded(db, what, bounds, &waits, work)
        })
        .await
    }

    pub(crate) async fn close(&self) {
        #[cfg(feature = "testing")]
        if let Some(here) = &self.here {
            here.close();
        }
        // Readers first: the last connection to close folds the log into the database.
        for readers in std::iter::repeat_n(&self.readers, READERS).chain([&self.reports]) {
            let (tell, told) = oneshot::channel();
            if readers.send(Message::Close(tell)).await.is_ok() {
                let _ = told.await;
            }
        }
        let (tell, told) = oneshot::channel();
        if self.writer.send(Message::Close(tell)).await.is_ok() {
            let _ = told.await;
        }
    }
}

fn spawn(name: &str, path: &Path, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map(drop)
        .map_err(|error| Error::Open {
            path: path.to_owned(),
            source: error.into(),
        })
}

fn write_loop(
    connection: Connection,
    mut inbox: mpsc::Receiver<Message<WriteJob>>,
    touches: &Touches,
    growth: Option<&Growth>,
) {
    let mut closing = None;
    while closing.is_none() {
        let Some(first) = inbox.blocking_recv() else { break };
        let mut batch = Vec::new();
        let mut message = Some(first);
        while let Some(next) = message {
            match next {
                Message::Job(job) => batch.push(job),
                Message::Close(tell) => {
                    closing = Some(tell);
                    break;
                }
            }
            message = if batch.len() < MAX_BATCH {
                inbox.try_recv().ok()
            } else {
                None
            };
        }
        perform(&connection, batch, touches, growth);
    }
    if !touches.is_empty() {
        perform(&connection, Vec::new(), touches, growth);
    }
    // Whoever still waits in the queue is answered `Closed` by its drop.
    inbox.close();
    drop(connection);
    if let Some(tell) = closing {
        let _ = tell.send(());
    }
}

/// One transaction: all jobs, `COMMIT`, all answers.
fn perform(connection: &Connection, batch: Vec<WriteJob>, touches: &Touches, growth: Option<&Growth>) {
    if let Err(error) = connection.execute_batch("BEGIN IMMEDIATE") {
        tracing::error!(%error, "the database could not begin a transaction");
        for job in batch {
            job.refuse(Error::commit("begin", &error));
        }
        return;
    }
    touches.write(connection);
    let mut answers = Vec::with_capacity(batch.len());
    let mut jobs = batch.into_iter();
    while !connection.is_autocommit()
        && let Some(job) = jobs.next()
    {
        answers.push(job.run(connection));
    }
    if connection.is_autocommit() {
        tracing::error!(
            writes = answers.len(),
            "the database gave up a transaction by itself"
        );
        let given_up = || Error::Commit {
            what: "a group of writes",
            detail: "a write that shared its transaction made the database give it up".into(),
        };
        for answer in answers {
            answer(Err(given_up()));
        }
        // Those behind it have not run. The disk is in trouble, so they are not tried either.
        for job in jobs {
            job.refuse(given_up());
        }
        return;
    }
    match connection.execute_batch("COMMIT") {
        Ok(()) => {
            answers.into_iter().for_each(|answer| answer(Ok(())));
            if let Some(growth) = growth {
                growth.tell(connection);
            }
        }
        Err(error) => {
            tracing::error!(%error, writes = answers.len(), "a group of writes could not be committed");
            if !connection.is_autocommit()
                && let Err(error) = connection.execute_batch("ROLLBACK")
            {
                tracing::error!(%error, "the database could not roll back");
            }
            for answer in answers {
                answer(Err(Error::commit("commit", &error)));
            }
        }
    }
}

fn read_loop(connection: Connection, inbox: &Mutex<mpsc::Receiver<Message<ReadJob>>>) {
    loop {
        // The lock is held while waiting, so idle readers queue behind it; it guards nothing that a panic could break.
        let message = inbox.lock().blocking_recv();
        match message {
            Some(Message::Job(job)) => job(&connection),
            Some(Message::Close(tell)) => {
                drop(connection);
                let _ = tell.send(());
                return;
            }
            None => return,
        }
    }
}

fn in_savepoint<T>(
    connection: &Connection,
    work: impl FnOnce(&Connection) -> Result<T, Error>,
) -> Result<T, Error> {
    connection.prepare_cached("SAVEPOINT job")?.execute([])?;
    let result = work(connection);
    if result.is_err() && !connection.is_autocommit() {
        connection.prepare_cached("ROLLBACK TO job")?.execute([])?;
    }
    if !connection.is_autocommit() {
        connection.prepare_cached("RELEASE job")?.execute([])?;
    }
    result
}

/// Several statements of one read see one state of the database.
/// Has some thread read, and waits for it.
async fn ask<T: Send + 'static>(
    threads: &mpsc::Sender<Message<ReadJob>>,
    what: &'static str,
    work: impl FnOnce(&Connection) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (tell, told) = oneshot::channel();
    let job: ReadJob = Box::new(move |connection| {
        // Nobody waits for it any more.
        if tell.is_closed() {
            return;
        }
        let _ = tell.send(in_snapshot(connection, work).map_err(|error| named(what, error)));
    });
    threads.send(Message::Job(job)).await.map_err(|_| Error::Closed)?;
    told.await.map_err(|_| Error::Closed)?
}

fn in_snapshot<T>(
    connection: &Connection,
    work: impl FnOnce(&Connection) -> Result<T, Error>,
) -> Result<T, Error> {
    connection.prepare_cached("BEGIN")?.execute([])?;
    let result = work(connection);
    connection.prepare_cached("COMMIT")?.execute([])?;
    result
}

/// Gives an error of SQLite the name of the job in which it came up.
fn named(what: &'static str, error: Error) -> Error {
    match error {
        Error::Refused { source, .. } => Error::Refused { what, source },
        Error::Full { .. } => Error::Full { what },
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(directory: &Path) -> Engine {
        Engine::open(&directory.join("atoll.db"), schema::MAIN, Arc::default()).unwrap()
    }

    fn insert(name: &'static str) -> impl FnOnce(&Connection) -> Result<(), Error> + Send + 'static {
        move |db| {
            db.execute(
                "INSERT INTO projects (id, name, created_at) VALUES (?1, ?1, 0)",
                [name],
            )?;
            Ok(())
        }
    }

    async fn names(engine: &Engine) -> Vec<String> {
        engine
            .read("list", |db| {
                crate::sqlite::sql::rows(db, "SELECT name FROM projects ORDER BY name", &[], |row| {
                    row.get(0)
                })
            })
            .await
            .unwrap()
    }

    /// Holds the writer until the returned sender is dropped, so that what is queued meanwhile shares one transaction.
    async fn hold(engine: &Engine) -> std::sync::mpsc::Sender<()> {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = oneshot::channel();
        let (tell, _) = oneshot::channel();
        let job = Job {
            what: "hold",
            tell,
            work: move |_: &Connection| {
                let _ = begin.send(());
                let _ = held.recv();
                Ok(())
            },
        };
        assert!(engine.writer.send(Message::Job(Box::new(job))).await.is_ok());
        begun.await.unwrap();
        release
    }

    #[tokio::test]
    async fn a_failing_write_rolls_back_only_itself() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let release = hold(&engine).await;
        let (a, b, c, ()) = tokio::join!(
            engine.write("a", insert("a")),
            engine.write("b", |db| {
                insert("half")(db)?;
                insert("a")(db)
            }),
            engine.write("c", insert("c")),
            async { drop(release) },
        );
        assert!(a.is_ok() && c.is_ok());
        assert!(matches!(b, Err(Error::Refused { what: "b", .. })), "{b:?}");
        assert_eq!(names(&engine).await, ["a", "c"]);
    }

    #[tokio::test]
    async fn a_lost_transaction_is_admitted_to_everybody_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let release = hold(&engine).await;
        let (a, b, c, ()) = tokio::join!(
            engine.write("a", insert("a")),
            // What SQLite does by itself on some I/O errors.
            engine.write("b", |db| {
                db.execute_batch("ROLLBACK")?;
                Ok(())
            }),
            engine.write("c", insert("c")),
            async { drop(release) },
        );
        for result in [a, b, c] {
            assert!(matches!(result, Err(Error::Commit { .. })), "{result:?}");
        }
        engine.write("d", insert("d")).await.unwrap();
        assert_eq!(names(&engine).await, ["d"]);
    }

    #[tokio::test]
    async fn a_full_disk_is_told_and_survived() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        let pages = |limit: i64| {
            move |db: &Connection| {
                db.query_row(&format!("PRAGMA max_page_count = {limit}"), [], |_| Ok(()))?;
                Ok(())
            }
        };
        engine.write("shrink", pages(1)).await.unwrap();
        let fill = |db: &Connection| {
            db.execute(
                "INSERT INTO projects (id, name, created_at) VALUES ('x', hex(zeroblob(100000)), 0)",
                [],
            )?;
            Ok(())
        };
        let full = engine.write("fill", fill).await;
        assert!(matches!(full, Err(Error::Full { what: "fill" })), "{full:?}");
        engine.write("grow", pages(1_000_000)).await.unwrap();
        engine.write("fill", fill).await.unwrap();
        assert_eq!(names(&engine).await.len(), 1);
    }

    #[tokio::test]
    async fn after_closing_everything_is_answered() {
        let directory = tempfile::tempdir().unwrap();
        let engine = engine(directory.path());
        engine.write("a", insert("a")).await.unwrap();
        engine.close().await;
        engine.close().await;
        assert!(matches!(engine.write("b", insert("b")).await, Err(Error::Closed)));
        assert!(matches!(engine.read("c", |_| Ok(())).await, Err(Error::Closed)));
        assert!(
            !directory.path().join("atoll.db-wal").exists(),
            "the log was folded in"
        );
    }
}

//! The engine of durable workflows: decides with `workflow-core`, remembers with `store`, hands tasks to workers.
//!
//! ```text
//!   request ──> cell of its workflow id (one at a time) ──> Run decides ──> one commit: row + events (+ next run)
//!                                                                              │ only then
//!               task queues <── tasks ──┬── deadline ──> clock ──> tick <───────┤
//!               other workflows <───────┴── letters                            └──> answer, waiters
//! ```
//!
//! What must hold:
//! - Nothing is answered, handed out or sent before its commit is durable.
//! - A transition that has begun is finished even if its caller goes away.
//! - Everything in memory can be lost: cells are loaded again, queues and the clock are filled from the rows, letters stay
//!   in the outbox until they are delivered, and delivering one twice does nothing.
//! - What is done in a namespace is done while it is held, so that a name means one namespace from the first look at it to the
//!   last write (see [`namespaces`]).
//! - No two cells are locked at once; workflows reach each other through letters only.

#![allow(
    deprecated,
    reason = "clients still send, and read, what the wire has deprecated"
)]

mod activities;
mod approvals;
mod batches;
mod cells;
mod clock;
mod dispatch;
mod filter;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod letters;
mod namespaces;
mod pages;
mod queries;
mod queues;
mod removal;
mod requests;
mod rights;
mod schedules;
mod shares;
mod starts;
mod steps;
mod tasks;
mod time;
mod updates;
mod views;
mod visibility;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use atoll_store::{OpenWorkflowRun, WorkflowStore};
use atoll_workflow_core::{Limits, Nanos};
use tokio_util::sync::CancellationToken;

pub use approvals::{Approval, DENIED, Decision, Question, Verdict, digest};
pub use atoll_workflow_core::Refusal;
pub use namespaces::Namespace;
pub use rights::acting_with;
pub use steps::{Step, StepEnd};
pub use views::{ActivityView, EventView, WorkflowName, WorkflowView};

use approvals::Approvals;
use batches::Batches;
use cells::Cells;
use clock::Clock;
use namespaces::Namespaces;
use queries::Queries;
use queues::Queues;
use schedules::Schedules;
use visibility::Searching;

/// How often what is idle is looked for.
const HOUSEKEEPING: Duration = Duration::from_millis(500);

/// How long the engine lets callers wait, and how much it keeps in memory.
#[derive(Debug, Clone)]
pub struct Options {
    pub limits: Limits,
    /// A worker's poll.
    pub poll: Duration,
    /// A client that waits for a history to grow, or for an update.
    pub long_poll: Duration,
    /// Workflows that nobody has used for this long leave the memory.
    pub idle: Duration,
    /// So many of those that rest stay.
    pub most_in_memory: usize,
    /// So many bytes of them, about.
    pub most_bytes: usize,
    /// So many bytes of workflows a project keeps on the disk, about. What runs already may need an eighth more.
    pub most_kept: u64,
    /// Namespaces that are made when the engine opens, if they are not there.
    pub namespaces: Vec<String>,
    /// The project that those belong to.
    pub project: String,
    /// How long closed runs of those are kept.
    pub retention: Duration,
    /// The machine's clock, in nanoseconds since 1970.
    pub wall: fn() -> Nanos,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            poll: Duration::from_secs(60),
            long_poll: Duration::from_secs(20),
            idle: Duration::from_secs(20),
            most_in_memory: 1_024,
            most_bytes: 256 * 1024 * 1024,
            most_kept: 10 * 1024 * 1024 * 1024,
            namespaces: vec!["default".to_owned()],
            project: String::new(),
            retention: Duration::from_secs(72 * 3600),
            wall: time::wall,
        }
    }
}

/// A handle to the engine; cheap to clone.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Arc<dyn WorkflowStore>,
    options: Options,
    cells: Cells,
    queues: Queues,
    queries: Queries,
    clock: Clock,
    namespaces: Namespaces,
    schedules: Schedules,
    approvals: Approvals,
    batches: Batches,
    searching: Searching,
    time: time::Time,
    stop: CancellationToken,
}

impl Engine {
    /// Reads what was left by the server before, and goes on with it.
    pub async fn open(store: Arc<dyn WorkflowStore>, options: Options) -> Result<Self, Refusal> {
        let namespaces = Namespaces::load(&*store, &options).await?;
        let schedules = Schedules::load(&*store).await?;
        let approvals = Approvals::load(&*store).await?;
        let batches = Batches::load(&*store).await?;
        let open = store.open_workflow_runs().await.map_err(unavailable)?;
        let written = open.iter().map(|run| run.written_at).max();
        let time = time::Time::load(&*store, options.wall, written).await?;
        let engine = Self {
            inner: Arc::new(Inner {
                store,
                options,
                cells: Cells::default(),
                queues: Queues::default(),
                queries: Queries::default(),
                clock: Clock::default(),
                namespaces,
                schedules,
                approvals,
                batches,
                searching: Searching::default(),
                time,
                stop: CancellationToken::new(),
            }),
        };
        engine.resume(open).await?;
        engine.resume_batches(None);
        tokio::spawn(engine.clone().keep_time());
        tokio::spawn(engine.clone().keep_schedules());
        tokio::spawn(engine.clone().keep_approvals());
        tokio::spawn(engine.clone().keep_house());
        Ok(engine)
    }

    /// Stops handing out work. What was acknowledged is durable already.
    pub fn close(&self) {
        self.inner.stop.cancel();
    }

    /// Nanoseconds since 1970, never going back.
    fn now(&self) -> Nanos {
        self.inner.time.now()
    }

    /// What the workflows that are in memory hold, in bytes, about.
    pub fn bytes_in_memory(&self) -> usize {
        self.inner.cells.bytes()
    }

    /// Puts back what a restart has taken out of memory. A workflow stays there no longer than there is room.
    async fn resume(&self, open: Vec<OpenWorkflowRun>) -> Result<(), Refusal> {
        let now = self.now();
        for run in open {
            let key = cells::Key::new(&run.namespace, &run.workflow_id);
            if let Some(deadline) = run.deadline {
                // One that was written later than now is looked at now: its deadline may be wrong.
                let at = if run.written_at > now { now } else { deadline };
                self.inner.clock.arm(at, &key, &run.run_id);
            }
            if !run.is_ready {
                continue;
            }
            match self.dispatch_again(key, &run.run_id).await {
                // One that cannot be read is its owner's loss, and not a reason for all others to wait.
                Err(Refusal::Internal(error)) => {
                    tracing::error!(
                        namespace = run.namespace,
                        workflow = run.workflow_id,
                        run = run.run_id,
                        error,
                        "a workflow cannot be taken up; delete it and start it anew"
                    );
                }
                other => other?,
            }
            self.inner.cells.settle(self.inner.options.most_in_memory);
        }
        Ok(())
    }

    /// Evicts, forgets and expires, every now and then.
    async fn keep_house(self) {
        let mut rounds: u64 = 0;
        // Of an earlier server, perhaps.
        let mut time_is_kept = true;
        loop {
            tokio::select! {
                () = self.inner.stop.cancelled() => return,
                () = tokio::time::sleep(HOUSEKEEPING) => {}
            }
            let options = &self.inner.options;
            self.inner.cells.evict(options.idle, options.most_in_memory);
            self.inner.cells.relieve(options.most_bytes, true);
            self.inner.time.keep(&*self.inner.store, &mut time_is_kept).await;
            rounds += 1;
            if rounds.is_multiple_of(120) {
                self.inner.queues.sweep();
                self.expire().await;
            }
        }
    }

    async fn expire(&self) {
        for (namespace, retention) in self.inner.namespaces.retentions() {
            let Ok(_inside) = self.inner.namespaces.enter(&namespace) else {
                continue;
            };
            let before = self.now().saturating_sub(retention);
            let expired = self
                .inner
                .store
                .expired_workflow_runs(namespace.clone(), before, 1_000)
                .await;
            for (workflow_id, run_id) in expired.unwrap_or_default() {
                if let Err(error) = self.delete_run(&namespace, &workflow_id, &run_id).await {
                    tracing::warn!(namespace, workflow_id, run_id, %error, "a closed run could not be deleted");
                }
            }
        }
    }
}

/// The store did not do as asked: nothing was decided, and the caller may try again.
#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err wants")]
fn unavailable(error: atoll_store::Error) -> Refusal {
    tracing::error!(%error, "the store failed");
    Refusal::Unavailable(format!("the store failed: {error}"))
}

fn fresh_id() -> String {
    uuid::Uuid::now_v7().to_string()
}

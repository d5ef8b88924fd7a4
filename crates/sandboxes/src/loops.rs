//! What the server does while nobody calls: deadlines, metering, the ledger's queue, housekeeping. What it looks at before
//! it takes a sandbox for idle is in `idleness`.
//!
//! None of them ticks per sandbox: a thousand idle sandboxes cost one sleeping task each, and a
//! second one where a command has run.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_lifecycle::{CpuMark, Input};
use atoll_node::Event;
use atoll_store::{Fact, NetworkTotal, NewFact};
use atoll_types::{SandboxState, Timestamp};
use tokio::sync::mpsc;

use crate::Sandboxes;
use crate::cell::{Cell, Metered};

/// Deadlines are looked at at least this often, in case the wall clock jumps.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// How long facts may gather before they are written together.
const FACTS_LINGER: Duration = Duration::from_millis(50);
/// How long until they are tried again when the database could not take them.
const FACTS_AGAIN: Duration = Duration::from_secs(1);
/// How long sums of the way out may gather.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);
const HOUSEKEEPING: Duration = Duration::from_secs(60);
/// How many facts go at a time, so that others may write in between.
const FACTS_FORGOTTEN: usize = 20_000;
/// The same of model calls.
const CALLS_FORGOTTEN: usize = 10_000;
/// The same of sandboxes that ended.
const SANDBOXES_FORGOTTEN: usize = 1000;
/// How often it is looked for projects with too much in the ledger, while that grows.
const LEDGER_MEASURED: Duration = Duration::from_secs(1);

impl Sandboxes {
    pub(crate) fn start_loops(&self, facts: mpsc::Receiver<NewFact>, events: mpsc::Receiver<Event>) {
        let tasks = &self.inner.tasks;
        let service = self.clone();
        tasks.spawn(async move { service.keep_deadlines().await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_metering().await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_house().await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_ledger().await });
        let service = self.clone();
        tasks.spawn(async move { service.write_facts(facts).await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_collecting().await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_collecting_templates().await });
        let service = self.clone();
        tasks.spawn(async move { service.keep_counting().await });
        let service = self.clone();
        tasks.spawn(async move { service.hear(events).await });
        self.node().start();
    }

    /// Ends sandboxes whose time is over. The store knows when; nothing is lost by a restart.
    async fn keep_deadlines(&self) {
        loop {
            self.inner.next_look.store(i64::MAX, Ordering::SeqCst);
            let wait = match self.reap_due().await {
                Ok(next) => next,
                Err(error) => {
                    tracing::error!(%error, "deadlines could not be read; trying again");
                    Duration::from_secs(1)
                }
            };
            let next = self
                .now()
                .plus_millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
            self.inner.next_look.store(next.0, Ordering::SeqCst);
            tokio::select! {
                biased;
                () = tokio::time::sleep(wait) => {}
                () = self.inner.deadlines.notified() => {}
                () = self.inner.stop.cancelled() => return,
            }
        }
    }

    /// Something of a sandbox was committed. Deadlines are looked at anew if its own comes before they would be, which is rare:
    /// most outlive the next look by far, and the look would compete with whoever waits for the sandbox.
    pub(crate) fn mind_deadline(&self, cell: &Cell) {
        let due = atoll_lifecycle::next_deadline(&cell.seen.borrow().record).map(|(at, _)| at.0);
        if due.is_some_and(|due| due < self.inner.next_look.load(Ordering::SeqCst)) {
            self.inner.deadlines.notify_one();
        }
    }

    /// Reaps what is due and says when to look again.
    async fn reap_due(&self) -> Result<Duration, atoll_store::Error> {
        let cells: Vec<Arc<Cell>> = self.live().values().cloned().collect();
        for cell in cells.iter().filter(|cell| cell.is_in_use()) {
            cell.touch(&*self.store().sandboxes, self.now());
        }
        let mut failed = false;
        let due = self.store().sandboxes.due_sandboxes(self.now(), 256).await?;
        let looks = due.into_iter().filter_map(|row| {
            let cell = self.live_cell(&row.id)?;
            Some(async move { (self.work_of(&cell, row.isolation).await, row, cell) })
        });
        // Side by side: one that is slow to answer does not make the others wait for longer than itself.
        for (work, row, cell) in futures_util::future::join_all(looks).await {
            let can_keep_memory = self.saves(row.isolation).is_ok_and(|saves| saves.memory);
            let reached = Input::DeadlineReached {
                snapshot: crate::entropy::id(),
                pause_keeps: if can_keep_memory {
                    atoll_types::SaveKind::Memory
                } else {
                    atoll_types::SaveKind::Filesystem
                },
                work,
            };
            match self.apply(&cell, reached).await {
                Ok(row) if row.record.state == SandboxState::Running => {
                    // What was decided about is not looked at again. Before that is written down it would be lost.
                    if let Some(work) = work {
                        cell.set_cpu_mark(work.cpu.1);
                    }
                }
                Ok(_) => {}
                Err(fault) => {
                    tracing::error!(sandbox = %cell.id, %fault, "a deadline could not be kept; trying again");
                    failed = true;
                }
            }
        }
        if failed {
            return Ok(Duration::from_secs(1));
        }
        let next = self.store().sandboxes.next_due().await?;
        Ok(next.map_or(LOOK_AGAIN, |at| {
            Duration::from_millis(at.millis_since(self.now()).max(1)).min(LOOK_AGAIN)
        }))
    }

    async fn keep_metering(&self) {
        let interval = Duration::from_millis(self.settings().metering_interval_millis.max(100));
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep(interval) => {}
                () = self.inner.stop.cancelled() => return,
            }
            let cells: Vec<Arc<Cell>> = self.live().values().cloned().collect();
            for cell in cells {
                self.meter(&cell).await;
                // Spread over the interval's first moments rather than one burst.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Writes down what went through the way out, for budgets that outlive the server.
    async fn keep_counting(&self) {
        loop {
            let stopping = tokio::select! {
                biased;
                () = tokio::time::sleep(COUNTED_WITHIN) => false,
                () = self.inner.stop.cancelled() => true,
            };
            for (sandbox, more) in self.node().take_network_usage().await {
                let more = NetworkTotal {
                    bytes_up: more.bytes_up,
                    bytes_down: more.bytes_down,
                    connections: more.connections,
                };
                if let Err(error) = self.store().sandboxes.add_network_usage(&sandbox, more).await {
                    tracing::error!(%sandbox, %error, "what went through its network could not be counted");
                }
            }
            if stopping {
                return;
            }
        }
    }

    /// Writes down what a sandbox has consumed since the last time, as the host counts it.
    pub(crate) async fn meter(&self, cell: &Cell) {
        let row = cell.last_seen();
        let (Some(instance), Some(started_at)) = (cell.instance(), row.record.started_at) else {
            return;
        };
        let Ok(usage) = self.node().usage(row.isolation, &instance.id).await else {
            return;
        };
        cell.note_cpu(CpuMark {
            at: self.now(),
            micros: usage.cpu_micros,
        });
        let before = cell.metered();
        let wall_total = self.now().millis_since(started_at);
        let wall_millis = wall_total.saturating_sub(before.wall_millis);
        let memory = u64::midpoint(before.memory_bytes.max(1), usage.memory_bytes);
        let byte_seconds = |bytes: u64| {
            u64::try_from(u128::from(bytes) * u128::from(wall_millis) / 1000).unwrap_or(u64::MAX)
        };
        let fact = Fact::Usage {
            instance: Some(instance.id.clone()),
            wall_millis,
            cpu_micros: usage.cpu_micros.saturating_sub(before.cpu_micros),
            memory_byte_seconds: byte_seconds(if before.memory_bytes == 0 {
                usage.memory_bytes
            } else {
                memory
            }),
            disk_byte_seconds: byte_seconds(usage.disk_bytes.unwrap_or(0)),
        };
        cell.set_metered(Metered {
            wall_millis: wall_total.max(before.wall_millis),
            cpu_micros: usage.cpu_micros.max(before.cpu_micros),
            memory_bytes: usage.memory_bytes,
        });
        self.append(cell, fact);
    }

    /// Whether the host's kernel has killed something in this sandbox for its memory.
    pub(crate) async fn ran_out_of_memory(&self, cell: &Cell) -> bool {
        let isolation = cell.seen.borrow().isolation;
        let Some(instance) = cell.instance() else {
            return false;
        };
        // One that is gone already was killed as a whole; its end says why.
        let usage = self.node().usage(isolation, &instance.id).await;
        usage.is_ok_and(|usage| usage.oom_kills > 0)
    }

    /// Writes queued facts in groups.
    async fn write_facts(&self, mut queue: mpsc::Receiver<NewFact>) {
        let mut batch = Vec::new();
        loop {
            let stopping = tokio::select! {
                biased;
                received = queue.recv_many(&mut batch, 1000) => received == 0,
                () = self.inner.stop.cancelled() => true,
            };
            if !stopping && batch.len() < 1000 {
                tokio::select! {
                    biased;
                    () = tokio::time::sleep(FACTS_LINGER) => {}
                    () = self.inner.stop.cancelled() => {}
                }
            }
            while let Ok(fact) = queue.try_recv() {
                batch.push(fact);
            }
            if !batch.is_empty() {
                self.write_batch(std::mem::take(&mut batch), stopping).await;
            }
            if stopping {
                return;
            }
        }
    }

    /// Tries until it is written. Meanwhile the queue fills up, and what would add to it is refused.
    async fn write_batch(&self, batch: Vec<NewFact>, stopping: bool) {
        while let Err(error) = self.store().ledger.append_facts(batch.clone()).await {
            tracing::error!(%error, "facts could not be recorded; trying again");
            if stopping || self.inner.stop.is_cancelled() {
                return;
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(FACTS_AGAIN) => {}
                () = self.inner.stop.cancelled() => {}
            }
        }
    }

    async fn keep_house(&self) {
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep(HOUSEKEEPING) => {}
                () = self.inner.stop.cancelled() => return,
            }
            if let Err(fault) = self.expire_artifacts().await {
                tracing::warn!(%fault, "expired artifacts could not be removed");
            }
            let old = self.before(self.settings().ended_retention_millis);
            loop {
                let forgotten = self.store().sandboxes.forget_sandboxes(old, SANDBOXES_FORGOTTEN);
                match forgotten.await {
                    Ok(SANDBOXES_FORGOTTEN) => {}
                    Ok(_) => break,
                    Err(error) => {
                        tracing::warn!(%error, "ended sandboxes could not be forgotten");
                        break;
                    }
                }
            }
            let old = self.before(self.settings().ledger_retention_millis);
            match self.store().ledger.expire_facts(old, FACTS_FORGOTTEN).await {
                Ok(0) => {}
                // Sums are of the facts that there are.
                Ok(_) => self.forget_usage(),
                Err(error) => tracing::warn!(%error, "old facts could not be forgotten"),
            }
            if let Err(error) = self.store().models.expire_model_calls(old, CALLS_FORGOTTEN).await {
                tracing::warn!(%error, "old model calls could not be forgotten");
            }
            self.destroy_orphans().await;
        }
    }

    /// Keeps what is left of each project's doings to its size. Apart from those who write: they never wait for it but as for
    /// anybody else who writes.
    async fn keep_ledger(&self) {
        let mut growth = self.store().ledger.ledger_growth(None);
        loop {
            if let Err(error) = self.trim_ledgers().await {
                tracing::warn!(%error, "the ledger could not be trimmed");
            }
            tokio::select! {
                biased;
                () = self.inner.stop.cancelled() => return,
                () = tokio::time::sleep(LEDGER_MEASURED) => {}
            }
            tokio::select! {
                biased;
                () = self.inner.stop.cancelled() => return,
                grown = growth.changed() => if grown.is_err() { return },
            }
        }
    }

    async fn trim_ledgers(&self) -> Result<(), atoll_store::Error> {
        let most = self.settings().max_ledger_bytes;
        for project in self.store().ledger.oversized_ledgers(most).await? {
            // A little more than it must, so that it is not to be done again at once.
            let enough = most - most / 16;
            while self
                .store()
                .ledger
                .trim_ledger(&project, enough, self.now())
                .await?
            {
                if self.inner.stop.is_cancelled() {
                    return Ok(());
                }
            }
            tracing::info!(%project, most, "the oldest of a project's ledger had to go");
        }
        Ok(())
    }

    /// So long ago.
    fn before(&self, millis: u64) -> Timestamp {
        Timestamp(
            self.now()
                .0
                .saturating_sub(i64::try_from(millis).unwrap_or(i64::MAX)),
        )
    }

    /// Destroys instances that belong to nobody. There should never be one; if there is, it must not live on.
    pub(crate) async fn destroy_orphans(&self) {
        for (isolation, _) in &self.node().offer().saves {
            let Ok(ids) = self.node().discover(*isolation).await else {
                continue;
            };
            for id in ids {
                let owned = self.held().contains(&id)
                    || self
                        .live()
                        .values()
                        .any(|cell| cell.seen.borrow().record.instance.as_ref() == Some(&id));
                if !owned {
                    tracing::warn!(instance = %id, "destroying an instance that belongs to nobody");
                    self.node().destroy(*isolation, &id).await;
                }
            }
        }
    }
}

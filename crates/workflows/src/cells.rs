//! Workflows in memory: one cell per workflow id, whose runs change one transition at a time.
//!
//! What must hold: what all of them hold is bounded, in number and in bytes. Who waits for something to happen to a workflow
//! does not keep it in memory.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use atoll_store::{WorkflowRunRow, WorkflowRunWrite};
use atoll_workflow_core::{Effect, Limits, Refusal, Run, State, Turn};
use prost::Message as _;
use temporalio_protos::temporal::api::history::v1::History;
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::namespaces::Hold;
use crate::pages::Pages;
use crate::shares::Growth;
use crate::{Engine, fresh_id, unavailable, visibility};

/// One that was used later than this is likely to be used again at once.
const RESTED: Duration = Duration::from_secs(1);
/// Who has asked for an update, and not for its answer in this time, does not wait for it any more.
const GIVEN_UP: Duration = Duration::from_secs(300);
/// What an event costs beside its bytes, about.
const EVENT: usize = 256;
/// A workflow that holds more than such a part of what all may hold is looked at more closely.
const LARGE: usize = 32;

/// A workflow: a namespace and an id.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) namespace: Arc<str>,
    pub(crate) workflow_id: Arc<str>,
}

impl Key {
    pub(crate) fn new(namespace: &str, workflow_id: &str) -> Self {
        Self {
            namespace: namespace.into(),
            workflow_id: workflow_id.into(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) key: Key,
    loaded: Arc<tokio::sync::Mutex<Loaded>>,
    /// Counts commits, for those who wait for something to happen.
    changes: Arc<watch::Sender<u64>>,
    /// About what it holds, in bytes; and the sum over all cells.
    weight: AtomicUsize,
    total: Arc<AtomicUsize>,
}

impl Drop for Cell {
    fn drop(&mut self) {
        self.total.fetch_sub(*self.weight.get_mut(), Ordering::Relaxed);
    }
}

/// The runs of a workflow that are in memory.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Known once somebody has looked.
    current: Option<Option<String>>,
    runs: HashMap<String, Slot>,
}

#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) run: Run,
    /// Queries that go along with the next workflow task.
    pub(crate) queries: Vec<String>,
    /// What has come of the answer to the workflow task.
    pub(crate) pages: Pages,
    /// The deadline that the clock knows.
    armed: i64,
    /// What it is searched by, as it was after so many changes.
    search: Option<(u64, String)>,
    /// What its state has, as it was last written.
    state_bytes: usize,
    /// Somebody is delivering its letters.
    pub(crate) posting: bool,
    is_new: bool,
}

impl Slot {
    fn new(run: Run, is_new: bool) -> Self {
        Self {
            run,
            queries: Vec::new(),
            pages: Pages::default(),
            armed: 0,
            search: None,
            state_bytes: 0,
            posting: false,
            is_new,
        }
    }

    pub(crate) fn rearm(&mut self, deadline: i64) {
        self.armed = deadline;
    }

    fn bytes(&self) -> usize {
        usize::try_from(self.run.state.history_bytes).unwrap_or(0)
            + self.run.events.len() * EVENT
            + self.state_bytes
            + self.run.memory_bytes()
            + self.pages.bytes()
    }

    /// It is in the middle of something that is not in the store.
    fn is_busy(&self) -> bool {
        self.posting || !self.queries.is_empty()
    }
}

type All = HashMap<Key, (Arc<Cell>, Instant)>;

#[derive(Debug, Default)]
pub(crate) struct Cells {
    all: Mutex<All>,
    /// Those who wait for something to happen to a workflow that has left the memory.
    waited_for: Mutex<HashMap<Key, Weak<watch::Sender<u64>>>>,
    total: Arc<AtomicUsize>,
    /// What could not be forgotten when it was last tried and was too much.
    in_use: AtomicUsize,
}

impl Cells {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock()
    }

    pub(crate) fn get(&self, key: &Key) -> Arc<Cell> {
        let mut all = self.lock();
        let now = Instant::now();
        if let Some((cell, used)) = all.get_mut(key) {
            *used = now;
            return Arc::clone(cell);
        }
        let waited_for = self.waited_for().remove(key).and_then(|known| known.upgrade());
        let cell = Arc::new(Cell {
            key: key.clone(),
            loaded: Arc::default(),
            changes: waited_for.unwrap_or_else(|| Arc::new(watch::Sender::new(0))),
            weight: AtomicUsize::new(0),
            total: Arc::clone(&self.total),
        });
        all.insert(key.clone(), (Arc::clone(&cell), now));
        cell
    }

    /// Forgets all of a namespace that nobody is in. Who still waits for one of them looks again, and does not find it.
    pub(crate) fn forget(&self, namespace: &str) {
        let mut all = self.lock();
        let keys: Vec<Key> = all
            .keys()
            .filter(|key| *key.namespace == *namespace)
            .cloned()
            .collect();
        let removed = self.remove(&mut all, keys);
        drop(all);
        for cell in removed {
            cell.changes.send_modify(|count| *count += 1);
        }
        self.waited_for().retain(|key, waited_for| {
            let stays = *key.namespace != *namespace;
            if let (false, Some(changes)) = (stays, waited_for.upgrade()) {
                changes.send_modify(|count| *count += 1);
            }
            stays
        });
    }

    fn waited_for(&self) -> MutexGuard<'_, HashMap<Key, Weak<watch::Sender<u64>>>> {
        self.waited_for.lock()
    }

    /// Takes cells out; whoever calls this lets go of the lock before them.
    fn remove(&self, all: &mut All, keys: impl IntoIterator<Item = Key>) -> Vec<Arc<Cell>> {
        let mut waited_for = self.waited_for();
        let mut removed = Vec::new();
        for key in keys {
            let Some((cell, _)) = all.remove(&key) else {
                continue;
            };
            if Arc::strong_count(&cell.changes) > 1 {
                waited_for.insert(key, Arc::downgrade(&cell.changes));
            }
            removed.push(cell);
        }
        removed
    }

    /// Forgets cells that nobody holds or has used for a while, and the longest unused where there are more than `most`;
    /// unless they are busy, or something would be lost with them that somebody may wait for.
    pub(crate) fn evict(&self, idle: Duration, most: usize) {
        let mut all = self.lock();
        let rests = |(_, (cell, used)): &(&Key, &(Arc<Cell>, Instant))| {
            used.elapsed() >= idle && cell.may_be_forgotten(used.elapsed() >= GIVEN_UP)
        };
        let idle: Vec<Key> = all.iter().filter(rests).map(|(key, _)| key.clone()).collect();
        let mut removed = self.remove(&mut all, idle);
        if let Some(surplus) = all.len().checked_sub(most).filter(|surplus| *surplus > 0) {
            let unused = longest_unused(&all, RESTED, false).into_iter().take(surplus);
            removed.extend(self.remove(&mut all, unused.map(|(key, _)| key)));
        }
        self.waited_for().retain(|_, known| known.strong_count() > 0);
        drop(all);
        drop(removed);
    }

    /// Forgets the longest unused where all of them hold more than `most` bytes, however short ago that was. Then those go
    /// that hold updates which nobody is waiting for at the moment: who asks again sends them again.
    pub(crate) fn relieve(&self, most: usize, anyway: bool) {
        let before = self.total.load(Ordering::Relaxed);
        // All of it was in use a moment ago: that need not be found out each time.
        let in_use = self.in_use.load(Ordering::Relaxed);
        if before <= most || (!anyway && before < in_use.saturating_add(most / 16)) {
            return;
        }
        // Some more than has to be, for the same reason.
        let (mut left, goal) = (before, most - most / 8);
        let mut removed = Vec::new();
        let mut all = self.lock();
        for (rested, with_updates, unless) in [
            (Duration::ZERO, false, goal),
            (RESTED, true, goal),
            (Duration::ZERO, true, most.saturating_mul(2)),
        ] {
            let mut keys = Vec::new();
            if left <= unless {
                break;
            }
            for (key, weight) in longest_unused(&all, rested, with_updates) {
                if left <= goal {
                    break;
                }
                left = left.saturating_sub(weight);
                keys.push(key);
            }
            removed.extend(self.remove(&mut all, keys));
        }
        self.in_use
            .store(if left > most { left } else { 0 }, Ordering::Relaxed);
        drop(all);
        drop(removed);
    }

    /// Forgets the longest unused where there are more than `most`, however short ago that was.
    pub(crate) fn settle(&self, most: usize) {
        let mut all = self.lock();
        let Some(surplus) = all.len().checked_sub(most).filter(|surplus| *surplus > 0) else {
            return;
        };
        let unused = longest_unused(&all, Duration::ZERO, false);
        // Some more than has to be, as above.
        let unused = unused.into_iter().take(surplus + most / 8);
        let removed = self.remove(&mut all, unused.map(|(key, _)| key));
        drop(all);
        drop(removed);
    }

    /// What all of them hold, about.
    pub(crate) fn bytes(&self) -> usize {
        self.total.load(Ordering::Relaxed)
    }
}

/// Those that may be forgotten, with what they hold, the longest unused first.
fn longest_unused(all: &All, rested: Duration, with_updates: bool) -> Vec<(Key, usize)> {
    let mut unused: Vec<_> = all
        .iter()
        .filter(|(_, (cell, used))| used.elapsed() >= rested && cell.may_be_forgotten(with_updates))
        .map(|(key, (cell, used))| (*used, key.clone(), cell.weight.load(Ordering::Relaxed)))
        .collect();
    unused.sort_unstable_by_key(|(used, _, _)| *used);
    unused.into_iter().map(|(_, key, weight)| (key, weight)).collect()
}

impl Cell {
    /// Nobody holds it, and all of it is in the store, but for updates if those do not matter. Asked under the lock of all
    /// cells, so nobody takes it meanwhile.
    fn may_be_forgotten(self: &Arc<Self>, with_updates: bool) -> bool {
        if Arc::strong_count(self) > 1 {
            return false;
        }
        let Ok(loaded) = self.loaded.try_lock() else {
            return false;
        };
        !loaded
            .runs
            .values()
            .any(|slot| slot.is_busy() || (slot.run.has_memory() && !with_updates))
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// For those who wait, and let the workflow leave the memory meanwhile. They have to hold this.
    pub(crate) fn changes(&self) -> Arc<watch::Sender<u64>> {
        Arc::clone(&self.changes)
    }

    fn weigh(&self, bytes: usize) {
        let before = self.weight.swap(bytes, Ordering::Relaxed);
        self.total.fetch_add(bytes, Ordering::Relaxed);
        self.total.fetch_sub(before, Ordering::Relaxed);
    }
}

/// A cell that is locked, with what a transition needs.
pub(crate) struct Locked {
    /// Of the namespace that it is in.
    inside: Hold,
    engine: Engine,
    cell: Arc<Cell>,
    loaded: tokio::sync::OwnedMutexGuard<Loaded>,
    fresh: String,
    now: i64,
    dirty: HashSet<String>,
    /// A worker adds what it likes: see [`Growth`].
    by_worker: bool,
}

impl Engine {
    pub(crate) async fn lock(&self, key: &Key) -> Result<Locked, Refusal> {
        let inside = self.inner.namespaces.enter(&key.namespace)?;
        Ok(self.lock_in(inside, key).await)
    }

    /// The same for who is in the namespace already.
    pub(crate) async fn lock_in(&self, inside: Hold, key: &Key) -> Locked {
        let cell = self.inner.cells.get(key);
        let loaded = Arc::clone(&cell.loaded).lock_owned().await;
        Locked {
            inside,
            engine: self.clone(),
            cell,
            loaded,
            fresh: fresh_id(),
            now: self.now(),
            dirty: HashSet::new(),
            by_worker: false,
        }
    }

    /// One transition of one run (the current one if no id is given): decided, committed, and only then told. It is
    /// finished even if the caller goes away.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        key: Key,
        run_id: &str,
        decide: impl FnOnce(&mut Slot, Turn<'_>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.change_by(key, run_id, false, decide).await
    }

    /// The same for what workers answer, which is as much as they like.
    pub(crate) async fn change_by_worker<T: Send + 'static>(
        &self,
        key: Key,
        run_id: &str,
        decide: impl FnOnce(&mut Slot, Turn<'_>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.change_by(key, run_id, true, decide).await
    }

    async fn change_by<T: Send + 'static>(
        &self,
        key: Key,
        run_id: &str,
        by_worker: bool,
        decide: impl FnOnce(&mut Slot, Turn<'_>) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let engine = self.clone();
        let run_id = run_id.to_owned();
        // Before the caller may go away, and with it what it holds.
        let inside = self.inner.namespaces.enter(&key.namespace)?;
        finish(async move {
            let mut locked = engine.lock_in(inside, &key).await;
            locked.by_worker = by_worker;
            let run_id = locked.resolve(&run_id).await?;
            let result = locked.decide(&run_id, decide)?;
            locked.commit().await?;
            Ok(result)
        })
        .await
    }

    /// Looks at a run without changing it.
    pub(crate) async fn see<T>(
        &self,
        key: &Key,
        run_id: &str,
        look: impl FnOnce(&Slot) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut locked = self.lock(key).await?;
        let run_id = locked.resolve(run_id).await?;
        look(locked.slot(&run_id)?)
    }

    /// Puts on the queues what a restart took off them.
    pub(crate) async fn dispatch_again(&self, key: Key, run_id: &str) -> Result<(), Refusal> {
        let mut locked = self.lock(&key).await?;
        let run_id = locked.resolve(run_id).await?;
        let slot = locked.slot(&run_id)?;
        let effects = slot.run.dispatch_again();
        locked.release(&run_id, effects);
        Ok(())
    }

    pub(crate) async fn delete_run(
        &self,
        namespace: &str,
        workflow_id: &str,
        run_id: &str,
    ) -> Result<(), Refusal> {
        let mut locked = self.lock(&Key::new(namespace, workflow_id)).await?;
        let run_id = locked.stored(run_id).await?;
        let deleted = self.inner.store.delete_workflow_run(run_id.clone()).await;
        let freed = deleted.map_err(unavailable)?.unwrap_or(0);
        locked.inside.kept().add(-freed);
        locked.loaded.runs.remove(&run_id);
        locked.loaded.current = None;
        locked.cell.changes.send_modify(|count| *count += 1);
        Ok(())
    }
}

/// A panic leaves the runs as they were in the middle of a transition: it is the disk that counts.
impl Drop for Locked {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.loaded.runs.clear();
            self.loaded.current = None;
        }
        let most = self.engine.inner.options.most_bytes;
        let bytes = |loaded: &Loaded| loaded.runs.values().map(Slot::bytes).sum::<usize>();
        let mut weight = bytes(&self.loaded);
        if weight > most / LARGE {
            // A chain of many runs: those that are over are read again when somebody asks.
            let Loaded { current, runs } = &mut *self.loaded;
            let current = current.as_ref().and_then(Option::as_ref);
            runs.retain(|run_id, slot| {
                Some(run_id) == current || slot.is_new || slot.run.is_running() || slot.is_busy()
            });
            weight = bytes(&self.loaded);
        }
        self.cell.weigh(weight);
        self.engine.inner.cells.relieve(most, false);
    }
}

/// Runs a future to its end, whatever happens to the caller.
pub(crate) async fn finish<T: Send + 'static>(
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!(%error, "a transition did not finish");
            Err(Refusal::Internal("the transition did not finish".to_owned()))
        }
    }
}

impl Locked {
    pub(crate) fn now(&self) -> i64 {
        self.now
    }

    pub(crate) fn inside(&self) -> &Hold {
        &self.inside
    }

    pub(crate) fn fresh_run_id(&self) -> &str {
        &self.fresh
    }

    /// Loads the run that is meant and says its id.
    pub(crate) async fn resolve(&mut self, run_id: &str) -> Result<String, Refusal> {
        let missing = || {
            Refusal::NotFound(format!(
                "workflow not found for ID: {}{}",
                self.cell.key.workflow_id,
                if run_id.is_empty() {
                    String::new()
                } else {
                    format!(" and RunID: {run_id}")
                }
            ))
        };
        let refusal = missing();
        if run_id.is_empty() {
            return self.current().await?.ok_or(refusal);
        }
        if self.loaded.runs.contains_key(run_id) {
            return Ok(run_id.to_owned());
        }
        let row = self
            .engine
            .inner
            .store
            .workflow_run(run_id.to_owned())
            .await
            .map_err(unavailable)?
            .filter(|row| {
                *row.namespace == *self.cell.key.namespace && *row.workflow_id == *self.cell.key.workflow_id
            })
            .ok_or(refusal)?;
        self.load(row).await
    }

    /// The id of the run that is meant, whether or not it can be read.
    async fn stored(&self, run_id: &str) -> Result<String, Refusal> {
        let (store, key) = (&self.engine.inner.store, &self.cell.key);
        let row = if run_id.is_empty() {
            let (namespace, workflow_id) = (key.namespace.to_string(), key.workflow_id.to_string());
            store.current_workflow_run(namespace, workflow_id).await
        } else {
            store.workflow_run(run_id.to_owned()).await
        };
        row.map_err(unavailable)?
            .filter(|row| *row.namespace == *key.namespace && *row.workflow_id == *key.workflow_id)
            .map(|row| row.run_id)
            .ok_or_else(|| Refusal::NotFound(format!("workflow not found for ID: {}", key.workflow_id)))
    }

    /// The run that the workflow id means, if there is any.
    pub(crate) async fn current(&mut self) -> Result<Option<String>, Refusal> {
        if let Some(known) = &self.loaded.current
            && known
                .as_ref()
                .is_none_or(|run_id| self.loaded.runs.contains_key(run_id))
        {
            return Ok(known.clone());
        }
        let row = self
            .engine
            .inner
            .store
            .current_workflow_run(
                self.cell.key.namespace.to_string(),
                self.cell.key.workflow_id.to_string(),
            )
            .await
            .map_err(unavailable)?;
        let Some(row) = row else {
            self.loaded.current = Some(None);
            return Ok(None);
        };
        let run_id = row.run_id.clone();
        if !self.loaded.runs.contains_key(&run_id) {
            self.load(row).await?;
        }
        self.loaded.current = Some(Some(run_id.clone()));
        Ok(Some(run_id))
    }

    async fn load(&mut self, row: WorkflowRunRow) -> Result<String, Refusal> {
        let corrupt = |what: &str| Refusal::Internal(format!("{what} of run {} cannot be read", row.run_id));
        let state = State::decode(row.state.as_slice()).map_err(|_| corrupt("the state"))?;
        let batches = self
            .engine
            .inner
            .store
            .workflow_events(row.run_id.clone())
            .await
            .map_err(unavailable)?;
        let mut events = Vec::new();
        for batch in batches {
            let batch = History::decode(batch.as_slice()).map_err(|_| corrupt("the history"))?;
            events.extend(batch.events);
        }
        let run = Run::restore(state, events);
        let mut slot = Slot::new(run, false);
        slot.state_bytes = row.state.len();
        self.loaded.runs.insert(row.run_id.clone(), slot);
        Ok(row.run_id)
    }

    pub(crate) fn slot(&mut self, run_id: &str) -> Result<&mut Slot, Refusal> {
        self.loaded
            .runs
            .get_mut(run_id)
            .ok_or_else(|| Refusal::Internal(format!("run {run_id} is not in memory")))
    }

    /// Lets a run decide. If it refuses, nothing has changed.
    pub(crate) fn decide<T>(
        &mut self,
        run_id: &str,
        decide: impl FnOnce(&mut Slot, Turn<'_>) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let limits = self.engine.inner.options.limits;
        let fresh = self.fresh.clone();
        let turn = Turn {
            now: self.now,
            fresh_run_id: &fresh,
            limits: &limits,
        };
        let doing = tracing::debug_span!(
            "decide",
            namespace = %self.cell.key.namespace,
            workflow = %self.cell.key.workflow_id,
            run = run_id
        )
        .entered();
        let slot = self.slot(run_id)?;
        let result = decide(slot, turn)?;
        let successor = slot.run.take_successor();
        self.dirty.insert(run_id.to_owned());
        if let Some(mut successor) = successor {
            // What the last run did not get to answer, the next one is asked.
            for request in self.slot(run_id)?.run.unanswered_updates() {
                let _ = successor.update(request, turn);
            }
            self.add(successor);
        }
        drop(doing);
        Ok(result)
    }

    /// Takes in a new run, which is the current one from now on.
    pub(crate) fn add(&mut self, run: Run) {
        let run_id = run.state.run_id.clone();
        if let Some(Some(previous)) = self.loaded.current.replace(Some(run_id.clone()))
            && previous != run_id
        {
            self.dirty.insert(previous);
        }
        self.loaded.runs.insert(run_id.clone(), Slot::new(run, true));
        self.dirty.insert(run_id);
    }

    /// Makes everything durable that was decided, then tells whom it concerns.
    pub(crate) async fn commit(&mut self) -> Result<(), Refusal> {
        let current = self.loaded.current.clone().flatten();
        let mut ids: Vec<_> = self.dirty.drain().collect();
        // The one that becomes current comes last: no id ever means two runs.
        ids.sort_by_key(|run_id| current.as_ref() == Some(run_id));
        let mut writes = Vec::new();
        let mut growth = Growth::default();
        for run_id in &ids {
            let is_current = match &current {
                Some(current) => current == run_id,
                None => false,
            };
            let unknown = self.loaded.current.is_none();
            if let Some(slot) = self.loaded.runs.get_mut(run_id) {
                let before = slot.state_bytes;
                let write = write(
                    &self.engine.inner.options.limits,
                    slot,
                    self.now,
                    is_current || unknown && slot.is_new,
                );
                let events = write.events.as_ref().map_or(0, |(_, body)| body.len());
                let bytes = (events + slot.state_bytes).saturating_sub(before);
                growth.bytes += i64::try_from(bytes).unwrap_or(i64::MAX);
                growth.new_run |= slot.is_new;
                growth.goes_on |= self.by_worker && slot.run.is_running();
                writes.push(write);
            }
        }
        // Without having looked for the current run we do not know whether this is it.
        if self.loaded.current.is_none() {
            self.current().await?;
            let current = self.loaded.current.clone().flatten();
            for write in &mut writes {
                write.row.is_current = current.as_ref() == Some(&write.row.run_id);
            }
        }
        let written = match self.engine.check_reserve(&self.inside, growth) {
            Ok(()) => {
                let written = self.engine.inner.store.write_workflow_runs(writes).await;
                written.map_err(unavailable)
            }
            Err(refusal) => Err(refusal),
        };
        match written {
            Ok(grown) => self.inside.kept().add(grown),
            Err(refusal) => {
                // Memory is ahead of the disk: it is the disk that counts.
                self.loaded.runs.clear();
                self.loaded.current = None;
                return Err(refusal);
            }
        }
        for run_id in ids {
            let Some(slot) = self.loaded.runs.get_mut(&run_id) else {
                continue;
            };
            slot.run.mark_saved();
            slot.is_new = false;
            let effects = slot.run.take_effects();
            self.release(&run_id, effects);
        }
        self.cell.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Tells queues, clock and post what a run wants.
    fn release(&mut self, run_id: &str, effects: Vec<Effect>) {
        let key = self.cell.key.clone();
        for effect in effects {
            self.engine.dispatch(&key, run_id, effect);
        }
        let engine = self.engine.clone();
        let Some(slot) = self.loaded.runs.get_mut(run_id) else {
            return;
        };
        let deadline = slot.run.deadline();
        if deadline != 0 && deadline != slot.armed {
            slot.armed = deadline;
            engine.inner.clock.arm(deadline, &key, run_id);
        }
        if !slot.run.state.outbox.is_empty() && !slot.posting {
            slot.posting = true;
            tokio::spawn(engine.clone().deliver(key.clone(), run_id.to_owned()));
        }
        if !slot.queries.is_empty() && slot.run.state.task.is_none() {
            for id in std::mem::take(&mut slot.queries) {
                engine.dispatch_query(&key, &slot.run, &id);
            }
        }
    }
}

fn write(limits: &Limits, slot: &mut Slot, now: i64, is_current: bool) -> WorkflowRunWrite {
    let run = &slot.run;
    let search = match slot.search.take() {
        Some(known) if known.0 == run.search_changes => known,
        _ => {
            let attributes = run.state.search_attributes.as_ref();
            (run.search_changes, visibility::search_object(limits, attributes))
        }
    };
    let search = slot.search.insert(search).1.clone();
    let encoded = slot.run.state.encode_to_vec();
    slot.state_bytes = encoded.len();
    let run = &slot.run;
    let state = &run.state;
    let started = run.started();
    let pair = |execution: &temporalio_protos::temporal::api::common::v1::WorkflowExecution| {
        (execution.workflow_id.clone(), execution.run_id.clone())
    };
    let unsaved = run.unsaved();
    let deadline = run.deadline();
    WorkflowRunWrite {
        row: WorkflowRunRow {
            run_id: state.run_id.clone(),
            namespace: state.namespace.clone(),
            workflow_id: state.workflow_id.clone(),
            is_current,
            status: state.status,
            workflow_type: run.workflow_type().to_owned(),
            task_queue: run.task_queue().to_owned(),
            started_at: state.started_at,
            execution_at: state.first_task_at,
            closed_at: (state.closed_at != 0).then_some(state.closed_at),
            history_length: run.last_event_id(),
            history_bytes: state.history_bytes,
            transitions: state.transitions,
            parent: started.parent_workflow_execution.as_ref().map(pair),
            root: Some(pair(&run.root())),
            search,
            state: encoded,
        },
        is_new: slot.is_new,
        is_open: run.is_running() || !state.outbox.is_empty(),
        is_ready: run.is_ready(),
        deadline: (deadline != 0).then_some(deadline),
        written_at: now,
        events: unsaved.first().map(|first| {
            let batch = History {
                events: unsaved.to_vec(),
            };
            (first.event_id, batch.encode_to_vec())
        }),
    }
}

//! The life of a sandbox after its creation: transitions are decided, committed, and then performed.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_lifecycle::{Effect, Extension, Input, step};
use atoll_store::{SandboxQuery, SandboxRow, SnapshotRow};
use atoll_types::{Code, EndReason, Fault, InstanceId, Isolation, SandboxId, SandboxState};

use crate::cell::Cell;
use crate::faults::from_store;
use crate::replies::{self, Attempt, Reply, Teller};
use crate::{Caller, ListSandboxes, Page, Sandbox, Sandboxes, views};

/// How long a caller waits for a kill before it is told that the kill goes on.
pub(crate) const KILL_WITHIN: Duration = Duration::from_secs(30);

/// What a decision led to, and where the end of what it began will be told.
type Decided = (SandboxRow, Option<Reply>);

/// How long, at most, between two tries to write down what has happened.
const RECORDED_AGAIN: Duration = Duration::from_secs(5);

/// No sandbox has more.
const MOST_LABELS: usize = 64;

impl Sandboxes {
    pub async fn get(&self, caller: &Caller, id: &SandboxId) -> Result<Sandbox, Fault> {
        self.row(caller, id).await.map(views::sandbox)
    }

    pub async fn list(&self, caller: &Caller, request: ListSandboxes) -> Result<Page<Sandbox>, Fault> {
        let states = if request.states.is_empty() {
            SandboxState::ALL
                .into_iter()
                .filter(|state| state.is_live())
                .collect()
        } else {
            request.states
        };
        if request.labels.len() > MOST_LABELS {
            return Err(Fault::new(
                Code::TooManyLabels,
                format!("a list is narrowed by at most {MOST_LABELS} labels"),
            ));
        }
        let query = SandboxQuery {
            project: caller.project().clone(),
            labels: request.labels.into_iter().collect(),
            owner: request.owner,
            states,
            after: crate::parse_cursor(request.cursor)?,
            limit: request.limit,
        };
        let page = self
            .store()
            .sandboxes
            .sandboxes(query)
            .await
            .map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items.into_iter().map(views::sandbox).collect(),
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }

    /// Ends it; returns when nothing of it is left. Killing what is already gone succeeds.
    pub async fn kill(&self, caller: &Caller, id: &SandboxId) -> Result<Sandbox, Fault> {
        let cell = loop {
            let cell = self.cell(caller, id).await?;
            let reason = EndReason::Killed;
            match self.apply(&cell, Input::Kill { reason }).await {
                // Of one that is not looked after any more, everybody has a record of their own.
                Err(fault) if fault.code == Code::SandboxContended => {}
                applied => {
                    applied?;
                    break cell;
                }
            }
        };
        let gone = cell.seen.wait_for(|row| !row.record.state.is_live());
        let over = tokio::time::timeout(KILL_WITHIN, gone).await;
        match over {
            Ok(row) => Ok(views::sandbox(row)),
            Err(_) => Err(Fault::new(
                Code::KillInProgress,
                format!("{id} is being deleted, but the host has not let go of it yet"),
            )
            .hint("the server goes on trying; look at it again later")),
        }
    }

    /// Sets the deadline to `timeout_millis` from now.
    pub async fn extend(
        &self,
        caller: &Caller,
        id: &SandboxId,
        timeout_millis: u64,
    ) -> Result<Sandbox, Fault> {
        atoll_lifecycle::admit_timeout(Some(timeout_millis), &self.settings().limits)?;
        let cell = self.cell(caller, id).await?;
        let row = self
            .apply(&cell, Input::Extend(Extension::For { timeout_millis }))
            .await?;
        Ok(views::sandbox(row))
    }

    /// The row of a sandbox of the caller's project.
    pub(crate) async fn row(&self, caller: &Caller, id: &SandboxId) -> Result<SandboxRow, Fault> {
        if let Some(cell) = self.live_cell(id)
            && cell.project == *caller.project()
        {
            return Ok(cell.last_seen());
        }
        let row = self
            .store()
            .sandboxes
            .sandbox(caller.project(), id)
            .await
            .map_err(|e| from_store(&e))?;
        row.ok_or_else(|| not_found(id))
    }

    /// The sandbox, to apply something to: the one that is looked after or, when it has ended, its record.
    pub(crate) async fn cell(&self, caller: &Caller, id: &SandboxId) -> Result<Arc<Cell>, Fault> {
        let live = || {
            self.live_cell(id)
                .filter(|cell| cell.project == *caller.project())
        };
        if let Some(cell) = live() {
            return Ok(cell);
        }
        let mut row = self.row(caller, id).await?;
        if row.record.state.is_live() {
            // It was made since; a cell is there before its row. Without one it has ended since, too.
            if let Some(cell) = live() {
                return Ok(cell);
            }
            row = self.row(caller, id).await?;
        }
        match row.record.state.is_live() {
            false => Ok(Cell::new(row)),
            true => Err(Fault::internal("a live sandbox is not looked after")),
        }
    }

    /// Decides, commits, and has the effects performed by a task of the server's own.
    pub(crate) async fn apply(&self, cell: &Arc<Cell>, input: Input) -> Result<SandboxRow, Fault> {
        self.apply_for_reply(cell, input).await.map(|(row, _)| row)
    }

    /// The same for an input that asks for a save or a restore, whose end the caller will wait for.
    pub(crate) async fn attempt(&self, cell: &Arc<Cell>, input: Input) -> Result<Reply, Fault> {
        let (_, reply) = self.apply_for_reply(cell, input).await?;
        reply.ok_or_else(|| Fault::internal("nothing was begun that could be waited for"))
    }

    async fn apply_for_reply(&self, cell: &Arc<Cell>, input: Input) -> Result<Decided, Fault> {
        let service = self.clone();
        let cell = Arc::clone(cell);
        let task = self
            .inner
            .tasks
            .spawn(async move { service.decide(&cell, input, None).await });
        task.await
            .map_err(|_| Fault::internal("a transition was interrupted"))?
    }

    /// The same for a save that is durable: its row is committed with the transition, if that makes it the one that the
    /// sandbox rests on.
    pub(crate) async fn apply_saved(
        &self,
        cell: &Arc<Cell>,
        saved: SnapshotRow,
    ) -> Result<SandboxRow, Fault> {
        let input = Input::Saved {
            snapshot: saved.id.clone(),
            bytes: saved.total_bytes,
        };
        self.decide(cell, input, Some(saved)).await.map(|(row, _)| row)
    }

    /// Applies what has happened, which nobody will tell a second time: if it cannot be written now, because the disk is full
    /// for instance, it is tried again until it can. Returns after the first try.
    pub(crate) fn record<'a>(
        &'a self,
        cell: &'a Arc<Cell>,
        happened: Input,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        // Boxed: this is part of tasks that `apply` spawns.
        Box::pin(async move {
            let Err(fault) = self.apply(cell, happened.clone()).await else {
                return;
            };
            if !is_passing(&fault) {
                tracing::error!(sandbox = %cell.id, %fault, "what happened to a sandbox does not fit its state");
                return;
            }
            tracing::error!(sandbox = %cell.id, %fault, "what happened to a sandbox could not be written; trying again");
            let (service, cell) = (self.clone(), Arc::clone(cell));
            self.inner.tasks.spawn(async move {
                let mut pause = Duration::from_millis(50);
                loop {
                    tokio::select! {
                        biased;
                        () = service.inner.stop.cancelled() => return,
                        () = tokio::time::sleep(pause) => {}
                    }
                    match service.apply(&cell, happened.clone()).await {
                        Err(fault) if is_passing(&fault) => pause = (pause * 2).min(RECORDED_AGAIN),
                        _ => return,
                    }
                }
            });
        })
    }

    async fn decide(
        &self,
        cell: &Arc<Cell>,
        input: Input,
        saved: Option<SnapshotRow>,
    ) -> Result<Decided, Fault> {
        let mut row = cell.row.lock().await;
        row.record.last_used_at = row.record.last_used_at.max(cell.record().last_used_at);
        let transition = step(&row.record, input, self.now()).map_err(Fault::from)?;
        let (teller, reply) = transition
            .effects
            .iter()
            .find_map(Attempt::by)
            .map(replies::channel)
            .unzip();
        if transition.changes(&row.record) {
            let next = SandboxRow {
                record: transition.next.clone(),
                ..row.clone()
            };
            let is_over = !next.record.state.is_live();
            let mut facts = if is_over {
                self.commands_lost_with(cell)
            } else {
                Vec::new()
            };
            facts.extend(next.facts(&transition.facts, self.now()));
            let rests_on = |snapshot: &SnapshotRow| {
                next.record.saved.as_ref().map(|saved| &saved.snapshot) == Some(&snapshot.id)
            };
            let wakes = next.record.state == SandboxState::Resuming && row.record.state != next.record.state;
            let committed = match saved.filter(rests_on) {
                Some(snapshot) => self.store().saved.commit_saved(next, snapshot, facts).await,
                None if wakes => {
                    let most = self.most_rows(&next.project);
                    self.store()
                        .sandboxes
                        .update_sandbox_within(next, facts, most)
                        .await
                }
                None => self.store().sandboxes.update_sandbox(next, facts).await,
            };
            let committed = match committed {
                // Everybody has a record of their own of what is over. A kill alone changes it; another one was quicker.
                Err(atoll_store::Error::VersionConflict(_)) if !row.record.state.is_live() => {
                    let now = self.store().sandboxes.sandbox(&cell.project, &cell.id).await;
                    let now = now.map_err(|e| from_store(&e))?;
                    *row = now.ok_or_else(|| not_found(&cell.id))?;
                    cell.seen.replace(row.clone());
                    return Ok((row.clone(), None));
                }
                committed => committed.map_err(|e| quota_fault(&e))?,
            };
            if is_over {
                cell.commands.clear();
            }
            if let Some(reply) = &reply {
                cell.begins(reply.clone());
            }
            note_change(cell, &row, &committed);
            *row = committed;
            self.mind_deadline(cell);
        }
        let now = row.clone();
        drop(row);
        self.perform(cell, &now, transition.effects, teller);
        Ok((now, reply))
    }

    /// The same input to several sandboxes, committed in one transaction: all or none.
    pub(crate) async fn apply_all(&self, changes: Vec<(Arc<Cell>, Input)>) -> Result<Vec<SandboxRow>, Fault> {
        let mut locked = Vec::with_capacity(changes.len());
        let mut commits = Vec::with_capacity(changes.len());
        for (cell, input) in &changes {
            let row = cell.row.lock().await;
            let transition = step(&row.record, input.clone(), self.now()).map_err(Fault::from)?;
            let next = SandboxRow {
                record: transition.next.clone(),
                ..row.clone()
            };
            let facts = next.facts(&transition.facts, self.now());
            commits.push((next, facts));
            locked.push((cell, row, transition.effects));
        }
        let committed = self.store().sandboxes.update_sandboxes(commits).await;
        let committed = committed.map_err(|e| from_store(&e))?;
        for ((cell, mut row, effects), committed) in locked.into_iter().zip(&committed) {
            note_change(cell, &row, committed);
            *row = committed.clone();
            self.mind_deadline(cell);
            drop(row);
            self.perform(cell, committed, effects, None);
        }
        Ok(committed)
    }

    /// Has tasks of the server's own do what a committed transition asks for.
    fn perform(&self, cell: &Arc<Cell>, now: &SandboxRow, effects: Vec<Effect>, mut teller: Option<Teller>) {
        if !now.record.state.is_live() {
            self.live().remove(&cell.id);
            self.end_owned_by(&cell.id);
            if !now.spec.secrets.is_empty() {
                self.inner.garbage.notify_one();
            }
        }
        if now.record.instance.is_none() && !now.spec.volumes.is_empty() {
            self.volumes_may_rest();
        }
        for effect in effects {
            let (service, cell, isolation) = (self.clone(), Arc::clone(cell), now.isolation);
            // Boxed: each of them applies inputs in turn.
            let work: Pin<Box<dyn Future<Output = ()> + Send>> = match effect {
                // Creation performs the start itself, where its outcome is awaited.
                Effect::StartInstance(_) => continue,
                Effect::DestroyInstance(instance) => {
                    self.destroy_later(&cell, isolation, instance);
                    continue;
                }
                Effect::SaveInstance {
                    instance,
                    snapshot,
                    kind,
                } => {
                    let teller = teller.take();
                    Box::pin(async move {
                        let outcome = service.perform_save(&cell, instance, snapshot, kind).await;
                        Teller::tell_if_asked(teller, outcome);
                    })
                }
                Effect::RestoreInstance {
                    instance,
                    snapshot,
                    kind,
                } => {
                    let teller = teller.take();
                    Box::pin(async move {
                        let outcome = service.perform_restore(&cell, instance, &snapshot, kind).await;
                        Teller::tell_if_asked(teller, outcome);
                    })
                }
                Effect::ThawInstance(instance) => {
                    Box::pin(async move {
                        // Not in the middle of the next save, which would run on half-saved.
                        let _one_at_a_time = cell.saving.lock().await;
                        service.thaw(&cell, isolation, &instance).await;
                    })
                }
                Effect::DropSnapshot(snapshot) => {
                    Box::pin(async move { service.drop_saved(&snapshot).await })
                }
            };
            self.inner.tasks.spawn(work);
        }
    }

    /// Destroys an instance in the background and records that it is gone; tries until it works.
    fn destroy_later(&self, cell: &Arc<Cell>, isolation: Isolation, instance: InstanceId) {
        // At once: the rest takes a moment.
        self.node().dismiss(&instance);
        let service = self.clone();
        let cell = Arc::clone(cell);
        self.inner.tasks.spawn(async move {
            service.meter(&cell).await;
            cell.let_go_of(&instance);
            if cell.instance().is_none() {
                cell.commands.hang_up().await;
            }
            service.node().destroy(isolation, &instance).await;
            service.record(&cell, Input::Destroyed { instance }).await;
        });
    }
}

/// Whether the store failed rather than the input: later it may not.
fn is_passing(fault: &Fault) -> bool {
    matches!(fault.code, Code::Internal | Code::ServerDiskFull)
}

fn note_change(cell: &Cell, before: &SandboxRow, after: &SandboxRow) {
    let (from, to) = (before.record.state, after.record.state);
    if from != to {
        tracing::info!(sandbox = %cell.id, %from, %to, end = ?after.record.end, "state changed");
    }
    cell.seen.replace(after.clone());
}

fn not_found(id: &SandboxId) -> Fault {
    Fault::new(Code::SandboxNotFound, format!("there is no sandbox {id}"))
        .hint("`atoll ls --all` shows those that exist or existed lately")
}

fn quota_fault(error: &atoll_store::Error) -> Fault {
    match error {
        atoll_store::Error::QuotaExceeded { .. } => crate::create::insert_fault(error),
        other => from_store(other),
    }
}

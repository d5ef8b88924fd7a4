//! Forks: running copies of a running sandbox.
//!
//! ```text
//!   parent ── held still ── saved into files without a name ── goes on
//!                                     ├──> copy 1: own row, instance, host name, token ────────┐
//!                                     ├──> copy 2                                              ├── all run: one commit
//!                                     └──> copy N                                              ┘   one fails: none stays
//! ```
//! What must hold: all copies or none. Until the one commit that says `Running` for all, each is `Starting`, and what a
//! crash leaves in `Starting` is ended by recovery.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_lifecycle::{Boot, Input, NewRecord, Policy};
use atoll_node::{Node, Origin, State};
use atoll_store::{Fact, SandboxRow};
use atoll_types::{Code, EndReason, Fault, SandboxId, SandboxState, SaveKind, SnapshotId};
use futures_util::future::join_all;

use crate::cell::Cell;
use crate::lives::KILL_WITHIN;
use crate::{Caller, Sandbox, Sandboxes, entropy, views};

/// More copies than this are asked for in several calls.
pub const MAX_COPIES: usize = 64;

#[derive(Debug, Clone)]
pub struct ForkSandbox {
    /// How many copies.
    pub count: usize,
    /// `None`: with memory, or a refusal where the tier cannot; `Filesystem`: copies that start anew on the same files.
    pub kind: Option<SaveKind>,
    /// Lifetime of the copies; `None`: as the parent was created with.
    pub timeout_millis: Option<u64>,
    /// Added to the parent's labels.
    pub labels: BTreeMap<String, String>,
}

/// State that the node keeps for a moment, and lets go of when this is dropped.
#[derive(Debug)]
pub(crate) struct Captured {
    node: Arc<dyn Node>,
    id: SnapshotId,
}

impl Captured {
    pub(crate) fn state(&self) -> State {
        State::Captured(self.id.clone())
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.node.release(&self.id);
    }
}

impl Sandboxes {
    /// Makes running copies of a running (or paused) sandbox, all or none.
    pub async fn fork(
        &self,
        caller: &Caller,
        id: &SandboxId,
        request: ForkSandbox,
    ) -> Result<Vec<Sandbox>, Fault> {
        if !(1..=MAX_COPIES).contains(&request.count) {
            return Err(Fault::new(
                Code::ForkCountInvalid,
                format!("a fork makes 1 to {MAX_COPIES} copies, not {}", request.count),
            ));
        }
        if request.timeout_millis.is_some() {
            atoll_lifecycle::admit_timeout(request.timeout_millis, &self.settings().limits)?;
        }
        let cell = self.cell(caller, id).await?;
        let (service, caller) = (self.clone(), caller.clone());
        let task = self
            .inner
            .tasks
            .spawn(async move { service.fork_here(&caller, &cell, request).await });
        task.await
            .map_err(|_| Fault::internal("the fork was interrupted"))?
    }

    async fn fork_here(
        &self,
        caller: &Caller,
        parent: &Arc<Cell>,
        request: ForkSandbox,
    ) -> Result<Vec<Sandbox>, Fault> {
        let row = parent.last_seen();
        let admission = self.admission(&row).await?;
        self.may_have(caller, &row, admission.as_ref())?;
        // A copy without memory is not what `fork` means; who wants that says so.
        let kind = self.kind_to_save(row.isolation, Some(request.kind.unwrap_or(SaveKind::Memory)))?;
        let captured = self.state_to_copy(parent, &row, kind).await?;
        let copies = self.insert_copies(&row, &request).await?;
        let started = join_all(copies.iter().map(|copy| self.start_copy(copy, kind, &captured)));
        let outcome = started.await.into_iter().collect::<Result<Vec<()>, Fault>>();
        let committed = match outcome {
            Ok(_) => self.commit_started(&copies).await,
            Err(fault) => Err(fault),
        };
        match committed {
            Ok(rows) => {
                for copy in &copies {
                    let fact = Fact::SandboxForked { from: row.id.clone() };
                    self.append(copy, fact);
                }
                Ok(rows.into_iter().map(views::sandbox).collect())
            }
            Err(fault) => {
                self.undo_copies(&copies, &fault).await;
                Err(fault)
            }
        }
    }

    /// The parent's state: taken now, or what it rests on.
    async fn state_to_copy(
        &self,
        parent: &Arc<Cell>,
        row: &SandboxRow,
        kind: SaveKind,
    ) -> Result<Captured, Fault> {
        if let (SandboxState::Paused | SandboxState::Stopped, Some(saved)) =
            (row.record.state, row.record.saved.as_ref())
        {
            if saved.kind != kind {
                return Err(Fault::new(
                    Code::SavedStateDiffers,
                    format!("{} rests on its {}, not on its {kind}", row.id, saved.kind),
                )
                .hint("resume it first, or fork what it rests on"));
            }
            return self.recall(&saved.snapshot).await;
        }
        let _one_at_a_time = parent.saving.lock().await;
        // Not before: whoever had the lock may have put it to rest.
        let instance = self.running_instance(parent).await?;
        let captured = self.captured();
        let saved = self
            .node()
            .capture(row.isolation, &instance, kind, &captured.id)
            .await;
        self.thaw(parent, row.isolation, &instance).await;
        if saved.is_err() && !parent.still_has(&instance) {
            return Err(parent.explain_end().await);
        }
        saved.map(|()| captured)
    }

    /// What was saved, read once for all that are made of it.
    pub(crate) async fn recall(&self, snapshot: &SnapshotId) -> Result<Captured, Fault> {
        let captured = self.captured();
        self.node().recall(snapshot, &captured.id).await?;
        Ok(captured)
    }

    /// A name for state that is about to be captured.
    fn captured(&self) -> Captured {
        Captured {
            node: Arc::clone(&self.inner.node),
            id: entropy::id(),
        }
    }

    /// Commits a row for each copy, or for none.
    async fn insert_copies(
        &self,
        parent: &SandboxRow,
        request: &ForkSandbox,
    ) -> Result<Vec<Arc<Cell>>, Fault> {
        let mut copies = Vec::with_capacity(request.count);
        for _ in 0..request.count {
            let mut spec = parent.spec.clone();
            // Which is the parent's alone.
            spec.name = None;
            spec.timeout_millis = request.timeout_millis.or(spec.timeout_millis);
            spec.labels.extend(request.labels.clone());
            // What it trusts and which placeholders it holds came with its memory.
            spec.lineage.get_or_insert_with(|| parent.id.clone());
            let transition = atoll_lifecycle::create(
                NewRecord {
                    boot: Boot::Cold(entropy::id()),
                    policy: Policy::of(&spec),
                },
                self.now(),
            );
            let row = SandboxRow {
                id: entropy::id(),
                spec,
                record: transition.next.clone(),
                version: 0,
                ..parent.clone()
            };
            match self.insert(row, &transition, None).await {
                Ok(Ok(cell)) => copies.push(cell),
                // Only a request with an idempotency key finds an earlier one.
                Ok(Err(_)) => return Err(Fault::internal("a copy was found to exist already")),
                Err(fault) => {
                    self.undo_copies(&copies, &fault).await;
                    return Err(fault);
                }
            }
        }
        Ok(copies)
    }

    async fn start_copy(&self, copy: &Arc<Cell>, kind: SaveKind, captured: &Captured) -> Result<(), Fault> {
        let row = copy.last_seen();
        let Some(id) = row.record.instance.clone() else {
            return Err(copy.explain_end().await);
        };
        let _held = self.hold(id.clone());
        let state = captured.state();
        let template = self.boot_saved(&row, &id, Origin { kind, state }).await?;
        let guest = self.give_instance(copy, id);
        self.introduce(copy, &guest, &row, &template, kind).await?;
        self.run_resume_hooks(copy, &guest, &row).await
    }

    /// Says `Running` for all of them in one transaction.
    async fn commit_started(&self, copies: &[Arc<Cell>]) -> Result<Vec<SandboxRow>, Fault> {
        let mut changes = Vec::with_capacity(copies.len());
        for copy in copies {
            // It may have ended since.
            let Some(instance) = copy.record().instance else {
                return Err(copy.explain_end().await);
            };
            changes.push((Arc::clone(copy), Input::Started { instance }));
        }
        let rows = self.apply_all(changes).await?;
        // A kill may have come between.
        for (copy, row) in copies.iter().zip(&rows) {
            if row.record.state != SandboxState::Running {
                return Err(copy.explain_end().await);
            }
        }
        Ok(rows)
    }

    async fn undo_copies(&self, copies: &[Arc<Cell>], why: &Fault) {
        let undone = join_all(copies.iter().map(|copy| async move {
            let reason = EndReason::StartFailed(why.message.clone());
            self.record(copy, Input::Kill { reason }).await;
            let gone = copy.seen.wait_for(|row| !row.record.state.is_live());
            // What takes longer goes on without whoever asked for the copies.
            let _ = tokio::time::timeout(KILL_WITHIN, gone).await;
        }));
        undone.await;
    }
}

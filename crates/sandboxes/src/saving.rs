//! Putting a sandbox to rest: held still, saved, committed, and only then destroyed.
//!
//! ```text
//!   Running ── commit Pausing ── hold still ── stream into the vault ── fsync ── commit Paused + snapshot row ── destroy
//!                                    └──────────── any failure: thaw, commit Running, say why ────────────┘
//! ```
//! What must hold: until the commit that says `Paused` the instance is whole and goes on after a failure or a crash; from
//! that commit on the snapshot is durable and complete. There is no moment at which neither is true.

use std::sync::Arc;

use atoll_lifecycle::Input;
use atoll_node::Save;
use atoll_store::{SandboxRow, SnapshotRow};
use atoll_types::{
    Code, Fault, InstanceId, Isolation, ProjectId, SandboxId, SandboxSpec, SandboxState, SaveKind,
    SnapshotId, SnapshotOwner, TemplateId,
};

use crate::cell::Cell;
use crate::replies::{Outcome, Reply};
use crate::{Caller, Sandbox, Sandboxes, entropy, views};

/// What is saved, and what will be known of it.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) project: ProjectId,
    /// `None`: an instance that is no sandbox.
    pub(crate) sandbox: Option<SandboxId>,
    pub(crate) parent: Option<SnapshotId>,
    pub(crate) template: TemplateId,
    pub(crate) isolation: Isolation,
    pub(crate) spec: SandboxSpec,
}

impl Subject {
    pub(crate) fn sandbox(row: &SandboxRow, parent: Option<SnapshotId>) -> Self {
        Self {
            project: row.project.clone(),
            sandbox: Some(row.id.clone()),
            parent,
            template: row.template.clone(),
            isolation: row.isolation,
            spec: row.spec.clone(),
        }
    }
}

impl Sandboxes {
    /// Pauses it: memory and files are kept, or as much as its tier can keep if `kind` leaves that open. Returns when
    /// that is durable. Pausing what is paused succeeds.
    pub async fn pause(
        &self,
        caller: &Caller,
        id: &SandboxId,
        kind: Option<SaveKind>,
    ) -> Result<Sandbox, Fault> {
        let cell = self.cell(caller, id).await?;
        let isolation = cell.last_seen().isolation;
        let kind = self.kind_to_save(isolation, kind)?;
        let input = Input::Pause {
            snapshot: entropy::id(),
            kind,
        };
        self.rest(&cell, input, SandboxState::Pausing).await
    }

    /// Stops it: files are kept, processes are not.
    pub async fn stop(&self, caller: &Caller, id: &SandboxId) -> Result<Sandbox, Fault> {
        let cell = self.cell(caller, id).await?;
        let input = Input::Stop {
            snapshot: entropy::id(),
        };
        self.rest(&cell, input, SandboxState::Stopping).await
    }

    /// Applies the wish, or joins those whose wish is under way, and waits for its end.
    async fn rest(&self, cell: &Arc<Cell>, input: Input, going: SandboxState) -> Result<Sandbox, Fault> {
        let rested = match going {
            SandboxState::Stopping => SandboxState::Stopped,
            _ => SandboxState::Paused,
        };
        let reply = loop {
            let row = cell.last_seen();
            if row.record.state == rested {
                return Ok(views::sandbox(row));
            }
            if row.record.state != going {
                self.check_storage(&cell.project).await?;
                match self.attempt(cell, input.clone()).await {
                    Ok(reply) => break reply,
                    // Somebody else with the same wish was faster.
                    Err(_) if [going, rested].contains(&cell.last_seen().record.state) => continue,
                    Err(fault) => return Err(fault),
                }
            }
            // Without one that was over between the two looks.
            if let Some(reply) = cell.reply(&row) {
                break reply;
            }
        };
        // If it runs again by now, somebody resumed it since; it did rest.
        self.outcome(cell, reply).await.map(views::sandbox)
    }

    /// How an attempt ended; or how the sandbox did, which does not wait for its attempts.
    pub(crate) async fn outcome(&self, cell: &Arc<Cell>, reply: Reply) -> Outcome {
        let ended = |row: &SandboxRow| row.record.end.is_some();
        let outcome = tokio::select! {
            biased;
            outcome = reply.heard() => outcome,
            row = cell.seen.wait_for(ended) => Ok(row),
        };
        match outcome {
            Ok(row) if ended(&row) => Err(cell.explain_end().await),
            outcome => outcome,
        }
    }

    /// What a tier can keep, or a refusal.
    pub(crate) fn kind_to_save(
        &self,
        isolation: Isolation,
        asked: Option<SaveKind>,
    ) -> Result<SaveKind, Fault> {
        let memory = self.saves(isolation)?.memory;
        match asked {
            Some(SaveKind::Memory) if !memory => Err(Fault::new(
                Code::MemoryNotSupported,
                format!("the {isolation} tier cannot keep memory, only files"),
            )
            .hint("ask for `filesystem`, or create the sandbox with the gvisor tier")),
            Some(kind) => Ok(kind),
            None if memory => Ok(SaveKind::Memory),
            None => Ok(SaveKind::Filesystem),
        }
    }

    /// Whether a sandbox of this tier comes back with its memory, unless somebody asks for less.
    pub fn keeps_memory(&self, isolation: Isolation) -> bool {
        self.saves(isolation).is_ok_and(|saves| saves.memory)
    }

    /// Performs a save that was decided and committed: the effect behind `Pausing` and `Stopping`.
    pub(crate) async fn perform_save(
        &self,
        cell: &Arc<Cell>,
        instance: InstanceId,
        snapshot: SnapshotId,
        kind: SaveKind,
    ) -> Outcome {
        let _one_at_a_time = cell.saving.lock().await;
        let row = cell.last_seen();
        let subject = Subject::sandbox(&row, None);
        let saved = self
            .save_instance(&subject, &instance, &snapshot, kind, SnapshotOwner::Sandbox)
            .await;
        let committed = match saved {
            Ok(saved) => self.apply_saved(cell, saved).await,
            Err(fault) => Err(fault),
        };
        let fault = match committed {
            Ok(row) => return Ok(row),
            Err(fault) => fault,
        };
        tracing::warn!(sandbox = %cell.id, %fault, "a sandbox could not be put to rest");
        let failed = Input::SaveFailed {
            snapshot,
            why: fault.message.clone(),
        };
        self.record(cell, failed).await;
        Err(fault)
    }

    /// Holds an instance still and writes it into the vault, durably. The instance stays still. On error nothing of the
    /// snapshot is left.
    pub(crate) async fn save_instance(
        &self,
        subject: &Subject,
        instance: &InstanceId,
        snapshot: &SnapshotId,
        kind: SaveKind,
        owner: SnapshotOwner,
    ) -> Result<SnapshotRow, Fault> {
        let saves = self.saves(subject.isolation)?.clone();
        let save = Save {
            instance: instance.clone(),
            isolation: subject.isolation,
            snapshot: snapshot.clone(),
            project: subject.project.clone(),
            kind,
            files_apart: subject.spec.fallback_to_files,
        };
        let room = self
            .room_for_save(&subject.project, subject.isolation, instance)
            .await?;
        let saved = self.node().save(save).await?;
        room.stored();
        Ok(SnapshotRow {
            id: snapshot.clone(),
            project: subject.project.clone(),
            name: None,
            kind,
            owner,
            sandbox: subject.sandbox.clone(),
            parent: subject.parent.clone(),
            template: subject.template.clone(),
            isolation: subject.isolation,
            runtime: saves.runtime_version,
            cpu_features: saves.cpu_features,
            spec: subject.spec.clone(),
            total_bytes: saved.total_bytes,
            stored_bytes: saved.stored_bytes,
            created_at: self.now(),
        })
    }

    /// Lets an instance that was held still go on; if that fails, its end will be noticed.
    pub(crate) async fn thaw(&self, cell: &Cell, isolation: Isolation, instance: &InstanceId) {
        if let Err(error) = self.node().thaw(isolation, instance).await
            // One that was ended meanwhile is not to go on.
            && cell.still_has(instance)
        {
            tracing::error!(%instance, %error, "an instance could not be let go on");
        }
    }

    /// Forgets saved state that no row refers to any more. What remains after a failure is garbage, collected later.
    pub(crate) async fn drop_saved(&self, snapshot: &SnapshotId) {
        if let Err(error) = self.store().saved.delete_hidden_snapshot(snapshot).await {
            tracing::warn!(%snapshot, %error, "saved state could not be forgotten");
            return;
        }
        if let Err(error) = self.node().forget(snapshot).await {
            tracing::warn!(%snapshot, %error, "saved state could not be removed");
        }
        self.inner.garbage.notify_one();
    }
}

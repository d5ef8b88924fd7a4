//! Snapshots: saved state with a name of its own, taken of a running or resting sandbox, and made sandboxes of.
//!
//! What must hold: a row is committed only after its bytes are durable, and goes before them; so a snapshot that is
//! listed is whole. What a crash leaves without a row is garbage, which `collect_garbage` removes.

use std::sync::Arc;

use atoll_store::{Fact, NewFact, SandboxRow, SnapshotRow};
use atoll_types::{
    Code, Fault, InstanceId, Isolation, ProjectId, SandboxId, SandboxState, SaveKind, SnapshotId,
    SnapshotOwner, TemplateId, Timestamp,
};

use crate::cell::Cell;
use crate::faults::from_store;
use crate::saving::Subject;
use crate::{Caller, Page, Sandboxes, entropy};

#[derive(Debug, Clone, Default)]
pub struct TakeSnapshot {
    /// Unique among the project's snapshots.
    pub name: Option<String>,
    /// `None`: with memory where the tier can (of one that rests: what it rests on).
    pub kind: Option<SaveKind>,
    /// A request that comes again with the same key finds the snapshot that the first one took.
    pub idempotency_key: Option<String>,
}

/// A snapshot as callers see it.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub id: SnapshotId,
    pub name: Option<String>,
    pub kind: SaveKind,
    /// Which sandbox it was taken of, if that is known here.
    pub sandbox: Option<SandboxId>,
    /// The snapshot before it in the same line.
    pub parent: Option<SnapshotId>,
    pub template: TemplateId,
    pub isolation: Isolation,
    pub runtime: String,
    pub cpu_features: Vec<String>,
    pub resources: atoll_types::Resources,
    /// All of it.
    pub total_bytes: u64,
    /// What it added to the disk when it was taken; the rest is shared with earlier ones.
    pub stored_bytes: u64,
    pub created_at: Timestamp,
}

pub(crate) fn view(row: SnapshotRow) -> Snapshot {
    Snapshot {
        id: row.id,
        name: row.name,
        kind: row.kind,
        sandbox: row.sandbox,
        parent: row.parent,
        template: row.template,
        isolation: row.isolation,
        runtime: row.runtime,
        cpu_features: row.cpu_features,
        resources: row.spec.resources,
        total_bytes: row.total_bytes,
        stored_bytes: row.stored_bytes,
        created_at: row.created_at,
    }
}

impl Sandboxes {
    /// Takes a snapshot. A running sandbox goes on as soon as its state is read.
    pub async fn take_snapshot(
        &self,
        caller: &Caller,
        id: &SandboxId,
        request: TakeSnapshot,
    ) -> Result<Snapshot, Fault> {
        let snapshot = match &request.idempotency_key {
            None => entropy::id(),
            Some(key) => crate::keyed::id(id, key)?,
        };
        if request.idempotency_key.is_some()
            && let Some(taken) = self.taken_before(caller, &snapshot).await?
        {
            return Ok(taken);
        }
        if let Some(name) = &request.name {
            check_name(name)?;
            let found = self.store().saved.snapshot_by_name(caller.project(), name).await;
            if found.map_err(|e| from_store(&e))?.is_some() {
                return Err(name_taken(name));
            }
        }
        let cell = self.cell(caller, id).await?;
        let service = self.clone();
        let task = self
            .inner
            .tasks
            .spawn(async move { service.take_snapshot_here(&cell, snapshot, request).await });
        task.await
            .map_err(|_| Fault::internal("the snapshot was interrupted"))?
    }

    /// What the same key took, or a refusal while it is being taken.
    async fn taken_before(&self, caller: &Caller, id: &SnapshotId) -> Result<Option<Snapshot>, Fault> {
        if self.unfinished().contains(id.as_str()) {
            return Err(being_taken(id));
        }
        let found = self.store().saved.snapshot(caller.project(), id).await;
        Ok(found.map_err(|e| from_store(&e))?.map(view))
    }

    async fn take_snapshot_here(
        &self,
        cell: &Arc<Cell>,
        snapshot: SnapshotId,
        request: TakeSnapshot,
    ) -> Result<Snapshot, Fault> {
        self.check_storage(&cell.project).await?;
        let row = cell.last_seen();
        let _unfinished = Unfinished::claim(self, &snapshot).ok_or_else(|| being_taken(&snapshot))?;
        if request.idempotency_key.is_some() {
            // Whoever was faster has let go of it only after the row was there.
            let found = self.store().saved.snapshot(&row.project, &snapshot).await;
            if let Some(found) = found.map_err(|e| from_store(&e))? {
                return Ok(view(found));
            }
            // A server that was killed may have left bytes of this name, whose row never came.
            self.node().forget(&snapshot).await?;
        }
        let taken = match (row.record.state, row.record.saved.clone()) {
            (SandboxState::Paused | SandboxState::Stopped, Some(saved)) => {
                if request.kind.is_some_and(|kind| kind != saved.kind) {
                    return Err(Fault::new(
                        Code::SavedStateDiffers,
                        format!("{} rests on its {}", row.id, saved.kind),
                    )
                    .hint("resume it first, or take what it rests on"));
                }
                self.copy_saved(&row.project, &saved.snapshot, &snapshot, request.name)
                    .await?
            }
            _ => {
                let kind = self.kind_to_save(row.isolation, request.kind)?;
                let subject = Subject::sandbox(&row, self.parent_of_next(&row).await);
                let _one_at_a_time = cell.saving.lock().await;
                // Not before: whoever had the lock may have put it to rest.
                let instance = self.running_instance(cell).await?;
                let taken = self
                    .save_instance(&subject, &instance, &snapshot, kind, SnapshotOwner::User)
                    .await;
                self.thaw(cell, row.isolation, &instance).await;
                if taken.is_err() && !cell.still_has(&instance) {
                    return Err(cell.explain_end().await);
                }
                SnapshotRow {
                    name: request.name,
                    ..taken?
                }
            }
        };
        self.commit_snapshot(taken).await
    }

    /// The instance of a sandbox that runs, or a refusal that says what it does instead.
    pub(crate) async fn running_instance(&self, cell: &Cell) -> Result<InstanceId, Fault> {
        let touched = atoll_lifecycle::step(&cell.record(), atoll_lifecycle::Input::Touched, self.now());
        touched.map_err(Fault::from)?;
        cell.reachable().await;
        match cell.instance() {
            Some(instance) => Ok(instance.id),
            None => Err(cell.explain_end().await),
        }
    }

    /// The same bytes under another id; nothing is copied.
    async fn copy_saved(
        &self,
        project: &ProjectId,
        from: &SnapshotId,
        to: &SnapshotId,
        name: Option<String>,
    ) -> Result<SnapshotRow, Fault> {
        let found = self
            .store()
            .saved
            .snapshot(project, from)
            .await
            .map_err(|e| from_store(&e))?;
        let saved = found.ok_or_else(|| no_snapshot(from.as_str()))?;
        let copied = self.node().copy_saved(from, to).await?;
        Ok(SnapshotRow {
            id: to.clone(),
            name,
            owner: SnapshotOwner::User,
            stored_bytes: copied.stored_bytes,
            created_at: self.now(),
            ..saved
        })
    }

    /// Commits the row of bytes that are durable; on error the bytes go.
    pub(crate) async fn commit_snapshot(&self, row: SnapshotRow) -> Result<Snapshot, Fault> {
        let fact = NewFact {
            at: self.now(),
            project: row.project.clone(),
            sandbox: row.sandbox.clone(),
            fact: Fact::SnapshotCreated {
                snapshot: row.id.clone(),
                kind: row.kind,
                total_bytes: row.total_bytes,
                stored_bytes: row.stored_bytes,
            },
        };
        match self.store().saved.insert_snapshot(row.clone(), vec![fact]).await {
            Ok(()) => Ok(view(row)),
            Err(error) => {
                let _ = self.node().forget(&row.id).await;
                Err(match (&error, &row.name) {
                    (atoll_store::Error::NameTaken { .. }, Some(name)) => name_taken(name),
                    _ => from_store(&error),
                })
            }
        }
    }

    pub async fn snapshots(
        &self,
        caller: &Caller,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<Snapshot>, Fault> {
        let after = crate::parse_cursor(cursor)?;
        let page = self
            .store()
            .saved
            .snapshots(caller.project(), after, limit)
            .await
            .map_err(|e| from_store(&e))?;
        Ok(Page {
            items: page.items.into_iter().map(view).collect(),
            next: page.next.map(|cursor| cursor.to_string()),
        })
    }

    /// By id or name.
    pub async fn snapshot(&self, caller: &Caller, which: &str) -> Result<Snapshot, Fault> {
        self.snapshot_row(caller.project(), which).await.map(view)
    }

    /// A snapshot that somebody asked for, by id or name.
    pub(crate) async fn snapshot_row(&self, project: &ProjectId, which: &str) -> Result<SnapshotRow, Fault> {
        self.find_snapshot(project, which)
            .await?
            .ok_or_else(|| no_snapshot(which))
    }

    pub(crate) async fn find_snapshot(
        &self,
        project: &ProjectId,
        which: &str,
    ) -> Result<Option<SnapshotRow>, Fault> {
        let found = match which.parse::<SnapshotId>() {
            Ok(id) => self.store().saved.snapshot(project, &id).await,
            Err(_) => self.store().saved.snapshot_by_name(project, which).await,
        };
        let found = found.map_err(|e| from_store(&e))?;
        Ok(found.filter(|row| row.owner == SnapshotOwner::User))
    }

    /// Deletes it. Sandboxes that were made of it go on.
    pub async fn delete_snapshot(&self, caller: &Caller, which: &str) -> Result<(), Fault> {
        let row = self.snapshot_row(caller.project(), which).await?;
        let fact = NewFact {
            at: self.now(),
            project: row.project.clone(),
            sandbox: row.sandbox.clone(),
            fact: Fact::SnapshotDeleted {
                snapshot: row.id.clone(),
            },
        };
        self.store()
            .saved
            .delete_snapshot(&row.project, &row.id, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        if let Err(fault) = self.node().forget(&row.id).await {
            tracing::warn!(snapshot = %row.id, %fault, "a snapshot's bytes could not be removed yet");
        }
        self.inner.garbage.notify_one();
        Ok(())
    }

    /// Refuses to store more for a project that is over its quota.
    pub(crate) async fn check_storage(&self, project: &ProjectId) -> Result<(), Fault> {
        let Some(limit) = self.settings().max_storage_per_project else {
            return Ok(());
        };
        let used = self
            .store()
            .saved
            .project_storage(project)
            .await
            .map_err(|e| from_store(&e))?;
        let used = used
            .total()
            .saturating_add(self.template_bytes(project).await?)
            .saturating_add(self.inner.uploads.of(project));
        if used < limit {
            return Ok(());
        }
        Err(Fault::new(
            Code::StorageQuotaExceeded,
            format!(
                "the project uses {} of its {} of storage",
                atoll_types::format_bytes(used),
                atoll_types::format_bytes(limit)
            ),
        )
        .hint(
            "delete snapshots, paused sandboxes, volumes, artifacts or templates (`atoll template prune` takes what builds \
             cached), or have the operator raise the quota",
        ))
    }

    /// The parent of the next snapshot of a sandbox: its last one, or the one that it was made of.
    pub(crate) async fn parent_of_next(&self, row: &SandboxRow) -> Option<SnapshotId> {
        match self.store().saved.latest_snapshot_of(&row.id).await {
            Ok(Some(latest)) => Some(latest),
            _ => row.spec.template.parse().ok(),
        }
    }
}

/// Keeps bytes whose row is still to be committed from being taken for garbage.
pub(crate) struct Unfinished {
    service: Sandboxes,
    id: String,
}

impl Unfinished {
    /// For an id that nobody else has.
    pub(crate) fn new(service: &Sandboxes, id: &SnapshotId) -> Self {
        let id = id.to_string();
        service.unfinished().insert(id.clone());
        Self {
            service: service.clone(),
            id,
        }
    }

    /// For an id that follows from a key: `None` while another request has it.
    fn claim(service: &Sandboxes, id: &SnapshotId) -> Option<Self> {
        let fresh = service.unfinished().insert(id.to_string());
        fresh.then(|| Self {
            service: service.clone(),
            id: id.to_string(),
        })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.service.unfinished().remove(&self.id);
    }
}

fn being_taken(id: &SnapshotId) -> Fault {
    Fault::new(
        Code::SnapshotBegins,
        format!("{id} is being taken by another request with the same idempotency key"),
    )
    .hint("ask again")
}

pub(crate) fn check_name(name: &str) -> Result<(), Fault> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=64).contains(&name.len())
        && name.chars().all(fine)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        // Never to be mistaken for an id.
        && !name.starts_with("snap_")
        && !name.starts_with("vol_")
    {
        return Ok(());
    }
    Err(Fault::new(
        Code::NameInvalid,
        format!(
            "`{name}` is no name: 1 to 64 letters, digits, `.`, `_` or `-`, beginning with a letter or digit"
        ),
    ))
}

fn name_taken(name: &str) -> Fault {
    Fault::new(
        Code::NameTaken,
        format!("there is a snapshot called `{name}` already"),
    )
    .hint("choose another name, or delete that one")
}

fn no_snapshot(which: &str) -> Fault {
    Fault::new(Code::SnapshotNotFound, format!("there is no snapshot {which}"))
        .hint("`atoll snapshot list` shows those that exist")
}

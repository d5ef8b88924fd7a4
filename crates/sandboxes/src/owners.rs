//! Whose a sandbox or a volume is: for front ends, which decide by rules of their own who passes.
//!
//! What must hold: a sandbox that belongs to another one does not outlive it, whoever dies in between.

use std::sync::Arc;

use atoll_lifecycle::Input;
use atoll_types::{Code, EndReason, Fault, Owner, ProjectId, SandboxId, VolumeId, WorkflowOwner};

use crate::cell::Cell;
use crate::faults::from_store;
use crate::{Caller, Sandboxes};

/// Whose a sandbox is.
#[derive(Debug, Clone)]
pub struct Belongs {
    pub project: ProjectId,
    /// The run of a workflow, if it belongs to one.
    pub workflow: Option<WorkflowOwner>,
    /// The first of those that began with the same memory, by forks and snapshots: itself, where none did.
    pub family: SandboxId,
}

impl Sandboxes {
    /// Who a living sandbox belongs to.
    pub fn owner(&self, id: &SandboxId) -> Option<ProjectId> {
        let cell = self.live_cell(id)?;
        Some(cell.project.clone())
    }

    /// The same, with the run of a workflow, and those that it is a copy of.
    pub fn belongs(&self, id: &SandboxId) -> Option<Belongs> {
        let cell = self.live_cell(id)?;
        let seen = cell.seen.borrow();
        let spec = &seen.spec;
        Some(Belongs {
            project: cell.project.clone(),
            workflow: spec.owner.as_ref().and_then(Owner::workflow).cloned(),
            family: spec.lineage.clone().unwrap_or_else(|| id.clone()),
        })
    }

    /// Whom a new sandbox will belong to: whom its maker names, else the key that it is made with.
    pub(crate) fn owner_of_new(&self, caller: &Caller, asked: Option<Owner>) -> Result<Option<Owner>, Fault> {
        match asked {
            None => Ok(caller.key().cloned().map(Owner::Key)),
            Some(Owner::Key(_)) => Err(Fault::new(
                Code::OwnerInvalid,
                "a sandbox that belongs to a key belongs to the one that it is made with",
            )
            .hint("leave `owner` out")),
            Some(Owner::Sandbox(sandbox)) => match self.owner(&sandbox) {
                Some(project) if project == *caller.project() => Ok(Some(Owner::Sandbox(sandbox))),
                _ => Err(Fault::new(
                    Code::OwnerInvalid,
                    format!("there is no living sandbox {sandbox} that it could belong to"),
                )),
            },
            Some(owner @ Owner::Workflow(_)) => Ok(Some(owner)),
        }
    }

    /// Ends what belonged to a sandbox that is over.
    pub(crate) fn end_owned_by(&self, over: &SandboxId) {
        let over = Some(Owner::Sandbox(over.clone()));
        let owned = |cell: &&Arc<Cell>| cell.seen.borrow().spec.owner == over;
        let cells: Vec<_> = self.live().values().filter(owned).cloned().collect();
        for cell in cells {
            self.end_with_owner(cell);
        }
    }

    /// The same of one that was being made meanwhile, or whose owner went while there was no server.
    pub(crate) fn end_if_ownerless(&self, cell: &Arc<Cell>) {
        let owner = match &cell.seen.borrow().spec.owner {
            Some(Owner::Sandbox(owner)) => owner.clone(),
            _ => return,
        };
        if self.live_cell(&owner).is_none() {
            self.end_with_owner(Arc::clone(cell));
        }
    }

    fn end_with_owner(&self, cell: Arc<Cell>) {
        tracing::info!(sandbox = %cell.id, "the sandbox that it belongs to is over");
        let service = self.clone();
        self.inner.tasks.spawn(async move {
            let reason = EndReason::Killed;
            service.record(&cell, Input::Kill { reason }).await;
        });
    }

    /// Whether a living sandbox has a label: by it an API knows those that it made. `None`: there is none.
    pub fn has_label(&self, id: &SandboxId, label: &str) -> Option<bool> {
        let cell = self.live_cell(id)?;
        let seen = cell.seen.borrow();
        Some(seen.spec.labels.contains_key(label))
    }

    /// The living sandbox that passes a check: for links that prove a token but do not name the sandbox.
    pub fn find_living(&self, is_it: impl Fn(&SandboxId) -> bool) -> Option<SandboxId> {
        let ids: Vec<SandboxId> = self.live().keys().cloned().collect();
        ids.into_iter().find(is_it)
    }

    /// Refuses where nobody could enter the sandbox now. One that rests and asks for it is woken.
    pub async fn check_entry(&self, caller: &Caller, id: &SandboxId) -> Result<(), Fault> {
        self.enter(caller, id).await.map(drop)
    }

    /// Who a volume belongs to.
    pub async fn owner_of_volume(&self, id: &VolumeId) -> Result<Option<ProjectId>, Fault> {
        let found = self.store().saved.project_of_volume(id).await;
        found.map_err(|e| from_store(&e))
    }
}

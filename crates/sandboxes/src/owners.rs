//! Whose a sandbox or a volume is: for front ends, which decide by rules of their own who passes.

use std::collections::BTreeMap;

use atoll_types::{Fault, ProjectId, SandboxId, VolumeId};

use crate::faults::from_store;
use crate::{Caller, Sandboxes};

/// Whose a sandbox is, and as what it was made.
#[derive(Debug, Clone)]
pub struct Labelled {
    pub project: ProjectId,
    pub labels: BTreeMap<String, String>,
    /// The first of those that began with the same memory, by forks and snapshots: itself, where none did.
    pub family: SandboxId,
}

impl Sandboxes {
    /// Who a living sandbox belongs to.
    pub fn owner(&self, id: &SandboxId) -> Option<ProjectId> {
        let cell = self.live_cell(id)?;
        Some(cell.project.clone())
    }

    /// The same, and its labels.
    pub fn labelled(&self, id: &SandboxId) -> Option<Labelled> {
        let cell = self.live_cell(id)?;
        let seen = cell.seen.borrow();
        let spec = &seen.spec;
        Some(Labelled {
            project: cell.project.clone(),
            labels: spec.labels.clone(),
            family: spec.lineage.clone().unwrap_or_else(|| id.clone()),
        })
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

//! What can be changed about a sandbox after its creation: its name, labels, times, and limits.
//!
//! What must hold: what the row says is what holds. Limits are set on the host before the commit that says so, and set back
//! if that fails; nothing else has to be told, since deadlines are read from the row. A change is all or nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_lifecycle::Policy;
use atoll_store::{Fact, SandboxRow};
use atoll_types::{
    Code, DiskBacking, Fault, IdleAction, IdlePolicy, SandboxId, SandboxName, SandboxSpec, SandboxState,
    TimeoutAction,
};

use crate::cell::Cell;
use crate::create::insert_fault;
use crate::{Caller, Sandbox, Sandboxes, views};

/// Labels that begin so say which API made a sandbox, and who may enter it follows from them: APIs take none from callers.
pub const OWN_LABELS: &str = "atoll.";

/// What is to be different; `None` leaves a thing as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeSandbox {
    /// What it is called from now on; `Some(None)`: nothing.
    pub name: Option<Option<SandboxName>>,
    /// These labels get these values, or go.
    pub labels: BTreeMap<String, Option<String>>,
    /// Its lifetime from now and, at rest, from its next resume.
    pub timeout_millis: Option<u64>,
    pub on_timeout: Option<TimeoutAction>,
    /// `Some(None)`: however long nobody uses it.
    pub idle: Option<Option<ChangeIdle>>,
    pub auto_resume: Option<bool>,
    pub retention_millis: Option<Option<u64>>,
    pub cpu_millis: Option<u32>,
    pub memory_bytes: Option<u64>,
    pub pids: Option<u32>,
}

/// What is `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChangeIdle {
    pub after_millis: Option<u64>,
    pub action: Option<IdleAction>,
}

impl ChangeIdle {
    fn applied_to(self, idle: Option<IdlePolicy>) -> Result<IdlePolicy, Fault> {
        let after_millis = self.after_millis.or(idle.map(|idle| idle.after_millis));
        let after_millis = after_millis.ok_or_else(|| {
            let message = "this sandbox has no idle time, so it needs one with what happens then";
            Fault::new(Code::IdleOutOfRange, message).hint("say after how long, too")
        })?;
        let action = self.action.or(idle.map(|idle| idle.action));
        Ok(IdlePolicy {
            after_millis,
            action: action.unwrap_or_default(),
        })
    }
}

impl ChangeSandbox {
    /// What it changes, in the words of the ledger.
    fn fields(&self) -> Vec<String> {
        let fields = [
            ("name", self.name.is_some()),
            ("labels", !self.labels.is_empty()),
            ("timeout", self.timeout_millis.is_some()),
            ("on_timeout", self.on_timeout.is_some()),
            ("idle", self.idle.is_some()),
            ("auto_resume", self.auto_resume.is_some()),
            ("retention", self.retention_millis.is_some()),
            ("cpu", self.cpu_millis.is_some()),
            ("memory", self.memory_bytes.is_some()),
            ("pids", self.pids.is_some()),
        ];
        let changed = fields.into_iter().filter(|(_, changed)| *changed);
        changed.map(|(name, _)| name.to_owned()).collect()
    }

    /// A label that it must not touch.
    fn own_label(&self) -> Option<&String> {
        self.labels.keys().find(|label| label.starts_with(OWN_LABELS))
    }

    /// What a spec becomes by it.
    fn applied_to(&self, mut spec: SandboxSpec) -> Result<SandboxSpec, Fault> {
        for (name, value) in &self.labels {
            match value {
                Some(value) => spec.labels.insert(name.clone(), value.clone()),
                None => spec.labels.remove(name),
            };
        }
        if let Some(name) = &self.name {
            spec.name.clone_from(name);
        }
        spec.timeout_millis = self.timeout_millis.or(spec.timeout_millis);
        spec.on_timeout = self.on_timeout.unwrap_or(spec.on_timeout);
        if let Some(change) = self.idle {
            spec.idle = change.map(|change| change.applied_to(spec.idle)).transpose()?;
        }
        spec.auto_resume = self.auto_resume.unwrap_or(spec.auto_resume);
        spec.retention_millis = self.retention_millis.unwrap_or(spec.retention_millis);
        let resources = &mut spec.resources;
        resources.cpu_millis = self.cpu_millis.unwrap_or(resources.cpu_millis);
        resources.memory_bytes = self.memory_bytes.unwrap_or(resources.memory_bytes);
        resources.pids = self.pids.unwrap_or(resources.pids);
        Ok(spec)
    }
}

impl Sandboxes {
    /// Changes it, whether it runs or rests. One on its way between the two is waited for.
    pub async fn change(
        &self,
        caller: &Caller,
        id: &SandboxId,
        change: ChangeSandbox,
    ) -> Result<Sandbox, Fault> {
        let cell = self.cell(caller, id).await?;
        let service = self.clone();
        let task = self
            .inner
            .tasks
            .spawn(async move { service.change_here(&cell, &change).await });
        let row = task
            .await
            .map_err(|_| Fault::internal("a change was interrupted"))??;
        Ok(views::sandbox(row))
    }

    async fn change_here(&self, cell: &Arc<Cell>, change: &ChangeSandbox) -> Result<SandboxRow, Fault> {
        let settled = |row: &SandboxRow| {
            !matches!(
                row.record.state,
                SandboxState::Starting
                    | SandboxState::Pausing
                    | SandboxState::Stopping
                    | SandboxState::Resuming
            )
        };
        // Limits are not set on what is held still to be saved. Whoever saves needs the row's lock last.
        let (_one_at_a_time, mut row) = loop {
            let saving = cell.saving.lock().await;
            let row = cell.row.lock().await;
            if settled(&row) {
                break (saving, row);
            }
            drop((saving, row));
            cell.seen.wait_for(settled).await;
        };
        if !row.record.state.is_live() || row.record.state == SandboxState::Deleting {
            drop(row);
            return Err(cell.explain_end().await);
        }
        let fields = change.fields();
        if fields.is_empty() {
            return Ok(row.clone());
        }
        let spec = self.admitted(change, &row)?;
        let runs = row.record.state == SandboxState::Running;
        let mut next = row.clone();
        let (policy, timeout) = (Policy::of(&spec), change.timeout_millis);
        next.record = atoll_lifecycle::change(&row.record, policy, timeout, self.now())?;
        next.spec = spec;
        let before = row.spec.resources;
        let resized = runs && before != next.spec.resources;
        let instance = row.record.instance.clone().filter(|_| resized);
        if let Some(instance) = &instance {
            let resources = &next.spec.resources;
            self.node().resize(row.isolation, instance, resources).await?;
        }
        let fact = self.fact(cell, Fact::SandboxChanged { fields });
        match self.store().sandboxes.change_sandbox(next, vec![fact]).await {
            Ok(committed) => {
                cell.seen.replace(committed.clone());
                *row = committed;
                self.mind_deadline(cell);
                Ok(row.clone())
            }
            Err(error) => {
                if let Some(instance) = &instance
                    && let Err(error) = self.node().resize(row.isolation, instance, &before).await
                {
                    tracing::error!(sandbox = %cell.id, %error, "limits could not be set back");
                }
                Err(insert_fault(&error))
            }
        }
    }

    /// The spec that it would have, if it may have it.
    fn admitted(&self, change: &ChangeSandbox, row: &SandboxRow) -> Result<SandboxSpec, Fault> {
        if let Some(label) = change.own_label() {
            let message =
                format!("the label `{label}` is the server's own, and stays as the sandbox was created");
            return Err(Fault::new(Code::LabelInvalid, message));
        }
        let spec = change.applied_to(row.spec.clone())?;
        let disk = row.spec.resources.disk_bytes;
        // Its disk is as large as it was made, and one in memory counts as memory.
        if spec.resources.disk_backing == DiskBacking::Memory
            && spec.resources.with_room_for_disk().disk_bytes < disk
        {
            return Err(Fault::new(
                Code::ResourcesOutOfRange,
                format!(
                    "its disk of {disk} bytes is in memory, so it needs at least {} bytes of memory",
                    disk.div_ceil(3) * 4
                ),
            )
            .hint("give it more, or create a sandbox with a smaller disk or with `disk_backing` `disk`"));
        }
        let kept = spec.clone();
        atoll_lifecycle::admit(spec, &self.settings().limits, &self.tiers())?;
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(names: &[&str]) -> ChangeSandbox {
        ChangeSandbox {
            labels: names.iter().map(|name| ((*name).to_owned(), None)).collect(),
            ..ChangeSandbox::default()
        }
    }

    #[test]
    fn labels_that_say_how_a_sandbox_was_made_stay() {
        assert_eq!(labels(&["stage", "atollx"]).own_label(), None);
        let found = labels(&["stage", "atoll.e2b"]);
        assert_eq!(found.own_label().map(String::as_str), Some("atoll.e2b"));
    }

    #[test]
    fn what_happens_when_idle_stays_unless_it_is_named() {
        let paused = IdlePolicy {
            after_millis: 600_000,
            action: IdleAction::Pause,
        };
        let change = |after_millis, action| ChangeIdle { after_millis, action };
        let later = change(Some(5_000), None).applied_to(Some(paused)).unwrap();
        assert_eq!((later.after_millis, later.action), (5_000, IdleAction::Pause));
        let stopped = change(None, Some(IdleAction::Stop))
            .applied_to(Some(paused))
            .unwrap();
        assert_eq!(
            (stopped.after_millis, stopped.action),
            (600_000, IdleAction::Stop)
        );
        let first = change(Some(5_000), None).applied_to(None).unwrap();
        assert_eq!(first.action, IdleAction::Kill);
        assert!(change(None, Some(IdleAction::Stop)).applied_to(None).is_err());
    }
}

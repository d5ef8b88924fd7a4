//! Templates that come up running: the memory of their start command, taken once after its ready check.
//!
//! ```text
//!   boot ── start command ── ready check ── save with memory ── destroy          kept for the template and this size
//!   create ──> restore, identity ──> its servers answer at once
//! ```
//! What must hold: a sandbox that is made this way could have been made the slow way. So it is only done where the start
//! command cannot have seen anything of the sandbox's own: no environment, no volumes, the same size and tier.

use atoll_lifecycle::{Admitted, admit};
use atoll_node::{Boot, Failed, Greeting, identity};
use atoll_store::SnapshotRow;
use atoll_types::{
    Code, Fault, InstanceId, Isolation, ProjectId, ResourcesAsked, SandboxId, SandboxSpec, SaveKind,
    SnapshotId, SnapshotOwner, TemplateId, TemplateManifest,
};

use tokio::sync::mpsc;

use crate::faults::from_store;
use crate::saving::Subject;
use crate::snapshots::{Snapshot, Unfinished};
use crate::{Action, Caller, Sandboxes, entropy, starting};

pub(crate) fn not_started(failed: Failed) -> Fault {
    match failed {
        Failed::Guest(error) => Fault::new(Code::TemplateStartFailed, error.to_string()),
        Failed::Fault(fault) => fault,
    }
}

impl Sandboxes {
    /// Boots the template, waits until its start command is ready, and keeps the memory for sandboxes of this size, or else
    /// of the template's: those of the caller's project, or of everybody if it is an operator who keeps what is shared. What
    /// the start command says meanwhile goes to `said`, line by line, as long as somebody reads it.
    pub async fn keep_running(
        &self,
        caller: &Caller,
        which: &str,
        asked: ResourcesAsked,
        isolation: Option<Isolation>,
        said: Option<mpsc::Sender<String>>,
    ) -> Result<Snapshot, Fault> {
        let project = caller.project().clone();
        let template = self.usable_template(&project, which)?;
        // What is kept of a shared one in the project of the operators serves everybody.
        let id = template.id.as_str();
        let for_all = project == *self.identity().default_project() && self.is_shared(id)?;
        if for_all || !self.is_own(&project, id)? {
            caller.may(Action::ShareTemplates, None)?;
        }
        if template.start.is_none() {
            return Err(Fault::new(
                Code::TemplateHasNoStart,
                format!("template {which} has no start command that could be kept running"),
            )
            .hint("build it with a start command and a ready check"));
        }
        let spec = SandboxSpec {
            template: template.id.to_string(),
            resources: asked.over(template.resources.unwrap_or_else(|| self.usual_resources())),
            timeout_millis: Some(self.settings().limits.min_timeout_millis),
            isolation_floor: isolation,
            ..SandboxSpec::default()
        };
        let admitted = admit(spec, &self.settings().limits, &self.tiers())?;
        self.kind_to_save(admitted.isolation, Some(SaveKind::Memory))?;
        let place = self.take_place(&project)?;
        let service = self.clone();
        let work = self.inner.tasks.spawn(async move {
            let _place = place;
            let id: InstanceId = entropy::id();
            let _held = service.hold(id.clone());
            let kept = service
                .keep_running_here(project, &id, &admitted, &template, said)
                .await;
            service.node().destroy(admitted.isolation, &id).await;
            kept
        });
        work.await
            .map_err(|_| Fault::internal("keeping a template running was interrupted"))?
    }

    async fn keep_running_here(
        &self,
        project: ProjectId,
        id: &InstanceId,
        admitted: &Admitted,
        template: &TemplateManifest,
        said: Option<mpsc::Sender<String>>,
    ) -> Result<Snapshot, Fault> {
        let boot = Boot {
            instance: id.clone(),
            project: Some(project.clone()),
            isolation: admitted.isolation,
            image: template.digest.clone(),
            resources: admitted.spec.resources,
            hostname: "atoll".into(),
            origin: None,
            volumes: Vec::new(),
            admission: None,
        };
        self.node().boot(boot).await?;
        let nobody: SandboxId = entropy::id();
        let start = template.start.as_ref();
        let greeting = Greeting {
            instance: id.clone(),
            identity: identity(&nobody, &admitted.spec, template, start),
            admission: None,
            command: None,
        };
        self.node().greet(greeting).await.map_err(not_started)?;
        if let Some(start) = start {
            starting::watch(self.node(), id, start, said).await?;
        }
        let subject = Subject {
            project,
            sandbox: None,
            parent: None,
            template: template.id.clone(),
            isolation: admitted.isolation,
            spec: admitted.spec.clone(),
        };
        let snapshot: SnapshotId = entropy::id();
        let _unfinished = Unfinished::new(self, &snapshot);
        let row = self
            .save_instance(&subject, id, &snapshot, SaveKind::Memory, SnapshotOwner::Template)
            .await?;
        self.commit_snapshot(row).await
    }

    /// The running state to make such a sandbox of a project of, if there is one: its own, or that of what everybody may use.
    pub(crate) async fn running_state(
        &self,
        project: &ProjectId,
        template: &TemplateManifest,
        admitted: &Admitted,
    ) -> Option<SnapshotRow> {
        let spec = &admitted.spec;
        if template.start.is_none() || !spec.env.is_empty() || !spec.volumes.is_empty() {
            return None;
        }
        let kept = self.store().saved.snapshots_of_template(&template.id).await;
        let kept =
            kept.inspect_err(|error| tracing::warn!(%error, "running templates could not be looked up"));
        let operators = self.identity().default_project();
        let for_all = || self.is_shared(template.id.as_str()).unwrap_or(false);
        kept.unwrap_or_default().into_iter().find(|row| {
            (row.project == *project || (row.project == *operators && for_all()))
                && row.isolation == admitted.isolation
                && row.spec.resources == spec.resources
                && self.check_fits(row).is_ok()
        })
    }

    /// Forgets what a project kept of a template that it has no more.
    pub(crate) async fn drop_running_state(&self, project: &ProjectId, template: &TemplateId) {
        let dropped = self
            .store()
            .saved
            .delete_snapshots_of_template(project, template)
            .await;
        match dropped.map_err(|e| from_store(&e)) {
            Ok(rows) => {
                for row in rows {
                    let _ = self.node().forget(&row.id).await;
                }
                self.inner.garbage.notify_one();
            }
            Err(fault) => {
                tracing::warn!(%template, %fault, "what a template kept running could not be dropped");
            }
        }
    }
}

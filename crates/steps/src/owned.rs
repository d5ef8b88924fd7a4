//! What workflows own: sandboxes whose owner is a run go when it is over. Whoever makes one may say so; our own steps do.

use std::time::Duration;

use atoll_identity::{Caller, Identity};
use atoll_sandboxes::{ListSandboxes, Sandboxes};
use atoll_types::{Fault, FaultKind, OwnedBy, Owner, OwnerKind, ProjectId, SandboxState, WorkflowOwner};
use atoll_workflows::Engine;
use tokio_util::sync::CancellationToken;

/// How soon after its workflow a sandbox goes.
const ROUND: Duration = Duration::from_secs(2);

/// Ends what belongs to workflows that are over, until `stop`.
pub(crate) async fn sweep(engine: Engine, identity: Identity, sandboxes: Sandboxes, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(ROUND) => {}
        }
        for project in engine.projects() {
            let Ok(project) = project.parse::<ProjectId>() else {
                continue;
            };
            if let Err(error) = sweep_project(&engine, &sandboxes, &identity.server(project)).await {
                tracing::warn!(%error, "sandboxes of workflows could not be looked after; trying again");
            }
        }
    }
}

async fn sweep_project(engine: &Engine, sandboxes: &Sandboxes, caller: &Caller) -> Result<(), Fault> {
    let mut cursor = None;
    loop {
        let page = sandboxes
            .list(
                caller,
                ListSandboxes {
                    owner: Some(OwnedBy::Kind(OwnerKind::Workflow)),
                    cursor: cursor.take(),
                    limit: 100,
                    ..ListSandboxes::default()
                },
            )
            .await?;
        for sandbox in page.items {
            let Some(owner) = sandbox.spec.owner.as_ref().and_then(Owner::workflow) else {
                continue;
            };
            let WorkflowOwner {
                namespace,
                run,
                workflow,
            } = owner;
            let goes_on = engine
                .goes_on(caller.project().as_str(), namespace, workflow, run)
                .await
                .map_err(|refusal| Fault::internal(refusal.to_string()))?;
            if goes_on != Some(false) || sandbox.state == SandboxState::Deleting {
                continue;
            }
            tracing::info!(sandbox = %sandbox.id, workflow, "its workflow is over");
            match sandboxes.kill(caller, &sandbox.id).await {
                Ok(_) => {}
                Err(fault) if matches!(fault.kind(), FaultKind::NotFound | FaultKind::Gone) => {}
                Err(fault) => return Err(fault),
            }
        }
        match page.next {
            Some(next) => cursor = Some(next),
            None => return Ok(()),
        }
    }
}

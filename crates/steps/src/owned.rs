//! What workflows own: sandboxes with labels that name their workflow go when it is over. Anybody may put the labels on; our
//! own steps do.
//!
//! ```text
//! atoll.owner     workflow
//! atoll.workflow  NAMESPACE:RUN:WORKFLOW
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_identity::{Caller, Identity};
use atoll_sandboxes::{ListSandboxes, Sandboxes};
use atoll_types::{Fault, FaultKind, ProjectId, SandboxState};
use atoll_workflows::{Engine, Step, StepEnd};
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use crate::call::invalid;

const OWNER: &str = "atoll.owner";
const WORKFLOW: &str = "atoll.workflow";
/// How soon after its workflow a sandbox goes.
const ROUND: Duration = Duration::from_secs(2);

pub(crate) fn label(step: &Step, request: &mut Map<String, Value>) -> Result<(), StepEnd> {
    let labels = request.entry("labels").or_insert_with(|| json!({}));
    let Some(labels) = labels.as_object_mut() else {
        return Err(invalid("`labels` must be a JSON object"));
    };
    let workflow = format!("{}:{}:{}", step.namespace, step.run_id, step.workflow_id);
    labels.insert(OWNER.to_owned(), json!("workflow"));
    labels.insert(WORKFLOW.to_owned(), json!(workflow));
    // What programs in it pay models is the workflow's.
    labels.entry("workflow").or_insert(json!(step.workflow_id));
    labels.entry("run").or_insert(json!(step.run_id));
    Ok(())
}

/// Namespace, run and workflow.
fn read(label: &str) -> Option<(&str, &str, &str)> {
    let (namespace, rest) = label.split_once(':')?;
    let (run, workflow) = rest.split_once(':')?;
    Some((namespace, run, workflow))
}

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
                    labels: BTreeMap::from([(OWNER.to_owned(), "workflow".to_owned())]),
                    cursor: cursor.take(),
                    limit: 100,
                    ..ListSandboxes::default()
                },
            )
            .await?;
        for sandbox in page.items {
            let Some((namespace, run, workflow)) =
                sandbox.spec.labels.get(WORKFLOW).and_then(|label| read(label))
            else {
                continue;
            };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_a_workflow_whatever_it_is_called() {
        assert_eq!(read("default:0199:a:b/c"), Some(("default", "0199", "a:b/c")));
        assert_eq!(read("default"), None);
    }
}

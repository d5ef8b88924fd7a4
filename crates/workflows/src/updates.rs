//! Updates: sent, waited for, and together with the start of their workflow.

use atoll_workflow_core::{Refusal, Stage, UpdateStatus};
use temporalio_protos::temporal::api::common::v1::WorkflowExecution;
use temporalio_protos::temporal::api::enums::v1::{
    UpdateWorkflowExecutionLifecycleStage as Wire, WorkflowIdConflictPolicy as Conflict,
};
use temporalio_protos::temporal::api::update::v1::{Request, UpdateRef, WaitPolicy};
use temporalio_protos::temporal::api::workflowservice::v1 as service;
use temporalio_protos::temporal::api::workflowservice::v1::execute_multi_operation_request::operation::Operation;
use temporalio_protos::temporal::api::workflowservice::v1::execute_multi_operation_response::{
    Response, response,
};

use crate::Engine;
use crate::cells::Key;
use crate::namespaces::Hold;
use crate::starts::{Along, Policy, start_of, start_response};

impl Engine {
    pub async fn update_workflow(
        &self,
        request: service::UpdateWorkflowExecutionRequest,
    ) -> Result<service::UpdateWorkflowExecutionResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        self.check_room(&inside)?;
        let execution = request.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let update = named(request.request)?;
        let id = update.meta.clone().unwrap_or_default().update_id;
        let first = request.first_execution_run_id;
        // The update is in memory only: the workflow stays there for as long as somebody waits.
        let _held = self.inner.cells.get(&key);
        let run_id = self
            .change(key.clone(), &execution.run_id, move |slot, turn| {
                check_first(&slot.run, &first)?;
                slot.run.update(update, turn)?;
                Ok(slot.run.state.run_id.clone())
            })
            .await?;
        let stage = wanted(request.wait_policy);
        let (run_id, status) = self.await_update(&inside, &key, run_id, &id, stage).await?;
        Ok(update_response(&key, run_id, id, status))
    }

    pub async fn poll_update(
        &self,
        request: service::PollWorkflowExecutionUpdateRequest,
    ) -> Result<service::PollWorkflowExecutionUpdateResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let reference = request
            .update_ref
            .ok_or_else(|| Refusal::InvalidArgument("UpdateRef is not set on request.".to_owned()))?;
        let execution = reference.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let run_id = self
            .see(&key, &execution.run_id, |slot| Ok(slot.run.state.run_id.clone()))
            .await?;
        let stage = match request.wait_policy {
            Some(policy) if policy.lifecycle_stage != 0 => wanted(Some(policy)),
            _ => Stage::Admitted,
        };
        let id = reference.update_id;
        let (run_id, status) = self.await_update(&inside, &key, run_id, &id, stage).await?;
        let response = update_response(&key, run_id, id, status);
        Ok(service::PollWorkflowExecutionUpdateResponse {
            outcome: response.outcome,
            stage: response.stage,
            update_ref: response.update_ref,
        })
    }

    /// Waits until an update has come so far, or the time is up; then says how far it has come, and in which run. A caller
    /// with less patience than a long poll takes leaves in the middle of it: an answer before that would only make it ask
    /// again, however often, and never learn that its own time is over.
    async fn await_update(
        &self,
        inside: &Hold,
        key: &Key,
        run_id: String,
        id: &str,
        stage: Stage,
    ) -> Result<(String, UpdateStatus), Refusal> {
        let cell = self.inner.cells.get(key);
        let mut changes = cell.subscribe();
        let deadline = tokio::time::Instant::now() + self.inner.options.long_poll;
        let mut run_id = run_id;
        loop {
            changes.borrow_and_update();
            let (status, running, successor) = self
                .see(key, &run_id, |slot| {
                    Ok((
                        slot.run.update_status(id),
                        slot.run.is_running(),
                        slot.run.state.successor.clone(),
                    ))
                })
                .await?;
            match status {
                Some(status) if status.stage >= stage => return Ok((run_id, status)),
                Some(status) => {
                    let waited = tokio::select! {
                        waited = tokio::time::timeout_at(deadline, changes.changed()) => waited,
                        () = inside.ending() => {
                            return Err(Refusal::NamespaceDeleting(key.namespace.to_string()));
                        }
                    };
                    if waited.is_err() {
                        return Ok((run_id, status));
                    }
                }
                // The next run was asked in its place.
                None if !running && !successor.is_empty() => run_id = successor,
                None if !running => {
                    return Err(Refusal::NotFound(
                        "workflow execution already completed".to_owned(),
                    ));
                }
                None => return Err(Refusal::NotFound(format!("update {id:?} not found"))),
            }
        }
    }

    /// Starts a workflow, or finds it, and sends it an update, as one.
    pub async fn update_with_start(
        &self,
        request: service::ExecuteMultiOperationRequest,
    ) -> Result<service::ExecuteMultiOperationResponse, Refusal> {
        let malformed =
            || Refusal::InvalidArgument("Operations have to be exactly [Start, Update].".to_owned());
        let mut operations = request
            .operations
            .into_iter()
            .map(|operation| operation.operation);
        let (
            Some(Some(Operation::StartWorkflow(start))),
            Some(Some(Operation::UpdateWorkflow(update))),
            None,
        ) = (operations.next(), operations.next(), operations.next())
        else {
            return Err(malformed());
        };
        if start.namespace != request.namespace || update.namespace != request.namespace {
            return Err(Refusal::InvalidArgument(
                "Operations have to be in the namespace of the request.".to_owned(),
            ));
        }
        let update_failed = |error: Refusal| Refusal::MultiOperation {
            start: None,
            update: Some(Box::new(error)),
        };
        let start_failed = |error: Refusal| Refusal::MultiOperation {
            start: Some(Box::new(error)),
            update: None,
        };
        if !start.cron_schedule.is_empty() || start.workflow_start_delay.is_some() {
            return Err(start_failed(Refusal::InvalidArgument(
                "CronSchedule and WorkflowStartDelay are not allowed in a multi-operation.".to_owned(),
            )));
        }
        let target = update.workflow_execution.unwrap_or_default();
        if target.workflow_id != start.workflow_id {
            return Err(update_failed(Refusal::InvalidArgument(
                "WorkflowId is not consistent with previous operation(s)".to_owned(),
            )));
        }
        let inside = self
            .inner
            .namespaces
            .enter(&request.namespace)
            .map_err(start_failed)?;
        let policy = Policy::new(start.workflow_id_reuse_policy, start.workflow_id_conflict_policy)
            .map_err(start_failed)?
            .or(Conflict::Fail);
        let asked = named(update.request).map_err(update_failed)?;
        let id = asked.meta.clone().unwrap_or_default().update_id;
        let key = Key::new(&start.namespace, &start.workflow_id);
        let along = Along {
            update: Some(asked),
            ..Default::default()
        };
        let _held = self.inner.cells.get(&key);
        // An update that is known already is only looked up, whatever became of its workflow.
        let known = self
            .see(&key, "", |slot| {
                Ok(slot.run.knows_update(&id).then(|| {
                    (
                        slot.run.state.run_id.clone(),
                        slot.run.started().first_execution_run_id.clone(),
                        slot.run.state.status,
                    )
                }))
            })
            .await
            .ok()
            .flatten();
        let started = match known {
            Some((run_id, first_execution_run_id, status)) => service::StartWorkflowExecutionResponse {
                run_id,
                first_execution_run_id,
                status,
                ..Default::default()
            },
            None => {
                let refused = |error: Refusal| match error {
                    Refusal::ResourceExhausted(_) => update_failed(error),
                    other => start_failed(other),
                };
                start_response(
                    self.start_run(start_of(start), policy, along)
                        .await
                        .map_err(refused)?,
                )
            }
        };
        let stage = wanted(update.wait_policy);
        let (run_id, status) = self
            .await_update(&inside, &key, started.run_id.clone(), &id, stage)
            .await
            .map_err(update_failed)?;
        Ok(service::ExecuteMultiOperationResponse {
            responses: vec![
                Response {
                    response: Some(response::Response::StartWorkflow(started)),
                },
                Response {
                    response: Some(response::Response::UpdateWorkflow(update_response(
                        &key, run_id, id, status,
                    ))),
                },
            ],
        })
    }
}

/// An update has a name, and an id, which is made up if the caller has none.
fn named(request: Option<Request>) -> Result<Request, Refusal> {
    let mut request =
        request.ok_or_else(|| Refusal::InvalidArgument("Request is not set on request.".to_owned()))?;
    if request.input.as_ref().is_none_or(|input| input.name.is_empty()) {
        return Err(Refusal::InvalidArgument(
            "Update Name is not set on request.".to_owned(),
        ));
    }
    let meta = request.meta.get_or_insert_default();
    if meta.update_id.is_empty() {
        meta.update_id = crate::fresh_id();
    }
    Ok(request)
}

fn wanted(policy: Option<WaitPolicy>) -> Stage {
    match Wire::try_from(policy.map_or(0, |policy| policy.lifecycle_stage)) {
        Ok(Wire::Completed) => Stage::Completed,
        _ => Stage::Accepted,
    }
}

fn update_response(
    key: &Key,
    run_id: String,
    update_id: String,
    status: UpdateStatus,
) -> service::UpdateWorkflowExecutionResponse {
    let stage = match status.stage {
        Stage::Admitted => Wire::Admitted,
        Stage::Accepted => Wire::Accepted,
        Stage::Completed => Wire::Completed,
    };
    service::UpdateWorkflowExecutionResponse {
        update_ref: Some(UpdateRef {
            workflow_execution: Some(WorkflowExecution {
                workflow_id: key.workflow_id.to_string(),
                run_id,
            }),
            update_id,
        }),
        outcome: status.outcome,
        stage: stage.into(),
        link: None,
    }
}

/// A caller that means one chain of runs is not to reach another.
pub(crate) fn check_first(run: &atoll_workflow_core::Run, first: &str) -> Result<(), Refusal> {
    if first.is_empty() || run.started().first_execution_run_id == first {
        return Ok(());
    }
    Err(Refusal::NotFound(
        "workflow execution not found: it belongs to another chain of runs".to_owned(),
    ))
}

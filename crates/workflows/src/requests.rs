//! What people and programs ask of one workflow: signal, cancel, terminate, describe, reset, delete.

use atoll_workflow_core::{CancelRequest, Refusal, ResetPoint, SignalRequest, Terminate, Turn};
use temporalio_protos::temporal::api::enums::v1::{ResetReapplyExcludeType, ResetReapplyType};
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::cells::{Key, finish};
use crate::namespaces::Hold;
use crate::updates::check_first;

impl Engine {
    pub async fn signal_workflow(
        &self,
        request: service::SignalWorkflowExecutionRequest,
    ) -> Result<service::SignalWorkflowExecutionResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.workflow_execution.unwrap_or_default();
        if request.signal_name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "SignalName is not set on request.".to_owned(),
            ));
        }
        self.inner
            .options
            .limits
            .check_id("RequestId", &request.request_id)?;
        let signal = SignalRequest {
            name: request.signal_name,
            input: request.input,
            header: request.header,
            identity: request.identity,
            request_id: request.request_id,
            links: request.links,
            sender: None,
        };
        self.check_room(&inside)?;
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.change(key, &execution.run_id, move |slot, turn| {
            slot.run.signal(signal, turn)
        })
        .await?;
        Ok(service::SignalWorkflowExecutionResponse::default())
    }

    pub async fn cancel_workflow(
        &self,
        request: service::RequestCancelWorkflowExecutionRequest,
    ) -> Result<service::RequestCancelWorkflowExecutionResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let first = request.first_execution_run_id;
        let cancel = CancelRequest {
            reason: request.reason,
            identity: request.identity,
            request_id: request.request_id,
            links: request.links,
            sender: None,
        };
        self.change(key, &execution.run_id, move |slot, turn| {
            check_first(&slot.run, &first)?;
            slot.run.request_cancel(cancel, turn)
        })
        .await?;
        Ok(service::RequestCancelWorkflowExecutionResponse {})
    }

    pub async fn terminate_workflow(
        &self,
        request: service::TerminateWorkflowExecutionRequest,
    ) -> Result<service::TerminateWorkflowExecutionResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let first = request.first_execution_run_id;
        let why = Terminate {
            reason: if request.reason.is_empty() {
                "terminated by user via frontend".to_owned()
            } else {
                request.reason
            },
            details: request.details,
            identity: request.identity,
            links: request.links,
        };
        self.change(key, &execution.run_id, move |slot, turn| {
            check_first(&slot.run, &first)?;
            slot.run.terminate(why, turn)
        })
        .await?;
        Ok(service::TerminateWorkflowExecutionResponse {})
    }

    pub async fn describe_workflow(
        &self,
        request: service::DescribeWorkflowExecutionRequest,
    ) -> Result<service::DescribeWorkflowExecutionResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.see(&key, &execution.run_id, |slot| {
            let run = &slot.run;
            Ok(service::DescribeWorkflowExecutionResponse {
                execution_config: Some(run.config()),
                workflow_execution_info: Some(run.info()),
                pending_activities: run.pending_activities(),
                pending_children: run.pending_children(),
                pending_workflow_task: run.pending_task(),
                workflow_extended_info: Some(run.extended_info()),
                ..Default::default()
            })
        })
        .await
    }

    pub async fn reset_workflow(
        &self,
        request: service::ResetWorkflowExecutionRequest,
    ) -> Result<service::ResetWorkflowExecutionResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let excluded = |kind: ResetReapplyExcludeType| {
            request
                .reset_reapply_exclude_types
                .iter()
                .any(|excluded| *excluded == i32::from(kind))
        };
        let nothing = request.reset_reapply_type == i32::from(ResetReapplyType::None);
        let signals_only = request.reset_reapply_type == i32::from(ResetReapplyType::Signal);
        let point = ResetPoint {
            task_end_id: request.workflow_task_finish_event_id,
            reason: request.reason.clone(),
            identity: request.identity.clone(),
            request_id: request.request_id.clone(),
            keep_signals: !nothing && !excluded(ResetReapplyExcludeType::Signal),
            keep_updates: !nothing && !signals_only && !excluded(ResetReapplyExcludeType::Update),
            then: request.post_reset_operations,
        };
        let execution = request.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let engine = self.clone();
        let run_id = finish(async move { engine.reset(inside, key, &execution.run_id, point).await }).await?;
        Ok(service::ResetWorkflowExecutionResponse { run_id })
    }

    /// Makes the run that goes back, and ends the one that is current, in one commit.
    async fn reset(
        &self,
        inside: Hold,
        key: Key,
        run_id: &str,
        point: ResetPoint,
    ) -> Result<String, Refusal> {
        let mut locked = self.lock_in(inside, &key).await;
        let base_id = locked.resolve(run_id).await?;
        let limits = self.inner.options.limits;
        let new_id = locked.fresh_run_id().to_owned();
        let now = locked.now();
        let turn = Turn {
            now,
            fresh_run_id: &new_id,
            limits: &limits,
        };
        let current = locked.current().await?;
        if let Some(current) = &current {
            let state = &locked.slot(current)?.run.state;
            if !point.request_id.is_empty() && state.start_request_id == point.request_id {
                return Ok(state.run_id.clone());
            }
        }
        self.check_room(locked.inside())?;
        let run = locked.slot(&base_id)?.run.reset(&point, &new_id, turn)?;
        if let Some(current) = current {
            let why = Terminate {
                reason: point.reason,
                identity: "history-resetter".to_owned(),
                ..Default::default()
            };
            let successor = new_id.clone();
            locked.decide(&current, move |slot, turn| {
                slot.run.replaced_by(&successor, why, turn)
            })?;
        }
        locked.add(run);
        locked.commit().await?;
        Ok(new_id)
    }

    pub async fn delete_workflow(
        &self,
        request: service::DeleteWorkflowExecutionRequest,
    ) -> Result<service::DeleteWorkflowExecutionResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.workflow_execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        let seen = self
            .see(&key, &execution.run_id, |slot| Ok(slot.run.state.run_id.clone()))
            .await;
        let run_id = match seen {
            // It cannot be read, so there is nobody to be told.
            Err(Refusal::Internal(_)) => {
                self.delete_run(&request.namespace, &execution.workflow_id, &execution.run_id)
                    .await?;
                return Ok(service::DeleteWorkflowExecutionResponse {});
            }
            seen => seen?,
        };
        // One that runs is ended first, so that its parent and its children hear of it.
        let ended = self
            .stop_run(
                key,
                &run_id,
                true,
                "Delete workflow execution",
                "history-service",
                None,
            )
            .await;
        match ended {
            Ok(()) | Err(Refusal::NotFound(_)) => {}
            Err(error) => return Err(error),
        }
        self.delete_run(&request.namespace, &execution.workflow_id, &run_id)
            .await?;
        Ok(service::DeleteWorkflowExecutionResponse {})
    }

    pub async fn reset_sticky(
        &self,
        request: service::ResetStickyTaskQueueRequest,
    ) -> Result<service::ResetStickyTaskQueueResponse, Refusal> {
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.change(key, &execution.run_id, |slot, turn| {
            slot.run.clear_sticky(turn);
            Ok(())
        })
        .await?;
        Ok(service::ResetStickyTaskQueueResponse {})
    }
}

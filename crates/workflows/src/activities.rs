//! Activity tasks: polled, kept alive, answered, by token or by name.
//!
//! What must hold: what the server carries out itself, on [`STEPS_QUEUE`], is taken and answered by the server alone. Whoever has
//! a key for workflows could otherwise answer in its place, and in the place of a person who was asked for approval.

use std::time::Duration;

use atoll_types::STEPS_QUEUE;
use atoll_workflow_core::{
    ActivityFinish, ActivityStart, GoOn, Heartbeat, Refusal, Run, TaskToken, Which, duration, stamp,
};
use temporalio_protos::temporal::api::common::v1::{Payloads, WorkflowExecution, WorkflowType};
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::cells::{Key, Slot};
use crate::queues::{Asking, Kind, QueueKey, Task, What};

/// Who speaks of an activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speaker {
    /// Whoever has a key for workflows.
    Worker,
    /// The server, of what it carries out itself.
    Server,
}

impl Speaker {
    fn may_name(self, run: &Run, token: &TaskToken) -> Result<(), Refusal> {
        match self == Self::Worker && run.names_one_on(token, STEPS_QUEUE) {
            true => Err(servers_own()),
            false => Ok(()),
        }
    }
}

fn servers_own() -> Refusal {
    Refusal::PermissionDenied(format!(
        "activities on the task queue `{STEPS_QUEUE}` are carried out and answered by the server alone: have workers of your own \
         poll another queue"
    ))
}

/// Refuses an activity of the server's that is meant by its id or type. Whoever means all of them means their own.
fn may_choose(run: &Run, which: &Which) -> Result<(), Refusal> {
    match *which != Which::All && run.chooses_one_on(which, STEPS_QUEUE)? {
        true => Err(servers_own()),
        false => Ok(()),
    }
}

impl Engine {
    /// Waits for an activity. An empty answer means that there was none.
    pub async fn poll_activity_task(
        &self,
        request: service::PollActivityTaskQueueRequest,
        wait: Option<Duration>,
    ) -> Result<service::PollActivityTaskQueueResponse, Refusal> {
        let queue = request.task_queue.as_ref();
        if queue.is_some_and(|queue| queue.name == STEPS_QUEUE) {
            return Err(servers_own());
        }
        self.poll_any_activity(request, wait).await
    }

    /// The same, on any queue.
    pub(crate) async fn poll_any_activity(
        &self,
        request: service::PollActivityTaskQueueRequest,
        wait: Option<Duration>,
    ) -> Result<service::PollActivityTaskQueueResponse, Refusal> {
        let inside = self.inner.namespaces.enter(&request.namespace)?;
        let queue = request.task_queue.unwrap_or_default();
        if queue.name.is_empty() {
            return Err(Refusal::InvalidArgument(
                "TaskQueue is not set on request.".to_owned(),
            ));
        }
        self.check_poll(&request.namespace, &queue.name, &request.identity)?;
        let key = QueueKey {
            namespace: request.namespace,
            name: queue.name,
            kind: Kind::Activity,
        };
        let asking = Asking {
            identity: request.identity.clone(),
            worker: request.worker_instance_key,
            now: self.now(),
            rate: request
                .task_queue_metadata
                .and_then(|metadata| metadata.max_tasks_per_second),
        };
        let deadline = tokio::time::Instant::now() + self.poll_time(wait);
        loop {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            let Some(task) = self.inner.queues.poll(&inside, &key, &asking, left).await else {
                return Ok(service::PollActivityTaskQueueResponse::default());
            };
            match self.take_activity(task.clone(), &request.identity).await {
                Err(Refusal::NotFound(_)) => {}
                // Should the namespace stay after all, somebody else has to find it.
                Err(refusal @ Refusal::NamespaceDeleting(_)) => {
                    self.inner.queues.put_back(&key, task);
                    return Err(refusal);
                }
                other => return other,
            }
        }
    }

    async fn take_activity(
        &self,
        task: Task,
        identity: &str,
    ) -> Result<service::PollActivityTaskQueueResponse, Refusal> {
        let What::Activity { scheduled_id, stamp } = task.what else {
            return Err(Refusal::NotFound("not an activity".to_owned()));
        };
        let identity = identity.to_owned();
        self.change(task.key, &task.run_id, move |slot, turn| {
            let started = slot.run.start_activity(scheduled_id, stamp, &identity, turn)?;
            Ok(activity_response(&slot.run, started))
        })
        .await
    }

    pub(crate) async fn finish_activity(
        &self,
        token: TaskToken,
        finish: ActivityFinish,
        identity: String,
        speaker: Speaker,
    ) -> Result<(), Refusal> {
        let key = Key::new(&token.namespace, &token.workflow_id);
        let run_id = token.run_id.clone();
        self.change_by_worker(key, &run_id, move |slot, turn| {
            speaker.may_name(&slot.run, &token)?;
            slot.run.finish_activity(&token, finish, &identity, turn)
        })
        .await
    }

    pub(crate) async fn heartbeat(
        &self,
        token: TaskToken,
        details: Option<Payloads>,
        speaker: Speaker,
    ) -> Result<Heartbeat, Refusal> {
        let key = Key::new(&token.namespace, &token.workflow_id);
        let run_id = token.run_id.clone();
        if details.is_none() {
            let now = self.now();
            let look = |slot: &Slot| {
                speaker.may_name(&slot.run, &token)?;
                Ok(slot.run.fresh_heartbeat(&token, now))
            };
            if let Some(beat) = self.see(&key, &run_id, look).await? {
                return Ok(beat);
            }
        }
        self.change_by_worker(key, &run_id, move |slot, turn| {
            speaker.may_name(&slot.run, &token)?;
            slot.run.heartbeat(&token, details, turn)
        })
        .await
    }

    pub async fn complete_activity(
        &self,
        request: service::RespondActivityTaskCompletedRequest,
    ) -> Result<service::RespondActivityTaskCompletedResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let finish = ActivityFinish::Completed(request.result);
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskCompletedResponse {})
    }

    pub async fn complete_activity_by_id(
        &self,
        request: service::RespondActivityTaskCompletedByIdRequest,
    ) -> Result<service::RespondActivityTaskCompletedByIdResponse, Refusal> {
        let token = by_id(
            request.namespace,
            request.workflow_id,
            request.run_id,
            request.activity_id,
        )?;
        let finish = ActivityFinish::Completed(request.result);
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskCompletedByIdResponse {})
    }

    pub async fn fail_activity(
        &self,
        request: service::RespondActivityTaskFailedRequest,
    ) -> Result<service::RespondActivityTaskFailedResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let finish = ActivityFinish::Failed {
            failure: request.failure.unwrap_or_default(),
            heartbeat: request.last_heartbeat_details,
        };
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskFailedResponse::default())
    }

    pub async fn fail_activity_by_id(
        &self,
        request: service::RespondActivityTaskFailedByIdRequest,
    ) -> Result<service::RespondActivityTaskFailedByIdResponse, Refusal> {
        let token = by_id(
            request.namespace,
            request.workflow_id,
            request.run_id,
            request.activity_id,
        )?;
        let finish = ActivityFinish::Failed {
            failure: request.failure.unwrap_or_default(),
            heartbeat: request.last_heartbeat_details,
        };
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskFailedByIdResponse::default())
    }

    pub async fn cancel_activity(
        &self,
        request: service::RespondActivityTaskCanceledRequest,
    ) -> Result<service::RespondActivityTaskCanceledResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let finish = ActivityFinish::Canceled(request.details);
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskCanceledResponse {})
    }

    pub async fn cancel_activity_by_id(
        &self,
        request: service::RespondActivityTaskCanceledByIdRequest,
    ) -> Result<service::RespondActivityTaskCanceledByIdResponse, Refusal> {
        let token = by_id(
            request.namespace,
            request.workflow_id,
            request.run_id,
            request.activity_id,
        )?;
        let finish = ActivityFinish::Canceled(request.details);
        self.finish_activity(token, finish, request.identity, Speaker::Worker)
            .await?;
        Ok(service::RespondActivityTaskCanceledByIdResponse {})
    }

    pub async fn heartbeat_activity(
        &self,
        request: service::RecordActivityTaskHeartbeatRequest,
    ) -> Result<service::RecordActivityTaskHeartbeatResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let beat = self.heartbeat(token, request.details, Speaker::Worker).await?;
        Ok(service::RecordActivityTaskHeartbeatResponse {
            cancel_requested: beat.cancel_requested,
            activity_paused: beat.paused,
            activity_reset: beat.reset,
        })
    }

    pub async fn heartbeat_activity_by_id(
        &self,
        request: service::RecordActivityTaskHeartbeatByIdRequest,
    ) -> Result<service::RecordActivityTaskHeartbeatByIdResponse, Refusal> {
        let token = by_id(
            request.namespace,
            request.workflow_id,
            request.run_id,
            request.activity_id,
        )?;
        let beat = self.heartbeat(token, request.details, Speaker::Worker).await?;
        Ok(service::RecordActivityTaskHeartbeatByIdResponse {
            cancel_requested: beat.cancel_requested,
            activity_paused: beat.paused,
            activity_reset: beat.reset,
        })
    }
}

impl Engine {
    pub async fn pause_activity(
        &self,
        request: service::PauseActivityRequest,
    ) -> Result<service::PauseActivityResponse, Refusal> {
        use service::pause_activity_request::Activity;
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let which = match request.activity.ok_or_else(unnamed)? {
            Activity::Id(id) => Which::Id(id),
            Activity::Type(kind) => Which::Type(kind),
        };
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.change(key, &execution.run_id, move |slot, turn| {
            may_choose(&slot.run, &which)?;
            slot.run
                .pause_activities(&which, &request.identity, &request.reason, turn)
        })
        .await?;
        Ok(service::PauseActivityResponse {})
    }

    /// A start that is spread over some time (jitter) may be at once.
    pub async fn unpause_activity(
        &self,
        request: service::UnpauseActivityRequest,
    ) -> Result<service::UnpauseActivityResponse, Refusal> {
        use service::unpause_activity_request::Activity;
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let which = match request.activity.ok_or_else(unnamed)? {
            Activity::Id(id) => Which::Id(id),
            Activity::Type(kind) => Which::Type(kind),
            Activity::UnpauseAll(_) => Which::All,
        };
        let how = GoOn {
            reset_attempts: request.reset_attempts,
            reset_heartbeat: request.reset_heartbeat,
        };
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.change(key, &execution.run_id, move |slot, turn| {
            may_choose(&slot.run, &which)?;
            slot.run.unpause_activities(&which, how, turn)
        })
        .await?;
        Ok(service::UnpauseActivityResponse {})
    }

    pub async fn reset_activity(
        &self,
        request: service::ResetActivityRequest,
    ) -> Result<service::ResetActivityResponse, Refusal> {
        use service::reset_activity_request::Activity;
        let _inside = self.inner.namespaces.enter(&request.namespace)?;
        let which = match request.activity.ok_or_else(unnamed)? {
            Activity::Id(id) => Which::Id(id),
            Activity::Type(kind) => Which::Type(kind),
            Activity::MatchAll(_) => Which::All,
        };
        let execution = request.execution.unwrap_or_default();
        let key = Key::new(&request.namespace, &execution.workflow_id);
        self.change(key, &execution.run_id, move |slot, turn| {
            may_choose(&slot.run, &which)?;
            slot.run
                .reset_activities(&which, request.keep_paused, request.reset_heartbeat, turn)
        })
        .await?;
        Ok(service::ResetActivityResponse {})
    }
}

fn unnamed() -> Refusal {
    Refusal::InvalidArgument("Either activity id or activity type must be provided.".to_owned())
}

/// An activity by the names that people know.
fn by_id(
    namespace: String,
    workflow_id: String,
    run_id: String,
    activity_id: String,
) -> Result<TaskToken, Refusal> {
    if workflow_id.is_empty() {
        return Err(Refusal::InvalidArgument(
            "WorkflowId is not set on request.".to_owned(),
        ));
    }
    if activity_id.is_empty() {
        return Err(Refusal::InvalidArgument(
            "ActivityId is not set on request.".to_owned(),
        ));
    }
    Ok(TaskToken {
        namespace,
        workflow_id,
        run_id,
        activity_id,
        ..Default::default()
    })
}

pub(crate) fn activity_response(run: &Run, started: ActivityStart) -> service::PollActivityTaskQueueResponse {
    let scheduled = started.scheduled;
    service::PollActivityTaskQueueResponse {
        task_token: started.token.encode(),
        workflow_namespace: run.state.namespace.clone(),
        workflow_type: Some(WorkflowType {
            name: run.workflow_type().to_owned(),
        }),
        workflow_execution: Some(WorkflowExecution {
            workflow_id: run.state.workflow_id.clone(),
            run_id: run.state.run_id.clone(),
        }),
        activity_type: scheduled.activity_type,
        activity_id: scheduled.activity_id,
        header: scheduled.header,
        input: scheduled.input,
        heartbeat_details: started.heartbeat,
        scheduled_time: Some(stamp(started.scheduled_at)),
        current_attempt_scheduled_time: Some(stamp(started.attempt_scheduled_at)),
        started_time: Some(stamp(started.started_at)),
        attempt: started.attempt,
        // Clients fail if these are absent.
        schedule_to_close_timeout: scheduled.schedule_to_close_timeout.or(Some(duration(0))),
        start_to_close_timeout: scheduled.start_to_close_timeout.or(Some(duration(0))),
        heartbeat_timeout: scheduled.heartbeat_timeout.or(Some(duration(0))),
        retry_policy: scheduled.retry_policy,
        priority: scheduled.priority,
        ..Default::default()
    }
}

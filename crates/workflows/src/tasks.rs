//! Workflow tasks: polled, answered, failed.

use std::collections::HashMap;
use std::time::Duration;

use atoll_types::STEPS_QUEUE;
use atoll_workflow_core::{Completion, Refusal, Run, StartedTask, TaskToken, stamp};
use prost::Message as _;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::common::v1::{WorkflowExecution, WorkflowType};
use temporalio_protos::temporal::api::enums::v1::{TaskQueueKind, WorkflowTaskFailedCause};
use temporalio_protos::temporal::api::history::v1::{History, HistoryEvent};
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;
use crate::activities::activity_response;
use crate::cells::{Key, Slot};
use crate::history::HistoryToken;
use crate::queues::{Asking, Kind, QueueKey, Task, What};

/// As much history as goes along with a task; the rest is fetched.
const PAGE_EVENTS: usize = 1_000;
const PAGE_BYTES: usize = 2 * 1024 * 1024;

impl Engine {
    /// Waits for a workflow task or a query. An empty answer means that there was none.
    pub async fn poll_workflow_task(
        &self,
        request: service::PollWorkflowTaskQueueRequest,
        wait: Option<Duration>,
    ) -> Result<service::PollWorkflowTaskQueueResponse, Refusal> {
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
            kind: Kind::Workflow,
        };
        let asking = Asking {
            identity: request.identity.clone(),
            worker: request.worker_instance_key,
            now: self.now(),
            rate: None,
        };
        let deadline = tokio::time::Instant::now() + self.poll_time(wait);
        loop {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            let Some(task) = self.inner.queues.poll(&inside, &key, &asking, left).await else {
                return Ok(service::PollWorkflowTaskQueueResponse::default());
            };
            match self.take_workflow_task(task.clone(), &request.identity).await {
                // Somebody else was faster, or it is not needed any more.
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

    pub(crate) fn poll_time(&self, wait: Option<Duration>) -> Duration {
        let usual = self.inner.options.poll;
        // Answered before the caller gives up, so that nothing is given to nobody.
        wait.map_or(usual, |wait| {
            usual.min(wait.saturating_sub(Duration::from_secs(1)).max(wait / 2))
        })
    }

    async fn take_workflow_task(
        &self,
        task: Task,
        identity: &str,
    ) -> Result<service::PollWorkflowTaskQueueResponse, Refusal> {
        let (task_stamp, engine, identity) = match task.what {
            What::Query { id, sticky } => return self.take_query(task.key, &task.run_id, id, sticky).await,
            What::Workflow { stamp, .. } => (stamp, self.clone(), identity.to_owned()),
            What::Activity { .. } => return Err(Refusal::NotFound("not a workflow task".to_owned())),
        };
        self.change(task.key, &task.run_id, move |slot, turn| {
            let started = slot
                .run
                .start_task(task_stamp, &identity, &crate::fresh_id(), turn)?;
            let mut response = engine.task_response(&slot.run, &started);
            response.queries = engine.attached_queries(slot);
            Ok(response)
        })
        .await
    }

    fn attached_queries(
        &self,
        slot: &mut Slot,
    ) -> HashMap<String, temporalio_protos::temporal::api::query::v1::WorkflowQuery> {
        let mut attached = HashMap::new();
        slot.queries.retain(|id| match self.inner.queries.get(id) {
            Some(query) => {
                attached.insert(id.clone(), query);
                true
            }
            // Nobody waits for it any more.
            None => false,
        });
        attached
    }

    pub(crate) fn task_response(
        &self,
        run: &Run,
        started: &StartedTask,
    ) -> service::PollWorkflowTaskQueueResponse {
        let (events, rest) = page(run, started);
        service::PollWorkflowTaskQueueResponse {
            task_token: started.token.encode(),
            workflow_execution: Some(WorkflowExecution {
                workflow_id: run.state.workflow_id.clone(),
                run_id: run.state.run_id.clone(),
            }),
            workflow_type: Some(WorkflowType {
                name: run.workflow_type().to_owned(),
            }),
            previous_started_event_id: started.previous_started_id,
            started_event_id: started.started_id,
            attempt: started.attempt,
            history: Some(History { events }),
            next_page_token: rest.map(|token| token.encode_to_vec()).unwrap_or_default(),
            workflow_execution_task_queue: Some(TaskQueue {
                name: run.task_queue().to_owned(),
                kind: TaskQueueKind::Normal.into(),
                normal_name: String::new(),
            }),
            scheduled_time: Some(stamp(started.scheduled_at)),
            started_time: Some(stamp(started.started_at)),
            messages: started.messages.clone(),
            ..Default::default()
        }
    }

    pub async fn complete_workflow_task(
        &self,
        request: service::RespondWorkflowTaskCompletedRequest,
    ) -> Result<service::RespondWorkflowTaskCompletedResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let key = Key::new(&token.namespace, &token.workflow_id);
        let mut request = request;
        if request.intermediate_page {
            self.keep_page(&token, request).await?;
            return Ok(service::RespondWorkflowTaskCompletedResponse::default());
        }
        let mut commands = self.all_commands(&token, &mut request).await?;
        let bad = commands
            .iter_mut()
            .filter_map(|command| command.attributes.as_mut())
            .find_map(|attributes| self.type_search_attributes(&token.namespace, attributes).err());
        let identity = request.identity.clone();
        if let Some(bad) = bad {
            let message = format!("BadSearchAttributes: {bad}");
            return self.refuse_completion(key, token, identity, message).await;
        }
        let completion = Completion {
            commands,
            messages: request.messages,
            identity: request.identity,
            return_new: request.return_new_workflow_task,
            force_new: request.force_create_new_workflow_task,
            eager: true,
            sdk_metadata: request.sdk_metadata,
            metering: request.metering_metadata,
            worker_version: request.worker_version_stamp,
            binary_checksum: request.binary_checksum,
            deployment: request.deployment_options,
            versioning_behavior: request.versioning_behavior,
            ..Default::default()
        }
        .with_sticky(request.sticky_attributes.as_ref());
        let results = request.query_results;
        let engine = self.clone();
        let run_id = token.run_id.clone();
        let (response, refused) = self
            .change_by_worker(key, &run_id, move |slot, turn| {
                let reply = slot.run.complete_task(&token, completion, turn)?;
                let mut response = service::RespondWorkflowTaskCompletedResponse {
                    reset_history_event_id: reply.reset_to.unwrap_or(0),
                    ..Default::default()
                };
                for scheduled_id in reply.eager_activities {
                    // No worker carries out what is the server's, however eager it is.
                    if slot.run.activity_queue(scheduled_id) == Some(STEPS_QUEUE) {
                        continue;
                    }
                    let Some(stamp) = slot
                        .run
                        .state
                        .activities
                        .get(&scheduled_id)
                        .map(|found| found.stamp)
                    else {
                        continue;
                    };
                    let started = slot.run.start_activity(scheduled_id, stamp, &identity, turn)?;
                    response
                        .activity_tasks
                        .push(activity_response(&slot.run, started));
                }
                // What was asked before this task is answered by what it has led to.
                slot.queries.retain(|id| match results.get(id) {
                    Some(result) => {
                        engine.inner.queries.answer(id, result.clone().into());
                        false
                    }
                    None => true,
                });
                if let Some(started) = reply.new_task {
                    let mut task = engine.task_response(&slot.run, &started);
                    task.queries = engine.attached_queries(slot);
                    response.workflow_task = Some(task);
                }
                Ok((response, reply.refused))
            })
            .await?;
        match refused {
            Some(message) => Err(Refusal::InvalidArgument(message)),
            None => Ok(response),
        }
    }

    async fn refuse_completion<T>(
        &self,
        key: Key,
        token: TaskToken,
        identity: String,
        message: String,
    ) -> Result<T, Refusal> {
        use temporalio_protos::temporal::api::failure::v1::{
            Failure, ServerFailureInfo, failure::FailureInfo,
        };
        let failure = Failure {
            message: message.clone(),
            source: "Server".to_owned(),
            failure_info: Some(FailureInfo::ServerFailureInfo(ServerFailureInfo {
                non_retryable: true,
            })),
            ..Default::default()
        };
        let run_id = token.run_id.clone();
        self.change(key, &run_id, move |slot, turn| {
            let cause = WorkflowTaskFailedCause::BadSearchAttributes;
            slot.run.fail_task(&token, cause, Some(failure), &identity, turn)
        })
        .await?;
        Err(Refusal::InvalidArgument(message))
    }

    /// What is searched by has a type, which goes along with the value from then on.
    fn type_search_attributes(&self, namespace: &str, attributes: &mut Attributes) -> Result<(), Refusal> {
        let fields = match attributes {
            Attributes::UpsertWorkflowSearchAttributesCommandAttributes(wanted) => {
                &mut wanted.search_attributes
            }
            Attributes::StartChildWorkflowExecutionCommandAttributes(wanted) => &mut wanted.search_attributes,
            Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(wanted) => {
                &mut wanted.search_attributes
            }
            _ => return Ok(()),
        };
        *fields = self.typed(namespace, fields.take())?;
        Ok(())
    }

    pub async fn fail_workflow_task(
        &self,
        request: service::RespondWorkflowTaskFailedRequest,
    ) -> Result<service::RespondWorkflowTaskFailedResponse, Refusal> {
        let token = TaskToken::decode(&request.namespace, &request.task_token)?;
        let key = Key::new(&token.namespace, &token.workflow_id);
        let cause = WorkflowTaskFailedCause::try_from(request.cause).unwrap_or_default();
        let run_id = token.run_id.clone();
        self.change(key, &run_id, move |slot, turn| {
            slot.run
                .fail_task(&token, cause, request.failure, &request.identity, turn)
        })
        .await?;
        Ok(service::RespondWorkflowTaskFailedResponse {})
    }
}

/// The events that go along with a task, and where to fetch the others.
fn page(run: &Run, started: &StartedTask) -> (Vec<HistoryEvent>, Option<HistoryToken>) {
    let from = usize::try_from(started.from.max(1) - 1)
        .unwrap_or(0)
        .min(run.events.len());
    let mut events = Vec::new();
    let mut bytes = 0;
    for event in &run.events[from..] {
        bytes += event.encoded_len();
        if events.len() >= PAGE_EVENTS || (bytes > PAGE_BYTES && !events.is_empty()) {
            let next = event.event_id;
            let token = HistoryToken {
                run_id: run.state.run_id.clone(),
                next_id: next,
                with_virtual: true,
            };
            return (events, Some(token));
        }
        events.push(event.clone());
    }
    events.extend(started.suffix.iter().cloned());
    (events, None)
}

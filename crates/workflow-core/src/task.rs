//! The life of a workflow task: scheduled, started, and completed, failed or timed out.

use prost::Message as _;

use crate::commands::Bad;
use crate::refusal::Refusal;
use crate::run::{Effect, Run, Turn, unnumbered};
use crate::state::{Sticky, WorkflowTask};
use crate::time::{Nanos, duration, seconds};
use crate::words::enums::{TaskQueueKind, TimeoutType, WorkerVersioningMode, WorkflowTaskFailedCause};
use crate::words::{
    Event, HistoryEvent, command, common, deployment, failure, history, protocol, queue, sdk, taskqueue,
};

/// How long a task that leaves no trace may wait for a worker before it becomes one that does.
const SPECULATIVE_START: Nanos = seconds(5);
/// From this attempt on each try is given longer than the one before.
const PATIENT_FROM: i32 = 4;
const MAX_PATIENCE: Nanos = seconds(600);

/// What a worker sends back to say which task it means. Opaque to it.
#[derive(Clone, PartialEq, Eq, ::prost::Message)]
pub struct TaskToken {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub workflow_id: String,
    #[prost(string, tag = "3")]
    pub run_id: String,
    #[prost(int64, tag = "4")]
    pub scheduled_id: i64,
    #[prost(int64, tag = "5")]
    pub started_id: i64,
    #[prost(int32, tag = "6")]
    pub attempt: i32,
    #[prost(int64, tag = "7")]
    pub stamp: i64,
    /// Of an activity that was started by its id alone.
    #[prost(string, tag = "8")]
    pub activity_id: String,
    /// Of a query that is answered outside of a workflow task.
    #[prost(string, tag = "9")]
    pub query_id: String,
}

impl TaskToken {
    pub fn encode(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// The token of a task in that namespace. Callers may have made it up; whether there is such a task is seen later.
    pub fn decode(namespace: &str, bytes: &[u8]) -> Result<Self, Refusal> {
        let token: Self = prost::Message::decode(bytes)
            .map_err(|_| Refusal::InvalidArgument("Error deserializing task token.".to_owned()))?;
        if token.workflow_id.is_empty() {
            return Err(Refusal::InvalidArgument(
                "WorkflowId is not set on request.".to_owned(),
            ));
        }
        if token.namespace != namespace {
            return Err(Refusal::InvalidArgument(
                "Operation requested with a token from a different namespace.".to_owned(),
            ));
        }
        Ok(token)
    }
}

/// A workflow task in the hands of a worker.
#[derive(Debug, Clone)]
pub struct StartedTask {
    pub token: TaskToken,
    pub previous_started_id: i64,
    pub started_id: i64,
    pub attempt: i32,
    pub scheduled_at: Nanos,
    pub started_at: Nanos,
    /// The first event that the worker does not know.
    pub from: i64,
    /// Events that are shown, but not in the history yet.
    pub suffix: Vec<HistoryEvent>,
    pub messages: Vec<protocol::Message>,
}

/// What a worker made of a workflow task.
#[derive(Debug, Clone, Default)]
pub struct Completion {
    pub commands: Vec<command::Command>,
    pub messages: Vec<protocol::Message>,
    pub identity: String,
    pub sticky: Option<Sticky>,
    pub return_new: bool,
    pub force_new: bool,
    pub eager: bool,
    pub sdk_metadata: Option<sdk::WorkflowTaskCompletedMetadata>,
    pub metering: Option<common::MeteringMetadata>,
    pub worker_version: Option<common::WorkerVersionStamp>,
    pub binary_checksum: String,
    /// The version of the worker's code, by its own words.
    pub deployment: Option<deployment::WorkerDeploymentOptions>,
    pub versioning_behavior: i32,
}

impl Completion {
    pub fn with_sticky(mut self, attributes: Option<&taskqueue::StickyExecutionAttributes>) -> Self {
        self.sticky = attributes.and_then(|attributes| {
            let queue = attributes.worker_task_queue.as_ref()?.name.clone();
            (!queue.is_empty()).then(|| Sticky {
                queue,
                timeout: crate::nanos(attributes.schedule_to_start_timeout.as_ref()),
            })
        });
        self
    }
}

#[derive(Debug, Clone, Default)]
pub struct CompletionReply {
    /// The next task, started already.
    pub new_task: Option<StartedTask>,
    /// The worker is to forget what it saw after this event.
    pub reset_to: Option<i64>,
    /// Activities that the same worker asked to run, by their scheduled event.
    pub eager_activities: Vec<i64>,
    /// The task was failed instead, which is durable, and this is why.
    pub refused: Option<String>,
}

impl Run {
    /// Makes sure that a worker will look at what has happened.
    pub(crate) fn schedule_task(&mut self, now: Nanos) {
        self.schedule(now, false);
    }

    pub(crate) fn schedule_speculative_task(&mut self, now: Nanos) {
        self.schedule(now, true);
    }

    fn schedule(&mut self, now: Nanos, speculative: bool) {
        // Only the first task waits for that time: where the clock was set back since, the run would wait for it again.
        let too_early = self.awaits_first_task() && self.state.first_task_at > now;
        if !self.is_running() || self.holding || too_early {
            return;
        }
        if let Some(task) = &self.state.task {
            if task.speculative && task.started_id == 0 && !speculative {
                self.write_speculative();
            }
            return;
        }
        // Nothing was completed yet: there is no state of a worker to go back to.
        let attempt = self.state.task_attempt.max(1);
        let speculative = speculative && attempt == 1 && self.state.last_started_id > 0;
        let sticky = self.state.sticky.clone().filter(|_| attempt == 1);
        let stamp = self.next_stamp();
        let mut task = WorkflowTask {
            scheduled_id: self.next_event_id(),
            scheduled_at: now,
            original_scheduled_at: now,
            attempt,
            stamp,
            speculative,
            written: attempt == 1 && !speculative,
            timeout: patience(self.task_timeout(), attempt),
            ..Default::default()
        };
        if let Some(sticky) = sticky {
            task.start_by = now.saturating_add(sticky.timeout);
            task.sticky_queue = sticky.queue;
        }
        if speculative {
            task.start_by = now.saturating_add(SPECULATIVE_START);
        }
        if task.written {
            let event = self.scheduled_event(&task);
            self.push(event);
        }
        let effect = self.task_effect(&task);
        self.effects.push(effect);
        self.state.task = Some(task);
    }

    pub(crate) fn task_effect(&self, task: &WorkflowTask) -> Effect {
        let sticky = !task.sticky_queue.is_empty();
        Effect::WorkflowTask {
            queue: if sticky {
                task.sticky_queue.clone()
            } else {
                self.task_queue().to_owned()
            },
            sticky,
            stamp: task.stamp,
        }
    }

    fn scheduled_event(&self, task: &WorkflowTask) -> HistoryEvent {
        let task_queue = if task.sticky_queue.is_empty() {
            queue(self.task_queue())
        } else {
            taskqueue::TaskQueue {
                name: task.sticky_queue.clone(),
                kind: TaskQueueKind::Sticky.into(),
                normal_name: self.task_queue().to_owned(),
            }
        };
        let mut event = unnumbered(
            task.scheduled_at,
            Event::WorkflowTaskScheduledEventAttributes(history::WorkflowTaskScheduledEventAttributes {
                task_queue: Some(task_queue),
                start_to_close_timeout: Some(duration(task.timeout)),
                attempt: task.attempt,
            }),
        );
        event.event_id = task.scheduled_id;
        event.task_id = task.scheduled_id;
        event
    }

    fn started_event(task: &WorkflowTask) -> HistoryEvent {
        let mut event = unnumbered(
            task.started_at,
            Event::WorkflowTaskStartedEventAttributes(history::WorkflowTaskStartedEventAttributes {
                scheduled_event_id: task.scheduled_id,
                identity: task.identity.clone(),
                request_id: task.request_id.clone(),
                suggest_continue_as_new: task.suggest_continue,
                history_size_bytes: task.history_bytes,
                ..Default::default()
            }),
        );
        event.event_id = task.started_id;
        event.task_id = task.started_id;
        event
    }

    /// Turns a task that was to leave no trace into one that does, because something else has happened.
    pub(crate) fn write_speculative(&mut self) {
        let Some(mut task) = self.state.task.take() else {
            return;
        };
        if task.speculative {
            task.speculative = false;
            task.written = true;
            task.scheduled_id = self.next_event_id();
            let event = self.scheduled_event(&task);
            self.push(event);
            if task.started_id == 0 {
                if task.sticky_queue.is_empty() {
                    task.start_by = 0;
                }
            } else {
                let event = Self::started_event(&task);
                task.started_id = self.push(event);
            }
        }
        self.state.task = Some(task);
    }

    /// A worker takes the task. Refused if it was taken, replaced or is no longer needed.
    pub fn start_task(
        &mut self,
        task_stamp: i64,
        identity: &str,
        request_id: &str,
        turn: Turn<'_>,
    ) -> Result<StartedTask, Refusal> {
        let next = self.next_event_id();
        let Some(mut task) = self
            .state
            .task
            .clone()
            .filter(|task| task.stamp == task_stamp && task.started_id == 0 && self.is_running())
        else {
            return Err(Refusal::NotFound("Workflow task not found.".to_owned()));
        };
        self.state.transitions += 1;
        if !task.written && !task.speculative && task.scheduled_id != next {
            // Something has happened since the last attempt failed: this is a new task, not another try.
            task.attempt = 1;
            task.written = true;
            task.scheduled_id = next;
            self.state.task_attempt = 1;
            let event = self.scheduled_event(&task);
            self.push(event);
        }
        task.started_at = turn.now;
        identity.clone_into(&mut task.identity);
        request_id.clone_into(&mut task.request_id);
        task.history_bytes = self.state.history_bytes;
        task.suggest_continue = self.last_event_id() >= turn.limits.suggest_events
            || self.state.history_bytes >= turn.limits.suggest_bytes;
        task.started_id = task.scheduled_id + 1;
        if task.written {
            task.started_id = self.next_event_id();
            let event = Self::started_event(&task);
            self.push(event);
        }
        let partial = !task.sticky_queue.is_empty();
        self.state.task = Some(task);
        Ok(self.show_task(partial))
    }

    /// The started task, as a worker is to see it.
    fn show_task(&mut self, partial: bool) -> StartedTask {
        let task = self.state.task.clone().unwrap_or_default();
        let suffix = if task.written {
            Vec::new()
        } else {
            vec![self.scheduled_event(&task), Self::started_event(&task)]
        };
        StartedTask {
            token: TaskToken {
                namespace: self.state.namespace.clone(),
                workflow_id: self.state.workflow_id.clone(),
                run_id: self.state.run_id.clone(),
                scheduled_id: task.scheduled_id,
                started_id: task.started_id,
                attempt: task.attempt,
                stamp: task.stamp,
                ..Default::default()
            },
            previous_started_id: self.state.last_started_id,
            started_id: task.started_id,
            attempt: task.attempt,
            scheduled_at: task.scheduled_at,
            started_at: task.started_at,
            from: if partial {
                self.state.last_started_id + 1
            } else {
                1
            },
            suffix,
            messages: self.send_updates(task.started_id - 1),
        }
    }

    /// The events that are shown to a worker whose task is started, but are not in the history.
    pub fn virtual_events(&self) -> Vec<HistoryEvent> {
        match &self.state.task {
            Some(task) if !task.written && task.started_id != 0 => {
                vec![self.scheduled_event(task), Self::started_event(task)]
            }
            _ => Vec::new(),
        }
    }

    /// Whether a worker with this token has the task.
    pub fn check_holder(&self, token: &TaskToken) -> Result<(), Refusal> {
        self.check_task(token).map(drop)
    }

    fn check_task(&self, token: &TaskToken) -> Result<WorkflowTask, Refusal> {
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        self.state
            .task
            .clone()
            .filter(|task| {
                // Between being shown and being answered a speculative task may have been written, at other ids.
                task.started_id != 0 && task.stamp == token.stamp && task.attempt == token.attempt
            })
            .ok_or_else(|| Refusal::NotFound("Workflow task not found.".to_owned()))
    }

    /// A worker is done with a task.
    pub fn complete_task(
        &mut self,
        token: &TaskToken,
        completion: Completion,
        turn: Turn<'_>,
    ) -> Result<CompletionReply, Refusal> {
        let task = self.check_task(token)?;
        self.state.transitions += 1;
        if task.speculative && self.leaves_no_trace(&completion) {
            return Ok(self.discard_task(&completion, turn));
        }
        let before = (self.state.clone(), self.registry.clone());
        let (events, effects) = (self.events.len(), self.effects.len());
        let identity = completion.identity.clone();
        match self.carry_out(&task, completion, turn) {
            Ok(reply) => Ok(reply),
            Err(bad) => {
                (self.state, self.registry) = before;
                self.sizes = crate::size::Sizes::default();
                self.events.truncate(events);
                self.effects.truncate(effects);
                self.holding = false;
                self.successor = None;
                if bad.fatal {
                    return Ok(self.end_for(bad, &identity, turn));
                }
                if task.attempt > 1 && bad.cause != WorkflowTaskFailedCause::UnhandledCommand {
                    // It will time out and be tried again, later and later.
                    return Err(Refusal::InvalidArgument(bad.message));
                }
                let refused =
                    (bad.cause != WorkflowTaskFailedCause::UnhandledCommand).then(|| bad.message.clone());
                let cause = bad.cause;
                self.end_failed_task(cause, Some(bad.failure()), &identity, turn);
                Ok(CompletionReply {
                    refused,
                    ..Default::default()
                })
            }
        }
    }

    /// Ends the run over what its code asks for, since that would not change.
    fn end_for(&mut self, bad: Bad, identity: &str, turn: Turn<'_>) -> CompletionReply {
        let reason = bad.message.clone();
        self.write_failed_task(bad.cause, Some(bad.failure()), identity, turn);
        self.state.task = None;
        self.flush();
        self.end_by_server(&reason, turn);
        CompletionReply {
            refused: Some(reason),
            ..Default::default()
        }
    }

    /// A history cannot grow for ever; its workflow was told to continue as new long before. If so, this has ended it.
    pub(crate) fn is_too_long(&mut self, turn: Turn<'_>) -> bool {
        let long = turn
            .limits
            .check_history(self.last_event_id(), self.state.history_bytes);
        if let Err(reason) = long {
            self.end_by_server(reason, turn);
        }
        long.is_err()
    }

    fn discard_task(&mut self, completion: &Completion, turn: Turn<'_>) -> CompletionReply {
        self.state.task = None;
        self.state.sticky.clone_from(&completion.sticky);
        self.take_rejections(&completion.messages);
        self.reject_unanswered();
        if self.registry.has_unsent() {
            self.schedule_speculative_task(turn.now);
        }
        CompletionReply {
            reset_to: Some(self.state.last_started_id),
            ..Default::default()
        }
    }

    fn carry_out(
        &mut self,
        task: &WorkflowTask,
        completion: Completion,
        turn: Turn<'_>,
    ) -> Result<CompletionReply, Bad> {
        let mut task = task.clone();
        if !task.written {
            task.scheduled_id = self.next_event_id();
            let event = self.scheduled_event(&task);
            self.push(event);
            task.started_id = self.next_event_id();
            self.push(Self::started_event(&task));
        }
        let deployment = completion.deployment.clone().unwrap_or_default();
        let versioned = deployment.worker_versioning_mode == i32::from(WorkerVersioningMode::Versioned);
        // A worker that is not told of versioning says which code it runs in the older words.
        let build_id = if deployment.build_id.is_empty() {
            &completion.binary_checksum
        } else {
            &deployment.build_id
        };
        let stamp = (!build_id.is_empty() && !versioned).then(|| common::WorkerVersionStamp {
            build_id: build_id.clone(),
            use_versioning: false,
        });
        let worker_version = completion.worker_version.clone().or(stamp);
        let completed_id = self.append(
            turn.now,
            Event::WorkflowTaskCompletedEventAttributes(history::WorkflowTaskCompletedEventAttributes {
                scheduled_event_id: task.scheduled_id,
                started_event_id: task.started_id,
                identity: completion.identity.clone(),
                sdk_metadata: completion.sdk_metadata,
                metering_metadata: completion.metering,
                binary_checksum: completion.binary_checksum,
                worker_version,
                versioning_behavior: completion.versioning_behavior,
                worker_deployment_name: deployment.deployment_name.clone(),
                deployment_version: versioned.then_some(deployment::WorkerDeploymentVersion {
                    deployment_name: deployment.deployment_name,
                    build_id: deployment.build_id,
                }),
                ..Default::default()
            }),
        );
        self.state.task = None;
        self.state.last_started_id = task.started_id;
        self.state.last_completed_id = completed_id;
        self.state.task_attempt = 1;
        self.state.sticky.clone_from(&completion.sticky);
        self.had_buffered = !self.state.buffered.is_empty();
        self.holding = true;
        let eager = completion.eager;
        self.answering.clone_from(&completion.identity);
        let eager_activities = self.carry_out_commands(
            completion.commands,
            completion.messages,
            completed_id,
            eager,
            turn,
        )?;
        self.holding = false;
        self.reject_unanswered();
        let mut reply = CompletionReply {
            eager_activities,
            ..Default::default()
        };
        if !self.is_running() {
            return Ok(reply);
        }
        let flushed = self.flush();
        if self.is_too_long(turn) {
            return Ok(CompletionReply::default());
        }
        if flushed || completion.force_new {
            self.schedule_task(turn.now);
        } else if self.registry.has_unsent() {
            self.schedule_speculative_task(turn.now);
        }
        if completion.return_new
            && let Some(next) = self.state.task.clone()
        {
            self.effects
                .retain(|effect| !matches!(effect, Effect::WorkflowTask { .. }));
            let partial = completion.sticky.is_some();
            reply.new_task = self
                .start_task(
                    next.stamp,
                    &completion.identity,
                    "request-from-RespondWorkflowTaskCompleted",
                    turn,
                )
                .ok()
                .map(|mut started| {
                    started.from = if partial {
                        started.previous_started_id + 1
                    } else {
                        1
                    };
                    started
                });
        }
        Ok(reply)
    }

    /// A worker could not do its task.
    pub fn fail_task(
        &mut self,
        token: &TaskToken,
        cause: WorkflowTaskFailedCause,
        failure: Option<failure::Failure>,
        identity: &str,
        turn: Turn<'_>,
    ) -> Result<(), Refusal> {
        self.check_task(token)?;
        self.state.transitions += 1;
        self.end_failed_task(cause, failure, identity, turn);
        Ok(())
    }

    pub(crate) fn end_failed_task(
        &mut self,
        cause: WorkflowTaskFailedCause,
        failure: Option<failure::Failure>,
        identity: &str,
        turn: Turn<'_>,
    ) {
        self.write_failed_task(cause, failure, identity, turn);
        self.try_again(true, turn);
    }

    fn write_failed_task(
        &mut self,
        cause: WorkflowTaskFailedCause,
        failure: Option<failure::Failure>,
        identity: &str,
        turn: Turn<'_>,
    ) {
        let Some(task) = self.state.task.clone() else {
            return;
        };
        if task.attempt == 1 {
            self.write_speculative();
            let task = self.state.task.clone().unwrap_or(task);
            self.append(
                turn.now,
                Event::WorkflowTaskFailedEventAttributes(history::WorkflowTaskFailedEventAttributes {
                    scheduled_event_id: task.scheduled_id,
                    started_event_id: task.started_id,
                    cause: cause.into(),
                    failure,
                    identity: identity.to_owned(),
                    ..Default::default()
                }),
            );
        }
    }

    /// The started task was not answered in time.
    pub(crate) fn time_out_task(&mut self, turn: Turn<'_>) {
        let Some(task) = self.state.task.clone() else {
            return;
        };
        if task.attempt == 1 {
            self.write_speculative();
            let task = self.state.task.clone().unwrap_or(task);
            self.append_task_timeout(&task, TimeoutType::StartToClose, turn.now);
        }
        self.try_again(true, turn);
    }

    /// The worker that remembers this workflow did not take the task, so any worker may.
    pub(crate) fn time_out_sticky(&mut self, turn: Turn<'_>) {
        self.write_speculative();
        let Some(task) = self.state.task.clone().filter(|task| task.started_id == 0) else {
            return;
        };
        if task.sticky_queue.is_empty() {
            return;
        }
        self.append_task_timeout(&task, TimeoutType::ScheduleToStart, turn.now);
        self.try_again(false, turn);
    }

    fn append_task_timeout(&mut self, task: &WorkflowTask, kind: TimeoutType, now: Nanos) {
        self.append(
            now,
            Event::WorkflowTaskTimedOutEventAttributes(history::WorkflowTaskTimedOutEventAttributes {
                scheduled_event_id: task.scheduled_id,
                started_event_id: task.started_id,
                timeout_type: kind.into(),
            }),
        );
    }

    fn try_again(&mut self, count: bool, turn: Turn<'_>) {
        let task = self.state.task.take();
        if count {
            self.state.task_attempt = task.map_or(1, |task| task.attempt) + 1;
        }
        self.state.sticky = None;
        self.registry.unsend();
        if self.flush() {
            self.state.task_attempt = 1;
        }
        self.schedule_task(turn.now);
    }

    /// Forgets which worker remembers this workflow. A task that waits for it goes to the workflow's own queue.
    pub fn clear_sticky(&mut self, turn: Turn<'_>) {
        self.state.sticky = None;
        let waiting = self
            .state
            .task
            .as_ref()
            .is_some_and(|task| task.started_id == 0 && !task.sticky_queue.is_empty());
        if waiting {
            let fresh = self.next_stamp();
            if let Some(task) = &mut self.state.task {
                task.sticky_queue.clear();
                task.stamp = fresh;
                if !task.speculative {
                    task.start_by = 0;
                }
            }
            if let Some(task) = self.state.task.clone() {
                let effect = self.task_effect(&task);
                self.effects.push(effect);
            }
        }
        let _ = turn;
    }
}

/// A worker that keeps failing is asked less and less often.
fn patience(timeout: Nanos, attempt: i32) -> Nanos {
    if attempt < PATIENT_FROM {
        return timeout;
    }
    let doublings = u32::try_from(attempt - PATIENT_FROM).unwrap_or(0).min(10);
    timeout.saturating_add((seconds(5) << doublings).min(MAX_PATIENCE))
}

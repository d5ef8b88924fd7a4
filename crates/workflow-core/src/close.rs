//! The ends of a run, and the run that may follow.
//!
//! ```text
//!   completed ── cron ──> next run             failed, timed out ── retry, else cron ──> next run
//!   continued as new ──> next run              canceled, terminated, and everything else: final
//! ```
//!
//! Only a final end is told to the parent.

use crate::commands::Bad;
use crate::retry;
use crate::run::{Run, Turn};
use crate::start::{Parent, Start};
use crate::state::{Outgoing, letter};
use crate::time::{Nanos, duration, nanos, seconds};
use crate::words::enums::{
    ContinueAsNewInitiator, ParentClosePolicy, RetryState, TimeoutType, WorkflowExecutionStatus as Status,
    WorkflowTaskFailedCause as Cause,
};
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{Failure, TimeoutFailureInfo};
use crate::words::{Event, command, common, history, queue, server_failure};

/// A workflow that continues as new over and over does not do so more often than this.
const BREATH: Nanos = seconds(1);

/// Who ends a run from outside, and why.
#[derive(Debug, Clone, Default)]
pub struct Terminate {
    pub reason: String,
    pub details: Option<common::Payloads>,
    pub identity: String,
    pub links: Vec<common::Link>,
}

impl Run {
    pub(crate) fn complete(&mut self, result: Option<common::Payloads>, completed_id: i64, turn: Turn<'_>) {
        let next = self.next_by_cron(result.clone(), None, turn);
        let new_execution_run_id = self.follow(next, turn);
        let event = Event::WorkflowExecutionCompletedEventAttributes(
            history::WorkflowExecutionCompletedEventAttributes {
                result,
                workflow_task_completed_event_id: completed_id,
                new_execution_run_id,
            },
        );
        self.close(event, Status::Completed, turn);
    }

    pub(crate) fn fail(&mut self, failure: Failure, completed_id: i64, turn: Turn<'_>) {
        let (next, retry_state) = self.next_after_failure(&failure, turn);
        let new_execution_run_id = self.follow(next, turn);
        let event =
            Event::WorkflowExecutionFailedEventAttributes(history::WorkflowExecutionFailedEventAttributes {
                failure: Some(failure),
                retry_state: retry_state.into(),
                workflow_task_completed_event_id: completed_id,
                new_execution_run_id,
            });
        self.close(event, Status::Failed, turn);
    }

    pub(crate) fn cancel(&mut self, details: Option<common::Payloads>, completed_id: i64, turn: Turn<'_>) {
        let event = Event::WorkflowExecutionCanceledEventAttributes(
            history::WorkflowExecutionCanceledEventAttributes {
                workflow_task_completed_event_id: completed_id,
                details,
            },
        );
        self.close(event, Status::Canceled, turn);
    }

    /// Its time is up.
    pub(crate) fn time_out(&mut self, turn: Turn<'_>) {
        let failure = server_failure(
            "workflow timeout",
            FailureInfo::TimeoutFailureInfo(TimeoutFailureInfo {
                timeout_type: TimeoutType::StartToClose.into(),
                last_heartbeat_details: None,
            }),
        );
        let expired = self.state.execution_expires_at != 0 && self.state.execution_expires_at <= turn.now;
        let (next, retry_state) = if expired {
            (None, RetryState::Timeout)
        } else {
            self.next_after_failure(&failure, turn)
        };
        let new_execution_run_id = self.follow(next, turn);
        self.abandon_task(turn);
        let event = Event::WorkflowExecutionTimedOutEventAttributes(
            history::WorkflowExecutionTimedOutEventAttributes {
                retry_state: retry_state.into(),
                new_execution_run_id,
            },
        );
        self.close(event, Status::TimedOut, turn);
    }

    pub fn terminate(&mut self, why: Terminate, turn: Turn<'_>) -> Result<(), crate::Refusal> {
        if !self.is_running() {
            return Err(crate::Refusal::completed());
        }
        self.abandon_task(turn);
        self.state.transitions += 1;
        let event = Event::WorkflowExecutionTerminatedEventAttributes(
            history::WorkflowExecutionTerminatedEventAttributes {
                reason: why.reason,
                details: why.details,
                identity: why.identity,
            },
        );
        self.close(event, Status::Terminated, turn);
        if let Some(event) = self.events.last_mut() {
            event.links = why.links;
        }
        Ok(())
    }

    /// The engine itself ends the run.
    pub(crate) fn end_by_server(&mut self, reason: &str, turn: Turn<'_>) {
        let why = Terminate {
            reason: reason.to_owned(),
            identity: "history-service".to_owned(),
            ..Default::default()
        };
        // Refused only if it has ended already.
        let _ended = self.terminate(why, turn);
    }

    /// Takes the task away from a worker that has it, so that what waited for it is in the history before the end.
    fn abandon_task(&mut self, turn: Turn<'_>) {
        let Some(task) = self.state.task.clone().filter(|task| task.started_id != 0) else {
            return;
        };
        if task.written {
            self.append(
                turn.now,
                Event::WorkflowTaskFailedEventAttributes(history::WorkflowTaskFailedEventAttributes {
                    scheduled_event_id: task.scheduled_id,
                    started_event_id: task.started_id,
                    cause: Cause::ForceCloseCommand.into(),
                    ..Default::default()
                }),
            );
        }
        self.state.task = None;
        self.flush();
    }

    fn close(&mut self, event: Event, status: Status, turn: Turn<'_>) {
        self.append(turn.now, event);
        self.state.status = status.into();
        self.state.closed_at = turn.now;
        self.state.task = None;
        self.state.buffered.clear();
        self.sizes.buffered = None;
        self.state.activities.clear();
        self.state.timers.clear();
        self.state.signals_out.clear();
        self.state.cancels_out.clear();
        self.effects.clear();
        let started = self.started();
        let has_parent = started.parent_workflow_execution.is_some();
        if has_parent && self.state.successor.is_empty() {
            let last = self.events.last().cloned().unwrap_or_default();
            self.post(Outgoing::Ended(last));
        }
        let children: Vec<_> = self.state.children.values().cloned().collect();
        for child in children {
            let target = letter::Target {
                workflow_id: child.workflow_id,
                run_id: child.run_id,
                initiated_id: child.initiated_id,
            };
            let unstarted = target.run_id.is_empty();
            match ParentClosePolicy::try_from(child.close_policy) {
                Ok(ParentClosePolicy::Terminate) if !unstarted => self.post(Outgoing::TerminateChild(target)),
                Ok(ParentClosePolicy::RequestCancel) if !unstarted => {
                    self.post(Outgoing::CancelChild(target));
                }
                _ => {}
            }
        }
        // Abandoned children that are not started yet still will be; the letter needs to know them.
        self.state
            .children
            .retain(|_, child| child.close_policy == i32::from(ParentClosePolicy::Abandon));
    }

    fn follow(&mut self, next: Option<Start>, turn: Turn<'_>) -> String {
        let Some(next) = next else { return String::new() };
        match Self::start(next, turn.fresh_run_id, turn) {
            Ok(run) => {
                turn.fresh_run_id.clone_into(&mut self.state.successor);
                self.successor = Some(Box::new(run));
                turn.fresh_run_id.to_owned()
            }
            // The schedule was checked when the first run was started.
            Err(_) => String::new(),
        }
    }

    fn next_after_failure(&self, failure: &Failure, turn: Turn<'_>) -> (Option<Start>, RetryState) {
        let started = self.started();
        let Some(policy) = &started.retry_policy else {
            return match self.next_by_cron(
                started.last_completion_result.clone(),
                Some(failure.clone()),
                turn,
            ) {
                Some(next) => (Some(next), RetryState::InProgress),
                None => (None, RetryState::RetryPolicyNotSet),
            };
        };
        // Between runs only what the workflow itself says counts; a timeout of the run is worth another try.
        let decision = retry::decide(
            policy,
            started.attempt,
            failure,
            turn.now,
            self.state.execution_expires_at,
        );
        match decision {
            Ok(wait) => {
                let mut next = self.same_again();
                next.delay = wait;
                next.attempt = started.attempt + 1;
                next.initiator = ContinueAsNewInitiator::Retry.into();
                next.continued_failure = Some(failure.clone());
                (Some(next), RetryState::InProgress)
            }
            Err(state) => {
                match self.next_by_cron(
                    started.last_completion_result.clone(),
                    Some(failure.clone()),
                    turn,
                ) {
                    Some(next) => (Some(next), RetryState::InProgress),
                    None => (None, state),
                }
            }
        }
    }

    fn next_by_cron(
        &self,
        last_result: Option<common::Payloads>,
        failure: Option<Failure>,
        turn: Turn<'_>,
    ) -> Option<Start> {
        let started = self.started();
        if started.cron_schedule.is_empty() || self.state.cancel_requested {
            return None;
        }
        let at = crate::Cron::parse(&started.cron_schedule)
            .ok()?
            .next_after(self.state.first_task_at.max(self.state.started_at), turn.now)?;
        let delay = at - turn.now;
        if self.state.execution_expires_at != 0 && at > self.state.execution_expires_at {
            return None;
        }
        let mut next = self.same_again();
        next.delay = delay;
        next.attempt = 1;
        next.initiator = ContinueAsNewInitiator::CronSchedule.into();
        next.last_result = last_result;
        next.continued_failure = failure;
        Some(next)
    }

    /// This workflow from its beginning, as the next run of its chain.
    fn same_again(&self) -> Start {
        let started = self.started();
        let event = self.events.first();
        Start {
            namespace: self.state.namespace.clone(),
            workflow_id: self.state.workflow_id.clone(),
            workflow_type: self.workflow_type().to_owned(),
            task_queue: self.task_queue().to_owned(),
            input: started.input.clone(),
            execution_timeout: nanos(started.workflow_execution_timeout.as_ref()),
            run_timeout: self.run_timeout(),
            task_timeout: self.task_timeout(),
            request_id: self.state.run_id.clone(),
            retry_policy: started.retry_policy.clone(),
            cron: started.cron_schedule.clone(),
            memo: self.state.memo.clone(),
            search_attributes: self.state.search_attributes.clone(),
            header: started.header.clone(),
            user_metadata: event.and_then(|event| event.user_metadata.clone()),
            priority: self.state.priority.clone(),
            versioning_override: started.versioning_override.clone(),
            parent: self.parent(),
            first_run_id: started.first_execution_run_id.clone(),
            continued_run_id: self.state.run_id.clone(),
            last_result: started.last_completion_result.clone(),
            execution_expires_at: self.state.execution_expires_at,
            completion_callbacks: started.completion_callbacks.clone(),
            rights: self.state.rights.clone(),
            ..Default::default()
        }
    }

    pub fn parent(&self) -> Option<Parent> {
        let started = self.started();
        let parent = started.parent_workflow_execution.as_ref()?;
        Some(Parent {
            namespace: started.parent_workflow_namespace.clone(),
            workflow_id: parent.workflow_id.clone(),
            run_id: parent.run_id.clone(),
            initiated_id: started.parent_initiated_event_id,
            root: started.root_workflow_execution.clone(),
        })
    }

    pub(crate) fn continue_as_new(
        &mut self,
        wanted: command::ContinueAsNewWorkflowExecutionCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Result<(), Bad> {
        if let Some(policy) = &wanted.retry_policy
            && let Err(text) = retry::check(policy)
        {
            return Err(Bad::new(
                Cause::BadContinueAsNewAttributes,
                format!("BadContinueAsNewAttributes: {text}"),
            ));
        }
        let named = |wanted: String, own: &str| if wanted.is_empty() { own.to_owned() } else { wanted };
        let length = |wanted: Nanos, own: Nanos| if wanted == 0 { own } else { wanted };
        let mut next = self.same_again();
        next.workflow_type = named(
            wanted.workflow_type.unwrap_or_default().name,
            self.workflow_type(),
        );
        next.task_queue = named(wanted.task_queue.unwrap_or_default().name, self.task_queue());
        next.input = wanted.input;
        next.run_timeout = length(nanos(wanted.workflow_run_timeout.as_ref()), self.run_timeout());
        next.task_timeout = length(nanos(wanted.workflow_task_timeout.as_ref()), self.task_timeout());
        let lived = turn.now - self.state.first_task_at;
        next.delay = nanos(wanted.backoff_start_interval.as_ref());
        if lived + next.delay < BREATH {
            next.delay = BREATH - lived;
        }
        next.retry_policy = wanted.retry_policy.or(next.retry_policy);
        next.cron = wanted.cron_schedule;
        next.header = wanted.header;
        next.initiator = match wanted.initiator {
            0 => ContinueAsNewInitiator::Workflow.into(),
            initiator => initiator,
        };
        next.continued_failure = wanted.failure;
        next.last_result = wanted.last_completion_result.or(next.last_result);
        next.attempt = 1;
        // Workers send along what is to be kept.
        next.memo = wanted.memo;
        next.search_attributes = wanted.search_attributes;
        let attributes = history::WorkflowExecutionContinuedAsNewEventAttributes {
            new_execution_run_id: turn.fresh_run_id.to_owned(),
            workflow_type: Some(common::WorkflowType {
                name: next.workflow_type.clone(),
            }),
            task_queue: Some(queue(&next.task_queue)),
            input: next.input.clone(),
            workflow_run_timeout: Some(duration(next.run_timeout)),
            workflow_task_timeout: Some(duration(next.task_timeout)),
            workflow_task_completed_event_id: completed_id,
            backoff_start_interval: Some(duration(next.delay)),
            initiator: next.initiator,
            last_completion_result: next.last_result.clone(),
            header: next.header.clone(),
            memo: next.memo.clone(),
            search_attributes: next.search_attributes.clone(),
            ..Default::default()
        };
        self.follow(Some(next), turn);
        let event = Event::WorkflowExecutionContinuedAsNewEventAttributes(attributes);
        self.close(event, Status::ContinuedAsNew, turn);
        Ok(())
    }
}

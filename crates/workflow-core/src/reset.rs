//! Going back: a new run with the history of another up to one of its workflow tasks, and from there anew.

use crate::refusal::Refusal;
use crate::run::{Run, Turn, ended_activity};
use crate::state::{self, State};
use crate::time::{nanos, unstamp};
use crate::words::enums::{EventType, UpdateAdmittedEventOrigin, WorkflowTaskFailedCause};
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{Failure, ResetWorkflowFailureInfo};
use crate::words::{Event, HistoryEvent, common, history, server_failure, workflow};

/// Where to go back to, and what of the time since is kept.
#[derive(Debug, Clone, Default)]
pub struct ResetPoint {
    /// The end of a workflow task, or its start if it has not ended.
    pub task_end_id: i64,
    pub reason: String,
    pub identity: String,
    pub request_id: String,
    pub keep_signals: bool,
    pub keep_updates: bool,
    /// Signals to be sent to the new run before it is given to a worker.
    pub then: Vec<workflow::PostResetOperation>,
}

impl Run {
    /// The new run. What becomes of this one is the caller's business.
    pub fn reset(&self, point: &ResetPoint, run_id: &str, turn: Turn<'_>) -> Result<Self, Refusal> {
        let invalid = |text: &str| Err(Refusal::InvalidArgument(text.to_owned()));
        if point.task_end_id <= 1 || point.task_end_id > self.next_event_id() {
            return invalid("Workflow task finish ID must be > 1 && <= workflow last event ID.");
        }
        let keep = usize::try_from(point.task_end_id - 1).unwrap_or(0);
        let mut copied = self.events[..keep.min(self.events.len())].to_vec();
        let last = copied.last().map(|event| event.event_type);
        let scheduled = i32::from(EventType::WorkflowTaskScheduled);
        let started = i32::from(EventType::WorkflowTaskStarted);
        if last != Some(scheduled) && last != Some(started) {
            return invalid(
                "unable to reset: the event before the given one is neither WorkflowTaskScheduled nor \
                 WorkflowTaskStarted",
            );
        }
        if last == Some(scheduled) {
            let scheduled_event_id = point.task_end_id - 1;
            let mut event = crate::run::unnumbered(
                turn.now,
                Event::WorkflowTaskStartedEventAttributes(history::WorkflowTaskStartedEventAttributes {
                    scheduled_event_id,
                    identity: "history-resetter".to_owned(),
                    ..Default::default()
                }),
            );
            event.event_id = point.task_end_id;
            event.task_id = point.task_end_id;
            copied.push(event);
        }
        let mut run = self.replay(copied, run_id, point, turn);
        let started_event_id = run.last_event_id();
        let scheduled_event_id = match run.attributes(started_event_id) {
            Some(Event::WorkflowTaskStartedEventAttributes(started)) => started.scheduled_event_id,
            _ => 0,
        };
        run.append(
            turn.now,
            Event::WorkflowTaskFailedEventAttributes(history::WorkflowTaskFailedEventAttributes {
                scheduled_event_id,
                started_event_id,
                cause: WorkflowTaskFailedCause::ResetWorkflow.into(),
                failure: Some(reset_failure(&point.reason)),
                identity: point.identity.clone(),
                base_run_id: self.state.run_id.clone(),
                new_run_id: run_id.to_owned(),
                ..Default::default()
            }),
        );
        for event in self.events.iter().skip(keep) {
            run.keep(event, point, turn);
        }
        for operation in &point.then {
            if let Some(workflow::post_reset_operation::Variant::SignalWorkflow(signal)) = &operation.variant
            {
                run.signal(
                    crate::SignalRequest {
                        name: signal.signal_name.clone(),
                        input: signal.input.clone(),
                        header: signal.header.clone(),
                        identity: point.identity.clone(),
                        ..Default::default()
                    },
                    turn,
                )?;
            }
        }
        run.state.task_attempt = 1;
        run.schedule_task(turn.now);
        run.dispatch_due_activities(turn.now);
        Ok(run)
    }

    fn replay(&self, events: Vec<HistoryEvent>, run_id: &str, point: &ResetPoint, turn: Turn<'_>) -> Self {
        let started = self.started();
        let state = State {
            namespace: self.state.namespace.clone(),
            workflow_id: self.state.workflow_id.clone(),
            run_id: run_id.to_owned(),
            status: crate::words::enums::WorkflowExecutionStatus::Running.into(),
            started_at: turn.now,
            first_task_at: turn.now,
            run_expires_at: crate::time::after(turn.now, self.run_timeout()),
            execution_expires_at: self.state.execution_expires_at,
            start_request_id: point.request_id.clone(),
            task_attempt: 1,
            // So that the run is not taken for one that waits for its first task.
            next_stamp: 1,
            memo: started.memo.clone(),
            search_attributes: started.search_attributes.clone(),
            priority: self.state.priority.clone(),
            rights: self.state.rights.clone(),
            reset_at: turn.now,
            copied_events: i64::try_from(events.len()).unwrap_or(0),
            ..Default::default()
        };
        let mut run = Self::new(state);
        for event in events {
            let at = unstamp(event.event_time.as_ref());
            let attributes = event.attributes.clone();
            let id = run.push(event);
            if let Some(attributes) = attributes {
                run.replay_one(id, at, attributes, turn);
            }
        }
        run
    }

    fn replay_one(&mut self, id: i64, at: i64, event: Event, turn: Turn<'_>) {
        let state = &mut self.state;
        match event {
            Event::WorkflowTaskCompletedEventAttributes(completed) => {
                state.last_started_id = completed.started_event_id;
                state.last_completed_id = id;
            }
            Event::ActivityTaskScheduledEventAttributes(scheduled) => {
                state.next_stamp += 1;
                state.activities.insert(
                    id,
                    state::Activity {
                        scheduled_id: id,
                        activity_id: scheduled.activity_id,
                        scheduled_at: turn.now,
                        attempt: 1,
                        due_at: turn.now,
                        stamp: state.next_stamp,
                        ..Default::default()
                    },
                );
            }
            Event::ActivityTaskCancelRequestedEventAttributes(requested) => {
                if let Some(activity) = state.activities.get_mut(&requested.scheduled_event_id) {
                    activity.cancel_requested_id = id;
                }
            }
            Event::TimerStartedEventAttributes(timer) => {
                let length = nanos(timer.start_to_fire_timeout.as_ref());
                state.timers.insert(
                    timer.timer_id,
                    state::Timer {
                        started_id: id,
                        fire_at: at.saturating_add(length),
                    },
                );
            }
            Event::TimerFiredEventAttributes(timer) => {
                state.timers.remove(&timer.timer_id);
            }
            Event::TimerCanceledEventAttributes(timer) => {
                state.timers.remove(&timer.timer_id);
            }
            Event::StartChildWorkflowExecutionInitiatedEventAttributes(child) => {
                state.children.insert(
                    id,
                    state::Child {
                        initiated_id: id,
                        workflow_id: child.workflow_id,
                        close_policy: child.parent_close_policy,
                        workflow_type: child.workflow_type.unwrap_or_default().name,
                        ..Default::default()
                    },
                );
            }
            Event::ChildWorkflowExecutionStartedEventAttributes(child) => {
                if let Some(known) = state.children.get_mut(&child.initiated_event_id) {
                    known.started_id = id;
                    known.run_id = child.workflow_execution.unwrap_or_default().run_id;
                }
            }
            Event::WorkflowExecutionSignaledEventAttributes(_) => state.signals += 1,
            Event::WorkflowExecutionCancelRequestedEventAttributes(_) => state.cancel_requested = true,
            Event::UpsertWorkflowSearchAttributesEventAttributes(upsert) => {
                self.merge_search_attributes(upsert.search_attributes.unwrap_or_default());
            }
            Event::WorkflowPropertiesModifiedEventAttributes(modified) => {
                self.merge_memo(modified.upserted_memo.unwrap_or_default());
            }
            Event::WorkflowExecutionUpdateAcceptedEventAttributes(accepted) => {
                let update = state.updates.entry(accepted.protocol_instance_id).or_default();
                update.accepted_id = id;
            }
            Event::WorkflowExecutionUpdateCompletedEventAttributes(completed) => {
                let name = completed.meta.unwrap_or_default().update_id;
                state.updates.entry(name).or_default().completed_id = id;
            }
            Event::SignalExternalWorkflowExecutionInitiatedEventAttributes(_) => {
                state.signals_out.push(id);
                self.post(state::Outgoing::Signal(id));
            }
            Event::RequestCancelExternalWorkflowExecutionInitiatedEventAttributes(_) => {
                state.cancels_out.push(id);
                self.post(state::Outgoing::Cancel(id));
            }
            other => self.replay_end(&other),
        }
    }

    fn replay_end(&mut self, event: &Event) {
        if let Some(scheduled_id) = ended_activity(event) {
            self.state.activities.remove(&scheduled_id);
        }
        let child = match event {
            Event::StartChildWorkflowExecutionFailedEventAttributes(end) => end.initiated_event_id,
            Event::ChildWorkflowExecutionCompletedEventAttributes(end) => end.initiated_event_id,
            Event::ChildWorkflowExecutionFailedEventAttributes(end) => end.initiated_event_id,
            Event::ChildWorkflowExecutionCanceledEventAttributes(end) => end.initiated_event_id,
            Event::ChildWorkflowExecutionTimedOutEventAttributes(end) => end.initiated_event_id,
            Event::ChildWorkflowExecutionTerminatedEventAttributes(end) => end.initiated_event_id,
            _ => 0,
        };
        self.state.children.remove(&child);
        let (signal, cancel) = match event {
            Event::ExternalWorkflowExecutionSignaledEventAttributes(end) => (end.initiated_event_id, 0),
            Event::SignalExternalWorkflowExecutionFailedEventAttributes(end) => (end.initiated_event_id, 0),
            Event::ExternalWorkflowExecutionCancelRequestedEventAttributes(end) => {
                (0, end.initiated_event_id)
            }
            Event::RequestCancelExternalWorkflowExecutionFailedEventAttributes(end) => {
                (0, end.initiated_event_id)
            }
            _ => return,
        };
        self.state.signals_out.retain(|id| *id != signal);
        self.state.cancels_out.retain(|id| *id != cancel);
        self.state.outbox.retain(|letter| match letter.body {
            Some(state::Outgoing::Signal(id)) => id != signal,
            Some(state::Outgoing::Cancel(id)) => id != cancel,
            _ => true,
        });
    }

    /// What people and other workflows have sent since is not undone.
    fn keep(&mut self, event: &HistoryEvent, point: &ResetPoint, turn: Turn<'_>) {
        match &event.attributes {
            Some(Event::WorkflowExecutionSignaledEventAttributes(_)) if point.keep_signals => {
                let mut again = event.clone();
                again.event_time = Some(crate::stamp(turn.now));
                self.state.signals += 1;
                self.push(again);
            }
            Some(Event::WorkflowExecutionUpdateAcceptedEventAttributes(accepted)) if point.keep_updates => {
                let Some(request) = accepted.accepted_request.clone() else {
                    return;
                };
                self.admit_again(request, turn);
            }
            Some(Event::WorkflowExecutionUpdateAdmittedEventAttributes(admitted)) if point.keep_updates => {
                let Some(request) = admitted.request.clone() else {
                    return;
                };
                self.admit_again(request, turn);
            }
            _ => {}
        }
    }

    fn admit_again(&mut self, request: crate::words::update::Request, turn: Turn<'_>) {
        let name = request.meta.clone().unwrap_or_default().update_id;
        if self.state.updates.contains_key(&name) {
            return;
        }
        let admitted_id = self.append(
            turn.now,
            Event::WorkflowExecutionUpdateAdmittedEventAttributes(
                history::WorkflowExecutionUpdateAdmittedEventAttributes {
                    request: Some(request),
                    origin: UpdateAdmittedEventOrigin::Reapply.into(),
                },
            ),
        );
        self.state.updates.insert(
            name,
            state::Update {
                admitted_id,
                ..Default::default()
            },
        );
        self.restore_admitted();
    }

    /// This run was replaced by one that went back: it ends, but nobody is told and its children live on.
    pub fn replaced_by(
        &mut self,
        run_id: &str,
        why: crate::Terminate,
        turn: Turn<'_>,
    ) -> Result<(), Refusal> {
        run_id.clone_into(&mut self.state.successor);
        if !self.is_running() {
            return Ok(());
        }
        self.state.children.clear();
        self.terminate(why, turn)
    }
}

fn reset_failure(reason: &str) -> Failure {
    server_failure(
        reason,
        FailureInfo::ResetWorkflowFailureInfo(ResetWorkflowFailureInfo {
            last_heartbeat_details: None::<common::Payloads>,
        }),
    )
}

//! Workflows that a workflow starts, and what it hears of them.

use crate::commands::Bad;
use crate::retry;
use crate::run::{Run, Turn};
use crate::start::{Parent, Start};
use crate::state::{Child, Outgoing};
use crate::time::{duration, nanos, seconds};
use crate::words::enums::{
    ParentClosePolicy, RetryState, StartChildWorkflowExecutionFailedCause, WorkflowIdReusePolicy,
    WorkflowTaskFailedCause as Cause,
};
use crate::words::{Event, HistoryEvent, command, common, execution, history};

/// Why a child could not be started.
pub type StartChildFailure = StartChildWorkflowExecutionFailedCause;

/// How a child ended: its identity and its last event.
#[derive(Debug, Clone)]
pub struct ChildEnd {
    pub initiated_id: i64,
    pub workflow_id: String,
    pub run_id: String,
    pub workflow_type: String,
    pub event: HistoryEvent,
}

impl Run {
    pub(crate) fn initiate_child(
        &mut self,
        wanted: command::StartChildWorkflowExecutionCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Result<(), Bad> {
        let bad = |text: &str| {
            Err(Bad::new(
                Cause::BadStartChildExecutionAttributes,
                format!("BadStartChildExecutionAttributes: {text}"),
            ))
        };
        let workflow_type = wanted.workflow_type.unwrap_or_default();
        if wanted.workflow_id.is_empty() {
            return bad("Required field WorkflowId is not set on StartChildWorkflowExecutionCommand.");
        }
        if workflow_type.name.is_empty() {
            return bad("Required field WorkflowType is not set on StartChildWorkflowExecutionCommand.");
        }
        if let Some(policy) = &wanted.retry_policy
            && let Err(text) = retry::check(policy)
        {
            return bad(&text);
        }
        if self.state.children.len() >= turn.limits.pending_children {
            return Err(Bad::new(
                Cause::PendingChildWorkflowsLimitExceeded,
                format!(
                    "PendingChildWorkflowsLimitExceeded: the number of pending child workflow executions, {}, has reached \
                     the per-workflow limit of {}",
                    self.state.children.len(),
                    turn.limits.pending_children
                ),
            ));
        }
        let close_policy = match wanted.parent_close_policy {
            0 => ParentClosePolicy::Terminate.into(),
            policy => policy,
        };
        let namespace = self.namespace_or_own(wanted.namespace);
        let task_timeout = match nanos(wanted.workflow_task_timeout.as_ref()) {
            0 => seconds(10),
            length => length,
        };
        let execution_timeout = nanos(wanted.workflow_execution_timeout.as_ref());
        let run_timeout = match nanos(wanted.workflow_run_timeout.as_ref()) {
            0 => execution_timeout,
            length => length,
        };
        let initiated_id = self.append(
            turn.now,
            Event::StartChildWorkflowExecutionInitiatedEventAttributes(
                history::StartChildWorkflowExecutionInitiatedEventAttributes {
                    namespace_id: namespace.clone(),
                    namespace,
                    workflow_id: wanted.workflow_id.clone(),
                    workflow_type: Some(workflow_type.clone()),
                    task_queue: Some(self.queue_or_own(wanted.task_queue)),
                    input: wanted.input,
                    workflow_execution_timeout: (execution_timeout != 0).then(|| duration(execution_timeout)),
                    workflow_run_timeout: Some(duration(run_timeout)),
                    workflow_task_timeout: Some(duration(task_timeout)),
                    parent_close_policy: close_policy,
                    control: wanted.control,
                    workflow_task_completed_event_id: completed_id,
                    workflow_id_reuse_policy: match wanted.workflow_id_reuse_policy {
                        0 => WorkflowIdReusePolicy::AllowDuplicate.into(),
                        policy => policy,
                    },
                    retry_policy: wanted
                        .retry_policy
                        .map(|policy| retry::with_defaults(Some(&policy))),
                    cron_schedule: wanted.cron_schedule,
                    header: wanted.header,
                    memo: wanted.memo,
                    search_attributes: wanted.search_attributes,
                    priority: wanted.priority.or_else(|| self.state.priority.clone()),
                    ..Default::default()
                },
            ),
        );
        self.state.children.insert(
            initiated_id,
            Child {
                initiated_id,
                workflow_id: wanted.workflow_id,
                close_policy,
                workflow_type: workflow_type.name,
                ..Default::default()
            },
        );
        self.post(Outgoing::StartChild(initiated_id));
        Ok(())
    }

    /// What the child is to be started with. `None` if nobody waits for it any more.
    pub fn child_start(&self, initiated_id: i64) -> Option<(Start, WorkflowIdReusePolicy)> {
        let Some(Event::StartChildWorkflowExecutionInitiatedEventAttributes(wanted)) =
            self.attributes(initiated_id)
        else {
            return None;
        };
        let child = self.state.children.get(&initiated_id)?;
        let abandoned = child.close_policy == i32::from(ParentClosePolicy::Abandon);
        if !self.is_running() && !abandoned {
            return None;
        }
        let start = Start {
            namespace: wanted.namespace.clone(),
            workflow_id: wanted.workflow_id.clone(),
            workflow_type: child.workflow_type.clone(),
            task_queue: wanted.task_queue.as_ref()?.name.clone(),
            input: wanted.input.clone(),
            execution_timeout: nanos(wanted.workflow_execution_timeout.as_ref()),
            run_timeout: nanos(wanted.workflow_run_timeout.as_ref()),
            task_timeout: nanos(wanted.workflow_task_timeout.as_ref()),
            // The same letter delivered twice finds the child that it has made.
            request_id: format!("{}:{initiated_id}", self.state.run_id),
            retry_policy: wanted.retry_policy.clone(),
            cron: wanted.cron_schedule.clone(),
            memo: wanted.memo.clone(),
            search_attributes: wanted.search_attributes.clone(),
            header: wanted.header.clone(),
            priority: wanted.priority.clone(),
            user_metadata: self.event(initiated_id)?.user_metadata.clone(),
            rights: self.state.rights.clone(),
            parent: Some(Parent {
                namespace: self.state.namespace.clone(),
                workflow_id: self.state.workflow_id.clone(),
                run_id: self.state.run_id.clone(),
                initiated_id,
                root: Some(self.root()),
            }),
            ..Default::default()
        };
        let policy = WorkflowIdReusePolicy::try_from(wanted.workflow_id_reuse_policy)
            .unwrap_or(WorkflowIdReusePolicy::AllowDuplicate);
        Some((start, policy))
    }

    pub fn child_started(&mut self, initiated_id: i64, run_id: &str, turn: Turn<'_>) {
        if !self.is_running() {
            return;
        }
        let Some(Event::StartChildWorkflowExecutionInitiatedEventAttributes(wanted)) =
            self.attributes(initiated_id).cloned()
        else {
            return;
        };
        let next = self.next_event_id();
        let Some(child) = self
            .state
            .children
            .get_mut(&initiated_id)
            .filter(|child| child.run_id.is_empty())
        else {
            return;
        };
        run_id.clone_into(&mut child.run_id);
        child.started_id = next;
        let workflow_execution = execution(&child.workflow_id, run_id);
        self.state.transitions += 1;
        self.record(
            turn.now,
            Event::ChildWorkflowExecutionStartedEventAttributes(
                history::ChildWorkflowExecutionStartedEventAttributes {
                    namespace: wanted.namespace.clone(),
                    namespace_id: wanted.namespace,
                    initiated_event_id: initiated_id,
                    workflow_execution: Some(workflow_execution),
                    workflow_type: wanted.workflow_type,
                    header: wanted.header,
                },
            ),
        );
        self.schedule_task(turn.now);
    }

    pub fn child_not_started(&mut self, initiated_id: i64, cause: StartChildFailure, turn: Turn<'_>) {
        if !self.is_running() {
            return;
        }
        let Some(Event::StartChildWorkflowExecutionInitiatedEventAttributes(wanted)) =
            self.attributes(initiated_id).cloned()
        else {
            return;
        };
        if self.state.children.remove(&initiated_id).is_none() {
            return;
        }
        self.state.transitions += 1;
        self.record(
            turn.now,
            Event::StartChildWorkflowExecutionFailedEventAttributes(
                history::StartChildWorkflowExecutionFailedEventAttributes {
                    namespace: wanted.namespace.clone(),
                    namespace_id: wanted.namespace,
                    workflow_id: wanted.workflow_id,
                    workflow_type: wanted.workflow_type,
                    cause: cause.into(),
                    control: wanted.control,
                    initiated_event_id: initiated_id,
                    workflow_task_completed_event_id: wanted.workflow_task_completed_event_id,
                },
            ),
        );
        self.schedule_task(turn.now);
    }

    /// A child has ended for good. Heard twice, or of a child that is not ours, it is ignored.
    pub fn child_ended(&mut self, end: &ChildEnd, turn: Turn<'_>) {
        if !self.is_running() {
            return;
        }
        if self
            .state
            .children
            .get(&end.initiated_id)
            .is_some_and(|child| child.run_id.is_empty())
        {
            // It ended before we heard that it had started.
            self.child_started(end.initiated_id, &end.run_id, turn);
        }
        let Some(child) = self
            .state
            .children
            .get(&end.initiated_id)
            .filter(|child| child.workflow_id == end.workflow_id)
            .cloned()
        else {
            return;
        };
        let Some(event) = self.child_end_event(&child, end) else {
            return;
        };
        self.state.children.remove(&end.initiated_id);
        self.state.transitions += 1;
        self.record(turn.now, event);
        self.schedule_task(turn.now);
    }

    fn child_end_event(&self, child: &Child, end: &ChildEnd) -> Option<Event> {
        let namespace = match self.attributes(end.initiated_id)? {
            Event::StartChildWorkflowExecutionInitiatedEventAttributes(wanted) => wanted.namespace.clone(),
            _ => return None,
        };
        let namespace_id = namespace.clone();
        let workflow_execution = Some(execution(&end.workflow_id, &end.run_id));
        let workflow_type = Some(common::WorkflowType {
            name: end.workflow_type.clone(),
        });
        let initiated_event_id = end.initiated_id;
        let started_event_id = child.started_id;
        Some(match end.event.attributes.clone()? {
            Event::WorkflowExecutionCompletedEventAttributes(completed) => {
                Event::ChildWorkflowExecutionCompletedEventAttributes(
                    history::ChildWorkflowExecutionCompletedEventAttributes {
                        result: completed.result,
                        namespace,
                        namespace_id,
                        workflow_execution,
                        workflow_type,
                        initiated_event_id,
                        started_event_id,
                    },
                )
            }
            Event::WorkflowExecutionFailedEventAttributes(failed) => {
                Event::ChildWorkflowExecutionFailedEventAttributes(
                    history::ChildWorkflowExecutionFailedEventAttributes {
                        failure: failed.failure,
                        namespace,
                        namespace_id,
                        workflow_execution,
                        workflow_type,
                        initiated_event_id,
                        started_event_id,
                        retry_state: failed.retry_state,
                    },
                )
            }
            Event::WorkflowExecutionCanceledEventAttributes(canceled) => {
                Event::ChildWorkflowExecutionCanceledEventAttributes(
                    history::ChildWorkflowExecutionCanceledEventAttributes {
                        details: canceled.details,
                        namespace,
                        namespace_id,
                        workflow_execution,
                        workflow_type,
                        initiated_event_id,
                        started_event_id,
                    },
                )
            }
            Event::WorkflowExecutionTimedOutEventAttributes(timed_out) => {
                Event::ChildWorkflowExecutionTimedOutEventAttributes(
                    history::ChildWorkflowExecutionTimedOutEventAttributes {
                        namespace,
                        namespace_id,
                        workflow_execution,
                        workflow_type,
                        initiated_event_id,
                        started_event_id,
                        retry_state: match timed_out.retry_state {
                            0 => RetryState::Timeout.into(),
                            state => state,
                        },
                    },
                )
            }
            Event::WorkflowExecutionTerminatedEventAttributes(_) => {
                Event::ChildWorkflowExecutionTerminatedEventAttributes(
                    history::ChildWorkflowExecutionTerminatedEventAttributes {
                        namespace,
                        namespace_id,
                        workflow_execution,
                        workflow_type,
                        initiated_event_id,
                        started_event_id,
                    },
                )
            }
            _ => return None,
        })
    }
}

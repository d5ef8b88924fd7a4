//! A run as it is shown to people.

use crate::run::Run;
use crate::state::{Activity, Pause};
use crate::time::{Nanos, after, duration, maybe_stamp, nanos, stamp};
use crate::words::enums::{PendingActivityState, PendingWorkflowTaskState};
use crate::words::{common, execution, workflow};

impl Run {
    pub fn info(&self) -> workflow::WorkflowExecutionInfo {
        let started = self.started();
        let closed = self.state.closed_at;
        workflow::WorkflowExecutionInfo {
            execution: Some(execution(&self.state.workflow_id, &self.state.run_id)),
            r#type: Some(common::WorkflowType {
                name: self.workflow_type().to_owned(),
            }),
            start_time: Some(stamp(self.state.started_at)),
            close_time: maybe_stamp(closed),
            status: self.state.status,
            history_length: self.last_event_id(),
            parent_namespace_id: started.parent_workflow_namespace_id.clone(),
            parent_execution: started.parent_workflow_execution.clone(),
            execution_time: Some(stamp(self.state.first_task_at)),
            memo: Some(self.state.memo.clone().unwrap_or_default()),
            search_attributes: Some(self.state.search_attributes.clone().unwrap_or_default()),
            task_queue: self.task_queue().to_owned(),
            state_transition_count: self.state.transitions,
            history_size_bytes: self.state.history_bytes,
            execution_duration: (closed != 0).then(|| duration((closed - self.state.first_task_at).max(0))),
            root_execution: Some(self.root()),
            first_run_id: started.first_execution_run_id.clone(),
            priority: self.state.priority.clone(),
            ..Default::default()
        }
    }

    /// The workflow that everything began with: this one, if it has no parent.
    pub fn root(&self) -> common::WorkflowExecution {
        let started = self.started();
        started
            .root_workflow_execution
            .clone()
            .unwrap_or_else(|| execution(&self.state.workflow_id, &started.first_execution_run_id))
    }

    pub fn config(&self) -> workflow::WorkflowExecutionConfig {
        let started = self.started();
        workflow::WorkflowExecutionConfig {
            task_queue: started.task_queue.clone(),
            workflow_execution_timeout: started.workflow_execution_timeout,
            workflow_run_timeout: started.workflow_run_timeout,
            default_workflow_task_timeout: started.workflow_task_timeout,
            user_metadata: self.events.first().and_then(|event| event.user_metadata.clone()),
        }
    }

    pub fn extended_info(&self) -> workflow::WorkflowExecutionExtendedInfo {
        workflow::WorkflowExecutionExtendedInfo {
            execution_expiration_time: maybe_stamp(self.state.execution_expires_at),
            run_expiration_time: maybe_stamp(self.state.run_expires_at),
            cancel_requested: self.state.cancel_requested,
            last_reset_time: maybe_stamp(self.state.reset_at),
            original_start_time: self.events.first().and_then(|event| event.event_time),
            reset_run_id: self.state.successor.clone(),
            request_id_infos: std::iter::once((
                self.state.start_request_id.clone(),
                workflow::RequestIdInfo {
                    event_type: crate::words::enums::EventType::WorkflowExecutionStarted.into(),
                    event_id: 1,
                    buffered: false,
                },
            ))
            .collect(),
            ..Default::default()
        }
    }

    pub fn pending_task(&self) -> Option<workflow::PendingWorkflowTaskInfo> {
        let task = self.state.task.as_ref()?;
        let state = if task.started_id == 0 {
            PendingWorkflowTaskState::Scheduled
        } else {
            PendingWorkflowTaskState::Started
        };
        Some(workflow::PendingWorkflowTaskInfo {
            state: state.into(),
            scheduled_time: Some(stamp(task.scheduled_at)),
            original_scheduled_time: Some(stamp(task.original_scheduled_at)),
            started_time: maybe_stamp(task.started_at),
            attempt: task.attempt,
        })
    }

    pub fn pending_children(&self) -> Vec<workflow::PendingChildExecutionInfo> {
        let children = self.state.children.values().filter(|_| self.is_running());
        children
            .map(|child| workflow::PendingChildExecutionInfo {
                workflow_id: child.workflow_id.clone(),
                run_id: child.run_id.clone(),
                workflow_type_name: child.workflow_type.clone(),
                initiated_id: child.initiated_id,
                parent_close_policy: child.close_policy,
            })
            .collect()
    }

    pub fn pending_activities(&self) -> Vec<workflow::PendingActivityInfo> {
        self.state
            .activities
            .values()
            .filter_map(|activity| self.pending_activity(activity))
            .collect()
    }

    fn pending_activity(&self, activity: &Activity) -> Option<workflow::PendingActivityInfo> {
        let scheduled = self.scheduled_activity(activity.scheduled_id)?;
        let state = match (activity.started_at != 0, activity.cancel_requested_id != 0) {
            (true, true) => PendingActivityState::CancelRequested,
            (true, false) if activity.paused => PendingActivityState::PauseRequested,
            (true, false) => PendingActivityState::Started,
            (false, _) if activity.paused => PendingActivityState::Paused,
            (false, _) => PendingActivityState::Scheduled,
        };
        let waits = activity.started_at == 0 && activity.attempt > 1;
        let scheduled_at: Nanos = if activity.started_at == 0 {
            activity.due_at
        } else {
            0
        };
        let expires = after(
            activity.scheduled_at,
            nanos(scheduled.schedule_to_close_timeout.as_ref()),
        );
        Some(workflow::PendingActivityInfo {
            activity_id: activity.activity_id.clone(),
            activity_type: scheduled.activity_type.clone(),
            state: state.into(),
            heartbeat_details: activity.heartbeat.clone(),
            last_heartbeat_time: maybe_stamp(activity.heartbeat_at.max(activity.started_at)),
            last_started_time: maybe_stamp(activity.started_at),
            attempt: activity.attempt,
            maximum_attempts: scheduled
                .retry_policy
                .as_ref()
                .map_or(0, |policy| policy.maximum_attempts),
            scheduled_time: maybe_stamp(scheduled_at),
            expiration_time: maybe_stamp(expires),
            last_failure: activity.last_failure.clone(),
            last_worker_identity: activity.identity.clone(),
            current_retry_interval: waits.then(|| duration(activity.due_at - activity.attempt_ended_at)),
            last_attempt_complete_time: maybe_stamp(activity.attempt_ended_at),
            next_attempt_schedule_time: if waits { maybe_stamp(activity.due_at) } else { None },
            paused: activity.paused,
            pause_info: activity.pause.as_ref().map(pause_info),
            priority: scheduled.priority.clone(),
            ..Default::default()
        })
    }
}

fn pause_info(pause: &Pause) -> workflow::pending_activity_info::PauseInfo {
    use workflow::pending_activity_info::pause_info::{Manual, PausedBy};
    workflow::pending_activity_info::PauseInfo {
        pause_time: maybe_stamp(pause.at),
        paused_by: Some(PausedBy::Manual(Manual {
            identity: pause.identity.clone(),
            reason: pause.reason.clone(),
        })),
    }
}

//! The first events of a run.

use crate::refusal::Refusal;
use crate::retry;
use crate::run::{Run, Turn};
use crate::state::State;
use crate::time::{Nanos, after, duration, maybe_stamp, nanos, seconds};
use crate::words::{Event, common, enums, execution, failure, history, sdk, taskqueue, workflow};

const DEFAULT_TASK_TIMEOUT: Nanos = seconds(10);
const MAX_TASK_TIMEOUT: Nanos = seconds(120);

/// Everything that a new run is made of, whoever asks for it: a client, a parent, a schedule or the run before.
#[derive(Debug, Clone, Default)]
pub struct Start {
    pub namespace: String,
    pub workflow_id: String,
    pub workflow_type: String,
    pub task_queue: String,
    pub input: Option<common::Payloads>,
    pub execution_timeout: Nanos,
    pub run_timeout: Nanos,
    pub task_timeout: Nanos,
    pub identity: String,
    pub request_id: String,
    pub retry_policy: Option<common::RetryPolicy>,
    pub cron: String,
    pub memo: Option<common::Memo>,
    pub search_attributes: Option<common::SearchAttributes>,
    pub header: Option<common::Header>,
    /// Before the first workflow task.
    pub delay: Nanos,
    pub user_metadata: Option<sdk::UserMetadata>,
    pub links: Vec<common::Link>,
    pub priority: Option<common::Priority>,
    pub versioning_override: Option<workflow::VersioningOverride>,
    pub parent: Option<Parent>,
    pub eager: bool,
    /// What whoever asks may do, in words of whoever knows; empty: nobody has said. See [`crate::state::State::rights`].
    pub rights: String,
    pub completion_callbacks: Vec<common::Callback>,

    // What a run takes over from the one before it.
    pub first_run_id: String,
    pub continued_run_id: String,
    pub initiator: i32,
    pub continued_failure: Option<failure::Failure>,
    pub last_result: Option<common::Payloads>,
    /// Counts from one; zero means the first.
    pub attempt: i32,
    /// Fixed by the first run of a chain.
    pub execution_expires_at: Nanos,
}

#[derive(Debug, Clone, Default)]
pub struct Parent {
    pub namespace: String,
    pub workflow_id: String,
    pub run_id: String,
    pub initiated_id: i64,
    pub root: Option<common::WorkflowExecution>,
}

impl Start {
    /// Says what is wrong with a request before anything is decided about it.
    pub fn check(&self, limits: &crate::Limits) -> Result<(), Refusal> {
        let invalid = |message: &str| Err(Refusal::InvalidArgument(message.to_owned()));
        if self.workflow_id.is_empty() {
            return invalid("WorkflowId is not set on request.");
        }
        if self.workflow_id.len() > limits.id_length {
            return invalid("WorkflowId length exceeds limit.");
        }
        if self.workflow_type.is_empty() {
            return invalid("WorkflowType is not set on request.");
        }
        if self.workflow_type.len() > limits.id_length {
            return invalid("WorkflowType length exceeds limit.");
        }
        if self.task_queue.is_empty() {
            return invalid("missing task queue name");
        }
        if self.task_queue.len() > limits.id_length {
            return invalid("taskQueue length exceeds limit");
        }
        if self.request_id.len() > limits.id_length {
            return invalid("RequestId length exceeds limit.");
        }
        if self.execution_timeout < 0 {
            return invalid("Invalid WorkflowExecutionTimeoutSeconds.");
        }
        if self.run_timeout < 0 {
            return invalid("Invalid WorkflowRunTimeoutSeconds.");
        }
        if self.task_timeout < 0 {
            return invalid("Invalid WorkflowTaskTimeoutSeconds.");
        }
        if self.delay != 0 && !self.cron.is_empty() {
            return invalid("CronSchedule and WorkflowStartDelay may not be used together.");
        }
        limits.check_input(self.input.as_ref())?;
        limits.check_memo(self.memo.as_ref())?;
        limits.check_search_attributes(self.search_attributes.as_ref())?;
        if let Some(policy) = &self.retry_policy {
            retry::check(policy).map_err(Refusal::InvalidArgument)?;
        }
        if !self.cron.is_empty() {
            crate::Cron::parse(&self.cron)
                .map_err(|error| Refusal::InvalidArgument(format!("Invalid CronSchedule. {error}")))?;
        }
        Ok(())
    }
}

/// A limit that is not set is not there: workers tell "none" from "zero".
fn set(length: Nanos) -> Option<prost_wkt_types::Duration> {
    (length != 0).then(|| duration(length))
}

impl Run {
    /// A new run, with its first workflow task scheduled unless it has to wait.
    pub fn start(start: Start, run_id: &str, turn: Turn<'_>) -> Result<Self, Refusal> {
        let mut run = Self::start_quietly(start, run_id, turn)?;
        run.schedule_first_task(turn.now);
        Ok(run)
    }

    /// A new run that has not been given to a worker yet: something else happens to it first.
    pub fn start_quietly(start: Start, run_id: &str, turn: Turn<'_>) -> Result<Self, Refusal> {
        let now = turn.now;
        let first_run_id = if start.first_run_id.is_empty() {
            run_id.to_owned()
        } else {
            start.first_run_id
        };
        let mut delay = start.delay;
        if !start.cron.is_empty() && start.continued_run_id.is_empty() {
            let cron = crate::Cron::parse(&start.cron)
                .map_err(|error| Refusal::InvalidArgument(format!("Invalid CronSchedule. {error}")))?;
            delay = cron.next_after(now, now).map_or(0, |at| at - now);
        }
        let first_task_at = now.saturating_add(delay.max(0));
        let execution_expires_at = if start.execution_expires_at != 0 {
            start.execution_expires_at
        } else {
            after(first_task_at, start.execution_timeout)
        };
        // A run cannot outlive its execution.
        let mut run_timeout = start.run_timeout;
        if start.execution_timeout > 0 && (run_timeout == 0 || run_timeout > start.execution_timeout) {
            run_timeout = start.execution_timeout;
        }
        let mut run_expires_at = after(first_task_at, run_timeout);
        if execution_expires_at != 0 && (run_expires_at == 0 || run_expires_at > execution_expires_at) {
            run_expires_at = execution_expires_at;
        }
        let task_timeout = match start.task_timeout {
            0 => DEFAULT_TASK_TIMEOUT,
            length => length.min(MAX_TASK_TIMEOUT),
        };
        let task_timeout = if run_timeout > 0 {
            task_timeout.min(run_timeout)
        } else {
            task_timeout
        };
        let retry_policy = start
            .retry_policy
            .as_ref()
            .map(|policy| retry::with_defaults(Some(policy)));
        let root = start.parent.as_ref().map(|parent| {
            parent
                .root
                .clone()
                .unwrap_or_else(|| execution(&parent.workflow_id, &parent.run_id))
        });
        let parent = start.parent.as_ref();
        let attributes = history::WorkflowExecutionStartedEventAttributes {
            workflow_type: Some(common::WorkflowType {
                name: start.workflow_type,
            }),
            parent_workflow_namespace: parent.map_or(String::new(), |parent| parent.namespace.clone()),
            parent_workflow_namespace_id: parent.map_or(String::new(), |parent| parent.namespace.clone()),
            parent_workflow_execution: parent.map(|parent| execution(&parent.workflow_id, &parent.run_id)),
            parent_initiated_event_id: parent.map_or(0, |parent| parent.initiated_id),
            task_queue: Some(taskqueue::TaskQueue {
                name: start.task_queue,
                kind: enums::TaskQueueKind::Normal.into(),
                normal_name: String::new(),
            }),
            input: start.input,
            workflow_execution_timeout: set(start.execution_timeout),
            workflow_run_timeout: set(run_timeout),
            workflow_task_timeout: Some(duration(task_timeout)),
            continued_execution_run_id: start.continued_run_id,
            initiator: start.initiator,
            continued_failure: start.continued_failure,
            last_completion_result: start.last_result,
            original_execution_run_id: run_id.to_owned(),
            identity: start.identity,
            first_execution_run_id: first_run_id,
            retry_policy,
            attempt: start.attempt.max(1),
            workflow_execution_expiration_time: maybe_stamp(execution_expires_at),
            cron_schedule: start.cron,
            first_workflow_task_backoff: Some(duration(delay.max(0))),
            memo: start.memo.clone(),
            search_attributes: start.search_attributes.clone(),
            header: start.header,
            workflow_id: start.workflow_id.clone(),
            completion_callbacks: start.completion_callbacks,
            root_workflow_execution: root,
            versioning_override: start.versioning_override,
            priority: start.priority.clone(),
            eager_execution_accepted: start.eager,
            ..Default::default()
        };
        let mut run = Self::new(State {
            namespace: start.namespace,
            workflow_id: start.workflow_id,
            run_id: run_id.to_owned(),
            status: enums::WorkflowExecutionStatus::Running.into(),
            started_at: now,
            first_task_at,
            run_expires_at,
            execution_expires_at,
            start_request_id: start.request_id,
            task_attempt: 1,
            memo: start.memo,
            search_attributes: start.search_attributes,
            priority: start.priority,
            rights: start.rights,
            transitions: 1,
            ..Default::default()
        });
        let mut event =
            crate::run::unnumbered(now, Event::WorkflowExecutionStartedEventAttributes(attributes));
        event.user_metadata = start.user_metadata;
        event.links = start.links;
        run.push(event);
        Ok(run)
    }

    pub fn schedule_first_task(&mut self, now: Nanos) {
        if self.state.first_task_at <= now {
            self.schedule_task(now);
        }
    }

    /// The run's own time limits, and its retry policy, as they were resolved at the start.
    pub(crate) fn run_timeout(&self) -> Nanos {
        nanos(self.started().workflow_run_timeout.as_ref())
    }

    pub(crate) fn task_timeout(&self) -> Nanos {
        match nanos(self.started().workflow_task_timeout.as_ref()) {
            0 => DEFAULT_TASK_TIMEOUT,
            length => length,
        }
    }
}

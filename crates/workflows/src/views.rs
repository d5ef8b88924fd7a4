//! Workflows for people: what a list, a page about one, and a history show, and what a person does by hand. In words of our
//! own, so that whoever shows them needs to know nothing of the wire.

use atoll_workflow_core::{Nanos, Refusal, unstamp};
use temporalio_protos::temporal::api::common::v1::{Payload, Payloads, WorkflowExecution};
use temporalio_protos::temporal::api::enums::v1::{PendingActivityState, WorkflowExecutionStatus as Status};
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::history::v1::HistoryEvent;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;
use temporalio_protos::temporal::api::workflow::v1::WorkflowExecutionInfo;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::Engine;

/// As much of an input or a result as is shown.
const LONGEST: usize = 160;

/// Times are nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkflowView {
    pub id: String,
    pub run: String,
    pub kind: String,
    /// `running`, `completed`, `failed`, `canceled`, `terminated`, `continued_as_new`, `timed_out`.
    pub status: &'static str,
    pub task_queue: String,
    pub started_at: Nanos,
    pub closed_at: Option<Nanos>,
    pub events: i64,
}

/// An activity that has not finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ActivityView {
    pub id: String,
    pub kind: String,
    /// `scheduled`, `started`, `cancel_requested`, `paused`, `pause_requested`.
    pub state: &'static str,
    pub attempt: i32,
    pub last_failure: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventView {
    pub id: i64,
    pub at: Nanos,
    /// As the SDKs' users know it, such as `ActivityTaskScheduled`.
    pub kind: String,
    /// What it is about, in a few words: a name, an id, why something failed.
    pub about: String,
}

/// One workflow, by the names that people know; without a run it is the latest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkflowName {
    pub namespace: String,
    pub id: String,
    pub run: String,
}

impl WorkflowName {
    fn execution(&self) -> Option<WorkflowExecution> {
        Some(WorkflowExecution {
            workflow_id: self.id.clone(),
            run_id: self.run.clone(),
        })
    }
}

impl Engine {
    /// Refuses a namespace that is not of this project.
    pub fn check_project(&self, project: &str, namespace: &str) -> Result<(), Refusal> {
        match self.namespace(namespace, "") {
            Ok(known) if known.project == project => Ok(()),
            _ => Err(Refusal::NamespaceNotFound(namespace.to_owned())),
        }
    }

    /// A page of workflows, newest first unless the query says otherwise, and where the next page begins.
    pub async fn view_workflows(
        &self,
        namespace: &str,
        query: &str,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<(Vec<WorkflowView>, Option<String>), Refusal> {
        let size = i32::try_from(limit).unwrap_or(i32::MAX);
        let token = cursor.unwrap_or_default().as_bytes();
        let (found, next) = self.list_workflows(namespace, query, size, token).await?;
        let next = String::from_utf8(next).ok().filter(|next| !next.is_empty());
        Ok((found.into_iter().map(view).collect(), next))
    }

    pub async fn view_workflow(
        &self,
        name: &WorkflowName,
    ) -> Result<(WorkflowView, Vec<ActivityView>), Refusal> {
        let described = self
            .describe_workflow(service::DescribeWorkflowExecutionRequest {
                namespace: name.namespace.clone(),
                execution: name.execution(),
            })
            .await?;
        let activities = described
            .pending_activities
            .into_iter()
            .map(|activity| ActivityView {
                id: activity.activity_id,
                kind: activity.activity_type.map(|kind| kind.name).unwrap_or_default(),
                state: match PendingActivityState::try_from(activity.state).unwrap_or_default() {
                    PendingActivityState::Started => "started",
                    PendingActivityState::CancelRequested => "cancel_requested",
                    PendingActivityState::Paused => "paused",
                    PendingActivityState::PauseRequested => "pause_requested",
                    PendingActivityState::Scheduled | PendingActivityState::Unspecified => "scheduled",
                },
                attempt: activity.attempt,
                last_failure: activity.last_failure.map(|failure| failure.message),
            })
            .collect();
        let info = described.workflow_execution_info.unwrap_or_default();
        Ok((view(info), activities))
    }

    /// Events from this id on, and the id of the one behind them.
    pub async fn view_history(
        &self,
        name: &WorkflowName,
        from: i64,
        limit: usize,
    ) -> Result<(Vec<EventView>, Option<i64>), Refusal> {
        let (events, more) = self.events_from(name, from, limit).await?;
        let shown: Vec<_> = events.iter().map(event_view).collect();
        let next = shown.last().filter(|_| more).map(|last| last.id + 1);
        Ok((shown, next))
    }

    /// The input is JSON.
    pub async fn signal_by_hand(
        &self,
        name: &WorkflowName,
        signal: &str,
        input: Option<Vec<u8>>,
        identity: &str,
    ) -> Result<(), Refusal> {
        let input = input.map(|data| Payloads {
            payloads: vec![Payload {
                metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
                data,
                ..Default::default()
            }],
        });
        self.signal_workflow(service::SignalWorkflowExecutionRequest {
            namespace: name.namespace.clone(),
            workflow_execution: name.execution(),
            signal_name: signal.to_owned(),
            input,
            identity: identity.to_owned(),
            ..Default::default()
        })
        .await?;
        Ok(())
    }

    pub async fn cancel_by_hand(
        &self,
        name: &WorkflowName,
        reason: &str,
        identity: &str,
    ) -> Result<(), Refusal> {
        self.cancel_workflow(service::RequestCancelWorkflowExecutionRequest {
            namespace: name.namespace.clone(),
            workflow_execution: name.execution(),
            reason: reason.to_owned(),
            identity: identity.to_owned(),
            ..Default::default()
        })
        .await?;
        Ok(())
    }

    pub async fn terminate_by_hand(
        &self,
        name: &WorkflowName,
        reason: &str,
        identity: &str,
    ) -> Result<(), Refusal> {
        self.terminate_workflow(service::TerminateWorkflowExecutionRequest {
            namespace: name.namespace.clone(),
            workflow_execution: name.execution(),
            reason: reason.to_owned(),
            identity: identity.to_owned(),
            ..Default::default()
        })
        .await?;
        Ok(())
    }

    /// Goes back to the end of a workflow task. Signals and updates that came later are kept. The name of the new run.
    pub async fn reset_by_hand(
        &self,
        name: &WorkflowName,
        event: i64,
        reason: &str,
        identity: &str,
    ) -> Result<String, Refusal> {
        let reset = self
            .reset_workflow(service::ResetWorkflowExecutionRequest {
                namespace: name.namespace.clone(),
                workflow_execution: name.execution(),
                workflow_task_finish_event_id: event,
                reason: reason.to_owned(),
                identity: identity.to_owned(),
                request_id: crate::fresh_id(),
                ..Default::default()
            })
            .await?;
        Ok(reset.run_id)
    }
}

fn view(info: WorkflowExecutionInfo) -> WorkflowView {
    let execution = info.execution.unwrap_or_default();
    WorkflowView {
        id: execution.workflow_id,
        run: execution.run_id,
        kind: info.r#type.map(|kind| kind.name).unwrap_or_default(),
        status: match Status::try_from(info.status).unwrap_or_default() {
            Status::Running | Status::Unspecified => "running",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::Canceled => "canceled",
            Status::Terminated => "terminated",
            Status::ContinuedAsNew => "continued_as_new",
            Status::TimedOut => "timed_out",
            Status::Paused => "paused",
        },
        task_queue: info.task_queue,
        started_at: unstamp(info.start_time.as_ref()),
        closed_at: info.close_time.as_ref().map(|at| unstamp(Some(at))),
        events: info.history_length,
    }
}

fn event_view(event: &HistoryEvent) -> EventView {
    let attributes = event.attributes.as_ref();
    EventView {
        id: event.event_id,
        at: unstamp(event.event_time.as_ref()),
        kind: attributes.map_or_else(String::new, |found| format!("{:?}", found.event_type())),
        about: attributes.map(about).unwrap_or_default(),
    }
}

/// Names first, then what was given or came out.
fn about(event: &Event) -> String {
    match event {
        Event::WorkflowExecutionStartedEventAttributes(start) => call(
            start.workflow_type.as_ref().map(|kind| &*kind.name),
            start.input.as_ref(),
        ),
        Event::WorkflowExecutionCompletedEventAttributes(end) => shown(end.result.as_ref()),
        Event::WorkflowExecutionFailedEventAttributes(end) => why(end.failure.as_ref()),
        Event::WorkflowExecutionTerminatedEventAttributes(end) => end.reason.clone(),
        Event::WorkflowExecutionContinuedAsNewEventAttributes(next) => {
            format!("run {}", next.new_execution_run_id)
        }
        Event::WorkflowExecutionSignaledEventAttributes(signal) => {
            call(Some(&signal.signal_name), signal.input.as_ref())
        }
        Event::WorkflowExecutionCancelRequestedEventAttributes(cancel) => cancel.cause.clone(),
        Event::WorkflowTaskFailedEventAttributes(failed) => why(failed.failure.as_ref()),
        Event::ActivityTaskScheduledEventAttributes(scheduled) => call(
            scheduled.activity_type.as_ref().map(|kind| &*kind.name),
            scheduled.input.as_ref(),
        ),
        Event::ActivityTaskStartedEventAttributes(started) if started.attempt > 1 => {
            format!("attempt {}", started.attempt)
        }
        Event::ActivityTaskCompletedEventAttributes(done) => shown(done.result.as_ref()),
        Event::ActivityTaskFailedEventAttributes(failed) => why(failed.failure.as_ref()),
        Event::ActivityTaskTimedOutEventAttributes(timed_out) => why(timed_out.failure.as_ref()),
        Event::TimerStartedEventAttributes(timer) => {
            let seconds = timer
                .start_to_fire_timeout
                .as_ref()
                .map_or(0, |timeout| timeout.seconds);
            format!("{} for {seconds} s", timer.timer_id)
        }
        Event::TimerFiredEventAttributes(timer) => timer.timer_id.clone(),
        Event::TimerCanceledEventAttributes(timer) => timer.timer_id.clone(),
        Event::MarkerRecordedEventAttributes(marker) => marker.marker_name.clone(),
        Event::StartChildWorkflowExecutionInitiatedEventAttributes(child) => format!(
            "{} {}",
            child.workflow_id,
            call(
                child.workflow_type.as_ref().map(|kind| &*kind.name),
                child.input.as_ref()
            )
        ),
        Event::ChildWorkflowExecutionCompletedEventAttributes(done) => shown(done.result.as_ref()),
        Event::ChildWorkflowExecutionFailedEventAttributes(failed) => why(failed.failure.as_ref()),
        Event::SignalExternalWorkflowExecutionInitiatedEventAttributes(signal) => {
            call(Some(&signal.signal_name), signal.input.as_ref())
        }
        Event::WorkflowExecutionUpdateAcceptedEventAttributes(update) => {
            let input = update
                .accepted_request
                .as_ref()
                .and_then(|request| request.input.as_ref());
            input.map_or_else(String::new, |input| call(Some(&input.name), input.args.as_ref()))
        }
        _ => String::new(),
    }
}

fn why(failure: Option<&Failure>) -> String {
    failure.map(|failure| failure.message.clone()).unwrap_or_default()
}

fn call(name: Option<&str>, input: Option<&Payloads>) -> String {
    format!("{}({})", name.unwrap_or_default(), shown(input))
}

/// What can be read of it, in one line.
fn shown(payloads: Option<&Payloads>) -> String {
    let payloads = payloads.map(|payloads| &*payloads.payloads).unwrap_or_default();
    let each: Vec<_> = payloads.iter().map(one).collect();
    let mut line = each.join(", ");
    if line.chars().count() > LONGEST {
        line = line.chars().take(LONGEST).collect();
        line.push('…');
    }
    line
}

fn one(payload: &Payload) -> String {
    let encoding = payload
        .metadata
        .get("encoding")
        .map(|name| String::from_utf8_lossy(name));
    match encoding.as_deref() {
        Some("json/plain" | "json/protobuf") => String::from_utf8_lossy(&payload.data)
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect(),
        Some("binary/null") => "null".to_owned(),
        other => format!(
            "<{} bytes of {}>",
            payload.data.len(),
            other.unwrap_or("unknown encoding")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(encoding: &str, data: &[u8]) -> Payload {
        Payload {
            metadata: [("encoding".to_owned(), encoding.as_bytes().to_vec())].into(),
            data: data.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn what_people_cannot_read_is_described_and_what_is_long_is_cut() {
        let payloads = Payloads {
            payloads: vec![
                payload("json/plain", b"{\"a\":\n1}"),
                payload("binary/null", b""),
                payload("binary/encrypted", b"xyz"),
            ],
        };
        assert_eq!(
            call(Some("pay"), Some(&payloads)),
            "pay({\"a\": 1}, null, <3 bytes of binary/encrypted>)"
        );
        let long = Payloads {
            payloads: vec![payload("json/plain", &[b'x'; 10_000])],
        };
        assert_eq!(shown(Some(&long)).chars().count(), LONGEST + 1);
        assert_eq!(shown(None), "");
    }
}

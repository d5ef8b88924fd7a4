//! What reaches a run from outside, and what comes back of what it sent to others.

use crate::refusal::Refusal;
use crate::run::{Run, Turn, unnumbered};
use crate::words::enums::{
    CancelExternalWorkflowExecutionFailedCause as CancelFailed,
    SignalExternalWorkflowExecutionFailedCause as SignalFailed,
};
use crate::words::{Event, common, history};

#[derive(Debug, Clone, Default)]
pub struct SignalRequest {
    pub name: String,
    pub input: Option<common::Payloads>,
    pub header: Option<common::Header>,
    pub identity: String,
    /// The same one again does nothing.
    pub request_id: String,
    pub links: Vec<common::Link>,
    /// The workflow that sent it.
    pub sender: Option<common::WorkflowExecution>,
}

impl SignalRequest {
    /// About what its event will have.
    fn bytes(&self) -> usize {
        self.input.as_ref().map_or(0, prost::Message::encoded_len)
            + self.header.as_ref().map_or(0, prost::Message::encoded_len)
            + self.links.iter().map(prost::Message::encoded_len).sum::<usize>()
            + self.name.len()
            + self.identity.len()
            + self.request_id.len()
    }
}

#[derive(Debug, Clone, Default)]
pub struct CancelRequest {
    pub reason: String,
    pub identity: String,
    pub request_id: String,
    pub links: Vec<common::Link>,
    /// The workflow that asked, and the event with which it did.
    pub sender: Option<(common::WorkflowExecution, i64)>,
}

/// What became of a signal or a cancellation that was sent to another workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    Done,
    NotFound,
    NamespaceNotFound,
    TooMany,
}

impl Run {
    pub fn signal(&mut self, signal: SignalRequest, turn: Turn<'_>) -> Result<(), Refusal> {
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        if !signal.request_id.is_empty() && self.state.signal_request_ids.contains(&signal.request_id) {
            return Ok(());
        }
        turn.limits.check_input(signal.input.as_ref())?;
        self.check_room(signal.bytes(), turn.limits)?;
        if self.state.signals >= turn.limits.signals {
            return Err(Refusal::InvalidArgument(
                "exceeded workflow execution limit for signal events".to_owned(),
            ));
        }
        if !signal.request_id.is_empty() {
            self.state.signal_request_ids.push(signal.request_id.clone());
        }
        self.state.signals += 1;
        self.state.transitions += 1;
        let mut event = unnumbered(
            turn.now,
            Event::WorkflowExecutionSignaledEventAttributes(
                history::WorkflowExecutionSignaledEventAttributes {
                    signal_name: signal.name,
                    input: signal.input,
                    identity: signal.identity,
                    header: signal.header,
                    external_workflow_execution: signal.sender,
                    request_id: signal.request_id,
                    ..Default::default()
                },
            ),
        );
        event.links = signal.links;
        self.record_event(event);
        self.schedule_task(turn.now);
        Ok(())
    }

    pub fn request_cancel(&mut self, request: CancelRequest, turn: Turn<'_>) -> Result<(), Refusal> {
        // What has ended needs no cancellation: nothing is wrong with the request.
        if !self.is_running() {
            return Ok(());
        }
        if self.state.cancel_requested {
            // Asking again is fine, whoever asks.
            return Ok(());
        }
        self.state.cancel_requested = true;
        self.state.cancel_request_id.clone_from(&request.request_id);
        self.state.transitions += 1;
        let (sender, initiated_id) = request
            .sender
            .map_or((None, 0), |(sender, initiated_id)| (Some(sender), initiated_id));
        let mut event = unnumbered(
            turn.now,
            Event::WorkflowExecutionCancelRequestedEventAttributes(
                history::WorkflowExecutionCancelRequestedEventAttributes {
                    cause: request.reason,
                    external_initiated_event_id: initiated_id,
                    external_workflow_execution: sender,
                    identity: request.identity,
                },
            ),
        );
        event.links = request.links;
        self.record_event(event);
        self.schedule_task(turn.now);
        Ok(())
    }

    /// The signal that this event asks for, its target and whether that must be a child of ours.
    pub fn outgoing_signal(
        &self,
        initiated_id: i64,
    ) -> Option<&history::SignalExternalWorkflowExecutionInitiatedEventAttributes> {
        match self.attributes(initiated_id)? {
            Event::SignalExternalWorkflowExecutionInitiatedEventAttributes(wanted) => Some(wanted),
            _ => None,
        }
    }

    pub fn outgoing_cancel(
        &self,
        initiated_id: i64,
    ) -> Option<&history::RequestCancelExternalWorkflowExecutionInitiatedEventAttributes> {
        match self.attributes(initiated_id)? {
            Event::RequestCancelExternalWorkflowExecutionInitiatedEventAttributes(wanted) => Some(wanted),
            _ => None,
        }
    }

    pub fn signal_delivered(&mut self, initiated_id: i64, delivery: Delivery, turn: Turn<'_>) {
        if !self.is_running() || !take(&mut self.state.signals_out, initiated_id) {
            return;
        }
        let Some(wanted) = self.outgoing_signal(initiated_id).cloned() else {
            return;
        };
        let cause = match delivery {
            Delivery::Done => None,
            Delivery::NotFound => Some(SignalFailed::ExternalWorkflowExecutionNotFound),
            Delivery::NamespaceNotFound => Some(SignalFailed::NamespaceNotFound),
            Delivery::TooMany => Some(SignalFailed::SignalCountLimitExceeded),
        };
        self.state.transitions += 1;
        let event = match cause {
            None => Event::ExternalWorkflowExecutionSignaledEventAttributes(
                history::ExternalWorkflowExecutionSignaledEventAttributes {
                    initiated_event_id: initiated_id,
                    namespace: wanted.namespace,
                    namespace_id: wanted.namespace_id,
                    workflow_execution: wanted.workflow_execution,
                    control: wanted.control,
                },
            ),
            Some(cause) => Event::SignalExternalWorkflowExecutionFailedEventAttributes(
                history::SignalExternalWorkflowExecutionFailedEventAttributes {
                    cause: cause.into(),
                    workflow_task_completed_event_id: 0,
                    namespace: wanted.namespace,
                    namespace_id: wanted.namespace_id,
                    workflow_execution: wanted.workflow_execution,
                    initiated_event_id: initiated_id,
                    control: wanted.control,
                },
            ),
        };
        self.record(turn.now, event);
        self.schedule_task(turn.now);
    }

    pub fn cancel_delivered(&mut self, initiated_id: i64, delivery: Delivery, turn: Turn<'_>) {
        if !self.is_running() || !take(&mut self.state.cancels_out, initiated_id) {
            return;
        }
        let Some(wanted) = self.outgoing_cancel(initiated_id).cloned() else {
            return;
        };
        let cause = match delivery {
            Delivery::Done => None,
            Delivery::NotFound | Delivery::TooMany => Some(CancelFailed::ExternalWorkflowExecutionNotFound),
            Delivery::NamespaceNotFound => Some(CancelFailed::NamespaceNotFound),
        };
        self.state.transitions += 1;
        let event = match cause {
            None => Event::ExternalWorkflowExecutionCancelRequestedEventAttributes(
                history::ExternalWorkflowExecutionCancelRequestedEventAttributes {
                    initiated_event_id: initiated_id,
                    namespace: wanted.namespace,
                    namespace_id: wanted.namespace_id,
                    workflow_execution: wanted.workflow_execution,
                },
            ),
            Some(cause) => Event::RequestCancelExternalWorkflowExecutionFailedEventAttributes(
                history::RequestCancelExternalWorkflowExecutionFailedEventAttributes {
                    cause: cause.into(),
                    workflow_task_completed_event_id: 0,
                    namespace: wanted.namespace,
                    namespace_id: wanted.namespace_id,
                    workflow_execution: wanted.workflow_execution,
                    initiated_event_id: initiated_id,
                    control: wanted.control,
                },
            ),
        };
        self.record(turn.now, event);
        self.schedule_task(turn.now);
    }
}

fn take(pending: &mut Vec<i64>, id: i64) -> bool {
    let before = pending.len();
    pending.retain(|known| *known != id);
    before != pending.len()
}

//! What is too big to keep. The texts are Temporal's: people search for them.
//!
//! What comes from outside and is too big is refused. What a workflow's own code asks for cannot be: the code would ask for
//! it again and again, so its run is ended. An activity whose answer is too big has failed, for good.

use prost::Message as _;

use crate::commands::Bad;
use crate::limits::Limits;
use crate::refusal::Refusal;
use crate::words::Event;
use crate::words::command::command::Attributes;
use crate::words::common::{Memo, Payload, Payloads, SearchAttributes};
use crate::words::enums::WorkflowTaskFailedCause as Cause;
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{ApplicationFailureInfo, Failure, ServerFailureInfo};

/// How much is kept of each text of a failure that is too big.
const EXCERPT: usize = 16 * 1024;
/// How many causes of a failure are kept. Messages that are nested a hundred deep cannot be read again, and a failure is
/// kept within others.
const MOST_CAUSES: usize = 32;
/// What every client says beside a value, its encoding and its type, is free.
const FREE_METADATA: usize = 128;
/// What the server itself adds to the workflows of a schedule is not held against their owner.
const ADDED: [&str; 2] = ["TemporalScheduledStartTime", "TemporalScheduledById"];
const ADDED_BYTES: usize = 16 * 1024;

impl Limits {
    /// Refuses what somebody outside sends along with a request.
    pub fn check_input(&self, input: Option<&Payloads>) -> Result<(), Refusal> {
        self.check_bytes(input.map_or(0, Payloads::encoded_len))
    }

    pub(crate) fn check_memo(&self, memo: Option<&Memo>) -> Result<(), Refusal> {
        self.check_bytes(memo.map_or(0, Memo::encoded_len))
    }

    /// Refuses to be told to search by more than anybody would.
    pub fn check_search_attributes(&self, attributes: Option<&SearchAttributes>) -> Result<(), Refusal> {
        let Some(attributes) = attributes else {
            return Ok(());
        };
        let fields = &attributes.indexed_fields;
        if fields.len() > self.attributes.saturating_add(ADDED.len()) {
            return Err(Refusal::InvalidArgument(format!(
                "number of search attributes {} exceeds limit {}",
                fields.len(),
                self.attributes
            )));
        }
        let mut total = 0;
        for (name, value) in fields {
            let bytes = value_bytes(value);
            if bytes > self.most_of(name) {
                return Err(Refusal::InvalidArgument(format!(
                    "search attribute {name} value size {bytes} exceeds size limit {}",
                    self.most_of(name)
                )));
            }
            if !ADDED.contains(&name.as_str()) {
                total += name.len() + bytes;
            }
        }
        if total > self.attributes_bytes {
            return Err(Refusal::InvalidArgument(format!(
                "total size of search attributes {total} exceeds size limit {}",
                self.attributes_bytes
            )));
        }
        Ok(())
    }

    /// Whether a value is small enough to be searched by. An earlier version has kept larger ones.
    pub fn may_search(&self, name: &str, value: &Payload) -> bool {
        value_bytes(value) <= self.most_of(name)
    }

    fn most_of(&self, name: &str) -> usize {
        if ADDED.contains(&name) {
            ADDED_BYTES
        } else {
            self.attribute_bytes
        }
    }

    /// Refuses an update that is larger than what it may carry along.
    pub(crate) fn check_update(&self, request: &crate::words::update::Request) -> Result<(), Refusal> {
        let input = request.input.as_ref();
        self.check_input(input.and_then(|input| input.args.as_ref()))?;
        self.check_bytes(
            input
                .and_then(|input| input.header.as_ref())
                .map_or(0, prost::Message::encoded_len),
        )?;
        let meta = request.meta.as_ref();
        self.check_id("UpdateId", meta.map_or("", |meta| meta.update_id.as_str()))?;
        self.check_id("Identity", meta.map_or("", |meta| meta.identity.as_str()))?;
        self.check_id("Update Name", input.map_or("", |input| input.name.as_str()))
    }

    fn check_bytes(&self, bytes: usize) -> Result<(), Refusal> {
        if bytes > self.blob_bytes {
            return Err(Refusal::InvalidArgument(
                "Blob data size exceeds limit.".to_owned(),
            ));
        }
        Ok(())
    }

    pub(crate) fn check_command(&self, attributes: &Attributes) -> Result<(), Bad> {
        let input = |input: &Option<Payloads>| input.as_ref().map_or(0, Payloads::encoded_len);
        let memo = |memo: &Option<Memo>| memo.as_ref().map_or(0, Memo::encoded_len);
        let (bytes, cause, what) = match attributes {
            Attributes::ScheduleActivityTaskCommandAttributes(wanted) => (
                input(&wanted.input),
                Cause::BadScheduleActivityAttributes,
                "BadScheduleActivityAttributes: ScheduleActivityTaskCommandAttributes.Input",
            ),
            // The cause is the one that Temporal gives.
            Attributes::CompleteWorkflowExecutionCommandAttributes(wanted) => (
                input(&wanted.result),
                Cause::BadScheduleActivityAttributes,
                "BadScheduleActivityAttributes: CompleteWorkflowExecutionCommandAttributes.Result",
            ),
            Attributes::FailWorkflowExecutionCommandAttributes(wanted) => (
                wanted.failure.as_ref().map_or(0, Failure::encoded_len),
                Cause::BadFailWorkflowExecutionAttributes,
                "BadFailWorkflowExecutionAttributes: FailWorkflowExecutionCommandAttributes.Failure",
            ),
            Attributes::RecordMarkerCommandAttributes(wanted) => (
                wanted.details.values().map(Payloads::encoded_len).sum(),
                Cause::BadRecordMarkerAttributes,
                "BadRecordMarkerAttributes: RecordMarkerCommandAttributes.Details",
            ),
            Attributes::StartChildWorkflowExecutionCommandAttributes(wanted) => (
                input(&wanted.input).max(memo(&wanted.memo)),
                Cause::BadStartChildExecutionAttributes,
                "BadStartChildExecutionAttributes: StartChildWorkflowExecutionCommandAttributes. Input",
            ),
            Attributes::SignalExternalWorkflowExecutionCommandAttributes(wanted) => (
                input(&wanted.input),
                Cause::BadSignalWorkflowExecutionAttributes,
                "BadSignalWorkflowExecutionAttributes: SignalExternalWorkflowExecutionCommandAttributes.Input",
            ),
            Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(wanted) => (
                input(&wanted.input).max(memo(&wanted.memo)),
                Cause::BadContinueAsNewAttributes,
                "BadContinueAsNewAttributes: ContinueAsNewWorkflowExecutionCommandAttributes. Input",
            ),
            Attributes::ModifyWorkflowPropertiesCommandAttributes(wanted) => (
                memo(&wanted.upserted_memo),
                Cause::BadModifyWorkflowPropertiesAttributes,
                "BadModifyWorkflowPropertiesAttributes: ModifyWorkflowPropertiesCommandAttributes",
            ),
            _ => return Ok(()),
        };
        if bytes > self.blob_bytes {
            return Err(Bad::fatal(cause, format!("{what} exceeds size limit.")));
        }
        Ok(())
    }

    /// What a run with so long a history is ended for.
    pub(crate) fn check_history(&self, events: i64, bytes: i64) -> Result<(), &'static str> {
        if events > self.history_events {
            return Err("Workflow history count exceeds limit.");
        }
        if bytes > self.history_bytes {
            return Err("Workflow history size exceeds limit.");
        }
        Ok(())
    }

    /// The failure in place of something that an activity sent, if that is too big.
    pub(crate) fn instead_of(&self, sent: Option<&Payloads>, text: &str) -> Option<Failure> {
        let bytes = sent.map_or(0, Payloads::encoded_len);
        (bytes > self.blob_bytes).then(|| for_good(text))
    }

    /// Refuses names that nobody could have meant.
    pub fn check_id(&self, what: &str, id: &str) -> Result<(), Refusal> {
        if id.len() > self.id_length {
            return Err(Refusal::InvalidArgument(format!("{what} length exceeds limit.")));
        }
        Ok(())
    }

    /// A failure as it is kept.
    pub(crate) fn excerpt(&self, mut failure: Failure) -> Failure {
        make_shallow(&mut failure);
        if failure.encoded_len() <= self.blob_bytes {
            return failure;
        }
        let info = match failure.failure_info {
            Some(FailureInfo::ApplicationFailureInfo(info)) => {
                FailureInfo::ApplicationFailureInfo(ApplicationFailureInfo {
                    r#type: beginning(&info.r#type),
                    non_retryable: info.non_retryable,
                    ..Default::default()
                })
            }
            _ => FailureInfo::ServerFailureInfo(ServerFailureInfo::default()),
        };
        Failure {
            cause: Some(Box::new(Failure {
                message: beginning(&failure.message),
                source: beginning(&failure.source),
                stack_trace: beginning(&failure.stack_trace),
                failure_info: Some(info),
                ..Default::default()
            })),
            ..for_good("Failure exceeds size limit.")
        }
    }
}

/// Leaves out the causes of causes that are too many.
pub(crate) fn make_shallow(failure: &mut Failure) {
    let mut last = failure;
    for _ in 0..MOST_CAUSES {
        match &mut last.cause {
            Some(cause) => last = cause,
            None => return,
        }
    }
    if last.cause.take().is_some() {
        last.message
            .push_str(" (its cause was left out: too many causes)");
    }
}

/// The same for the failure that an event tells of, if it does.
pub(crate) fn make_event_shallow(event: &mut Event) {
    use crate::words::update::outcome::Value;
    let failure = match event {
        Event::WorkflowExecutionStartedEventAttributes(event) => event.continued_failure.as_mut(),
        Event::WorkflowExecutionFailedEventAttributes(event) => event.failure.as_mut(),
        Event::WorkflowExecutionContinuedAsNewEventAttributes(event) => event.failure.as_mut(),
        Event::WorkflowTaskFailedEventAttributes(event) => event.failure.as_mut(),
        Event::ActivityTaskStartedEventAttributes(event) => event.last_failure.as_mut(),
        Event::ActivityTaskFailedEventAttributes(event) => event.failure.as_mut(),
        Event::ActivityTaskTimedOutEventAttributes(event) => event.failure.as_mut(),
        Event::ChildWorkflowExecutionFailedEventAttributes(event) => event.failure.as_mut(),
        Event::MarkerRecordedEventAttributes(event) => event.failure.as_mut(),
        Event::WorkflowExecutionUpdateCompletedEventAttributes(event) => {
            match event.outcome.as_mut().and_then(|outcome| outcome.value.as_mut()) {
                Some(Value::Failure(failure)) => Some(failure),
                _ => None,
            }
        }
        _ => None,
    };
    if let Some(failure) = failure {
        make_shallow(failure);
    }
}

fn value_bytes(value: &Payload) -> usize {
    let beside: usize = value
        .metadata
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    value.data.len() + beside.saturating_sub(FREE_METADATA)
}

/// How much parts of a run hold, as far as it was counted. What is not known is counted when it is asked for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    pub(crate) memo: Option<usize>,
    pub(crate) buffered: Option<usize>,
}

/// A part of a memo.
pub(crate) fn memo_bytes(name: &str, value: &Payload) -> usize {
    name.len() + value.encoded_len()
}

impl crate::run::Run {
    /// What waits for the end of the workflow task that a worker has.
    pub(crate) fn buffered_bytes(&mut self) -> usize {
        let buffered = &self.state.buffered;
        let count = || buffered.iter().map(prost::Message::encoded_len).sum();
        *self.sizes.buffered.get_or_insert_with(count)
    }

    /// Refuses what would have to wait with too much else: all of that is written again with each change.
    pub(crate) fn check_buffer(&mut self, bytes: usize, limits: &Limits) -> Result<(), Refusal> {
        let buffered = self.buffered_bytes();
        if buffered > 0 && buffered.saturating_add(bytes) > limits.buffered_bytes {
            return Err(Refusal::ResourceExhausted(format!(
                "{buffered} bytes wait for the workflow task at hand to end: try again then"
            )));
        }
        Ok(())
    }

    /// Refuses what would make the run hold more than a run may, while it can still be refused.
    pub(crate) fn check_room(&mut self, bytes: usize, limits: &Limits) -> Result<(), Refusal> {
        self.check_buffer(bytes, limits)?;
        let more = self.buffered_bytes().saturating_add(bytes);
        let more = i64::try_from(more).unwrap_or(i64::MAX);
        let events = i64::try_from(self.state.buffered.len()).unwrap_or(i64::MAX);
        limits
            .check_history(
                self.last_event_id().saturating_add(events),
                self.state.history_bytes.saturating_add(more),
            )
            .map_err(|reason| Refusal::InvalidArgument(reason.to_owned()))
    }
}

fn for_good(text: &str) -> Failure {
    Failure {
        message: text.to_owned(),
        failure_info: Some(FailureInfo::ServerFailureInfo(ServerFailureInfo {
            non_retryable: true,
        })),
        ..Default::default()
    }
}

fn beginning(text: &str) -> String {
    let mut end = text.len().min(EXCERPT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

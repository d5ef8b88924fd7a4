//! What a workflow's code asks for: one event per command, in the order of the commands.
//!
//! The first command that makes no sense fails the whole workflow task; nothing of it is kept.

use std::collections::HashMap;

use crate::retry;
use crate::run::{Run, Turn};
use crate::size::memo_bytes;
use crate::state::{self, Outgoing};
use crate::time::{Nanos, duration, nanos};
use crate::words::command::Command;
use crate::words::command::command::Attributes;
use crate::words::enums::WorkflowTaskFailedCause as Cause;
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{Failure, ServerFailureInfo};
use crate::words::protocol::Message;
use crate::words::{Event, HistoryEvent, command, common, enums, execution, history, taskqueue};

/// Why a workflow task failed.
#[derive(Debug, Clone)]
pub(crate) struct Bad {
    pub(crate) cause: Cause,
    pub(crate) message: String,
    /// Asking again would not help: the run is ended.
    pub(crate) fatal: bool,
}

impl Bad {
    pub(crate) fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
            fatal: false,
        }
    }

    pub(crate) fn fatal(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            fatal: true,
            ..Self::new(cause, message)
        }
    }

    pub(crate) fn failure(self) -> Failure {
        Failure {
            message: self.message,
            failure_info: Some(FailureInfo::ServerFailureInfo(ServerFailureInfo::default())),
            ..Default::default()
        }
    }
}

type Done = Result<(), Bad>;

impl Run {
    /// Returns the activities that the worker wants to run itself.
    pub(crate) fn carry_out_commands(
        &mut self,
        commands: Vec<Command>,
        messages: Vec<Message>,
        completed_id: i64,
        eager: bool,
        turn: Turn<'_>,
    ) -> Result<Vec<i64>, Bad> {
        // Each becomes an event at most, and a run ends that has more. Before, not after the work.
        let most = usize::try_from(turn.limits.history_events).unwrap_or(usize::MAX);
        if commands.len().max(messages.len()) > most {
            return Err(Bad::fatal(
                Cause::UnhandledCommand,
                format!(
                    "UnhandledCommand: a workflow task may lead to at most {most} commands and messages."
                ),
            ));
        }
        let mut messages: Vec<Option<Message>> = messages.into_iter().map(Some).collect();
        // Found by their ids; the first of those that share one comes first.
        let mut places: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, message) in messages.iter().enumerate().rev() {
            let id = message
                .as_ref()
                .map_or(String::new(), |message| message.id.clone());
            places.entry(id).or_default().push(place);
        }
        let mut eager_activities = Vec::new();
        for command in commands {
            if !self.is_running() {
                break;
            }
            let metadata = command.user_metadata.clone();
            let groups = command.event_group_markers.clone();
            let before = self.events.len();
            let Some(attributes) = command.attributes else {
                return Err(Bad::new(
                    Cause::UnhandledCommand,
                    "UnhandledCommand: empty command",
                ));
            };
            if let Attributes::ProtocolMessageCommandAttributes(place) = &attributes {
                let found = places
                    .get_mut(&place.message_id)
                    .and_then(Vec::pop)
                    .and_then(|place| messages.get_mut(place))
                    .and_then(Option::take);
                if let Some(message) = found {
                    self.take_message(&message, turn)?;
                }
                continue;
            }
            let wants_eager = matches!(
                &attributes,
                Attributes::ScheduleActivityTaskCommandAttributes(wanted) if wanted.request_eager_execution
            );
            self.carry_out_one(attributes, completed_id, turn)?;
            if let Some(event) = self.events.get_mut(before) {
                event.user_metadata = metadata;
                event.event_group_markers = groups;
            }
            if wants_eager && eager {
                eager_activities.push(self.last_event_id());
            }
        }
        for message in messages.into_iter().flatten() {
            if self.is_running() {
                self.take_message(&message, turn)?;
            }
        }
        Ok(eager_activities)
    }

    fn carry_out_one(&mut self, attributes: Attributes, completed_id: i64, turn: Turn<'_>) -> Done {
        turn.limits.check_command(&attributes)?;
        match attributes {
            Attributes::ScheduleActivityTaskCommandAttributes(wanted) => {
                self.schedule_activity(wanted, completed_id, turn)
            }
            Attributes::RequestCancelActivityTaskCommandAttributes(wanted) => {
                self.cancel_activity(wanted.scheduled_event_id, completed_id, turn)
            }
            Attributes::StartTimerCommandAttributes(wanted) => self.start_timer(wanted, completed_id, turn),
            Attributes::CancelTimerCommandAttributes(wanted) => {
                self.cancel_timer(&wanted.timer_id, completed_id, turn)
            }
            Attributes::RecordMarkerCommandAttributes(wanted) => {
                if wanted.marker_name.is_empty() {
                    return Err(Bad::new(
                        Cause::BadRecordMarkerAttributes,
                        "BadRecordMarkerAttributes: MarkerName is not set on RecordMarkerCommand.",
                    ));
                }
                self.append(
                    turn.now,
                    Event::MarkerRecordedEventAttributes(history::MarkerRecordedEventAttributes {
                        marker_name: wanted.marker_name,
                        details: wanted.details,
                        workflow_task_completed_event_id: completed_id,
                        header: wanted.header,
                        failure: wanted.failure,
                    }),
                );
                Ok(())
            }
            Attributes::UpsertWorkflowSearchAttributesCommandAttributes(wanted) => {
                self.upsert_search_attributes(wanted, completed_id, turn)
            }
            Attributes::ModifyWorkflowPropertiesCommandAttributes(wanted) => {
                self.modify_memo(wanted, completed_id, turn)
            }
            Attributes::StartChildWorkflowExecutionCommandAttributes(wanted) => {
                self.initiate_child(wanted, completed_id, turn)
            }
            Attributes::SignalExternalWorkflowExecutionCommandAttributes(wanted) => {
                self.initiate_signal(wanted, completed_id, turn)
            }
            Attributes::RequestCancelExternalWorkflowExecutionCommandAttributes(wanted) => {
                self.initiate_cancel(wanted, completed_id, turn)
            }
            Attributes::CompleteWorkflowExecutionCommandAttributes(wanted) => {
                self.check_nothing_unhandled()?;
                self.complete(wanted.result, completed_id, turn);
                Ok(())
            }
            Attributes::FailWorkflowExecutionCommandAttributes(wanted) => {
                self.check_nothing_unhandled()?;
                let Some(failure) = wanted.failure else {
                    return Err(Bad::new(
                        Cause::BadFailWorkflowExecutionAttributes,
                        "BadFailWorkflowExecutionAttributes: Failure is not set on FailWorkflowExecutionCommand.",
                    ));
                };
                self.fail(failure, completed_id, turn);
                Ok(())
            }
            Attributes::CancelWorkflowExecutionCommandAttributes(wanted) => {
                self.check_nothing_unhandled()?;
                self.cancel(wanted.details, completed_id, turn);
                Ok(())
            }
            Attributes::ContinueAsNewWorkflowExecutionCommandAttributes(wanted) => {
                // Updates that it has not seen do not hold it up: the next run is asked in its place.
                self.check_nothing_buffered()?;
                self.continue_as_new(wanted, completed_id, turn)
            }
            Attributes::ProtocolMessageCommandAttributes(_) => Ok(()),
            Attributes::ScheduleNexusOperationCommandAttributes(_)
            | Attributes::RequestCancelNexusOperationCommandAttributes(_) => Err(Bad::new(
                Cause::FeatureDisabled,
                "FeatureDisabled: Nexus operations are not supported by this server",
            )),
        }
    }

    fn check_nothing_buffered(&self) -> Done {
        if self.had_buffered {
            return Err(Bad::new(Cause::UnhandledCommand, "UnhandledCommand"));
        }
        Ok(())
    }

    /// A workflow must not end over something that it was not told about.
    fn check_nothing_unhandled(&self) -> Done {
        self.check_nothing_buffered()?;
        if self.registry.has_unsent() {
            return Err(Bad::new(Cause::UnhandledCommand, "UnhandledCommand"));
        }
        Ok(())
    }

    fn schedule_activity(
        &mut self,
        wanted: command::ScheduleActivityTaskCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        let kind = wanted
            .activity_type
            .as_ref()
            .map_or(String::new(), |kind| kind.name.clone());
        let id = wanted.activity_id.clone();
        let bad = |text: &str| {
            Err(Bad::new(
                Cause::BadScheduleActivityAttributes,
                format!("BadScheduleActivityAttributes: {text} ActivityId={id} ActivityType={kind}"),
            ))
        };
        if id.is_empty() {
            return bad("ActivityId is not set on ScheduleActivityTaskCommand.");
        }
        if kind.is_empty() {
            return bad("ActivityType is not set on ScheduleActivityTaskCommand.");
        }
        if self
            .state
            .activities
            .values()
            .any(|activity| activity.activity_id == id)
        {
            return Err(Bad::new(
                Cause::ScheduleActivityDuplicateId,
                "ScheduleActivityDuplicateId",
            ));
        }
        if self.state.activities.len() >= turn.limits.pending_activities {
            return Err(Bad::new(
                Cause::PendingActivitiesLimitExceeded,
                format!(
                    "PendingActivitiesLimitExceeded: the number of pending activities, {}, has reached the per-workflow \
                     limit of {}",
                    self.state.activities.len(),
                    turn.limits.pending_activities
                ),
            ));
        }
        let policy = retry::with_defaults(wanted.retry_policy.as_ref());
        if let Err(text) = retry::check(&policy) {
            return bad(&text);
        }
        let Some(times) = ActivityTimes::resolve(&wanted, self.run_timeout()) else {
            return bad(
                "A valid StartToClose or ScheduleToCloseTimeout is not set on ScheduleActivityTaskCommand.",
            );
        };
        let task_queue = self.queue_or_own(wanted.task_queue);
        let scheduled_id = self.append(
            turn.now,
            Event::ActivityTaskScheduledEventAttributes(history::ActivityTaskScheduledEventAttributes {
                activity_id: wanted.activity_id.clone(),
                activity_type: wanted.activity_type,
                task_queue: Some(task_queue),
                header: wanted.header,
                input: wanted.input,
                schedule_to_close_timeout: Some(duration(times.schedule_to_close)),
                schedule_to_start_timeout: Some(duration(times.schedule_to_start)),
                start_to_close_timeout: Some(duration(times.start_to_close)),
                heartbeat_timeout: Some(duration(times.heartbeat)),
                workflow_task_completed_event_id: completed_id,
                retry_policy: Some(policy),
                priority: wanted.priority.or_else(|| self.state.priority.clone()),
                ..Default::default()
            }),
        );
        let stamp = self.next_stamp();
        let activity = state::Activity {
            scheduled_id,
            activity_id: wanted.activity_id,
            scheduled_at: turn.now,
            attempt: 1,
            due_at: turn.now,
            stamp,
            dispatched: true,
            ..Default::default()
        };
        self.effects.extend(self.activity_effect(&activity));
        self.state.activities.insert(scheduled_id, activity);
        Ok(())
    }

    fn start_timer(
        &mut self,
        wanted: command::StartTimerCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        if wanted.timer_id.is_empty() {
            return Err(Bad::new(
                Cause::BadStartTimerAttributes,
                "BadStartTimerAttributes: TimerId is not set on StartTimerCommand.",
            ));
        }
        let length = nanos(wanted.start_to_fire_timeout.as_ref());
        if length < 0 {
            return Err(Bad::new(
                Cause::BadStartTimerAttributes,
                format!(
                    "BadStartTimerAttributes: An invalid StartToFireTimeout is set on StartTimerCommand. TimerId={}",
                    wanted.timer_id
                ),
            ));
        }
        if self.state.timers.contains_key(&wanted.timer_id) {
            return Err(Bad::new(Cause::StartTimerDuplicateId, "StartTimerDuplicateId"));
        }
        let started_id = self.append(
            turn.now,
            Event::TimerStartedEventAttributes(history::TimerStartedEventAttributes {
                timer_id: wanted.timer_id.clone(),
                start_to_fire_timeout: wanted.start_to_fire_timeout,
                workflow_task_completed_event_id: completed_id,
            }),
        );
        self.state.timers.insert(
            wanted.timer_id,
            state::Timer {
                started_id,
                fire_at: turn.now.saturating_add(length),
            },
        );
        Ok(())
    }

    fn cancel_timer(&mut self, timer_id: &str, completed_id: i64, turn: Turn<'_>) -> Done {
        let pending = self.state.timers.remove(timer_id);
        // One that has fired, which its workflow does not know yet, has not fired.
        let fired = |event: &HistoryEvent| {
            matches!(
                &event.attributes,
                Some(Event::TimerFiredEventAttributes(fired)) if fired.timer_id == timer_id
            )
        };
        let unseen = match pending {
            Some(_) => None,
            None => self.state.buffered.iter().position(fired),
        };
        let started_id = match (pending, unseen) {
            (Some(timer), _) => timer.started_id,
            (None, Some(at)) => match self.unbuffer(at).attributes {
                Some(Event::TimerFiredEventAttributes(fired)) => fired.started_event_id,
                _ => 0,
            },
            (None, None) => {
                return Err(Bad::new(
                    Cause::BadCancelTimerAttributes,
                    format!("BadCancelTimerAttributes: Timer {timer_id} not found"),
                ));
            }
        };
        // What it was not told about may just have been that. What this very task brings is not in the way.
        self.had_buffered &= !self.state.buffered.is_empty();
        self.append(
            turn.now,
            Event::TimerCanceledEventAttributes(history::TimerCanceledEventAttributes {
                timer_id: timer_id.to_owned(),
                started_event_id: started_id,
                workflow_task_completed_event_id: completed_id,
                identity: self.answering.clone(),
            }),
        );
        Ok(())
    }

    fn upsert_search_attributes(
        &mut self,
        wanted: command::UpsertWorkflowSearchAttributesCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        let Some(fields) = wanted
            .search_attributes
            .filter(|attributes| !attributes.indexed_fields.is_empty())
        else {
            return Err(Bad::new(
                Cause::BadSearchAttributes,
                "BadSearchAttributes: IndexedFields is not set on UpsertWorkflowSearchAttributesCommand.",
            ));
        };
        if let Err(refusal) = turn.limits.check_search_attributes(Some(&self.merged(&fields))) {
            return Err(Bad::new(
                Cause::BadSearchAttributes,
                format!("BadSearchAttributes: {refusal}"),
            ));
        }
        self.append(
            turn.now,
            Event::UpsertWorkflowSearchAttributesEventAttributes(
                history::UpsertWorkflowSearchAttributesEventAttributes {
                    workflow_task_completed_event_id: completed_id,
                    search_attributes: Some(fields.clone()),
                },
            ),
        );
        self.merge_search_attributes(fields);
        Ok(())
    }

    /// What it would be searched by with these.
    fn merged(&self, fields: &common::SearchAttributes) -> common::SearchAttributes {
        let mut all = self.state.search_attributes.clone().unwrap_or_default();
        merge(&mut all, fields.clone());
        all
    }

    pub(crate) fn merge_search_attributes(&mut self, fields: common::SearchAttributes) {
        self.search_changes += 1;
        merge(self.state.search_attributes.get_or_insert_default(), fields);
    }

    fn modify_memo(
        &mut self,
        wanted: command::ModifyWorkflowPropertiesCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        let Some(memo) = wanted.upserted_memo else {
            return Err(Bad::new(
                Cause::BadModifyWorkflowPropertiesAttributes,
                "BadModifyWorkflowPropertiesAttributes: ModifyWorkflowPropertiesCommandAttributes is not set",
            ));
        };
        let bytes = self.merged_memo_bytes(&memo);
        if bytes > turn.limits.blob_bytes {
            return Err(Bad::fatal(
                Cause::BadModifyWorkflowPropertiesAttributes,
                "BadModifyWorkflowPropertiesAttributes: ModifyWorkflowPropertiesCommandAttributes exceeds size limit.",
            ));
        }
        self.append(
            turn.now,
            Event::WorkflowPropertiesModifiedEventAttributes(
                history::WorkflowPropertiesModifiedEventAttributes {
                    workflow_task_completed_event_id: completed_id,
                    upserted_memo: Some(memo.clone()),
                },
            ),
        );
        self.merge_memo(memo);
        Ok(())
    }

    /// What the memo would hold with these. All of it is counted once, then what changes.
    fn merged_memo_bytes(&mut self, memo: &common::Memo) -> usize {
        let known = self.state.memo.get_or_insert_default();
        let all = |memo: &common::Memo| {
            memo.fields
                .iter()
                .map(|(name, value)| memo_bytes(name, value))
                .sum()
        };
        let mut bytes: usize = *self.sizes.memo.get_or_insert_with(|| all(known));
        for (name, value) in &memo.fields {
            let before = known.fields.get(name).map_or(0, |value| memo_bytes(name, value));
            let after = if is_null(value) {
                0
            } else {
                memo_bytes(name, value)
            };
            bytes = (bytes + after).saturating_sub(before);
        }
        bytes
    }

    pub(crate) fn merge_memo(&mut self, memo: common::Memo) {
        self.sizes.memo = Some(self.merged_memo_bytes(&memo));
        let known = &mut self.state.memo.get_or_insert_default().fields;
        for (name, value) in memo.fields {
            if is_null(&value) {
                known.remove(&name);
            } else {
                known.insert(name, value);
            }
        }
    }

    fn initiate_signal(
        &mut self,
        wanted: command::SignalExternalWorkflowExecutionCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        let target = wanted.execution.unwrap_or_default();
        if target.workflow_id.is_empty() || wanted.signal_name.is_empty() {
            return Err(Bad::new(
                Cause::BadSignalWorkflowExecutionAttributes,
                "BadSignalWorkflowExecutionAttributes: WorkflowId or SignalName is not set on \
                 SignalExternalWorkflowExecutionCommand.",
            ));
        }
        if self.state.signals_out.len() >= turn.limits.pending_signals {
            return Err(Bad::new(
                Cause::PendingSignalsLimitExceeded,
                "PendingSignalsLimitExceeded",
            ));
        }
        let namespace = self.namespace_or_own(wanted.namespace);
        let id = self.append(
            turn.now,
            Event::SignalExternalWorkflowExecutionInitiatedEventAttributes(
                history::SignalExternalWorkflowExecutionInitiatedEventAttributes {
                    workflow_task_completed_event_id: completed_id,
                    namespace_id: namespace.clone(),
                    namespace,
                    workflow_execution: Some(target),
                    signal_name: wanted.signal_name,
                    input: wanted.input,
                    control: wanted.control,
                    child_workflow_only: wanted.child_workflow_only,
                    header: wanted.header,
                },
            ),
        );
        self.state.signals_out.push(id);
        self.post(Outgoing::Signal(id));
        Ok(())
    }

    fn initiate_cancel(
        &mut self,
        wanted: command::RequestCancelExternalWorkflowExecutionCommandAttributes,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Done {
        if wanted.workflow_id.is_empty() {
            return Err(Bad::new(
                Cause::BadRequestCancelExternalWorkflowExecutionAttributes,
                "BadRequestCancelExternalWorkflowExecutionAttributes: WorkflowId is not set on \
                 RequestCancelExternalWorkflowExecutionCommand.",
            ));
        }
        if self.state.cancels_out.len() >= turn.limits.pending_cancels {
            return Err(Bad::new(
                Cause::PendingRequestCancelLimitExceeded,
                "PendingRequestCancelLimitExceeded",
            ));
        }
        let namespace = self.namespace_or_own(wanted.namespace);
        let id = self.append(
            turn.now,
            Event::RequestCancelExternalWorkflowExecutionInitiatedEventAttributes(
                history::RequestCancelExternalWorkflowExecutionInitiatedEventAttributes {
                    workflow_task_completed_event_id: completed_id,
                    namespace_id: namespace.clone(),
                    namespace,
                    workflow_execution: Some(execution(&wanted.workflow_id, &wanted.run_id)),
                    control: wanted.control,
                    child_workflow_only: wanted.child_workflow_only,
                    reason: wanted.reason,
                },
            ),
        );
        self.state.cancels_out.push(id);
        self.post(Outgoing::Cancel(id));
        Ok(())
    }

    pub(crate) fn namespace_or_own(&self, namespace: String) -> String {
        if namespace.is_empty() {
            self.state.namespace.clone()
        } else {
            namespace
        }
    }

    pub(crate) fn queue_or_own(&self, wanted: Option<taskqueue::TaskQueue>) -> taskqueue::TaskQueue {
        let name = wanted.map_or(String::new(), |queue| queue.name);
        taskqueue::TaskQueue {
            name: if name.is_empty() {
                self.task_queue().to_owned()
            } else {
                name
            },
            kind: enums::TaskQueueKind::Normal.into(),
            normal_name: String::new(),
        }
    }
}

/// A null takes an attribute away.
fn merge(known: &mut common::SearchAttributes, fields: common::SearchAttributes) {
    for (name, value) in fields.indexed_fields {
        if is_null(&value) {
            known.indexed_fields.remove(&name);
        } else {
            known.indexed_fields.insert(name, value);
        }
    }
}

/// How JSON, and nothing at all, spell "no value".
fn is_null(value: &common::Payload) -> bool {
    let encoding = value.metadata.get("encoding").map_or(&[][..], Vec::as_slice);
    encoding == b"binary/null" || value.data.is_empty() || (value.data == b"null" || value.data == b"[]")
}

struct ActivityTimes {
    schedule_to_close: Nanos,
    schedule_to_start: Nanos,
    start_to_close: Nanos,
    heartbeat: Nanos,
}

impl ActivityTimes {
    /// Fills in the limits that were left out. `None` if they say nothing about how long it may run.
    fn resolve(wanted: &command::ScheduleActivityTaskCommandAttributes, run: Nanos) -> Option<Self> {
        let schedule_to_close = nanos(wanted.schedule_to_close_timeout.as_ref());
        let schedule_to_start = nanos(wanted.schedule_to_start_timeout.as_ref());
        let start_to_close = nanos(wanted.start_to_close_timeout.as_ref());
        let at_most = |length: Nanos, limit: Nanos| match (length, limit) {
            (0, limit) => limit,
            (length, 0) => length,
            (length, limit) => length.min(limit),
        };
        let mut times = if schedule_to_close > 0 {
            Self {
                schedule_to_close,
                schedule_to_start: at_most(schedule_to_start, schedule_to_close),
                start_to_close: at_most(start_to_close, schedule_to_close),
                heartbeat: 0,
            }
        } else if start_to_close > 0 {
            Self {
                schedule_to_close: run,
                schedule_to_start: if schedule_to_start > 0 {
                    schedule_to_start
                } else {
                    run
                },
                start_to_close,
                heartbeat: 0,
            }
        } else {
            return None;
        };
        if run > 0 {
            times.schedule_to_close = at_most(times.schedule_to_close, run);
            times.schedule_to_start = at_most(times.schedule_to_start, run);
            times.start_to_close = at_most(times.start_to_close, run);
        }
        let heartbeat = nanos(wanted.heartbeat_timeout.as_ref());
        times.heartbeat = if heartbeat > 0 {
            at_most(heartbeat, times.start_to_close)
        } else {
            0
        };
        Some(times)
    }
}

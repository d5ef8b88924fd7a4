//! Activities: work outside of the workflow's code, tried until it succeeds or must not be tried again.
//!
//! Attempts are not events. `ActivityTaskStarted` is written together with the end, so that a history stays small however
//! often something was tried.

use prost::Message;

use crate::commands::Bad;
use crate::refusal::Refusal;
use crate::retry::{self, timeout_name};
use crate::run::{Effect, Run, Turn, ended_activity};
use crate::state::Activity;
use crate::task::TaskToken;
use crate::time::{Nanos, after, earlier, is_due, nanos};
use crate::words::enums::{RetryState, TimeoutType, WorkflowTaskFailedCause as Cause};
use crate::words::failure::failure::FailureInfo;
use crate::words::failure::{Failure, TimeoutFailureInfo};
use crate::words::{Event, common, history, server_failure};

/// Signs of life that come faster are not written down, each with all of the run's state.
const FRESH: Nanos = crate::time::seconds(1);

/// An activity in the hands of a worker.
#[derive(Debug, Clone)]
pub struct ActivityStart {
    pub token: TaskToken,
    pub scheduled: history::ActivityTaskScheduledEventAttributes,
    pub scheduled_at: Nanos,
    pub attempt_scheduled_at: Nanos,
    pub started_at: Nanos,
    pub attempt: i32,
    pub heartbeat: Option<common::Payloads>,
}

/// How an attempt ended, as its worker says.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "made once per attempt and taken apart at once"
)]
pub enum ActivityFinish {
    Completed(Option<common::Payloads>),
    Failed {
        failure: Failure,
        heartbeat: Option<common::Payloads>,
    },
    Canceled(Option<common::Payloads>),
}

impl ActivityFinish {
    /// About what its event will have.
    fn bytes(&self) -> usize {
        match self {
            Self::Completed(sent) | Self::Canceled(sent) => sent.as_ref().map_or(0, Message::encoded_len),
            Self::Failed { failure, .. } => failure.encoded_len(),
        }
    }
}

/// What a worker learns when it says that it is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Heartbeat {
    pub cancel_requested: bool,
    pub paused: bool,
    pub reset: bool,
}

impl Run {
    pub(crate) fn activity_effect(&self, activity: &Activity) -> Option<Effect> {
        let scheduled = self.scheduled_activity(activity.scheduled_id)?;
        Some(Effect::ActivityTask {
            queue: scheduled.task_queue.as_ref()?.name.clone(),
            scheduled_id: activity.scheduled_id,
            stamp: activity.stamp,
        })
    }

    pub(crate) fn scheduled_activity(
        &self,
        scheduled_id: i64,
    ) -> Option<&history::ActivityTaskScheduledEventAttributes> {
        match self.attributes(scheduled_id)? {
            Event::ActivityTaskScheduledEventAttributes(scheduled) => Some(scheduled),
            _ => None,
        }
    }

    /// The queue that an activity was put up on.
    pub fn activity_queue(&self, scheduled_id: i64) -> Option<&str> {
        let queue = self.scheduled_activity(scheduled_id)?.task_queue.as_ref()?;
        Some(&queue.name)
    }

    /// Whether a token names an activity on this queue, whoever holds it by now.
    pub fn names_one_on(&self, token: &TaskToken, queue: &str) -> bool {
        let mut named = self.state.activities.values().filter(|activity| {
            if token.scheduled_id == 0 {
                activity.activity_id == token.activity_id
            } else {
                activity.scheduled_id == token.scheduled_id
            }
        });
        named.any(|activity| self.activity_queue(activity.scheduled_id) == Some(queue))
    }

    /// A worker takes the activity. Refused if it was taken, has ended, or is to be tried later.
    pub fn start_activity(
        &mut self,
        scheduled_id: i64,
        activity_stamp: i64,
        identity: &str,
        turn: Turn<'_>,
    ) -> Result<ActivityStart, Refusal> {
        let gone = || Refusal::NotFound("Activity task not found.".to_owned());
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        let scheduled = self.scheduled_activity(scheduled_id).cloned().ok_or_else(gone)?;
        let activity = self
            .state
            .activities
            .get_mut(&scheduled_id)
            .filter(|activity| {
                activity.stamp == activity_stamp && activity.started_at == 0 && !activity.paused
            })
            .ok_or_else(gone)?;
        activity.started_at = turn.now;
        activity.heartbeat_at = 0;
        identity.clone_into(&mut activity.identity);
        activity.request_id = format!("{}:{scheduled_id}:{}", self.state.run_id, activity.attempt);
        let started = ActivityStart {
            token: TaskToken {
                namespace: self.state.namespace.clone(),
                workflow_id: self.state.workflow_id.clone(),
                run_id: self.state.run_id.clone(),
                scheduled_id,
                attempt: activity.attempt,
                stamp: activity.stamp,
                activity_id: activity.activity_id.clone(),
                ..Default::default()
            },
            scheduled,
            scheduled_at: activity.scheduled_at,
            attempt_scheduled_at: activity.due_at,
            started_at: turn.now,
            attempt: activity.attempt,
            heartbeat: activity.heartbeat.clone(),
        };
        self.state.transitions += 1;
        self.effects.retain(
            |effect| !matches!(effect, Effect::ActivityTask { scheduled_id: id, .. } if *id == scheduled_id),
        );
        Ok(started)
    }

    /// The activity that a worker holds, by its token; or by its id alone, for whoever answers in a worker's place.
    fn held(&mut self, token: &TaskToken) -> Result<&mut Activity, Refusal> {
        if !self.is_running() {
            return Err(Refusal::completed());
        }
        let by_id = token.scheduled_id == 0;
        self.state
            .activities
            .values_mut()
            .find(|activity| {
                if by_id {
                    activity.activity_id == token.activity_id && activity.started_at != 0
                } else {
                    activity.scheduled_id == token.scheduled_id
                        && activity.stamp == token.stamp
                        && activity.attempt == token.attempt
                        && activity.started_at != 0
                }
            })
            .ok_or_else(|| {
                Refusal::NotFound(
                    "invalid activityID or activity already timed out or invoking workflow is completed"
                        .to_owned(),
                )
            })
    }

    /// What to answer to a sign of life that says nothing, and that need not be written down: the last one is so fresh that
    /// nobody could tell the difference.
    pub fn fresh_heartbeat(&self, token: &TaskToken, now: Nanos) -> Option<Heartbeat> {
        let activity = self.state.activities.get(&token.scheduled_id)?;
        let is_held = activity.stamp == token.stamp && activity.attempt == token.attempt;
        let limit = match self.attributes(activity.scheduled_id) {
            Some(Event::ActivityTaskScheduledEventAttributes(scheduled)) => {
                nanos(scheduled.heartbeat_timeout.as_ref())
            }
            _ => return None,
        };
        let fresh = if limit == 0 { FRESH } else { FRESH.min(limit / 8) };
        let is_fresh = activity.heartbeat_at != 0 && now < activity.heartbeat_at.saturating_add(fresh);
        // What was said before stays as it is, so there must be nothing that silence would take back.
        (self.is_running() && is_held && is_fresh && activity.started_at != 0 && activity.heartbeat.is_none())
            .then_some(Heartbeat {
                cancel_requested: activity.cancel_requested_id != 0,
                paused: activity.paused,
                reset: activity.reset,
            })
    }

    pub fn heartbeat(
        &mut self,
        token: &TaskToken,
        details: Option<common::Payloads>,
        turn: Turn<'_>,
    ) -> Result<Heartbeat, Refusal> {
        let scheduled_id = self.held(token)?.scheduled_id;
        let others = self.state.activities.values();
        let others = others.filter(|other| other.scheduled_id != scheduled_id);
        let said: usize = others
            .filter_map(|other| other.heartbeat.as_ref())
            .map(Message::encoded_len)
            .sum();
        let bytes = details.as_ref().map_or(0, Message::encoded_len);
        if bytes > 0 && said.saturating_add(bytes) > turn.limits.completion_bytes {
            return Err(Refusal::ResourceExhausted(format!(
                "the activities of this workflow have said {said} bytes in their heartbeats: say less"
            )));
        }
        let activity = self.held(token)?;
        if let Some(failure) = turn
            .limits
            .instead_of(details.as_ref(), "Heartbeat details exceed size limit.")
        {
            let scheduled_id = activity.scheduled_id;
            self.state.transitions += 1;
            self.activity_failed(scheduled_id, failure, "", turn);
            return Ok(Heartbeat {
                cancel_requested: true,
                ..Default::default()
            });
        }
        activity.heartbeat_at = turn.now;
        activity.heartbeat = details;
        Ok(Heartbeat {
            cancel_requested: activity.cancel_requested_id != 0,
            paused: activity.paused,
            reset: activity.reset,
        })
    }

    pub fn finish_activity(
        &mut self,
        token: &TaskToken,
        finish: ActivityFinish,
        identity: &str,
        turn: Turn<'_>,
    ) -> Result<(), Refusal> {
        let activity = self.held(token)?.clone();
        self.check_buffer(finish.bytes(), turn.limits)?;
        self.state.transitions += 1;
        let scheduled_id = activity.scheduled_id;
        let instead = match &finish {
            ActivityFinish::Completed(result) => turn
                .limits
                .instead_of(result.as_ref(), "Complete result exceeds size limit."),
            ActivityFinish::Canceled(details) => turn
                .limits
                .instead_of(details.as_ref(), "Cancel details exceed size limit."),
            ActivityFinish::Failed { heartbeat, .. } => turn
                .limits
                .instead_of(heartbeat.as_ref(), "Heartbeat details exceed size limit."),
        };
        if let Some(failure) = instead {
            self.activity_failed(scheduled_id, failure, identity, turn);
            return Ok(());
        }
        match finish {
            ActivityFinish::Completed(result) => {
                self.write_activity_start(&activity);
                self.end_activity(
                    scheduled_id,
                    Event::ActivityTaskCompletedEventAttributes(
                        history::ActivityTaskCompletedEventAttributes {
                            result,
                            scheduled_event_id: scheduled_id,
                            started_event_id: self.next_event_id() - 1,
                            identity: identity.to_owned(),
                            ..Default::default()
                        },
                    ),
                    turn,
                );
            }
            ActivityFinish::Canceled(details) => {
                if activity.cancel_requested_id == 0 {
                    self.state.transitions -= 1;
                    return Err(Refusal::InvalidArgument(
                        "ActivityTaskCanceled is not allowed: cancellation was not requested".to_owned(),
                    ));
                }
                self.write_activity_start(&activity);
                self.end_activity(
                    scheduled_id,
                    Event::ActivityTaskCanceledEventAttributes(
                        history::ActivityTaskCanceledEventAttributes {
                            details,
                            latest_cancel_requested_event_id: activity.cancel_requested_id,
                            scheduled_event_id: scheduled_id,
                            started_event_id: self.next_event_id() - 1,
                            identity: identity.to_owned(),
                            ..Default::default()
                        },
                    ),
                    turn,
                );
            }
            ActivityFinish::Failed { failure, heartbeat } => {
                if heartbeat.is_some()
                    && let Some(activity) = self.state.activities.get_mut(&scheduled_id)
                {
                    activity.heartbeat = heartbeat;
                }
                self.activity_failed(scheduled_id, turn.limits.excerpt(failure), identity, turn);
            }
        }
        // Whether or not anybody takes its workflow tasks.
        self.is_too_long(turn);
        Ok(())
    }

    fn activity_failed(&mut self, scheduled_id: i64, failure: Failure, identity: &str, turn: Turn<'_>) {
        let Err(retry_state) = self.retry_activity(scheduled_id, &failure, turn) else {
            return;
        };
        let Some(activity) = self.state.activities.get(&scheduled_id).cloned() else {
            return;
        };
        self.write_activity_start(&activity);
        self.end_activity(
            scheduled_id,
            Event::ActivityTaskFailedEventAttributes(history::ActivityTaskFailedEventAttributes {
                failure: Some(failure),
                scheduled_event_id: scheduled_id,
                started_event_id: self.next_event_id() - 1,
                identity: identity.to_owned(),
                retry_state: retry_state.into(),
                ..Default::default()
            }),
            turn,
        );
    }

    /// Puts the activity up for another attempt, or says why not.
    fn retry_activity(
        &mut self,
        scheduled_id: i64,
        failure: &Failure,
        turn: Turn<'_>,
    ) -> Result<(), RetryState> {
        let Some(scheduled) = self.scheduled_activity(scheduled_id) else {
            return Err(RetryState::InternalServerError);
        };
        let policy = retry::with_defaults(scheduled.retry_policy.as_ref());
        let schedule_to_close = nanos(scheduled.schedule_to_close_timeout.as_ref());
        let stamp = self.next_stamp();
        let Some(activity) = self.state.activities.get_mut(&scheduled_id) else {
            return Err(RetryState::InternalServerError);
        };
        if activity.cancel_requested_id != 0 {
            return Err(RetryState::CancelRequested);
        }
        let expires_at = after(activity.scheduled_at, schedule_to_close);
        let wait = retry::decide(&policy, activity.attempt, failure, turn.now, expires_at)?;
        activity.attempt = if activity.reset { 1 } else { activity.attempt + 1 };
        if activity.reset && activity.reset_heartbeat {
            activity.heartbeat = None;
        }
        activity.reset = false;
        activity.reset_heartbeat = false;
        activity.due_at = turn.now.saturating_add(wait);
        activity.started_at = 0;
        activity.attempt_ended_at = turn.now;
        activity.stamp = stamp;
        activity.last_failure = Some(failure.clone());
        activity.dispatched = false;
        self.dispatch_due_activities(turn.now);
        Ok(())
    }

    /// Puts on their queues what may be tried again now.
    pub(crate) fn dispatch_due_activities(&mut self, now: Nanos) {
        let due: Vec<_> = self
            .state
            .activities
            .values()
            .filter(|activity| {
                !activity.dispatched && activity.started_at == 0 && !activity.paused && activity.due_at <= now
            })
            .map(|activity| activity.scheduled_id)
            .collect();
        for id in due {
            if let Some(activity) = self.state.activities.get_mut(&id) {
                activity.dispatched = true;
                let activity = activity.clone();
                self.effects.extend(self.activity_effect(&activity));
            }
        }
    }

    fn write_activity_start(&mut self, activity: &Activity) {
        if activity.started_at == 0 {
            return;
        }
        self.record(
            activity.started_at,
            Event::ActivityTaskStartedEventAttributes(history::ActivityTaskStartedEventAttributes {
                scheduled_event_id: activity.scheduled_id,
                identity: activity.identity.clone(),
                request_id: activity.request_id.clone(),
                attempt: activity.attempt,
                last_failure: activity.last_failure.clone(),
                ..Default::default()
            }),
        );
    }

    /// If the two events are buffered, the second is pointed to the first when they are flushed.
    fn end_activity(&mut self, scheduled_id: i64, event: Event, turn: Turn<'_>) {
        self.state.activities.remove(&scheduled_id);
        self.record(turn.now, event);
        self.schedule_task(turn.now);
    }

    /// The workflow asks for an activity to be cancelled. One that nobody holds is cancelled at once.
    pub(crate) fn cancel_activity(
        &mut self,
        scheduled_id: i64,
        completed_id: i64,
        turn: Turn<'_>,
    ) -> Result<(), Bad> {
        let known = self.state.activities.get(&scheduled_id).cloned();
        let ended = self
            .state
            .buffered
            .iter()
            .any(|event| event.attributes.as_ref().and_then(ended_activity) == Some(scheduled_id));
        if known.is_none() && !ended {
            return Err(Bad::new(
                Cause::BadRequestCancelActivityAttributes,
                "BadRequestCancelActivityAttributes: invalid history builder state for action",
            ));
        }
        if known
            .as_ref()
            .is_some_and(|activity| activity.cancel_requested_id != 0)
        {
            return Err(Bad::new(
                Cause::BadRequestCancelActivityAttributes,
                "BadRequestCancelActivityAttributes: cancellation was requested already",
            ));
        }
        let requested_id = self.append(
            turn.now,
            Event::ActivityTaskCancelRequestedEventAttributes(
                history::ActivityTaskCancelRequestedEventAttributes {
                    scheduled_event_id: scheduled_id,
                    workflow_task_completed_event_id: completed_id,
                },
            ),
        );
        let Some(activity) = self.state.activities.get_mut(&scheduled_id) else {
            return Ok(());
        };
        activity.cancel_requested_id = requested_id;
        if activity.started_at == 0 {
            self.end_activity(
                scheduled_id,
                Event::ActivityTaskCanceledEventAttributes(history::ActivityTaskCanceledEventAttributes {
                    latest_cancel_requested_event_id: requested_id,
                    scheduled_event_id: scheduled_id,
                    ..Default::default()
                }),
                turn,
            );
        }
        Ok(())
    }

    /// When something about this activity becomes due: a limit, or the next attempt.
    pub(crate) fn activity_deadline(&self, activity: &Activity) -> Nanos {
        let waits = activity.started_at == 0 && !activity.dispatched && !activity.paused;
        let next = if waits { activity.due_at } else { 0 };
        self.activity_limits(activity)
            .into_iter()
            .fold(next, |soonest, (at, _)| earlier(soonest, at))
    }

    fn activity_limits(&self, activity: &Activity) -> [(Nanos, TimeoutType); 4] {
        let Some(scheduled) = self.scheduled_activity(activity.scheduled_id) else {
            return [(0, TimeoutType::Unspecified); 4];
        };
        let started = activity.started_at;
        let alive = started.max(activity.heartbeat_at);
        let unless = |condition: bool, at: Nanos| if condition { 0 } else { at };
        // Of those that are due at once, the first is the one that is told: an activity that starts in the very moment it is
        // scheduled has run out of the time for all attempts, not only of that for this one.
        [
            (
                unless(
                    started != 0 || activity.paused,
                    after(
                        activity.due_at,
                        nanos(scheduled.schedule_to_start_timeout.as_ref()),
                    ),
                ),
                TimeoutType::ScheduleToStart,
            ),
            (
                after(
                    activity.scheduled_at,
                    nanos(scheduled.schedule_to_close_timeout.as_ref()),
                ),
                TimeoutType::ScheduleToClose,
            ),
            (
                unless(
                    started == 0,
                    after(started, nanos(scheduled.start_to_close_timeout.as_ref())),
                ),
                TimeoutType::StartToClose,
            ),
            (
                unless(
                    started == 0,
                    after(alive, nanos(scheduled.heartbeat_timeout.as_ref())),
                ),
                TimeoutType::Heartbeat,
            ),
        ]
    }

    /// Ends, or tries again, every activity that has run out of time.
    pub(crate) fn time_out_activities(&mut self, turn: Turn<'_>) {
        let mut due: Vec<(Nanos, i64, TimeoutType)> = self
            .state
            .activities
            .values()
            .filter_map(|activity| {
                self.activity_limits(activity)
                    .into_iter()
                    .filter(|(at, _)| is_due(*at, turn.now))
                    .min_by_key(|(at, _)| *at)
                    .map(|(at, kind)| (at, activity.scheduled_id, kind))
            })
            .collect();
        due.sort_by_key(|(at, id, _)| (*at, *id));
        for (_, scheduled_id, kind) in due {
            self.time_out_activity(scheduled_id, kind, turn);
        }
        self.dispatch_due_activities(turn.now);
    }

    fn time_out_activity(&mut self, scheduled_id: i64, kind: TimeoutType, turn: Turn<'_>) {
        let Some(activity) = self.state.activities.get(&scheduled_id).cloned() else {
            return;
        };
        let mut failure = timeout(kind, activity.heartbeat.clone());
        let Err(retry_state) = self.retry_activity(scheduled_id, &failure, turn) else {
            return;
        };
        failure.cause = activity.last_failure.clone().map(Box::new);
        if retry_state == RetryState::Timeout && kind != TimeoutType::ScheduleToClose {
            // There is no time left for another attempt: what has run out is the time for all of them.
            let cause = failure;
            failure = timeout(TimeoutType::ScheduleToClose, activity.heartbeat.clone());
            failure.cause = Some(Box::new(cause));
        }
        self.write_activity_start(&activity);
        let started_id = if activity.started_at == 0 {
            0
        } else {
            self.next_event_id() - 1
        };
        self.end_activity(
            scheduled_id,
            Event::ActivityTaskTimedOutEventAttributes(history::ActivityTaskTimedOutEventAttributes {
                failure: Some(failure),
                scheduled_event_id: scheduled_id,
                started_event_id: started_id,
                retry_state: retry_state.into(),
            }),
            turn,
        );
    }
}

fn timeout(kind: TimeoutType, heartbeat: Option<common::Payloads>) -> Failure {
    server_failure(
        format!("activity {} timeout", timeout_name(kind)),
        FailureInfo::TimeoutFailureInfo(TimeoutFailureInfo {
            timeout_type: kind.into(),
            last_heartbeat_details: heartbeat,
        }),
    )
}

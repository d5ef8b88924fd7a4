//! Those who play the workflows of a project: take a task, decide by the history alone, answer. Whoever is killed in between
//! loses nothing but time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_client::WorkflowClient;
use atoll_types::STEPS_QUEUE;
use serde_json::{Value, json};
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::command::v1::{
    Command, CompleteWorkflowExecutionCommandAttributes, ScheduleActivityTaskCommandAttributes,
    StartTimerCommandAttributes,
};
use temporalio_protos::temporal::api::common::v1::{ActivityType, Payload, Payloads};
use temporalio_protos::temporal::api::enums::v1::CommandType;
use temporalio_protos::temporal::api::history::v1::HistoryEvent;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Happened;
use temporalio_protos::temporal::api::taskqueue::v1::TaskQueue;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use crate::soak::caller::Caller;
use crate::soak::world::World;

/// Where the tasks of honest workflows are.
pub(super) const QUEUE: &str = "soak";
/// Does one activity, waits for a timer and a signal, and ends.
pub(super) const PLAIN: &str = "Plain";
/// Asks a person, and ends.
pub(super) const ASKS: &str = "Asks";
/// Calls a model by the worker that is built in, and ends.
pub(super) const CALLS: &str = "Calls";
/// Ends at once; what schedules start.
pub(super) const SHORT: &str = "Short";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Workflows,
    Activities,
}

/// Until it is dropped.
pub(super) async fn play(world: &Arc<World>, index: usize, part: Part) {
    loop {
        if !world.is_up() && !world.until_up().await {
            return;
        }
        let Some(caller) = Caller::new(world, index) else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some(mut wire) = caller.wire().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        loop {
            let played = match part {
                Part::Workflows => workflow_task(&caller, &mut wire).await,
                Part::Activities => activity_task(&caller, &mut wire).await,
            };
            if played.is_none() {
                tokio::time::sleep(Duration::from_millis(50)).await;
                break;
            }
        }
    }
}

fn queue(name: &str) -> Option<TaskQueue> {
    Some(TaskQueue {
        name: name.to_owned(),
        ..Default::default()
    })
}

/// `None`: the connection is no good any more, or the task is somebody else's by now.
async fn workflow_task(caller: &Caller, wire: &mut WorkflowClient) -> Option<()> {
    let namespace = caller.project.namespace.clone();
    let request = service::PollWorkflowTaskQueueRequest {
        namespace: namespace.clone(),
        task_queue: queue(QUEUE),
        identity: "soak".to_owned(),
        ..Default::default()
    };
    let task: service::PollWorkflowTaskQueueResponse =
        wire.call("PollWorkflowTaskQueue", request).await.ok()?;
    if task.task_token.is_empty() {
        return Some(());
    }
    let kind = task.workflow_type.map(|kind| kind.name).unwrap_or_default();
    let history = task.history.unwrap_or_default();
    let answer = service::RespondWorkflowTaskCompletedRequest {
        namespace,
        task_token: task.task_token,
        identity: "soak".to_owned(),
        commands: decide(&kind, caller, &history.events),
        ..Default::default()
    };
    wire.call::<_, service::RespondWorkflowTaskCompletedResponse>("RespondWorkflowTaskCompleted", answer)
        .await
        .ok()
        .map(drop)
}

async fn activity_task(caller: &Caller, wire: &mut WorkflowClient) -> Option<()> {
    let namespace = caller.project.namespace.clone();
    let request = service::PollActivityTaskQueueRequest {
        namespace: namespace.clone(),
        task_queue: queue(QUEUE),
        identity: "soak".to_owned(),
        ..Default::default()
    };
    let task: service::PollActivityTaskQueueResponse =
        wire.call("PollActivityTaskQueue", request).await.ok()?;
    if task.task_token.is_empty() {
        return Some(());
    }
    let answer = service::RespondActivityTaskCompletedRequest {
        namespace,
        task_token: task.task_token,
        identity: "soak".to_owned(),
        result: task.input,
        ..Default::default()
    };
    wire.call::<_, service::RespondActivityTaskCompletedResponse>("RespondActivityTaskCompleted", answer)
        .await
        .ok()
        .map(drop)
}

/// What has happened in a workflow so far.
#[derive(Debug, Default)]
struct Past {
    scheduled: usize,
    activities_done: usize,
    timers: usize,
    timers_fired: usize,
    signals: usize,
}

impl Past {
    fn of(history: &[HistoryEvent]) -> Self {
        let mut past = Self::default();
        for event in history {
            match &event.attributes {
                Some(Happened::ActivityTaskScheduledEventAttributes(_)) => past.scheduled += 1,
                // A refusal of a model or of a person is an end of the step too.
                Some(
                    Happened::ActivityTaskCompletedEventAttributes(_)
                    | Happened::ActivityTaskFailedEventAttributes(_)
                    | Happened::ActivityTaskTimedOutEventAttributes(_),
                ) => past.activities_done += 1,
                Some(Happened::TimerStartedEventAttributes(_)) => past.timers += 1,
                Some(Happened::TimerFiredEventAttributes(_)) => past.timers_fired += 1,
                Some(Happened::WorkflowExecutionSignaledEventAttributes(_)) => past.signals += 1,
                _ => {}
            }
        }
        past
    }
}

/// What a workflow of this kind wants next.
fn decide(kind: &str, caller: &Caller, history: &[HistoryEvent]) -> Vec<Command> {
    let past = Past::of(history);
    let canary = caller.canary();
    let step = match kind {
        PLAIN => Some(activity("echo", QUEUE, &json!({"word": canary}))),
        ASKS => Some(activity(
            "approval.request",
            STEPS_QUEUE,
            &json!({"action": {"do": canary}, "reason": canary, "timeout_ms": super::native::LIFETIME_MILLIS}),
        )),
        CALLS => Some(activity(
            "model.call",
            STEPS_QUEUE,
            &json!({"model": caller.project.echo(), "max_tokens": 50,
                "messages": [{"role": "user", "content": canary}]}),
        )),
        _ => None,
    };
    if let Some(step) = step {
        if past.scheduled == 0 {
            return vec![step];
        }
        if past.activities_done == 0 {
            return Vec::new();
        }
    }
    if kind == PLAIN {
        if past.timers == 0 {
            return vec![timer()];
        }
        if past.timers_fired == 0 || past.signals == 0 {
            return Vec::new();
        }
    }
    let result = CompleteWorkflowExecutionCommandAttributes {
        result: Some(write(&json!({"word": canary}))),
    };
    vec![command(
        CommandType::CompleteWorkflowExecution,
        Attributes::CompleteWorkflowExecutionCommandAttributes(result),
    )]
}

fn command(kind: CommandType, attributes: Attributes) -> Command {
    Command {
        command_type: i32::from(kind),
        attributes: Some(attributes),
        ..Default::default()
    }
}

fn activity(name: &str, on: &str, input: &Value) -> Command {
    let attributes = ScheduleActivityTaskCommandAttributes {
        activity_id: "1".to_owned(),
        activity_type: Some(ActivityType {
            name: name.to_owned(),
        }),
        task_queue: queue(on),
        input: Some(write(input)),
        schedule_to_close_timeout: seconds(12 * 3600),
        start_to_close_timeout: seconds(if on == QUEUE { 5 } else { 12 * 3600 }),
        heartbeat_timeout: seconds(i64::from(on != QUEUE) * 2),
        ..Default::default()
    };
    command(
        CommandType::ScheduleActivityTask,
        Attributes::ScheduleActivityTaskCommandAttributes(attributes),
    )
}

fn timer() -> Command {
    let attributes = StartTimerCommandAttributes {
        timer_id: "1".to_owned(),
        start_to_fire_timeout: Some(prost_wkt_types::Duration {
            seconds: 0,
            nanos: 200_000_000,
        }),
    };
    command(
        CommandType::StartTimer,
        Attributes::StartTimerCommandAttributes(attributes),
    )
}

fn seconds(seconds: i64) -> Option<prost_wkt_types::Duration> {
    (seconds > 0).then_some(prost_wkt_types::Duration { seconds, nanos: 0 })
}

pub(in crate::soak) fn write(value: &Value) -> Payloads {
    Payloads {
        payloads: vec![Payload {
            metadata: HashMap::from([("encoding".to_owned(), b"json/plain".to_vec())]),
            data: value.to_string().into_bytes(),
            ..Default::default()
        }],
    }
}

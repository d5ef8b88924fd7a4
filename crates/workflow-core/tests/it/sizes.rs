//! What is too big, and what is made of it.

use atoll_workflow_core::{ActivityFinish, ActivityStart, Refusal, SignalRequest};
use temporalio_protos::temporal::api::command::v1::RecordMarkerCommandAttributes;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::common::v1::{Payload, Payloads};
use temporalio_protos::temporal::api::enums::v1::RetryState;
use temporalio_protos::temporal::api::failure::v1::failure::FailureInfo;
use temporalio_protos::temporal::api::failure::v1::{ApplicationFailureInfo, Failure};
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;

use crate::support::{SECOND, World, activity, activity_with, again, command};

fn big(world: &World) -> Option<Payloads> {
    Some(Payloads {
        payloads: vec![Payload {
            data: vec![0; world.limits.blob_bytes],
            ..Default::default()
        }],
    })
}

fn held(world: &mut World) -> ActivityStart {
    world.step(vec![activity("a")]);
    let (id, stamp) = world
        .run
        .state
        .activities
        .iter()
        .map(|(id, found)| (*id, found.stamp))
        .next()
        .unwrap();
    world
        .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
        .unwrap()
}

fn failed(world: &World) -> Failure {
    let failed = world.run.events.iter().find_map(|event| match &event.attributes {
        Some(Event::ActivityTaskFailedEventAttributes(failed)) => Some(failed.clone()),
        _ => None,
    });
    let failed = failed.unwrap();
    assert_eq!(failed.retry_state(), RetryState::NonRetryableFailure);
    failed.failure.unwrap()
}

#[test]
fn a_command_that_is_too_big_ends_the_run() {
    let mut world = World::start();
    let input = big(&world);
    let task = world.poll().unwrap();
    let reply = world
        .complete(&task, vec![activity_with("a", |wanted| wanted.input = input)])
        .unwrap();
    let reason =
        "BadScheduleActivityAttributes: ScheduleActivityTaskCommandAttributes.Input exceeds size limit.";
    assert_eq!(reply.refused.as_deref(), Some(reason));
    assert_eq!(
        world.types()[3..],
        ["WorkflowTaskFailed", "WorkflowExecutionTerminated"]
    );
    let Some(Event::WorkflowExecutionTerminatedEventAttributes(end)) =
        &world.run.events.last().unwrap().attributes
    else {
        panic!("another end");
    };
    assert_eq!(end.reason, reason);
    assert!(world.effects().is_empty(), "nothing of it is carried out");
}

#[test]
fn an_answer_that_is_too_big_is_a_failure_for_good() {
    let mut world = World::start();
    let task = held(&mut world);
    let finish = ActivityFinish::Completed(big(&world));
    world
        .decide(|run, turn| run.finish_activity(&task.token, finish, "worker", turn))
        .unwrap();
    assert_eq!(failed(&world).message, "Complete result exceeds size limit.");
}

#[test]
fn a_heartbeat_that_is_too_big_is_the_last() {
    let mut world = World::start();
    let task = held(&mut world);
    let details = big(&world);
    let beat = world
        .decide(|run, turn| run.heartbeat(&task.token, details, turn))
        .unwrap();
    assert!(beat.cancel_requested);
    assert_eq!(failed(&world).message, "Heartbeat details exceed size limit.");
}

#[test]
fn of_a_failure_that_is_too_big_the_words_are_kept() {
    let mut world = World::start();
    let task = held(&mut world);
    let finish = ActivityFinish::Failed {
        failure: Failure {
            message: "why".to_owned(),
            failure_info: Some(FailureInfo::ApplicationFailureInfo(ApplicationFailureInfo {
                r#type: "Kind".to_owned(),
                details: big(&world),
                ..Default::default()
            })),
            ..Default::default()
        },
        heartbeat: None,
    };
    world
        .decide(|run, turn| run.finish_activity(&task.token, finish, "worker", turn))
        .unwrap();
    let failure = failed(&world);
    assert_eq!(failure.message, "Failure exceeds size limit.");
    let cause = failure.cause.unwrap();
    assert_eq!(cause.message, "why");
    let Some(FailureInfo::ApplicationFailureInfo(info)) = cause.failure_info else {
        panic!("another kind");
    };
    assert_eq!((info.r#type.as_str(), info.details), ("Kind", None));
}

#[test]
fn a_signal_that_is_too_big_is_refused() {
    let mut world = World::start();
    let signal = SignalRequest {
        name: "s".to_owned(),
        input: big(&world),
        ..Default::default()
    };
    let refused = world.decide(|run, turn| run.signal(signal, turn));
    assert!(
        matches!(refused, Err(Refusal::InvalidArgument(text)) if text == "Blob data size exceeds limit.")
    );
    assert!(!world.types().contains(&"WorkflowExecutionSignaled".to_owned()));
}

#[test]
fn a_history_that_is_too_long_ends_the_run() {
    let mut world = World::start();
    let marker = command(Attributes::RecordMarkerCommandAttributes(
        RecordMarkerCommandAttributes {
            marker_name: "m".to_owned(),
            ..Default::default()
        },
    ));
    world.limits.history_events = 20;
    world.step(vec![marker; 20]);
    assert!(!world.run.is_running());
    let Some(Event::WorkflowExecutionTerminatedEventAttributes(end)) =
        &world.run.events.last().unwrap().attributes
    else {
        panic!("another end");
    };
    assert_eq!(end.reason, "Workflow history count exceeds limit.");
}

#[test]
fn continuing_as_new_over_and_over_takes_a_breath() {
    for (lived, waits) in [(SECOND / 4, SECOND * 3 / 4), (SECOND, 0), (3 * SECOND, 0)] {
        let mut world = World::start();
        world.wait(lived);
        world.step(vec![again()]);
        let next = world.run.take_successor().unwrap();
        let backoff = next.started().first_workflow_task_backoff;
        assert_eq!(atoll_workflow_core::nanos(backoff.as_ref()), waits);
        assert_eq!(next.state.task.is_none(), waits > 0);
    }
}

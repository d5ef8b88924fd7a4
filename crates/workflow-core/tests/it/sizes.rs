//! What is too big, and what is made of it.

use atoll_workflow_core::{ActivityFinish, ActivityStart, Refusal, SignalRequest, Start};
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::command::v1::{
    ModifyWorkflowPropertiesCommandAttributes, RecordMarkerCommandAttributes,
    UpsertWorkflowSearchAttributesCommandAttributes,
};
use temporalio_protos::temporal::api::common::v1::{Memo, Payload, Payloads, SearchAttributes};
use temporalio_protos::temporal::api::enums::v1::RetryState;
use temporalio_protos::temporal::api::failure::v1::failure::FailureInfo;
use temporalio_protos::temporal::api::failure::v1::{ApplicationFailureInfo, Failure};
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;
use temporalio_protos::temporal::api::update::v1 as update;

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

fn payload(bytes: usize) -> Payload {
    Payload {
        metadata: [("encoding".to_owned(), b"json/plain".to_vec())].into(),
        data: vec![b'1'; bytes],
        ..Default::default()
    }
}

fn attributes(fields: &[(&str, usize)]) -> SearchAttributes {
    SearchAttributes {
        indexed_fields: fields
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), payload(*bytes)))
            .collect(),
    }
}

#[test]
fn what_a_run_is_searched_by_is_bounded() {
    let mut world = World::start();
    let refused = |fields: &[(&str, usize)]| {
        let start = Start {
            workflow_id: "w".to_owned(),
            workflow_type: "T".to_owned(),
            task_queue: "q".to_owned(),
            search_attributes: Some(attributes(fields)),
            ..Default::default()
        };
        start.check(&atoll_workflow_core::Limits::default())
    };
    refused(&[("A", 2048), ("B", 2048)]).unwrap();
    assert!(
        refused(&[("A", 2049)])
            .unwrap_err()
            .to_string()
            .contains("A value size 2049")
    );
    let names: Vec<String> = (0..21).map(|number| format!("A{number}")).collect();
    let many: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), 2000)).collect();
    refused(&many[..20]).unwrap();
    assert!(refused(&many).unwrap_err().to_string().contains("total size"));
    // What the server says of a schedule's workflow itself is on top.
    let mut with_ours = many[..20].to_vec();
    with_ours.push(("TemporalScheduledById", 3000));
    refused(&with_ours).unwrap();

    // Together with what is there already.
    let upsert = |fields: &[(&str, usize)]| {
        command(Attributes::UpsertWorkflowSearchAttributesCommandAttributes(
            UpsertWorkflowSearchAttributesCommandAttributes {
                search_attributes: Some(attributes(fields)),
            },
        ))
    };
    let changes = world.run.search_changes;
    world.step(vec![upsert(&many[..10]), upsert(&many[10..20])]);
    assert!(world.run.search_changes > changes);
    world
        .decide(|run, turn| {
            run.signal(
                SignalRequest {
                    name: "s".to_owned(),
                    ..Default::default()
                },
                turn,
            )
        })
        .unwrap();
    let task = world.poll().unwrap();
    let reply = world.complete(&task, vec![upsert(&many[20..])]).unwrap();
    assert!(reply.refused.unwrap().contains("total size"));
    assert!(world.run.is_running());
}

#[test]
fn a_memo_does_not_grow_by_parts() {
    let mut world = World::start();
    let part = |name: &str, bytes: usize| {
        let memo = Memo {
            fields: [(name.to_owned(), payload(bytes))].into(),
        };
        command(Attributes::ModifyWorkflowPropertiesCommandAttributes(
            ModifyWorkflowPropertiesCommandAttributes {
                upserted_memo: Some(memo),
            },
        ))
    };
    let half = world.limits.blob_bytes / 2 + 1;
    // One that is replaced counts once, one that is taken away does not count.
    world.step(vec![
        part("a", half),
        part("a", half),
        part("a", 0),
        part("b", half),
    ]);
    assert!(world.run.is_running());
    world
        .decide(|run, turn| {
            run.signal(
                SignalRequest {
                    name: "s".to_owned(),
                    ..Default::default()
                },
                turn,
            )
        })
        .unwrap();
    world.crash();
    let task = world.poll().unwrap();
    let reply = world.complete(&task, vec![part("c", half)]).unwrap();
    assert!(reply.refused.unwrap().contains("exceeds size limit"));
    assert!(!world.run.is_running());
}

fn signal(bytes: usize) -> SignalRequest {
    SignalRequest {
        name: "s".to_owned(),
        input: Some(Payloads {
            payloads: vec![payload(bytes)],
        }),
        ..Default::default()
    }
}

#[test]
fn signals_that_nobody_takes_end_where_a_history_does() {
    let mut world = World::start();
    world.limits.history_bytes = 10_000;
    world.limits.buffered_bytes = 5_000;
    let sent = (0..100).take_while(|_| world.decide(|run, turn| run.signal(signal(1_000), turn)).is_ok());
    assert!((5..10).contains(&sent.count()));
    let refused = world
        .decide(|run, turn| run.signal(signal(1_000), turn))
        .unwrap_err();
    assert_eq!(refused.to_string(), "Workflow history size exceeds limit.");
    assert!(world.run.is_running());
}

#[test]
fn what_waits_for_the_end_of_a_task_is_bounded() {
    let mut world = World::start();
    world.limits.buffered_bytes = 5_000;
    let task = held(&mut world);
    world.decide(|run, turn| run.signal(signal(1), turn)).unwrap();
    let started = world.poll().unwrap();
    while world.decide(|run, turn| run.signal(signal(1_000), turn)).is_ok() {}
    assert!(world.run.state.buffered.len() < 6);
    world.crash();
    let refused = world
        .decide(|run, turn| run.signal(signal(1_000), turn))
        .unwrap_err();
    assert!(matches!(refused, Refusal::ResourceExhausted(_)), "{refused:?}");
    let finish = || ActivityFinish::Completed(signal(1_000).input);
    let refused = world.decide(|run, turn| run.finish_activity(&task.token, finish(), "worker", turn));
    assert!(
        matches!(refused, Err(Refusal::ResourceExhausted(_))),
        "{refused:?}"
    );
    // Then there is room again, and nothing was lost.
    world.complete(&started, Vec::new()).unwrap();
    world
        .decide(|run, turn| run.finish_activity(&task.token, finish(), "worker", turn))
        .unwrap();
    world.decide(|run, turn| run.signal(signal(1_000), turn)).unwrap();
}

#[test]
fn results_that_no_workflow_task_takes_end_the_run() {
    let mut world = World::start();
    let task = held(&mut world);
    world.limits.history_bytes = 5_000;
    let finish = ActivityFinish::Completed(signal(6_000).input);
    world
        .decide(|run, turn| run.finish_activity(&task.token, finish, "worker", turn))
        .unwrap();
    assert!(!world.run.is_running());
}

#[test]
fn an_update_that_is_too_big_is_refused() {
    let mut world = World::start();
    let asked = |args: Option<Payloads>| update::Request {
        meta: Some(update::Meta {
            update_id: "u".to_owned(),
            ..Default::default()
        }),
        input: Some(update::Input {
            name: "u".to_owned(),
            args,
            ..Default::default()
        }),
        ..Default::default()
    };
    let request = asked(big(&world));
    let refused = world.decide(|run, turn| run.update(request, turn)).unwrap_err();
    assert_eq!(refused.to_string(), "Blob data size exceeds limit.");
    world.decide(|run, turn| run.update(asked(None), turn)).unwrap();
    assert!(world.run.memory_bytes() > 0);
}

#[test]
fn signs_of_life_are_not_written_down_faster_than_anybody_could_tell() {
    let mut world = World::start();
    let task = held(&mut world);
    assert_eq!(world.run.fresh_heartbeat(&task.token, world.now), None);
    world
        .decide(|run, turn| run.heartbeat(&task.token, None, turn))
        .unwrap();
    assert!(world.run.fresh_heartbeat(&task.token, world.now + 1).is_some());
    assert_eq!(world.run.fresh_heartbeat(&task.token, world.now + SECOND), None);
    let mut other = task.token.clone();
    other.attempt += 1;
    assert_eq!(world.run.fresh_heartbeat(&other, world.now + 1), None);
}

#[test]
fn heartbeats_of_all_activities_are_bounded_together() {
    let mut world = World::start();
    world.step(vec![activity("a"), activity("b")]);
    let pending: Vec<_> = world
        .run
        .state
        .activities
        .values()
        .map(|found| (found.scheduled_id, found.stamp))
        .collect();
    world.limits.completion_bytes = 1_500;
    let mut beat = |(id, stamp): (i64, i64)| {
        let started = world
            .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
            .unwrap();
        world.decide(|run, turn| run.heartbeat(&started.token, signal(1_000).input, turn))
    };
    beat(pending[0]).unwrap();
    let refused = beat(pending[1]).unwrap_err();
    assert!(matches!(refused, Refusal::ResourceExhausted(_)), "{refused:?}");
}

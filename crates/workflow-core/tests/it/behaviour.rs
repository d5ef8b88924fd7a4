//! Features, one by one, by the events that they leave.

use atoll_workflow_core::{
    ActivityFinish, CancelRequest, Completion, Refusal, ResetPoint, SignalRequest, Stage, Start, Terminate,
};
use temporalio_protos::temporal::api::common::v1::RetryPolicy;
use temporalio_protos::temporal::api::deployment::v1::WorkerDeploymentOptions;
use temporalio_protos::temporal::api::enums::v1::{TimeoutType, WorkerVersioningMode};
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::failure::v1::failure::FailureInfo;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;
use temporalio_protos::temporal::api::protocol::v1::Message;
use temporalio_protos::temporal::api::update::v1 as update;

use crate::support::{SECOND, World, activity, activity_with, again, cancel_timer, finish, timer, types};

fn signal(name: &str) -> SignalRequest {
    SignalRequest {
        name: name.to_owned(),
        ..Default::default()
    }
}

#[test]
fn a_workflow_starts_and_ends() {
    let mut world = World::start();
    world.step(vec![finish()]);
    assert_eq!(
        world.types(),
        [
            "WorkflowExecutionStarted",
            "WorkflowTaskScheduled",
            "WorkflowTaskStarted",
            "WorkflowTaskCompleted",
            "WorkflowExecutionCompleted"
        ]
    );
    assert!(!world.run.is_running());
    assert_eq!(world.run.deadline(), 0);
}

#[test]
fn what_arrives_during_a_task_waits_and_ends_come_last() {
    let mut world = World::start();
    world.step(vec![activity("a"), timer("t", 60 * SECOND)]);
    world
        .decide(|run, turn| run.signal(signal("wake"), turn))
        .unwrap();
    let task = world.poll().unwrap();
    let (id, stamp) = world
        .run
        .state
        .activities
        .iter()
        .map(|(id, activity)| (*id, activity.stamp))
        .next()
        .unwrap();
    let held = world
        .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
        .unwrap();
    world
        .decide(|run, turn| run.finish_activity(&held.token, ActivityFinish::Completed(None), "worker", turn))
        .unwrap();
    world
        .decide(|run, turn| run.signal(signal("late"), turn))
        .unwrap();
    let before = world.types().len();
    world.complete(&task, vec![]).unwrap();
    assert_eq!(
        world.types()[before..],
        [
            "WorkflowTaskCompleted",
            "ActivityTaskStarted",
            "WorkflowExecutionSignaled",
            "ActivityTaskCompleted",
            "WorkflowTaskScheduled"
        ]
    );
    let Some(Event::ActivityTaskCompletedEventAttributes(done)) =
        &world.run.events[world.run.events.len() - 2].attributes
    else {
        panic!("not a completion");
    };
    let started = world.run.event(done.started_event_id).unwrap();
    assert!(matches!(
        started.attributes,
        Some(Event::ActivityTaskStartedEventAttributes(_))
    ));
}

#[test]
fn a_workflow_cannot_end_over_an_unseen_signal() {
    let mut world = World::start();
    let task = world.poll().unwrap();
    world
        .decide(|run, turn| run.signal(signal("unseen"), turn))
        .unwrap();
    let reply = world.complete(&task, vec![finish()]).unwrap();
    assert!(reply.refused.is_none());
    assert!(world.run.is_running());
    assert_eq!(
        world.types()[2..],
        [
            "WorkflowTaskStarted",
            "WorkflowTaskFailed",
            "WorkflowExecutionSignaled",
            "WorkflowTaskScheduled"
        ]
    );
    world.step(vec![finish()]);
    assert!(!world.run.is_running());
}

#[test]
fn a_timer_that_fired_unseen_can_be_cancelled() {
    let mut world = World::start();
    world.step(vec![timer("t", SECOND)]);
    world.decide(|run, turn| run.signal(signal("x"), turn)).unwrap();
    let task = world.poll().unwrap();
    world.wait(2 * SECOND);
    assert_eq!(world.run.state.buffered.len(), 1);
    world
        .complete(&task, vec![cancel_timer("t"), finish()])
        .unwrap_or_else(|refusal| panic!("{refusal}"));
    assert!(world.types().contains(&"TimerCanceled".to_owned()));
    assert!(
        !world.types().contains(&"TimerFired".to_owned()),
        "as if it had never fired"
    );
    assert!(!world.run.is_running(), "nothing was in the way of the end");
}

#[test]
fn failing_tasks_leave_one_trace() {
    let mut world = World::start();
    for _ in 0..5 {
        let task = world.poll().unwrap();
        world
            .decide(|run, turn| {
                run.fail_task(
                    &task.token,
                    temporalio_protos::temporal::api::enums::v1::WorkflowTaskFailedCause::WorkflowWorkerUnhandledFailure,
                    None,
                    "worker",
                    turn,
                )
            })
            .unwrap();
    }
    assert_eq!(
        world.types(),
        [
            "WorkflowExecutionStarted",
            "WorkflowTaskScheduled",
            "WorkflowTaskStarted",
            "WorkflowTaskFailed"
        ]
    );
    let task = world.poll().unwrap();
    assert_eq!(task.attempt, 6);
    assert_eq!(task.suffix.len(), 2);
    world.complete(&task, vec![finish()]).unwrap();
    assert_eq!(world.types().last().unwrap(), "WorkflowExecutionCompleted");
}

#[test]
fn an_unanswered_task_is_tried_again_and_the_late_answer_is_not_heard() {
    let mut world = World::start();
    let late = world.poll().unwrap();
    world.wait(11 * SECOND);
    let refused = world.complete(&late, vec![finish()]);
    assert!(matches!(refused, Err(Refusal::NotFound(_))));
    world.step(vec![finish()]);
    assert!(world.types().contains(&"WorkflowTaskTimedOut".to_owned()));
}

#[test]
fn an_activity_is_tried_as_often_as_its_policy_says() {
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.retry_policy = Some(RetryPolicy {
            maximum_attempts: 3,
            initial_interval: Some(atoll_workflow_core::duration(SECOND)),
            ..Default::default()
        });
    })]);
    for attempt in 1..=3 {
        let (id, stamp) = world
            .run
            .state
            .activities
            .iter()
            .map(|(id, found)| (*id, found.stamp))
            .next()
            .unwrap();
        let held = world
            .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
            .unwrap();
        assert_eq!(held.attempt, attempt);
        let finish = ActivityFinish::Failed {
            failure: Failure::default(),
            heartbeat: None,
        };
        world
            .decide(|run, turn| run.finish_activity(&held.token, finish, "worker", turn))
            .unwrap();
        world.wait(5 * SECOND);
    }
    assert!(world.run.state.activities.is_empty());
    let count = world
        .types()
        .iter()
        .filter(|kind| *kind == "ActivityTaskStarted")
        .count();
    assert_eq!(count, 1);
    assert!(world.types().contains(&"ActivityTaskFailed".to_owned()));
}

#[test]
fn a_silent_activity_times_out_by_its_heartbeat() {
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.heartbeat_timeout = Some(atoll_workflow_core::duration(SECOND));
        wanted.retry_policy = Some(RetryPolicy {
            maximum_attempts: 1,
            ..Default::default()
        });
    })]);
    let (id, stamp) = world
        .run
        .state
        .activities
        .iter()
        .map(|(id, found)| (*id, found.stamp))
        .next()
        .unwrap();
    let held = world
        .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
        .unwrap();
    for _ in 0..3 {
        world.wait(SECOND / 2);
        world
            .decide(|run, turn| run.heartbeat(&held.token, None, turn))
            .unwrap();
    }
    world.wait(2 * SECOND);
    assert!(world.types().contains(&"ActivityTaskTimedOut".to_owned()));
    let beat = world.decide(|run, turn| run.heartbeat(&held.token, None, turn));
    assert!(matches!(beat, Err(Refusal::NotFound(_))));
}

fn ask(id: &str) -> update::Request {
    update::Request {
        meta: Some(update::Meta {
            update_id: id.to_owned(),
            ..Default::default()
        }),
        input: Some(update::Input {
            name: "up".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn says<M: prost::Message>(id: &str, name: &str, message: &M) -> Message {
    Message {
        id: format!("{id}/{name}"),
        protocol_instance_id: id.to_owned(),
        body: Some(prost_wkt_types::Any {
            type_url: format!("type.googleapis.com/temporal.api.update.v1.{name}"),
            value: message.encode_to_vec(),
        }),
        ..Default::default()
    }
}

#[test]
fn a_rejected_update_leaves_no_trace() {
    let mut world = World::start();
    world.step(vec![timer("t", 60 * SECOND)]);
    let before = world.types();
    world.decide(|run, turn| run.update(ask("u"), turn)).unwrap();
    let task = world.poll().unwrap();
    assert_eq!(task.messages.len(), 1);
    let rejection = update::Rejection {
        failure: Some(Failure::default()),
        ..Default::default()
    };
    let reply = world
        .complete_with(
            &task,
            Completion {
                messages: vec![says("u", "Rejection", &rejection)],
                ..Default::default()
            },
        )
        .unwrap();
    assert_eq!(reply.reset_to, Some(3));
    assert_eq!(world.types(), before);
    assert_eq!(world.run.update_status("u").unwrap().stage, Stage::Completed);
}

#[test]
fn an_update_that_nobody_accepted_is_gone_after_a_crash_and_may_be_sent_again() {
    let mut world = World::start();
    world.step(vec![timer("t", 60 * SECOND)]);
    world.decide(|run, turn| run.update(ask("u"), turn)).unwrap();
    world.crash();
    assert!(world.run.update_status("u").is_none());
    world.decide(|run, turn| run.update(ask("u"), turn)).unwrap();
    let task = world.poll().unwrap();
    assert_eq!(task.messages.len(), 1);
}

#[test]
fn a_failed_run_is_followed_by_another_attempt() {
    let mut world = World::start_with(Start {
        retry_policy: Some(RetryPolicy {
            maximum_attempts: 2,
            initial_interval: Some(atoll_workflow_core::duration(3 * SECOND)),
            ..Default::default()
        }),
        ..Default::default()
    });
    let fail = crate::support::command(
        temporalio_protos::temporal::api::command::v1::command::Attributes::FailWorkflowExecutionCommandAttributes(
            temporalio_protos::temporal::api::command::v1::FailWorkflowExecutionCommandAttributes {
                failure: Some(Failure::default()),
            },
        ),
    );
    world.step(vec![fail]);
    let next = world.run.take_successor().unwrap();
    assert_eq!(next.started().attempt, 2);
    assert_eq!(next.started().continued_execution_run_id, "run-0");
    assert_eq!(types(&next), ["WorkflowExecutionStarted"]);
    assert_eq!(next.deadline(), world.now + 3 * SECOND);
}

#[test]
fn a_reset_keeps_what_came_before_and_the_signals_since() {
    let mut world = World::start();
    world.step(vec![timer("t", 60 * SECOND)]);
    world
        .decide(|run, turn| run.signal(signal("kept"), turn))
        .unwrap();
    world.step(vec![finish()]);
    let point = ResetPoint {
        task_end_id: 4,
        reason: "try again".to_owned(),
        keep_signals: true,
        ..Default::default()
    };
    let run = world
        .decide(|run, turn| run.reset(&point, "reset", turn))
        .unwrap();
    assert_eq!(
        types(&run),
        [
            "WorkflowExecutionStarted",
            "WorkflowTaskScheduled",
            "WorkflowTaskStarted",
            "WorkflowTaskFailed",
            "WorkflowExecutionSignaled",
            "WorkflowTaskScheduled"
        ]
    );
    assert!(run.state.timers.is_empty());
}

#[test]
fn terminating_takes_the_task_away() {
    let mut world = World::start();
    let task = world.poll().unwrap();
    world
        .decide(|run, turn| run.terminate(Terminate::default(), turn))
        .unwrap();
    assert!(matches!(world.complete(&task, vec![]), Err(Refusal::NotFound(_))));
    assert_eq!(world.types().last().unwrap(), "WorkflowExecutionTerminated");
}

#[test]
fn cancelling_twice_is_one_request() {
    let mut world = World::start();
    world.step(vec![timer("t", 60 * SECOND)]);
    for _ in 0..2 {
        world
            .decide(|run, turn| run.request_cancel(CancelRequest::default(), turn))
            .unwrap();
    }
    let count = world
        .types()
        .iter()
        .filter(|kind| *kind == "WorkflowExecutionCancelRequested")
        .count();
    assert_eq!(count, 1);
}

#[test]
fn the_same_signal_is_taken_once() {
    let mut world = World::start();
    for _ in 0..2 {
        let request = SignalRequest {
            request_id: "same".to_owned(),
            ..signal("s")
        };
        world.decide(|run, turn| run.signal(request, turn)).unwrap();
    }
    assert_eq!(world.run.state.signals, 1);
}

#[test]
fn a_bad_command_keeps_nothing_of_its_task() {
    let mut world = World::start();
    let task = world.poll().unwrap();
    let reply = world
        .complete(&task, vec![activity("kept?"), timer("", SECOND)])
        .unwrap();
    assert!(reply.refused.unwrap().contains("TimerId"));
    assert!(world.run.state.activities.is_empty());
    assert_eq!(world.types()[3], "WorkflowTaskFailed");
    assert!(world.effects().len() <= 2);
}

#[test]
fn an_update_that_was_not_seen_does_not_hold_up_the_next_run() {
    let mut world = World::start();
    let task = world.poll().unwrap();
    world.decide(|run, turn| run.update(ask("u"), turn)).unwrap();
    world.complete(&task, vec![again()]).unwrap();
    assert!(
        world
            .types()
            .contains(&"WorkflowExecutionContinuedAsNew".to_owned())
    );
    assert_eq!(
        world.run.unanswered_updates().len(),
        1,
        "it is there to be asked of the next run"
    );
}

#[test]
fn an_activity_that_nobody_took_was_not_started_in_time() {
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.start_to_close_timeout = None;
        wanted.schedule_to_close_timeout = Some(atoll_workflow_core::duration(3 * SECOND));
    })]);
    world.wait(3 * SECOND);
    assert_eq!(why_it_timed_out(&world), TimeoutType::ScheduleToStart);
}

#[test]
fn an_activity_taken_at_once_runs_out_of_the_time_for_all_attempts() {
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.start_to_close_timeout = None;
        wanted.schedule_to_close_timeout = Some(atoll_workflow_core::duration(3 * SECOND));
        wanted.retry_policy = Some(RetryPolicy {
            maximum_attempts: 1,
            ..Default::default()
        });
    })]);
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
        .unwrap();
    world.wait(3 * SECOND);
    assert_eq!(why_it_timed_out(&world), TimeoutType::ScheduleToClose);
}

fn why_it_timed_out(world: &World) -> TimeoutType {
    let failure = world.run.events.iter().find_map(|event| match &event.attributes {
        Some(Event::ActivityTaskTimedOutEventAttributes(end)) => end.failure.clone(),
        _ => None,
    });
    let Some(FailureInfo::TimeoutFailureInfo(info)) = failure.unwrap().failure_info else {
        panic!("another kind of failure");
    };
    info.timeout_type()
}

#[test]
fn a_history_says_which_code_did_the_work() {
    for (mode, versioned) in [
        (WorkerVersioningMode::Unversioned, false),
        (WorkerVersioningMode::Versioned, true),
    ] {
        let mut world = World::start();
        let task = world.poll().unwrap();
        let completion = Completion {
            deployment: Some(WorkerDeploymentOptions {
                deployment_name: "name".to_owned(),
                build_id: "build".to_owned(),
                worker_versioning_mode: mode.into(),
            }),
            ..Default::default()
        };
        world.complete_with(&task, completion).unwrap();
        let Some(Event::WorkflowTaskCompletedEventAttributes(done)) =
            &world.run.events.last().unwrap().attributes
        else {
            panic!("not a completion");
        };
        assert_eq!(done.worker_deployment_name, "name");
        assert_eq!(done.deployment_version.is_some(), versioned);
        assert_eq!(done.worker_version.is_some(), !versioned);
    }
    let mut world = World::start();
    let task = world.poll().unwrap();
    let completion = Completion {
        binary_checksum: "build".to_owned(),
        ..Default::default()
    };
    world.complete_with(&task, completion).unwrap();
    let Some(Event::WorkflowTaskCompletedEventAttributes(done)) =
        &world.run.events.last().unwrap().attributes
    else {
        panic!("not a completion");
    };
    assert_eq!(done.worker_version.as_ref().unwrap().build_id, "build");
}

//! Activities that people hold back.

use atoll_workflow_core::{ActivityFinish, ActivityStart, Effect, GoOn, Refusal, Which};
use temporalio_protos::temporal::api::common::v1::RetryPolicy;
use temporalio_protos::temporal::api::failure::v1::Failure;

use crate::support::{SECOND, World, activity_with};

fn id() -> Which {
    Which::Id("a".to_owned())
}

/// A workflow that waits for an activity, which may be tried so often.
fn waiting(attempts: i32) -> World {
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.retry_policy = Some(RetryPolicy {
            maximum_attempts: attempts,
            initial_interval: Some(atoll_workflow_core::duration(SECOND)),
            ..Default::default()
        });
    })]);
    world
}

/// What a worker would find on the queue, taken.
fn take(world: &mut World) -> Result<ActivityStart, Refusal> {
    let (scheduled_id, stamp) = world
        .run
        .state
        .activities
        .values()
        .map(|found| (found.scheduled_id, found.stamp))
        .next()
        .unwrap();
    world.decide(|run, turn| run.start_activity(scheduled_id, stamp, "worker", turn))
}

fn fail(world: &mut World, held: &ActivityStart) {
    let finish = ActivityFinish::Failed {
        failure: Failure::default(),
        heartbeat: None,
    };
    world
        .decide(|run, turn| run.finish_activity(&held.token, finish, "worker", turn))
        .unwrap();
}

fn dispatches(world: &mut World) -> usize {
    let effects = world.effects();
    effects
        .iter()
        .filter(|effect| matches!(effect, Effect::ActivityTask { .. }))
        .count()
}

#[test]
fn a_paused_activity_is_not_handed_out_until_it_goes_on() {
    let mut world = waiting(0);
    assert_eq!(dispatches(&mut world), 1);
    let stale = world.run.state.activities.values().next().unwrap().clone();
    world
        .decide(|run, turn| run.pause_activities(&id(), "somebody", "to look at it", turn))
        .unwrap();
    let late = world.decide(|run, turn| run.start_activity(stale.scheduled_id, stale.stamp, "worker", turn));
    assert!(late.is_err(), "what lies on the queue still is not handed out");
    world.crash();
    world.wait(3600 * SECOND);
    assert_eq!(dispatches(&mut world), 0);
    assert!(take(&mut world).is_err());
    let shown = world.run.pending_activities().remove(0);
    assert!(shown.paused && shown.pause_info.is_some());
    world
        .decide(|run, turn| run.unpause_activities(&id(), GoOn::default(), turn))
        .unwrap();
    assert_eq!(dispatches(&mut world), 1);
    assert_eq!(take(&mut world).unwrap().attempt, 1);
}

#[test]
fn a_worker_hears_of_a_pause_and_its_failure_waits() {
    let mut world = waiting(0);
    let held = take(&mut world).unwrap();
    world
        .decide(|run, turn| run.pause_activities(&Which::Type("Activity".to_owned()), "", "", turn))
        .unwrap_err();
    world
        .decide(|run, turn| run.pause_activities(&id(), "", "", turn))
        .unwrap();
    let beat = world
        .decide(|run, turn| run.heartbeat(&held.token, None, turn))
        .unwrap();
    assert!(beat.paused && !beat.cancel_requested);
    fail(&mut world, &held);
    world.wait(60 * SECOND);
    assert!(take(&mut world).is_err());
    let how = GoOn {
        reset_attempts: true,
        ..GoOn::default()
    };
    world
        .decide(|run, turn| run.unpause_activities(&Which::All, how, turn))
        .unwrap();
    assert_eq!(take(&mut world).unwrap().attempt, 1);
}

#[test]
fn a_reset_counts_attempts_anew_and_takes_nothing_away() {
    let mut world = waiting(3);
    let held = take(&mut world).unwrap();
    fail(&mut world, &held);
    // It waits for its second attempt; a reset does not wait.
    world
        .decide(|run, turn| run.reset_activities(&id(), false, false, turn))
        .unwrap();
    let held = take(&mut world).unwrap();
    assert_eq!(held.attempt, 1);
    world
        .decide(|run, turn| run.reset_activities(&id(), false, false, turn))
        .unwrap();
    let beat = world
        .decide(|run, turn| run.heartbeat(&held.token, None, turn))
        .unwrap();
    assert!(beat.reset);
    world
        .decide(|run, turn| run.finish_activity(&held.token, ActivityFinish::Completed(None), "worker", turn))
        .unwrap();
    assert!(world.types().contains(&"ActivityTaskCompleted".to_owned()));
}

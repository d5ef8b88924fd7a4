//! A clock that was set back while the server was down: nobody waits for a worker as long as the clock was wrong.

use atoll_workflow_core::{ActivityFinish, ActivityStart, Completion, Start};
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::taskqueue::v1::{StickyExecutionAttributes, TaskQueue};

use crate::support::{SECOND, World, activity, activity_with, finish, timer};

const HOUR: i64 = 3600 * SECOND;

/// The server is killed, and started again when the clock was set back.
fn set_back(world: &mut World, by: i64) {
    world.crash();
    world.now -= by;
    assert!(world.run.is_ahead(world.now));
    world.decide(|run, turn| run.set_back(turn.now));
    assert!(!world.run.is_ahead(world.now));
}

fn take_activity(world: &mut World) -> ActivityStart {
    let (id, stamp) = world
        .run
        .state
        .activities
        .iter()
        .map(|(id, activity)| (*id, activity.stamp))
        .next()
        .unwrap();
    world
        .decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
        .unwrap()
}

#[test]
fn a_run_goes_on_though_the_time_of_its_first_task_has_not_come_again() {
    let mut world = World::start();
    world.step(vec![activity("a")]);
    let held = take_activity(&mut world);
    world.crash();
    world.now -= SECOND / 2;
    world
        .decide(|run, turn| run.finish_activity(&held.token, ActivityFinish::Completed(None), "worker", turn))
        .unwrap();
    world.step(vec![finish()]);
    assert!(!world.run.is_running());
}

#[test]
fn a_first_task_still_waits_for_its_time() {
    let mut world = World::start_with(Start {
        delay: HOUR,
        ..Start::default()
    });
    let request = atoll_workflow_core::SignalRequest::default();
    world.decide(|run, turn| run.signal(request, turn)).unwrap();
    assert!(world.poll().is_none());
    world.wait(HOUR);
    world.step(vec![finish()]);
    assert!(!world.run.is_running());
}

#[test]
fn a_workflow_task_is_given_out_again_after_its_own_time() {
    let mut world = World::start();
    let _lost = world.poll().unwrap();
    set_back(&mut world, 48 * HOUR);
    assert_eq!(world.run.deadline(), world.now + 10 * SECOND);
    world.wait(10 * SECOND);
    world.step(vec![finish()]);
    assert!(!world.run.is_running());
}

#[test]
fn a_task_leaves_the_queue_of_one_worker_after_its_own_time() {
    let mut world = World::start();
    let task = world.poll().unwrap();
    let sticky = StickyExecutionAttributes {
        worker_task_queue: Some(TaskQueue {
            name: "sticky".to_owned(),
            ..Default::default()
        }),
        schedule_to_start_timeout: Some(atoll_workflow_core::duration(5 * SECOND)),
    };
    let completion = Completion {
        force_new: true,
        ..Default::default()
    }
    .with_sticky(Some(&sticky));
    world.complete_with(&task, completion).unwrap();
    set_back(&mut world, 48 * HOUR);
    assert_eq!(world.run.deadline(), world.now + 5 * SECOND);
    world.wait(5 * SECOND);
    let task = world.run.state.task.as_ref().unwrap();
    assert!(task.sticky_queue.is_empty());
}

#[test]
fn an_activity_runs_out_of_its_own_time() {
    for (length, change) in [(10, 0), (2, 1), (20, 2)] {
        let mut world = World::start();
        world.step(vec![activity_with("a", |wanted| {
            let some = |seconds: i64| Some(atoll_workflow_core::duration(seconds * SECOND));
            match change {
                1 => wanted.heartbeat_timeout = some(2),
                2 => {
                    wanted.start_to_close_timeout = None;
                    wanted.schedule_to_close_timeout = some(20);
                }
                _ => {}
            }
        })]);
        let held = take_activity(&mut world);
        world.now += SECOND;
        world
            .decide(|run, turn| run.heartbeat(&held.token, None, turn))
            .unwrap();
        set_back(&mut world, 48 * HOUR);
        assert_eq!(world.run.deadline(), world.now + length * SECOND, "{change}");
    }
    // One that nobody has taken.
    let mut world = World::start();
    world.step(vec![activity_with("a", |wanted| {
        wanted.schedule_to_start_timeout = Some(atoll_workflow_core::duration(3 * SECOND));
        wanted.schedule_to_close_timeout = Some(atoll_workflow_core::duration(HOUR));
    })]);
    set_back(&mut world, 48 * HOUR);
    assert_eq!(world.run.deadline(), world.now + 3 * SECOND);
}

#[test]
fn the_next_attempt_waits_as_long_as_it_was_to() {
    let mut world = World::start();
    world.step(vec![activity("a")]);
    let held = take_activity(&mut world);
    let failed = ActivityFinish::Failed {
        failure: Failure::default(),
        heartbeat: None,
    };
    world
        .decide(|run, turn| run.finish_activity(&held.token, failed, "worker", turn))
        .unwrap();
    set_back(&mut world, 48 * HOUR);
    assert_eq!(world.run.deadline(), world.now + SECOND);
    world.wait(SECOND);
    take_activity(&mut world);
}

#[test]
fn a_timer_is_a_point_in_time_and_stays() {
    let mut world = World::start();
    world.step(vec![timer("t", HOUR)]);
    let at = world.run.deadline();
    world.crash();
    world.now -= 48 * HOUR;
    assert!(
        !world.run.is_ahead(world.now),
        "there is nothing to count from now"
    );
    assert_eq!(world.run.deadline(), at);
}

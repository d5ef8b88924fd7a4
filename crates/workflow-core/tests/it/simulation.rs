//! Random lives of a workflow: a worker that answers late, twice or never, signals, cancellations, updates, timeouts and
//! crashes in any order. After every step the history is checked; at the end nothing may be stuck.
//!
//! Built with `SEEDS=10000` it runs more of them; with `SEED=7` one, and shows its history.

use atoll_workflow_core::{
    ActivityFinish, CancelRequest, ChildEnd, Completion, Outgoing, SignalRequest, StartedTask, Terminate,
};
use prost::Message as _;
use temporalio_protos::temporal::api::command::v1 as command;
use temporalio_protos::temporal::api::command::v1::command::Attributes;
use temporalio_protos::temporal::api::failure::v1::Failure;
use temporalio_protos::temporal::api::history::v1 as history;
use temporalio_protos::temporal::api::history::v1::history_event::Attributes as Event;
use temporalio_protos::temporal::api::protocol::v1::Message;
use temporalio_protos::temporal::api::update::v1 as update;

use crate::support::{self, SECOND, World, activity_with, cancel_timer, child, command, finish, timer};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[test]
fn no_seed_breaks_a_history() {
    if let Some(seed) = option_env!("SEED") {
        let world = live(seed.parse().unwrap());
        println!("{}", world.types().join("\n"));
        return;
    }
    let seeds = option_env!("SEEDS").map_or(1_000, |count| count.parse().unwrap());
    let mut events = 0;
    for seed in 1..=seeds {
        events += live(seed).run.events.len();
    }
    assert!(
        events > 20 * usize::try_from(seeds).unwrap(),
        "the lives are too short: {events} events"
    );
}

fn live(seed: u64) -> World {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut world = World::start();
    let mut held: Vec<StartedTask> = Vec::new();
    let mut activities = Vec::new();
    let mut number = 0;
    for _ in 0..120 {
        number += 1;
        match random.below(16) {
            0..=3 => held.extend(world.poll()),
            4..=7 => {
                if let Some(task) = held.last().cloned() {
                    let completion = answer(&world, &task, &mut random, number);
                    // Late and double answers are refused, and change nothing.
                    let before = world.run.events.len();
                    if world.complete_with(&task, completion).is_err() {
                        assert_eq!(before, world.run.events.len(), "seed {seed}");
                    }
                    if random.chance(90) {
                        held.pop();
                    }
                }
            }
            8 => {
                let pending: Vec<_> = world
                    .run
                    .state
                    .activities
                    .values()
                    .map(|found| (found.scheduled_id, found.stamp))
                    .collect();
                for (id, stamp) in pending {
                    if let Ok(started) =
                        world.decide(|run, turn| run.start_activity(id, stamp, "worker", turn))
                    {
                        activities.push(started.token);
                    }
                }
            }
            9 | 10 => {
                if let Some(token) = activities.pop() {
                    let end = match random.below(4) {
                        0 => ActivityFinish::Failed {
                            failure: Failure::default(),
                            heartbeat: None,
                        },
                        1 => ActivityFinish::Canceled(None),
                        _ => ActivityFinish::Completed(None),
                    };
                    let _ = world.decide(|run, turn| run.finish_activity(&token, end, "worker", turn));
                    if random.chance(10) {
                        activities.push(token);
                    }
                }
            }
            11 => {
                let request = SignalRequest {
                    name: "s".to_owned(),
                    request_id: if random.chance(50) {
                        format!("r{}", number / 3)
                    } else {
                        String::new()
                    },
                    ..Default::default()
                };
                let _ = world.decide(|run, turn| run.signal(request, turn));
            }
            12 => {
                let length = i64::try_from(random.below(15_000)).unwrap() * SECOND / 1000;
                world.wait(length);
            }
            13 => {
                let request = ask(&format!("u{}", number / 2));
                let _ = world.decide(|run, turn| run.update(request, turn));
            }
            14 => {
                if random.chance(30) {
                    world.crash();
                } else if random.chance(10) {
                    let _ = world.decide(|run, turn| run.request_cancel(CancelRequest::default(), turn));
                } else if random.chance(2) {
                    let _ = world.decide(|run, turn| run.terminate(Terminate::default(), turn));
                }
            }
            _ => deliver(&mut world, &mut random),
        }
        if random.chance(40) {
            world.effects();
        }
    }
    settle(&mut world, seed);
    world
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

/// What a worker might say to a task.
fn answer(world: &World, task: &StartedTask, random: &mut Random, number: u64) -> Completion {
    let mut commands: Vec<command::Command> = Vec::new();
    let mut messages = Vec::new();
    let say = |id: &str, name: &str, body: Vec<u8>| Message {
        id: format!("{id}/{name}"),
        protocol_instance_id: id.to_owned(),
        body: Some(prost_wkt_types::Any {
            type_url: format!("type.googleapis.com/temporal.api.update.v1.{name}"),
            value: body,
        }),
        ..Default::default()
    };
    let place = |id: String| {
        command(Attributes::ProtocolMessageCommandAttributes(
            command::ProtocolMessageCommandAttributes { message_id: id },
        ))
    };
    for asked in &task.messages {
        let id = asked.protocol_instance_id.as_str();
        if random.chance(60) {
            let acceptance = say(id, "Acceptance", update::Acceptance::default().encode_to_vec());
            commands.push(place(acceptance.id.clone()));
            messages.push(acceptance);
            if random.chance(70) {
                let response = update::Response {
                    meta: Some(update::Meta {
                        update_id: id.to_owned(),
                        ..Default::default()
                    }),
                    outcome: Some(update::Outcome::default()),
                };
                let response = say(id, "Response", response.encode_to_vec());
                commands.push(place(response.id.clone()));
                messages.push(response);
            }
        } else if random.chance(80) {
            messages.push(say(id, "Rejection", update::Rejection::default().encode_to_vec()));
        }
    }
    for step in 0..random.below(4) {
        commands.push(match random.below(6) {
            0 | 1 => activity_with(&format!("a{number}-{step}"), |wanted| {
                wanted.start_to_close_timeout = Some(atoll_workflow_core::duration(3 * SECOND));
            }),
            2 => timer(
                &format!("t{number}-{step}"),
                i64::try_from(random.below(20)).unwrap() * SECOND,
            ),
            3 => match world.run.state.timers.keys().next() {
                Some(id) => cancel_timer(id),
                None => timer(&format!("t{number}-{step}"), SECOND),
            },
            4 => child(&format!("c{number}-{step}")),
            _ => match world.run.state.activities.keys().next() {
                Some(id) => command(Attributes::RequestCancelActivityTaskCommandAttributes(
                    command::RequestCancelActivityTaskCommandAttributes {
                        scheduled_event_id: *id,
                    },
                )),
                None => timer(&format!("t{number}-{step}"), SECOND),
            },
        });
    }
    if random.chance(3) {
        commands.push(finish());
    }
    Completion {
        commands,
        messages,
        identity: "worker".to_owned(),
        return_new: false,
        force_new: random.chance(5),
        ..Default::default()
    }
}

/// The post: children start and end, sometimes twice.
fn deliver(world: &mut World, random: &mut Random) {
    let Some(letter) = world.run.state.outbox.first().cloned() else {
        return;
    };
    let twice = random.chance(20);
    if let Some(Outgoing::StartChild(id)) = letter.body {
        world.decide(|run, turn| run.child_started(id, "child-run", turn));
        let end = ChildEnd {
            initiated_id: id,
            workflow_id: world
                .run
                .state
                .children
                .get(&id)
                .map_or(String::new(), |found| found.workflow_id.clone()),
            run_id: "child-run".to_owned(),
            workflow_type: "Child".to_owned(),
            event: history::HistoryEvent {
                attributes: Some(Event::WorkflowExecutionCompletedEventAttributes(
                    history::WorkflowExecutionCompletedEventAttributes::default(),
                )),
                ..Default::default()
            },
        };
        if random.chance(60) {
            world.decide(|run, turn| run.child_ended(&end, turn));
            if twice {
                world.decide(|run, turn| run.child_ended(&end, turn));
            }
        }
    }
    if !twice {
        world.decide(|run, _| run.discard_letter(letter.number));
    }
}

/// A patient worker with nothing more to ask for must always be able to bring the workflow to its end.
fn settle(world: &mut World, seed: u64) {
    for _ in 0..200 {
        if !world.run.is_running() {
            return;
        }
        if let Some(task) = world.poll() {
            let _ = world.complete(&task, vec![finish()]);
            continue;
        }
        if world.run.state.task.is_none() {
            let request = SignalRequest {
                name: "end".to_owned(),
                ..Default::default()
            };
            let _ = world.decide(|run, turn| run.signal(request, turn));
            continue;
        }
        // Somebody else has the task: it will time out.
        let deadline = world.run.deadline();
        assert!(
            deadline != 0,
            "seed {seed}: a task is out and nothing will bring it back"
        );
        world.wait((deadline - world.now).max(0));
    }
    panic!("seed {seed} is stuck:\n{}", support::types(&world.run).join("\n"));
}

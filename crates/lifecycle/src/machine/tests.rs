//! Every decision by itself. Those about rest are in `resting`; what any history of
//! them keeps is in `histories`.

use super::*;

use SandboxState::{
    Deleted, Deleting, Failed, Paused, Pausing, Resuming, Running, Starting, Stopped, Stopping,
};
use atoll_types::{
    Code, Fault, IdleAction, IdlePolicy, SaveKind, Saved, SnapshotId, TimeLeft, TimeoutAction,
};

use crate::{CpuMark, Work};

mod histories;
mod resting;

const T0: Timestamp = Timestamp(1_000_000);

fn instance(n: u8) -> InstanceId {
    InstanceId::from_entropy([n; 20])
}

fn snapshot(n: u8) -> SnapshotId {
    SnapshotId::from_entropy([n; 20])
}

fn deadline_reached() -> Input {
    Input::DeadlineReached {
        snapshot: snapshot(1),
        pause_keeps: SaveKind::Memory,
        work: Some(NO_WORK),
    }
}

const NO_WORK: Work = Work {
    connected_at: None,
    cpu: (CpuMark::NONE, CpuMark::NONE),
};

fn saved() -> Input {
    Input::Saved {
        snapshot: snapshot(1),
        bytes: 7,
    }
}

fn resume() -> Input {
    Input::Resume {
        instance: instance(1),
        timeout_millis: None,
    }
}

fn policy() -> Policy {
    Policy {
        timeout_millis: Some(60_000),
        retention_millis: Some(60_000),
        ..Policy::default()
    }
}

/// A record in each state, as the machine itself makes it.
fn record(state: SandboxState) -> Record {
    let starting = create(
        NewRecord {
            boot: Boot::Cold(instance(1)),
            policy: policy(),
        },
        T0,
    )
    .next;
    let go = |record: &Record, input| step(record, input, T0).expect("accepted").next;
    let running = || {
        go(
            &starting,
            Input::Started {
                instance: instance(1),
            },
        )
    };
    let gone = |record: &Record| {
        go(
            record,
            Input::Destroyed {
                instance: instance(1),
            },
        )
    };
    let killed = || {
        go(
            &running(),
            Input::Kill {
                reason: EndReason::Killed,
            },
        )
    };
    let pausing = || {
        let (snapshot, kind) = (snapshot(1), SaveKind::Memory);
        go(&running(), Input::Pause { snapshot, kind })
    };
    let stopping = || {
        go(
            &running(),
            Input::Stop {
                snapshot: snapshot(1),
            },
        )
    };
    let paused = || gone(&go(&pausing(), saved()));
    match state {
        Starting => starting,
        Running => running(),
        Pausing => pausing(),
        Paused => paused(),
        // Under the same id, which a real one would not be: the tables below get by with one name.
        Resuming => go(&paused(), resume()),
        Stopping => stopping(),
        Stopped => gone(&go(&stopping(), saved())),
        Deleting => killed(),
        Deleted => gone(&killed()),
        Failed => gone(&go(
            &running(),
            Input::Ended {
                instance: instance(1),
                fate: InstanceFate::OutOfMemory,
            },
        )),
    }
}

/// `state + input` in words: the next state, what is recorded, what is done; or the refusal.
fn outcome(state: SandboxState, input: Input, now: Timestamp) -> String {
    outcome_of(&record(state), input, now)
}

fn outcome_of(record: &Record, input: Input, now: Timestamp) -> String {
    match step(record, input, now) {
        Err(refused) => format!("refused: {refused}; {}", refused.instead),
        Ok(Transition { next, facts, effects }) => {
            let mut text = next.state.to_string();
            for fact in facts {
                text += match fact {
                    Happening::Created => " +created",
                    Happening::Started { .. } => " +started",
                    Happening::Extended { .. } => " +extended",
                    Happening::Paused { .. } => " +paused",
                    Happening::Stopped { .. } => " +stopped",
                    Happening::SaveFailed { .. } => " +save-failed",
                    Happening::Resumed { .. } => " +resumed",
                    Happening::ResumeFailed { .. } => " +resume-failed",
                    Happening::Ended { .. } => " +ended",
                    Happening::Failed { .. } => " +failed",
                };
            }
            for effect in effects {
                text += match effect {
                    Effect::StartInstance(_) => " start",
                    Effect::DestroyInstance(id) if id == instance(1) => " destroy",
                    Effect::DestroyInstance(_) => " destroy-other",
                    Effect::SaveInstance { .. } => " save",
                    Effect::ThawInstance(_) => " thaw",
                    Effect::RestoreInstance { .. } => " restore",
                    Effect::DropSnapshot(id) if id == snapshot(1) => " drop",
                    Effect::DropSnapshot(_) => " drop-other",
                };
            }
            text
        }
    }
}

#[test]
fn every_state_meets_every_input() {
    let started = || Input::Started {
        instance: instance(1),
    };
    let other_started = || Input::Started {
        instance: instance(2),
    };
    let start_failed = || Input::StartFailed { why: "x".into() };
    let kill = || Input::Kill {
        reason: EndReason::Killed,
    };
    let ended = || Input::Ended {
        instance: instance(1),
        fate: InstanceFate::OutOfMemory,
    };
    let destroyed = || Input::Destroyed {
        instance: instance(1),
    };
    let extend = || Input::Extend(Extension::For { timeout_millis: 1 });
    let touched = || Input::Touched;
    let deadline = deadline_reached;
    let alive = || Input::Recover(Liveness::Alive);
    let gone = || Input::Recover(Liveness::Gone);
    let early = T0.plus_millis(59_999);
    let late = T0.plus_millis(60_000);
    let over = "its timeout has been reached; create a new sandbox";
    let table = [
        (Starting, started(), early, "running +started".into()),
        (
            Starting,
            other_started(),
            early,
            "running +started destroy".into(),
        ),
        (Starting, start_failed(), early, "deleting destroy".into()),
        (Starting, kill(), early, "deleting destroy".into()),
        (Starting, ended(), early, "deleting destroy".into()),
        (Starting, destroyed(), early, "failed +failed".into()),
        (Starting, extend(), early, "starting +extended".into()),
        (
            Starting,
            extend(),
            late,
            format!("refused: cannot extend this sandbox: {over}"),
        ),
        (
            Starting,
            touched(),
            early,
            "refused: cannot use this sandbox: it is still starting; wait until it runs".into(),
        ),
        (Starting, deadline(), early, "starting".into()),
        (Starting, deadline(), late, "deleting destroy".into()),
        (Starting, alive(), early, "deleting destroy".into()),
        (Starting, gone(), early, "deleting destroy".into()),
        (Running, started(), early, "running".into()),
        (Running, other_started(), early, "running destroy-other".into()),
        (
            Running,
            start_failed(),
            early,
            "refused: cannot fail the start of this sandbox: it has started; report how its instance ended"
                .into(),
        ),
        (Running, kill(), early, "deleting destroy".into()),
        (Running, ended(), early, "deleting destroy".into()),
        (Running, destroyed(), early, "failed +failed".into()),
        (Running, extend(), early, "running +extended".into()),
        (
            Running,
            extend(),
            late,
            format!("refused: cannot extend this sandbox: {over}"),
        ),
        (Running, touched(), early, "running".into()),
        (
            Running,
            touched(),
            late,
            format!("refused: cannot use this sandbox: {over}"),
        ),
        (Running, deadline(), early, "running".into()),
        (Running, deadline(), late, "deleting destroy".into()),
        (Running, alive(), early, "running thaw".into()),
        (Running, gone(), early, "deleting destroy".into()),
        (Deleting, started(), early, "deleting destroy".into()),
        (Deleting, other_started(), early, "deleting destroy-other".into()),
        (Deleting, start_failed(), early, "deleting".into()),
        (Deleting, kill(), early, "deleting".into()),
        (Deleting, ended(), early, "deleting".into()),
        (Deleting, destroyed(), early, "deleted +ended".into()),
        (
            Deleting,
            extend(),
            early,
            "refused: cannot extend this sandbox: it is deleting; create a new sandbox".into(),
        ),
        (
            Deleting,
            touched(),
            early,
            "refused: cannot use this sandbox: it is deleting: killed on request; create a new sandbox"
                .into(),
        ),
        (Deleting, deadline(), late, "deleting".into()),
        (Deleting, alive(), early, "deleting destroy".into()),
        (Deleting, gone(), early, "deleting destroy".into()),
        (Deleted, started(), early, "deleted destroy".into()),
        (Deleted, start_failed(), early, "deleted".into()),
        (Deleted, kill(), early, "deleted".into()),
        (Deleted, ended(), early, "deleted".into()),
        (Deleted, destroyed(), early, "deleted".into()),
        (
            Deleted,
            extend(),
            early,
            "refused: cannot extend this sandbox: it is deleted; create a new sandbox".into(),
        ),
        (Deleted, deadline(), late, "deleted".into()),
        (Deleted, alive(), early, "deleted".into()),
        (Failed, started(), early, "failed destroy".into()),
        (Failed, kill(), early, "deleted".into()),
        (Failed, destroyed(), early, "failed".into()),
        (
            Failed,
            touched(),
            early,
            format!(
                "refused: cannot use this sandbox: it is failed: {}; create a new sandbox",
                EndReason::OutOfMemory.explain()
            ),
        ),
        (Failed, deadline(), late, "failed".into()),
        (Failed, gone(), early, "failed".into()),
    ];
    for (state, input, now, expected) in table {
        assert_eq!(
            outcome(state, input.clone(), now),
            expected,
            "{state} + {input:?}"
        );
    }
}

#[test]
fn a_warm_sandbox_runs_at_once_and_a_cold_one_is_started() {
    let new = |boot| NewRecord {
        boot,
        policy: Policy {
            timeout_millis: Some(5),
            ..Policy::default()
        },
    };
    let cold = create(new(Boot::Cold(instance(1))), T0);
    assert_eq!(cold.next.state, Starting);
    assert_eq!(cold.effects, [Effect::StartInstance(instance(1))]);
    assert_eq!(cold.next.deadline, Some(Timestamp(T0.0 + 5)));
    let warm = create(new(Boot::Warm(instance(1))), T0);
    assert_eq!(warm.next.running_instance(), Some(&instance(1)));
    assert_eq!(warm.effects, []);
    assert_eq!(warm.facts.len(), 2);
}

#[test]
fn the_earlier_of_timeout_and_idle_counts() {
    let with = |deadline: Option<i64>, idle_after: Option<u64>| {
        next_deadline(&Record {
            deadline: deadline.map(Timestamp),
            policy: Policy {
                idle: idle_after.map(|after_millis| IdlePolicy {
                    after_millis,
                    action: IdleAction::Kill,
                }),
                ..Policy::default()
            },
            last_used_at: Timestamp(100),
            ..record(Running)
        })
    };
    assert_eq!(with(None, None), None);
    assert_eq!(
        with(Some(500), None),
        Some((Timestamp(500), DeadlineKind::Timeout))
    );
    assert_eq!(with(None, Some(50)), Some((Timestamp(150), DeadlineKind::Idle)));
    assert_eq!(
        with(Some(500), Some(50)),
        Some((Timestamp(150), DeadlineKind::Idle))
    );
    assert_eq!(
        with(Some(120), Some(50)),
        Some((Timestamp(120), DeadlineKind::Timeout))
    );
    assert_eq!(
        with(Some(150), Some(50)),
        Some((Timestamp(150), DeadlineKind::Timeout))
    );
    assert_eq!(with(None, Some(u64::MAX)).map(|(at, _)| at.0), Some(i64::MAX));
}

#[test]
fn a_sandbox_that_broke_says_so_even_when_it_is_killed_meanwhile() {
    let dying = step(
        &record(Running),
        Input::Ended {
            instance: instance(1),
            fate: InstanceFate::OutOfMemory,
        },
        T0,
    )
    .unwrap()
    .next;
    let killed = step(
        &dying,
        Input::Kill {
            reason: EndReason::Killed,
        },
        T0,
    )
    .unwrap()
    .next;
    let end = step(
        &killed,
        Input::Destroyed {
            instance: instance(1),
        },
        T0,
    )
    .unwrap();
    assert_eq!(end.next.state, Deleted);
    assert_eq!(end.next.end, Some(EndReason::OutOfMemory));
    assert_eq!(
        end.facts,
        [Happening::Failed {
            reason: EndReason::OutOfMemory
        }]
    );
}

#[test]
fn an_agent_of_another_generation_is_the_reason_of_the_end() {
    let other = Liveness::Incompatible { agent: 1, server: 2 };
    let found = step(&record(Running), Input::Recover(other), T0).unwrap();
    let reason = EndReason::Incompatible { agent: 1, server: 2 };
    assert_eq!(found.next.end, Some(reason.clone()));
    assert_eq!(
        reason.explain(),
        "its agent speaks generation 1 of the guest protocol, this server 2; create it again with this version"
    );
    let gone = Input::Destroyed {
        instance: instance(1),
    };
    let end = step(&found.next, gone, T0).unwrap();
    assert_eq!(end.next.state, Failed);
    assert_eq!(end.facts, [Happening::Failed { reason }]);
}

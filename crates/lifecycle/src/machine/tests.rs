use super::*;
use proptest::prelude::*;

use SandboxState::{Deleted, Deleting, Failed, Running, Starting};
use atoll_types::IdleAction;

const T0: Timestamp = Timestamp(1_000_000);

fn instance(n: u8) -> InstanceId {
    InstanceId::from_entropy([n; 20])
}

/// A record in each state, as the machine itself makes it.
fn record(state: SandboxState) -> Record {
    let starting = create(
        NewRecord {
            boot: Boot::Cold(instance(1)),
            timeout_millis: Some(60_000),
            idle: None,
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
    match state {
        Starting => starting,
        Running => running(),
        Deleting => killed(),
        Deleted => gone(&killed()),
        Failed => gone(&go(
            &running(),
            Input::Ended {
                fate: InstanceFate::OutOfMemory,
            },
        )),
    }
}

/// `state + input` in words: the next state, what is recorded, what is done; or the refusal.
fn outcome(state: SandboxState, input: Input, now: Timestamp) -> String {
    match step(&record(state), input, now) {
        Err(refused) => format!("refused: {refused}; {}", refused.instead),
        Ok(Transition { next, facts, effects }) => {
            let mut text = next.state.to_string();
            for fact in facts {
                text += match fact {
                    Happening::Created => " +created",
                    Happening::Started { .. } => " +started",
                    Happening::Extended { .. } => " +extended",
                    Happening::Ended { .. } => " +ended",
                    Happening::Failed { .. } => " +failed",
                };
            }
            for effect in effects {
                text += match effect {
                    Effect::StartInstance(_) => " start",
                    Effect::DestroyInstance(id) if id == instance(1) => " destroy",
                    Effect::DestroyInstance(_) => " destroy-other",
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
        fate: InstanceFate::OutOfMemory,
    };
    let destroyed = || Input::Destroyed {
        instance: instance(1),
    };
    let extend = || Input::Extend(Extension::For { timeout_millis: 1 });
    let touched = || Input::Touched;
    let deadline = || Input::DeadlineReached;
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
        (Running, alive(), early, "running".into()),
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
        timeout_millis: Some(5),
        idle: None,
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
            idle: idle_after.map(|after_millis| IdlePolicy {
                after_millis,
                action: IdleAction::Kill,
            }),
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

fn any_instance() -> impl Strategy<Value = InstanceId> {
    (1u8..4).prop_map(instance)
}

fn any_reason() -> impl Strategy<Value = EndReason> {
    prop_oneof![
        Just(EndReason::Killed),
        Just(EndReason::OutOfMemory),
        Just(EndReason::StartFailed("x".into())),
    ]
}

fn any_input() -> impl Strategy<Value = Input> {
    prop_oneof![
        any_instance().prop_map(|instance| Input::Started { instance }),
        Just(Input::StartFailed { why: "x".into() }),
        any_reason().prop_map(|reason| Input::Kill { reason }),
        prop_oneof![
            Just(InstanceFate::OutOfMemory),
            Just(InstanceFate::Died("x".into())),
            Just(InstanceFate::Lost)
        ]
        .prop_map(|fate| Input::Ended { fate }),
        any_instance().prop_map(|instance| Input::Destroyed { instance }),
        prop_oneof![
            any::<u64>().prop_map(|timeout_millis| Extension::For { timeout_millis }),
            any::<i64>().prop_map(|at| Extension::Until(Timestamp(at))),
            Just(Extension::Unlimited),
        ]
        .prop_map(Input::Extend),
        Just(Input::Touched),
        Just(Input::DeadlineReached),
        prop_oneof![Just(Liveness::Alive), Just(Liveness::Gone)].prop_map(Input::Recover),
    ]
}

fn any_new() -> impl Strategy<Value = NewRecord> {
    (
        prop_oneof![
            any_instance().prop_map(Boot::Cold),
            any_instance().prop_map(Boot::Warm)
        ],
        proptest::option::of(0u64..2000),
        proptest::option::of(0u64..2000),
    )
        .prop_map(|(boot, timeout_millis, idle)| NewRecord {
            boot,
            timeout_millis,
            idle: idle.map(|after_millis| IdlePolicy {
                after_millis,
                action: IdleAction::Kill,
            }),
        })
}

fn is_over(state: SandboxState) -> bool {
    !state.is_live()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_the_promises(
        new in any_new(),
        inputs in proptest::collection::vec((any_input(), 0u64..500), 0..60),
    ) {
        let mut now = T0;
        let Transition { next: mut record, .. } = create(new, now);
        let mut endings = 0;
        for (input, later) in inputs {
            now = now.plus_millis(later);
            let expired_before = expired(&record, now).is_some();
            let Ok(Transition { next, facts, effects }) = step(&record, input.clone(), now) else {
                prop_assert!(!matches!(input, Input::Kill { .. }), "a kill was refused");
                continue;
            };
            endings += facts
                .iter()
                .filter(|fact| matches!(fact, Happening::Ended { .. } | Happening::Failed { .. }))
                .count();

            prop_assert_eq!(is_over(next.state), next.instance.is_none());
            prop_assert_eq!(is_over(next.state), next.ended_at.is_some());
            prop_assert_eq!(is_over(next.state), endings == 1);
            prop_assert!(endings <= 1);
            prop_assert_eq!(next.end.is_some(), !matches!(next.state, Starting | Running));
            prop_assert!(next.last_used_at >= record.last_used_at);
            if record.end.is_some() {
                prop_assert_eq!(&next.end, &record.end, "the first reason stays");
            }
            // Nothing comes back to life, by whatever way.
            let rank = |state| match state {
                Starting => 0, Running => 1, Deleting => 2, Failed => 3, Deleted => 4,
            };
            prop_assert!(rank(next.state) >= rank(record.state));
            if is_over(record.state) {
                prop_assert!(!effects.iter().any(|e| matches!(e, Effect::StartInstance(_))));
            }
            if matches!(input, Input::DeadlineReached) && expired_before {
                prop_assert_eq!(next.state, Deleting);
            }
            // An instance that leaves the record, or never enters it, is destroyed.
            if let Input::Started { instance } = &input && next.running_instance() != Some(instance) {
                prop_assert!(effects.contains(&Effect::DestroyInstance(instance.clone())));
            }
            if next.state == Deleting && record.state != Deleting {
                prop_assert_eq!(effects, next.instance.clone().map(Effect::DestroyInstance).into_iter().collect::<Vec<_>>());
            }
            record = next;
        }

        // A kill now, and whatever is asked to be destroyed is: it is deleted.
        let Transition { next, .. } = step(&record, Input::Kill { reason: EndReason::Killed }, now).unwrap();
        record = next;
        if let Some(instance) = record.instance.clone() {
            record = step(&record, Input::Destroyed { instance }, now).unwrap().next;
        }
        prop_assert_eq!(record.state, Deleted);
        prop_assert_eq!(next_deadline(&record), None);
    }

    #[test]
    fn a_passed_deadline_is_final(
        new in any_new(),
        inputs in proptest::collection::vec(any_input(), 0..20),
    ) {
        let Transition { next: mut record, .. } = create(new, T0);
        let Some((at, _)) = next_deadline(&record) else { return Ok(()) };
        // A restart is the one thing that counts as a use; only the timeout survives it.
        for input in inputs.into_iter().filter(|input| !matches!(input, Input::Recover(_) | Input::Started { .. })) {
            if let Ok(transition) = step(&record, input, at) {
                record = transition.next;
            }
        }
        let end = step(&record, Input::DeadlineReached, at).unwrap().next;
        prop_assert!(matches!(end.state, Deleting | Deleted | Failed));
    }
}

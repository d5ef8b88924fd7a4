//! Any history, likely or not, keeps the promises.

use std::collections::BTreeSet;

use atoll_types::Id;
use proptest::prelude::*;

use super::*;

fn any_instance() -> impl Strategy<Value = InstanceId> {
    (1u8..4).prop_map(instance)
}

fn any_snapshot() -> impl Strategy<Value = SnapshotId> {
    (1u8..4).prop_map(snapshot)
}

fn any_kind() -> impl Strategy<Value = SaveKind> {
    prop_oneof![Just(SaveKind::Memory), Just(SaveKind::Filesystem)]
}

fn any_reason() -> impl Strategy<Value = EndReason> {
    prop_oneof![
        Just(EndReason::Killed),
        Just(EndReason::OutOfMemory),
        Just(EndReason::StartFailed("x".into())),
    ]
}

fn any_fate() -> impl Strategy<Value = InstanceFate> {
    prop_oneof![
        Just(InstanceFate::OutOfMemory),
        Just(InstanceFate::Died("x".into())),
        Just(InstanceFate::Lost)
    ]
}

fn any_input() -> impl Strategy<Value = Input> {
    let why = || "x".to_owned();
    prop_oneof![
        any_instance().prop_map(|instance| Input::Started { instance }),
        Just(Input::StartFailed { why: why() }),
        (any_snapshot(), any_kind()).prop_map(|(snapshot, kind)| Input::Pause { snapshot, kind }),
        any_snapshot().prop_map(|snapshot| Input::Stop { snapshot }),
        any_snapshot().prop_map(|snapshot| Input::Saved { snapshot, bytes: 1 }),
        any_snapshot().prop_map(move |snapshot| Input::SaveFailed { snapshot, why: why() }),
        (any_instance(), proptest::option::of(any::<u64>())).prop_map(|(instance, timeout_millis)| {
            Input::Resume {
                instance,
                timeout_millis,
            }
        }),
        any_instance().prop_map(move |instance| Input::ResumeFailed { instance, why: why() }),
        any_reason().prop_map(|reason| Input::Kill { reason }),
        (any_instance(), any_fate()).prop_map(|(instance, fate)| Input::Ended { instance, fate }),
        any_instance().prop_map(|instance| Input::Destroyed { instance }),
        prop_oneof![
            any::<u64>().prop_map(|timeout_millis| Extension::For { timeout_millis }),
            any::<i64>().prop_map(|at| Extension::Until(Timestamp(at))),
            Just(Extension::Unlimited),
        ]
        .prop_map(Input::Extend),
        Just(Input::Touched),
        (any_snapshot(), any_kind(), any_work()).prop_map(|(snapshot, pause_keeps, work)| {
            Input::DeadlineReached {
                snapshot,
                pause_keeps,
                work,
            }
        }),
        prop_oneof![
            Just(Liveness::Alive),
            Just(Liveness::Gone),
            Just(Liveness::Incompatible { agent: 1, server: 2 })
        ]
        .prop_map(Input::Recover),
    ]
}

/// At moments around those of a history.
fn any_work() -> impl Strategy<Value = Option<Work>> {
    let moment = || (0u64..60_000).prop_map(|millis| T0.plus_millis(millis));
    let mark = move || (moment(), 0u64..1_000_000).prop_map(|(at, micros)| CpuMark { at, micros });
    let work = (proptest::option::of(moment()), (mark(), mark()));
    proptest::option::of(work.prop_map(|(connected_at, cpu)| Work { connected_at, cpu }))
}

fn any_policy() -> impl Strategy<Value = Policy> {
    (
        proptest::option::of(0u64..2000),
        prop_oneof![
            Just(TimeoutAction::Kill),
            Just(TimeoutAction::Pause),
            Just(TimeoutAction::Stop)
        ],
        proptest::option::of((
            0u64..2000,
            prop_oneof![
                Just(IdleAction::Kill),
                Just(IdleAction::Pause),
                Just(IdleAction::Stop)
            ],
        )),
        proptest::option::of(0u64..2000),
    )
        .prop_map(|(timeout_millis, on_timeout, idle, retention_millis)| Policy {
            timeout_millis,
            on_timeout,
            idle: idle.map(|(after_millis, action)| IdlePolicy { after_millis, action }),
            retention_millis,
        })
}

fn any_new() -> impl Strategy<Value = NewRecord> {
    (
        prop_oneof![
            any_instance().prop_map(Boot::Cold),
            any_instance().prop_map(Boot::Warm)
        ],
        any_policy(),
    )
        .prop_map(|(boot, policy)| NewRecord { boot, policy })
}

fn is_over(state: SandboxState) -> bool {
    !state.is_live()
}

fn drops(effects: &[Effect], snapshot: &SnapshotId) -> bool {
    effects.contains(&Effect::DropSnapshot(snapshot.clone()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_the_promises(
        new in any_new(),
        inputs in proptest::collection::vec((any_input(), 0u64..500), 0..120),
    ) {
        let mut now = T0;
        let Transition { next: mut record, .. } = create(new, now);
        let mut endings = 0;
        for (input, later) in inputs {
            now = now.plus_millis(later);
            let due_before = deadlines::expired(&record, now);
            let Ok(Transition { next, facts, effects }) = step(&record, input.clone(), now) else {
                prop_assert!(!matches!(input, Input::Kill { .. }), "a kill was refused");
                continue;
            };
            endings += facts
                .iter()
                .filter(|fact| matches!(fact, Happening::Ended { .. } | Happening::Failed { .. }))
                .count();

            // What a record of each state names.
            let state = next.state;
            let rests = state.is_resting();
            if rests || is_over(state) {
                prop_assert!(rests || next.instance.is_none());
            } else {
                prop_assert!(next.instance.is_some());
            }
            if state != Deleting {
                prop_assert_eq!(next.saved.is_some(), rests || state == Resuming);
                prop_assert_eq!(next.saving.is_some(), matches!(state, Pausing | Stopping));
            }
            if let Some(saved) = &next.saved && rests {
                prop_assert_eq!(saved.rest(), state);
            }
            prop_assert_eq!(is_over(state), next.ended_at.is_some());
            prop_assert_eq!(is_over(state), endings == 1);
            prop_assert!(endings <= 1);
            prop_assert_eq!(next.end.is_some(), is_over(state) || state == Deleting);
            prop_assert!(next.last_used_at >= record.last_used_at);
            if record.end.is_some() {
                prop_assert_eq!(&next.end, &record.end, "the first reason stays");
            }

            // Nothing comes back from the way out.
            let rank = |state| match state {
                Deleting => 1, Failed => 2, Deleted => 3, _ => 0,
            };
            prop_assert!(rank(state) >= rank(record.state));
            if rank(record.state) > 0 {
                prop_assert!(effects.iter().all(
                    |effect| matches!(effect, Effect::DestroyInstance(_) | Effect::DropSnapshot(_))
                ));
            }
            if let (Input::DeadlineReached { work, .. }, Some(kind)) = (&input, due_before)
                && (kind != DeadlineKind::Idle
                    || work.is_some_and(|work| work.last_at(record.last_used_at).is_none()))
            {
                let expected: &[SandboxState] = match (record.state, deadlines::action(&record, kind)) {
                    (Running, TimeoutAction::Pause) => &[Pausing],
                    (Running, TimeoutAction::Stop) => &[Stopping],
                    _ => &[Deleting, Deleted],
                };
                prop_assert!(expected.contains(&state), "{kind} made it {state}");
            }

            // An instance that leaves the record, or never enters it, is destroyed or known to be gone.
            if let Input::Started { instance } = &input
                && !(matches!(state, Running | Pausing | Stopping) && next.instance.as_ref() == Some(instance))
            {
                prop_assert!(effects.contains(&Effect::DestroyInstance(instance.clone())));
            }
            if let Some(instance) = &record.instance && next.instance.as_ref() != Some(instance) {
                let gone = input == Input::Destroyed { instance: instance.clone() };
                prop_assert!(gone || effects.contains(&Effect::DestroyInstance(instance.clone())));
            }
            // Whoever does not want its instance any more has said so.
            if (rests || state == Deleting) && state != record.state && let Some(instance) = &next.instance {
                prop_assert!(effects.contains(&Effect::DestroyInstance(instance.clone())));
            }

            // What it rests on is given up only by running again or by ending, and then it is.
            if let Some(saved) = &record.saved {
                let given_up = state == Running || rank(state) > 0;
                if given_up {
                    prop_assert!(record.state == Deleting || drops(&effects, &saved.snapshot));
                } else {
                    prop_assert!(!drops(&effects, &saved.snapshot));
                    prop_assert_eq!(next.saved.as_ref(), Some(saved));
                }
            }
            // A save that is not kept is thrown away.
            if let Some(saving) = &record.saving && state != record.state && record.state != Deleting {
                let kept = next.saved.as_ref().is_some_and(|saved| saved.snapshot == saving.snapshot) && rests;
                prop_assert_eq!(!kept, drops(&effects, &saving.snapshot));
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
        prop_assert_eq!((record.instance.as_ref(), record.saved.as_ref()), (None, None));
        prop_assert_eq!(next_deadline(&record), None);
    }

    /// However often it rests, fails to rest and fails to come back: it runs for as long as it was given, within the
    /// moments that it spends between `Running` and being held still.
    #[test]
    fn what_a_sandbox_runs_and_nothing_else_consumes_its_lifetime(
        lifetime in 1u64..5000,
        turns in proptest::collection::vec((0u64..300, 0u64..10_000, 0u64..10_000, any::<bool>(), any::<bool>()), 0..40),
    ) {
        let policy = Policy { timeout_millis: Some(lifetime), on_timeout: TimeoutAction::Pause, ..Policy::default() };
        let mut record = create(NewRecord { boot: Boot::Warm(instance(1)), policy }, T0).next;
        let (mut now, mut left) = (T0, lifetime);
        for (runs, saves, rests, saves_well, comes_back_well) in turns {
            let go = |record: &Record, input, now| step(record, input, now).expect("accepted").next;
            now = now.plus_millis(runs);
            left = left.saturating_sub(runs);
            let pause = Input::Pause { snapshot: snapshot(1), kind: SaveKind::Memory };
            record = go(&record, pause, now);
            if !saves_well {
                record = go(&record, Input::SaveFailed { snapshot: snapshot(1), why: "x".into() }, now);
                record.hold_off = None;
                record = go(&record, Input::Pause { snapshot: snapshot(1), kind: SaveKind::Memory }, now);
            }
            now = now.plus_millis(saves);
            record = go(&record, saved(), now);
            record = go(&record, Input::Destroyed { instance: instance(1) }, now);
            prop_assert_eq!(record.deadline, None);
            now = now.plus_millis(rests);
            record = go(&record, resume(), now);
            if !comes_back_well {
                let failed = Input::ResumeFailed { instance: instance(1), why: "x".into() };
                now = now.plus_millis(saves);
                record = go(&record, failed, now);
                record = go(&record, Input::Destroyed { instance: instance(1) }, now);
                now = now.plus_millis(rests);
                record = go(&record, resume(), now);
            }
            record = go(&record, Input::Started { instance: instance(1) }, now);
            if left == 0 {
                left = lifetime;
            }
            prop_assert_eq!(record.deadline, Some(now.plus_millis(left)));
        }
    }

    #[test]
    fn a_passed_deadline_is_final(
        new in any_new(),
        inputs in proptest::collection::vec(any_input(), 0..20),
    ) {
        let Transition { next: mut record, .. } = create(new, T0);
        // Of its idle time a use is the end.
        record.policy.idle = None;
        let Some((at, _)) = next_deadline(&record) else { return Ok(()) };
        // A save that fails puts off.
        let spares = |input: &Input| matches!(
            input,
            Input::Recover(_) | Input::Started { .. } | Input::SaveFailed { .. } | Input::Resume { .. }
        );
        for input in inputs.into_iter().filter(|input| !spares(input)) {
            if let Ok(transition) = step(&record, input, at) {
                record = transition.next;
            }
        }
        let end = step(&record, deadline_reached(), at).unwrap().next;
        prop_assert!(!matches!(end.state, Starting | Running | Resuming), "{}", end.state);
    }

}

proptest! {
    // What goes wrong here takes several things at the wrong moment, a crash after a crash for instance; a few hundred
    // histories are too few to meet it.
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    /// A host that performs effects in any order, fails, and loses the server now and then.
    #[test]
    fn a_host_that_does_as_it_is_told_ends_up_with_what_the_record_names(
        new in any_new(),
        moves in proptest::collection::vec((any::<u8>(), any::<u8>(), 0u64..500), 0..150),
    ) {
        let mut now = T0;
        let mut fresh = 0u16;
        let mut host = Host::default();
        if let Boot::Warm(instance) = &new.boot {
            host.instances.insert(instance.clone());
        }
        let Transition { next, effects, .. } = create(new, now);
        let mut record = next;
        host.todo.extend(effects);

        for (what, which, later) in moves {
            now = now.plus_millis(later);
            fresh += 1;
            let input = match what % 12 {
                0 => Input::Pause { snapshot: Id::from_entropy(unused(fresh)), kind: SaveKind::Memory },
                1 => Input::Stop { snapshot: Id::from_entropy(unused(fresh)) },
                2 => Input::Resume { instance: Id::from_entropy(unused(fresh)), timeout_millis: Some(1000) },
                3 => Input::Touched,
                4 => Input::DeadlineReached {
                    snapshot: Id::from_entropy(unused(fresh)),
                    pause_keeps: SaveKind::Memory,
                    work: Some(NO_WORK),
                },
                // The server dies: what it was about to do is forgotten, what is on the host stays. It may die in the
                // middle of a save, too.
                5 => {
                    for effect in &host.todo {
                        if let Effect::SaveInstance { instance, .. } = effect && which % 2 == 0 {
                            host.still.insert(instance.clone());
                        }
                    }
                    host.todo.clear();
                    let there = record.instance.as_ref().is_some_and(|id| host.instances.contains(id));
                    // Snapshots that no row names are garbage, and collected; so are instances.
                    let named = record.saved.as_ref().map(|saved| saved.snapshot.clone());
                    host.snapshots.retain(|id| Some(id) == named.as_ref());
                    host.instances.retain(|id| Some(id) == record.instance.as_ref());
                    host.still.retain(|id| Some(id) == record.instance.as_ref());
                    Input::Recover(if there { Liveness::Alive } else { Liveness::Gone })
                }
                6 if which % 16 == 0 => Input::Kill { reason: EndReason::Killed },
                _ => match host.perform(which) {
                    Some(input) => input,
                    None => continue,
                },
            };
            let Ok(Transition { next, effects, .. }) = step(&record, input, now) else { continue };
            record = next;
            host.todo.extend(effects);

            // At every moment there is something to go on with.
            match record.state {
                Running | Pausing | Stopping => prop_assert!(
                    record.instance.as_ref().is_some_and(|id| host.instances.contains(id))
                ),
                Paused | Stopped | Resuming => prop_assert!(
                    record.saved.as_ref().is_some_and(|saved| host.snapshots.contains(&saved.snapshot)),
                    "{} rests on nothing", record.state
                ),
                Starting | Deleting | Deleted | Failed => {}
            }
        }

        // Let everything come to an end that was begun.
        for _ in 0..100 {
            let Some(input) = host.perform(0) else { break };
            if let Ok(Transition { next, effects, .. }) = step(&record, input, now) {
                record = next;
                host.todo.extend(effects);
            }
        }
        prop_assert!(host.todo.is_empty());
        let instances: BTreeSet<_> = record.instance.iter().cloned().collect();
        prop_assert_eq!(&host.instances, &instances, "{}", record.state);
        let saved: BTreeSet<_> = record.saved.iter().map(|saved| saved.snapshot.clone()).collect();
        prop_assert_eq!(&host.snapshots, &saved, "{}", record.state);
        if let Some(running) = record.running_instance() {
            prop_assert!(!host.still.contains(running), "it runs, but is held still");
        }
    }
}

/// A number that no other id is made of, in the five bits that each letter of an id takes.
fn unused(n: u16) -> [u8; 20] {
    let mut entropy = [9; 20];
    entropy[..4].copy_from_slice(&[0, (n >> 10) as u8, (n >> 5 & 31) as u8, (n & 31) as u8]);
    entropy
}

#[derive(Debug, Default)]
struct Host {
    instances: BTreeSet<InstanceId>,
    snapshots: BTreeSet<SnapshotId>,
    /// Instances that are held still.
    still: BTreeSet<InstanceId>,
    todo: Vec<Effect>,
}

impl Host {
    /// Does one of the things to do, well or not, and says what there is to report.
    fn perform(&mut self, which: u8) -> Option<Input> {
        if self.todo.is_empty() {
            return None;
        }
        let effect = self.todo.remove(usize::from(which) % self.todo.len());
        let fails = which >= 200;
        let why = || "x".to_owned();
        Some(match effect {
            Effect::StartInstance(_) if fails => Input::StartFailed { why: why() },
            Effect::StartInstance(instance) => {
                self.instances.insert(instance.clone());
                Input::Started { instance }
            }
            Effect::DestroyInstance(instance) => {
                self.instances.remove(&instance);
                self.still.remove(&instance);
                // Destroying cancels what is under way.
                self.todo.retain(|effect| {
                    !matches!(effect,
                        Effect::StartInstance(id)
                        | Effect::SaveInstance { instance: id, .. }
                        | Effect::ThawInstance(id)
                        | Effect::RestoreInstance { instance: id, .. } if *id == instance)
                });
                Input::Destroyed { instance }
            }
            Effect::SaveInstance {
                instance, snapshot, ..
            } => {
                if fails || !self.instances.contains(&instance) {
                    self.still.insert(instance);
                    return Some(Input::SaveFailed { snapshot, why: why() });
                }
                self.still.insert(instance);
                self.snapshots.insert(snapshot.clone());
                Input::Saved { snapshot, bytes: 1 }
            }
            Effect::RestoreInstance {
                instance, snapshot, ..
            } => {
                self.instances.insert(instance.clone());
                if fails || !self.snapshots.contains(&snapshot) {
                    return Some(Input::ResumeFailed { instance, why: why() });
                }
                Input::Started { instance }
            }
            Effect::ThawInstance(instance) => {
                self.still.remove(&instance);
                return self.perform(which);
            }
            Effect::DropSnapshot(snapshot) => {
                self.snapshots.remove(&snapshot);
                return self.perform(which);
            }
        })
    }
}

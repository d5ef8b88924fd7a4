//! Decisions on the way to rest, at rest, and on the way back.

use super::*;

#[test]
fn rest_and_its_ways_meet_every_input() {
    let started = || Input::Started {
        instance: instance(1),
    };
    let other_started = || Input::Started {
        instance: instance(2),
    };
    let start_failed = || Input::StartFailed { why: "x".into() };
    let pause = || Input::Pause {
        snapshot: snapshot(2),
        kind: SaveKind::Memory,
    };
    let stop = || Input::Stop {
        snapshot: snapshot(2),
    };
    let other_saved = || Input::Saved {
        snapshot: snapshot(2),
        bytes: 7,
    };
    let save_failed = || Input::SaveFailed {
        snapshot: snapshot(1),
        why: "x".into(),
    };
    let other_save_failed = || Input::SaveFailed {
        snapshot: snapshot(2),
        why: "x".into(),
    };
    let resume_failed = || Input::ResumeFailed {
        instance: instance(1),
        why: "x".into(),
    };
    let other_resume_failed = || Input::ResumeFailed {
        instance: instance(2),
        why: "x".into(),
    };
    let kill = || Input::Kill {
        reason: EndReason::Killed,
    };
    let ended = || Input::Ended {
        instance: instance(1),
        fate: InstanceFate::OutOfMemory,
    };
    let other_ended = || Input::Ended {
        instance: instance(2),
        fate: InstanceFate::OutOfMemory,
    };
    let destroyed = || Input::Destroyed {
        instance: instance(1),
    };
    let extend = || Input::Extend(Extension::For { timeout_millis: 1 });
    let deadline = deadline_reached;
    let alive = || Input::Recover(Liveness::Alive);
    let gone = || Input::Recover(Liveness::Gone);
    let other_version = || Input::Recover(Liveness::Incompatible { agent: 1, server: 2 });
    let early = T0.plus_millis(59_999);
    let late = T0.plus_millis(60_000);
    let has_started =
        "refused: cannot fail the start of this sandbox: it has started; report how its instance ended";

    // The way to rest is the same for both, but for its end.
    for (going, rests, plus) in [(Pausing, Paused, "+paused"), (Stopping, Stopped, "+stopped")] {
        let wait =
            |verb: &str| format!("refused: cannot {verb} this sandbox: it is {going}; wait until it rests");
        let later = |verb: &str, tail: &str| {
            format!("refused: cannot {verb} this sandbox: it is {going}; resume it once it rests{tail}")
        };
        for (input, now, expected) in [
            (started(), early, going.to_string()),
            (other_started(), early, format!("{going} destroy-other")),
            (start_failed(), early, has_started.into()),
            (pause(), early, wait("pause")),
            (stop(), early, wait("stop")),
            (saved(), early, format!("{rests} {plus} destroy")),
            (other_saved(), early, format!("{going} drop-other")),
            (save_failed(), early, "running +save-failed thaw drop".into()),
            (other_save_failed(), early, going.to_string()),
            (resume(), early, wait("resume")),
            (resume_failed(), early, going.to_string()),
            (kill(), early, "deleting destroy drop".into()),
            (ended(), early, "deleting destroy drop".into()),
            (other_ended(), early, going.to_string()),
            (destroyed(), early, "failed +failed drop".into()),
            (
                extend(),
                early,
                format!(
                    "refused: cannot extend this sandbox: it is {going}; change its timeout once it rests, or resume it with one"
                ),
            ),
            (Input::Touched, early, later("use", "")),
            (deadline(), late, going.to_string()),
            (alive(), early, "running +save-failed thaw drop".into()),
            (gone(), early, "deleting destroy drop".into()),
            (other_version(), early, "deleting destroy drop".into()),
        ] {
            assert_eq!(
                outcome(going, input.clone(), now),
                expected,
                "{going} + {input:?}"
            );
        }
    }

    // Its instance is gone by now.
    for (rests, verb) in [(Paused, "resume it"), (Stopped, "start it")] {
        let first =
            |verb: &str| format!("refused: cannot {verb} this sandbox: it is {rests}; resume it first");
        for (input, now, expected) in [
            (started(), early, format!("{rests} destroy")),
            (start_failed(), early, has_started.into()),
            (pause(), early, first("pause")),
            (stop(), early, first("stop")),
            (saved(), early, rests.to_string()),
            (other_saved(), early, format!("{rests} drop-other")),
            (save_failed(), early, rests.to_string()),
            (resume(), early, "resuming restore".into()),
            (
                resume(),
                late,
                "refused: cannot resume this sandbox: its retention has been reached; create a new sandbox"
                    .into(),
            ),
            (resume_failed(), early, rests.to_string()),
            (kill(), early, "deleted +ended drop".into()),
            (ended(), early, rests.to_string()),
            (destroyed(), early, rests.to_string()),
            (
                extend(),
                early,
                format!(
                    "refused: cannot extend this sandbox: it is {rests}; change its timeout, or resume it with one"
                ),
            ),
            (
                Input::Touched,
                early,
                format!("refused: cannot use this sandbox: it is {rests}; {verb}"),
            ),
            (deadline(), early, rests.to_string()),
            (deadline(), late, "deleted +ended drop".into()),
            (alive(), early, rests.to_string()),
            (gone(), early, rests.to_string()),
            (other_version(), early, rests.to_string()),
        ] {
            assert_eq!(
                outcome(rests, input.clone(), now),
                expected,
                "{rests} + {input:?}"
            );
        }
    }

    let wait =
        |verb: &str| format!("refused: cannot {verb} this sandbox: it is resuming; wait until it runs");
    for (input, now, expected) in [
        (started(), early, "running +resumed drop".into()),
        (other_started(), early, "resuming destroy-other".into()),
        (start_failed(), early, has_started.into()),
        (pause(), early, wait("pause")),
        (stop(), early, wait("stop")),
        (saved(), early, "resuming".into()),
        (other_saved(), early, "resuming drop-other".into()),
        (save_failed(), early, "resuming".into()),
        (resume(), early, wait("resume")),
        (resume_failed(), early, "paused +resume-failed destroy".into()),
        (other_resume_failed(), early, "resuming".into()),
        (kill(), early, "deleting destroy drop".into()),
        (ended(), early, "paused +resume-failed destroy".into()),
        (other_ended(), early, "resuming".into()),
        (destroyed(), early, "paused +resume-failed".into()),
        (extend(), early, "resuming +extended".into()),
        (
            Input::Touched,
            early,
            "refused: cannot use this sandbox: it is still resuming; wait until it runs".into(),
        ),
        (deadline(), late, "resuming".into()),
        (alive(), early, "paused +resume-failed destroy".into()),
        (gone(), early, "paused +resume-failed destroy".into()),
    ] as [(Input, Timestamp, String); 20]
    {
        assert_eq!(
            outcome(Resuming, input.clone(), now),
            expected,
            "resuming + {input:?}"
        );
    }

    // The others, asked for rest.
    for (state, input, expected) in [
        (
            Starting,
            pause(),
            "refused: cannot pause this sandbox: it is starting; wait until it runs",
        ),
        (
            Starting,
            resume(),
            "refused: cannot resume this sandbox: it is starting; wait until it runs",
        ),
        (Starting, other_saved(), "starting drop-other"),
        (Running, pause(), "pausing save"),
        (Running, stop(), "stopping save"),
        (Running, saved(), "running drop"),
        (Running, save_failed(), "running"),
        (
            Running,
            resume(),
            "refused: cannot resume this sandbox: it runs; use it as it is",
        ),
        (Running, resume_failed(), "running"),
        (Running, other_ended(), "running"),
        (
            Deleting,
            pause(),
            "refused: cannot pause this sandbox: it is deleting; create a new sandbox",
        ),
        (Deleting, saved(), "deleting drop"),
        (Deleting, resume_failed(), "deleting"),
        (
            Deleted,
            stop(),
            "refused: cannot stop this sandbox: it is deleted; create a new sandbox",
        ),
        (
            Deleted,
            resume(),
            "refused: cannot resume this sandbox: it is deleted; create a new sandbox",
        ),
        (Deleted, saved(), "deleted drop"),
        (
            Failed,
            resume(),
            "refused: cannot resume this sandbox: it is failed; create a new sandbox",
        ),
    ] {
        assert_eq!(
            outcome(state, input.clone(), early),
            expected,
            "{state} + {input:?}"
        );
    }
}

#[test]
fn what_a_sandbox_rests_on_is_named_until_it_runs() {
    let pausing = record(Pausing);
    let rested = step(&pausing, saved(), T0.plus_millis(30)).unwrap();
    let on = Saved {
        snapshot: snapshot(1),
        kind: SaveKind::Memory,
        at: T0.plus_millis(30),
        stopped: false,
        time_left: TimeLeft::Millis(60_000),
    };
    assert_eq!(rested.next.saved, Some(on.clone()));
    assert_eq!(rested.next.saving, None);
    assert_eq!(
        rested.next.deadline, None,
        "its lifetime does not run while it rests"
    );
    // Still there until it is removed; a resume has to wait for that.
    assert_eq!(rested.next.instance, Some(instance(1)));
    assert_eq!(
        rested.facts,
        [Happening::Paused {
            snapshot: snapshot(1),
            kind: SaveKind::Memory,
            bytes: 7,
            took_millis: 30
        }]
    );
    let refused = step(&rested.next, resume(), T0).unwrap_err();
    assert_eq!(refused.instead, "try again in a moment");
    assert_eq!(
        outcome_of(&rested.next, Input::Recover(Liveness::Gone), T0),
        "paused destroy"
    );
    assert_eq!(
        outcome_of(
            &rested.next,
            Input::Kill {
                reason: EndReason::Killed
            },
            T0
        ),
        "deleting destroy drop"
    );

    let gone = step(
        &rested.next,
        Input::Destroyed {
            instance: instance(1),
        },
        T0,
    )
    .unwrap()
    .next;
    let resuming = step(
        &gone,
        Input::Resume {
            instance: instance(2),
            timeout_millis: None,
        },
        T0.plus_millis(100),
    )
    .unwrap();
    assert_eq!(resuming.next.saved, Some(on));
    assert_eq!(resuming.next.deadline, Some(T0.plus_millis(60_100)));
    assert_eq!(
        resuming.effects,
        [Effect::RestoreInstance {
            instance: instance(2),
            snapshot: snapshot(1),
            kind: SaveKind::Memory
        }]
    );
    let running = step(
        &resuming.next,
        Input::Started {
            instance: instance(2),
        },
        T0.plus_millis(175),
    )
    .unwrap();
    assert_eq!(running.next.saved, None);
    assert_eq!(running.next.started_at, Some(T0.plus_millis(175)));
    assert_eq!(running.next.running_instance(), Some(&instance(2)));
    assert_eq!(
        running.facts,
        [Happening::Resumed {
            instance: instance(2),
            took_millis: 75
        }]
    );
}

#[test]
fn a_resume_may_ask_for_another_lifetime() {
    let ask = |timeout_millis| {
        let input = Input::Resume {
            instance: instance(2),
            timeout_millis,
        };
        step(&record(Paused), input, T0).unwrap().next.deadline
    };
    assert_eq!(ask(Some(5)), Some(T0.plus_millis(5)));
    assert_eq!(ask(None), Some(T0.plus_millis(60_000)));
}

/// From `Running` at `pauses_at`, through a save that takes `saving` and a rest that takes `resting`, to its resume.
fn rested(running: &Record, pauses_at: Timestamp, saving: u64, resting: u64, asked: Option<u64>) -> Record {
    let go = |record: &Record, input, now| step(record, input, now).expect("accepted").next;
    let pausing = go(running, deadline_reached(), pauses_at);
    let pausing = match pausing.state {
        Running => {
            let (snapshot, kind) = (snapshot(1), SaveKind::Memory);
            go(running, Input::Pause { snapshot, kind }, pauses_at)
        }
        _ => pausing,
    };
    let rests_at = pauses_at.plus_millis(saving);
    let paused = go(&pausing, saved(), rests_at);
    let gone = Input::Destroyed {
        instance: instance(1),
    };
    let paused = go(&paused, gone, rests_at);
    let input = Input::Resume {
        instance: instance(2),
        timeout_millis: asked,
    };
    go(&paused, input, rests_at.plus_millis(resting))
}

#[test]
fn rest_does_not_consume_the_lifetime() {
    let running = Record {
        policy: Policy {
            on_timeout: TimeoutAction::Pause,
            retention_millis: None,
            ..policy()
        },
        ..record(Running)
    };
    let back = |at: u64, asked| {
        let resumed_at = T0.plus_millis(at + 5_000 + 7_000_000);
        let resumed = rested(&running, T0.plus_millis(at), 5_000, 7_000_000, asked);
        resumed.deadline.map(|deadline| deadline.millis_since(resumed_at))
    };
    // 20 of its 60 seconds were used; neither the save nor the rest counts.
    assert_eq!(back(20_000, None), Some(40_000));
    assert_eq!(back(59_999, None), Some(1));
    assert_eq!(back(20_000, Some(5)), Some(5), "a resume may ask for another");
    // It rests because its time was over: it comes back to a whole one.
    assert_eq!(back(60_000, None), Some(60_000));
    assert_eq!(back(75_000, None), Some(60_000));

    let unlimited = Record {
        deadline: None,
        ..running.clone()
    };
    assert_eq!(rested(&unlimited, T0, 1, 1, None).deadline, None);
    assert_eq!(
        rested(&unlimited, T0, 1, 1, Some(5)).deadline,
        Some(T0.plus_millis(7))
    );
}

#[test]
fn a_failed_resume_costs_no_lifetime() {
    let go = |record: &Record, input, now| step(record, input, now).expect("accepted").next;
    let running = Record {
        policy: Policy {
            retention_millis: None,
            ..policy()
        },
        ..record(Running)
    };
    let resuming = rested(&running, T0.plus_millis(20_000), 0, 0, Some(3));
    let failed = Input::ResumeFailed {
        instance: instance(2),
        why: "x".into(),
    };
    let back = go(&resuming, failed, T0.plus_millis(30_000));
    let gone = Input::Destroyed {
        instance: instance(2),
    };
    let back = go(&back, gone, T0.plus_millis(30_000));
    let again = go(&back, resume(), T0.plus_millis(100_000));
    assert_eq!(again.deadline, Some(T0.plus_millis(140_000)));
}

#[test]
fn a_timeout_that_is_changed_holds_from_now_or_from_the_next_resume() {
    let longer = Policy {
        timeout_millis: Some(90_000),
        ..policy()
    };
    let now = T0.plus_millis(10);
    let running = change(&record(Running), longer, Some(90_000), now).unwrap();
    assert_eq!(running.deadline, Some(now.plus_millis(90_000)));
    assert_eq!(running.policy, longer);

    let paused = change(&record(Paused), longer, Some(90_000), now).unwrap();
    assert_eq!((paused.state, paused.deadline), (Paused, None));
    let resumed = step(&paused, resume(), now).unwrap().next;
    assert_eq!(resumed.deadline, Some(now.plus_millis(90_000)));

    // Another change leaves what was left as it was.
    let kept = change(&record(Paused), longer, None, now).unwrap();
    let resumed = step(&kept, resume(), now).unwrap().next;
    assert_eq!(resumed.deadline, Some(now.plus_millis(60_000)));

    let over = change(&record(Running), longer, Some(90_000), T0.plus_millis(60_000));
    assert!(over.is_err(), "a deadline that has passed has passed");
}

#[test]
fn a_failed_resume_goes_back_to_where_it_came_from() {
    let resuming = step(&record(Stopped), resume(), T0).unwrap().next;
    let failed = Input::ResumeFailed {
        instance: instance(1),
        why: "x".into(),
    };
    let back = step(&resuming, failed, T0).unwrap().next;
    assert_eq!(back.state, Stopped);
    assert_eq!(back.saved, record(Stopped).saved);
    assert_eq!(back.deadline, None);
    assert_eq!(
        outcome_of(
            &back,
            Input::Destroyed {
                instance: instance(1)
            },
            T0
        ),
        "stopped"
    );
}

#[test]
fn a_deadline_does_what_the_sandbox_asks_for() {
    let running = |on_timeout, action| Record {
        policy: Policy {
            on_timeout,
            idle: Some(IdlePolicy {
                after_millis: 1000,
                action,
            }),
            ..policy()
        },
        ..record(Running)
    };
    let idle = T0.plus_millis(1000);
    let both = T0.plus_millis(60_000);
    let at = |record: &Record, now| outcome_of(record, deadline_reached(), now);
    let pauses = running(TimeoutAction::Stop, IdleAction::Pause);
    assert_eq!(at(&pauses, idle), "pausing save");
    let used = Record {
        last_used_at: both,
        ..pauses.clone()
    };
    assert_eq!(at(&used, both), "stopping save");
    let stops = running(TimeoutAction::Kill, IdleAction::Stop);
    assert_eq!(at(&stops, idle), "stopping save");
    let killed = Record {
        last_used_at: both,
        ..stops
    };
    assert_eq!(at(&killed, both), "deleting destroy");

    // A stop keeps files whatever the tier could keep; a pause keeps what it can.
    let kind = |record: &Record, pause_keeps| {
        let input = Input::DeadlineReached {
            snapshot: snapshot(1),
            pause_keeps,
            work: Some(NO_WORK),
        };
        step(record, input, idle).unwrap().next.saving.unwrap().kind
    };
    let stops = running(TimeoutAction::Kill, IdleAction::Stop);
    assert_eq!(kind(&stops, SaveKind::Memory), SaveKind::Filesystem);
    assert_eq!(kind(&pauses, SaveKind::Memory), SaveKind::Memory);
    assert_eq!(kind(&pauses, SaveKind::Filesystem), SaveKind::Filesystem);

    // Nothing to keep yet.
    let starting = Record {
        policy: running(TimeoutAction::Pause, IdleAction::Pause).policy,
        ..record(Starting)
    };
    assert_eq!(at(&starting, both), "deleting destroy");

    // Whoever comes too late is told what will become of it.
    let late = step(&pauses, Input::Touched, both).unwrap_err();
    assert_eq!(late.instead, "resume it once it rests");
    // And may ask for what happens anyway.
    let stop = Input::Stop {
        snapshot: snapshot(1),
    };
    assert_eq!(outcome_of(&pauses, stop, both), "stopping save");
}

#[test]
fn whoever_comes_before_the_look_at_its_idle_time_is_in_time() {
    let idle = |action| Record {
        policy: Policy {
            idle: Some(IdlePolicy {
                after_millis: 1000,
                action,
            }),
            ..policy()
        },
        ..record(Running)
    };
    let now = T0.plus_millis(5000);
    for action in [IdleAction::Kill, IdleAction::Pause, IdleAction::Stop] {
        let used = step(&idle(action), Input::Touched, now).unwrap().next;
        assert_eq!(outcome_of(&used, deadline_reached(), now), "running");
        assert_eq!(
            next_deadline(&used),
            Some((now.plus_millis(1000), DeadlineKind::Idle))
        );
        let extended = Input::Extend(Extension::For { timeout_millis: 1 });
        assert_eq!(outcome_of(&idle(action), extended, now), "running +extended");
        let stop = Input::Stop {
            snapshot: snapshot(1),
        };
        assert_eq!(outcome_of(&idle(action), stop, now), "stopping save");
    }
}

#[test]
fn one_that_works_is_not_idle_and_its_lifetime_ends_all_the_same() {
    let kills = Record {
        policy: Policy {
            idle: Some(IdlePolicy {
                after_millis: 1000,
                action: IdleAction::Kill,
            }),
            ..policy()
        },
        ..record(Running)
    };
    let reached = |record: &Record, work, now| {
        let reached = Input::DeadlineReached {
            snapshot: snapshot(1),
            pause_keeps: SaveKind::Memory,
            work,
        };
        step(record, reached, now).unwrap()
    };
    let look = |record: &Record, work, now| reached(record, Some(work), now);
    let mark = |millis, micros| CpuMark {
        at: T0.plus_millis(millis),
        micros,
    };
    let computing = |until: u64| Work {
        connected_at: None,
        cpu: (mark(0, 0), mark(until, until * 1000)),
    };
    let stays = look(&kills, computing(1000), T0.plus_millis(1000));
    assert_eq!((stays.next.state, stays.facts.len()), (Running, 0));
    assert_eq!(
        next_deadline(&stays.next),
        Some((T0.plus_millis(2000), DeadlineKind::Idle))
    );
    // Its connection has ended in between: the idle time is counted from there, and may be over.
    let connected = |millis| Work {
        connected_at: Some(T0.plus_millis(millis)),
        ..NO_WORK
    };
    let stays = look(&kills, connected(400), T0.plus_millis(1000));
    assert_eq!(
        next_deadline(&stays.next),
        Some((T0.plus_millis(1400), DeadlineKind::Idle))
    );
    let late = look(&kills, connected(400), T0.plus_millis(1400));
    assert_eq!(late.next.end, Some(EndReason::Idle));
    // A clock that is ahead of the decision puts nothing off for longer than work would.
    let ahead = look(&kills, connected(5000), T0.plus_millis(1000));
    assert_eq!(ahead.next.last_used_at, T0.plus_millis(1000));
    // Nothing that it does outlasts its timeout, whichever of the two is over first.
    let both = look(&kills, computing(60_000), T0.plus_millis(60_000));
    assert_eq!(both.next.end, Some(EndReason::TimedOut));
    // What nobody could look at stays, as long as it may.
    let unknown = reached(&kills, None, T0.plus_millis(1000)).next;
    assert_eq!(
        (unknown.state, unknown.last_used_at),
        (Running, T0.plus_millis(1000))
    );
    let unknown = reached(&kills, None, T0.plus_millis(60_000)).next;
    assert_eq!(unknown.end, Some(EndReason::TimedOut));
    // And what rests, works not.
    let rests = look(&record(Paused), computing(60_000), T0.plus_millis(60_000));
    assert_eq!(rests.next.end, Some(EndReason::Expired));
}

#[test]
fn a_deadline_that_cannot_save_waits_and_a_kill_does_not() {
    let pauses = Record {
        policy: Policy {
            on_timeout: TimeoutAction::Pause,
            ..policy()
        },
        ..record(Running)
    };
    let due = T0.plus_millis(60_000);
    let pausing = step(&pauses, deadline_reached(), due).unwrap().next;
    let failed = Input::SaveFailed {
        snapshot: snapshot(1),
        why: "the disk is full".into(),
    };
    let back = step(&pausing, failed.clone(), due).unwrap();
    assert_eq!(
        back.facts,
        [Happening::SaveFailed {
            why: "the disk is full".into()
        }]
    );
    let again = due.plus_millis(60_000);
    assert_eq!(next_deadline(&back.next), Some((again, DeadlineKind::Timeout)));
    assert_eq!(back.next.deadline, Some(due), "what was promised stays on record");
    // Until then it can be used.
    assert!(step(&back.next, Input::Touched, due).is_ok());
    assert_eq!(outcome_of(&back.next, deadline_reached(), due), "running");
    assert_eq!(outcome_of(&back.next, deadline_reached(), again), "pausing save");

    // Its idle time is not what failed, and it kills.
    let mut kills = back.next;
    kills.policy.idle = Some(IdlePolicy {
        after_millis: 1,
        action: IdleAction::Kill,
    });
    assert_eq!(outcome_of(&kills, deadline_reached(), due), "deleting destroy");

    // A person's pause that fails puts nothing off.
    let early = step(&record(Pausing), failed, T0).unwrap().next;
    assert_eq!(early.hold_off, None);
}

#[test]
fn how_long_it_rests_is_its_own_choice() {
    let resting = record(Paused);
    assert_eq!(
        next_deadline(&resting),
        Some((T0.plus_millis(60_000), DeadlineKind::Retention))
    );
    let forever = Record {
        policy: Policy::default(),
        ..resting.clone()
    };
    assert_eq!(next_deadline(&forever), None);
    let end = step(&resting, deadline_reached(), T0.plus_millis(60_000)).unwrap();
    assert_eq!(
        end.facts,
        [Happening::Ended {
            reason: EndReason::Expired
        }]
    );
    assert_eq!((end.next.saved, end.next.state), (None, Deleted));
}

#[test]
fn refusals_tell_callers_apart_what_to_do() {
    for (state, code) in [
        (Paused, Code::SandboxPaused),
        (Stopped, Code::SandboxStopped),
        (Resuming, Code::SandboxWrongState),
        (Deleted, Code::SandboxDeleted),
        (Failed, Code::SandboxFailed),
    ] {
        let refused = step(&record(state), Input::Touched, T0).unwrap_err();
        assert_eq!(Fault::from(refused).code, code);
    }
}

#[test]
fn a_restart_in_the_middle_of_a_save_does_not_count_as_idle() {
    for state in [Running, Pausing, Stopping] {
        let mut before = record(state);
        before.policy.idle = Some(IdlePolicy {
            after_millis: 1000,
            action: IdleAction::Kill,
        });
        let back = T0.plus_millis(30_000);
        let after = step(&before, Input::Recover(Liveness::Alive), back).unwrap().next;
        assert_eq!((after.state, after.last_used_at), (Running, back), "{state}");
        assert_eq!(outcome_of(&after, deadline_reached(), back), "running", "{state}");
    }
}

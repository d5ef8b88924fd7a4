//! To rest and back: pause, stop, resume.
//!
//! ```text
//!   Running ── Pause, Stop, deadline: hold it still, save it ──> Pausing, Stopping
//!                                                                  │          │
//!          SaveFailed, Recover(Alive): throw away, let it go on <──┘          │ Saved: row and snapshot in one
//!                                                                             v transaction, then destroy
//!   Running <── Started: throw away ── Resuming <── Resume: restore ── Paused, Stopped
//!                                         └── ResumeFailed, Ended, Recover: destroy ──^
//! ```
//!
//! What must hold: at every moment either the instance or what it was saved as is whole, and the record says which. The
//! instance goes only after its save is committed; the save goes only after its instance runs. The lifetime stands still
//! from the moment that the instance does until the resume is asked for.

use atoll_types::{
    EndReason, InstanceId, SandboxState, SaveKind, Saved, Saving, SnapshotId, TimeoutAction, Timestamp,
};

use super::deadlines::{action, deadline_after, hold_off, is_over, time_left, too_late};
use super::ending::delete;
use super::words::{Effect, Happening, Record, Refused, Transition};

pub(super) fn pause(
    record: &Record,
    snapshot: SnapshotId,
    kind: SaveKind,
    now: Timestamp,
) -> Result<Transition, Refused> {
    may_rest(record, "pause", now)?;
    Ok(begin_saving(record, SandboxState::Pausing, snapshot, kind, now))
}

pub(super) fn stop(record: &Record, snapshot: SnapshotId, now: Timestamp) -> Result<Transition, Refused> {
    may_rest(record, "stop", now)?;
    Ok(begin_saving(
        record,
        SandboxState::Stopping,
        snapshot,
        SaveKind::Filesystem,
        now,
    ))
}

fn may_rest(record: &Record, input: &'static str, now: Timestamp) -> Result<(), Refused> {
    let refused = |instead| {
        let why = format!("it is {}", record.state);
        Err(Refused::new(record, input, why, instead))
    };
    match record.state {
        SandboxState::Running => match is_over(record, now) {
            // Where its deadline keeps it, a person may as well.
            Some(kind) if action(record, kind) == TimeoutAction::Kill => Err(too_late(record, input, kind)),
            _ => Ok(()),
        },
        SandboxState::Starting | SandboxState::Resuming => refused("wait until it runs"),
        SandboxState::Pausing | SandboxState::Stopping => refused("wait until it rests"),
        SandboxState::Paused | SandboxState::Stopped => refused("resume it first"),
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            refused("create a new sandbox")
        }
    }
}

pub(super) fn begin_saving(
    record: &Record,
    state: SandboxState,
    snapshot: SnapshotId,
    kind: SaveKind,
    now: Timestamp,
) -> Transition {
    let Some(instance) = record.instance.clone() else {
        // Never of a record that runs.
        return delete(record, EndReason::Lost, false, now);
    };
    Transition {
        effects: vec![Effect::SaveInstance {
            instance,
            snapshot: snapshot.clone(),
            kind,
        }],
        ..Transition::to(Record {
            state,
            saving: Some(Saving {
                snapshot,
                kind,
                since: now,
            }),
            ..record.clone()
        })
    }
}

pub(super) fn saved(record: &Record, snapshot: SnapshotId, bytes: u64, now: Timestamp) -> Transition {
    let saving = record.saving.as_ref().filter(|it| it.snapshot == snapshot);
    match (record.state, saving) {
        (SandboxState::Pausing | SandboxState::Stopping, Some(saving)) => {
            let took_millis = now.millis_since(saving.since);
            let stopped = record.state == SandboxState::Stopping;
            let saved = Saved {
                snapshot: snapshot.clone(),
                kind: saving.kind,
                at: now,
                stopped,
                time_left: time_left(record.deadline, saving.since),
            };
            let happening = if stopped {
                Happening::Stopped {
                    snapshot,
                    bytes,
                    took_millis,
                }
            } else {
                Happening::Paused {
                    snapshot,
                    kind: saving.kind,
                    bytes,
                    took_millis,
                }
            };
            Transition {
                facts: vec![happening],
                effects: destroy(record),
                next: Record {
                    state: saved.rest(),
                    saved: Some(saved),
                    saving: None,
                    hold_off: None,
                    deadline: None,
                    ..record.clone()
                },
            }
        }
        // Told twice.
        _ if record.saved.as_ref().is_some_and(|it| it.snapshot == snapshot)
            && record.state != SandboxState::Deleting =>
        {
            Transition::unchanged(record)
        }
        // The save lost a race, against a kill for instance: nobody wants it.
        _ => Transition::only(record, Effect::DropSnapshot(snapshot)),
    }
}

pub(super) fn save_failed(record: &Record, snapshot: &SnapshotId, why: String, now: Timestamp) -> Transition {
    match (record.state, &record.saving) {
        (SandboxState::Pausing | SandboxState::Stopping, Some(saving)) if saving.snapshot == *snapshot => {
            run_on(record, why, now)
        }
        _ => Transition::unchanged(record),
    }
}

/// Back to `Running` from a save that did not work out.
pub(super) fn run_on(record: &Record, why: String, now: Timestamp) -> Transition {
    let next = Record {
        state: SandboxState::Running,
        saving: None,
        ..record.clone()
    };
    Transition {
        next: hold_off(next, now),
        facts: vec![Happening::SaveFailed { why }],
        effects: record
            .instance
            .clone()
            .map(Effect::ThawInstance)
            .into_iter()
            .chain(unfinished(record))
            .collect(),
    }
}

pub(super) fn resume(
    record: &Record,
    instance: InstanceId,
    timeout_millis: Option<u64>,
    now: Timestamp,
) -> Result<Transition, Refused> {
    let refused = |why: String, instead| Err(Refused::new(record, "resume", why, instead));
    let state = || format!("it is {}", record.state);
    let saved = match (record.state, &record.saved) {
        (SandboxState::Paused | SandboxState::Stopped, Some(saved)) => saved,
        (SandboxState::Running, _) => return refused("it runs".into(), "use it as it is"),
        (SandboxState::Starting | SandboxState::Resuming, _) => {
            return refused(state(), "wait until it runs");
        }
        (SandboxState::Pausing | SandboxState::Stopping, _) => {
            return refused(state(), "wait until it rests");
        }
        (
            SandboxState::Paused
            | SandboxState::Stopped
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed,
            _,
        ) => return refused(state(), "create a new sandbox"),
    };
    if let Some(kind) = is_over(record, now) {
        return Err(too_late(record, "resume", kind));
    }
    // A record names one instance; with two, a crash would forget the first.
    if record.instance.is_some() {
        return refused(
            "its processes are still being removed".into(),
            "try again in a moment",
        );
    }
    Ok(Transition {
        effects: vec![Effect::RestoreInstance {
            instance: instance.clone(),
            snapshot: saved.snapshot.clone(),
            kind: saved.kind,
        }],
        ..Transition::to(Record {
            state: SandboxState::Resuming,
            instance: Some(instance),
            deadline: deadline_after(saved.time_left, timeout_millis, &record.policy, now),
            last_used_at: record.last_used_at.max(now),
            ..record.clone()
        })
    })
}

/// The restored instance has answered: what it came from is not needed any more.
pub(super) fn resumed(record: &Record, instance: InstanceId, now: Timestamp) -> Transition {
    Transition {
        // The resume was its last use, and nobody can use it before it runs.
        facts: vec![Happening::Resumed {
            instance,
            took_millis: now.millis_since(record.last_used_at),
        }],
        effects: record
            .saved
            .clone()
            .map(|saved| Effect::DropSnapshot(saved.snapshot))
            .into_iter()
            .collect(),
        next: Record {
            state: SandboxState::Running,
            started_at: Some(now),
            last_used_at: record.last_used_at.max(now),
            saved: None,
            ..record.clone()
        },
    }
}

pub(super) fn resume_failed(
    record: &Record,
    instance: &InstanceId,
    why: String,
    now: Timestamp,
) -> Transition {
    if record.state != SandboxState::Resuming || record.instance.as_ref() != Some(instance) {
        return Transition::unchanged(record);
    }
    rest_again(record, why, now)
}

/// Back to rest from a resume that did not work out: nothing of what was saved was touched.
pub(super) fn rest_again(record: &Record, why: String, now: Timestamp) -> Transition {
    let Some(saved) = &record.saved else {
        // Never of a record on its way back.
        return delete(record, EndReason::Lost, false, now);
    };
    Transition {
        next: Record {
            state: saved.rest(),
            deadline: None,
            ..record.clone()
        },
        facts: vec![Happening::ResumeFailed { why }],
        effects: destroy(record),
    }
}

fn destroy(record: &Record) -> Vec<Effect> {
    record
        .instance
        .clone()
        .map(Effect::DestroyInstance)
        .into_iter()
        .collect()
}

/// What there is of a save that is not finished.
fn unfinished(record: &Record) -> Option<Effect> {
    record
        .saving
        .clone()
        .map(|saving| Effect::DropSnapshot(saving.snapshot))
}

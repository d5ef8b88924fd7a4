//! The way out: kill, death, and what is left when nothing is left.

use atoll_types::{EndReason, InstanceId, SandboxState, Timestamp};

use super::saving::rest_again;
use super::words::{Effect, Happening, InstanceFate, Record, Transition};

pub(super) fn kill(record: &Record, reason: EndReason, now: Timestamp) -> Transition {
    match record.state {
        SandboxState::Starting
        | SandboxState::Running
        | SandboxState::Pausing
        | SandboxState::Paused
        | SandboxState::Resuming
        | SandboxState::Stopping
        | SandboxState::Stopped => delete(record, reason, true, now),
        SandboxState::Deleting => Transition::to(Record {
            kill_requested: true,
            ..record.clone()
        }),
        SandboxState::Failed => Transition::to(Record {
            state: SandboxState::Deleted,
            kill_requested: true,
            ..record.clone()
        }),
        SandboxState::Deleted => Transition::unchanged(record),
    }
}

pub(super) fn ended(
    record: &Record,
    instance: &InstanceId,
    fate: InstanceFate,
    now: Timestamp,
) -> Transition {
    // The news of an earlier instance may come late.
    if record.instance.as_ref() != Some(instance) {
        return Transition::unchanged(record);
    }
    match record.state {
        // What was saved of it so far is not whole.
        SandboxState::Starting | SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping => {
            delete(record, fate.into(), false, now)
        }
        SandboxState::Resuming => rest_again(record, EndReason::from(fate).explain(), now),
        // Being destroyed is the usual reason for an instance to end.
        SandboxState::Paused
        | SandboxState::Stopped
        | SandboxState::Deleting
        | SandboxState::Deleted
        | SandboxState::Failed => Transition::unchanged(record),
    }
}

pub(super) fn destroyed(record: &Record, instance: &InstanceId, now: Timestamp) -> Transition {
    if record.instance.as_ref() != Some(instance) {
        return Transition::unchanged(record);
    }
    let without = || Record {
        instance: None,
        ..record.clone()
    };
    match record.state {
        // Nobody here asked for that; the host has lost it all the same.
        SandboxState::Starting | SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping => {
            finish(record, EndReason::Lost, now)
        }
        SandboxState::Resuming => rest_again(&without(), EndReason::Lost.explain(), now),
        SandboxState::Paused | SandboxState::Stopped => Transition::to(without()),
        SandboxState::Deleting => finish(record, EndReason::Killed, now),
        SandboxState::Deleted | SandboxState::Failed => Transition::unchanged(record),
    }
}

/// Begins the way out of a living state; where there is no instance, that is all of the way.
pub(super) fn delete(record: &Record, reason: EndReason, kill_requested: bool, now: Timestamp) -> Transition {
    let record = Record {
        end: Some(record.end.clone().unwrap_or(reason.clone())),
        kill_requested: record.kill_requested || kill_requested,
        ..record.clone()
    };
    let Some(instance) = record.instance.clone() else {
        return finish(&record, reason, now);
    };
    let mut effects = vec![Effect::DestroyInstance(instance)];
    effects.extend(leftovers(&record));
    Transition {
        effects,
        ..Transition::to(Record {
            state: SandboxState::Deleting,
            ..record
        })
    }
}

/// Nothing runs on the host: the record may rest. `reason` counts only if none was known before.
pub(super) fn finish(record: &Record, reason: EndReason, now: Timestamp) -> Transition {
    let reason = record.end.clone().unwrap_or(reason);
    let broke = is_failure(&reason);
    let state = if broke && !record.kill_requested {
        SandboxState::Failed
    } else {
        SandboxState::Deleted
    };
    // Whoever was in `Deleting` has been told to throw its saved state away.
    let effects = if record.state == SandboxState::Deleting {
        Vec::new()
    } else {
        leftovers(record).collect()
    };
    Transition {
        next: Record {
            state,
            instance: None,
            ended_at: Some(now),
            saved: None,
            saving: None,
            end: Some(reason.clone()),
            ..record.clone()
        },
        facts: vec![if broke {
            Happening::Failed { reason }
        } else {
            Happening::Ended { reason }
        }],
        effects,
    }
}

/// What of its saved state goes with it.
pub(super) fn leftovers(record: &Record) -> impl Iterator<Item = Effect> + use<> {
    let saved = record.saved.clone().map(|saved| saved.snapshot);
    let saving = record.saving.clone().map(|saving| saving.snapshot);
    saved.into_iter().chain(saving).map(Effect::DropSnapshot)
}

fn is_failure(reason: &EndReason) -> bool {
    match reason {
        EndReason::Killed | EndReason::TimedOut | EndReason::Idle | EndReason::Expired => false,
        EndReason::OutOfMemory
        | EndReason::GuestDied(_)
        | EndReason::StartFailed(_)
        | EndReason::Lost
        | EndReason::Incompatible { .. } => true,
    }
}

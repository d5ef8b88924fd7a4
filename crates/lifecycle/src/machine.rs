//! The life of one sandbox.
//!
//! ```text
//!         create(Cold)               create(Warm)
//!              │                          │
//!              v         Started          v
//!          Starting ─────────────────> Running <─┐ Extend, Touched, Recover(Alive)
//!                                      ^ │ ^ └───┘
//!          Started ┌───────────────────┘ │ └──────────────┐ SaveFailed, Recover(Alive)
//!                  │                     │                │
//!                  │     Pause, deadline │ Stop, deadline │
//!                  │                     ├──> Stopping ───┤
//!                  │                     └──> Pausing ────┘
//!              Resuming                          │ Saved
//!                  ^ │                           v
//!           Resume │ └── ResumeFailed, ──> Paused, Stopped <─┐ Destroyed (what was left of its instance)
//!                  │     Ended, Recover          │ │    └────┘
//!                  └─────────────────────────────┘ │ Kill, retention over
//!                                                  │ (no instance: straight to Deleted)
//!                                                  │
//!    Starting: Kill, timeout, StartFailed, ────┐   │   ┌──── Running: Kill, timeout, idle, Ended, Recover(Gone)
//!              Ended, Recover                  v   v   v     Pausing, Stopping: Kill, Ended, Recover(Gone)
//!                                             Deleting       Resuming: Kill
//!                                                 │ Destroyed
//!                                 ┌───────────────┴──────────────┐
//!                 it was asked    v                              v  it broke
//!                 to end       Deleted <──────── Kill ─────── Failed
//! ```
//!
//! What must hold:
//! - There is one way out, and it leads through `Deleting`: whoever is there still has something on the host, and
//!   destroying it again is always right. Only a sandbox at rest whose instance is gone, and one whose instance the host
//!   lost, have nothing to wait for and skip it. A crash between two lines of the picture therefore loses nothing.
//! - `Deleted` and `Failed` hold no instance and no saved state, and never leave for a living state. `Failed` tells the
//!   two apart for people: it broke, and nobody has asked for its deletion yet.
//! - A kill is never refused, and ends in `Deleted` whatever else happens.
//! - What a sandbox rests on is given up only when it runs again or ends: no error and no crash on the way to rest or
//!   back costs more than the attempt.
//! - What is to run does not stand still: every way into `Running` from a save, and every recovery of it, lets it go on.
//! - While it is put to rest its instance is there, held still, until what was saved is committed.
//! - A record names at most one instance. It comes back under a new id, and only once the old one is gone.
//! - A deadline that has passed has passed: neither an extension nor a use undoes it, however late its reaper comes. One
//!   that is to save and cannot is put off by a minute, and until then it has not passed. The end of an idle time is none
//!   before the sandbox was looked at: until then a use undoes it, and so does work that is found.
//! - An instance or a snapshot that turns up where none belongs (a start or a save that lost its race against a kill) is
//!   destroyed, not kept.
//! - Every sandbox ends with exactly one [`Happening::Ended`] or [`Happening::Failed`].

mod deadlines;
mod ending;
mod saving;
mod words;

use atoll_types::{EndReason, InstanceId, SandboxState, Timestamp};

pub use deadlines::{change, next_deadline};
pub use words::{
    Boot, DeadlineKind, Effect, Extension, Happening, Input, InstanceFate, Liveness, NewRecord, Policy,
    Record, Refused, Transition,
};

use ending::{delete, finish, leftovers};

/// The first record of a sandbox and what to do about it.
pub fn create(new: NewRecord, now: Timestamp) -> Transition {
    let mut facts = vec![Happening::Created];
    let mut effects = Vec::new();
    let (state, instance, started_at) = match new.boot {
        Boot::Cold(instance) => {
            effects.push(Effect::StartInstance(instance.clone()));
            (SandboxState::Starting, instance, None)
        }
        Boot::Warm(instance) => {
            facts.push(Happening::Started {
                instance: instance.clone(),
            });
            (SandboxState::Running, instance, Some(now))
        }
    };
    Transition {
        next: Record {
            state,
            instance: Some(instance),
            created_at: now,
            started_at,
            ended_at: None,
            deadline: new.policy.timeout_millis.map(|millis| now.plus_millis(millis)),
            policy: new.policy,
            last_used_at: now,
            hold_off: None,
            saved: None,
            saving: None,
            end: None,
            kill_requested: false,
        },
        facts,
        effects,
    }
}

/// Decides what `input` means for the sandbox.
pub fn step(record: &Record, input: Input, now: Timestamp) -> Result<Transition, Refused> {
    match input {
        Input::Started { instance } => Ok(started(record, instance, now)),
        Input::StartFailed { why } => start_failed(record, why, now),
        Input::Pause { snapshot, kind } => saving::pause(record, snapshot, kind, now),
        Input::Stop { snapshot } => saving::stop(record, snapshot, now),
        Input::Saved { snapshot, bytes } => Ok(saving::saved(record, snapshot, bytes, now)),
        Input::SaveFailed { snapshot, why } => Ok(saving::save_failed(record, &snapshot, why, now)),
        Input::Resume {
            instance,
            timeout_millis,
        } => saving::resume(record, instance, timeout_millis, now),
        Input::ResumeFailed { instance, why } => Ok(saving::resume_failed(record, &instance, why, now)),
        Input::Kill { reason } => Ok(ending::kill(record, reason, now)),
        Input::Ended { instance, fate } => Ok(ending::ended(record, &instance, fate, now)),
        Input::Destroyed { instance } => Ok(ending::destroyed(record, &instance, now)),
        Input::Extend(extension) => deadlines::extend(record, extension, now),
        Input::Touched => touched(record, now),
        Input::DeadlineReached {
            snapshot,
            pause_keeps,
            work,
        } => Ok(deadlines::deadline_reached(
            record,
            snapshot,
            pause_keeps,
            work,
            now,
        )),
        Input::Recover(liveness) => Ok(recover(record, liveness, now)),
    }
}

fn started(record: &Record, instance: InstanceId, now: Timestamp) -> Transition {
    let known = record.instance.as_ref() == Some(&instance);
    match record.state {
        SandboxState::Starting => {
            let mut next = record.clone();
            let planned = next.instance.replace(instance.clone());
            next.state = SandboxState::Running;
            next.started_at = Some(now);
            next.last_used_at = next.last_used_at.max(now);
            Transition {
                next,
                effects: planned
                    .filter(|planned| *planned != instance)
                    .map(Effect::DestroyInstance)
                    .into_iter()
                    .collect(),
                facts: vec![Happening::Started { instance }],
            }
        }
        SandboxState::Resuming if known => saving::resumed(record, instance, now),
        SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping if known => {
            Transition::unchanged(record)
        }
        // The start lost a race: nobody wants this instance.
        SandboxState::Running
        | SandboxState::Pausing
        | SandboxState::Paused
        | SandboxState::Resuming
        | SandboxState::Stopping
        | SandboxState::Stopped
        | SandboxState::Deleting
        | SandboxState::Deleted
        | SandboxState::Failed => Transition::only(record, Effect::DestroyInstance(instance)),
    }
}

fn start_failed(record: &Record, why: String, now: Timestamp) -> Result<Transition, Refused> {
    match record.state {
        SandboxState::Starting => Ok(delete(record, EndReason::StartFailed(why), false, now)),
        SandboxState::Running
        | SandboxState::Pausing
        | SandboxState::Paused
        | SandboxState::Resuming
        | SandboxState::Stopping
        | SandboxState::Stopped => Err(Refused::new(
            record,
            "fail the start of",
            "it has started",
            "report how its instance ended",
        )),
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            Ok(Transition::unchanged(record))
        }
    }
}

fn touched(record: &Record, now: Timestamp) -> Result<Transition, Refused> {
    let refused = |why: String, instead| Err(Refused::new(record, "use", why, instead));
    match record.state {
        SandboxState::Running => match deadlines::is_over(record, now) {
            Some(kind) => Err(deadlines::too_late(record, "use", kind)),
            None => Ok(Transition::to(Record {
                last_used_at: record.last_used_at.max(now),
                ..record.clone()
            })),
        },
        SandboxState::Starting | SandboxState::Resuming => {
            refused(format!("it is still {}", record.state), "wait until it runs")
        }
        SandboxState::Pausing | SandboxState::Stopping => {
            refused(format!("it is {}", record.state), "resume it once it rests")
        }
        SandboxState::Paused => refused("it is paused".into(), "resume it"),
        SandboxState::Stopped => refused("it is stopped".into(), "start it"),
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            let why = match &record.end {
                Some(end) => format!("it is {}: {}", record.state, end.explain()),
                None => format!("it is {}", record.state),
            };
            refused(why, "create a new sandbox")
        }
    }
}

fn recover(record: &Record, liveness: Liveness, now: Timestamp) -> Transition {
    // Nobody could use it while the server was away, so that time does not count as idle.
    let used = || Record {
        last_used_at: record.last_used_at.max(now),
        ..record.clone()
    };
    match (record.state, liveness) {
        // It may stand still although it is to run: the server died with a thaw before it, or while a snapshot or a fork
        // held it.
        (SandboxState::Running, Liveness::Alive) => Transition {
            effects: record
                .instance
                .clone()
                .map(Effect::ThawInstance)
                .into_iter()
                .collect(),
            ..Transition::to(used())
        },
        // Nobody was told that it rests. It stands still with all it had, so it can go on.
        (SandboxState::Pausing | SandboxState::Stopping, Liveness::Alive) => saving::run_on(
            &used(),
            "the server was restarted while it was being saved; it runs on".into(),
            now,
        ),
        (SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping, Liveness::Gone) => {
            delete(record, EndReason::Lost, false, now)
        }
        (
            SandboxState::Running | SandboxState::Pausing | SandboxState::Stopping,
            Liveness::Incompatible { agent, server },
        ) => delete(record, EndReason::Incompatible { agent, server }, false, now),
        // Even one that answers may lack its environment or start command, and its creator was never told of success.
        (SandboxState::Starting, _) => delete(
            record,
            EndReason::StartFailed("the server was restarted while it was starting; create it again".into()),
            false,
            now,
        ),
        // The same, but here there is something to go back to.
        (SandboxState::Resuming, _) => saving::rest_again(
            record,
            "the server was restarted while it was resuming; resume it again".into(),
            now,
        ),
        (SandboxState::Paused | SandboxState::Stopped, _) => match record.instance.clone() {
            Some(instance) => Transition::only(record, Effect::DestroyInstance(instance)),
            None => Transition::unchanged(record),
        },
        (SandboxState::Deleting, _) => match record.instance.clone() {
            Some(instance) => {
                let mut again = Transition::only(record, Effect::DestroyInstance(instance));
                again.effects.extend(leftovers(record));
                again
            }
            None => finish(record, EndReason::Killed, now),
        },
        (SandboxState::Deleted | SandboxState::Failed, _) => Transition::unchanged(record),
    }
}

#[cfg(test)]
mod tests;

//! When a sandbox's time is over, and what happens to it then.

use atoll_types::{
    IdleAction, SandboxState, SaveKind, Saved, SnapshotId, TimeLeft, TimeoutAction, Timestamp,
};

use super::ending::delete;
use super::saving::begin_saving;
use super::words::{DeadlineKind, Extension, Happening, Policy, Record, Refused, Transition};
use crate::Work;

/// How long a deadline waits before it asks again for a save that failed: what stood in the way (a full disk, say) is
/// not gone in a moment, and trying costs.
const HOLD_OFF_MILLIS: u64 = 60_000;

/// The next moment at which something is done to the sandbox unless something happens first, and why. At that of its idle
/// time it is looked at first: see [`Work`].
pub fn next_deadline(record: &Record) -> Option<(Timestamp, DeadlineKind)> {
    let (one, other) = deadlines(record);
    one.into_iter().chain(other).min_by_key(|(at, _)| *at)
}

type Deadline = Option<(Timestamp, DeadlineKind)>;

/// What is final, and its idle time.
fn deadlines(record: &Record) -> (Deadline, Deadline) {
    match record.state {
        // Nobody can use a sandbox that is still starting, so it is not idle.
        SandboxState::Starting => (record.deadline.map(|at| (at, DeadlineKind::Timeout)), None),
        SandboxState::Running => {
            let timeout = record.deadline.map(|at| (at, DeadlineKind::Timeout));
            let idle = record.policy.idle.map(|policy| {
                let at = record.last_used_at.plus_millis(policy.after_millis);
                (at, DeadlineKind::Idle)
            });
            let held_off = |(at, kind)| (held_off(record, at, kind), kind);
            (timeout.map(held_off), idle.map(held_off))
        }
        SandboxState::Paused | SandboxState::Stopped => {
            let kept = record.saved.as_ref().zip(record.policy.retention_millis);
            let over = |(saved, retention): (&Saved, u64)| {
                (saved.at.plus_millis(retention), DeadlineKind::Retention)
            };
            (kept.map(over), None)
        }
        // These end by themselves, well or not; whoever performs them sees to that.
        SandboxState::Pausing | SandboxState::Stopping | SandboxState::Resuming | SandboxState::Deleting => {
            (None, None)
        }
        SandboxState::Deleted | SandboxState::Failed => (None, None),
    }
}

/// Only what failed waits: a kill does not.
fn held_off(record: &Record, at: Timestamp, kind: DeadlineKind) -> Timestamp {
    match record.hold_off {
        Some(hold_off) if action(record, kind) != TimeoutAction::Kill => at.max(hold_off),
        _ => at,
    }
}

pub(super) fn expired(record: &Record, now: Timestamp) -> Option<DeadlineKind> {
    next_deadline(record)
        .filter(|(at, _)| *at <= now)
        .map(|(_, kind)| kind)
}

/// The deadline that has passed for good. That of its idle time has not: whether it is idle is found out when it is looked
/// at, and who uses it before that is in time.
pub(super) fn is_over(record: &Record, now: Timestamp) -> Option<DeadlineKind> {
    let (last, _idle) = deadlines(record);
    last.filter(|(at, _)| *at <= now).map(|(_, kind)| kind)
}

/// What the sandbox asks for at this deadline.
pub(super) fn action(record: &Record, kind: DeadlineKind) -> TimeoutAction {
    match kind {
        DeadlineKind::Timeout => record.policy.on_timeout,
        DeadlineKind::Idle => match record.policy.idle.map(|idle| idle.action) {
            Some(IdleAction::Pause) => TimeoutAction::Pause,
            Some(IdleAction::Stop) => TimeoutAction::Stop,
            Some(IdleAction::Kill) | None => TimeoutAction::Kill,
        },
        DeadlineKind::Retention => TimeoutAction::Kill,
    }
}

/// What a caller who came too late can do.
pub(super) fn too_late(record: &Record, input: &'static str, kind: DeadlineKind) -> Refused {
    let instead = match (record.state, action(record, kind)) {
        (SandboxState::Running, TimeoutAction::Pause | TimeoutAction::Stop) => "resume it once it rests",
        _ => "create a new sandbox",
    };
    Refused::new(record, input, format!("its {kind} has been reached"), instead)
}

pub(super) fn deadline_reached(
    record: &Record,
    snapshot: SnapshotId,
    pause_keeps: SaveKind,
    work: Option<Work>,
    now: Timestamp,
) -> Transition {
    let record = match expired(record, now) {
        Some(DeadlineKind::Idle) => &after_work(record, work, now),
        _ => record,
    };
    // Its lifetime may be over all the same.
    let Some(kind) = expired(record, now) else {
        return Transition::unchanged(record);
    };
    match (record.state, action(record, kind)) {
        (SandboxState::Running, TimeoutAction::Pause) => {
            begin_saving(record, SandboxState::Pausing, snapshot, pause_keeps, now)
        }
        (SandboxState::Running, TimeoutAction::Stop) => begin_saving(
            record,
            SandboxState::Stopping,
            snapshot,
            SaveKind::Filesystem,
            now,
        ),
        // One whose time is over before it has started has nothing to keep.
        (_, TimeoutAction::Kill | TimeoutAction::Pause | TimeoutAction::Stop) => {
            delete(record, kind.into(), false, now)
        }
    }
}

/// Its idle time begins again with the last moment of its work. One that nobody could look at stays: to end what works
/// cannot be undone.
fn after_work(record: &Record, work: Option<Work>, now: Timestamp) -> Record {
    let worked_at = match work {
        Some(work) => work.last_at(record.last_used_at).map(|at| at.min(now)),
        None => Some(now),
    };
    Record {
        last_used_at: record.last_used_at.max(worked_at.unwrap_or(record.last_used_at)),
        ..record.clone()
    }
}

/// Puts off the deadline that has just failed to save the sandbox.
pub(super) fn hold_off(record: Record, now: Timestamp) -> Record {
    match expired(&record, now) {
        Some(kind) if action(&record, kind) != TimeoutAction::Kill => Record {
            hold_off: Some(now.plus_millis(HOLD_OFF_MILLIS)),
            ..record
        },
        _ => record,
    }
}

pub(super) fn extend(record: &Record, extension: Extension, now: Timestamp) -> Result<Transition, Refused> {
    let refused = |instead| {
        Err(Refused::new(
            record,
            "extend",
            format!("it is {}", record.state),
            instead,
        ))
    };
    match record.state {
        SandboxState::Starting | SandboxState::Running | SandboxState::Resuming => {}
        SandboxState::Pausing | SandboxState::Stopping => {
            return refused("change its timeout once it rests, or resume it with one");
        }
        SandboxState::Paused | SandboxState::Stopped => {
            return refused("change its timeout, or resume it with one");
        }
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            return refused("create a new sandbox");
        }
    }
    if let Some(kind) = is_over(record, now) {
        return Err(too_late(record, "extend", kind));
    }
    let deadline = match extension {
        Extension::For { timeout_millis } => Some(now.plus_millis(timeout_millis)),
        Extension::Until(at) => Some(at),
        Extension::Unlimited => None,
    };
    Ok(Transition {
        facts: vec![Happening::Extended { deadline }],
        ..Transition::to(Record {
            deadline,
            last_used_at: record.last_used_at.max(now),
            ..record.clone()
        })
    })
}

/// What a sandbox that is held still from `since` on has left of its lifetime. One whose time was over, which is why it
/// rests or was about to, comes back to a whole one: with nothing it could not come back at all.
pub(super) fn time_left(deadline: Option<Timestamp>, since: Timestamp) -> TimeLeft {
    match deadline {
        None => TimeLeft::Unlimited,
        Some(at) if at <= since => TimeLeft::Anew,
        Some(at) => TimeLeft::Millis(at.millis_since(since)),
    }
}

/// The end of the lifetime of one that comes back now; `timeout_millis` is what its resume asks for.
pub(super) fn deadline_after(
    left: TimeLeft,
    timeout_millis: Option<u64>,
    policy: &Policy,
    now: Timestamp,
) -> Option<Timestamp> {
    let lifetime = match (timeout_millis, left) {
        (Some(asked), _) => Some(asked),
        (None, TimeLeft::Millis(left)) => Some(left),
        (None, TimeLeft::Unlimited) => None,
        (None, TimeLeft::Anew) => policy.timeout_millis,
    };
    lifetime.map(|millis| now.plus_millis(millis))
}

/// What its spec says about time is different from now on. A new timeout holds at once: from now where it runs, from its
/// resume where it rests. Whoever calls this has seen to it that it does one or the other.
pub fn change(
    record: &Record,
    policy: Policy,
    timeout_millis: Option<u64>,
    now: Timestamp,
) -> Result<Record, Refused> {
    let mut next = match timeout_millis {
        Some(timeout_millis) if record.state == SandboxState::Running => {
            extend(record, Extension::For { timeout_millis }, now)?.next
        }
        _ => record.clone(),
    };
    if timeout_millis.is_some()
        && let Some(saved) = &mut next.saved
    {
        saved.time_left = TimeLeft::Anew;
    }
    next.policy = policy;
    Ok(next)
}

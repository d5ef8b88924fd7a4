//! The life of one sandbox.
//!
//! ```text
//!                 create(Cold)                      create(Warm)
//!                      │                                 │
//!                      v            Started              v
//!                  Starting ────────────────────────> Running <──┐ Extend, Touched, Recover(Alive)
//!                      │                                 │  └─────┘
//!      Kill, deadline, │                                 │ Kill, timeout, idle,
//!   StartFailed, Ended,│                                 │ Ended, Recover(Gone)
//!        Recover(any)  └────────────> Deleting <─────────┘
//!                                        │ Destroyed
//!                        ┌───────────────┴──────────────┐
//!        it was asked    v                              v  it broke
//!        to end       Deleted <──────── Kill ─────── Failed
//! ```
//!
//! What must hold:
//! - There is one way out, and it leads through `Deleting`: whoever is there still has something on the host, and
//!   destroying it again is always right. A crash between two lines of the picture therefore loses nothing.
//! - `Deleted` and `Failed` hold no instance and never leave for a living state. `Failed` tells the two apart for people:
//!   it broke, and nobody has asked for its deletion yet.
//! - A kill is never refused, and ends in `Deleted` whatever else happens.
//! - A deadline that has passed has passed: neither an extension nor a use undoes it, however late its reaper comes.
//! - An instance that turns up where none belongs (a start that lost its race against a kill) is destroyed, not kept.
//! - Every sandbox ends with exactly one [`Happening::Ended`] or [`Happening::Failed`].

use std::fmt;

use atoll_types::{EndReason, Fault, FaultKind, IdlePolicy, InstanceId, SandboxState, Timestamp};

/// What the decisions need to know of a sandbox. [`create`] makes one, [`step`] makes the next one of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub state: SandboxState,
    /// Its instance on the host, from before the first process exists until the last trace of it is gone.
    pub instance: Option<InstanceId>,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    /// When it became `Deleted` or `Failed`.
    pub ended_at: Option<Timestamp>,
    /// When its lifetime is over.
    pub deadline: Option<Timestamp>,
    pub idle: Option<IdlePolicy>,
    pub last_used_at: Timestamp,
    /// Why it ends; known from `Deleting` on, and the first reason stays.
    pub end: Option<EndReason>,
    /// Somebody asked for its deletion, so it ends in `Deleted` even though it broke first.
    pub kill_requested: bool,
}

/// What [`create`] needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRecord {
    pub boot: Boot,
    pub timeout_millis: Option<u64>,
    pub idle: Option<IdlePolicy>,
}

/// Where the first instance comes from. Its id is chosen before anything runs, so that a crash in between leaves a row
/// that names what has to be cleaned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Boot {
    /// To be started under this id.
    Cold(InstanceId),
    /// Claimed from a warm pool: it runs already.
    Warm(InstanceId),
}

/// What can happen to a sandbox, or be asked of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The instance is up and its agent has answered.
    Started {
        instance: InstanceId,
    },
    StartFailed {
        why: String,
    },
    /// Delete it, for this reason ([`EndReason::Killed`] when a person asks).
    Kill {
        reason: EndReason,
    },
    /// The instance ended by itself.
    Ended {
        fate: InstanceFate,
    },
    /// Nothing of this instance is left on the host.
    Destroyed {
        instance: InstanceId,
    },
    Extend(Extension),
    /// Somebody used it: an exec, a file, a port.
    Touched,
    /// A timer fired for it. Early and late timers do no harm.
    DeadlineReached,
    /// The server came back after a restart and looked for the instance.
    Recover(Liveness),
}

/// How an instance ended, as the host saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceFate {
    OutOfMemory,
    Died(String),
    /// It is not there any more and nobody saw it go.
    Lost,
}

/// A new end of its lifetime. It may be sooner than the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extension {
    /// This long from now.
    For {
        timeout_millis: u64,
    },
    Until(Timestamp),
    /// No end; only where the operator allows it.
    Unlimited,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// The instance runs, and its agent has answered.
    Alive,
    Gone,
}

/// The answer of [`step`]: persist `next` and `facts` in one transaction, then perform `effects`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    pub next: Record,
    pub facts: Vec<Happening>,
    pub effects: Vec<Effect>,
}

/// What to do on the host. Both are idempotent, so performing one again after a crash is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Boot it, then report [`Input::Started`] or [`Input::StartFailed`].
    StartInstance(InstanceId),
    /// Remove every trace of it (first cancelling a start under way), then report [`Input::Destroyed`].
    DestroyInstance(InstanceId),
}

/// What the ledger has to say about a transition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    Created,
    Started { instance: InstanceId },
    Extended { deadline: Option<Timestamp> },
    Ended { reason: EndReason },
    Failed { reason: EndReason },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlineKind {
    Timeout,
    Idle,
}

/// The sandbox cannot do this now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub state: SandboxState,
    /// What was asked, as a verb: `extend`.
    pub input: &'static str,
    /// Why not, as the end of a sentence.
    pub why: String,
    /// What would work.
    pub instead: &'static str,
}

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
            deadline: new.timeout_millis.map(|millis| now.plus_millis(millis)),
            idle: new.idle,
            last_used_at: now,
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
        Input::StartFailed { why } => start_failed(record, why),
        Input::Kill { reason } => Ok(kill(record, reason)),
        Input::Ended { fate } => Ok(ended(record, fate)),
        Input::Destroyed { instance } => Ok(destroyed(record, &instance, now)),
        Input::Extend(extension) => extend(record, extension, now),
        Input::Touched => touched(record, now),
        Input::DeadlineReached => Ok(deadline_reached(record, now)),
        Input::Recover(liveness) => Ok(recover(record, liveness, now)),
    }
}

/// The next moment at which the sandbox ends unless something happens first, and why it would.
pub fn next_deadline(record: &Record) -> Option<(Timestamp, DeadlineKind)> {
    let timeout = match record.state {
        SandboxState::Starting | SandboxState::Running => {
            record.deadline.map(|at| (at, DeadlineKind::Timeout))
        }
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => None,
    };
    // Nobody can use a sandbox that is still starting, so it is not idle.
    let idle = match (record.state, record.idle) {
        (SandboxState::Running, Some(policy)) => Some((
            record.last_used_at.plus_millis(policy.after_millis),
            DeadlineKind::Idle,
        )),
        _ => None,
    };
    match (timeout, idle) {
        (Some(timeout), Some(idle)) => Some(if idle.0 < timeout.0 { idle } else { timeout }),
        (one, other) => one.or(other),
    }
}

fn started(record: &Record, instance: InstanceId, now: Timestamp) -> Transition {
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
        SandboxState::Running if record.instance.as_ref() == Some(&instance) => Transition::unchanged(record),
        // The start lost a race: nobody wants this instance.
        SandboxState::Running | SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            Transition::only(record, Effect::DestroyInstance(instance))
        }
    }
}

fn start_failed(record: &Record, why: String) -> Result<Transition, Refused> {
    match record.state {
        SandboxState::Starting => Ok(delete(record, EndReason::StartFailed(why), false)),
        SandboxState::Running => Err(Refused {
            state: record.state,
            input: "fail the start of",
            why: "it has started".into(),
            instead: "report how its instance ended",
        }),
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            Ok(Transition::unchanged(record))
        }
    }
}

fn kill(record: &Record, reason: EndReason) -> Transition {
    match record.state {
        SandboxState::Starting | SandboxState::Running => delete(record, reason, true),
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

fn ended(record: &Record, fate: InstanceFate) -> Transition {
    match record.state {
        SandboxState::Starting | SandboxState::Running => delete(record, fate.into(), false),
        // Being destroyed is the usual reason for an instance to end.
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            Transition::unchanged(record)
        }
    }
}

fn destroyed(record: &Record, instance: &InstanceId, now: Timestamp) -> Transition {
    if record.instance.as_ref() != Some(instance) {
        return Transition::unchanged(record);
    }
    match record.state {
        // Nobody here asked for that; the host has lost it all the same.
        SandboxState::Starting | SandboxState::Running => finish(record, EndReason::Lost, now),
        SandboxState::Deleting => finish(record, EndReason::Killed, now),
        SandboxState::Deleted | SandboxState::Failed => Transition::unchanged(record),
    }
}

fn extend(record: &Record, extension: Extension, now: Timestamp) -> Result<Transition, Refused> {
    let refused = |why: String| Refused {
        state: record.state,
        input: "extend",
        why,
        instead: "create a new sandbox",
    };
    match record.state {
        SandboxState::Starting | SandboxState::Running => {}
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            return Err(refused(format!("it is {}", record.state)));
        }
    }
    if let Some(kind) = expired(record, now) {
        return Err(refused(format!("its {kind} has been reached")));
    }
    let deadline = match extension {
        Extension::For { timeout_millis } => Some(now.plus_millis(timeout_millis)),
        Extension::Until(at) => Some(at),
        Extension::Unlimited => None,
    };
    Ok(Transition {
        next: Record {
            deadline,
            last_used_at: record.last_used_at.max(now),
            ..record.clone()
        },
        facts: vec![Happening::Extended { deadline }],
        effects: Vec::new(),
    })
}

fn touched(record: &Record, now: Timestamp) -> Result<Transition, Refused> {
    let refused = |why: String, instead| Refused {
        state: record.state,
        input: "use",
        why,
        instead,
    };
    match record.state {
        SandboxState::Running => match expired(record, now) {
            Some(kind) => Err(refused(
                format!("its {kind} has been reached"),
                "create a new sandbox",
            )),
            None => Ok(Transition::to(Record {
                last_used_at: record.last_used_at.max(now),
                ..record.clone()
            })),
        },
        SandboxState::Starting => Err(refused("it is still starting".into(), "wait until it runs")),
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => {
            let why = match &record.end {
                Some(end) => format!("it is {}: {}", record.state, end.explain()),
                None => format!("it is {}", record.state),
            };
            Err(refused(why, "create a new sandbox"))
        }
    }
}

fn deadline_reached(record: &Record, now: Timestamp) -> Transition {
    match expired(record, now) {
        Some(kind) => delete(record, kind.into(), false),
        None => Transition::unchanged(record),
    }
}

fn recover(record: &Record, liveness: Liveness, now: Timestamp) -> Transition {
    match (record.state, liveness) {
        // Nobody could use it while the server was away, so that time does not count as idle.
        (SandboxState::Running, Liveness::Alive) => Transition::to(Record {
            last_used_at: record.last_used_at.max(now),
            ..record.clone()
        }),
        (SandboxState::Running, Liveness::Gone) => delete(record, EndReason::Lost, false),
        // Even one that answers may lack its environment or start command, and its creator was never told of success.
        (SandboxState::Starting, _) => delete(
            record,
            EndReason::StartFailed("the server was restarted while it was starting; create it again".into()),
            false,
        ),
        (SandboxState::Deleting, _) => match record.instance.clone() {
            Some(instance) => Transition::only(record, Effect::DestroyInstance(instance)),
            None => finish(record, EndReason::Killed, now),
        },
        (SandboxState::Deleted | SandboxState::Failed, _) => Transition::unchanged(record),
    }
}

/// Begins the way out of a living state.
fn delete(record: &Record, reason: EndReason, kill_requested: bool) -> Transition {
    let next = Record {
        state: SandboxState::Deleting,
        end: Some(record.end.clone().unwrap_or(reason)),
        kill_requested: record.kill_requested || kill_requested,
        ..record.clone()
    };
    Transition {
        effects: next
            .instance
            .clone()
            .map(Effect::DestroyInstance)
            .into_iter()
            .collect(),
        next,
        facts: Vec::new(),
    }
}

/// Nothing is left on the host: the record may rest. `reason` counts only if none was known before.
fn finish(record: &Record, reason: EndReason, now: Timestamp) -> Transition {
    let reason = record.end.clone().unwrap_or(reason);
    let broke = is_failure(&reason);
    let state = if broke && !record.kill_requested {
        SandboxState::Failed
    } else {
        SandboxState::Deleted
    };
    Transition {
        next: Record {
            state,
            instance: None,
            ended_at: Some(now),
            end: Some(reason.clone()),
            ..record.clone()
        },
        facts: vec![if broke {
            Happening::Failed { reason }
        } else {
            Happening::Ended { reason }
        }],
        effects: Vec::new(),
    }
}

fn is_failure(reason: &EndReason) -> bool {
    match reason {
        EndReason::Killed | EndReason::TimedOut | EndReason::Idle => false,
        EndReason::OutOfMemory | EndReason::GuestDied(_) | EndReason::StartFailed(_) | EndReason::Lost => {
            true
        }
    }
}

fn expired(record: &Record, now: Timestamp) -> Option<DeadlineKind> {
    next_deadline(record)
        .filter(|(at, _)| *at <= now)
        .map(|(_, kind)| kind)
}

impl Record {
    /// The way for a row that must be in a living state with an instance, as exec, files and ports need it.
    pub fn running_instance(&self) -> Option<&InstanceId> {
        match self.state {
            SandboxState::Running => self.instance.as_ref(),
            SandboxState::Starting
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed => None,
        }
    }
}

impl Transition {
    fn to(next: Record) -> Self {
        Self {
            next,
            facts: Vec::new(),
            effects: Vec::new(),
        }
    }

    fn unchanged(record: &Record) -> Self {
        Self::to(record.clone())
    }

    fn only(record: &Record, effect: Effect) -> Self {
        Self {
            effects: vec![effect],
            ..Self::unchanged(record)
        }
    }

    /// Whether there is anything to persist.
    pub fn changes(&self, record: &Record) -> bool {
        self.next != *record || !self.facts.is_empty()
    }
}

impl From<InstanceFate> for EndReason {
    fn from(fate: InstanceFate) -> Self {
        match fate {
            InstanceFate::OutOfMemory => Self::OutOfMemory,
            InstanceFate::Died(how) => Self::GuestDied(how),
            InstanceFate::Lost => Self::Lost,
        }
    }
}

impl From<DeadlineKind> for EndReason {
    fn from(kind: DeadlineKind) -> Self {
        match kind {
            DeadlineKind::Timeout => Self::TimedOut,
            DeadlineKind::Idle => Self::Idle,
        }
    }
}

impl fmt::Display for DeadlineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "timeout",
            Self::Idle => "idle limit",
        })
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} this sandbox: {}", self.input, self.why)
    }
}

impl std::error::Error for Refused {}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        let (kind, code) = match refused.state {
            SandboxState::Starting | SandboxState::Running => (FaultKind::Conflict, "sandbox_wrong_state"),
            SandboxState::Deleting | SandboxState::Deleted => (FaultKind::Gone, "sandbox_deleted"),
            SandboxState::Failed => (FaultKind::Gone, "sandbox_failed"),
        };
        Self::new(kind, code, refused.to_string()).hint(refused.instead)
    }
}

#[cfg(test)]
mod tests;

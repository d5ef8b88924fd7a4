//! The words of the machine: what it knows, what it is told, what it answers.

use std::fmt;

use atoll_types::{
    Code, EndReason, Fault, IdlePolicy, InstanceId, SandboxSpec, SandboxState, SaveKind, Saved, Saving,
    SnapshotId, TimeoutAction, Timestamp,
};

use crate::Work;

/// What the decisions need to know of a sandbox. [`super::create`] makes one, [`super::step`] makes the next one of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub state: SandboxState,
    /// Its instance on the host, from before the first process exists until the last trace of it is gone. One that was
    /// just put to rest still has it until it is removed.
    pub instance: Option<InstanceId>,
    pub created_at: Timestamp,
    /// When its instance came up: the one it has or, at rest and after the end, the last it had.
    pub started_at: Option<Timestamp>,
    /// When it became `Deleted` or `Failed`.
    pub ended_at: Option<Timestamp>,
    /// When its lifetime is over. At rest it has none: what was left is in [`Saved::time_left`].
    pub deadline: Option<Timestamp>,
    /// What its spec says about time.
    pub policy: Policy,
    pub last_used_at: Timestamp,
    /// Saving failed when a deadline asked for it: not asked again before.
    pub hold_off: Option<Timestamp>,
    /// What it comes back from: while it rests, on its way back, and until that is thrown away in `Deleting`.
    pub saved: Option<Saved>,
    /// What is being written: while it is put to rest, and until that is thrown away in `Deleting`.
    pub saving: Option<Saving>,
    /// Why it ends; known from `Deleting` on, and the first reason stays.
    pub end: Option<EndReason>,
    /// Somebody asked for its deletion, so it ends in `Deleted` even though it broke first.
    pub kill_requested: bool,
}

/// What a spec says about time. [`super::change`] alone changes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    pub timeout_millis: Option<u64>,
    pub on_timeout: TimeoutAction,
    pub idle: Option<IdlePolicy>,
    pub retention_millis: Option<u64>,
}

impl Policy {
    pub fn of(spec: &SandboxSpec) -> Self {
        Self {
            timeout_millis: spec.timeout_millis,
            on_timeout: spec.on_timeout,
            idle: spec.idle,
            retention_millis: spec.retention_millis,
        }
    }
}

/// What [`super::create`] needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewRecord {
    pub boot: Boot,
    pub policy: Policy,
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

/// What can happen to a sandbox, or be asked of it. Ids that a decision may need are chosen by the caller, fresh each
/// time; those that are not needed are forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The instance is up and its agent has answered: the end of a start, and of a resume.
    Started {
        instance: InstanceId,
    },
    StartFailed {
        why: String,
    },
    /// Keep its state and let go of its processes. The caller has made sure that the tier can save this kind.
    Pause {
        snapshot: SnapshotId,
        kind: SaveKind,
    },
    /// Keep its files and end its processes.
    Stop {
        snapshot: SnapshotId,
    },
    /// What [`Effect::SaveInstance`] asked for is durable. Its row is committed together with this transition, if this
    /// makes it the one that the sandbox rests on.
    Saved {
        snapshot: SnapshotId,
        /// As large as it is, whether or not its data is shared with others.
        bytes: u64,
    },
    /// Nothing was saved, and nothing is left of the attempt.
    SaveFailed {
        snapshot: SnapshotId,
        why: String,
    },
    /// Bring it back from where it rests.
    Resume {
        instance: InstanceId,
        /// Its new lifetime, if not what it had left.
        timeout_millis: Option<u64>,
    },
    ResumeFailed {
        instance: InstanceId,
        why: String,
    },
    /// Delete it, for this reason ([`EndReason::Killed`] when a person asks).
    Kill {
        reason: EndReason,
    },
    /// The instance ended by itself.
    Ended {
        instance: InstanceId,
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
    DeadlineReached {
        /// The id of what is saved, if that is what is to be done.
        snapshot: SnapshotId,
        /// What a pause keeps on its tier.
        pause_keeps: SaveKind,
        /// What it was seen to do of its own, if its idle time is what is over. `None`: nobody could find out.
        work: Option<Work>,
    },
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
    /// The instance is there and could be taken over: it runs or, held still by a save, can be let go on. (One that is
    /// held still does not answer: let it go on before asking it.)
    Alive,
    Gone,
    /// It is there, but its agent speaks another generation of the guest protocol than this server.
    Incompatible {
        agent: u32,
        server: u32,
    },
}

/// The answer of [`super::step`]: persist `next` and `facts` in one transaction, then perform `effects`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    pub next: Record,
    pub facts: Vec<Happening>,
    pub effects: Vec<Effect>,
}

/// What to do on the host. All are idempotent, so performing one again after a crash is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Boot it, then report [`Input::Started`] or [`Input::StartFailed`].
    StartInstance(InstanceId),
    /// Remove every trace of it (first cancelling a start, a save or a restore under way), then report
    /// [`Input::Destroyed`].
    DestroyInstance(InstanceId),
    /// Hold it still and save it under this id, then report [`Input::Saved`] or [`Input::SaveFailed`].
    SaveInstance {
        instance: InstanceId,
        snapshot: SnapshotId,
        kind: SaveKind,
    },
    /// Let an instance that was held still go on. Done before any later save of it begins: one that goes on while it is
    /// saved is saved wrong.
    ThawInstance(InstanceId),
    /// Boot it from what was saved, then report [`Input::Started`] or [`Input::ResumeFailed`].
    RestoreInstance {
        instance: InstanceId,
        snapshot: SnapshotId,
        kind: SaveKind,
    },
    /// Nobody needs this saved state, or what there is of it: remove it. The record does not wait for that; what a
    /// crash leaves behind is named by no row.
    DropSnapshot(SnapshotId),
}

/// What the ledger has to say about a transition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    Created,
    Started {
        instance: InstanceId,
    },
    Extended {
        deadline: Option<Timestamp>,
    },
    Paused {
        snapshot: SnapshotId,
        kind: SaveKind,
        bytes: u64,
        took_millis: u64,
    },
    Stopped {
        snapshot: SnapshotId,
        bytes: u64,
        took_millis: u64,
    },
    /// It was to rest and could not be saved; it runs on.
    SaveFailed {
        why: String,
    },
    Resumed {
        instance: InstanceId,
        took_millis: u64,
    },
    /// It rests on, as it did.
    ResumeFailed {
        why: String,
    },
    Ended {
        reason: EndReason,
    },
    Failed {
        reason: EndReason,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeadlineKind {
    Timeout,
    Idle,
    /// It has rested for as long as it was to be kept.
    Retention,
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

impl Record {
    /// The way for a row that must be in a living state with an instance, as exec, files and ports need it.
    pub fn running_instance(&self) -> Option<&InstanceId> {
        match self.state {
            SandboxState::Running => self.instance.as_ref(),
            SandboxState::Starting
            | SandboxState::Pausing
            | SandboxState::Paused
            | SandboxState::Resuming
            | SandboxState::Stopping
            | SandboxState::Stopped
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed => None,
        }
    }
}

impl Transition {
    pub(super) fn to(next: Record) -> Self {
        Self {
            next,
            facts: Vec::new(),
            effects: Vec::new(),
        }
    }

    pub(super) fn unchanged(record: &Record) -> Self {
        Self::to(record.clone())
    }

    pub(super) fn only(record: &Record, effect: Effect) -> Self {
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

impl Refused {
    pub(super) fn new(
        record: &Record,
        input: &'static str,
        why: impl Into<String>,
        instead: &'static str,
    ) -> Self {
        Self {
            state: record.state,
            input,
            why: why.into(),
            instead,
        }
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
            DeadlineKind::Retention => Self::Expired,
        }
    }
}

impl fmt::Display for DeadlineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "timeout",
            Self::Idle => "idle limit",
            Self::Retention => "retention",
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
        let code = match refused.state {
            SandboxState::Paused => Code::SandboxPaused,
            SandboxState::Stopped => Code::SandboxStopped,
            SandboxState::Starting
            | SandboxState::Running
            | SandboxState::Pausing
            | SandboxState::Resuming
            | SandboxState::Stopping => Code::SandboxWrongState,
            SandboxState::Deleting | SandboxState::Deleted => Code::SandboxDeleted,
            SandboxState::Failed => Code::SandboxFailed,
        };
        Self::new(code, refused.to_string()).hint(refused.instead)
    }
}

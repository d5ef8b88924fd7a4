//! Words that requests and answers about sandboxes share.

use atoll_types::{
    DiskBacking, Fault, Hook, Hooks, IdleAction, Isolation, SandboxState, SaveKind, TimeoutAction,
    VolumeMount,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::spelling;

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Isolation)]
pub enum IsolationName {
    Jail,
    Gvisor,
    Microvm,
}

impl IsolationName {
    pub fn of(isolation: Isolation) -> Self {
        match isolation {
            Isolation::Jail => Self::Jail,
            Isolation::Gvisor => Self::Gvisor,
            Isolation::Microvm => Self::Microvm,
        }
    }

    pub fn into_isolation(self) -> Isolation {
        match self {
            Self::Jail => Isolation::Jail,
            Self::Gvisor => Isolation::Gvisor,
            Self::Microvm => Isolation::Microvm,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SandboxState)]
pub enum StateName {
    Starting,
    Running,
    Pausing,
    Paused,
    Resuming,
    Stopping,
    Stopped,
    Deleting,
    Deleted,
    Failed,
}

impl StateName {
    pub fn of(state: SandboxState) -> Self {
        match state {
            SandboxState::Starting => Self::Starting,
            SandboxState::Running => Self::Running,
            SandboxState::Pausing => Self::Pausing,
            SandboxState::Paused => Self::Paused,
            SandboxState::Resuming => Self::Resuming,
            SandboxState::Stopping => Self::Stopping,
            SandboxState::Stopped => Self::Stopped,
            SandboxState::Deleting => Self::Deleting,
            SandboxState::Deleted => Self::Deleted,
            SandboxState::Failed => Self::Failed,
        }
    }
}

/// Where the private writable layer lives: in memory (counted against the memory limit) or on the host's disk.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = DiskBacking)]
pub(crate) enum BackingName {
    Memory,
    Disk,
}

impl BackingName {
    pub(crate) fn of(backing: DiskBacking) -> Self {
        match backing {
            DiskBacking::Memory => Self::Memory,
            DiskBacking::Disk => Self::Disk,
        }
    }

    pub(crate) fn into_backing(self) -> DiskBacking {
        match self {
            Self::Memory => DiskBacking::Memory,
            Self::Disk => DiskBacking::Disk,
        }
    }
}

/// How much of a sandbox is kept: with its memory its processes go on; with its files alone they are started anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SaveKind)]
pub(crate) enum SaveKindName {
    Memory,
    Filesystem,
}

impl SaveKindName {
    pub(crate) fn of(kind: SaveKind) -> Self {
        match kind {
            SaveKind::Memory => Self::Memory,
            SaveKind::Filesystem => Self::Filesystem,
        }
    }

    pub(crate) fn into_kind(self) -> SaveKind {
        match self {
            Self::Memory => SaveKind::Memory,
            Self::Filesystem => SaveKind::Filesystem,
        }
    }
}

/// What happens to a sandbox when its time is over. `pause` keeps as much as its isolation can: memory, or else files;
/// `stop` keeps files.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = DeadlineAction)]
pub enum ActionName {
    #[default]
    Kill,
    Pause,
    Stop,
}

impl ActionName {
    pub fn of_timeout(action: TimeoutAction) -> Self {
        match action {
            TimeoutAction::Kill => Self::Kill,
            TimeoutAction::Pause => Self::Pause,
            TimeoutAction::Stop => Self::Stop,
        }
    }

    pub fn of_idle(action: IdleAction) -> Self {
        match action {
            IdleAction::Kill => Self::Kill,
            IdleAction::Pause => Self::Pause,
            IdleAction::Stop => Self::Stop,
        }
    }

    pub fn at_timeout(self) -> TimeoutAction {
        match self {
            Self::Kill => TimeoutAction::Kill,
            Self::Pause => TimeoutAction::Pause,
            Self::Stop => TimeoutAction::Stop,
        }
    }

    pub fn when_idle(self) -> IdleAction {
        match self {
            Self::Kill => IdleAction::Kill,
            Self::Pause => IdleAction::Pause,
            Self::Stop => IdleAction::Stop,
        }
    }
}

/// What happens to a sandbox that nobody uses and that does not work, for a while.
///
/// Use is whatever comes through an API: a call, an open stream, a connection to one of its ports, and a command until it
/// ends, also in the background. Work is a connection of its own to the world, and CPU time: 2 % of one CPU or more on average.
/// The agent, the template's start command and programs that a command left behind count by their work alone. A sandbox is
/// looked at when its idle time is over, so what it computed before its last use may keep it for one idle time more. Nothing
/// keeps it beyond its timeout.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Idle {
    /// For how long. A use, or work that is found, starts it anew.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    pub after_ms: u64,
    #[serde(default)]
    pub action: ActionName,
}

/// What a request to create does where a living sandbox has the name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IfExists {
    /// It is refused with `name_taken`.
    #[default]
    Fail,
    /// It is answered with that sandbox.
    Return,
}

/// A command that the server runs in the sandbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Hook)]
pub(crate) struct HookWords {
    #[schema(min_items = 1, examples(json!(["/bin/sh", "-c", "service nginx reload"])))]
    argv: Vec<String>,
    /// It is killed when it takes longer.
    #[serde(default = "HookWords::default_timeout")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64, default = 60_000)]
    timeout_ms: u64,
}

/// Commands at turns of a sandbox's life, run one after the other.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Hooks)]
pub(crate) struct HooksWords {
    /// Before its creation is answered; one that fails fails the creation.
    #[serde(default)]
    on_create: Vec<HookWords>,
    /// After every resume or start, before that is answered.
    #[serde(default)]
    on_resume: Vec<HookWords>,
}

impl HookWords {
    fn default_timeout() -> u64 {
        60_000
    }

    fn of(hook: Hook) -> Self {
        Self {
            argv: hook.argv,
            timeout_ms: hook.timeout_millis,
        }
    }

    fn into_hook(self) -> Result<Hook, Fault> {
        Ok(Hook {
            argv: self.argv,
            timeout_millis: spelling::duration("hooks.timeout_ms", self.timeout_ms)?,
        })
    }
}

impl HooksWords {
    pub(crate) fn of(hooks: Hooks) -> Self {
        Self {
            on_create: hooks.on_create.into_iter().map(HookWords::of).collect(),
            on_resume: hooks.on_resume.into_iter().map(HookWords::of).collect(),
        }
    }

    pub(crate) fn into_hooks(self) -> Result<Hooks, Fault> {
        let read = |hooks: Vec<HookWords>| {
            hooks
                .into_iter()
                .map(HookWords::into_hook)
                .collect::<Result<Vec<Hook>, Fault>>()
        };
        Ok(Hooks {
            on_create: read(self.on_create)?,
            on_resume: read(self.on_resume)?,
        })
    }
}

/// A volume as the sandbox sees it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = VolumeMount)]
pub(crate) struct VolumeMountWords {
    /// Name or id.
    #[schema(min_length = 1, max_length = 255)]
    volume: String,
    /// Where it appears: absolute, in its plain form.
    #[schema(min_length = 2, examples("/data"))]
    path: String,
    #[serde(default)]
    read_only: bool,
}

impl VolumeMountWords {
    pub(crate) fn of(mount: VolumeMount) -> Self {
        Self {
            volume: mount.volume,
            path: mount.path,
            read_only: mount.read_only,
        }
    }

    pub(crate) fn into_mount(self) -> VolumeMount {
        VolumeMount {
            volume: self.volume,
            path: self.path,
            read_only: self.read_only,
        }
    }
}

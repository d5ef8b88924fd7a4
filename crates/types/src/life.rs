//! The states that a sandbox passes through, and why it ends.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// ```text
///  create ──> Starting ──> Running ── pause ──> Pausing ──> Paused ──┬── resume, start ──> Resuming ──> Running
///                             └────── stop ───> Stopping ─> Stopped ─┘
///
///  every state ── kill, death, deadline ──> Deleting ──┬──> Deleted   it was asked to end
///                                                      └──> Failed    it broke; kill ──> Deleted
/// ```
/// Every state accepts kill. `Paused` and `Stopped` hold no process, only what they come back from; `Deleted` and
/// `Failed` hold nothing on the host: the row stays as a record. The decisions behind the picture are in the lifecycle
/// crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    Starting,
    Running,
    /// Held still while its memory or its files are saved.
    Pausing,
    Paused,
    /// On its way back from `Paused` or `Stopped`.
    Resuming,
    /// Held still while its files are saved.
    Stopping,
    Stopped,
    Deleting,
    Deleted,
    Failed,
}

impl SandboxState {
    pub const ALL: [Self; 10] = [
        Self::Starting,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopping,
        Self::Stopped,
        Self::Deleting,
        Self::Deleted,
        Self::Failed,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Deleting => "deleting",
            Self::Deleted => "deleted",
            Self::Failed => "failed",
        }
    }

    /// Whether the sandbox may hold anything on the host: processes, or saved state.
    pub fn is_live(self) -> bool {
        !matches!(self, Self::Deleted | Self::Failed)
    }

    /// Whether it is at rest: no process, no memory, but it can come back.
    pub fn is_resting(self) -> bool {
        matches!(self, Self::Paused | Self::Stopped)
    }

    /// Whether it has processes, and so counts against limits on what may run at once. One that was just put to rest
    /// may still have an instance that is being removed; that does not count.
    pub fn holds_instance(self) -> bool {
        self.is_live() && !self.is_resting()
    }
}

impl fmt::Display for SandboxState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SandboxState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|state| state.name() == text)
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::name);
                format!("unknown state `{text}`; one of {}", names.join(", "))
            })
    }
}

/// Why a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reason", content = "detail")]
pub enum EndReason {
    /// Somebody asked for it.
    Killed,
    /// Its lifetime was over.
    TimedOut,
    /// Nobody used it for as long as its idle policy allows.
    Idle,
    /// It rested, paused or stopped, for as long as it was to be kept.
    Expired,
    /// It exceeded its memory limit and was killed for it.
    OutOfMemory,
    /// Its first process ended, or broke the protocol.
    GuestDied(String),
    /// It could not be started.
    StartFailed(String),
    /// It was gone when the server came back (a reboot, for instance).
    Lost,
    /// It was there when the server came back, but another version's: its agent speaks another generation of the guest
    /// protocol.
    Incompatible { agent: u32, server: u32 },
}

impl EndReason {
    /// The stable machine-readable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::TimedOut => "timed_out",
            Self::Idle => "idle",
            Self::Expired => "expired",
            Self::OutOfMemory => "out_of_memory",
            Self::GuestDied(_) => "guest_died",
            Self::StartFailed(_) => "start_failed",
            Self::Lost => "lost",
            Self::Incompatible { .. } => "incompatible",
        }
    }

    /// One sentence for a person.
    pub fn explain(&self) -> String {
        match self {
            Self::Killed => "killed on request".into(),
            Self::TimedOut => "its timeout was reached".into(),
            Self::Idle => "it was idle for longer than its idle policy allows".into(),
            Self::Expired => "it rested for as long as its retention allows".into(),
            Self::OutOfMemory => {
                "it exceeded its memory limit and was killed; create it with more memory".into()
            }
            Self::GuestDied(detail) => format!("its first process ended: {detail}"),
            Self::StartFailed(detail) => format!("it could not be started: {detail}"),
            Self::Lost => "it was no longer running when the server came back".into(),
            Self::Incompatible { agent, server } => format!(
                "its agent speaks generation {agent} of the guest protocol, this server {server}; \
                 create it again with this version"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_one_name() {
        for state in SandboxState::ALL {
            assert_eq!(state.name().parse(), Ok(state));
            // The name in SQL and in the ledger's JSON is the same word.
            assert_eq!(
                serde_json::to_value(state).unwrap(),
                serde_json::json!(state.name())
            );
        }
        let error = "asleep".parse::<SandboxState>().unwrap_err();
        assert!(error.contains("paused, resuming, stopping"), "{error}");
    }

    #[test]
    fn what_rests_lives_but_runs_nothing() {
        let running: Vec<_> = SandboxState::ALL
            .into_iter()
            .filter(|state| state.holds_instance())
            .map(SandboxState::name)
            .collect();
        assert_eq!(
            running,
            [
                "starting", "running", "pausing", "resuming", "stopping", "deleting"
            ]
        );
        assert!(SandboxState::Paused.is_live() && SandboxState::Stopped.is_live());
    }
}

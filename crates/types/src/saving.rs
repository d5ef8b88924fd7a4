//! State that outlives the processes it was in.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{SandboxState, SnapshotId, Timestamp};

/// How much of a sandbox is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveKind {
    /// Everything: processes go on where they were. Includes the filesystem.
    Memory,
    /// Files only: processes are started anew.
    Filesystem,
}

impl SaveKind {
    pub const ALL: [Self; 2] = [Self::Memory, Self::Filesystem];

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Filesystem => "filesystem",
        }
    }
}

impl fmt::Display for SaveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SaveKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("unknown kind `{text}`; one of memory, filesystem"))
    }
}

/// What a sandbox that rests comes back from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    pub snapshot: SnapshotId,
    pub kind: SaveKind,
    /// When it went to rest.
    pub at: Timestamp,
    /// It was stopped rather than paused. The kind does not say: a pause, too, may keep the filesystem only.
    pub stopped: bool,
    /// What it had left of its lifetime. Rest does not consume it.
    #[serde(default)]
    pub time_left: TimeLeft,
}

/// The lifetime of a sandbox that rests, once it comes back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeLeft {
    /// As long as its spec says: its last one was over, or was changed at rest. Rows of earlier versions do not say, and
    /// mean this.
    #[default]
    Anew,
    Millis(u64),
    /// It had no end.
    Unlimited,
}

impl Saved {
    /// The state in which a sandbox rests on this.
    pub fn rest(&self) -> SandboxState {
        if self.stopped {
            SandboxState::Stopped
        } else {
            SandboxState::Paused
        }
    }
}

/// What is being written while a sandbox is put to rest. Its id is chosen before anything is written, so that a crash in
/// between leaves a row that names what has to be cleaned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saving {
    pub snapshot: SnapshotId,
    pub kind: SaveKind,
    pub since: Timestamp,
}

/// Whom a snapshot exists for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotOwner {
    /// Somebody asked for it; listed, and kept until deleted.
    User,
    /// The hidden state of a paused or stopped sandbox: comes and goes with its rest.
    Sandbox,
    /// The memory of a template that comes up running: goes with the template.
    Template,
}

impl SnapshotOwner {
    pub const ALL: [Self; 3] = [Self::User, Self::Sandbox, Self::Template];

    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Sandbox => "sandbox",
            Self::Template => "template",
        }
    }
}

impl fmt::Display for SnapshotOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SnapshotOwner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|owner| owner.name() == text)
            .ok_or_else(|| format!("unknown owner `{text}`; one of user, sandbox, template"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_of_an_earlier_version_comes_back_to_a_whole_lifetime() {
        // Rows are kept across upgrades.
        let snapshot = SnapshotId::from_entropy([1; 20]);
        let old = format!(r#"{{"snapshot":"{snapshot}","kind":"memory","at":5,"stopped":false}}"#);
        let saved: Saved = serde_json::from_str(&old).unwrap();
        assert_eq!(saved.time_left, TimeLeft::Anew);
    }
}

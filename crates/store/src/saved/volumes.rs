//! Volumes: directories that outlive sandboxes and are shared by them. The bytes lie elsewhere, by id.
//!
//! What must hold:
//! - A name belongs to one volume of its project.
//! - A volume that a sandbox which has not ended was created with cannot be deleted, however the two requests race: the
//!   attachment is written with the sandbox's row, and goes in the transaction in which the sandbox ends.
//! - An attachment names the volume that the name meant when the sandbox was created.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use atoll_types::{ProjectId, SandboxId, Timestamp, VolumeId};

use crate::{Cursor, Error, NewFact, Page};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRow {
    pub id: VolumeId,
    pub project: ProjectId,
    pub name: String,
    pub state: VolumeState,
    /// The most it may hold.
    pub limit_bytes: u64,
    /// What it held when somebody last looked.
    pub used_bytes: u64,
    pub created_at: Timestamp,
}

/// ```text
///   insert ──> Creating ── its directory is there ──> Ready ── delete ──> (no row; then the bytes go)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VolumeState {
    /// Named, but its directory may not be there yet. One that is found so after a restart was never promised.
    Creating,
    Ready,
}

/// A volume as a sandbox that has not ended sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    pub volume: VolumeId,
    pub path: String,
    pub read_only: bool,
}

impl VolumeState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
        }
    }
}

impl fmt::Display for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for VolumeState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "creating" => Ok(Self::Creating),
            "ready" => Ok(Self::Ready),
            other => Err(format!("unknown volume state `{other}`")),
        }
    }
}

#[async_trait]
pub trait VolumeStore: fmt::Debug + Send + Sync + 'static {
    /// Refused with [`Error::NameTaken`] if the project has a volume of that name.
    async fn insert_volume(&self, volume: VolumeRow, facts: Vec<NewFact>) -> Result<(), Error>;

    /// By id or by name.
    async fn volume(&self, project: &ProjectId, id_or_name: &str) -> Result<Option<VolumeRow>, Error>;

    /// Newest first.
    async fn volumes(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<VolumeRow>, Error>;

    /// Whose it is, unless it is not ready yet or gone.
    async fn project_of_volume(&self, id: &VolumeId) -> Result<Option<ProjectId>, Error>;

    /// Every volume of every project: for recovery, measuring, and to know what on disk is garbage.
    async fn all_volumes(&self) -> Result<Vec<VolumeRow>, Error>;

    /// Forgets a volume and gives back what it was; `None`, and no facts, when there is none. Refused with
    /// [`Error::InUse`] while a sandbox that has not ended was created with it. The caller removes the bytes after this.
    async fn delete_volume(
        &self,
        project: &ProjectId,
        id: &VolumeId,
        facts: Vec<NewFact>,
    ) -> Result<Option<VolumeRow>, Error>;

    async fn set_volume_state(&self, id: &VolumeId, state: VolumeState) -> Result<(), Error>;

    /// Notes how much it holds; a volume that is gone by now is none of our business.
    async fn set_volume_used(&self, id: &VolumeId, used_bytes: u64) -> Result<(), Error>;

    async fn set_volume_limit(&self, id: &VolumeId, limit_bytes: u64) -> Result<(), Error>;

    /// What a sandbox sees, by path; nothing when it has ended.
    async fn attachments(&self, sandbox: &SandboxId) -> Result<Vec<Attachment>, Error>;

    /// The sandboxes that see a volume.
    async fn attached_to(&self, volume: &VolumeId) -> Result<Vec<SandboxId>, Error>;
}

//! Snapshots: saved state, of sandboxes, by id. The bytes lie in the vault under the same id.
//!
//! What must hold:
//! - A row is written after its bytes are durable, and removed before they are: bytes without a row are garbage, and a
//!   row without bytes is damage.
//! - The hidden snapshot of a resting sandbox exists exactly as long as that sandbox's record names it: it is inserted
//!   in the transaction that puts the sandbox to rest, and removed in the one after which its record does not name it.
//! - Only those that a user asked for are listed, have names, and can be deleted by a user.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{
    Isolation, ProjectId, SandboxId, SandboxSpec, SaveKind, SnapshotId, SnapshotOwner, TemplateId, Timestamp,
};

use crate::{Cursor, Error, NewFact, Page, SandboxRow};

#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotRow {
    pub id: SnapshotId,
    pub project: ProjectId,
    pub owner: SnapshotOwner,
    /// Unique in its project; only a user's has one.
    pub name: Option<String>,
    pub kind: SaveKind,
    /// The sandbox it was taken of; that may be long gone. `None` for one that was imported or made for a template.
    pub sandbox: Option<SandboxId>,
    /// What that sandbox came from, or its last snapshot before; that may be gone, too.
    pub parent: Option<SnapshotId>,
    /// The template below it.
    pub template: TemplateId,
    pub isolation: Isolation,
    /// What wrote it, and on which processor; what reads it must match.
    pub runtime: String,
    pub cpu_features: Vec<String>,
    /// What the sandbox was asked to be.
    pub spec: SandboxSpec,
    /// As large as it is for whoever restores it.
    pub total_bytes: u64,
    /// What it added to the vault.
    pub stored_bytes: u64,
    pub created_at: Timestamp,
}

/// What a project has on the host's disks, or was promised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProjectStorage {
    /// Of every owner: a paused sandbox, too, takes room.
    pub snapshots_bytes: u64,
    /// What they may grow to: guests fill them without asking.
    pub volumes_bytes: u64,
    /// Equal contents count once.
    pub artifacts_bytes: u64,
}

impl ProjectStorage {
    pub fn total(&self) -> u64 {
        self.snapshots_bytes
            .saturating_add(self.volumes_bytes)
            .saturating_add(self.artifacts_bytes)
    }
}

#[async_trait]
pub trait SnapshotStore: fmt::Debug + Send + Sync + 'static {
    /// Refused with [`Error::NameTaken`] if the project has a snapshot of that name.
    async fn insert_snapshot(&self, snapshot: SnapshotRow, facts: Vec<NewFact>) -> Result<(), Error>;

    /// Puts a sandbox to rest: its row and the hidden snapshot that its record names from now on, or neither.
    async fn commit_saved(
        &self,
        row: SandboxRow,
        snapshot: SnapshotRow,
        facts: Vec<NewFact>,
    ) -> Result<SandboxRow, Error>;

    /// Whomever it belongs to: a caller that asks for a user looks at its owner.
    async fn snapshot(&self, project: &ProjectId, id: &SnapshotId) -> Result<Option<SnapshotRow>, Error>;

    /// A snapshot that a user asked for; no other has a name.
    async fn snapshot_by_name(&self, project: &ProjectId, name: &str) -> Result<Option<SnapshotRow>, Error>;

    /// Those that users asked for, newest first.
    async fn snapshots(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<SnapshotRow>, Error>;

    /// All that were taken of a sandbox, the hidden one too, newest first.
    async fn snapshots_of_sandbox(&self, sandbox: &SandboxId) -> Result<Vec<SnapshotRow>, Error>;

    /// The last that a user took of a sandbox: the parent of its next.
    async fn latest_snapshot_of(&self, sandbox: &SandboxId) -> Result<Option<SnapshotId>, Error>;

    /// The templates that a user's snapshot or a sandbox at rest needs to come back, in each project.
    async fn templates_of_snapshots(&self) -> Result<Vec<(ProjectId, TemplateId)>, Error>;

    /// What projects keep of a template that comes up running, newest first.
    async fn snapshots_of_template(&self, template: &TemplateId) -> Result<Vec<SnapshotRow>, Error>;

    /// Forgets a snapshot that a user asked for and gives back what it was; `None`, and no facts, when there is none.
    /// One that is kept for a template is refused with [`Error::InUse`]. The caller removes the bytes after this.
    async fn delete_snapshot(
        &self,
        project: &ProjectId,
        id: &SnapshotId,
        facts: Vec<NewFact>,
    ) -> Result<Option<SnapshotRow>, Error>;

    /// Forgets what a project kept of a template that comes up running, and says what it was. The caller removes the bytes
    /// after this.
    async fn delete_snapshots_of_template(
        &self,
        project: &ProjectId,
        template: &TemplateId,
    ) -> Result<Vec<SnapshotRow>, Error>;

    /// Forgets the hidden snapshot of a sandbox that is about to end, if it is still there. (When the sandbox has ended
    /// or runs again, this has happened already.)
    async fn delete_hidden_snapshot(&self, id: &SnapshotId) -> Result<(), Error>;

    /// Every snapshot of every project and owner: what is not among them is garbage in the vault.
    async fn all_snapshot_ids(&self) -> Result<Vec<SnapshotId>, Error>;

    /// What a project has on disk, for its quota.
    async fn project_storage(&self, project: &ProjectId) -> Result<ProjectStorage, Error>;
}

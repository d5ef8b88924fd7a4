//! Artifacts: files and directories that outlive their sandbox. The bytes lie elsewhere, by digest; these are the names.
//!
//! Saving under a name that exists makes a new version. The newest is what the name means; older ones stay reachable by
//! id until they expire.

use std::fmt;
use std::str::FromStr;

use async_trait::async_trait;
use atoll_types::{ArtifactId, ProjectId, SandboxId, Timestamp};

use crate::{Cursor, Error, NewFact, Page};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactRow {
    pub id: ArtifactId,
    pub project: ProjectId,
    pub name: String,
    /// Where it was saved from; that sandbox may be long gone.
    pub sandbox: Option<SandboxId>,
    pub kind: ArtifactKind,
    /// SHA-256 of the content, in hex.
    pub digest: String,
    pub size: u64,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ArtifactKind {
    File,
    /// Kept as a tar archive.
    Directory,
}

impl ArtifactKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
        }
    }
}

impl fmt::Display for ArtifactKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ArtifactKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "file" => Ok(Self::File),
            "directory" => Ok(Self::Directory),
            other => Err(format!("unknown artifact kind `{other}`")),
        }
    }
}

#[async_trait]
pub trait ArtifactStore: fmt::Debug + Send + Sync + 'static {
    async fn insert_artifact(&self, artifact: ArtifactRow, facts: Vec<NewFact>) -> Result<(), Error>;

    async fn artifact(&self, project: &ProjectId, id: &ArtifactId) -> Result<Option<ArtifactRow>, Error>;

    /// The newest version of a name that is not over.
    async fn artifact_by_name(
        &self,
        project: &ProjectId,
        name: &str,
        now: Timestamp,
    ) -> Result<Option<ArtifactRow>, Error>;

    /// All versions of all names of a project (or of one name), newest first.
    async fn artifacts(
        &self,
        project: &ProjectId,
        name: Option<&str>,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ArtifactRow>, Error>;

    /// Artifacts whose retention is over at `now`, the longest overdue first.
    async fn expired_artifacts(&self, now: Timestamp, limit: usize) -> Result<Vec<ArtifactRow>, Error>;

    /// Forgets an artifact and gives back what it was; `None`, and no facts, when there is none. The caller removes the
    /// bytes once [`Self::digest_in_use`] says no.
    async fn delete_artifact(
        &self,
        project: &ProjectId,
        id: &ArtifactId,
        facts: Vec<NewFact>,
    ) -> Result<Option<ArtifactRow>, Error>;

    /// Whether any artifact of any project has this content.
    async fn digest_in_use(&self, digest: &str) -> Result<bool, Error>;
}

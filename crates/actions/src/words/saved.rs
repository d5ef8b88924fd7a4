//! What is kept of a sandbox under a name of its own: snapshots and artifacts.

use atoll_sandboxes::{Artifact, FilePath, SaveArtifact, Snapshot, TakeSnapshot};
use atoll_types::Fault;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::life::{IsolationName, SaveKindName};
use crate::spelling;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Unique among your snapshots.
    #[schema(min_length = 1, max_length = 64)]
    name: Option<String>,
    /// What is kept. Absent: memory where the isolation can, else files.
    kind: Option<SaveKindName>,
}

impl SnapshotRequest {
    pub fn into_take(self, idempotency_key: Option<String>) -> TakeSnapshot {
        TakeSnapshot {
            name: self.name,
            kind: self.kind.map(SaveKindName::into_kind),
            idempotency_key,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Snapshot)]
pub struct SnapshotView {
    id: String,
    name: Option<String>,
    kind: SaveKindName,
    /// Which sandbox it was taken of.
    sandbox: Option<String>,
    /// The snapshot before it in the same line.
    parent: Option<String>,
    template: String,
    isolation: IsolationName,
    /// What wrote it; the same is needed to bring it back.
    runtime: String,
    /// What its programs may rely on of the CPU.
    cpu_features: Vec<String>,
    memory_bytes: u64,
    disk_bytes: u64,
    /// All of it.
    total_bytes: u64,
    /// What it added to the disk; the rest is shared with others.
    stored_bytes: u64,
    #[schema(format = DateTime)]
    created_at: String,
}

impl SnapshotView {
    pub fn of(snapshot: Snapshot) -> Self {
        Self {
            id: snapshot.id.to_string(),
            name: snapshot.name,
            kind: SaveKindName::of(snapshot.kind),
            sandbox: snapshot.sandbox.map(|id| id.to_string()),
            parent: snapshot.parent.map(|id| id.to_string()),
            template: snapshot.template.to_string(),
            isolation: IsolationName::of(snapshot.isolation),
            runtime: snapshot.runtime,
            cpu_features: snapshot.cpu_features,
            memory_bytes: snapshot.resources.memory_bytes,
            disk_bytes: snapshot.resources.disk_bytes,
            total_bytes: snapshot.total_bytes,
            stored_bytes: snapshot.stored_bytes,
            created_at: spelling::time(snapshot.created_at),
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveArtifactRequest {
    /// Letters, digits, `.`, `_` and `-`; not beginning with `art_`, which ids do.
    #[schema(min_length = 1, max_length = 200, pattern = "^[A-Za-z0-9._-]+$")]
    name: String,
    /// A file or a directory in the sandbox.
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who reads it; absent: the template's user.
    user: Option<String>,
    /// How long it is kept; absent: as long as the server says, 30 days unless its configuration has another
    /// `artifact_retention`.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    retention_ms: Option<u64>,
}

impl SaveArtifactRequest {
    pub fn into_save(self) -> Result<SaveArtifact, Fault> {
        Ok(SaveArtifact {
            name: spelling::name("name", self.name)?,
            at: FilePath {
                path: spelling::exactly_one("path", self.path, self.path_base64)?,
                user: self.user,
            },
            retention_millis: self
                .retention_ms
                .map(|millis| spelling::duration("retention_ms", millis))
                .transpose()?,
        })
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Artifact)]
pub struct ArtifactView {
    id: String,
    name: String,
    /// Where it came from, as long as that is on record.
    sandbox: Option<String>,
    /// `file`: the content is the file. `directory`: the content is a tar stream.
    kind: ArtifactKind,
    /// Of the content.
    digest: String,
    size_bytes: u64,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ArtifactKind {
    File,
    Directory,
}

impl ArtifactView {
    pub fn of(artifact: Artifact) -> Self {
        Self {
            id: artifact.id.to_string(),
            name: artifact.name,
            sandbox: artifact.sandbox.map(|id| id.to_string()),
            kind: match artifact.directory {
                true => ArtifactKind::Directory,
                false => ArtifactKind::File,
            },
            digest: artifact.digest,
            size_bytes: artifact.size_bytes,
            created_at: spelling::time(artifact.created_at),
            expires_at: artifact.expires_at.map(spelling::time),
        }
    }
}

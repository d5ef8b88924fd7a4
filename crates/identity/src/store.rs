//! What is remembered of projects and keys, whoever keeps it.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{Cursor, Fault, KeyId, Page, ProjectId, Timestamp};

use crate::{Key, ModelKey, NewKey, NewSession, Project};

/// Rows of projects, keys and sessions.
///
/// What must hold: success means durable. A row that was written is seen by every read that begins afterwards, whoever wrote it.
///
/// What is committed together: making or revoking a key and its fact, which is told once; a session and the end of those that
/// have to make room for it. Keys for models are rows of the model gateway, and only read here.
///
/// What is kept in front of it, and how that stays true: keys and sessions that were found valid (`KnownKeys`). A revocation
/// forgets them after its commit and whatever was looked up meanwhile; expiry is looked at with each use. Nothing tells of what
/// another server revokes: several would have to learn it from the ledger (`key.revoked`) before they may share a database.
///
/// What locks protect: that of `KnownKeys` the map and the count of revocations, together. None is held for a store.
#[async_trait]
pub trait IdentityStore: fmt::Debug + Send + Sync + 'static {
    /// The project of that name; `new` gives the id it gets if there is none yet.
    async fn ensure_project(&self, name: &str, new: ProjectId, now: Timestamp)
    -> Result<Project, StoreError>;

    /// All of them, by name.
    async fn projects(&self) -> Result<Vec<Project>, StoreError>;

    /// `None`: the project has `most` keys that work already. Of those that were revoked or have expired, only as many of the
    /// latest need to be remembered; the ledger tells of all.
    async fn insert_key(&self, key: NewKey, most: usize) -> Result<Option<Key>, StoreError>;

    /// The key whose secret has that hash, unless it was revoked.
    async fn find_active_key(&self, hash: [u8; 32]) -> Result<Option<Key>, StoreError>;

    /// The key for models whose secret has that hash, unless it was revoked.
    async fn find_active_model_key(&self, hash: [u8; 32]) -> Result<Option<ModelKey>, StoreError>;

    /// Keys of a project, revoked ones too, newest first.
    async fn keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<Key>, StoreError>;

    /// One of them.
    async fn key(&self, project: &ProjectId, id: &KeyId) -> Result<Option<Key>, StoreError>;

    /// Revokes a key; the time of an earlier revocation stays. `None`: the project has no such key.
    async fn revoke_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
    ) -> Result<Option<Key>, StoreError>;

    /// Keeps a session. Of too many of one key, the oldest end: their hashes. Those that have expired may be forgotten.
    async fn insert_session(&self, session: NewSession) -> Result<Vec<[u8; 32]>, StoreError>;

    /// The key of the session whose secret has that hash, and when the session expires; unless the key was revoked.
    async fn find_session(&self, hash: [u8; 32]) -> Result<Option<(Key, Timestamp)>, StoreError>;

    async fn delete_session(&self, hash: [u8; 32]) -> Result<(), StoreError>;

    /// Notes a use of the key. Returns at once; written later, and lost if the server dies before.
    fn note_key_used(&self, id: &KeyId, at: Timestamp);
}

/// Why the rows could not be read or written, in words. Nothing was changed.
#[derive(Debug, Clone)]
pub struct StoreError(pub String);

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StoreError {}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        tracing::error!(%error, "the store failed");
        Self::internal(format!("the server's database failed: {error}"))
    }
}

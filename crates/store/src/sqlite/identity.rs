//! The rows of `atoll-identity`, in SQLite.

use atoll_identity::{IdentityStore, Key, ModelKey, NewKey, NewSession, Project, StoreError};
use atoll_types::{KeyId, ProjectId, Timestamp};

use super::{Identity, keys, projects, sessions};
use crate::{Cursor, Error, Page};

#[async_trait::async_trait]
impl IdentityStore for Identity {
    async fn ensure_project(
        &self,
        name: &str,
        new: ProjectId,
        now: Timestamp,
    ) -> Result<Project, StoreError> {
        let name = name.to_owned();
        let made = self.file.write("create the project", move |db| {
            projects::ensure(db, &name, &new, now)
        });
        made.await.map_err(|e| told(&e))
    }

    async fn projects(&self) -> Result<Vec<Project>, StoreError> {
        self.file
            .read("list projects", projects::all)
            .await
            .map_err(|e| told(&e))
    }

    async fn insert_key(&self, key: NewKey, most: usize) -> Result<Option<Key>, StoreError> {
        let made = self
            .file
            .write("create the key", move |db| keys::insert(db, key, most));
        made.await.map_err(|e| told(&e))
    }

    async fn find_active_key(&self, hash: [u8; 32]) -> Result<Option<Key>, StoreError> {
        let found = self
            .file
            .read("find the key", move |db| keys::find_active(db, &hash));
        found.await.map_err(|e| told(&e))
    }

    async fn find_active_model_key(&self, hash: [u8; 32]) -> Result<Option<ModelKey>, StoreError> {
        let found = self.file.read("find the model key", move |db| {
            keys::find_active_for_models(db, &hash)
        });
        found.await.map_err(|e| told(&e))
    }

    async fn keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<Key>, StoreError> {
        let project = project.clone();
        let found = self.file.read("list keys", move |db| {
            keys::of(db, &project, after.as_ref(), limit)
        });
        found.await.map_err(|e| told(&e))
    }

    async fn key(&self, project: &ProjectId, id: &KeyId) -> Result<Option<Key>, StoreError> {
        let (project, id) = (project.clone(), id.clone());
        let found = self
            .file
            .read("find the key", move |db| keys::one(db, &project, &id));
        found.await.map_err(|e| told(&e))
    }

    async fn revoke_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
    ) -> Result<Option<Key>, StoreError> {
        let (project, id) = (project.clone(), id.clone());
        let revoked = self
            .file
            .write("revoke the key", move |db| keys::revoke(db, &project, &id, now));
        revoked.await.map_err(|e| told(&e))
    }

    async fn insert_session(&self, session: NewSession) -> Result<Vec<[u8; 32]>, StoreError> {
        let kept = self
            .file
            .write("keep the session", move |db| sessions::insert(db, &session));
        kept.await.map_err(|e| told(&e))
    }

    async fn find_session(&self, hash: [u8; 32]) -> Result<Option<(Key, Timestamp)>, StoreError> {
        let found = self
            .file
            .read("find the session", move |db| sessions::find(db, &hash));
        found.await.map_err(|e| told(&e))
    }

    async fn delete_session(&self, hash: [u8; 32]) -> Result<(), StoreError> {
        let ended = self
            .file
            .write("end the session", move |db| sessions::delete(db, &hash));
        ended.await.map_err(|e| told(&e))
    }

    fn note_key_used(&self, id: &KeyId, at: Timestamp) {
        self.file.touches.key(id, at);
    }
}

fn told(error: &Error) -> StoreError {
    StoreError(error.to_string())
}

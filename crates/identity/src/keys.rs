//! API keys.
//!
//! A key's secret is 200 random bits, shown once and stored as a SHA-256 hash: with that much entropy a slow hash would
//! protect nothing. Tokens are derived rather than kept: [`crate::tokens`].

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use atoll_types::{Fault, KeyId, ProjectId, Timestamp};
use sha2::{Digest as _, Sha256};

use crate::tokens::{KEY_PREFIX, MODEL_KEY_PREFIX};
use crate::{Caller, Identity, Role, entropy};

/// Longer ones are none of ours.
const LONGEST: usize = 100;

/// A key as listed; the secret itself is shown once, when it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// The beginning of the secret, for people to recognise it by.
    pub prefix: String,
    pub created_at: Timestamp,
    pub revoked_at: Option<Timestamp>,
    /// Not exact: uses are gathered before they are written.
    pub last_used_at: Option<Timestamp>,
}

/// A key to be kept.
#[derive(Debug, Clone)]
pub struct NewKey {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// SHA-256 of the secret.
    pub hash: [u8; 32],
    pub prefix: String,
    pub created_at: Timestamp,
}

/// A key that opens models and nothing else. Its limits are kept where models are called.
#[derive(Debug, Clone)]
pub struct ModelKey {
    pub id: KeyId,
    pub project: ProjectId,
    pub expires_at: Option<Timestamp>,
}

/// A secret that nobody has seen yet.
pub struct NewSecret {
    pub text: String,
    /// SHA-256.
    pub hash: [u8; 32],
    /// Its beginning, to be shown in lists.
    pub prefix: String,
}

impl std::fmt::Debug for NewSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewSecret").finish_non_exhaustive()
    }
}

impl NewSecret {
    fn new(kind: &str) -> Self {
        let first: KeyId = entropy::id();
        let second: KeyId = entropy::id();
        let text = format!("{kind}{}{}", first.bare(), second.bare());
        Self {
            hash: hash(&text),
            prefix: text[..kind.len() + 4].to_owned(),
            text,
        }
    }

    /// For a key that opens models and nothing else.
    pub fn for_models() -> Self {
        Self::new(MODEL_KEY_PREFIX)
    }
}

impl Identity {
    /// Finds out who holds this secret. `None`: nobody (unknown or revoked).
    pub async fn authenticate(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        if !secret.starts_with(KEY_PREFIX) || secret.len() > LONGEST {
            return Ok(None);
        }
        let hash = hash(secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let key = match known {
            Some(known) => known,
            None => {
                let Some(row) = self.store().find_active_key(hash).await? else {
                    return Ok(None);
                };
                let known = KnownKey {
                    id: row.id,
                    project: row.project,
                    expires_at: None,
                };
                self.inner.known_keys.remember(hash, &known, generation);
                known
            }
        };
        self.store().note_key_used(&key.id, self.now());
        let role = self.role_in(&key.project);
        Ok(Some(Caller::key_holder(key.project, role, key.id)))
    }

    /// The same for a key that opens models and nothing else. `None`: nobody (unknown, revoked or expired).
    pub async fn authenticate_for_models(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        if !secret.starts_with(MODEL_KEY_PREFIX) || secret.len() > LONGEST {
            return Ok(None);
        }
        let hash = hash(secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let key = match known {
            Some(known) => known,
            None => {
                let Some(row) = self.store().find_active_model_key(hash).await? else {
                    return Ok(None);
                };
                let known = KnownKey {
                    id: row.id,
                    project: row.project,
                    expires_at: row.expires_at,
                };
                self.inner.known_keys.remember(hash, &known, generation);
                known
            }
        };
        let works = key.expires_at.is_none_or(|at| self.now() < at);
        Ok(works.then(|| Caller::key_holder(key.project, Role::Member, key.id)))
    }

    /// A key that is kept elsewhere was revoked.
    pub fn key_was_revoked(&self) {
        self.inner.known_keys.forget();
    }

    /// Keys of the first project run the server.
    fn role_in(&self, project: &ProjectId) -> Role {
        match project == self.default_project() {
            true => Role::Operator,
            false => Role::Member,
        }
    }

    /// Makes a key and returns its secret, which cannot be shown again.
    pub async fn create_key(&self, project: &ProjectId, name: &str) -> Result<(Key, String), Fault> {
        if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
            return Err(Fault::invalid(
                "key_name_invalid",
                "a key's name has 1 to 100 printable characters",
            ));
        }
        let secret = NewSecret::new(KEY_PREFIX);
        let key = NewKey {
            id: entropy::id(),
            project: project.clone(),
            name: name.to_owned(),
            hash: secret.hash,
            prefix: secret.prefix,
            created_at: self.now(),
        };
        let key = self.store().insert_key(key).await?;
        Ok((key, secret.text))
    }

    pub async fn list_keys(&self, project: &ProjectId) -> Result<Vec<Key>, Fault> {
        Ok(self.store().keys(project).await?)
    }

    /// From now on the key opens nothing. Revoking it again changes nothing.
    pub async fn revoke_key(&self, project: &ProjectId, id: &KeyId) -> Result<Key, Fault> {
        let revoked = self.store().revoke_key(project, id, self.now()).await;
        self.inner.known_keys.forget();
        revoked?.ok_or_else(|| {
            Fault::not_found("key_not_found", format!("there is no key {id}"))
                .hint("`atoll key list` shows those that exist")
        })
    }
}

/// Keys that were found valid, so that not every request asks the store. This server is the only one on its database, so
/// nothing is revoked behind its back; a revocation forgets them all, and whatever was looked up meanwhile. The lock protects
/// the map and its generation together.
#[derive(Debug, Default)]
pub(crate) struct KnownKeys(Mutex<Known>);

#[derive(Debug, Clone)]
struct KnownKey {
    id: KeyId,
    project: ProjectId,
    expires_at: Option<Timestamp>,
}

#[derive(Debug, Default)]
struct Known {
    by_hash: HashMap<[u8; 32], KnownKey>,
    /// Counts the revocations.
    generation: u64,
}

impl KnownKeys {
    fn lookup(&self, hash: &[u8; 32]) -> (Option<KnownKey>, u64) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (known.by_hash.get(hash).cloned(), known.generation)
    }

    /// Unless something was revoked since `generation` was read.
    fn remember(&self, hash: [u8; 32], key: &KnownKey, generation: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation == generation {
            known.by_hash.insert(hash, key.clone());
        }
    }

    fn forget(&self) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.by_hash.clear();
        known.generation += 1;
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

//! API keys, and who holds a token of a sandbox.
//!
//! A key's secret is 200 random bits, shown once and stored as a SHA-256 hash: with that much entropy a slow hash would
//! protect nothing. Tokens are derived rather than kept: [`crate::tokens`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use atoll_store::{Fact, KeyRow, NewFact, NewKey};
use atoll_types::{Code, Fault, KeyId, ProjectId, SandboxId, Timestamp};
use sha2::{Digest as _, Sha256};

use crate::faults::from_store;
use crate::tokens::{KEY_PREFIX, MODEL_PREFIX};
use crate::{Caller, Key, Opens, Sandboxes, entropy};

/// A sandbox that calls a model.
#[derive(Debug, Clone)]
pub struct ModelCaller {
    pub project: ProjectId,
    pub sandbox: SandboxId,
    /// As it was created with.
    pub labels: BTreeMap<String, String>,
}

impl Sandboxes {
    /// Finds out who holds this secret. `None`: nobody (unknown or revoked).
    pub async fn authenticate(&self, secret: &str) -> Result<Option<Caller>, Fault> {
        let found = self.find_key(secret).await?;
        Ok(found.map(|(_, project)| Caller { project }))
    }

    /// Which key a secret is of, and whose; `None` as above.
    pub async fn find_key(&self, secret: &str) -> Result<Option<(KeyId, ProjectId)>, Fault> {
        if !secret.starts_with(KEY_PREFIX) || secret.len() > 100 {
            return Ok(None);
        }
        let hash = hash(secret);
        let (known, generation) = self.inner.known_keys.lookup(&hash);
        let (key, project) = match known {
            Some(known) => known,
            None => {
                let found = self
                    .store()
                    .find_active_key(hash)
                    .await
                    .map_err(|e| from_store(&e))?;
                let Some(row) = found else { return Ok(None) };
                let known = (row.id, row.project);
                self.inner.known_keys.remember(hash, known.clone(), generation);
                known
            }
        };
        self.store().note_key_used(&key, self.now());
        Ok(Some((key, project)))
    }

    /// Makes a key and returns its secret, which cannot be shown again.
    pub async fn create_key(&self, project: &ProjectId, name: &str) -> Result<(Key, String), Fault> {
        if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
            return Err(Fault::new(
                Code::KeyNameInvalid,
                "a key's name has 1 to 100 printable characters",
            ));
        }
        let first = entropy::id::<KeyId>();
        let second = entropy::id::<KeyId>();
        let secret = format!("{KEY_PREFIX}{}{}", first.bare(), second.bare());
        let id: KeyId = entropy::id();
        let now = self.now();
        let key = NewKey {
            id: id.clone(),
            project: project.clone(),
            name: name.to_owned(),
            hash: hash(&secret),
            prefix: secret[..KEY_PREFIX.len() + 4].to_owned(),
            created_at: now,
        };
        let fact = of_project(
            now,
            project,
            Fact::KeyCreated {
                key: id,
                name: name.to_owned(),
            },
        );
        let row = self
            .store()
            .insert_key(key, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        Ok((view(row), secret))
    }

    pub async fn list_keys(&self, project: &ProjectId) -> Result<Vec<Key>, Fault> {
        let rows = self.store().keys(project).await.map_err(|e| from_store(&e))?;
        Ok(rows.into_iter().map(view).collect())
    }

    /// From now on the key opens nothing. Revoking it again changes nothing.
    pub async fn revoke_key(&self, project: &ProjectId, id: &KeyId) -> Result<Key, Fault> {
        let now = self.now();
        let fact = of_project(now, project, Fact::KeyRevoked { key: id.clone() });
        let revoked = self.store().revoke_key(project, id, now, vec![fact]).await;
        self.inner.known_keys.forget();
        match revoked {
            Ok(row) => Ok(view(row)),
            Err(atoll_store::Error::NotFound { .. }) => {
                Err(Fault::new(Code::KeyNotFound, format!("there is no key {id}"))
                    .hint("`atoll key list` shows those that exist"))
            }
            Err(error) => Err(from_store(&error)),
        }
    }

    /// The token that opens one port of this sandbox.
    pub async fn port_token(&self, caller: &Caller, id: &SandboxId, port: u16) -> Result<String, Fault> {
        let (cell, _guest, _in_use) = self.enter(caller, id).await?;
        Ok(self.token(&Opens::Port {
            sandbox: &cell.id,
            port,
        }))
    }

    /// Who a living sandbox belongs to: for front ends that decide by rules of their own who passes.
    pub fn tenant(&self, id: &SandboxId) -> Option<Caller> {
        let cell = self.live_cell(id)?;
        Some(Caller {
            project: cell.project.clone(),
        })
    }

    /// Whether a living sandbox has a label: by it an API knows those that it made. `None`: there is none.
    pub fn has_label(&self, id: &SandboxId, label: &str) -> Option<bool> {
        let cell = self.live_cell(id)?;
        let seen = cell.seen.borrow();
        Some(seen.spec.labels.contains_key(label))
    }

    /// The living sandbox whose agent's token passes a check: for links that prove the token but do not name the sandbox.
    pub fn find_by_agent_token(&self, proves: impl Fn(&str) -> bool) -> Option<SandboxId> {
        let ids: Vec<SandboxId> = self.live().keys().cloned().collect();
        ids.into_iter()
            .find(|sandbox| proves(&self.token(&Opens::Agent { sandbox })))
    }

    /// Checks the token of a port and says on whose behalf it acts. `None`: it opens nothing.
    pub fn check_port_token(&self, id: &SandboxId, port: u16, token: &str) -> Option<Caller> {
        let right = self.is_token(&Opens::Port { sandbox: id, port }, token);
        right.then(|| self.tenant(id))?
    }

    /// Which living sandbox holds this token for models.
    pub fn check_model_token(&self, token: &str) -> Option<ModelCaller> {
        let rest = token.strip_prefix(MODEL_PREFIX)?;
        let id = SandboxId::from_bare(rest.get(..rest.len().checked_sub(40)?)?).ok()?;
        let right = self.is_token(&Opens::Models { sandbox: &id }, token);
        let cell = self.live_cell(&id).filter(|_| right)?;
        let labels = cell.seen.borrow().spec.labels.clone();
        Some(ModelCaller {
            project: cell.project.clone(),
            sandbox: id,
            labels,
        })
    }
}

/// Keys that were found valid, so that not every request asks the store. This server is the only one on its database, so
/// nothing is revoked behind its back; a revocation forgets them all, and whatever was looked up meanwhile.
#[derive(Debug, Default)]
pub(crate) struct KnownKeys(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_hash: HashMap<[u8; 32], (KeyId, ProjectId)>,
    /// Counts the revocations.
    generation: u64,
}

impl KnownKeys {
    fn lookup(&self, hash: &[u8; 32]) -> (Option<(KeyId, ProjectId)>, u64) {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (known.by_hash.get(hash).cloned(), known.generation)
    }

    /// Unless something was revoked since `generation` was read.
    fn remember(&self, hash: [u8; 32], key: (KeyId, ProjectId), generation: u64) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation == generation {
            known.by_hash.insert(hash, key);
        }
    }

    fn forget(&self) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.by_hash.clear();
        known.generation += 1;
    }
}

fn of_project(at: Timestamp, project: &ProjectId, fact: Fact) -> NewFact {
    NewFact {
        at,
        project: project.clone(),
        sandbox: None,
        fact,
    }
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

fn view(row: KeyRow) -> Key {
    Key {
        id: row.id,
        project: row.project,
        name: row.name,
        shown_prefix: row.prefix,
        created_at: row.created_at,
        revoked_at: row.revoked_at,
    }
}

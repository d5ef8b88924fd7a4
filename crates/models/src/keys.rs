//! Virtual keys: secrets of this gateway's own, with fewer rights than a project's key.
//!
//! Who holds one is found out by `atoll-identity`; what it may do is known here.

use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;

use atoll_gateway_core::{Pattern, Rate, RateLimit};
use atoll_identity::NewSecret;
use atoll_store::{Cursor, Fact, ModelKeyRow, Page};
use atoll_types::{Code, Fault, KeyId, ProjectId, Timestamp};

use crate::faults::from_store;
use crate::{Models, fresh};

/// How many keys of a project may work at a time.
const MOST_KEYS: usize = 1_000;

/// A key that works, as calls see it.
#[derive(Debug)]
pub struct ModelKey {
    pub row: ModelKeyRow,
    models: Vec<Pattern>,
    pub(crate) rate: Mutex<Rate>,
}

impl ModelKey {
    /// Whether it may ask for a model of this name.
    pub(crate) fn allows(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|pattern| pattern.matches(model))
    }

    pub(crate) fn take(&self, tokens: u64, now: Timestamp) -> Result<(), u64> {
        self.rate.lock().take(tokens, now)
    }

    pub(crate) fn correct(&self, estimated: u64, actual: u64) {
        self.rate.lock().correct(estimated, actual);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Keys(RwLock<HashMap<KeyId, Arc<ModelKey>>>);

impl Keys {
    pub(crate) fn remember(&self, row: ModelKeyRow, now: Timestamp) {
        let limit = RateLimit {
            requests_per_minute: row.requests_per_minute,
            tokens_per_minute: row.tokens_per_minute,
        };
        let key = ModelKey {
            models: row
                .models
                .iter()
                .filter_map(|pattern| pattern.parse().ok())
                .collect(),
            rate: Mutex::new(Rate::new(limit, now)),
            row,
        };
        let mut keys = self.0.write();
        keys.insert(key.row.id.clone(), Arc::new(key));
    }

    fn forget(&self, id: &KeyId) {
        self.0.write().remove(id);
    }

    fn find(&self, id: &KeyId) -> Option<Arc<ModelKey>> {
        self.0.read().get(id).cloned()
    }
}

#[derive(Debug, Clone)]
pub struct CreateModelKey {
    pub name: String,
    /// Names of models that it may ask for, with wildcards; empty: all.
    pub models: Vec<String>,
    pub requests_per_minute: Option<u64>,
    pub tokens_per_minute: Option<u64>,
    pub expires_at: Option<Timestamp>,
}

impl Models {
    /// What whoever was let in by a key of this gateway's own may do. `None`: it is none, or was revoked.
    pub fn key(&self, id: &KeyId) -> Option<Arc<ModelKey>> {
        self.inner.keys.find(id)
    }

    /// Makes a key and returns its secret, which cannot be shown again.
    pub async fn create_model_key(
        &self,
        project: &ProjectId,
        request: CreateModelKey,
    ) -> Result<(ModelKeyRow, String), Fault> {
        let name = &request.name;
        if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
            return Err(Fault::new(
                Code::KeyNameInvalid,
                "a key's name has 1 to 100 printable characters",
            ));
        }
        if [request.requests_per_minute, request.tokens_per_minute].contains(&Some(0)) {
            return Err(Fault::new(
                Code::KeyRateInvalid,
                "a key that may do nothing is of no use: a rate is at least 1 a minute",
            )
            .hint("leave the rate out where there is no limit, and revoke a key that is to stop"));
        }
        if request.models.len() > 100 {
            return Err(Fault::new(
                Code::KeyModelsInvalid,
                "a key names at most 100 models; use wildcards",
            ));
        }
        for pattern in &request.models {
            pattern
                .parse::<Pattern>()
                .map_err(|why| Fault::new(Code::ModelNameInvalid, why))?;
        }
        let now = self.now();
        let secret = NewSecret::for_models();
        let row = ModelKeyRow {
            id: fresh(),
            project: project.clone(),
            name: request.name,
            hash: secret.hash,
            prefix: secret.prefix,
            models: request.models,
            requests_per_minute: request.requests_per_minute,
            tokens_per_minute: request.tokens_per_minute,
            created_at: now,
            expires_at: request.expires_at,
            revoked_at: None,
        };
        let fact = self.fact(
            project,
            Fact::ModelKeyCreated {
                key: row.id.clone(),
                name: row.name.clone(),
            },
        );
        let made = self
            .store()
            .models
            .insert_model_key(row.clone(), MOST_KEYS, vec![fact])
            .await;
        if !made.map_err(|e| from_store(&e))? {
            return Err(Fault::new(
                Code::TooManyKeys,
                format!("the project has {MOST_KEYS} keys for models that work, and may have no more"),
            )
            .hint("revoke keys that nobody uses: `atoll model key list` names them"));
        }
        self.inner.keys.remember(row.clone(), self.now());
        Ok((row, secret.text))
    }

    /// Newest first.
    pub async fn list_model_keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ModelKeyRow>, Fault> {
        self.store()
            .models
            .model_keys(project, after, limit)
            .await
            .map_err(|e| from_store(&e))
    }

    /// From now on the key opens nothing. Revoking it again changes nothing.
    pub async fn revoke_model_key(&self, project: &ProjectId, id: &KeyId) -> Result<ModelKeyRow, Fault> {
        let fact = self.fact(project, Fact::ModelKeyRevoked { key: id.clone() });
        let revoked = self
            .store()
            .models
            .revoke_model_key(project, id, self.now(), vec![fact])
            .await;
        let row = revoked.map_err(|e| from_store(&e))?;
        self.inner.keys.forget(&row.id);
        self.inner.identity.key_was_revoked(&row.id);
        Ok(row)
    }
}

//! Secrets: kept sealed, held in memory, put into requests at the boundary, and never anywhere else.
//!
//! ```text
//!   master key ──┬── sealing key ────> sealed bytes (for the store)      bound to project and secret
//!                ├── placeholders ───> what a sandbox holds instead      same for a lineage, so nothing is stored
//!                └── authorities ────> see `intercept`
//!
//!   sealed ── load ──> held { value, shape, expires } ── apply ──> request on its way out
//!                                                    └─ redactor ──> answer on its way in
//! ```
//! What must hold:
//! - A value has no printable form and is wiped when dropped. It leaves this module only inside a request to a place that
//!   its binding names. Copies inside the HTTP and TLS libraries live as long as that request.
//! - A value that was loaded later is the one that the next request gets.
//! - A placeholder that cannot be replaced where it stands refuses the request: it is never forwarded in a head.
//! - No error and no event of this module contains a value or a part of one.

mod inject;
mod key;
mod redact;
mod seal;
mod secret;
mod shape;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use atoll_types::{ProjectId, SecretId, Timestamp};

pub use key::MasterKey;
pub use secret::Secret;

pub(crate) use inject::Head;
pub(crate) use redact::{Redactor, Scanner};

use crate::TrustId;
use redact::Needles;
use seal::Sealer;
use shape::Shape;

/// Why a key or a secret cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    #[error("{what} does not hold a key: write 32 random bytes, or 64 hexadecimal digits")]
    NotAKey { what: String },
    #[error("cannot {doing} the key file {path}: {source}")]
    KeyFile {
        doing: &'static str,
        path: String,
        source: std::io::Error,
    },
    #[error(
        "the key file {path} can be read or changed by others: it must be a file of the user who runs Atoll, with mode 0600"
    )]
    KeyFileOpen { path: String },
    #[error("a secret cannot be empty")]
    Empty,
    #[error("a secret of {size} bytes is too long: at most {max} are kept")]
    TooLong { size: usize, max: usize },
    #[error("secret {id} cannot be opened: it is damaged, or it was sealed with another key")]
    CannotOpen { id: SecretId },
    #[error("secret {id} was sealed by a newer version of Atoll (format {format}): use that version")]
    NewerFormat { id: SecretId, format: u8 },
    #[error("the encryption library refused to work")]
    Library,
}

/// The secrets that running sandboxes may use.
pub struct Broker {
    sealer: Sealer,
    key: MasterKey,
    held: RwLock<HashMap<SecretId, Held>>,
}

struct Held {
    value: Arc<Secret>,
    needles: Arc<Needles>,
    shape: Shape,
    expires: Option<Timestamp>,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_struct("Broker")
            .field("secrets", &held.len())
            .finish_non_exhaustive()
    }
}

impl Broker {
    pub fn new(key: &MasterKey) -> Result<Self, BrokerError> {
        Ok(Self {
            sealer: Sealer::new(key)?,
            key: key.copy(),
            held: RwLock::default(),
        })
    }

    /// Encrypts the first value of a secret for the store.
    pub fn seal(&self, project: &ProjectId, id: &SecretId, value: &Secret) -> Result<Vec<u8>, BrokerError> {
        self.sealer.seal(project, id, &Shape::of(value), value)
    }

    /// Encrypts a new value. Its placeholders stay as they are, because sandboxes already hold them.
    pub fn reseal(
        &self,
        project: &ProjectId,
        id: &SecretId,
        previous: &[u8],
        value: &Secret,
    ) -> Result<Vec<u8>, BrokerError> {
        let (shape, _) = self.sealer.open(project, id, previous)?;
        self.sealer.seal(project, id, &shape, value)
    }

    /// Makes a sealed value the one that requests get from now on.
    pub fn load(
        &self,
        project: &ProjectId,
        id: &SecretId,
        sealed: &[u8],
        expires: Option<Timestamp>,
    ) -> Result<(), BrokerError> {
        let (shape, value) = self.sealer.open(project, id, sealed)?;
        let held = Held {
            needles: Arc::new(Needles::of(&value)),
            value: Arc::new(value),
            shape,
            expires,
        };
        self.held
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id.clone(), held);
        Ok(())
    }

    /// Requests that need it are refused from now on.
    pub fn forget(&self, id: &SecretId) {
        self.held
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(id);
    }

    /// What a sandbox of this lineage holds in place of the value; `None` where the secret is not loaded.
    pub fn placeholder(&self, trust: &TrustId, id: &SecretId) -> Option<String> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(id)?.shape.placeholder(&self.key, trust, id).ok()
    }

    fn current(&self, id: &SecretId, now: Timestamp) -> Option<Arc<Secret>> {
        self.live(id, now, |held| held.value.clone())
    }

    fn needles(&self, id: &SecretId, now: Timestamp) -> Option<Arc<Needles>> {
        self.live(id, now, |held| held.needles.clone())
    }

    fn live<T>(&self, id: &SecretId, now: Timestamp, take: impl FnOnce(&Held) -> T) -> Option<T> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let held = held.get(id)?;
        held.expires
            .is_none_or(|expires| now < expires)
            .then(|| take(held))
    }
}

#[cfg(test)]
mod tests;

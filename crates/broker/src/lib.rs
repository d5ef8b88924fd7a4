//! Secrets: kept sealed, held in memory, put into requests at the boundary, and never anywhere else.
//!
//! Two users: the proxy, which puts them into the requests of sandboxes, and the model gateway, which is lent the keys of its
//! providers. What a connection is, neither of them says here: this crate sees heads of requests and bytes of answers.
//!
//! ```text
//!   master key ──┬── sealing key ────> sealed bytes (for the store)      bound to project and secret
//!                ├── placeholders ───> what a sandbox holds instead      same for a lineage, so nothing is stored
//!                └── authorities ────> whose certificates a sandbox trusts: see `egress`
//!
//!   sealed ── load ──> held { value, shape, expires } ── apply ──> request on its way out
//!                                                    └─ redactor ──> answer on its way in
//! ```
//! What must hold:
//! - A value has no printable form and is wiped when dropped. It leaves this crate only inside a request to a place that
//!   its binding names. Copies inside the HTTP and TLS libraries live as long as that request.
//! - A value that was loaded later is the one that the next request gets, and who has requests open is told of it.
//! - A placeholder that cannot be replaced where it stands refuses the request: it is never forwarded in a head.
//! - No error of this crate contains a value or a part of one.

mod inject;
mod key;
mod redact;
mod seal;
mod secret;
mod shape;
mod trust;

use parking_lot::RwLock;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_types::{ProjectId, SecretId, Timestamp};
use tokio::sync::watch;

pub use inject::{Denied, Head, Placeholder, Use, carries};
pub use key::MasterKey;
pub use redact::{Redactor, Scanner};
pub use secret::Secret;
pub use trust::TrustId;

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
    /// Moves on with each change of what is held, after it is in force.
    changes: watch::Sender<u64>,
    versions: AtomicU64,
}

struct Held {
    value: Arc<Secret>,
    /// Another one for each other value.
    version: u64,
    needles: Arc<Needles>,
    shape: Shape,
    expires: Option<Timestamp>,
}

/// A value that may be used now.
struct Lent {
    value: Arc<Secret>,
    version: u64,
    needles: Arc<Needles>,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held.read();
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
            changes: watch::Sender::new(0),
            versions: AtomicU64::new(0),
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

    /// Makes a sealed value the one that requests get from now on, and says which version of the secret it is.
    pub fn load(
        &self,
        project: &ProjectId,
        id: &SecretId,
        sealed: &[u8],
        expires: Option<Timestamp>,
    ) -> Result<u64, BrokerError> {
        let (shape, value) = self.sealer.open(project, id, sealed)?;
        let value = Arc::new(value);
        let needles = Arc::new(Needles::of(Arc::clone(&value)));
        let mut held = self.held.write();
        // The same value under another binding, or until another time, is the same secret.
        let version = match held.get(id) {
            Some(before) if before.value.expose() == value.expose() => before.version,
            _ => self.versions.fetch_add(1, Ordering::Relaxed),
        };
        held.insert(
            id.clone(),
            Held {
                needles,
                value,
                version,
                shape,
                expires,
            },
        );
        drop(held);
        self.changes.send_modify(|change| *change += 1);
        Ok(version)
    }

    /// Tells when a value was replaced or forgotten.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// From when on its value may not be used.
    pub fn expires(&self, id: &SecretId) -> Option<Timestamp> {
        let held = self.held.read();
        held.get(id)?.expires
    }

    /// Why a value that went out may no longer be in use, if that is so.
    pub fn revoked(&self, used: &Use, now: Timestamp) -> Option<&'static str> {
        let held = self.held.read();
        match held.get(&used.secret.id) {
            None => Some("was deleted"),
            Some(held) if held.version != used.version => Some("has another value now"),
            Some(held) if held.expires.is_some_and(|expires| expires <= now) => Some("has expired"),
            Some(_) => None,
        }
    }

    /// Lends a value to one of the server's own requests, for as long as `put` takes, with what blots it out of the answer;
    /// `None` where there is none to lend, or another one than the `version` that was loaded: whoever knew where that one
    /// goes does not know where this one does.
    pub fn lend<T>(
        &self,
        id: &SecretId,
        version: u64,
        now: Timestamp,
        put: impl FnOnce(&[u8], Redactor) -> T,
    ) -> Option<T> {
        let lent = self.current(id, now).filter(|lent| lent.version == version)?;
        let mut redactor = Redactor::default();
        redactor.add(lent.needles);
        Some(put(lent.value.expose(), redactor))
    }

    /// Requests that need it are refused from now on, and those that it went out with are cut.
    pub fn forget(&self, id: &SecretId) {
        self.held.write().remove(id);
        self.changes.send_modify(|change| *change += 1);
    }

    /// What a sandbox of this lineage holds in place of the value; `None` where the secret is not loaded.
    pub fn placeholder(&self, trust: &TrustId, id: &SecretId) -> Option<String> {
        let held = self.held.read();
        held.get(id)?.shape.placeholder(&self.key, trust, id).ok()
    }

    fn current(&self, id: &SecretId, now: Timestamp) -> Option<Lent> {
        let held = self.held.read();
        let held = held.get(id)?;
        held.expires.is_none_or(|expires| now < expires).then(|| Lent {
            value: held.value.clone(),
            version: held.version,
            needles: held.needles.clone(),
        })
    }

    /// Also of one that has expired: a server may still show what it was sent before.
    fn needles(&self, id: &SecretId) -> Option<Arc<Needles>> {
        let held = self.held.read();
        held.get(id).map(|held| held.needles.clone())
    }
}

#[cfg(test)]
mod tests;

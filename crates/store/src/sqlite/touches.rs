//! Last uses, gathered in memory and written along with the next batch.
//!
//! Every request uses a key and most use a sandbox. Waiting for the disk each time would cost more than the request, and
//! losing the last second of it in a crash costs nothing: a sandbox found alive after a restart counts as just used.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;

use atoll_types::{KeyId, SandboxId, Timestamp};
use rusqlite::Connection;

use super::{keys, sandboxes};
use crate::Error;

#[derive(Debug, Default)]
pub(crate) struct Touches {
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    keys: HashMap<KeyId, Timestamp>,
    sandboxes: HashMap<SandboxId, Timestamp>,
}

impl Touches {
    pub(crate) fn key(&self, id: &KeyId, at: Timestamp) {
        note(&mut self.lock().keys, id, at);
    }

    pub(crate) fn sandbox(&self, id: &SandboxId, at: Timestamp) {
        note(&mut self.lock().sandboxes, id, at);
    }

    pub(crate) fn is_empty(&self) -> bool {
        let pending = self.lock();
        pending.keys.is_empty() && pending.sandboxes.is_empty()
    }

    /// Writes and forgets what was gathered, inside of the open transaction.
    pub(crate) fn write(&self, connection: &Connection) {
        let Pending { keys, sandboxes } = std::mem::take(&mut *self.lock());
        for (id, at) in &keys {
            warn("key", keys::touch(connection, id, *at));
        }
        for (id, at) in &sandboxes {
            warn("sandbox", sandboxes::touch(connection, id, *at));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock()
    }
}

fn note<K: Clone + Eq + std::hash::Hash>(map: &mut HashMap<K, Timestamp>, id: &K, at: Timestamp) {
    match map.get_mut(id) {
        Some(last) => *last = (*last).max(at),
        None => {
            map.insert(id.clone(), at);
        }
    }
}

fn warn(what: &'static str, result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the last use of a {what} could not be noted");
    }
}

//! Hears what the proxy saw: events for the ledger, and sums for budgets.
//!
//! What must hold: the proxy never waits. When the queue of events is full, the detail is lost and counted, the sums are
//! not.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_egress::{EgressEvent, EventKind, Witness};
use atoll_types::{EgressVerdict, SandboxId};
use tokio::sync::mpsc;

use crate::words::{Event, NetworkUsage};

/// The most that is remembered of what a build was refused.
const MOST_REFUSED: usize = 8;

#[derive(Debug, Default)]
pub struct Recorder {
    /// Set when the node is there; before that nobody is admitted and nothing is seen.
    events: OnceLock<mpsc::Sender<Event>>,
    /// What nobody has taken yet.
    sums: Mutex<HashMap<SandboxId, NetworkUsage>>,
    lost: AtomicU64,
    /// Whom no row stands for, and what they were refused.
    watched: Mutex<HashMap<SandboxId, BTreeSet<String>>>,
}

impl Recorder {
    pub(crate) fn tell(&self, events: mpsc::Sender<Event>) {
        let _ = self.events.set(events);
    }

    fn sums(&self) -> MutexGuard<'_, HashMap<SandboxId, NetworkUsage>> {
        self.sums.lock()
    }

    /// What was counted for a sandbox and was not taken yet.
    pub(crate) fn pending(&self, sandbox: &SandboxId) -> NetworkUsage {
        self.sums().get(sandbox).copied().unwrap_or_default()
    }

    /// All of that, to be written; forgotten here.
    pub(crate) fn take(&self) -> Vec<(SandboxId, NetworkUsage)> {
        if let lost @ 1.. = self.lost.swap(0, Ordering::Relaxed) {
            tracing::warn!(lost, "more happened at the way out than could be told of");
        }
        std::mem::take(&mut *self.sums()).into_iter().collect()
    }

    /// From now on this is nobody with a row.
    pub(crate) fn watch(&self, id: &SandboxId) {
        self.watched().insert(id.clone(), BTreeSet::new());
    }

    pub(crate) fn unwatch(&self, id: &SandboxId) {
        self.watched().remove(id);
    }

    pub(crate) fn refused(&self, id: &SandboxId) -> Vec<String> {
        let watched = self.watched();
        watched.get(id).into_iter().flatten().map(String::clone).collect()
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<SandboxId, BTreeSet<String>>> {
        self.watched.lock()
    }

    /// Whether it is one of those without a row; what it was refused is remembered.
    fn is_watched(&self, event: &EgressEvent) -> bool {
        let mut watched = self.watched();
        let Some(refused) = watched.get_mut(&event.sandbox) else {
            return false;
        };
        let address = event.address.map(|address| address.to_string());
        if event.verdict == EgressVerdict::Denied
            && refused.len() < MOST_REFUSED
            && let Some(what) = event.host.clone().or(address)
        {
            refused.insert(what);
        }
        true
    }
}

impl Witness for Recorder {
    fn saw(&self, event: EgressEvent) {
        let watched = self.is_watched(&event);
        if event.kind == EventKind::Closed && !watched {
            let mut sums = self.sums();
            let sum = sums.entry(event.sandbox.clone()).or_default();
            sum.bytes_up = sum.bytes_up.saturating_add(event.bytes_up);
            sum.bytes_down = sum.bytes_down.saturating_add(event.bytes_down);
            sum.connections = sum.connections.saturating_add(event.count);
        }
        let Some(queue) = self.events.get() else { return };
        let saw = Event::Saw {
            event,
            is_sandbox: !watched,
        };
        if queue.try_send(saw).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

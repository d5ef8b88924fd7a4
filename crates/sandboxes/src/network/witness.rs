//! Writes down what the proxy saw: facts for the ledger, and sums for budgets.
//!
//! What must hold: the proxy never waits. Facts go into the queue that all facts without a row go through; when that is
//! full, the detail is lost and counted, the sums are not.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use atoll_egress::{EgressEvent, EventKind, Witness};
use atoll_store::{Fact, NetworkDecision, NetworkTotal, NewFact};
use atoll_types::{EgressVerdict, SandboxId};
use tokio::sync::mpsc;

/// The most that is remembered of what a build was refused.
const MOST_REFUSED: usize = 8;

#[derive(Debug, Default)]
pub struct Recorder {
    /// Set when the service is up; before that nobody is admitted and nothing is seen.
    facts: OnceLock<mpsc::Sender<NewFact>>,
    /// What is not in the store yet.
    sums: Mutex<HashMap<SandboxId, NetworkTotal>>,
    lost: AtomicU64,
    /// Whom no row stands for, and what they were refused.
    watched: Mutex<HashMap<SandboxId, BTreeSet<String>>>,
}

impl Recorder {
    pub(crate) fn write_to(&self, facts: mpsc::Sender<NewFact>) {
        let _ = self.facts.set(facts);
    }

    fn sums(&self) -> MutexGuard<'_, HashMap<SandboxId, NetworkTotal>> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was counted for a sandbox and is not in the store yet.
    pub(crate) fn pending(&self, sandbox: &SandboxId) -> NetworkTotal {
        self.sums().get(sandbox).copied().unwrap_or_default()
    }

    /// All of that, to be written; forgotten here.
    pub(crate) fn take(&self) -> HashMap<SandboxId, NetworkTotal> {
        std::mem::take(&mut *self.sums())
    }

    /// From now on this is nobody with a row.
    pub(super) fn watch(&self, id: &SandboxId) {
        self.watched().insert(id.clone(), BTreeSet::new());
    }

    pub(super) fn unwatch(&self, id: &SandboxId) {
        self.watched().remove(id);
    }

    pub(super) fn refused(&self, id: &SandboxId) -> Vec<String> {
        let watched = self.watched();
        watched.get(id).into_iter().flatten().map(String::clone).collect()
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<SandboxId, BTreeSet<String>>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// How many facts were not written since the last time.
    pub(crate) fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
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
        let Some(queue) = self.facts.get() else { return };
        let fact = NewFact {
            at: event.at,
            project: event.project.clone(),
            sandbox: (!watched).then(|| event.sandbox.clone()),
            fact: fact_of(event),
        };
        if queue.try_send(fact).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn fact_of(event: EgressEvent) -> Fact {
    if let EventKind::SecretUsed(secret) = event.kind {
        return Fact::SecretUsed {
            secret: secret.name,
            host: event.host.unwrap_or_default(),
            port: event.port,
            count: event.count,
        };
    }
    let decision = NetworkDecision {
        protocol: event.protocol.name().to_owned(),
        host: event.host,
        address: event.address.map(|address| address.to_string()),
        port: event.port,
        rule: event.rule,
        reason: event.reason,
        count: event.count,
        bytes_up: event.bytes_up,
        bytes_down: event.bytes_down,
    };
    match event.verdict {
        EgressVerdict::Allowed => Fact::NetworkAllowed(decision),
        EgressVerdict::Denied => Fact::NetworkDenied(decision),
    }
}

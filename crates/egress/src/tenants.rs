//! Who is behind which source address, and what they may do at the moment.
//!
//! What must hold: an address belongs to one sandbox at a time, and everything that was begun for the one before is over
//! once another is admitted. A change of policy reaches every flow of the sandbox.

use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use atoll_broker::{Placeholder, TrustId};
use atoll_policy::Policy;
use atoll_types::{ProjectId, SandboxId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit, watch};
use tokio_util::sync::CancellationToken;

use crate::dns::Names;
use crate::events::{Collector, Events};
use crate::limits::{Allowance, Bucket, Exhausted, Used};

/// DNS questions that a sandbox may ask each second, and at once after a pause.
const QUESTIONS: u64 = 100;
const QUESTIONS_AT_ONCE: u64 = 400;
/// DNS questions of a sandbox that may be under way.
const QUESTIONS_OPEN: usize = 64;
/// Large buffers that a sandbox's flows may hold; see `flow::copy`.
const BUFFERS: usize = 64;

/// Connections of a sandbox to Atoll's own service at once.
const SERVICE: usize = 64;

/// Flows of datagrams, within its limit of connections; each takes two descriptors.
pub(crate) const DATAGRAM_FLOWS: usize = 128;

/// A sandbox as the way out sees it.
#[derive(Debug, Clone)]
pub struct Tenant {
    pub sandbox: SandboxId,
    pub project: ProjectId,
    pub policy: Arc<Policy>,
    /// What it used of its budgets before it was admitted here for the first time.
    pub used: Used,
    /// What stands for each secret inside the sandbox.
    pub placeholders: Vec<Placeholder>,
    /// Whose certificates it trusts: its own, or those of the sandbox that it was forked from.
    pub trust: TrustId,
}

/// A tenant while it is admitted, with all that its flows share.
#[derive(Debug)]
pub(crate) struct TenantState {
    current: RwLock<Arc<Tenant>>,
    /// Moves on with each change of policy.
    generation: watch::Sender<u64>,
    gone: CancellationToken,
    pub allowance: Arc<Allowance>,
    pub events: Events,
    /// What its synthetic addresses stand for.
    pub names: Names,
    questions: Mutex<Bucket>,
    pub questions_open: Arc<Semaphore>,
    pub buffers: Arc<Semaphore>,
    service: Arc<Semaphore>,
    datagrams: Arc<Semaphore>,
}

impl TenantState {
    pub(crate) fn new(tenant: Tenant, collector: Arc<Collector>, most_connections: usize) -> Arc<Self> {
        Arc::new(Self {
            generation: watch::Sender::new(0),
            gone: CancellationToken::new(),
            allowance: Arc::new(Allowance::new(
                *tenant.policy.limits(),
                tenant.used,
                most_connections,
            )),
            events: Events::new(tenant.sandbox.clone(), tenant.project.clone(), collector),
            names: Names::default(),
            questions: Mutex::new(Bucket::new(QUESTIONS, QUESTIONS_AT_ONCE)),
            questions_open: Arc::new(Semaphore::new(QUESTIONS_OPEN)),
            buffers: Arc::new(Semaphore::new(BUFFERS)),
            service: Arc::new(Semaphore::new(SERVICE)),
            datagrams: Arc::new(Semaphore::new(DATAGRAM_FLOWS)),
            current: RwLock::new(Arc::new(tenant)),
        })
    }

    /// As it is now. Ask again for each decision.
    pub(crate) fn now(&self) -> Arc<Tenant> {
        Arc::clone(&self.current.read())
    }

    pub(crate) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.now().policy)
    }

    /// Tells when the policy has changed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Completes when the sandbox is dismissed.
    pub(crate) async fn gone(&self) {
        self.gone.cancelled().await;
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.is_cancelled()
    }

    /// Room for one more connection to Atoll's own service.
    pub(crate) fn service_room(&self) -> Result<OwnedSemaphorePermit, Exhausted> {
        Arc::clone(&self.service)
            .try_acquire_owned()
            .map_err(|_| Exhausted::Service(SERVICE as u64))
    }

    /// A question of its own connections, when there is room among all of its questions; and how many there are with it.
    pub(crate) async fn question(&self) -> (Option<SemaphorePermit<'_>>, usize) {
        // Never closed; were it, there would be nobody to bound.
        let question = self.questions_open.acquire().await.ok();
        (question, self.questions_held())
    }

    /// How many of its questions are under way.
    pub(crate) fn questions_held(&self) -> usize {
        QUESTIONS_OPEN.saturating_sub(self.questions_open.available_permits())
    }

    /// Room for one more flow of datagrams.
    pub(crate) fn datagram_room(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.datagrams).try_acquire_owned().ok()
    }

    /// Whether one more DNS question may be answered now.
    pub(crate) fn may_ask(&self) -> bool {
        self.questions.lock().try_take(1, tokio::time::Instant::now())
    }

    fn replace(&self, tenant: Tenant) {
        self.allowance.set(*tenant.policy.limits());
        *self.current.write() = Arc::new(tenant);
        self.generation.send_modify(|generation| *generation += 1);
    }

    fn end(&self) {
        self.gone.cancel();
        self.events.flush();
    }
}

/// All admitted sandboxes by source address.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    table: RwLock<HashMap<IpAddr, Arc<TenantState>>>,
}

impl Tenants {
    pub(crate) fn of(&self, source: IpAddr) -> Option<Arc<TenantState>> {
        let table = self.table.read();
        table.get(&source.to_canonical()).cloned()
    }

    /// Puts `tenant` behind `sources`, in place of what it was before or of who was there before.
    pub(crate) fn admit(
        &self,
        sources: &[IpAddr],
        tenant: Tenant,
        make: impl FnOnce(Tenant) -> Arc<TenantState>,
    ) {
        let mut table = self.table.write();
        let known = sources
            .iter()
            .find_map(|source| table.get(&source.to_canonical()))
            .filter(|state| state.now().sandbox == tenant.sandbox)
            .cloned();
        let state = match known {
            Some(state) => {
                state.replace(tenant);
                state
            }
            None => make(tenant),
        };
        let mut before = Vec::new();
        for source in sources {
            before.extend(table.insert(source.to_canonical(), Arc::clone(&state)));
        }
        // Whoever was there has no address left, or one that it must not use alone.
        before.retain(|old| !Arc::ptr_eq(old, &state));
        table.retain(|_, held| !before.iter().any(|old| Arc::ptr_eq(old, held)));
        drop(table);
        before.iter().for_each(|old| old.end());
    }

    /// Ends everything of whoever is behind `sources`.
    pub(crate) fn dismiss(&self, sources: &[IpAddr]) {
        let mut table = self.table.write();
        let ended: Vec<_> = sources
            .iter()
            .filter_map(|source| table.remove(&source.to_canonical()))
            .collect();
        table.retain(|_, held| !ended.iter().any(|old| Arc::ptr_eq(old, held)));
        drop(table);
        ended.iter().for_each(|old| old.end());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::{Seen, policy};

    use super::*;

    fn tenant(n: u8) -> Tenant {
        Tenant {
            sandbox: SandboxId::from_entropy([n; 20]),
            project: ProjectId::from_entropy([1; 20]),
            policy: policy(&json!({})),
            used: Used::default(),
            placeholders: Vec::new(),
            trust: TrustId::new("trust"),
        }
    }

    fn sources(n: u8) -> [IpAddr; 2] {
        [
            IpAddr::from([198, 19, 0, n]),
            IpAddr::from([0xfd61, 0x746f, 0x6c6c, 0x19, 0, 0, 0, n.into()]),
        ]
    }

    #[test]
    fn a_link_has_two_addresses_and_one_tenant() {
        let tenants = Tenants::default();
        let admit = |n: u8, sources: &[IpAddr]| {
            tenants.admit(sources, tenant(n), |tenant| {
                TenantState::new(tenant, Collector::new(Arc::new(Seen::default())), 8)
            });
        };
        admit(1, &sources(1));
        admit(2, &sources(2));
        let [four, six] = sources(1);
        let first = tenants.of(four).unwrap();
        assert!(Arc::ptr_eq(&first, &tenants.of(six).unwrap()));
        let mapped = match four {
            IpAddr::V4(four) => IpAddr::from(four.to_ipv6_mapped()),
            six @ IpAddr::V6(_) => six,
        };
        assert!(Arc::ptr_eq(&first, &tenants.of(mapped).unwrap()));

        // The same sandbox again is a change of its policy.
        let changes = first.changes();
        admit(1, &sources(1));
        assert!(Arc::ptr_eq(&first, &tenants.of(six).unwrap()));
        assert!(changes.has_changed().unwrap());
        assert!(!first.gone.is_cancelled());

        // Another one at one of its addresses ends it at both.
        admit(3, &[four]);
        assert!(first.gone.is_cancelled());
        assert!(tenants.of(six).is_none());
        let third = tenants.of(four).unwrap();
        tenants.dismiss(&sources(1));
        assert!(third.gone.is_cancelled());
        assert!(tenants.of(four).is_none());
        assert!(tenants.of(sources(2)[0]).is_some());
    }
}

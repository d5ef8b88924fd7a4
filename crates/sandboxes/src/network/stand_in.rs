//! At the way out for instances that are no sandboxes: the steps of a build.
//!
//! What must hold: they reach what their build says and nothing else, whatever the operator's default for sandboxes is.
//! What they tried is in the ledger under the project, for there is no row to name.

use std::sync::Arc;
use std::time::Duration;

use atoll_broker::TrustId;
use atoll_egress::{Tenant, Used};
use atoll_policy::{Floor, Policy};
use atoll_types::{Fault, NetworkPolicy, SandboxId};

use super::policy::{Admission, allows_nothing};
use crate::{Sandboxes, entropy};

/// The proxy tells of an end a moment after it came.
const ECHO: Duration = Duration::from_secs(5);

/// Who the proxy takes the steps of one build for.
#[derive(Debug)]
pub(crate) struct StandIn {
    service: Sandboxes,
    id: SandboxId,
    policy: NetworkPolicy,
}

impl Sandboxes {
    /// Refuses a policy that makes no sense, whether or not this machine could enforce it.
    pub(crate) fn check_policy(&self, policy: &NetworkPolicy) -> Result<(), Fault> {
        let floor = self
            .way_out()
            .map_or_else(Floor::default, |way| way.floor.clone());
        Policy::compile(policy, &floor, &[])?;
        Ok(())
    }

    /// As [`Sandboxes::check_policy`], for one that must be enforced here.
    pub(crate) fn check_enforced(&self, policy: &NetworkPolicy) -> Result<(), Fault> {
        if self.way_out().is_none() && !allows_nothing(policy) {
            return Err(self.no_way_out());
        }
        self.check_policy(policy)
    }

    pub(crate) fn stand_in(&self, policy: NetworkPolicy) -> StandIn {
        let id: SandboxId = entropy::id();
        self.outside().recorder.watch(&id);
        StandIn {
            service: self.clone(),
            id,
            policy,
        }
    }
}

impl StandIn {
    /// What the proxy is to know of an instance; `None` where there is no proxy.
    pub(crate) fn admission(&self) -> Result<Option<Admission>, Fault> {
        let Some(way) = self.service.way_out() else {
            return Ok(None);
        };
        let tenant = Tenant {
            sandbox: self.id.clone(),
            project: self.service.identity().default_project().clone(),
            policy: Arc::new(Policy::compile(&self.policy, &way.floor, &[])?),
            used: Used::default(),
            placeholders: Vec::new(),
            trust: TrustId::new(self.id.as_str()),
        };
        Ok(Some(Admission {
            tenant,
            env: Vec::new(),
        }))
    }

    /// Names and addresses that it was refused, or some of them.
    pub(crate) fn refused(&self) -> Vec<String> {
        self.service.outside().recorder.refused(&self.id)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let (service, id) = (self.service.clone(), self.id.clone());
        self.service.inner.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(ECHO) => {}
                () = service.inner.stop.cancelled() => {}
            }
            service.outside().recorder.unwatch(&id);
        });
    }
}

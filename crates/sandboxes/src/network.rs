//! The way out: what a sandbox may reach, and with which secrets.
//!
//! What must hold:
//! - A policy is part of the sandbox's row, and in force before the instance runs its first instruction, restored or not.
//! - Where there is no way out (no root, an old kernel) sandboxes that want none work, and the others are refused.

mod policy;

pub(crate) use atoll_node::Admission;
use atoll_node::{NetworkOffer, NetworkUsage, allows_nothing};
use atoll_policy::{Floor, Policy};
use atoll_store::{Fact, SandboxRow};
use atoll_types::{EgressVerdict, Fault, InstanceId, NetworkPolicy, SandboxId, SandboxState, SecretUse};

use crate::cell::Cell;
use crate::faults::{from_node, from_store};
use crate::secrets::may_lend;
use crate::{Caller, Sandboxes};

/// Where a sandbox's policy comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicySource {
    Sandbox,
    Template,
    Default,
}

#[derive(Debug, Clone)]
pub struct NetworkView {
    /// What is in force.
    pub policy: NetworkPolicy,
    pub source: PolicySource,
    pub secrets: Vec<SecretUse>,
    pub usage: NetworkUsage,
    /// Why nothing leaves it, whatever the policy says.
    pub unavailable: Option<String>,
}

#[derive(Debug, Clone)]
pub struct ExplainNetwork {
    /// `https://host/path`, `http://…`, `tcp://host:port`, `udp://address:port`, or `host[:port]`.
    pub url: String,
    /// `GET` unless said otherwise.
    pub method: Option<String>,
}

#[derive(Debug, Clone)]
pub struct NetworkExplanation {
    pub verdict: EgressVerdict,
    pub rule: String,
    pub reason: String,
    /// How it came to that, in words.
    pub steps: Vec<String>,
    /// Whether Atoll reads the requests.
    pub inspected: bool,
    /// Names of the secrets that would be put into it.
    pub secrets: Vec<String>,
}

impl Sandboxes {
    /// What a sandbox may reach.
    pub async fn network(&self, caller: &Caller, id: &SandboxId) -> Result<NetworkView, Fault> {
        let row = self.row(caller, id).await?;
        let (policy, source) = self.effective_policy(&row.spec, &row.template);
        let stored = self
            .store()
            .sandboxes
            .network_usage(id)
            .await
            .map_err(|e| from_store(&e))?;
        let pending = self.node().network_pending(id).await;
        Ok(NetworkView {
            policy,
            source,
            secrets: row.spec.secrets,
            usage: NetworkUsage {
                bytes_up: stored.bytes_up.saturating_add(pending.bytes_up),
                bytes_down: stored.bytes_down.saturating_add(pending.bytes_down),
                connections: stored.connections.saturating_add(pending.connections),
            },
            unavailable: self.node().offer().network.as_ref().err().cloned(),
        })
    }

    /// Changes what a sandbox may reach, while it lives. Connections that are no longer allowed are cut.
    pub async fn set_network(
        &self,
        caller: &Caller,
        id: &SandboxId,
        policy: NetworkPolicy,
        secrets: Option<Vec<SecretUse>>,
    ) -> Result<NetworkView, Fault> {
        may_lend(caller, secrets.as_deref().unwrap_or_default())?;
        let cell = self.cell(caller, id).await?;
        let (service, setter) = (self.clone(), caller.clone());
        let task = self.inner.tasks.spawn(async move {
            // One that is on its way up or down was given its policy already, and what becomes of its instance is open.
            let mut row = loop {
                let row = cell.row.lock().await;
                if settled(&row) {
                    break row;
                }
                drop(row);
                cell.seen.wait_for(settled).await;
            };
            if !row.record.state.is_live() || row.record.state == SandboxState::Deleting {
                drop(row);
                return Err(cell.explain_end().await);
            }
            // What is left of the last instance of one at rest is being taken away.
            let runs = row.record.state == SandboxState::Running;
            let mut next = row.clone();
            next.spec.network = Some(policy);
            if let Some(secrets) = secrets {
                next.spec.secrets = secrets;
            }
            let admission = service.check_network(&next).await?;
            service.may_have(&setter, &next, admission.as_ref())?;
            let fact = service.fact(
                &cell,
                Fact::NetworkPolicySet {
                    preset: next.spec.network.as_ref().and_then(|policy| policy.preset),
                    rules: next
                        .spec
                        .network
                        .as_ref()
                        .map_or(0, |policy| policy.rules.len() as u64),
                    secrets: next.spec.secrets.iter().map(|used| used.secret.clone()).collect(),
                },
            );
            let committed = service
                .store()
                .sandboxes
                .set_sandbox_network(next, vec![fact])
                .await;
            let committed = committed.map_err(|e| from_store(&e))?;
            cell.seen.replace(committed.clone());
            *row = committed;
            // Still under the lock, so that of two changes the later one stays.
            if let (Some(instance), Some(admission)) =
                (row.record.instance.as_ref().filter(|_| runs), admission)
            {
                service.node().admit(instance, admission);
            }
            drop(row);
            if runs {
                service.tell_network(&cell).await?;
            }
            Ok(())
        });
        task.await
            .map_err(|_| Fault::internal("setting the network was interrupted"))??;
        // What it used before may have been its own.
        self.inner.garbage.notify_one();
        self.network(caller, id).await
    }

    /// Tells the guest what it has to know of its policy: whom to trust, and the placeholders of its secrets. The policy is in
    /// force already, and without the row's lock: a guest that says nothing must not keep its sandbox from being changed.
    async fn tell_network(&self, cell: &Cell) -> Result<(), Fault> {
        // One after the other, and each tells what was committed last: whoever comes last tells the truth.
        let _turn = cell.telling.lock().await;
        let row = cell.last_seen();
        let Some(instance) = cell.instance() else {
            return Ok(());
        };
        let admission = self.admission(&row).await?;
        match self.node().tell_network(&instance.id, admission).await {
            Ok(()) => Ok(()),
            Err(failed) => Err(from_node(cell, failed)
                .await
                .hint("the policy is in force, but the sandbox could not be told of it: programs in it may not trust what Atoll reads")),
        }
    }

    /// Whether anything can leave a sandbox on this machine, if its policy lets it.
    pub fn has_way_out(&self) -> bool {
        self.way_out().is_some()
    }

    fn way_out(&self) -> Option<&NetworkOffer> {
        self.node().offer().network.as_ref().ok()
    }

    /// What may leave an instance that runs, as its row and its secrets say now.
    pub(crate) async fn plug_in_again(&self, row: &SandboxRow, instance: &InstanceId) {
        match self.admission(row).await {
            Ok(Some(admission)) => self.node().admit(instance, admission),
            Ok(None) => {}
            Err(fault) => {
                tracing::error!(sandbox = %row.id, %fault, "its policy cannot be used; nothing leaves it");
            }
        }
    }

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
}

/// Whether it is what it is to be: neither on its way up nor on its way down.
pub(crate) fn settled(row: &SandboxRow) -> bool {
    !matches!(
        row.record.state,
        SandboxState::Starting | SandboxState::Pausing | SandboxState::Resuming | SandboxState::Stopping
    )
}

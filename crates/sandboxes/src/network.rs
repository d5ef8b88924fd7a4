//! The way out: what a sandbox may reach, and with which secrets.
//!
//! ```text
//!   links   a network namespace for each instance, whose only cable ends at the proxy
//!   egress  the proxy: knows a sandbox by the address of its cable, and what that sandbox may reach
//!
//!   boot:     lease a link ── admit the sandbox behind it ── start the instance in its namespace
//!   pool:     lease a link ── start; nobody is admitted behind it until the instance is claimed
//!   restart:  take over the links of the instances that run ── admit
//!   destroy:  dismiss ── destroy the instance ── release the link
//! ```
//! What must hold:
//! - A policy is part of the sandbox's row, and in force before the instance runs its first instruction, restored or not.
//! - A link without an admitted sandbox behind it leads nowhere.
//! - Where there is no way out (no root, an old kernel) sandboxes that want none work, and the others are refused.

mod policy;
mod stand_in;
mod witness;

use std::net::IpAddr;
use std::sync::Arc;

use atoll_broker::Broker;
use atoll_egress::Egress;
use atoll_guest_protocol::{Network as GuestNetwork, Request};
use atoll_links::{Link, Links};
use atoll_policy::{Floor, Name};
use atoll_runtime::{CableEnd, Instance, Network};
use atoll_store::{Fact, SandboxRow};
use atoll_types::{
    Code, EgressVerdict, Fault, InstanceId, NetworkPolicy, SandboxId, SandboxState, SecretUse,
};

pub(crate) use policy::{Admission, allows_nothing};
pub(crate) use stand_in::StandIn;
pub use witness::Recorder;

use crate::cell::Cell;
use crate::faults::{from_channel, from_store};
use crate::secrets::may_lend;
use crate::{Caller, Sandboxes};

/// What the server was given to let sandboxes out.
#[derive(Debug)]
pub struct WayOut {
    pub links: Links,
    pub egress: Egress,
    /// What no sandbox may reach, whatever its policy says.
    pub floor: Floor,
    /// For sandboxes that say nothing, and whose template does not either.
    pub default: NetworkPolicy,
    /// The name under which sandboxes find the model gateway, where there is one. Internal to the floor.
    pub models: Option<Name>,
}

/// All that has to do with what leaves a sandbox.
#[derive(Debug)]
pub struct Outside {
    /// Or why there is none, and what to do about it.
    pub way: Result<WayOut, String>,
    pub broker: Arc<Broker>,
    /// Where the proxy tells what it saw.
    pub recorder: Arc<Recorder>,
}

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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetworkUsage {
    pub bytes_up: u64,
    pub bytes_down: u64,
    pub connections: u64,
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
        let pending = self.outside().recorder.pending(id);
        Ok(NetworkView {
            policy,
            source,
            secrets: row.spec.secrets,
            usage: NetworkUsage {
                bytes_up: stored.bytes_up.saturating_add(pending.bytes_up),
                bytes_down: stored.bytes_down.saturating_add(pending.bytes_down),
                connections: stored.connections.saturating_add(pending.connections),
            },
            unavailable: self.outside().way.as_ref().err().cloned(),
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
        let service = self.clone();
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
            if let Some(instance) = row.record.instance.as_ref().filter(|_| runs) {
                service.admit_behind(instance, admission);
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
        let Some(network) = self.guest_network(admission.as_ref())? else {
            return Ok(());
        };
        match instance.guest.call(&Request::Network(network)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(from_channel(cell, error)
                .await
                .hint("the policy is in force, but the sandbox could not be told of it: programs in it may not trust what Atoll reads")),
        }
    }

    pub(crate) fn outside(&self) -> &Outside {
        &self.inner.outside
    }

    /// Whether anything can leave a sandbox on this machine, if its policy lets it.
    pub fn has_way_out(&self) -> bool {
        self.way_out().is_some()
    }

    fn way_out(&self) -> Option<&WayOut> {
        self.outside().way.as_ref().ok()
    }

    /// A cable for an instance that is about to start, with its sandbox admitted behind it if there is one.
    pub(crate) async fn plug_in(
        &self,
        instance: &InstanceId,
        admission: Option<Admission>,
    ) -> Result<Option<Cable>, Fault> {
        let Some(way) = self.way_out() else {
            return Ok(None);
        };
        let link = way.links.lease(instance).await.map_err(|error| {
            Fault::new(
                Code::NetworkFailed,
                format!("the sandbox could not be given a network: {error}"),
            )
        })?;
        if let Some(admission) = admission {
            way.egress.admit(&addresses(&link), admission.tenant);
        }
        let Some(namespace) = link.namespace() else {
            return Err(Fault::internal("a link that was just leased is in use"));
        };
        let slot = link.slot();
        let network = Network {
            namespace,
            mtu: atoll_links::MTU,
            guest: CableEnd {
                mac: atoll_links::GUEST_MAC,
                v4: slot.v4(),
                v6: slot.v6(),
            },
            gateway: CableEnd {
                mac: atoll_links::GATEWAY_MAC,
                v4: atoll_links::GATEWAY_V4,
                v6: atoll_links::GATEWAY_V6,
            },
        };
        Ok(Some(Cable { network, _link: link }))
    }

    /// Puts a sandbox behind the cable of an instance, or what it may do now in place of what it might before.
    pub(crate) fn admit_behind(&self, instance: &InstanceId, admission: Option<Admission>) {
        if let (Some(way), Some(admission)) = (self.way_out(), admission)
            && let Some(link) = way.links.adopt(instance)
        {
            way.egress.admit(&addresses(&link), admission.tenant);
        }
    }

    /// Nothing leaves it from now on. Before the instance is destroyed, for that takes a moment.
    pub(crate) fn dismiss(&self, instance: &InstanceId) {
        if let Some(way) = self.way_out()
            && let Some(link) = way.links.adopt(instance)
        {
            way.egress.dismiss(&addresses(&link));
        }
    }

    /// Takes the cable of an instance that is no more.
    pub(crate) async fn unplug(&self, instance: &InstanceId) {
        self.dismiss(instance);
        if let Some(way) = self.way_out()
            && let Err(error) = way.links.release(instance).await
        {
            tracing::error!(%instance, %error, "the link of an instance that is gone could not be cut");
        }
    }

    /// After a restart: the instances that run have their cables still.
    pub(crate) async fn plug_in_again(&self, row: &SandboxRow, instance: &Instance) {
        let Some(way) = self.way_out() else { return };
        let admission = match self.admission(row).await {
            Ok(admission) => admission,
            Err(fault) => {
                tracing::error!(sandbox = %row.id, %fault, "its policy cannot be used; nothing leaves it");
                return;
            }
        };
        if way.links.adopt(&instance.id).is_none() {
            tracing::warn!(sandbox = %row.id, "it was started without a network, and has none");
        }
        self.admit_behind(&instance.id, admission);
    }

    /// Takes the cables of instances that nobody has.
    pub(crate) async fn unplug_all_but(&self, kept: &std::collections::HashSet<InstanceId>) {
        let Some(way) = self.way_out() else { return };
        let found = way.links.discover().await.unwrap_or_else(|error| {
            tracing::error!(%error, "links that nobody has could not be looked for");
            Vec::new()
        });
        for id in found.iter().filter(|id| !kept.contains(id)) {
            self.unplug(id).await;
        }
    }

    /// Leaves nothing behind, unless sandboxes go on without this server.
    pub(crate) async fn close_network(&self) {
        if let Some(way) = self.way_out()
            && let Err(error) = way.links.close().await
        {
            tracing::warn!(%error, "the gateway of the sandboxes' networks could not be closed");
        }
    }

    /// What the guest has to know of the way out.
    pub(crate) fn guest_network(&self, admission: Option<&Admission>) -> Result<Option<GuestNetwork>, Fault> {
        let Some(way) = self.way_out() else {
            return Ok(None);
        };
        let mut network = GuestNetwork {
            nameserver: atoll_links::GATEWAY_V4.to_string(),
            ..GuestNetwork::default()
        };
        if let Some(Admission { tenant, env }) = admission {
            network.env.clone_from(env);
            if tenant.policy.inspects_any() {
                let authority = way.egress.authority_pem(&tenant.trust);
                network.authority = Some(authority.map_err(|error| Fault::internal(error.to_string()))?);
            }
        }
        Ok(Some(network))
    }
}

/// The cable of an instance while it starts.
#[derive(Debug)]
pub(crate) struct Cable {
    pub(crate) network: Network,
    /// Its namespace lives by this until the instance is in it.
    _link: Link,
}

/// Whether it is what it is to be: neither on its way up nor on its way down.
pub(crate) fn settled(row: &SandboxRow) -> bool {
    !matches!(
        row.record.state,
        SandboxState::Starting | SandboxState::Pausing | SandboxState::Resuming | SandboxState::Stopping
    )
}

fn addresses(link: &Link) -> [IpAddr; 2] {
    [link.slot().v4().into(), link.slot().v6().into()]
}

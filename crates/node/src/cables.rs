//! The way out of instances: a cable for each, and who is admitted behind it.
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
//! What must hold: a link without an admitted sandbox behind it leads nowhere.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use atoll_egress::Egress;
use atoll_guest_protocol::{Network as GuestNetwork, Request};
use atoll_links::{Link, Links};
use atoll_policy::{Decision, Floor, Name, Policy};
use atoll_runtime::{CableEnd, Network};
use atoll_types::{Code, Fault, InstanceId, NetworkPolicy, NetworkRule, Preset, RuleAction, SandboxId};

use crate::LocalNode;
use crate::node::Cables;
use crate::witness::Recorder;
use crate::words::{Admission, Failed, NetworkUsage};

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

/// All that has to do with what leaves an instance.
#[derive(Debug)]
pub struct Outside {
    /// Or why there is none, and what to do about it.
    pub way: Result<WayOut, String>,
    /// Where the proxy tells what it saw.
    pub recorder: Arc<Recorder>,
}

#[async_trait]
impl Cables for LocalNode {
    fn admit(&self, instance: &InstanceId, admission: Admission) {
        let Some(way) = self.way_out() else { return };
        match way.links.adopt(instance) {
            Some(link) => way.egress.admit(&addresses(&link), admission.tenant),
            None => tracing::warn!(%instance, "it was started without a network, and has none"),
        }
    }

    fn dismiss(&self, instance: &InstanceId) {
        if let Some(way) = self.way_out()
            && let Some(link) = way.links.adopt(instance)
        {
            way.egress.dismiss(&addresses(&link));
        }
    }

    async fn tell_network(&self, instance: &InstanceId, admission: Option<Admission>) -> Result<(), Failed> {
        if let Some(network) = self.guest_network(admission.as_ref())? {
            self.guest(instance)?.call(&Request::Network(network)).await?;
        }
        Ok(())
    }

    async fn quiet_for(&self, instance: &InstanceId) -> Option<Duration> {
        let way = self.way_out()?;
        let link = way.links.adopt(instance)?;
        way.egress.quiet_for(link.slot().v4().into())
    }

    async fn network_pending(&self, sandbox: &SandboxId) -> NetworkUsage {
        self.inner.outside.recorder.pending(sandbox)
    }

    async fn take_network_usage(&self) -> Vec<(SandboxId, NetworkUsage)> {
        self.inner.outside.recorder.take()
    }

    async fn own_address(&self, policy: Arc<Policy>, address: IpAddr) -> Option<Decision> {
        policy.own_address(address, atoll_egress::is_own)
    }
}

impl LocalNode {
    pub(crate) fn way_out(&self) -> Option<&WayOut> {
        self.inner.outside.way.as_ref().ok()
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

    /// Takes the cable of an instance that is no more.
    pub(crate) async fn unplug(&self, instance: &InstanceId) {
        self.dismiss(instance);
        if let Some(way) = self.way_out()
            && let Err(error) = way.links.release(instance).await
        {
            tracing::error!(%instance, %error, "the link of an instance that is gone could not be cut");
        }
    }

    /// Takes the cables of instances that nobody has.
    pub(crate) async fn unplug_all_but(&self, kept: &HashSet<InstanceId>) {
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

fn addresses(link: &Link) -> [IpAddr; 2] {
    [link.slot().v4().into(), link.slot().v6().into()]
}

/// Whether there is nothing that it could let out.
pub fn allows_nothing(policy: &NetworkPolicy) -> bool {
    let allows = |rule: &NetworkRule| rule.action == RuleAction::Allow;
    policy.preset.is_none_or(|preset| preset == Preset::None) && !policy.rules.iter().any(allows)
}

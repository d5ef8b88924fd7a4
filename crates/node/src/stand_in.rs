//! At the way out for instances that are no sandboxes: the steps of a build.
//!
//! What must hold: they reach what their build says and nothing else, whatever the operator's default for sandboxes is.
//! What they tried is in the ledger under the project, for there is no row to name.

use std::sync::Arc;
use std::time::Duration;

use atoll_broker::TrustId;
use atoll_egress::{Tenant, Used};
use atoll_policy::Policy;
use atoll_types::{Fault, NetworkPolicy, ProjectId, SandboxId};

use crate::words::Admission;
use crate::{LocalNode, entropy};

/// The proxy tells of an end a moment after it came.
const ECHO: Duration = Duration::from_secs(5);

/// Who the proxy takes the steps of one build for.
#[derive(Debug)]
pub(crate) struct StandIn {
    node: LocalNode,
    id: SandboxId,
    /// Whose build it is.
    project: ProjectId,
    policy: NetworkPolicy,
}

impl LocalNode {
    pub(crate) fn stand_in(&self, project: ProjectId, policy: NetworkPolicy) -> StandIn {
        let id: SandboxId = entropy::id();
        self.inner.outside.recorder.watch(&id);
        StandIn {
            node: self.clone(),
            id,
            project,
            policy,
        }
    }
}

impl StandIn {
    /// What the proxy is to know of an instance; `None` where there is no proxy.
    pub(crate) fn admission(&self) -> Result<Option<Admission>, Fault> {
        let Some(way) = self.node.way_out() else {
            return Ok(None);
        };
        let tenant = Tenant {
            sandbox: self.id.clone(),
            project: self.project.clone(),
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
        self.node.inner.outside.recorder.refused(&self.id)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let (node, id) = (self.node.clone(), self.id.clone());
        self.node.inner.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(ECHO) => {}
                () = node.inner.stop.cancelled() => {}
            }
            node.inner.outside.recorder.unwatch(&id);
        });
    }
}

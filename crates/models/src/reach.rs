//! Where providers may be: the operator's anywhere, also on this machine; those of tenants beyond the floor that holds for
//! sandboxes too.

use std::net::IpAddr;
use std::sync::Arc;

use atoll_egress::is_own;
use atoll_policy::{Decision, Floor, Name};
use atoll_providers::Reach;
use atoll_types::ProjectId;

use crate::Models;

/// Nothing below the floor, and not this machine.
pub(crate) struct BeyondFloor(pub(crate) Floor);

impl std::fmt::Debug for BeyondFloor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BeyondFloor").finish_non_exhaustive()
    }
}

impl Reach for BeyondFloor {
    fn name(&self, host: &str) -> Result<(), String> {
        // What is no name may still be an address in an old spelling, and is asked about as such once it is resolved.
        match Name::parse(host) {
            Ok(name) => refused(self.0.name(&name)),
            Err(_) => Ok(()),
        }
    }

    fn address(&self, address: IpAddr) -> Result<(), String> {
        let address = address.to_canonical();
        refused(
            self.0
                .address(address)
                .or_else(|| self.0.own_address(address, is_own)),
        )
    }
}

fn refused(decision: Option<Decision>) -> Result<(), String> {
    match decision {
        None => Ok(()),
        Some(decision) => Err(format!(
            "{}; only providers of the project `default` may be there",
            decision.reason
        )),
    }
}

impl Models {
    /// Where the providers of a project may be; `None`: anywhere.
    pub(crate) fn reach_of(&self, project: &ProjectId) -> Option<&Arc<dyn Reach>> {
        (project != self.inner.identity.default_project()).then_some(&self.inner.beyond_floor)
    }
}

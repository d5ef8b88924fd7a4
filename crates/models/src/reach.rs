//! Where providers may be: the operator's anywhere, also on this machine; those of tenants beyond the floor that holds for
//! sandboxes too.

use std::net::IpAddr;
use std::sync::Arc;

use atoll_policy::{Decision, Floor, Name};
use atoll_providers::Reach;
use atoll_types::ProjectId;

use crate::{Models, Settings};

/// Nothing below the floor, and not this machine.
pub(crate) struct BeyondFloor {
    floor: Floor,
    is_own: fn(IpAddr) -> bool,
}

impl BeyondFloor {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            floor: settings.floor.clone(),
            is_own: settings.is_own,
        }
    }
}

impl std::fmt::Debug for BeyondFloor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BeyondFloor").finish_non_exhaustive()
    }
}

impl Reach for BeyondFloor {
    fn name(&self, host: &str) -> Result<(), String> {
        // What is no name may still be an address in an old spelling, and is asked about as such once it is resolved.
        match Name::parse(host) {
            Ok(name) => refused(self.floor.name(&name)),
            Err(_) => Ok(()),
        }
    }

    fn address(&self, address: IpAddr) -> Result<(), String> {
        let address = address.to_canonical();
        refused(
            self.floor
                .address(address)
                .or_else(|| self.floor.own_address(address, self.is_own)),
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

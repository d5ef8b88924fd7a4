//! Network options.

use axum::extract::State;
use serde::Deserialize;
use serde_json::Value;

use super::read::{Id, Read};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};
use crate::extras::Extras;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct NetworkConfig {
    allow_public_traffic: Option<bool>,
    mask_request_host: Option<String>,
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    dns_servers: Option<Vec<String>>,
    egress_proxy: Option<Value>,
    https_ports: Option<Vec<u16>>,
    rules: Option<Value>,
}

const NO_EGRESS: &str =
    "sandboxes have no way out of this server yet, so there is nothing to allow or to deny";

impl NetworkConfig {
    pub(crate) fn apply(self, extras: &mut Extras) -> Answer<()> {
        refuse_egress(&[
            (
                "network.allowOut",
                self.allow_out.is_some_and(|list| !list.is_empty()),
            ),
            (
                "network.denyOut",
                self.deny_out.is_some_and(|list| !list.is_empty()),
            ),
            (
                "network.dnsServers",
                self.dns_servers.is_some_and(|list| !list.is_empty()),
            ),
            ("network.egressProxy", self.egress_proxy.is_some()),
            (
                "network.httpsPorts",
                self.https_ports.is_some_and(|list| !list.is_empty()),
            ),
            ("network.rules", self.rules.is_some_and(|rules| !is_empty(&rules))),
        ])?;
        extras.private_ports = self.allow_public_traffic == Some(false);
        extras.mask_host = self.mask_request_host;
        Ok(())
    }
}

fn is_empty(rules: &Value) -> bool {
    rules.as_object().is_some_and(serde_json::Map::is_empty)
}

fn refuse_egress(given: &[(&str, bool)]) -> Answer<()> {
    match given.iter().find(|(_, given)| *given) {
        Some((field, _)) => Err(Refusal::unsupported(field, NO_EGRESS)),
        None => Ok(()),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NetworkUpdate {
    #[serde(rename = "allowOut")]
    allow_out: Option<Vec<String>>,
    #[serde(rename = "denyOut")]
    deny_out: Option<Vec<String>>,
    #[serde(rename = "dnsServers")]
    dns_servers: Option<Vec<String>>,
    #[serde(rename = "egressProxy")]
    egress_proxy: Option<Value>,
    rules: Option<Value>,
    allow_internet_access: Option<bool>,
}

pub(crate) async fn update(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<NetworkUpdate>,
) -> Answer<axum::http::StatusCode> {
    super::life::known(&app, &caller, &id).await?;
    refuse_egress(&[
        ("allowOut", request.allow_out.is_some()),
        ("denyOut", request.deny_out.is_some()),
        ("dnsServers", request.dns_servers.is_some()),
        ("egressProxy", request.egress_proxy.is_some()),
        ("rules", request.rules.is_some()),
        ("allow_internet_access", request.allow_internet_access.is_some()),
    ])?;
    Ok(axum::http::StatusCode::NO_CONTENT)
}

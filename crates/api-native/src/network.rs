//! `/v1/sandboxes/{id}/network`: what a sandbox may reach, what became of its attempts, and why.

use atoll_actions::words::{PolicyWords, SecretUseWords};
use atoll_sandboxes::{ExplainNetwork, NetworkView, PolicySource};
use atoll_types::EgressVerdict;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::Answer;
use crate::extract::{Args, As, Json};
use crate::ledger::{self, FactPage};
use crate::named::Named;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(get_network, set_network))
        .routes(routes!(network_log))
        .routes(routes!(explain_network))
}

/// What is in the log; the rest of a sandbox's ledger is about other things.
const LOGGED: [&str; 4] = [
    "network.allowed",
    "network.denied",
    "network.policy_set",
    "secret.used",
];
const DENIED: [&str; 1] = ["network.denied"];

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetNetworkRequest {
    /// Instead of all that was said before.
    policy: PolicyWords,
    /// The secrets that it may use. Absent: as before.
    secrets: Option<Vec<SecretUseWords>>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogQuery {
    /// Only what was refused.
    #[serde(default)]
    denied: bool,
    /// `next` of the page before, or 0.
    #[param(minimum = 0)]
    after: Option<i64>,
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ExplainQuery {
    /// A URL, a name or an address, with or without a port; `udp://` and `tcp://` where it is not HTTP.
    #[param(min_length = 1, example = "https://pypi.org/simple/")]
    url: String,
    /// Of the request; `GET` if absent.
    #[param(example = "POST")]
    method: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = NetworkVerdict)]
pub(crate) enum VerdictName {
    Allowed,
    Denied,
}

impl VerdictName {
    pub(crate) fn of(verdict: EgressVerdict) -> Self {
        match verdict {
            EgressVerdict::Allowed => Self::Allowed,
            EgressVerdict::Denied => Self::Denied,
        }
    }
}

/// Who has the word about what a sandbox may reach.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = NetworkPolicySource)]
pub(crate) enum SourceName {
    /// It was said when the sandbox was created, or since.
    Sandbox,
    /// The sandbox's template says it.
    Template,
    /// The operator's default.
    Default,
}

impl SourceName {
    fn of(source: PolicySource) -> Self {
        match source {
            PolicySource::Sandbox => Self::Sandbox,
            PolicySource::Template => Self::Template,
            PolicySource::Default => Self::Default,
        }
    }
}

/// What has gone through over the whole life of the sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NetworkUsage)]
pub(crate) struct NetworkUsageItem {
    bytes_up: u64,
    bytes_down: u64,
    connections: u64,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Network)]
pub(crate) struct NetworkItem {
    /// What holds now.
    policy: PolicyWords,
    source: SourceName,
    secrets: Vec<SecretUseWords>,
    usage: NetworkUsageItem,
    /// Why this server cannot connect any sandbox; absent where it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
}

impl NetworkItem {
    fn of(network: NetworkView) -> Self {
        Self {
            policy: PolicyWords::of(network.policy),
            source: SourceName::of(network.source),
            secrets: SecretUseWords::of(network.secrets),
            usage: NetworkUsageItem {
                bytes_up: network.usage.bytes_up,
                bytes_down: network.usage.bytes_down,
                connections: network.usage.connections,
            },
            unavailable: network.unavailable,
        }
    }
}

/// What would become of an attempt to reach something.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NetworkExplanation)]
pub(crate) struct ExplanationItem {
    verdict: VerdictName,
    /// What decides: a rule by name or place, an entry of a preset, the operator's floor, or `default`.
    #[schema(examples("rules[2]"))]
    rule: String,
    reason: String,
    /// What was looked at, in order.
    steps: Vec<String>,
    /// Whether Atoll reads the requests of such a connection.
    inspected: bool,
    /// The names of the secrets that would be put into the request.
    secrets: Vec<String>,
}

/// Shows what a sandbox may reach and what has gone through.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/network", tag = "network",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "What holds now.", body = NetworkItem))
)]
pub(crate) async fn get_network(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<NetworkItem>> {
    let network = app.sandboxes.network(&caller, &id).await?;
    Ok(axum::Json(NetworkItem::of(network)))
}

/// Sets what a sandbox may reach from now on. Connections that are not allowed any more are closed.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/network", tag = "network",
    security(("key" = ["sandbox.network"])), request_body = SetNetworkRequest,
    responses((status = 200, description = "It holds.", body = NetworkItem))
)]
pub(crate) async fn set_network(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<SetNetworkRequest>,
) -> Answer<axum::Json<NetworkItem>> {
    let secrets = body.secrets.map(SecretUseWords::into_uses);
    let network = app
        .sandboxes
        .set_network(&caller, &id, body.policy.into_policy(), secrets)
        .await?;
    Ok(axum::Json(NetworkItem::of(network)))
}

/// Reads what became of a sandbox's attempts to reach something, oldest first: a part of its ledger.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/network/log", tag = "network",
    security(("key" = ["sandbox.read"])), params(LogQuery),
    responses((status = 200, description = "A page of facts.", body = FactPage))
)]
pub(crate) async fn network_log(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<LogQuery>,
) -> Answer<axum::Json<FactPage>> {
    let kinds: &[&str] = if query.denied { &DENIED } else { &LOGGED };
    ledger::facts(&app, &caller, Some(&id), kinds, query.after, query.limit).await
}

/// Says whether a sandbox may reach something, and which rule decides. Nothing is sent.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/network/explain", tag = "network",
    security(("key" = ["sandbox.read"])), params(ExplainQuery),
    responses((status = 200, description = "What would happen.", body = ExplanationItem))
)]
pub(crate) async fn explain_network(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<ExplainQuery>,
) -> Answer<axum::Json<ExplanationItem>> {
    let question = ExplainNetwork {
        url: query.url,
        method: query.method,
    };
    let answer = app.sandboxes.explain_network(&caller, &id, question).await?;
    Ok(axum::Json(ExplanationItem {
        verdict: VerdictName::of(answer.verdict),
        rule: answer.rule,
        reason: answer.reason,
        steps: answer.steps,
        inspected: answer.inspected,
        secrets: answer.secrets,
    }))
}

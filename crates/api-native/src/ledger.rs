//! The ledger as callers read it: facts in their order, and usage summed from them; of one sandbox or of the project.

use atoll_identity::Caller;
use atoll_sandboxes::FactView;
use atoll_types::{Code, SandboxId};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{Args, As};
use crate::named::Named;
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(sandbox_facts))
        .routes(routes!(sandbox_usage))
        .routes(routes!(project_facts))
        .routes(routes!(project_usage))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FactsQuery {
    /// `next` of the page before, or 0.
    #[param(minimum = 0)]
    after: Option<i64>,
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u64>,
}

/// One record of the ledger.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FactItem {
    seq: i64,
    #[schema(format = DateTime)]
    at: String,
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<String>,
    /// Depends on the kind.
    data: serde_json::Value,
}

impl FactItem {
    pub(crate) fn of(fact: FactView) -> Self {
        Self {
            seq: fact.seq,
            at: wire::time(fact.at),
            kind: fact.kind,
            sandbox: fact.sandbox.map(|id| id.to_string()),
            data: serde_json::from_str(&fact.data).unwrap_or(serde_json::Value::String(fact.data)),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FactPage {
    items: Vec<FactItem>,
    /// Pass it as `after` to get what follows; absent at the end of the ledger. A page may have fewer items than were asked
    /// for, or none, and there may be more behind it all the same: one request looks through a bounded part of the ledger.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<i64>,
}

/// Usage summed from the ledger.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct UsageView {
    wall_ms: u64,
    cpu_micros: u64,
    memory_byte_seconds: u64,
    disk_byte_seconds: u64,
}

/// Reads the ledger of one sandbox, oldest first.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/facts", tag = "ledger",
    security(("key" = ["sandbox.read"])), params(FactsQuery),
    responses((status = 200, description = "A page of facts.", body = FactPage))
)]
pub(crate) async fn sandbox_facts(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<FactsQuery>,
) -> Answer<axum::Json<FactPage>> {
    facts(&app, &caller, Some(&id), &[], query.after, query.limit).await
}

/// Reads the ledger of the whole project, oldest first.
#[utoipa::path(
    get, path = "/v1/facts", tag = "ledger",
    security(("key" = ["ledger.read"])), params(FactsQuery),
    responses((status = 200, description = "A page of facts.", body = FactPage))
)]
pub(crate) async fn project_facts(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<FactsQuery>,
) -> Answer<axum::Json<FactPage>> {
    facts(&app, &caller, None, &[], query.after, query.limit).await
}

/// A page of facts of these kinds, or of all where none is named.
pub(crate) async fn facts(
    app: &App,
    caller: &Caller,
    sandbox: Option<&SandboxId>,
    kinds: &[&str],
    after: Option<i64>,
    limit: Option<u64>,
) -> Answer<axum::Json<FactPage>> {
    let after = after.unwrap_or(0);
    if after < 0 {
        return Err(Failure::new(Code::OutOfRange, "`after` must not be negative"));
    }
    let limit = wire::within("limit", limit.unwrap_or(100), 1..=1000)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let (facts, next) = app.sandboxes.facts(caller, sandbox, kinds, after, limit).await?;
    let items = facts.into_iter().map(FactItem::of).collect();
    Ok(axum::Json(FactPage { items, next }))
}

/// Sums what one sandbox has used.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/usage", tag = "ledger",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "The sums.", body = UsageView))
)]
pub(crate) async fn sandbox_usage(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<UsageView>> {
    usage(&app, &caller, Some(&id)).await
}

/// Sums what all sandboxes of the project have used.
#[utoipa::path(
    get, path = "/v1/usage", tag = "ledger",
    security(("key" = ["ledger.read"])),
    responses((status = 200, description = "The sums.", body = UsageView))
)]
pub(crate) async fn project_usage(State(app): State<App>, As(caller): As) -> Answer<axum::Json<UsageView>> {
    usage(&app, &caller, None).await
}

async fn usage(app: &App, caller: &Caller, sandbox: Option<&SandboxId>) -> Answer<axum::Json<UsageView>> {
    let total = app.sandboxes.usage_total(caller, sandbox).await?;
    Ok(axum::Json(UsageView {
        wall_ms: total.wall_millis,
        cpu_micros: total.cpu_micros,
        memory_byte_seconds: total.memory_byte_seconds,
        disk_byte_seconds: total.disk_byte_seconds,
    }))
}

//! `/v1/gateway/calls` and `/v1/gateway/spend`: what was called, and what it cost.

use atoll_identity::Caller;
use atoll_store::{ModelCallRow, SpendBy, SpendQuery};
use atoll_types::{CallOutcome, Code, Fault, ModelCallId, SandboxId, Timestamp, Usd};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Usage, instant, word};
use crate::error::Answer;
use crate::extract::{Args, As, At};
use crate::wire::time;
use crate::{App, named};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_calls))
        .routes(routes!(get_call))
        .routes(routes!(get_spend))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct CallsQuery {
    /// Only calls from this sandbox.
    sandbox: Option<String>,
    /// `next` of the page before.
    cursor: Option<String>,
    /// How many at most. Default: 50.
    limit: Option<usize>,
}

/// One call of a model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCall {
    id: String,
    #[schema(format = DateTime)]
    started_at: String,
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    key: Option<String>,
    sandbox: Option<String>,
    workflow: Option<String>,
    run: Option<String>,
    user: Option<String>,
    tags: Vec<String>,
    /// The wire that the client spoke.
    dialect: String,
    /// The model's name as it was asked for.
    asked: String,
    provider: String,
    model: String,
    streamed: bool,
    #[schema(value_type = String)]
    outcome: CallOutcome,
    attempts: u32,
    first_byte_ms: Option<u64>,
    finish: Option<String>,
    error: Option<String>,
    usage: Usage,
    /// The provider did not say what it used, or not all.
    estimated: bool,
    /// Null: nobody knows what it costs.
    price_version: Option<String>,
    /// Dollars.
    cost: String,
    /// What was said, where that is kept; only where one call is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    bodies: Option<Bodies>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Bodies {
    request: String,
    answer: String,
    shortened: bool,
}

impl ModelCall {
    fn of(row: ModelCallRow) -> Self {
        Self {
            id: row.id.to_string(),
            started_at: time(row.started_at),
            ended_at: row.ended_at.map(time),
            key: row.key.map(|id| id.to_string()),
            sandbox: row.sandbox.map(|id| id.to_string()),
            workflow: row.workflow,
            run: row.run,
            user: row.end_user,
            tags: row.tags,
            dialect: row.dialect,
            asked: row.asked,
            provider: row.provider,
            model: row.model,
            streamed: row.streamed,
            outcome: row.outcome,
            attempts: row.attempts,
            first_byte_ms: row.first_byte_millis,
            finish: row.finish,
            error: row.error,
            usage: Usage::of(&row.usage),
            estimated: row.estimated,
            price_version: row.price_version,
            cost: row.cost.to_string(),
            bodies: None,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCallPage {
    items: Vec<ModelCall>,
    next: Option<String>,
}

/// Lists calls of models, the newest first.
#[utoipa::path(
    get, path = "/v1/gateway/calls", tag = "models",
    security(("key" = ["models.read"])), params(CallsQuery),
    responses((status = 200, description = "A page of calls.", body = ModelCallPage))
)]
pub(crate) async fn list_calls(
    State(app): State<App>,
    As(caller): As,
    Args(asked): Args<CallsQuery>,
) -> Answer<axum::Json<ModelCallPage>> {
    let sandbox = maybe_sandbox(&app, &caller, asked.sandbox.as_deref()).await?;
    let limit = asked.limit.unwrap_or(50);
    let page = app
        .models
        .model_calls(caller.project(), sandbox.as_ref(), asked.cursor, limit)
        .await?;
    Ok(axum::Json(ModelCallPage {
        items: page.items.into_iter().map(ModelCall::of).collect(),
        next: page.next.map(|cursor| cursor.to_string()),
    }))
}

async fn maybe_sandbox(app: &App, caller: &Caller, text: Option<&str>) -> Answer<Option<SandboxId>> {
    match text {
        Some(text) => Ok(Some(named::sandbox(app, caller, text, Code::InvalidQuery).await?)),
        None => Ok(None),
    }
}

/// Shows one call of a model.
#[utoipa::path(
    get, path = "/v1/gateway/calls/{call}", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The call.", body = ModelCall))
)]
pub(crate) async fn get_call(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
) -> Answer<axum::Json<ModelCall>> {
    let id: ModelCallId = word("id", &id)?;
    let row = app.models.model_call(caller.project(), &id).await?;
    let bodies = app.models.bodies(caller.project(), &id).await?;
    let bodies = bodies.map(|bodies| Bodies {
        request: bodies.request,
        answer: bodies.answer,
        shortened: bodies.shortened,
    });
    Ok(axum::Json(ModelCall {
        bodies,
        ..ModelCall::of(row)
    }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SpendQueryArgs {
    /// What is summed by: `model`, `provider`, `key`, `sandbox`, `workflow`, `run`, `user`, `tag`, `day`, `hour` or `total`.
    /// Default: `model`.
    by: Option<String>,
    #[param(format = DateTime)]
    from: Option<String>,
    #[param(format = DateTime)]
    to: Option<String>,
    sandbox: Option<String>,
    model: Option<String>,
    provider: Option<String>,
}

/// What was spent on models, and what sandboxes used beside it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SpendReport {
    items: Vec<Spend>,
    /// Dollars.
    total: String,
    /// What is older may not be in the sums: it is kept for as long as the ledger is, and a project keeps so much of it. Absent
    /// where nothing is missing.
    #[schema(format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    complete_from: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Spend {
    /// Empty for calls that have none of what is summed by.
    group: String,
    calls: u64,
    /// Dollars.
    cost: String,
    usage: Usage,
    /// Calls whose model has no price.
    unpriced: u64,
    estimated: u64,
    failed: u64,
    compute: Compute,
}

/// What sandboxes used.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Compute {
    wall_ms: u64,
    cpu_us: u64,
    memory_byte_seconds: u64,
    disk_byte_seconds: u64,
}

/// Sums what was spent.
///
/// Of more than 10,000 groups those that called last are told, and the rest together as `other`.
#[utoipa::path(
    get, path = "/v1/gateway/spend", tag = "models",
    security(("key" = ["models.read"])), params(SpendQueryArgs),
    responses((status = 200, description = "The sums.", body = SpendReport))
)]
pub(crate) async fn get_spend(
    State(app): State<App>,
    As(caller): As,
    Args(asked): Args<SpendQueryArgs>,
) -> Answer<axum::Json<SpendReport>> {
    let bound = |field: &str, text: Option<&str>, otherwise: i64| match text {
        Some(text) => instant(field, text),
        None => Ok(Timestamp(otherwise)),
    };
    let spend = SpendQuery {
        project: caller.project().clone(),
        from: bound("from", asked.from.as_deref(), 0)?,
        to: bound("to", asked.to.as_deref(), i64::MAX)?,
        by: by(asked.by.as_deref())?,
        model: asked.model,
        provider: asked.provider,
        sandbox: maybe_sandbox(&app, &caller, asked.sandbox.as_deref()).await?,
        user: None,
        key: None,
    };
    let begins = spend.from;
    let rows = app.models.spend_beside_compute(spend).await?;
    let complete_from = app.models.complete_from(caller.project()).await?;
    let total: Usd = rows.iter().map(|(row, _)| row.cost).sum();
    let items = rows.into_iter().map(|(row, compute)| Spend {
        group: row.group,
        calls: row.calls,
        cost: row.cost.to_string(),
        usage: Usage::of(&row.usage),
        unpriced: row.unpriced,
        estimated: row.estimated,
        failed: row.failed,
        compute: Compute {
            wall_ms: compute.wall_millis,
            cpu_us: compute.cpu_micros,
            memory_byte_seconds: compute.memory_byte_seconds,
            disk_byte_seconds: compute.disk_byte_seconds,
        },
    });
    Ok(axum::Json(SpendReport {
        items: items.collect(),
        total: total.to_string(),
        complete_from: complete_from.filter(|from| *from > begins).map(time),
    }))
}

fn by(text: Option<&str>) -> Answer<SpendBy> {
    Ok(match text {
        None | Some("model") => SpendBy::Model,
        Some("total") => SpendBy::Total,
        Some("day") => SpendBy::Day,
        Some("hour") => SpendBy::Hour,
        Some("provider") => SpendBy::Provider,
        Some("key") => SpendBy::Key,
        Some("sandbox") => SpendBy::Sandbox,
        Some("workflow") => SpendBy::Workflow,
        Some("run") => SpendBy::Run,
        Some("user") => SpendBy::User,
        Some("tag") => SpendBy::Tag,
        Some(other) => {
            let fault = Fault::new(
                Code::InvalidQuery,
                format!("cannot sum by `{}`", other.escape_default()),
            );
            let hint = "use model, provider, key, sandbox, workflow, run, user, tag, day, hour or total";
            return Err(fault.hint(hint).into());
        }
    })
}

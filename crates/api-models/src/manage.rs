//! `/v1/gateway`: what the operator sets and sees. In Atoll's own shape; unknown fields are refused.

use atoll_gateway_core::Target;
use atoll_models::{CreateModelKey, SetBudget, SetPrice, SetProvider, SetRoute};
use atoll_store::{ModelCallRow, ModelKeyRow, ModelRates, SpendBy, SpendQuery};
use atoll_types::{
    BudgetScope, BudgetWindow, Fault, KeyId, ModelUsage, ProviderKind, SandboxId, Timestamp, Usd,
};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::ai_sdk::time;
use crate::calls::Read;
use crate::error::{Failure, Wire};
use crate::{App, auth};

pub(crate) type Answer = Result<Response, Failure>;

pub(crate) fn own(refusal: impl Into<atoll_models::Refusal>) -> Failure {
    Wire::Own.refuse(refusal)
}

pub(crate) fn ok(value: Value) -> Answer {
    Ok(axum::Json(value).into_response())
}

/// Errors name the place and never the content: there may be a key in it.
pub(crate) fn parse<T: DeserializeOwned>(body: Read) -> Result<T, Failure> {
    let body = body.map_err(|_| own(Fault::invalid("invalid_body", "the body could not be read")))?;
    serde_json::from_slice(&body).map_err(|error| {
        let text = error.to_string();
        let known = [
            "unknown field",
            "missing field",
            "duplicate field",
            "unknown variant",
        ];
        let told = if known.iter().any(|beginning| text.starts_with(beginning)) || !error.is_data() {
            text
        } else {
            format!(
                "a field has a value of the wrong kind at line {} column {}",
                error.line(),
                error.column()
            )
        };
        own(Fault::invalid("invalid_body", told))
    })
}

fn word<T: std::str::FromStr>(field: &str, text: &str) -> Result<T, Failure>
where
    T::Err: std::fmt::Display,
{
    text.parse()
        .map_err(|why| own(Fault::invalid("invalid_body", format!("`{field}`: {why}"))))
}

/// Metrics of model calls in Prometheus' text form.
pub(crate) async fn metrics(State(app): State<App>) -> impl IntoResponse {
    let mut out = String::new();
    app.models.metrics().write(&mut out);
    (
        [(
            axum::http::header::CONTENT_TYPE,
            "text/plain; version=0.0.4; charset=utf-8",
        )],
        out,
    )
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProviderBody {
    kind: String,
    base_url: Option<String>,
    #[serde(default, deserialize_with = "private")]
    key: Option<Zeroizing<String>>,
    serves: Option<Vec<String>>,
    responses: Option<bool>,
}

/// Wiped when dropped, as soon as it is ours.
fn private<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Zeroizing<String>>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Zeroizing::new))
}

pub(crate) async fn set_provider(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
    body: Read,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: ProviderBody = parse(body)?;
    let request = SetProvider {
        name,
        kind: word::<ProviderKind>("kind", &body.kind)?,
        base_url: body.base_url,
        key: body.key.map(|key| Zeroizing::new(key.as_bytes().to_vec())),
        serves: body.serves,
        responses: body.responses,
    };
    let view = app.models.set_provider(&project, request).await.map_err(own)?;
    ok(provider(&view))
}

fn provider(view: &atoll_models::ProviderView) -> Value {
    json!({
        "name": view.name, "kind": view.kind, "base_url": view.base_url, "has_key": view.has_key, "serves": view.serves,
        "responses": view.responses, "created_at": time(view.created_at), "updated_at": time(view.updated_at),
    })
}

pub(crate) async fn list_providers(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let items: Vec<Value> = app.models.list_providers(&project).iter().map(provider).collect();
    ok(json!({"items": items}))
}

pub(crate) async fn delete_provider(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    app.models.delete_provider(&project, &name).await.map_err(own)?;
    ok(json!({"deleted": name}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelBody {
    #[serde(default)]
    targets: Vec<TargetBody>,
    #[serde(default)]
    fallbacks: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetBody {
    provider: String,
    model: String,
    weight: Option<u32>,
}

pub(crate) async fn set_model(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
    body: Read,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: ModelBody = parse(body)?;
    let targets = body.targets.into_iter().map(|target| {
        (
            Target {
                provider: target.provider,
                model: target.model,
            },
            target.weight.unwrap_or(1),
        )
    });
    let request = SetRoute {
        name: name.clone(),
        targets: targets.collect(),
        fallbacks: body.fallbacks,
    };
    app.models.set_route(&project, request).await.map_err(own)?;
    let view = app
        .models
        .list_models(&project)
        .into_iter()
        .find(|view| view.name == name);
    ok(view.as_ref().map_or(Value::Null, model))
}

fn model(view: &atoll_models::ModelView) -> Value {
    let targets: Vec<Value> = view
        .targets
        .iter()
        .map(|(target, weight)| json!({"provider": target.provider, "model": target.model, "weight": weight}))
        .collect();
    json!({
        "name": view.name, "targets": targets, "fallbacks": view.fallbacks,
        "input_per_million": view.price.map(|(input, _)| input), "output_per_million": view.price.map(|(_, output)| output),
    })
}

pub(crate) async fn list_models(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let items: Vec<Value> = app.models.list_models(&project).iter().map(model).collect();
    ok(json!({"items": items}))
}

pub(crate) async fn delete_model(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    app.models.delete_route(&project, &name).await.map_err(own)?;
    ok(json!({"deleted": name}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriceBody {
    input: Option<String>,
    output: Option<String>,
    cache_read: Option<String>,
    cache_write: Option<String>,
    cache_write_1h: Option<String>,
    audio_input: Option<String>,
    audio_output: Option<String>,
    search: Option<String>,
}

pub(crate) async fn set_price(
    State(app): State<App>,
    headers: HeaderMap,
    Path(model): Path<String>,
    body: Read,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: PriceBody = parse(body)?;
    let rates = ModelRates {
        input: body.input,
        output: body.output,
        cache_read: body.cache_read,
        cache_write: body.cache_write,
        cache_write_1h: body.cache_write_1h,
        audio_input: body.audio_input,
        audio_output: body.audio_output,
        search: body.search,
    };
    app.models
        .set_price(
            &project,
            SetPrice {
                model: model.clone(),
                rates: rates.clone(),
            },
        )
        .await
        .map_err(own)?;
    ok(json!({"model": model, "rates": rates}))
}

pub(crate) async fn list_prices(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let (version, prices) = app.models.list_prices(&project);
    let items: Vec<Value> = prices
        .iter()
        .map(|price| json!({"model": price.model, "rates": price.rates}))
        .collect();
    ok(json!({"version": version, "items": items}))
}

pub(crate) async fn delete_price(
    State(app): State<App>,
    headers: HeaderMap,
    Path(model): Path<String>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    app.models.delete_price(&project, &model).await.map_err(own)?;
    ok(json!({"deleted": model}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BudgetBody {
    limit: String,
    window: Option<String>,
    scope: Option<String>,
    subject: Option<String>,
    alert_percent: Option<u8>,
}

pub(crate) async fn set_budget(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
    body: Read,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: BudgetBody = parse(body)?;
    let request = SetBudget {
        name,
        scope: body
            .scope
            .as_deref()
            .map_or(Ok(BudgetScope::Project), |scope| word("scope", scope))?,
        subject: body.subject,
        window: body
            .window
            .as_deref()
            .map_or(Ok(BudgetWindow::Total), |window| word("window", window))?,
        limit: word::<Usd>("limit", &body.limit)?,
        alert_percent: body.alert_percent,
    };
    let view = app.models.set_budget(&project, request).await.map_err(own)?;
    ok(budget(&view))
}

fn budget(view: &atoll_models::BudgetView) -> Value {
    let standing: Vec<Value> = view
        .standing
        .iter()
        .map(|standing| {
            json!({
                "subject": standing.subject, "spent": standing.spent, "reserved": standing.reserved,
                "resets_at": standing.resets_at.map(time),
            })
        })
        .collect();
    json!({
        "id": view.id.as_str(), "name": view.name, "scope": view.scope, "subject": view.subject, "window": view.window,
        "limit": view.limit, "alert_percent": view.alert_percent, "created_at": time(view.created_at),
        "standing": standing,
    })
}

pub(crate) async fn list_budgets(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let items: Vec<Value> = app.models.list_budgets(&project).iter().map(budget).collect();
    ok(json!({"items": items}))
}

pub(crate) async fn delete_budget(
    State(app): State<App>,
    headers: HeaderMap,
    Path(name): Path<String>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    app.models.delete_budget(&project, &name).await.map_err(own)?;
    ok(json!({"deleted": name}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyBody {
    name: String,
    #[serde(default)]
    models: Vec<String>,
    requests_per_minute: Option<u64>,
    tokens_per_minute: Option<u64>,
    expires_at: Option<String>,
}

pub(crate) async fn create_key(State(app): State<App>, headers: HeaderMap, body: Read) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: KeyBody = parse(body)?;
    let expires_at = body
        .expires_at
        .as_deref()
        .map(|text| instant("expires_at", text))
        .transpose()?;
    let request = CreateModelKey {
        name: body.name,
        models: body.models,
        requests_per_minute: body.requests_per_minute,
        tokens_per_minute: body.tokens_per_minute,
        expires_at,
    };
    let (row, secret) = app
        .models
        .create_model_key(&project, request)
        .await
        .map_err(own)?;
    Ok((
        StatusCode::CREATED,
        axum::Json(json!({"key": key(&row), "secret": secret})),
    )
        .into_response())
}

fn key(row: &ModelKeyRow) -> Value {
    json!({
        "id": row.id.as_str(), "name": row.name, "prefix": row.prefix, "models": row.models,
        "requests_per_minute": row.requests_per_minute, "tokens_per_minute": row.tokens_per_minute,
        "created_at": time(row.created_at), "expires_at": row.expires_at.map(time), "revoked_at": row.revoked_at.map(time),
    })
}

pub(crate) async fn list_keys(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let rows = app.models.list_model_keys(&project).await.map_err(own)?;
    ok(json!({"items": rows.iter().map(key).collect::<Vec<_>>()}))
}

pub(crate) async fn revoke_key(State(app): State<App>, headers: HeaderMap, Path(id): Path<String>) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let id: KeyId = word("id", &id)?;
    let row = app.models.revoke_model_key(&project, &id).await.map_err(own)?;
    ok(key(&row))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CallsQuery {
    sandbox: Option<String>,
    cursor: Option<String>,
    limit: Option<usize>,
}

pub(crate) async fn list_calls(
    State(app): State<App>,
    headers: HeaderMap,
    query: Result<Query<CallsQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let Query(query) = query.map_err(|error| own(Fault::invalid("invalid_query", error.body_text())))?;
    let sandbox: Option<SandboxId> = query
        .sandbox
        .as_deref()
        .map(|id| word("sandbox", id))
        .transpose()?;
    let page = app
        .models
        .model_calls(
            &project,
            sandbox.as_ref(),
            query.cursor,
            query.limit.unwrap_or(50),
        )
        .await;
    let page = page.map_err(own)?;
    ok(json!({
        "items": page.items.iter().map(call).collect::<Vec<_>>(),
        "next": page.next.map(|cursor| cursor.to_string()),
    }))
}

pub(crate) async fn get_call(State(app): State<App>, headers: HeaderMap, Path(id): Path<String>) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let id: atoll_types::ModelCallId = word("id", &id)?;
    let row = app.models.model_call(&project, &id).await.map_err(own)?;
    let bodies = app.models.bodies(&project, &id).await.map_err(own)?;
    let mut shown = call(&row);
    shown["bodies"] = bodies.map_or(
        Value::Null,
        |bodies| json!({"request": bodies.request, "answer": bodies.answer, "shortened": bodies.shortened}),
    );
    ok(shown)
}

fn call(row: &ModelCallRow) -> Value {
    json!({
        "id": row.id.as_str(), "started_at": time(row.started_at), "ended_at": row.ended_at.map(time),
        "key": row.key.as_ref().map(|id| id.as_str()), "sandbox": row.sandbox.as_ref().map(|id| id.as_str()),
        "workflow": row.workflow, "run": row.run, "user": row.end_user, "tags": row.tags, "dialect": row.dialect,
        "asked": row.asked, "provider": row.provider, "model": row.model, "streamed": row.streamed,
        "outcome": row.outcome, "attempts": row.attempts, "first_byte_ms": row.first_byte_millis, "finish": row.finish,
        "error": row.error, "usage": usage(&row.usage), "estimated": row.estimated, "price_version": row.price_version,
        "cost": row.cost,
    })
}

fn usage(usage: &ModelUsage) -> Value {
    json!(usage)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SpendArgs {
    by: Option<String>,
    from: Option<String>,
    to: Option<String>,
    sandbox: Option<String>,
    model: Option<String>,
    provider: Option<String>,
}

pub(crate) async fn spend(
    State(app): State<App>,
    headers: HeaderMap,
    query: Result<Query<SpendArgs>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let Query(query) = query.map_err(|error| own(Fault::invalid("invalid_query", error.body_text())))?;
    let by = match query.by.as_deref() {
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
            let fault = Fault::invalid(
                "invalid_query",
                format!("cannot sum by `{}`", other.escape_default()),
            );
            return Err(own(fault.hint(
                "use model, provider, key, sandbox, workflow, run, user, tag, day, hour or total",
            )));
        }
    };
    let time = |field: &str, text: Option<&str>, otherwise: i64| match text {
        Some(text) => instant(field, text),
        None => Ok(Timestamp(otherwise)),
    };
    let asked = SpendQuery {
        project,
        from: time("from", query.from.as_deref(), 0)?,
        to: time("to", query.to.as_deref(), i64::MAX)?,
        by,
        model: query.model,
        provider: query.provider,
        sandbox: query
            .sandbox
            .as_deref()
            .map(|id| word("sandbox", id))
            .transpose()?,
        user: None,
    };
    let rows = app.models.spend_beside_compute(asked).await.map_err(own)?;
    let total: Usd = rows.iter().map(|(row, _)| row.cost).sum();
    let items: Vec<Value> = rows
        .iter()
        .map(|(row, compute)| {
            json!({
                "group": row.group, "calls": row.calls, "cost": row.cost, "usage": usage(&row.usage),
                "unpriced": row.unpriced, "estimated": row.estimated, "failed": row.failed,
                "compute": {
                    "wall_ms": compute.wall_millis, "cpu_us": compute.cpu_micros,
                    "memory_byte_seconds": compute.memory_byte_seconds, "disk_byte_seconds": compute.disk_byte_seconds,
                },
            })
        })
        .collect();
    ok(json!({"items": items, "total": total}))
}

fn instant(field: &str, text: &str) -> Result<Timestamp, Failure> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(|at| Timestamp(at.as_millisecond())).map_err(|_| {
        let message = format!("`{field}` is not a time; write RFC 3339, such as 2030-01-31T12:00:00Z");
        own(Fault::invalid("invalid_time", message))
    })
}

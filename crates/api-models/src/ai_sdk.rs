//! The AI SDK's gateway protocol: calls, the catalogue, credits, one call looked up, and reports.

use atoll_dialects::Dialect;
use atoll_front::Visit;
use atoll_models::{ModelView, Who};
use atoll_store::{SpendBy, SpendQuery};
use atoll_types::{Code, Fault, KeyId, ModelCallId, SandboxId, Timestamp, Usd};
use axum::extract::{Extension, Query, Request, State};
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::calls::serve;
use crate::error::{Failure, Wire};
use crate::{App, auth};

const WIRE: Wire = Wire::AiSdk;
const DAY: i64 = 24 * 60 * 60 * 1000;

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

pub(crate) async fn language_model(State(app): State<App>, request: Request) -> Result<Response, Failure> {
    let headers = request.headers();
    let model = header(headers, "ai-language-model-id");
    let stream = header(headers, "ai-language-model-streaming").as_deref() == Some("true");
    serve(&app, WIRE, Dialect::AiSdk, request, model, Some(stream)).await
}

pub(crate) async fn embedding_model(State(app): State<App>, request: Request) -> Result<Response, Failure> {
    let headers = request.headers();
    let model = header(headers, "ai-model-id").or_else(|| header(headers, "ai-embedding-model-id"));
    serve(&app, WIRE, Dialect::AiSdkEmbeddings, request, model, Some(false)).await
}

/// Who asks for something that is no call, which counts against a key's rate all the same.
async fn who(app: &App, headers: &HeaderMap, visit: &Visit) -> Result<Who, Failure> {
    let who = auth::payer(app, headers, visit)
        .await
        .map_err(|refusal| WIRE.refuse(refusal))?;
    let taken = app.models.take_rate(&who, 0);
    taken.map_err(|refusal| WIRE.refuse(refusal))?;
    Ok(who)
}

pub(crate) async fn config(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let who = who(&app, &headers, &visit).await?;
    // Each version of the client insists on its own.
    let version = if uri.path().starts_with("/v3/") {
        "v3"
    } else {
        "v4"
    };
    let models: Vec<Value> = app
        .models
        .models_for(&who)
        .iter()
        .map(|view| entry(view, version))
        .collect();
    Ok(axum::Json(json!({"models": models})).into_response())
}

fn entry(view: &ModelView, version: &str) -> Value {
    let provider = view
        .targets
        .first()
        .map_or("atoll", |(target, _)| target.provider.as_str());
    let per_token = |million: Usd| million.millionth().unwrap_or_default().to_string();
    let kind = if view.name.contains("embedding") {
        "embedding"
    } else {
        "language"
    };
    let mut entry = json!({
        "id": view.name, "name": view.name, "modelType": kind,
        "specification": {"specificationVersion": version, "provider": provider, "modelId": view.name},
    });
    if let Some((input, output)) = view.price {
        entry["pricing"] = json!({"input": per_token(input), "output": per_token(output)});
        for (name, rate) in [
            ("input_cache_read", view.cache_read),
            ("input_cache_write", view.cache_write),
        ] {
            if let Some(rate) = rate {
                entry["pricing"][name] = per_token(rate).into();
            }
        }
    }
    entry
}

/// What may still be spent, which is what is left of the tightest budget that applies to the caller, and what was ever spent: by
/// the project, for its own keys; by themselves alone for sandboxes and holders of virtual keys. The clients want a text that
/// is a number, so where no budget applies it is `Infinity`.
pub(crate) async fn credits(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let who = who(&app, &headers, &visit).await?;
    let project = &who.spender.project;
    let (sandbox, key) = only(&who);
    let left = app.models.left_for(&who);
    let balance = left.map_or_else(|| "Infinity".to_owned(), |left| left.to_string());
    let query = SpendQuery {
        project: project.clone(),
        from: Timestamp(0),
        to: Timestamp(i64::MAX),
        by: SpendBy::Total,
        model: None,
        provider: None,
        sandbox,
        key,
        user: None,
    };
    let spent = app
        .models
        .spend(query)
        .await
        .map_err(|fault| WIRE.refuse(fault))?;
    let used: Usd = spent.iter().map(|row| row.cost).sum();
    Ok(axum::Json(json!({"balance": balance, "total_used": used.to_string()})).into_response())
}

/// Whose calls a caller may know of, if not all of the project's: a sandbox its own, a virtual key those made with it.
fn only(who: &Who) -> (Option<SandboxId>, Option<KeyId>) {
    let key = who.key.as_ref().map(|key| key.row.id.clone());
    (who.spender.sandbox.clone(), key)
}

#[derive(Debug, Deserialize)]
pub(crate) struct GenerationQuery {
    id: String,
}

pub(crate) async fn generation(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
    query: Result<Query<GenerationQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Failure> {
    let who = who(&app, &headers, &visit).await?;
    let Ok(Query(query)) = query else {
        return Err(WIRE.refuse(Fault::new(Code::IdMissing, "`id` names the generation")));
    };
    let id: ModelCallId = query
        .id
        .parse()
        .map_err(|error: atoll_types::IdError| WIRE.refuse(Fault::new(Code::InvalidId, error.to_string())))?;
    let row = app
        .models
        .model_call(&who.spender.project, &id)
        .await
        .map_err(|fault| WIRE.refuse(fault))?;
    let (sandbox, key) = only(&who);
    let is_others = (sandbox.is_some() && sandbox != row.sandbox) || (key.is_some() && key != row.key);
    if is_others {
        // What others asked is not for them to know, nor that they did.
        let fault = Fault::new(Code::CallNotFound, format!("there is no model call {id}"));
        return Err(WIRE.refuse(fault));
    }
    let duration = row.ended_at.map_or(0, |ended| ended.millis_since(row.started_at));
    // The SDK wants numbers here; exact amounts are in the reports.
    let dollars = |amount: Usd| amount.pico() as f64 / 1e12;
    let data = json!({
        "id": row.id.as_str(),
        "total_cost": dollars(row.cost),
        "upstream_inference_cost": dollars(row.cost),
        "usage": dollars(row.cost),
        "created_at": time(row.started_at),
        "model": row.asked,
        "is_byok": false,
        "provider_name": row.provider,
        "streamed": row.streamed,
        "finish_reason": row.finish.unwrap_or_else(|| row.outcome.name().to_owned()),
        "latency": row.first_byte_millis.unwrap_or(duration),
        "generation_time": duration,
        "native_tokens_prompt": row.usage.total_input(),
        "native_tokens_completion": row.usage.total_output(),
        "native_tokens_reasoning": row.usage.reasoning,
        "native_tokens_cached": row.usage.cache_read,
        "native_tokens_cache_creation": row.usage.cache_write + row.usage.cache_write_1h,
        "billable_web_search_calls": row.usage.searches,
    });
    Ok(axum::Json(json!({"data": data})).into_response())
}

pub(crate) fn time(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(at.0).map_or_else(|_| at.0.to_string(), |at| format!("{at:.3}"))
}

#[derive(Debug, Deserialize)]
pub(crate) struct ReportQuery {
    start_date: String,
    end_date: String,
    group_by: Option<String>,
    date_part: Option<String>,
    user_id: Option<String>,
    model: Option<String>,
    provider: Option<String>,
    tags: Option<String>,
    credential_type: Option<String>,
}

pub(crate) async fn report(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
    query: Result<Query<ReportQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Failure> {
    let who = who(&app, &headers, &visit).await?;
    let Ok(Query(query)) = query else {
        return Err(WIRE.refuse(Fault::new(
            Code::DatesMissing,
            "`start_date` and `end_date` are dates: YYYY-MM-DD",
        )));
    };
    // Leaving them out of the sum would answer another question.
    for (field, given) in [("tags", &query.tags), ("credential_type", &query.credential_type)] {
        if given.is_some() {
            let fault = Fault::new(Code::FilterUnsupported, format!("cannot filter by `{field}`"));
            return Err(WIRE.refuse(fault));
        }
    }
    let (by, name) = match (query.group_by.as_deref(), query.date_part.as_deref()) {
        (None | Some("day"), Some("hour")) => (SpendBy::Hour, "hour"),
        (None | Some("day"), _) => (SpendBy::Day, "day"),
        (Some("user"), _) => (SpendBy::User, "user"),
        (Some("model"), _) => (SpendBy::Model, "model"),
        (Some("tag"), _) => (SpendBy::Tag, "tag"),
        (Some("provider"), _) => (SpendBy::Provider, "provider"),
        (Some(other), _) => {
            let fault = Fault::new(Code::GroupByUnsupported, format!("cannot group by `{other}`"));
            return Err(WIRE.refuse(fault.hint("use day, user, model, tag or provider")));
        }
    };
    let date = |text: &str| -> Result<i64, Failure> {
        let parsed = format!("{text}T00:00:00Z").parse::<jiff::Timestamp>();
        let bad = Fault::new(
            Code::InvalidDate,
            format!("`{}` is not a date: YYYY-MM-DD", text.escape_default()),
        );
        parsed.map(|at| at.as_millisecond()).map_err(|_| WIRE.refuse(bad))
    };
    let (sandbox, key) = only(&who);
    let asked = SpendQuery {
        project: who.spender.project.clone(),
        from: Timestamp(date(&query.start_date)?),
        to: Timestamp(date(&query.end_date)?.saturating_add(DAY)),
        by,
        model: query.model,
        provider: query.provider,
        sandbox,
        key,
        user: query.user_id,
    };
    let rows = app
        .models
        .spend(asked)
        .await
        .map_err(|fault| WIRE.refuse(fault))?;
    let results: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                name: row.group,
                "total_cost": row.cost.pico() as f64 / 1e12,
                "input_tokens": row.usage.total_input(),
                "output_tokens": row.usage.total_output(),
                "cached_input_tokens": row.usage.cache_read,
                "cache_creation_input_tokens": row.usage.cache_write + row.usage.cache_write_1h,
                "reasoning_tokens": row.usage.reasoning,
                "request_count": row.calls,
            })
        })
        .collect();
    Ok(axum::Json(json!({"results": results})).into_response())
}

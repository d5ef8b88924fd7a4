//! `/v1/gateway`: what the operator sets and sees. In Atoll's own shape; unknown fields are refused.
//!
//! What must hold: what is served is documented. Routes are made from the handlers' own descriptions.

pub(crate) mod budgets;
pub(crate) mod calls;
pub(crate) mod catalogue;
pub(crate) mod guards;
pub(crate) mod keys;
pub(crate) mod providers;

use atoll_types::{Code, Fault, ProjectId, Timestamp};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;

use crate::ai_sdk::time;
use crate::calls::Read;
use crate::error::{Failure, Wire};
use crate::{App, auth};

type Answer<T> = Result<axum::Json<T>, Failure>;

/// Everything that is managed, with its documentation.
pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(providers::routes())
        .merge(catalogue::routes())
        .merge(budgets::routes())
        .merge(keys::routes())
        .merge(guards::routes())
        .merge(calls::routes())
}

fn own(refusal: impl Into<atoll_models::Refusal>) -> Failure {
    Wire::Own.refuse(refusal)
}

async fn project(app: &App, headers: &HeaderMap) -> Result<ProjectId, Failure> {
    auth::project(app, headers).await.map_err(own)
}

/// What is left of something that was deleted: its name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    deleted: String,
}

/// Errors name the place and never the content: there may be a key in it.
fn parse<T: DeserializeOwned>(body: &Read) -> Result<T, Failure> {
    serde_json::from_slice(&body.0).map_err(|error| {
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
        own(Fault::new(Code::InvalidBody, told))
    })
}

/// The name in a path, read by axum.
type Named = Result<axum::extract::Path<String>, axum::extract::rejection::PathRejection>;

fn named(named: Named) -> Result<String, Failure> {
    let named = named.map_err(|error| own(Fault::new(Code::InvalidPathParameter, error.body_text())))?;
    Ok(named.0)
}

/// The query of a request, read by axum.
type Asked<T> = Result<axum::extract::Query<T>, axum::extract::rejection::QueryRejection>;

fn query<T>(asked: Asked<T>) -> Result<T, Failure> {
    let asked = asked.map_err(|error| own(Fault::new(Code::InvalidQuery, error.body_text())))?;
    Ok(asked.0)
}

fn word<T: std::str::FromStr>(field: &str, text: &str) -> Result<T, Failure>
where
    T::Err: std::fmt::Display,
{
    text.parse()
        .map_err(|why| own(Fault::new(Code::InvalidBody, format!("`{field}`: {why}"))))
}

fn instant(field: &str, text: &str) -> Result<Timestamp, Failure> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(|at| Timestamp(at.as_millisecond())).map_err(|_| {
        let message = format!("`{field}` is not a time; write RFC 3339, such as 2030-01-31T12:00:00Z");
        own(Fault::new(Code::InvalidTime, message))
    })
}

/// Metrics of model calls in Prometheus' text form.
pub(crate) async fn metrics(State(app): State<App>) -> Response {
    let mut out = String::new();
    app.models.metrics().write(&mut out);
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(axum::http::header::CONTENT_TYPE, kind)], out).into_response()
}

/// What a call used, in buckets that never overlap: tokens, and searches.
#[derive(Debug, Serialize, ToSchema)]
struct Usage {
    /// Read by the model, and not from a cache.
    input: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_1h: u64,
    audio_input: u64,
    /// Written by the model for the caller.
    output: u64,
    /// Written by the model for itself; billed as output.
    reasoning: u64,
    audio_output: u64,
    searches: u64,
}

impl Usage {
    fn of(usage: &atoll_types::ModelUsage) -> Self {
        Self {
            input: usage.input,
            cache_read: usage.cache_read,
            cache_write: usage.cache_write,
            cache_write_1h: usage.cache_write_1h,
            audio_input: usage.audio_input,
            output: usage.output,
            reasoning: usage.reasoning,
            audio_output: usage.audio_output,
            searches: usage.searches,
        }
    }
}

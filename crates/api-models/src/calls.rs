//! The routes that call models.

use std::time::Duration;

use atoll_dialects::Dialect;
use atoll_front::extract::{Declared, JsonRules, read_json};
use atoll_front::{Refused, Visit};
use atoll_models::{Refusal, Request, Served};
use atoll_types::{Code, Fault};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::json;

use crate::error::{Failure, Wire};
use crate::{App, auth};

/// Conversations with images are large. Some clients do not say that they send JSON.
const RULES: JsonRules = JsonRules {
    bytes: 32 * 1024 * 1024,
    declared: Declared::IfAtAll,
    may_be_empty: false,
};
/// Answers are kept for a day at most.
const LONGEST_KEPT: u64 = 24 * 60 * 60;

pub(crate) async fn chat(
    State(app): State<App>,
    request: axum::extract::Request,
) -> Result<Response, Failure> {
    serve(&app, Wire::Openai, Dialect::Chat, request, None, None).await
}

pub(crate) async fn responses(
    State(app): State<App>,
    request: axum::extract::Request,
) -> Result<Response, Failure> {
    serve(&app, Wire::Openai, Dialect::Responses, request, None, None).await
}

pub(crate) async fn embeddings(
    State(app): State<App>,
    request: axum::extract::Request,
) -> Result<Response, Failure> {
    serve(&app, Wire::Openai, Dialect::Embeddings, request, None, None).await
}

pub(crate) async fn messages(
    State(app): State<App>,
    request: axum::extract::Request,
) -> Result<Response, Failure> {
    serve(&app, Wire::Anthropic, Dialect::Messages, request, None, None).await
}

pub(crate) async fn count_tokens(
    State(app): State<App>,
    request: axum::extract::Request,
) -> Result<Response, Failure> {
    let wire = Wire::Anthropic;
    let (parts, body) = request.into_parts();
    let visit = Visit::of(&parts.extensions).map_err(|fault| wire.refuse(fault))?;
    let who = auth::payer(&app, &parts.headers, &visit)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    let body = read(&visit, &parts.headers, body)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    let count = app
        .models
        .count_tokens(&who, body)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    Ok(axum::Json(json!({"input_tokens": count})).into_response())
}

pub(crate) async fn serve(
    app: &App,
    wire: Wire,
    dialect: Dialect,
    request: axum::extract::Request,
    model: Option<String>,
    stream: Option<bool>,
) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    let visit = Visit::of(&parts.extensions).map_err(|fault| wire.refuse(fault))?;
    let who = auth::payer(app, headers, &visit)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    let body = read(&visit, headers, body)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    let request = Request {
        dialect,
        body,
        model,
        stream,
        headers: passed_on(headers),
        keep: keep(headers).map_err(|refusal| wire.refuse(refusal))?,
    };
    let served = app
        .models
        .call(&who, request)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    Ok(match served {
        Served::Whole {
            call,
            body,
            cost,
            cached,
        } => {
            let mut response = ([(header::CONTENT_TYPE, "application/json")], body).into_response();
            tell(&mut response, "x-atoll-call", call.as_str());
            tell(&mut response, "x-atoll-cost-usd", &cost.to_string());
            tell(
                &mut response,
                "x-atoll-cache",
                if cached { "hit" } else { "miss" },
            );
            response
        }
        Served::Stream { call, events, cached } => {
            let body = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>));
            let head = [
                (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
                (header::CACHE_CONTROL, "no-cache"),
            ];
            let mut response = (StatusCode::OK, head, body).into_response();
            tell(&mut response, "x-atoll-call", call.as_str());
            tell(
                &mut response,
                "x-atoll-cache",
                if cached { "hit" } else { "miss" },
            );
            response
        }
    })
}

fn tell(response: &mut Response, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response
            .headers_mut()
            .insert(HeaderName::from_static(name), value);
    }
}

/// For how many seconds the answer may be given again, if the caller wants that.
fn keep(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    const NAME: &str = "x-atoll-cache";
    let Some(value) = headers.get(NAME) else {
        return Ok(None);
    };
    let seconds = value.to_str().ok().and_then(|text| text.parse().ok());
    match seconds.filter(|seconds| (1..=LONGEST_KEPT).contains(seconds)) {
        Some(seconds) => Ok(Some(Duration::from_secs(seconds))),
        None => Err(Fault::new(
            Code::InvalidHeader,
            format!("`{NAME}` is a number of seconds from 1 to {LONGEST_KEPT}"),
        )
        .into()),
    }
}

/// The body, if it is JSON and not too large. It is paid for until the last copy is dropped.
async fn read(visit: &Visit, headers: &HeaderMap, body: Body) -> Result<Bytes, Refusal> {
    match read_json(visit, headers, body, RULES).await {
        Ok(held) => Ok(held.into_bytes()),
        Err(Refused::TooLarge { limit }) => {
            let message = format!("a request may hold at most {limit} bytes");
            Err(Fault::new(Code::RequestTooLarge, message).into())
        }
        Err(other) => Err(other.fault().into()),
    }
}

/// What a provider of the same wire should hear.
fn passed_on(headers: &HeaderMap) -> Vec<(String, String)> {
    let names = ["anthropic-version", "anthropic-beta", "openai-beta"];
    names
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), headers.get(name)?.to_str().ok()?.to_owned())))
        .collect()
}

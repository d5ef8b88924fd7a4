//! A provider of models that follows a script: for tests, benches and demos, and named so in every answer.
//!
//! It speaks four wires, counts tokens in a way that anybody can check (a word is a token), remembers what it has counted
//! (`GET /scripted/usage`), and misbehaves on request. What it does is in the name of the model.
//!
//! What must hold: the same question has the same answer ([`script`], which is pure), and what it has charged for is counted
//! whether or not anybody heard the answer, so that a gateway's own count can be held against it.

pub mod script;

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use atoll_dialects::{Dialect, embeddings};
use atoll_types::ModelUsage;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::script::{Bill, words};

/// A line that no honest provider sends.
const LONG_LINE: usize = 10 * 1024 * 1024;
const LARGEST: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone, Default)]
struct Script {
    /// What was answered, by model.
    counted: Arc<Mutex<BTreeMap<String, Counted>>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    calls: u64,
    /// Tokens read, and tokens written.
    input: u64,
    output: u64,
}

/// Serves it on a listener until `stop`.
pub async fn serve(listener: TcpListener, stop: CancellationToken) {
    atoll_front::serve::serve_all(listener, router(), stop).await;
}

fn router() -> Router {
    Router::new()
        .route(
            "/v1/chat/completions",
            post(|script: State<Script>, body: Bytes| answer(script, Dialect::Chat, None, body)),
        )
        .route(
            "/v1/responses",
            post(|script: State<Script>, body: Bytes| answer(script, Dialect::Responses, None, body)),
        )
        .route(
            "/v1/messages",
            post(|script: State<Script>, body: Bytes| answer(script, Dialect::Messages, None, body)),
        )
        .route("/v1/messages/count_tokens", post(count))
        .route("/v1/embeddings", post(embed))
        .route("/v1beta/models/{action}", post(gemini))
        .route("/model/{model}/{method}", post(converse))
        .route("/scripted/usage", get(usage))
        .layer(DefaultBodyLimit::max(LARGEST))
        .with_state(Script::default())
}

async fn usage(State(script): State<Script>) -> axum::Json<Value> {
    let counted = script.counted.lock();
    let models = counted.iter().map(|(model, counted)| {
        let Counted { calls, input, output } = counted;
        json!({"model": model, "calls": calls, "input": input, "output": output})
    });
    axum::Json(json!({"models": models.collect::<Vec<_>>()}))
}

async fn count(body: Bytes) -> Response {
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    axum::Json(json!({"input_tokens": words(&value["messages"].to_string())})).into_response()
}

async fn embed(State(script): State<Script>, body: Bytes) -> Response {
    let Ok(ask) = embeddings::read_request(&body) else {
        return refuse(StatusCode::BAD_REQUEST, "this is no request for embeddings");
    };
    let value: Value = serde_json::from_slice(&body).unwrap_or_default();
    let model = value["model"].as_str().unwrap_or_default();
    let input: u64 = ask.texts.iter().map(|text| words(text)).sum();
    script.note(model, input, 0);
    let size = usize::try_from(ask.dimensions.unwrap_or(4))
        .unwrap_or(4)
        .min(4096);
    let vectors = ask
        .texts
        .iter()
        .map(|text| vec![words(text) as f32; size])
        .collect();
    let used = ModelUsage {
        input,
        ..ModelUsage::default()
    };
    let answer = embeddings::Answer {
        vectors,
        usage: Some(used),
    };
    axum::Json(embeddings::write_openai_answer(&answer, model, ask.packed)).into_response()
}

async fn gemini(State(script): State<Script>, Path(action): Path<String>, body: Bytes) -> Response {
    let Some((model, method)) = action.split_once(':') else {
        return refuse(StatusCode::NOT_FOUND, "no such method");
    };
    answer(
        State(script),
        Dialect::Gemini,
        Some((model.to_owned(), method.starts_with("stream"))),
        body,
    )
    .await
}

async fn converse(
    State(script): State<Script>,
    Path((model, method)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let stream = method.ends_with("stream");
    answer(State(script), Dialect::Converse, Some((model, stream)), body).await
}

async fn answer(
    State(script): State<Script>,
    dialect: Dialect,
    named: Option<(String, bool)>,
    body: Bytes,
) -> Response {
    let Ok(value) = serde_json::from_slice::<Value>(&body) else {
        return refuse(StatusCode::BAD_REQUEST, "the body is not JSON");
    };
    let (model, stream) = script::asked(named, &value);
    let role = model.strip_prefix("scripted-").unwrap_or_default();
    let kind = if stream {
        "text/event-stream"
    } else {
        "application/json"
    };
    match role {
        "hang" => std::future::pending::<()>().await,
        "garbage" => return ([(header::CONTENT_TYPE, kind)], "data: {\"oh\n\nno}").into_response(),
        "html" => return ([(header::CONTENT_TYPE, "text/html")], "<h1>welcome</h1>").into_response(),
        "longline" => {
            return (
                [(header::CONTENT_TYPE, "text/event-stream")],
                [b"data: ".as_slice(), &vec![b'x'; LONG_LINE]].concat(),
            )
                .into_response();
        }
        _ => {}
    }
    if let Some(millis) = script::number(role, "slow-") {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    let told = script::answer(dialect, &model, stream, &value);
    if told.bill != Bill::default() {
        script.note(&model, told.bill.input, told.bill.output);
    }
    let pause = script::number(role, "stream-").map(|_| Duration::from_millis(20));
    let pieces = futures_util::stream::iter(told.pieces).then(move |piece| async move {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        Ok::<_, Infallible>(Bytes::from(piece))
    });
    let status = StatusCode::from_u16(told.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (
        status,
        [(header::CONTENT_TYPE, told.kind)],
        Body::from_stream(pieces),
    )
        .into_response()
}

fn refuse(status: StatusCode, message: &str) -> Response {
    (
        status,
        axum::Json(json!({"error": {"message": message, "type": "scripted_error"}})),
    )
        .into_response()
}

impl Script {
    fn note(&self, model: &str, input: u64, output: u64) {
        let mut counted = self.counted.lock();
        let entry = counted.entry(model.to_owned()).or_default();
        entry.calls += 1;
        entry.input += input;
        entry.output += output;
    }
}

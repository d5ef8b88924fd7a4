//! OpenAI's Chat Completions, spoken by most providers and most clients.
//!
//! Thinking has no place in OpenAI's own form; it travels as `reasoning_content` and, with its signature, in
//! `reasoning_details`, as others have come to spell it. `cache_control` on parts is understood too.

mod stream;

use serde_json::{Value, json};

use crate::json::{Built, Fields};
use crate::talk::{push, source_of_url, texts, url_of_source};
use crate::{
    Answer, Ask, Cache, Effort, Finish, Format, Part, Result, Role, Schema, Source, Stamp, TextPart,
    Thinking, Tool, ToolChoice, Untranslatable, usage,
};

pub use stream::{Reader, Writer};

/// Say nothing about what is asked of the model, or are for the gateway.
const IGNORED: [&str; 14] = [
    "model",
    "store",
    "metadata",
    "service_tier",
    "stream_options",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "provider",
    "providerOptions",
    "models",
    "route",
    "usage",
    "verbosity",
];

pub fn read_request(body: &[u8]) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    fields.ignore(&IGNORED);
    if fields.count("n")?.is_some_and(|n| n != 1) {
        return fields.refuse("n", "the model's provider gives one answer at a time");
    }
    if fields.flag("logprobs")? == Some(true) {
        return fields.refuse("logprobs", "the model's provider does not tell probabilities");
    }
    let mut ask = Ask {
        max_output: fields.count("max_completion_tokens")?,
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        top_k: fields.count("top_k")?,
        presence_penalty: fields.number("presence_penalty")?,
        frequency_penalty: fields.number("frequency_penalty")?,
        seed: fields.number("seed")?,
        parallel_tools: fields.flag("parallel_tool_calls")?,
        user: fields.text("user")?,
        stream: fields.flag("stream")?.unwrap_or(false),
        ..Ask::default()
    };
    let older = fields.count("max_tokens")?;
    ask.max_output = ask.max_output.or(older);
    ask.stop = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops
            .into_iter()
            .filter_map(|stop| stop.as_str().map(str::to_owned))
            .collect(),
        Some(_) => return fields.refuse("stop", "expected a string or a list of strings"),
    };
    if let Some(effort) = fields.text("reasoning_effort")? {
        ask.thinking = Some(read_effort(&effort).ok_or_else(|| unknown_effort("reasoning_effort", &effort))?);
    }
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(effort) = reasoning.text("effort")? {
            ask.thinking =
                Some(read_effort(&effort).ok_or_else(|| unknown_effort("reasoning.effort", &effort))?);
        }
        if let Some(tokens) = reasoning.count("max_tokens")? {
            ask.thinking = Some(Thinking::Tokens(tokens));
        }
        reasoning.ignore(&["enabled", "exclude", "summary"]);
        reasoning.end()?;
    }
    if let Some(format) = fields.object("response_format")? {
        ask.format = read_format(format)?;
    }
    for tool in fields.list("tools")? {
        ask.tools.push(read_tool(tool)?);
    }
    ask.tool_choice = fields.take("tool_choice").map(read_choice).transpose()?;
    for message in fields.list("messages")? {
        read_message(message, &mut ask)?;
    }
    fields.end()?;
    if ask.turns.is_empty() {
        return Err(Untranslatable::new("messages", "there is no message of the user"));
    }
    Ok(ask)
}

fn unknown_effort(field: &str, effort: &str) -> Untranslatable {
    Untranslatable::new(
        field,
        format!("`{effort}` is not known: use none, minimal, low, medium, high or xhigh"),
    )
}

pub(crate) fn read_effort(name: &str) -> Option<Thinking> {
    match name {
        "none" => Some(Thinking::Off),
        name => Effort::read(name).map(Thinking::Effort),
    }
}

fn read_format(mut format: Fields) -> Result<Format> {
    let kind = format.need_text("type")?;
    let read = match kind.as_str() {
        "text" => Format::Text,
        "json_object" => Format::Json,
        "json_schema" => {
            let Some(mut schema) = format.object("json_schema")? else {
                return format.refuse("json_schema", "it is missing");
            };
            let read = Schema {
                name: schema.text("name")?,
                description: schema.text("description")?,
                schema: schema.take("schema").unwrap_or_else(|| json!({})),
                strict: schema.flag("strict")?,
            };
            schema.end()?;
            Format::Schema(read)
        }
        _ => return format.refuse("type", format!("`{kind}` is not known")),
    };
    format.end()?;
    Ok(read)
}

fn read_tool(mut tool: Fields) -> Result<Tool> {
    let kind = tool.need_text("type")?;
    if kind != "function" {
        return tool.refuse("type", format!("only functions can be translated, not `{kind}`"));
    }
    let cache = read_cache(&mut tool)?;
    let Some(mut function) = tool.object("function")? else {
        return tool.refuse("function", "it is missing");
    };
    tool.end()?;
    let read = Tool {
        name: function.need_text("name")?,
        description: function.text("description")?,
        schema: function
            .take("parameters")
            .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        strict: function.flag("strict")?,
        cache,
    };
    function.end()?;
    Ok(read)
}

fn read_choice(choice: Value) -> Result<ToolChoice> {
    match choice {
        Value::String(name) => match name.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(Untranslatable::new(
                "tool_choice",
                format!("`{name}` is not known"),
            )),
        },
        choice => match choice["function"]["name"].as_str() {
            Some(name) => Ok(ToolChoice::Only(name.to_owned())),
            None => Err(Untranslatable::new(
                "tool_choice",
                "only a function can be chosen",
            )),
        },
    }
}

/// `cache_control: {"type": "ephemeral", "ttl": "1h"}`, as Anthropic spells it and others have taken it over.
pub(crate) fn read_cache(fields: &mut Fields) -> Result<Option<Cache>> {
    let Some(mut control) = fields.object("cache_control")? else {
        return Ok(None);
    };
    control.ignore(&["type"]);
    let cache = match control.text("ttl")?.as_deref() {
        None | Some("5m") => Cache::Short,
        Some("1h") => Cache::Hour,
        Some(other) => return control.refuse("ttl", format!("`{other}` is not known: use 5m or 1h")),
    };
    control.end()?;
    Ok(Some(cache))
}

fn read_message(mut message: Fields, ask: &mut Ask) -> Result<()> {
    let role = message.need_text("role")?;
    message.ignore(&["name", "refusal", "audio", "annotations"]);
    let path = message.path("content");
    let content = message.take("content");
    match role.as_str() {
        "system" | "developer" => {
            for part in read_content(&path, content)? {
                match part {
                    Part::Text(text) => ask.system.push(text),
                    _ => return Err(Untranslatable::new(path, "instructions are text")),
                }
            }
        }
        "user" => push(&mut ask.turns, Role::User, read_content(&path, content)?),
        "tool" => {
            let result = Part::Result {
                id: message.need_text("tool_call_id")?,
                parts: read_content(&path, content)?,
                failed: false,
                cache: None,
            };
            push(&mut ask.turns, Role::User, vec![result]);
        }
        "assistant" => {
            let mut parts = read_thinking(&mut message)?;
            parts.extend(read_content(&path, content)?);
            for mut call in message.list("tool_calls")? {
                call.ignore(&["type", "index"]);
                let id = call.need_text("id")?;
                let Some(mut function) = call.object("function")? else {
                    return call.refuse("function", "only functions can be translated");
                };
                parts.push(Part::Call {
                    id,
                    name: function.need_text("name")?,
                    arguments: function.text("arguments")?.unwrap_or_default(),
                    cache: None,
                });
                function.end()?;
                call.end()?;
            }
            push(&mut ask.turns, Role::Assistant, parts);
        }
        _ => return message.refuse("role", format!("`{role}` is not known")),
    }
    message.end()
}

/// What an assistant thought before, in either spelling; the one with signatures wins.
fn read_thinking(message: &mut Fields) -> Result<Vec<Part>> {
    let plain = message.text("reasoning_content")?;
    let other = message.text("reasoning")?;
    let mut parts = Vec::new();
    for mut detail in message.list("reasoning_details")? {
        match detail.need_text("type")?.as_str() {
            "reasoning.text" => parts.push(Part::Thinking {
                text: detail.text("text")?.unwrap_or_default(),
                signature: detail.text("signature")?,
            }),
            "reasoning.encrypted" => parts.push(Part::Redacted {
                data: detail.need_text("data")?,
            }),
            _ => {}
        }
    }
    if parts.is_empty() {
        parts.extend(plain.or(other).map(|text| Part::Thinking {
            text,
            signature: None,
        }));
    }
    Ok(parts)
}

fn read_content(path: &str, content: Option<Value>) -> Result<Vec<Part>> {
    let items = match content {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) if text.is_empty() => return Ok(Vec::new()),
        Some(Value::String(text)) => return Ok(vec![Part::text(text)]),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(Untranslatable::new(path, "expected a string or a list of parts")),
    };
    let parts = items.into_iter().enumerate();
    parts
        .map(|(at, item)| read_part(Fields::of(format!("{path}[{at}]"), item)?))
        .collect()
}

fn read_part(mut part: Fields) -> Result<Part> {
    let kind = part.need_text("type")?;
    let cache = read_cache(&mut part)?;
    let read = match kind.as_str() {
        "text" => Part::Text(TextPart {
            text: part.need_text("text")?,
            cache,
        }),
        "refusal" => Part::text(part.need_text("refusal")?),
        "image_url" => {
            let Some(mut image) = part.object("image_url")? else {
                return part.refuse("image_url", "it is missing");
            };
            image.ignore(&["detail"]);
            let source = source_of_url(image.need_text("url")?);
            image.end()?;
            Part::Image { source, cache }
        }
        "file" => {
            let Some(mut file) = part.object("file")? else {
                return part.refuse("file", "it is missing");
            };
            let name = file.text("filename")?;
            let Some(data) = file.text("file_data")? else {
                return file.refuse(
                    "file_id",
                    "files that lie with another provider cannot be sent along",
                );
            };
            file.end()?;
            Part::Document {
                source: source_of_url(data),
                name,
                cache,
            }
        }
        _ => return part.refuse("type", format!("`{kind}` cannot be translated")),
    };
    part.end()?;
    Ok(read)
}

/// The request for a provider that knows the model as `model`.
pub fn write_request(ask: &Ask, model: &str) -> Result<Value> {
    let mut messages = Vec::new();
    if !ask.system.is_empty() {
        let text: Vec<&str> = ask.system.iter().map(|part| part.text.as_str()).collect();
        messages.push(json!({"role": "system", "content": text.join("\n\n")}));
    }
    for (at, turn) in ask.turns.iter().enumerate() {
        match turn.role {
            Role::Assistant => messages.push(write_assistant(&turn.parts)),
            Role::User => write_user(at, &turn.parts, &mut messages)?,
        }
    }
    let tools: Vec<Value> = ask.tools.iter().map(write_tool).collect();
    let format = match &ask.format {
        Format::Text => None,
        Format::Json => Some(json!({"type": "json_object"})),
        Format::Schema(schema) => {
            let written = Built::default()
                .with("name", schema.name.clone().unwrap_or_else(|| "answer".into()))
                .maybe("description", schema.description.clone())
                .with("schema", schema.schema.clone())
                .maybe("strict", schema.strict);
            let format = Built::default()
                .with("type", "json_schema")
                .with("json_schema", written);
            Some(format.into())
        }
    };
    let choice = ask.tool_choice.as_ref().map(|choice| match choice {
        ToolChoice::Auto => json!("auto"),
        ToolChoice::None => json!("none"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Only(name) => json!({"type": "function", "function": {"name": name}}),
    });
    let effort = ask.thinking.and_then(|thinking| match thinking {
        Thinking::Off => Some("none"),
        Thinking::Adaptive => None,
        Thinking::Tokens(tokens) => Some(Effort::of_tokens(tokens).name()),
        Thinking::Effort(Effort::Max) => Some(Effort::Extra.name()),
        Thinking::Effort(effort) => Some(effort.name()),
    });
    let request = Built::default()
        .with("model", model)
        .with("messages", messages)
        // Reasoning models refuse the older name, and the others have come to know the newer one.
        .maybe("max_completion_tokens", ask.max_output)
        .maybe("temperature", ask.temperature.clone().map(Value::Number))
        .maybe("top_p", ask.top_p.clone().map(Value::Number))
        .maybe(
            "presence_penalty",
            ask.presence_penalty.clone().map(Value::Number),
        )
        .maybe(
            "frequency_penalty",
            ask.frequency_penalty.clone().map(Value::Number),
        )
        .maybe("seed", ask.seed.clone().map(Value::Number))
        .maybe("stop", (!ask.stop.is_empty()).then(|| ask.stop.clone()))
        .maybe("tools", (!tools.is_empty()).then_some(tools))
        .maybe("tool_choice", choice)
        .maybe(
            "parallel_tool_calls",
            ask.parallel_tools.filter(|_| !ask.tools.is_empty()),
        )
        .maybe("response_format", format)
        .maybe("reasoning_effort", effort)
        .maybe("user", ask.user.clone());
    let request = if ask.stream {
        request
            .with("stream", true)
            .with("stream_options", json!({"include_usage": true}))
    } else {
        request
    };
    Ok(request.into())
}

fn write_tool(tool: &Tool) -> Value {
    let function = Built::default()
        .with("name", tool.name.clone())
        .maybe("description", tool.description.clone())
        .with("parameters", tool.schema.clone())
        .maybe("strict", tool.strict);
    Built::default()
        .with("type", "function")
        .with("function", function)
        .into()
}

/// Thinking is left out: providers of this wire keep their own.
fn write_assistant(parts: &[Part]) -> Value {
    let text = texts(parts);
    let calls: Vec<Value> = parts.iter().filter_map(write_call).collect();
    Built::default()
        .with("role", "assistant")
        .with(
            "content",
            if text.is_empty() && !calls.is_empty() {
                Value::Null
            } else {
                text.into()
            },
        )
        .maybe("tool_calls", (!calls.is_empty()).then_some(calls))
        .into()
}

fn write_call(part: &Part) -> Option<Value> {
    match part {
        Part::Call {
            id, name, arguments, ..
        } => Some(json!({
            "id": id, "type": "function", "function": {"name": name, "arguments": whole(arguments)},
        })),
        _ => None,
    }
}

/// A call without arguments has an empty object of them.
pub(crate) fn whole(arguments: &str) -> &str {
    if arguments.trim().is_empty() {
        "{}"
    } else {
        arguments
    }
}

/// Results of tools are messages of their own, before what else the user says.
fn write_user(at: usize, parts: &[Part], messages: &mut Vec<Value>) -> Result<()> {
    let mut said = Vec::new();
    for part in parts {
        match part {
            Part::Result {
                id, parts, failed, ..
            } => {
                let mut text = texts(parts);
                if *failed {
                    text = format!("Error: {text}");
                }
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
                // Images in results have no place on this wire; the user shows them.
                said.extend(parts.iter().filter_map(write_image));
            }
            Part::Text(part) => said.push(json!({"type": "text", "text": part.text})),
            Part::Image { .. } => said.extend(write_image(part)),
            Part::Document {
                source: source @ Source::Base64 { .. },
                name,
                ..
            } => said.push(json!({
                "type": "file",
                "file": {"filename": name.as_deref().unwrap_or("file"), "file_data": url_of_source(source)},
            })),
            Part::Document { .. } => {
                return Err(Untranslatable::new(
                    format!("messages[{at}]"),
                    "a document by its address has no place on the provider's wire: send its content",
                ));
            }
            Part::Thinking { .. } | Part::Redacted { .. } | Part::Call { .. } => {
                return Err(Untranslatable::new(
                    format!("messages[{at}]"),
                    "only an assistant thinks and calls tools",
                ));
            }
        }
    }
    let content = match &mut said[..] {
        [] => return Ok(()),
        [only] if only["type"] == "text" => only["text"].take(),
        _ => said.into(),
    };
    let message = Built::default().with("role", "user").with("content", content);
    messages.push(message.into());
    Ok(())
}

fn write_image(part: &Part) -> Option<Value> {
    match part {
        Part::Image { source, .. } => {
            Some(json!({"type": "image_url", "image_url": {"url": url_of_source(source)}}))
        }
        _ => None,
    }
}

pub fn read_answer(body: &[u8]) -> Result<Answer> {
    let value: Value =
        serde_json::from_slice(body).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
    let Some(choice) = value["choices"].get(0) else {
        return Err(Untranslatable::new(
            "answer.choices",
            "the provider gave no answer",
        ));
    };
    let message = &choice["message"];
    let mut parts = Vec::new();
    let thought = message["reasoning_content"]
        .as_str()
        .or(message["reasoning"].as_str());
    if let Some(text) = thought.filter(|text| !text.is_empty()) {
        parts.push(Part::Thinking {
            text: text.to_owned(),
            signature: None,
        });
    }
    let said = message["content"].as_str().or(message["refusal"].as_str());
    if let Some(text) = said.filter(|text| !text.is_empty()) {
        parts.push(Part::text(text));
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        parts.push(Part::Call {
            id: text(&call["id"]),
            name: text(&call["function"]["name"]),
            arguments: text(&call["function"]["arguments"]),
            cache: None,
        });
    }
    Ok(Answer {
        parts,
        finish: read_finish(choice["finish_reason"].as_str().unwrap_or("stop")),
        usage: usage::read_chat(&value["usage"]),
    })
}

pub(crate) fn read_finish(name: &str) -> Finish {
    match name {
        "stop" => Finish::Stop,
        "length" => Finish::Length,
        "tool_calls" | "function_call" => Finish::Tools,
        "content_filter" => Finish::Filter,
        other => Finish::Other(other.to_owned()),
    }
}

pub(crate) fn write_finish(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop | Finish::StopText(_) | Finish::Other(_) => "stop",
        Finish::Length => "length",
        Finish::Tools => "tool_calls",
        Finish::Filter => "content_filter",
    }
}

pub fn write_answer(answer: &Answer, stamp: &Stamp) -> Value {
    let text = texts(&answer.parts);
    let calls: Vec<Value> = answer.parts.iter().filter_map(write_call).collect();
    let thought: String = answer
        .parts
        .iter()
        .filter_map(|part| match part {
            Part::Thinking { text, .. } => Some(text.as_str()),
            _ => None,
        })
        .collect();
    let details: Vec<Value> = answer.parts.iter().filter_map(write_detail).collect();
    let message = Built::default()
        .with("role", "assistant")
        .with(
            "content",
            if text.is_empty() && !calls.is_empty() {
                Value::Null
            } else {
                text.into()
            },
        )
        .with("refusal", Value::Null)
        .maybe("reasoning_content", (!thought.is_empty()).then_some(thought))
        .maybe("reasoning_details", (!details.is_empty()).then_some(details))
        .maybe("tool_calls", (!calls.is_empty()).then_some(calls));
    let choice = Built::default()
        .with("index", 0)
        .with("message", message)
        .with("logprobs", Value::Null)
        .with("finish_reason", write_finish(&answer.finish));
    Built::default()
        .with("id", format!("chatcmpl-{}", stamp.id))
        .with("object", "chat.completion")
        .with("created", stamp.created)
        .with("model", stamp.model.clone())
        .with("choices", vec![Value::from(choice)])
        .with("usage", usage::write_chat(&answer.usage.unwrap_or_default()))
        .into()
}

fn write_detail(part: &Part) -> Option<Value> {
    match part {
        Part::Thinking {
            text,
            signature: Some(signature),
        } => Some(json!({"type": "reasoning.text", "text": text, "signature": signature})),
        Part::Redacted { data } => Some(json!({"type": "reasoning.encrypted", "data": data})),
        _ => None,
    }
}

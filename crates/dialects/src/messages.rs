//! Anthropic's Messages.

mod stream;

use serde_json::{Value, json};

use crate::chat::read_cache;
use crate::json::{Built, Fields, arguments, only};
use crate::talk::push;
use crate::{
    Answer, Ask, Cache, Effort, Finish, Format, Part, Result, Role, Schema, Source, Stamp, TextPart,
    Thinking, Tool, ToolChoice, Untranslatable, usage,
};

pub use stream::{Reader, Writer};

/// Say nothing about what is asked of the model, or are for the gateway. Editing of the context and containers are the
/// provider's own; what needs them says so in its tools.
const IGNORED: [&str; 7] = [
    "model",
    "metadata",
    "service_tier",
    "providerOptions",
    "context_management",
    "container",
    "inference_geo",
];
/// What a provider of this wire gets that insists on a limit, where nobody gave one.
pub const DEFAULT_MAX_OUTPUT: u64 = 4096;
const LEAST_THINKING: u64 = 1024;

pub fn read_request(body: &[u8]) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    let user = match fields.object("metadata")? {
        Some(mut metadata) => metadata.text("user_id")?,
        None => None,
    };
    fields.ignore(&IGNORED);
    let mut ask = Ask {
        max_output: fields.count("max_tokens")?,
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        top_k: fields.count("top_k")?,
        stream: fields.flag("stream")?.unwrap_or(false),
        user,
        ..Ask::default()
    };
    for stop in fields.values("stop_sequences")? {
        ask.stop.extend(stop.as_str().map(str::to_owned));
    }
    // Caching of the whole request: the last part carries it.
    let cache_all = read_cache(&mut fields)?;
    ask.system = match fields.take("system") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![TextPart { text, cache: None }],
        Some(Value::Array(parts)) => {
            let parts = read_parts("system", parts)?.into_iter();
            let texts = parts.map(|part| match part {
                Part::Text(text) => Ok(text),
                _ => Err(Untranslatable::new("system", "instructions are text")),
            });
            texts.collect::<Result<_>>()?
        }
        Some(_) => return fields.refuse("system", "expected a string or a list of parts"),
    };
    if let Some(thinking) = fields.object("thinking")? {
        ask.thinking = Some(read_thinking(thinking)?);
    }
    if let Some(mut config) = fields.object("output_config")? {
        if let Some(effort) = config.text("effort")? {
            let Some(effort) = Effort::read(&effort) else {
                return config.refuse("effort", format!("`{effort}` is not known"));
            };
            if !matches!(ask.thinking, Some(Thinking::Off | Thinking::Tokens(_))) {
                ask.thinking = Some(Thinking::Effort(effort));
            }
        }
        if let Some(mut format) = config.object("format")? {
            format.ignore(&["type"]);
            let schema = format.take("schema").unwrap_or_else(|| json!({}));
            ask.format = Format::Schema(Schema {
                name: None,
                description: None,
                schema,
                strict: Some(true),
            });
            format.end()?;
        }
        config.end()?;
    }
    for tool in fields.list("tools")? {
        ask.tools.push(read_tool(tool)?);
    }
    if let Some(mut choice) = fields.object("tool_choice")? {
        let kind = choice.need_text("type")?;
        ask.parallel_tools = choice
            .flag("disable_parallel_tool_use")?
            .map(|disabled| !disabled);
        ask.tool_choice = Some(match kind.as_str() {
            "auto" => ToolChoice::Auto,
            "any" => ToolChoice::Required,
            "none" => ToolChoice::None,
            "tool" => ToolChoice::Only(choice.need_text("name")?),
            _ => return choice.refuse("type", format!("`{kind}` is not known")),
        });
        choice.end()?;
    }
    for mut message in fields.list("messages")? {
        let role = message.need_text("role")?;
        let path = message.path("content");
        let parts = match message.take("content") {
            None => Vec::new(),
            Some(Value::String(text)) => vec![Part::text(text)],
            Some(Value::Array(parts)) => read_parts(&path, parts)?,
            Some(_) => return message.refuse("content", "expected a string or a list of parts"),
        };
        match role.as_str() {
            "user" => push(&mut ask.turns, Role::User, parts),
            "assistant" => push(&mut ask.turns, Role::Assistant, parts),
            "system" => {
                for part in parts {
                    if let Part::Text(text) = part {
                        ask.system.push(text);
                    }
                }
            }
            _ => return message.refuse("role", format!("`{role}` is not known")),
        }
        message.end()?;
    }
    if let (Some(cache), Some(last)) = (
        cache_all,
        ask.turns.last_mut().and_then(|turn| turn.parts.last_mut()),
    ) {
        set_cache(last, cache);
    }
    fields.end()?;
    if ask.turns.is_empty() {
        return Err(Untranslatable::new("messages", "there is no message"));
    }
    Ok(ask)
}

fn read_thinking(mut thinking: Fields) -> Result<Thinking> {
    let kind = thinking.need_text("type")?;
    thinking.ignore(&["display"]);
    let read = match kind.as_str() {
        "disabled" => Thinking::Off,
        "adaptive" => Thinking::Adaptive,
        "enabled" => Thinking::Tokens(
            thinking
                .count("budget_tokens")?
                .unwrap_or(Effort::Medium.tokens()),
        ),
        _ => return thinking.refuse("type", format!("`{kind}` is not known")),
    };
    thinking.end()?;
    Ok(read)
}

fn set_cache(part: &mut Part, set: Cache) {
    match part {
        Part::Text(TextPart { cache, .. })
        | Part::Image { cache, .. }
        | Part::Document { cache, .. }
        | Part::Call { cache, .. }
        | Part::Result { cache, .. } => *cache = Some(set),
        Part::Thinking { .. } | Part::Redacted { .. } => {}
    }
}

fn read_tool(mut tool: Fields) -> Result<Tool> {
    let kind = tool.text("type")?.unwrap_or_else(|| "custom".into());
    if kind != "custom" {
        return tool.refuse(
            "type",
            format!("`{kind}` is a tool of Anthropic's own and cannot be translated"),
        );
    }
    tool.ignore(&[
        "eager_input_streaming",
        "input_examples",
        "allowed_callers",
        "defer_loading",
    ]);
    let read = Tool {
        name: tool.need_text("name")?,
        description: tool.text("description")?,
        schema: tool
            .take("input_schema")
            .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        strict: tool.flag("strict")?,
        cache: read_cache(&mut tool)?,
    };
    tool.end()?;
    Ok(read)
}

fn read_parts(path: &str, parts: Vec<Value>) -> Result<Vec<Part>> {
    let parts = parts.into_iter().enumerate();
    parts
        .map(|(at, part)| read_part(Fields::of(format!("{path}[{at}]"), part)?))
        .collect()
}

fn read_part(mut part: Fields) -> Result<Part> {
    let kind = part.need_text("type")?;
    let cache = read_cache(&mut part)?;
    let read = match kind.as_str() {
        "text" => {
            part.ignore(&["citations"]);
            Part::Text(TextPart {
                text: part.need_text("text")?,
                cache,
            })
        }
        "image" => Part::Image {
            source: read_source(&mut part)?,
            cache,
        },
        "document" => {
            part.ignore(&["citations", "context"]);
            let name = part.text("title")?;
            Part::Document {
                source: read_source(&mut part)?,
                name,
                cache,
            }
        }
        "thinking" => Part::Thinking {
            text: part.text("thinking")?.unwrap_or_default(),
            signature: part.text("signature")?,
        },
        "redacted_thinking" => Part::Redacted {
            data: part.need_text("data")?,
        },
        "tool_use" => {
            part.ignore(&["caller"]);
            Part::Call {
                id: part.need_text("id")?,
                name: part.need_text("name")?,
                arguments: part.take("input").unwrap_or_else(|| json!({})).to_string(),
                cache,
            }
        }
        "tool_result" => {
            let path = part.path("content");
            let parts = match part.take("content") {
                None => Vec::new(),
                Some(Value::String(text)) => vec![Part::text(text)],
                Some(Value::Array(parts)) => read_parts(&path, parts)?,
                Some(_) => return part.refuse("content", "expected a string or a list of parts"),
            };
            let failed = part.flag("is_error")?.unwrap_or(false);
            Part::Result {
                id: part.need_text("tool_use_id")?,
                parts,
                failed,
                cache,
            }
        }
        _ => return part.refuse("type", format!("`{kind}` cannot be translated")),
    };
    part.end()?;
    Ok(read)
}

fn read_source(part: &mut Fields) -> Result<Source> {
    let Some(mut source) = part.object("source")? else {
        return part.refuse("source", "it is missing");
    };
    let kind = source.need_text("type")?;
    let read = match kind.as_str() {
        "base64" => Source::Base64 {
            media: source.need_text("media_type")?,
            data: source.need_text("data")?,
        },
        "url" => Source::Url(source.need_text("url")?),
        _ => return source.refuse("type", format!("`{kind}` cannot be translated")),
    };
    source.end()?;
    Ok(read)
}

/// The request for a provider that knows the model as `model`, whose answers have at most `most_output` tokens where that
/// is known.
pub fn write_request(ask: &Ask, model: &str, most_output: Option<u64>) -> Result<Value> {
    let max = ask.max_output.or(most_output).unwrap_or(DEFAULT_MAX_OUTPUT);
    let mut messages = Vec::<Value>::new();
    for turn in &ask.turns {
        let role = match turn.role {
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        // Thinking without a signature would be refused: it came from another author.
        let content: Vec<Value> = turn.parts.iter().filter_map(write_part).collect();
        if !content.is_empty() {
            let message = Built::default().with("role", role).with("content", content);
            messages.push(message.into());
        }
    }
    for (name, given) in [
        ("presence_penalty", &ask.presence_penalty),
        ("frequency_penalty", &ask.frequency_penalty),
    ] {
        if given.as_ref().is_some_and(|number| number.as_f64() != Some(0.0)) {
            return Err(Untranslatable::new(
                name,
                "the model's provider knows no penalties",
            ));
        }
    }
    if ask.format == Format::Json {
        return Err(Untranslatable::new(
            "response_format",
            "the model's provider gives JSON by a schema only: use json_schema",
        ));
    }
    let thinking = ask.thinking.and_then(|thinking| write_thinking(thinking, max));
    let thinks = thinking
        .as_ref()
        .is_some_and(|thinking| thinking["type"] != "disabled");
    let tools: Vec<Value> = ask.tools.iter().map(write_tool).collect();
    let output = match &ask.format {
        Format::Schema(schema) => {
            let format = Built::default()
                .with("type", "json_schema")
                .with("schema", closed(schema.schema.clone()));
            Some(only("format", format))
        }
        Format::Text | Format::Json => None,
    };
    let system: Vec<Value> = ask
        .system
        .iter()
        .map(|part| write_text(&part.text, part.cache))
        .collect();
    Ok(Built::default()
        .with("model", model)
        .with("max_tokens", max)
        .with("messages", messages)
        .maybe("system", (!system.is_empty()).then_some(system))
        // A thinking model has its own temperature.
        .maybe(
            "temperature",
            ask.temperature.clone().filter(|_| !thinks).map(Value::Number),
        )
        .maybe("top_p", ask.top_p.clone().filter(|_| !thinks).map(Value::Number))
        .maybe("top_k", ask.top_k.filter(|_| !thinks))
        .maybe("stop_sequences", (!ask.stop.is_empty()).then(|| ask.stop.clone()))
        .maybe("thinking", thinking)
        .maybe("tools", (!tools.is_empty()).then_some(tools))
        .maybe("tool_choice", write_choice(ask))
        .maybe("output_config", output)
        .maybe("metadata", ask.user.as_ref().map(|user| json!({"user_id": user})))
        .maybe("stream", ask.stream.then_some(true))
        .into())
}

pub(crate) fn write_thinking(thinking: Thinking, max: u64) -> Option<Value> {
    let tokens = match thinking {
        Thinking::Off => return Some(json!({"type": "disabled"})),
        Thinking::Adaptive => return Some(json!({"type": "adaptive"})),
        Thinking::Tokens(tokens) => tokens,
        Thinking::Effort(effort) => effort.tokens(),
    };
    // It must leave room for the answer.
    let tokens = tokens.min(max.saturating_sub(1)).max(LEAST_THINKING);
    (tokens < max).then(|| json!({"type": "enabled", "budget_tokens": tokens}))
}

fn write_choice(ask: &Ask) -> Option<Value> {
    if ask.tools.is_empty() {
        return None;
    }
    let serial = ask.parallel_tools == Some(false);
    let choice = match (&ask.tool_choice, serial) {
        (None, false) => return None,
        (None | Some(ToolChoice::Auto), _) => Built::default().with("type", "auto"),
        (Some(ToolChoice::None), _) => return Some(json!({"type": "none"})),
        (Some(ToolChoice::Required), _) => Built::default().with("type", "any"),
        (Some(ToolChoice::Only(name)), _) => Built::default().with("type", "tool").with("name", name.clone()),
    };
    Some(
        choice
            .maybe("disable_parallel_tool_use", serial.then_some(true))
            .into(),
    )
}

/// Objects of a schema must say that they have no other fields.
pub(crate) fn closed(mut schema: Value) -> Value {
    fn close(schema: &mut Value) {
        match schema {
            Value::Object(fields) => {
                if fields.get("type").is_some_and(|kind| kind == "object") {
                    fields.entry("additionalProperties").or_insert(Value::Bool(false));
                }
                fields.values_mut().for_each(close);
            }
            Value::Array(items) => items.iter_mut().for_each(close),
            _ => {}
        }
    }
    close(&mut schema);
    schema
}

fn write_cache(cache: Option<Cache>) -> Option<Value> {
    cache.map(|cache| match cache {
        Cache::Short => json!({"type": "ephemeral"}),
        Cache::Hour => json!({"type": "ephemeral", "ttl": "1h"}),
    })
}

fn write_tool(tool: &Tool) -> Value {
    Built::default()
        .with("name", tool.name.clone())
        .maybe("description", tool.description.clone())
        .with("input_schema", tool.schema.clone())
        .maybe("cache_control", write_cache(tool.cache))
        .into()
}

fn write_text(text: &str, cache: Option<Cache>) -> Value {
    Built::default()
        .with("type", "text")
        .with("text", text)
        .maybe("cache_control", write_cache(cache))
        .into()
}

fn write_part(part: &Part) -> Option<Value> {
    let built = match part {
        Part::Text(part) if part.text.is_empty() => return None,
        Part::Text(part) => return Some(write_text(&part.text, part.cache)),
        Part::Image { source, cache } => Built::default()
            .with("type", "image")
            .with("source", write_source(source))
            .maybe("cache_control", write_cache(*cache)),
        Part::Document { source, name, cache } => Built::default()
            .with("type", "document")
            .with("source", write_source(source))
            .maybe("title", name.clone())
            .maybe("cache_control", write_cache(*cache)),
        Part::Thinking { text, signature } => Built::default()
            .with("type", "thinking")
            .with("thinking", text.clone())
            .with("signature", signature.clone()?),
        Part::Redacted { data } => Built::default()
            .with("type", "redacted_thinking")
            .with("data", data.clone()),
        Part::Call {
            id,
            name,
            arguments: text,
            cache,
        } => Built::default()
            .with("type", "tool_use")
            .with("id", id.clone())
            .with("name", name.clone())
            .with("input", arguments(text))
            .maybe("cache_control", write_cache(*cache)),
        Part::Result {
            id,
            parts,
            failed,
            cache,
        } => Built::default()
            .with("type", "tool_result")
            .with("tool_use_id", id.clone())
            .with("content", parts.iter().filter_map(write_part).collect::<Vec<_>>())
            .maybe("is_error", failed.then_some(true))
            .maybe("cache_control", write_cache(*cache)),
    };
    Some(built.into())
}

fn write_source(source: &Source) -> Value {
    match source {
        Source::Url(url) => json!({"type": "url", "url": url}),
        Source::Base64 { media, data } => json!({"type": "base64", "media_type": media, "data": data}),
    }
}

pub fn read_answer(body: &[u8]) -> Result<Answer> {
    let mut value: Value =
        serde_json::from_slice(body).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
    let Value::Array(content) = value["content"].take() else {
        return Err(Untranslatable::new(
            "answer.content",
            "the provider gave no answer",
        ));
    };
    Ok(Answer {
        // What the provider's own tools did is not for those who asked on another wire.
        parts: content.iter().filter_map(read_answer_part).collect(),
        finish: read_finish(&value["stop_reason"], &value["stop_sequence"]),
        usage: usage::read_messages(&value["usage"], None),
    })
}

fn read_answer_part(part: &Value) -> Option<Part> {
    let text = |name: &str| part[name].as_str().unwrap_or_default().to_owned();
    Some(match part["type"].as_str()? {
        "text" => Part::text(text("text")),
        "thinking" => Part::Thinking {
            text: text("thinking"),
            signature: part["signature"].as_str().map(str::to_owned),
        },
        "redacted_thinking" => Part::Redacted { data: text("data") },
        "tool_use" => Part::Call {
            id: text("id"),
            name: text("name"),
            arguments: part["input"].to_string(),
            cache: None,
        },
        _ => return None,
    })
}

pub(crate) fn read_finish(reason: &Value, stop: &Value) -> Finish {
    match reason.as_str() {
        Some("end_turn") | None => Finish::Stop,
        Some("stop_sequence") => Finish::StopText(stop.as_str().unwrap_or_default().to_owned()),
        Some("max_tokens" | "model_context_window_exceeded") => Finish::Length,
        Some("tool_use") => Finish::Tools,
        Some("refusal") => Finish::Filter,
        Some(other) => Finish::Other(other.to_owned()),
    }
}

pub(crate) fn write_finish(finish: &Finish) -> (&'static str, Value) {
    match finish {
        Finish::Stop | Finish::Other(_) => ("end_turn", Value::Null),
        Finish::StopText(text) => ("stop_sequence", text.clone().into()),
        Finish::Length => ("max_tokens", Value::Null),
        Finish::Tools => ("tool_use", Value::Null),
        Finish::Filter => ("refusal", Value::Null),
    }
}

pub fn write_answer(answer: &Answer, stamp: &Stamp) -> Value {
    let content: Vec<Value> = answer.parts.iter().filter_map(write_answer_part).collect();
    let (reason, stop) = write_finish(&answer.finish);
    Built::default()
        .with("id", format!("msg_{}", stamp.id))
        .with("type", "message")
        .with("role", "assistant")
        .with("model", stamp.model.clone())
        .with("content", content)
        .with("stop_reason", reason)
        .with("stop_sequence", stop)
        .with("usage", usage::write_messages(&answer.usage.unwrap_or_default()))
        .into()
}

fn write_answer_part(part: &Part) -> Option<Value> {
    match part {
        // Whoever asked may read it, and need not be able to send it back.
        Part::Thinking { text, signature } => Some(json!({
            "type": "thinking", "thinking": text, "signature": signature.as_deref().unwrap_or_default(),
        })),
        part => write_part(part),
    }
}

//! The AI SDK's own gateway protocol (`@ai-sdk/gateway`): a call's options as JSON, an answer's content or its stream parts.
//!
//! Versions 3 and 4 differ in how files are written; both are read. What the SDK hands to a provider in `providerOptions` is
//! read as far as other wires have a word for it (cache control and signatures of Anthropic's) and else left out: those
//! options are hints by their own definition.

mod stream;

use serde_json::{Value, json};

use crate::chat::{read_effort, whole};
use crate::json::{Built, Fields};
use crate::talk::{push, source_of_url};
use crate::{
    Answer, Ask, Cache, Finish, Format, Part, Result, Role, Schema, Source, Stamp, TextPart, Tool,
    ToolChoice, Untranslatable, usage,
};

pub use stream::Writer;

const IGNORED: [&str; 4] = ["includeRawChunks", "headers", "abortSignal", "providerOptions"];

/// Whether it is to be streamed stands in a header, so the caller says it.
pub fn read_request(body: &[u8], stream: bool) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    fields.ignore(&IGNORED);
    let mut ask = Ask {
        max_output: fields.count("maxOutputTokens")?,
        temperature: fields.number("temperature")?,
        top_p: fields.number("topP")?,
        top_k: fields.count("topK")?,
        presence_penalty: fields.number("presencePenalty")?,
        frequency_penalty: fields.number("frequencyPenalty")?,
        seed: fields.number("seed")?,
        stream,
        ..Ask::default()
    };
    for stop in fields.values("stopSequences")? {
        ask.stop.extend(stop.as_str().map(str::to_owned));
    }
    match fields.text("reasoning")?.as_deref() {
        None | Some("provider-default") => {}
        Some(effort) => {
            let Some(thinking) = read_effort(effort) else {
                return fields.refuse("reasoning", format!("`{effort}` is not known"));
            };
            ask.thinking = Some(thinking);
        }
    }
    if let Some(mut format) = fields.object("responseFormat")? {
        ask.format = match (format.need_text("type")?.as_str(), format.take("schema")) {
            ("json", Some(schema)) => Format::Schema(Schema {
                name: format.text("name")?,
                description: format.text("description")?,
                schema,
                strict: None,
            }),
            ("json", None) => Format::Json,
            _ => Format::Text,
        };
    }
    for tool in fields.list("tools")? {
        ask.tools.push(read_tool(tool)?);
    }
    if let Some(mut choice) = fields.object("toolChoice")? {
        let kind = choice.need_text("type")?;
        ask.tool_choice = Some(match kind.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            "tool" => ToolChoice::Only(choice.need_text("toolName")?),
            _ => return choice.refuse("type", format!("`{kind}` is not known")),
        });
    }
    for message in fields.list("prompt")? {
        read_message(message, &mut ask)?;
    }
    fields.end()?;
    if ask.turns.is_empty() {
        return Err(Untranslatable::new("prompt", "there is no message of the user"));
    }
    Ok(ask)
}

fn read_tool(mut tool: Fields) -> Result<Tool> {
    let kind = tool.need_text("type")?;
    if kind != "function" {
        return tool.refuse("type", format!("only functions can be translated, not `{kind}`"));
    }
    let cache = anthropic(&mut tool).cache;
    Ok(Tool {
        name: tool.need_text("name")?,
        description: tool.text("description")?,
        schema: tool
            .take("inputSchema")
            .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        strict: tool.flag("strict")?,
        cache,
    })
}

/// What stands for Anthropic in the options of a message or a part.
#[derive(Debug, Default)]
struct Hints {
    cache: Option<Cache>,
    signature: Option<String>,
    redacted: Option<String>,
}

fn anthropic(fields: &mut Fields) -> Hints {
    let options = fields.take("providerOptions").unwrap_or_default();
    let own = &options["anthropic"];
    let control = own.get("cacheControl").or(own.get("cache_control"));
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let signed = ["google", "vertex", "gateway"]
        .iter()
        .find_map(|name| text(&options[name]["thoughtSignature"]));
    Hints {
        cache: control.map(|control| {
            if control["ttl"] == "1h" {
                Cache::Hour
            } else {
                Cache::Short
            }
        }),
        signature: text(&own["signature"]).or(signed),
        redacted: text(&own["redactedData"]),
    }
}

fn read_message(mut message: Fields, ask: &mut Ask) -> Result<()> {
    let role = message.need_text("role")?;
    let hints = anthropic(&mut message);
    if role == "system" {
        ask.system.push(TextPart {
            text: message.need_text("content")?,
            cache: hints.cache,
        });
        return message.end();
    }
    let mut parts = Vec::new();
    for part in message.list("content")? {
        parts.extend(read_part(part)?);
    }
    if let (Some(set), Some(last)) = (hints.cache, parts.last_mut()) {
        match last {
            Part::Text(TextPart { cache, .. })
            | Part::Image { cache, .. }
            | Part::Document { cache, .. }
            | Part::Call { cache, .. }
            | Part::Result { cache, .. } => *cache = cache.or(Some(set)),
            Part::Thinking { .. } | Part::Redacted { .. } => {}
        }
    }
    match role.as_str() {
        "user" | "tool" => push(&mut ask.turns, Role::User, parts),
        "assistant" => push(&mut ask.turns, Role::Assistant, parts),
        _ => return message.refuse("role", format!("`{role}` is not known")),
    }
    message.end()
}

fn read_part(mut part: Fields) -> Result<Option<Part>> {
    let kind = part.need_text("type")?;
    let hints = anthropic(&mut part);
    let read = match kind.as_str() {
        "text" => Part::Text(TextPart {
            text: part.need_text("text")?,
            cache: hints.cache,
        }),
        "reasoning" => match hints.redacted {
            Some(data) => Part::Redacted { data },
            None => Part::Thinking {
                text: part.text("text")?.unwrap_or_default(),
                signature: hints.signature,
            },
        },
        "file" => {
            let media = part.text("mediaType")?.unwrap_or_default();
            let source = read_data(&mut part, &media)?;
            let name = part.text("filename")?;
            if media.starts_with("image") {
                Part::Image {
                    source,
                    cache: hints.cache,
                }
            } else {
                Part::Document {
                    source,
                    name,
                    cache: hints.cache,
                }
            }
        }
        "tool-call" => Part::Call {
            id: part.need_text("toolCallId")?,
            name: part.need_text("toolName")?,
            arguments: match part.take("input") {
                Some(Value::String(text)) => text,
                Some(input) => input.to_string(),
                None => String::new(),
            },
            cache: hints.cache,
        },
        "tool-result" => {
            let id = part.need_text("toolCallId")?;
            let Some(output) = part.object("output")? else {
                return part.refuse("output", "it is missing");
            };
            let (parts, failed) = read_output(output)?;
            Part::Result {
                id,
                parts,
                failed,
                cache: hints.cache,
            }
        }
        // A person said yes or no; the result, which follows, says what came of it.
        "tool-approval-response" => return Ok(None),
        _ => return part.refuse("type", format!("`{kind}` cannot be translated")),
    };
    // The name of the tool stands at its call, too.
    part.ignore(&["toolName", "providerExecuted"]);
    part.end()?;
    Ok(Some(read))
}

fn read_data(part: &mut Fields, media: &str) -> Result<Source> {
    let text = |text: String| {
        let is_address = ["http://", "https://", "data:"]
            .iter()
            .any(|scheme| text.starts_with(scheme));
        if is_address {
            source_of_url(text)
        } else {
            // `image/*` is how the SDK says that it does not know; providers look for themselves.
            let media = if media == "image/*" { "image/png" } else { media };
            Source::Base64 {
                media: media.to_owned(),
                data: text,
            }
        }
    };
    match part.take("data") {
        Some(Value::String(data)) => Ok(text(data)),
        Some(data @ Value::Object(_)) => {
            let mut data = Fields::of(part.path("data"), data)?;
            data.ignore(&["type"]);
            let held = match data.text("data")? {
                Some(held) => Some(held),
                None => data.text("url")?,
            };
            data.end()?;
            match held {
                Some(held) => Ok(text(held)),
                None => part.refuse("data", "only data and addresses can be translated"),
            }
        }
        _ => part.refuse("data", "it is missing"),
    }
}

fn read_output(mut output: Fields) -> Result<(Vec<Part>, bool)> {
    let kind = output.need_text("type")?;
    let failed = kind.starts_with("error");
    output.ignore(&["providerOptions"]);
    let read = match kind.as_str() {
        "text" | "error-text" => (vec![Part::text(output.need_text("value")?)], failed),
        "json" | "error-json" => (
            vec![Part::text(
                output.take("value").unwrap_or(Value::Null).to_string(),
            )],
            failed,
        ),
        "execution-denied" => {
            let why = output
                .text("reason")?
                .unwrap_or_else(|| "it was not allowed".into());
            (vec![Part::text(why)], true)
        }
        "content" => {
            let mut parts = Vec::new();
            for mut part in output.list("value")? {
                let kind = part.need_text("type")?;
                let media = part.text("mediaType")?.unwrap_or_else(|| "image/png".into());
                part.ignore(&["providerOptions", "filename"]);
                match kind.as_str() {
                    "text" => parts.push(Part::text(part.need_text("text")?)),
                    "file" | "media" | "image-data" | "image-url" | "file-data" | "file-url" => {
                        let source = read_data(&mut part, &media)?;
                        parts.push(Part::Image { source, cache: None });
                    }
                    _ => return part.refuse("type", format!("`{kind}` cannot be translated")),
                }
                part.end()?;
            }
            (parts, false)
        }
        _ => return output.refuse("type", format!("`{kind}` is not known")),
    };
    output.end()?;
    Ok(read)
}

/// The answer; `gateway` is what this gateway tells about the call.
pub fn write_answer(answer: &Answer, stamp: &Stamp, timestamp: &str, gateway: &Value) -> Value {
    let content: Vec<Value> = answer.parts.iter().filter_map(write_part).collect();
    let response = json!({"id": stamp.id, "modelId": stamp.model, "timestamp": timestamp});
    Built::default()
        .with("content", content)
        .with("finishReason", write_finish(&answer.finish))
        .with("usage", usage::write_ai_sdk(&answer.usage.unwrap_or_default()))
        .with("warnings", Vec::<Value>::new())
        .with("providerMetadata", json!({"gateway": gateway}))
        .with("response", response)
        .into()
}

fn write_part(part: &Part) -> Option<Value> {
    Some(match part {
        Part::Text(part) => json!({"type": "text", "text": part.text}),
        Part::Thinking { text, signature } => Built::default()
            .with("type", "reasoning")
            .with("text", text.clone())
            .maybe("providerMetadata", signature.as_ref().map(signed))
            .into(),
        Part::Redacted { data } => json!({
            "type": "reasoning", "text": "", "providerMetadata": {"anthropic": {"redactedData": data}},
        }),
        Part::Call {
            id, name, arguments, ..
        } => json!({
            "type": "tool-call", "toolCallId": id, "toolName": name, "input": whole(arguments),
        }),
        Part::Image { .. } | Part::Document { .. } | Part::Result { .. } => return None,
    })
}

pub(crate) fn signed(signature: &String) -> Value {
    json!({"anthropic": {"signature": signature}})
}

pub(crate) fn write_finish(finish: &Finish) -> Value {
    let (unified, raw) = match finish {
        Finish::Stop => ("stop", "stop"),
        Finish::StopText(_) => ("stop", "stop_sequence"),
        Finish::Length => ("length", "length"),
        Finish::Tools => ("tool-calls", "tool_calls"),
        Finish::Filter => ("content-filter", "content_filter"),
        Finish::Other(raw) => ("other", raw.as_str()),
    };
    json!({"unified": unified, "raw": raw})
}

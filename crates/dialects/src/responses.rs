//! OpenAI's Responses, as far as it is a conversation: items in, items out. What OpenAI keeps on its side (earlier responses,
//! stored prompts, its own tools) is theirs and is refused by name.

mod stream;

use serde_json::{Value, json};

use crate::chat::{read_effort, whole};
use crate::json::{Built, Fields};
use crate::talk::{push, source_of_url};
use crate::{
    Answer, Ask, Finish, Format, Part, Result, Role, Schema, Stamp, TextPart, Tool, ToolChoice,
    Untranslatable, usage,
};

pub use stream::Writer;

/// Say nothing about what is asked of the model, or are for the gateway.
const IGNORED: [&str; 13] = [
    "model",
    "store",
    "metadata",
    "include",
    "service_tier",
    "truncation",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "stream_options",
    "providerOptions",
    "models",
    "client_metadata",
];

pub fn read_request(body: &[u8]) -> Result<Ask> {
    let mut fields = Fields::parse(body)?;
    fields.ignore(&IGNORED);
    if fields.flag("background")? == Some(true) {
        return fields.refuse("background", "the model's provider answers at once or not at all");
    }
    let mut ask = Ask {
        max_output: fields.count("max_output_tokens")?,
        temperature: fields.number("temperature")?,
        top_p: fields.number("top_p")?,
        parallel_tools: fields.flag("parallel_tool_calls")?,
        user: fields.text("user")?,
        stream: fields.flag("stream")?.unwrap_or(false),
        ..Ask::default()
    };
    ask.system.extend(
        fields
            .text("instructions")?
            .map(|text| TextPart { text, cache: None }),
    );
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(effort) = reasoning.text("effort")? {
            let Some(thinking) = read_effort(&effort) else {
                return reasoning.refuse("effort", format!("`{effort}` is not known"));
            };
            ask.thinking = Some(thinking);
        }
        reasoning.ignore(&["summary", "generate_summary", "context"]);
        reasoning.end()?;
    }
    if let Some(mut text) = fields.object("text")? {
        text.ignore(&["verbosity"]);
        if let Some(format) = text.object("format")? {
            ask.format = read_format(format)?;
        }
        text.end()?;
    }
    for tool in fields.list("tools")? {
        ask.tools.push(read_tool(tool)?);
    }
    ask.tool_choice = fields.take("tool_choice").as_ref().map(read_choice).transpose()?;
    match fields.take("input") {
        None => return fields.refuse("input", "it is missing"),
        Some(Value::String(text)) => push(&mut ask.turns, Role::User, vec![Part::text(text)]),
        Some(Value::Array(items)) => {
            for (at, item) in items.into_iter().enumerate() {
                read_item(Fields::of(format!("input[{at}]"), item)?, &mut ask)?;
            }
        }
        Some(_) => return fields.refuse("input", "expected a string or a list of items"),
    }
    fields.end()?;
    if ask.turns.is_empty() {
        return Err(Untranslatable::new("input", "there is no message of the user"));
    }
    Ok(ask)
}

fn read_format(mut format: Fields) -> Result<Format> {
    let kind = format.need_text("type")?;
    let read = match kind.as_str() {
        "text" => Format::Text,
        "json_object" => Format::Json,
        "json_schema" => Format::Schema(Schema {
            name: format.text("name")?,
            description: format.text("description")?,
            schema: format.take("schema").unwrap_or_else(|| json!({})),
            strict: format.flag("strict")?,
        }),
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
    let read = Tool {
        name: tool.need_text("name")?,
        description: tool.text("description")?,
        schema: tool
            .take("parameters")
            .unwrap_or_else(|| json!({"type": "object", "properties": {}})),
        strict: tool.flag("strict")?,
        cache: None,
    };
    tool.end()?;
    Ok(read)
}

fn read_choice(choice: &Value) -> Result<ToolChoice> {
    match (choice.as_str(), choice["name"].as_str()) {
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required"), _) => Ok(ToolChoice::Required),
        (None, Some(name)) if choice["type"] == "function" => Ok(ToolChoice::Only(name.to_owned())),
        _ => Err(Untranslatable::new(
            "tool_choice",
            "only a function can be chosen",
        )),
    }
}

fn read_item(mut item: Fields, ask: &mut Ask) -> Result<()> {
    let kind = item.text("type")?.unwrap_or_else(|| "message".into());
    item.ignore(&["status", "phase"]);
    match kind.as_str() {
        "message" => {
            item.ignore(&["id"]);
            let role = item.need_text("role")?;
            let path = item.path("content");
            let parts = match item.take("content") {
                None => Vec::new(),
                Some(Value::String(text)) => vec![Part::text(text)],
                Some(Value::Array(parts)) => parts
                    .into_iter()
                    .enumerate()
                    .map(|(at, part)| read_part(Fields::of(format!("{path}[{at}]"), part)?))
                    .collect::<Result<_>>()?,
                Some(_) => return item.refuse("content", "expected a string or a list of parts"),
            };
            match role.as_str() {
                "user" => push(&mut ask.turns, Role::User, parts),
                "assistant" => push(&mut ask.turns, Role::Assistant, parts),
                "system" | "developer" => {
                    for part in parts {
                        match part {
                            Part::Text(text) => ask.system.push(text),
                            _ => return Err(Untranslatable::new(path, "instructions are text")),
                        }
                    }
                }
                _ => return item.refuse("role", format!("`{role}` is not known")),
            }
        }
        "function_call" => {
            item.ignore(&["id", "namespace"]);
            let call = Part::Call {
                id: item.need_text("call_id")?,
                name: item.need_text("name")?,
                arguments: item.text("arguments")?.unwrap_or_default(),
                cache: None,
            };
            push(&mut ask.turns, Role::Assistant, vec![call]);
        }
        "function_call_output" => {
            item.ignore(&["id"]);
            let path = item.path("output");
            let parts = match item.take("output") {
                None => Vec::new(),
                Some(Value::String(text)) => vec![Part::text(text)],
                Some(Value::Array(parts)) => parts
                    .into_iter()
                    .enumerate()
                    .map(|(at, part)| read_part(Fields::of(format!("{path}[{at}]"), part)?))
                    .collect::<Result<_>>()?,
                Some(_) => return item.refuse("output", "expected a string or a list of parts"),
            };
            let result = Part::Result {
                id: item.need_text("call_id")?,
                parts,
                failed: false,
                cache: None,
            };
            push(&mut ask.turns, Role::User, vec![result]);
        }
        "reasoning" => {
            item.ignore(&["id", "content"]);
            let mut text = String::new();
            for mut part in item.list("summary")? {
                text.push_str(&part.text("text")?.unwrap_or_default());
            }
            let signature = item.text("encrypted_content")?;
            push(
                &mut ask.turns,
                Role::Assistant,
                vec![Part::Thinking { text, signature }],
            );
        }
        _ => return item.refuse("type", format!("`{kind}` cannot be translated")),
    }
    item.end()
}

fn read_part(mut part: Fields) -> Result<Part> {
    let kind = part.need_text("type")?;
    let read = match kind.as_str() {
        "input_text" | "output_text" | "text" => {
            part.ignore(&["annotations", "logprobs"]);
            Part::text(part.need_text("text")?)
        }
        "refusal" => Part::text(part.need_text("refusal")?),
        "input_image" => {
            part.ignore(&["detail"]);
            match part.text("image_url")? {
                Some(url) => Part::Image {
                    source: source_of_url(url),
                    cache: None,
                },
                None => {
                    return part.refuse(
                        "file_id",
                        "files that lie with another provider cannot be sent along",
                    );
                }
            }
        }
        "input_file" => {
            let name = part.text("filename")?;
            let data = part.text("file_data")?;
            let url = part.text("file_url")?;
            match data.or(url) {
                Some(data) => Part::Document {
                    source: source_of_url(data),
                    name,
                    cache: None,
                },
                None => {
                    return part.refuse(
                        "file_id",
                        "files that lie with another provider cannot be sent along",
                    );
                }
            }
        }
        _ => return part.refuse("type", format!("`{kind}` cannot be translated")),
    };
    part.end()?;
    Ok(read)
}

pub fn write_answer(answer: &Answer, stamp: &Stamp) -> Value {
    let items: Vec<Value> = answer
        .parts
        .iter()
        .enumerate()
        .filter_map(|(at, part)| write_item(part, &item_id(stamp, at as u64)))
        .collect();
    response(stamp, items, &answer.finish, answer.usage.unwrap_or_default())
}

pub(crate) fn item_id(stamp: &Stamp, index: u64) -> String {
    format!("{}_{index}", stamp.id)
}

pub(crate) fn write_item(part: &Part, id: &str) -> Option<Value> {
    Some(match part {
        Part::Text(part) => json!({
            "id": format!("msg_{id}"), "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}],
        }),
        Part::Thinking { text, signature } => Built::default()
            .with("id", format!("rs_{id}"))
            .with("type", "reasoning")
            .with("summary", json!([{"type": "summary_text", "text": text}]))
            .maybe("encrypted_content", signature.clone())
            .into(),
        Part::Redacted { data } => json!({
            "id": format!("rs_{id}"), "type": "reasoning", "summary": [], "encrypted_content": data,
        }),
        Part::Call {
            id: call,
            name,
            arguments,
            ..
        } => json!({
            "id": format!("fc_{id}"), "type": "function_call", "status": "completed",
            "call_id": call, "name": name, "arguments": whole(arguments),
        }),
        Part::Image { .. } | Part::Document { .. } | Part::Result { .. } => return None,
    })
}

pub(crate) fn response(
    stamp: &Stamp,
    output: Vec<Value>,
    finish: &Finish,
    used: atoll_types::ModelUsage,
) -> Value {
    let (status, incomplete) = match finish {
        Finish::Length => ("incomplete", json!({"reason": "max_output_tokens"})),
        Finish::Filter => ("incomplete", json!({"reason": "content_filter"})),
        Finish::Stop | Finish::StopText(_) | Finish::Tools | Finish::Other(_) => ("completed", Value::Null),
    };
    let mut response = skeleton(stamp, status);
    response["incomplete_details"] = incomplete;
    response["output"] = output.into();
    response["usage"] = usage::write_responses(&used);
    response
}

pub(crate) fn skeleton(stamp: &Stamp, status: &str) -> Value {
    json!({
        "id": format!("resp_{}", stamp.id),
        "object": "response",
        "created_at": stamp.created,
        "status": status,
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": null,
        "max_output_tokens": null,
        "model": stamp.model,
        "output": [],
        "parallel_tool_calls": true,
        "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null},
        "store": false,
        "temperature": null,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "truncation": "disabled",
        "usage": null,
        "user": null,
        "metadata": {},
    })
}

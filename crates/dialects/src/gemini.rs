//! Google's Gemini (`generateContent`), spoken by its provider only.
//!
//! Gemini knows calls of tools by name and not by id, so ids are made from the place of the call, and a result finds its
//! name by the call before it. Thinking is signed on the part behind it (`thoughtSignature`), which travels as the signature
//! of an empty thought in front of that part.

mod stream;

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::json::{Built, arguments, object, only};
use crate::talk::texts;
use crate::{
    Answer, Ask, Effort, Finish, Format, Part, Result, Role, Source, Thinking, ToolChoice, Untranslatable,
    usage,
};

pub use stream::Reader;

pub fn write_request(ask: &Ask) -> Result<Value> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    for part in ask.turns.iter().flat_map(|turn| &turn.parts) {
        if let Part::Call { id, name, .. } = part {
            names.insert(id, name);
        }
    }
    let mut contents = Vec::<Value>::new();
    for (at, turn) in ask.turns.iter().enumerate() {
        let role = match turn.role {
            Role::User => "user",
            Role::Assistant => "model",
        };
        let mut parts = Vec::new();
        let mut signature: Option<&str> = None;
        for part in &turn.parts {
            if let Part::Thinking {
                signature: Some(signed),
                ..
            } = part
            {
                signature = Some(signed);
                continue;
            }
            let Some(mut written) = write_part(at, part, &names)? else {
                continue;
            };
            if let Some(signed) = signature.take() {
                written["thoughtSignature"] = signed.into();
            }
            parts.push(written);
        }
        if !parts.is_empty() {
            let content = Built::default().with("role", role).with("parts", parts);
            contents.push(content.into());
        }
    }
    let thinking = ask.thinking.map(|thinking| match thinking {
        Thinking::Off => json!({"thinkingBudget": 0}),
        Thinking::Adaptive => json!({"thinkingBudget": -1, "includeThoughts": true}),
        Thinking::Tokens(tokens) => json!({"thinkingBudget": tokens, "includeThoughts": true}),
        Thinking::Effort(effort) => {
            json!({"thinkingBudget": effort.min(Effort::High).tokens(), "includeThoughts": true})
        }
    });
    let (mime, schema) = match &ask.format {
        Format::Text => (None, None),
        Format::Json => (Some("application/json"), None),
        Format::Schema(schema) => (Some("application/json"), Some(schema.schema.clone())),
    };
    let config: Value = Built::default()
        .maybe("maxOutputTokens", ask.max_output)
        .maybe("temperature", ask.temperature.clone().map(Value::Number))
        .maybe("topP", ask.top_p.clone().map(Value::Number))
        .maybe("topK", ask.top_k)
        .maybe("presencePenalty", ask.presence_penalty.clone().map(Value::Number))
        .maybe(
            "frequencyPenalty",
            ask.frequency_penalty.clone().map(Value::Number),
        )
        .maybe("seed", ask.seed.clone().map(Value::Number))
        .maybe("stopSequences", (!ask.stop.is_empty()).then(|| ask.stop.clone()))
        .maybe("responseMimeType", mime)
        .maybe("responseJsonSchema", schema)
        .maybe("thinkingConfig", thinking)
        .into();
    let has_config = config.as_object().is_some_and(|fields| !fields.is_empty());
    let system: Vec<Value> = ask.system.iter().map(|part| json!({"text": part.text})).collect();
    let tools: Vec<Value> = ask.tools.iter().map(write_tool).collect();
    let choice = ask
        .tool_choice
        .as_ref()
        .filter(|_| !tools.is_empty())
        .map(|choice| match choice {
            ToolChoice::Auto => json!({"mode": "AUTO"}),
            ToolChoice::None => json!({"mode": "NONE"}),
            ToolChoice::Required => json!({"mode": "ANY"}),
            ToolChoice::Only(name) => json!({"mode": "ANY", "allowedFunctionNames": [name]}),
        });
    Ok(Built::default()
        .with("contents", contents)
        .maybe(
            "systemInstruction",
            (!system.is_empty()).then(|| only("parts", system)),
        )
        .maybe(
            "tools",
            (!tools.is_empty()).then(|| vec![only("functionDeclarations", tools)]),
        )
        .maybe(
            "toolConfig",
            choice.map(|choice| only("functionCallingConfig", choice)),
        )
        .maybe("generationConfig", has_config.then_some(config))
        .into())
}

fn write_tool(tool: &crate::Tool) -> Value {
    Built::default()
        .with("name", tool.name.clone())
        .maybe("description", tool.description.clone())
        .with("parametersJsonSchema", tool.schema.clone())
        .into()
}

fn write_part(at: usize, part: &Part, names: &HashMap<&str, &str>) -> Result<Option<Value>> {
    Ok(Some(match part {
        Part::Text(part) if part.text.is_empty() => return Ok(None),
        Part::Text(part) => json!({"text": part.text}),
        Part::Image { source, .. } | Part::Document { source, .. } => match source {
            Source::Base64 { media, data } => json!({"inlineData": {"mimeType": media, "data": data}}),
            Source::Url(url) => json!({"fileData": {"fileUri": url}}),
        },
        // Of another author, or not to be shown again.
        Part::Thinking { .. } | Part::Redacted { .. } => return Ok(None),
        Part::Call {
            name,
            arguments: text,
            ..
        } => {
            let call = Built::default()
                .with("name", name.clone())
                .with("args", object(arguments(text)));
            only("functionCall", call)
        }
        Part::Result {
            id, parts, failed, ..
        } => {
            let Some(name) = names.get(id.as_str()) else {
                return Err(Untranslatable::new(
                    format!("messages[{at}]"),
                    format!("it has the result of the call `{id}`, which nobody made"),
                ));
            };
            let key = if *failed { "error" } else { "output" };
            json!({"functionResponse": {"name": name, "response": {key: texts(parts)}}})
        }
    }))
}

pub fn read_answer(body: &[u8]) -> Result<Answer> {
    let mut events = Vec::new();
    let mut reader = Reader::default();
    crate::ReadStream::read(&mut reader, body, &mut events)?;
    if !crate::ReadStream::end(&mut reader, &mut events) {
        return Err(Untranslatable::new(
            "answer.candidates",
            "the provider gave no answer",
        ));
    }
    Ok(Answer::collect(events))
}

pub(crate) fn read_finish(name: &str, calls: bool) -> Finish {
    match name {
        "STOP" if calls => Finish::Tools,
        "STOP" | "FINISH_REASON_UNSPECIFIED" => Finish::Stop,
        "MAX_TOKENS" => Finish::Length,
        "SAFETY" | "RECITATION" | "BLOCKLIST" | "PROHIBITED_CONTENT" | "SPII" | "IMAGE_SAFETY" => {
            Finish::Filter
        }
        other => Finish::Other(other.to_lowercase()),
    }
}

pub(crate) use usage::read_gemini;

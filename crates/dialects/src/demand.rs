//! What a request asks for that costs, read as the wire of the request spells it: an upper bound for a reservation.
//!
//! It is to be read from what a provider gets. Where that is a translation, what the client wrote is another text: a translation
//! takes some of it, leaves the rest, and writes numbers at greater length.
//!
//! What must hold: whatever is not known to cost nothing beyond the tokens that are counted here is named in
//! [`Demand::unpriced`]. So fields, kinds of tools and kinds of content are listed if they are harmless; a list of the
//! harmful ones would never be complete. Nothing is refused here: whether a budget applies is decided elsewhere.

mod headers;
mod parts;

use crate::tree::{Fields, Node};
use crate::{Dialect, PeekError};

pub use headers::unpriced_header;

/// What is to be read and written at most.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// Bytes of the body that a model may read as text.
    pub text: u64,
    pub images: u64,
    /// Bytes of documents that hold more than their bytes tell, such as PDFs.
    pub documents: u64,
    /// Bytes of sound and of moving pictures.
    pub audio: u64,
    /// Some of the images are addresses, behind which somebody may find more than an image.
    pub linked: bool,
    /// Tools that are shown to the model, for which providers add words of their own.
    pub tools: u64,
    /// Tokens of one answer; `None`: nobody has set a limit.
    pub max_output: Option<u64>,
    /// How many answers are wanted at once, each as long as that.
    pub choices: u64,
    /// Bytes of an answer that the caller foresees; what does not come true is paid for beside the answer.
    pub predicted: u64,
    /// The answer may be spoken.
    pub speaks: bool,
    /// The first thing whose price nobody here knows.
    pub unpriced: Option<Unpriced>,
}

/// Something without a price.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpriced {
    pub field: String,
    pub why: String,
}

/// For the gateway alone; never sent on.
const OURS: [&str; 3] = ["provider", "providerOptions", "models"];

const CHAT: &[&str] = &[
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "user",
    "store",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "reasoning_effort",
    "reasoning",
    "include_reasoning",
    "verbosity",
    "modalities",
    "audio",
    "prediction",
    "service_tier",
    "usage",
    "route",
];

const RESPONSES: &[&str] = &[
    "model",
    "input",
    "instructions",
    "stream",
    "stream_options",
    "max_output_tokens",
    "max_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "store",
    "metadata",
    "client_metadata",
    "include",
    "user",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "background",
    "previous_response_id",
    "conversation",
    "prompt",
];

const MESSAGES: &[&str] = &[
    "model",
    "messages",
    "system",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "thinking",
    "tools",
    "tool_choice",
    "metadata",
    "output_config",
    "output_format",
    "cache_control",
    "service_tier",
    "context_management",
    "speed",
    "inference_geo",
    "container",
    "mcp_servers",
];

const AI_SDK: &[&str] = &[
    "prompt",
    "maxOutputTokens",
    "temperature",
    "topP",
    "topK",
    "presencePenalty",
    "frequencyPenalty",
    "seed",
    "stopSequences",
    "reasoning",
    "responseFormat",
    "tools",
    "toolChoice",
    "includeRawChunks",
    "headers",
    "abortSignal",
];

/// As we write it; nobody asks us on this wire, nor on the next.
const GEMINI: &[&str] = &[
    "contents",
    "systemInstruction",
    "tools",
    "toolConfig",
    "generationConfig",
];

const CONVERSE: &[&str] = &[
    "messages",
    "system",
    "inferenceConfig",
    "toolConfig",
    "outputConfig",
    "additionalModelRequestFields",
];

const EMBEDDINGS: &[&str] = &["model", "input", "encoding_format", "dimensions", "user"];
const AI_SDK_EMBEDDINGS: &[&str] = &["values", "dimensions", "headers"];

/// The names that requests of a wire have at their top.
pub(crate) fn known(dialect: Dialect) -> impl Iterator<Item = &'static str> {
    let own = match dialect {
        Dialect::Chat => CHAT,
        Dialect::Gemini => GEMINI,
        Dialect::Converse => CONVERSE,
        Dialect::Responses => RESPONSES,
        Dialect::Messages => MESSAGES,
        Dialect::AiSdk => AI_SDK,
        Dialect::Embeddings => EMBEDDINGS,
        Dialect::AiSdkEmbeddings => AI_SDK_EMBEDDINGS,
    };
    own.iter().chain(&OURS).copied()
}

impl Demand {
    pub(crate) fn of(dialect: Dialect, fields: &Fields<'_>, bytes: usize) -> Result<Self, PeekError> {
        let mut demand = Self {
            text: bytes as u64,
            choices: 1,
            ..Self::default()
        };
        if let Some((name, _)) = fields
            .iter()
            .find(|(name, node)| **node != Node::Null && known(dialect).all(|known| known != *name))
        {
            demand.price_unknown(
                &name.chars().take(100).collect::<String>(),
                "this gateway does not know it, nor what it costs",
            );
        }
        match dialect {
            Dialect::Chat => demand.chat(fields)?,
            Dialect::Gemini => demand.gemini(fields)?,
            Dialect::Converse => demand.converse(fields)?,
            Dialect::Responses => demand.responses(fields)?,
            Dialect::Messages => demand.messages(fields)?,
            Dialect::AiSdk => {
                demand.max_output = fields.count("maxOutputTokens")?;
                // No provider speaks this wire, so what is said is counted in what it is translated to.
                demand.tools(fields, |kind| kind == Some("function"));
            }
            Dialect::Embeddings | Dialect::AiSdkEmbeddings => demand.max_output = Some(0),
        }
        Ok(demand)
    }

    fn price_unknown(&mut self, field: &str, why: &str) {
        if self.unpriced.is_none() {
            self.unpriced = Some(Unpriced {
                field: field.to_owned(),
                why: why.to_owned(),
            });
        }
    }

    /// What the provider keeps and we do not see.
    fn unseen(&mut self, field: &str) {
        self.price_unknown(
            field,
            "what it stands for lies elsewhere, so nobody here can count it",
        );
    }

    fn chat(&mut self, fields: &Fields<'_>) -> Result<(), PeekError> {
        // Which of the two a provider minds is its own affair.
        self.max_output = fields
            .count("max_tokens")?
            .max(fields.count("max_completion_tokens")?);
        if self.max_output == Some(0) {
            self.price_unknown("max_tokens", "to some providers 0 is no limit");
        }
        let best = fields.count("best_of")?.unwrap_or(1);
        self.choices = fields.count("n")?.unwrap_or(1).max(best).max(1);
        if let Some(Node::Object(prediction)) = fields.get("prediction") {
            self.predicted = prediction.get("content").map_or(0, size);
            self.parts("prediction", prediction.get("content"));
        }
        self.speaks = fields.get("audio").is_some();
        match fields.get("modalities") {
            None => {}
            Some(Node::List(kinds)) => {
                for kind in kinds {
                    match kind {
                        Node::Text(kind) if kind.start == "text" => {}
                        Node::Text(kind) if kind.start == "audio" => self.speaks = true,
                        _ => self.price_unknown("modalities", "only text and audio have prices here"),
                    }
                }
            }
            Some(_) => self.price_unknown("modalities", "it is no list"),
        }
        self.tools(fields, |kind| matches!(kind, Some("function" | "custom")));
        if let Some(Node::List(functions)) = fields.get("functions") {
            self.tools += functions.len() as u64;
        }
        self.items("messages", fields.get("messages"));
        Ok(())
    }

    fn responses(&mut self, fields: &Fields<'_>) -> Result<(), PeekError> {
        self.max_output = fields.count("max_output_tokens")?;
        if fields.flag("background")? == Some(true) {
            self.price_unknown("background", "what it uses is told after the call has ended");
        }
        for field in ["previous_response_id", "conversation", "prompt"] {
            if fields.get(field).is_some() {
                self.unseen(field);
            }
        }
        self.tools(fields, |kind| {
            matches!(kind, Some("function" | "custom" | "local_shell" | "apply_patch"))
        });
        self.items("instructions", fields.get("instructions"));
        self.items("input", fields.get("input"));
        Ok(())
    }

    fn messages(&mut self, fields: &Fields<'_>) -> Result<(), PeekError> {
        self.max_output = fields.count("max_tokens")?;
        if let Some(thinking) = fields.object("thinking") {
            let thinks = thinking.count("budget_tokens")?;
            if thinks.is_some() && thinks >= self.max_output {
                self.price_unknown(
                    "thinking.budget_tokens",
                    "it is not below `max_tokens`, so that limits the answer no longer",
                );
            }
        }
        match fields.text("speed") {
            None if fields.get("speed").is_none() => {}
            Some("standard") => {}
            _ => self.price_unknown("speed", "other speeds have prices of their own"),
        }
        match fields.text("inference_geo") {
            None if fields.get("inference_geo").is_none() => {}
            Some("global" | "not_available") => {}
            _ => self.price_unknown("inference_geo", "regions have prices of their own"),
        }
        for field in ["container", "mcp_servers"] {
            let is_empty = matches!(fields.get(field), None | Some(Node::List(_)))
                && !matches!(fields.get(field), Some(Node::List(items)) if !items.is_empty());
            if !is_empty {
                self.price_unknown(field, "what the provider runs has a price of its own");
            }
        }
        if let Some(management) = fields.get("context_management")
            && !only_clears(management)
        {
            self.price_unknown(
                "context_management",
                "rewriting a conversation is a call of its own",
            );
        }
        // Tools that the caller runs; the others are run, and charged for, by the provider.
        self.tools(fields, |kind| {
            kind.is_none_or(|kind| {
                kind == "custom"
                    || ["bash_", "text_editor_", "computer_", "memory_"]
                        .iter()
                        .any(|own| kind.starts_with(own))
            })
        });
        self.parts("system", fields.get("system"));
        self.items("messages", fields.get("messages"));
        Ok(())
    }

    fn tools(&mut self, fields: &Fields<'_>, is_callers: impl Fn(Option<&str>) -> bool) {
        let tools = match fields.get("tools") {
            None => return,
            Some(Node::List(tools)) => tools,
            Some(_) => return self.price_unknown("tools", "it is no list"),
        };
        self.tools += tools.len() as u64;
        for (at, tool) in tools.iter().enumerate() {
            let kind = match tool {
                Node::Object(tool) if matches!(tool.get("type"), None | Some(Node::Text(_))) => {
                    tool.text("type")
                }
                _ => return self.price_unknown(&format!("tools[{at}]"), "it is no tool of the caller's own"),
            };
            if !is_callers(kind) {
                return self.price_unknown(
                    &format!("tools[{at}].type"),
                    "tools that the provider runs have prices of their own",
                );
            }
        }
    }

    fn gemini(&mut self, fields: &Fields<'_>) -> Result<(), PeekError> {
        if let Some(config) = fields.object("generationConfig") {
            self.max_output = config.count("maxOutputTokens")?;
        }
        if let Some(Node::List(tools)) = fields.get("tools") {
            for tool in tools {
                if let Node::Object(tool) = tool
                    && let Some(Node::List(functions)) = tool.get("functionDeclarations")
                {
                    self.tools += functions.len() as u64;
                }
            }
        }
        self.gemini_parts(fields.get("contents"));
        Ok(())
    }

    fn converse(&mut self, fields: &Fields<'_>) -> Result<(), PeekError> {
        if let Some(config) = fields.object("inferenceConfig") {
            self.max_output = config.count("maxTokens")?;
        }
        if let Some(Node::List(tools)) = fields.object("toolConfig").and_then(|config| config.get("tools")) {
            self.tools += tools.len() as u64;
        }
        self.converse_parts(fields.get("messages"));
        Ok(())
    }
}

/// Bytes of all texts below.
fn size(node: &Node<'_>) -> u64 {
    match node {
        Node::Text(text) => text.len as u64,
        Node::List(items) => items.iter().map(size).sum(),
        Node::Object(fields) => fields.iter().map(|(_, node)| size(node)).sum(),
        Node::Null | Node::Flag(_) | Node::Number(_) => 0,
    }
}

/// Whether the context is only made smaller, which costs nothing.
fn only_clears(management: &Node<'_>) -> bool {
    let Node::Object(management) = management else {
        return false;
    };
    management.iter().all(|(name, node)| match node {
        Node::List(edits) if name == "edits" => edits.iter().all(|edit| {
            matches!(edit, Node::Object(edit) if edit.text("type").is_some_and(|kind| kind.starts_with("clear_")))
        }),
        node => *node == Node::Null,
    })
}

#[cfg(test)]
mod tests;

//! Conversations with models as wires spell them, and the one form in between.
//!
//! ```text
//!   Chat Completions ─┐                                  ┌─> Chat Completions
//!   Responses ────────┼─ read ──> Ask ────────── write ──┼─> Messages
//!   Messages ─────────┤                                  ├─> Gemini
//!   AI SDK ───────────┘  <─ write ── Answer, Events <── read ┴─> Converse
//! ```
//! A wire that a provider speaks itself is not translated at all: [`Peek`] finds the few fields that matter in the raw bytes,
//! [`Watch`] reads usage out of the answer as it passes.
//!
//! What must hold:
//! - Pure: bytes and values in, bytes and values out. No clock, no randomness, no I/O.
//! - What cannot be said on the other wire is refused by the name of its field. What is left out because it changes nothing
//!   is listed where it is left out.
//! - Thinking keeps its signature, tool calls keep their ids, in every direction that has a place for them.
//! - Memory is bounded by what the caller hands in; [`sse::Splitter`] has a limit of its own.

pub mod ai_sdk;
pub mod chat;
pub mod converse;
mod demand;
pub mod embeddings;
pub mod event_stream;
#[cfg(test)]
mod fixtures;
pub mod gemini;
mod json;
pub mod messages;
mod peek;
pub mod responses;
pub mod screen;
pub mod sse;
mod talk;
mod tree;
mod usage;
mod watch;

pub use demand::{Demand, Unpriced, unpriced_header};
pub use peek::{Peek, PeekError, Rewrite};
pub use talk::{
    Answer, Ask, Cache, Effort, Event, Finish, Format, Opening, Part, Role, Schema, Source, Stamp, TextPart,
    Thinking, Tool, ToolChoice, Turn,
};
pub use watch::{Seen, Watch};

/// A wire that conversations are held on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    Chat,
    Responses,
    Messages,
    Gemini,
    /// Amazon Bedrock's.
    Converse,
    AiSdk,
    Embeddings,
    AiSdkEmbeddings,
}

impl Dialect {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Gemini => "gemini",
            Self::Converse => "converse",
            Self::AiSdk => "ai_sdk",
            Self::Embeddings => "embeddings",
            Self::AiSdkEmbeddings => "ai_sdk_embeddings",
        }
    }
}

/// Why something cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: {why}")]
pub struct Untranslatable {
    pub field: String,
    pub why: String,
}

impl Untranslatable {
    pub fn new(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            why: why.into(),
        }
    }
}

pub type Result<T, E = Untranslatable> = std::result::Result<T, E>;

/// Reads a stream of one wire into events. Fed with the data of whole server-sent events. [`Event::Finish`] is the last.
pub trait ReadStream: Send {
    fn read(&mut self, data: &[u8], events: &mut Vec<Event>) -> Result<()>;
    /// The connection has ended; whether the answer had.
    fn end(&mut self, events: &mut Vec<Event>) -> bool;
}

/// Writes events as a stream of one wire.
pub trait WriteStream: Send {
    fn write(&mut self, event: &Event, out: &mut Vec<u8>);
}

/// How a stream of a wire says that it cannot go on, where it is not us who wrote its beginning.
pub fn failure(dialect: Dialect, message: &str) -> Vec<u8> {
    use serde_json::json;
    let mut out = Vec::new();
    match dialect {
        Dialect::Messages => {
            let error = json!({"type": "error", "error": {"type": "api_error", "message": message}});
            sse::write(&mut out, Some("error"), &error);
        }
        Dialect::Responses => {
            let error = json!({"type": "error", "code": "server_error", "message": message, "param": null});
            sse::write(&mut out, Some("error"), &error);
        }
        Dialect::Chat
        | Dialect::Gemini
        | Dialect::Converse
        | Dialect::AiSdk
        | Dialect::Embeddings
        | Dialect::AiSdkEmbeddings => {
            let error = json!({"error": {
                "message": message, "type": "server_error", "param": null, "code": "provider_failed",
            }});
            sse::write(&mut out, None, &error);
        }
    }
    out
}

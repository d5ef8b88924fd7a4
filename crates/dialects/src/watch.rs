//! Reads usage out of an answer that passes by untouched.

use atoll_types::ModelUsage;
use memchr::memmem;
use serde_json::Value;

use crate::sse::Raw;
use crate::{Dialect, usage};

/// What an answer has told so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    pub usage: Option<ModelUsage>,
    /// Bytes of what the model wrote, where it passed by: for an estimate when the usage never comes.
    pub written: u64,
    /// The model has stopped.
    pub finished: bool,
    /// Nothing more will be said, not about what was used either.
    pub over: bool,
    /// Why the model stopped, in the provider's word.
    pub reason: Option<String>,
    /// The provider said that it failed.
    pub failed: Option<String>,
}

#[derive(Debug)]
pub struct Watch {
    dialect: Dialect,
    pub seen: Seen,
}

impl Watch {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            seen: Seen::default(),
        }
    }

    /// A whole answer.
    pub fn body(&mut self, body: &[u8]) {
        let Ok(value) = serde_json::from_slice::<Value>(body) else {
            return;
        };
        self.seen.finished = true;
        self.seen.written = body.len() as u64;
        match self.dialect {
            Dialect::Chat | Dialect::Embeddings => {
                self.seen.usage = usage::read_chat(&value["usage"]);
                self.reason(&value["choices"][0]["finish_reason"]);
            }
            Dialect::Responses => {
                self.seen.usage = usage::read_responses(&value["usage"]);
                self.reason(&value["status"]);
            }
            Dialect::Messages => {
                self.seen.usage = usage::read_messages(&value["usage"], None);
                self.reason(&value["stop_reason"]);
            }
            Dialect::Gemini | Dialect::Converse | Dialect::AiSdk | Dialect::AiSdkEmbeddings => {}
        }
    }

    /// One event of a stream. Whether it is nothing but the usage that the gateway asked for.
    pub fn event(&mut self, event: &Raw) -> bool {
        let Some(data) = event.data() else { return false };
        match self.dialect {
            Dialect::Chat => self.chat(&data),
            Dialect::Responses => self.responses(&data),
            Dialect::Messages => self.messages(&data),
            Dialect::Gemini
            | Dialect::Converse
            | Dialect::AiSdk
            | Dialect::Embeddings
            | Dialect::AiSdkEmbeddings => false,
        }
    }

    fn chat(&mut self, data: &[u8]) -> bool {
        if data == b"[DONE]" {
            self.seen.over = true;
            return false;
        }
        self.seen.written += text_of(data, br#""content":"#) + text_of(data, br#""arguments":"#);
        // Most chunks say neither how it ended nor what it used.
        let tells = has_object(data, br#""usage":"#)
            || !is_null(data, br#""finish_reason":"#)
            || has(data, br#""error""#);
        if !tells {
            return false;
        }
        let Ok(value) = serde_json::from_slice::<Value>(data) else {
            return false;
        };
        self.reason(&value["choices"][0]["finish_reason"]);
        self.seen.finished |= self.seen.reason.is_some();
        self.failure(&value["error"]);
        let told = usage::read_chat(&value["usage"]);
        self.seen.usage = told.or(self.seen.usage);
        told.is_some() && value["choices"].as_array().is_some_and(Vec::is_empty)
    }

    fn responses(&mut self, data: &[u8]) -> bool {
        self.seen.written += text_of(data, br#""delta":"#);
        let ends = [
            br#""response.completed""#.as_slice(),
            br#""response.incomplete""#,
            br#""response.failed""#,
        ];
        if !ends.iter().any(|end| has(data, end)) && !has(data, br#""type":"error""#) {
            return false;
        }
        let Ok(value) = serde_json::from_slice::<Value>(data) else {
            return false;
        };
        let response = &value["response"];
        self.seen.usage = usage::read_responses(&response["usage"]).or(self.seen.usage);
        self.reason(&response["status"]);
        self.seen.finished = true;
        self.seen.over = true;
        self.failure(&response["error"]);
        if value["type"] == "error" {
            self.failure(&value);
        }
        false
    }

    fn messages(&mut self, data: &[u8]) -> bool {
        for name in [br#""text":"#.as_slice(), br#""partial_json":"#, br#""thinking":"#] {
            self.seen.written += text_of(data, name);
        }
        if has_object(data, br#""usage":"#) {
            let Ok(value) = serde_json::from_slice::<Value>(data) else {
                return false;
            };
            let used = if value["usage"].is_object() {
                &value["usage"]
            } else {
                &value["message"]["usage"]
            };
            self.seen.usage = usage::read_messages(used, self.seen.usage).or(self.seen.usage);
            self.reason(&value["delta"]["stop_reason"]);
        } else if has(data, br#""message_stop""#) {
            self.seen.finished = true;
            self.seen.over = true;
        } else if has(data, br#""type":"error""#) || has(data, br#""type": "error""#) {
            let value: Value = serde_json::from_slice(data).unwrap_or_default();
            self.failure(&value["error"]);
        }
        false
    }

    fn reason(&mut self, value: &Value) {
        if let Some(reason) = value.as_str() {
            self.seen.reason = Some(reason.chars().take(40).collect());
        }
    }

    fn failure(&mut self, error: &Value) {
        if let Some(message) = error["message"].as_str() {
            self.seen.failed = Some(message.chars().take(300).collect());
        }
    }
}

fn has(data: &[u8], needle: &[u8]) -> bool {
    memmem::find(data, needle).is_some()
}

fn behind<'a>(data: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    memmem::find(data, name).map(|at| data[at + name.len()..].trim_ascii_start())
}

fn has_object(data: &[u8], name: &[u8]) -> bool {
    behind(data, name).is_some_and(|rest| rest.starts_with(b"{"))
}

fn is_null(data: &[u8], name: &[u8]) -> bool {
    behind(data, name).is_none_or(|rest| rest.starts_with(b"null"))
}

/// How long the text behind a field's name is, as it is written.
fn text_of(data: &[u8], name: &[u8]) -> u64 {
    let Some(text) = behind(data, name).and_then(|rest| rest.strip_prefix(b"\"")) else {
        return 0;
    };
    let mut escaped = false;
    let length = text.iter().take_while(|byte| {
        let ends = **byte == b'"' && !escaped;
        escaped = **byte == b'\\' && !escaped;
        !ends
    });
    length.count() as u64
}

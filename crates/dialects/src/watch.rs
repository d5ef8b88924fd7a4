//! Reads usage out of an answer that passes by untouched.
//!
//! What must hold: what kind of event it is, is what the event says of itself at its top. Callers choose words that come back
//! inside of events (names of tools, metadata, what the model repeats), so words that are found somewhere only decide whether an
//! event is read at all. An answer is over only with what was told at its end: a usage from its beginning does not count for it.

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
    /// Messages: what was written has been told, which is later than what was read.
    told_output: bool,
    pub seen: Seen,
}

impl Watch {
    pub fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            told_output: false,
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
        let may_end = [
            br#""response.completed""#.as_slice(),
            br#""response.incomplete""#,
            br#""response.failed""#,
            br#""error""#,
        ];
        if !may_end.iter().any(|end| has(data, end)) {
            return false;
        }
        let Ok(value) = serde_json::from_slice::<Value>(data) else {
            return false;
        };
        match value["type"].as_str() {
            Some("response.completed" | "response.incomplete" | "response.failed") => {
                let response = &value["response"];
                self.seen.usage = usage::read_responses(&response["usage"]);
                self.reason(&response["status"]);
                self.failure(&response["error"]);
            }
            Some("error") => self.failure(&value),
            _ => return false,
        }
        self.seen.finished = true;
        self.seen.over = true;
        false
    }

    fn messages(&mut self, data: &[u8]) -> bool {
        for name in [br#""text":"#.as_slice(), br#""partial_json":"#, br#""thinking":"#] {
            self.seen.written += text_of(data, name);
        }
        if !has(data, br#""message_"#) && !has(data, br#""error""#) {
            return false;
        }
        let Ok(value) = serde_json::from_slice::<Value>(data) else {
            return false;
        };
        let used = match value["type"].as_str() {
            Some("message_start") => &value["message"]["usage"],
            Some("message_delta") => {
                self.told_output |= value["usage"]["output_tokens"].is_number();
                self.reason(&value["delta"]["stop_reason"]);
                &value["usage"]
            }
            Some("message_stop") => {
                self.seen.finished = true;
                self.seen.over = true;
                // What was read is not all that was used.
                self.seen.usage = self.seen.usage.filter(|_| self.told_output);
                return false;
            }
            Some("error") => {
                self.failure(&value["error"]);
                return false;
            }
            _ => return false,
        };
        self.seen.usage = usage::read_messages(used, self.seen.usage).or(self.seen.usage);
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

/// What stands behind a name, wherever it stands.
fn behind<'a>(data: &'a [u8], name: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    memmem::find_iter(data, name).map(|at| data[at + name.len()..].trim_ascii_start())
}

fn has_object(data: &[u8], name: &[u8]) -> bool {
    behind(data, name).any(|rest| rest.starts_with(b"{"))
}

fn is_null(data: &[u8], name: &[u8]) -> bool {
    behind(data, name).all(|rest| rest.starts_with(b"null"))
}

/// How long the text behind a field's name is, as it is written.
fn text_of(data: &[u8], name: &[u8]) -> u64 {
    let Some(text) = behind(data, name)
        .next()
        .and_then(|rest| rest.strip_prefix(b"\""))
    else {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(dialect: Dialect, events: &[&str]) -> Seen {
        let mut watch = Watch::new(dialect);
        for event in events {
            watch.event(&Raw(format!("data: {event}\n\n").into()));
        }
        watch.seen
    }

    const START: &str =
        r#"{"type":"message_start","message":{"usage":{"input_tokens":10,"output_tokens":1}}}"#;
    const DELTA: &str =
        r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5000}}"#;
    const STOP: &str = r#"{"type":"message_stop"}"#;

    #[test]
    fn words_of_the_caller_end_no_answer() {
        let seen = watched(
            Dialect::Messages,
            &[
                START,
                r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"message_stop","input":{}}}"#,
                r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"x","input":{"type":"message_stop"}}}"#,
                r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"error","input":{"usage":{"output_tokens":3}}}}"#,
            ],
        );
        assert!(!seen.over && !seen.finished && seen.failed.is_none(), "{seen:?}");
        assert_eq!(seen.usage.unwrap().output, 1);
        let seen = watched(
            Dialect::Responses,
            &[
                r#"{"type":"response.created","response":{"metadata":{"a":"response.completed"},"usage":{"output_tokens":1}}}"#,
                r#"{"type":"response.output_item.added","item":{"type":"function_call","name":"response.failed"}}"#,
                r#"{"type":"response.in_progress","response":{"tools":[{"name":"error"}],"error":null}}"#,
            ],
        );
        assert!(!seen.over && !seen.finished && seen.usage.is_none(), "{seen:?}");
        let seen = watched(
            Dialect::Chat,
            &[
                r#"{"choices":[{"delta":{"tool_calls":[{"function":{"name":"[DONE]"}}]},"finish_reason":null}]}"#,
            ],
        );
        assert!(!seen.over && !seen.finished, "{seen:?}");
    }

    #[test]
    fn an_answer_is_over_with_what_was_told_at_its_end() {
        let seen = watched(Dialect::Messages, &[START, DELTA, STOP]);
        assert_eq!((seen.over, seen.usage.unwrap().output), (true, 5000));
        // Of what was written nobody has told.
        for delta in [
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":10}}"#,
            r#"{"type":"content_block_delta","usage":{"output_tokens":2}}"#,
        ] {
            let seen = watched(Dialect::Messages, &[START, delta, STOP]);
            assert_eq!((seen.over, seen.usage), (true, None), "{delta}");
        }
        let end = r#"{"type": "response.completed", "response": {"status": "completed", "usage": {"input_tokens": 1, "output_tokens": 9}}}"#;
        let seen = watched(Dialect::Responses, &[end]);
        assert_eq!((seen.over, seen.usage.unwrap().output), (true, 9));
        let seen = watched(Dialect::Responses, &[r#"{"type": "error", "message": "no"}"#]);
        assert_eq!((seen.over, seen.failed.as_deref()), (true, Some("no")));
    }
}

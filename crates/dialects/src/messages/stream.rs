//! Events of a message.

use atoll_types::ModelUsage;
use serde_json::{Value, json};

use crate::{Event, Finish, Opening, ReadStream, Result, Stamp, Untranslatable, WriteStream, sse, usage};

use super::{read_finish, write_finish};

#[derive(Debug, Default)]
pub struct Reader {
    usage: Option<ModelUsage>,
    /// A block that others have a word for is open.
    open: bool,
    /// What was written has been told, which is later than what was read.
    told_output: bool,
    finish: Option<Finish>,
    ended: bool,
}

impl ReadStream for Reader {
    fn read(&mut self, data: &[u8], events: &mut Vec<Event>) -> Result<()> {
        let event: Value =
            serde_json::from_slice(data).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
        match event["type"].as_str().unwrap_or_default() {
            "message_start" => self.usage = usage::read_messages(&event["message"]["usage"], self.usage),
            "content_block_start" => {
                let block = &event["content_block"];
                let text = |name: &str| block[name].as_str().unwrap_or_default().to_owned();
                let opening = match block["type"].as_str().unwrap_or_default() {
                    "text" => Opening::Text,
                    "thinking" => Opening::Thinking,
                    "redacted_thinking" => Opening::Redacted(text("data")),
                    "tool_use" => Opening::Call {
                        id: text("id"),
                        name: text("name"),
                    },
                    // What the provider's own tools do.
                    _ => return Ok(()),
                };
                self.open = true;
                events.push(Event::Open(opening));
                events.extend(
                    Some(text("text"))
                        .filter(|text| !text.is_empty())
                        .map(Event::Text),
                );
            }
            "content_block_delta" if self.open => {
                let delta = &event["delta"];
                let text = |name: &str| delta[name].as_str().unwrap_or_default().to_owned();
                match delta["type"].as_str().unwrap_or_default() {
                    "text_delta" => events.push(Event::Text(text("text"))),
                    "thinking_delta" => events.push(Event::Thinking(text("thinking"))),
                    "signature_delta" => events.push(Event::Signature(text("signature"))),
                    "input_json_delta" => events.push(Event::Arguments(text("partial_json"))),
                    _ => {}
                }
            }
            "content_block_stop" if self.open => {
                self.open = false;
                events.push(Event::Close);
            }
            "message_delta" => {
                self.told_output |= event["usage"]["output_tokens"].is_number();
                self.usage = usage::read_messages(&event["usage"], self.usage).or(self.usage);
                self.finish = Some(read_finish(
                    &event["delta"]["stop_reason"],
                    &event["delta"]["stop_sequence"],
                ));
            }
            "message_stop" => {
                self.end(events);
            }
            "error" => {
                let message = event["error"]["message"]
                    .as_str()
                    .unwrap_or("the provider gave up");
                events.push(Event::Failed(message.to_owned()));
            }
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self, events: &mut Vec<Event>) -> bool {
        if std::mem::take(&mut self.open) {
            events.push(Event::Close);
        }
        // Of an answer that has come to its end, what was read is not all that was used.
        let usage = self.usage.take();
        let usage = usage.filter(|_| self.told_output || self.finish.is_none());
        events.extend(usage.map(Event::Usage));
        if let Some(finish) = self.finish.take() {
            self.ended = true;
            events.push(Event::Finish(finish));
        }
        self.ended
    }
}

#[derive(Debug)]
pub struct Writer {
    stamp: Stamp,
    begun: bool,
    blocks: u64,
    usage: ModelUsage,
}

impl Writer {
    pub fn new(stamp: Stamp) -> Self {
        Self {
            stamp,
            begun: false,
            blocks: 0,
            usage: ModelUsage::default(),
        }
    }

    /// What was read is not known yet on most other wires; the last event tells it.
    fn begin(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let message = json!({
            "id": format!("msg_{}", self.stamp.id), "type": "message", "role": "assistant", "model": self.stamp.model,
            "content": [], "stop_reason": null, "stop_sequence": null, "usage": usage::write_messages(&self.usage),
        });
        event(out, "message_start", json!({"message": message}));
    }

    fn delta(&self, delta: &Value, out: &mut Vec<u8>) {
        let index = self.blocks.saturating_sub(1);
        event(
            out,
            "content_block_delta",
            json!({"index": index, "delta": delta}),
        );
    }
}

fn event(out: &mut Vec<u8>, name: &str, mut fields: Value) {
    fields["type"] = name.into();
    sse::write(out, Some(name), &fields);
}

impl WriteStream for Writer {
    fn write(&mut self, piece: &Event, out: &mut Vec<u8>) {
        match piece {
            Event::Usage(usage) => self.usage = *usage,
            _ => self.begin(out),
        }
        match piece {
            Event::Usage(_) => {}
            Event::Open(opening) => {
                let block = match opening {
                    Opening::Text => json!({"type": "text", "text": ""}),
                    Opening::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
                    Opening::Redacted(data) => json!({"type": "redacted_thinking", "data": data}),
                    Opening::Call { id, name } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                };
                event(
                    out,
                    "content_block_start",
                    json!({"index": self.blocks, "content_block": block}),
                );
                self.blocks += 1;
            }
            Event::Text(text) => self.delta(&json!({"type": "text_delta", "text": text}), out),
            Event::Thinking(text) => self.delta(&json!({"type": "thinking_delta", "thinking": text}), out),
            Event::Signature(text) => self.delta(&json!({"type": "signature_delta", "signature": text}), out),
            Event::Arguments(text) => {
                self.delta(&json!({"type": "input_json_delta", "partial_json": text}), out);
            }
            Event::Close => {
                event(
                    out,
                    "content_block_stop",
                    json!({"index": self.blocks.saturating_sub(1)}),
                );
            }
            Event::Finish(finish) => {
                let (reason, stop) = write_finish(finish);
                let delta = json!({"stop_reason": reason, "stop_sequence": stop});
                event(
                    out,
                    "message_delta",
                    json!({"delta": delta, "usage": usage::write_messages(&self.usage)}),
                );
                event(out, "message_stop", json!({}));
            }
            Event::Failed(message) => {
                event(
                    out,
                    "error",
                    json!({"error": {"type": "api_error", "message": message}}),
                );
            }
        }
    }
}

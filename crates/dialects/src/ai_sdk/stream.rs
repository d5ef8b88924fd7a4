//! Stream parts of the AI SDK.

use atoll_types::ModelUsage;
use serde_json::{Value, json};

use crate::json::Built;
use crate::{Answer, Event, Opening, Part, Stamp, WriteStream, sse, usage};

use super::{signed, write_finish};

#[derive(Debug)]
pub struct Writer {
    stamp: Stamp,
    timestamp: String,
    /// What this gateway tells about the call.
    gateway: Value,
    begun: bool,
    blocks: u64,
    open: Answer,
    usage: ModelUsage,
}

impl Writer {
    pub fn new(stamp: Stamp, timestamp: String, gateway: Value) -> Self {
        Self {
            stamp,
            timestamp,
            gateway,
            begun: false,
            blocks: 0,
            open: Answer::default(),
            usage: ModelUsage::default(),
        }
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        part(out, &json!({"type": "stream-start", "warnings": []}));
        part(
            out,
            &json!({
                "type": "response-metadata", "id": self.stamp.id, "modelId": self.stamp.model,
                "timestamp": self.timestamp,
            }),
        );
    }

    fn id(&self) -> String {
        self.blocks.to_string()
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let id = self.id();
        self.blocks += 1;
        match std::mem::take(&mut self.open).parts.pop() {
            Some(Part::Text(_)) => part(out, &json!({"type": "text-end", "id": id})),
            Some(Part::Thinking { signature, .. }) => {
                let metadata = signature.as_ref().map(signed);
                let end = Built::default().with("type", "reasoning-end").with("id", id);
                part(out, &end.maybe("providerMetadata", metadata).into());
            }
            Some(Part::Redacted { .. }) => part(out, &json!({"type": "reasoning-end", "id": id})),
            Some(Part::Call {
                id, name, arguments, ..
            }) => {
                part(out, &json!({"type": "tool-input-end", "id": id}));
                let input = crate::chat::whole(&arguments);
                part(
                    out,
                    &json!({"type": "tool-call", "toolCallId": id, "toolName": name, "input": input}),
                );
            }
            _ => {}
        }
    }
}

fn part(out: &mut Vec<u8>, value: &Value) {
    sse::write(out, None, value);
}

impl WriteStream for Writer {
    fn write(&mut self, event: &Event, out: &mut Vec<u8>) {
        self.begin(out);
        match event {
            Event::Open(opening) => {
                let id = self.id();
                match opening {
                    Opening::Text => part(out, &json!({"type": "text-start", "id": id})),
                    Opening::Thinking => part(out, &json!({"type": "reasoning-start", "id": id})),
                    Opening::Redacted(data) => {
                        let metadata = json!({"anthropic": {"redactedData": data}});
                        part(
                            out,
                            &json!({"type": "reasoning-start", "id": id, "providerMetadata": metadata}),
                        );
                    }
                    Opening::Call { id, name } => {
                        part(
                            out,
                            &json!({"type": "tool-input-start", "id": id, "toolName": name}),
                        );
                    }
                }
                self.open.add(event.clone());
            }
            Event::Text(text) => part(
                out,
                &json!({"type": "text-delta", "id": self.id(), "delta": text}),
            ),
            Event::Thinking(text) => {
                part(
                    out,
                    &json!({"type": "reasoning-delta", "id": self.id(), "delta": text}),
                );
            }
            Event::Signature(_) => self.open.add(event.clone()),
            Event::Arguments(text) => {
                if let Some(Part::Call { id, .. }) = self.open.parts.last() {
                    part(out, &json!({"type": "tool-input-delta", "id": id, "delta": text}));
                }
                self.open.add(event.clone());
            }
            Event::Close => self.close(out),
            Event::Usage(usage) => self.usage = *usage,
            Event::Finish(finish) => {
                part(
                    out,
                    &json!({
                        "type": "finish", "finishReason": write_finish(finish),
                        "usage": usage::write_ai_sdk(&self.usage),
                        "providerMetadata": {"gateway": self.gateway},
                    }),
                );
                out.extend_from_slice(sse::DONE);
            }
            Event::Failed(message) => {
                let error = json!({"message": message, "type": "internal_server_error"});
                part(out, &json!({"type": "error", "error": error}));
                out.extend_from_slice(sse::DONE);
            }
        }
    }
}

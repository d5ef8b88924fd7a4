//! Events of a response. Every event carries a number, and every item its place, from which clients build it up.

use atoll_types::ModelUsage;
use serde_json::{Value, json};

use crate::{Answer, Event, Opening, Part, Stamp, WriteStream, sse};

use super::{item_id, response, skeleton, write_item};

#[derive(Debug)]
pub struct Writer {
    stamp: Stamp,
    sequence: u64,
    /// Items that are done.
    output: Vec<Value>,
    /// The one being written.
    open: Answer,
    usage: ModelUsage,
    begun: bool,
}

impl Writer {
    pub fn new(stamp: Stamp) -> Self {
        Self {
            stamp,
            sequence: 0,
            output: Vec::new(),
            open: Answer::default(),
            usage: ModelUsage::default(),
            begun: false,
        }
    }

    fn event(&mut self, name: &str, mut fields: Value, out: &mut Vec<u8>) {
        fields["type"] = name.into();
        fields["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        sse::write(out, Some(name), &fields);
    }

    /// An event about the item that is being written.
    fn about_item(&mut self, name: &str, kind: &str, mut fields: Value, out: &mut Vec<u8>) {
        let index = self.output.len() as u64;
        fields["output_index"] = index.into();
        fields["item_id"] = format!("{kind}_{}", item_id(&self.stamp, index)).into();
        self.event(name, fields, out);
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let response = skeleton(&self.stamp, "in_progress");
        self.event("response.created", json!({"response": response}), out);
        self.event("response.in_progress", json!({"response": response}), out);
    }

    fn open(&mut self, opening: &Opening, out: &mut Vec<u8>) {
        let index = self.output.len() as u64;
        let id = item_id(&self.stamp, index);
        let item = match opening {
            Opening::Text => json!({
                "id": format!("msg_{id}"), "type": "message", "role": "assistant", "status": "in_progress", "content": [],
            }),
            Opening::Thinking | Opening::Redacted(_) => {
                json!({"id": format!("rs_{id}"), "type": "reasoning", "summary": []})
            }
            Opening::Call { id: call, name } => json!({
                "id": format!("fc_{id}"), "type": "function_call", "status": "in_progress",
                "call_id": call, "name": name, "arguments": "",
            }),
        };
        self.event(
            "response.output_item.added",
            json!({"output_index": index, "item": item}),
            out,
        );
        match opening {
            Opening::Text => {
                let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                let fields = json!({"content_index": 0, "part": part});
                self.about_item("response.content_part.added", "msg", fields, out);
            }
            Opening::Thinking => {
                let fields = json!({"summary_index": 0, "part": {"type": "summary_text", "text": ""}});
                self.about_item("response.reasoning_summary_part.added", "rs", fields, out);
            }
            Opening::Redacted(_) | Opening::Call { .. } => {}
        }
    }

    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(part) = std::mem::take(&mut self.open).parts.pop() else {
            return;
        };
        match &part {
            Part::Text(part) => {
                let fields = json!({"content_index": 0, "text": part.text, "logprobs": []});
                self.about_item("response.output_text.done", "msg", fields, out);
                let done =
                    json!({"type": "output_text", "text": part.text, "annotations": [], "logprobs": []});
                let fields = json!({"content_index": 0, "part": done});
                self.about_item("response.content_part.done", "msg", fields, out);
            }
            Part::Thinking { text, .. } => {
                let fields = json!({"summary_index": 0, "text": text});
                self.about_item("response.reasoning_summary_text.done", "rs", fields, out);
                let fields = json!({"summary_index": 0, "part": {"type": "summary_text", "text": text}});
                self.about_item("response.reasoning_summary_part.done", "rs", fields, out);
            }
            Part::Call { name, arguments, .. } => {
                let fields = json!({"name": name, "arguments": crate::chat::whole(arguments)});
                self.about_item("response.function_call_arguments.done", "fc", fields, out);
            }
            Part::Redacted { .. } | Part::Image { .. } | Part::Document { .. } | Part::Result { .. } => {}
        }
        let index = self.output.len() as u64;
        if let Some(item) = write_item(&part, &item_id(&self.stamp, index)) {
            self.event(
                "response.output_item.done",
                json!({"output_index": index, "item": item}),
                out,
            );
            self.output.push(item);
        }
    }
}

impl WriteStream for Writer {
    fn write(&mut self, event: &Event, out: &mut Vec<u8>) {
        self.begin(out);
        match event {
            Event::Open(opening) => {
                self.open(opening, out);
                self.open.add(event.clone());
            }
            Event::Text(text) => {
                let fields = json!({"content_index": 0, "delta": text, "logprobs": []});
                self.about_item("response.output_text.delta", "msg", fields, out);
                self.open.add(event.clone());
            }
            Event::Thinking(text) => {
                let fields = json!({"summary_index": 0, "delta": text});
                self.about_item("response.reasoning_summary_text.delta", "rs", fields, out);
                self.open.add(event.clone());
            }
            Event::Arguments(text) => {
                self.about_item(
                    "response.function_call_arguments.delta",
                    "fc",
                    json!({"delta": text}),
                    out,
                );
                self.open.add(event.clone());
            }
            Event::Signature(_) => self.open.add(event.clone()),
            Event::Close => self.close(out),
            Event::Usage(usage) => self.usage = *usage,
            Event::Finish(finish) => {
                let whole = response(&self.stamp, std::mem::take(&mut self.output), finish, self.usage);
                let name = if whole["status"] == "completed" {
                    "response.completed"
                } else {
                    "response.incomplete"
                };
                self.event(name, json!({"response": whole}), out);
            }
            Event::Failed(message) => {
                let mut failed = skeleton(&self.stamp, "failed");
                failed["error"] = json!({"code": "server_error", "message": message});
                self.event("response.failed", json!({"response": failed}), out);
            }
        }
    }
}

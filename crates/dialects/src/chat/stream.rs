//! Chunks of a chat completion.

use serde_json::{Value, json};

use crate::json::Built;
use crate::{Event, Finish, Opening, ReadStream, Result, Stamp, Untranslatable, WriteStream, sse, usage};

use super::{read_finish, write_finish};

#[derive(Debug, Default)]
pub struct Reader {
    open: Option<Block>,
    /// Held back until the usage, which comes later, has come.
    finish: Option<Finish>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call(u64),
}

impl ReadStream for Reader {
    fn read(&mut self, data: &[u8], events: &mut Vec<Event>) -> Result<()> {
        if data == b"[DONE]" {
            self.end(events);
            return Ok(());
        }
        let chunk: Value =
            serde_json::from_slice(data).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
        if let Some(error) = chunk.get("error") {
            let message = error["message"]
                .as_str()
                .or(error.as_str())
                .unwrap_or("the provider gave up");
            events.push(Event::Failed(message.to_owned()));
            return Ok(());
        }
        if let Some(choice) = chunk["choices"].get(0) {
            let delta = &choice["delta"];
            let thought = delta["reasoning_content"]
                .as_str()
                .or(delta["reasoning"].as_str());
            if let Some(text) = thought.filter(|text| !text.is_empty()) {
                self.open(Block::Thinking, events, || Opening::Thinking);
                events.push(Event::Thinking(text.to_owned()));
            }
            let said = delta["content"].as_str().or(delta["refusal"].as_str());
            if let Some(text) = said.filter(|text| !text.is_empty()) {
                self.open(Block::Text, events, || Opening::Text);
                events.push(Event::Text(text.to_owned()));
            }
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                self.call(call, events)?;
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                self.close(events);
                self.finish = Some(read_finish(reason));
            }
        }
        events.extend(usage::read_chat(&chunk["usage"]).map(Event::Usage));
        Ok(())
    }

    fn end(&mut self, events: &mut Vec<Event>) -> bool {
        self.close(events);
        if let Some(finish) = self.finish.take() {
            self.ended = true;
            events.push(Event::Finish(finish));
        }
        self.ended
    }
}

impl Reader {
    fn call(&mut self, call: &Value, events: &mut Vec<Event>) -> Result<()> {
        // Some leave the index out and send one call at a time, each beginning with its id.
        let begins = call["id"].as_str().filter(|id| !id.is_empty());
        let index = call["index"].as_u64().unwrap_or(match (self.open, begins) {
            (Some(Block::Call(index)), None) => index,
            (Some(Block::Call(index)), Some(_)) => index + 1,
            _ => 0,
        });
        if self.open != Some(Block::Call(index)) {
            let name = call["function"]["name"].as_str();
            let (Some(id), Some(name)) = (begins, name) else {
                return Err(Untranslatable::new(
                    "answer.tool_calls",
                    "the provider mixes the calls of tools",
                ));
            };
            self.open(Block::Call(index), events, || Opening::Call {
                id: id.to_owned(),
                name: name.to_owned(),
            });
        }
        if let Some(arguments) = call["function"]["arguments"]
            .as_str()
            .filter(|text| !text.is_empty())
        {
            events.push(Event::Arguments(arguments.to_owned()));
        }
        Ok(())
    }

    fn open(&mut self, block: Block, events: &mut Vec<Event>, opening: impl FnOnce() -> Opening) {
        if self.open != Some(block) {
            self.close(events);
            self.open = Some(block);
            events.push(Event::Open(opening()));
        }
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            events.push(Event::Close);
        }
    }
}

#[derive(Debug)]
pub struct Writer {
    stamp: Stamp,
    /// The client asked for a last chunk with the usage.
    tells_usage: bool,
    begun: bool,
    calls: u64,
    usage: Option<Value>,
    thought: Option<(String, Option<String>)>,
}

impl Writer {
    pub fn new(stamp: Stamp, tells_usage: bool) -> Self {
        Self {
            stamp,
            tells_usage,
            begun: false,
            calls: 0,
            usage: None,
            thought: None,
        }
    }

    fn chunk(&self, choices: Value) -> Built {
        Built::default()
            .with("id", format!("chatcmpl-{}", self.stamp.id))
            .with("object", "chat.completion.chunk")
            .with("created", self.stamp.created)
            .with("model", self.stamp.model.clone())
            .with("choices", choices)
    }

    fn delta(&mut self, delta: &Value, out: &mut Vec<u8>) {
        if !self.begun {
            self.begun = true;
            self.write_delta(&json!({"role": "assistant", "content": ""}), &Value::Null, out);
        }
        self.write_delta(delta, &Value::Null, out);
    }

    fn write_delta(&self, delta: &Value, finish: &Value, out: &mut Vec<u8>) {
        let choice = json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]);
        let mut chunk = self.chunk(choice);
        if self.tells_usage {
            chunk = chunk.with("usage", Value::Null);
        }
        sse::write(out, None, &chunk.into());
    }
}

impl WriteStream for Writer {
    fn write(&mut self, event: &Event, out: &mut Vec<u8>) {
        match event {
            Event::Open(Opening::Call { id, name }) => {
                let index = self.calls;
                self.calls += 1;
                let call = json!([{
                    "index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""},
                }]);
                self.delta(&json!({"tool_calls": call}), out);
            }
            Event::Open(Opening::Redacted(data)) => {
                let detail = json!([{"type": "reasoning.encrypted", "data": data}]);
                self.delta(&json!({"reasoning_details": detail}), out);
            }
            Event::Open(Opening::Thinking) => self.thought = Some((String::new(), None)),
            Event::Text(text) => self.delta(&json!({"content": text}), out),
            Event::Thinking(text) => {
                if let Some((thought, _)) = &mut self.thought {
                    thought.push_str(text);
                }
                self.delta(&json!({"reasoning_content": text}), out);
            }
            Event::Signature(text) => {
                if let Some((_, signature)) = &mut self.thought {
                    signature.get_or_insert_default().push_str(text);
                }
            }
            Event::Arguments(text) => {
                let call = json!([{"index": self.calls.saturating_sub(1), "function": {"arguments": text}}]);
                self.delta(&json!({"tool_calls": call}), out);
            }
            Event::Close => {
                if let Some((text, Some(signature))) = self.thought.take() {
                    let detail = json!([{"type": "reasoning.text", "text": text, "signature": signature}]);
                    self.delta(&json!({"reasoning_details": detail}), out);
                }
            }
            Event::Open(Opening::Text) => {}
            Event::Usage(used) => self.usage = Some(usage::write_chat(used)),
            Event::Finish(finish) => {
                if !self.begun {
                    self.delta(&json!({}), out);
                }
                self.write_delta(&json!({}), &write_finish(finish).into(), out);
                if self.tells_usage {
                    let used = self
                        .usage
                        .take()
                        .unwrap_or_else(|| usage::write_chat(&Default::default()));
                    sse::write(out, None, &self.chunk(json!([])).with("usage", used).into());
                }
                out.extend_from_slice(sse::DONE);
            }
            Event::Failed(message) => {
                let error = json!({"error": {
                    "message": message, "type": "server_error", "param": null, "code": "provider_failed",
                }});
                sse::write(out, None, &error);
                out.extend_from_slice(sse::DONE);
            }
        }
    }
}

//! Pieces of a Gemini answer; a whole one is a single piece.

use serde_json::Value;

use crate::{Event, Finish, Opening, ReadStream, Result, Untranslatable};

use super::{read_finish, read_gemini};

#[derive(Debug, Default)]
pub struct Reader {
    open: Option<Block>,
    calls: u64,
    finish: Option<Finish>,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
}

impl ReadStream for Reader {
    fn read(&mut self, data: &[u8], events: &mut Vec<Event>) -> Result<()> {
        let piece: Value =
            serde_json::from_slice(data).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
        if let Some(error) = piece.get("error") {
            let message = error["message"].as_str().unwrap_or("the provider gave up");
            events.push(Event::Failed(message.to_owned()));
            return Ok(());
        }
        if piece["promptFeedback"]["blockReason"].is_string() {
            self.finish = Some(Finish::Filter);
        }
        if let Some(candidate) = piece["candidates"].get(0) {
            for part in candidate["content"]["parts"].as_array().into_iter().flatten() {
                self.part(part, events);
            }
            if let Some(reason) = candidate["finishReason"].as_str() {
                self.close(events);
                self.finish = Some(read_finish(reason, self.calls > 0));
            }
        }
        events.extend(read_gemini(&piece["usageMetadata"]).map(Event::Usage));
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
    fn part(&mut self, part: &Value, events: &mut Vec<Event>) {
        let is_thought = part["thought"] == true;
        if let Some(signature) = part["thoughtSignature"].as_str().filter(|_| !is_thought) {
            // It belongs to what was thought before, which may not have been shown.
            if self.open != Some(Block::Thinking) {
                self.open(Block::Thinking, events, Opening::Thinking);
            }
            events.push(Event::Signature(signature.to_owned()));
            self.close(events);
        }
        if let Some(text) = part["text"].as_str().filter(|text| !text.is_empty()) {
            if is_thought {
                self.open(Block::Thinking, events, Opening::Thinking);
                events.push(Event::Thinking(text.to_owned()));
            } else {
                self.open(Block::Text, events, Opening::Text);
                events.push(Event::Text(text.to_owned()));
            }
        } else if let Some(name) = part["functionCall"]["name"].as_str() {
            self.close(events);
            let id = match part["functionCall"]["id"].as_str() {
                Some(id) => id.to_owned(),
                None => format!("call_{}_{name}", self.calls),
            };
            self.calls += 1;
            events.push(Event::Open(Opening::Call {
                id,
                name: name.to_owned(),
            }));
            let arguments = &part["functionCall"]["args"];
            let text = if arguments.is_null() {
                "{}".to_owned()
            } else {
                arguments.to_string()
            };
            events.extend([Event::Arguments(text), Event::Close]);
        }
    }

    fn open(&mut self, block: Block, events: &mut Vec<Event>, opening: Opening) {
        if self.open != Some(block) {
            self.close(events);
            self.open = Some(block);
            events.push(Event::Open(opening));
        }
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            events.push(Event::Close);
        }
    }
}

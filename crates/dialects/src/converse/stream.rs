//! Events of a conversation, each as an object of one field: the name of the event.

use atoll_types::ModelUsage;
use serde_json::Value;

use crate::{Event, Finish, Opening, ReadStream, Result, Untranslatable, usage};

use super::read_finish;

#[derive(Debug, Default)]
pub struct Reader {
    /// The block that is open, by its number; text and thinking open without being announced.
    open: Option<u64>,
    usage: Option<ModelUsage>,
    finish: Option<Finish>,
    ended: bool,
}

impl ReadStream for Reader {
    fn read(&mut self, data: &[u8], events: &mut Vec<Event>) -> Result<()> {
        let event: Value =
            serde_json::from_slice(data).map_err(|error| Untranslatable::new("answer", error.to_string()))?;
        let Some((name, event)) = event.as_object().and_then(|fields| fields.iter().next()) else {
            return Err(Untranslatable::new("answer", "an event without a name"));
        };
        match name.as_str() {
            "contentBlockStart" => {
                let tool = &event["start"]["toolUse"];
                let text = |field: &str| tool[field].as_str().unwrap_or_default().to_owned();
                if tool.is_object() {
                    let opening = Opening::Call {
                        id: text("toolUseId"),
                        name: text("name"),
                    };
                    self.open(&event["contentBlockIndex"], opening, events);
                }
            }
            "contentBlockDelta" => self.delta(&event["contentBlockIndex"], &event["delta"], events),
            "contentBlockStop" => self.close(events),
            "messageStop" => {
                self.close(events);
                self.finish = event["stopReason"].as_str().map(read_finish);
            }
            "metadata" => self.usage = usage::read_converse(&event["usage"]).or(self.usage),
            name if name.ends_with("Exception") => {
                let said = event["message"].as_str().unwrap_or("the provider gave up");
                events.push(Event::Failed(said.to_owned()));
            }
            _ => {}
        }
        Ok(())
    }

    /// What was used comes behind the end of the message, so both wait for the end of the stream.
    fn end(&mut self, events: &mut Vec<Event>) -> bool {
        self.close(events);
        events.extend(self.usage.take().map(Event::Usage));
        if let Some(finish) = self.finish.take() {
            self.ended = true;
            events.push(Event::Finish(finish));
        }
        self.ended
    }
}

impl Reader {
    fn delta(&mut self, index: &Value, delta: &Value, events: &mut Vec<Event>) {
        let thought = &delta["reasoningContent"];
        if let Some(text) = delta["text"].as_str() {
            self.open(index, Opening::Text, events);
            events.push(Event::Text(text.to_owned()));
        } else if let Some(text) = delta["toolUse"]["input"].as_str() {
            events.push(Event::Arguments(text.to_owned()));
        } else if let Some(text) = thought["text"].as_str() {
            self.open(index, Opening::Thinking, events);
            events.push(Event::Thinking(text.to_owned()));
        } else if let Some(signature) = thought["signature"].as_str() {
            self.open(index, Opening::Thinking, events);
            events.push(Event::Signature(signature.to_owned()));
        } else if let Some(data) = thought["redactedContent"].as_str() {
            self.open(index, Opening::Redacted(data.to_owned()), events);
        }
    }

    fn open(&mut self, index: &Value, opening: Opening, events: &mut Vec<Event>) {
        let index = index.as_u64().unwrap_or_default();
        if self.open == Some(index) {
            return;
        }
        self.close(events);
        self.open = Some(index);
        events.push(Event::Open(opening));
    }

    fn close(&mut self, events: &mut Vec<Event>) {
        if self.open.take().is_some() {
            events.push(Event::Close);
        }
    }
}

//! What was asked and answered, for operators who turn that on: redacted, shortened, kept for a while, off by default.
//!
//! What must hold: nothing is kept that was not screened, and what cannot be screened is not kept. Streams are put together
//! first, so that what is split over their pieces is found, too. It is written beside the call and never slows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use atoll_dialects::screen::{Action, KNOWN, Screen};
use atoll_dialects::sse::Splitter;
use atoll_dialects::{Answer, Dialect, ReadStream, Stamp, chat, messages};
use atoll_store::ModelBodies;
use atoll_types::{Fault, ModelCallId, ProjectId};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::Models;
use crate::faults::from_store;
use crate::guards::in_time;

/// What is kept of each.
const LARGEST: usize = 64 * 1024;
/// How many calls' are kept at most.
const MOST: usize = 10_000;
const TRIM_EVERY_MILLIS: i64 = 60_000;
/// Keys and tokens as well-known services spell them, and ours.
const TOKEN: &str = r"\b(?:sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|at[lms]_[A-Za-z0-9]{16,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,})";

/// Exists where bodies are kept.
#[derive(Debug)]
pub(crate) struct Bodies {
    keep: Duration,
    screen: Screen,
    trimmed_at: AtomicI64,
}

impl Bodies {
    pub(crate) fn new(keep: Duration) -> Result<Self, String> {
        let known = KNOWN.map(|name| (name, None, Action::Redact));
        let rules = known.into_iter().chain([("token", Some(TOKEN), Action::Redact)]);
        Ok(Self {
            keep,
            screen: Screen::new(rules)?,
            trimmed_at: AtomicI64::new(i64::MIN),
        })
    }

    /// A JSON text as it may be kept; empty if it is none, or takes too long to look through.
    fn clean(&self, body: &Bytes) -> (String, bool) {
        let screened = self.screen.apply(body, in_time()).ok();
        let text = screened
            .and_then(|bytes| String::from_utf8(bytes.to_vec()).ok())
            .unwrap_or_default();
        let mut end = text.len().min(LARGEST);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        (text[..end].to_owned(), end < text.len())
    }
}

impl Models {
    /// What was asked and answered in a call, if it was kept.
    pub async fn bodies(
        &self,
        project: &ProjectId,
        call: &ModelCallId,
    ) -> Result<Option<ModelBodies>, Fault> {
        self.store()
            .models
            .model_bodies(project, call)
            .await
            .map_err(|e| from_store(&e))
    }

    /// Keeps what was asked and answered. `stream`: the answer is one of events, on this wire.
    pub(crate) fn keep_bodies(
        &self,
        call: ModelCallId,
        project: ProjectId,
        request: Bytes,
        answer: Bytes,
        stream: Option<Dialect>,
    ) {
        let Some(bodies) = &self.inner.bodies else { return };
        let (models, bytes) = (self.clone(), request.len() + answer.len());
        let cleaning = move || {
            let bodies = models.inner.bodies.as_ref()?;
            let (request, cut_request) = bodies.clean(&request);
            let (answer, cut_answer) = match stream {
                None => bodies.clean(&answer),
                Some(dialect) => bodies.clean(&transcript(dialect, &answer)),
            };
            Some(ModelBodies {
                request,
                answer,
                shortened: cut_request || cut_answer,
            })
        };
        let now = self.now();
        let trim = now.0.saturating_sub(bodies.trimmed_at.load(Ordering::Relaxed)) > TRIM_EVERY_MILLIS;
        if trim {
            bodies.trimmed_at.store(now.0, Ordering::Relaxed);
        }
        let keep = i64::try_from(bodies.keep.as_millis()).unwrap_or(i64::MAX);
        let before = atoll_types::Timestamp(now.0.saturating_sub(keep));
        let (store, models) = (Arc::clone(&self.store().models), self.clone());
        self.spawn(async move {
            let Ok(Some(kept)) = models.apart(&project, bytes, cleaning).await else {
                return;
            };
            let mut outcome = store.put_model_bodies(call, project, now, kept).await;
            if trim {
                outcome = outcome.and(store.trim_model_bodies(before, MOST).await.map(drop));
            }
            if let Err(error) = outcome {
                tracing::warn!(%error, "what was asked and answered could not be kept");
            }
        });
    }
}

/// A stream as one JSON text.
fn transcript(dialect: Dialect, stream: &Bytes) -> Bytes {
    let mut splitter = Splitter::default();
    splitter.push(stream);
    let mut datas = Vec::new();
    while let Ok(Some(event)) = splitter.take() {
        datas.extend(event.data());
    }
    let value = match dialect {
        Dialect::Chat => collect(chat::Reader::default(), &datas),
        Dialect::Messages => collect(messages::Reader::default(), &datas),
        // The last event holds the whole answer.
        Dialect::Responses => datas
            .iter()
            .rev()
            .find_map(|data| {
                serde_json::from_slice::<Value>(data)
                    .ok()
                    .filter(|event| event["response"].is_object())
            })
            .map(|mut event| event["response"].take()),
        _ => Some(collect_parts(&datas)),
    };
    value.map(|value| value.to_string()).unwrap_or_default().into()
}

fn collect(mut reader: impl ReadStream, datas: &[impl AsRef<[u8]>]) -> Option<Value> {
    let mut events = Vec::new();
    for data in datas {
        reader.read(data.as_ref(), &mut events).ok()?;
    }
    reader.end(&mut events);
    let stamp = Stamp {
        id: String::new(),
        model: String::new(),
        created: 0,
    };
    let mut whole = chat::write_answer(&Answer::collect(events), &stamp);
    Some(whole["choices"].take())
}

/// What the parts of the AI SDK's stream say.
fn collect_parts(datas: &[impl AsRef<[u8]>]) -> Value {
    let (mut text, mut thinking, mut calls) = (String::new(), String::new(), Vec::new());
    for part in datas
        .iter()
        .filter_map(|data| serde_json::from_slice::<Value>(data.as_ref()).ok())
    {
        let delta = part["delta"].as_str().unwrap_or_default();
        match part["type"].as_str() {
            Some("text-delta") => text.push_str(delta),
            Some("reasoning-delta") => thinking.push_str(delta),
            Some("tool-call") => calls.push(part),
            _ => {}
        }
    }
    json!({"text": text, "reasoning": thinking, "tool_calls": calls})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_split_over_a_stream_is_redacted_and_what_is_no_json_is_not_kept() {
        let bodies = Bodies::new(Duration::from_secs(1)).unwrap();
        let stream = concat!(
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"to ann@mail\"},\"finish_reason\":null}]}\n\n",
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\".example.org\"},\"finish_reason\":\"stop\"}]}\n\n",
            "data: [DONE]\n\n",
        );
        let whole = transcript(Dialect::Chat, &Bytes::from_static(stream.as_bytes()));
        let (kept, shortened) = bodies.clean(&whole);
        assert!(
            kept.contains("to [email]") && !kept.contains("ann@") && !shortened,
            "{kept}"
        );
        let (kept, _) = bodies.clean(&Bytes::from_static(br#"{"k":"sk-abcdefghijklmnopqrst"}"#));
        assert_eq!(kept, r#"{"k":"[token]"}"#);
        assert_eq!(bodies.clean(&Bytes::from_static(b"{\"a\":\"")).0, "");
        let long = Bytes::from(format!(r#"{{"a":"{}"}}"#, "é".repeat(LARGEST)));
        let (kept, shortened) = bodies.clean(&long);
        assert!(shortened && kept.len() <= LARGEST);
    }
}

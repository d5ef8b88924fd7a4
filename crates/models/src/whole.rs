//! Answers in one piece: untouched where both speak the same wire, translated where not.

use std::sync::Arc;

use atoll_dialects::{
    Dialect, Stamp, Watch, ai_sdk, chat, converse, embeddings, gemini, messages, responses,
};
use atoll_providers::Reply;
use atoll_types::{Code, Fault, ModelUsage};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::Request;
use crate::faults::Refusal;
use crate::outgoing::Outgoing;
use crate::settlement::{Open, Progress};

/// An answer in one piece.
pub(crate) async fn whole(
    request: &Arc<Request>,
    outgoing: &Outgoing,
    reply: Reply,
    open: &mut Open,
) -> Result<Bytes, Refusal> {
    let body = reply.whole().await.map_err(|error| failed(error.to_string()))?;
    let answer = Whole {
        request: Arc::clone(request),
        speaks: outgoing.speaks,
        stamp: stamp(open),
        timestamp: timestamp(open),
        gateway: about(open),
        guessed: open.row.usage,
        body,
    };
    let mut seen = open.seen.clone();
    let (models, project, bytes) = (open.models.clone(), open.row.project.clone(), answer.body.len());
    let reading = move || {
        let read = answer.read(&mut seen);
        (read, seen)
    };
    let (read, seen) = models.apart(&project, bytes, reading).await?;
    open.seen = seen;
    read
}

fn failed(why: String) -> Refusal {
    Fault::new(Code::ProviderFailed, why).into()
}

/// An answer in one piece, and what is said about it on the client's wire.
struct Whole {
    request: Arc<Request>,
    /// The provider.
    speaks: Dialect,
    body: Bytes,
    stamp: Stamp,
    timestamp: String,
    gateway: Value,
    /// What it used, where its provider does not count.
    guessed: ModelUsage,
}

impl Whole {
    /// The answer for the client.
    fn read(self, seen: &mut Progress) -> Result<Bytes, Refusal> {
        let Self {
            request,
            speaks,
            body,
            stamp,
            timestamp,
            gateway,
            guessed,
        } = self;
        if speaks == request.dialect {
            let mut watch = Watch::new(speaks);
            watch.body(&body);
            if !watch.seen.finished {
                return Err(failed("the provider's answer is not JSON".into()));
            }
            seen.usage = watch.seen.usage;
            seen.written = watch.seen.written;
            seen.finish = watch.seen.reason;
            seen.complete = seen.usage.is_some();
            return Ok(body);
        }
        let garbage = |error: atoll_dialects::Untranslatable| {
            failed(format!("the provider's answer makes no sense: {error}"))
        };
        if matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings) {
            let mut answer = match speaks {
                Dialect::Gemini => embeddings::read_gemini(&body),
                _ => embeddings::read_openai(&body),
            }
            .map_err(garbage)?;
            seen.complete = answer.usage.is_some();
            seen.usage = answer.usage;
            // One that does not count is told our guess.
            answer.usage = answer.usage.or(Some(guessed));
            let packed =
                request.dialect == Dialect::Embeddings && embeddings::read_request(&request.body)?.packed;
            let written = match request.dialect {
                Dialect::AiSdkEmbeddings => embeddings::write_ai_sdk_answer(&answer, &gateway),
                _ => embeddings::write_openai_answer(&answer, &stamp.model, packed),
            };
            return Ok(written.to_string().into());
        }
        let answer = match speaks {
            Dialect::Messages => messages::read_answer(&body),
            Dialect::Gemini => gemini::read_answer(&body),
            Dialect::Converse => converse::read_answer(&body),
            _ => chat::read_answer(&body),
        }
        .map_err(garbage)?;
        seen.usage = answer.usage;
        seen.complete = answer.usage.is_some();
        seen.written = body.len() as u64;
        let written = match request.dialect {
            Dialect::Responses => responses::write_answer(&answer, &stamp),
            Dialect::Messages => messages::write_answer(&answer, &stamp),
            Dialect::AiSdk => ai_sdk::write_answer(&answer, &stamp, &timestamp, &gateway),
            _ => chat::write_answer(&answer, &stamp),
        };
        Ok(written.to_string().into())
    }
}

pub(crate) fn stamp(open: &Open) -> Stamp {
    Stamp {
        id: open.row.id.bare().to_owned(),
        model: open.row.asked.clone(),
        created: open.row.started_at.0.div_euclid(1000),
    }
}

pub(crate) fn timestamp(open: &Open) -> String {
    jiff::Timestamp::from_millisecond(open.row.started_at.0)
        .map_or_else(|_| String::new(), |at| at.to_string())
}

/// What the gateway tells a client of the AI SDK about the call.
pub(crate) fn about(open: &Open) -> Value {
    json!({
        "generationId": open.row.id.as_str(),
        "routing": {
            "originalModelId": open.row.asked,
            "finalProvider": open.row.provider,
            "resolvedProviderApiModelId": open.row.model,
            "attempts": open.row.attempts,
        },
    })
}

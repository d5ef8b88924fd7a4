//! From a provider's answer to the client's: untouched where both speak the same wire, translated where not.
//!
//! What must hold: an event is passed on when it is whole, never held for the next. What has been passed on is accounted for
//! before the next is read. A stream that breaks off ends with an error in the client's wire, not as if it were complete. One
//! that the client leaves is heard out where a budget applies ([`crate::conduct`]), and so is one that it does not read.

use std::pin::Pin;
use std::sync::Arc;

use atoll_dialects::sse::Raw;
use atoll_dialects::{
    Answer, Dialect, Event, ReadStream, Stamp, Watch, WriteStream, ai_sdk, chat, converse, embeddings,
    event_stream, failure, gemini, messages, responses, sse,
};
use atoll_gateway_core::{Target, input_tokens};
use atoll_providers::{Call, Reply};
use atoll_types::{Code, Fault, ModelCallId, ProjectId, Usd};
use bytes::Bytes;
use futures_util::Stream;
use serde_json::{Value, json};

use crate::cache::{self, Slot};
use crate::faults::Refusal;
use crate::listening::{Source, listen};
use crate::outgoing::Outgoing;
use crate::settlement::Open;
use crate::{Models, Request, Who, attempts, conduct};

/// Bytes of an answer, as they come.
pub type AnswerStream = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

#[allow(missing_debug_implementations, reason = "a stream has nothing to show")]
pub enum Served {
    Whole {
        call: ModelCallId,
        body: Bytes,
        cost: Usd,
        /// It had been given before.
        cached: bool,
    },
    /// Server-sent events. Dropping it tells the provider that nobody listens.
    Stream {
        call: ModelCallId,
        events: AnswerStream,
        cached: bool,
    },
}

/// A call that may be made, and was not made yet.
struct Begun {
    request: Request,
    open: Open,
    targets: Vec<Target>,
    stream: bool,
    wants_usage: bool,
    slot: Option<Slot>,
    /// The same was answered before.
    kept: Option<Bytes>,
}

impl Models {
    /// Serves one call, from the question who pays to the last byte.
    pub async fn call(&self, who: &Who, request: Request) -> Result<Served, Refusal> {
        let estimated = input_tokens(&request.body);
        self.take_rate(who, estimated)?;
        let begun = self.begin(who, request, estimated).await.inspect_err(|_| {
            // Nothing was used after all.
            if let Some(key) = &who.key {
                key.correct(estimated, 0);
            }
        })?;
        if let Some(body) = begun.kept {
            return again(begun.open, body, begun.stream).await;
        }
        let (gone, to_its_end) = (Arc::clone(&begun.open.gone), begun.open.is_capped);
        let models = self.clone();
        let project = who.spender.project.clone();
        let answering = Box::pin(async move { models.answer(begun).await });
        self.conduct(project, gone, to_its_end, answering).await?
    }

    /// All that is decided before a provider is asked.
    async fn begin(&self, who: &Who, mut request: Request, estimated: u64) -> Result<Begun, Refusal> {
        request.body = self.guarded_body(who, request.body).await?;
        let slot = Slot::of(who, &request);
        let kept = slot.and_then(|slot| self.inner.cache.get(&slot, self.now()));
        let admitted = self.admit(who, &request, kept.is_some(), estimated)?;
        let stream =
            admitted.stream && !matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings);
        let wants_usage = admitted.wants_usage;
        let (open, targets) = Open::begin(self, who, &request, admitted);
        Ok(Begun {
            request,
            open,
            targets,
            stream,
            wants_usage,
            slot,
            kept,
        })
    }

    async fn answer(&self, begun: Begun) -> Result<Served, Refusal> {
        let Begun {
            request,
            mut open,
            targets,
            stream,
            wants_usage,
            slot,
            kept: _,
        } = begun;
        let call = open.row.id.clone();
        let answered = Box::pin(self.attempt(&mut open, &request, &targets, stream)).await;
        let durable = open.durable().await;
        let (reply, outgoing) = match (answered, durable) {
            (Ok(answered), Ok(())) => answered,
            (Err(refusal), _) => {
                open.failed(&refusal.fault.message);
                return Err(Refusal {
                    call: Some(call),
                    ..refusal
                });
            }
            (Ok(_), Err(fault)) => {
                open.failed(&fault.message);
                return Err(Refusal {
                    call: Some(call),
                    ..fault.into()
                });
            }
        };
        if stream {
            let mode = Mode::between(&request, &outgoing, &open, wants_usage);
            let copy = Copy::wanted(self, &open, &request, slot);
            let relay = Relay {
                open: Some(open),
                reply,
                received: 0,
                splitter: Splitter::of(outgoing.speaks),
                mode,
                dialect: request.dialect,
                copy,
            };
            // Where a budget applies, money is set aside for as long as this lasts.
            let (dialect, is_capped) = (request.dialect, relay.is_capped());
            let too_late = move || failure(dialect, "nobody has read this answer for too long").into();
            let listened = Listened(Some(Box::new(relay)));
            let events = listen(listened, &self.inner.runtime, is_capped, too_late);
            return Ok(Served::Stream {
                call,
                events: Box::pin(events),
                cached: false,
            });
        }
        match whole(&request, &outgoing, reply, &mut open).await {
            Ok(body) => {
                if let Some(slot) = &slot {
                    self.inner.cache.put(slot, body.clone(), self.now());
                }
                let asked = request.body.clone();
                self.keep_bodies(call.clone(), open.row.project.clone(), asked, body.clone(), None);
                let row = open.done();
                Ok(Served::Whole {
                    call,
                    body,
                    cost: row.cost,
                    cached: false,
                })
            }
            Err(refusal) => {
                open.failed(&refusal.fault.message);
                Err(Refusal {
                    call: Some(call),
                    ..refusal
                })
            }
        }
    }

    /// How many tokens a request of the Messages wire has: the provider's own count where it counts, else a guess.
    pub async fn count_tokens(&self, who: &Who, body: Bytes) -> Result<u64, Refusal> {
        let estimated = input_tokens(&body);
        self.take_rate(who, estimated)?;
        let counted = self.count(who, body).await;
        if let Some(key) = &who.key {
            // Counting costs a request, but no tokens.
            key.correct(estimated, 0);
        }
        counted
    }

    async fn count(&self, who: &Who, body: Bytes) -> Result<u64, Refusal> {
        let request = Request {
            dialect: Dialect::Messages,
            body: self.guarded_body(who, body).await?,
            model: None,
            stream: Some(false),
            headers: Vec::new(),
            keep: None,
        };
        let peek = atoll_dialects::Peek::at(request.dialect, &request.body)?;
        let asked = peek.model.unwrap_or_default();
        self.refuse_unlisted(who, &asked)?;
        let setup = self.setup(&who.spender.project);
        let targets = setup
            .catalogue
            .plan(&asked, &Default::default(), |_| Default::default(), 0)?;
        self.refuse_blocked(who, &setup, &asked, &targets)?;
        let target = &targets[0];
        let counts = setup
            .providers
            .get(&target.provider)
            .filter(|provider| provider.row.kind == atoll_types::ProviderKind::Anthropic);
        let Some(provider) = counts else {
            return Ok(input_tokens(&request.body));
        };
        let outgoing = Outgoing::prepare(&request, &provider.row, target, None, false, None)?;
        let call = Call {
            kind: provider.row.kind,
            base_url: &provider.row.base_url,
            path: "/v1/messages/count_tokens",
            headers: &[],
            body: outgoing.body,
            stream: false,
        };
        let project = &who.spender.project;
        let failed = |error: &atoll_providers::Error| attempts::failed(target, error).0;
        let ready = self.with_key(provider, call).map_err(|error| failed(&error))?;
        let sent = self
            .inner
            .providers
            .send(ready, project, self.reach_of(project))
            .await;
        let reply = sent.map_err(|error| failed(&error))?;
        if !(200..300).contains(&reply.status) {
            return Err(attempts::refused(target, reply, true).await);
        }
        let body = reply.whole().await.map_err(|error| failed(&error))?;
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        value["input_tokens"].as_u64().ok_or_else(|| {
            let message = format!("provider `{}` did not count", target.provider);
            Fault::new(Code::ProviderFailed, message).into()
        })
    }
}

/// Gives an answer that was given before.
async fn again(open: Open, body: Bytes, stream: bool) -> Result<Served, Refusal> {
    let call = open.row.id.clone();
    if let Err(fault) = open.durable().await {
        open.failed(&fault.message);
        return Err(Refusal {
            call: Some(call),
            ..fault.into()
        });
    }
    // Nobody was asked, so nothing is owed.
    let cost = open.done().cost;
    Ok(if stream {
        let events = futures_util::stream::once(std::future::ready(body));
        Served::Stream {
            call,
            events: Box::pin(events),
            cached: true,
        }
    } else {
        Served::Whole {
            call,
            body,
            cost,
            cached: true,
        }
    })
}

/// An answer in one piece.
async fn whole(
    request: &Request,
    outgoing: &Outgoing,
    reply: Reply,
    open: &mut Open,
) -> Result<Bytes, Refusal> {
    let failed = |why: String| Refusal::from(Fault::new(Code::ProviderFailed, why));
    let body = reply.whole().await.map_err(|error| failed(error.to_string()))?;
    if outgoing.speaks == request.dialect {
        let mut watch = Watch::new(outgoing.speaks);
        watch.body(&body);
        if !watch.seen.finished {
            return Err(failed("the provider's answer is not JSON".into()));
        }
        open.seen.usage = watch.seen.usage;
        open.seen.written = watch.seen.written;
        open.seen.finish = watch.seen.reason;
        open.seen.complete = open.seen.usage.is_some();
        return Ok(body);
    }
    let garbage = |error: atoll_dialects::Untranslatable| {
        failed(format!("the provider's answer makes no sense: {error}"))
    };
    let gateway = about(open);
    if matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings) {
        let mut answer = match outgoing.speaks {
            Dialect::Gemini => embeddings::read_gemini(&body),
            _ => embeddings::read_openai(&body),
        }
        .map_err(garbage)?;
        open.seen.complete = answer.usage.is_some();
        open.seen.usage = answer.usage;
        // One that does not count is told our guess.
        answer.usage = answer.usage.or(Some(open.row.usage));
        let packed =
            request.dialect == Dialect::Embeddings && embeddings::read_request(&request.body)?.packed;
        let written = match request.dialect {
            Dialect::AiSdkEmbeddings => embeddings::write_ai_sdk_answer(&answer, &gateway),
            _ => embeddings::write_openai_answer(&answer, &open.row.asked, packed),
        };
        return Ok(written.to_string().into());
    }
    let answer = match outgoing.speaks {
        Dialect::Messages => messages::read_answer(&body),
        Dialect::Gemini => gemini::read_answer(&body),
        Dialect::Converse => converse::read_answer(&body),
        _ => chat::read_answer(&body),
    }
    .map_err(garbage)?;
    open.seen.usage = answer.usage;
    open.seen.complete = answer.usage.is_some();
    open.seen.written = body.len() as u64;
    let written = write_whole(request.dialect, &answer, &stamp(open), &gateway, open);
    Ok(written.to_string().into())
}

fn write_whole(dialect: Dialect, answer: &Answer, stamp: &Stamp, gateway: &Value, open: &Open) -> Value {
    match dialect {
        Dialect::Responses => responses::write_answer(answer, stamp),
        Dialect::Messages => messages::write_answer(answer, stamp),
        Dialect::AiSdk => ai_sdk::write_answer(answer, stamp, &timestamp(open), gateway),
        _ => chat::write_answer(answer, stamp),
    }
}

fn stamp(open: &Open) -> Stamp {
    Stamp {
        id: open.row.id.bare().to_owned(),
        model: open.row.asked.clone(),
        created: open.row.started_at.0.div_euclid(1000),
    }
}

fn timestamp(open: &Open) -> String {
    jiff::Timestamp::from_millisecond(open.row.started_at.0)
        .map_or_else(|_| String::new(), |at| at.to_string())
}

/// What the gateway tells a client of the AI SDK about the call.
fn about(open: &Open) -> Value {
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

/// A stream that somebody listens to, until it is dropped.
struct Listened(Option<Box<Relay>>);

impl Source for Listened {
    async fn next(&mut self) -> Option<Bytes> {
        self.0.as_mut()?.next().await
    }
}

impl Drop for Listened {
    fn drop(&mut self) {
        let Some(mut relay) = self.0.take() else { return };
        let Some(open) = &relay.open else { return };
        // Some hang up as soon as they have heard the end.
        if open.seen.complete {
            return relay.finish();
        }
        if !open.is_capped && !open.seen.finished {
            return;
        }
        open.gone.store(true, std::sync::atomic::Ordering::Relaxed);
        let (models, project) = (open.models.clone(), open.row.project.clone());
        open.models.clone().spawn(async move {
            models.hear_out(&project, relay.drain()).await;
        });
    }
}

struct Relay {
    /// `None` once it is settled.
    open: Option<Open>,
    reply: Reply,
    /// Bytes so far.
    received: u64,
    splitter: Splitter,
    mode: Mode,
    dialect: Dialect,
    copy: Option<Copy>,
}

/// Cuts what arrives into events.
enum Splitter {
    Lines(sse::Splitter),
    Binary(event_stream::Splitter),
}

impl Splitter {
    fn of(speaks: Dialect) -> Self {
        match speaks {
            Dialect::Converse => Self::Binary(event_stream::Splitter::default()),
            _ => Self::Lines(sse::Splitter::default()),
        }
    }

    fn push(&mut self, chunk: &[u8]) {
        match self {
            Self::Lines(lines) => lines.push(chunk),
            Self::Binary(binary) => binary.push(chunk),
        }
    }

    fn take(&mut self) -> Result<Option<Raw>, String> {
        match self {
            Self::Lines(lines) => lines.take().map_err(|error| error.to_string()),
            Self::Binary(binary) => binary.take().map_err(|error| error.to_string()),
        }
    }

    /// What is left at the end, where half an event says something.
    fn rest(&mut self) -> Option<Raw> {
        match self {
            Self::Lines(lines) => lines.rest(),
            Self::Binary(_) => None,
        }
    }
}

/// What was passed on so far, where it is to be kept.
struct Copy {
    models: Models,
    call: ModelCallId,
    project: ProjectId,
    request: Bytes,
    /// Where it is given again from.
    slot: Option<Slot>,
    bytes: Vec<u8>,
    /// The provider has closed a stream that was complete.
    ended: bool,
}

impl Copy {
    /// `None`: nobody wants one.
    fn wanted(models: &Models, open: &Open, request: &Request, slot: Option<Slot>) -> Option<Self> {
        (slot.is_some() || models.inner.bodies.is_some()).then(|| Self {
            models: models.clone(),
            call: open.row.id.clone(),
            project: open.row.project.clone(),
            request: request.body.clone(),
            slot,
            bytes: Vec::new(),
            ended: false,
        })
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.bytes.len() + bytes.len() > cache::LARGEST {
            // Half of it cannot be given again; to be looked at, the beginning is enough.
            self.slot = None;
            return;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn keep(self, is_complete: bool, dialect: Dialect) {
        let bytes = Bytes::from(self.bytes);
        if let Some(slot) = self.slot.filter(|_| is_complete) {
            self.models
                .inner
                .cache
                .put(&slot, bytes.clone(), self.models.now());
        }
        self.models
            .keep_bodies(self.call, self.project, self.request, bytes, Some(dialect));
    }
}

enum Mode {
    Pass {
        watch: Watch,
        /// The usage was asked for by us: the client does not expect it.
        hide_usage: bool,
    },
    Translate {
        reader: Box<dyn ReadStream>,
        writer: Box<dyn WriteStream>,
        failed: Option<String>,
    },
}

impl Mode {
    fn between(request: &Request, outgoing: &Outgoing, open: &Open, wants_usage: bool) -> Self {
        if outgoing.speaks == request.dialect {
            return Self::Pass {
                watch: Watch::new(outgoing.speaks),
                hide_usage: !wants_usage,
            };
        }
        let reader: Box<dyn ReadStream> = match outgoing.speaks {
            Dialect::Messages => Box::new(messages::Reader::default()),
            Dialect::Gemini => Box::new(gemini::Reader::default()),
            Dialect::Converse => Box::new(converse::Reader::default()),
            _ => Box::new(chat::Reader::default()),
        };
        let stamp = stamp(open);
        let writer: Box<dyn WriteStream> = match request.dialect {
            Dialect::Responses => Box::new(responses::Writer::new(stamp)),
            Dialect::Messages => Box::new(messages::Writer::new(stamp)),
            Dialect::AiSdk => Box::new(ai_sdk::Writer::new(stamp, timestamp(open), about(open))),
            _ => Box::new(chat::Writer::new(stamp, wants_usage)),
        };
        Self::Translate {
            reader,
            writer,
            failed: None,
        }
    }
}

impl Relay {
    fn is_capped(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.is_capped)
    }

    /// Reads on though nobody listens. What is not over then is settled as it is dropped.
    async fn drain(mut self: Box<Self>) {
        while self.received <= conduct::MOST_BYTES && self.next().await.is_some() {
            // Some providers keep a connection open behind the last word.
            if self.open.as_ref().is_some_and(|open| open.seen.complete) {
                return self.finish();
            }
        }
    }

    /// The next bytes for the client; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        let bytes = self.relay().await?;
        if let Some(copy) = &mut self.copy {
            copy.add(&bytes);
        }
        Some(bytes)
    }

    async fn relay(&mut self) -> Option<Bytes> {
        loop {
            self.open.as_ref()?;
            match self.whole_events() {
                Ok(Some(bytes)) => return Some(bytes),
                Ok(None) => {}
                Err(why) => return Some(self.fail(&why)),
            }
            match self.reply.chunk().await {
                Ok(Some(chunk)) => {
                    self.received += chunk.len() as u64;
                    self.splitter.push(&chunk);
                }
                Ok(None) => return self.end(),
                Err(error) => return Some(self.fail(&error.to_string())),
            }
        }
    }

    /// Everything that has arrived whole, for the client.
    fn whole_events(&mut self) -> Result<Option<Bytes>, String> {
        let mut first: Option<Bytes> = None;
        let mut more: Vec<u8> = Vec::new();
        while let Some(event) = self.splitter.take()? {
            let bytes = self.take(&event)?;
            match &first {
                _ if bytes.is_empty() => {}
                None => first = Some(bytes),
                Some(one) => {
                    if more.is_empty() {
                        more.extend_from_slice(one);
                    }
                    more.extend_from_slice(&bytes);
                }
            }
        }
        Ok(if more.is_empty() { first } else { Some(more.into()) })
    }

    fn take(&mut self, event: &Raw) -> Result<Bytes, String> {
        let Some(open) = &mut self.open else {
            return Ok(Bytes::new());
        };
        match &mut self.mode {
            Mode::Pass { watch, hide_usage } => {
                let only_usage = watch.event(event);
                open.seen.usage = watch.seen.usage;
                open.seen.finished = watch.seen.finished;
                open.seen.written = watch.seen.written;
                open.seen.complete = watch.seen.over && watch.seen.usage.is_some();
                Ok(if only_usage && *hide_usage {
                    Bytes::new()
                } else {
                    event.0.clone()
                })
            }
            Mode::Translate {
                reader,
                writer,
                failed,
            } => {
                let Some(data) = event.data() else {
                    return Ok(Bytes::new());
                };
                let mut events = Vec::new();
                reader
                    .read(&data, &mut events)
                    .map_err(|error| format!("the provider's answer makes no sense: {error}"))?;
                Ok(write_events(open, writer.as_mut(), failed, &events))
            }
        }
    }

    /// The provider has closed its stream.
    fn end(&mut self) -> Option<Bytes> {
        let rest = self.splitter.rest();
        let mut out = match rest {
            Some(rest) => self.take(&rest).unwrap_or_default().to_vec(),
            None => Vec::new(),
        };
        let open = self.open.as_mut()?;
        let (finished, reason) = match &mut self.mode {
            Mode::Pass { watch, .. } => {
                open.seen.finish.clone_from(&watch.seen.reason);
                (
                    watch.seen.finished && watch.seen.failed.is_none(),
                    watch.seen.failed.clone(),
                )
            }
            Mode::Translate {
                reader,
                writer,
                failed,
            } => {
                let mut events = Vec::new();
                let finished = reader.end(&mut events);
                out.extend_from_slice(&write_events(open, writer.as_mut(), failed, &events));
                (finished && failed.is_none(), failed.clone())
            }
        };
        match (finished, reason) {
            (true, _) => {
                open.seen.complete = open.seen.usage.is_some();
                self.finish();
            }
            // It said so itself, and the client has heard it.
            (false, Some(reason)) => self.settle(Some(&reason)),
            (false, None) => out.extend_from_slice(
                &self.fail("the provider closed the connection before its answer was complete"),
            ),
        }
        (!out.is_empty()).then(|| out.into())
    }

    /// The answer is complete.
    fn finish(&mut self) {
        if let Some(copy) = &mut self.copy {
            copy.ended = true;
        }
        self.settle(None);
    }

    fn fail(&mut self, why: &str) -> Bytes {
        let bytes = match &mut self.mode {
            Mode::Pass { .. } => failure(self.dialect, why),
            Mode::Translate { writer, .. } => {
                let mut out = Vec::new();
                writer.write(&Event::Failed(why.to_owned()), &mut out);
                out
            }
        };
        self.settle(Some(why));
        bytes.into()
    }

    fn settle(&mut self, why: Option<&str>) {
        if let Some(open) = self.open.take() {
            match why {
                None => drop(open.done()),
                Some(why) => drop(open.failed(why)),
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(copy) = self.copy.take() {
            let is_complete = copy.ended;
            copy.keep(is_complete, self.dialect);
        }
    }
}

fn write_events(
    open: &mut Open,
    writer: &mut dyn WriteStream,
    failed: &mut Option<String>,
    events: &[Event],
) -> Bytes {
    let mut out = Vec::new();
    for event in events {
        match event {
            Event::Text(text) | Event::Thinking(text) | Event::Arguments(text) => {
                open.seen.written += text.len() as u64;
            }
            Event::Usage(usage) => open.seen.usage = Some(*usage),
            // It is the last, behind the usage.
            Event::Finish(_) => {
                open.seen.finished = true;
                open.seen.complete = open.seen.usage.is_some();
            }
            Event::Failed(why) => *failed = Some(why.clone()),
            Event::Open(_) | Event::Close | Event::Signature(_) => {}
        }
        writer.write(event, &mut out);
    }
    out.into()
}

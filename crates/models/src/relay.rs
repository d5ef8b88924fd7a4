//! From a provider's answer to the client's: untouched where both speak the same wire, translated where not.
//!
//! What must hold: an event is passed on when it is whole, never held for the next. What has been passed on is accounted for
//! before the next is read. A stream that breaks off ends with an error in the client's wire, not as if it were complete. One
//! that the client leaves is heard out where a budget applies ([`crate::conduct`]), and so is one that it does not read.

use std::pin::Pin;
use std::sync::Arc;

use atoll_dialects::sse::Raw;
use atoll_dialects::{
    Dialect, Event, ReadStream, Watch, WriteStream, ai_sdk, chat, converse, event_stream, failure, gemini,
    messages, responses, sse,
};
use atoll_gateway_core::Target;
use atoll_providers::Reply;
use atoll_types::{Fault, ModelCallId, ProjectId, Usd};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::future::BoxFuture;

use crate::cache::{self, Slot};
use crate::faults::Refusal;
use crate::listening::{Source, listen};
use crate::outgoing::Outgoing;
use crate::settlement::{Open, Progress};
use crate::whole::{about, stamp, timestamp, whole};
use crate::work::LONG;
use crate::{Models, Request, Who, conduct};

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
    request: Arc<Request>,
    open: Open,
    targets: Vec<Target>,
    /// What the first of them will get, where that is known already.
    made: Option<Outgoing>,
    stream: bool,
    wants_usage: bool,
    slot: Option<Slot>,
    /// The same was answered before.
    kept: Option<Bytes>,
}

impl Models {
    /// Serves one call, from the question who pays to the last byte.
    pub async fn call(&self, who: &Who, request: Request) -> Result<Served, Refusal> {
        let estimated = self.estimate(who, &request.body).await?;
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
    async fn begin(&self, who: &Who, request: Request, estimated: u64) -> Result<Begun, Refusal> {
        let project = &who.spender.project;
        let bytes = self.weight(project, &request.body);
        let (models, who) = (self.clone(), who.clone());
        self.apart(project, bytes, move || models.decide(&who, request, estimated))
            .await?
    }

    fn decide(&self, who: &Who, mut request: Request, estimated: u64) -> Result<Begun, Refusal> {
        request.body = self.guarded_body(who, request.body)?;
        let slot = Slot::of(who, &request);
        let kept = slot.and_then(|slot| self.inner.cache.get(&slot, self.now()));
        let mut admitted = self.admit(who, &request, kept.is_some(), estimated)?;
        let (stream, wants_usage) = (admitted.stream, admitted.wants_usage);
        let counted = admitted.made.take();
        let (open, targets) = Open::begin(self, who, &request, admitted);
        // What is long is worked on apart, and here it is already: later would be another wait for a place. What cannot be
        // made says why when its turn comes.
        let made = counted.or_else(|| match (&kept, targets.first()) {
            (None, Some(first)) => open.setup.outgoing(&request, first, stream, open.limit)?.ok(),
            _ => None,
        });
        Ok(Begun {
            request: Arc::new(request),
            open,
            targets,
            made,
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
            made,
            stream,
            wants_usage,
            slot,
            kept: _,
        } = begun;
        let call = open.row.id.clone();
        let answered = Box::pin(self.attempt(&mut open, &request, &targets, stream, made)).await;
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
                is_closed: false,
                splitter: Splitter::of(outgoing.speaks),
                mode: Some(mode),
                reading: None,
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
    /// The provider has closed its stream.
    is_closed: bool,
    splitter: Splitter,
    /// `None` while an event is read that is long.
    mode: Option<Mode>,
    /// Which goes on whoever waits for it, and is not begun again.
    reading: Option<BoxFuture<'static, Result<Read, Fault>>>,
    dialect: Dialect,
    copy: Option<Copy>,
}

/// An event that was long, for the client.
struct Read {
    mode: Mode,
    seen: Progress,
    bytes: Result<Bytes, String>,
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

    /// An event, for the client.
    fn event(&mut self, event: &Raw, seen: &mut Progress) -> Result<Bytes, String> {
        match self {
            Self::Pass { watch, hide_usage } => {
                let only_usage = watch.event(event);
                seen.usage = watch.seen.usage;
                seen.finished = watch.seen.finished;
                seen.written = watch.seen.written;
                seen.complete = watch.seen.over && watch.seen.usage.is_some();
                Ok(if only_usage && *hide_usage {
                    Bytes::new()
                } else {
                    event.0.clone()
                })
            }
            Self::Translate {
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
                Ok(write_events(seen, writer.as_mut(), failed, &events))
            }
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
            if let Some(reading) = &mut self.reading {
                let read = reading.await;
                self.reading = None;
                match self.put_back(read) {
                    Ok(bytes) if bytes.is_empty() => {}
                    Ok(bytes) => return Some(bytes),
                    Err(why) => return Some(self.fail(&why)),
                }
            }
            match self.whole_events() {
                Ok(Some(bytes)) => return Some(bytes),
                Ok(None) => {}
                Err(why) => return Some(self.fail(&why)),
            }
            if self.reading.is_some() {
                continue;
            }
            let arrived = match self.is_closed {
                true => Ok(None),
                false => self.reply.chunk().await,
            };
            match arrived {
                Ok(Some(chunk)) => {
                    self.received += chunk.len() as u64;
                    self.splitter.push(&chunk);
                }
                // What is left is an event, too.
                Ok(None) => match self.splitter.rest() {
                    Some(rest) if rest.0.len() >= LONG => {
                        self.is_closed = true;
                        self.read_apart(rest);
                    }
                    rest => return self.end(rest.as_ref()),
                },
                Err(error) => return Some(self.fail(&error.to_string())),
            }
        }
    }

    /// Everything that has arrived whole, for the client, up to the first event that is long: that is read elsewhere.
    fn whole_events(&mut self) -> Result<Option<Bytes>, String> {
        let mut first: Option<Bytes> = None;
        let mut more: Vec<u8> = Vec::new();
        while let Some(event) = self.splitter.take()? {
            if event.0.len() >= LONG {
                self.read_apart(event);
                break;
            }
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
        match (&mut self.open, &mut self.mode) {
            (Some(open), Some(mode)) => mode.event(event, &mut open.seen),
            _ => Ok(Bytes::new()),
        }
    }

    fn read_apart(&mut self, event: Raw) {
        let (Some(open), Some(mut mode)) = (&self.open, self.mode.take()) else {
            return;
        };
        let (models, project, mut seen) = (open.models.clone(), open.row.project.clone(), open.seen.clone());
        self.reading = Some(Box::pin(async move {
            let bytes = event.0.len();
            let reading = move || {
                let bytes = mode.event(&event, &mut seen);
                Read { mode, seen, bytes }
            };
            models.apart(&project, bytes, reading).await
        }));
    }

    fn put_back(&mut self, read: Result<Read, Fault>) -> Result<Bytes, String> {
        let Read { mode, seen, bytes } = read.map_err(|fault| fault.message)?;
        self.mode = Some(mode);
        if let Some(open) = &mut self.open {
            open.seen = seen;
        }
        bytes
    }

    /// The provider has closed its stream.
    fn end(&mut self, rest: Option<&Raw>) -> Option<Bytes> {
        let mut out = match rest {
            Some(rest) => self.take(rest).unwrap_or_default().to_vec(),
            None => Vec::new(),
        };
        let (Some(open), Some(mode)) = (&mut self.open, &mut self.mode) else {
            return None;
        };
        let (finished, reason) = match mode {
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
                out.extend_from_slice(&write_events(&mut open.seen, writer.as_mut(), failed, &events));
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
            None | Some(Mode::Pass { .. }) => failure(self.dialect, why),
            Some(Mode::Translate { writer, .. }) => {
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
    seen: &mut Progress,
    writer: &mut dyn WriteStream,
    failed: &mut Option<String>,
    events: &[Event],
) -> Bytes {
    let mut out = Vec::new();
    for event in events {
        match event {
            Event::Text(text) | Event::Thinking(text) | Event::Arguments(text) => {
                seen.written += text.len() as u64;
            }
            Event::Usage(usage) => seen.usage = Some(*usage),
            // It is the last, behind the usage.
            Event::Finish(_) => {
                seen.finished = true;
                seen.complete = seen.usage.is_some();
            }
            Event::Failed(why) => *failed = Some(why.clone()),
            Event::Open(_) | Event::Close | Event::Signature(_) => {}
        }
        writer.write(event, &mut out);
    }
    out.into()
}

//! `POST /v1/sandboxes/{id}/exec`: run a command and get its output, all at once or as it comes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use atoll_actions::words::command::{
    self, Attached, Ended, ExecRequest, ExecResult, ExitView, Run, StartedView,
};
use atoll_front::{Refused, Visit};
use atoll_sandboxes::{ExecEvent, ExecEvents, OutputStream};
use atoll_types::Fault;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::{Answer, ErrorDetail, Failure};
use crate::extract::{As, Json, Paying, wants_events};
use crate::named::Named;
use crate::sandboxes::idempotency_key;
use crate::wire::TextCutter;

/// How often a silent event stream says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(exec))
}

/// Runs a command.
///
/// By default the answer comes when the command has ended. With `Accept: text/event-stream` it is a stream of events:
/// `started`, then `stdout` and `stderr` with `{"text"}` or, where it is not UTF-8, `{"base64"}`, then `exited`; or
/// `error`. Hanging up ends the command, unless it runs in the background or has an `Idempotency-Key`: who comes again with
/// the same key gets the same command, its output and its end, for as long as the sandbox remembers it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/exec", tag = "commands",
    security(("key" = ["sandbox.use"])), request_body = ExecRequest,
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
        description = "A request that comes again with the same key finds the command that the first one started.")),
    responses(
        (status = 200, description = "It is over; or its events.", content(
            (ExecResult = "application/json"), (String = "text/event-stream"))),
        (status = 202, description = "It runs in the background.", body = StartedView),
    )
)]
pub(crate) async fn exec(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Named(id): Named,
    headers: HeaderMap,
    Json(body): Json<ExecRequest>,
) -> Answer<Response> {
    let began = Instant::now();
    let Run { mut spec, stdin } = body.into_run()?;
    let stdin = paid(&visit, stdin)?;
    spec.idempotency_key = idempotency_key(&headers)?;
    let background = spec.background;
    let execution = app.sandboxes.exec(&caller, &id, spec).await?;
    let attached = Attached::to(execution, stdin, began).await?;
    if background {
        let started = attached.into_background();
        return Ok((StatusCode::ACCEPTED, axum::Json(started)).into_response());
    }
    if wants_events(&headers) {
        return Ok(events_of(attached, None, ()));
    }
    let (result, length) = end_of(attached, &visit).await?;
    Ok(whole(&result, length))
}

/// Its end, and how long that is as JSON. All of it is paid for until it is answered.
pub(crate) async fn end_of(attached: Attached, visit: &Visit) -> Result<(ExecResult, usize), Fault> {
    let permit = || visit.permit().map_err(Refused::fault);
    let Ended { result, length, held } = attached.into_result([permit()?, permit()?]).await?;
    held.into_iter().for_each(|permit| visit.keep(permit));
    Ok((result, length))
}

/// All that happens, as it happens, after `first`; `kept` lives as long as somebody listens.
pub(crate) fn events_of<K: Send + 'static>(attached: Attached, first: Option<Event>, kept: K) -> Response {
    let started = event("started", &attached.view());
    let (events, fed) = attached.into_events();
    let mut follow = Follow::new(events, 0);
    follow.ready.extend(first);
    follow.ready.push_back(started);
    follow.keeping((fed, kept))
}

/// What a command is to read, which it may do long after the request is answered.
pub(crate) fn paid(visit: &Visit, stdin: Option<Bytes>) -> Result<Option<Bytes>, Fault> {
    stdin.map(|stdin| visit.pay(stdin)).transpose()
}

/// An answer with the output of a command, written into room that was made for it: growing by doubling would take twice.
pub(crate) fn whole(answer: &impl Serialize, length: usize) -> Response {
    let mut body = Vec::with_capacity(length);
    match serde_json::to_writer(&mut body, answer) {
        Ok(()) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => Failure::from(Fault::internal(error.to_string())).into_response(),
    }
}

/// A command's events as server-sent ones. Each carries as its id the offset in the command's log at which to go on.
pub(crate) struct Follow {
    events: ExecEvents,
    position: u64,
    /// Where to stop although the command goes on.
    until: Option<u64>,
    stdout: TextCutter,
    stderr: TextCutter,
    ready: VecDeque<Event>,
    over: bool,
}

impl Follow {
    pub(crate) fn new(events: ExecEvents, from: u64) -> Self {
        Self {
            events,
            position: from,
            until: None,
            stdout: TextCutter::default(),
            stderr: TextCutter::default(),
            ready: VecDeque::new(),
            over: false,
        }
    }

    pub(crate) fn until(mut self, position: u64) -> Self {
        self.until = Some(position);
        self
    }

    /// The response; `kept` lives as long as it is being sent.
    pub(crate) fn keeping<K: Send + 'static>(self, kept: K) -> Response {
        let events = stream::unfold((self, kept), |(mut follow, kept)| async move {
            let event = follow.next().await?;
            Some((event, (follow, kept)))
        });
        sse(events)
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            if self.until.is_some_and(|until| self.position >= until) {
                self.finish();
                continue;
            }
            match self.events.next().await {
                Some(Ok(event)) => self.take(event),
                Some(Err(fault)) => self.fail(&fault),
                None => self.fail(&command::broken("the output ended before the command did")),
            }
        }
    }

    fn take(&mut self, happened: ExecEvent) {
        match happened {
            ExecEvent::Started { .. } => {}
            ExecEvent::Output { stream, bytes } => {
                self.position += bytes.len() as u64;
                let (name, cutter) = match stream {
                    OutputStream::Stdout => ("stdout", &mut self.stdout),
                    OutputStream::Stderr => ("stderr", &mut self.stderr),
                };
                if let Some(chunk) = cutter.push(&bytes) {
                    let event = event(name, &chunk);
                    let whole = self.stdout.is_empty() && self.stderr.is_empty();
                    self.ready.push_back(match whole {
                        true => event.id(self.position.to_string()),
                        false => event,
                    });
                }
            }
            ExecEvent::Dropped { bytes } => {
                self.position += bytes;
                self.ready
                    .push_back(event("dropped", &serde_json::json!({ "bytes": bytes })));
            }
            ExecEvent::Exited(state) => {
                self.finish();
                self.ready.push_back(event("exited", &ExitView::of(state)));
            }
        }
    }

    fn fail(&mut self, fault: &Fault) {
        self.finish();
        self.ready
            .push_back(event("error", &ErrorDetail::new(fault, None)));
    }

    fn finish(&mut self) {
        self.over = true;
        for (name, cutter) in [("stdout", &mut self.stdout), ("stderr", &mut self.stderr)] {
            self.ready
                .extend(cutter.finish().map(|chunk| event(name, &chunk)));
        }
    }
}

impl IntoResponse for Follow {
    fn into_response(self) -> Response {
        self.keeping(())
    }
}

/// One server-sent event with JSON data.
pub(crate) fn event(name: &str, data: &impl Serialize) -> Event {
    Event::default()
        .event(name)
        .json_data(data)
        .unwrap_or_else(|_| Event::default().event("error").data("{}"))
}

/// A response of server-sent events.
pub(crate) fn sse(events: impl Stream<Item = Event> + Send + 'static) -> Response {
    let events = events.map(Ok::<_, Infallible>);
    let mut response = Sse::new(events)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response();
    // proxies that collect responses would hold the events back
    response
        .headers_mut()
        .insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    response
}

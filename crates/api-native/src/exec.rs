//! `POST /v1/sandboxes/{id}/exec`: run a command and get its output, all at once or as it comes.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::time::{Duration, Instant};

use atoll_front::{Permit, Refused, Visit};
use atoll_guest_protocol::{CommandState, PtySize};
use atoll_sandboxes::{ExecEvent, ExecEvents, ExecInput, ExecSpec, Execution, OutputStream};
use atoll_types::{Code, CommandId, Fault};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use tokio_util::task::AbortOnDropHandle;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::{Answer, ErrorDetail, Failure};
use crate::extract::{As, Json, Paying, wants_events};
use crate::named::Named;
use crate::sandboxes::idempotency_key;
use crate::wire::{self, TextCutter};

/// How much of each output stream is kept for an answer in one piece.
const CAPTURE_BYTES: usize = 4 * 1024 * 1024;
/// What an answer holds beside the output, written.
const REST_BYTES: usize = 1024;
/// What stands in a readable text for bytes that are none.
const REPLACED: usize = char::REPLACEMENT_CHARACTER.len_utf8();
/// Stdin is handed on in pieces of this size.
const FEED_BYTES: usize = 64 * 1024;
/// How often a silent event stream says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(exec))
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PtyRequest {
    #[schema(minimum = 1, maximum = 65535)]
    rows: u16,
    #[schema(minimum = 1, maximum = 65535)]
    cols: u16,
}

impl PtyRequest {
    pub(crate) fn into_size(self) -> PtySize {
        PtySize {
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// A command to run: either `argv` or `cmd`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExecRequest {
    /// The program and its arguments.
    #[schema(min_items = 1, examples(json!(["python3", "-c", "print(1)"])))]
    argv: Option<Vec<String>>,
    /// A line for `/bin/sh -c`.
    cmd: Option<String>,
    /// Added to the sandbox's environment.
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<String>,
    /// A name, a number, or `user:group`; absent: the template's user.
    user: Option<String>,
    /// What the command reads, to its end. Absent: nothing (over a WebSocket: what the client sends).
    stdin: Option<String>,
    /// Instead of `stdin`, where it is not UTF-8.
    stdin_base64: Option<String>,
    /// The command is killed when it takes longer.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
    /// Goes on when nobody is attached; the answer is 202 as soon as it runs.
    #[serde(default)]
    background: bool,
    /// Runs it on a terminal of this size; all its output is then stdout.
    pty: Option<PtyRequest>,
}

/// What to run, and what to feed it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) spec: ExecSpec,
    pub(crate) stdin: Option<Bytes>,
}

impl ExecRequest {
    pub(crate) fn into_run(self) -> Answer<Run> {
        let argv: Vec<Vec<u8>> = match (self.argv, self.cmd) {
            (Some(argv), None) if !argv.is_empty() => argv.into_iter().map(String::into_bytes).collect(),
            (None, Some(cmd)) => vec![b"/bin/sh".into(), b"-c".into(), cmd.into_bytes()],
            (Some(_), None) => return Err(Failure::new(Code::InvalidBody, "`argv` is empty")),
            (None, None) => {
                return Err(Failure::new(
                    Code::MissingField,
                    "nothing to run: give `argv` (a list) or `cmd` (a line for /bin/sh)",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(Failure::new(
                    Code::ContradictingFields,
                    "`argv` and `cmd` exclude each other",
                ));
            }
        };
        let stdin = match (self.stdin, self.stdin_base64) {
            (None, None) => None,
            (text, encoded) => Some(Bytes::from(wire::exactly_one("stdin", text, encoded)?)),
        };
        Ok(Run {
            spec: ExecSpec {
                argv,
                env: self.env.into_iter().collect(),
                cwd: self.cwd.map(String::into_bytes),
                user: self.user,
                pty: self.pty.map(PtyRequest::into_size),
                stdin: stdin.is_some(),
                timeout_millis: self
                    .timeout_ms
                    .map(|millis| wire::duration("timeout_ms", millis))
                    .transpose()?,
                background: self.background,
                lossless: false,
                idempotency_key: None,
            },
            stdin,
        })
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct ExitView {
    /// Absent if a signal ended it.
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<i32>,
    /// Whether it was killed because its `timeout_ms` was over.
    pub(crate) timed_out: bool,
}

impl ExitView {
    pub(crate) fn of(state: CommandState) -> Self {
        let mut exit = Self {
            exit_code: None,
            signal: None,
            timed_out: false,
        };
        match state {
            CommandState::Running => {}
            CommandState::Exited { code } => exit.exit_code = Some(code),
            CommandState::Signaled { signal } => exit.signal = Some(signal),
            CommandState::TimedOut => exit.timed_out = true,
        }
        exit
    }
}

/// A command that runs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StartedView {
    pub(crate) command: String,
    pub(crate) pid: u32,
}

/// A command that is over, with the beginning of its output (at most 4 MiB of each stream).
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecResult {
    command: String,
    pid: u32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    timed_out: bool,
    duration_ms: u64,
    /// Readable; where the bytes are not UTF-8, `stdout_base64` has them exactly.
    stdout: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    /// How much the command wrote, which may be more than is kept here.
    stdout_bytes: u64,
    stdout_truncated: bool,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    stderr_bytes: u64,
    stderr_truncated: bool,
}

impl ExecResult {
    fn new(command: &CommandId, pid: u32, state: CommandState, began: Instant) -> Self {
        let exit = ExitView::of(state);
        Self {
            command: command.to_string(),
            pid,
            exit_code: exit.exit_code,
            signal: exit.signal,
            timed_out: exit.timed_out,
            duration_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX),
            stdout: String::new(),
            stdout_base64: None,
            stdout_bytes: 0,
            stdout_truncated: false,
            stderr: String::new(),
            stderr_base64: None,
            stderr_bytes: 0,
            stderr_truncated: false,
        }
    }
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
        return Ok(attached.into_background());
    }
    if wants_events(&headers) {
        return Ok(attached.into_events(None, ()));
    }
    let (result, weight) = attached.into_result(&visit).await?;
    Ok(whole(&result, weight))
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

/// A command that has begun, and what it is fed.
pub(crate) struct Attached {
    command: CommandId,
    pid: u32,
    events: ExecEvents,
    began: Instant,
    /// Beside the reading, because a command may write before it has read everything.
    feeding: Option<AbortOnDropHandle<()>>,
    idle_input: Option<ExecInput>,
}

impl Attached {
    /// Fails if the command could not be started.
    pub(crate) async fn to(
        execution: Execution,
        stdin: Option<Bytes>,
        began: Instant,
    ) -> Result<Self, Fault> {
        let Execution {
            command,
            mut events,
            input,
        } = execution;
        let pid = events.started().await?;
        let mut idle_input = Some(input);
        let feeding = stdin.and_then(|stdin| {
            let input = idle_input.take()?;
            Some(AbortOnDropHandle::new(tokio::spawn(feed(input, stdin))))
        });
        Ok(Self {
            command,
            pid,
            events,
            began,
            feeding,
            idle_input,
        })
    }

    /// All that happens, as it happens, after `first`; `kept` lives as long as somebody listens.
    pub(crate) fn into_events<K: Send + 'static>(self, first: Option<Event>, kept: K) -> Response {
        let started = event("started", &self.view());
        let mut follow = Follow::new(self.events, 0);
        follow.ready.extend(first);
        follow.ready.push_back(started);
        follow.keeping((self.feeding, self.idle_input, kept))
    }

    /// That it runs; nobody waits for more.
    fn into_background(self) -> Response {
        let started = self.view();
        let Self {
            feeding, mut events, ..
        } = self;
        if let Some(feeding) = feeding {
            // Owned by the command: ends when all is written or the command is over.
            tokio::spawn(async move {
                tokio::select! {
                    _ = feeding => {}
                    () = async { while events.next().await.is_some() {} } => {}
                }
            });
        }
        (StatusCode::ACCEPTED, axum::Json(started)).into_response()
    }

    fn view(&self) -> StartedView {
        StartedView {
            command: self.command.to_string(),
            pid: self.pid,
        }
    }

    /// Its end, with the beginning of its output, and how long that is as JSON. All of it is paid for until it is answered.
    pub(crate) async fn into_result(mut self, visit: &Visit) -> Result<(ExecResult, usize), Fault> {
        let permit = || visit.permit().map_err(Refused::fault);
        let (mut stdout, mut stderr) = (Captured::new(permit()?), Captured::new(permit()?));
        let exit = collect(&mut self.events, &mut stdout, &mut stderr).await?;
        let length = stdout.prepare()? + stderr.prepare()? + REST_BYTES;
        let mut result = ExecResult::new(&self.command, self.pid, exit, self.began);
        (result.stdout_bytes, result.stdout_truncated) = (stdout.total, stdout.is_truncated());
        (result.stderr_bytes, result.stderr_truncated) = (stderr.total, stderr.is_truncated());
        (result.stdout, result.stdout_base64) = stdout.into_text(visit);
        (result.stderr, result.stderr_base64) = stderr.into_text(visit);
        Ok((result, length))
    }
}

fn broken(message: &str) -> Fault {
    Fault::new(Code::GuestProtocol, message)
}

/// Writes all of stdin and closes it. A command that reads no further is none of our business.
pub(crate) async fn feed(mut input: ExecInput, mut stdin: Bytes) {
    while !stdin.is_empty() {
        let piece = stdin.split_to(stdin.len().min(FEED_BYTES));
        if input.write(piece).await.is_err() {
            return;
        }
    }
    let _ = input.close().await;
}

async fn collect(
    events: &mut ExecEvents,
    stdout: &mut Captured,
    stderr: &mut Captured,
) -> Result<CommandState, Fault> {
    while let Some(event) = events.next().await {
        match event? {
            ExecEvent::Output { stream, bytes } => match stream {
                OutputStream::Stdout => stdout.take(&bytes)?,
                OutputStream::Stderr => stderr.take(&bytes)?,
            },
            ExecEvent::Exited(state) => return Ok(state),
            // Only of one that was found again, whose log keeps the last of it.
            ExecEvent::Dropped { bytes } => stdout.total += bytes,
            ExecEvent::Started { .. } => {}
        }
    }
    Err(broken("the output ended before the command did"))
}

/// The beginning of a stream, and how long it really was.
#[derive(Debug)]
struct Captured {
    kept: Vec<u8>,
    total: u64,
    permit: Permit,
}

impl Captured {
    fn new(permit: Permit) -> Self {
        Self {
            kept: Vec::new(),
            total: 0,
            permit,
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.total += bytes.len() as u64;
        let bytes = &bytes[..bytes.len().min(CAPTURE_BYTES - self.kept.len())];
        let length = self.kept.len() + bytes.len();
        if length > self.kept.capacity() {
            let room = (self.kept.capacity() * 2).clamp(length, CAPTURE_BYTES);
            self.permit.set(room as u64)?;
            self.kept.reserve_exact(room - self.kept.len());
        }
        self.kept.extend_from_slice(bytes);
        Ok(())
    }

    fn is_truncated(&self) -> bool {
        self.total > self.kept.len() as u64
    }

    /// Pays for what is going to be made of it, and says how long it is as JSON.
    fn prepare(&mut self) -> Result<usize, Fault> {
        // a character that the limit cut in two is no reason to call the whole not UTF-8
        if self.is_truncated()
            && let Err(error) = std::str::from_utf8(&self.kept)
            && error.error_len().is_none()
        {
            self.kept.truncate(error.valid_up_to());
        }
        let (mut text, mut written) = (0, 0);
        for chunk in self.kept.utf8_chunks() {
            text += chunk.valid().len();
            written += chunk.valid().bytes().map(written_length).sum::<usize>();
            if !chunk.invalid().is_empty() {
                text += REPLACED;
                written += REPLACED;
            }
        }
        let mut beside = 0;
        if std::str::from_utf8(&self.kept).is_err() {
            let encoded = self.kept.len().div_ceil(3) * 4;
            // Both spellings, of which the readable one grows by doubling.
            beside = 2 * text + encoded;
            written += encoded;
        }
        self.permit.grow((beside + written) as u64)?;
        Ok(written)
    }

    /// Readable, and exactly where that is not the same.
    fn into_text(self, visit: &Visit) -> (String, Option<String>) {
        let text = match String::from_utf8(self.kept) {
            Ok(text) => (text, None),
            Err(error) => wire::readable(error.as_bytes()),
        };
        visit.keep(self.permit);
        text
    }
}

/// How many bytes JSON spells a byte with.
fn written_length(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
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
                None => self.fail(&broken("the output ended before the command did")),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn run(json: &str) -> Answer<Run> {
        parse_json::<ExecRequest>(json.as_bytes())?.into_run()
    }

    #[test]
    fn a_line_runs_in_a_shell_and_a_list_as_it_is() {
        let line = run(r#"{"cmd":"echo $HOME"}"#).unwrap();
        assert_eq!(
            line.spec.argv,
            [b"/bin/sh".to_vec(), b"-c".to_vec(), b"echo $HOME".to_vec()]
        );
        assert!(!line.spec.stdin);
        let list = run(
            r#"{"argv":["a"],"env":{"B":"c"},"cwd":"/d","user":"e","stdin":"f","timeout_ms":1,"background":true,
                "pty":{"rows":2,"cols":3}}"#,
        )
        .unwrap();
        assert_eq!(list.spec.argv, [b"a".to_vec()]);
        assert_eq!(list.spec.env, [("B".to_owned(), "c".to_owned())]);
        assert_eq!(list.spec.cwd.as_deref(), Some(&b"/d"[..]));
        assert_eq!(list.spec.user.as_deref(), Some("e"));
        assert_eq!(list.spec.pty, Some(PtySize { rows: 2, cols: 3 }));
        assert_eq!(list.spec.timeout_millis, Some(1));
        assert!(list.spec.background && list.spec.stdin);
        assert_eq!(list.stdin.as_deref(), Some(&b"f"[..]));
    }

    #[test]
    fn contradictions_are_refused() {
        for bad in [
            "{}",
            r#"{"argv":[]}"#,
            r#"{"argv":["a"],"cmd":"b"}"#,
            r#"{"cmd":"b","stdin":"x","stdin_base64":"eA=="}"#,
            r#"{"cmd":"b","shell":"zsh"}"#,
            r#"{"cmd":"b","pty":{"rows":70000,"cols":1}}"#,
        ] {
            assert_eq!(run(bad).unwrap_err().status(), StatusCode::BAD_REQUEST, "{bad}");
        }
    }

    #[test]
    fn ends_are_told_apart() {
        let exit = ExitView::of(CommandState::Exited { code: 3 });
        assert_eq!(
            (exit.exit_code, exit.signal, exit.timed_out),
            (Some(3), None, false)
        );
        let exit = ExitView::of(CommandState::Signaled { signal: 9 });
        assert_eq!(
            (exit.exit_code, exit.signal, exit.timed_out),
            (None, Some(9), false)
        );
        let exit = ExitView::of(CommandState::TimedOut);
        assert_eq!((exit.exit_code, exit.signal, exit.timed_out), (None, None, true));
    }

    /// Somebody with so many bytes.
    fn visit(bytes: u64) -> (atoll_front::Front, Visit) {
        let mut limits = atoll_front::Limits::for_machine(1 << 30, 1000);
        limits.memory = atoll_front::memory::Limits::within(2 * bytes);
        let front = atoll_front::Front::new(limits);
        let visit = front.visit(None);
        visit
            .admit(&atoll_types::ProjectId::from_entropy([1; 20]), None)
            .unwrap();
        (front, visit)
    }

    #[test]
    fn captured_output_is_bounded_and_cut_between_characters() {
        let (_, visit) = visit(64 << 20);
        let captured = || Captured::new(visit.permit().unwrap());
        let mut long = captured();
        long.take(&vec![b'x'; CAPTURE_BYTES - 1]).unwrap();
        long.take("€".as_bytes()).unwrap();
        long.take(b"more").unwrap();
        assert!(long.is_truncated());
        assert_eq!(long.total, CAPTURE_BYTES as u64 + 6);
        assert_eq!(long.prepare().unwrap(), CAPTURE_BYTES - 1);
        let (text, encoded) = long.into_text(&visit);
        assert_eq!((text.len(), encoded), (CAPTURE_BYTES - 1, None));

        let mut broken = captured();
        broken.take(b"a\xff").unwrap();
        assert_eq!(broken.prepare().unwrap(), 1 + 3 + 4);
        assert_eq!(
            broken.into_text(&visit),
            ("a\u{fffd}".into(), Some("Yf8=".into()))
        );
    }

    #[test]
    fn captured_output_is_paid_for_with_what_is_made_of_it() {
        let noise: Vec<u8> = (0..=255).cycle().take(100_000).collect();
        let quiet = vec![0; 100_000];
        let text = "line \"1\"\n\t\u{7f}€\\".repeat(1000).into_bytes();
        for bytes in [noise, quiet, text] {
            let (front, visit) = visit(64 << 20);
            let mut captured = Captured::new(visit.permit().unwrap());
            for piece in bytes.chunks(1000) {
                captured.take(piece).unwrap();
            }
            assert!(front.memory.held() >= bytes.len() as u64);
            let length = captured.prepare().unwrap();
            let (text, encoded) = captured.into_text(&visit);
            let mut result = ExecResult::new(
                &CommandId::from_entropy([1; 20]),
                1,
                CommandState::Exited { code: 0 },
                Instant::now(),
            );
            let made = text.len() + encoded.as_ref().map_or(0, String::len);
            (result.stdout, result.stdout_base64) = (text, encoded);
            let written = serde_json::to_vec(&result).unwrap().len();
            assert!(written <= length + REST_BYTES, "{written} of {length}");
            assert!(written + REST_BYTES >= length, "{written} of {length}");
            assert!(front.memory.held() >= (made + length) as u64);
            visit.answered();
            assert_eq!(front.memory.held(), 0);
        }
        // Whoever has no room for it is told so.
        let (_, visit) = visit(1 << 20);
        let mut captured = Captured::new(visit.permit().unwrap());
        captured.take(&vec![0; 400_000]).unwrap();
        assert_eq!(captured.prepare().unwrap_err().code, Code::TooMuchBuffered);
        let fault = captured.take(&vec![0; 1 << 20]).unwrap_err();
        assert_eq!(fault.code, Code::TooMuchBuffered);
    }
}

//! Commands over a WebSocket: run one, or attach to one that runs.
//!
//! ```text
//!   client                                   server
//!     │ {"cmd": "bash", "pty": {...}}  ────>  │    the first message of `exec/ws`, as for POST exec
//!     │ <─────────  {"started": {"command", "pid"}}
//!     │ 0x00 bytes                     ────>  │    stdin
//!     │ <─────────────────────  0x01 bytes    │    stdout (all output of a terminal)
//!     │ <─────────────────────  0x02 bytes    │    stderr
//!     │ {"resize": {"rows", "cols"}}   ────>  │    or {"signal": 15}, {"close_stdin": true}
//!     │ <─────  {"exited": {...}}, close      │    or {"error": {...}}, close
//! ```
//!
//! Binary messages are bytes behind one byte that names the channel; text messages are JSON. Each side reads the next
//! message only when it has passed the last one on, so back-pressure goes through in both directions.
//!
//! What must hold: a session pays from its beginning for the largest message that it may be in the middle of, since nobody sees
//! how far that has come. A message that has begun has to come at the pace of a body (`front`: `websocket`).

use std::time::Duration;

use atoll_actions::words::command::{ExecRequest, ExitView, PtyRequest, Run, StartedView};
use atoll_front::memory::json_weight;
use atoll_front::websocket::{CloseCode, CloseFrame, Message, Sizes, WebSocket, Wish};
use atoll_front::{Permit, Visit};
use atoll_identity::Caller;
use atoll_sandboxes::{ExecEvent, ExecEvents, ExecInput, Execution, OutputStream};
use atoll_types::{Code, CommandId, Fault, FaultKind, SandboxId};
use axum::extract::State;
use axum::response::Response;
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::commands::SignalName;
use crate::error::{Answer, ErrorDetail, Failure};
use crate::extract::{Args, As, At, Paying, parse_json};
use crate::named::Named;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;

/// The largest message from a client. Input may come in as many as it likes.
const MESSAGE_BYTES: usize = 256 * 1024;
/// What is read and written at once.
const BUFFER_BYTES: usize = 16 * 1024;
/// What a session takes: a message that comes, a frame of it, and buffers.
const SESSION_BYTES: u64 = 2 * (MESSAGE_BYTES + BUFFER_BYTES) as u64;

/// How long a client may take to say what it wants, and to say goodbye.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a silent connection is tested.
const PING: Duration = Duration::from_secs(30);

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(exec_ws))
        .routes(routes!(attach_ws))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AttachQuery {
    /// Offset in the command's log from which to replay.
    #[param(minimum = 0, default = 0)]
    from: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NoQuery {}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromClient {
    Resize(PtyRequest),
    Signal(SignalName),
    CloseStdin(bool),
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum FromServer {
    Started(StartedView),
    Attached { command: String },
    Dropped { bytes: u64 },
    Exited(ExitView),
    Error(ErrorDetail),
}

/// Why a session is over.
enum End {
    Exited(ExitView),
    Failed(Failure),
    PeerGone,
}

/// How large messages may become.
const SIZES: Sizes = Sizes {
    message: MESSAGE_BYTES,
    buffer: BUFFER_BYTES,
};

/// Runs a command over a WebSocket, with stdin, terminal and signals.
///
/// The first text message is the request, as for `POST exec`; a message may have at most 256 KiB. Then binary messages carry bytes behind a channel byte
/// (0 stdin, 1 stdout, 2 stderr), and text messages are control: `{"resize":{"rows","cols"}}`, `{"signal":15}` and
/// `{"close_stdin":true}` from the client; `started`, `exited` and `error` from the server. Hanging up ends the command
/// unless it runs in the background.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/exec/ws", tag = "commands",
    security(("key" = ["sandbox.use"])),
    responses((status = 101, description = "A WebSocket."))
)]
pub(crate) async fn exec_ws(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Named(id): Named,
    Args(NoQuery {}): Args<NoQuery>,
    wish: Wish,
) -> Answer<Response> {
    let (upgrade, permit) = (wish.well_formed()?, session(&visit)?);
    // so that a sandbox that is not there is a plain 404
    app.sandboxes.get(&caller, &id).await?;
    Ok(upgrade.accept(SIZES, visit.patience(), move |socket| async move {
        run(&app, &caller, &id, socket, permit).await;
    }))
}

/// Attaches to a command over a WebSocket; messages as for `exec/ws`. Hanging up leaves the command alone.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands/{command}/ws", tag = "commands",
    security(("key" = ["sandbox.use"])), params(AttachQuery),
    responses((status = 101, description = "A WebSocket."))
)]
pub(crate) async fn attach_ws(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Named(id): Named,
    At((_, command)): At<(String, CommandId)>,
    Args(query): Args<AttachQuery>,
    wish: Wish,
) -> Answer<Response> {
    let (upgrade, permit) = (wish.well_formed()?, session(&visit)?);
    let from = query.from.unwrap_or(0);
    let execution = app.sandboxes.attach(&caller, &id, &command, from).await?;
    Ok(upgrade.accept(SIZES, visit.patience(), move |socket| async move {
        let first = FromServer::Attached {
            command: execution.command.to_string(),
        };
        drive(socket, execution, first, Bytes::new()).await;
        drop(permit);
    }))
}

/// What a session holds from its beginning to its end.
fn session(visit: &Visit) -> Answer<Permit> {
    let mut permit = visit.permit()?;
    permit.grow(SESSION_BYTES)?;
    Ok(permit)
}

async fn run(app: &App, caller: &Caller, id: &SandboxId, mut socket: WebSocket, mut permit: Permit) {
    let begun = async {
        let request = first_message(&mut socket).await?;
        // What it becomes is there until the command has read its input.
        permit.grow(request.len() as u64 + json_weight(&request))?;
        let Run { mut spec, stdin } = parse_json::<ExecRequest>(&request)?.into_run()?;
        spec.stdin = true;
        let mut execution = app.sandboxes.exec(caller, id, spec).await?;
        let pid = execution.events.started().await?;
        Ok::<_, Failure>((execution, pid, stdin))
    };
    match begun.await {
        Ok((execution, pid, stdin)) => {
            let first = FromServer::Started(StartedView {
                command: execution.command.to_string(),
                pid,
            });
            drive(socket, execution, first, stdin.unwrap_or_default()).await;
        }
        Err(failure) => {
            let (mut sink, stream) = socket.split();
            finish(&mut sink, stream, End::Failed(failure)).await;
        }
    }
}

async fn first_message(socket: &mut WebSocket) -> Answer<Bytes> {
    let next = async {
        loop {
            match socket.next().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => return other,
            }
        }
    };
    match tokio::time::timeout(PATIENCE, next).await {
        Ok(Some(Ok(Message::Text(text)))) => Ok(text.into()),
        Ok(_) => Err(Failure::new(
            Code::InvalidMessage,
            "the first message must be a text message with the command to run",
        )),
        Err(_) => Err(Fault::new(Code::NoMessage, "no command to run arrived within 10 seconds").into()),
    }
}

/// Passes bytes both ways until the command ends or the client leaves. Dropping the execution detaches.
async fn drive(socket: WebSocket, execution: Execution, first: FromServer, stdin: Bytes) {
    let (mut sink, mut stream) = socket.split();
    let Execution { events, input, .. } = execution;
    let end = tokio::select! {
        end = outbound(&mut sink, events, &first) => end,
        end = inbound(&mut stream, input, stdin) => end,
    };
    finish(&mut sink, stream, end).await;
}

async fn outbound(
    sink: &mut SplitSink<WebSocket, Message>,
    mut events: ExecEvents,
    first: &FromServer,
) -> End {
    if sink.send(text(first)).await.is_err() {
        return End::PeerGone;
    }
    let mut ping = tokio::time::interval(PING);
    ping.reset();
    loop {
        let next = events.next();
        tokio::pin!(next);
        let event = loop {
            tokio::select! {
                event = &mut next => break event,
                _ = ping.tick() => {
                    if sink.send(Message::Ping(Bytes::new())).await.is_err() {
                        return End::PeerGone;
                    }
                }
            }
        };
        let message = match event {
            Some(Ok(ExecEvent::Output { stream, bytes })) => output(stream, &bytes),
            Some(Ok(ExecEvent::Dropped { bytes })) => text(&FromServer::Dropped { bytes }),
            Some(Ok(ExecEvent::Started { .. })) => continue,
            Some(Ok(ExecEvent::Exited(state))) => return End::Exited(ExitView::of(state)),
            Some(Err(fault)) => return End::Failed(fault.into()),
            None => {
                let message = "the output ended before the command did";
                return End::Failed(Fault::new(Code::GuestProtocol, message).into());
            }
        };
        if sink.send(message).await.is_err() {
            return End::PeerGone;
        }
    }
}

async fn inbound(stream: &mut SplitStream<WebSocket>, mut input: ExecInput, stdin: Bytes) -> End {
    // A command that reads no further, or is over, refuses input; the end of the session is told by its output.
    if !stdin.is_empty() {
        let _ = input.write(stdin).await;
    }
    while let Some(Ok(message)) = stream.next().await {
        match message {
            Message::Binary(mut bytes) if bytes.first() == Some(&STDIN) => {
                let bytes = bytes.split_off(1);
                if !bytes.is_empty() {
                    let _ = input.write(bytes).await;
                }
            }
            Message::Binary(_) => {
                let message = "a binary message must begin with 0, the channel of stdin";
                return End::Failed(Failure::new(Code::InvalidMessage, message));
            }
            Message::Text(text) => {
                if let Err(failure) = control(&mut input, text.as_bytes()).await {
                    return End::Failed(failure);
                }
            }
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            Message::Close(_) => return End::PeerGone,
        }
    }
    End::PeerGone
}

async fn control(input: &mut ExecInput, text: &[u8]) -> Answer<()> {
    let done = match parse_json(text)? {
        FromClient::Resize(size) => input.resize(size.into_size()).await,
        FromClient::Signal(signal) => input.signal(signal.into_number()?).await,
        FromClient::CloseStdin(true) => input.close().await,
        FromClient::CloseStdin(false) => Ok(()),
    };
    if let Err(fault) = done {
        tracing::debug!(%fault, "a control message came to nothing");
    }
    Ok(())
}

async fn finish(sink: &mut SplitSink<WebSocket, Message>, mut stream: SplitStream<WebSocket>, end: End) {
    let (last, code) = match end {
        End::Exited(exit) => (FromServer::Exited(exit), CloseCode::Normal),
        End::Failed(failure) => {
            let code = match failure.fault().kind() {
                FaultKind::Invalid => CloseCode::Policy,
                _ => CloseCode::Error,
            };
            (FromServer::Error(ErrorDetail::new(failure.fault(), None)), code)
        }
        End::PeerGone => return,
    };
    let close = Message::Close(Some(CloseFrame {
        code,
        reason: "".into(),
    }));
    if sink.send(text(&last)).await.is_err() || sink.send(close).await.is_err() {
        return;
    }
    // Closing a socket with unread bytes resets it, and the client would lose what we just said.
    let drain = async { while let Some(Ok(_)) = stream.next().await {} };
    let _ = tokio::time::timeout(PATIENCE, drain).await;
}

fn text(message: &FromServer) -> Message {
    Message::Text(serde_json::to_string(message).unwrap_or_default().into())
}

fn output(stream: OutputStream, bytes: &[u8]) -> Message {
    let mut framed = BytesMut::with_capacity(bytes.len() + 1);
    framed.put_u8(match stream {
        OutputStream::Stdout => STDOUT,
        OutputStream::Stderr => STDERR,
    });
    framed.put_slice(bytes);
    Message::Binary(framed.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_read_strictly() {
        for good in [
            r#"{"resize":{"rows":24,"cols":80}}"#,
            r#"{"signal":"SIGINT"}"#,
            r#"{"signal":2}"#,
            r#"{"close_stdin":true}"#,
        ] {
            assert!(parse_json::<FromClient>(good.as_bytes()).is_ok(), "{good}");
        }
        for bad in [
            r#"{"resize":{"rows":24}}"#,
            r#"{"shout":1}"#,
            r#"{"signal":2,"close_stdin":true}"#,
            "[]",
        ] {
            assert!(parse_json::<FromClient>(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn sessions_are_paid_for() {
        let mut limits = atoll_front::Limits::for_machine(1 << 30, 1000);
        limits.memory = atoll_front::memory::Limits::within(20 * SESSION_BYTES);
        let front = atoll_front::Front::new(limits);
        let open = || {
            let visit = front.visit(None);
            let project = atoll_types::ProjectId::from_entropy([1; 20]);
            visit.admit(&project, None).unwrap();
            let permit = session(&visit);
            // The request is over when the session begins.
            visit.answered();
            permit
        };
        let sessions: Vec<_> = (0..10).map(|_| open().unwrap()).collect();
        assert_eq!(open().unwrap_err().fault().code, Code::TooMuchBuffered);
        drop(sessions);
        open().unwrap();
        assert_eq!(front.memory.held(), 0);
    }

    #[test]
    fn output_names_its_channel() {
        assert_eq!(
            output(OutputStream::Stderr, b"no"),
            Message::Binary(Bytes::from_static(b"\x02no"))
        );
        let exit = ExitView {
            exit_code: Some(0),
            signal: None,
            timed_out: false,
        };
        assert_eq!(
            text(&FromServer::Exited(exit)),
            Message::Text(r#"{"exited":{"exit_code":0,"signal":null,"timed_out":false}}"#.into())
        );
    }
}

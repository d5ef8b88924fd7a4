//! Being attached to a command: our stdin, stdout, stderr and terminal become its own, over one WebSocket.
//!
//! Binary messages start with a channel byte (0 stdin, 1 stdout, 2 stderr), text messages are JSON: control from us
//! (`resize`, `signal`, `close_stdin`), `started`, `exited` or `error` from the server.

use std::io::{self, IsTerminal, Read, Write};
use std::time::Duration;

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{Client, from_wire};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{Sink, SinkExt, StreamExt};
use reqwest::Method;
use rustix::termios::{self, OptionalActions, Termios};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};

const CLOSE_STDIN: &str = r#"{"close_stdin":true}"#;

/// Which of our streams the command gets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streams {
    pub(crate) stdin: bool,
    pub(crate) tty: bool,
}

impl Streams {
    /// A terminal when we have one at both ends, unless told otherwise.
    pub(crate) fn choose(no_stdin: bool, no_tty: bool) -> Self {
        let tty = !no_tty && !no_stdin && io::stdin().is_terminal() && io::stdout().is_terminal();
        Self {
            stdin: !no_stdin,
            tty,
        }
    }
}

/// Runs a command attached and returns the exit code that we should have. `request` is the body of an exec request.
pub(crate) async fn run(client: &Client, sandbox: &str, request: Value, streams: Streams) -> Result<u8> {
    let mut write = |message: &[u8]| write_out(message);
    match session(client, sandbox, request, streams, &mut write).await? {
        Ended::ByItself { exited, .. } => Ok(exit_code(&exited)),
        Ended::ByUs(code) => Ok(code),
    }
}

/// Runs a command that reads our standard input, and gathers what it prints: the answer of an exec request. `None`: it was
/// we who were ended, with that code.
pub(crate) async fn captured(
    client: &Client,
    sandbox: &str,
    request: Value,
) -> Result<std::result::Result<Value, u8>> {
    let began = std::time::Instant::now();
    let (mut stdout, mut stderr) = (Captured::default(), Captured::default());
    let mut gather = |message: &[u8]| match message.split_first() {
        Some((1, bytes)) => stdout.take(bytes),
        Some((2, bytes)) => stderr.take(bytes),
        _ => {}
    };
    let streams = Streams {
        stdin: true,
        tty: false,
    };
    let (started, exited) = match session(client, sandbox, request, streams, &mut gather).await? {
        Ended::ByItself { started, exited } => (started, exited),
        Ended::ByUs(code) => return Ok(Err(code)),
    };
    let mut answer = started;
    for (name, value) in exited.as_object().into_iter().flatten() {
        answer[name] = value.clone();
    }
    answer["duration_ms"] = json!(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
    stdout.describe("stdout", &mut answer);
    stderr.describe("stderr", &mut answer);
    Ok(Ok(answer))
}

/// The beginning of a stream, as much as the API would answer with, and how long it really was.
#[derive(Debug, Default)]
struct Captured {
    kept: Vec<u8>,
    total: u64,
}

impl Captured {
    const MOST: usize = 4 << 20;

    fn take(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = Self::MOST - self.kept.len();
        self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn describe(mut self, name: &str, answer: &mut Value) {
        let truncated = self.total > self.kept.len() as u64;
        // A character that the limit cut in two is no reason to call the whole not UTF-8.
        if truncated
            && let Err(error) = std::str::from_utf8(&self.kept)
            && error.error_len().is_none()
        {
            self.kept.truncate(error.valid_up_to());
        }
        answer[name] = json!(String::from_utf8_lossy(&self.kept));
        if std::str::from_utf8(&self.kept).is_err() {
            answer[format!("{name}_base64")] = json!(STANDARD.encode(&self.kept));
        }
        answer[format!("{name}_bytes")] = json!(self.total);
        answer[format!("{name}_truncated")] = json!(truncated);
    }
}

/// How a session ended.
enum Ended {
    /// With what the server said at its beginning and end.
    ByItself { started: Value, exited: Value },
    /// By a signal to us; the code that we should have.
    ByUs(u8),
}

async fn session(
    client: &Client,
    sandbox: &str,
    mut request: Value,
    streams: Streams,
    write: &mut (dyn FnMut(&[u8]) + Send),
) -> Result<Ended> {
    if streams.tty {
        let (rows, cols) = terminal_size();
        request["pty"] = json!({"rows": rows, "cols": cols});
    }

    let socket = connect(client, &format!("/v1/sandboxes/{sandbox}/exec/ws")).await?;
    let (mut to, mut from) = socket.split();
    to.send(Message::text(request.to_string()))
        .await
        .doing("cannot send the command")?;
    if !streams.stdin {
        send(&mut to, Message::text(CLOSE_STDIN)).await;
    }

    // Raw only once the command can be started, so that an early error is readable.
    let _raw = if streams.tty {
        Some(RawTerminal::enter()?)
    } else {
        None
    };
    let mut stdin = streams.stdin.then(read_stdin);
    let mut resized = signal(SignalKind::window_change()).doing("cannot watch the terminal")?;
    let mut interrupted = signal(SignalKind::interrupt()).doing("cannot watch for Ctrl-C")?;
    let mut terminated = signal(SignalKind::terminate()).doing("cannot watch for termination")?;
    let mut interrupts = 0;
    let mut started = json!({});

    loop {
        tokio::select! {
            message = from.next() => match message {
                Some(Ok(Message::Binary(bytes))) => write(&bytes),
                Some(Ok(Message::Text(text))) => {
                    let mut message = control(&text)?;
                    if let Some(exited) = message.get_mut("exited").map(Value::take) {
                        return Ok(Ended::ByItself { started, exited });
                    }
                    if let Some(first) = message.get_mut("started") {
                        started = first.take();
                    }
                }
                Some(Ok(Message::Close(_))) | None => {
                    return Err(Error::new("the server closed the connection before the command ended"));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(Error::new(format!("the connection to the server broke: {error}"))),
            },
            input = next_input(&mut stdin) => {
                let message = match input {
                    Some(bytes) => {
                        let mut framed = Vec::with_capacity(bytes.len() + 1);
                        framed.push(0);
                        framed.extend_from_slice(&bytes);
                        Message::binary(framed)
                    }
                    None => {
                        stdin = None;
                        Message::text(CLOSE_STDIN)
                    }
                };
                send(&mut to, message).await;
            }
            _ = resized.recv(), if streams.tty => {
                let (rows, cols) = terminal_size();
                send(&mut to, Message::text(json!({"resize": {"rows": rows, "cols": cols}}).to_string())).await;
            }
            _ = interrupted.recv() => {
                interrupts += 1;
                if interrupts > 2 {
                    return Ok(Ended::ByUs(130));
                }
                send(&mut to, Message::text(json!({"signal": 2}).to_string())).await;
            }
            _ = terminated.recv() => {
                send(&mut to, Message::text(json!({"signal": 15}).to_string())).await;
                // A command that ignores it is killed when our connection closes.
                tokio::time::sleep(Duration::from_millis(500)).await;
                return Ok(Ended::ByUs(143));
            }
        }
    }
}

/// A text message of the server; one about a failure is that failure.
fn control(text: &str) -> Result<Value> {
    let message: Value = serde_json::from_str(text).doing("the server sent something that is not JSON")?;
    if let Some(error) = message.get("error") {
        // After the start no error has these codes, so all of them may be looked at as failures to start.
        return Err(from_wire(error).into_start_failure());
    }
    Ok(message)
}

/// The exit code that a shell would show for the way in which a command ended.
pub(crate) fn exit_code(ended: &Value) -> u8 {
    if ended.get("timed_out").and_then(Value::as_bool) == Some(true) {
        return 124;
    }
    if let Some(signal) = ended.get("signal").and_then(Value::as_i64) {
        return u8::try_from(128 + signal).unwrap_or(255);
    }
    let code = ended.get("exit_code").and_then(Value::as_i64);
    code.map_or(255, |code| u8::try_from(code & 0xff).unwrap_or(255))
}

/// Errors are left to the reading side, which learns more about them.
async fn send(to: &mut (impl Sink<Message, Error = WsError> + Unpin), message: Message) {
    let _broken = to.send(message).await;
}

async fn next_input(stdin: &mut Option<mpsc::Receiver<Bytes>>) -> Option<Bytes> {
    match stdin {
        Some(stdin) => stdin.recv().await,
        None => std::future::pending().await,
    }
}

fn write_out(message: &[u8]) {
    // A reader that has gone away is the command's business as little as ours.
    let _gone = match message.split_first() {
        Some((1, bytes)) => {
            let mut out = io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        Some((2, bytes)) => io::stderr().lock().write_all(bytes),
        _ => Ok(()),
    };
}

/// Reads stdin in a thread of its own: a read cannot be cancelled, and nothing waits for this thread at the end.
fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = io::stdin().lock().read(&mut buffer) {
            if sender
                .blocking_send(Bytes::copy_from_slice(&buffer[..count]))
                .is_err()
            {
                return;
            }
        }
    });
    receiver
}

/// Opens a WebSocket through the HTTP client, so that keys, TLS and errors work as everywhere else.
pub(crate) async fn connect(client: &Client, path: &str) -> Result<WebSocketStream<reqwest::Upgraded>> {
    let request = client
        .request(Method::GET, path)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", generate_key());
    let response = client.send(request).await?;
    if response.status().as_u16() != 101 {
        return Err(Error::new(format!(
            "the server answered {} instead of opening a stream",
            response.status()
        )));
    }
    let upgraded = response
        .upgrade()
        .await
        .doing("cannot open a stream to the server")?;
    Ok(WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await)
}

fn terminal_size() -> (u16, u16) {
    match termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}

/// The terminal in raw mode until dropped.
#[derive(Debug)]
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self> {
        let before = termios::tcgetattr(io::stdin()).doing("cannot read the state of the terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        // Not `Flush`: what was typed ahead is for the command.
        termios::tcsetattr(io::stdin(), OptionalActions::Drain, &raw).doing("cannot change the terminal")?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _gone = termios::tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_captured_has_the_shape_of_the_apis_answer() {
        let mut text = Captured::default();
        text.take("é".as_bytes());
        let mut answer = json!({"command": "cmd_a"});
        text.describe("stdout", &mut answer);
        let mut bytes = Captured::default();
        bytes.take(b"\xff");
        bytes.describe("stderr", &mut answer);
        assert_eq!(
            answer,
            json!({
                "command": "cmd_a", "stdout": "é", "stdout_bytes": 2, "stdout_truncated": false,
                "stderr": "\u{fffd}", "stderr_base64": "/w==", "stderr_bytes": 1, "stderr_truncated": false,
            })
        );
        let mut long = Captured::default();
        long.take(&[b'x'; Captured::MOST - 1]);
        long.take("é and more".as_bytes());
        let mut answer = json!({});
        long.describe("stdout", &mut answer);
        assert_eq!(answer["stdout_truncated"], true);
        assert!(
            answer.get("stdout_base64").is_none(),
            "a character cut in two is left out"
        );
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        for (ended, code) in [
            (json!({"exit_code": 0}), 0),
            (json!({"exit_code": 3, "signal": null}), 3),
            (json!({"exit_code": null, "signal": 9}), 137),
            (json!({"timed_out": true}), 124),
        ] {
            assert_eq!(exit_code(&ended), code, "{ended}");
        }
    }
}

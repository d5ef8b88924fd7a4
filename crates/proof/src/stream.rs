//! Streams of the API: server-sent events, and WebSockets to commands and ports.

use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::client::Client;
use crate::wait::within;

/// Nothing that a test waits for on a stream takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

// ---- server-sent events

/// The events of one response, as they come.
#[derive(Debug)]
pub struct Events {
    response: reqwest::Response,
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub name: String,
    pub id: Option<String>,
    pub data: Value,
}

impl Events {
    #[track_caller]
    pub fn of(response: reqwest::Response) -> Self {
        assert_eq!(response.status().as_u16(), 200);
        let kind = response
            .headers()
            .get("content-type")
            .and_then(|value| value.to_str().ok());
        assert_eq!(kind, Some("text/event-stream"));
        Self {
            response,
            buffer: Vec::new(),
        }
    }

    /// The next event with data; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Event> {
        within("the next event", PATIENCE, async {
            loop {
                if let Some(event) = self.parse() {
                    return Some(event);
                }
                match self.response.chunk().await {
                    Ok(Some(chunk)) => self.buffer.extend_from_slice(&chunk),
                    Ok(None) | Err(_) => return None,
                }
            }
        })
        .await
    }

    /// Skips to the first event of this name.
    pub async fn find(&mut self, name: &str) -> Event {
        loop {
            match self.next().await {
                Some(event) if event.name == name => return event,
                Some(_) => {}
                None => panic!("the stream ended without an event `{name}`"),
            }
        }
    }

    /// All events until the stream ends.
    pub async fn rest(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }

    fn parse(&mut self) -> Option<Event> {
        while let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
            let block = String::from_utf8(block).expect("events are UTF-8");
            let field = |name: &str| {
                let line = block
                    .lines()
                    .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                line.map(|value| value.trim_start().to_owned())
            };
            if let Some(data) = field("data") {
                return Some(Event {
                    name: field("event").unwrap_or_default(),
                    id: field("id"),
                    data: serde_json::from_str(&data).expect("the data of events is JSON"),
                });
            }
        }
        None
    }
}

/// The bytes of an output event: `text`, or `base64` where they are not UTF-8.
pub fn chunk_bytes(data: &Value) -> Vec<u8> {
    match (data["text"].as_str(), data["base64"].as_str()) {
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(encoded)) => crate::sandbox::from_base64(encoded),
        _ => panic!("neither text nor base64: {data}"),
    }
}

// ---- WebSockets

/// A WebSocket to anywhere on the server; `host` is what the `Host` header says.
pub async fn connect(
    client: &Client,
    host: &str,
    path: &str,
    headers: &[(&'static str, &str)],
) -> Result<WebSocketStream<TcpStream>, Error> {
    let mut request = format!("ws://{host}{path}").into_client_request()?;
    for (name, value) in headers {
        request
            .headers_mut()
            .insert(*name, value.parse().expect("a header is ASCII"));
    }
    let tcp = TcpStream::connect(client.authority())
        .await
        .expect("the server listens");
    let (socket, _) = tokio_tungstenite::client_async(request, tcp).await?;
    Ok(socket)
}

/// A command over a WebSocket.
#[derive(Debug)]
pub struct Session {
    socket: WebSocketStream<TcpStream>,
    /// All that came so far.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

/// What came over a session.
#[derive(Debug, Clone, PartialEq)]
pub enum Received {
    Output,
    Control(Value),
    Closed,
}

impl Session {
    /// Opens `exec/ws` and sends the request.
    pub async fn exec(client: &Client, sandbox: &str, request: &Value) -> Self {
        let mut session = Self::open(client, &format!("/v1/sandboxes/{sandbox}/exec/ws")).await;
        // A server that refuses it may hang up before it has read all of it; what it said is still to be read.
        let _refused = session.socket.send(Message::text(request.to_string())).await;
        session
    }

    /// Attaches to a command, replaying from an offset.
    pub async fn attach(client: &Client, sandbox: &str, command: &str, from: u64) -> Self {
        Self::open(
            client,
            &format!("/v1/sandboxes/{sandbox}/commands/{command}/ws?from={from}"),
        )
        .await
    }

    async fn open(client: &Client, path: &str) -> Self {
        let key = format!("Bearer {}", client.key().unwrap_or_default());
        let socket = connect(client, client.authority(), path, &[("authorization", &key)]).await;
        let socket = socket.unwrap_or_else(|error| panic!("no WebSocket at {path}: {error}"));
        Self {
            socket,
            stdout: Vec::new(),
            stderr: Vec::new(),
        }
    }

    pub async fn control(&mut self, message: &Value) {
        self.socket
            .send(Message::text(message.to_string()))
            .await
            .expect("the session is open");
    }

    pub async fn stdin(&mut self, bytes: &[u8]) {
        self.raw(&[&[0], bytes].concat()).await;
    }

    /// A binary message as it is.
    pub async fn raw(&mut self, message: &[u8]) {
        self.socket
            .send(Message::binary(message.to_vec()))
            .await
            .expect("the session is open");
    }

    pub async fn close_stdin(&mut self) {
        self.control(&json!({"close_stdin": true})).await;
    }

    pub async fn next(&mut self) -> Received {
        match tokio::time::timeout(PATIENCE, self.receive()).await {
            Ok(received) => received,
            Err(_) => panic!("nothing came for {PATIENCE:?}; stdout so far: {:?}", self.text()),
        }
    }

    async fn receive(&mut self) -> Received {
        loop {
            match self.socket.next().await {
                Some(Ok(Message::Binary(bytes))) => {
                    match bytes.split_first() {
                        Some((1, bytes)) => self.stdout.extend_from_slice(bytes),
                        Some((2, bytes)) => self.stderr.extend_from_slice(bytes),
                        other => panic!("an unknown channel: {other:?}"),
                    }
                    return Received::Output;
                }
                Some(Ok(Message::Text(text))) => {
                    let value = serde_json::from_str(text.as_str()).expect("control messages are JSON");
                    return Received::Control(value);
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Received::Closed,
            }
        }
    }

    /// Reads on until a control message of this name came; returns what it says.
    pub async fn until(&mut self, name: &str) -> Value {
        loop {
            match self.next().await {
                Received::Control(value) if value.get(name).is_some() => return value[name].clone(),
                Received::Control(value) if value.get("error").is_some() => {
                    panic!("waiting for `{name}`, the session failed: {value}")
                }
                Received::Closed => {
                    panic!(
                        "waiting for `{name}`, the session closed; stdout so far: {}",
                        self.text()
                    )
                }
                Received::Output | Received::Control(_) => {}
            }
        }
    }

    /// Reads on until stdout contains this text.
    pub async fn until_stdout(&mut self, text: &str) {
        self.until_stdout_times(text, 1).await;
    }

    /// Reads on until stdout contains this text so many times.
    pub async fn until_stdout_times(&mut self, text: &str, times: usize) {
        while self.text().matches(text).count() < times {
            if let Received::Closed = self.next().await {
                panic!(
                    "the session closed before `{text}` came; stdout so far: {}",
                    self.text()
                );
            }
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

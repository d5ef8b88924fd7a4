//! WebSockets that end here: accepted, and read at the pace of a body.
//!
//! What must hold: a message that has begun is a body that is gathered. No wait for a piece of it is longer than
//! [`Patience::body`], and all of it takes no longer than that and the time that its bytes take at [`Patience::body_rate`],
//! however it is cut into frames. Between messages a client may be silent, and bytes that nobody asks for are not waited for.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use atoll_types::{Code, Fault};
use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::header::{
    CONNECTION, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

pub use tokio_tungstenite::tungstenite::Message;
pub use tokio_tungstenite::tungstenite::protocol::CloseFrame;
pub use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use crate::Patience;
use crate::body::Pace;

/// A WebSocket with a client.
pub type WebSocket = WebSocketStream<Paced<TokioIo<Upgraded>>>;

/// Whether a request asks for one as it should.
#[derive(Debug)]
pub struct Wish(Result<Upgrade, Fault>);

/// A request that asks for one.
#[derive(Debug)]
pub struct Upgrade {
    connection: OnUpgrade,
    accept: HeaderValue,
}

/// How large it may become.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// The largest message, in one frame or in many.
    pub message: usize,
    /// What is read and written at once.
    pub buffer: usize,
}

impl<S: Send + Sync> FromRequestParts<S> for Wish {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(Upgrade::of(parts)))
    }
}

impl Wish {
    pub fn well_formed(self) -> Result<Upgrade, Fault> {
        self.0
    }
}

impl Upgrade {
    fn of(parts: &mut Parts) -> Result<Self, Fault> {
        let refused = |why: &str| {
            Fault::new(
                Code::WebsocketRequired,
                format!("this route speaks WebSocket: {why}"),
            )
        };
        let headers = &parts.headers;
        if parts.method != Method::GET {
            return Err(refused("the method is not GET"));
        }
        if !has_word(headers, &CONNECTION, "upgrade") || !has_word(headers, &UPGRADE, "websocket") {
            return Err(refused("the request does not ask for an upgrade to `websocket`"));
        }
        if headers
            .get(SEC_WEBSOCKET_VERSION)
            .is_none_or(|version| version != "13")
        {
            return Err(refused("`Sec-WebSocket-Version` is not 13"));
        }
        let key = headers
            .get(SEC_WEBSOCKET_KEY)
            .ok_or_else(|| refused("`Sec-WebSocket-Key` is missing"))?;
        let accept = HeaderValue::try_from(derive_accept_key(key.as_bytes()))
            .map_err(|_| refused("`Sec-WebSocket-Key` is not a key"))?;
        let connection = parts.extensions.remove::<OnUpgrade>();
        Ok(Self {
            connection: connection.ok_or_else(|| refused("the connection cannot be upgraded"))?,
            accept,
        })
    }

    /// Agrees, and hands the WebSocket to `serve`.
    pub fn accept<F>(
        self,
        sizes: Sizes,
        patience: Patience,
        serve: impl FnOnce(WebSocket) -> F + Send + 'static,
    ) -> Response
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let config = WebSocketConfig::default()
            .max_message_size(Some(sizes.message))
            .max_frame_size(Some(sizes.message))
            .read_buffer_size(sizes.buffer)
            .write_buffer_size(sizes.buffer);
        tokio::spawn(async move {
            let upgraded = match self.connection.await {
                Ok(upgraded) => upgraded,
                Err(error) => {
                    tracing::debug!(%error, "a connection did not become a WebSocket");
                    return;
                }
            };
            let stream = Paced::new(TokioIo::new(upgraded), patience);
            serve(WebSocketStream::from_raw_socket(stream, Role::Server, Some(config)).await).await;
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_ACCEPT, self.accept);
        response
    }
}

fn has_word(headers: &HeaderMap, name: &HeaderName, word: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| part.trim().eq_ignore_ascii_case(word))
}

/// A stream of frames, of which one that has begun has to go on.
#[derive(Debug)]
pub struct Paced<S> {
    inner: S,
    patience: Patience,
    frames: Frames,
    /// While a message is unfinished.
    pace: Option<Pace>,
}

impl<S> Paced<S> {
    fn new(inner: S, patience: Patience) -> Self {
        Self {
            inner,
            patience,
            frames: Frames::default(),
            pace: None,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        match Pin::new(&mut this.inner).poll_read(context, buffer) {
            Poll::Ready(Ok(())) => {
                let came = &buffer.filled()[before..];
                match this.frames.read(came) {
                    None => this.pace = None,
                    Some(Left { began, bytes }) => {
                        // If one was unfinished before, that one is over, and another has begun since.
                        let fresh = || Pace::new(this.patience.body, this.patience.body_rate);
                        let kept = this.pace.take().filter(|_| !began);
                        this.pace.insert(kept.unwrap_or_else(fresh)).arrived(bytes);
                    }
                }
                Poll::Ready(Ok(()))
            }
            Poll::Pending => match &mut this.pace {
                Some(pace) => pace.poll_over(context).map(|slow| {
                    let why = slow.fault().message;
                    Err(io::Error::new(io::ErrorKind::TimedOut, why))
                }),
                None => Poll::Pending,
            },
            ended @ Poll::Ready(Err(_)) => ended,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

/// Follows frames as they come, to know whether a message is unfinished. What is not a frame is somebody else's to refuse.
#[derive(Debug, Default)]
struct Frames {
    /// The head of the frame that comes, as far as it is here.
    head: Vec<u8>,
    /// What is left of a frame behind its head.
    payload: u64,
    /// Frames of a message came, and not its last.
    in_message: bool,
}

/// A message is unfinished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Left {
    /// It has begun in what was read last.
    began: bool,
    /// So much of it has come there.
    bytes: usize,
}

impl Frames {
    fn is_between(&self) -> bool {
        self.head.is_empty() && self.payload == 0 && !self.in_message
    }

    /// `None` if all that has begun is finished.
    fn read(&mut self, mut bytes: &[u8]) -> Option<Left> {
        let (mut began, mut since) = (self.is_between(), 0);
        while let Some((&first, rest)) = bytes.split_first() {
            if self.is_between() {
                (began, since) = (true, 0);
            }
            if self.payload > 0 {
                let taken = usize::try_from(self.payload).map_or(bytes.len(), |left| left.min(bytes.len()));
                self.payload -= taken as u64;
                since += taken;
                bytes = &bytes[taken..];
                continue;
            }
            self.head.push(first);
            since += 1;
            bytes = rest;
            if let Some(payload) = head(&self.head) {
                let (is_last, kind) = (self.head[0] & 0x80 != 0, self.head[0] & 0x0f);
                self.head.clear();
                self.payload = payload;
                // Control frames come in between.
                if kind < 8 {
                    self.in_message = !is_last;
                }
            }
        }
        (!self.is_between()).then_some(Left { began, bytes: since })
    }
}

/// How much follows a head, if that is complete.
fn head(head: &[u8]) -> Option<u64> {
    let [_, second, rest @ ..] = head else {
        return None;
    };
    let mask = if second & 0x80 == 0 { 0 } else { 4 };
    let length = match second & 0x7f {
        126 => 2,
        127 => 8,
        short => return (rest.len() >= mask).then_some(u64::from(short)),
    };
    let whole = rest.len() >= length + mask;
    whole.then(|| {
        rest[..length]
            .iter()
            .fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::StreamExt as _;
    use tokio::io::{AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::Instant;

    use super::*;

    fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![first];
        match payload.len() {
            short @ 0..=125 => frame.push(0x80 | short as u8),
            middle @ 126..=0xffff => {
                frame.push(0x80 | 126);
                frame.extend((middle as u16).to_be_bytes());
            }
            long => {
                frame.push(0x80 | 127);
                frame.extend((long as u64).to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn frames_are_followed_however_they_are_cut() {
        let stream: Vec<(Vec<u8>, bool)> = vec![
            (frame(0x82, b""), false),
            (frame(0x82, &[1; 125]), false),
            (frame(0x81, &[1; 126]), false),
            (frame(0x82, &[1; 70_000]), false),
            (frame(0x89, b"ping"), false),
            (frame(0x02, b"begins"), true),
            (frame(0x8a, b"pong"), true),
            (frame(0x00, b"goes on"), true),
            (frame(0x80, b"ends"), false),
        ];
        for cut in [1, 2, 3, 7, 1000, 100_000] {
            let mut frames = Frames::default();
            for (bytes, unfinished) in &stream {
                let mut left = None;
                for piece in bytes.chunks(cut) {
                    left = frames.read(piece);
                }
                assert_eq!(left.is_some(), *unfinished, "{cut}");
            }
        }
        // The end of one and the beginning of another.
        let mut frames = Frames::default();
        let first = frame(0x82, b"first");
        assert_eq!(
            frames.read(&first[..4]),
            Some(Left {
                began: true,
                bytes: 4
            })
        );
        let both = [&first[4..], &frame(0x82, b"second")[..5]].concat();
        assert_eq!(
            frames.read(&both),
            Some(Left {
                began: true,
                bytes: 5
            })
        );
        assert_eq!(
            frames.read(&[0; 2]),
            Some(Left {
                began: false,
                bytes: 2
            })
        );
    }

    async fn open() -> (DuplexStream, WebSocketStream<Paced<DuplexStream>>) {
        let (client, server) = duplex(1 << 20);
        let stream = Paced::new(server, Patience::default());
        (
            client,
            WebSocketStream::from_raw_socket(stream, Role::Server, None).await,
        )
    }

    /// How long a server waits for a client that sends `bytes` at this pace, and what it gets.
    async fn wait(bytes: Vec<u8>, at_once: usize, pause: Duration) -> (Duration, bool) {
        let (mut client, mut server) = open().await;
        let sending = tokio::spawn(async move {
            for piece in bytes.chunks(at_once) {
                if client.write_all(piece).await.is_err() {
                    return;
                }
                tokio::time::sleep(pause).await;
            }
            std::future::pending::<()>().await;
        });
        let began = Instant::now();
        let came = loop {
            match server.next().await {
                Some(Ok(message)) if message.is_pong() => {}
                other => break other.is_some_and(|message| message.is_ok()),
            }
        };
        sending.abort();
        (began.elapsed(), came)
    }

    #[tokio::test(start_paused = true)]
    async fn a_frame_that_has_begun_must_go_on() {
        let (minute, second) = (Duration::from_secs(60), Duration::from_secs(1));
        // One byte a minute, and one a second; in one frame, and in a message of many.
        for (at_once, pause) in [(1, minute), (1, second)] {
            let (waited, came) = wait(frame(0x82, &[1; 1000]), at_once, pause).await;
            assert!(!came);
            assert!(waited < Duration::from_secs(17), "{waited:?}");
        }
        let mut many = frame(0x02, b"x");
        for _ in 0..1000 {
            many.extend(frame(0x00, b"x"));
            many.extend(frame(0x8a, b""));
        }
        let (waited, came) = wait(many, 13, second).await;
        assert!(!came);
        assert!(waited < Duration::from_secs(17), "{waited:?}");
        // Who sends nothing but a part of a head is waited for as long.
        let (waited, came) = wait(vec![0x82], 1, second).await;
        assert!(!came && waited.as_secs() == 15, "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_between_messages_or_sends_a_long_one_is_waited_for() {
        let (mut client, mut server) = open().await;
        let sending = tokio::spawn(async move {
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
                client.write_all(&frame(0x82, b"late")).await.unwrap();
            }
            // Twenty kilobytes a second, for a minute.
            let long = frame(0x82, &[1; 1_200_000]);
            for piece in long.chunks(20_000) {
                client.write_all(piece).await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            client
        });
        for _ in 0..3 {
            assert_eq!(server.next().await.unwrap().unwrap().into_data(), &b"late"[..]);
        }
        assert_eq!(server.next().await.unwrap().unwrap().len(), 1_200_000);
        drop(sending.await.unwrap());
    }
}

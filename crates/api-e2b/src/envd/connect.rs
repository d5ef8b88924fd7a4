//! The Connect protocol as E2B's clients speak it: unary calls with a bare message, streams of length-prefixed frames that
//! end with a frame of their own, JSON and protocol buffers, never compressed.

use std::any::TypeId;
use std::time::Duration;

use atoll_front::proto::{self, Field, Holds, Message, Unfit};
use atoll_front::{Permit, Refused, Visit, memory};
use atoll_types::{Fault, FaultKind};
use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::messages::{SendInputRequest, StartRequest, StreamInputRequest};

/// The largest message that is accepted if it carries input for a process.
pub(crate) const INPUT_BYTES: usize = 16 * 1024 * 1024;
/// The largest of the others.
const MESSAGE_BYTES: usize = 1024 * 1024;
/// Answers from here on are not written in passing.
const LONG: usize = 1024 * 1024;
/// The most that a message may take once it is read, beside its bytes.
const MOST_BESIDE: u64 = 64 * 1024 * 1024;
/// What stands before each message of a stream: flags, and its length.
const HEAD: usize = 5;
const END_OF_STREAM: u8 = 0x02;
const COMPRESSED: u8 = 0x01;
/// How often a silent stream says that it is there, unless the client asks otherwise.
const KEEPALIVE: Duration = Duration::from_secs(90);
/// The longest time that anybody may ask for: what is added to a clock must fit it.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The one message with lists: its process, and that one's arguments and environment.
static START: &[Message] = &[
    Message {
        fields: &[Field {
            number: 1,
            holds: Holds::Message(1),
            first: 0,
            next: 0,
        }],
    },
    Message {
        fields: &[
            Field {
                number: 2,
                holds: Holds::Text,
                first: 128,
                next: 80,
            },
            Field {
                number: 3,
                holds: Holds::Message(2),
                first: 300,
                next: 210,
            },
        ],
    },
    Message { fields: &[] },
];
const NO_LISTS: usize = 2;

/// Every message of the services.
pub(crate) trait Wire: prost::Message + Default + Serialize + DeserializeOwned + 'static {}

impl<T: prost::Message + Default + Serialize + DeserializeOwned + 'static> Wire for T {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Json,
    Proto,
}

impl Codec {
    pub(crate) fn encode(self, message: &impl Wire) -> Bytes {
        match self {
            // These are maps with text keys, which always can be written.
            Self::Json => serde_json::to_vec(message).unwrap_or_default().into(),
            Self::Proto => message.encode_to_vec().into(),
        }
    }

    pub(crate) fn decode<T: Wire>(self, bytes: &[u8]) -> Result<T, Error> {
        match self {
            Self::Json if bytes.is_empty() => Ok(T::default()),
            Self::Json => serde_json::from_slice(bytes).map_err(|error| Error::invalid(error.to_string())),
            Self::Proto => T::decode(bytes).map_err(|error| Error::invalid(error.to_string())),
        }
    }

    /// What a message takes once it is decoded, its bytes included.
    pub(crate) fn weigh<T: Wire>(self, bytes: &[u8]) -> Result<u64, Error> {
        let length = bytes.len() as u64;
        let most = length + MOST_BESIDE;
        match self {
            Self::Json => {
                let weight = length + memory::json_weight(bytes);
                if weight > most {
                    let message = "the message holds too many values; send fewer at once";
                    return Err(Error::new(Code::ResourceExhausted, message));
                }
                Ok(weight)
            }
            Self::Proto => {
                let starts = TypeId::of::<T>() == TypeId::of::<StartRequest>();
                let root = if starts { 0 } else { NO_LISTS };
                proto::weigh(START, root, bytes, most).map_err(|unfit| {
                    let code = match unfit {
                        Unfit::TooHeavy { .. } => Code::ResourceExhausted,
                        Unfit::Broken => Code::InvalidArgument,
                    };
                    Error::new(code, unfit.to_string())
                })
            }
        }
    }
}

/// How large a message may be.
fn most<T: Wire>() -> usize {
    let inputs = [
        TypeId::of::<SendInputRequest>(),
        TypeId::of::<StreamInputRequest>(),
    ];
    match inputs.contains(&TypeId::of::<T>()) {
        true => INPUT_BYTES,
        false => MESSAGE_BYTES,
    }
}

/// How a call is made, by its content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) codec: Codec,
    pub(crate) streams: bool,
}

impl Kind {
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let (codec, streams) = match value.split(';').next()?.trim() {
            "application/json" => (Codec::Json, false),
            "application/proto" => (Codec::Proto, false),
            "application/connect+json" => (Codec::Json, true),
            "application/connect+proto" => (Codec::Proto, true),
            _ => return None,
        };
        Some(Self { codec, streams })
    }

    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match (self.codec, self.streams) {
            (Codec::Json, false) => "application/json",
            (Codec::Proto, false) => "application/proto",
            (Codec::Json, true) => "application/connect+json",
            (Codec::Proto, true) => "application/connect+proto",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    Unauthenticated,
}

impl Code {
    fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Error {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// The sandbox ended or went to rest meanwhile: the connection breaks, as it does when a machine goes away.
    pub(crate) gone: bool,
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            gone: false,
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub(crate) fn unary(&self) -> Response {
        let body = axum::extract::Json(json!({"code": self.code.name(), "message": self.message}));
        (self.code.status(), body).into_response()
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let code = match fault.kind() {
            // The sandbox is there.
            _ if fault.code == atoll_types::Code::ServerDiskFull => Code::ResourceExhausted,
            // E2B's agent takes the name of a user for a proof of who asks.
            _ if fault.code == atoll_types::Code::NoSuchUserInSandbox => Code::Unauthenticated,
            FaultKind::Invalid => Code::InvalidArgument,
            FaultKind::Unauthenticated => Code::Unauthenticated,
            FaultKind::Forbidden => Code::PermissionDenied,
            FaultKind::NotFound => Code::NotFound,
            FaultKind::Conflict => match fault.code {
                atoll_types::Code::AlreadyExists => Code::AlreadyExists,
                atoll_types::Code::SandboxPaused
                | atoll_types::Code::SandboxStopped
                | atoll_types::Code::SandboxWrongState
                | atoll_types::Code::SandboxContended => Code::Unavailable,
                _ => Code::FailedPrecondition,
            },
            FaultKind::Gone | FaultKind::Unavailable => Code::Unavailable,
            FaultKind::LimitExceeded | FaultKind::TooLarge => Code::ResourceExhausted,
            FaultKind::Unsupported => Code::Unimplemented,
            FaultKind::TimedOut => Code::DeadlineExceeded,
            FaultKind::GuestFailed | FaultKind::Internal => Code::Internal,
        };
        Self {
            code,
            gone: code == Code::Unavailable,
            message: fault.to_string(),
        }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        let code = match refused {
            Refused::TooLarge { .. } | Refused::Full(_) => Code::ResourceExhausted,
            Refused::TooSlow { .. } | Refused::Silent { .. } => Code::DeadlineExceeded,
            Refused::Broken(_) | Refused::NotJson => Code::InvalidArgument,
            Refused::Unpaid => Code::Internal,
        };
        // Not `gone`, whatever it was: the sandbox is there.
        Self::new(code, refused.fault().to_string())
    }
}

/// Reads the one message of a unary call or of a call that is answered with a stream.
pub(crate) async fn receive<T: Wire>(visit: &Visit, kind: Kind, body: Body) -> Result<T, Error> {
    // All of it, so that the connection can be used again.
    let held = visit.read(body, most::<T>() + HEAD).await?;
    let message = match kind.streams {
        false => held.as_ref(),
        true => match take_frame(held.as_ref(), most::<T>())? {
            Some((Frame::Message(payload), _)) => payload,
            Some((Frame::End, _)) | None => return Err(Error::invalid("the request holds no message")),
        },
    };
    let mut permit = visit.permit()?;
    let weight = kind.codec.weigh::<T>(message)?;
    permit.grow(weight).map_err(Refused::Full)?;
    let decoded = kind.codec.decode(message);
    visit.keep(permit);
    decoded
}

/// The messages of a client stream, as they come.
pub(crate) fn receive_all<T: Wire>(
    visit: &Visit,
    kind: Kind,
    body: Body,
) -> Result<impl Stream<Item = Result<T, Error>>, Error> {
    struct State {
        body: BodyDataStream,
        buffer: BytesMut,
        /// For what is in the buffer, and the message that was made of it last.
        permit: Permit,
    }
    async fn next<T: Wire>(kind: Kind, state: &mut State) -> Result<Option<T>, Error> {
        loop {
            if let Some((frame, length)) = take_frame(&state.buffer, most::<T>())? {
                let decoded = match frame {
                    Frame::Message(payload) => {
                        let weight = kind.codec.weigh::<T>(payload)?;
                        let held = state.buffer.len() as u64 + weight;
                        state.permit.set(held).map_err(Refused::Full)?;
                        kind.codec.decode(payload).map(Some)
                    }
                    Frame::End => Ok(None),
                };
                state.buffer.advance(length);
                return decoded;
            }
            match state.body.next().await {
                Some(Ok(bytes)) => {
                    let held = state.buffer.len() + bytes.len();
                    state.permit.set(held as u64).map_err(Refused::Full)?;
                    state.buffer.extend_from_slice(&bytes);
                }
                Some(Err(error)) => return Err(Error::invalid(format!("the request broke off: {error}"))),
                None => return Ok(None),
            }
        }
    }
    let state = State {
        body: body.into_data_stream(),
        buffer: BytesMut::new(),
        permit: visit.permit()?,
    };
    Ok(futures_util::stream::unfold(
        Some(state),
        move |state| async move {
            let mut state = state?;
            match next(kind, &mut state).await {
                Ok(message) => Some((Ok(message?), Some(state))),
                Err(error) => Some((Err(error), None)),
            }
        },
    ))
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    Message(&'a [u8]),
    End,
}

/// The first whole frame, if there is one, and how many bytes it takes.
pub(crate) fn take_frame(buffer: &[u8], most: usize) -> Result<Option<(Frame<'_>, usize)>, Error> {
    if buffer.len() < HEAD {
        return Ok(None);
    }
    let flags = buffer[0];
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if length > most {
        let message = format!("the message is too large: it may hold at most {most} bytes");
        return Err(Error::new(Code::ResourceExhausted, message));
    }
    let Some(payload) = buffer.get(HEAD..HEAD + length) else {
        return Ok(None);
    };
    if flags & END_OF_STREAM != 0 {
        return Ok(Some((Frame::End, HEAD + length)));
    }
    if flags & COMPRESSED != 0 {
        return Err(Error::new(
            Code::Unimplemented,
            "compressed messages are not supported",
        ));
    }
    Ok(Some((Frame::Message(payload), HEAD + length)))
}

fn frame(flags: u8, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(HEAD + payload.len());
    frame.put_u8(flags);
    // Messages are bounded far below 4 GiB: they hold a chunk of output or one entry.
    frame.put_u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
    frame.extend_from_slice(payload);
    frame.freeze()
}

fn end(error: Option<&Error>) -> Bytes {
    let payload = match error {
        None => json!({}),
        Some(error) => json!({"error": {"code": error.code.name(), "message": error.message}}),
    };
    frame(END_OF_STREAM, payload.to_string().as_bytes())
}

pub(crate) fn answer(kind: Kind, outcome: Result<impl Wire, Error>) -> Response {
    match (kind.streams, outcome) {
        (false, Ok(message)) => (
            [(header::CONTENT_TYPE, kind.content_type())],
            kind.codec.encode(&message),
        )
            .into_response(),
        (false, Err(error)) => error.unary(),
        (true, outcome) => {
            let body = match &outcome {
                Ok(message) => [frame(0, &kind.codec.encode(message)), end(None)].concat(),
                Err(error) => end(Some(error)).to_vec(),
            };
            ([(header::CONTENT_TYPE, kind.content_type())], body).into_response()
        }
    }
}

/// The same for a message that may be long: then it is written where nobody else waits.
pub(crate) async fn answer_long<T: Wire + Send + 'static>(kind: Kind, outcome: Result<T, Error>) -> Response {
    match outcome {
        Ok(message) if message.encoded_len() > LONG => {
            let written = tokio::task::spawn_blocking(move || answer(kind, Ok(message))).await;
            written.unwrap_or_else(|_| {
                let error = Error::new(Code::Internal, "the answer could not be written");
                answer(kind, Err::<T, _>(error))
            })
        }
        outcome => answer(kind, outcome),
    }
}

/// A stream of messages; an error is its last word.
pub(crate) fn answer_stream<T: Wire>(
    kind: Kind,
    messages: impl Stream<Item = Result<T, Error>> + Send + 'static,
) -> Response {
    enum State<S> {
        Open(S),
        Over,
    }
    let frames = futures_util::stream::unfold(State::Open(Box::pin(messages)), move |state| async move {
        let State::Open(mut messages) = state else {
            return None;
        };
        match messages.next().await {
            Some(Ok(message)) => {
                let bytes = frame(0, &kind.codec.encode(&message));
                Some((Ok(bytes), State::Open(messages)))
            }
            Some(Err(error)) if error.gone => Some((Err(std::io::Error::other(error.message)), State::Over)),
            Some(Err(error)) => Some((Ok(end(Some(&error))), State::Over)),
            None => Some((Ok(end(None)), State::Over)),
        }
    });
    let headers = [(header::CONTENT_TYPE, kind.content_type())];
    (headers, Body::from_stream(frames)).into_response()
}

/// How long the client allows the call to take.
pub(crate) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let asked = number(headers, "connect-timeout-ms").map(Duration::from_millis);
    asked.map(|asked| asked.min(LONGEST))
}

/// How often a silent stream is to say that it is there.
pub(crate) fn keepalive(headers: &HeaderMap) -> Duration {
    number(headers, "keepalive-ping-interval")
        .filter(|seconds| *seconds > 0)
        .map_or(KEEPALIVE, |seconds| Duration::from_secs(seconds).min(LONGEST))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envd::messages::{ListDirRequest, PathRequest, ProcessConfig, StartEvent};

    const JSON_STREAM: Kind = Kind {
        codec: Codec::Json,
        streams: true,
    };

    fn visit() -> Visit {
        let limits = atoll_front::Limits::for_machine(1 << 30, 1000);
        let visit = atoll_front::Front::new(limits).visit(None);
        visit
            .admit(&atoll_types::ProjectId::from_entropy([1; 20]), None)
            .unwrap();
        visit
    }

    async fn body_of(response: Response) -> Bytes {
        axum::body::to_bytes(response.into_body(), 10_000).await.unwrap()
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_own_frame() {
        let messages = futures_util::stream::iter([
            Ok(StartEvent { pid: 3 }),
            Err(Error::new(Code::DeadlineExceeded, "late")),
        ]);
        let body = body_of(answer_stream(JSON_STREAM, messages)).await;
        let expected = [
            &b"\x00\x00\x00\x00\x09{\"pid\":3}"[..],
            b"\x02\x00\x00\x00\x3c{\"error\":{\"code\":\"deadline_exceeded\",\"message\":\"late\"}}",
        ]
        .concat();
        assert_eq!(body.len(), 14 + 5 + body[14 + 4] as usize);
        assert_eq!(&body[..15], &expected[..15]);
        assert!(body.ends_with(b"\"message\":\"late\"}}"));
    }

    #[tokio::test]
    async fn a_client_stream_may_be_cut_anywhere() {
        let whole = [frame(0, br#"{"path":"a"}"#), frame(0, br#"{"path":"b"}"#)].concat();
        let pieces = whole
            .chunks(3)
            .map(|piece| Ok::<_, std::io::Error>(piece.to_vec()))
            .collect::<Vec<_>>();
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let paths: Vec<String> = receive_all::<PathRequest>(&visit(), JSON_STREAM, body)
            .unwrap()
            .map(|message| message.unwrap().path)
            .collect()
            .await;
        assert_eq!(paths, ["a", "b"]);
    }

    #[tokio::test]
    async fn compressed_and_broken_messages_are_refused() {
        let compressed = Body::from(frame(COMPRESSED, b"x"));
        let error = receive::<PathRequest>(&visit(), JSON_STREAM, compressed)
            .await
            .unwrap_err();
        assert_eq!(error.code, Code::Unimplemented);
        let error = receive::<PathRequest>(&visit(), JSON_STREAM, Body::from("abc"))
            .await
            .unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument);
    }

    #[tokio::test]
    async fn what_a_message_becomes_is_paid_for() {
        const PROTO: Kind = Kind {
            codec: Codec::Proto,
            streams: false,
        };
        let ask = async |memory: u64, message: Vec<u8>| {
            let mut limits = atoll_front::Limits::for_machine(1 << 30, 1000);
            limits.memory = atoll_front::memory::Limits::within(memory);
            let front = atoll_front::Front::new(limits);
            let visit = front.visit(None);
            visit
                .admit(&atoll_types::ProjectId::from_entropy([1; 20]), None)
                .unwrap();
            let received = receive::<StartRequest>(&visit, PROTO, Body::from(message)).await;
            (received, front.memory.held())
        };
        let start = |args: usize| {
            let message = StartRequest {
                process: Some(ProcessConfig {
                    cmd: "sleep".into(),
                    args: vec![String::new(); args],
                    ..ProcessConfig::default()
                }),
                ..StartRequest::default()
            };
            prost::Message::encode_to_vec(&message)
        };
        let (received, held) = ask(64 << 20, start(100_000)).await;
        assert_eq!(received.unwrap().process.unwrap().args.len(), 100_000);
        assert!(held >= 100_000 * 48, "{held}");
        let (received, held) = ask(8 << 20, start(100_000)).await;
        assert_eq!(received.unwrap_err().code, Code::ResourceExhausted);
        assert_eq!(held, 0);
        // Nothing but input is that large.
        let (received, _) = ask(64 << 20, start(600_000)).await;
        assert_eq!(received.unwrap_err().code, Code::ResourceExhausted);
        // Other messages are not read as this one.
        let list = ListDirRequest {
            path: "/home/user/\n\n".into(),
            depth: 1,
        };
        let body = Body::from(prost::Message::encode_to_vec(&list));
        let received = receive::<ListDirRequest>(&visit(), PROTO, body).await.unwrap();
        assert_eq!(received, list);
    }

    #[test]
    fn nobody_asks_for_more_time_than_there_is() {
        let headers = |value: &str| {
            let mut headers = HeaderMap::new();
            for name in ["keepalive-ping-interval", "connect-timeout-ms"] {
                headers.insert(name, value.parse().unwrap());
            }
            headers
        };
        for (asked, ping, limit) in [
            ("18446744073709551615", LONGEST, Some(LONGEST)),
            ("2000", Duration::from_secs(2000), Some(Duration::from_secs(2))),
            ("0", KEEPALIVE, Some(Duration::ZERO)),
            ("soon", KEEPALIVE, None),
        ] {
            let headers = headers(asked);
            assert_eq!((keepalive(&headers), timeout(&headers)), (ping, limit), "{asked}");
            // As it is used.
            let _ = tokio::time::Instant::now() + keepalive(&headers);
        }
    }
}

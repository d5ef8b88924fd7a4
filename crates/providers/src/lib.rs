//! Outbound calls to those who serve models.
//!
//! ```text
//!   Call (path, body) ── head within first_byte ──> Reply { status, chunks } ── each chunk within idle
//!        └─ connect within connect                       └─ dropping it closes the connection
//! ```
//! What must hold:
//! - A provider is somebody else's machine: what it sends is bounded in size and in time, and an answer of a kind that
//!   nobody asked for is an error.
//! - A key goes into a header of a request to its own provider, marked so that no library logs it, and nowhere else:
//!   redirects are not followed and no proxy of the environment is used. What comes back goes through [`Blot`] first.
//! - What one project does to its providers costs others nothing: connections, and names being resolved, are counted for
//!   each and shared with nobody.
//! - Who may not call every machine is connected to none that [`Reach`] refuses, whatever a name resolves to.
//! - Dropping a call at any point closes its connection, which is how a provider learns that nobody listens.
//!
//! Connections are HTTP/1.1: a shared one would queue calls behind each other, and a provider that limits streams on it would
//! hold up the hundred and first.

mod link;
mod names;
mod shelf;
mod signature;

use std::fmt;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use atoll_types::{ProjectId, ProviderKind, Timestamp};
use bytes::{Bytes, BytesMut};
use http_body_util::Full;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT,
};
use hyper::{Request, Uri};
use tokio::time::{Instant, Sleep, timeout};

use crate::link::{Answer, Failed, Links, Way};
use crate::signature::{Credentials, Signed};

/// The most that an answer which is not a stream may hold.
pub const LARGEST_ANSWER: usize = 64 * 1024 * 1024;
/// The most that is read of an error's explanation.
const LARGEST_ERROR: usize = 64 * 1024;
/// The most that is looked at of what an answer says that it is.
const LONGEST_KIND: usize = 100;

/// How long to wait for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    pub connect: Duration,
    /// From the request to the head of its answer. A model that is not streamed thinks before it answers.
    pub first_byte: Duration,
    /// Between two chunks.
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            first_byte: Duration::from_secs(600),
            idle: Duration::from_secs(120),
        }
    }
}

/// Where calls may go; errors are sentences for people.
pub trait Reach: Send + Sync {
    /// Before a name is resolved.
    fn name(&self, host: &str) -> Result<(), String>;
    /// Before an address is connected to, right before.
    fn address(&self, address: IpAddr) -> Result<(), String>;
}

/// Takes out of what a provider says what it must not repeat.
pub trait Blot: Send + Sync {
    /// Something short that is there as a whole.
    fn text(&self, text: &str) -> String;
    /// The next piece of an answer: what may be passed on by now.
    fn piece(&mut self, piece: Bytes) -> Bytes;
    /// What was held back, at the end.
    fn rest(&mut self) -> Bytes;
}

/// Something to send.
#[derive(Debug)]
pub struct Call<'a> {
    pub kind: ProviderKind,
    pub base_url: &'a str,
    /// Behind the base, with its query.
    pub path: &'a str,
    /// What the client said that its provider should hear, such as `anthropic-beta`.
    pub headers: &'a [(String, String)],
    pub body: Bytes,
    /// A stream of events is wanted.
    pub stream: bool,
}

/// A call with its key in it. Not to be printed.
#[allow(missing_debug_implementations, reason = "there is a key in it")]
pub struct Ready {
    url: Uri,
    headers: HeaderMap,
    body: Bytes,
    /// What the answer must be, if it is to be streamed.
    stream: Option<&'static str>,
    blot: Option<Box<dyn Blot>>,
}

impl Call<'_> {
    /// Puts the provider's key in, or what it signs now. Does not wait, so that a key can be lent for as long as this takes.
    pub fn with_key(self, key: Option<&[u8]>, now: Timestamp) -> Result<Ready, Error> {
        let url = format!("{}{}", self.base_url.trim_end_matches('/'), self.path);
        let url: Uri = url.parse().map_err(|_| Error::Unusable("it is no URL".into()))?;
        Ok(Ready {
            headers: headers(&self, &url, key, now)?,
            url,
            body: self.body,
            stream: self.stream.then_some(stream_of(self.kind)),
            blot: None,
        })
    }
}

/// How a provider of this kind calls a stream.
fn stream_of(kind: ProviderKind) -> &'static str {
    match kind {
        ProviderKind::Bedrock => "application/vnd.amazon.eventstream",
        ProviderKind::Openai | ProviderKind::Azure | ProviderKind::Anthropic | ProviderKind::Gemini => {
            "text/event-stream"
        }
    }
}

impl Ready {
    /// Everything that the provider says goes through this.
    pub fn blotting(self, blot: Box<dyn Blot>) -> Self {
        Self {
            blot: Some(blot),
            ..self
        }
    }

    fn request(&self) -> Result<Request<Full<Bytes>>, Error> {
        let path = self.url.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::post(path)
            .body(Full::new(self.body.clone()))
            .map_err(|error| Error::Unusable(error.to_string()))?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }
}

/// As it stands in the request.
fn host(url: &Uri) -> Result<String, Error> {
    match (url.host(), url.port_u16()) {
        (Some(host), Some(port)) => Ok(format!("{host}:{port}")),
        (Some(host), None) => Ok(host.to_owned()),
        (None, _) => Err(Error::Unusable("it has no host".into())),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the address of the provider or its key cannot be used: {0}")]
    Unusable(String),
    #[error("the provider cannot be reached: {0}")]
    Unreachable(String),
    /// It is where calls of this project may not go.
    #[error("the provider cannot be reached: {0}")]
    OutOfBounds(String),
    #[error("{0} connections to providers are open for this project, which is as many as it may have")]
    Crowded(usize),
    #[error("the provider did not answer within {} seconds", .0.as_secs())]
    TooSlow(Duration),
    #[error("the provider sent nothing for {} seconds in the middle of its answer", .0.as_secs())]
    Stalled(Duration),
    #[error("the provider broke off: {0}")]
    BrokeOff(String),
    #[error("the provider answered with {0}, which is not what was asked for")]
    WrongKind(String),
    #[error("the provider's answer is larger than {0} bytes")]
    TooLarge(usize),
}

/// The head of an answer, and the rest as it comes.
pub struct Reply {
    pub status: u16,
    /// How long the provider wants to be left alone.
    pub retry_after: Option<Duration>,
    /// The provider's own name for the request, for asking them about it.
    pub request_id: Option<String>,
    kind: String,
    answer: Answer,
    idle: Duration,
    /// When something was last heard.
    heard: Instant,
    /// Goes off when nothing may have been heard for too long; looked at only then, not set anew with every chunk.
    alarm: Option<Pin<Box<Sleep>>>,
    blot: Option<Box<dyn Blot>>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reply")
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

/// The one client; connections are kept and shared. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Providers {
    links: Arc<Links>,
    timeouts: Timeouts,
}

impl Providers {
    pub fn new(timeouts: Timeouts) -> Result<Self, Error> {
        let links = Links::new().map_err(|error| Error::Unusable(error.to_string()))?;
        Ok(Self {
            links: Arc::new(links),
            timeouts,
        })
    }

    /// Sends a call of a project and waits for the head of its answer, which may say no. `reach`: where it may go; `None`:
    /// anywhere.
    pub async fn send(
        &self,
        call: Ready,
        project: &ProjectId,
        reach: Option<&Arc<dyn Reach>>,
    ) -> Result<Reply, Error> {
        let Timeouts {
            connect,
            first_byte,
            idle,
        } = self.timeouts;
        let request = call.request()?;
        let way = Way {
            url: &call.url,
            project,
            reach,
        };
        let clean = |text: &str| match &call.blot {
            Some(blot) => blot.text(text),
            None => text.to_owned(),
        };
        let sent = timeout(first_byte, self.links.send(way, request, connect)).await;
        let (head, answer) =
            sent.map_err(|_| Error::TooSlow(first_byte))?
                .map_err(|failed| match failed {
                    Failed::OutOfBounds(why) => Error::OutOfBounds(why),
                    Failed::Crowded(most) => Error::Crowded(most),
                    Failed::Unsent(error) => Error::Unreachable(clean(&cause(error.as_ref()))),
                    Failed::Sent(error) => Error::BrokeOff(clean(&cause(error.as_ref()))),
                })?;
        let header = |name: HeaderName| head.headers().get(name).and_then(|value| value.to_str().ok());
        let kind = header(CONTENT_TYPE)
            .map(|kind| essence(&clean(kind)))
            .unwrap_or_default();
        let reply = Reply {
            status: head.status().as_u16(),
            retry_after: header(RETRY_AFTER)
                .and_then(|value| value.trim().parse().ok())
                .map(Duration::from_secs),
            request_id: ["x-request-id", "request-id"]
                .into_iter()
                .find_map(|name| header(HeaderName::from_static(name)))
                .map(|id| {
                    let id = clean(id);
                    id.chars().filter(char::is_ascii_graphic).take(100).collect()
                }),
            kind,
            answer,
            idle,
            heard: Instant::now(),
            alarm: None,
            blot: call.blot,
        };
        reply.check(call.stream)
    }
}

impl Error {
    /// The provider may have done what it was asked to, and charge for it.
    pub fn may_be_charged(&self) -> bool {
        match self {
            Self::Unusable(_) | Self::Unreachable(_) | Self::OutOfBounds(_) | Self::Crowded(_) => false,
            Self::TooSlow(_)
            | Self::Stalled(_)
            | Self::BrokeOff(_)
            | Self::WrongKind(_)
            | Self::TooLarge(_) => true,
        }
    }
}

impl Reply {
    /// An answer of success must be of the kind that was asked for.
    fn check(self, stream: Option<&str>) -> Result<Self, Error> {
        let kind = &self.kind;
        let fits = match stream {
            Some(stream) => kind == stream,
            None => kind == "application/json" || kind.ends_with("+json"),
        };
        match self.status {
            200..=299 if !fits => Err(Error::WrongKind(format!("`{}`", kind.escape_default()))),
            300..=399 => Err(Error::WrongKind("a redirect".into())),
            _ => Ok(self),
        }
    }

    /// The next chunk; `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Error>> {
        while let Poll::Ready(next) = self.answer.poll_chunk(cx) {
            self.heard = Instant::now();
            let next = next.transpose().map_err(|error| Error::BrokeOff(cause(&error)))?;
            let Some(blot) = &mut self.blot else {
                return Poll::Ready(Ok(next));
            };
            let ended = next.is_none();
            let passed = match next {
                Some(piece) => blot.piece(piece),
                None => blot.rest(),
            };
            // What may be the beginning of what is looked for waits for the next piece.
            if !passed.is_empty() {
                return Poll::Ready(Ok(Some(passed)));
            }
            if ended {
                return Poll::Ready(Ok(None));
            }
        }
        let due = self.heard + self.idle;
        let alarm = self
            .alarm
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        while alarm.as_mut().poll(cx).is_ready() {
            if Instant::now() >= due {
                return Poll::Ready(Err(Error::Stalled(self.idle)));
            }
            alarm.as_mut().reset(due);
        }
        Poll::Pending
    }

    /// The whole answer.
    pub async fn whole(self) -> Result<Bytes, Error> {
        self.read(LARGEST_ANSWER).await
    }

    /// The provider's explanation of why not, as far as it is short.
    pub async fn explanation(self) -> Bytes {
        self.read(LARGEST_ERROR).await.unwrap_or_default()
    }

    async fn read(mut self, most: usize) -> Result<Bytes, Error> {
        if self.answer.size_hint().is_some_and(|size| size > most as u64) {
            return Err(Error::TooLarge(most));
        }
        let Some(first) = self.chunk().await? else {
            return Ok(Bytes::new());
        };
        let mut whole = BytesMut::from(first);
        while let Some(chunk) = self.chunk().await? {
            if whole.len() + chunk.len() > most {
                return Err(Error::TooLarge(most));
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.freeze())
    }
}

fn headers(call: &Call<'_>, url: &Uri, key: Option<&[u8]>, now: Timestamp) -> Result<HeaderMap, Error> {
    let mut headers = HeaderMap::new();
    let us = concat!("atoll/", env!("CARGO_PKG_VERSION"));
    headers.insert(USER_AGENT, HeaderValue::from_static(us));
    let host = host(url)?;
    headers.insert(HOST, value(&host)?);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let accept = if call.stream {
        stream_of(call.kind)
    } else {
        "application/json"
    };
    headers.insert(ACCEPT, HeaderValue::from_static(accept));
    for (name, text) in call.headers {
        let name =
            HeaderName::from_bytes(name.as_bytes()).map_err(|error| Error::Unusable(error.to_string()))?;
        headers.insert(name, value(text)?);
    }
    if call.kind == ProviderKind::Anthropic && !headers.contains_key("anthropic-version") {
        headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
    }
    let Some(key) = key else { return Ok(headers) };
    let (name, text) = match call.kind {
        ProviderKind::Bedrock => match Credentials::read(key) {
            Some(credentials) => return sign(headers, call, url, &host, &credentials, now),
            None => (AUTHORIZATION, [b"Bearer ", key].concat()),
        },
        ProviderKind::Openai => (AUTHORIZATION, [b"Bearer ", key].concat()),
        ProviderKind::Azure => (HeaderName::from_static("api-key"), key.to_vec()),
        ProviderKind::Anthropic => (HeaderName::from_static("x-api-key"), key.to_vec()),
        ProviderKind::Gemini => (HeaderName::from_static("x-goog-api-key"), key.to_vec()),
    };
    headers.insert(name, private(&text)?);
    Ok(headers)
}

fn value(text: &str) -> Result<HeaderValue, Error> {
    HeaderValue::from_str(text).map_err(|error| Error::Unusable(error.to_string()))
}

/// A header that no library logs.
fn private(text: &[u8]) -> Result<HeaderValue, Error> {
    let mut value = HeaderValue::from_bytes(text)
        .map_err(|_| Error::Unusable("the key has characters that cannot stand in a header".into()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Adds a signature of the request as Amazon wants it.
fn sign(
    mut headers: HeaderMap,
    call: &Call<'_>,
    url: &Uri,
    host: &str,
    credentials: &Credentials<'_>,
    now: Timestamp,
) -> Result<HeaderMap, Error> {
    let stamp = signature::stamp(now).ok_or_else(|| Error::Unusable("the clock is wrong".into()))?;
    let mut signed = vec![
        ("content-type", "application/json"),
        ("host", host),
        ("x-amz-date", &stamp),
    ];
    signed.extend(credentials.token.map(|token| ("x-amz-security-token", token)));
    let request = Signed {
        method: "POST",
        path: url.path(),
        headers: &signed,
        body: &call.body,
        region: signature::region(url.host().unwrap_or_default()),
        service: "bedrock",
    };
    let authorization = signature::authorization(credentials, &request, &stamp);
    headers.insert(AUTHORIZATION, private(authorization.as_bytes())?);
    headers.insert("x-amz-date", value(&stamp)?);
    if let Some(token) = credentials.token {
        headers.insert("x-amz-security-token", private(token.as_bytes())?);
    }
    Ok(headers)
}

fn essence(kind: &str) -> String {
    kind.split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .chars()
        .take(LONGEST_KIND)
        .collect::<String>()
        .to_ascii_lowercase()
}

/// The innermost cause; the outer ones repeat the address, which may be nobody's business.
fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    std::iter::successors(error.source(), |error| error.source())
        .last()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

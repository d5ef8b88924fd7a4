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
//!   redirects are not followed and no proxy of the environment is used.
//! - Dropping a call at any point closes its connection, which is how a provider learns that nobody listens.

use std::fmt;
use std::time::Duration;

use atoll_types::ProviderKind;
use bytes::{Bytes, BytesMut};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tokio::time::timeout;

/// The most that an answer which is not a stream may hold.
pub const LARGEST_ANSWER: usize = 64 * 1024 * 1024;
/// The most that is read of an error's explanation.
const LARGEST_ERROR: usize = 64 * 1024;

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
    /// Server-sent events are wanted.
    pub stream: bool,
}

/// A call with its key in it. Not to be printed.
#[allow(missing_debug_implementations, reason = "there is a key in it")]
pub struct Ready {
    url: String,
    headers: HeaderMap,
    body: Bytes,
    stream: bool,
}

impl Call<'_> {
    /// Puts the provider's key in. Does not wait, so that a key can be lent for as long as this takes.
    pub fn with_key(self, key: Option<&[u8]>) -> Result<Ready, Error> {
        Ok(Ready {
            url: format!("{}{}", self.base_url.trim_end_matches('/'), self.path),
            headers: headers(&self, key)?,
            body: self.body,
            stream: self.stream,
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the address of the provider or its key cannot be used: {0}")]
    Unusable(String),
    #[error("the provider cannot be reached: {0}")]
    Unreachable(String),
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
    pub is_stream: bool,
    /// How long the provider wants to be left alone.
    pub retry_after: Option<Duration>,
    /// The provider's own name for the request, for asking them about it.
    pub request_id: Option<String>,
    response: reqwest::Response,
    idle: Duration,
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
    http: reqwest::Client,
    timeouts: Timeouts,
}

impl Providers {
    pub fn new(timeouts: Timeouts) -> Result<Self, Error> {
        let http = reqwest::Client::builder()
            .connect_timeout(timeouts.connect)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .tcp_nodelay(true)
            .pool_max_idle_per_host(256)
            .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Error::Unusable(error.to_string()))?;
        Ok(Self { http, timeouts })
    }

    /// Sends a call and waits for the head of its answer, which may say no.
    pub async fn send(&self, call: Ready) -> Result<Reply, Error> {
        let request = self.http.post(call.url).headers(call.headers).body(call.body);
        let sent = timeout(self.timeouts.first_byte, request.send()).await;
        let response = sent
            .map_err(|_| Error::TooSlow(self.timeouts.first_byte))?
            .map_err(|error| Error::Unreachable(cause(&error)))?;
        let header = |name: HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
        let is_stream = header(CONTENT_TYPE).is_some_and(|kind| essence(kind) == "text/event-stream");
        let reply = Reply {
            status: response.status().as_u16(),
            is_stream,
            retry_after: header(RETRY_AFTER)
                .and_then(|value| value.trim().parse().ok())
                .map(Duration::from_secs),
            request_id: ["x-request-id", "request-id"]
                .into_iter()
                .find_map(|name| header(HeaderName::from_static(name)))
                .map(|id| id.chars().filter(char::is_ascii_graphic).take(100).collect()),
            response,
            idle: self.timeouts.idle,
        };
        reply.check(call.stream)
    }
}

impl Reply {
    /// An answer of success must be of the kind that was asked for.
    fn check(self, stream: bool) -> Result<Self, Error> {
        let kind = self
            .response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|kind| kind.to_str().ok());
        let kind = kind.map(essence).unwrap_or_default();
        let fits = if stream {
            self.is_stream
        } else {
            kind == "application/json" || kind.ends_with("+json")
        };
        match self.status {
            200..=299 if !fits => Err(Error::WrongKind(format!("`{}`", kind.escape_default()))),
            300..=399 => Err(Error::WrongKind("a redirect".into())),
            _ => Ok(self),
        }
    }

    /// The next chunk; `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        let next = timeout(self.idle, self.response.chunk()).await;
        next.map_err(|_| Error::Stalled(self.idle))?
            .map_err(|error| Error::BrokeOff(cause(&error)))
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
        if self
            .response
            .content_length()
            .is_some_and(|length| length > most as u64)
        {
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

fn headers(call: &Call<'_>, key: Option<&[u8]>) -> Result<HeaderMap, Error> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let accept = if call.stream {
        "text/event-stream"
    } else {
        "application/json"
    };
    headers.insert(ACCEPT, HeaderValue::from_static(accept));
    for (name, value) in call.headers {
        let name =
            HeaderName::from_bytes(name.as_bytes()).map_err(|error| Error::Unusable(error.to_string()))?;
        let value = HeaderValue::from_str(value).map_err(|error| Error::Unusable(error.to_string()))?;
        headers.insert(name, value);
    }
    if call.kind == ProviderKind::Anthropic && !headers.contains_key("anthropic-version") {
        headers.insert("anthropic-version", HeaderValue::from_static("2023-06-01"));
    }
    if let Some(key) = key {
        let (name, value) = match call.kind {
            ProviderKind::Openai => (AUTHORIZATION, [b"Bearer ", key].concat()),
            ProviderKind::Azure => (HeaderName::from_static("api-key"), key.to_vec()),
            ProviderKind::Anthropic => (HeaderName::from_static("x-api-key"), key.to_vec()),
            ProviderKind::Gemini => (HeaderName::from_static("x-goog-api-key"), key.to_vec()),
        };
        let mut value = HeaderValue::from_bytes(&value)
            .map_err(|_| Error::Unusable("the key has characters that cannot stand in a header".into()))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

fn essence(kind: &str) -> String {
    kind.split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase()
}

/// The innermost cause; the outer ones repeat the address, which may be nobody's business.
fn cause(error: &reqwest::Error) -> String {
    std::iter::successors(std::error::Error::source(error), |error| error.source())
        .last()
        .map_or_else(|| error.to_string(), ToString::to_string)
}

//! One connection of a guest, request by request.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_policy::{Decision, Flow, FlowKind, Grant, HttpRequest, RuleName};
use atoll_types::{EgressVerdict, Protocol};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{
    ACCEPT_ENCODING, ALT_SVC, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, EXPECT, HOST, HeaderName,
    HeaderValue, IF_RANGE, RANGE, TE, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::body::{Answer, Leave, Upload};
use super::check::{self, Bad, Wishes};
use super::route::Route;
use super::tls::Speech;
use super::upstream::{Unanswered, Upstream};
use super::websocket::{self, Asked};
use super::{HEAD_BYTES, reply};
use crate::Tenant;
use crate::broker::{Broker, Head, Redactor};
use crate::events::now;

/// For the head of a request, and for the next one on a connection that is kept.
const HEAD_TIME: Duration = Duration::from_secs(75);
/// Requests at once on an HTTP/2 connection.
const STREAMS: u32 = 128;
/// Requests that were taken back before they were looked at; more end the connection.
const TAKEN_BACK: usize = 32;
/// What a guest may send ahead of a server that does not read: of one request, and of all on a connection.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);
/// What is read of the body of a request that is refused, so that a client which is still writing gets to read why.
const DRAIN_BYTES: usize = 1024 * 1024;
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// What a server cannot say to a guest: that it also answers over QUIC, where it cannot be reached, and what only Atoll
/// says.
const KEPT_BACK: [HeaderName; 3] = [ALT_SVC, reply::DENIED, reply::FAILED];

const DEFAULT_HINT: &str =
    "ask whoever set the sandbox's network policy to allow it, for example with a rule for this host";

pub(super) struct Connection<R> {
    broker: Arc<Broker>,
    upstream: Upstream<R>,
}

/// A request that may go out, and what to do with its answer.
struct Ready {
    parts: Parts,
    wishes: Wishes,
    redactor: Redactor,
    bodies: bool,
}

/// Why a request does not go out.
enum Stop {
    Denied {
        decision: Decision,
        status: StatusCode,
        hint: String,
    },
    /// Whoever found out has told the log.
    Unanswered(Unanswered),
}

impl<R: Route> Connection<R> {
    pub(super) fn new(broker: Arc<Broker>, upstream: Upstream<R>) -> Arc<Self> {
        Arc::new(Self { broker, upstream })
    }

    pub(super) async fn serve<S>(self: Arc<Self>, stream: S) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let tasks = self.upstream.tasks().clone();
        let speech = self.upstream.speech();
        let service = service_fn(move |request| {
            let this = self.clone();
            Box::pin(async move { Ok::<_, Infallible>(this.answer(request).await) })
        });
        let io = TokioIo::new(stream);
        let served = match speech {
            Speech::Http1 => {
                http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_TIME)
                    .max_buf_size(HEAD_BYTES)
                    .preserve_header_case(true)
                    .auto_date_header(false)
                    .serve_connection(io, service)
                    .with_upgrades()
                    .await
            }
            Speech::Http2 => {
                http2::Builder::new(tasks.clone())
                    .timer(TokioTimer::new())
                    .max_concurrent_streams(STREAMS)
                    .max_pending_accept_reset_streams(TAKEN_BACK)
                    .max_local_error_reset_streams(TAKEN_BACK)
                    .max_header_list_size(u32::try_from(HEAD_BYTES).unwrap_or(u32::MAX))
                    .max_send_buf_size(HEAD_BYTES)
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .keep_alive_interval(PING)
                    .keep_alive_timeout(PONG)
                    .auto_date_header(false)
                    .serve_connection(io, service)
                    .await
            }
        };
        // A WebSocket goes on.
        tasks.wait().await;
        served.map_err(io::Error::other)
    }

    async fn answer(&self, mut request: Request<Incoming>) -> Response<Answer> {
        let guest = hyper::upgrade::on(&mut request);
        let (parts, body) = request.into_parts();
        let websocket = Asked::of(&parts);
        let method = parts.method.clone();
        // Whoever asks leave for its body has not sent it, and is not to be given it now.
        let unsent = parts.headers.contains_key(EXPECT);
        let mut ready = match self.prepare(parts, websocket.is_some()).await {
            Ok(ready) => ready,
            Err(stop) => {
                let response = self.refuse(stop, method.as_str()).await;
                if !unsent {
                    drain(body).await;
                }
                return response;
            }
        };
        if websocket.is_some() {
            websocket::mark(&mut ready.parts.headers);
        }
        let mut upload = Upload::new(body);
        let leave = ready.wishes.continues.then(|| Arc::new(Leave::default()));
        if let Some(leave) = &leave {
            upload = upload.wait_for(leave);
        }
        let mut request = Request::from_parts(ready.parts, upload);
        if let Some(leave) = leave.clone() {
            hyper::ext::on_informational(&mut request, move |response| {
                if response.status() == StatusCode::CONTINUE {
                    leave.give();
                }
            });
        }
        let sent = self
            .upstream
            .send(request, |response| {
                // A body that nobody asked for any more is never sent, and leaves the connection in the middle of it.
                leave.as_ref().is_none_or(|leave| leave.end())
                    && response.status() != StatusCode::SWITCHING_PROTOCOLS
            })
            .await;
        let mut response = match sent {
            Ok(response) => response,
            Err(unanswered) => return unanswered.into(),
        };
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return pass(response, &ready.redactor, ready.bodies);
        }
        if !websocket.is_some_and(|asked| asked.agreed(response.headers())) {
            return reply::failed(
                "upstream_failed",
                "the server switched to a protocol that it was not asked for",
            );
        }
        let server = hyper::upgrade::on(&mut response);
        self.upstream
            .tasks()
            .spawn_awaited(websocket::tunnel(guest, server));
        let (mut parts, _) = response.into_parts();
        check::strip_hop_by_hop(&mut parts.headers);
        ready.redactor.headers(&mut parts.headers);
        websocket::mark(&mut parts.headers);
        Response::from_parts(parts, Answer::from(bytes::Bytes::new()))
    }

    /// Checks a request, asks for it, and puts secrets into it.
    async fn prepare(&self, mut parts: Parts, websocket: bool) -> Result<Ready, Stop> {
        let route = self.upstream.route();
        check::method(&parts.method)?;
        check::authority(&parts, route.name(), route.port())?;
        let wishes = check::framing(&parts)?;
        let tenant = route.tenant();
        let now = now();
        let decision = self.decide(&tenant, &parts).await?;
        let host = route.name();
        let (redactor, bodies) = self.broker.redactor(tenant.policy.all_grants(), host, now);
        if bodies && websocket {
            return Err(Stop::denied(
                "secret: redact",
                "a secret that is bound to this host is to be blotted out of answers, which cannot be done in a WebSocket"
                    .to_owned(),
                "bind the secret without `redact`",
            ));
        }
        check::strip_hop_by_hop(&mut parts.headers);
        parts.headers.remove(HOST);
        let path = parts.uri.path().to_owned();
        let query = parts.uri.query().map(str::to_owned);
        // Nothing is put into a request that has nowhere to go.
        let address = self.upstream.address().await.map_err(|error| {
            if !matches!(error, Unanswered::Denied(_)) {
                route.decided(&decision, None, parts.method.as_str());
            }
            Stop::Unanswered(error)
        })?;
        let address = Some(address);
        let grants: Vec<&Grant> = {
            let request = http_request(self.flow(address), &parts);
            tenant.policy.grants(&request, now).collect()
        };
        let mut head = Head {
            headers: &mut parts.headers,
            path: &path,
            query,
        };
        let used = self
            .broker
            .inject(&mut head, &grants, &tenant.placeholders, now)
            .map_err(|denied| Stop::denied(&denied.rule(), denied.to_string(), denied.hint()))?;
        let query = head.query;
        self.address_to_server(&mut parts, &path, query.as_deref())?;
        if wishes.trailers {
            parts.headers.insert(TE, HeaderValue::from_static("trailers"));
            if self.upstream.speech() == Speech::Http1 {
                parts.headers.insert(CONNECTION, HeaderValue::from_static("te"));
            }
        }
        if !wishes.continues {
            parts.headers.remove(EXPECT);
        }
        if bodies {
            // So that it can be read here, and not in parts that each show too little.
            parts
                .headers
                .insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            parts.headers.remove(RANGE);
            parts.headers.remove(IF_RANGE);
        }
        route.decided(&decision, address, parts.method.as_str());
        for secret in &used {
            route.used(secret, address, parts.method.as_str());
        }
        Ok(Ready {
            parts,
            wishes,
            redactor,
            bodies,
        })
    }

    /// Asks the policy. Rules about addresses count only where the address is known.
    async fn decide(&self, tenant: &Tenant, parts: &Parts) -> Result<Decision, Stop> {
        let ask = |address| tenant.policy.request(&http_request(self.flow(address), parts));
        let known = self.upstream.known_address().await;
        let mut decision = ask(known);
        // Where there is no connection to be had, the first refusal is the better reason.
        if !decision.is_allowed()
            && known.is_none()
            && let Ok(address) = self.upstream.address().await
        {
            decision = ask(Some(address));
        }
        match decision.is_allowed() {
            true => Ok(decision),
            false => Err(Stop::Denied {
                decision,
                status: StatusCode::FORBIDDEN,
                hint: DEFAULT_HINT.to_owned(),
            }),
        }
    }

    fn flow(&self, address: Option<IpAddr>) -> Flow<'_> {
        let route = self.upstream.route();
        Flow {
            protocol: Protocol::Tcp,
            port: route.port(),
            name: Some(route.name()),
            address,
            kind: match route.tls() {
                true => FlowKind::Tls,
                false => FlowKind::Http,
            },
            // Was compared before, in every place where a request can say it.
            claimed: Some(route.name()),
        }
    }

    /// Names the host in the one way that the server is to see.
    fn address_to_server(&self, parts: &mut Parts, path: &str, query: Option<&str>) -> Result<(), Stop> {
        let route = self.upstream.route();
        let (scheme, default) = match route.tls() {
            true => (Scheme::HTTPS, 443),
            false => (Scheme::HTTP, 80),
        };
        let host = match route.port() {
            port if port == default => route.name().to_string(),
            port => format!("{}:{port}", route.name()),
        };
        let target = match query {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        // Both were valid before; only a secret in the query can have made it too long.
        let too_long = || {
            Stop::Unanswered(Unanswered::Failed {
                code: "request_too_long",
                why: "the request is too long with the secret in it".to_owned(),
            })
        };
        let target = PathAndQuery::try_from(target).map_err(|_| too_long())?;
        let mut uri = hyper::http::uri::Parts::default();
        uri.path_and_query = Some(target);
        match self.upstream.speech() {
            Speech::Http1 => {
                parts.version = Version::HTTP_11;
                let host = HeaderValue::try_from(host).map_err(|_| too_long())?;
                parts.headers.insert(HOST, host);
            }
            Speech::Http2 => {
                parts.version = Version::HTTP_2;
                uri.scheme = Some(scheme);
                uri.authority = Some(Authority::try_from(host).map_err(|_| too_long())?);
            }
        }
        parts.uri = Uri::from_parts(uri).map_err(|_| too_long())?;
        Ok(())
    }

    async fn refuse(&self, stop: Stop, method: &str) -> Response<Answer> {
        match stop {
            Stop::Denied {
                decision,
                status,
                hint,
            } => {
                let address = self.upstream.known_address().await;
                self.upstream.route().decided(&decision, address, method);
                reply::denied(&decision, status, &hint)
            }
            Stop::Unanswered(unanswered) => unanswered.into(),
        }
    }
}

impl Stop {
    fn denied(rule: &str, reason: String, hint: &str) -> Self {
        Self::Denied {
            decision: refusal(rule, reason),
            status: StatusCode::FORBIDDEN,
            hint: hint.to_owned(),
        }
    }
}

impl From<Bad> for Stop {
    fn from(bad: Bad) -> Self {
        Self::Denied {
            decision: refusal(bad.rule, bad.reason.to_owned()),
            status: bad.status,
            hint: bad.hint.to_owned(),
        }
    }
}

impl From<Unanswered> for Response<Answer> {
    fn from(unanswered: Unanswered) -> Self {
        match unanswered {
            Unanswered::Denied(decision) => reply::denied(&decision, StatusCode::FORBIDDEN, DEFAULT_HINT),
            Unanswered::BrokenBody => reply::broken(),
            Unanswered::Failed { code, why } => reply::failed(code, &why),
        }
    }
}

fn refusal(rule: &str, reason: String) -> Decision {
    Decision {
        verdict: EgressVerdict::Denied,
        rule: RuleName::from(rule),
        reason,
    }
}

fn http_request<'a>(flow: Flow<'a>, parts: &'a Parts) -> HttpRequest<'a> {
    HttpRequest {
        flow,
        method: parts.method.as_str(),
        path: parts.uri.path(),
    }
}

/// The server's answer, without what concerns its connection only and without echoes of secrets.
fn pass(response: Response<Incoming>, redactor: &Redactor, bodies: bool) -> Response<Answer> {
    let (mut parts, body) = response.into_parts();
    if parts.headers.contains_key(TRANSFER_ENCODING) {
        parts.headers.remove(CONTENT_LENGTH);
    }
    check::strip_hop_by_hop(&mut parts.headers);
    for name in KEPT_BACK {
        parts.headers.remove(name);
    }
    // Free text of the server, which nobody needs and which is not looked at for echoes.
    parts.extensions.remove::<ReasonPhrase>();
    redactor.headers(&mut parts.headers);
    let body = match bodies && !redactor.is_empty() && !body.is_end_stream() {
        false => Answer::Passed(body),
        true if is_identity(&parts.headers) => Answer::redacted(body, redactor.clone().scanner()),
        true => {
            return reply::failed(
                "upstream_encoded",
                "the server answered in an encoding in which echoes of secrets cannot be looked for, though it was asked not to",
            );
        }
    };
    Response::from_parts(parts, body)
}

fn is_identity(headers: &hyper::HeaderMap) -> bool {
    headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}

async fn drain(body: Incoming) {
    let read = async {
        let mut body = pin!(body);
        let mut left = DRAIN_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            match frame.data_ref().map(|data| left.checked_sub(data.len())) {
                Some(Some(less)) => left = less,
                _ => return,
            }
        }
    };
    let _ = timeout(DRAIN_TIME, read).await;
}

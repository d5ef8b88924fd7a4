//! One connection of a guest, request by request.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::{Broker, Head, Redactor, Use};
use atoll_http_rules::strip_hop_by_hop;
use atoll_policy::{Decision, Flow, FlowKind, Grant, HttpRequest, RuleName};
use atoll_types::{EgressVerdict, Protocol, Timestamp};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{ACCEPT_ENCODING, CONNECTION, EXPECT, HOST, HeaderValue, IF_RANGE, RANGE, TE};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::answer::{clean, pass};
use super::body::{Answer, Leave, Upload};
use super::check::{self, Bad, Wishes};
use super::open::{self, Open, Ticket};
use super::route::Route;
use super::tls::Speech;
use super::upstream::{Unanswered, Upstream};
use super::websocket::{self, Asked};
use super::{Cut, HEAD_BYTES, reply};
use crate::Tenant;
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

/// How long a request of HTTP/2 that was cut may hold on: one that a silent peer stalls is not looked at, and then takes
/// the connection with it.
const LETTING_GO: Duration = Duration::from_secs(1);
/// How often the clock is looked at for secrets that expire: it may be set.
const CLOCK: Duration = Duration::from_secs(5);

const DEFAULT_HINT: &str =
    "ask whoever set the sandbox's network policy to allow it, for example with a rule for this host";

pub(super) struct Connection<R> {
    broker: Arc<Broker>,
    upstream: Upstream<R>,
    open: Arc<Open>,
}

/// A request that may go out, and what to do with its answer.
struct Ready {
    parts: Parts,
    wishes: Wishes,
    redactor: Redactor,
    bodies: bool,
    tenant: Arc<Tenant>,
    ticket: Ticket,
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
        Arc::new(Self {
            broker,
            upstream,
            open: Arc::default(),
        })
    }

    pub(super) async fn serve<S>(self: Arc<Self>, stream: S) -> io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Before the first request, so that no change is missed.
        let changes = (self.upstream.route().changes(), self.broker.changes());
        let this = Arc::clone(&self);
        // While the connection is still there: it is dropped before the arm of a select is entered.
        let cut = async {
            let why = this.watch(changes).await;
            this.upstream.route().sever();
            why
        };
        tokio::select! {
            biased;
            why = cut => Err(io::Error::other(Cut(why))),
            served = self.serve_requests(stream) => served,
        }
    }

    /// Looks at what is open whenever something changes; completes when the connection is to be broken off.
    async fn watch(
        &self,
        (mut policy, mut secrets): (watch::Receiver<u64>, watch::Receiver<u64>),
    ) -> Decision {
        let mut stalled: Option<(Instant, Decision)> = None;
        loop {
            // Where nobody can change anything any more, nothing is to be waited for.
            let policy_changes = async {
                if policy.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            let secrets_change = async {
                if secrets.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            let patience = stalled.as_ref().map(|(until, _)| *until);
            tokio::select! {
                () = policy_changes => {}
                () = secrets_change => {}
                () = self.open.entered.notified() => continue,
                () = until(self.open.deadline()) => {}
                () = sleep_or_never(patience) => {
                    if let Some((_, why)) = stalled.take().filter(|_| self.holds_on()) {
                        return why;
                    }
                    continue;
                }
            }
            if let Some(why) = self.review() {
                match self.upstream.speech() {
                    // There is no other way to end a message in the middle, and nothing else is on the connection.
                    Speech::Http1 => return why,
                    Speech::Http2 => stalled = Some((Instant::now() + LETTING_GO, why)),
                }
            }
        }
    }

    /// Whether something that was cut is still there.
    fn holds_on(&self) -> bool {
        self.open.hold().requests().any(|request| request.is_cut())
    }

    /// Cuts what is no longer allowed; why, where there is something.
    fn review(&self) -> Option<Decision> {
        let open = self.open.hold();
        let route = self.upstream.route();
        let tenant = route.tenant();
        let now = now();
        let mut last = None;
        for request in open.requests().filter(|request| !request.is_cut()) {
            let Some(why) = self.verdict(&tenant, request, now) else {
                request.ends_at(self.expiry(&tenant, &request.used));
                continue;
            };
            route.decided(&why, Some(request.address()), request.method.as_str());
            request.cut(why.clone());
            last = Some(why);
        }
        last
    }

    /// Why a request that is open may not be, if that is so.
    fn verdict(&self, tenant: &Tenant, open: &open::Request, now: Timestamp) -> Option<Decision> {
        let asked = HttpRequest {
            flow: self.flow(Some(open.address())),
            method: open.method.as_str(),
            path: &open.path,
        };
        let mut decision = tenant.policy.request(&asked);
        if !decision.is_allowed() {
            decision.reason = format!("cut while it was open: {}", decision.reason);
            return Some(decision);
        }
        let cut = |secret: &str, why: &str| {
            refusal(
                &format!("secret: {secret}"),
                format!("cut while it was open: the secret `{secret}` that it was sent with {why}"),
            )
        };
        if !open.used.is_empty() {
            let given: Vec<&Grant> = tenant.policy.grants(&asked, now).collect();
            for used in &open.used {
                let name = &used.secret.name;
                // The broker knows better than the grant why it is gone.
                if let Some(why) = self.broker.revoked(used, now) {
                    return Some(cut(name, why));
                }
                if !given.iter().any(|grant| grant.secret.id == used.secret.id) {
                    return Some(cut(name, "is no longer bound to such requests of this sandbox"));
                }
            }
        }
        let searched = !open.redacted
            && tenant.policy.redacts(self.upstream.route().name())
            && !self.broker.redactor(tenant.policy.all_grants()).is_empty();
        searched.then(|| {
            refusal(
                "secret: redact",
                "cut while it was open: answers of this host are searched for echoes of a secret from now on"
                    .to_owned(),
            )
        })
    }

    /// When the first of these may no longer be in use, as far as is known now.
    fn expiry(&self, tenant: &Tenant, used: &[Use]) -> Option<Timestamp> {
        let grants = tenant.policy.all_grants();
        used.iter()
            .flat_map(|used| {
                let grant = grants.iter().find(|grant| grant.secret.id == used.secret.id);
                [
                    grant.and_then(|grant| grant.expires),
                    self.broker.expires(&used.secret.id),
                ]
            })
            .flatten()
            .min()
    }

    async fn serve_requests<S>(self: Arc<Self>, stream: S) -> io::Result<()>
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
        let ticket = ready.ticket;
        let mut upload = Upload::new(body, ready.tenant, ticket.watched());
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
        let reusable = |response: &Response<Incoming>| {
            // A body that nobody asked for any more is never sent, and leaves the connection in the middle of it.
            leave.as_ref().is_none_or(|leave| leave.end())
                && response.status() != StatusCode::SWITCHING_PROTOCOLS
        };
        let sent = tokio::select! {
            biased;
            why = ticket.cut() => Err(Unanswered::cut(why)),
            sent = self.upstream.send(request, |address| self.moved(&ticket, address), reusable) => sent,
        };
        let mut response = match sent {
            Ok(response) => response,
            Err(unanswered) => return unanswered.into(),
        };
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return pass(response, &ready.redactor, ready.bodies, &ticket);
        }
        if !websocket.is_some_and(|asked| asked.agreed(response.headers())) {
            return reply::failed(
                atoll_types::Code::UpstreamFailed,
                "the server switched to a protocol that it was not asked for",
            );
        }
        let server = hyper::upgrade::on(&mut response);
        self.upstream
            .tasks()
            .spawn_awaited(websocket::tunnel(guest, server, ticket));
        let (mut parts, _) = response.into_parts();
        clean(&mut parts, &ready.redactor);
        websocket::mark(&mut parts.headers);
        Response::from_parts(parts, Answer::from(bytes::Bytes::new()))
    }

    /// Checks a request, asks for it, and puts secrets into it.
    async fn prepare(&self, parts: Parts, websocket: bool) -> Result<Ready, Stop> {
        let route = self.upstream.route();
        check::method(&parts.method)?;
        check::authority(&parts, route.name(), route.port())?;
        let wishes = check::framing(&parts)?;
        let decision = self.decide(&route.tenant(), &parts).await?;
        // Nothing is put into a request that has nowhere to go.
        let address = self.upstream.address().await.map_err(|error| {
            if !matches!(error, Unanswered::Denied(_)) {
                route.decided(&decision, None, parts.method.as_str());
            }
            Stop::Unanswered(error)
        })?;
        self.admit(parts, wishes, websocket, address)
    }

    /// Decides with all that is known, puts secrets in, and enters the request as open; waits for nothing in between, so that
    /// what changes from now on finds it there.
    fn admit(
        &self,
        mut parts: Parts,
        wishes: Wishes,
        websocket: bool,
        address: IpAddr,
    ) -> Result<Ready, Stop> {
        let mut open = self.open.hold();
        let route = self.upstream.route();
        let tenant = route.tenant();
        let now = now();
        let (decision, grants) = {
            let request = http_request(self.flow(Some(address)), &parts);
            let decision = allowed(tenant.policy.request(&request))?;
            (decision, tenant.policy.grants(&request, now).collect::<Vec<_>>())
        };
        let redactor = self.broker.redactor(tenant.policy.all_grants());
        let bodies = !redactor.is_empty() && tenant.policy.redacts(route.name());
        if bodies && websocket {
            return Err(Stop::denied(
                "secret: redact",
                "a secret that is bound to this host is to be blotted out of answers, which cannot be done in a WebSocket"
                    .to_owned(),
                "bind the secret without `redact`",
            ));
        }
        strip_hop_by_hop(&mut parts.headers);
        parts.headers.remove(HOST);
        let path = parts.uri.path().to_owned();
        let mut head = Head {
            headers: &mut parts.headers,
            path: &path,
            query: parts.uri.query().map(str::to_owned),
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
        route.decided(&decision, Some(address), parts.method.as_str());
        for used in &used {
            route.used(&used.secret, Some(address), parts.method.as_str());
        }
        let expires = self.expiry(&tenant, &used);
        let request = open::Request::new(parts.method.clone(), path, address, used, bodies);
        request.ends_at(expires);
        let ticket = open.enter(request);
        drop(open);
        Ok(Ready {
            parts,
            wishes,
            redactor,
            bodies,
            tenant,
            ticket,
        })
    }

    /// The server had closed the connection, and the next one leads elsewhere: may the request go there?
    fn moved(&self, ticket: &Ticket, address: IpAddr) -> Result<(), Unanswered> {
        let request = ticket.request();
        if request.address() == address {
            return Ok(());
        }
        let _open = self.open.hold();
        request.move_to(address);
        match self.verdict(&self.upstream.route().tenant(), request, now()) {
            None => Ok(()),
            Some(why) => {
                let route = self.upstream.route();
                route.decided(&why, Some(address), request.method.as_str());
                Err(Unanswered::Denied(why))
            }
        }
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
        allowed(decision)
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
                code: atoll_types::Code::RequestTooLong,
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

fn allowed(decision: Decision) -> Result<Decision, Stop> {
    match decision.is_allowed() {
        true => Ok(decision),
        false => Err(Stop::Denied {
            decision,
            status: StatusCode::FORBIDDEN,
            hint: DEFAULT_HINT.to_owned(),
        }),
    }
}

/// Until a time of day has come, or the clock is to be looked at again.
async fn until(time: Option<Timestamp>) {
    let Some(time) = time else {
        return std::future::pending().await;
    };
    let left = u64::try_from(time.0.saturating_sub(now().0)).unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(left).min(CLOCK)).await;
}

async fn sleep_or_never(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
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

//! The way from outside to a port inside a sandbox: `http://{port}-{sandbox}.localhost`.
//!
//! ```text
//!   client ══ hyper server ══ [token checked, headers cleaned] ══ hyper client ══ byte stream ══ port in the guest
//! ```
//!
//! What must hold:
//! - Nothing passes without the port's own token, and the token never reaches the guest, wherever it was put. Nor does
//!   an API key that somebody sent here by mistake.
//! - The guest is hostile. Its answers are parsed and written anew by hyper on each side, so that nothing can be
//!   smuggled between them; heads are bounded; it can switch protocols only if the client asked for that protocol; it
//!   can set cookies only for its own host, and not ours.
//! - Bodies stream in both directions with back-pressure. Whoever hangs up ends the other side.

use std::net::SocketAddr;
use std::time::Duration;

use atoll_sandboxes::{Caller, kind_of_secret};
use atoll_types::{Fault, FaultKind, SandboxId};
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use crate::App;
use crate::error::{Answer, Failure};
use crate::extract::{admit as admit_to, bearer};
use crate::pipe::Pipe;

const TOKEN_HEADER: HeaderName = HeaderName::from_static("x-atoll-token");
/// The `Host` that the server in the sandbox is to see instead of the one that was asked for.
const GUEST_HOST: HeaderName = HeaderName::from_static("x-atoll-host");
/// The parameter that sets the cookie, and the cookie's name over plain HTTP.
const TOKEN_NAME: &str = "atoll_token";
/// Its name over TLS: by it a browser takes a cookie from this very host only, and none that another sandbox's page has set
/// for the whole domain.
const HOST_TOKEN_NAME: &str = "__Host-atoll_token";

fn is_token_cookie(name: &str) -> bool {
    name == TOKEN_NAME || name == HOST_TOKEN_NAME
}
/// More tokens than this in one request are not looked at.
const MAX_TOKENS: usize = 8;
/// The largest head that a guest may answer with.
const HEAD_BYTES: usize = 128 * 1024;
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
const COPY_BYTES: usize = 64 * 1024;

/// Headers that concern one connection only (RFC 9110, 7.6.1) besides those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

pub(crate) async fn serve(app: &App, sandbox: &SandboxId, port: u16, request: Request) -> Answer<Response> {
    if request.method() == Method::CONNECT {
        return Err(Failure::with_status(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            "a sandbox's port is not a proxy",
        ));
    }
    let Some(admitted) = admit(app, sandbox, port, request.headers(), request.uri()) else {
        let shown = tokens(request.headers(), request.uri()).find_map(|(_, token)| kind_of_secret(token));
        return Err(Fault::new(
            FaultKind::Unauthenticated,
            "invalid_port_token",
            match shown {
                Some(kind) => format!(
                    "port {port} of sandbox {sandbox} opens with this port's token only; what was sent looks like {kind}"
                ),
                None => format!("port {port} of sandbox {sandbox} opens with this port's token only"),
            },
        )
        .hint(format!(
            "GET /v1/sandboxes/{sandbox}/ports/{port} tells the token; send it as `X-Atoll-Token`, or open the page \
             once with `?{TOKEN_NAME}=`"
        ))
        .into());
    };
    admit_to(request.extensions(), &admitted.caller.project, Some(sandbox))?;
    let protocol = upgrade_to(request.headers());
    let safe = matches!(*request.method(), Method::GET | Method::HEAD);
    if admitted.by == Source::Query && safe && protocol.is_none() {
        return Ok(remember(app, &request, &admitted.token));
    }
    forward(app, &admitted, sandbox, port, request, protocol).await
}

// ---- who may pass

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Header,
    Bearer,
    Cookie,
    Query,
}

struct Admitted {
    caller: Caller,
    token: String,
    by: Source,
}

fn admit(app: &App, sandbox: &SandboxId, port: u16, headers: &HeaderMap, uri: &Uri) -> Option<Admitted> {
    tokens(headers, uri).find_map(|(by, token)| {
        let caller = app.sandboxes.check_port_token(sandbox, port, token)?;
        let token = token.to_owned();
        Some(Admitted { caller, token, by })
    })
}

/// Everything in a request that might be the token.
fn tokens<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> impl Iterator<Item = (Source, &'a str)> {
    let from_header = headers
        .get(TOKEN_HEADER)
        .and_then(|value| value.to_str().ok())
        .map(|token| (Source::Header, token.trim()));
    let from_bearer = bearer(headers).map(|token| (Source::Bearer, token));
    // several, because another host of the domain may have planted one of the same name
    let from_cookies = cookies(headers)
        .filter(|(name, _)| is_token_cookie(name))
        .map(|(_, token)| (Source::Cookie, token));
    let from_query = uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|pair| pair.strip_prefix(TOKEN_NAME)?.strip_prefix('='))
        .map(|token| (Source::Query, token));
    from_header
        .into_iter()
        .chain(from_bearer)
        .chain(from_query)
        .chain(from_cookies)
        .filter(|(_, token)| !token.is_empty())
        .take(MAX_TOKENS)
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
}

/// Puts the token of a URL into a cookie and leads to the URL without it.
fn remember(app: &App, request: &Request, token: &str) -> Response {
    let host = request
        .uri()
        .authority()
        .map(ToString::to_string)
        .or_else(|| Some(request.headers().get(header::HOST)?.to_str().ok()?.to_owned()))
        .unwrap_or_default();
    let scheme = &app.options.public_scheme;
    // With scheme and host: a path that begins with `//` would otherwise lead to another host.
    let location = format!("{scheme}://{host}{}", without_token(request.uri()));
    let (name, secure) = match scheme == "https" {
        true => (HOST_TOKEN_NAME, "; Secure"),
        false => (TOKEN_NAME, ""),
    };
    let cookie = format!("{name}={token}; Path=/; HttpOnly; SameSite=Lax{secure}");
    let headers = [
        (header::LOCATION, location),
        (header::SET_COOKIE, cookie),
        (header::CACHE_CONTROL, "no-store".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
    ];
    (StatusCode::SEE_OTHER, headers).into_response()
}

/// Path and query without our parameter.
fn without_token(uri: &Uri) -> String {
    let path = match uri.path() {
        "" => "/",
        path => path,
    };
    let Some(query) = uri.query() else {
        return path.to_owned();
    };
    let kept: Vec<_> = query
        .split('&')
        .filter(|pair| pair.split('=').next() != Some(TOKEN_NAME))
        .collect();
    match kept.is_empty() {
        true => path.to_owned(),
        false => format!("{path}?{}", kept.join("&")),
    }
}

// ---- passing

async fn forward(
    app: &App,
    admitted: &Admitted,
    sandbox: &SandboxId,
    port: u16,
    mut request: Request,
    protocol: Option<HeaderValue>,
) -> Answer<Response> {
    let connecting = app.sandboxes.connect(&admitted.caller, sandbox, port);
    let stream = match tokio::time::timeout(CONNECT_PATIENCE, connecting).await {
        Ok(stream) => stream.map_err(|fault| unreachable_port(fault, port))?,
        Err(_) => {
            let message =
                format!("port {port} inside the sandbox did not accept a connection within 10 seconds");
            return Err(Fault::new(FaultKind::TimedOut, "port_timed_out", message).into());
        }
    };
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(HEAD_BYTES)
        // As most clients write them; some servers look no closer.
        .title_case_headers(true)
        .handshake(TokioIo::new(Pipe::new(stream)))
        .await
        .map_err(|error| guest_failed(port, &error))?;
    // Ends with the exchange: when both the sender and the response's body are gone, or the upgraded stream is.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "the connection to a sandbox's port broke");
        }
    });

    let client_side = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
    let outgoing = outgoing(app, admitted, request, protocol.as_ref())?;
    let mut response = sender
        .send_request(outgoing)
        .await
        .map_err(|error| guest_failed(port, &error))?;

    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let switched = response.headers().get(header::UPGRADE);
        let agreed = match (&protocol, switched) {
            (Some(asked), Some(got)) => asked.as_bytes().eq_ignore_ascii_case(got.as_bytes()),
            _ => false,
        };
        let (Some(client_side), true) = (client_side, agreed) else {
            return Err(Fault::new(
                FaultKind::GuestFailed,
                "port_broke_http",
                format!("port {port} inside the sandbox switched to a protocol that nobody asked for"),
            )
            .into());
        };
        let guest_side = hyper::upgrade::on(&mut response);
        // Ends when either side hangs up.
        tokio::spawn(bridge(client_side, guest_side));
    }
    let protocol = protocol.filter(|_| response.status() == StatusCode::SWITCHING_PROTOCOLS);
    Ok(incoming(response, protocol))
}

fn unreachable_port(fault: Fault, port: u16) -> Failure {
    match fault.kind {
        // The request was well formed; it is the port that says no.
        FaultKind::Invalid | FaultKind::GuestFailed => Fault::new(
            FaultKind::GuestFailed,
            "port_refused",
            format!(
                "port {port} inside the sandbox refused the connection: {}",
                fault.message
            ),
        )
        .hint("is the server inside running, and does it listen on this port?")
        .into(),
        _ => fault.into(),
    }
}

fn guest_failed(port: u16, error: &hyper::Error) -> Failure {
    Fault::new(
        FaultKind::GuestFailed,
        "port_broke_http",
        format!("port {port} inside the sandbox did not answer in HTTP: {error}"),
    )
    .into()
}

async fn bridge(client: OnUpgrade, guest: OnUpgrade) {
    let (Ok(client), Ok(guest)) = futures_util::future::join(client, guest).await else {
        return;
    };
    let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
    let copied =
        tokio::io::copy_bidirectional_with_sizes(&mut client, &mut guest, COPY_BYTES, COPY_BYTES).await;
    if let Err(error) = copied {
        tracing::debug!(%error, "an upgraded connection to a sandbox's port broke");
    }
}

/// The protocol that a request asks to switch to.
fn upgrade_to(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|option| option.trim().eq_ignore_ascii_case("upgrade"));
    asked.then(|| headers.get(header::UPGRADE).cloned())?
}

/// The request as the guest sees it.
fn outgoing(
    app: &App,
    admitted: &Admitted,
    request: Request,
    protocol: Option<&HeaderValue>,
) -> Answer<hyper::Request<Body>> {
    let (parts, body) = request.into_parts();
    let mut headers = parts.headers;
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => headers.get(header::HOST).cloned(),
    };
    clean_hop_by_hop(&mut headers);
    clean_secrets(&mut headers, &admitted.token);
    // hyper answers `100 Continue` to the client itself
    headers.remove(header::EXPECT);
    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
    let shown = headers.remove(GUEST_HOST);
    forwarded(&mut headers, host.as_ref(), &app.options.public_scheme, peer);
    if let Some(host) = shown.or(host) {
        headers.insert(header::HOST, host);
    }
    if let Some(protocol) = protocol {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
    let uri = match (parts.method == Method::OPTIONS, parts.uri.path()) {
        (true, "*") => Ok(Uri::from_static("*")),
        _ => without_token(&parts.uri).parse(),
    };
    let uri: Uri = uri
        .map_err(|error| Failure::invalid("invalid_uri", format!("the path cannot be passed on: {error}")))?;
    let mut outgoing = hyper::Request::new(body);
    *outgoing.method_mut() = parts.method;
    *outgoing.uri_mut() = uri;
    *outgoing.version_mut() = Version::HTTP_11;
    *outgoing.headers_mut() = headers;
    Ok(outgoing)
}

/// The response as the client sees it.
fn incoming(response: hyper::Response<hyper::body::Incoming>, protocol: Option<HeaderValue>) -> Response {
    let (parts, body) = response.into_parts();
    let mut headers = parts.headers;
    clean_hop_by_hop(&mut headers);
    clean_cookies(&mut headers);
    let switching = protocol.is_some();
    if let Some(protocol) = protocol {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol);
    }
    let body = if switching { Body::empty() } else { Body::new(body) };
    let mut response = Response::new(body);
    *response.status_mut() = parts.status;
    *response.headers_mut() = headers;
    response
}

fn clean_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // These frame the message; naming them must not take the framing away.
        .filter(|name| *name != header::CONTENT_LENGTH && *name != header::HOST)
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Removes the token wherever it may be, and any key or token of ours. A key of the guest's own passes, in whatever header.
fn clean_secrets(headers: &mut HeaderMap, token: &str) {
    headers.remove(TOKEN_HEADER);
    let ours: Vec<HeaderName> = headers
        .iter()
        .filter(|(name, value)| **name != header::COOKIE && holds_ours(value.as_bytes(), token))
        .map(|(name, _)| name.clone())
        .collect();
    for name in ours {
        headers.remove(name);
    }
    if !headers.contains_key(header::COOKIE) {
        return;
    }
    let kept: Vec<_> = headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .map(str::trim)
        .filter(|pair| {
            !pair.is_empty() && !pair.split('=').next().map(str::trim).is_some_and(is_token_cookie)
        })
        .collect();
    let kept = HeaderValue::from_str(&kept.join("; ")).ok();
    headers.remove(header::COOKIE);
    if let Some(kept) = kept.filter(|kept| !kept.is_empty()) {
        headers.insert(header::COOKIE, kept);
    }
}

/// Whether a header's value is a secret of ours: bare, after the name of a scheme, or as user or password of `Basic`.
fn holds_ours(value: &[u8], token: &str) -> bool {
    let is_ours = |secret: &str| secret == token || kind_of_secret(secret).is_some();
    let value = String::from_utf8_lossy(value);
    let value = value.trim();
    if is_ours(value) {
        return true;
    }
    let Some((scheme, rest)) = value.split_once(char::is_whitespace) else {
        return false;
    };
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("basic")
        && let Ok(pair) = STANDARD.decode(rest)
    {
        return String::from_utf8_lossy(&pair).split(':').any(is_ours);
    }
    is_ours(rest)
}

/// Says who asked and how. What the client claimed of itself is replaced.
fn forwarded(
    headers: &mut HeaderMap,
    host: Option<&HeaderValue>,
    scheme: &str,
    peer: Option<&ConnectInfo<SocketAddr>>,
) {
    const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
    const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
    const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
    for name in [FOR, HOST, PROTO, header::FORWARDED] {
        headers.remove(name);
    }
    if let Some(ConnectInfo(peer)) = peer
        && let Ok(peer) = HeaderValue::from_str(&peer.ip().to_string())
    {
        headers.insert(FOR, peer);
    }
    if let Some(host) = host {
        headers.insert(HOST, host.clone());
    }
    if let Ok(scheme) = HeaderValue::from_str(scheme) {
        headers.insert(PROTO, scheme);
    }
}

/// Confines a guest's cookies to its own host, and keeps it from setting ours.
fn clean_cookies(headers: &mut HeaderMap) {
    if !headers.contains_key(header::SET_COOKIE) {
        return;
    }
    let kept: Vec<HeaderValue> = headers
        .get_all(header::SET_COOKIE)
        .iter()
        .filter_map(|value| {
            let text = std::str::from_utf8(value.as_bytes()).ok()?;
            let name = text.split(['=', ';']).next()?.trim();
            if is_token_cookie(name) {
                return None;
            }
            let confined: Vec<_> = text
                .split(';')
                .enumerate()
                .filter(|(at, attribute)| {
                    let name = attribute.split('=').next().unwrap_or_default().trim();
                    *at == 0 || !name.eq_ignore_ascii_case("domain")
                })
                .map(|(_, attribute)| attribute)
                .collect();
            HeaderValue::from_bytes(confined.join(";").as_bytes()).ok()
        })
        .collect();
    headers.remove(header::SET_COOKIE);
    for value in kept {
        headers.append(header::SET_COOKIE, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn the_token_is_looked_for_in_four_places() {
        let headers = headers(&[
            ("x-atoll-token", "t1"),
            ("authorization", "Bearer t2"),
            ("cookie", "a=b; atoll_token=t3; __Host-atoll_token=t4"),
        ]);
        let uri: Uri = "/x?atoll_token=t5&y=1".parse().unwrap();
        let found: Vec<_> = tokens(&headers, &uri).collect();
        assert_eq!(
            found,
            [
                (Source::Header, "t1"),
                (Source::Bearer, "t2"),
                (Source::Query, "t5"),
                (Source::Cookie, "t3"),
                (Source::Cookie, "t4"),
            ]
        );
    }

    #[test]
    fn the_token_never_reaches_the_guest() {
        let mut sent = headers(&[
            ("x-atoll-token", "t"),
            ("authorization", "Bearer t"),
            ("cookie", "a=b; atoll_token=t; __Host-atoll_token=t"),
            ("cookie", "c=d"),
        ]);
        clean_secrets(&mut sent, "t");
        assert_eq!(sent, headers(&[("cookie", "a=b; c=d")]));

        let mut sent = headers(&[("authorization", "Bearer theirs"), ("cookie", "atoll_token=t")]);
        clean_secrets(&mut sent, "t");
        assert_eq!(sent, headers(&[("authorization", "Bearer theirs")]));

        for (name, value) in [
            ("authorization", "Bearer atl_key"),
            ("authorization", "bearer  atl_key"),
            ("authorization", "Bearer e2b_61746c5f6b6579"),
            ("authorization", "Bearer atm_key"),
            ("authorization", "Bearer atv_key"),
            ("authorization", "Bearer ats_key"),
            ("authorization", "Bearer atp_of-another-port"),
            ("e2b-traffic-access-token", "att_token"),
            ("authorization", "Basic YXRsX2tleTo="),
            ("x-api-key", "atl_key"),
            ("x-api-key", "e2b_61746c5f6b6579"),
            ("x-access-token", "t"),
            ("x-access-token", "atl_key"),
            ("x-access-token", "ate_token"),
            ("x-goog-api-key", "atm_key"),
        ] {
            let mut sent = headers(&[(name, value)]);
            clean_secrets(&mut sent, "t");
            assert!(sent.is_empty(), "{name}: {value} reached the guest");
        }
        // The second of two is looked at, too, and takes both with it.
        let mut sent = headers(&[
            ("authorization", "Bearer theirs"),
            ("authorization", "Bearer atl_key"),
        ]);
        clean_secrets(&mut sent, "t");
        assert!(sent.is_empty());
        let theirs = [
            ("x-api-key", "theirs"),
            ("x-access-token", "theirs"),
            ("authorization", "Basic dXNlcjpwYXNz"),
            ("accept", "*/*"),
        ];
        let mut sent = headers(&theirs);
        clean_secrets(&mut sent, "t");
        assert_eq!(sent, headers(&theirs), "what is the guest's own passes");
        for (uri, clean) in [
            ("/a?atoll_token=t", "/a"),
            ("/a?x=1&atoll_token=t&y=2", "/a?x=1&y=2"),
            ("/a?x", "/a?x"),
            ("//evil.org/?atoll_token=t", "//evil.org/"),
        ] {
            assert_eq!(without_token(&uri.parse().unwrap()), clean);
        }
    }

    #[test]
    fn headers_of_one_hop_stay_there() {
        let mut sent = headers(&[
            ("connection", "close, X-Private, Content-Length"),
            ("x-private", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("accept", "*/*"),
        ]);
        clean_hop_by_hop(&mut sent);
        assert_eq!(sent, headers(&[("content-length", "3"), ("accept", "*/*")]));
    }

    #[test]
    fn only_a_declared_upgrade_is_one() {
        let websocket = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        assert_eq!(upgrade_to(&websocket).unwrap(), "websocket");
        assert!(upgrade_to(&headers(&[("upgrade", "websocket")])).is_none());
        assert!(upgrade_to(&headers(&[("connection", "upgrade")])).is_none());
    }

    #[test]
    fn guests_set_cookies_for_themselves_only() {
        let mut sent = headers(&[
            ("set-cookie", "a=1; Domain=localhost; Path=/"),
            ("set-cookie", "atoll_token=stolen"),
            ("set-cookie", "__Host-atoll_token=stolen; Secure; Path=/"),
            ("set-cookie", "domain=ok"),
        ]);
        clean_cookies(&mut sent);
        let expected = headers(&[("set-cookie", "a=1; Path=/"), ("set-cookie", "domain=ok")]);
        assert_eq!(sent, expected);
    }

    #[test]
    fn claims_about_the_client_are_replaced() {
        let mut sent = headers(&[("x-forwarded-for", "1.2.3.4"), ("forwarded", "for=1.2.3.4")]);
        let host = HeaderValue::from_static("80-x.localhost");
        let peer = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 5)));
        forwarded(&mut sent, Some(&host), "http", Some(&peer));
        let expected = headers(&[
            ("x-forwarded-for", "127.0.0.1"),
            ("x-forwarded-host", "80-x.localhost"),
            ("x-forwarded-proto", "http"),
        ]);
        assert_eq!(sent, expected);
    }
}

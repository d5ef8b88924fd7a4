//! The way of a request to a port inside a sandbox, once an API has decided that it may pass.
//!
//! ```text
//!   client ══ hyper server ══ [an API admits it; headers cleaned] ══ hyper client ══ byte stream ══ port in the guest
//! ```
//!
//! What must hold:
//! - No token or key of ours reaches the guest, wherever it was put.
//! - The guest is hostile. Its answers are parsed and written anew by hyper on each side, so that nothing can be
//!   smuggled between them; heads are bounded; it can switch protocols only if the client asked for that protocol; it
//!   can set cookies only for its own host, and not ours.
//! - On the server's own host (E2B's clients name ports by headers there) a guest neither sees nor sets a cookie.
//! - Bodies stream in both directions with back-pressure. Whoever hangs up ends the other side.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use atoll_http_rules::{connection_options, strip_hop_by_hop};
use atoll_types::{Code, Fault, FaultKind};
use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// The parameter that sets the cookie of a port, and the cookie's name over plain HTTP.
pub const TOKEN_NAME: &str = "atoll_token";
/// Its name over TLS: by it a browser takes a cookie from this very host only, and none that another sandbox's page has set
/// for the whole domain.
pub const HOST_TOKEN_NAME: &str = "__Host-atoll_token";

/// The cookie of a browser's session with the server's own pages, over plain HTTP.
pub const SESSION_NAME: &str = "atoll_session";
/// Its name over TLS: by it a browser takes it from this very host only, and not from the page of a sandbox beside it.
pub const HOST_SESSION_NAME: &str = "__Host-atoll_session";

/// Whether a cookie opens a port.
pub fn is_token_cookie(name: &str) -> bool {
    name == TOKEN_NAME || name == HOST_TOKEN_NAME
}

/// Whether a cookie is of the server's own, whatever it opens.
fn is_our_cookie(name: &str) -> bool {
    is_token_cookie(name) || name == SESSION_NAME || name == HOST_SESSION_NAME
}

/// The largest head that a guest may answer with.
const HEAD_BYTES: usize = 128 * 1024;
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
const COPY_BYTES: usize = 64 * 1024;

/// What nobody in the sandbox has to know.
#[derive(Debug, Clone, Copy)]
pub struct Secrets<'a> {
    /// Headers that go, whatever they hold.
    pub headers: &'a [HeaderName],
    /// What opened the port, if anything did.
    pub token: Option<&'a str>,
    /// Whether a word is a key or a token of ours.
    pub is_ours: fn(&str) -> bool,
}

/// How a request is passed on.
#[derive(Debug)]
pub struct Passing<'a> {
    pub port: u16,
    pub secrets: Secrets<'a>,
    /// The `Host` that the server in the sandbox sees; `None`: the one that was asked for.
    pub host: Option<HeaderValue>,
    /// What the client used: `http` or `https`.
    pub scheme: &'a str,
    /// The host is the server's own, and not one of this port alone: cookies of that host are none of the guest's business, it
    /// sets none there, and nobody keeps what it says under the server's addresses.
    pub shares_host: bool,
}

/// Waits for a port to take a connection.
pub async fn connect<S>(port: u16, connecting: impl Future<Output = Result<S, Fault>>) -> Result<S, Fault> {
    match tokio::time::timeout(CONNECT_PATIENCE, connecting).await {
        Ok(stream) => stream.map_err(|fault| unreachable_port(fault, port)),
        Err(_) => {
            let message =
                format!("port {port} inside the sandbox did not accept a connection within 10 seconds");
            Err(Fault::new(Code::PortTimedOut, message))
        }
    }
}

/// Passes a request to whatever is at the other end of `stream`, and its answer back.
pub async fn pass<S>(stream: S, mut request: Request, passing: Passing<'_>) -> Result<Response, Fault>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (port, protocol) = (passing.port, upgrade_to(request.headers()));
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(HEAD_BYTES)
        // As most clients write them; some servers look no closer.
        .title_case_headers(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| guest_failed(port, &error))?;
    // Ends with the exchange: when both the sender and the response's body are gone, or the upgraded stream is.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "the connection to a sandbox's port broke");
        }
    });

    let client_side = protocol.is_some().then(|| hyper::upgrade::on(&mut request));
    let outgoing = outgoing(&passing, request, protocol.as_ref())?;
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
                Code::PortBrokeHttp,
                format!("port {port} inside the sandbox switched to a protocol that nobody asked for"),
            ));
        };
        let guest_side = hyper::upgrade::on(&mut response);
        // Ends when either side hangs up.
        tokio::spawn(bridge(client_side, guest_side));
    }
    let protocol = protocol.filter(|_| response.status() == StatusCode::SWITCHING_PROTOCOLS);
    Ok(incoming(response, protocol, passing.shares_host))
}

fn unreachable_port(fault: Fault, port: u16) -> Fault {
    match fault.kind() {
        // The request was well formed; it is the port that says no.
        FaultKind::Invalid | FaultKind::GuestFailed => Fault::new(
            Code::PortRefused,
            format!(
                "port {port} inside the sandbox refused the connection: {}",
                fault.message
            ),
        )
        .hint("is the server inside running, and does it listen on this port?"),
        _ => fault,
    }
}

fn guest_failed(port: u16, error: &hyper::Error) -> Fault {
    Fault::new(
        Code::PortBrokeHttp,
        format!("port {port} inside the sandbox did not answer in HTTP: {error}"),
    )
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
pub fn upgrade_to(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = connection_options(headers).any(|option| option.eq_ignore_ascii_case("upgrade"));
    asked.then(|| headers.get(header::UPGRADE).cloned())?
}

/// The request as the guest sees it.
fn outgoing(
    passing: &Passing<'_>,
    request: Request,
    protocol: Option<&HeaderValue>,
) -> Result<hyper::Request<Body>, Fault> {
    let (parts, body) = request.into_parts();
    let mut headers = parts.headers;
    let host = match parts.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => headers.get(header::HOST).cloned(),
    };
    strip(&mut headers);
    if passing.shares_host {
        headers.remove(header::COOKIE);
    }
    clean_secrets(&mut headers, &passing.secrets);
    // hyper answers `100 Continue` to the client itself
    headers.remove(header::EXPECT);
    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
    forwarded(&mut headers, host.as_ref(), passing.scheme, peer);
    if let Some(host) = passing.host.clone().or(host) {
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
    let uri: Uri =
        uri.map_err(|error| Fault::new(Code::InvalidUri, format!("the path cannot be passed on: {error}")))?;
    let mut outgoing = hyper::Request::new(body);
    *outgoing.method_mut() = parts.method;
    *outgoing.uri_mut() = uri;
    *outgoing.version_mut() = Version::HTTP_11;
    *outgoing.headers_mut() = headers;
    Ok(outgoing)
}

/// Path and query without our parameter.
pub fn without_token(uri: &Uri) -> String {
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

/// The response as the client sees it.
fn incoming(
    response: hyper::Response<hyper::body::Incoming>,
    protocol: Option<HeaderValue>,
    shares_host: bool,
) -> Response {
    let (parts, body) = response.into_parts();
    let mut headers = parts.headers;
    strip(&mut headers);
    clean_cookies(&mut headers);
    if shares_host {
        headers.remove(header::SET_COOKIE);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
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

/// Without what concerns one connection, and trailers: their names would be passed, and they are not.
fn strip(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(header::TRAILER);
}

/// Removes the token wherever it may be, and any key or token of ours. A key of the guest's own passes, in whatever header.
fn clean_secrets(headers: &mut HeaderMap, secrets: &Secrets<'_>) {
    for name in secrets.headers {
        headers.remove(name);
    }
    let ours: Vec<HeaderName> = headers
        .iter()
        .filter(|(name, value)| **name != header::COOKIE && holds_ours(value.as_bytes(), secrets))
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
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            // Some clients write values in quotes.
            let value = value.trim().trim_matches('"');
            !pair.is_empty() && !is_our_cookie(name.trim()) && !holds_ours(value.as_bytes(), secrets)
        })
        .collect();
    let kept = HeaderValue::from_str(&kept.join("; ")).ok();
    headers.remove(header::COOKIE);
    if let Some(kept) = kept.filter(|kept| !kept.is_empty()) {
        headers.insert(header::COOKIE, kept);
    }
}

/// Whether a header's value is a secret of ours: bare, after the name of a scheme, or as user or password of `Basic`.
fn holds_ours(value: &[u8], secrets: &Secrets<'_>) -> bool {
    let is_ours = |word: &str| secrets.token == Some(word) || (secrets.is_ours)(word);
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
            // One without a name comes back as whatever its value looks like.
            let named = text.trim_start_matches(|c: char| c == '=' || c.is_whitespace());
            let name = named.split(['=', ';']).next()?.trim();
            if is_our_cookie(name) {
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

    const TOKEN: HeaderName = HeaderName::from_static("x-atoll-token");

    fn clean(headers: &mut HeaderMap) {
        let secrets = Secrets {
            headers: &[TOKEN],
            token: Some("t"),
            is_ours: |word| word.starts_with("ours_"),
        };
        clean_secrets(headers, &secrets);
    }

    #[test]
    fn the_token_never_reaches_the_guest() {
        let mut sent = headers(&[
            ("x-atoll-token", "t"),
            ("authorization", "Bearer t"),
            ("cookie", "a=b; atoll_token=t; __Host-atoll_token=t"),
            ("cookie", "c=d"),
        ]);
        clean(&mut sent);
        assert_eq!(sent, headers(&[("cookie", "a=b; c=d")]));

        let mut sent = headers(&[("authorization", "Bearer theirs"), ("cookie", "atoll_token=t")]);
        clean(&mut sent);
        assert_eq!(sent, headers(&[("authorization", "Bearer theirs")]));

        // Nor does the session of a browser, by its name or by what it is.
        let mut sent = headers(&[
            ("cookie", "atoll_session=s; a=b; __Host-atoll_session=s"),
            (
                "cookie",
                "renamed=ours_session; quoted=\"ours_session\"; again=t; c=d",
            ),
        ]);
        clean(&mut sent);
        assert_eq!(sent, headers(&[("cookie", "a=b; c=d")]));

        for (name, value) in [
            ("authorization", "Bearer ours_key"),
            ("authorization", "bearer  ours_key"),
            ("authorization", "Basic b3Vyc19rZXk6"),
            ("x-api-key", "ours_key"),
            ("x-access-token", "t"),
            ("x-access-token", "ours_key"),
        ] {
            let mut sent = headers(&[(name, value)]);
            clean(&mut sent);
            assert!(sent.is_empty(), "{name}: {value} reached the guest");
        }
        // The second of two is looked at, too, and takes both with it.
        let mut sent = headers(&[
            ("authorization", "Bearer theirs"),
            ("authorization", "Bearer ours_key"),
        ]);
        clean(&mut sent);
        assert!(sent.is_empty());
        let theirs = [
            ("x-api-key", "theirs"),
            ("x-access-token", "theirs"),
            ("authorization", "Basic dXNlcjpwYXNz"),
            ("accept", "*/*"),
        ];
        let mut sent = headers(&theirs);
        clean(&mut sent);
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
            ("set-cookie", "atoll_session=theirs; Path=/"),
            ("set-cookie", " __Host-atoll_session =theirs; Secure; Path=/"),
            ("set-cookie", "=atoll_session=theirs; Path=/"),
            ("set-cookie", "domain=ok"),
        ]);
        clean_cookies(&mut sent);
        let expected = headers(&[("set-cookie", "a=1; Path=/"), ("set-cookie", "domain=ok")]);
        assert_eq!(sent, expected);
    }

    /// What a guest that answers so much is asked, and what the client hears of it.
    async fn passed(shares_host: bool) -> (String, HeaderMap) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (ours, mut guest) = tokio::io::duplex(64 * 1024);
        let asked = tokio::spawn(async move {
            let (mut asked, mut buffer) = (Vec::new(), [0; 1024]);
            while !asked.ends_with(b"\r\n\r\n") {
                let count = guest.read(&mut buffer).await.unwrap();
                asked.extend_from_slice(&buffer[..count]);
            }
            let answer = b"HTTP/1.1 200 OK\r\nSet-Cookie: a=1\r\nCache-Control: max-age=9\r\nContent-Length: 0\r\n\r\n";
            guest.write_all(answer).await.unwrap();
            String::from_utf8(asked).unwrap().to_lowercase()
        });
        let request = Request::builder()
            .uri("/")
            .header("host", "server")
            .header("cookie", "theirs=1");
        let passing = Passing {
            port: 80,
            secrets: Secrets {
                headers: &[],
                token: None,
                is_ours: |_| false,
            },
            host: None,
            scheme: "http",
            shares_host,
        };
        let request = request.body(Body::empty()).unwrap();
        let answer = pass(ours, request, passing).await.unwrap();
        (asked.await.unwrap(), answer.headers().clone())
    }

    #[tokio::test]
    async fn a_guest_on_the_servers_own_host_neither_sees_nor_sets_its_cookies() {
        let (asked, answered) = passed(false).await;
        assert!(asked.contains("cookie: theirs=1"), "{asked}");
        assert_eq!(answered[header::SET_COOKIE], "a=1");
        assert_eq!(answered[header::CACHE_CONTROL], "max-age=9");
        let (asked, answered) = passed(true).await;
        assert!(!asked.contains("cookie"), "{asked}");
        assert!(!answered.contains_key(header::SET_COOKIE));
        assert_eq!(answered[header::CACHE_CONTROL], "no-store");
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

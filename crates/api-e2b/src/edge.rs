//! Which sandbox a request is for, if any, and the way there.
//!
//! What must hold: a request that names a sandbox's port, by headers or by host, never reaches a route of the API; a
//! sandbox that does not run is answered in words from which the clients conclude that it is gone.

use atoll_front::host;
use atoll_sandboxes::{Caller, Opens, Sandbox};
use atoll_types::{SandboxId, SandboxState};
use axum::body::Body;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::extras::Extras;
use crate::{App, envd};

/// The port of E2B's in-sandbox agent.
pub(crate) const ENVD_PORT: u16 = 49983;

const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";
/// How the native proxy is told that a request may pass.
const PORT_TOKEN: &str = "x-atoll-token";
/// How it is told which `Host` the server in the sandbox is to see.
const GUEST_HOST: &str = "x-atoll-host";
/// The largest refusal of the native proxy that is translated.
const REFUSAL_BYTES: usize = 64 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Api,
    Port {
        sandbox: SandboxId,
        port: u16,
        /// By headers, as only E2B's clients do, rather than by host.
        by_headers: bool,
    },
    /// A host that looks like a port's but names none, which the native proxy refuses in its own words.
    Nowhere,
    Wrong(&'static str),
}

pub(crate) async fn edge(State(app): State<App>, mut request: Request, next: Next) -> Response {
    // Ours to say to the native proxy, whichever way the request takes.
    request.headers_mut().remove(GUEST_HOST);
    match address(request.uri(), request.headers(), &app.options.port_domains) {
        Address::Api if is_signed_file(&request) => envd::serve_signed(&app, request).await,
        Address::Api => next.run(request).await,
        Address::Wrong(why) => (StatusCode::BAD_REQUEST, why).into_response(),
        Address::Nowhere => to_native(&app, request).await,
        Address::Port {
            sandbox,
            port,
            by_headers,
        } => to_sandbox(&app, &sandbox, port, by_headers, request).await,
    }
}

/// A link to a file on the API's own address names no sandbox; its signature tells.
fn is_signed_file(request: &Request) -> bool {
    request.uri().path() == "/files"
}

fn address(uri: &Uri, headers: &HeaderMap, domains: &[String]) -> Address {
    match host::target(uri, headers, domains) {
        host::Target::Port { sandbox, port } => {
            return Address::Port {
                sandbox,
                port,
                by_headers: false,
            };
        }
        host::Target::Nowhere { .. } => return Address::Nowhere,
        host::Target::Ambiguous => return Address::Wrong("the request must name exactly one host"),
        host::Target::Api => {}
    }
    // Two names are none: whoever stands before us may have looked at the other one.
    if ["e2b-sandbox-id", "e2b-sandbox-port"]
        .iter()
        .any(|name| headers.get_all(*name).iter().count() > 1)
    {
        return Address::Wrong("repeated header");
    }
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    match (text("e2b-sandbox-id"), text("e2b-sandbox-port")) {
        (None, None) => Address::Api,
        (Some(_), None) | (None, Some(_)) => Address::Wrong("missing header"),
        (Some(id), Some(port)) => match (parse_id(id), host::parse_port(port)) {
            (None, _) => Address::Wrong("Invalid sandbox ID"),
            (_, None) => Address::Wrong("Invalid sandbox port"),
            (Some(sandbox), Some(port)) => Address::Port {
                sandbox,
                port,
                by_headers: true,
            },
        },
    }
}

/// An id as clients write it: bare, with a client's id behind a dash, or our own form.
pub(crate) fn parse_id(text: &str) -> Option<SandboxId> {
    if let Ok(id) = text.parse() {
        return Some(id);
    }
    let bare = text.split('-').next()?;
    SandboxId::from_bare(bare).ok()
}

/// A sandbox that a request may go to.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) id: SandboxId,
    pub(crate) caller: Caller,
    pub(crate) sandbox: Sandbox,
    /// `None`: it was not made through this wire.
    pub(crate) extras: Option<Extras>,
}

impl Target {
    pub(crate) async fn find(app: &App, id: &SandboxId) -> Option<Self> {
        let caller = app.sandboxes.tenant(id)?;
        let sandbox = app.sandboxes.get(&caller, id).await.ok()?;
        let extras = Extras::of(&sandbox.spec.labels);
        Some(Self {
            id: id.clone(),
            caller,
            sandbox,
            extras,
        })
    }

    pub(crate) fn runs(&self) -> bool {
        self.sandbox.state == SandboxState::Running
    }

    /// Whether a request finds it running, or wakes it.
    fn answers(&self) -> bool {
        match self.sandbox.state {
            SandboxState::Running | SandboxState::Resuming => true,
            SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopping | SandboxState::Stopped => {
                self.sandbox.spec.auto_resume
            }
            SandboxState::Starting
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed => false,
        }
    }
}

async fn to_native(app: &App, request: Request) -> Response {
    match app.native.clone().oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

async fn to_sandbox(app: &App, id: &SandboxId, port: u16, by_headers: bool, request: Request) -> Response {
    let Some(target) = Target::find(app, id).await else {
        // Whoever shows a token of ours is told in our words what became of it.
        return match by_headers || port == ENVD_PORT || !shows_token(&request) {
            true => not_found(id),
            false => to_native(app, request).await,
        };
    };
    if port == ENVD_PORT {
        // Asking whether it runs does not wake it.
        let runs = match request.uri().path() {
            "/health" => target.runs(),
            _ => target.answers(),
        };
        return match runs {
            true => envd::serve(app, &target, request).await,
            false => not_found(id),
        };
    }
    match &target.extras {
        Some(_) if !target.answers() => not_found(id),
        Some(extras) => to_port(app, &target, extras, port, request).await,
        // Not made through this wire: the native proxy decides who passes.
        None if by_headers => {
            let message = "This sandbox has no public ports";
            refused(id, StatusCode::FORBIDDEN, message, Some(port))
        }
        None => to_native(app, request).await,
    }
}

/// Whether a request carries what the native proxy looks for.
fn shows_token(request: &Request) -> bool {
    let headers = request.headers();
    let query = request.uri().query().unwrap_or_default();
    [PORT_TOKEN, "cookie", "authorization"]
        .iter()
        .any(|name| headers.contains_key(*name))
        || query.contains("atoll_token=")
}

/// To a server in the sandbox, by way of the native proxy, which wants the sandbox's own token and host.
async fn to_port(app: &App, target: &Target, extras: &Extras, port: u16, mut request: Request) -> Response {
    let headers = request.headers_mut();
    if extras.private_ports {
        let opens = Opens::Traffic { sandbox: &target.id };
        let given = headers.get(TRAFFIC_TOKEN).and_then(|value| value.to_str().ok());
        let why = match given {
            Some(given) if app.sandboxes.is_token(&opens, given) => None,
            Some(_) => Some("The traffic access token is invalid"),
            None => Some("The traffic access token is missing"),
        };
        if let Some(why) = why {
            return refused(&target.id, StatusCode::FORBIDDEN, why, None);
        }
    }
    // The native proxy's own, for this port alone.
    let opens = Opens::Port {
        sandbox: &target.id,
        port,
    };
    if let Ok(token) = HeaderValue::from_str(&app.sandboxes.token(&opens)) {
        headers.insert(PORT_TOKEN, token);
    }
    // What opens the sandbox is none of the business of what runs in it, and what is ours to say nobody else says.
    for ours in [TRAFFIC_TOKEN, "x-access-token", "x-api-key"] {
        headers.remove(ours);
    }
    let domain = app
        .options
        .port_domains
        .first()
        .map_or("localhost", String::as_str);
    let proxied = format!("{port}-{}.{domain}", target.id.bare());
    let seen = match &extras.mask_host {
        Some(mask) => HeaderValue::from_str(&mask.replace("${PORT}", &port.to_string())).ok(),
        None => headers.get(header::HOST).cloned(),
    };
    if let Some(seen) = seen {
        headers.insert(GUEST_HOST, seen);
    }
    if let Ok(host) = HeaderValue::from_str(&proxied) {
        headers.insert(header::HOST, host);
    }
    *request.uri_mut() = origin_form(request.uri());
    let response = to_native(app, request).await;
    match response.status() {
        StatusCode::BAD_GATEWAY => translate(target, port, response).await,
        _ => response,
    }
}

/// Path and query alone: an authority would outrank the `Host` that was set.
fn origin_form(uri: &Uri) -> Uri {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    path.parse().unwrap_or_else(|_| Uri::from_static("/"))
}

/// A port that nobody listens on, in E2B's words; anything else is the server's own answer.
async fn translate(target: &Target, port: u16, response: Response) -> Response {
    let (mut parts, body) = response.into_parts();
    let is_json = parts
        .headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
    if !is_json {
        return Response::from_parts(parts, body);
    }
    let Ok(bytes) = axum::body::to_bytes(body, REFUSAL_BYTES).await else {
        return refused(
            &target.id,
            StatusCode::BAD_GATEWAY,
            "The answer was too long",
            Some(port),
        );
    };
    let code = serde_json::from_slice::<Value>(&bytes)
        .ok()
        .and_then(|body| Some(body.get("error")?.get("code")?.as_str()?.to_owned()));
    if code.as_deref() == Some("port_refused") {
        let message = "The sandbox is running but port is not open";
        return refused(&target.id, StatusCode::BAD_GATEWAY, message, Some(port));
    }
    parts.headers.remove(header::TRANSFER_ENCODING);
    Response::from_parts(parts, Body::from(bytes))
}

/// What clients take for a sandbox that ended or rests.
pub(crate) fn not_found(id: &SandboxId) -> Response {
    refused(id, StatusCode::BAD_GATEWAY, "The sandbox was not found", None)
}

fn refused(id: &SandboxId, status: StatusCode, message: &str, port: Option<u16>) -> Response {
    let mut body = json!({
        "sandboxId": id.bare(),
        "message": message,
        "code": status.as_u16(),
    });
    if let Some(port) = port {
        body["port"] = port.into();
    }
    (status, Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: &str = "abcdefghijkmnpqrstuv";

    fn found(pairs: &[(&'static str, &str)]) -> Address {
        let headers = pairs
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        address(
            &Uri::from_static("/"),
            &headers,
            &["localhost".into(), "boxes.test".into()],
        )
    }

    #[test]
    fn a_sandbox_is_named_by_host_or_by_headers() {
        let port = |port, by_headers| Address::Port {
            sandbox: SandboxId::from_bare(BARE).unwrap(),
            port,
            by_headers,
        };
        assert_eq!(found(&[("host", "80-short.boxes.test")]), Address::Nowhere);
        assert_eq!(
            found(&[("host", &format!("49983-{BARE}.boxes.test:8443"))]),
            port(49983, false)
        );
        assert_eq!(
            found(&[
                ("host", "127.0.0.1:1"),
                ("e2b-sandbox-id", BARE),
                ("e2b-sandbox-port", "80")
            ]),
            port(80, true)
        );
        assert_eq!(
            found(&[("host", &format!("x@80-{BARE}.boxes.test"))]),
            port(80, false)
        );
        assert_eq!(found(&[("host", "api.boxes.test")]), Address::Api);
        assert_eq!(found(&[("host", "127.0.0.1:7070")]), Address::Api);
        assert_eq!(
            found(&[("e2b-sandbox-id", BARE)]),
            Address::Wrong("missing header")
        );
        assert_eq!(
            found(&[("e2b-sandbox-id", "X Y"), ("e2b-sandbox-port", "80")]),
            Address::Wrong("Invalid sandbox ID")
        );
        assert_eq!(
            found(&[("e2b-sandbox-id", BARE), ("e2b-sandbox-port", "0")]),
            Address::Wrong("Invalid sandbox port")
        );
        // As the native API reads it: a number of a port is digits, of which the first is not zero.
        for wrong in ["+80", "080", "-80", "8 0"] {
            assert_eq!(
                found(&[("host", &format!("{wrong}-{BARE}.boxes.test"))]),
                Address::Nowhere,
                "{wrong}"
            );
            assert_eq!(
                found(&[("e2b-sandbox-id", BARE), ("e2b-sandbox-port", wrong)]),
                Address::Wrong("Invalid sandbox port"),
                "{wrong}"
            );
        }
    }
}

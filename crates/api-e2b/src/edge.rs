//! Which sandbox a request is for, if any, and the way there.
//!
//! What must hold: a request that names a sandbox's port by its host never reaches a route of the API, and one that names it by
//! headers does only where it cannot mean the sandbox: on the host of the API, or by a path of the API to the agent, which has no
//! such paths (Python's SDK 2.8 to 2.26 asks that way for `connect`). A sandbox that does not run is answered in words from which
//! the clients conclude that it is gone.

use atoll_front::proxy::{self, Passing, Secrets};
use atoll_front::serve;
use atoll_front::{Asked, Visit, host};
use atoll_identity::{Caller, Opens, kind_of_secret};
use atoll_sandboxes::Sandbox;
use atoll_types::{Code, Fault, SandboxId, SandboxState, SaveKind};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::closed::{self, Closed, Why};
use crate::error::Refusal;
use crate::extras::{self, Extras};
use crate::{App, control, envd};

/// The port of E2B's in-sandbox agent.
pub(crate) const ENVD_PORT: u16 = 49983;

/// The shortest lifetime of what traffic has woken.
const WOKEN_FOR_MILLIS: u64 = 300_000;

const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static(closed::TRAFFIC_TOKEN);
/// What the native API opens ports with.
const PORT_TOKEN: HeaderName = HeaderName::from_static("x-atoll-token");

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Api,
    Port {
        sandbox: SandboxId,
        port: u16,
        /// By headers, as only E2B's clients do, rather than by host.
        by_headers: bool,
    },
    /// It has the form of E2B's ids but not of ours: a sandbox of another server, for which there is none.
    Foreign(String),
    /// A host that names none, or not one alone: the native API says so.
    Nowhere,
    Wrong(&'static str),
}

/// Whether a request is this wire's: one of its paths, or a port of a sandbox that was made through it.
pub(crate) fn claims(app: &App, asked: &Asked<'_>) -> bool {
    match address(asked.target, &asked.head.uri, &asked.head.headers) {
        Address::Api => {
            let path = asked.head.uri.path();
            is_signed_file(path)
                || control::is_ours(path)
                || is_by_token(&asked.head.uri, &asked.head.headers)
        }
        Address::Wrong(_) | Address::Port { by_headers: true, .. } => true,
        // As with sandboxes that are gone.
        Address::Foreign(_) => !shows_token(asked),
        Address::Port { port: ENVD_PORT, .. } => true,
        Address::Port { sandbox, .. } => match app.sandboxes.has_label(&sandbox, extras::LABEL) {
            Some(was_made_here) => was_made_here,
            // Whoever shows a token of ours is told in our words what became of it.
            None => !shows_token(asked),
        },
        Address::Nowhere => false,
    }
}

pub(crate) async fn edge(State(app): State<App>, request: Request, next: Next) -> Response {
    let is_browser = closed::is_browser(request.headers());
    closed::as_page(route(&app, request, next).await, is_browser)
}

async fn route(app: &App, request: Request, next: Next) -> Response {
    let target = request.extensions().get::<host::Target>();
    let address = match target {
        Some(target) => address(target, request.uri(), request.headers()),
        None => Address::Api,
    };
    match address {
        Address::Api if is_signed_file(request.uri().path()) => envd::serve_signed(app, request).await,
        Address::Api if is_by_token(request.uri(), request.headers()) => {
            let sandbox = envd::shown(request.headers()).and_then(|token| envd::whose(app, token));
            match sandbox {
                Some(sandbox) => to_sandbox(app, &sandbox, ENVD_PORT, true, request).await,
                None => Closed::not_found("").into_response(),
            }
        }
        Address::Api | Address::Nowhere => next.run(request).await,
        Address::Wrong(why) => (StatusCode::BAD_REQUEST, why).into_response(),
        Address::Foreign(sandbox) => Closed::not_found(&sandbox).into_response(),
        Address::Port {
            sandbox,
            port,
            by_headers,
        } => to_sandbox(app, &sandbox, port, by_headers, request).await,
    }
}

/// A link to a file on the API's own address names no sandbox; its signature tells.
fn is_signed_file(path: &str) -> bool {
    path == "/files"
}

/// Neither does what some clients send that were told a sandbox's address (`E2B_SANDBOX_URL`): the agent's token tells. Python's SDK
/// 2.8 to 2.20 does so after a `connect`, older ones for JavaScript always.
fn is_by_token(uri: &Uri, headers: &HeaderMap) -> bool {
    envd::is_agents(uri.path()) && envd::shown(headers).is_some()
}

fn address(target: &host::Target, uri: &Uri, headers: &HeaderMap) -> Address {
    match target {
        host::Target::Port { sandbox, port } => {
            return Address::Port {
                sandbox: sandbox.clone(),
                port: *port,
                by_headers: false,
            };
        }
        host::Target::Nowhere { host } => {
            return foreign_host(host).map_or(Address::Nowhere, Address::Foreign);
        }
        host::Target::Ambiguous => return Address::Nowhere,
        host::Target::Api => {}
    }
    let (name, _) = host::split(host::authority(uri, headers).unwrap_or_default());
    if host::of_api(&name).is_some() {
        return Address::Api;
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
            (None, Some(_)) if foreign(id).is_some() => Address::Foreign(id.to_owned()),
            (None, _) => Address::Wrong("Invalid sandbox ID"),
            (_, None) => Address::Wrong("Invalid sandbox port"),
            (_, Some(ENVD_PORT)) if control::is_ours(uri.path()) && !envd::is_health(uri.path()) => {
                Address::Api
            }
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

/// An id of E2B's form: letters and digits, perhaps with a client's id behind a dash. It comes back in answers, so it is short.
fn foreign(id: &str) -> Option<&str> {
    let bare = id.split('-').next()?;
    let fine = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    ((1..=64).contains(&bare.len()) && id.len() <= 128 && bare.bytes().all(fine)).then_some(bare)
}

/// The sandbox of E2B's cloud that a host names. What is none of its ids either is a typing error, which the native API is good at.
fn foreign_host(host: &str) -> Option<String> {
    let (port, id) = host.split('.').next()?.split_once('-')?;
    let of_cloud = |id: &&str| id.starts_with('i') && (20..=22).contains(&id.len());
    let id = foreign(id).filter(of_cloud)?;
    host::parse_port(port).map(|_| id.to_owned())
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
        let project = app.sandboxes.owner(id)?;
        let caller = app.identity.visitor(project, id.clone());
        let sandbox = app.sandboxes.get(&caller, id).await.ok()?;
        let extras = Extras::of(&sandbox.spec.labels);
        Some(Self {
            id: id.clone(),
            caller,
            sandbox,
            extras,
        })
    }

    /// It rests, and would come back if somebody may wake it.
    fn waits(&self, app: &App) -> bool {
        !self.runs() && self.sandbox.state != SandboxState::Resuming && self.answers(app)
    }

    pub(crate) fn runs(&self) -> bool {
        self.sandbox.state == SandboxState::Running
    }

    /// Wakes it for a request that was let in, if it rests and wants that. As E2B has it, the lifetime then begins anew,
    /// however much was left of the last one, and is not short.
    pub(crate) async fn wake(&self, app: &App) -> Result<(), Fault> {
        if !self.runs() && self.answers(app) {
            let least = app
                .sandboxes
                .longest_lifetime()
                .map_or(WOKEN_FOR_MILLIS, |most| most.min(WOKEN_FOR_MILLIS));
            let timeout = self.sandbox.spec.timeout_millis.map(|asked| asked.max(least));
            app.sandboxes.resume(&self.caller, &self.id, timeout).await?;
        }
        Ok(())
    }

    /// Whether a request finds it running, or wakes it. What was saved without its memory, although that could have been kept,
    /// would come back without its processes: whoever wants that says so.
    pub(crate) fn answers(&self, app: &App) -> bool {
        match self.sandbox.state {
            SandboxState::Running | SandboxState::Resuming => true,
            SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopping | SandboxState::Stopped => {
                let without_memory = self
                    .sandbox
                    .saved
                    .as_ref()
                    .is_some_and(|saved| saved.kind == SaveKind::Filesystem);
                let reboots = without_memory && app.sandboxes.keeps_memory(self.sandbox.isolation);
                self.sandbox.spec.auto_resume && !reboots
            }
            SandboxState::Starting
            | SandboxState::Deleting
            | SandboxState::Deleted
            | SandboxState::Failed => false,
        }
    }
}

async fn to_sandbox(app: &App, id: &SandboxId, port: u16, by_headers: bool, request: Request) -> Response {
    let Some(target) = Target::find(app, id).await else {
        return not_found(id);
    };
    if port == ENVD_PORT {
        return to_agent(app, &target, request).await;
    }
    match &target.extras {
        Some(_) if !target.answers(app) => not_found(id),
        Some(extras) => match to_port(app, &target, extras, port, by_headers, request).await {
            Ok(response) => response,
            Err(Barred::Traffic(why)) => Closed::new(id.bare(), why).into_response(),
            Err(Barred::Fault(fault)) => port_failed(id, port, &fault),
        },
        // Not made through this wire.
        None if by_headers => {
            let why = Why::Other {
                status: StatusCode::FORBIDDEN,
                message: "This sandbox has no public ports".to_owned(),
            };
            Closed::at_port(id.bare(), port, why).into_response()
        }
        None => not_found(id),
    }
}

/// To E2B's agent, in whose place we answer.
async fn to_agent(app: &App, target: &Target, request: Request) -> Response {
    let path = request.uri().path();
    if envd::is_reserved(path) {
        let path = path.to_owned();
        return Closed::new(target.id.bare(), Why::Reserved { path }).into_response();
    }
    if !target.answers(app) {
        return not_found(&target.id);
    }
    if target.waits(app) && request.method() != Method::OPTIONS {
        // A link to a file may be signed instead, which is looked at before anything is woken.
        if !is_signed_file(path) && !envd::opens(app, target, request.headers()) {
            return Closed::new(target.id.bare(), Why::MayNotWake).into_response();
        }
        // E2B's own edge wakes it whatever is asked, and so does this question.
        if envd::is_health(path)
            && let Err(fault) = target.wake(app).await
        {
            return port_failed(&target.id, ENVD_PORT, &fault);
        }
    }
    envd::serve(app, target, request).await
}

/// Whether a request carries what the native API opens ports with.
fn shows_token(asked: &Asked<'_>) -> bool {
    let headers = &asked.head.headers;
    let query = asked.head.uri.query().unwrap_or_default();
    [PORT_TOKEN.as_str(), "cookie", "authorization"]
        .iter()
        .any(|name| headers.contains_key(*name))
        || query.contains("atoll_token=")
}

/// Why nothing came of a request to a port.
enum Barred {
    Traffic(Why),
    Fault(Fault),
}

impl From<Fault> for Barred {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// To a server in the sandbox, with the sandbox's traffic token where its ports are private.
async fn to_port(
    app: &App,
    target: &Target,
    extras: &Extras,
    port: u16,
    by_headers: bool,
    request: Request,
) -> Result<Response, Barred> {
    let headers = request.headers();
    if extras.private_ports {
        let opens = Opens::Traffic { sandbox: &target.id };
        let given = headers.get(TRAFFIC_TOKEN).and_then(|value| value.to_str().ok());
        match given {
            Some(given) if app.identity.is_token(&opens, given) => {}
            Some(_) => return Err(Barred::Traffic(Why::TokenInvalid)),
            None => return Err(Barred::Traffic(Why::TokenMissing)),
        }
    }
    if request.method() == Method::CONNECT {
        return Err(Fault::new(Code::MethodNotAllowed, "a sandbox's port is not a proxy").into());
    }
    let visit = Visit::of(request.extensions())?;
    match extras.private_ports {
        true => visit.admit_caller(&target.caller)?,
        // Anybody may come, and nobody of them takes the project's places.
        false => visit.welcome(target.caller.project(), &target.id)?,
    }
    target.wake(app).await?;
    let connecting = app.sandboxes.connect(&target.caller, &target.id, port);
    let stream = proxy::connect(port, connecting).await?;
    let mask = extras.mask_host.as_ref();
    let scheme = serve::scheme(request.extensions(), &app.options.public_scheme);
    let passing = Passing {
        port,
        // What opens the sandbox is none of the business of what runs in it.
        secrets: Secrets {
            headers: &[
                TRAFFIC_TOKEN,
                PORT_TOKEN,
                HeaderName::from_static("x-access-token"),
                HeaderName::from_static("x-api-key"),
            ],
            token: None,
            is_ours: |word| kind_of_secret(word).is_some(),
        },
        host: mask.and_then(|mask| {
            HeaderValue::from_str(&mask.replace(control::network::PORT_MARK, &port.to_string())).ok()
        }),
        scheme,
        // By headers, whatever the server's own pages have in a browser would come along.
        shares_host: by_headers,
    };
    Ok(proxy::pass(stream.into_io(), request, passing).await?)
}

/// A port that nobody listens on, and whatever else went wrong on the way there.
fn port_failed(id: &SandboxId, port: u16, fault: &Fault) -> Response {
    let why = match fault.kind() {
        _ if fault.code == Code::PortRefused => Why::PortClosed,
        // The guest's mistake, and not the server's, is a bad gateway to whoever asked the guest.
        atoll_types::FaultKind::GuestFailed => Why::Other {
            status: StatusCode::BAD_GATEWAY,
            message: fault.message.clone(),
        },
        _ => Why::Other {
            status: Refusal::from(fault.clone()).status,
            message: fault.message.clone(),
        },
    };
    Closed::at_port(id.bare(), port, why).into_response()
}

/// What clients take for a sandbox that ended or rests.
pub(crate) fn not_found(id: &SandboxId) -> Response {
    Closed::not_found(id.bare()).into_response()
}

#[cfg(test)]
mod tests {
    use axum::http::header;

    use super::*;

    const BARE: &str = "abcdefghijkmnpqrstuv";

    fn found(pairs: &[(&'static str, &str)]) -> Address {
        found_at("/", pairs)
    }

    fn found_at(path: &'static str, pairs: &[(&'static str, &str)]) -> Address {
        let headers = pairs
            .iter()
            .map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        let domains = ["localhost".into(), "boxes.test".into()];
        let uri = Uri::from_static(path);
        address(&host::target(&uri, &headers, &domains), &uri, &headers)
    }

    #[test]
    fn what_is_asked_of_the_api_goes_there_whatever_headers_come_along() {
        let connect = "/sandboxes/abcdefghijkmnpqrstuv/connect";
        let port = |port| Address::Port {
            sandbox: SandboxId::from_bare(BARE).unwrap(),
            port,
            by_headers: true,
        };
        let at = |path, host: &str, port: &str| {
            let named = [
                ("host", host),
                ("e2b-sandbox-id", BARE),
                ("e2b-sandbox-port", port),
            ];
            found_at(path, &named)
        };
        for host in [
            "api.boxes.test",
            "API.boxes.test:8443",
            "api.localhost:7070",
            "api.elsewhere.test",
        ] {
            for path in [connect, "/v2/sandboxes", "/health", "/process.Process/Start", "/"] {
                assert_eq!(at(path, host, "49983"), Address::Api, "{host} {path}");
            }
            assert_eq!(
                found_at(connect, &[("host", host), ("e2b-sandbox-id", "X Y")]),
                Address::Api
            );
        }
        for host in [
            "127.0.0.1:7070",
            "localhost:7070",
            "sandbox.boxes.test",
            "boxes.test",
        ] {
            for path in [connect, "/v2/sandboxes", "/v3/templates"] {
                assert_eq!(at(path, host, "49983"), Address::Api, "{host} {path}");
                // A server inside may have any path.
                assert_eq!(at(path, host, "8000"), port(8000), "{host} {path}");
            }
            for path in [
                "/health",
                "/files",
                "/process.Process/Start",
                "//process.Process/Start",
                "/v1/keys",
            ] {
                assert_eq!(at(path, host, "49983"), port(49983), "{host} {path}");
            }
        }
        // A host that names a port is that port, whatever the path.
        let host = format!("49983-{BARE}.boxes.test");
        let by_host = Address::Port {
            sandbox: SandboxId::from_bare(BARE).unwrap(),
            port: ENVD_PORT,
            by_headers: false,
        };
        assert_eq!(at(connect, &host, "49983"), by_host);
    }

    #[test]
    fn paths_are_told_apart_from_those_of_other_apis() {
        for ours in [
            "/sandboxes",
            "/v2/sandboxes/x/logs",
            "/v3/templates",
            "/health",
            "/templates/a/b",
        ] {
            assert!(control::is_ours(ours), "{ours}");
        }
        for other in [
            "/",
            "/v1/sandboxes",
            "/healthz",
            "/v3/ai/config",
            "/sandboxes2",
            "/v2",
            "/metrics",
        ] {
            assert!(!control::is_ours(other), "{other}");
        }
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
            Address::Nowhere
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
        // A sandbox of another server is one that is not here.
        let foreign = || Address::Foreign("i1a2b3c4d5e6f7g8h9i0j".into());
        assert_eq!(
            found(&[
                ("e2b-sandbox-id", "i1a2b3c4d5e6f7g8h9i0j"),
                ("e2b-sandbox-port", "80")
            ]),
            foreign()
        );
        for host in [
            "49983-i1a2b3c4d5e6f7g8h9i0j.boxes.test",
            "3210-i1a2b3c4d5e6f7g8h9i0j-client.localhost:7070",
        ] {
            assert_eq!(found(&[("host", host)]), foreign(), "{host}");
        }
        assert_eq!(
            found(&[("e2b-sandbox-id", &"a".repeat(65)), ("e2b-sandbox-port", "80")]),
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

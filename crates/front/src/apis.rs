//! The APIs of a server, and what surrounds every request to any of them: an id, a span, a measurement, and a net under
//! panics.
//!
//! ```text
//!   request ── Visit ── host ── id, span, meter ── which API? ── its router ── its words for what went wrong
//! ```
//!
//! What must hold:
//! - **One of them answers.** They are asked in order whether a request is theirs; the last takes what is left. None calls
//!   another one.
//! - **A host is read once.** Each API finds the [`Target`] among the request's extensions, so that all send it to the same place.
//! - **An answer is paid for** by whoever asked until it is written: see [`crate::answer`].
//! - A request for a port of a sandbox never reaches a route: routes are paths of ours, those behind a port are the guest's.

use std::borrow::Cow;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use atoll_types::{Code, Fault, FaultKind, RequestId};
use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::FutureExt as _;
use tower::ServiceExt as _;
use tracing::Instrument as _;

use crate::host::{self, Target};
use crate::{Front, answer, status};

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// One API as the front end knows it.
#[derive(Clone)]
pub struct Api {
    /// For the log and the metrics.
    pub name: &'static str,
    /// Whether a request is for it.
    pub claims: Arc<dyn Fn(&Asked<'_>) -> bool + Send + Sync>,
    pub router: Router,
    /// Writes a fault in its words. The response is what the handler left of it: a status, and headers.
    pub write: fn(Response, &Fault, &str) -> Response,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Api").field(&self.name).finish()
    }
}

/// A request, as far as it takes to say whose it is.
#[derive(Debug)]
pub struct Asked<'a> {
    pub target: &'a Target,
    pub head: &'a Parts,
}

/// All APIs of a server, in the order in which they are asked; cheap to clone.
#[derive(Debug, Clone)]
pub struct Apis(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    front: Front,
    /// Under which ports of sandboxes appear.
    domains: Vec<String>,
    apis: Vec<Api>,
}

impl Apis {
    pub fn new(front: Front, domains: Vec<String>, apis: impl IntoIterator<Item = Api>) -> Self {
        let observed = apis.into_iter().map(|api| Api {
            router: api.router.layer(axum::middleware::from_fn(note_route)),
            ..api
        });
        Self(Arc::new(Inner {
            apis: observed.collect(),
            front,
            domains,
        }))
    }

    pub fn front(&self) -> &Front {
        &self.0.front
    }

    /// Answers a request that came on a connection.
    pub async fn answer(&self, mut request: Request) -> Response {
        let (front, started) = (&self.0.front, Instant::now());
        // What comes from inside this process did not come by a listener.
        let visit = request
            .extensions_mut()
            .get_or_insert_with(|| front.visit(None))
            .clone();
        let id = request_id(request.headers());
        let method = request.method().clone();
        let target = host::target(request.uri(), request.headers(), &self.0.domains);
        let (head, body) = request.into_parts();
        let asked = Asked {
            target: &target,
            head: &head,
        };
        let Some(api) = self.0.apis.iter().find(|api| (api.claims)(&asked)) else {
            // The last of them takes everything, so this is a server without one.
            return failed(Fault::new(Code::NoSuchRoute, "nobody serves this here"));
        };
        let span = tracing::info_span!(
            "request",
            id = %id.as_str(),
            api = api.name,
            %method,
            route = tracing::field::Empty,
            sandbox = tracing::field::Empty,
            status = tracing::field::Empty,
            latency_us = tracing::field::Empty,
        );
        match &target {
            Target::Port { sandbox, .. } => span.record("sandbox", sandbox.as_str()),
            _ => span.record("sandbox", sandbox_in(head.uri.path())),
        };
        let is_port = matches!(target, Target::Port { .. });
        let mut request = Request::from_parts(head, body);
        request.extensions_mut().insert(target);

        let in_flight = front.meter.begin();
        let answer = AssertUnwindSafe(api.router.clone().oneshot(request))
            .catch_unwind()
            .instrument(span.clone())
            .await;
        let mut response = match answer {
            Ok(Ok(response)) => response,
            Ok(Err(never)) => match never {},
            Err(panic) => {
                let message = panic_message(&*panic);
                span.in_scope(|| tracing::error!(message, "a handler panicked"));
                let fault =
                    Fault::internal("the server made a mistake; its log says more under this request id");
                failed(fault)
            }
        };
        if let Some(fault) = response.extensions_mut().remove::<Fault>() {
            span.in_scope(|| tell(&fault));
            response = (api.write)(response, &fault, &id);
        }
        let route = response.extensions_mut().remove::<Route>();
        response = match answer::paid(&visit, response) {
            Ok(response) => response,
            Err(fault) => {
                span.in_scope(|| tell(&fault));
                let mut refused = failed(fault.clone());
                refused.extensions_mut().clear();
                (api.write)(refused, &fault, &id)
            }
        };
        drop(in_flight);

        let elapsed = started.elapsed();
        let status = response.status();
        let route = match route {
            _ if is_port => Cow::Borrowed("port"),
            Some(Route(path)) => Cow::Owned(path.as_str().to_owned()),
            None => Cow::Borrowed("none"),
        };
        front.meter.record(api.name, &method, &route, status, elapsed);
        span.record("route", &*route);
        span.record("status", status.as_u16());
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        span.record("latency_us", micros);
        span.in_scope(|| tracing::debug!("answered"));
        if let Ok(value) = HeaderValue::from_str(&id) {
            response.headers_mut().entry(REQUEST_ID).or_insert(value);
        }
        response
    }
}

/// A response whose body is still to be written, by the API that was asked.
pub fn failed(fault: Fault) -> Response {
    let mut response = Response::default();
    *response.status_mut() = status::http(fault.code);
    response.extensions_mut().insert(fault);
    response
}

fn tell(fault: &Fault) {
    match fault.kind() {
        FaultKind::Internal => {
            tracing::error!(code = fault.code.text(), message = %fault.message, "request failed");
        }
        FaultKind::GuestFailed | FaultKind::Unavailable => {
            tracing::warn!(code = fault.code.text(), message = %fault.message, "request failed");
        }
        _ => tracing::debug!(code = fault.code.text(), message = %fault.message, "request refused"),
    }
}

/// The route that answered, in the extensions of the response.
#[derive(Debug, Clone)]
struct Route(MatchedPath);

async fn note_route(request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    if let Some(path) = path {
        response.extensions_mut().insert(Route(path));
    }
    response
}

/// The caller's own id if it is harmless to log and echo, otherwise a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    match given {
        Some(given) if is_sane(given) => given.to_owned(),
        _ => {
            let mut entropy = [0; 20];
            // Without entropy the id is all the same, which costs a log line its uniqueness and nothing else.
            let _ = getrandom::fill(&mut entropy);
            RequestId::from_entropy(entropy).as_str().to_owned()
        }
    }
}

fn is_sane(id: &str) -> bool {
    (1..=128).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':'))
}

/// The sandbox that a path names, in whichever API.
fn sandbox_in(path: &str) -> Option<&str> {
    let (_, rest) = path.split_once("/sandboxes/")?;
    rest.split('/').next().filter(|id| (20..=64).contains(&id.len()))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "no message"
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::response::IntoResponse as _;
    use axum::routing::get;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::Limits;

    fn api(name: &'static str, router: Router, claims: fn(&Asked<'_>) -> bool) -> Api {
        Api {
            name,
            claims: Arc::new(claims),
            router,
            write: |response, fault, id| {
                (
                    response.status(),
                    format!("{}: {} {id}", fault.code, fault.message),
                )
                    .into_response()
            },
        }
    }

    fn apis() -> Apis {
        async fn panics() -> &'static str {
            panic!("by mistake")
        }
        let first = Router::new()
            .route("/first/{id}", get(|| async { "first" }))
            .route("/first/panic", get(panics));
        let rest = Router::new().fallback(|| async { failed(Fault::new(Code::NoSuchRoute, "nowhere")) });
        Apis::new(
            Front::new(Limits::for_machine(1 << 30, 1000)),
            vec!["localhost".into()],
            [
                api("one", first, |asked| asked.head.uri.path().starts_with("/first")),
                api("two", rest, |_| true),
            ],
        )
    }

    async fn ask(apis: &Apis, path: &str, id: &'static str) -> (u16, String, String) {
        let request = Request::builder().uri(path).header(REQUEST_ID, id);
        let response = apis.answer(request.body(Body::empty()).unwrap()).await;
        let status = response.status().as_u16();
        let told = response.headers()[REQUEST_ID].to_str().unwrap().to_owned();
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap(), told)
    }

    #[tokio::test]
    async fn each_request_has_one_api_which_answers_in_its_words() {
        let apis = apis();
        assert_eq!(
            ask(&apis, "/first/x", "id-1").await,
            (200, "first".into(), "id-1".into())
        );
        let (status, body, _) = ask(&apis, "/other", "id-2").await;
        assert_eq!((status, body.as_str()), (404, "no_such_route: nowhere id-2"));
        let (status, body, _) = ask(&apis, "/first/panic", "id-3").await;
        assert_eq!(status, 500);
        assert!(body.starts_with("internal: ") && body.ends_with("id-3"), "{body}");
        let mut registry = Registry::default();
        apis.front().meter.register(&mut registry);
        let mut out = String::new();
        prometheus_client::encoding::text::encode(&mut out, &registry).unwrap();
        for expected in [
            r#"atoll_http_requests_total{api="one",method="GET",route="/first/{id}",status="200"} 1"#,
            r#"atoll_http_requests_total{api="two",method="GET",route="none",status="404"} 1"#,
        ] {
            assert!(out.contains(expected), "{expected} not in\n{out}");
        }
        assert!(out.contains("atoll_http_requests_in_flight 0"), "{out}");
    }

    #[tokio::test]
    async fn only_harmless_request_ids_are_echoed() {
        let id = |value: &str| request_id(&HeaderMap::from_iter([(REQUEST_ID, value.parse().unwrap())]));
        assert_eq!(id("trace-1.a:b_c"), "trace-1.a:b_c");
        for bad in ["", "a b", "<script>", &"x".repeat(129)] {
            assert!(id(bad).starts_with("req_"), "{bad}");
        }
    }

    #[test]
    fn the_span_names_the_sandbox() {
        let id = "abcdefghijkmnpqrstuv";
        assert_eq!(
            sandbox_in(&format!("/v1/sandboxes/sbx_{id}/exec")),
            Some("sbx_abcdefghijkmnpqrstuv")
        );
        assert_eq!(sandbox_in(&format!("/sandboxes/{id}")), Some(id));
        assert_eq!(sandbox_in("/v1/sandboxes"), None);
        assert_eq!(sandbox_in("/sandboxes/metrics"), None);
        assert_eq!(sandbox_in("/v1/keys"), None);
    }
}

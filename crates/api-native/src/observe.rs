//! What surrounds every request: an id, a span, a measurement, a net under panics, and the writing of errors.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use atoll_front::host::{self, Target};
use atoll_types::{Fault, FaultKind, RequestId};
use axum::extract::{FromRequestParts as _, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::App;
use crate::error::{Failure, write_body};
use crate::extract::Collector;
use crate::proxy;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(crate) async fn observe(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    // What comes from inside this process did not come by a listener.
    let front = &app.front;
    request.extensions_mut().get_or_insert_with(|| front.visit(None));
    let id = request_id(request.headers());
    let method = request.method().clone();
    let target = host::target(request.uri(), request.headers(), &app.options.port_domains);
    let route = match &target {
        Target::Api => request
            .extensions()
            .get::<MatchedPath>()
            .map_or(Cow::Borrowed("none"), |path| Cow::Owned(path.as_str().to_owned())),
        Target::Port { .. } => Cow::Borrowed("port"),
        Target::Nowhere { .. } | Target::Ambiguous => Cow::Borrowed("none"),
    };
    let span = tracing::info_span!(
        "request",
        id = %id.as_str(),
        %method,
        route = %route,
        sandbox = tracing::field::Empty,
        status = tracing::field::Empty,
        latency_us = tracing::field::Empty,
    );
    match &target {
        Target::Port { sandbox, .. } => span.record("sandbox", sandbox.as_str()),
        _ => span.record("sandbox", sandbox_in(request.uri().path())),
    };

    let in_flight = app.meter.begin();
    let answer = AssertUnwindSafe(answer(&app, target, request, next))
        .catch_unwind()
        .instrument(span.clone())
        .await
        .unwrap_or_else(|panic| {
            let message = panic_message(&*panic);
            span.in_scope(|| tracing::error!(message, "a handler panicked"));
            Failure::from(Fault::internal(
                "the server made a mistake; its log says more under this request id",
            ))
            .into_response()
        });
    let mut response = span.in_scope(|| write_body(answer, &id));
    drop(in_flight);

    let elapsed = started.elapsed();
    let status = response.status();
    app.meter.record(&method, &route, status, elapsed);
    span.record("status", status.as_u16());
    span.record(
        "latency_us",
        u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
    );
    span.in_scope(|| tracing::debug!("answered"));
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().entry(REQUEST_ID).or_insert(value);
    }
    response
}

async fn answer(app: &App, target: Target, request: Request, next: Next) -> Response {
    match target {
        Target::Api => match allowed(app, request).await {
            Ok(request) => next.run(request).await,
            Err(failure) => failure.into_response(),
        },
        Target::Port { sandbox, port } => proxy::serve(app, &sandbox, port, request).await.into_response(),
        Target::Nowhere { host } => Failure::from(Fault::not_found(
            "no_such_port",
            format!("`{host}` names no port of a sandbox; expected `PORT-SANDBOX` before the domain"),
        ))
        .into_response(),
        Target::Ambiguous => Failure::from(Fault::new(
            FaultKind::Invalid,
            "ambiguous_host",
            "the request must name exactly one host",
        ))
        .into_response(),
    }
}

/// What holds for every route, whoever serves it: metrics are for operators, and unknown parameters are refused.
async fn allowed(app: &App, request: Request) -> Result<Request, Failure> {
    let Some(path) = request.extensions().get::<MatchedPath>().cloned() else {
        return Ok(request);
    };
    let query = request.uri().query().unwrap_or_default();
    // All metrics are read like the documented ones.
    let documented = match is_metrics(path.as_str()) {
        true => METRICS,
        false => path.as_str(),
    };
    app.parameters.check(documented, request.method(), query)?;
    if documented != METRICS {
        return Ok(request);
    }
    let (mut parts, body) = request.into_parts();
    Collector::from_request_parts(&mut parts, app).await?;
    Ok(Request::from_parts(parts, body))
}

const METRICS: &str = "/metrics";

fn is_metrics(path: &str) -> bool {
    let rest = path.strip_prefix(METRICS);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
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

fn sandbox_in(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/sandboxes/")?;
    let id = rest.split('/').next()?;
    id.starts_with("sbx_").then_some(id)
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
    use super::*;

    #[test]
    fn only_harmless_request_ids_are_echoed() {
        let id = |value: &str| request_id(&HeaderMap::from_iter([(REQUEST_ID, value.parse().unwrap())]));
        assert_eq!(id("trace-1.a:b_c"), "trace-1.a:b_c");
        for bad in ["", "a b", "<script>", &"x".repeat(129)] {
            assert!(id(bad).starts_with("req_"), "{bad}");
        }
    }

    #[test]
    fn the_span_names_the_sandbox() {
        assert_eq!(sandbox_in("/v1/sandboxes/sbx_1/exec"), Some("sbx_1"));
        assert_eq!(sandbox_in("/v1/sandboxes"), None);
        assert_eq!(sandbox_in("/v1/keys"), None);
    }
}

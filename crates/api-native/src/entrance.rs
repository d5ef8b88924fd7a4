//! What holds for every request to this API: where it goes by its host, metrics for operators only, no unknown parameters.

use atoll_front::host::Target;
use atoll_types::{Code, Fault};
use axum::extract::{FromRequestParts as _, MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::App;
use crate::error::Failure;
use crate::extract::Collector;
use crate::proxy;

pub(crate) async fn enter(State(app): State<App>, request: Request, next: Next) -> Response {
    match request.extensions().get::<Target>().cloned() {
        None | Some(Target::Api) => match allowed(&app, request).await {
            Ok(request) => next.run(request).await,
            Err(failure) => failure.into_response(),
        },
        Some(Target::Port { sandbox, port }) => {
            proxy::pass(&app, &sandbox, port, request).await.into_response()
        }
        Some(Target::Nowhere { host }) => Failure::from(Fault::new(
            Code::NoSuchPort,
            format!("`{host}` names no port of a sandbox; expected `PORT-SANDBOX` before the domain"),
        ))
        .into_response(),
        Some(Target::Ambiguous) => Failure::from(Fault::new(
            Code::AmbiguousHost,
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

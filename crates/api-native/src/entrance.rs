//! What holds for every request to this API: where it goes by its host, and no unknown parameters.

use atoll_front::host::Target;
use atoll_types::{Fault, FaultKind};
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::App;
use crate::error::Failure;
use crate::proxy;

pub(crate) async fn enter(State(app): State<App>, request: Request, next: Next) -> Response {
    match request.extensions().get::<Target>().cloned() {
        None | Some(Target::Api) => match check_parameters(&app, &request) {
            Ok(()) => next.run(request).await,
            Err(failure) => failure.into_response(),
        },
        Some(Target::Port { sandbox, port }) => {
            proxy::pass(&app, &sandbox, port, request).await.into_response()
        }
        Some(Target::Nowhere { host }) => Failure::from(Fault::not_found(
            "no_such_port",
            format!("`{host}` names no port of a sandbox; expected `PORT-SANDBOX` before the domain"),
        ))
        .into_response(),
        Some(Target::Ambiguous) => Failure::from(Fault::new(
            FaultKind::Invalid,
            "ambiguous_host",
            "the request must name exactly one host",
        ))
        .into_response(),
    }
}

/// Unknown parameters are refused, on every route.
fn check_parameters(app: &App, request: &Request) -> Result<(), Failure> {
    let Some(path) = request.extensions().get::<MatchedPath>() else {
        return Ok(());
    };
    let query = request.uri().query().unwrap_or_default();
    Ok(app.parameters.check(path.as_str(), request.method(), query)?)
}

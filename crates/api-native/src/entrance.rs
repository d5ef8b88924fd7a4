//! What holds for every request to this API: where it goes by its host, no unknown parameters, and whether whoever asks may.

use atoll_front::host::Target;
use atoll_types::{Code, Fault};
use axum::extract::{MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::actions::{Actions, For};
use crate::error::Failure;
use crate::extract::{authenticate, bearer};
use crate::{App, named, proxy, server};

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

/// What holds for every route: unknown parameters are refused, and so is whoever may not do what the route is.
async fn allowed(app: &App, request: Request) -> Result<Request, Failure> {
    let Some(path) = request.extensions().get::<MatchedPath>().cloned() else {
        return Ok(request);
    };
    let path = path.as_str();
    let whom = whom(&app.actions, path, request.method(), request.uri().path())?;
    let query = request.uri().query().unwrap_or_default();
    app.parameters.check(path, request.method(), query)?;
    let action = match whom {
        For::Everybody => return Ok(request),
        For::Nobody => return Err(Fault::internal("this route names no action that it is").into()),
        For::WhoMay(action) => action,
    };
    let (mut parts, body) = request.into_parts();
    if !(is_metrics(path) && collects(app, &parts)) {
        let caller = authenticate(app, &parts).await?;
        let sandbox = named::find(app, &caller, path, &mut parts).await;
        caller.may(action, sandbox.as_ref())?;
        parts.extensions.insert(caller);
    }
    Ok(Request::from_parts(parts, body))
}

/// Whom an operation is for. Of what the description does not know nobody has said who may do it, so nobody may, also if the
/// router knows it.
fn whom(actions: &Actions, route: &str, method: &Method, asked: &str) -> Result<For, Failure> {
    actions.find(route, method).ok_or_else(|| {
        let refused = server::wrong_method(asked, method);
        match HeaderValue::from_str(&actions.methods(route)) {
            Ok(methods) => refused.header(header::ALLOW, methods),
            Err(_) => refused,
        }
    })
}

/// Metrics say what all projects do: they are for those who run the server, and for holders of a key that is for nothing else.
fn is_metrics(path: &str) -> bool {
    let rest = path.strip_prefix("/metrics");
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn collects(app: &App, parts: &Parts) -> bool {
    match (&app.options.metrics_key, bearer(&parts.headers)) {
        (Some(key), Some(given)) => key.is(given),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn a_route_that_nobody_described_is_served_to_nobody() {
        let api = crate::openapi::complete(crate::openapi::documented().into_openapi());
        let actions = Actions::of(&api);
        for method in [Method::GET, Method::HEAD, Method::POST] {
            assert!(
                whom(&actions, "/v1/keys", &method, "/v1/keys").is_ok(),
                "{method}"
            );
        }
        for method in [Method::PATCH, Method::PUT, Method::OPTIONS, Method::TRACE] {
            let refused = whom(&actions, "/v1/keys", &method, "/v1/keys").unwrap_err();
            let answer = refused.into_response();
            assert_eq!(answer.status(), StatusCode::METHOD_NOT_ALLOWED, "{method}");
            assert_eq!(answer.headers()[header::ALLOW], "GET, HEAD, POST");
        }
        for method in [Method::GET, Method::PATCH] {
            let refused = whom(&actions, "/v1/new", &method, "/v1/new").unwrap_err();
            assert_eq!(refused.status(), StatusCode::METHOD_NOT_ALLOWED, "{method}");
        }
    }
}

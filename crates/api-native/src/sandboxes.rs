//! `/v1/sandboxes`: create, look, list, extend, rest, fork, end, what a sandbox uses at this moment, and when it ran.

mod change;
mod instances;
mod list;
mod metrics;
mod rest;

use atoll_actions::words::{CreateSandboxRequest, IfExists, SandboxView};
use atoll_sandboxes::Obtained;
use atoll_types::Code;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{Args, As, Json};
use crate::named::Named;
use crate::{App, wire};

use change::{__path_change_sandbox, change_sandbox};
use instances::{__path_sandbox_instances, sandbox_instances};
use list::{ListQuery, SandboxPage, read_list};
use metrics::{__path_sandbox_metrics, sandbox_metrics};
use rest::{
    __path_fork_sandbox, __path_pause_sandbox, __path_resume_sandbox, __path_start_sandbox,
    __path_stop_sandbox, fork_sandbox, pause_sandbox, resume_sandbox, start_sandbox, stop_sandbox,
};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create_sandbox, list_sandboxes))
        .routes(routes!(get_sandbox, change_sandbox, delete_sandbox))
        .routes(routes!(extend_sandbox))
        .routes(routes!(pause_sandbox))
        .routes(routes!(resume_sandbox))
        .routes(routes!(stop_sandbox))
        .routes(routes!(start_sandbox))
        .routes(routes!(fork_sandbox))
        .routes(routes!(sandbox_metrics))
        .routes(routes!(sandbox_instances))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtendRequest {
    /// The new lifetime, from now.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: u64,
}

/// Creates a sandbox and answers when it runs; or, with `if_exists`, finds the one that has the name.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "sandboxes",
    security(("key" = ["sandboxes.create"])),
    request_body = CreateSandboxRequest,
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
        description = "The same key with the same request finds the sandbox that was already made. \
            One that could not be started gives its key up.")),
    responses(
        (status = 201, description = "It was made, and runs.", body = SandboxView,
            headers(("Location" = String, description = "Where it is found."))),
        (status = 200, description = "It was there, with `if_exists: return`; this is how it is now.", body = SandboxView,
            headers(("Location" = String, description = "Where it is found.")))
    )
)]
pub(crate) async fn create_sandbox(
    State(app): State<App>,
    As(caller): As,
    headers: HeaderMap,
    Json(body): Json<CreateSandboxRequest>,
) -> Answer<Response> {
    let key = idempotency_key(&headers)?;
    let if_exists = body.if_exists();
    let request = body.into_create(app.options.default_timeout_millis, key)?;
    let obtained = match if_exists {
        IfExists::Fail => Obtained::Made(app.sandboxes.create(&caller, request).await?),
        IfExists::Return => app.sandboxes.find_or_create(&caller, request).await?,
    };
    let (status, sandbox) = match obtained {
        Obtained::Made(sandbox) => (StatusCode::CREATED, sandbox),
        Obtained::Found(sandbox) => (StatusCode::OK, sandbox),
    };
    let location = format!("/v1/sandboxes/{}", sandbox.id);
    let mut response = (status, axum::Json(SandboxView::of(sandbox))).into_response();
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

pub(crate) fn idempotency_key(headers: &HeaderMap) -> Answer<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(key) if (1..=255).contains(&key.len()) => Ok(Some(key.into())),
        _ => Err(Failure::new(
            Code::InvalidIdempotencyKey,
            "`Idempotency-Key` must be 1 to 255 visible ASCII characters",
        )),
    }
}

/// Lists sandboxes, newest first.
#[utoipa::path(
    get, path = "/v1/sandboxes", tag = "sandboxes",
    security(("key" = ["sandboxes.list"])), params(ListQuery),
    responses((status = 200, description = "A page of them.", body = SandboxPage))
)]
pub(crate) async fn list_sandboxes(
    State(app): State<App>,
    As(caller): As,
    Args(pairs): Args<Vec<(String, String)>>,
) -> Answer<axum::Json<SandboxPage>> {
    let page = app.sandboxes.list(&caller, read_list(pairs)?).await?;
    Ok(axum::Json(SandboxPage {
        items: page.items.into_iter().map(SandboxView::of).collect(),
        next: page.next,
    }))
}

/// Shows a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "The sandbox.", body = SandboxView))
)]
pub(crate) async fn get_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.get(&caller, &id).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Ends a sandbox and answers when nothing of it is left. Ending what is already gone succeeds.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    security(("key" = ["sandbox.use"])),
    responses((status = 200, description = "It is gone; this is its record.", body = SandboxView))
)]
pub(crate) async fn delete_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.kill(&caller, &id).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Sets the deadline of a sandbox anew, counted from now.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/extend", tag = "sandboxes",
    security(("key" = ["sandbox.use"])), request_body = ExtendRequest,
    responses((status = 200, description = "The sandbox with its new deadline.", body = SandboxView))
)]
pub(crate) async fn extend_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<ExtendRequest>,
) -> Answer<axum::Json<SandboxView>> {
    let timeout_millis = wire::duration("timeout_ms", body.timeout_ms)?;
    let sandbox = app.sandboxes.extend(&caller, &id, timeout_millis).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

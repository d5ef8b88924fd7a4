//! To rest and back, and copies: pause, resume, stop, start, fork.

use atoll_actions::words::{Copies, ForkRequest, PauseRequest, ResumeRequest, SandboxView};
use axum::extract::State;
use axum::http::StatusCode;

use crate::App;
use crate::error::Answer;
use crate::extract::{As, MaybeJson};
use crate::named::Named;

/// Pauses a sandbox: its state is kept, its processes hold no memory or CPU any more. Answers when that is durable.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes",
    security(("key" = ["sandbox.use"])), request_body = Option<PauseRequest>,
    responses((status = 200, description = "It is paused.", body = SandboxView))
)]
pub(crate) async fn pause_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    MaybeJson(body): MaybeJson<PauseRequest>,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.pause(&caller, &id, body.into_kind()).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Resumes a paused sandbox, and answers when it runs. Resuming what runs succeeds.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes",
    security(("key" = ["sandbox.use"])), request_body = Option<ResumeRequest>,
    responses((status = 200, description = "It runs.", body = SandboxView))
)]
pub(crate) async fn resume_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    MaybeJson(body): MaybeJson<ResumeRequest>,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.resume(&caller, &id, body.into_timeout()?).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Stops a sandbox: its files are kept, its processes are not.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/stop", tag = "sandboxes",
    security(("key" = ["sandbox.use"])),
    responses((status = 200, description = "It is stopped.", body = SandboxView))
)]
pub(crate) async fn stop_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.stop(&caller, &id).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Starts a stopped sandbox on its files, and answers when it runs.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/start", tag = "sandboxes",
    security(("key" = ["sandbox.use"])), request_body = Option<ResumeRequest>,
    responses((status = 200, description = "It runs.", body = SandboxView))
)]
pub(crate) async fn start_sandbox(
    state: State<App>,
    caller: As,
    id: Named,
    body: MaybeJson<ResumeRequest>,
) -> Answer<axum::Json<SandboxView>> {
    resume_sandbox(state, caller, id, body).await
}

/// Makes running copies of a running sandbox, all or none. Each has an identity of its own; the original goes on.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes",
    security(("key" = ["sandboxes.create"])), request_body = Option<ForkRequest>,
    responses((status = 201, description = "They run.", body = Copies))
)]
pub(crate) async fn fork_sandbox(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    MaybeJson(body): MaybeJson<ForkRequest>,
) -> Answer<(StatusCode, axum::Json<Copies>)> {
    let copies = app.sandboxes.fork(&caller, &id, body.into_fork()?).await?;
    Ok((StatusCode::CREATED, axum::Json(Copies::of(copies))))
}

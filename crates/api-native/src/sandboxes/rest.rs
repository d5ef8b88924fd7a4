//! To rest and back, and copies: pause, resume, stop, start, fork.

use std::collections::BTreeMap;

use atoll_sandboxes::{ForkSandbox, MAX_COPIES};
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::view::SandboxView;
use super::words::SaveKindName;
use crate::error::Answer;
use crate::extract::{As, MaybeJson};
use crate::named::Named;
use crate::{App, wire};

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PauseRequest {
    /// What is kept. Absent: memory where the isolation can, else files; the answer says which.
    kind: Option<SaveKindName>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResumeRequest {
    /// The new lifetime, from now. Absent: what was left when it went to rest or, if nothing was, what it was created with.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForkRequest {
    /// How many copies; 1 if absent.
    #[schema(minimum = 1, maximum = 64)]
    count: Option<u64>,
    /// Absent: with memory, refused where the isolation cannot. `filesystem`: copies that start anew on the same files.
    kind: Option<SaveKindName>,
    /// Lifetime of the copies, from now. Absent: as the sandbox was created with.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<u64>,
    /// Added to the labels of the sandbox.
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Copies {
    items: Vec<SandboxView>,
}

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
    let kind = body.kind.map(SaveKindName::into_kind);
    let sandbox = app.sandboxes.pause(&caller, &id, kind).await?;
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
    let timeout = body
        .timeout_ms
        .map(|millis| wire::duration("timeout_ms", millis))
        .transpose()?;
    let sandbox = app.sandboxes.resume(&caller, &id, timeout).await?;
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
    let count = wire::within("count", body.count.unwrap_or(1), 1..=MAX_COPIES as u64)?;
    let request = ForkSandbox {
        count: usize::try_from(count).unwrap_or(MAX_COPIES),
        kind: body.kind.map(SaveKindName::into_kind),
        timeout_millis: body
            .timeout_ms
            .map(|millis| wire::duration("timeout_ms", millis))
            .transpose()?,
        labels: body.labels,
    };
    let copies = app.sandboxes.fork(&caller, &id, request).await?;
    let items = copies.into_iter().map(SandboxView::of).collect();
    Ok((StatusCode::CREATED, axum::Json(Copies { items })))
}

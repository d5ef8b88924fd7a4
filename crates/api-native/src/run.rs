//! `POST /v1/run`: one command in a sandbox of its own, in one request.

use std::time::Instant;

use atoll_actions::words::command::{Attached, ExecRequest, ExecResult, Run};
use atoll_actions::words::{CreateSandboxRequest, IfExists, SandboxView};
use atoll_sandboxes::Ran;
use atoll_types::Code;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::{Answer, Failure};
use crate::exec::{end_of, event, events_of, paid, whole};
use crate::extract::{As, Json, Paying, wants_events};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(run))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunRequest {
    /// The sandbox to make for it. Absent: one as the server makes them by default.
    #[serde(default)]
    sandbox: CreateSandboxRequest,
    /// What to run in it; not in the background.
    command: ExecRequest,
    /// Whether the sandbox stays when the command is over.
    #[serde(default)]
    keep: bool,
}

/// What came of it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RunResult {
    /// The sandbox as it was made. Unless it was to be kept, it is being deleted now.
    sandbox: SandboxView,
    result: ExecResult,
}

/// Makes a sandbox, runs a command in it and, unless `keep` is set, deletes the sandbox.
///
/// This is the quickest way from code to its output: with a pool, the program starts while the sandbox is being written
/// down. By default the answer comes when the command has ended. With `Accept: text/event-stream` it is a stream of events:
/// `created` with the sandbox, then those of a command. Hanging up ends the command, and the sandbox with it unless it is to
/// be kept. If the command cannot be started, no sandbox stays.
#[utoipa::path(
    post, path = "/v1/run", tag = "commands",
    security(("key" = ["sandboxes.create"])), request_body = RunRequest,
    responses((status = 200, description = "It is over; or its events.", content(
        (RunResult = "application/json"), (String = "text/event-stream")))),
)]
pub(crate) async fn run(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    headers: HeaderMap,
    Json(body): Json<RunRequest>,
) -> Answer<Response> {
    let began = Instant::now();
    let Run { spec, stdin } = body.command.into_run()?;
    let stdin = paid(&visit, stdin)?;
    if spec.background {
        return Err(Failure::new(
            Code::ContradictingFields,
            "`command.background`: a command in the background has no end to wait for; create a sandbox and run it there",
        ));
    }
    if body.sandbox.if_exists() == IfExists::Return {
        return Err(Failure::new(
            Code::ContradictingFields,
            "`sandbox.if_exists`: a run makes a sandbox of its own; create or find one and run the command there",
        ));
    }
    let request = body
        .sandbox
        .into_create(app.options.default_timeout_millis, None)?;
    let Ran {
        sandbox,
        execution,
        removal,
    } = app.sandboxes.run(&caller, request, spec, body.keep).await?;
    let sandbox = SandboxView::of(sandbox);
    let attached = Attached::to(execution, stdin, began).await?;
    if wants_events(&headers) {
        let created = event("created", &sandbox);
        return Ok(events_of(attached, Some(created), removal));
    }
    let (result, length) = end_of(attached, &visit).await?;
    drop(removal);
    Ok(whole(&RunResult { sandbox, result }, length))
}

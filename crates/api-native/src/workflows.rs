//! `/v1/workflows`: durable workflows for people: what runs, what happened, and what is done by hand. Programs that write
//! workflows speak their SDK's wire.

use atoll_identity::Caller;
use atoll_types::{Code, Fault, Timestamp};
use atoll_workflows::{ActivityView, Engine, EventView, Refusal, WorkflowName, WorkflowView};
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{Args, As, At, Json, MaybeJson};
use crate::{App, wire};

/// Who did it, as the history says.
const IDENTITY: &str = "atoll";

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_workflows))
        .routes(routes!(get_workflow))
        .routes(routes!(workflow_history))
        .routes(routes!(signal_workflow))
        .routes(routes!(cancel_workflow))
        .routes(routes!(terminate_workflow))
        .routes(routes!(reset_workflow))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    #[param(default = "default")]
    namespace: Option<String>,
    /// Which ones, in the language of lists, such as `ExecutionStatus = 'Running' AND WorkflowType = 'Order'`.
    query: Option<String>,
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u64>,
    /// `next` of the page before.
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OneQuery {
    #[param(default = "default")]
    namespace: Option<String>,
    /// Which run of the workflow; the latest if it is left out.
    run: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct HistoryQuery {
    #[param(default = "default")]
    namespace: Option<String>,
    /// Which run of the workflow; the latest if it is left out.
    run: Option<String>,
    /// The id of the first event that is wanted: `next` of the page before.
    #[param(minimum = 1, default = 1)]
    from: Option<i64>,
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u64>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SignalRequest {
    /// The signal's name.
    #[schema(min_length = 1)]
    signal: String,
    /// What goes with it: any JSON.
    input: Option<serde_json::Value>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EndRequest {
    /// Why, for the history.
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResetRequest {
    /// The event to go back to: one that ends a workflow task (`WorkflowTaskCompleted`, `…Failed`, `…TimedOut`). What it
    /// decided, it decides anew.
    #[schema(minimum = 1)]
    event: i64,
    /// Why, for the history.
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WorkflowItem {
    id: String,
    run: String,
    r#type: String,
    /// `running`, `completed`, `failed`, `canceled`, `terminated`, `continued_as_new` or `timed_out`.
    status: String,
    task_queue: String,
    #[schema(format = DateTime)]
    started_at: String,
    #[schema(format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    closed_at: Option<String>,
    /// How many events its history has.
    events: i64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WorkflowPage {
    items: Vec<WorkflowItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PendingActivityItem {
    id: String,
    r#type: String,
    /// `scheduled`, `started`, `cancel_requested`, `paused` or `pause_requested`.
    state: String,
    attempt: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct WorkflowDetail {
    #[serde(flatten)]
    workflow: WorkflowItem,
    /// Activities that have not finished.
    activities: Vec<PendingActivityItem>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventItem {
    id: i64,
    #[schema(format = DateTime)]
    at: String,
    /// Such as `ActivityTaskScheduled`.
    r#type: String,
    /// A name, an id, or why something failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    about: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventPage {
    items: Vec<EventItem>,
    /// Pass it as `from` to get what follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<i64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct NewRun {
    /// The run that goes on from there.
    run: String,
}

/// Lists workflows, newest first.
#[utoipa::path(
    get, path = "/v1/workflows", tag = "workflows",
    security(("key" = ["workflows.read"])), params(ListQuery),
    responses((status = 200, description = "A page of workflows.", body = WorkflowPage))
)]
pub(crate) async fn list_workflows(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ListQuery>,
) -> Answer<axum::Json<WorkflowPage>> {
    let name = named(query.namespace, String::new(), None);
    let engine = engine(&app, &caller, &name)?;
    let limit = wire::within("limit", query.limit.unwrap_or(100), 1..=1_000)?;
    let (found, next) = engine
        .view_workflows(
            &name.namespace,
            query.query.as_deref().unwrap_or_default(),
            usize::try_from(limit).unwrap_or(usize::MAX),
            query.cursor.as_deref(),
        )
        .await
        .map_err(refused)?;
    let items = found.into_iter().map(WorkflowItem::of).collect();
    Ok(axum::Json(WorkflowPage { items, next }))
}

/// Shows one workflow, and what it waits for.
#[utoipa::path(
    get, path = "/v1/workflows/{workflow}", tag = "workflows",
    security(("key" = ["workflows.read"])), params(OneQuery),
    responses((status = 200, description = "The workflow.", body = WorkflowDetail))
)]
pub(crate) async fn get_workflow(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<OneQuery>,
) -> Answer<axum::Json<WorkflowDetail>> {
    let name = named(query.namespace, id, query.run);
    let (workflow, activities) = engine(&app, &caller, &name)?
        .view_workflow(&name)
        .await
        .map_err(refused)?;
    Ok(axum::Json(WorkflowDetail {
        workflow: WorkflowItem::of(workflow),
        activities: activities.into_iter().map(PendingActivityItem::of).collect(),
    }))
}

/// Shows what happened in a workflow, event by event.
#[utoipa::path(
    get, path = "/v1/workflows/{workflow}/history", tag = "workflows",
    security(("key" = ["workflows.read"])), params(HistoryQuery),
    responses((status = 200, description = "A page of events, in their order.", body = EventPage))
)]
pub(crate) async fn workflow_history(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<HistoryQuery>,
) -> Answer<axum::Json<EventPage>> {
    let name = named(query.namespace, id, query.run);
    let engine = engine(&app, &caller, &name)?;
    let limit = wire::within("limit", query.limit.unwrap_or(100), 1..=1_000)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let from = query.from.unwrap_or(1);
    if from < 1 {
        return Err(Failure::new(
            Code::InvalidQuery,
            "`from` is the id of an event, which is at least 1",
        ));
    }
    let (events, next) = engine.view_history(&name, from, limit).await.map_err(refused)?;
    let items = events.into_iter().map(EventItem::of).collect();
    Ok(axum::Json(EventPage { items, next }))
}

/// Sends a signal to a workflow.
#[utoipa::path(
    post, path = "/v1/workflows/{workflow}/signal", tag = "workflows",
    security(("key" = ["workflows.run"])), params(OneQuery), request_body = SignalRequest,
    responses((status = 204, description = "The signal is part of the history."))
)]
pub(crate) async fn signal_workflow(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<OneQuery>,
    Json(body): Json<SignalRequest>,
) -> Answer<StatusCode> {
    let name = named(query.namespace, id, query.run);
    let input = body.input.map(|input| input.to_string().into_bytes());
    engine(&app, &caller, &name)?
        .signal_by_hand(&name, &body.signal, input, IDENTITY)
        .await
        .map_err(refused)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Asks a workflow to end; it may clean up first.
#[utoipa::path(
    post, path = "/v1/workflows/{workflow}/cancel", tag = "workflows",
    security(("key" = ["workflows.run"])), params(OneQuery),
    request_body = Option<EndRequest>,
    responses((status = 204, description = "The workflow is asked."))
)]
pub(crate) async fn cancel_workflow(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<OneQuery>,
    MaybeJson(body): MaybeJson<EndRequest>,
) -> Answer<StatusCode> {
    let name = named(query.namespace, id, query.run);
    engine(&app, &caller, &name)?
        .cancel_by_hand(&name, &body.reason, IDENTITY)
        .await
        .map_err(refused)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends a workflow at once; it cleans up nothing.
#[utoipa::path(
    post, path = "/v1/workflows/{workflow}/terminate", tag = "workflows",
    security(("key" = ["workflows.run"])), params(OneQuery),
    request_body = Option<EndRequest>,
    responses((status = 204, description = "The workflow has ended."))
)]
pub(crate) async fn terminate_workflow(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<OneQuery>,
    MaybeJson(body): MaybeJson<EndRequest>,
) -> Answer<StatusCode> {
    let name = named(query.namespace, id, query.run);
    engine(&app, &caller, &name)?
        .terminate_by_hand(&name, &body.reason, IDENTITY)
        .await
        .map_err(refused)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Goes back to an earlier point of a workflow and goes on from there, as a new run. The run that was current ends.
#[utoipa::path(
    post, path = "/v1/workflows/{workflow}/reset", tag = "workflows",
    security(("key" = ["workflows.run"])), params(OneQuery), request_body = ResetRequest,
    responses((status = 200, description = "The new run.", body = NewRun))
)]
pub(crate) async fn reset_workflow(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Args(query): Args<OneQuery>,
    Json(body): Json<ResetRequest>,
) -> Answer<axum::Json<NewRun>> {
    let name = named(query.namespace, id, query.run);
    let run = engine(&app, &caller, &name)?
        .reset_by_hand(&name, body.event, &body.reason, IDENTITY)
        .await
        .map_err(refused)?;
    Ok(axum::Json(NewRun { run }))
}

fn named(namespace: Option<String>, id: String, run: Option<String>) -> WorkflowName {
    WorkflowName {
        namespace: namespace.unwrap_or_else(|| "default".to_owned()),
        id,
        run: run.unwrap_or_default(),
    }
}

/// The engine, if there is one and the namespace is one of the caller's project.
fn engine<'a>(app: &'a App, caller: &Caller, name: &WorkflowName) -> Answer<&'a Engine> {
    let engine = any_engine(app)?;
    engine
        .check_project(caller.project().as_str(), &name.namespace)
        .map_err(refused)?;
    Ok(engine)
}

pub(crate) fn any_engine(app: &App) -> Answer<&Engine> {
    app.workflows.as_ref().ok_or_else(|| {
        Fault::new(Code::WorkflowsOff, "this server does not serve workflows")
            .hint("start it with --workflows-listen")
            .into()
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err wants")]
pub(crate) fn refused(refusal: Refusal) -> Failure {
    let code = match &refusal {
        Refusal::NotFound(_) => Code::WorkflowNotFound,
        Refusal::NamespaceNotFound(_) => Code::NamespaceNotFound,
        Refusal::NamespaceDeleting(_) => Code::NamespaceDeleting,
        Refusal::InvalidArgument(_) => Code::InvalidRequest,
        Refusal::AlreadyStarted { .. }
        | Refusal::AlreadyExists(_)
        | Refusal::NamespaceExists(_)
        | Refusal::CancelAlreadyRequested
        | Refusal::FailedPrecondition(_)
        | Refusal::NotReady(_)
        | Refusal::PagesLost
        | Refusal::Aborted(_) => Code::WorkflowConflict,
        Refusal::ResourceExhausted(_) => Code::WorkflowLimit,
        Refusal::PermissionDenied(_) => Code::Forbidden,
        Refusal::DeadlineExceeded(_) => Code::TimedOut,
        Refusal::Unavailable(_) => Code::Unavailable,
        Refusal::Unimplemented(_) => Code::Unsupported,
        Refusal::QueryFailed { .. } | Refusal::MultiOperation { .. } | Refusal::Internal(_) => Code::Internal,
    };
    let mut fault = Fault::new(code, refusal.to_string());
    fault.hint = refusal.hint();
    fault.into()
}

/// From nanoseconds to what the API shows.
fn time(at: i64) -> String {
    wire::time(Timestamp(at / 1_000_000))
}

impl WorkflowItem {
    fn of(view: WorkflowView) -> Self {
        Self {
            id: view.id,
            run: view.run,
            r#type: view.kind,
            status: view.status.to_owned(),
            task_queue: view.task_queue,
            started_at: time(view.started_at),
            closed_at: view.closed_at.map(time),
            events: view.events,
        }
    }
}

impl PendingActivityItem {
    fn of(view: ActivityView) -> Self {
        Self {
            id: view.id,
            r#type: view.kind,
            state: view.state.to_owned(),
            attempt: view.attempt,
            last_failure: view.last_failure,
        }
    }
}

impl EventItem {
    fn of(view: EventView) -> Self {
        Self {
            id: view.id,
            at: time(view.at),
            r#type: view.kind,
            about: view.about,
        }
    }
}

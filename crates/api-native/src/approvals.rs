//! `/v1/approvals`: what workflows ask people, and what people answer.

use atoll_identity::Caller;
use atoll_store::Fact;
use atoll_types::Timestamp;
use atoll_workflows::{Approval, Verdict};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{Args, As, At, Json};
use crate::workflows::{any_engine, refused};
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_approvals))
        .routes(routes!(get_approval))
        .routes(routes!(grant_approval))
        .routes(routes!(deny_approval))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ApprovalsQuery {
    /// Also those that were decided.
    #[serde(default)]
    #[param(default = false)]
    all: bool,
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 1000, default = 1000)]
    limit: Option<u64>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecideRequest {
    /// The digest of the action that the person was shown. Another one is refused.
    digest: String,
    /// Who decides, as the workflow is told.
    #[serde(default)]
    by: String,
    /// Why, for the workflow.
    #[serde(default)]
    note: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ApprovalItem {
    id: String,
    namespace: String,
    workflow: String,
    run: String,
    /// What is to be done, exactly.
    action: Value,
    /// SHA-256 of the action as JSON with sorted keys and without spaces.
    digest: String,
    /// Why, in words for people.
    reason: String,
    #[schema(format = DateTime)]
    asked_at: String,
    /// When silence becomes a no.
    #[schema(format = DateTime)]
    deadline: String,
    /// `waiting`, `granted` or `denied`.
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_by: Option<String>,
    /// The id of the key that it was decided with, whatever `decided_by` says; absent where the time was up.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_with: Option<String>,
    #[schema(format = DateTime)]
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ApprovalList {
    items: Vec<ApprovalItem>,
    /// Pass it as `cursor` to get what follows; absent at the end. A page ends early where its questions are large.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

impl ApprovalItem {
    fn of(approval: Approval) -> Self {
        let time = |at: i64| wire::time(Timestamp(at / 1_000_000));
        let decision = approval.decision;
        Self {
            id: approval.id,
            namespace: approval.namespace,
            workflow: approval.workflow_id,
            run: approval.run_id,
            action: serde_json::from_str(&approval.action).unwrap_or_default(),
            digest: approval.digest,
            reason: approval.reason,
            asked_at: time(approval.asked_at),
            deadline: time(approval.deadline),
            state: match decision.as_ref().map(|decision| decision.granted) {
                None => "waiting",
                Some(true) => "granted",
                Some(false) => "denied",
            }
            .to_owned(),
            decided_at: decision.as_ref().map(|decision| time(decision.at)),
            decided_by: decision.as_ref().map(|decision| decision.by.clone()),
            decided_with: decision.as_ref().and_then(|decision| decision.key.clone()),
            note: decision.map(|decision| decision.note),
        }
    }
}

/// Lists what workflows ask people, oldest first.
#[utoipa::path(
    get, path = "/v1/approvals", tag = "approvals",
    security(("key" = ["approvals.read"])), params(ApprovalsQuery),
    responses((status = 200, description = "A page of the questions.", body = ApprovalList))
)]
pub(crate) async fn list_approvals(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ApprovalsQuery>,
) -> Answer<axum::Json<ApprovalList>> {
    let limit = wire::within("limit", query.limit.unwrap_or(1000), 1..=1000)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let found = any_engine(&app)?.approvals(
        caller.project().as_str(),
        query.all,
        query.cursor.as_deref(),
        limit,
    );
    let (found, next) = found.map_err(refused)?;
    let items = found.into_iter().map(ApprovalItem::of).collect();
    Ok(axum::Json(ApprovalList { items, next }))
}

/// Shows one question.
#[utoipa::path(
    get, path = "/v1/approvals/{approval}", tag = "approvals",
    security(("key" = ["approvals.read"])),
    responses((status = 200, description = "The question.", body = ApprovalItem))
)]
pub(crate) async fn get_approval(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
) -> Answer<axum::Json<ApprovalItem>> {
    let found = any_engine(&app)?.approval(caller.project().as_str(), &id);
    Ok(axum::Json(ApprovalItem::of(found.map_err(refused)?)))
}

/// Says yes, to exactly the action that has this digest.
#[utoipa::path(
    post, path = "/v1/approvals/{approval}/grant", tag = "approvals",
    security(("key" = ["approvals.answer"])), request_body = DecideRequest,
    responses((status = 200, description = "It is granted.", body = ApprovalItem))
)]
pub(crate) async fn grant_approval(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Json(body): Json<DecideRequest>,
) -> Answer<axum::Json<ApprovalItem>> {
    decide(&app, &caller, &id, true, body).await
}

/// Says no.
#[utoipa::path(
    post, path = "/v1/approvals/{approval}/deny", tag = "approvals",
    security(("key" = ["approvals.answer"])), request_body = DecideRequest,
    responses((status = 200, description = "It is denied.", body = ApprovalItem))
)]
pub(crate) async fn deny_approval(
    State(app): State<App>,
    As(caller): As,
    At(id): At<String>,
    Json(body): Json<DecideRequest>,
) -> Answer<axum::Json<ApprovalItem>> {
    decide(&app, &caller, &id, false, body).await
}

async fn decide(
    app: &App,
    caller: &Caller,
    id: &str,
    granted: bool,
    body: DecideRequest,
) -> Answer<axum::Json<ApprovalItem>> {
    let by = if body.by.is_empty() {
        "somebody with a key of the project".to_owned()
    } else {
        wire::name("by", body.by)?
    };
    let verdict = Verdict {
        granted,
        digest: body.digest,
        by,
        key: caller.key().map(ToString::to_string),
        note: body.note,
    };
    let engine = any_engine(app)?;
    let decided = engine
        .decide_approval(caller.project().as_str(), id, verdict)
        .await;
    let decided = decided.map_err(refused)?;
    if let Some(decision) = &decided.decision {
        let answered = Fact::ApprovalAnswered {
            approval: decided.id.clone(),
            namespace: decided.namespace.clone(),
            workflow: decided.workflow_id.clone(),
            run: decided.run_id.clone(),
            digest: decided.digest.clone(),
            granted: decision.granted,
            by: decision.by.clone(),
            key: caller.key().cloned(),
        };
        app.sandboxes.note(caller.project(), answered);
    }
    Ok(axum::Json(ApprovalItem::of(decided)))
}

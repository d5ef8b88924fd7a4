//! `/v1/keys`: who may call.

use atoll_front::Visit;
use atoll_identity::{CreateKey, Key};
use atoll_types::{Fault, KeyId};
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{Args, As, At, Json};
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_keys, create_key))
        .routes(routes!(revoke_key))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateKeyRequest {
    /// What the key is for.
    #[schema(min_length = 1, max_length = 255)]
    name: String,
    /// Name or id of the project that it is of; absent: the caller's. Operators make keys for all projects.
    project: Option<String>,
    /// `operator`, `member`, `viewer` or `approver`; absent: `member`. Nobody makes a key that may do more than their own.
    role: Option<String>,
    /// What the key is restricted to: `sandboxes`, `sandbox:ID`, `templates`, `secrets:use`, `secrets:manage`, `models`,
    /// `models:manage`, `workflows`, `approvals`, `ledger`; empty: its role alone says what it may do.
    #[serde(default)]
    #[schema(max_items = 32)]
    scopes: Vec<String>,
    /// When it stops working; absent: when the caller's own key does, if it does.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WhoseQuery {
    /// Name or id of the project that the keys are of; absent: the caller's.
    project: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct KeysQuery {
    /// Name or id of the project that the keys are of; absent: the caller's.
    project: Option<String>,
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Key)]
pub(crate) struct KeyView {
    id: String,
    project: String,
    name: String,
    /// The first characters of the secret, to tell keys apart.
    prefix: String,
    /// What it may do: `operator`, `member`, `viewer` or `approver`.
    role: String,
    /// What it is restricted to; empty: its role alone says what it may do.
    scopes: Vec<String>,
    /// The id of the key that it was made with; absent where the server made it, or an earlier release did not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    made_by: Option<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    #[schema(format = DateTime)]
    revoked_at: Option<String>,
}

impl KeyView {
    fn of(key: Key) -> Self {
        Self {
            id: key.id.to_string(),
            project: key.project.to_string(),
            name: key.name,
            prefix: key.prefix,
            role: key.role.to_string(),
            scopes: key.scopes.iter().map(ToString::to_string).collect(),
            made_by: key.made_by.map(|id| id.to_string()),
            expires_at: key.expires_at.map(wire::time),
            created_at: wire::time(key.created_at),
            revoked_at: key.revoked_at.map(wire::time),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct NewKeyView {
    key: KeyView,
    /// Shown this once; the server keeps only its hash.
    secret: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct KeyList {
    items: Vec<KeyView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Lists the project's keys, newest first.
#[utoipa::path(
    get, path = "/v1/keys", tag = "keys",
    security(("key" = ["keys.read"])), params(KeysQuery),
    responses((status = 200, description = "A page of the keys, without their secrets.", body = KeyList))
)]
pub(crate) async fn list_keys(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<KeysQuery>,
) -> Answer<axum::Json<KeyList>> {
    let project = app
        .identity
        .project_named(&caller, query.project.as_deref())
        .await?;
    let (after, limit) = wire::page(query.cursor, query.limit)?;
    let page = app.identity.list_keys(&project, after, limit).await?;
    Ok(axum::Json(KeyList {
        items: page.items.into_iter().map(KeyView::of).collect(),
        next: page.next.map(|cursor| cursor.to_string()),
    }))
}

/// Makes a key for the caller's project, or for another that it may name.
#[utoipa::path(
    post, path = "/v1/keys", tag = "keys",
    security(("key" = ["keys.manage"])), request_body = CreateKeyRequest,
    responses((status = 201, description = "The key and its secret.", body = NewKeyView))
)]
pub(crate) async fn create_key(
    State(app): State<App>,
    As(caller): As,
    Json(body): Json<CreateKeyRequest>,
) -> Answer<(StatusCode, axum::Json<NewKeyView>)> {
    let name = wire::name("name", body.name)?;
    let project = app
        .identity
        .project_named(&caller, body.project.as_deref())
        .await?;
    let scopes = body.scopes.iter().map(|scope| scope.parse());
    let wanted = CreateKey {
        project,
        name,
        role: body.role.map(|role| role.parse()).transpose()?,
        scopes: scopes.collect::<Result<_, Fault>>()?,
        expires_at: wire::maybe_time("expires_at", body.expires_at.as_deref())?,
    };
    let (key, secret) = app.identity.create_key(&caller, wanted).await?;
    let answer = NewKeyView {
        key: KeyView::of(key),
        secret,
    };
    Ok((StatusCode::CREATED, axum::Json(answer)))
}

/// Revokes a key; it stops working at once, and what is open with it ends.
#[utoipa::path(
    delete, path = "/v1/keys/{id}", tag = "keys",
    security(("key" = ["keys.manage"])), params(WhoseQuery),
    responses((status = 200, description = "The key, revoked.", body = KeyView))
)]
pub(crate) async fn revoke_key(
    State(app): State<App>,
    As(caller): As,
    Extension(visit): Extension<Visit>,
    At(id): At<KeyId>,
    Args(whose): Args<WhoseQuery>,
) -> Answer<axum::Json<KeyView>> {
    let project = app
        .identity
        .project_named(&caller, whose.project.as_deref())
        .await?;
    let key = app.identity.revoke_key(&caller, &project, &id).await?;
    visit.revoke(id.as_str());
    Ok(axum::Json(KeyView::of(key)))
}

//! `/v1/gateway/keys`: keys that open models and nothing else.

use atoll_front::Visit;
use atoll_models::CreateModelKey;
use atoll_store::ModelKeyRow;
use atoll_types::KeyId;
use axum::extract::{Extension, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{instant, word};
use crate::App;
use crate::error::Answer;
use crate::extract::{Args, As, At, Json};
use crate::wire::{page, time};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_model_keys, create_model_key))
        .routes(routes!(revoke_model_key))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateModelKeyRequest {
    /// What the key is for.
    #[schema(min_length = 1)]
    name: String,
    /// Models that it may call, with `*`. Default: all.
    #[serde(default)]
    models: Vec<String>,
    requests_per_minute: Option<u64>,
    tokens_per_minute: Option<u64>,
    /// When it stops working.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelKey {
    id: String,
    name: String,
    /// The first characters of the secret, to tell keys apart.
    prefix: String,
    models: Vec<String>,
    requests_per_minute: Option<u64>,
    tokens_per_minute: Option<u64>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    expires_at: Option<String>,
    #[schema(format = DateTime)]
    revoked_at: Option<String>,
}

impl ModelKey {
    fn of(row: ModelKeyRow) -> Self {
        Self {
            id: row.id.to_string(),
            name: row.name,
            prefix: row.prefix,
            models: row.models,
            requests_per_minute: row.requests_per_minute,
            tokens_per_minute: row.tokens_per_minute,
            created_at: time(row.created_at),
            expires_at: row.expires_at.map(time),
            revoked_at: row.revoked_at.map(time),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct NewModelKey {
    key: ModelKey,
    /// Shown this once; the server keeps only its hash.
    secret: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ModelKeysQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelKeyList {
    items: Vec<ModelKey>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Lists the keys for models, newest first.
#[utoipa::path(
    get, path = "/v1/gateway/keys", tag = "models",
    security(("key" = ["models.read"])), params(ModelKeysQuery),
    responses((status = 200, description = "A page of the keys, without their secrets.", body = ModelKeyList))
)]
pub(crate) async fn list_model_keys(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ModelKeysQuery>,
) -> Answer<axum::Json<ModelKeyList>> {
    let (after, limit) = page(query.cursor, query.limit)?;
    let page = app.models.list_model_keys(caller.project(), after, limit).await?;
    Ok(axum::Json(ModelKeyList {
        items: page.items.into_iter().map(ModelKey::of).collect(),
        next: page.next.map(|cursor| cursor.to_string()),
    }))
}

/// Makes a key for models.
#[utoipa::path(
    post, path = "/v1/gateway/keys", tag = "models",
    security(("key" = ["models.manage"])), request_body = CreateModelKeyRequest,
    responses((status = 201, description = "The key and its secret.", body = NewModelKey))
)]
pub(crate) async fn create_model_key(
    State(app): State<App>,
    As(caller): As,
    Json(body): Json<CreateModelKeyRequest>,
) -> Answer<(StatusCode, axum::Json<NewModelKey>)> {
    let expires_at = body
        .expires_at
        .as_deref()
        .map(|text| instant("expires_at", text))
        .transpose()?;
    let expires_at = app.identity.check_expiry(&caller, expires_at)?;
    let request = CreateModelKey {
        name: body.name,
        models: body.models,
        requests_per_minute: body.requests_per_minute,
        tokens_per_minute: body.tokens_per_minute,
        expires_at,
    };
    let (row, secret) = app.models.create_model_key(caller.project(), request).await?;
    let key = ModelKey::of(row);
    Ok((StatusCode::CREATED, axum::Json(NewModelKey { key, secret })))
}

/// Revokes a key for models; it stops working at once, and what is open with it ends.
#[utoipa::path(
    delete, path = "/v1/gateway/keys/{id}", tag = "models",
    security(("key" = ["models.manage"])),
    responses((status = 200, description = "The key.", body = ModelKey))
)]
pub(crate) async fn revoke_model_key(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    As(caller): As,
    At(id): At<String>,
) -> Answer<axum::Json<ModelKey>> {
    let id: KeyId = word("id", &id)?;
    let row = app.models.revoke_model_key(caller.project(), &id).await?;
    visit.revoke(id.as_str());
    Ok(axum::Json(ModelKey::of(row)))
}

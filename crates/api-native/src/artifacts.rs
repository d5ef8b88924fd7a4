//! `/v1/artifacts`: what is kept by name when its sandbox is gone.

use atoll_actions::words::{ArtifactView, SaveArtifactRequest};
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{Args, As, At, Json};
use crate::named::Named;
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(save_artifact))
        .routes(routes!(list_artifacts))
        .routes(routes!(get_artifact, delete_artifact))
        .routes(routes!(read_artifact))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ArtifactsQuery {
    /// Only those of this name.
    name: Option<String>,
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ArtifactPage {
    items: Vec<ArtifactView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Keeps a file or directory of a sandbox under a name.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/artifacts", tag = "artifacts",
    security(("key" = ["storage.manage"])), request_body = SaveArtifactRequest,
    responses((status = 201, description = "It is kept.", body = ArtifactView))
)]
pub(crate) async fn save_artifact(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<SaveArtifactRequest>,
) -> Answer<(StatusCode, axum::Json<ArtifactView>)> {
    let artifact = app
        .sandboxes
        .save_artifact(&caller, &id, body.into_save()?)
        .await?;
    Ok((StatusCode::CREATED, axum::Json(ArtifactView::of(artifact))))
}

/// Lists artifacts, newest first.
#[utoipa::path(
    get, path = "/v1/artifacts", tag = "artifacts",
    security(("key" = ["storage.read"])), params(ArtifactsQuery),
    responses((status = 200, description = "A page of them.", body = ArtifactPage))
)]
pub(crate) async fn list_artifacts(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ArtifactsQuery>,
) -> Answer<axum::Json<ArtifactPage>> {
    let limit = wire::within("limit", query.limit.unwrap_or(50), 1..=100)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = app
        .sandboxes
        .artifacts(&caller, query.name.as_deref(), query.cursor, limit)
        .await?;
    Ok(axum::Json(ArtifactPage {
        items: page.items.into_iter().map(ArtifactView::of).collect(),
        next: page.next,
    }))
}

/// Shows an artifact, by id or by name (the newest of that name).
#[utoipa::path(
    get, path = "/v1/artifacts/{artifact}", tag = "artifacts",
    security(("key" = ["storage.read"])),
    responses((status = 200, description = "The artifact.", body = ArtifactView))
)]
pub(crate) async fn get_artifact(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<axum::Json<ArtifactView>> {
    let artifact = app.sandboxes.artifact(&caller, &which).await?;
    Ok(axum::Json(ArtifactView::of(artifact)))
}

/// Streams an artifact's content: a file, or a tar of a directory.
#[utoipa::path(
    get, path = "/v1/artifacts/{artifact}/content", tag = "artifacts",
    security(("key" = ["storage.read"])),
    responses((status = 200, description = "The content.", content(
        (Vec<u8> = "application/octet-stream"), (Vec<u8> = "application/x-tar"))))
)]
pub(crate) async fn read_artifact(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<Response> {
    let (artifact, body) = app.sandboxes.read_artifact(&caller, &which).await?;
    let kind = match artifact.directory {
        true => "application/x-tar",
        false => "application/octet-stream",
    };
    let headers = [
        (header::CONTENT_TYPE, kind.to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::CONTENT_LENGTH, artifact.size_bytes.to_string()),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// Deletes an artifact, by id or by name (the newest of that name).
#[utoipa::path(
    delete, path = "/v1/artifacts/{artifact}", tag = "artifacts",
    security(("key" = ["storage.manage"])),
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn delete_artifact(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_artifact(&caller, &which).await?;
    Ok(StatusCode::NO_CONTENT)
}

//! `/v1/artifacts`: what is kept by name when its sandbox is gone.

use atoll_sandboxes::{Artifact, FilePath, SaveArtifact};
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

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveArtifactRequest {
    /// Letters, digits, `.`, `_` and `-`; not beginning with `art_`, which ids do.
    #[schema(min_length = 1, max_length = 200, pattern = "^[A-Za-z0-9._-]+$")]
    name: String,
    /// A file or a directory in the sandbox.
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who reads it; absent: the template's user.
    user: Option<String>,
    /// How long it is kept; absent: as long as the server says, 30 days unless its configuration has another
    /// `artifact_retention`.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    retention_ms: Option<u64>,
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
#[schema(as = Artifact)]
pub(crate) struct ArtifactView {
    id: String,
    name: String,
    /// Where it came from, as long as that is on record.
    sandbox: Option<String>,
    /// `file`: the content is the file. `directory`: the content is a tar stream.
    kind: ArtifactKind,
    /// Of the content.
    digest: String,
    size_bytes: u64,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ArtifactKind {
    File,
    Directory,
}

impl ArtifactView {
    fn of(artifact: Artifact) -> Self {
        Self {
            id: artifact.id.to_string(),
            name: artifact.name,
            sandbox: artifact.sandbox.map(|id| id.to_string()),
            kind: match artifact.directory {
                true => ArtifactKind::Directory,
                false => ArtifactKind::File,
            },
            digest: artifact.digest,
            size_bytes: artifact.size_bytes,
            created_at: wire::time(artifact.created_at),
            expires_at: artifact.expires_at.map(wire::time),
        }
    }
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
    let request = SaveArtifact {
        name: wire::name("name", body.name)?,
        at: FilePath {
            path: wire::exactly_one("path", body.path, body.path_base64)?,
            user: body.user,
        },
        retention_millis: body
            .retention_ms
            .map(|millis| wire::duration("retention_ms", millis))
            .transpose()?,
    };
    let artifact = app.sandboxes.save_artifact(&caller, &id, request).await?;
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

//! `/v1/volumes`: storage that outlives sandboxes.

use atoll_sandboxes::{CreateVolume, Volume};
use atoll_types::Fault;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{Args, Arriving, As, At, Json, Paying};
use crate::{App, upload, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create_volume, list_volumes))
        .routes(routes!(seal_volume))
        .routes(routes!(get_volume, delete_volume))
        .routes(routes!(export_volume, import_volume))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateVolumeRequest {
    /// Unique among your volumes.
    #[schema(min_length = 1, max_length = 64)]
    name: String,
    /// The most it may hold.
    #[schema(minimum = 16_777_216, examples(1_073_741_824))]
    size_bytes: u64,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct VolumesQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SealQuery {
    #[param(min_length = 1, max_length = 64)]
    name: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Volume)]
pub(crate) struct VolumeView {
    id: String,
    name: String,
    /// The most it may hold.
    size_bytes: u64,
    used_bytes: u64,
    /// Made of an archive, and only ever read.
    read_only: bool,
    /// Sandboxes that see it and have not ended.
    attached_to: Vec<String>,
    #[schema(format = DateTime)]
    created_at: String,
}

impl VolumeView {
    fn of(volume: Volume) -> Self {
        Self {
            id: volume.id.to_string(),
            name: volume.name,
            size_bytes: volume.limit_bytes,
            used_bytes: volume.used_bytes,
            read_only: volume.read_only,
            attached_to: volume.attached_to.iter().map(ToString::to_string).collect(),
            created_at: wire::time(volume.created_at),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VolumePage {
    items: Vec<VolumeView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Imported {
    /// Files, directories and links.
    entries: u64,
}

/// Makes an empty volume.
#[utoipa::path(
    post, path = "/v1/volumes", tag = "volumes",
    security(("key" = ["storage.manage"])), request_body = CreateVolumeRequest,
    responses((status = 201, description = "It is there.", body = VolumeView))
)]
pub(crate) async fn create_volume(
    State(app): State<App>,
    As(caller): As,
    Json(body): Json<CreateVolumeRequest>,
) -> Answer<(StatusCode, axum::Json<VolumeView>)> {
    let request = CreateVolume {
        name: body.name,
        bytes: body.size_bytes,
    };
    let volume = app.sandboxes.create_volume(&caller, request).await?;
    Ok((StatusCode::CREATED, axum::Json(VolumeView::of(volume))))
}

/// Makes a volume of a tar archive that sandboxes can only read.
#[utoipa::path(
    post, path = "/v1/volumes/seal", tag = "volumes",
    security(("key" = ["storage.manage"])), params(SealQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, description = "It is there.", body = VolumeView))
)]
pub(crate) async fn seal_volume(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<SealQuery>,
    Arriving(body): Arriving,
) -> Answer<(StatusCode, axum::Json<VolumeView>)> {
    let upload = upload::archive(&app, &caller, body).await?;
    let volume = app
        .sandboxes
        .seal_volume(&caller, query.name, upload.file())
        .await?;
    Ok((StatusCode::CREATED, axum::Json(VolumeView::of(volume))))
}

/// Lists volumes, newest first.
#[utoipa::path(
    get, path = "/v1/volumes", tag = "volumes",
    security(("key" = ["storage.read"])), params(VolumesQuery),
    responses((status = 200, description = "A page of them.", body = VolumePage))
)]
pub(crate) async fn list_volumes(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<VolumesQuery>,
) -> Answer<axum::Json<VolumePage>> {
    let limit = wire::within("limit", query.limit.unwrap_or(50), 1..=100)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = app.sandboxes.volumes(&caller, query.cursor, limit).await?;
    Ok(axum::Json(VolumePage {
        items: page.items.into_iter().map(VolumeView::of).collect(),
        next: page.next,
    }))
}

/// Shows a volume, by id or name.
#[utoipa::path(
    get, path = "/v1/volumes/{volume}", tag = "volumes",
    security(("key" = ["storage.read"])),
    responses((status = 200, description = "The volume.", body = VolumeView))
)]
pub(crate) async fn get_volume(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<axum::Json<VolumeView>> {
    let volume = app.sandboxes.volume(&caller, &which).await?;
    Ok(axum::Json(VolumeView::of(volume)))
}

/// Deletes a volume with all it holds; refused while a sandbox that has not ended was created with it.
#[utoipa::path(
    delete, path = "/v1/volumes/{volume}", tag = "volumes",
    security(("key" = ["storage.manage"])),
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn delete_volume(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_volume(&caller, &which).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Streams all that is in a volume as a tar archive; possible while sandboxes use it.
#[utoipa::path(
    get, path = "/v1/volumes/{volume}/content", tag = "volumes",
    security(("key" = ["storage.manage"])),
    responses((status = 200, description = "The archive.", content((Vec<u8> = "application/x-tar"))))
)]
pub(crate) async fn export_volume(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    At(which): At<String>,
) -> Answer<Response> {
    let body = app.sandboxes.export_volume(&caller, &which).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/x-tar"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, Body::from_stream(visit.download(body))).into_response())
}

/// Adds what is in a tar archive to a volume.
#[utoipa::path(
    put, path = "/v1/volumes/{volume}/content", tag = "volumes",
    security(("key" = ["storage.manage"])),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "It is in.", body = Imported))
)]
pub(crate) async fn import_volume(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
    Arriving(body): Arriving,
) -> Answer<axum::Json<Imported>> {
    // Nothing is received for a volume that is not there.
    app.sandboxes.volume(&caller, &which).await?;
    let upload = upload::archive(&app, &caller, body).await?;
    let file = std::fs::File::open(upload.file())
        .map_err(|error| Fault::internal(format!("the upload cannot be read: {error}")))?;
    let entries = app
        .sandboxes
        .import_volume(&caller, &which, std::io::BufReader::new(file))
        .await?;
    Ok(axum::Json(Imported { entries }))
}

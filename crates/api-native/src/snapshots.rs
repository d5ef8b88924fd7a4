//! `/v1/snapshots`: saved state with a name of its own.

use atoll_actions::words::{IsolationName, ResourcesRequest, SnapshotRequest, SnapshotView};
use atoll_types::Fault;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{Args, Arriving, As, At, MaybeJson, Paying};
use crate::named::Named;
use crate::sandboxes::idempotency_key;
use crate::{App, upload, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(take_snapshot))
        .routes(routes!(list_snapshots))
        .routes(routes!(import_snapshot))
        .routes(routes!(get_snapshot, delete_snapshot))
        .routes(routes!(export_snapshot))
        .routes(routes!(keep_template_running))
        .routes(routes!(collect_garbage))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SnapshotsQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ImportQuery {
    /// Instead of the name that is in the file.
    #[param(min_length = 1, max_length = 64)]
    name: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotPage {
    items: Vec<SnapshotView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Takes a snapshot of a running, paused or stopped sandbox, and answers when it is durable.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots",
    security(("key" = ["storage.manage"])), request_body = Option<SnapshotRequest>,
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
        description = "A request that comes again with the same key finds the snapshot that the first one took.")),
    responses((status = 201, description = "It is taken.", body = SnapshotView))
)]
pub(crate) async fn take_snapshot(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    headers: HeaderMap,
    MaybeJson(body): MaybeJson<SnapshotRequest>,
) -> Answer<(StatusCode, axum::Json<SnapshotView>)> {
    let request = body.into_take(idempotency_key(&headers)?);
    let snapshot = app.sandboxes.take_snapshot(&caller, &id, request).await?;
    Ok((StatusCode::CREATED, axum::Json(SnapshotView::of(snapshot))))
}

/// Lists snapshots, newest first.
#[utoipa::path(
    get, path = "/v1/snapshots", tag = "snapshots",
    security(("key" = ["storage.read"])), params(SnapshotsQuery),
    responses((status = 200, description = "A page of them.", body = SnapshotPage))
)]
pub(crate) async fn list_snapshots(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<SnapshotsQuery>,
) -> Answer<axum::Json<SnapshotPage>> {
    let limit = wire::within("limit", query.limit.unwrap_or(50), 1..=100)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = app.sandboxes.snapshots(&caller, query.cursor, limit).await?;
    Ok(axum::Json(SnapshotPage {
        items: page.items.into_iter().map(SnapshotView::of).collect(),
        next: page.next,
    }))
}

/// Shows a snapshot, by id or name.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}", tag = "snapshots",
    security(("key" = ["storage.read"])),
    responses((status = 200, description = "The snapshot.", body = SnapshotView))
)]
pub(crate) async fn get_snapshot(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<axum::Json<SnapshotView>> {
    let snapshot = app.sandboxes.snapshot(&caller, &which).await?;
    Ok(axum::Json(SnapshotView::of(snapshot)))
}

/// Deletes a snapshot. Sandboxes that were made of it go on.
#[utoipa::path(
    delete, path = "/v1/snapshots/{snapshot}", tag = "snapshots",
    security(("key" = ["storage.manage"])),
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn delete_snapshot(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_snapshot(&caller, &which).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Streams a snapshot as one file that another server can take in.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/export", tag = "snapshots",
    security(("key" = ["storage.manage"])),
    responses((status = 200, description = "The file.", content((Vec<u8> = "application/octet-stream"))))
)]
pub(crate) async fn export_snapshot(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    At(which): At<String>,
) -> Answer<Response> {
    let body = app.sandboxes.export_snapshot(&caller, &which).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, Body::from_stream(visit.download(body))).into_response())
}

/// Takes in a file that an export made.
#[utoipa::path(
    post, path = "/v1/snapshots/import", tag = "snapshots",
    security(("key" = ["storage.manage"])), params(ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, description = "It is here.", body = SnapshotView))
)]
pub(crate) async fn import_snapshot(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ImportQuery>,
    Arriving(body): Arriving,
) -> Answer<(StatusCode, axum::Json<SnapshotView>)> {
    let upload = upload::archive(&app, &caller, body).await?;
    let file = std::fs::File::open(upload.file())
        .map_err(|error| Fault::internal(format!("the upload cannot be read: {error}")))?;
    let snapshot = app
        .sandboxes
        .import_snapshot(&caller, query.name, std::io::BufReader::new(file))
        .await?;
    Ok((StatusCode::CREATED, axum::Json(SnapshotView::of(snapshot))))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeepRunningRequest {
    /// Absent: the template's, or else the server's defaults.
    resources: Option<ResourcesRequest>,
    isolation_floor: Option<IsolationName>,
}

/// Boots a template that has a start command, waits until that is ready, and keeps the memory: sandboxes of this size
/// come up with their servers running. For one that is shared it takes `templates.share`, and serves every project.
#[utoipa::path(
    post, path = "/v1/templates/{template}/running", tag = "templates",
    security(("key" = ["templates.manage"])), request_body = Option<KeepRunningRequest>,
    responses((status = 201, description = "What is kept.", body = SnapshotView))
)]
pub(crate) async fn keep_template_running(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
    MaybeJson(body): MaybeJson<KeepRunningRequest>,
) -> Answer<(StatusCode, axum::Json<SnapshotView>)> {
    let resources = body.resources.unwrap_or_default().into_asked();
    let floor = body.isolation_floor.map(IsolationName::into_isolation);
    let kept = app
        .sandboxes
        .keep_running(&caller, &which, resources, floor, None)
        .await?;
    Ok((StatusCode::CREATED, axum::Json(SnapshotView::of(kept))))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CollectRequest {
    /// Only say what there is.
    #[serde(default)]
    dry_run: bool,
}

/// What nobody refers to.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Garbage {
    dry_run: bool,
    /// Saved states without a record.
    snapshots: Vec<String>,
    /// Volumes without a record.
    volumes: Vec<String>,
    /// Disk space that came free, or would.
    bytes: u64,
    /// Saved states that cannot be read; while they are there, the space of others cannot be reclaimed.
    unreadable: Vec<String>,
}

/// Collects garbage, or says what there is.
#[utoipa::path(
    post, path = "/v1/gc", tag = "server",
    security(("key" = ["server.run"])), request_body = Option<CollectRequest>,
    responses((status = 200, description = "What went, or would.", body = Garbage))
)]
pub(crate) async fn collect_garbage(
    State(app): State<App>,
    MaybeJson(body): MaybeJson<CollectRequest>,
) -> Answer<axum::Json<Garbage>> {
    let collected = app.sandboxes.collect_garbage(body.dry_run).await?;
    Ok(axum::Json(Garbage {
        dry_run: collected.dry_run,
        snapshots: collected.snapshots,
        volumes: collected.volumes,
        bytes: collected.bytes,
        unreadable: collected.unreadable,
    }))
}

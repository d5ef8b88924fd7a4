//! `/v1/sandboxes/{id}/files`: look, list, change, watch. Content and archives are in [`crate::transfer`].

use atoll_actions::words::FileView;
use atoll_front::Permit;
use atoll_guest_protocol::{FileEntry, WatchEvent, WatchKind};
use atoll_sandboxes::{FileChange, FilePath, Watch};
use atoll_types::SandboxId;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::sse::Event;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, ErrorDetail};
use crate::exec::{event, sse};
use crate::extract::{Args, As, Json, Paying};
use crate::named::Named;
use crate::{App, wire};

/// How deep a listing may go.
const MAX_DEPTH: u64 = 64;
/// So much of a listing is written at once.
const PIECE: usize = 64 * 1024;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_files))
        .routes(routes!(stat_file))
        .routes(routes!(make_directory))
        .routes(routes!(rename_file))
        .routes(routes!(remove_file))
        .routes(routes!(change_mode))
        .routes(routes!(change_owner))
        .routes(routes!(make_symlink))
        .routes(routes!(watch_files))
}

// ---- wire types

/// Names a file and who looks at it.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PathQuery {
    /// Absolute, or relative to the home of the user.
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who does it, with the permissions that they have in the sandbox. Absent: the sandbox's owner, who may all; what is
    /// created then belongs to the template's user.
    user: Option<String>,
}

impl PathQuery {
    pub(crate) fn into_path(self) -> Answer<FilePath> {
        path(self.path, self.path_base64, self.user)
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who does it, with the permissions that they have in the sandbox. Absent: the sandbox's owner, who may all; what is
    /// created then belongs to the template's user.
    user: Option<String>,
    /// 1 lists the directory itself.
    #[param(minimum = 1, maximum = 64, default = 1)]
    depth: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WatchQuery {
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who does it, with the permissions that they have in the sandbox. Absent: the sandbox's owner, who may all; what is
    /// created then belongs to the template's user.
    user: Option<String>,
    #[param(default = false)]
    recursive: Option<bool>,
}

pub(crate) fn path(path: Option<String>, encoded: Option<String>, user: Option<String>) -> Answer<FilePath> {
    Ok(FilePath {
        path: wire::exactly_one("path", path, encoded)?,
        user,
    })
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct MkdirRequest {
    path: Option<String>,
    path_base64: Option<String>,
    user: Option<String>,
    /// Octal; 0755 if absent.
    #[schema(pattern = "^(0o)?[0-7]{1,5}$", examples("0755"))]
    mode: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RenameRequest {
    path: Option<String>,
    path_base64: Option<String>,
    /// The new path.
    to: Option<String>,
    to_base64: Option<String>,
    user: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemoveRequest {
    path: Option<String>,
    path_base64: Option<String>,
    user: Option<String>,
    /// A directory needs it.
    #[serde(default)]
    recursive: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChmodRequest {
    path: Option<String>,
    path_base64: Option<String>,
    user: Option<String>,
    /// Octal.
    #[schema(pattern = "^(0o)?[0-7]{1,5}$", examples("0644"))]
    mode: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChownRequest {
    path: Option<String>,
    path_base64: Option<String>,
    user: Option<String>,
    /// `user`, `user:group` or numbers.
    #[schema(examples("user:user"))]
    owner: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SymlinkRequest {
    /// Where the link is made.
    path: Option<String>,
    path_base64: Option<String>,
    /// What it points to.
    target: Option<String>,
    target_base64: Option<String>,
    user: Option<String>,
}

#[expect(dead_code, reason = "read by the OpenAPI generator only")]
#[derive(Debug, ToSchema)]
pub(crate) struct FileList {
    items: Vec<FileView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MkdirResult {
    /// Whether it is new.
    created: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChangeKind {
    Created,
    Written,
    Removed,
    RenamedFrom,
    RenamedTo,
    Attributes,
    /// Events were lost; look for yourself.
    Overflow,
}

/// The data of a `changed` event.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChangeView {
    kind: ChangeKind,
    /// Relative to the watched path; empty for the path itself.
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_base64: Option<String>,
    directory: bool,
}

impl ChangeView {
    fn of(event: &WatchEvent) -> Self {
        let (name, name_base64) = wire::readable(&event.name);
        Self {
            kind: match event.kind {
                WatchKind::Created => ChangeKind::Created,
                WatchKind::Written => ChangeKind::Written,
                WatchKind::Removed => ChangeKind::Removed,
                WatchKind::RenamedFrom => ChangeKind::RenamedFrom,
                WatchKind::RenamedTo => ChangeKind::RenamedTo,
                WatchKind::Attributes => ChangeKind::Attributes,
                WatchKind::Overflow => ChangeKind::Overflow,
            },
            name,
            name_base64,
            directory: event.directory,
        }
    }
}

// ---- handlers

/// Lists a directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files", tag = "files",
    security(("key" = ["sandbox.use"])), params(ListQuery),
    responses((status = 200, description = "Its entries, in no particular order.", body = FileList))
)]
pub(crate) async fn list_files(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Named(id): Named,
    Args(query): Args<ListQuery>,
) -> Answer<Response> {
    let depth = wire::within("depth", query.depth.unwrap_or(1), 1..=MAX_DEPTH)?;
    let depth = u32::try_from(depth).unwrap_or(1);
    let at = path(query.path, query.path_base64, query.user)?;
    let mut permit = visit.permit()?;
    let entries = app
        .sandboxes
        .list_files(&caller, &id, at, depth, &mut |bytes| permit.grow(bytes))
        .await?;
    let headers = [(header::CONTENT_TYPE, "application/json")];
    Ok((headers, Body::from_stream(written(entries, permit))).into_response())
}

/// A [`FileList`] in pieces, so that there is never more of it than what it is made of, which is paid for, and one piece.
fn written(
    entries: Vec<FileEntry>,
    permit: Permit,
) -> impl Stream<Item = Result<Bytes, std::convert::Infallible>> + Send {
    let begin = (entries.into_iter(), permit, br#"{"items":["#.to_vec());
    stream::unfold(Some(begin), |state| async move {
        let (mut entries, permit, mut piece) = state?;
        while piece.len() < PIECE {
            let Some(entry) = entries.next() else {
                piece.extend_from_slice(b"]}");
                return Some((Ok(Bytes::from(piece)), None));
            };
            let view = FileView::of(&entry.stat).at_depth(entry.depth);
            // Text and numbers can always be written.
            piece.extend(serde_json::to_vec(&view).unwrap_or_default());
            if entries.len() > 0 {
                piece.push(b',');
            }
        }
        Some((Ok(Bytes::from(piece)), Some((entries, permit, Vec::new()))))
    })
}

/// Looks at a file without following a final symlink.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/stat", tag = "files",
    security(("key" = ["sandbox.use"])), params(PathQuery),
    responses((status = 200, description = "What it is.", body = FileView))
)]
pub(crate) async fn stat_file(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<PathQuery>,
) -> Answer<axum::Json<FileView>> {
    let stat = app.sandboxes.stat(&caller, &id, query.into_path()?).await?;
    Ok(axum::Json(FileView::of(&stat)))
}

/// Makes a directory and its missing parents.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = MkdirRequest,
    responses((status = 200, description = "It exists.", body = MkdirResult))
)]
pub(crate) async fn make_directory(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<MkdirRequest>,
) -> Answer<axum::Json<MkdirResult>> {
    let mode = body.mode.as_deref().map_or(Ok(0o755), wire::mode)?;
    let at = path(body.path, body.path_base64, body.user)?;
    let change = FileChange::MakeDir { mode };
    let created = app.sandboxes.change_file(&caller, &id, at, change).await?;
    Ok(axum::Json(MkdirResult { created }))
}

/// Renames a file or directory, replacing what has the new name.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/rename", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = RenameRequest,
    responses((status = 204, description = "It has its new name."))
)]
pub(crate) async fn rename_file(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<RenameRequest>,
) -> Answer<StatusCode> {
    let at = path(body.path, body.path_base64, body.user)?;
    let to = wire::exactly_one("to", body.to, body.to_base64)?;
    change(&app, &caller, &id, at, FileChange::RenameTo { to }).await
}

/// Removes a file, or with `recursive` a directory and all below it.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/remove", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = RemoveRequest,
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn remove_file(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<RemoveRequest>,
) -> Answer<StatusCode> {
    let at = path(body.path, body.path_base64, body.user)?;
    let removal = FileChange::Remove {
        recursive: body.recursive,
    };
    change(&app, &caller, &id, at, removal).await
}

/// Sets permission bits.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/chmod", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = ChmodRequest,
    responses((status = 204, description = "They are set."))
)]
pub(crate) async fn change_mode(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<ChmodRequest>,
) -> Answer<StatusCode> {
    let mode = wire::mode(&body.mode)?;
    let at = path(body.path, body.path_base64, body.user)?;
    change(&app, &caller, &id, at, FileChange::SetMode { mode }).await
}

/// Sets the owner.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/chown", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = ChownRequest,
    responses((status = 204, description = "It is set."))
)]
pub(crate) async fn change_owner(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<ChownRequest>,
) -> Answer<StatusCode> {
    let at = path(body.path, body.path_base64, body.user)?;
    change(&app, &caller, &id, at, FileChange::SetOwner { owner: body.owner }).await
}

/// Makes a symlink.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/symlink", tag = "files",
    security(("key" = ["sandbox.use"])), request_body = SymlinkRequest,
    responses((status = 204, description = "It exists."))
)]
pub(crate) async fn make_symlink(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Json(body): Json<SymlinkRequest>,
) -> Answer<StatusCode> {
    let at = path(body.path, body.path_base64, body.user)?;
    let target = wire::exactly_one("target", body.target, body.target_base64)?;
    change(&app, &caller, &id, at, FileChange::Symlink { target }).await
}

async fn change(
    app: &App,
    caller: &atoll_identity::Caller,
    id: &SandboxId,
    at: FilePath,
    change: FileChange,
) -> Answer<StatusCode> {
    app.sandboxes.change_file(caller, id, at, change).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Watches a file or directory: `watching` once the watch stands, then `changed` events until you hang up, or `error`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/watch", tag = "files",
    security(("key" = ["sandbox.use"])), params(WatchQuery),
    responses((status = 200, description = "The events.", body = ChangeView, content_type = "text/event-stream"))
)]
pub(crate) async fn watch_files(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<WatchQuery>,
) -> Answer<Response> {
    let at = path(query.path, query.path_base64, query.user)?;
    let recursive = query.recursive.unwrap_or(false);
    let watch = app.sandboxes.watch(&caller, &id, at, recursive).await?;
    let watching = event("watching", &serde_json::json!({}));
    Ok(sse(stream::iter([watching]).chain(changes(watch))))
}

fn changes(watch: Watch) -> impl Stream<Item = Event> + Send {
    let batches = stream::unfold(Some(watch), |watch| async move {
        let mut watch = watch?;
        match watch.next().await? {
            Ok(batch) => {
                let events: Vec<_> = batch
                    .iter()
                    .map(|change| event("changed", &ChangeView::of(change)))
                    .collect();
                Some((events, Some(watch)))
            }
            Err(fault) => Some((vec![event("error", &ErrorDetail::new(&fault, None))], None)),
        }
    });
    batches.flat_map(stream::iter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::{parse_json, query};

    #[test]
    fn unknown_fields_are_refused() {
        assert!(query::<PathQuery>("path=/a&follow=1").is_err());
        assert!(query::<WatchQuery>("path=/a&recursive=maybe").is_err());
        assert!(parse_json::<RemoveRequest>(br#"{"path":"/a","force":true}"#).is_err());
        assert!(query::<PathQuery>("user=x").unwrap().into_path().is_err());
    }
}

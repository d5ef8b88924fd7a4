//! `/volumecontent`: files in a volume without a sandbox. A host of its own in E2B's cloud, with tokens of its own, and
//! refusals whose `code` is text.

use atoll_front::Visit;
use atoll_front::extract::{At, bearer};
use atoll_front::upload::Incoming;
use atoll_identity::{Caller, Opens};
use atoll_sandboxes::{EntryKind, VolumeEntry, VolumeMetadata, WriteInVolume};
use atoll_types::VolumeId;
use axum::body::Body;
use axum::extract::{FromRequestParts, Json, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::App;
use crate::auth::{self, admit};
use crate::control::read::{Query, Read};
use crate::error::Refusal;

/// A refusal of this API.
#[derive(Debug)]
pub(crate) struct NotDone(Refusal);

impl<T: Into<Refusal>> From<T> for NotDone {
    fn from(refusal: T) -> Self {
        Self(refusal.into())
    }
}

impl IntoResponse for NotDone {
    fn into_response(self) -> Response {
        let body = json!({"code": self.0.status.as_str(), "message": self.0.message});
        let mut response = self.0.into_response();
        let status = response.status();
        let (parts, _) = response.into_parts();
        response = (status, Json(body)).into_response();
        // What tells clients not to try again.
        for (name, value) in &parts.headers {
            if name != header::CONTENT_LENGTH && name != header::CONTENT_TYPE {
                response.headers_mut().insert(name, value.clone());
            }
        }
        response
    }
}

type Done<T> = Result<T, NotDone>;

/// The volume that a request names and its token opens.
#[derive(Debug)]
pub(crate) struct Opened {
    caller: Caller,
    id: VolumeId,
    visit: Visit,
}

impl FromRequestParts<App> for Opened {
    type Rejection = NotDone;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Done<Self> {
        let At(text) = At::<String>::from_request_parts(parts, app).await?;
        let token = bearer(&parts.headers).unwrap_or_default();
        let closed = || {
            auth::refused(
                "this does not open that volume, which its own token does",
                Some(token),
            )
        };
        let id: VolumeId = text.parse().map_err(|_| closed())?;
        let opens = Opens::Volume { volume: &id };
        let proof = app.identity.prove(&opens, token).ok_or_else(closed)?;
        // A token opens nothing once its volume is gone.
        let project = app.sandboxes.owner_of_volume(&id).await?.ok_or_else(closed)?;
        let caller = proof.acting_for(project);
        let visit = admit(&parts.extensions, &caller)?;
        Ok(Self { caller, id, visit })
    }
}

/// What is to be set.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
}

pub(crate) async fn stat(State(app): State<App>, opened: Opened, query: Query) -> Done<Json<Value>> {
    let query = query.only(&["path"])?;
    let found = app
        .sandboxes
        .volume_entry(&opened.caller, opened.id.as_str(), path(&query)?)
        .await?;
    Ok(Json(view(&found)))
}

pub(crate) async fn change(
    State(app): State<App>,
    opened: Opened,
    query: Query,
    Read(change): Read<Change>,
) -> Done<Json<Value>> {
    let query = query.only(&["path"])?;
    let metadata = VolumeMetadata {
        uid: change.uid,
        gid: change.gid,
        mode: change.mode,
    };
    let changed = app
        .sandboxes
        .set_metadata_in_volume(&opened.caller, opened.id.as_str(), path(&query)?, metadata)
        .await?;
    Ok(Json(view(&changed)))
}

pub(crate) async fn remove(State(app): State<App>, opened: Opened, query: Query) -> Done<StatusCode> {
    let query = query.only(&["path"])?;
    app.sandboxes
        .remove_from_volume(&opened.caller, opened.id.as_str(), path(&query)?)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn list(State(app): State<App>, opened: Opened, query: Query) -> Done<Response> {
    let query = query.only(&["path", "depth"])?;
    let depth = number(&query, "depth")?.unwrap_or(1);
    let mut permit = opened.visit.permit()?;
    let found = app
        .sandboxes
        .volume_entries(
            &opened.caller,
            opened.id.as_str(),
            path(&query)?,
            depth,
            &mut |bytes| permit.grow(bytes),
        )
        .await?;
    // One by one: as a tree of JSON they would take many times what they are.
    let mut text = vec![b'['];
    for entry in &found {
        if text.len() > 1 {
            text.push(b',');
        }
        text.extend_from_slice(view(entry).to_string().as_bytes());
    }
    text.push(b']');
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}

pub(crate) async fn make_dir(State(app): State<App>, opened: Opened, query: Query) -> Done<Response> {
    let query = query.only(&["path", "uid", "gid", "mode", "force"])?;
    let (metadata, parents) = (metadata(&query)?, flag(&query, "force")?);
    let made = app
        .sandboxes
        .make_dir_in_volume(
            &opened.caller,
            opened.id.as_str(),
            path(&query)?,
            metadata,
            parents,
        )
        .await?;
    Ok((StatusCode::CREATED, Json(view(&made))).into_response())
}

pub(crate) async fn read(State(app): State<App>, opened: Opened, query: Query) -> Done<Response> {
    let query = query.only(&["path"])?;
    let (entry, bytes) = app
        .sandboxes
        .read_from_volume(&opened.caller, opened.id.as_str(), path(&query)?)
        .await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, entry.size.to_string()),
    ];
    Ok((headers, Body::from_stream(opened.visit.download(bytes))).into_response())
}

pub(crate) async fn write(
    State(app): State<App>,
    opened: Opened,
    query: Query,
    headers: HeaderMap,
    body: Body,
) -> Done<Response> {
    let query = query.only(&["path", "uid", "gid", "mode", "force"])?;
    let length = headers.get(header::CONTENT_LENGTH);
    let how = WriteInVolume {
        metadata: metadata(&query)?,
        replace: flag(&query, "force")?,
        length: length.and_then(|value| value.to_str().ok()?.parse().ok()),
    };
    let pieces = Incoming::new(&opened.visit, body).boxed();
    let written = app
        .sandboxes
        .write_into_volume(&opened.caller, opened.id.as_str(), path(&query)?, how, pieces)
        .await?;
    Ok((StatusCode::CREATED, Json(view(&written))).into_response())
}

fn path(query: &Query) -> Done<String> {
    match query.text("path") {
        Some(path) => Ok(path.to_owned()),
        None => Err(Refusal::invalid("the parameter `path` is missing").into()),
    }
}

fn number(query: &Query, name: &str) -> Done<Option<u32>> {
    let number = query.number(name)?.map(u32::try_from).transpose();
    number.map_err(|_| Refusal::invalid(format!("`{name}` is not a number of 32 bits")).into())
}

fn metadata(query: &Query) -> Done<VolumeMetadata> {
    Ok(VolumeMetadata {
        uid: number(query, "uid")?,
        gid: number(query, "gid")?,
        mode: number(query, "mode")?,
    })
}

fn flag(query: &Query, name: &str) -> Done<bool> {
    match query.text(name).map(str::to_ascii_lowercase).as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(Refusal::invalid(format!("`{name}` is neither true nor false")).into()),
    }
}

fn view(entry: &VolumeEntry) -> Value {
    let time = |at| jiff::Timestamp::try_from(at).unwrap_or_default().to_string();
    let name = entry.path.file_name().unwrap_or(entry.path.as_os_str());
    let mut view = json!({
        "name": name.to_string_lossy(),
        "type": match entry.kind {
            EntryKind::File => "file",
            EntryKind::Directory => "directory",
            EntryKind::Symlink => "symlink",
            EntryKind::Other => "unknown",
        },
        "path": entry.path.to_string_lossy(),
        "size": entry.size,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "atime": time(entry.accessed),
        "mtime": time(entry.modified),
        "ctime": time(entry.changed),
    });
    if let Some(target) = &entry.target {
        view["target"] = target.to_string_lossy().into();
    }
    view
}

#[cfg(test)]
mod tests {
    use atoll_types::{Code, Fault};

    use super::*;

    #[tokio::test]
    async fn the_code_of_a_refusal_is_text_here() {
        let response = NotDone::from(Fault::new(Code::PathNotFound, "nothing there")).into_response();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        assert_eq!(&body[..], br#"{"code":"404","message":"nothing there"}"#);
    }

    #[test]
    fn what_is_no_number_or_flag_is_refused() {
        let query = |name: &str, value: &str| Query(vec![(name.to_owned(), value.to_owned())]);
        assert_eq!(number(&query("mode", "493"), "mode").unwrap(), Some(0o755));
        for wrong in ["-1", "4294967296", "0o755", "1e3"] {
            assert!(number(&query("mode", wrong), "mode").is_err(), "{wrong}");
        }
        assert!(flag(&query("force", "True"), "force").unwrap());
        assert!(flag(&query("force", "1"), "force").is_err());
    }
}

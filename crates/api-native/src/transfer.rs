//! File content and archives on their way in and out of a sandbox: streams, handed on chunk by chunk.

use std::collections::VecDeque;

use atoll_actions::words::FileView;
use atoll_front::range::{self, Part};
use atoll_guest_protocol::{EntryKind, FileStat, WriteMode};
use atoll_sandboxes::{ByteStream, FileContent, WriteSpec};
use atoll_types::Code;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{Args, Arriving, As};
use crate::files::{PathQuery, path};
use crate::named::Named;
use crate::{App, wire};

/// Files up to this size are read before they are answered, so that their length is certain (files in `/proc` and
/// `/sys` do not tell the truth about theirs) and an error is still an error status.
const SMALL_BYTES: u64 = 64 * 1024;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(read_file, write_file))
        .routes(routes!(read_tar, write_tar))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReadQuery {
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who reads, with the permissions that they have in the sandbox. Absent: the sandbox's owner, who may all.
    user: Option<String>,
    #[param(minimum = 0, default = 0)]
    offset: Option<u64>,
    /// At most so many bytes.
    #[param(minimum = 0)]
    length: Option<u64>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WriteHow {
    /// Replace or create, atomically: the file appears when it is complete.
    Replace,
    Append,
    /// Fail if it exists.
    Create,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WriteQuery {
    path: Option<String>,
    /// Instead of `path`, where it is not UTF-8.
    path_base64: Option<String>,
    /// Who writes, with the permissions that they have in the sandbox, and owns what is created. Absent: the sandbox's
    /// owner, who may all, for the template's user.
    user: Option<String>,
    /// Octal permission bits.
    #[param(pattern = "^(0o)?[0-7]{1,5}$", example = "0644")]
    mode: Option<String>,
    /// `replace` if absent.
    #[param(inline)]
    write: Option<WriteHow>,
    /// Whether to create missing parents.
    #[param(default = true)]
    parents: Option<bool>,
}

impl WriteQuery {
    fn into_spec(self) -> Answer<WriteSpec> {
        Ok(WriteSpec {
            at: path(self.path, self.path_base64, self.user)?,
            mode: self.mode.as_deref().map(wire::mode).transpose()?,
            write: match self.write {
                None | Some(WriteHow::Replace) => WriteMode::Replace,
                Some(WriteHow::Append) => WriteMode::Append,
                Some(WriteHow::Create) => WriteMode::CreateNew,
            },
            parents: self.parents.unwrap_or(true),
        })
    }
}

/// Reads a file, or with `Range` or `offset` and `length` a part of it.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/content", tag = "files",
    security(("key" = ["sandbox.use"])),
    params(ReadQuery, ("Range" = Option<String>, Header, description = "One range of bytes.")),
    responses(
        (status = 200, description = "The content.", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, description = "The range.", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 416, description = "The file has no such range.", body = crate::error::ErrorBody),
    )
)]
pub(crate) async fn read_file(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    headers: HeaderMap,
    Args(query): Args<ReadQuery>,
) -> Answer<Response> {
    let at = path(query.path, query.path_base64, query.user)?;
    let Some(asked) = range::asked(&headers) else {
        let (offset, length) = (query.offset.unwrap_or(0), query.length);
        let content = app.sandboxes.read_file(&caller, &id, at, offset, length).await?;
        return whole(content, offset, length).await;
    };
    if query.offset.is_some() || query.length.is_some() {
        return Err(Failure::new(
            Code::ContradictingFields,
            "`Range` excludes `offset` and `length`",
        ));
    }
    // The size must be known before the range is; asking for nothing tells it.
    let probe = app
        .sandboxes
        .read_file(&caller, &id, at.clone(), 0, Some(0))
        .await?;
    let size = probe.stat.size;
    drop(probe);
    let Some(part) = asked.of(size) else {
        return Err(no_such_range(size));
    };
    let content = app
        .sandboxes
        .read_file(&caller, &id, at, part.first, Some(part.length))
        .await?;
    Ok(ranged(content.body, part, size))
}

async fn whole(content: FileContent, offset: u64, length: Option<u64>) -> Answer<Response> {
    let FileContent { stat, body } = content;
    if let Some(expected) = expected_length(&stat, offset, length)
        && expected > SMALL_BYTES
    {
        return Ok(octets(Body::from_stream(body), Some(expected)));
    }
    Ok(match read_small(body).await? {
        Small::All(bytes) => {
            let length = bytes.len() as u64;
            octets(Body::from(bytes), Some(length))
        }
        Small::More(body) => octets(Body::from_stream(body), None),
    })
}

/// How many bytes a regular file of this size has to give.
fn expected_length(stat: &FileStat, offset: u64, length: Option<u64>) -> Option<u64> {
    let rest = stat.size.saturating_sub(offset);
    (stat.kind == EntryKind::File && stat.size > 0).then(|| length.map_or(rest, |length| length.min(rest)))
}

enum Small {
    All(Bytes),
    More(ByteStream),
}

async fn read_small(mut body: ByteStream) -> Answer<Small> {
    let mut chunks = VecDeque::new();
    let mut total = 0;
    while let Some(chunk) = body.next().await {
        let chunk = chunk?;
        total += chunk.len() as u64;
        chunks.push_back(chunk);
        if total > SMALL_BYTES {
            let begun = stream::iter(chunks.into_iter().map(Ok));
            return Ok(Small::More(Box::pin(begun.chain(body))));
        }
    }
    Ok(Small::All(match chunks.len() {
        0 => Bytes::new(),
        1 => chunks.pop_front().unwrap_or_default(),
        _ => chunks.iter().flat_map(|chunk| chunk.iter().copied()).collect(),
    }))
}

fn ranged(body: ByteStream, part: Part, size: u64) -> Response {
    let mut response = octets(Body::from_stream(body), Some(part.length));
    *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    if let Ok(value) = HeaderValue::from_str(&part.header(size)) {
        response.headers_mut().insert(header::CONTENT_RANGE, value);
    }
    response
}

fn no_such_range(size: u64) -> Failure {
    let failure = Failure::new(
        Code::RangeNotSatisfiable,
        format!("the file has {size} bytes and no such range"),
    );
    match HeaderValue::from_str(&format!("bytes */{size}")) {
        Ok(value) => failure.header(header::CONTENT_RANGE, value),
        Err(_) => failure,
    }
}

/// Bytes of a guest. `nosniff`, because nobody knows what they are and a browser must not guess.
fn octets(body: Body, length: Option<u64>) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::ACCEPT_RANGES, "bytes"),
    ];
    let mut response = (headers, body).into_response();
    if let Some(length) = length {
        response
            .headers_mut()
            .insert(header::CONTENT_LENGTH, length.into());
    }
    response
}

/// Writes a file; the body is its content.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files/content", tag = "files",
    security(("key" = ["sandbox.use"])), params(WriteQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "It is written.", body = FileView))
)]
pub(crate) async fn write_file(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<WriteQuery>,
    Arriving(body): Arriving,
) -> Answer<axum::Json<FileView>> {
    let spec = query.into_spec()?;
    let stat = app.sandboxes.write_file(&caller, &id, spec, body.boxed()).await?;
    Ok(axum::Json(FileView::of(&stat)))
}

/// Streams a file or directory as a tar archive, names relative to its parent.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/tar", tag = "files",
    security(("key" = ["sandbox.use"])), params(PathQuery),
    responses((status = 200, description = "The archive.", body = Vec<u8>, content_type = "application/x-tar"))
)]
pub(crate) async fn read_tar(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<PathQuery>,
) -> Answer<Response> {
    let body = app.sandboxes.tar_out(&caller, &id, query.into_path()?).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/x-tar"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// Unpacks a tar archive below a directory, which is created. Members that would land outside are refused.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files/tar", tag = "files",
    security(("key" = ["sandbox.use"])), params(PathQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "A tar archive."),
    responses((status = 204, description = "It is unpacked."))
)]
pub(crate) async fn write_tar(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<PathQuery>,
    Arriving(body): Arriving,
) -> Answer<StatusCode> {
    let at = query.into_path()?;
    app.sandboxes.tar_in(&caller, &id, at, body.boxed()).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::query;

    fn stat(kind: EntryKind, size: u64) -> FileStat {
        FileStat {
            path: b"/f".to_vec(),
            kind,
            size,
            mode: 0o644,
            uid: 0,
            gid: 0,
            owner: None,
            group: None,
            modified_millis: 0,
            target: None,
        }
    }

    #[test]
    fn a_length_is_promised_only_for_files_that_have_one() {
        let file = stat(EntryKind::File, 10);
        assert_eq!(expected_length(&file, 0, None), Some(10));
        assert_eq!(expected_length(&file, 4, Some(100)), Some(6));
        assert_eq!(expected_length(&file, 4, Some(2)), Some(2));
        assert_eq!(expected_length(&file, 40, None), Some(0));
        assert_eq!(expected_length(&stat(EntryKind::File, 0), 0, None), None);
        assert_eq!(expected_length(&stat(EntryKind::Other, 10), 0, None), None);
    }

    #[tokio::test]
    async fn a_file_that_lies_about_its_size_is_answered_with_what_it_has() {
        let chunks = |count: usize| -> ByteStream {
            Box::pin(stream::iter(
                (0..count).map(|_| Ok(Bytes::from(vec![b'x'; 40 * 1024]))),
            ))
        };
        for (count, length) in [(1, Some("40960")), (3, None)] {
            let content = FileContent {
                stat: stat(EntryKind::File, 4096),
                body: chunks(count),
            };
            let response = whole(content, 0, None).await.unwrap();
            let found = response.headers().get(header::CONTENT_LENGTH);
            assert_eq!(found.map(|value| value.to_str().unwrap()), length);
            let body = axum::body::to_bytes(response.into_body(), usize::MAX)
                .await
                .unwrap();
            assert_eq!(body.len(), count * 40 * 1024);
        }
    }

    #[test]
    fn writing_is_asked_for_in_the_query() {
        let spec = query::<WriteQuery>("path=/a&mode=0600&write=create&parents=false")
            .unwrap()
            .into_spec()
            .unwrap();
        assert_eq!(
            (spec.mode, spec.write, spec.parents),
            (Some(0o600), WriteMode::CreateNew, false)
        );
        let spec = query::<WriteQuery>("path=/a").unwrap().into_spec().unwrap();
        assert_eq!(
            (spec.mode, spec.write, spec.parents),
            (None, WriteMode::Replace, true)
        );
        for bad in [
            "path=/a&write=truncate",
            "path=/a&mode=rw",
            "path=/a&overwrite=1",
            "mode=0600",
        ] {
            assert!(
                query::<WriteQuery>(bad).map_or(true, |query| query.into_spec().is_err()),
                "{bad}"
            );
        }
    }
}

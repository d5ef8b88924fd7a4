//! The route `/files`: content up and down, by token or by signed link.

use atoll_front::multipart::Parts;
use atoll_front::query;
use atoll_guest_protocol::{EntryKind, FileStat, WriteMode};
use atoll_sandboxes::{ByteStream, FileChange, WriteSpec};
use atoll_types::{Code, Fault, FaultKind};
use axum::body::Body;
use axum::extract::{Json, Request};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use super::entries::{METADATA, file_name, metadata};
use super::{Admitted, Call, admitted_to_file, content, file_refusal};
use crate::App;
use crate::auth::Signed;
use crate::edge::Target;
use crate::error::{Answer, Refusal};

/// Keys of metadata and their values together.
const METADATA_BYTES: usize = 4096;
const METADATA_KEY_BYTES: usize = 246;
const METADATA_HEADER: &str = "x-metadata-";

/// The query of a request for a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FileQuery {
    path: Option<String>,
    username: Option<String>,
    signature: Option<String>,
    expires: Option<i64>,
}

const PARAMETERS: [&str; 4] = ["path", "username", "signature", "signature_expiration"];
const LONGEST_PATH: usize = 4096;

impl FileQuery {
    pub(crate) fn of(request: &Request) -> Answer<Self> {
        let mut query = Self::default();
        let given = || query::pairs(request.uri().query().unwrap_or_default());
        query::only(given().map(|(name, _)| name), &PARAMETERS)?;
        for (name, value) in given() {
            let value = value.into_owned();
            match &*name {
                "path" => query.path = Some(value),
                "username" => query.username = Some(value),
                "signature" => query.signature = Some(value),
                _ => {
                    let seconds = value.parse();
                    let seconds =
                        seconds.map_err(|_| Refusal::invalid("`signature_expiration` is not a number"));
                    query.expires = Some(seconds?);
                }
            }
        }
        // Before any token is tried on it: no system has longer paths.
        if query.path.as_ref().is_some_and(|path| path.len() > LONGEST_PATH) {
            return Err(Refusal::invalid(format!(
                "`path` has more than {LONGEST_PATH} bytes"
            )));
        }
        if query.username.as_ref().is_some_and(|name| name.len() > 256) {
            return Err(Refusal::invalid("`username` has more than 256 bytes"));
        }
        Ok(query)
    }

    pub(crate) fn signed(&self, writes: bool) -> Signed<'_> {
        Signed {
            path: self.path.as_deref().unwrap_or_default(),
            writes,
            user: self.username.as_deref().unwrap_or_default(),
            signature: self.signature.as_deref(),
            expires: self.expires,
        }
    }
}

/// `call` makes one of whoever acts.
pub(crate) async fn serve(
    call: impl FnOnce(Option<String>) -> Call,
    app: &App,
    target: &Target,
    request: Request,
) -> Answer<Response> {
    let query = FileQuery::of(&request)?;
    let writes = request.method() == Method::POST;
    if !writes && request.method() != Method::GET && request.method() != Method::HEAD {
        return Err(Refusal::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "files are read with GET and written with POST",
        ));
    }
    let admitted = admitted_to_file(app, target, &request, query.signed(writes))?;
    let call = call(acting(admitted, query.username.clone()));
    call.admit()?;
    target.wake(app).await?;
    match writes {
        true => write(&call, query.path, request).await,
        false => read(&call, query.path.unwrap_or_default(), request.headers()).await,
    }
}

/// Who acts: whom the query names, which a signature covers. Nothing else of a request has a say. A link that names nobody
/// is the template's user's: whoever holds it does not own the sandbox.
fn acting(admitted: Admitted, username: Option<String>) -> Option<String> {
    let named = username.filter(|user| !user.is_empty());
    match admitted {
        Admitted::Owner => named,
        Admitted::Link => Some(named.unwrap_or_default()),
    }
}

/// Mistakes in the words of the original.
async fn refusal(call: &Call, path: &str, fault: Fault) -> Refusal {
    match (fault.kind(), fault.code) {
        (_, Code::NoSuchUserInSandbox) => {
            let user = call.user.as_deref().unwrap_or_default();
            Refusal::unauthorized(format!("error looking up user '{user}': {}", fault.message))
        }
        (FaultKind::NotFound, _) => missing(call, path).await,
        (_, Code::IsADirectory) => {
            let path = call.whole(path).await;
            file_refusal(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory"))
        }
        _ => fault.into(),
    }
}

async fn missing(call: &Call, path: &str) -> Refusal {
    let path = call.whole(path).await;
    file_refusal(StatusCode::NOT_FOUND, format!("path '{path}' does not exist"))
}

async fn read(call: &Call, path: String, headers: &HeaderMap) -> Answer<Response> {
    let (caller, id) = (&call.target.caller, &call.target.id);
    let found = call.stat(call.at(&path)).await;
    let found = match found {
        Ok(found) => found,
        Err(fault) => return Err(refusal(call, &path, fault).await),
    };
    let Some(leads) = call.resolve(&found).await? else {
        return Err(missing(call, &path).await);
    };
    if leads.kind == EntryKind::Directory {
        let path = call.whole(&path).await;
        return Err(file_refusal(
            StatusCode::BAD_REQUEST,
            format!("path '{path}' is a directory"),
        ));
    }
    // What the kernel makes up as it is read has no size to promise.
    let sized = leads.kind == EntryKind::File && (leads.size > 0 || !leads.path.starts_with(b"/proc/"));
    let range = match sized {
        true => content::range(headers, leads.size)?,
        false => None,
    };
    let (offset, length) = range.map_or((0, None), |range| (range.first, Some(range.length)));
    let content = call
        .app
        .sandboxes
        .read_file(caller, id, call.exactly(&leads.path), offset, length);
    let content = match content.await {
        Ok(content) => content,
        Err(fault) => return Err(refusal(call, &path, fault).await),
    };
    let mut response = Body::from_stream(content.body).into_response();
    let out = response.headers_mut();
    let name = file_name(&found.path).replace(['"', '\\'], "_");
    if let Ok(value) = HeaderValue::from_str(&format!("inline; filename=\"{name}\"")) {
        out.insert(header::CONTENT_DISPOSITION, value);
    }
    out.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    out.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    out.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if sized {
        out.insert(header::CONTENT_LENGTH, length.unwrap_or(content.stat.size).into());
    }
    if let Some(range) = range {
        if let Ok(value) = HeaderValue::from_str(&range.header(leads.size)) {
            out.insert(header::CONTENT_RANGE, value);
        }
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

async fn write(call: &Call, path: Option<String>, request: Request) -> Answer<Response> {
    let attributes = attributes(request.headers())?;
    let media = request
        .headers()
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let gzip = content::is_gzip(request.headers())?;
    let body = content::decoded(Body::new(call.visit.upload(request.into_body())), gzip);
    let mut entries = Vec::new();
    if media.starts_with("multipart/form-data") {
        let mut parts = Parts::new(body, &media)?;
        while let Some(part) = parts.next().await? {
            if part.name.as_deref() != Some("file") {
                let name = part.name.unwrap_or_default();
                return Err(Refusal::invalid(format!("unknown part `{name}` of the body")));
            }
            let Some(target) = path.clone().or(part.file_name).filter(|path| !path.is_empty()) else {
                return Err(Refusal::invalid(
                    "a part of the body names no file, and there is no `path`",
                ));
            };
            let bytes = part.content.map(|piece| piece.map_err(|error| broken(&error)));
            entries.push(write_one(call, &target, bytes.boxed(), &attributes).await?);
        }
        if entries.is_empty() {
            return Err(Refusal::invalid("the multipart body holds no file"));
        }
    } else {
        let Some(path) = path.filter(|path| !path.is_empty()) else {
            return Err(Refusal::invalid("`path` is missing"));
        };
        let bytes = body.map(|piece| piece.map_err(|error| broken(&error)));
        entries.push(write_one(call, &path, bytes.boxed(), &attributes).await?);
    }
    Ok(Json(entries).into_response())
}

fn broken(error: &dyn std::error::Error) -> Fault {
    Fault::new(Code::BodyBroken, format!("the body could not be read: {error}"))
}

async fn write_one(
    call: &Call,
    path: &str,
    body: ByteStream,
    attributes: &[(String, Vec<u8>)],
) -> Answer<Value> {
    let (caller, id) = (&call.target.caller, &call.target.id);
    let spec = WriteSpec {
        at: call.at(path),
        mode: None,
        write: WriteMode::InPlace,
        parents: true,
    };
    let stat: FileStat = match call.app.sandboxes.write_file(caller, id, spec, body).await {
        Ok(stat) => stat,
        Err(fault) => return Err(refusal(call, path, fault).await),
    };
    let change = FileChange::SetAttributes {
        prefix: METADATA.to_owned(),
        attributes: attributes.to_vec(),
    };
    call.app
        .sandboxes
        .change_file(caller, id, call.exactly(&stat.path), change)
        .await?;
    let mut entry = json!({
        "path": String::from_utf8_lossy(&stat.path),
        "name": file_name(&stat.path),
        "type": "file",
    });
    if !attributes.is_empty() {
        entry["metadata"] = json!(metadata(attributes.to_vec()));
    }
    Ok(entry)
}

/// The metadata that a request gives its files.
fn attributes(headers: &HeaderMap) -> Answer<Vec<(String, Vec<u8>)>> {
    let mut found = Vec::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) else {
            continue;
        };
        let printable = value.as_bytes().iter().all(|byte| (0x20..=0x7e).contains(byte));
        if key.is_empty() || key.len() > METADATA_KEY_BYTES || !printable {
            return Err(Refusal::invalid(format!(
                "metadata `{key}` is not valid: keys have at most {METADATA_KEY_BYTES} bytes, values are printable ASCII"
            )));
        }
        total += key.len() + value.len();
        found.push((key.to_owned(), value.as_bytes().to_vec()));
    }
    if total > METADATA_BYTES {
        return Err(Refusal::invalid(format!(
            "the metadata has {total} bytes; at most {METADATA_BYTES} are allowed"
        )));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_acts_as_whom_it_was_signed_for() {
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(acting(Admitted::Owner, None), None);
        assert_eq!(acting(Admitted::Owner, named("user")), named("user"));
        assert_eq!(
            acting(Admitted::Link, None),
            named(""),
            "the template's user, not the owner"
        );
        assert_eq!(acting(Admitted::Link, named("")), named(""));
        assert_eq!(acting(Admitted::Link, named("root")), named("root"));
    }
}

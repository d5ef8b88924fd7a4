//! How requests are read: who asks, path parameters, query, JSON body. Each refuses in our error shape, and each refuses
//! what it does not know.

use atoll_front::{Held, Refused, Visit};
use atoll_identity::Caller;
use atoll_types::{Code, Fault};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, header};
use serde::de::DeserializeOwned;
use zeroize::Zeroize as _;

use crate::error::Failure;
use crate::{App, browser};

/// The most that a JSON body may hold.
pub(crate) const JSON_BYTES: usize = 1024 * 1024;

/// Who asks, and may: put there before the route was entered.
#[derive(Debug)]
pub(crate) struct As(pub(crate) Caller);

impl FromRequestParts<App> for As {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        let caller = parts.extensions.get::<Caller>().cloned();
        let unnamed = || Fault::internal("this route names no action that it is").into();
        caller.map(Self).ok_or_else(unnamed)
    }
}

/// Finds out who asks, by their key, or in a browser by their cookie.
pub(crate) async fn authenticate(app: &App, parts: &Parts) -> Result<Caller, Failure> {
    const HINT: &str = "send `Authorization: Bearer atl_…`; `atoll key create` makes a key";
    let Some(secret) = bearer(&parts.headers) else {
        if let Some(caller) = browser::by_cookie(app, parts).await? {
            admit(&parts.extensions, &caller)?;
            return Ok(caller);
        }
        return Err(Fault::new(Code::MissingKey, "this request carries no API key")
            .hint(HINT)
            .into());
    };
    match app.identity.authenticate(secret).await? {
        Some(caller) => {
            admit(&parts.extensions, &caller)?;
            Ok(caller)
        }
        None => Err(Fault::new(
            Code::InvalidKey,
            match atoll_identity::kind_of_secret(secret) {
                Some(kind) if !secret.starts_with("atl_") => format!("this is {kind}, not an API key"),
                _ => "this API key is unknown, was revoked or has expired".to_owned(),
            },
        )
        .hint(HINT)
        .into()),
    }
}

/// Says who pays for what a request holds, now that it is known who asks.
pub(crate) fn admit(extensions: &Extensions, caller: &Caller) -> Result<(), Failure> {
    match extensions.get::<Visit>() {
        Some(visit) => Ok(visit.admit_caller(caller)?),
        None => Err(Refused::Unpaid.into()),
    }
}

/// The token of an `Authorization: Bearer` header.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The parameters in the path.
#[derive(Debug)]
pub(crate) struct At<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for At<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        match Path::<T>::from_request_parts(parts, &()).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(rejection) => Err(Failure::new(
                Code::InvalidPathParameter,
                cause(&rejection.body_text()),
            )),
        }
    }
}

/// The query. `T` must refuse unknown fields.
#[derive(Debug)]
pub(crate) struct Args<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<App> for Args<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        query(parts.uri.query().unwrap_or_default()).map(Self)
    }
}

pub(crate) fn query<T: DeserializeOwned>(text: &str) -> Result<T, Failure> {
    // The decoder behind `Query` replaces what is not UTF-8, which would silently name another file.
    if !decodes_to_utf8(text) {
        return Err(
            Failure::new(Code::InvalidQuery, "the query is not UTF-8 once decoded")
                .hint("name such a file with `path_base64`"),
        );
    }
    let uri = axum::http::Uri::builder()
        .path_and_query(format!("/?{text}"))
        .build()
        .map_err(|error| Failure::new(Code::InvalidQuery, error.to_string()))?;
    match Query::<T>::try_from_uri(&uri) {
        Ok(Query(value)) => Ok(value),
        Err(rejection) => Err(Failure::new(Code::InvalidQuery, cause(&rejection.body_text()))),
    }
}

/// What is wrong, without axum's words about what it was doing.
fn cause(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, cause)| cause)
}

fn decodes_to_utf8(text: &str) -> bool {
    if !text.contains('%') {
        return true;
    }
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::str::from_utf8(&decoded).is_ok()
}

/// Who pays for what the request makes the server hold. Comes after [`As`], which says who that is.
#[derive(Debug)]
pub(crate) struct Paying(pub(crate) Visit);

impl FromRequestParts<App> for Paying {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        let visit = parts.extensions.get::<Visit>().cloned();
        Ok(Self(visit.ok_or(Refused::Unpaid)?))
    }
}

/// A JSON body. `T` must refuse unknown fields.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &App) -> Result<Self, Failure> {
        let (visit, held) = read_json(request).await?;
        let parsed = parse_json(held.as_ref());
        // What was made of the text is there until the answer is.
        visit.keep(held.into_permit());
        parsed.map(Self)
    }
}

/// A JSON body that holds what nobody may read. `T` must refuse unknown fields, and wipe what it holds.
pub(crate) struct PrivateJson<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<App> for PrivateJson<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &App) -> Result<Self, Failure> {
        let (visit, mut held) = read_json(request).await?;
        let parsed = parse_private_json(held.as_ref());
        // Where the connection still holds a part of it, that part is overwritten by what it reads next.
        held.bytes_mut().zeroize();
        visit.keep(held.into_permit());
        parsed.map(Self)
    }
}

/// A JSON body that may be left out or `null`; then every field has its default.
#[derive(Debug)]
pub(crate) struct MaybeJson<T>(pub(crate) T);

impl<T: DeserializeOwned + Default> FromRequest<App> for MaybeJson<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &App) -> Result<Self, Failure> {
        use axum::body::HttpBody as _;
        if request.body().is_end_stream() {
            return Ok(Self(T::default()));
        }
        let Json(body) = Json::<Option<T>>::from_request(request, app).await?;
        Ok(Self(body.unwrap_or_default()))
    }
}

/// A body that is kept as it comes, of somebody who is known; it must keep coming.
#[derive(Debug)]
pub(crate) struct Arriving(pub(crate) axum::body::Body);

impl FromRequest<App> for Arriving {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &App) -> Result<Self, Failure> {
        let visit = request.extensions().get::<Visit>().cloned();
        let visit = visit.ok_or(Refused::Unpaid)?;
        let body = visit.upload(request.into_body());
        Ok(Self(axum::body::Body::new(body)))
    }
}

/// Reads a JSON text into a wire type, naming the field that is wrong.
pub(crate) fn parse_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, Failure> {
    Ok(atoll_actions::spelling::parse_json(text)?)
}

/// The same without a word of what is there: a mistake is described by its place and by what was expected.
pub(crate) fn parse_private_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, Failure> {
    let refuse = |message: String| Failure::new(Code::InvalidBody, message);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let (path, error) = (error.path().to_string(), error.into_inner());
        refuse(without_content(&path, &error))
    })?;
    match reader.end() {
        Ok(()) => Ok(value),
        Err(error) => Err(refuse(error.to_string())),
    }
}

fn without_content(path: &str, error: &serde_json::Error) -> String {
    let text = error.to_string();
    let begins = |words: &[&str]| words.iter().any(|word| text.starts_with(word));
    // The first know the grammar only, the second the names of fields.
    if !error.is_data() || begins(&["unknown field ", "missing field ", "duplicate field "]) {
        return text;
    }
    // What was expected is said last, in words of ours.
    match text.rsplit_once(", expected ") {
        Some((_, expected))
            if begins(&[
                "invalid type",
                "invalid value",
                "invalid length",
                "unknown variant",
            ]) =>
        {
            format!("`{path}`: expected {expected}")
        }
        _ => {
            let (line, column) = (error.line(), error.column());
            format!("`{path}`: this cannot stand here at line {line} column {column}")
        }
    }
}

async fn read_json(request: Request) -> Result<(Visit, Held), Failure> {
    if !is_json(request.headers()) {
        return Err(Failure::new(
            Code::UnsupportedMediaType,
            "this route reads JSON, and the body is not declared as such",
        )
        .hint("send `Content-Type: application/json`"));
    }
    let visit = request.extensions().get::<Visit>().cloned();
    let visit = visit.ok_or(Refused::Unpaid)?;
    let mut held = visit.read(request.into_body(), JSON_BYTES).await?;
    held.weigh_json()?;
    Ok((visit, held))
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
    else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
        || (essence.len() > 5 && essence[essence.len() - 5..].eq_ignore_ascii_case("+json"))
}

/// Whether the client asked for server-sent events.
pub(crate) fn wants_events(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| {
            let essence = part.split(';').next().unwrap_or_default().trim();
            essence.eq_ignore_ascii_case("text/event-stream")
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        path: Option<String>,
        limit: Option<u16>,
    }

    #[test]
    fn unknown_and_malformed_query_parameters_are_named() {
        let sample: Sample = query("path=%2Fa+b&limit=3").unwrap();
        assert_eq!((sample.path.as_deref(), sample.limit), (Some("/a b"), Some(3)));
        for (text, named) in [
            ("colour=red", "colour"),
            ("limit=x", "limit"),
            ("path=1&path=2", "path"),
            ("path=%ff", "UTF-8"),
        ] {
            let failure = query::<Sample>(text).unwrap_err();
            assert_eq!(failure.status(), StatusCode::BAD_REQUEST, "{text}");
            assert!(
                failure.fault().message.contains(named),
                "{}",
                failure.fault().message
            );
        }
    }

    #[test]
    fn unknown_and_malformed_json_fields_are_named() {
        for (text, named) in [
            (r#"{"colour":1}"#, "colour"),
            (r#"{"limit":"x"}"#, "limit"),
            ("{", "EOF"),
        ] {
            let failure = parse_json::<Sample>(text.as_bytes()).unwrap_err();
            assert_eq!(failure.status(), StatusCode::BAD_REQUEST, "{text}");
            assert!(
                failure.fault().message.contains(named),
                "{}",
                failure.fault().message
            );
        }
    }

    fn request(body: axum::body::Body) -> (atoll_front::Front, Request) {
        let front = atoll_front::Front::new(atoll_front::Limits::for_machine(1 << 30, 1000));
        let visit = front.visit(None);
        visit
            .admit(&atoll_types::ProjectId::from_entropy([1; 20]), None)
            .unwrap();
        let request = Request::builder()
            .header(header::CONTENT_TYPE, "application/json")
            .extension(visit)
            .body(body)
            .unwrap();
        (front, request)
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        let declared = axum::body::Body::from(vec![b' '; JSON_BYTES + 1]);
        let failure = read_json(request(declared).1).await.unwrap_err();
        assert_eq!(failure.status(), StatusCode::PAYLOAD_TOO_LARGE);
        let chunks = futures_util::stream::iter([Ok::<_, std::io::Error>(vec![b' '; JSON_BYTES + 1])]);
        let chunked = axum::body::Body::from_stream(chunks);
        let failure = read_json(request(chunked).1).await.unwrap_err();
        assert_eq!(failure.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_body_is_a_timeout_of_the_client_and_holds_nothing() {
        let silent =
            axum::body::Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
        let (front, request) = request(silent);
        let failure = read_json(request).await.unwrap_err();
        assert_eq!(failure.status(), StatusCode::REQUEST_TIMEOUT);
        assert_eq!(front.memory.held(), 0);
    }

    #[test]
    fn media_types_are_read_by_their_essence() {
        let headers =
            |name: header::HeaderName, value: &str| HeaderMap::from_iter([(name, value.parse().unwrap())]);
        assert!(is_json(&headers(
            header::CONTENT_TYPE,
            "application/json; charset=utf-8"
        )));
        assert!(is_json(&headers(
            header::CONTENT_TYPE,
            "application/merge-patch+JSON"
        )));
        assert!(!is_json(&headers(header::CONTENT_TYPE, "text/plain")));
        assert!(wants_events(&headers(
            header::ACCEPT,
            "text/html, text/event-stream;q=0.9"
        )));
        assert!(!wants_events(&headers(header::ACCEPT, "*/*")));
    }
}

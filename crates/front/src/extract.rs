//! How requests are read, the same for every API: what is in the path, JSON, bodies that are kept as they come. Queries are in
//! [`query`](crate::query).
//!
//! What must hold:
//! - **Nothing is read before somebody pays for it** ([`Visit`]), and what was made of it is paid for until the answer is there.
//! - **What is not known is refused and named**: a field, a value, another media type.
//! - An API adds its shape of an error and how strict it is, and nothing else: the state of its routes says both ([`Wire`]).

use atoll_types::{Code, Fault};
use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use serde::de::DeserializeOwned;
use zeroize::Zeroize as _;

use crate::body::{Held, Refused};
use crate::upload::Incoming;
use crate::visit::Visit;

/// An API, as far as reading requests goes: the state of its routes.
pub trait Wire: Send + Sync {
    /// A fault in its own shape.
    type Refusal: From<Fault> + IntoResponse;
    const JSON: JsonRules;
}

/// How strict an API is with JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonRules {
    /// The most that a body may hold.
    pub bytes: usize,
    pub declared: Declared,
    /// Whether no body is an empty object.
    pub may_be_empty: bool,
}

/// Whether a body has to be declared as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declared {
    Always,
    /// It may be left out, but not say something else.
    IfAtAll,
    NotLookedAt,
}

/// The parameters in the path.
#[derive(Debug)]
pub struct At<T>(pub T);

impl<S: Wire, T: DeserializeOwned + Send> FromRequestParts<S> for At<T> {
    type Rejection = S::Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, S::Refusal> {
        match Path::<T>::from_request_parts(parts, &()).await {
            Ok(Path(value)) => Ok(Self(value)),
            Err(rejection) => {
                let why = cause(&rejection.body_text()).to_owned();
                Err(Fault::new(Code::InvalidPathParameter, why).into())
            }
        }
    }
}

/// Who pays for what the request makes the server hold. Somebody must have been admitted before.
#[derive(Debug)]
pub struct Paying(pub Visit);

impl<S: Wire> FromRequestParts<S> for Paying {
    type Rejection = S::Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, S::Refusal> {
        Ok(Self(Visit::of(&parts.extensions)?))
    }
}

/// A body that is kept as it comes, of somebody who is known; it must keep coming.
#[derive(Debug)]
pub struct Arriving(pub Incoming);

impl<S: Wire> FromRequest<S> for Arriving {
    type Rejection = S::Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, S::Refusal> {
        let visit = Visit::of(request.extensions())?;
        Ok(Self(Incoming::new(&visit, request.into_body())))
    }
}

/// A JSON body. `T` must refuse unknown fields.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<S: Wire, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = S::Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, S::Refusal> {
        let (visit, held) = receive(request, S::JSON).await?;
        let parsed = parse_json(text(&held, S::JSON))?;
        // What was made of the text is there until the answer is.
        visit.keep(held.into_permit());
        Ok(Self(parsed))
    }
}

/// A JSON body that holds what nobody may read. `T` must refuse unknown fields, and wipe what it holds.
pub struct PrivateJson<T>(pub T);

impl<T> std::fmt::Debug for PrivateJson<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PrivateJson(…)")
    }
}

impl<S: Wire, T: DeserializeOwned> FromRequest<S> for PrivateJson<T> {
    type Rejection = S::Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, S::Refusal> {
        let (visit, mut held) = receive(request, S::JSON).await?;
        let parsed = parse_private_json(text(&held, S::JSON));
        // Where the connection still holds a part of it, that part is overwritten by what it reads next.
        held.bytes_mut().zeroize();
        let parsed = parsed?;
        visit.keep(held.into_permit());
        Ok(Self(parsed))
    }
}

/// A JSON body that may be left out or `null`; then every field has its default.
#[derive(Debug)]
pub struct MaybeJson<T>(pub T);

impl<S: Wire, T: DeserializeOwned + Default> FromRequest<S> for MaybeJson<T> {
    type Rejection = S::Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, S::Refusal> {
        if request.body().is_end_stream() {
            return Ok(Self(T::default()));
        }
        let Json(body) = Json::<Option<T>>::from_request(request, state).await?;
        Ok(Self(body.unwrap_or_default()))
    }
}

/// Reads a JSON body as bytes that are paid for, with what reading them may take.
pub async fn read_json(
    visit: &Visit,
    headers: &HeaderMap,
    body: Body,
    rules: JsonRules,
) -> Result<Held, Refused> {
    let fits = match (rules.declared, declared_as_json(headers)) {
        (Declared::NotLookedAt, _) | (_, Some(true)) | (Declared::IfAtAll, None) => true,
        (_, Some(false)) | (Declared::Always, None) => false,
    };
    if !fits {
        return Err(Refused::NotJson);
    }
    let mut held = visit.read(body, rules.bytes).await?;
    held.weigh_json()?;
    Ok(held)
}

async fn receive(request: Request, rules: JsonRules) -> Result<(Visit, Held), Fault> {
    let (parts, body) = request.into_parts();
    let visit = Visit::of(&parts.extensions)?;
    let held = read_json(&visit, &parts.headers, body, rules).await?;
    Ok((visit, held))
}

fn text(held: &Held, rules: JsonRules) -> &[u8] {
    match held.as_ref() {
        b"" if rules.may_be_empty => b"{}",
        text => text,
    }
}

/// Reads a JSON text into a wire type, naming the field that is wrong.
pub fn parse_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, Fault> {
    match axum::Json::<T>::from_bytes(text) {
        Ok(axum::Json(value)) => Ok(value),
        Err(rejection) => Err(Fault::new(Code::InvalidBody, cause(&rejection.body_text()))),
    }
}

/// The same without a word of what is there: a mistake is described by its place and by what was expected.
pub fn parse_private_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, Fault> {
    let refuse = |message: String| Fault::new(Code::InvalidBody, message);
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

/// What is wrong, without axum's words about what it was doing.
pub(crate) fn cause(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, cause)| cause)
}

/// Whether a body is declared as JSON; `None`: it is declared as nothing.
fn declared_as_json(headers: &HeaderMap) -> Option<bool> {
    let value = headers.get(header::CONTENT_TYPE)?;
    Some(value.to_str().is_ok_and(|value| {
        let essence = essence(value).to_ascii_lowercase();
        essence == "application/json" || (essence.len() > 5 && essence.ends_with("+json"))
    }))
}

/// A media type without its parameters.
fn essence(value: &str) -> &str {
    value.split(';').next().unwrap_or_default().trim()
}

/// Whether the client asked for server-sent events.
pub fn wants_events(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| essence(part).eq_ignore_ascii_case("text/event-stream"))
}

/// The token of an `Authorization: Bearer` header.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The cookies of a request, as they come: there may be several of a name, of which another page planted all but one.
pub fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;
    use axum::response::Response;
    use serde::Deserialize;

    use super::*;
    use crate::{Front, Limits, status};

    const BYTES: usize = 10_000;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        limit: Option<u16>,
    }

    struct Shape(Fault);

    impl From<Fault> for Shape {
        fn from(fault: Fault) -> Self {
            Self(fault)
        }
    }

    impl IntoResponse for Shape {
        fn into_response(self) -> Response {
            status::http(self.0.code).into_response()
        }
    }

    struct Strict;
    impl Wire for Strict {
        type Refusal = Shape;
        const JSON: JsonRules = JsonRules {
            bytes: BYTES,
            declared: Declared::Always,
            may_be_empty: false,
        };
    }

    struct Lenient;
    impl Wire for Lenient {
        type Refusal = Shape;
        const JSON: JsonRules = JsonRules {
            bytes: BYTES,
            declared: Declared::NotLookedAt,
            may_be_empty: true,
        };
    }

    fn request(media: Option<&str>, body: Body) -> (Front, Request) {
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        let visit = front.visit(None);
        visit
            .admit(&atoll_types::ProjectId::from_entropy([1; 20]), None)
            .unwrap();
        let mut request = Request::builder().extension(visit).body(body).unwrap();
        if let Some(media) = media {
            request
                .headers_mut()
                .insert(header::CONTENT_TYPE, media.parse().unwrap());
        }
        (front, request)
    }

    async fn read<S: Wire<Refusal = Shape>>(
        wire: S,
        media: Option<&str>,
        body: Body,
    ) -> Result<Sample, Code> {
        let (front, request) = request(media, body);
        let read = Json::<Sample>::from_request(request, &wire).await;
        if read.is_err() {
            assert_eq!(front.memory.held(), 0, "what is refused is not held");
        }
        read.map(|Json(sample)| sample).map_err(|Shape(fault)| fault.code)
    }

    #[tokio::test]
    async fn an_api_says_how_strict_it_is() {
        const JSON: Option<&str> = Some("application/merge-patch+JSON; charset=utf-8");
        let sample = || Body::from(r#"{"limit":3}"#);
        assert_eq!(read(Strict, JSON, sample()).await, Ok(Sample { limit: Some(3) }));
        for media in [None, Some("text/plain"), Some("+json")] {
            let refused = read(Strict, media, sample()).await;
            assert_eq!(refused, Err(Code::UnsupportedMediaType), "{media:?}");
            assert_eq!(
                read(Lenient, media, sample()).await,
                Ok(Sample { limit: Some(3) })
            );
        }
        assert_eq!(read(Strict, JSON, Body::empty()).await, Err(Code::InvalidBody));
        assert_eq!(read(Lenient, JSON, Body::empty()).await, Ok(Sample::default()));
        for wrong in [r#"{"colour":1}"#, "{", "[]", r#"{"limit":1}{}"#] {
            assert_eq!(
                read(Lenient, JSON, Body::from(wrong)).await,
                Err(Code::InvalidBody),
                "{wrong}"
            );
        }
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_refused() {
        let much = vec![b' '; BYTES + 1];
        let chunked = futures_util::stream::iter([Ok::<_, std::io::Error>(much.clone())]);
        for body in [Body::from(much), Body::from_stream(chunked)] {
            let refused = read(Lenient, None, body).await;
            assert_eq!(refused, Err(Code::BodyTooLarge));
        }
    }

    #[tokio::test]
    async fn what_was_made_of_a_body_is_paid_for_until_the_answer_is_there() {
        let (front, request) = request(None, Body::from(r#"{"limit":3}"#));
        let visit = Visit::of(request.extensions()).unwrap();
        let read = Json::<Sample>::from_request(request, &Lenient).await;
        assert!(read.is_ok() && front.memory.held() > 0);
        visit.answered();
        assert_eq!(front.memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_body_is_a_timeout_of_the_client() {
        let silent = futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>();
        let refused = read(Lenient, None, Body::from_stream(silent)).await;
        assert_eq!(refused, Err(Code::BodyTooSlow));
    }

    #[tokio::test]
    async fn nobody_is_read_before_they_are_known() {
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        for visit in [None, Some(front.visit(None))] {
            let mut request = Request::new(Body::from("{}"));
            if let Some(visit) = visit {
                request.extensions_mut().insert(visit);
            }
            let Err(Shape(fault)) = Json::<Sample>::from_request(request, &Lenient).await else {
                panic!("a body was read that nobody pays for");
            };
            assert_eq!(fault.code, Code::Internal);
        }
    }

    #[tokio::test]
    async fn a_body_that_may_be_left_out_is_not_looked_for() {
        let maybe = async |media: Option<&str>, body: Body| {
            let (_front, request) = request(media, body);
            let read = MaybeJson::<Sample>::from_request(request, &Strict).await;
            read.map(|MaybeJson(sample)| sample)
                .map_err(|Shape(fault)| fault.code)
        };
        assert_eq!(maybe(None, Body::empty()).await, Ok(Sample::default()));
        let media = Some("application/json");
        assert_eq!(maybe(media, Body::from("null")).await, Ok(Sample::default()));
        assert_eq!(
            maybe(media, Body::from(r#"{"limit":1}"#)).await,
            Ok(Sample { limit: Some(1) })
        );
        assert_eq!(
            maybe(None, Body::from("null")).await,
            Err(Code::UnsupportedMediaType)
        );
    }

    #[test]
    fn mistakes_are_named_and_in_private_without_what_is_there() {
        for (text, named) in [
            (r#"{"colour":1}"#, "colour"),
            (r#"{"limit":"hush"}"#, "limit"),
            ("{", "EOF"),
        ] {
            let fault = parse_json::<Sample>(text.as_bytes()).unwrap_err();
            assert!(fault.message.contains(named), "{fault}");
            let fault = parse_private_json::<Sample>(text.as_bytes()).unwrap_err();
            assert!(
                fault.message.contains(named) && !fault.message.contains("hush"),
                "{fault}"
            );
        }
    }

    #[test]
    fn headers_are_read_by_what_they_mean() {
        let headers = |name: HeaderName, value: &str| HeaderMap::from_iter([(name, value.parse().unwrap())]);
        let events = |value: &str| wants_events(&headers(header::ACCEPT, value));
        assert!(events("text/html, text/event-stream;q=0.9") && !events("*/*"));
        let token = |value: &str| bearer(&headers(header::AUTHORIZATION, value)).map(str::to_owned);
        assert_eq!(token("Bearer  atl_1 ").as_deref(), Some("atl_1"));
        assert_eq!(token("bEARER atl_1").as_deref(), Some("atl_1"));
        for none in ["Bearer", "Bearer ", "Basic atl_1", "atl_1"] {
            assert_eq!(token(none), None, "{none}");
        }
    }
}

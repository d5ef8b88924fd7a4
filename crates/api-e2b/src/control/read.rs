//! Reading requests: what is unknown or malformed is named.

use axum::extract::{FromRequest, FromRequestParts, MatchedPath, Path, Request};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use serde::de::DeserializeOwned;

use atoll_front::{Refused, Visit};
use atoll_types::SandboxId;

use crate::App;
use crate::edge::parse_id;
use crate::error::{Answer, Refusal};

/// The largest body of a request to the control plane.
const BODY_BYTES: usize = 4 * 1024 * 1024;

/// A JSON body; an empty one is an empty object. `T` must refuse unknown fields.
#[derive(Debug)]
pub(crate) struct Read<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<App> for Read<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &App) -> Answer<Self> {
        let visit = request.extensions().get::<Visit>().cloned();
        let visit = visit.ok_or(Refused::Unpaid)?;
        let mut held = visit.read(request.into_body(), BODY_BYTES).await?;
        held.weigh_json()?;
        let text: &[u8] = match held.as_ref() {
            b"" => b"{}",
            text => text,
        };
        let parsed = serde_json::from_slice(text)
            .map(Self)
            .map_err(|error| Refusal::invalid(format!("the body is not right: {error}")));
        // What was made of the text is there until the answer is.
        visit.keep(held.into_permit());
        parsed
    }
}

/// The sandbox that a path names.
#[derive(Debug)]
pub(crate) struct Id(pub(crate) SandboxId);

impl FromRequestParts<App> for Id {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Answer<Self> {
        let Path(text) = Path::<String>::from_request_parts(parts, &())
            .await
            .map_err(|error| Refusal::invalid(error.body_text()))?;
        // What has not the form of an id names nothing that exists.
        parse_id(&text)
            .map(Self)
            .ok_or_else(|| Refusal::no_sandbox(&text))
    }
}

/// The parameters of a query, decoded once.
pub(crate) fn query(parts: &Parts) -> Vec<(String, String)> {
    form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes())
        .into_owned()
        .collect()
}

/// What reads a query, and refuses what it does not know of it. Nothing else takes one.
const READ_QUERIES: [(Method, &str); 18] = [
    (Method::GET, "/sandboxes"),
    (Method::GET, "/v2/sandboxes"),
    (Method::GET, "/sandboxes/metrics"),
    (Method::GET, "/sandboxes/{id}/metrics"),
    (Method::GET, "/sandboxes/{id}/logs"),
    (Method::GET, "/v2/sandboxes/{id}/logs"),
    (Method::GET, "/snapshots"),
    (Method::GET, "/templates"),
    (Method::GET, "/v2/templates"),
    (Method::GET, "/templates/{id}/builds/{build}/status"),
    (Method::PUT, "/templates/{id}/files/{hash}"),
    (Method::GET, "/volumecontent/{id}/path"),
    (Method::PATCH, "/volumecontent/{id}/path"),
    (Method::DELETE, "/volumecontent/{id}/path"),
    (Method::GET, "/volumecontent/{id}/dir"),
    (Method::POST, "/volumecontent/{id}/dir"),
    (Method::GET, "/volumecontent/{id}/file"),
    (Method::PUT, "/volumecontent/{id}/file"),
];

/// Refuses a query where nobody reads one.
pub(crate) async fn no_query(path: MatchedPath, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let reads = READ_QUERIES
        .iter()
        .any(|(method, known)| *method == parts.method && *known == path.as_str());
    if !reads && let Err(refusal) = Query(query(&parts)).only(&[]) {
        return refusal.into_response();
    }
    next.run(Request::from_parts(parts, body)).await
}

/// The query of a request.
#[derive(Debug)]
pub(crate) struct Query(pub(crate) Vec<(String, String)>);

impl FromRequestParts<App> for Query {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Answer<Self> {
        Ok(Self(query(parts)))
    }
}

impl Query {
    /// Refuses what is not among the names, and what is given twice.
    pub(crate) fn only(self, known: &[&str]) -> Answer<Self> {
        for (at, (name, _)) in self.0.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                return Err(Refusal::invalid(format!("unknown parameter `{name}`")));
            }
            if self.0[..at].iter().any(|(before, _)| before == name) {
                return Err(Refusal::invalid(format!("the parameter `{name}` is given twice")));
            }
        }
        Ok(self)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| known == name)?;
        Some(found.1.as_str()).filter(|value| !value.is_empty())
    }

    pub(crate) fn number(&self, name: &str) -> Answer<Option<i64>> {
        self.text(name)
            .map(|value| {
                value
                    .parse()
                    .map_err(|_| Refusal::invalid(format!("`{name}` is not a number")))
            })
            .transpose()
    }

    /// A page's size: 1 to 100.
    pub(crate) fn limit(&self) -> Answer<usize> {
        match self.number("limit")? {
            None => Ok(100),
            Some(limit @ 1..=100) => Ok(usize::try_from(limit).unwrap_or(100)),
            Some(_) => Err(Refusal::invalid("`limit` must be from 1 to 100")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_or_given_twice_is_named() {
        let query = |pairs: &[(&str, &str)]| {
            let owned = pairs
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()));
            Query(owned.collect()).only(&["limit", "state"])
        };
        assert!(query(&[("limit", "1"), ("state", "running")]).is_ok());
        let refusal = query(&[("limit", "1"), ("project", "x")]).unwrap_err();
        assert!(refusal.message.contains("`project`"), "{}", refusal.message);
        let refusal = query(&[("limit", "1"), ("limit", "2")]).unwrap_err();
        assert!(refusal.message.contains("`limit`"), "{}", refusal.message);
    }
}

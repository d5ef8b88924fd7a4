//! Reading requests by the rules of this wire (`atoll_front::extract`): the sandbox that a path names, and queries.

use atoll_front::extract::{At, Declared, JsonRules, Wire};
use atoll_front::query;
use atoll_types::SandboxId;
use axum::extract::{FromRequestParts, MatchedPath, Request};
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::App;
use crate::edge::parse_id;
use crate::error::{Answer, Refusal};

pub(crate) use atoll_front::extract::Json as Read;

impl Wire for App {
    type Refusal = Refusal;
    /// Some clients send no body where all of it is optional, and say nothing of what it is.
    const JSON: JsonRules = JsonRules {
        bytes: 4 * 1024 * 1024,
        declared: Declared::NotLookedAt,
        may_be_empty: true,
    };
}

/// The sandbox that a path names.
#[derive(Debug)]
pub(crate) struct Id(pub(crate) SandboxId);

impl FromRequestParts<App> for Id {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Answer<Self> {
        let At(text) = At::<String>::from_request_parts(parts, app).await?;
        // What has not the form of an id names nothing that exists.
        parse_id(&text)
            .map(Self)
            .ok_or_else(|| Refusal::no_sandbox(&text))
    }
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
    let reads = READ_QUERIES
        .iter()
        .any(|(method, known)| method == request.method() && *known == path.as_str());
    if !reads {
        let given = query::pairs(request.uri().query().unwrap_or_default());
        if let Err(fault) = query::only(given.map(|(name, _)| name), &[]) {
            return Refusal::from(fault).into_response();
        }
    }
    next.run(request).await
}

/// The query of a request.
#[derive(Debug)]
pub(crate) struct Query(pub(crate) Vec<(String, String)>);

impl FromRequestParts<App> for Query {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Answer<Self> {
        let pairs = query::pairs(parts.uri.query().unwrap_or_default());
        let owned = pairs.map(|(name, value)| (name.into_owned(), value.into_owned()));
        Ok(Self(owned.collect()))
    }
}

impl Query {
    /// Refuses what is not among the names, and what is given twice.
    pub(crate) fn only(self, known: &[&str]) -> Answer<Self> {
        query::only(self.0.iter().map(|(name, _)| name), known)?;
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

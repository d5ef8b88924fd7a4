//! Queries. What nobody reads is refused, and so is what is given twice: whoever gives a parameter means something by it,
//! such as another project than the one they get.

use std::borrow::Cow;

use atoll_types::{Code, Fault};
use axum::extract::{FromRequestParts, Query};
use axum::http::Uri;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::extract::{Wire, cause};

/// What is shown of a name that nobody knows.
const SHOWN: usize = 100;

/// The query. `T` must refuse unknown fields.
#[derive(Debug)]
pub struct Args<T>(pub T);

impl<S: Wire, T: DeserializeOwned> FromRequestParts<S> for Args<T> {
    type Rejection = S::Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, S::Refusal> {
        Ok(Self(parse(parts.uri.query().unwrap_or_default())?))
    }
}

/// Reads a query into a wire type, naming the parameter that is wrong.
pub fn parse<T: DeserializeOwned>(text: &str) -> Result<T, Fault> {
    // The decoder behind `Query` replaces what is not UTF-8, which would silently name another file.
    if !decodes_to_utf8(text) {
        return Err(
            Fault::new(Code::InvalidQuery, "the query is not UTF-8 once decoded")
                .hint("where a name may be any bytes, there is a parameter that takes them in base64"),
        );
    }
    let uri = Uri::builder()
        .path_and_query(format!("/?{text}"))
        .build()
        .map_err(|error| Fault::new(Code::InvalidQuery, error.to_string()))?;
    match Query::<T>::try_from_uri(&uri) {
        Ok(Query(value)) => Ok(value),
        Err(rejection) => Err(Fault::new(Code::InvalidQuery, cause(&rejection.body_text()))),
    }
}

fn decodes_to_utf8(text: &str) -> bool {
    percent_encoding::percent_decode_str(text).decode_utf8().is_ok()
}

/// The parameters of a query, decoded.
pub fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form_urlencoded::parse(query.as_bytes())
}

/// A parameter that somebody reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter<N> {
    pub name: N,
    /// Whether it may be given several times.
    pub repeats: bool,
}

/// Refuses names that are not known, and those that come twice.
pub fn check<N: AsRef<str>>(
    names: impl IntoIterator<Item = impl AsRef<str>>,
    known: &[Parameter<N>],
) -> Result<(), Fault> {
    let refuse = |message: String| Err(Fault::new(Code::InvalidQuery, message));
    let mut seen = vec![false; known.len()];
    for name in names {
        let name = name.as_ref();
        let found = known.iter().position(|known| known.name.as_ref() == name);
        let Some(at) = found else {
            let shown: String = name.chars().take(SHOWN).collect();
            return refuse(format!(
                "unknown query parameter `{}`; {}",
                shown.escape_default(),
                expected(known)
            ));
        };
        if seen[at] && !known[at].repeats {
            return refuse(format!("the query parameter `{name}` is given twice"));
        }
        seen[at] = true;
    }
    Ok(())
}

/// The same where each may come once.
pub fn only(names: impl IntoIterator<Item = impl AsRef<str>>, known: &[&str]) -> Result<(), Fault> {
    let once = |name: &&str| Parameter {
        name: (*name).to_owned(),
        repeats: false,
    };
    let known: Vec<Parameter<String>> = known.iter().map(once).collect();
    check(names, &known)
}

fn expected<N: AsRef<str>>(known: &[Parameter<N>]) -> String {
    match known {
        [] => "there are none here".to_owned(),
        known => {
            let names = known.iter().map(|known| format!("`{}`", known.name.as_ref()));
            format!("expected one of {}", names.collect::<Vec<_>>().join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        path: Option<String>,
        limit: Option<u16>,
    }

    #[test]
    fn unknown_and_malformed_parameters_are_named() {
        let sample: Sample = parse("path=%2Fa+b&limit=3").unwrap();
        assert_eq!((sample.path.as_deref(), sample.limit), (Some("/a b"), Some(3)));
        for (text, named) in [
            ("colour=red", "colour"),
            ("limit=x", "limit"),
            ("path=1&path=2", "path"),
            ("path=%ff", "UTF-8"),
            ("path=%C3%28", "UTF-8"),
        ] {
            let fault = parse::<Sample>(text).unwrap_err();
            assert_eq!(fault.code, Code::InvalidQuery, "{text}");
            assert!(fault.message.contains(named), "{fault}");
        }
    }

    #[test]
    fn what_nobody_reads_is_refused_and_so_is_what_comes_twice() {
        let names = |query: &'static str| pairs(query).map(|(name, _)| name);
        only(names(""), &[]).unwrap();
        only(names("limit=1&state=running"), &["limit", "state"]).unwrap();
        for (query, told) in [
            ("limit=1&project=x", "`project`; expected one of `limit`, `state`"),
            ("limit=1&l%69mit=2", "`limit` is given twice"),
            ("Limit=1", "`Limit`"),
            ("=", "``"),
        ] {
            let fault = only(names(query), &["limit", "state"]).unwrap_err();
            assert_eq!(fault.code, Code::InvalidQuery);
            assert!(fault.message.contains(told), "{fault}");
        }
        let none = only(["x"], &[]).unwrap_err();
        assert!(none.message.contains("there are none here"), "{none}");
        let long = only(["y".repeat(10_000)], &[]).unwrap_err();
        assert!(long.message.len() < 200, "{long}");
        let repeats = [Parameter {
            name: "label",
            repeats: true,
        }];
        check(["label", "label"], &repeats).unwrap();
    }
}

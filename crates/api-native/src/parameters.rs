//! Which parameters the query of an operation may have: those that its documentation names, each once unless it repeats.
//!
//! What must hold: a parameter that nobody reads is refused, also where nobody reads a query. Whoever gives one means
//! something by it, such as another project than the one they get.

use std::collections::HashMap;

use atoll_front::query::{self, Parameter};
use atoll_types::Fault;
use axum::http::Method;
use utoipa::openapi::path::ParameterIn;
use utoipa::openapi::{OpenApi, RefOr, Schema};

use crate::openapi::operations;

/// Of one path, by method.
type OfPath = Vec<(&'static str, Vec<Parameter<String>>)>;

#[derive(Debug, Default)]
pub(crate) struct Parameters(HashMap<String, OfPath>);

impl Parameters {
    pub(crate) fn of(api: &OpenApi) -> Self {
        let of_path = |item| {
            let documented = operations(item).map(|(method, operation)| {
                let all = operation.parameters.iter().flatten();
                let query = all.filter(|parameter| parameter.parameter_in == ParameterIn::Query);
                let read = query.map(|parameter| Parameter {
                    name: parameter.name.clone(),
                    repeats: matches!(parameter.schema, Some(RefOr::T(Schema::Array(_)))),
                });
                (method, read.collect())
            });
            documented.collect()
        };
        let paths = api.paths.paths.iter();
        Self(paths.map(|(path, item)| (path.clone(), of_path(item))).collect())
    }

    /// Refuses what the operation does not know, and what is given twice. What is not documented decides for itself.
    pub(crate) fn check(&self, path: &str, method: &Method, text: &str) -> Result<(), Fault> {
        // The router says of some parameters that they may hold slashes.
        let path = path.replace("{*", "{");
        let method = if method == Method::HEAD {
            "GET"
        } else {
            method.as_str()
        };
        let Some((_, known)) = self
            .0
            .get(&path)
            .and_then(|operations| operations.iter().find(|(name, _)| *name == method))
        else {
            return Ok(());
        };
        query::check(query::pairs(text).map(|(name, _)| name), known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_operation_refuses_what_it_does_not_know() {
        let api = crate::openapi::complete(crate::openapi::documented().into_openapi());
        let parameters = Parameters::of(&api);
        let mut count = 0;
        for (path, item) in &api.paths.paths {
            for (method, _) in operations(item) {
                let method: Method = method.parse().unwrap();
                let fault = parameters.check(path, &method, "nonsense=1").unwrap_err();
                assert!(fault.message.contains("`nonsense`"), "{method} {path}: {fault}");
                parameters.check(path, &method, "").unwrap();
                count += 1;
            }
        }
        assert!(count >= 50, "{count}");
    }

    #[test]
    fn what_is_given_twice_is_refused_unless_it_repeats() {
        let api = crate::openapi::complete(crate::openapi::documented().into_openapi());
        let parameters = Parameters::of(&api);
        let check = |path: &str, query: &str| parameters.check(path, &Method::GET, query);
        check("/v1/sandboxes", "label=a%3D1&label=b%3D2&state=running&limit=3").unwrap();
        for (path, query, named) in [
            ("/v1/sandboxes", "limit=1&limit=2", "limit"),
            ("/v1/keys", "project=a&project=b", "project"),
            ("/v1/keys", "project=a&proj%65ct=b", "project"),
            ("/v1/keys", "project=a&Project=b", "Project"),
            ("/v1/usage", "=", "unknown"),
            ("/v1/usage", "x", "`x`"),
        ] {
            let fault = check(path, query).unwrap_err();
            assert!(fault.message.contains(named), "{fault}");
        }
        let created = parameters
            .check("/v1/keys", &Method::POST, "project=x")
            .unwrap_err();
        assert!(created.message.contains("`project`"), "{created}");
    }
}

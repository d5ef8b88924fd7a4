//! Which action each operation is: what its description names as its security, `security(("key" = ["sandbox.use"]))`.
//!
//! What must hold: every operation names exactly one, or says that it is open to everybody; one that names none is served to
//! nobody, and neither is what the description does not know, whatever the router has for it. Who may do what is in `rights.txt`, which a test compares with what is decided.

use std::collections::HashMap;

use atoll_identity::Action;
use axum::http::Method;
use utoipa::openapi::OpenApi;
use utoipa::openapi::path::Operation;

use crate::openapi::operations;

/// Whom an operation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    Everybody,
    WhoMay(Action),
    /// Its description says nothing that is understood.
    Nobody,
}

#[derive(Debug, Default)]
pub(crate) struct Actions(HashMap<String, Vec<(&'static str, For)>>);

impl Actions {
    pub(crate) fn of(api: &OpenApi) -> Self {
        let of_path = |item| operations(item).map(|(method, operation)| (method, named(operation)));
        let paths = api.paths.paths.iter();
        Self(
            paths
                .map(|(path, item)| (path.clone(), of_path(item).collect()))
                .collect(),
        )
    }

    /// The methods of a path, for `Allow`.
    pub(crate) fn methods(&self, path: &str) -> String {
        let of_path = self.0.get(&path.replace("{*", "{")).map(Vec::as_slice);
        let mut names = Vec::new();
        for (name, _) in of_path.unwrap_or_default() {
            names.push(*name);
            if *name == "GET" {
                names.push("HEAD");
            }
        }
        names.join(", ")
    }

    /// `None`: there is no such operation.
    pub(crate) fn find(&self, path: &str, method: &Method) -> Option<For> {
        // The router says of some parameters that they may hold slashes.
        let path = path.replace("{*", "{");
        let method = match *method == Method::HEAD {
            true => "GET",
            false => method.as_str(),
        };
        let of_path = self.0.get(&path)?;
        of_path
            .iter()
            .find(|(name, _)| *name == method)
            .map(|(_, who)| *who)
    }
}

fn named(operation: &Operation) -> For {
    let needs = serde_json::to_value(&operation.security).unwrap_or_default();
    let [need] = needs.as_array().map(Vec::as_slice).unwrap_or_default() else {
        return For::Nobody;
    };
    if need.as_object().is_some_and(serde_json::Map::is_empty) {
        return For::Everybody;
    }
    let names = need[crate::openapi::KEY].as_array().map(Vec::as_slice);
    match names.unwrap_or_default() {
        [name] => name
            .as_str()
            .and_then(Action::named)
            .map_or(For::Nobody, For::WhoMay),
        _ => For::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use atoll_identity::{Caller, Role, Scope};
    use atoll_types::{ProjectId, SandboxId};

    use super::*;

    fn caller(role: Role, scopes: Vec<Scope>) -> Caller {
        Caller::with_rights_for_test(ProjectId::from_entropy([1; 20]), role, scopes)
    }

    /// Every route, every role, every scope: the table in `rights.txt` is what is decided.
    #[test]
    fn what_every_role_and_scope_may_is_as_written_down() {
        let api = crate::openapi::complete(crate::openapi::documented().into_openapi());
        let actions = Actions::of(&api);
        let (own, other) = (SandboxId::from_entropy([1; 20]), SandboxId::from_entropy([2; 20]));
        let scopes = [
            Scope::Sandboxes,
            Scope::Sandbox(own.clone()),
            Scope::Templates,
            Scope::UseSecrets,
            Scope::ManageSecrets,
            Scope::Models,
            Scope::ManageModels,
            Scope::Workflows,
            Scope::Approvals,
            Scope::Ledger,
        ];
        let mut table = String::from(RIGHTS.split_once("\n\n").unwrap().0);
        table.push_str("\n\n");
        let mut lines = Vec::new();
        for (path, item) in &api.paths.paths {
            for (method, _) in operations(item) {
                let method: Method = method.parse().unwrap();
                let action = match actions.find(path, &method).unwrap() {
                    For::Everybody => {
                        lines.push(format!("{path} {method}: everybody"));
                        continue;
                    }
                    For::WhoMay(action) => action,
                    For::Nobody => panic!("{method} {path} names no action"),
                };
                let about = path.starts_with("/v1/sandboxes/{id}").then_some(&own);
                let roles = Role::ALL.into_iter().filter(|role| {
                    let allowed = caller(*role, vec![]).may(action, about).is_ok();
                    // What a role may not, no scope adds.
                    for scope in &scopes {
                        let scoped = caller(*role, vec![scope.clone()]);
                        assert!(
                            allowed || scoped.may(action, about).is_err(),
                            "{method} {path} {role} {scope}"
                        );
                    }
                    allowed
                });
                let roles: Vec<_> = roles.map(Role::name).collect();
                let within = scopes.iter().filter(|scope| {
                    let scoped = caller(Role::Operator, vec![(*scope).clone()]);
                    scoped.may(action, about).is_ok()
                });
                let within: Vec<_> = within
                    .map(|scope| scope.to_string().replace(own.as_str(), "ID"))
                    .collect();
                // A key for one sandbox opens no other.
                let one = caller(Role::Member, vec![Scope::Sandbox(other.clone())]);
                if about.is_some() {
                    assert!(one.may(action, about).is_err(), "{method} {path}");
                }
                // A step of a workflow never answers for people, nor makes a key that could.
                if matches!(action, Action::AnswerApprovals | Action::ManageKeys) {
                    let step = Caller::step_for_test(ProjectId::from_entropy([1; 20]));
                    assert!(step.may(action, about).is_err(), "{method} {path}");
                }
                let mut line = format!("{path} {method}: {action}; {}", roles.join(" "));
                let _ = match within.len() == scopes.len() {
                    true => write!(line, "; any scope"),
                    false => write!(line, "; {}", within.join(" ")),
                };
                lines.push(line.trim_end_matches([';', ' ']).to_owned());
            }
        }
        lines.sort();
        table.push_str(&lines.join("\n"));
        table.push('\n');
        assert!(
            table == RIGHTS,
            "crates/api-native/src/rights.txt is not what is decided, which is:\n{table}"
        );
    }

    const RIGHTS: &str = include_str!("rights.txt");

    /// Whatever method a route is made for, its action is asked for.
    #[test]
    fn a_route_of_any_method_names_its_action() {
        use utoipa::openapi::path::{HttpMethod, OperationBuilder, PathItem};
        use utoipa::openapi::security::SecurityRequirement;
        use utoipa::openapi::{InfoBuilder, OpenApiBuilder, PathsBuilder};
        for (method, name) in [
            (HttpMethod::Get, "GET"),
            (HttpMethod::Put, "PUT"),
            (HttpMethod::Post, "POST"),
            (HttpMethod::Delete, "DELETE"),
            (HttpMethod::Patch, "PATCH"),
        ] {
            let action = SecurityRequirement::new(crate::openapi::KEY, ["sandbox.use"]);
            let operation = OperationBuilder::new().security(action);
            let paths = PathsBuilder::new().path("/v1/new", PathItem::new(method, operation));
            let api = OpenApiBuilder::new()
                .info(InfoBuilder::new().title("").version("").build())
                .paths(paths)
                .build();
            let (actions, method) = (Actions::of(&api), name.parse().unwrap());
            assert_eq!(
                actions.find("/v1/new", &method),
                Some(For::WhoMay(Action::UseSandbox)),
                "{name}"
            );
        }
    }
}

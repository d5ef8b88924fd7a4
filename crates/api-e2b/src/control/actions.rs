//! Which action each route is. What shows a token that opens more than looking is more than looking.

use atoll_identity::Action;
use axum::http::Method;

const ACTIONS: &[(&str, &str, Action)] = &[
    ("POST", "/sandboxes", Action::CreateSandboxes),
    ("GET", "/sandboxes", Action::ListSandboxes),
    ("POST", "/v2/sandboxes", Action::CreateSandboxes),
    ("GET", "/v2/sandboxes", Action::ListSandboxes),
    ("GET", "/sandboxes/metrics", Action::ListSandboxes),
    // With the token of its agent.
    ("GET", "/sandboxes/{id}", Action::UseSandbox),
    ("DELETE", "/sandboxes/{id}", Action::UseSandbox),
    ("POST", "/sandboxes/{id}/connect", Action::UseSandbox),
    ("POST", "/v2/sandboxes/{id}/connect", Action::UseSandbox),
    ("POST", "/sandboxes/{id}/resume", Action::UseSandbox),
    ("POST", "/sandboxes/{id}/pause", Action::UseSandbox),
    ("POST", "/sandboxes/{id}/timeout", Action::UseSandbox),
    ("POST", "/sandboxes/{id}/refreshes", Action::UseSandbox),
    ("PUT", "/sandboxes/{id}/network", Action::SetNetwork),
    ("GET", "/sandboxes/{id}/metrics", Action::ReadSandbox),
    ("GET", "/sandboxes/{id}/logs", Action::ReadSandbox),
    ("GET", "/v2/sandboxes/{id}/logs", Action::ReadSandbox),
    ("POST", "/sandboxes/{id}/snapshots", Action::ManageStorage),
    ("POST", "/sandboxes/{id}/fork", Action::CreateSandboxes),
    ("GET", "/snapshots", Action::ReadStorage),
    ("GET", "/templates", Action::ReadTemplates),
    ("GET", "/v2/templates", Action::ReadTemplates),
    ("GET", "/templates/{id}", Action::ReadTemplates),
    // It may name a snapshot, too; what deleting it takes is known once that is.
    ("DELETE", "/templates/{id}", Action::ReadTemplates),
    ("GET", "/templates/aliases/{alias}", Action::ReadTemplates),
    ("POST", "/v3/templates", Action::ManageTemplates),
    // To make it public, or not, takes more, which is known once it is clear that this is asked for.
    ("PATCH", "/v2/templates/{id}", Action::ManageTemplates),
    (
        "POST",
        "/v2/templates/{id}/builds/{build}",
        Action::ManageTemplates,
    ),
    (
        "GET",
        "/templates/{id}/builds/{build}/status",
        Action::ReadTemplates,
    ),
    ("GET", "/templates/{id}/files/{hash}", Action::ManageTemplates),
    ("POST", "/templates/tags", Action::ManageTemplates),
    ("DELETE", "/templates/tags", Action::ManageTemplates),
    ("GET", "/templates/{id}/tags", Action::ReadTemplates),
    ("POST", "/volumes", Action::ManageStorage),
    ("GET", "/volumes", Action::ReadStorage),
    // With the token of its files.
    ("GET", "/volumes/{id}", Action::ManageStorage),
    ("DELETE", "/volumes/{id}", Action::ManageStorage),
    ("GET", "/teams", Action::ReadProjects),
];

/// `None`: the route names none, and is served to nobody who comes with a key.
pub(crate) fn of(method: &Method, path: &str) -> Option<Action> {
    let method = match *method == Method::HEAD {
        true => "GET",
        false => method.as_str(),
    };
    let named = ACTIONS.iter().find(|(m, p, _)| (*m, *p) == (method, path));
    named.map(|(_, _, action)| *action)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those that open with something else than a key, or are refused to everybody.
    const WITHOUT_KEY: [(&str, &str); 1] = [("PUT", "/templates/{id}/files/{hash}")];

    #[test]
    fn every_route_that_takes_a_key_names_its_action_once() {
        let source = include_str!("mod.rs");
        let routes = source.split_once("fn routes()").unwrap().1;
        let mut seen = Vec::new();
        for route in routes.split(".route(").skip(1) {
            let path = route.split('"').nth(1).unwrap();
            if path == "/health" || path.starts_with("/volumecontent") || path.starts_with("/secrets") {
                continue;
            }
            let handlers = route.split_once(',').unwrap().1;
            for method in ["get", "post", "put", "patch", "delete"] {
                let here =
                    handlers.contains(&format!(" {method}(")) || handlers.contains(&format!(".{method}("));
                let method = method.to_uppercase();
                if here && !WITHOUT_KEY.contains(&(&method, path)) {
                    assert!(of(&method.parse().unwrap(), path).is_some(), "{method} {path}");
                    seen.push((method, path));
                }
            }
        }
        assert_eq!(seen.len(), ACTIONS.len(), "{seen:?}");
    }
}

//! Every route of every API, with what opens it.

use atoll_proof::{Sandbox, Server, Value, json};

use crate::raw::Head;

/// A route, and how each kind of caller asks for it.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    /// What it belongs to, in the table.
    pub(crate) class: &'static str,
    pub(crate) head: Head,
    /// The header that opens it, with a wrong and the right value.
    pub(crate) opens: Option<(&'static str, String, String)>,
}

const E2B: [(&str, &str); 42] = [
    ("POST", "/sandboxes"),
    ("GET", "/sandboxes"),
    ("POST", "/v2/sandboxes"),
    ("GET", "/v2/sandboxes"),
    ("GET", "/sandboxes/metrics"),
    ("GET", "/sandboxes/ID"),
    ("DELETE", "/sandboxes/ID"),
    ("POST", "/sandboxes/ID/connect"),
    ("POST", "/v2/sandboxes/ID/connect"),
    ("POST", "/sandboxes/ID/resume"),
    ("POST", "/sandboxes/ID/pause"),
    ("POST", "/sandboxes/ID/timeout"),
    ("POST", "/sandboxes/ID/refreshes"),
    ("PUT", "/sandboxes/ID/network"),
    ("GET", "/sandboxes/ID/metrics"),
    ("GET", "/sandboxes/ID/logs"),
    ("GET", "/v2/sandboxes/ID/logs"),
    ("POST", "/sandboxes/ID/snapshots"),
    ("POST", "/sandboxes/ID/fork"),
    ("GET", "/snapshots"),
    ("GET", "/templates"),
    ("GET", "/v2/templates"),
    ("GET", "/templates/nothing"),
    ("DELETE", "/templates/nothing"),
    ("GET", "/templates/aliases/nothing"),
    ("POST", "/v3/templates"),
    ("PATCH", "/v2/templates/nothing"),
    ("POST", "/v2/templates/nothing/builds/nothing"),
    ("GET", "/templates/nothing/builds/nothing/status"),
    ("GET", "/templates/nothing/files/abc"),
    ("PUT", "/templates/nothing/files/abc"),
    ("POST", "/templates/tags"),
    ("DELETE", "/templates/tags"),
    ("GET", "/templates/nothing/tags"),
    ("POST", "/volumes"),
    ("GET", "/volumes"),
    ("GET", "/volumes/nothing"),
    ("DELETE", "/volumes/nothing"),
    ("GET", "/teams"),
    ("PATCH", "/volumecontent/ID/path"),
    ("POST", "/volumecontent/ID/dir"),
    ("PUT", "/volumecontent/ID/file"),
];

const ENVD: [&str; 17] = [
    "/process.Process/Start",
    "/process.Process/Connect",
    "/process.Process/List",
    "/process.Process/Update",
    "/process.Process/SendInput",
    "/process.Process/StreamInput",
    "/process.Process/SendSignal",
    "/process.Process/CloseStdin",
    "/filesystem.Filesystem/Stat",
    "/filesystem.Filesystem/MakeDir",
    "/filesystem.Filesystem/Move",
    "/filesystem.Filesystem/ListDir",
    "/filesystem.Filesystem/Remove",
    "/filesystem.Filesystem/WatchDir",
    "/filesystem.Filesystem/CreateWatcher",
    "/filesystem.Filesystem/GetWatcherEvents",
    "/files?path=/tmp/attack",
];

const MODELS: [&str; 9] = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v3/ai/language-model",
    "/v3/ai/embedding-model",
    "/v4/ai/language-model",
    "/v4/ai/embedding-model",
];

fn head(method: &str, path: &str, more: &[(&str, &str)]) -> Head {
    let mut headers = vec![("host".to_owned(), "localhost".to_owned())];
    for (name, value) in more {
        headers.retain(|(known, _)| known != name);
        headers.push(((*name).to_owned(), (*value).to_owned()));
    }
    Head {
        method: method.to_owned(),
        path: path.to_owned(),
        headers,
    }
}

const JSON: (&str, &str) = ("content-type", "application/json");
/// Has the form of an id, and is nobody's.
const NOBODY: &str = "zzzzzzzzzzzzzzzzzzzz";

/// All of them. `envd` is a sandbox that was made by E2B's wire, with its token; `own` one that was not.
pub(crate) async fn all(server: &Server, envd: (&str, &str), own: &Sandbox) -> Vec<Route> {
    let key = server.client().key().unwrap().to_owned();
    let bearer = |wrong: &str| {
        Some((
            "authorization",
            format!("Bearer {wrong}"),
            format!("Bearer {key}"),
        ))
    };
    let mut routes = Vec::new();
    let document: Value = server.client().get("/openapi.json").await.ok();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let class = match path.as_str() {
                path if path.starts_with("/v1/gateway") => "gateway",
                path if path.starts_with("/v1/") => "native",
                path if path.starts_with("/metrics") => "metrics",
                _ => "open",
            };
            let filled: Vec<String> = path
                .split('/')
                .map(|part| match part {
                    "{id}" if path.starts_with("/v1/keys") || path.starts_with("/v1/gateway") => {
                        format!("key_{NOBODY}")
                    }
                    "{id}" => format!("sbx_{NOBODY}"),
                    "{command}" => format!("cmd_{NOBODY}"),
                    "{approval}" => format!("apr_{NOBODY}"),
                    "{port}" => "8080".into(),
                    part if part.starts_with('{') => "nothing".into(),
                    part => part.into(),
                })
                .collect();
            let content = operation["requestBody"]["content"].as_object();
            let kind = content.and_then(|kinds| kinds.keys().next()).cloned();
            let kind = kind.unwrap_or_else(|| "application/json".into());
            routes.push(Route {
                class,
                head: head(
                    &method.to_uppercase(),
                    &filled.join("/"),
                    &[("content-type", &kind)],
                ),
                opens: (class != "open").then(|| bearer("atl_wrong")).flatten(),
            });
        }
    }
    for (method, path) in E2B {
        routes.push(Route {
            class: "e2b",
            head: head(method, &path.replace("ID", NOBODY), &[JSON]),
            opens: Some(("x-api-key", "e2b_00".into(), key.clone())),
        });
    }
    for path in MODELS {
        routes.push(Route {
            class: "models",
            head: head("POST", path, &[JSON]),
            opens: bearer("atm_wrong"),
        });
    }
    let (id, token) = envd;
    for path in ENVD {
        routes.push(Route {
            class: "envd",
            head: head("POST", path, &[JSON, ("host", &format!("49983-{id}.localhost"))]),
            opens: Some(("x-access-token", "wrong".into(), token.to_owned())),
        });
    }
    let port = server.client().get(&own.path("/ports/8080")).await.ok();
    let bare = own.id.trim_start_matches("sbx_");
    routes.push(Route {
        class: "port",
        head: head("POST", "/", &[("host", &format!("8080-{bare}.localhost"))]),
        opens: Some((
            "x-atoll-token",
            "wrong".into(),
            port["token"].as_str().unwrap_or_default().to_owned(),
        )),
    });
    routes
}

/// A sandbox of E2B's wire: its id and what opens it.
pub(crate) async fn e2b_sandbox(server: &Server) -> (String, String) {
    let request = server
        .client()
        .request(reqwest::Method::POST, "/sandboxes")
        .header("x-api-key", server.client().key().unwrap())
        .json(&json!({"templateID": "base", "timeout": 300, "secure": true}));
    let created = server.client().send(request).await.expect(201).json();
    let text = |name: &str| created[name].as_str().unwrap_or_default().to_owned();
    (text("sandboxID"), text("envdAccessToken"))
}

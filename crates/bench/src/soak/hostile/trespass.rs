//! Attacks on who one is: every kind of key and token where it does not belong, and ids and names of other projects.

use reqwest::Method;
use serde_json::{Value, json};

use super::Hand;
use crate::soak::honest::{ENVD, framed, keyed};
use crate::soak::random::Random;

/// A token for ports opens ports; one of models opens models. Everything else about a sandbox is closed to both.
pub(super) async fn tokens(hand: &Hand, random: &mut Random) -> u64 {
    let caller = &hand.caller;
    let Some(id) = hand.sandbox(&json!({})).await else {
        return 1;
    };
    let bare = id.trim_start_matches("sbx_").to_owned();
    let access = caller.get(&format!("/v1/sandboxes/{id}/ports/8000"));
    let access = caller.attempt("tokens", access).await;
    let port_token = access
        .map(|access| access.json()["token"].clone())
        .unwrap_or_default();
    let port_token = port_token.as_str().unwrap_or_default().to_owned();
    // As somebody who was sent a link to a preview.
    let mut moves = 3;
    let agent = |method: Method, path: &str, token: &str| {
        caller
            .bare(method, path)
            .header("e2b-sandbox-id", &bare)
            .header("e2b-sandbox-port", ENVD)
            .header("x-access-token", token)
            .basic_auth("root", Some(""))
    };
    let start = json!({"process": {"cmd": "/bin/id", "args": [], "envs": {}}});
    let shells = [
        ("a token for ports", port_token.clone()),
        ("a key for models", caller.project.model_key.clone()),
        ("nothing", String::new()),
    ];
    for (what, token) in shells {
        let run = agent(Method::POST, "/process.Process/Start", &token)
            .header("content-type", "application/connect+json")
            .body(framed(&start));
        let file = agent(Method::GET, "/files", &token).query(&[("path", "/etc/shadow")]);
        for (route, request) in [("a shell", run), ("a file", file)] {
            moves += 1;
            if let Some(answer) = caller.attempt("tokens", request).await
                && answer.is_success()
                && answer
                    .body
                    .windows(4)
                    .any(|word| word == b"root" || word == b"cm9v" || word == b"dWlk")
            {
                hand.got(
                    "a token opened what it is not for",
                    format!("{what} opened {route}"),
                );
            }
        }
    }
    // Keys for models, and tokens of ports, at the API.
    for (what, secret) in [
        ("a key for models", caller.project.model_key.clone()),
        ("a token for ports", port_token),
    ] {
        for path in [
            "/v1/sandboxes",
            "/v1/keys",
            "/v1/gateway/budgets",
            "/v2/sandboxes",
            "/v1/secrets",
        ] {
            let request = caller
                .bare(Method::GET, path)
                .bearer_auth(&secret)
                .header("x-api-key", &secret);
            moves += 1;
            if let Some(answer) = caller.attempt("tokens", request).await
                && answer.is_success()
            {
                hand.got(
                    "a token opened what it is not for",
                    format!("{what} opened GET {path}"),
                );
            }
        }
    }
    // Somebody else's port, with a token of one's own and with theirs for another purpose.
    if let (Some(other), Some(token)) = (
        hand.world().board.pick("sandbox", random),
        hand.world().board.pick("port token", random),
    ) {
        let other = other.trim_start_matches("sbx_").to_owned();
        let request = caller
            .bare(Method::POST, "/process.Process/Start")
            .header("e2b-sandbox-id", &other)
            .header("e2b-sandbox-port", ENVD)
            .header("x-access-token", token)
            .basic_auth("root", Some(""))
            .header("content-type", "application/connect+json")
            .body(framed(&start));
        moves += 1;
        if let Some(answer) = caller.attempt("tokens", request).await
            && answer.is_success()
            && answer.text().contains("stdout")
        {
            hand.got(
                "a token opened what it is not for",
                "somebody else's preview link was a shell",
            );
        }
    }
    hand.kill(&id).await;
    moves
}

/// Ids and names of others, in every place that takes one.
pub(super) async fn ids(hand: &Hand, random: &mut Random) -> u64 {
    let (caller, board) = (&hand.caller, &hand.world().board);
    let mut tries: Vec<(Method, String, Option<Value>)> = Vec::new();
    let none = json!({});
    if let Some(id) = board.pick("sandbox", random) {
        let path = format!("/v1/sandboxes/{id}");
        for rest in [
            "",
            "/files?path=/",
            "/commands",
            "/ports",
            "/ports/8000",
            "/network",
            "/facts",
            "/metrics",
        ] {
            tries.push((Method::GET, format!("{path}{rest}"), None));
        }
        tries.push((
            Method::GET,
            format!("{path}/files/content?path=/home/user/kept"),
            None,
        ));
        for rest in [
            "/exec",
            "/pause",
            "/stop",
            "/fork",
            "/snapshots",
            "/artifacts",
            "/extend",
        ] {
            let body = match rest {
                "/exec" => json!({"cmd": "env"}),
                "/artifacts" => json!({"name": "x", "path": "/home/user/kept"}),
                "/extend" => json!({"timeout_ms": 1}),
                _ => none.clone(),
            };
            tries.push((Method::POST, format!("{path}{rest}"), Some(body)));
        }
        tries.push((
            Method::PUT,
            format!("{path}/network"),
            Some(json!({"policy": {"preset": "all-public"}})),
        ));
        tries.push((Method::DELETE, path, None));
        tries.push((
            Method::GET,
            format!("/sandboxes/{}", id.trim_start_matches("sbx_")),
            None,
        ));
        tries.push((
            Method::DELETE,
            format!("/sandboxes/{}", id.trim_start_matches("sbx_")),
            None,
        ));
        tries.push((Method::GET, format!("/v1/facts?sandbox={id}"), None));
    }
    for (kind, path) in [
        ("snapshot", "/v1/snapshots"),
        ("volume", "/v1/volumes"),
        ("artifact", "/v1/artifacts"),
        ("secret", "/v1/secrets"),
        ("model call", "/v1/gateway/calls"),
        ("approval", "/v1/approvals"),
    ] {
        if let Some(id) = board.pick(kind, random) {
            tries.push((Method::GET, format!("{path}/{id}"), None));
            tries.push((Method::DELETE, format!("{path}/{id}"), None));
            match kind {
                "snapshot" => {
                    tries.push((Method::GET, format!("{path}/{id}/export"), None));
                    tries.push((
                        Method::POST,
                        "/v1/sandboxes".to_owned(),
                        Some(json!({"template": id})),
                    ));
                }
                "volume" => {
                    let mount = json!({"volumes": [{"volume": id, "path": "/data"}]});
                    tries.push((Method::POST, "/v1/sandboxes".to_owned(), Some(mount)));
                    tries.push((Method::GET, format!("{path}/{id}/content"), None));
                }
                "artifact" => tries.push((Method::GET, format!("{path}/{id}/content"), None)),
                "secret" => {
                    let uses = json!({"secrets": [{"secret": id}]});
                    tries.push((Method::POST, "/v1/sandboxes".to_owned(), Some(uses)));
                }
                "approval" => {
                    let digest = board.pick("digest", random).unwrap_or_default();
                    let yes = json!({"digest": digest, "by": "nobody"});
                    tries.push((Method::POST, format!("{path}/{id}/grant"), Some(yes)));
                }
                _ => {}
            }
        }
    }
    if let (Some(id), Some(owner)) = (
        board.pick("workflow", random),
        hand.world().project(usize::from(random.chance(2))),
    ) {
        let namespace = &owner.namespace;
        tries.push((Method::GET, format!("/v1/workflows?namespace={namespace}"), None));
        tries.push((
            Method::GET,
            format!("/v1/workflows/{id}?namespace={namespace}"),
            None,
        ));
        tries.push((
            Method::GET,
            format!("/v1/workflows/{id}/history?namespace={namespace}"),
            None,
        ));
        for word in ["cancel", "terminate"] {
            let path = format!("/v1/workflows/{id}/{word}?namespace={namespace}");
            tries.push((Method::POST, path, Some(none.clone())));
        }
        for path in ["/v1/keys?project=soak-one", "/v1/keys?project=default"] {
            tries.push((Method::GET, path.to_owned(), None));
        }
        tries.push((Method::POST, "/v1/gc".to_owned(), Some(none.clone())));
    }
    let mut moves = 0;
    for (method, path, body) in tries {
        let e2b = path.starts_with("/sandboxes/");
        let mut request = match e2b {
            true => keyed(caller, method.clone(), &path),
            false => caller.request(method.clone(), &path),
        };
        if let Some(body) = &body {
            request = request.json(body);
        }
        moves += 1;
        let Some(answer) = caller.attempt("ids", request).await else {
            continue;
        };
        // Facts outlive what they are about: there are none of what one does not have, whatever it is called.
        let nothing = path.contains("/facts") && answer.json()["items"] == json!([]);
        if answer.is_success() && !nothing {
            let words = format!(
                "{method} {path} was answered {}: {}",
                answer.status,
                answer.text()
            );
            hand.got("somebody else's was reached", words);
            if let Some(id) = answer.json()["id"].as_str().filter(|id| id.starts_with("sbx_")) {
                hand.kill(id).await;
            }
        }
    }
    moves
}

//! Attacks on what requests say: parameters that do not exist, paths that lead elsewhere, JSON that is deep or broken.

use reqwest::Method;
use serde_json::json;

use super::Hand;
use crate::soak::random::Random;

/// Routes of the native API that answer a project without anything being there.
const READ: [&str; 16] = [
    "/v1/sandboxes",
    "/v1/snapshots",
    "/v1/volumes",
    "/v1/artifacts",
    "/v1/secrets",
    "/v1/keys",
    "/v1/templates",
    "/v1/info",
    "/v1/usage",
    "/v1/facts",
    "/v1/approvals",
    "/v1/gateway/budgets",
    "/v1/gateway/calls",
    "/v1/gateway/spend",
    "/v1/gateway/providers",
    "/v1/gateway/keys",
];

/// What is unknown is refused, never ignored: else a request means something other than it says.
pub(super) async fn queries(hand: &Hand, random: &mut Random) -> u64 {
    let caller = &hand.caller;
    let mut moves = 0;
    for _ in 0..12 {
        let path = random.one(&READ).copied().unwrap_or("/v1/info");
        let name = ["projekt", "as", "owner", "sudo", "namespace2"];
        let name = random.one(&name).copied().unwrap_or("x");
        let request = caller.get(path).query(&[(name, "default")]);
        moves += 1;
        if let Some(answer) = caller.attempt("queries", request).await
            && answer.is_success()
        {
            hand.got("a parameter was ignored", format!("GET {path}?{name}=default"));
        }
    }
    // The parameter exists on a route beside it.
    let request = caller
        .post("/v1/keys", &json!({"name": "stolen"}))
        .query(&[("project", "default")]);
    if let Some(answer) = caller.attempt("queries", request).await
        && answer.is_success()
    {
        hand.got(
            "a parameter was ignored",
            "POST /v1/keys?project=default made a key",
        );
        if let Some(id) = answer.json()["key"]["id"].as_str() {
            let _revoked = caller
                .attempt("queries", caller.delete(&format!("/v1/keys/{id}")))
                .await;
        }
    }
    moves + 1
}

/// Files of the host, or of nobody, by names that lead there.
pub(super) async fn paths(hand: &Hand, random: &mut Random) -> u64 {
    let Some(id) = hand.sandbox(&json!({})).await else {
        return 1;
    };
    let caller = &hand.caller;
    let data = hand.world().server.home.data();
    let host = data.join("admin.key").display().to_string();
    let trap = format!(
        "cd /home/user; ln -sfn / root; ln -sfn {host} key; ln -sfn loop loop; mkdir -p a; ln -sfn ../../../../../../proc/1/root/etc esc; \
         mkfifo pipe 2>/dev/null; head -c 4096 /dev/zero | tr '\\0' / > long"
    );
    hand.exec(&id, &trap, 10_000).await;
    let ups = "../".repeat(12);
    let names = [
        format!("{ups}{}", &host[1..]),
        host.clone(),
        "/home/user/key".to_owned(),
        format!("/home/user/root{host}"),
        "/home/user/loop".to_owned(),
        "/home/user/esc/shadow".to_owned(),
        "/proc/1/environ".to_owned(),
        "/proc/self/mem".to_owned(),
        "/dev/zero".to_owned(),
        "a/".repeat(3000),
        "x".repeat(5000),
        String::new(),
        "..".to_owned(),
        "/home/user/\u{202e}gnp.exe".to_owned(),
    ];
    let admin = hand.world().server.admin_key().unwrap_or_default();
    let mut moves = 0;
    for name in &names {
        let at = [("path", name.as_str())];
        let path = format!("/v1/sandboxes/{id}");
        let request = match random.below(5) {
            0 => caller.get(&format!("{path}/files/stat")).query(&at),
            1 => caller.get(&format!("{path}/files")).query(&at),
            2 => caller.get(&format!("{path}/files/tar")).query(&at),
            3 => caller.post(
                &format!("{path}/artifacts"),
                &json!({"name": random.word(), "path": name, "retention_ms": 60_000}),
            ),
            _ => caller
                .get(&format!("{path}/files/content"))
                .query(&at)
                .header("range", "bytes=0-4095"),
        };
        // What has no end is left after a second.
        let asked = caller.attempt("paths", request.timeout(std::time::Duration::from_secs(2)));
        moves += 1;
        if let Some(answer) = asked.await
            && !admin.is_empty()
            && answer.text().contains(&admin)
        {
            hand.got("a file of the host was read", name.clone());
        }
    }
    let kept = caller.attempt("paths", caller.get("/v1/artifacts")).await;
    let kept = kept.map(|kept| kept.json()).unwrap_or_default();
    for artifact in kept["items"].as_array().into_iter().flatten() {
        let id = artifact["id"].as_str().unwrap_or_default();
        let _gone = caller
            .attempt("paths", caller.delete(&format!("/v1/artifacts/{id}")))
            .await;
    }
    hand.kill(&id).await;
    moves
}

/// JSON that is nested, huge in number or no JSON.
pub(super) async fn depth(hand: &Hand, random: &mut Random) -> u64 {
    let deep = 100_000;
    let bodies = [
        "[".repeat(deep),
        format!("{{\"messages\":{}{}}}", "[".repeat(deep), "]".repeat(deep)),
        "{\"a\":".repeat(deep),
        format!(
            "{{\"model\":\"scripted-echo-2\",\"max_tokens\":1e999,\"messages\":[{}]}}",
            "{},".repeat(50_000)
        ),
        format!(
            "{{{}}}",
            (0..20_000)
                .map(|i| format!("\"k{i}\":{i}"))
                .collect::<Vec<_>>()
                .join(",")
        ),
        "\"\\ud800\"".to_owned(),
        "{\"name\":\"\\u0000\",\"template\":\"\\u0000\"}".to_owned(),
        "{\"timeout_ms\":18446744073709551616}".to_owned(),
        String::from_utf8_lossy(&random.bytes(4096)).into_owned(),
    ];
    let routes = [
        "/v1/sandboxes",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v4/ai/language-model",
        "/v1/run",
        "/sandboxes",
        "/v3/templates",
        "/v1/gateway/keys",
        "/v1/volumes",
    ];
    let caller = &hand.caller;
    let mut moves = 0;
    for body in bodies {
        let route = random.one(&routes).copied().unwrap_or("/v1/sandboxes");
        let request = caller
            .request(Method::POST, route)
            .header("content-type", "application/json")
            .header("ai-language-model-id", caller.project.echo())
            .body(body);
        moves += 1;
        if let Some(answer) = caller.attempt("depth", request).await {
            if answer.status >= 500 && !hand.world().is_full() {
                hand.got(
                    "nonsense was answered with 5xx",
                    format!("{route}: {} {}", answer.status, answer.text()),
                );
            }
            // What was nonsense to us may be a sandbox to the server.
            if let Some(id) = answer.json()["id"].as_str().filter(|id| id.starts_with("sbx_")) {
                hand.kill(id).await;
            }
        }
    }
    moves
}

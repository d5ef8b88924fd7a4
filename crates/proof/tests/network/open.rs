//! What is open when something changes: requests, WebSockets and streams on hosts that Atoll reads, and the door to the
//! models.

use std::time::Duration;

use atoll_proof::{Sandbox, Server, Value, World, host, json, wait};

use crate::{allow, get, sandbox, sandbox_with, set_network, set_secret, until_logged};

in_a_world!(
    a_narrower_policy_cuts_requests_that_are_open,
    requests_end_with_their_secret,
    requests_end_with_the_sandbox,
    only_a_rule_that_names_it_opens_the_way_to_the_models,
    connections_to_the_models_end_with_the_sandbox,
    a_sandbox_with_an_open_connection_is_not_idle,
);

const VALUE: &str = "sk-live-4f9a6d2e8b7c1a5f3e0d9c8b7a6f5e4d";

/// A WebSocket that says a word again and again, and what came of it.
fn websocket(url: &str) -> String {
    let (tls, host) = match url.strip_prefix("wss://") {
        Some(host) => (true, host),
        None => (false, url.strip_prefix("ws://").unwrap()),
    };
    let (port, wrap) = match tls {
        true => (
            443,
            "s = ssl.create_default_context().wrap_socket(s, server_hostname=HOST)",
        ),
        false => (80, "pass"),
    };
    format!(
        "python3 -u - <<'END'
import socket, ssl, base64, os, time
HOST = '{host}'
s = socket.create_connection((HOST, {port}), 20)
{wrap}
s.sendall(b'GET /socket HTTP/1.1\\r\\nHost: ' + HOST.encode() + b'\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: ' + base64.b64encode(os.urandom(16)) + b'\\r\\n\\r\\n')
f = s.makefile('rb')
print(f.readline().decode().strip())
while f.readline().strip(): pass
try:
    while True:
        mask = os.urandom(4)
        s.sendall(bytes([0x81, 0x84]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(b'word')))
        head = f.read(2)
        if len(head) < 2: break
        print('heard', f.read(head[1]).decode(), flush=True)
        time.sleep(0.05)
except OSError: pass
print('cut', flush=True)
time.sleep(600)
END"
    )
}

fn stream(url: &str) -> String {
    format!("curl -sSN {url}; echo cut; sleep 600")
}

/// Starts one of each: over TLS and in the clear, a stream and a WebSocket. Gives the commands once all have begun.
async fn all_open(sandbox: &Sandbox) -> Vec<String> {
    let mut commands = Vec::new();
    for (line, begun) in [
        (stream("https://api.example.org/drip/tls"), "tick"),
        (stream("http://api.example.org/drip/plain"), "tick"),
        (websocket("wss://api.example.org"), "heard word"),
        (websocket("ws://api.example.org"), "heard word"),
    ] {
        let command = sandbox.background(&line).await;
        sandbox.until_logged(&command, begun).await;
        commands.push(command);
    }
    commands
}

/// The world saw so many of them break.
async fn until_broken(world: &World, count: usize) {
    wait::until_sync("the servers lost their clients", Duration::from_secs(20), || {
        (world.saw("broken").len() >= count).then_some(())
    })
    .await;
}

async fn a_narrower_policy_cuts_requests_that_are_open(server: &mut Server, world: &World) {
    let rule = |paths: &[&str]| json!({"rules": [{"name": "reads", "action": "allow", "to": "api.example.org", "paths": paths}]});
    let sandbox = sandbox(server, world, rule(&["/**"])).await;
    let commands = all_open(&sandbox).await;
    // A change that leaves them allowed leaves them alone.
    set_network(&sandbox, &json!({"policy": rule(&["/drip/**", "/socket"])}))
        .await
        .ok();
    assert!(world.saw("broken").is_empty());
    // The host stays allowed, what they are for does not.
    set_network(&sandbox, &json!({"policy": rule(&["/other"])}))
        .await
        .ok();
    for command in &commands {
        sandbox.until_logged(command, "cut").await;
    }
    until_broken(world, 4).await;
    let fact = until_logged(&sandbox, "why it was cut", |fact| {
        fact["kind"] == "network.denied"
            && fact["data"]["reason"]
                .as_str()
                .is_some_and(|reason| reason.starts_with("cut while it was open"))
    })
    .await;
    assert_eq!(fact["data"]["host"], "api.example.org");
}

async fn requests_end_with_their_secret(server: &mut Server, world: &World) {
    let secret = |more: Value| {
        let mut body = json!({"value": VALUE, "hosts": ["api.example.org"], "inject": "bearer"});
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    let request = json!({"network": allow(&["api.example.org"]), "secrets": [{"secret": "key"}]});
    set_secret(server, "key", &secret(json!({}))).await;
    let sandbox = sandbox_with(server, world, request).await;
    let tls = stream("https://api.example.org/drip/secret");
    let open = async || {
        let command = sandbox.background(&tls).await;
        sandbox.until_logged(&command, "tick").await;
        command
    };
    // Bound to something else, with another value, given to others, and gone.
    let command = open().await;
    set_secret(server, "key", &secret(json!({"paths": ["/v1/**"]}))).await;
    sandbox.until_logged(&command, "cut").await;
    until_broken(world, 1).await;
    set_secret(server, "key", &secret(json!({}))).await;
    let command = open().await;
    let rotated = json!({"value": format!("{VALUE}-next")});
    server
        .client()
        .post("/v1/secrets/key/rotate", &rotated)
        .await
        .ok();
    sandbox.until_logged(&command, "cut").await;
    until_broken(world, 2).await;
    let command = open().await;
    set_network(
        &sandbox,
        &json!({"policy": allow(&["api.example.org"]), "secrets": []}),
    )
    .await
    .ok();
    sandbox.until_logged(&command, "cut").await;
    until_broken(world, 3).await;
    set_network(
        &sandbox,
        &json!({"policy": allow(&["api.example.org"]), "secrets": [{"secret": "key"}]}),
    )
    .await
    .ok();
    let command = open().await;
    server.client().delete("/v1/secrets/key").await.expect(204);
    sandbox.until_logged(&command, "cut").await;
    until_broken(world, 4).await;
    until_logged(&sandbox, "why it was cut", |fact| {
        fact["kind"] == "network.denied" && fact["data"]["rule"] == "secret: key"
    })
    .await;
    // And at a time that was known before.
    let soon = sandbox
        .sh("date -u -d '+8 seconds' +%Y-%m-%dT%H:%M:%SZ")
        .await
        .ok();
    set_secret(server, "key", &secret(json!({"expires_at": soon.trim()}))).await;
    set_network(
        &sandbox,
        &json!({"policy": allow(&["api.example.org"]), "secrets": [{"secret": "key"}]}),
    )
    .await
    .ok();
    let command = open().await;
    sandbox.until_logged(&command, "cut").await;
    until_broken(world, 5).await;
}

async fn requests_end_with_the_sandbox(server: &mut Server, world: &World) {
    let rules = json!({"rules": [{"action": "allow", "to": "api.example.org", "paths": ["/**"]}]});
    let sandbox = sandbox(server, world, rules).await;
    all_open(&sandbox).await;
    sandbox.ask("/pause", json!({})).await.ok();
    until_broken(world, 4).await;
    sandbox.ask("/resume", json!({})).await.ok();
    all_open(&sandbox).await;
    sandbox.kill().await;
    until_broken(world, 8).await;
}

const MODELS: &str = "http://models.atoll.internal/v1/models";

async fn only_a_rule_that_names_it_opens_the_way_to_the_models(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, json!({})).await;
    let code = "curl -s -m 10 -o /dev/null -w '%{http_code}' ";
    for policy in [
        json!({"preset": "all-public"}),
        json!({"preset": "all-public", "rules": [{"action": "allow", "to": "*", "ports": ["1-65535"]}]}),
        json!({"rules": [{"action": "allow", "to": "*.internal"}, {"action": "allow", "to": "*.atoll.internal", "ports": [80]}]}),
        json!({"rules": [{"action": "allow", "to": "0.0.0.0/0"}, {"action": "allow", "to": "192.0.2.80"}]}),
    ] {
        set_network(&sandbox, &json!({ "policy": policy })).await.ok();
        // By its name, and by an address that stands for nothing, or for other names.
        let by_name = sandbox.sh(&format!("{code}{MODELS}")).await;
        assert_ne!(by_name.code, Some(0), "{policy}: {by_name:?}");
        for address in ["198.18.7.7", "192.0.2.80"] {
            let line = format!("{code}--resolve models.atoll.internal:80:{address} {MODELS}");
            let by_address = sandbox.sh(&line).await;
            assert!(
                by_address.code != Some(0) || by_address.stdout == "403",
                "{policy} {address}: {by_address:?}"
            );
        }
        let inside = sandbox.sh("env").await.ok();
        assert!(!inside.contains("OPENAI_BASE_URL"), "{inside}");
    }
    // Sandboxes of E2B's wire reach the public internet, and not this.
    let wanted = json!({"templateID": "base"});
    let made = server.client().post("/v2/sandboxes", &wanted).await;
    let made = made.expect(201).json();
    let e2b = Sandbox {
        client: server.client().clone(),
        id: format!("sbx_{}", made["sandboxID"].as_str().unwrap()),
    };
    assert_ne!(e2b.sh(&format!("{code}{MODELS}")).await.code, Some(0));
    // Whoever names it gets there, and is asked for a token.
    let named =
        json!({"preset": "all-public", "rules": [{"action": "allow", "to": "models.atoll.internal"}]});
    set_network(&sandbox, &json!({ "policy": named })).await.ok();
    assert_eq!(sandbox.sh(&format!("{code}{MODELS}")).await.ok(), "401");
    assert_eq!(get(&sandbox, "https://api.example.org/").await.0, 200);
}

async fn connections_to_the_models_end_with_the_sandbox(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["models.atoll.internal"])).await;
    let before = host::open_files(server.pid());
    // Requests of which half has come, with the sandbox's own token.
    let crowd = "python3 -u - <<'END'
import os, socket, time
held = []
for _ in range(40):
    s = socket.create_connection(('models.atoll.internal', 80), 10)
    s.sendall(b'POST /v1/chat/completions HTTP/1.1\\r\\nHost: models.atoll.internal\\r\\nAuthorization: Bearer ' + os.environ['OPENAI_API_KEY'].encode() + b'\\r\\nContent-Type: application/json\\r\\nContent-Length: 2000\\r\\n\\r\\n' + b'x' * 1000)
    held.append(s)
print('open', flush=True)
time.sleep(600)
END";
    let command = sandbox.background(crowd).await;
    sandbox.until_logged(&command, "open").await;
    assert!(host::open_files(server.pid()) > before);
    sandbox.kill().await;
    wait::until_sync("nothing of it is held", Duration::from_secs(20), || {
        (host::open_files(server.pid()) <= before).then_some(())
    })
    .await;
}

/// A program that nobody waits for and that takes no CPU time, with a connection on which nothing is said.
async fn a_sandbox_with_an_open_connection_is_not_idle(server: &mut Server, _: &World) {
    let request = json!({
        "idle": {"after_ms": 1500},
        "network": {"rules": [{"action": "allow", "to": "203.0.113.0/24"}]},
    });
    let left_behind = |line: &str| {
        format!(
            "mkfifo /tmp/end; setsid bash -c '{line}; echo begun >/tmp/begun; read -r end </tmp/end' \
             </dev/null >/dev/null 2>&1 & until [ -s /tmp/begun ]; do sleep 0.05; done"
        )
    };
    let connected = server.sandbox_with(&request).await;
    let connect = "exec 3<>/dev/tcp/203.0.113.10/2222; read -r line <&3";
    connected.sh(&left_behind(connect)).await.ok();
    // Each lasts for an idle time at least.
    for _ in 0..2 {
        let alone = server.sandbox_with(&request).await;
        alone.sh(&left_behind("true")).await.ok();
        assert_eq!(alone.until_state("deleted").await["end"]["reason"], "idle");
    }
    assert_eq!(connected.state().await, "running");
    connected.sh("echo >/tmp/end").await.ok();
    assert_eq!(connected.until_state("deleted").await["end"]["reason"], "idle");
}

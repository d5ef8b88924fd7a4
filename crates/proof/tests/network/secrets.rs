//! Secrets that work and are nowhere inside.

use atoll_proof::{Sandbox, Server, Tier, World, json};

use crate::{allow, sandbox_with, set_network, set_secret, until_logged};

in_a_world!(
    a_secret_is_used_and_never_inside,
    a_placeholder_is_replaced_where_it_may_go,
    a_new_value_applies_at_once,
    an_expired_or_deleted_secret_is_not_used,
    a_binding_is_kept_to,
    names_and_values_are_checked,
    copies_take_the_rights_that_their_origin_took,
    echoes_are_found_wherever_they_are,
);

const VALUE: &str = "sk-live-4f9a6d2e8b7c1a5f3e0d9c8b7a6f5e4d";
/// In a file inside: what a search of a snapshot must find.
const CONTROL: &str = "what-is-in-the-files-is-in-the-snapshot-4711";
const OTHER: &str = "sk-live-0000000000000000000000000000next";

fn bearer() -> atoll_proof::Value {
    json!({"value": VALUE, "hosts": ["api.example.org"], "inject": "bearer"})
}

fn placeholder() -> atoll_proof::Value {
    json!({"value": VALUE, "hosts": ["api.example.org"], "inject": "placeholder"})
}

async fn user_of(server: &Server, world: &World, hosts: &[&str]) -> Sandbox {
    let request = json!({"network": allow(hosts), "secrets": [{"secret": "key", "env": "API_KEY"}]});
    sandbox_with(server, world, request).await
}

/// The headers that the world got last.
fn last_headers(world: &World) -> atoll_proof::Value {
    world.saw("http").last().expect("something arrived")["headers"].clone()
}

const CALL: &str = "curl -sS -m 20 https://api.example.org/v1/me";

/// A key that may make sandboxes and nothing else gets neither secrets nor models by way of one that has them.
async fn copies_take_the_rights_that_their_origin_took(server: &mut Server, world: &World) {
    set_secret(server, "key", &bearer()).await;
    let made = json!({"name": "makes", "role": "member", "scopes": ["sandboxes"]});
    let made = server.client().post("/v1/keys", &made).await.expect(201).json();
    let key = server.client().with_key(made["secret"].as_str());
    let models = allow(&["models.atoll.internal"]);
    let wanted = server.request(&json!({"network": models}));
    key.post("/v1/sandboxes", &wanted)
        .await
        .refused(403, "not_allowed");
    let holder = user_of(server, world, &["api.example.org"]).await;
    let caller = sandbox_with(server, world, json!({"network": models})).await;
    let plain = sandbox_with(server, world, json!({"network": allow(&["api.example.org"])})).await;
    for origin in [&holder, &caller] {
        let copied = key
            .post(&origin.path("/fork"), &json!({"kind": "filesystem"}))
            .await;
        copied.refused(403, "not_allowed");
    }
    let wider = json!({"policy": {"preset": "all-public"}});
    let put = async |sandbox: &Sandbox, body: &atoll_proof::Value| {
        let request = key.request(reqwest::Method::PUT, &sandbox.path("/network"));
        key.send(request.json(body)).await
    };
    put(&holder, &wider).await.refused(403, "not_allowed");
    put(&plain, &json!({"policy": models}))
        .await
        .refused(403, "not_allowed");
    put(&plain, &wider).await.expect(200);
}

async fn a_secret_is_used_and_never_inside(server: &mut Server, world: &World) {
    let shown = set_secret(server, "key", &bearer()).await;
    assert!(!shown.to_string().contains(VALUE));
    let sandbox = user_of(server, world, &["api.example.org"]).await;
    let echoed = sandbox
        .sh(&format!("{CALL} -D /tmp/head | tee /tmp/body; cat /tmp/head"))
        .await
        .ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {VALUE}"));
    // The world repeats what it got; in headers that is taken out again.
    assert!(echoed.contains("\"authorization\""), "{echoed}");
    let head = sandbox.sh("cat /tmp/head").await.ok();
    assert!(!head.contains(VALUE), "{head}");
    sandbox.sh("rm -f /tmp/head /tmp/body").await.ok();

    // A call whose answer does not repeat it, and then a look everywhere.
    let fresh = user_of(server, world, &["bulk.example.org", "api.example.org"]).await;
    fresh
        .sh("curl -sS -m 20 -o /dev/null https://api.example.org/bytes/1000")
        .await
        .ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {VALUE}"));
    let inside = fresh
        .root_sh(&format!(
            "printf '%s' '{}' | rev > /tmp/needle; needle=$(cat /tmp/needle); rm /tmp/needle; \
             env | grep -c -- \"$needle\"; cat /proc/[0-9]*/environ 2>/dev/null | grep -ac -- \"$needle\"; \
             grep -rIl -- \"$needle\" /etc /home /root /tmp /var /run 2>/dev/null | wc -l",
            VALUE.chars().rev().collect::<String>()
        ))
        .await;
    assert!(
        inside.stdout.lines().all(|count| count.trim() == "0"),
        "{inside:?}"
    );

    fresh.write("/home/user/control", CONTROL.as_bytes()).await;
    fresh.ask("/snapshots", json!({"name": "searched"})).await.ok();
    let exported = server
        .client()
        .get("/v1/snapshots/searched/export")
        .await
        .expect(200)
        .body;
    assert!(contains(&exported, CONTROL), "what is in there would be found");
    assert!(!contains(&exported, VALUE), "the snapshot holds the secret");
    until_logged(&fresh, "its use is logged", |fact| {
        fact["kind"] == "secret.used"
            && fact["data"]["secret"] == "key"
            && fact["data"]["host"] == "api.example.org"
    })
    .await;
    let facts = server.client().get("/v1/ledger?limit=1000").await.text();
    assert!(!facts.contains(VALUE));
    let info = sandbox.client.get(&fresh.path("")).await.text();
    assert!(!info.contains(VALUE));
    // Nor anywhere in what the server keeps or says.
    for path in atoll_proof::host::files_below(&server.data()) {
        let Ok(bytes) = atoll_proof::host::data_of(&path) else {
            continue;
        };
        assert!(!contains(&bytes, VALUE), "{} holds the secret", path.display());
    }
    assert!(!server.log().contains(VALUE));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("1"), "no core dumps: {core}");
}

fn contains(bytes: &[u8], needle: &str) -> bool {
    bytes
        .windows(needle.len())
        .any(|window| window == needle.as_bytes())
}

async fn a_placeholder_is_replaced_where_it_may_go(server: &mut Server, world: &World) {
    set_secret(server, "key", &placeholder()).await;
    let sandbox = user_of(server, world, &["api.example.org", "other.example.org"]).await;
    let inside = sandbox.sh("printf %s \"$API_KEY\"").await.ok();
    assert_ne!(inside, VALUE);
    assert_eq!(
        (inside.len(), &inside[..3]),
        (VALUE.len(), &VALUE[..3]),
        "{inside}"
    );

    sandbox
        .sh(&format!("{CALL} -H \"X-Api-Key: $API_KEY\""))
        .await
        .ok();
    assert_eq!(last_headers(world)["x-api-key"], VALUE);
    sandbox.sh(&format!("{CALL} -u \"me:$API_KEY\"")).await.ok();
    assert_eq!(
        last_headers(world)["authorization"],
        format!(
            "Basic {}",
            atoll_proof::to_base64(format!("me:{VALUE}").as_bytes())
        )
    );
    sandbox
        .sh("curl -sS -m 20 \"https://api.example.org/v1/me?key=$API_KEY&x=1\"")
        .await
        .ok();
    assert_eq!(
        world.saw("http").last().unwrap()["path"],
        format!("/v1/me?key={VALUE}&x=1")
    );
    // Without it nothing is added.
    sandbox.sh(CALL).await.ok();
    assert!(!last_headers(world).to_string().contains(VALUE));

    // Another sandbox with that placeholder has nothing.
    let stranger = sandbox_with(server, world, json!({"network": allow(&["api.example.org"])})).await;
    stranger
        .sh(&format!(
            "curl -sS -m 20 --cacert ~/world.pem -H 'X-Api-Key: {inside}' https://api.example.org/; true"
        ))
        .await;
    assert_ne!(last_headers(world)["x-api-key"], VALUE);
    // A copy of the sandbox has the same in its memory, and it works there.
    if server.tier == Tier::Gvisor {
        let forked = sandbox.ask("/fork", json!({"count": 1})).await.ok();
        let copy = Sandbox::of(&sandbox.client, &forked["items"][0]);
        copy.sh(&format!("{CALL} -H 'X-Api-Key: {inside}'")).await.ok();
        assert_eq!(last_headers(world)["x-api-key"], VALUE);
    }
}

async fn a_new_value_applies_at_once(server: &mut Server, world: &World) {
    set_secret(server, "key", &bearer()).await;
    let sandbox = user_of(server, world, &["api.example.org"]).await;
    sandbox.sh(CALL).await.ok();
    let rotated = server
        .client()
        .post("/v1/secrets/key/rotate", &json!({"value": OTHER}))
        .await
        .ok();
    assert!(!rotated["rotated_at"].is_null() && !rotated.to_string().contains(OTHER));
    sandbox.sh(CALL).await.ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {OTHER}"));
    // And over a restart.
    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    sandbox.sh(CALL).await.ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {OTHER}"));
    // Another binding, too: what was read before is spliced now, and nothing is added.
    let elsewhere = json!({"value": OTHER, "hosts": ["other.example.org"], "inject": "bearer"});
    set_secret(server, "key", &elsewhere).await;
    sandbox.sh(&format!("{CALL} --cacert ~/world.pem")).await.ok();
    assert!(last_headers(world)["authorization"].is_null());
}

async fn an_expired_or_deleted_secret_is_not_used(server: &mut Server, world: &World) {
    let mut past = bearer();
    past["expires_at"] = json!("1970-01-01T00:00:01Z");
    set_secret(server, "key", &past).await;
    let sandbox = user_of(server, world, &["api.example.org"]).await;
    sandbox.sh(&format!("{CALL}; true")).await.ok();
    assert!(!world.raw().contains(VALUE));
    set_secret(server, "key", &bearer()).await;
    sandbox.sh(CALL).await.ok();
    assert!(world.raw().contains(VALUE));
    let used = world.raw().matches(VALUE).count();
    server.client().delete("/v1/secrets/key").await.expect(204);
    sandbox.sh(&format!("{CALL}; true")).await.ok();
    assert_eq!(world.raw().matches(VALUE).count(), used);
    // It rests and comes back without.
    sandbox.ask("/pause", json!({})).await.ok();
    sandbox.ask("/resume", json!({})).await.ok();
    sandbox.assert_works().await;
    let request = server.request(&json!({"secrets": [{"secret": "key"}]}));
    server
        .client()
        .post("/v1/sandboxes", &request)
        .await
        .refused(404, "secret_not_found");
}

async fn a_binding_is_kept_to(server: &mut Server, world: &World) {
    let bound = json!({"value": VALUE, "hosts": ["api.example.org"], "methods": ["GET"], "paths": ["/v1/**"],
                       "inject": {"header": {"name": "X-Token"}}});
    set_secret(server, "key", &bound).await;
    let sandbox = user_of(server, world, &["api.example.org", "other.example.org"]).await;
    sandbox.sh(&format!("{CALL} -H 'X-Token: mine'")).await.ok();
    assert_eq!(
        last_headers(world)["x-token"],
        VALUE,
        "what the guest sent is overwritten"
    );
    let with = world.raw().matches(VALUE).count();
    for elsewhere in [
        "-X POST https://api.example.org/v1/me",
        "https://api.example.org/v2/me",
        "--cacert /home/user/world.pem https://other.example.org/v1/me",
        "http://api.example.org/v1/me",
    ] {
        sandbox
            .sh(&format!("curl -sS -m 20 {elsewhere}; true"))
            .await
            .ok();
    }
    assert_eq!(world.raw().matches(VALUE).count(), with);
    // A sandbox that was not given it has nothing, whatever it may reach.
    let other = sandbox_with(server, world, json!({"network": allow(&["api.example.org"])})).await;
    other
        .sh("curl -sS -m 20 --cacert ~/world.pem https://api.example.org/v1/me")
        .await
        .ok();
    assert_eq!(world.raw().matches(VALUE).count(), with);
    // Taken away while it runs.
    set_network(
        &sandbox,
        &json!({"policy": allow(&["api.example.org"]), "secrets": []}),
    )
    .await
    .ok();
    sandbox
        .sh("curl -sS -m 20 --cacert ~/world.pem https://api.example.org/v1/me")
        .await
        .ok();
    assert_eq!(world.raw().matches(VALUE).count(), with);
}

async fn names_and_values_are_checked(server: &mut Server, _world: &World) {
    let put = async |name: &str, body: atoll_proof::Value| {
        let request = server
            .client()
            .request(reqwest::Method::PUT, &format!("/v1/secrets/{name}"));
        server.client().send(request.json(&body)).await
    };
    for (name, body) in [
        (
            "key",
            json!({"value": "", "hosts": ["api.example.org"], "inject": "bearer"}),
        ),
        ("key", json!({"value": VALUE, "hosts": [], "inject": "bearer"})),
        ("key", json!({"value": VALUE, "hosts": ["*"], "inject": "bearer"})),
        (
            "key",
            json!({"value": VALUE, "hosts": ["api.example.org"], "inject": {"header": {"name": "host"}}}),
        ),
        (
            "key",
            json!({"value": VALUE, "hosts": ["api.example.org"], "inject": "telepathy"}),
        ),
        (
            "key",
            json!({"value": [VALUE], "hosts": ["api.example.org"], "inject": "bearer"}),
        ),
        (
            "key",
            json!({"value": VALUE, "hosts": ["api.example.org"], "inject": "bearer", "extra": VALUE}),
        ),
        ("no%20good", bearer()),
    ] {
        let answer = put(name, body.clone()).await;
        assert!((400..500).contains(&answer.status), "{body}: {answer:?}");
        assert!(
            !answer.text().contains(VALUE),
            "an error repeats the secret: {}",
            answer.text()
        );
    }
    assert!(!server.log().contains(VALUE));
}

/// Behind the body, and in answers of a host that was written in its own script.
async fn echoes_are_found_wherever_they_are(server: &mut Server, world: &World) {
    let bound = json!({"value": VALUE, "hosts": ["api.example.org", "BÜCHER.example.org"], "inject": "bearer", "redact": true});
    set_secret(server, "key", &bound).await;
    let sandbox = user_of(server, world, &["api.example.org", "bücher.example.org"]).await;
    let raw = "python3 - <<'END'
import socket, ssl
s = ssl.create_default_context().wrap_socket(socket.create_connection(('api.example.org', 443), 20), server_hostname='api.example.org')
s.sendall(b'GET /trailers HTTP/1.1\\r\\nHost: api.example.org\\r\\nTE: trailers\\r\\nConnection: te, close\\r\\n\\r\\n')
out = b''
while data := s.recv(65536): out += data
print(out.decode())
END";
    let answer = sandbox.sh(raw).await.ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {VALUE}"));
    assert!(!answer.contains(VALUE), "{answer}");
    assert!(answer.contains("x-echo: Bearer ****"), "{answer}");
    let answer = sandbox
        .sh("curl -sS -m 20 https://xn--bcher-kva.example.org/v1/me")
        .await
        .ok();
    assert_eq!(last_headers(world)["authorization"], format!("Bearer {VALUE}"));
    assert!(answer.contains("\"authorization\""), "{answer}");
    assert!(!answer.contains(VALUE), "{answer}");
}

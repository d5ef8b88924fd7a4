//! A policy over time: changed while the sandbox runs, kept while it rests, and held by a server that was killed.

use std::time::Duration;

use atoll_proof::{Server, World, json, wait};

use crate::builds::{build, built};
use crate::{allow, assert_refused, get, sandbox, set_network};

in_a_world!(
    a_change_is_in_force_at_once,
    a_narrower_policy_cuts_what_is_open,
    it_is_kept_over_pause_stop_and_fork,
    it_survives_a_killed_server,
    a_template_can_bring_one,
    budgets_hold,
    bad_policies_are_refused,
);

const API: &str = "https://api.example.org/";

async fn a_change_is_in_force_at_once(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, json!({})).await;
    for _ in 0..3 {
        assert_refused(&sandbox, API).await;
        set_network(&sandbox, &json!({"policy": allow(&["api.example.org"])}))
            .await
            .ok();
        assert_eq!(get(&sandbox, API).await.0, 200);
        let view = set_network(&sandbox, &json!({"policy": {}})).await.ok();
        assert_eq!(view["source"], "sandbox");
    }
    assert_refused(&sandbox, API).await;
}

async fn a_narrower_policy_cuts_what_is_open(server: &mut Server, world: &World) {
    let open = json!({"rules": [{"action": "allow", "to": "203.0.113.0/24"}]});
    let sandbox = sandbox(server, world, open).await;
    let talk = "exec 3<>/dev/tcp/203.0.113.10/2222; read -r line <&3; echo \"got $line\"; \
                while echo ping >&3 && read -r line <&3; do sleep 0.1; done; echo cut; sleep 600";
    let command = sandbox.background(talk).await;
    sandbox.until_logged(&command, "got WELCOME").await;
    // A change that leaves it allowed leaves it alone.
    let same = json!({"rules": [{"action": "allow", "to": "203.0.113.10"}]});
    set_network(&sandbox, &json!({"policy": same})).await.ok();
    set_network(&sandbox, &json!({"policy": {}})).await.ok();
    sandbox.until_logged(&command, "cut").await;
    assert_eq!(world.saw("tcp").len(), 1);
}

async fn it_is_kept_over_pause_stop_and_fork(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["api.example.org"])).await;
    for (rest, wake) in [("/pause", "/resume"), ("/stop", "/start")] {
        sandbox.ask(rest, json!({})).await.ok();
        sandbox.ask(wake, json!({})).await.ok();
        assert_eq!(get(&sandbox, API).await.0, 200, "after {rest}");
        assert_refused(&sandbox, "https://other.example.org/").await;
    }
    // Changed while it rests.
    for _ in 0..4 {
        sandbox.ask("/pause", json!({})).await.ok();
        set_network(&sandbox, &json!({"policy": {}})).await.ok();
        sandbox.ask("/resume", json!({})).await.ok();
    }
    assert_refused(&sandbox, API).await;
    // And while it goes to rest or wakes up.
    for way in ["/pause", "/resume"] {
        let policy = json!({"policy": {}});
        let (moved, set) = tokio::join!(sandbox.ask(way, json!({})), set_network(&sandbox, &policy));
        moved.ok();
        set.ok();
    }
    assert_refused(&sandbox, API).await;
    set_network(&sandbox, &json!({"policy": allow(&["api.example.org"])}))
        .await
        .ok();

    let kind = if server.tier == atoll_proof::Tier::Gvisor {
        "memory"
    } else {
        "filesystem"
    };
    let forked = sandbox.ask("/fork", json!({"count": 2, "kind": kind})).await.ok();
    for copy in forked["items"].as_array().expect("copies") {
        let copy = atoll_proof::Sandbox::of(&sandbox.client, copy);
        assert_eq!(get(&copy, API).await.0, 200);
        assert_refused(&copy, "https://other.example.org/").await;
        // Each has its own from now on.
        set_network(&copy, &json!({"policy": {}})).await.ok();
        assert_refused(&copy, API).await;
    }
    assert_eq!(get(&sandbox, API).await.0, 200);
}

async fn it_survives_a_killed_server(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["api.example.org"])).await;
    assert_eq!(get(&sandbox, API).await.0, 200);
    let line = "while :; do curl -s -m 2 --cacert ~/world.pem https://api.example.org/tick >/dev/null && echo through || echo refused; done";
    let command = sandbox.background(line).await;
    sandbox.until_logged(&command, "through").await;
    server.kill_9();
    // Nobody is there to let anything out. What the world saw until now is all that it sees.
    wait::until_sync("the last request is over", Duration::from_secs(20), || {
        let before = world.seen().len();
        std::thread::sleep(Duration::from_millis(500));
        (world.seen().len() == before).then_some(())
    })
    .await;
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    let before = world.saw("http").len();
    wait::until_sync("it gets through again", Duration::from_secs(30), || {
        (world.saw("http").len() > before).then_some(())
    })
    .await;
    assert_eq!(get(&sandbox, API).await.0, 200);
    assert_refused(&sandbox, "https://other.example.org/").await;
}

async fn a_template_can_bring_one(server: &mut Server, world: &World) {
    let original = sandbox(server, world, allow(&["api.example.org"])).await;
    let view = original.client.get(&original.path("/network")).await.ok();
    assert_eq!(
        (&view["source"], &view["unavailable"]),
        (&json!("sandbox"), &json!(null))
    );
    // A snapshot keeps what its sandbox might reach, unless the new one says otherwise.
    original
        .ask("/snapshots", json!({"name": "kept", "kind": "filesystem"}))
        .await
        .ok();
    let again = server.sandbox_with(&json!({"template": "kept"})).await;
    assert_eq!(get(&again, API).await.0, 200);
    let none = server
        .sandbox_with(&json!({"template": "kept", "network": {}}))
        .await;
    assert_refused(&none, API).await;

    // So does a template.
    let policy = allow(&["api.example.org"]).to_string();
    let files = [
        ("Dockerfile", "FROM base\nCOPY world.pem /home/user/\n".into()),
        ("world.pem", std::fs::read(world.authority()).unwrap()),
    ];
    let query = [("name", "reaching"), ("network", policy.as_str())];
    let template = built(&build(server, &query, &files).await);
    assert_eq!(template["network"]["rules"][0]["to"], "api.example.org");
    let inspected = server.client().get("/v1/templates/reaching").await.ok();
    assert_eq!(inspected, template);
    let request = json!({"template": "reaching"});
    let reaching = server.sandbox_with(&request).await;
    let view = reaching.client.get(&reaching.path("/network")).await.ok();
    assert_eq!(view["source"], "template");
    assert_eq!(get(&reaching, API).await.0, 200);
    assert_refused(&reaching, "https://other.example.org/").await;
    let none = server
        .sandbox_with(&json!({"template": "reaching", "network": {}}))
        .await;
    assert_refused(&none, API).await;
    set_network(&reaching, &json!({"policy": {}})).await.ok();
    assert_refused(&reaching, API).await;
    // Without one it is another template, whose sandboxes reach what the operator says.
    let plain = built(&build(server, &[("name", "plain")], &files).await);
    assert_eq!(plain["network"], json!(null));
    assert_ne!(plain["id"], template["id"]);

    // One that makes no sense is refused before anything is built.
    for (field, policy) in [
        ("network", r#"{"rules":[{"action":"allow","to":"exa mple.org"}]}"#),
        (
            "build_network",
            r#"{"rules":[{"action":"allow","to":"10.0.0.0/33"}]}"#,
        ),
        ("network", r#"{"rulez":[]}"#),
        ("build_network", "all-public"),
    ] {
        let refused = server
            .client()
            .send(crate::builds::request(
                server,
                &[("name", "bad"), (field, policy)],
                &files,
            ))
            .await;
        assert_eq!(refused.status, 400, "{policy}: {refused:?}");
        refused.error();
    }
}

async fn budgets_hold(server: &mut Server, world: &World) {
    let mut policy = allow(&["bulk.example.org", "api.example.org"]);
    policy["limits"] = json!({"total_bytes": 3_000_000});
    let sandbox = sandbox(server, world, policy).await;
    assert_eq!(
        get(&sandbox, "-o /dev/null https://bulk.example.org/bytes/1000000")
            .await
            .0,
        200
    );
    let out = sandbox.sh("curl -s -m 20 --cacert ~/world.pem -o /dev/null https://bulk.example.org/bytes/50000000 -w '%{size_download}'").await;
    assert_ne!(out.code, Some(0), "{out:?}");
    let got: u64 = out.stdout.trim().parse().unwrap();
    assert!(got < 3_000_000, "{got}");
    // Used up, and that is remembered.
    assert_refused(&sandbox, API).await;
    sandbox.ask("/pause", json!({})).await.ok();
    sandbox.ask("/resume", json!({})).await.ok();
    assert_refused(&sandbox, API).await;

    let mut policy = json!({"rules": [{"action": "allow", "to": "203.0.113.0/24"}]});
    policy["limits"] = json!({"connections": 3});
    set_network(&sandbox, &json!({ "policy": policy })).await.ok();
    let crowd = "python3 - <<'END'
import socket
held, refused = [], 0
for _ in range(8):
    try:
        s = socket.create_connection(('203.0.113.10', 2222), 10)
        s.settimeout(10)
        refused += not s.recv(7)
        held.append(s)
    except OSError:
        refused += 1
print(refused)
END";
    assert_eq!(sandbox.sh(crowd).await.ok().trim(), "5");
}

async fn bad_policies_are_refused(server: &mut Server, _world: &World) {
    let sandbox = server.sandbox().await;
    for policy in [
        json!({"rules": [{"action": "allow", "to": "exa mple.org"}]}),
        json!({"rules": [{"action": "allow", "to": "0x7f.1"}]}),
        json!({"rules": [{"action": "allow", "to": "10.0.0.0/33"}]}),
        json!({"rules": [{"action": "allow", "to": "203.0.113.0/24", "methods": ["GET"]}]}),
        json!({"rules": [{"action": "perhaps", "to": "example.org"}]}),
        json!({"rules": [{"action": "allow", "to": "example.org", "ports": [0]}]}),
        json!({"preset": "everything"}),
        json!({"rulez": []}),
    ] {
        let refused = set_network(&sandbox, &json!({ "policy": policy })).await;
        assert!((400..500).contains(&refused.status), "{policy}: {refused:?}");
        refused.error();
        let request = server.request(&json!({ "network": policy }));
        let refused = server.client().post("/v1/sandboxes", &request).await;
        assert!((400..500).contains(&refused.status), "{policy}: {refused:?}");
    }
    assert_refused(&sandbox, "http://203.0.113.10/").await;
}

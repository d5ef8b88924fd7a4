//! What is neither TLS nor HTTP: by address and port, or by name and port where a rule says so.

use atoll_proof::{Server, World, json};

use crate::{assert_refused, sandbox, set_network};

in_a_world!(
    other_protocols_go_by_address_and_port,
    datagrams_go_by_rule_and_quic_never,
    presets_mean_what_they_say,
);

const GREET: &str = "python3 - <<'END'
import socket
s = socket.create_connection((HOST, 2222), 10)
s.settimeout(10)
print(s.recv(7).decode())
END";

fn greet(host: &str) -> String {
    GREET.replace("HOST", &format!("'{host}'"))
}

async fn other_protocols_go_by_address_and_port(server: &mut Server, world: &World) {
    let policy = json!({"rules": [
        {"action": "allow", "to": "203.0.113.10/32", "ports": [2222]},
        {"action": "allow", "to": "other.example.org", "ports": [2222]},
        {"action": "allow", "to": "bulk.example.org"},
    ]});
    let sandbox = sandbox(server, world, policy).await;
    assert_eq!(sandbox.sh(&greet("203.0.113.10")).await.ok().trim(), "WELCOME");
    assert_eq!(
        sandbox.sh(&greet("other.example.org")).await.ok().trim(),
        "WELCOME"
    );
    // Another address, another port, a name without that port.
    assert_ne!(sandbox.sh(&greet("203.0.113.20")).await.code, Some(0));
    assert_refused(&sandbox, "http://203.0.113.10/").await;
    assert_ne!(sandbox.sh(&greet("api.example.org")).await.code, Some(0));
    assert_eq!(world.saw("tcp").len(), 2);
}

const SEND: &str = "python3 - <<'END'
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.connect(('203.0.113.10', PORT))
try:
    s.send(b'hello')
    print(s.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
END";

async fn datagrams_go_by_rule_and_quic_never(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, json!({"preset": "all-public"})).await;
    let send = |port: &str| SEND.replace("PORT", port);
    assert_ne!(
        sandbox.sh(&send("5000")).await.ok().trim(),
        "hello",
        "no rule about datagrams"
    );
    let policy = json!({"rules": [{"action": "allow", "to": "203.0.113.10", "protocol": "udp"}]});
    set_network(&sandbox, &json!({ "policy": policy })).await.ok();
    assert_eq!(sandbox.sh(&send("5000")).await.ok().trim(), "hello");
    // Told at once, so that a client tries TCP instead of waiting.
    assert_eq!(
        sandbox.sh(&send("443")).await.ok().trim(),
        "ConnectionRefusedError"
    );
    assert!(world.saw("udp").iter().all(|seen| seen["port"] == 5000));
}

async fn presets_mean_what_they_say(server: &mut Server, world: &World) {
    let sandbox = sandbox(server, world, json!({"preset": "all-public"})).await;
    for url in [
        "https://api.example.org/",
        "http://other.example.org/",
        "http://203.0.113.10/",
    ] {
        assert_eq!(crate::get(&sandbox, url).await.0, 200, "{url}");
    }
    for url in [
        "http://internal.example.org/",
        "http://169.254.169.254/",
        "http://10.0.0.5/",
        "http://127.0.0.2/",
    ] {
        assert_refused(&sandbox, url).await;
    }
    set_network(&sandbox, &json!({"policy": {"preset": "package-registries"}}))
        .await
        .ok();
    assert_refused(&sandbox, "https://api.example.org/").await;
    let why = sandbox
        .client
        .get_with(
            &sandbox.path("/network/explain"),
            &[("url", "https://pypi.org/simple/")],
        )
        .await
        .ok();
    assert_eq!(why["verdict"], "allowed");
    assert!(world.saw("forbidden").is_empty());
}

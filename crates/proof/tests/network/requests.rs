//! Rules about requests, on hosts whose TLS Atoll reads.

use atoll_proof::{Server, World, json};

use crate::{get, sandbox, until_logged};

in_a_world!(
    methods_and_paths_are_enforced,
    every_kind_of_request_goes_through,
    websockets_go_through,
    requests_in_disguise_are_read_or_refused,
);

fn read_only() -> atoll_proof::Value {
    json!({"rules": [
        {"name": "reads", "action": "allow", "to": "api.example.org", "methods": ["GET", "HEAD"], "paths": ["/v1/**"]},
        {"name": "no admin", "action": "deny", "to": "api.example.org", "paths": ["/v1/admin/**"]},
    ]})
}

async fn methods_and_paths_are_enforced(server: &mut Server, world: &World) {
    // Nothing inside was told whom to trust: the sandbox brings that by itself.
    let sandbox = sandbox(server, world, read_only()).await;
    let line = "curl -sS -m 20 -w '\\n%{http_code}' https://api.example.org/v1/things?q=1";
    assert!(sandbox.sh(line).await.ok().ends_with("200"));
    for refused in [
        "-X POST https://api.example.org/v1/things",
        "-X DELETE https://api.example.org/v1/things",
        "https://api.example.org/v2/things",
        "https://api.example.org/v1/admin/keys",
        "--path-as-is https://api.example.org/v1/x/../admin/keys",
        "--path-as-is https://api.example.org/v1/x/%2e%2e/admin/keys",
        "--path-as-is https://api.example.org/v1%2fadmin/keys",
        "--path-as-is https://api.example.org//v1/admin/keys",
        "-H 'Host: other.example.org' https://api.example.org/v1/things",
    ] {
        let line = format!("curl -sS -m 20 -w '\\n%{{http_code}}' {refused}");
        let output = sandbox.sh(&line).await;
        assert!(
            output.stdout.ends_with("403")
                || output.stdout.ends_with("400")
                || output.stdout.ends_with("421"),
            "{refused}: {output:?}"
        );
    }
    let arrived = world.saw("http");
    assert_eq!(arrived.len(), 1, "{arrived:?}");
    assert_eq!(arrived[0]["path"], "/v1/things?q=1");
    let denied = until_logged(&sandbox, "a denial", |fact| {
        fact["kind"] == "network.denied" && fact["data"]["rule"] == "no admin"
    })
    .await;
    assert!(!denied.to_string().contains("keys"), "{denied}");
}

async fn every_kind_of_request_goes_through(server: &mut Server, world: &World) {
    let policy = json!({"rules": [{"action": "allow", "to": "api.example.org", "paths": ["/**"]},
                                  {"action": "allow", "to": "bulk.example.org", "paths": ["/**"]}]});
    let sandbox = sandbox(server, world, policy).await;
    sandbox
        .sh("head -c 20000000 /dev/urandom > ~/big && sha256sum ~/big | cut -d' ' -f1 > ~/sum")
        .await
        .ok();
    let sum = sandbox.sh("cat ~/sum").await.ok();
    for how in [
        "--http1.1 -H 'Expect: 100-continue' --data-binary @/home/user/big",
        "--http2 --data-binary @/home/user/big",
        "--http1.1 -H 'Transfer-Encoding: chunked' --data-binary @/home/user/big",
        "-T /home/user/big",
    ] {
        let (status, body) = get(
            &sandbox,
            &format!("{how} https://api.example.org/up --cacert /etc/ssl/certs/ca-certificates.crt"),
        )
        .await;
        assert_eq!(status, 200, "{how}: {body}");
        let echoed: atoll_proof::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (echoed["bytes"].as_u64(), echoed["sha256"].as_str()),
            (Some(20_000_000), Some(sum.trim())),
            "{how}"
        );
    }
    let line = "curl -sS -m 60 https://bulk.example.org/bytes/50000000 | wc -c";
    assert_eq!(sandbox.sh(line).await.ok().trim(), "50000000");
    // Many on one connection.
    let line = "curl -sS -m 60 -o /dev/null -w '%{num_connects} ' 'https://api.example.org/[1-20]'";
    let connects = sandbox.sh(line).await.ok();
    let connects: Vec<u32> = connects
        .split_whitespace()
        .map(|count| count.parse().unwrap())
        .collect();
    assert_eq!(
        (connects.len(), connects.iter().sum::<u32>()),
        (20, 1),
        "{connects:?}"
    );
    // Programs with a trust store of their own.
    let python = "python3 -c 'import urllib.request; print(urllib.request.urlopen(\"https://api.example.org/py\").status)'";
    assert_eq!(sandbox.sh(python).await.ok().trim(), "200");
    let node = "node -e 'fetch(\"https://api.example.org/js\").then(r => console.log(r.status))'";
    assert_eq!(sandbox.sh(node).await.ok().trim(), "200");
}

async fn websockets_go_through(server: &mut Server, world: &World) {
    let policy = json!({"rules": [{"action": "allow", "to": "api.example.org", "paths": ["/socket"]}]});
    let sandbox = sandbox(server, world, policy).await;
    let talk = "python3 - <<'END'
import socket, ssl, base64, os
s = ssl.create_default_context().wrap_socket(socket.create_connection(('api.example.org', 443), 20), server_hostname='api.example.org')
s.sendall(b'GET /socket HTTP/1.1\\r\\nHost: api.example.org\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: ' + base64.b64encode(os.urandom(16)) + b'\\r\\n\\r\\n')
f = s.makefile('rb')
print(f.readline().decode().strip())
while f.readline().strip(): pass
for word in (b'hello', b'bye'):
    mask = os.urandom(4)
    s.sendall(bytes([0x81, 0x80 | len(word)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(word)))
    head = f.read(2)
    print(f.read(head[1]).decode())
END";
    let said = sandbox.sh(talk).await.ok();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("101"), "{said}");
    assert_eq!(&lines[1..], ["hello", "bye"]);
}

/// A rule that lists the port lets other protocols through; requests in whichever form are read all the same.
async fn requests_in_disguise_are_read_or_refused(server: &mut Server, world: &World) {
    let policy = json!({"rules": [{"action": "allow", "to": "api.example.org", "ports": [80, 2222]}]});
    let sandbox = sandbox(server, world, policy).await;
    let tries = "python3 - <<'END'
import socket, time
def say(*parts):
    try:
        s = socket.create_connection(('api.example.org', 80), 10); s.settimeout(10)
        for part in parts:
            s.sendall(part); time.sleep(0.6 if len(parts) > 1 else 0)
        s.shutdown(socket.SHUT_WR)
        while s.recv(65536): pass
    except OSError: pass
other = b' / HTTP/1.1\\r\\nHost: other.example.org\\r\\nConnection: close\\r\\n\\r\\n'
for request in (b'gET' + other, b'get' + other.lower(), b'\\r\\n\\r\\nGET' + other, b' GET' + other, b'GET\\t/ HTTP/1.1\\r\\nHost: other.example.org\\r\\n\\r\\n',
                b'FROBNICATE' * 5 + other, b'GET http://other.example.org/ HTTP/1.1\\r\\nHost: api.example.org\\r\\n\\r\\n', b'GET /oldest\\r\\n',
                b'GET / HTTP/1.0\\nHost: other.example.org\\n\\n', b'GET /unfinished HTTP/1.0'):
    say(request)
for cut in (1, 2, 3, 12, 14):
    whole = b'GET' + other
    say(whole[:cut], whole[cut:])
say(b'', b'GET' + other)
print('done')
END";
    assert_eq!(sandbox.sh(tries).await.ok().trim(), "done");
    assert!(world.saw("http").is_empty(), "{:?}", world.saw("http"));
    // What is one, for the host that is dialled, goes through; also on a connection that was silent before.
    let honest = "python3 - <<'END'
import socket, time
for pause in (0, 1):
    s = socket.create_connection(('api.example.org', 80), 10); s.settimeout(10)
    time.sleep(pause)
    s.sendall(b'GET /read HTTP/1.1\\r\\nHost: api.example.org\\r\\nConnection: close\\r\\n\\r\\n')
    print(s.makefile('rb').readline().split()[1].decode())
END";
    assert_eq!(sandbox.sh(honest).await.ok(), "200\n200\n");
    assert_eq!(world.saw("http").len(), 2);
}

//! Attempts to get out, or at others, past the policy. Each is refused or harmless.

use std::io::ErrorKind;
use std::net::{TcpListener, UdpSocket};
use std::time::Duration;

use atoll_proof::wait::within;
use atoll_proof::{MIB, Sandbox, Server, World, json};

use crate::{allow, assert_refused, get, sandbox, until_logged};

in_a_world!(
    addresses_in_disguise,
    a_redirect_to_the_metadata_service,
    another_name_than_the_one_that_is_dialled,
    no_name_and_no_readable_name,
    raw_sockets_and_icmp,
    spoofed_sources_and_neighbours,
    tunnels_and_odd_ports,
    a_crowd_of_slow_connections,
    endless_headers_and_garbage,
    a_bomb_of_certificates,
    smuggled_requests,
    the_host_and_its_api,
    the_hosts_own_public_addresses,
    other_sandboxes,
    floods_of_names_and_datagrams,
    a_flood_costs_its_neighbours_no_answer,
);

/// Asserts that only what was allowed arrived, that the server has not grown, and that both still work.
async fn assert_unharmed(server: &Server, world: &World, attacker: &Sandbox, memory: u64) {
    assert!(world.saw("forbidden").is_empty(), "{:?}", world.saw("forbidden"));
    within(
        "the attacker still works",
        Duration::from_secs(30),
        attacker.assert_works(),
    )
    .await;
    server.assert_answers().await;
    let grown = server.memory().saturating_sub(memory);
    assert!(grown < 64 * MIB, "the server grew by {} MiB", grown / MIB);
}

async fn addresses_in_disguise(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, json!({"preset": "all-public"})).await;
    let memory = server.memory();
    for host in [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "169.254.43518",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "127.0.0.1:80",
        "127.1",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "10.0.0.5",
        "[fe80::1]",
        "[fd77::2]",
        "192.0.2.1",
        "metadata.google.internal",
        "localhost.",
        "api.example.org%00.evil.org",
        "internal.example.org.",
    ] {
        assert_refused(&attacker, &format!("-g 'http://{host}/'")).await;
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn a_redirect_to_the_metadata_service(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, json!({"preset": "all-public"})).await;
    let memory = server.memory();
    assert_eq!(get(&attacker, "http://redirect.example.org/").await.0, 302);
    assert_refused(&attacker, "-L http://redirect.example.org/").await;
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn another_name_than_the_one_that_is_dialled(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, allow(&["api.example.org"])).await;
    let memory = server.memory();
    // The SNI of an allowed host, at the address of another; and the other way round.
    assert_refused(
        &attacker,
        "--resolve other.example.org:443:203.0.113.20 https://other.example.org/",
    )
    .await;
    assert_refused(
        &attacker,
        "--connect-to other.example.org:443:api.example.org:443 https://other.example.org/",
    )
    .await;
    assert_refused(
        &attacker,
        "--connect-to other.example.org:80:api.example.org:80 http://other.example.org/",
    )
    .await;
    assert_refused(&attacker, "-H 'Host: other.example.org' http://api.example.org/").await;
    // An address of its own choice for an allowed name gets it to that name, not to that address.
    attacker.sh("curl -s -m 5 --cacert ~/world.pem --resolve api.example.org:443:203.0.113.20 https://api.example.org/; true").await.ok();
    // A second request on a plain connection that names another host.
    let second = "python3 - <<'END'
import socket
s = socket.create_connection(('api.example.org', 80), 10)
s.settimeout(5)
s.sendall(b'GET /1 HTTP/1.1\\r\\nHost: api.example.org\\r\\n\\r\\nGET /2 HTTP/1.1\\r\\nHost: other.example.org\\r\\n\\r\\n')
try:
    while s.recv(65536): pass
except OSError: pass
END";
    attacker.sh(second).await.ok();
    assert!(
        world
            .saw("http")
            .iter()
            .all(|seen| seen["host"] == "api.example.org"),
        "{:?}",
        world.saw("http")
    );
    assert!(world.saw("http").iter().all(|seen| seen["at"] != "203.0.113.20"));
    assert!(
        world
            .saw("tls")
            .iter()
            .all(|seen| seen["sni"] == "api.example.org")
    );
    // Domain fronting on a host that is read: see `requests`. On a spliced one only the host itself can stop it.
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn no_name_and_no_readable_name(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, allow(&["api.example.org"])).await;
    let memory = server.memory();
    let hello = "python3 - <<'END'
import socket, ssl
c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
for server_hostname in (None, 'x' * 60 + '.example.org'):
    try:
        s = c.wrap_socket(socket.create_connection(('api.example.org', 443), 10), server_hostname=server_hostname)
        print('through', server_hostname)
    except OSError: pass
# Bytes that are no ClientHello, and one that never ends.
for data in (b'\\x16\\x03\\x01\\xff\\xff' + b'\\x01\\x00\\xff\\xff' + b'a' * 70000, b'\\x00' * 100, b'SSH-2.0-x\\r\\n', b'\\x16\\x03\\x01\\x00\\x00'):
    s = socket.create_connection(('api.example.org', 443), 10)
    s.settimeout(15)
    try:
        s.sendall(data)
        if s.recv(100)[:1] == b'\\x16': print('answered', data[:5])
    except OSError: pass
END";
    let out = attacker
        .run_with(json!({"argv": ["bash", "-c", hello], "timeout_ms": 120_000}))
        .await
        .ok();
    assert_eq!(out, "");
    assert!(
        world.saw("http").is_empty() && world.saw("tls").is_empty(),
        "{:?}",
        world.seen()
    );
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn raw_sockets_and_icmp(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, json!({"preset": "all-public"})).await;
    let memory = server.memory();
    let raw = "python3 - <<'END'
import socket
for family, kind, proto in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_RAW, 255), (17, socket.SOCK_RAW, 0x0300),
                            (socket.AF_INET6, socket.SOCK_RAW, 58), (socket.AF_INET, socket.SOCK_DGRAM, 1)):
    try:
        s = socket.socket(family, kind, proto)
        s.settimeout(2)
        s.sendto(b'\\x08\\x00\\xf7\\xff\\x00\\x00\\x00\\x00', ('203.0.113.10', 0))
        if s.recv(100): print('answered', family, kind, proto)
    except (OSError, TypeError): pass
END";
    for user in ["user", "root"] {
        let out = attacker
            .run_with(json!({"argv": ["bash", "-c", raw], "user": user, "timeout_ms": 60_000}))
            .await
            .ok();
        assert_eq!(out, "", "as {user}");
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn spoofed_sources_and_neighbours(server: &mut Server, world: &World) {
    let neighbour = sandbox(server, world, allow(&["api.example.org"])).await;
    let attacker = sandbox(server, world, json!({})).await;
    let memory = server.memory();
    let theirs = neighbour.sh("hostname -I").await.ok();
    let v4 = theirs
        .split_whitespace()
        .find(|address| address.contains('.'))
        .expect("it has an address");
    let line = format!(
        "ip address add {v4}/32 dev eth0; ip link set eth0 address 02:00:00:00:00:99; ip route replace default dev eth0 src {v4}; \
         ip neigh replace 198.18.0.1 lladdr 02:00:00:00:00:99 dev eth0; \
         python3 -c \"
import socket
s = socket.socket(); s.settimeout(5)
s.setsockopt(socket.IPPROTO_IP, 15, 1)
s.bind(('{v4}', 0))
s.connect(('203.0.113.10', 80))
s.sendall(b'GET / HTTP/1.0\\r\\nHost: api.example.org\\r\\n\\r\\n')
print('through', s.recv(100))
\"; true"
    );
    let out = attacker
        .run_with(json!({"argv": ["bash", "-c", line], "user": "root", "timeout_ms": 60_000}))
        .await;
    assert!(!out.stdout.contains("through b'HTTP/1.1 200"), "{out:?}");
    assert!(world.saw("http").is_empty());
    assert_eq!(get(&neighbour, "https://api.example.org/").await.0, 200);
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn tunnels_and_odd_ports(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, allow(&["api.example.org"])).await;
    let memory = server.memory();
    for refused in [
        "-p -x http://api.example.org:80 https://other.example.org/",
        "-p -x http://api.example.org:80 http://169.254.169.254/",
        "-x http://api.example.org:80 http://other.example.org/",
        "https://api.example.org:8443/",
        "telnet://api.example.org:2222",
        "-k https://api.example.org:80/",
    ] {
        assert_refused(&attacker, refused).await;
    }
    assert!(
        world
            .saw("http")
            .iter()
            .all(|seen| seen["host"] == "api.example.org" && seen["method"] != "CONNECT"),
        "{:?}",
        world.saw("http")
    );
    assert!(world.saw("tcp").is_empty());
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn a_crowd_of_slow_connections(server: &mut Server, world: &World) {
    let neighbour = sandbox(server, world, allow(&["api.example.org"])).await;
    let attacker = sandbox(server, world, allow(&["api.example.org"])).await;
    let memory = server.memory();
    let slow = "python3 - <<'END'
import socket, time
held = []
for i in range(3000):
    try:
        s = socket.socket(); s.settimeout(2)
        s.connect(('198.18.0.9', 443 if i % 2 else 80))
        s.send(b'\\x16\\x03\\x01' if i % 2 else b'GET / HT')
        held.append(s)
    except OSError: pass
print(len(held), flush=True)
time.sleep(600)
END";
    let command = attacker.background(slow).await;
    within("the crowd has gathered", Duration::from_secs(120), async {
        loop {
            let log = attacker.logs(&command).await;
            if log.trim().parse::<u32>().is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await;
    for _ in 0..5 {
        assert_eq!(get(&neighbour, "https://api.example.org/").await.0, 200);
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn endless_headers_and_garbage(server: &mut Server, world: &World) {
    let policy = json!({"rules": [{"action": "allow", "to": "api.example.org", "paths": ["/**"]}]});
    let attacker = sandbox(server, world, policy).await;
    let memory = server.memory();
    let endless = "python3 - <<'END'
import socket, ssl
def attempt(tls, first, piece, count):
    s = socket.create_connection(('api.example.org', 443 if tls else 80), 10)
    if tls: s = ssl.create_default_context().wrap_socket(s, server_hostname='api.example.org')
    s.settimeout(10)
    sent = 0
    try:
        s.sendall(first)
        for _ in range(count):
            s.sendall(piece); sent += len(piece)
    except OSError: pass
    return sent
for tls in (False, True):
    # One header of a gigabyte, a million of them, one endless line.
    print(attempt(tls, b'GET / HTTP/1.1\\r\\nHost: api.example.org\\r\\nX: ', b'a' * (1 << 20), 1024))
    print(attempt(tls, b'GET / HTTP/1.1\\r\\nHost: api.example.org\\r\\n', b'X: y\\r\\n' * 1000, 5000))
    print(attempt(tls, b'GET /', b'a' * (1 << 20), 1024))
    print(attempt(tls, b'\\x00\\xff\\r\\n\\r\\n', b'\\x00' * 1000, 100))
END";
    let out = attacker
        .run_with(json!({"argv": ["bash", "-c", endless], "timeout_ms": 240_000}))
        .await
        .ok();
    for sent in out.lines() {
        let sent: u64 = sent.parse().unwrap();
        assert!(sent < 64 * MIB, "{out}");
    }
    assert!(world.saw("http").is_empty());
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn a_bomb_of_certificates(server: &mut Server, world: &World) {
    let policy = json!({"rules": [
        {"action": "allow", "to": "other.example.org", "ports": [8444], "paths": ["/**"]},
    ]});
    let attacker = sandbox(server, world, policy).await;
    let memory = server.memory();
    for _ in 0..5 {
        let out = attacker
            .sh("curl -sS -m 20 -w '\\n%{http_code}' https://other.example.org:8444/")
            .await;
        assert!(out.code != Some(0) || out.stdout.ends_with("502"), "{out:?}");
    }
    assert!(world.saw("http").is_empty());
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn smuggled_requests(server: &mut Server, world: &World) {
    let policy = json!({"rules": [{"action": "allow", "to": "api.example.org", "methods": ["GET", "POST"], "paths": ["/open/**"]}]});
    let attacker = sandbox(server, world, policy).await;
    let memory = server.memory();
    let smuggle = "python3 - <<'END'
import socket, ssl
inner = b'GET /closed HTTP/1.1\\r\\nHost: api.example.org\\r\\n\\r\\n'
host = b'Host: api.example.org\\r\\n'
heads = [
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Content-Length: 5\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Transfer-Encoding: chunked\\r\\nTransfer-Encoding: identity\\r\\n\\r\\n0\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Transfer-Encoding: xchunked\\r\\n\\r\\n0\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Transfer-Encoding : chunked\\r\\n\\r\\n0\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Content-Length: 0\\r\\nContent-Length: 60\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'Content-Length: +0\\r\\n\\r\\n',
    b'POST /open/a HTTP/1.1\\r\\n' + host + b'X: a\\r\\n Content-Length: 0\\r\\n\\r\\n',
    b'GET /open/a HTTP/1.1\\r\\n' + host + b'X: a\\nGET /closed HTTP/1.1\\nHost: api.example.org\\r\\n\\r\\n',
    b'GET /open/a HTTP/1.1\\r\\n' + host + host.replace(b'api', b'other') + b'\\r\\n',
    b'GET http://api.example.org/closed HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET http://other.example.org/open/a HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET /open/a HTTP/1.1\\r\\n' + host + b'Connection: Upgrade, HTTP2-Settings\\r\\nUpgrade: h2c\\r\\nHTTP2-Settings: AAMAAABkAAQAAP__\\r\\n\\r\\n',
    b'CONNECT other.example.org:443 HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET /open/../closed HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET /open/%2e%2e/closed HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET /open/..%2fclosed HTTP/1.1\\r\\n' + host + b'\\r\\n',
    b'GET /open/a\\\\..\\\\..\\\\closed HTTP/1.1\\r\\n' + host + b'\\r\\n',
]
for tls in (True, False):
    for head in heads:
        try:
            s = socket.create_connection(('api.example.org', 443 if tls else 80), 10)
            if tls: s = ssl.create_default_context().wrap_socket(s, server_hostname='api.example.org')
            s.settimeout(1)
            s.sendall(head + inner)
            while s.recv(65536): pass
        except OSError: pass
END";
    attacker
        .run_with(json!({"argv": ["bash", "-c", smuggle], "timeout_ms": 240_000}))
        .await
        .ok();
    for seen in world.saw("http") {
        let path = seen["path"].as_str().unwrap();
        assert!(path.starts_with("/open/") && !path.contains("closed"), "{seen}");
        assert_eq!(seen["host"], "api.example.org", "{seen}");
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn the_host_and_its_api(server: &mut Server, world: &World) {
    let attacker = sandbox(server, world, json!({"preset": "all-public"})).await;
    let memory = server.memory();
    let port = server.client().url().rsplit(':').next().unwrap().to_owned();
    for host in [
        "127.0.0.1",
        "192.0.2.1",
        "[::1]",
        "[fd77::1]",
        "198.19.0.1",
        "198.18.0.1",
        "localhost",
        "host.docker.internal",
    ] {
        for port in [port.as_str(), "53", "22"] {
            assert_refused(&attacker, &format!("-g http://{host}:{port}/healthz")).await;
        }
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

/// Addresses that look like anybody's, given to the host while the server runs, with somebody listening there.
async fn the_hosts_own_public_addresses(server: &mut Server, world: &World) {
    let policy = json!({"preset": "all-public", "rules": [
        {"action": "allow", "to": "198.51.100.0/24", "protocol": "udp"},
        {"action": "allow", "to": "host.example.org", "ports": ["1-65535"]},
    ]});
    let attacker = sandbox(server, world, policy).await;
    let memory = server.memory();
    world.give_host("198.51.100.7/32");
    world.give_host("2001:db8:7::7/128");
    let listeners = ["198.51.100.7:0", "[2001:db8:7::7]:0"].map(|at| TcpListener::bind(at).unwrap());
    let datagrams = UdpSocket::bind("198.51.100.7:0").unwrap();
    for (listener, hosts) in listeners.iter().zip([
        &["198.51.100.7", "host.example.org", "[::ffff:198.51.100.7]"][..],
        &["[2001:db8:7::7]"],
    ]) {
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in hosts {
            assert_refused(&attacker, &format!("-g http://{host}:{port}/")).await;
        }
        let nobody = listener.accept().map_err(|error| error.kind());
        assert_eq!(nobody.unwrap_err(), ErrorKind::WouldBlock, "somebody got through");
    }
    let port = datagrams.local_addr().unwrap().port();
    attacker
        .sh(&format!("echo hello > /dev/udp/198.51.100.7/{port}"))
        .await
        .ok();
    for protocol in ["tcp", "udp"] {
        until_logged(&attacker, "its own address is refused", |fact| {
            fact["data"]["rule"] == "floor: own address" && fact["data"]["protocol"] == protocol
        })
        .await;
    }
    datagrams.set_nonblocking(true).unwrap();
    assert!(datagrams.recv(&mut [0; 8]).is_err(), "a datagram got through");
    let why = attacker
        .client
        .get_with(
            &attacker.path("/network/explain"),
            &[("url", "http://198.51.100.7/")],
        )
        .await
        .ok();
    assert_eq!(
        (&why["verdict"], &why["rule"]),
        (&json!("denied"), &json!("floor: own address"))
    );
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn other_sandboxes(server: &mut Server, world: &World) {
    let neighbour = sandbox(server, world, json!({"preset": "all-public"})).await;
    let attacker = sandbox(
        server,
        world,
        json!({"preset": "all-public", "rules": [{"action": "allow", "to": "198.18.0.0/15"}]}),
    )
    .await;
    let memory = server.memory();
    let serving = neighbour
        .background("cd /etc && exec python3 -u -m http.server --bind :: 8000")
        .await;
    neighbour.until_logged(&serving, "Serving").await;
    let addresses = neighbour.sh("hostname -I").await.ok();
    for address in addresses.split_whitespace() {
        let host = if address.contains(':') {
            format!("[{address}]")
        } else {
            address.to_owned()
        };
        assert_refused(&attacker, &format!("-g http://{host}:8000/hostname")).await;
    }
    assert_unharmed(server, world, &attacker, memory).await;
}

async fn floods_of_names_and_datagrams(server: &mut Server, world: &World) {
    let neighbour = sandbox(server, world, allow(&["api.example.org"])).await;
    let attacker = sandbox(server, world, allow(&["*.wild.example.org"])).await;
    let memory = server.memory();
    let flood = "python3 - <<'END'
import socket, struct, os, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setblocking(False)
end = time.time() + 5
n = 0
while time.time() < end:
    name = os.urandom(8).hex()
    q = struct.pack('!6H', n & 65535, 0x100, 1, 0, 0, 0) + bytes([16]) + name.encode() + b'\\x04wild\\x07example\\x03org\\0' + struct.pack('!2H', 1, 1)
    for data, port in ((q, 53), (os.urandom(1200), 9999), (os.urandom(600), 53)):
        try: s.sendto(data, ('198.18.0.1', port))
        except OSError: pass
    n += 1
print(n)
END";
    let command = attacker.background(flood).await;
    for _ in 0..5 {
        assert_eq!(get(&neighbour, "https://api.example.org/").await.0, 200);
    }
    within(
        "the flood is over",
        Duration::from_secs(60),
        attacker.until_ended(&command),
    )
    .await;
    // Names under a wildcard can carry data; how fast is bounded.
    assert!(
        world.asked().len() < 3000,
        "{} names left the machine",
        world.asked().len()
    );
    assert_unharmed(server, world, &attacker, memory).await;
}

/// Asks a hundred times, each once and without patience for a second try, while another floods in every way it can.
async fn a_flood_costs_its_neighbours_no_answer(server: &mut Server, world: &World) {
    let neighbour = sandbox(server, world, allow(&["api.example.org"])).await;
    let attacker = sandbox(server, world, allow(&["*.wild.example.org"])).await;
    let memory = server.memory();
    let flood = "python3 -u - <<'END'
import os, socket, struct, threading, time
end = time.time() + 60
def question(n):
    return struct.pack('!6H', n & 65535, 0x100, 1, 0, 0, 0) + bytes([16]) + os.urandom(8).hex().encode() + b'\\x04wild\\x07example\\x03org\\0' + struct.pack('!2H', 1, 1)
def datagrams(port, size):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setblocking(False)
    data = question(1) if size == 0 else os.urandom(size)
    while time.time() < end and not os.path.exists('/tmp/enough'):
        try: s.sendto(data, ('198.18.0.1', port))
        except OSError: pass
def connections():
    while time.time() < end and not os.path.exists('/tmp/enough'):
        s = socket.socket(); s.setblocking(False)
        try: s.connect(('198.18.0.1', 53))
        except OSError: pass
        s.close()
for args in ((53, 0), (53, 0), (53, 1200), (9999, 60000)):
    threading.Thread(target=datagrams, args=args).start()
threading.Thread(target=connections).start()
print('flooding')
END";
    let command = attacker.background(flood).await;
    attacker.until_logged(&command, "flooding").await;
    let asking = "python3 - <<'END'
import socket, struct
def name(text): return b''.join(bytes([len(part)]) + part.encode() for part in text.split('.')) + b'\\0'
answered = 0
for n in range(100):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(10)
    s.sendto(struct.pack('!6H', n, 0x100, 1, 0, 0, 0) + name('api.example.org') + struct.pack('!2H', 1, 1), ('198.18.0.1', 53))
    try: answer = s.recv(2000)
    except OSError: continue
    head = struct.unpack('!6H', answer[:12])
    answered += head[0] == n and head[1] & 15 == 0 and head[3] == 1
print(answered)
END";
    assert_eq!(neighbour.sh(asking).await.ok().trim(), "100");
    for _ in 0..3 {
        assert_eq!(get(&neighbour, "https://api.example.org/").await.0, 200);
    }
    attacker.sh("touch /tmp/enough").await.ok();
    within(
        "the flood is over",
        Duration::from_secs(90),
        attacker.until_ended(&command),
    )
    .await;
    assert_unharmed(server, world, &attacker, memory).await;
}

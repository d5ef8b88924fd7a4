//! Reaching for what is not one's own: the host's services, the cloud's, and other sandboxes.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::time::Duration;

use atoll_proof::{Server, json, on_every_tier};
use tokio::net::TcpListener;

use crate::Scene;

on_every_tier!(
    host_loopback_services,
    the_metadata_address_and_the_world,
    another_sandboxs_files,
    another_sandboxs_processes,
    another_sandboxs_ports,
    the_servers_own_files,
);

/// Speaks to each `host:port`, and prints those that answer. That a connection comes about means nothing: every one ends at
/// the gateway, which hangs up or says that it refuses.
const CONNECT: &str = "
import socket, sys
for target in sys.argv[1:]:
  host, port = target.rsplit(':', 1)
  try:
    s = socket.create_connection((host, int(port)), timeout=2)
    s.sendall(b'GET / HTTP/1.0\\r\\nHost: ' + host.encode() + b'\\r\\n\\r\\n')
    answer = s.recv(4096)
    if answer and b'x-atoll-denied' not in answer: print('answered', target)
    s.close()
  except OSError: pass
";

async fn host_loopback_services(server: &Server) {
    let scene = Scene::new(server).await;
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let six = TcpListener::bind("[::1]:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let api = server.client().authority().to_owned();
    // What this machine is called from outside, if it has a way out at all; nothing is sent.
    let probe = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let outside = probe
        .connect("198.51.100.1:9")
        .and_then(|()| probe.local_addr())
        .map(|address| address.ip());
    let mut targets = vec![
        format!("127.0.0.1:{port}"),
        format!("127.1.2.3:{port}"),
        format!("0.0.0.0:{port}"),
        format!("localhost:{port}"),
        format!("::1:{}", six.local_addr().unwrap().port()),
        api.clone(),
        format!("172.17.0.1:{port}"),
        "127.0.0.1:22".into(),
    ];
    targets.extend(outside.ok().map(|ip| format!("{ip}:{port}")));
    for user in ["root", "nobody"] {
        let mut argv = vec!["python3", "-c", CONNECT];
        argv.extend(targets.iter().map(String::as_str));
        let output = scene
            .attacker
            .run_with(json!({"argv": argv, "user": user, "timeout_ms": 40_000}))
            .await;
        assert_eq!(output.ok(), "", "as {user}");
    }
    let reached = tokio::time::timeout(Duration::from_millis(50), async {
        tokio::select! { r = listener.accept() => r.is_ok(), r = six.accept() => r.is_ok() }
    });
    assert!(reached.await.is_err(), "the host's service was reached");

    // Abstract Unix sockets live in the network namespace, not in the filesystem.
    let name = format!("atoll-proof-{}", std::process::id());
    let abstract_socket = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name).unwrap()).unwrap();
    abstract_socket.set_nonblocking(true).unwrap();
    let script = format!("import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}')");
    let output = scene.attacker.run(&["python3", "-c", &script]).await;
    assert_ne!(output.code, Some(0), "{output:?}");
    assert!(
        abstract_socket.accept().is_err(),
        "the host's abstract socket was reached"
    );
    scene.assert_unharmed().await;
}

/// Names the kinds of sockets that can be had and should not.
const OTHER_SOCKETS: &str = r"
import socket
for kind, proto in ((socket.SOCK_RAW, socket.IPPROTO_ICMP), (socket.SOCK_RAW, 255)):
  try: socket.socket(socket.AF_INET, kind, proto); print('raw')
  except OSError: pass
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0); print('packet')
except OSError: pass
try: socket.socket(40, socket.SOCK_STREAM).connect((2, 1024)); print('vsock')
except (OSError, TypeError): pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(1)
try: s.sendto(b'x', ('8.8.8.8', 123)); print('answered', s.recv(100))
except OSError: pass
";

async fn the_metadata_address_and_the_world(server: &Server) {
    let scene = Scene::new(server).await;
    let targets = [
        "169.254.169.254:80",
        "100.100.100.200:80",
        "fd00:ec2::254:80",
        "metadata.google.internal:80",
        "10.0.0.1:80",
        "192.168.0.1:80",
        "8.8.8.8:53",
        "1.1.1.1:443",
        "example.com:80",
    ];
    let mut argv = vec!["python3", "-c", CONNECT];
    argv.extend(targets);
    let output = scene
        .attacker
        .run_with(json!({"argv": argv, "user": "root", "timeout_ms": 60_000}))
        .await;
    assert_eq!(output.ok(), "", "nothing leaves a sandbox");
    let output = scene
        .attacker
        .run_with(json!({"argv": ["python3", "-c", OTHER_SOCKETS], "user": "root"}))
        .await;
    assert_eq!(output.ok(), "");
    let interfaces = scene
        .attacker
        .sh("ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")
        .await
        .ok();
    let known = |name| matches!(name, "lo" | "eth0");
    assert!(interfaces.lines().all(known), "{interfaces}");
    scene.assert_unharmed().await;
}

async fn another_sandboxs_files(server: &Server) {
    let scene = Scene::new(server).await;
    scene
        .neighbour
        .write("/tmp/neighbours-secret-file", b"neighbours-secret-content")
        .await;
    scene
        .neighbour
        .write("/dev/shm/neighbours-secret-shm", b"neighbours-secret-content")
        .await;
    scene
        .neighbour
        .write("neighbours-secret-home", b"neighbours-secret-content")
        .await;
    let line = "find / -xdev -name 'neighbours-secret*' 2>/dev/null; \
                find /proc /dev /run /sys -maxdepth 3 -name 'neighbours-secret*' 2>/dev/null; \
                find /proc/1/root/ -maxdepth 3 -name 'neighbours-secret*' 2>/dev/null; true";
    let output = scene
        .attacker
        .run_with(json!({"argv": ["bash", "-c", line], "user": "root", "timeout_ms": 60_000}))
        .await;
    assert_eq!(output.ok(), "");
    // A change to the shared template is seen by whoever made it only.
    let line = "for f in /etc/hostname /usr/bin/evil; do echo evil > $f; done; echo evil >> /etc/passwd; rm /usr/bin/git";
    scene.attacker.root_sh(line).await.ok();
    let output = scene
        .neighbour
        .sh("cat /etc/hostname; ls /usr/bin/evil; git --version; grep evil /etc/passwd")
        .await;
    assert!(
        !output.stdout.contains("evil") && output.stdout.contains("git version"),
        "{output:?}"
    );
    let fresh = server.sandbox().await;
    let output = fresh
        .sh("cat /etc/hostname; ls /usr/bin/evil; git --version; grep evil /etc/passwd")
        .await;
    assert!(
        !output.stdout.contains("evil") && output.stdout.contains("git version"),
        "{output:?}"
    );
    scene.assert_unharmed().await;
}

async fn another_sandboxs_processes(server: &Server) {
    let scene = Scene::new(server).await;
    let marker = scene
        .neighbour
        .background("exec -a neighbours-marker sleep 1000")
        .await;
    let seen = scene
        .attacker
        .root_sh("ps axww; cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' '")
        .await
        .ok();
    assert!(
        !seen.contains("neighbours-marker") && !seen.contains("atoll server") && !seen.contains("--data"),
        "{seen}"
    );
    // Whatever numbers the host gives its processes, they mean nothing inside.
    let mut pids: Vec<u32> = atoll_proof::host::cgroup_processes(server.cgroup())
        .into_iter()
        .collect();
    pids.push(server.pid());
    pids.push(std::process::id());
    let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
    scene
        .attacker
        .root_sh(&format!(
            "for p in {}; do [ $p -gt 300 ] && kill -9 $p 2>/dev/null; done; true",
            pids.join(" ")
        ))
        .await;
    assert_eq!(scene.neighbour.command(&marker).await["state"], "running");
    // System V memory and message queues are each one's own.
    scene.neighbour.sh("ipcmk -M 4096 -p 0666 && ipcmk -Q").await;
    let queues = scene.attacker.sh("ipcs -m -q | grep -c '^0x'").await;
    assert_eq!(queues.stdout.trim(), "0", "{queues:?}");
    let (one, two) = (
        scene.attacker.sh("hostname").await.ok(),
        scene.neighbour.sh("hostname").await.ok(),
    );
    assert_ne!(one, two);
    scene.assert_unharmed().await;
}

async fn another_sandboxs_ports(server: &Server) {
    let scene = Scene::new(server).await;
    let command = scene
        .neighbour
        .background("echo up; exec python3 -m http.server 8123 --bind 0.0.0.0")
        .await;
    scene.neighbour.until_logged(&command, "up").await;
    let listening = "until curl -so /dev/null http://127.0.0.1:8123/; do sleep 0.05; done";
    scene.neighbour.sh(listening).await.ok();
    let addresses = scene.neighbour.sh("hostname -I; hostname").await.stdout;
    let mut targets = vec!["127.0.0.1:8123".to_owned(), "localhost:8123".to_owned()];
    targets.extend(
        addresses
            .split_whitespace()
            .map(|address| format!("{address}:8123")),
    );
    let mut argv = vec!["python3", "-c", CONNECT];
    argv.extend(targets.iter().map(String::as_str));
    let output = scene
        .attacker
        .run_with(json!({"argv": argv, "user": "root", "timeout_ms": 40_000}))
        .await;
    assert_eq!(output.ok(), "");
    // Both may use the same number.
    let own = scene
        .attacker
        .run(&[
            "python3",
            "-c",
            "import socket; socket.create_server(('0.0.0.0', 8123))",
        ])
        .await;
    own.ok();
    scene.assert_unharmed().await;
}

async fn the_servers_own_files(server: &Server) {
    let scene = Scene::new(server).await;
    let data = server.data();
    let line = format!(
        "ls {0} {0}/admin.key /proc/1/root{0} /proc/1/cwd/{0} 2>/dev/null; cat {0}/admin.key 2>/dev/null; \
         cat /proc/mounts /proc/self/mountinfo /proc/1/{{cmdline,environ}} /proc/self/cgroup | grep -a -e '{0}'; true",
        data.display()
    );
    let output = scene.attacker.root_sh(&line).await;
    assert_eq!(
        output.ok(),
        "",
        "nothing inside tells where the server keeps its things"
    );
    let environment = scene.attacker.root_sh("cat /proc/1/environ; env").await.ok();
    for secret in ["ATOLL", "e2b_", "CARGO", "SSH_"] {
        assert!(!environment.contains(secret), "{environment}");
    }
    scene.assert_unharmed().await;
}

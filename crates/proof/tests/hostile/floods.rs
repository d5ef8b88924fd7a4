//! More output than anybody can take.

use std::time::Duration;

use atoll_proof::stream::Received;
use atoll_proof::{MIB, Server, json, on_every_tier};
use reqwest::Method;

use crate::Scene;

on_every_tier!(
    output_flood,
    output_flood_in_the_background,
    output_flood_to_a_reader_who_does_not_read,
    endless_single_line,
    terminals_left_open,
    port_flood,
    watch_flood,
    many_streams,
);

async fn output_flood(server: &Server) {
    let scene = Scene::new(server).await;
    let body = json!({"cmd": "yes & yes >&2", "timeout_ms": 4000});
    let output = scene
        .attack(&body)
        .await
        .expect("a command that floods is only a command");
    assert!(
        output.timed_out && output.json["stdout_truncated"] == json!(true),
        "not flooded"
    );
    assert!(output.stdout.len() as u64 <= 4 * MIB && output.stderr.len() as u64 <= 4 * MIB);
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn output_flood_in_the_background(server: &Server) {
    let scene = Scene::new(server).await;
    let mut commands = Vec::new();
    for _ in 0..4 {
        commands.push(scene.attacker.background("exec yes").await);
    }
    for command in &commands {
        atoll_proof::wait::until("a lot was written", Duration::from_secs(60), || async {
            let written = scene.attacker.command(command).await["output_bytes"]
                .as_u64()
                .unwrap();
            (written > 50 * MIB).then_some(())
        })
        .await;
    }
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// The stream stalls, and nobody else's does.
async fn output_flood_to_a_reader_who_does_not_read(server: &Server) {
    let scene = Scene::new(server).await;
    scene.attacker.sh("head -c 100M /dev/zero > /tmp/big").await.ok();
    let mut held = Vec::new();
    for _ in 0..8 {
        let request = scene
            .attacker
            .client
            .request(Method::POST, &scene.attacker.path("/exec"));
        let request = request
            .header("accept", "text/event-stream")
            .json(&json!({"cmd": "exec cat /dev/zero"}));
        held.push(scene.attacker.client.open(request).await);
        let path = scene.attacker.path("/files/content?path=/tmp/big");
        held.push(
            scene
                .attacker
                .client
                .open(scene.attacker.client.request(Method::GET, &path))
                .await,
        );
    }
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        scene.assert_attacker_works().await;
        scene.server.assert_answers().await;
    }
    scene.assert_unharmed().await;
}

async fn endless_single_line(server: &Server) {
    let scene = Scene::new(server).await;
    let line = "tr '\\0' x < /dev/zero";
    let output = scene
        .attack(&json!({"cmd": line, "timeout_ms": 3000}))
        .await
        .unwrap();
    assert!(output.json["stdout_bytes"].as_u64().unwrap() > MIB);
    // As events, and on a terminal, read for a while.
    let mut events = scene.attacker.exec_events(&json!({ "cmd": line })).await;
    let mut session = scene
        .attacker
        .session(&json!({"cmd": line, "pty": {"rows": 24, "cols": 80}}))
        .await;
    for _ in 0..200 {
        events.next().await.unwrap();
        assert_ne!(session.next().await, Received::Closed);
    }
    drop((events, session));
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn terminals_left_open(server: &Server) {
    let scene = Scene::new(server).await;
    let mut left = Vec::new();
    for _ in 0..20 {
        let request = json!({"argv": ["bash"], "pty": {"rows": 24, "cols": 80}});
        let (mut session, _) = scene.attacker.started(&request).await;
        // Fills the terminal's buffers; nobody reads from here on.
        session.stdin(b"yes\n").await;
        left.push(session);
    }
    scene.assert_attacker_works().await;
    assert_eq!(
        scene
            .attacker
            .commands()
            .await
            .iter()
            .filter(|command| command["pty"] == json!(true))
            .count(),
        20
    );
    // Half hang up without a word, half stay while the sandbox is killed under them.
    left.truncate(10);
    atoll_proof::wait::until("those who hung up are gone", Duration::from_secs(30), || async {
        let commands = scene.attacker.commands().await;
        let running = commands
            .iter()
            .filter(|command| command["pty"] == json!(true) && command["state"] == json!("running"));
        (running.count() == 10).then_some(())
    })
    .await;
    scene.assert_unharmed().await;
}

/// Port 8000 sends a body without end, 8001 a head without end, 8002 nothing at all.
const FLOODING_SERVER: &str = r"
import socket, threading
def serve(port, work):
  l = socket.create_server(('127.0.0.1', port), backlog=64)
  while True:
    c, _ = l.accept(); threading.Thread(target=work, args=(c,), daemon=True).start()
def flood(c):
  c.recv(4096); c.sendall(b'HTTP/1.1 200 OK\r\n\r\n')
  while True: c.sendall(b'x' * 65536)
def head(c):
  c.recv(4096)
  while True: c.sendall(b'X-Header: ' + b'y' * 65536 + b'\r\n')
keep = []
for port, work in ((8000, flood), (8001, head), (8002, keep.append)):
  threading.Thread(target=serve, args=(port, work), daemon=True).start()
print('up', flush=True)
threading.Event().wait()
";

/// A port that sends without end to a client that does not read, and one that never answers.
async fn port_flood(server: &Server) {
    let scene = Scene::new(server).await;
    scene
        .attacker
        .write("/tmp/flood.py", FLOODING_SERVER.as_bytes())
        .await;
    let command = scene.attacker.background("exec python3 /tmp/flood.py").await;
    scene.attacker.until_logged(&command, "up").await;
    let mut tokens = Vec::new();
    for port in 8000..=8002 {
        let at = scene.attacker.path(&format!("/ports/{port}"));
        let access = scene.attacker.client.get(&at).await.ok();
        tokens.push(access["token"].as_str().unwrap().to_owned());
    }
    let client = scene.attacker.client.with_key(None);
    let own = client.authority().rsplit_once(':').unwrap().1.to_owned();
    let open = |port: u16| {
        let host = format!("{port}-{}.localhost:{own}", scene.attacker.bare());
        client
            .request(Method::GET, "/")
            .header("host", host)
            .header("x-atoll-token", &tokens[usize::from(port - 8000)])
    };
    let mut held = Vec::new();
    for _ in 0..8 {
        held.push(client.open(open(8000)).await);
    }
    let endless_head = client.send(open(8001)).await;
    endless_head.refused(502, "port_broke_http");
    let silent = open(8002).timeout(Duration::from_secs(2)).send().await;
    assert!(
        silent.is_err_and(|error| error.is_timeout()),
        "the client gives up, not the server"
    );
    scene.assert_attacker_works().await;
    drop(held);
    scene.assert_unharmed().await;
}

/// Makes and renames files for four seconds.
const CHANGES: &str = r"
import os, time
end = time.time() + 4
while time.time() < end:
  for i in range(500):
    p = f'/tmp/w/a/{i}'; open(p, 'w').close(); os.rename(p, f'/tmp/w/a/b/{i}')
";

async fn watch_flood(server: &Server) {
    let scene = Scene::new(server).await;
    scene.attacker.sh("mkdir -p /tmp/w/a/b").await.ok();
    let mut watches = Vec::new();
    for _ in 0..4 {
        watches.push(scene.attacker.watch("/tmp/w", true).await);
    }
    scene
        .attack(&json!({"argv": ["python3", "-c", CHANGES], "timeout_ms": 20_000}))
        .await;
    scene.assert_attacker_works().await;
    drop(watches);
    scene.assert_unharmed().await;
}

/// As many operations at once as a sandbox takes, and more: refused, not queued without end.
async fn many_streams(server: &Server) {
    let scene = Scene::new(server).await;
    let sleep = json!({"cmd": "sleep 3"});
    let runs = (0..700).map(|_| scene.attacker.exec(&sleep));
    let answers = futures_util::future::join_all(runs).await;
    let mut refused = 0;
    for answer in &answers {
        if answer.status != 200 {
            // 410, 409: a tier may end a sandbox that exceeds its limit of processes, and says so.
            assert!([409, 410, 429, 503, 502].contains(&answer.status), "{answer:?}");
            answer.error();
            refused += 1;
        }
    }
    eprintln!("{} ran, {refused} were refused", answers.len() - refused);
    scene.assert_unharmed().await;
}

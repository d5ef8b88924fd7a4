//! Bad input from callers: too large, malformed, half-sent.

use std::time::{Duration, Instant};

use atoll_proof::random::Random;
use atoll_proof::stream::{Received, Session};
use atoll_proof::{Server, json, on_every_tier};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Scene;

on_every_tier!(
    a_hundred_megabytes_of_arguments,
    arguments_that_the_kernel_refuses,
    not_http,
    requests_that_never_end,
    websockets_that_misbehave,
    hanging_up_in_the_middle,
);

/// Sends a head and as much of a body as is taken; returns what comes back.
async fn raw(server: &Server, head: &str, body: usize) -> String {
    let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
    tcp.write_all(head.as_bytes()).await.unwrap();
    let (mut read, mut write) = tcp.split();
    let sending = async {
        let piece = vec![b'x'; 1 << 20];
        let mut left = body;
        while left > 0 {
            let count = left.min(piece.len());
            if write.write_all(&piece[..count]).await.is_err() {
                break;
            }
            left -= count;
        }
        std::future::pending::<()>().await;
    };
    let mut answer = vec![0; 4096];
    let reading = async {
        let count = read.read(&mut answer).await.unwrap_or(0);
        String::from_utf8_lossy(&answer[..count]).into_owned()
    };
    tokio::select! {
        () = sending => String::new(),
        text = reading => text,
        () = tokio::time::sleep(Duration::from_secs(20)) => panic!("no answer within 20 s"),
    }
}

async fn a_hundred_megabytes_of_arguments(server: &Server) {
    let scene = Scene::new(server).await;
    let path = scene.attacker.path("/exec");
    let key = server.client().key().unwrap();
    let size = 100 << 20;
    let began = Instant::now();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
         Content-Length: {size}\r\n\r\n{{\"argv\": [\"true\", \""
    );
    let answer = raw(server, &head, size).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "refused at once, not after reading: {:?}",
        began.elapsed()
    );
    // Without a length to refuse by.
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n"
    );
    let answer = raw(server, &head, size).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Hands a hundred megabytes to the kernel.
const LONG_ARGUMENT: &str = r"
import os
try: os.execv('/bin/true', ['true', 'x' * (100 << 20)])
except OSError as e: print(e.errno)
";

async fn arguments_that_the_kernel_refuses(server: &Server) {
    let scene = Scene::new(server).await;
    let long = "x".repeat(900_000);
    let many: Vec<&str> = std::iter::once("true")
        .chain(std::iter::repeat_n("x", 200_000))
        .collect();
    for body in [
        json!({"argv": ["true", long]}),
        json!({ "argv": many }),
        json!({"cmd": long}),
        json!({"argv": ["true"], "env": {"LONG": long}}),
        json!({"argv": ["true\u{0}x"]}),
        json!({"argv": ["true"], "env": {"A\u{0}": "x"}}),
        json!({"argv": ["true"], "env": {"A=B": "x"}}),
        json!({"argv": ["true"], "cwd": "x".repeat(100_000)}),
        json!({"argv": ["true"], "user": "x".repeat(100_000)}),
        json!({"argv": ["true"], "timeout_ms": 0}),
        json!({"argv": ["true"], "timeout_ms": u64::MAX}),
        json!({"argv": ["true"], "pty": {"rows": 0, "cols": 0}}),
    ] {
        let shown: String = body.to_string().chars().take(60).collect();
        let answer = scene.attacker.exec(&body).await;
        assert!(answer.status < 500, "{shown}: {answer:?}");
        if answer.status != 200 {
            answer.error();
        }
    }
    // From inside, too.
    let refused = scene.attacker.run(&["python3", "-c", LONG_ARGUMENT]).await.ok();
    assert!(
        ["7\n", "36\n"].contains(&refused.as_str()),
        "E2BIG, or as gVisor says ENAMETOOLONG: {refused}"
    );
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn not_http(server: &Server) {
    let scene = Scene::new(server).await;
    let mut random = Random::seeded();
    for round in 0..20 {
        let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
        let garbage: Vec<u8> = match round % 4 {
            0 => (0..4096).map(|_| random.next().to_le_bytes()[0]).collect(),
            1 => b"GET / HTTP/9.9\r\n\r\n".to_vec(),
            2 => format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 20)).into_bytes(),
            _ => format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(1 << 20)).into_bytes(),
        };
        // The server may hang up before it has read all of it.
        let _refused = tcp.write_all(&garbage).await;
        let mut answer = [0; 64];
        let read = tokio::time::timeout(Duration::from_secs(10), tcp.read(&mut answer)).await;
        if let Ok(Ok(count)) = read
            && count > 0
        {
            let text = String::from_utf8_lossy(&answer[..count]);
            assert!(text.starts_with("HTTP/1.1 4"), "{text}");
        }
    }
    scene.assert_unharmed().await;
}

/// Five hundred clients that begin and do not go on.
async fn requests_that_never_end(server: &Server) {
    let scene = Scene::new(server).await;
    let mut held = Vec::new();
    for number in 0..500 {
        let mut tcp = TcpStream::connect(server.client().authority()).await.unwrap();
        let begun: &[u8] = match number % 3 {
            0 => b"",
            1 => b"POST /v1/sandboxes HTTP/1.1\r\nHost:",
            _ => {
                b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
                  Content-Length: 99999\r\n\r\n{"
            }
        };
        tcp.write_all(begun).await.unwrap();
        held.push(tcp);
    }
    server.assert_answers().await;
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn websockets_that_misbehave(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    // Larger than any request may be.
    let mut session: Session = attacker.session(&json!({"cmd": "x".repeat(3 << 20)})).await;
    match session.next().await {
        Received::Closed => {}
        Received::Control(value) => assert!(value["error"].is_object(), "{value}"),
        Received::Output => panic!("it ran"),
    }
    // A message on a channel that is not ours to write.
    let (mut session, _) = attacker.started(&json!({"argv": ["cat"]})).await;
    session.raw(&[2, b'x']).await;
    match session.next().await {
        Received::Control(value) => assert_eq!(value["error"]["code"], "invalid_message"),
        other => panic!("{other:?}"),
    }
    // Stdin to a command that does not read: the connection stalls, not the server.
    let (mut stalled, _) = attacker.started(&json!({"argv": ["sleep", "1000"]})).await;
    let flooding = async {
        loop {
            stalled.stdin(&vec![b'x'; 200_000]).await;
        }
    };
    assert!(
        tokio::time::timeout(Duration::from_secs(2), flooding)
            .await
            .is_err()
    );
    scene.assert_attacker_works().await;
    drop(stalled);
    scene.assert_unharmed().await;
}

/// Connections that break at every stage leave no command, no stream and no descriptor behind.
async fn hanging_up_in_the_middle(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    let descriptors = atoll_proof::host::open_files(server.pid());
    for _ in 0..20 {
        let mut events = attacker.exec_events(&json!({"cmd": "yes"})).await;
        events.next().await;
        drop(events);
        let terminal = json!({"argv": ["cat"], "pty": {"rows": 1, "cols": 1}});
        drop(attacker.started(&terminal).await);
        drop(attacker.watch("/tmp", true).await);
    }
    atoll_proof::wait::until("all commands are gone", Duration::from_secs(30), || async {
        let running = attacker.commands().await;
        running
            .iter()
            .all(|command| command["state"] != json!("running"))
            .then_some(())
    })
    .await;
    atoll_proof::wait::until_sync("all descriptors are closed", Duration::from_secs(30), || {
        (atoll_proof::host::open_files(server.pid()) <= descriptors + 4).then_some(())
    })
    .await;
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

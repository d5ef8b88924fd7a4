//! Attacks from inside sandboxes: floods of names, of processes, of output, and of the way to models.

use std::time::Duration;

use futures_util::StreamExt as _;
use serde_json::json;

use super::Hand;
use crate::soak::random::Random;

/// Asks the resolver for names that do not exist, as fast as it can, and reads no answer.
const NAMES: &str = r#"
import os, re, socket, struct, time
where = re.search(r"nameserver\s+(\S+)", open("/etc/resolv.conf").read()).group(1)
family = socket.AF_INET6 if ":" in where else socket.AF_INET
sockets = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(16)]
end, sent = time.time() + 5, 0
while time.time() < end and sent < 20000:
    name = b"".join(bytes([len(p)]) + p for p in (os.urandom(8).hex().encode(), b"flood", b"example", b"org"))
    ask = struct.pack(">HHHHHH", sent & 65535, 256, 1, 0, 0, 0) + name + b"\0" + struct.pack(">HH", 1, 1)
    try: sockets[sent % 16].sendto(ask, (where, 53))
    except OSError: pass
    sent += 1
print(sent)
"#;

/// Sends large bodies to the sandboxes' way to models, without a token, on many connections, and leaves them open.
const DOOR: &str = r#"
import socket, time
held, sent = [], 0
piece = b"x" * 65536
for _ in range(30):
    try:
        s = socket.create_connection(("models.atoll.internal", 80), 2)
        s.settimeout(2)
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: models.atoll.internal\r\ncontent-length: 33000000\r\n\r\n")
        held.append(s)
    except OSError: break
end = time.time() + 6
while held and time.time() < end and sent < 150_000_000:
    for s in list(held):
        try: sent += s.send(piece)
        except OSError: held.remove(s)
print(sent)
"#;

/// Calls of one sandbox: made, made to run something, and gone.
async fn from_inside(hand: &Hand, more: &serde_json::Value, program: &str) -> u64 {
    let Some(id) = hand.sandbox(more).await else {
        return 1;
    };
    let body = json!({"argv": ["python3", "-c", program], "timeout_ms": 12_000});
    let request = hand.caller.post(&format!("/v1/sandboxes/{id}/exec"), &body);
    let ran = hand.caller.attempt("from inside", request).await;
    hand.kill(&id).await;
    let ran = ran.map(|ran| ran.json()).unwrap_or_default();
    let said = ran["stdout"].as_str().unwrap_or_default().trim().to_owned();
    1 + said.parse::<u64>().unwrap_or_default()
}

pub(super) async fn dns(hand: &Hand, random: &mut Random) -> u64 {
    // Names that a rule refuses never leave; those that it allows are looked up. Nobody is there to answer either.
    let policy = match random.chance(2) {
        true => json!({"rules": [{"action": "allow", "to": "docs.example.org"}]}),
        false => json!({"preset": "none"}),
    };
    from_inside(hand, &json!({"network": policy}), NAMES).await
}

pub(super) async fn door(hand: &Hand, random: &mut Random) -> u64 {
    let policy = match random.chance(2) {
        true => json!({"preset": "all-public"}),
        false => json!({"rules": [{"action": "allow", "to": "models.atoll.internal"}]}),
    };
    from_inside(hand, &json!({"network": policy}), DOOR).await
}

pub(super) async fn forks(hand: &Hand, _random: &mut Random) -> u64 {
    let Some(id) = hand.sandbox(&json!({})).await else {
        return 1;
    };
    let bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass";
    let body = json!({"argv": ["python3", "-c", bomb], "timeout_ms": 4000});
    let request = hand.caller.post(&format!("/v1/sandboxes/{id}/exec"), &body);
    let _over = hand
        .caller
        .attempt("forks", request.timeout(Duration::from_secs(8)))
        .await;
    hand.kill(&id).await;
    128
}

/// Hundreds of megabytes that are not read, or read for a moment.
pub(super) async fn output(hand: &Hand, random: &mut Random) -> u64 {
    let Some(id) = hand.sandbox(&json!({})).await else {
        return 1;
    };
    let line = "for i in 1 2 3 4 5 6; do head -c 60000000 /dev/zero | tr '\\0' a >&$((i % 2 + 1)); done";
    let body = json!({"cmd": line, "timeout_ms": 10_000, "background": random.chance(3)});
    let path = format!("/v1/sandboxes/{id}/exec");
    let mut streams = Vec::new();
    for _ in 0..3 {
        let request = hand
            .caller
            .post(&path, &body)
            .header("accept", "text/event-stream");
        if let Ok(Ok(answer)) = tokio::time::timeout(Duration::from_secs(10), request.send()).await {
            streams.push(answer.bytes_stream());
        }
    }
    let pieces = random.below(200);
    for stream in &mut streams {
        for _ in 0..pieces {
            let next = tokio::time::timeout(Duration::from_secs(1), stream.next()).await;
            if !matches!(next, Ok(Some(Ok(_)))) {
                break;
            }
        }
    }
    // Held without being read, then dropped in the middle.
    hand.world().rest(2000).await;
    drop(streams);
    hand.kill(&id).await;
    3
}

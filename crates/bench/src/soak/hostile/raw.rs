//! Attacks below HTTP: bodies that are large, slow or never come, connections that say nothing, hosts that are none.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::Hand;
use crate::soak::random::Random;

/// Routes that read a body, on every API that shares the port.
const TAKE_BODIES: [(&str, &str); 16] = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v4/ai/language-model"),
    ("POST", "/v3/ai/embedding-model"),
    ("PUT", "/v1/gateway/budgets/x"),
    ("PUT", "/v1/gateway/guards"),
    ("POST", "/v1/sandboxes"),
    ("POST", "/v1/run"),
    ("PUT", "/v1/secrets/x"),
    ("POST", "/sandboxes"),
    ("POST", "/v3/templates"),
    ("POST", "/volumes"),
    ("PUT", "/files?path=x"),
];
const MIB: usize = 1 << 20;
/// All bodies of one attack together.
const MOST_BYTES: usize = 192 * MIB;

/// How a request says who it is from.
fn authority(hand: &Hand, random: &mut Random) -> String {
    let project = &hand.caller.project;
    match random.below(4) {
        0 => format!("authorization: Bearer {}\r\n", project.key),
        1 => format!("x-api-key: {}\r\n", project.model_key),
        2 => "authorization: Bearer atl_0000000000000000000000000000000000000000\r\n".to_owned(),
        _ => String::new(),
    }
}

async fn connect(hand: &Hand) -> Option<TcpStream> {
    let address = hand.world().server.listen;
    let opened = tokio::time::timeout(Duration::from_secs(5), TcpStream::connect(address)).await;
    opened.ok()?.ok()
}

/// Reads what there is, to the end or for a while; it is searched.
async fn listen(hand: &Hand, stream: &mut TcpStream, patience: Duration) -> Vec<u8> {
    let mut heard = Vec::new();
    let reading = async {
        let mut buffer = [0; 8192];
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            heard.extend_from_slice(&buffer[..count]);
            if heard.len() > MIB {
                break;
            }
        }
    };
    let _late = tokio::time::timeout(patience, reading).await;
    hand.world()
        .search(hand.caller.project.index, hand.attack.name(), &heard);
    heard
}

/// Many large bodies at once. Some promise more than they send and hold on to it.
pub(super) async fn bodies(hand: &Hand, random: &mut Random) -> u64 {
    let count = 8 + random.index(9);
    let each = (MOST_BYTES / count).min(33 * MIB);
    let mut all = JoinSet::new();
    for _ in 0..count {
        let Some((method, path)) = random.one(&TAKE_BODIES).copied() else {
            continue;
        };
        let unfinished = random.chance(2);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{}content-length: {}\r\n\r\n",
            authority(hand, random),
            if unfinished { each + 1 } else { each },
        );
        let Some(mut stream) = connect(hand).await else {
            continue;
        };
        all.spawn(async move {
            let sending = async {
                stream.write_all(head.as_bytes()).await.ok()?;
                stream
                    .write_all(b"{\"model\":\"scripted-echo-2\",\"x\":\"")
                    .await
                    .ok()?;
                let piece = vec![b'a'; 256 * 1024];
                let mut sent = 32;
                while sent < each {
                    let length = piece.len().min(each - sent);
                    stream.write_all(&piece[..length]).await.ok()?;
                    sent += length;
                }
                Some(())
            };
            let _refused = tokio::time::timeout(Duration::from_secs(20), sending).await;
            // Held for a while: what was read so far stays where it is.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let mut answer = [0; 1024];
            let _read = tokio::time::timeout(Duration::from_millis(500), stream.read(&mut answer)).await;
        });
    }
    let moves = all.len() as u64;
    while all.join_next().await.is_some() {}
    moves
}

/// Heads and bodies of which a byte comes now and then.
pub(super) async fn slow(hand: &Hand, random: &mut Random) -> u64 {
    let until = Instant::now() + Duration::from_secs(8);
    let mut all = JoinSet::new();
    for _ in 0..40 {
        let Some((method, path)) = random.one(&TAKE_BODIES).copied() else {
            continue;
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{}content-length: 100000\r\n\r\n",
            authority(hand, random)
        );
        // From the first byte on, or from the body on.
        let at_once = if random.chance(2) { 0 } else { head.len() };
        let Some(mut stream) = connect(hand).await else {
            continue;
        };
        all.spawn(async move {
            let bytes = head.as_bytes();
            if stream.write_all(&bytes[..at_once]).await.is_err() {
                return;
            }
            let trickle = bytes[at_once..].iter().copied().chain(std::iter::repeat(b' '));
            for byte in trickle {
                if Instant::now() > until || stream.write_all(&[byte]).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(80)).await;
            }
        });
    }
    let moves = all.len() as u64;
    while all.join_next().await.is_some() {}
    moves
}

/// Connections that say nothing, or begin something and stop; to both ports. They are dropped without a word.
pub(super) async fn silent(hand: &Hand, random: &mut Random) -> u64 {
    let mut held = Vec::new();
    let beginnings: [&[u8]; 6] = [
        b"",
        b"G",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00",
    ];
    for _ in 0..150 {
        let server = &hand.world().server;
        let address = if random.chance(3) {
            server.workflows
        } else {
            server.listen
        };
        let opened = tokio::time::timeout(Duration::from_secs(5), TcpStream::connect(address)).await;
        let Ok(Ok(mut stream)) = opened else {
            continue;
        };
        let _sent = stream
            .write_all(random.one(&beginnings).copied().unwrap_or_default())
            .await;
        held.push(stream);
    }
    let (moves, millis) = (held.len() as u64, 1000 + random.below(6000));
    hand.world().rest(millis).await;
    moves
}

/// Hosts that two parsers may read in two ways, with somebody else's sandbox in them.
pub(super) async fn hosts(hand: &Hand, random: &mut Random) -> u64 {
    let world = hand.world();
    let id = world.board.pick("sandbox", random).unwrap_or_default();
    let bare = id.trim_start_matches("sbx_").to_owned();
    let names = [
        format!("+8000-{bare}.localhost"),
        format!("08000-{bare}.localhost"),
        format!("8000-{bare}.localhost\r\nhost: localhost"),
        format!("8000-{bare}-x.localhost"),
        format!("8000-{}.LOCALHOST.", bare.to_uppercase()),
        format!("x@8000-{bare}.localhost"),
        format!("8000-{bare}.localhost:99999"),
        format!("8000-{bare}.localhost:"),
        format!("49983-{bare}.localhost"),
        format!("+49983-{bare}.localhost"),
        format!("-8000-{bare}.localhost"),
        format!("8000-{bare}%2elocalhost"),
        "models.atoll.internal".to_owned(),
        "localhost, 8000-x.localhost".to_owned(),
        "[::1".to_owned(),
        String::new(),
    ];
    let targets = [
        "/",
        "/v1/sandboxes",
        "/files?path=/etc/passwd",
        "/envs",
        "/metrics",
    ];
    let mut moves = 0;
    for name in names {
        let target = random.one(&targets).copied().unwrap_or("/");
        let line = match random.chance(3) {
            true => format!("GET http://{name}{target} HTTP/1.1\r\nhost: localhost\r\n"),
            false => format!("GET {target} HTTP/1.1\r\nhost: {name}\r\n"),
        };
        let request = format!(
            "{line}{}x-atoll-token: {}\r\nconnection: close\r\n\r\n",
            authority(hand, random),
            hand.caller.project.key
        );
        let Some(mut stream) = connect(hand).await else {
            continue;
        };
        moves += 1;
        if stream.write_all(request.as_bytes()).await.is_ok() {
            listen(hand, &mut stream, Duration::from_secs(2)).await;
        }
    }
    moves
}

//! The gRPC of durable workflows, frame by frame: calls that are begun and not finished.

use std::io::Write as _;

use atoll_proof::{Server, Value};
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::raw::NEVER;

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A header that is not in any table, not compressed.
pub(crate) fn literal(name: &str, value: &str) -> Vec<u8> {
    let mut text = vec![0];
    for part in [name, value] {
        assert!(part.len() < 127);
        text.push(u8::try_from(part.len()).unwrap());
        text.extend_from_slice(part.as_bytes());
    }
    text
}

/// A connection on which HTTP/2 has begun.
pub(crate) async fn connect(authority: &str) -> TcpStream {
    let mut tcp = TcpStream::connect(authority).await.unwrap();
    let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    hello.extend(frame(4, 0, 0, &[]));
    tcp.write_all(&hello).await.unwrap();
    tcp
}

/// Where the server listens for it.
pub(crate) fn authority(server: &Server) -> String {
    let announced = std::fs::read_to_string(server.data().join("server.json")).unwrap();
    let announced: Value = serde_json::from_str(&announced).unwrap();
    let url = announced["workflows"].as_str().unwrap();
    url.strip_prefix("http://").unwrap().to_owned()
}

/// A whole call with one message, compressed: what repeats itself fits into the first window.
pub(crate) fn whole_call(stream: u32, path: &str, authorization: &str, message: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(message).unwrap();
    let packed = packed.finish().unwrap();
    let mut sent = vec![1];
    sent.extend(u32::try_from(packed.len()).unwrap().to_be_bytes());
    sent.extend(packed);
    let mut call = begin(stream, path, Some(authorization), &[("grpc-encoding", "gzip")]);
    const END_STREAM: u8 = 1;
    call.extend(frame(0, END_STREAM, stream, &sent));
    call
}

/// The beginning of a call: its head, and as much of a message as is given.
pub(crate) fn call(stream: u32, path: &str, authorization: Option<&str>, message: &[u8]) -> Vec<u8> {
    let mut call = begin(stream, path, authorization, &[]);
    if !message.is_empty() {
        call.extend(frame(0, 0, stream, message));
    }
    call
}

/// The beginning of a call with as large a head as is taken, which nobody reads.
pub(crate) fn with_large_head(stream: u32, path: &str, message: &[u8]) -> Vec<u8> {
    let value = "x".repeat(100);
    let names: Vec<String> = (0..100).map(|n| format!("own-{n:016}")).collect();
    let more: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
    let mut call = begin(stream, path, None, &more);
    call.extend(frame(0, 0, stream, message));
    call
}

fn begin(stream: u32, path: &str, authorization: Option<&str>, more: &[(&str, &str)]) -> Vec<u8> {
    let mut head = Vec::new();
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    for (name, value) in usual.iter().chain(more) {
        head.extend(literal(name, value));
    }
    if let Some(authorization) = authorization {
        head.extend(literal("authorization", authorization));
    }
    const END_HEADERS: u8 = 4;
    frame(HEADERS, END_HEADERS, stream, &head)
}

/// Waits until a call is answered, taken back, or its connection ended; says which.
pub(crate) async fn until_answered(tcp: &mut TcpStream, stream: u32, what: &str) -> &'static str {
    let answered = async {
        loop {
            let mut head = [0; 9];
            if tcp.read_exact(&mut head).await.is_err() {
                return "closed";
            }
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let of = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            let mut payload = vec![0; length];
            if tcp.read_exact(&mut payload).await.is_err() {
                return "closed";
            }
            match head[3] {
                HEADERS if of == stream => return "answered",
                RST_STREAM if of == stream => return "taken back",
                GOAWAY => return "closed",
                _ => {}
            }
        }
    };
    match tokio::time::timeout(NEVER, answered).await {
        Ok(how) => how,
        Err(_) => panic!("{what}: neither answered nor cut"),
    }
}

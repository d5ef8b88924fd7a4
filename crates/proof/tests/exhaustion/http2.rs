//! HTTP/2 over TLS, frame by frame: floods of what costs a client little and a server much.
//!
//! What must hold: each of them ends by itself, the server does not grow, and others are served meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_proof::{Server, host, on_every_tier, wait};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::grpc::{frame, literal};
use crate::raw::NEVER;
use crate::{assert_nothing_held, meanwhile, neighbour};

on_every_tier!(
    with crate::options().config("\n[tls]\nlisten = \"127.0.0.1:0\"\n");
    floods_of_frames_end_and_harm_nobody,
);

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
/// Flags of a head.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Connections that do the same at once.
const AT_ONCE: usize = 8;
/// The most that one of them sends.
const SENT: usize = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Attack {
    /// Requests, each taken back at once.
    RapidResets,
    /// A head that never ends.
    Continuations,
    /// The same, of nothing.
    EmptyContinuations,
    Settings,
    Pings,
    /// The same, and what is answered is not read.
    UnreadPings,
    /// More requests than there may be, whose bodies never come.
    ManyStreams,
    /// Answers for which there is no room, from somebody who says all the while to be there.
    NoRoom,
}

const ATTACKS: [Attack; 8] = [
    Attack::RapidResets,
    Attack::Continuations,
    Attack::EmptyContinuations,
    Attack::Settings,
    Attack::Pings,
    Attack::UnreadPings,
    Attack::ManyStreams,
    Attack::NoRoom,
];

impl Attack {
    /// What is said at the beginning.
    fn hello(self) -> Vec<u8> {
        let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let window = [0, 4, 0, 0, 0, 0];
        let settings: &[u8] = if self == Self::NoRoom { &window } else { &[] };
        hello.extend(frame(SETTINGS, 0, 0, settings));
        hello
    }

    /// The next that is sent; `None`: that was all.
    fn next(self, turn: u32, authorization: Option<&str>) -> Option<Vec<u8>> {
        let head = |method: &str, path: &str| {
            let mut head = Vec::new();
            for (name, value) in [
                (":method", method),
                (":scheme", "https"),
                (":path", path),
                (":authority", "localhost"),
            ] {
                head.extend(literal(name, value));
            }
            if let Some(authorization) = authorization {
                head.extend(literal("authorization", authorization));
            }
            head
        };
        let streams = (turn * 50..turn * 50 + 50).map(|number| 2 * number + 1);
        Some(match self {
            Self::RapidResets => {
                let one = |stream| {
                    let head = frame(
                        HEADERS,
                        END_STREAM | END_HEADERS,
                        stream,
                        &head("GET", "/v1/sandboxes"),
                    );
                    [head, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
                };
                streams.flat_map(one).collect()
            }
            Self::Continuations | Self::EmptyContinuations if turn == 0 => {
                frame(HEADERS, 0, 1, &head("GET", "/v1/sandboxes"))
            }
            Self::Continuations => {
                let more = literal(&format!("x-{turn}"), &"v".repeat(120)).repeat(100);
                frame(CONTINUATION, 0, 1, &more)
            }
            Self::EmptyContinuations => frame(CONTINUATION, 0, 1, &[]).repeat(1000),
            Self::Settings => frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 100]).repeat(1000),
            Self::Pings | Self::UnreadPings => frame(PING, 0, 0, b"12345678").repeat(1000),
            Self::ManyStreams => streams
                .flat_map(|stream| frame(HEADERS, END_HEADERS, stream, &head("POST", "/v1/sandboxes")))
                .collect(),
            Self::NoRoom if turn < 3 => streams
                .flat_map(|stream| {
                    let head = head("GET", "/openapi.json");
                    frame(HEADERS, END_STREAM | END_HEADERS, stream, &head)
                })
                .collect(),
            Self::NoRoom => return None,
        })
    }
}

/// Where the server speaks TLS, and whom to trust there.
fn secured(server: &Server) -> (String, TlsConnector) {
    let log = server.log();
    let url = log
        .lines()
        .filter(|line| line.contains("serving TLS"))
        .find_map(|line| line.split("https://").nth(1))
        .expect("it says where it speaks TLS");
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(server.data().join("tls/ca.pem")).unwrap() {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    (url.trim().to_owned(), TlsConnector::from(Arc::new(config)))
}

type Stream = TlsStream<TcpStream>;

/// Sends until the server has enough, or all was sent.
async fn send(to: &mut WriteHalf<Stream>, attack: Attack, authorization: Option<&str>) -> usize {
    let mut sent = 0;
    for turn in 0.. {
        let Some(bytes) = attack.next(turn, authorization).filter(|_| sent < SENT) else {
            break;
        };
        if to.write_all(&bytes).await.is_err() || to.flush().await.is_err() {
            break;
        }
        sent += bytes.len();
    }
    sent
}

/// Reads to the end of the connection, and gives what pings want to hear.
async fn read(from: &mut ReadHalf<Stream>, pongs: tokio::sync::mpsc::UnboundedSender<Vec<u8>>) {
    let mut head = [0; 9];
    while from.read_exact(&mut head).await.is_ok() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        if from.read_exact(&mut payload).await.is_err() {
            return;
        }
        if head[3] == PING && head[4] == 0 {
            let _over = pongs.send(frame(PING, 1, 0, &payload));
        }
    }
}

/// What was sent until the server ended it, in bytes.
async fn attack(authority: &str, tls: &TlsConnector, attack: Attack, authorization: Option<&str>) -> usize {
    let tcp = TcpStream::connect(authority).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let Ok(mut stream) = tls.connect(name, tcp).await else {
        // Others of this attack are enough already.
        return 0;
    };
    if stream.write_all(&attack.hello()).await.is_err() {
        return 0;
    }
    let (mut from, mut to) = tokio::io::split(stream);
    let (pongs, mut wanted) = tokio::sync::mpsc::unbounded_channel::<Vec<u8>>();
    let sending = async {
        let sent = send(&mut to, attack, authorization).await;
        while let Some(pong) = wanted.recv().await {
            if to.write_all(&pong).await.is_err() || to.flush().await.is_err() {
                break;
            }
        }
        sent
    };
    let ended = async {
        if attack == Attack::UnreadPings {
            drop(pongs);
            return sending.await;
        }
        tokio::join!(sending, read(&mut from, pongs)).0
    };
    match tokio::time::timeout(NEVER, ended).await {
        Ok(sent) => sent,
        Err(_) => panic!("{attack:?} goes on"),
    }
}

async fn floods_of_frames_end_and_harm_nobody(server: &Server) {
    let neighbour = neighbour(server).await;
    let (authority, tls) = secured(server);
    let key = format!("Bearer {}", server.client().key().unwrap());
    let before = server.memory();
    let files = host::open_files(server.pid());
    let mut table = BTreeMap::new();
    for kind in ATTACKS {
        for who in [None, Some(key.as_str())] {
            let all = (0..AT_ONCE).map(|_| attack(&authority, &tls, kind, who));
            let sent = meanwhile(server, &neighbour, futures_util::future::join_all(all)).await;
            let most = sent.into_iter().max().unwrap_or_default();
            table.insert((kind, who.is_some()), most);
        }
    }
    println!("| attack | with a key | bytes that were taken at most |\n|---|---|---|");
    for ((kind, with_key), most) in &table {
        println!("| {kind:?} | {with_key} | {most} |");
    }
    for ((kind, _), most) in table {
        // Nobody reads on for long who has seen what it is.
        let is_seen = matches!(
            kind,
            Attack::RapidResets | Attack::Continuations | Attack::EmptyContinuations | Attack::ManyStreams
        );
        assert!(!is_seen || most < SENT / 4, "{kind:?}: {most} bytes");
    }
    assert_nothing_held(server, before).await;
    wait::until("descriptors are given back", Duration::from_secs(60), || async {
        (host::open_files(server.pid()) <= files + 40).then_some(())
    })
    .await;
    neighbour.kill().await;
}

//! Connections of guests, over real sockets, to small real servers.

mod hostile;
mod limits;
mod policy;

use std::io;
use std::net::SocketAddr;

use atoll_types::EgressVerdict;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::hello::tests::hello_for;
use crate::Timeouts;
use crate::events::{EgressProtocol, EventKind};
use crate::testing::{Guest, World, allow};

const GUEST: Guest = Guest(1);

/// A server on this machine that hands out its connections.
struct Server {
    listener: TcpListener,
    port: u16,
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        Self { listener, port }
    }

    async fn accept(&self) -> TcpStream {
        self.listener.accept().await.unwrap().0
    }

    /// Whether nobody has connected so far. Whatever was going to is known to have been refused.
    async fn is_untouched(&self) -> bool {
        let own = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let (_, first) = self.listener.accept().await.unwrap();
        first == own.local_addr().unwrap()
    }
}

/// A world in which `a.example` is this machine and a server runs there.
async fn world() -> (World, Server) {
    world_with(Timeouts::default()).await
}

async fn world_with(timeouts: Timeouts) -> (World, Server) {
    let world = World::with(timeouts).await;
    world.resolver.address_for("a.example", "127.0.0.1");
    world.resolver.address_for("b.example", "127.0.0.1");
    (world, Server::start().await)
}

async fn read(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).await.unwrap();
    bytes
}

/// How a connection ends: `true` where it is broken off rather than finished. Only nothing may come before.
async fn is_reset(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 16]).await {
        Ok(0) => false,
        Ok(_) => panic!("something came"),
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

/// Whether a connection is not even taken.
async fn is_turned_away(world: &World, guest: Guest, to: SocketAddr) -> bool {
    match world.try_connect(guest, to).await {
        Ok(mut stream) => is_reset(&mut stream).await,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[tokio::test]
async fn tls_to_an_allowed_name_passes_untouched_in_both_directions() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let hello = hello_for("a.example");
    guest.write_all(&hello).await.unwrap();
    let mut served = server.accept().await;
    assert_eq!(read(&mut served, hello.len()).await, hello);
    served.write_all(b"server hello").await.unwrap();
    assert_eq!(read(&mut guest, 12).await, b"server hello");

    // A half-closed connection still works in the other direction.
    guest.write_all(b"last words").await.unwrap();
    guest.shutdown().await.unwrap();
    let mut rest = Vec::new();
    served.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"last words");
    served.write_all(&[5; 100_000]).await.unwrap();
    drop(served);
    let mut rest = Vec::new();
    guest.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest.len(), 100_000);

    let event = world.seen.find(|event| event.kind == EventKind::Closed).await;
    assert_eq!(event.verdict, EgressVerdict::Allowed);
    assert_eq!(event.rule, "rules[0]");
    assert_eq!(event.protocol, EgressProtocol::Tls);
    assert_eq!(event.host.as_deref(), Some("a.example"));
    assert_eq!(event.address, Some("127.0.0.1".parse().unwrap()));
    assert_eq!(event.bytes_up, hello.len() as u64 + 10);
    assert_eq!(event.bytes_down, 12 + 100_000);
}

#[tokio::test]
async fn large_transfers_arrive_whole() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let (mut guest_read, mut guest_write) = guest.into_split();
    let data: Vec<u8> = (0..8_000_000_u32).map(|n| (n / 251) as u8 ^ n as u8).collect();
    let sent = [hello_for("a.example"), data].concat();
    let expected = sent.clone();
    let echo = async {
        let mut served = server.accept().await;
        let (mut from, mut to) = served.split();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
        served.shutdown().await.unwrap();
    };
    let send = async {
        guest_write.write_all(&sent).await.unwrap();
        guest_write.shutdown().await.unwrap();
    };
    let receive = async {
        let mut received = Vec::new();
        guest_read.read_to_end(&mut received).await.unwrap();
        received
    };
    let (received, (), ()) = tokio::join!(receive, send, echo);
    assert!(received == expected);
}

#[tokio::test]
async fn a_reset_is_passed_on_as_one() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    for by_guest in [true, false] {
        let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
        guest.write_all(&hello_for("a.example")).await.unwrap();
        let mut served = server.accept().await;
        read(&mut served, hello_for("a.example").len()).await;
        if by_guest {
            guest.set_zero_linger().unwrap();
            drop(guest);
            assert!(is_reset(&mut served).await);
        } else {
            served.set_zero_linger().unwrap();
            drop(served);
            assert!(is_reset(&mut guest).await);
        }
    }
}

#[tokio::test]
async fn where_the_server_speaks_first_a_silent_client_is_let_through_if_the_port_is_listed() {
    let (world, server) = world_with(Timeouts {
        patience: std::time::Duration::from_millis(10),
        ..Timeouts::default()
    })
    .await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let mut served = server.accept().await;
    served.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    assert_eq!(read(&mut guest, 11).await, b"SSH-2.0-x\r\n");
}

#[tokio::test]
async fn plain_http_to_an_allowed_name_is_read_and_passed_on() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let request = format!(
        "GET /path HTTP/1.1\r\nHost: a.example:{}\r\nConnection: close\r\n\r\n",
        server.port
    );
    guest.write_all(request.as_bytes()).await.unwrap();
    let answer = async {
        let mut served = server.accept().await;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(served.read_u8().await.unwrap());
        }
        served
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
            .await
            .unwrap();
        String::from_utf8(head).unwrap()
    };
    let mut reply = String::new();
    let (head, _) = tokio::join!(answer, guest.read_to_string(&mut reply));
    assert!(head.starts_with("GET /path HTTP/1.1\r\n"), "{head}");
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    assert!(reply.ends_with("ok"));
    let event = world.seen.find(|event| event.kind == EventKind::Closed).await;
    assert_eq!(event.protocol, EgressProtocol::Http);
    assert_eq!(event.bytes_up, request.len() as u64);
}

#[tokio::test]
async fn postgres_is_asked_for_its_tls_and_its_name() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let request = super::classify::SSL_REQUEST;
    // By a name that was resolved, and by an address whose name is forgotten.
    for resolved in [true, false] {
        let mut guest = if resolved {
            world.connect_name(GUEST, "a.example.", server.port).await
        } else {
            let stale = SocketAddr::new("198.18.200.200".parse().unwrap(), server.port);
            world.connect(GUEST, stale).await
        };
        guest.write_all(&request).await.unwrap();
        assert_eq!(read(&mut guest, 1).await, b"S");
        let hello = hello_for("a.example");
        guest.write_all(&hello).await.unwrap();
        let mut served = server.accept().await;
        assert_eq!(read(&mut served, 8).await, request);
        served.write_all(b"S").await.unwrap();
        assert_eq!(read(&mut served, hello.len()).await, hello);
        served.write_all(b"server hello").await.unwrap();
        assert_eq!(read(&mut guest, 12).await, b"server hello");
    }
    let event = world
        .seen
        .find(|event| event.kind == EventKind::Decided && event.port == server.port)
        .await;
    assert_eq!(event.protocol, EgressProtocol::Postgres);

    // A rule about requests does not vouch for what is not read.
    let mut read_only = allow("a.example", &[server.port]);
    read_only["rules"][0]["methods"] = json!(["GET"]);
    world.admit(GUEST, &read_only);
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(&request).await.unwrap();
    assert_eq!(read(&mut guest, 1).await, b"S");
    guest.write_all(&hello_for("a.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);

    // Another name than the resolved one.
    world.admit(GUEST, &allow("*", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(&request).await.unwrap();
    assert_eq!(read(&mut guest, 1).await, b"S");
    guest.write_all(&hello_for("b.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn what_is_allowed_but_not_there_is_told_apart_from_what_is_refused() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("*", &[server.port]));
    let port = server.port;
    let mut guest = world.connect_name(GUEST, "a.example.", port).await;
    drop(server);
    guest.write_all(&hello_for("a.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    let event = world.seen.find(|event| event.kind == EventKind::Failed).await;
    assert_eq!(event.verdict, EgressVerdict::Allowed);
    assert!(event.reason.contains("cannot connect"), "{}", event.reason);
}

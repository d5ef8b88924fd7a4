//! Guests that dribble, flood, lie and send garbage.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::testing::Manner;

fn hurried() -> Timeouts {
    Timeouts {
        peek: Duration::from_millis(200),
        patience: Duration::from_millis(10),
        ..Timeouts::default()
    }
}

#[tokio::test]
async fn a_hello_that_comes_byte_by_byte_is_put_together() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.set_nodelay(true).unwrap();
    let hello = hello_for("a.example");
    for byte in &hello {
        guest.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(read(&mut server.accept().await, hello.len()).await, hello);
}

#[tokio::test]
async fn a_hello_without_an_end_or_a_name_or_sense_goes_nowhere() {
    let (world, server) = world_with(hurried()).await;
    world.admit(
        GUEST,
        &json!({ "rules": [{ "action": "allow", "to": "a.example" }] }),
    );
    let whole = hello_for("a.example");
    let endless = {
        let mut bytes = vec![22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff];
        bytes.resize(20_000, 0);
        bytes
    };
    for (what, bytes) in [
        ("cut", whole[..30].to_vec()),
        ("endless", endless),
        ("empty records", b"\x16\x03\x01\0\0".repeat(100)),
        ("no name", super::super::hello::tests::nameless_hello()),
        (
            "two names",
            super::super::hello::tests::two_faced_hello("a.example", "b.example"),
        ),
        ("an address", super::super::hello::tests::hello_for("127.0.0.1")),
        (
            "a request without an end",
            [b"GET /".to_vec(), vec![b'a'; 20]].concat(),
        ),
        ("an SSH client", b"SSH-2.0-x\r\n".to_vec()),
    ] {
        let mut guest = world.connect_name(GUEST, "a.example.", 443).await;
        let _ = guest.write_all(&bytes).await;
        assert!(is_reset(&mut guest).await, "{what}");
    }
    assert!(server.is_untouched().await);
    let tenant = world.egress.inner.shared.tenants.of(GUEST.source()).unwrap();
    assert!(tenant.allowance.used().bytes > 0);
}

#[tokio::test]
async fn silent_connections_are_bounded_and_end_by_themselves() {
    let (world, server) = world_with(hurried()).await;
    let mut policy = allow("a.example", &[]);
    policy["limits"] = json!({ "connections": 50 });
    world.admit(GUEST, &policy);
    let address = world.address_of(GUEST, "a.example.").await.unwrap();
    let mut held = Vec::new();
    for _ in 0..200 {
        held.push(world.try_connect(GUEST, SocketAddr::new(address, 443)).await);
    }
    for mut guest in held.into_iter().flatten() {
        assert!(is_reset(&mut guest).await);
    }
    // All room is there again, also for another guest meanwhile.
    world.admit(Guest(2), &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(Guest(2), "a.example.", server.port).await;
    guest.write_all(&hello_for("a.example")).await.unwrap();
    server.accept().await;
}

#[tokio::test]
async fn half_open_and_vanishing_guests_leave_nothing() {
    let (world, _server) = world_with(hurried()).await;
    world.admit(GUEST, &allow("a.example", &[]));
    let address = world.address_of(GUEST, "a.example.").await.unwrap();
    for n in 0..60 {
        let mut guest = world.connect(GUEST, SocketAddr::new(address, 443)).await;
        match n % 3 {
            0 => guest.shutdown().await.unwrap(),
            1 => guest.set_zero_linger().unwrap(),
            _ => guest.write_all(&hello_for("a.example")[..10]).await.unwrap(),
        }
    }
    let shared = &world.egress.inner.shared;
    shared.total.empty().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn garbage_reaches_nobody(
        bytes in proptest::collection::vec(any::<u8>(), 1..400),
        start in prop_oneof![Just(&b""[..]), Just(&b"\x16\x03\x01"[..]), Just(&b"GET "[..]), Just(&b"\0\0\0\x08\x04"[..])],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (world, server) = world_with(hurried()).await;
            // Names count for TLS and HTTP only, and this is neither.
            world.admit(GUEST, &json!({ "rules": [{ "action": "allow", "to": "a.example" }] }));
            let mut guest = world.connect_name(GUEST, "a.example.", 443).await;
            let _ = guest.write_all(&[start, &bytes].concat()).await;
            let _ = guest.shutdown().await;
            let mut answer = Vec::new();
            let _ = guest.read_to_end(&mut answer).await;
            assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{answer:?}");
            assert!(server.is_untouched().await);
        });
    }
}

/// Plain HTTP to a name is read, in whichever disguise it comes, also where a rule lists the port and would let other
/// protocols through.
#[tokio::test]
async fn a_request_in_disguise_is_read_or_refused() {
    let (world, server) = world_with(hurried()).await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    for request in [
        "gET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        "get / http/1.1\r\nhost: b.example\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        " GET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        "GET\t/ HTTP/1.1\r\nHost: b.example\r\n\r\n",
        "FROBNICATE-IT-WITH-A-VERY-LONG-METHOD / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        "GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        "GET / HTTP/1.1\rHost: b.example\r\n\r\n",
        "GET / HTTP/9.9\r\nHost: b.example\r\n\r\n",
        "GET /\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
        guest.write_all(request.as_bytes()).await.unwrap();
        guest.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // Told why, or broken off.
        let _ = guest.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!(!answer.starts_with("HTTP/1.1 2"), "{request:?}: {answer}");
    }
    assert!(server.is_untouched().await);
}

/// Who takes its time is let through to a protocol of its own, and becomes a request no more.
#[tokio::test]
async fn a_request_that_takes_its_time_is_cut_before_it_is_one() {
    let (world, server) = world_with(hurried()).await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    for (first, rest) in [
        ("gE", "T / HTTP/1.1\r\nHost: b.example\r\n\r\n"),
        ("GET / HTTP/1.", "1\r\nHost: b.example\r\n\r\n"),
        ("GET / HTTP/1.1", "\r\n"),
        ("\r\n", "GET / HTTP/1.1\r\n\r\n"),
    ] {
        let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
        guest.write_all(first.as_bytes()).await.unwrap();
        let mut served = server.accept().await;
        assert_eq!(read(&mut served, first.len()).await, first.as_bytes());
        guest.write_all(rest.as_bytes()).await.unwrap();
        assert!(is_reset(&mut served).await, "{first:?}");
        assert!(is_reset(&mut guest).await);
    }
    let event = world
        .seen
        .find(|event| event.kind == EventKind::Closed && event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.rule, "protocol");
    // What stays something else goes through, however slowly.
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(b"HELLO").await.unwrap();
    let mut served = server.accept().await;
    read(&mut served, 5).await;
    guest
        .write_all(b" my http/friend\r\nGET / HTTP/1.1\r\n")
        .await
        .unwrap();
    assert_eq!(read(&mut served, 17).await, b" my http/friend\r\n");
}

/// A connection that was opened ahead and speaks later is read as if it had spoken at once.
#[tokio::test]
async fn a_silent_connection_that_turns_out_to_be_http_is_read() {
    let (world, server) = world_with(hurried()).await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    for (host, answered) in [("b.example", "HTTP/1.1 403 "), ("a.example", "HTTP/1.1 200 ")] {
        let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
        // Dialled for who says nothing, and no longer of use.
        let mut ahead = server.accept().await;
        let request = format!(
            "gET /x HTTP/1.1\r\nHost: {host}:{}\r\nConnection: close\r\n\r\n",
            server.port
        );
        guest.write_all(request.as_bytes()).await.unwrap();
        assert_eq!(ahead.read(&mut [0; 16]).await.unwrap_or_default(), 0);
        if host == "a.example" {
            let mut served = server.accept().await;
            assert_eq!(read(&mut served, 6).await, b"gET /x");
            served
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                .await
                .unwrap();
        }
        let mut answer = String::new();
        guest.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(answered), "{answer}");
    }
}

/// However many names that nobody answers one guest dials and asks for, another is answered.
#[tokio::test]
async fn one_guest_does_not_take_all_questions() {
    let world = World::new().await;
    let neighbour = Guest(2);
    world.resolver.behave(Manner::SlowSilent);
    world.resolver.address_for("a.example", "127.0.0.1");
    world.admit(GUEST, &allow("*", &[80]));
    world.admit(neighbour, &allow("*", &[80]));
    let stale = "198.18.99.99:80".parse().unwrap();
    let mut held = Vec::new();
    for n in 0..600 {
        let mut guest = world.connect(GUEST, stale).await;
        let request = format!("GET / HTTP/1.1\r\nHost: n{n}.slow.example\r\n\r\n");
        guest.write_all(request.as_bytes()).await.unwrap();
        held.push(guest);
    }
    for _ in 0..20 {
        assert!(world.address_of(neighbour, "a.example.").await.is_some());
        world.egress.inner.shared.dialer.resolver.forget();
    }
}

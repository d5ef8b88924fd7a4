//! Who may go where.

use std::time::Duration;

use super::*;

async fn refused_with(world: &World, rule: &str) {
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied && event.rule == rule)
        .await;
    assert_eq!(event.kind, EventKind::Decided);
}

#[tokio::test]
async fn whoever_is_not_admitted_gets_nothing() {
    let (world, server) = world().await;
    let to = SocketAddr::new("127.0.0.1".parse().unwrap(), server.port);
    assert!(is_turned_away(&world, GUEST, to).await);
    world.admit(GUEST, &allow("127.0.0.1/32", &[]));
    let mut guest = world.connect(GUEST, to).await;
    guest.write_all(b"hello").await.unwrap();
    assert_eq!(read(&mut server.accept().await, 5).await, b"hello");
    world.egress.dismiss(&[GUEST.source()]);
    // What was open ends.
    assert!(matches!(guest.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    assert!(is_turned_away(&world, GUEST, to).await);
}

#[tokio::test]
async fn the_name_in_the_hello_must_be_the_one_that_was_resolved() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("*", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(&hello_for("b.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    refused_with(&world, "name_mismatch").await;
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn a_real_address_is_reached_by_a_rule_about_addresses_only() {
    let (world, server) = world().await;
    let literal = SocketAddr::new("127.0.0.1".parse().unwrap(), server.port);
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect(GUEST, literal).await;
    // Whatever it claims.
    let _ = guest.write_all(&hello_for("a.example")).await;
    assert!(is_reset(&mut guest).await);
    refused_with(&world, "default").await;
    assert!(server.is_untouched().await);

    world.admit(GUEST, &allow("127.0.0.0/8", &[server.port]));
    let mut guest = world.connect(GUEST, literal).await;
    guest.write_all(b"anything").await.unwrap();
    assert_eq!(read(&mut server.accept().await, 8).await, b"anything");
}

#[tokio::test]
async fn the_floor_stands_before_every_rule() {
    let (world, server) = world().await;
    world.admit(
        GUEST,
        &json!({ "rules": [
            { "action": "allow", "to": "0.0.0.0/0" },
            { "action": "allow", "to": "::/0" },
            { "action": "allow", "to": "*", "ports": ["1-65535"] },
        ]}),
    );
    for address in [
        "169.254.169.254",
        "10.0.0.1",
        "::1",
        "::ffff:10.1.2.3",
        "fd00::1",
        "0.0.0.0",
    ] {
        let to = SocketAddr::new(address.parse().unwrap(), server.port);
        assert!(is_turned_away(&world, GUEST, to).await, "{address}");
    }
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied)
        .await;
    assert!(event.rule.starts_with("floor"), "{}", event.rule);
}

#[tokio::test]
async fn the_host_itself_is_not_reached_by_whatever_address() {
    let (world, _) = world().await;
    // An exception for the range does not hand out the host; one for the very address would.
    let own = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let to = own.local_addr().unwrap();
    world.resolver.address_for("own.example", "127.0.0.2");
    world.admit(
        GUEST,
        &json!({ "rules": [
            { "action": "allow", "to": "127.0.0.0/8" },
            { "action": "allow", "to": "own.example", "ports": [to.port()] },
        ]}),
    );
    assert!(is_turned_away(&world, GUEST, to).await);
    let mut guest = world.connect_name(GUEST, "own.example.", to.port()).await;
    guest.write_all(&hello_for("own.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    for name in [None, Some("own.example")] {
        let event = world
            .seen
            .find(|event| event.verdict == EgressVerdict::Denied && event.host.as_deref() == name)
            .await;
        assert_eq!(event.rule, "floor: own address");
        assert_eq!(event.address, Some(to.ip()));
    }
    let nobody = tokio::time::timeout(Duration::from_millis(100), own.accept()).await;
    assert!(nobody.is_err());
}

#[tokio::test]
async fn a_name_that_moves_to_a_refused_address_is_not_followed() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    // Between the answer and the connection it is somewhere else.
    world.resolver.remove("a.example");
    world.resolver.address_for("a.example", "169.254.169.254");
    world.egress.inner.shared.dialer.resolver.forget();
    guest.write_all(&hello_for("a.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    let event = world
        .seen
        .find(|event| event.verdict == EgressVerdict::Denied)
        .await;
    assert!(event.rule.starts_with("floor"), "{}", event.rule);
    assert_eq!(event.address, Some("169.254.169.254".parse().unwrap()));
}

#[tokio::test]
async fn of_several_addresses_the_first_that_is_allowed_and_answers_is_taken() {
    let (world, server) = world().await;
    world.resolver.address_for("both.example", "10.0.0.1");
    world.resolver.address_for("both.example", "127.0.0.1");
    world.resolver.address_for("both.example", "fe80::1");
    // Nobody listens there.
    world.resolver.address_for("both.example", "127.0.0.77");
    world.admit(GUEST, &allow("both.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "both.example.", server.port).await;
    let hello = hello_for("both.example");
    guest.write_all(&hello).await.unwrap();
    assert_eq!(read(&mut server.accept().await, hello.len()).await, hello);
}

#[tokio::test]
async fn a_forgotten_address_is_named_by_the_connection_itself() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let stale = SocketAddr::new("198.18.99.99".parse().unwrap(), server.port);
    let mut guest = world.connect(GUEST, stale).await;
    let hello = hello_for("a.example");
    guest.write_all(&hello).await.unwrap();
    assert_eq!(read(&mut server.accept().await, hello.len()).await, hello);

    // A name that is not allowed is not even resolved.
    let mut guest = world.connect(GUEST, stale).await;
    guest.write_all(&hello_for("data.evil.example")).await.unwrap();
    assert!(is_reset(&mut guest).await);
    assert!(
        world
            .resolver
            .asked()
            .iter()
            .all(|(name, _)| name == "a.example.")
    );

    // And one that says nothing goes nowhere.
    let mut guest = world.connect(GUEST, stale).await;
    guest.write_all(b"\x01\x02\x03 opaque").await.unwrap();
    assert!(is_reset(&mut guest).await);
    refused_with(&world, "address").await;
}

#[tokio::test]
async fn what_is_neither_tls_nor_http_needs_a_rule_that_lists_the_port() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[]));
    let mut guest = world.connect_name(GUEST, "a.example.", 443).await;
    guest.write_all(b"\x00\x01 my own protocol").await.unwrap();
    assert!(is_reset(&mut guest).await);
    refused_with(&world, "default").await;

    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(b"\x00\x01 my own protocol").await.unwrap();
    assert_eq!(read(&mut server.accept().await, 3).await, b"\x00\x01 ");
}

#[tokio::test]
async fn plain_http_is_told_why() {
    let (world, server) = world().await;
    world.admit(
        GUEST,
        &json!({ "rules": [
            { "action": "allow", "to": "a.example" },
            { "name": "no builds", "action": "deny", "to": "a.example", "ports": [8080] },
        ]}),
    );
    let named = world.connect_name(GUEST, "a.example.", 8080).await;
    let literal = world.connect(GUEST, "10.0.0.1:80".parse().unwrap()).await;
    for (mut guest, rule) in [(named, "no builds"), (literal, "floor: private")] {
        guest
            .write_all(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\n\r\nhello")
            .await
            .unwrap();
        let mut reply = String::new();
        guest.read_to_string(&mut reply).await.unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
        assert!(head.contains(&format!("x-atoll-denied: {rule}")), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], "egress_denied");
        assert!(body["error"]["rule"].as_str().unwrap().starts_with(rule));
    }
    assert!(server.is_untouched().await);
}

#[tokio::test]
async fn a_narrower_policy_ends_what_it_does_not_allow_and_nothing_else() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("*.example", &[server.port]));
    let mut flows = Vec::new();
    for name in ["a.example", "b.example"] {
        let mut guest = world.connect_name(GUEST, &format!("{name}."), server.port).await;
        guest.write_all(&hello_for(name)).await.unwrap();
        let mut served = server.accept().await;
        read(&mut served, hello_for(name).len()).await;
        flows.push((guest, served));
    }
    let (mut cut, mut cut_served) = flows.pop().unwrap();
    let (mut kept, mut kept_served) = flows.pop().unwrap();
    world.admit(GUEST, &allow("a.example", &[server.port]));
    assert!(is_reset(&mut cut).await);
    assert!(is_reset(&mut cut_served).await);
    let event = world
        .seen
        .find(|event| event.kind == EventKind::Closed && event.verdict == EgressVerdict::Denied)
        .await;
    assert_eq!(event.host.as_deref(), Some("b.example"));
    kept.write_all(b"still here").await.unwrap();
    assert_eq!(read(&mut kept_served, 10).await, b"still here");

    world.admit(GUEST, &json!({}));
    assert!(is_reset(&mut kept).await);
}

#[tokio::test]
async fn another_sandbox_at_the_same_address_inherits_nothing() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("a.example", &[server.port]));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    guest.write_all(&hello_for("a.example")).await.unwrap();
    let mut served = server.accept().await;
    read(&mut served, hello_for("a.example").len()).await;
    world.admit_as(Guest(9), GUEST.source(), &allow("a.example", &[server.port]));
    assert!(matches!(guest.read(&mut [0; 1]).await, Ok(0) | Err(_)));
    let event = world.seen.find(|event| event.kind == EventKind::Closed).await;
    assert_eq!(event.sandbox, GUEST.sandbox());
    assert_eq!(event.bytes_up, hello_for("a.example").len() as u64);
}

#[tokio::test]
async fn an_encrypted_hello_is_taken_at_its_outer_word_but_not_where_that_is_nobodys() {
    let (world, server) = world().await;
    world.admit(GUEST, &allow("*", &[server.port]));
    world.resolver.address_for("cloudflare-ech.com", "127.0.0.1");
    let mut guest = world
        .connect_name(GUEST, "cloudflare-ech.com.", server.port)
        .await;
    guest
        .write_all(&super::super::hello::tests::encrypted_hello_for(
            "cloudflare-ech.com",
        ))
        .await
        .unwrap();
    assert!(is_reset(&mut guest).await);
    refused_with(&world, "tls").await;
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let hello = super::super::hello::tests::encrypted_hello_for("a.example");
    guest.write_all(&hello).await.unwrap();
    assert_eq!(read(&mut server.accept().await, hello.len()).await, hello);
}

/// Atoll's own service is on an address of the host, which no policy reaches; its name does, where a rule allows it, and
/// nothing else does.
#[tokio::test]
async fn a_service_of_our_own_is_reached_by_its_name_alone() {
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let world = World::serving(to).await;
    // Whatever a resolver says about the name, it is not asked.
    world.resolver.address_for("service.internal", "169.254.169.254");
    for policy in [
        json!({ "rules": [{ "action": "allow", "to": "127.0.0.0/8" }] }),
        json!({ "preset": "all-public" }),
        json!({ "rules": [{ "action": "allow", "to": "*", "ports": ["1-65535"] }] }),
        json!({ "preset": "all-public", "rules": [{ "action": "allow", "to": "*.internal", "ports": [80] }] }),
    ] {
        world.admit(GUEST, &policy);
        assert!(is_turned_away(&world, GUEST, to).await);
        let denied = world
            .ask(GUEST, "service.internal.", hickory_proto::rr::RecordType::A)
            .await;
        assert!(
            denied.answers.is_empty(),
            "without a rule that names it the name does not exist: {policy}"
        );
        // Nor by an address that stood for it once, or for nothing.
        let stale = "198.18.99.99:80".parse().unwrap();
        let mut guest = world.connect(GUEST, stale).await;
        guest
            .write_all(b"GET /v1/models HTTP/1.1\r\nhost: service.internal\r\n\r\n")
            .await
            .unwrap();
        let mut reply = String::new();
        guest.read_to_string(&mut reply).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 403 "), "{policy}: {reply}");
    }

    world.admit(
        GUEST,
        &json!({ "rules": [{ "action": "allow", "to": "service.internal" }] }),
    );
    let mut guest = world.connect_name(GUEST, "service.internal.", 80).await;
    guest
        .write_all(b"GET /v1/models HTTP/1.1\r\nhost: service.internal\r\n\r\n")
        .await
        .unwrap();
    let (mut served, _) = listener.accept().await.unwrap();
    let request = read(&mut served, 18).await;
    assert_eq!(request, b"GET /v1/models HTT");
    // Nothing but requests gets there, and its other ports lead nowhere.
    world.admit(
        GUEST,
        &json!({ "rules": [{ "action": "allow", "to": "service.internal", "ports": ["1-65535"] }] }),
    );
    for (port, first) in [
        (443, hello_for("service.internal")),
        (80, hello_for("service.internal")),
        (80, vec![0, 1, 2]),
    ] {
        let mut other = world.connect_name(GUEST, "service.internal.", port).await;
        other.write_all(&first).await.unwrap();
        assert!(matches!(other.read(&mut [0; 16]).await, Ok(0) | Err(_)));
    }
    let nobody = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
    assert!(nobody.is_err());
}

/// The service is nobody's to hold: so many connections at once, and none when the sandbox is gone.
#[tokio::test]
async fn connections_to_our_own_service_are_bounded_and_end_with_the_sandbox() {
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let world = World::serving(listener.local_addr().unwrap()).await;
    world.admit(
        GUEST,
        &json!({ "rules": [{ "action": "allow", "to": "service.internal" }] }),
    );
    // Each has announced more than it sends.
    let half = b"POST /v1/messages HTTP/1.1\r\nhost: service.internal\r\ncontent-length: 1000000\r\n\r\nhalf";
    let mut held = Vec::new();
    for _ in 0..64 {
        let mut guest = world.connect_name(GUEST, "service.internal.", 80).await;
        guest.write_all(half).await.unwrap();
        let (mut served, _) = listener.accept().await.unwrap();
        read(&mut served, 18).await;
        held.push((guest, served));
    }
    let mut more = world.connect_name(GUEST, "service.internal.", 80).await;
    more.write_all(half).await.unwrap();
    let answer = String::from_utf8(read(&mut more, 13).await).unwrap();
    assert_eq!(answer, "HTTP/1.1 403 ");
    refused_with(&world, "limits: service").await;
    // One that is given back can be had again.
    drop(held.pop());
    let mut again = world.connect_name(GUEST, "service.internal.", 80).await;
    again.write_all(half).await.unwrap();
    let (mut served, _) = listener.accept().await.unwrap();
    read(&mut served, 18).await;
    held.push((again, served));
    world.egress.dismiss(&[GUEST.source()]);
    for (mut guest, mut served) in held {
        let mut rest = Vec::new();
        let broken = served.read_to_end(&mut rest).await;
        assert!(broken.is_err(), "broken off, not finished");
        assert!(rest.len() < 1000);
        assert!(matches!(guest.read(&mut [0; 16]).await, Ok(0) | Err(_)));
    }
}

/// Plain HTTP to a name is read; a request that is open when the policy changes is asked about again.
#[tokio::test]
async fn a_request_that_is_open_is_cut_and_the_log_says_why() {
    let (world, server) = world().await;
    let rule = |path: &str| json!({ "rules": [{ "action": "allow", "to": "a.example", "ports": [server.port], "paths": [path] }] });
    world.admit(GUEST, &rule("/stream"));
    let mut guest = world.connect_name(GUEST, "a.example.", server.port).await;
    let request = format!("GET /stream HTTP/1.1\r\nHost: a.example:{}\r\n\r\n", server.port);
    guest.write_all(request.as_bytes()).await.unwrap();
    let mut served = server.accept().await;
    read(&mut served, request.len()).await;
    served
        .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        .await
        .unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"one\r\n") {
        seen.push(guest.read_u8().await.unwrap());
    }
    // The connection as such stays allowed, the request does not.
    world.admit(GUEST, &rule("/other"));
    assert!(is_reset(&mut guest).await);
    assert!(is_reset(&mut served).await);
    for kind in [EventKind::Decided, EventKind::Closed] {
        let event = world
            .seen
            .find(|event| event.kind == kind && event.verdict == EgressVerdict::Denied)
            .await;
        assert_eq!(event.rule, "default");
        assert!(
            event.reason.starts_with("cut while it was open"),
            "{}",
            event.reason
        );
    }
}

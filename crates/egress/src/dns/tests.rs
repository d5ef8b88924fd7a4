//! Questions of guests, as they come over the wire.

use atoll_types::EgressVerdict;
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::rdata::TXT;
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
use hickory_proto::rr::{RData, RecordType};
use proptest::prelude::*;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::events::EgressProtocol;
use crate::testing::{Guest, Manner, World, allow, question};

const GUEST: Guest = Guest(1);

fn extended_error(reply: &Message) -> Option<u16> {
    match reply.edns.as_ref()?.option(EdnsCode::from(15))? {
        EdnsOption::Unknown(15, data) => Some(u16::from_be_bytes([data[0], data[1]])),
        _ => None,
    }
}

#[tokio::test]
async fn a_refused_name_goes_nowhere() {
    let world = World::new().await;
    world.admit(GUEST, &allow("a.example", &[]));
    world.resolver.address_for("b.example", "127.0.0.9");
    for (name, kind) in [
        ("b.example.", RecordType::A),
        ("b.example.", RecordType::TXT),
        ("c2VjcmV0.a.example.", RecordType::A),
        ("a.example.evil.example.", RecordType::HTTPS),
        ("metadata.google.internal.", RecordType::A),
        ("example.", RecordType::NS),
    ] {
        let reply = world.ask(GUEST, name, kind).await;
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain, "{name}");
        assert_eq!(extended_error(&reply), Some(15), "{name}");
    }
    assert_eq!(world.resolver.asked(), []);
    let event = world
        .seen
        .find(|event| event.host.as_deref() == Some("b.example"))
        .await;
    assert_eq!(event.verdict, EgressVerdict::Denied);
    assert_eq!(event.protocol, EgressProtocol::Dns);
}

#[tokio::test]
async fn an_allowed_name_gets_an_address_that_stands_for_it() {
    let world = World::new().await;
    world.admit(GUEST, &allow("*", &[]));
    world.resolver.address_for("a.example", "127.0.0.9");
    world.resolver.address_for("six.example", "2606:4700::1111");
    let reply = world.ask(GUEST, "A.Example.", RecordType::A).await;
    let RData::A(address) = reply.answers[0].data else {
        panic!("{reply}");
    };
    assert_eq!(address.0.octets()[..2], [198, 18]);
    // Spelt as it was asked.
    assert_eq!(reply.queries[0].name.to_ascii(), "A.Example.");
    // Each family, whichever the name has.
    assert_eq!(
        world
            .ask(GUEST, "a.example.", RecordType::AAAA)
            .await
            .answers
            .len(),
        1
    );
    assert_eq!(
        world
            .ask(GUEST, "six.example.", RecordType::A)
            .await
            .answers
            .len(),
        1
    );

    let [a, b, c, d] = address.0.octets();
    let reverse = format!("{d}.{c}.{b}.{a}.in-addr.arpa.");
    let reply = world.ask(GUEST, &reverse, RecordType::PTR).await;
    assert_eq!(reply.answers[0].data.to_string(), "a.example.");

    for (name, kind, code) in [
        ("none.example.", RecordType::A, ResponseCode::NXDomain),
        ("a.example.", RecordType::HTTPS, ResponseCode::NoError),
        ("a.example.", RecordType::SVCB, ResponseCode::NoError),
        ("a.example.", RecordType::ANY, ResponseCode::NoError),
        ("1.2.0.192.in-addr.arpa.", RecordType::PTR, ResponseCode::NXDomain),
    ] {
        let reply = world.ask(GUEST, name, kind).await;
        assert_eq!(reply.metadata.response_code, code, "{name} {kind}");
        assert!(reply.answers.is_empty());
    }
    let types: Vec<_> = world.resolver.asked().into_iter().map(|(_, kind)| kind).collect();
    assert!(
        types
            .iter()
            .all(|kind| [RecordType::A, RecordType::AAAA].contains(kind))
    );
}

#[tokio::test]
async fn a_name_that_leads_to_what_is_refused_is_refused() {
    let world = World::new().await;
    world.admit(GUEST, &allow("*", &[]));
    world.resolver.address_for("rebind.example", "169.254.169.254");
    world.resolver.address_for("mapped.example", "::ffff:10.0.0.1");
    world.resolver.address_for("both.example", "10.0.0.1");
    world.resolver.address_for("both.example", "127.0.0.1");
    for name in ["rebind.example.", "mapped.example."] {
        let reply = world.ask(GUEST, name, RecordType::A).await;
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(extended_error(&reply), Some(15));
    }
    let event = world.seen.find(|event| event.rule.starts_with("floor")).await;
    assert_eq!(event.verdict, EgressVerdict::Denied);
    assert!(world.address_of(GUEST, "both.example.").await.is_some());
}

#[tokio::test]
async fn other_types_come_from_upstream_and_what_is_too_long_by_tcp() {
    let world = World::new().await;
    world.admit(GUEST, &allow("a.example", &[]));
    for n in 0..10 {
        let text = format!("{n}").repeat(200);
        world.resolver.add("a.example", RData::TXT(TXT::new(vec![text])));
    }
    let mut plain = question("a.example.", RecordType::TXT);
    plain.edns = None;
    for message in [&plain, &question("a.example.", RecordType::TXT)] {
        let reply = world.exchange(GUEST, &message.to_vec().unwrap()).await;
        assert!(reply.metadata.truncation);
        assert!(reply.to_vec().unwrap().len() <= 512);
    }
    let mut stream = world.connect(GUEST, "198.18.0.1:53".parse().unwrap()).await;
    for _ in 0..2 {
        let bytes = plain.to_vec().unwrap();
        stream
            .write_u16(u16::try_from(bytes.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(&bytes).await.unwrap();
        let len = stream.read_u16().await.unwrap();
        let mut reply = vec![0; usize::from(len)];
        stream.read_exact(&mut reply).await.unwrap();
        let reply = Message::from_vec(&reply).unwrap();
        assert_eq!(reply.answers.len(), 10);
        assert!(!reply.metadata.truncation);
    }
}

#[tokio::test]
async fn a_resolver_that_fails_is_a_failure_and_not_a_missing_name() {
    let world = World::new().await;
    world.admit(GUEST, &allow("a.example", &[]));
    world.resolver.behave(Manner::Failing);
    let reply = world.ask(GUEST, "a.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    assert_eq!(extended_error(&reply), Some(22));
}

#[tokio::test]
async fn nobody_can_ask_without_end() {
    let world = World::new().await;
    world.admit(GUEST, &allow("a.example", &[]));
    let mut refused = 0;
    for n in 0..2000 {
        let reply = world.ask(GUEST, &format!("n{n}.example."), RecordType::A).await;
        refused += usize::from(reply.metadata.response_code == ResponseCode::Refused);
    }
    assert!(refused > 0);
    let event = world.seen.find(|event| event.rule == "limits: dns").await;
    assert_eq!(event.verdict, EgressVerdict::Denied);
    // Another guest does not notice.
    world.admit(Guest(2), &allow("a.example", &[]));
    let reply = world.ask(Guest(2), "b.example.", RecordType::A).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
}

#[tokio::test]
async fn nonsense_is_answered_as_such_or_not_at_all() {
    let world = World::new().await;
    world.admit(GUEST, &json!({}));
    let mut two = question("a.example.", RecordType::A);
    two.queries.push(two.queries[0].clone());
    let reply = world.exchange(GUEST, &two.to_vec().unwrap()).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
    // A question without an end.
    let mut cut = question("a.example.", RecordType::A).to_vec().unwrap();
    cut.truncate(20);
    let reply = world.exchange(GUEST, &cut).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::FormErr);
    // A name in which a dot is part of a label.
    let mut bytes = question("a.example.", RecordType::A).to_vec().unwrap();
    let at = bytes.windows(7).position(|window| window == b"example").unwrap();
    bytes[at + 3] = b'.';
    let reply = world.exchange(GUEST, &bytes).await;
    assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(world.resolver.asked(), []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_make_it_panic_or_ask_upstream(bytes in proptest::collection::vec(any::<u8>(), 0..600), at in 0..40_usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let world = World::new().await;
            world.admit(GUEST, &allow("a.example", &[]));
            let tenant = world.egress.inner.shared.tenants.of(GUEST.source()).unwrap();
            let resolver = &world.egress.inner.shared.dialer.resolver;
            let _ = answer(resolver, &tenant, &bytes, Room::Datagram).await;
            // Two changes away from the name that is allowed, and one is made.
            let mut near = question("zz.example.", RecordType::A).to_vec().unwrap();
            let at = at % near.len();
            near[at] = bytes.first().copied().unwrap_or_default();
            let _ = answer(resolver, &tenant, &near, Room::Datagram).await;
            assert_eq!(world.resolver.asked(), []);
        });
    }
}

//! Against a resolver that is honest, and against others.

use std::net::IpAddr;

use super::*;
use crate::config::Timeouts;
use crate::testing::{Manner, TestResolver};

fn resolver_with(servers: Vec<SocketAddr>) -> Resolver {
    Resolver::new(servers, None, Timeouts::default().resolve)
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

fn addresses(list: &[&str]) -> Option<Vec<IpAddr>> {
    Some(list.iter().map(|address| address.parse().unwrap()).collect())
}

#[tokio::test]
async fn both_families_are_asked_once_and_remembered() {
    let server = TestResolver::start().await;
    server.address_for("a.example", "192.0.2.1");
    server.address_for("a.example", "2001:db8::1");
    let resolver = resolver_with(vec![server.address()]);
    for _ in 0..3 {
        let found = resolver.addresses(&name("a.example"), 0).await.unwrap();
        assert_eq!(found.list, addresses(&["2001:db8::1", "192.0.2.1"]));
    }
    assert_eq!(server.asked().len(), 2);
}

#[tokio::test]
async fn a_name_that_is_not_there_is_told_from_one_without_addresses() {
    let server = TestResolver::start().await;
    server.alias("empty.example", "nowhere.example");
    server.address_for("six.example", "2001:db8::6");
    let resolver = resolver_with(vec![server.address()]);
    assert_eq!(
        resolver.addresses(&name("none.example"), 0).await.unwrap().list,
        None
    );
    assert_eq!(
        resolver.addresses(&name("empty.example"), 0).await.unwrap().list,
        None
    );
    let found = resolver.addresses(&name("six.example"), 0).await.unwrap();
    assert_eq!(found.list, addresses(&["2001:db8::6"]));
}

#[tokio::test]
async fn aliases_are_followed_but_not_for_ever() {
    let server = TestResolver::start().await;
    server.alias("a.example", "b.example");
    server.alias("b.example", "c.example");
    server.address_for("c.example", "192.0.2.3");
    server.alias("loop.example", "loop2.example");
    server.alias("loop2.example", "loop.example");
    let resolver = resolver_with(vec![server.address()]);
    let found = resolver.addresses(&name("a.example"), 0).await.unwrap();
    assert_eq!(found.list, addresses(&["192.0.2.3"]));
    assert!(matches!(
        resolver.addresses(&name("loop.example"), 0).await,
        Err(ResolveError::Failed(_))
    ));
}

#[tokio::test]
async fn long_answers_respelling_and_forgeries_do_not_matter() {
    for manner in [Manner::Truncated, Manner::Forged] {
        let server = TestResolver::start().await;
        server.behave(manner);
        server.address_for("a.example", "192.0.2.1");
        let resolver = resolver_with(vec![server.address()]);
        let found = resolver.addresses(&name("a.example"), 0).await.unwrap();
        assert_eq!(found.list, addresses(&["192.0.2.1"]), "{manner:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_datagrams_are_of_no_use_a_connection_is() {
    // Simulated time: the waits for datagrams are skipped, as nothing else is under way.
    for manner in [Manner::Respelt, Manner::Silent] {
        let server = TestResolver::start().await;
        server.behave(manner);
        server.address_for("a.example", "192.0.2.1");
        let resolver = resolver_with(vec![server.address()]);
        let found = resolver.addresses(&name("a.example"), 0).await.unwrap();
        assert_eq!(found.list, addresses(&["192.0.2.1"]), "{manner:?}");
    }
}

#[tokio::test]
async fn one_that_fails_is_passed_over() {
    let failing = TestResolver::start().await;
    failing.behave(Manner::Failing);
    let server = TestResolver::start().await;
    server.address_for("a.example", "192.0.2.1");
    let both = resolver_with(vec![failing.address(), server.address()]);
    let found = both.addresses(&name("a.example"), 0).await.unwrap();
    assert_eq!(found.list, addresses(&["192.0.2.1"]));

    let alone = resolver_with(vec![failing.address()]);
    assert!(matches!(
        alone.addresses(&name("a.example"), 0).await,
        Err(ResolveError::Failed(_))
    ));
    // A failure is not an answer: it is asked again.
    failing.behave(Manner::Honest);
    failing.address_for("a.example", "192.0.2.2");
    let found = alone.addresses(&name("a.example"), 0).await.unwrap();
    assert_eq!(found.list, addresses(&["192.0.2.2"]));
}

//! Secrets and our own services: where they go, and that they open no way.

use atoll_types::{Injection, SecretBinding, SecretId, SecretRef};

use super::*;

pub(super) fn grant(secret: &str, hosts: &[&str]) -> Grant {
    Grant {
        secret: SecretRef {
            id: SecretId::from_entropy([1; 20]),
            name: secret.into(),
        },
        binding: SecretBinding {
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            ports: Vec::new(),
            methods: Vec::new(),
            paths: Vec::new(),
            plain_http: false,
            redact: false,
            inject: Injection::Bearer,
        },
        expires: None,
        env: None,
    }
}

#[test]
fn secrets_go_where_they_are_bound_and_nowhere_else() {
    let mut scoped = grant("scoped", &["api.test"]);
    scoped.binding.methods = vec!["GET".into()];
    scoped.binding.paths = vec!["/me/**".into()];
    let mut plain = grant("plain", &["api.test"]);
    plain.binding.plain_http = true;
    plain.binding.ports = vec![PortRange::single(80).unwrap()];
    let mut short = grant("short", &["api.test"]);
    short.expires = Some(Timestamp(1000));
    let grants = [grant("wide", &["*.api.test", "api.test"]), scoped, plain, short];
    let rules = words(vec![ports(allow("*"), &["1-65535"]), allow("0.0.0.0/0")]);
    let policy = Policy::compile(&rules, &Floor::default(), &grants).unwrap();

    let given = |flow: &Try<'_>, method: &str, path: &str, now: i64| {
        let literal = flow.to.parse::<IpAddr>().ok();
        let dialled = literal.is_none().then(|| name(flow.to));
        let claimed = flow.claims.map(name);
        let flow = Flow {
            protocol: flow.protocol,
            port: flow.port,
            name: dialled.as_ref(),
            address: literal,
            kind: flow.kind,
            claimed: claimed.as_ref(),
        };
        policy
            .grants(&HttpRequest { flow, method, path }, Timestamp(now))
            .map(|grant| grant.secret.name.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let api = tls("api.test", 443);
    assert_eq!(given(&api, "GET", "/me/x", 0), "wide scoped short");
    assert_eq!(given(&api, "GET", "/me/x", 1000), "wide scoped");
    assert_eq!(given(&api, "POST", "/me/x", 1000), "wide");
    assert_eq!(given(&api, "GET", "/me/../you", 1000), "wide");
    assert_eq!(given(&tls("x.api.test", 443), "GET", "/", 1000), "wide");
    assert_eq!(given(&tls("evilapi.test", 443), "GET", "/", 0), "");
    assert_eq!(given(&tls("api.test", 8443), "GET", "/me", 0), "");
    // In the clear only where the binding says so.
    assert_eq!(given(&http("api.test", 443), "GET", "/me", 0), "");
    assert_eq!(given(&http("api.test", 80), "GET", "/me", 0), "plain");
    // Never to whoever only says that it is the host.
    assert_eq!(
        given(
            &tls("203.0.113.7", 443).claiming(Some("api.test")),
            "GET",
            "/me",
            0
        ),
        ""
    );
    assert_eq!(
        given(
            &tls("api.test", 443).claiming(Some("x.api.test")),
            "GET",
            "/me",
            0
        ),
        ""
    );
    assert!(policy.inspects(&name("api.test"), 443));
    assert!(policy.inspects(&name("x.api.test"), 443));
    assert!(!policy.inspects(&name("api.test"), 8443));
    assert_eq!(policy.all_grants().len(), 4);
}

/// Only a rule that names the service lets anybody to it, and only to speak HTTP.
#[test]
fn a_service_of_our_own_is_allowed_by_its_name_alone() {
    let service = "models.atoll.internal";
    let floor = Floor::new(&crate::FloorConfig {
        internal: vec![name(service)],
        ..crate::FloorConfig::default()
    })
    .unwrap();
    let compiled = |preset, rules| {
        let words = NetworkPolicy {
            preset,
            rules,
            ..NetworkPolicy::default()
        };
        Policy::compile(&words, &floor, &[]).unwrap()
    };
    for (preset, rules) in [
        (Some(Preset::AllPublic), vec![]),
        (Some(Preset::PackageRegistries), vec![]),
        (None, vec![ports(allow("*"), &["1-65535"])]),
        (None, vec![ports(allow("*.internal"), &["1-65535"])]),
        (
            None,
            vec![allow("*.atoll.internal"), allow("0.0.0.0/0"), allow("::/0")],
        ),
        (
            None,
            vec![allow("192.0.2.80"), requests(allow("*"), &["GET"], &[])],
        ),
    ] {
        let policy = compiled(preset, rules.clone());
        let refused = policy.name(&name(service));
        assert!(!refused.is_allowed(), "{preset:?} {rules:?}");
        assert!(
            refused.reason.contains("only a rule that names it"),
            "{}",
            refused.reason
        );
        for flow in [http(service, 80), tls(service, 443), opaque(service, 80)] {
            let flow = flow.leading_to("192.0.2.80");
            assert!(!flow.ask(&policy, None).is_allowed(), "{preset:?} {rules:?}");
            assert!(!flow.ask(&policy, Some(("GET", "/"))).is_allowed());
        }
    }
    // By its name, in any spelling; also beside a preset. A deny still counts, however wide.
    for to in [service, "Models.Atoll.INTERNAL", "ｍodels.atoll.internal"] {
        let policy = compiled(Some(Preset::AllPublic), vec![ports(allow(to), &["1-65535"])]);
        assert!(policy.name(&name(service)).is_allowed(), "{to}");
        assert_eq!(
            http(service, 80).leading_to("192.0.2.80").outcome(&policy),
            "+rules[0]"
        );
        assert_eq!(opaque(service, 80).outcome(&policy), "-protocol");
        assert_eq!(tls(service, 80).outcome(&policy), "-protocol");
    }
    let denied = compiled(None, vec![allow(service), deny("*.atoll.internal")]);
    assert_eq!(http(service, 80).outcome(&denied), "-rules[1]");
    // Names beside it are like any other.
    let wide = compiled(Some(Preset::AllPublic), vec![]);
    assert!(http("other.atoll.internal", 80).ask(&wide, None).is_allowed());
}

/// Where a secret is bound, answers are searched for it; so nothing goes there that cannot be read.
#[test]
fn what_cannot_be_read_does_not_go_where_a_secret_is_bound() {
    let rules = words(vec![ports(allow("*"), &["1-65535"]), allow("0.0.0.0/0")]);
    let mut plain = grant("plain", &["plain.test"]);
    plain.binding.plain_http = true;
    plain.binding.ports = vec![PortRange::single(80).unwrap()];
    let grants = [grant("key", &["api.test"]), plain];
    let policy = Policy::compile(&rules, &Floor::default(), &grants).unwrap();
    for (flow, outcome) in [
        (opaque("api.test", 443), "-protocol"),
        (tls("api.test", 443).claiming(None), "-protocol"),
        (opaque("plain.test", 80), "-protocol"),
        (tls("api.test", 443), "+rules[0]"),
        (http("plain.test", 80), "+rules[0]"),
        (opaque("api.test", 22), "+rules[0]"),
        (opaque("other.test", 443), "+rules[0]"),
        (opaque("203.0.113.7", 443), "+rules[1]"),
    ] {
        assert_eq!(flow.outcome(&policy), outcome, "{}:{}", flow.to, flow.port);
    }
}

/// Hosts of a binding are compared as names, in whichever script they were written.
#[test]
fn hosts_of_bindings_are_the_same_in_every_spelling() {
    for host in [
        "bücher.test",
        "BÜCHER.Test",
        "xn--bcher-kva.test",
        "XN--BCHER-KVA.test",
        "*.Bücher.test",
    ] {
        let mut bound = grant("key", &[host]);
        bound.binding.redact = true;
        let policy = Policy::compile(&words(vec![allow("*")]), &Floor::default(), &[bound]).unwrap();
        let asked = match host.starts_with('*') {
            true => "shop.xn--bcher-kva.test",
            false => "xn--bcher-kva.test",
        };
        assert!(policy.redacts(&name(asked)), "{host}");
        assert!(policy.inspects(&name(asked), 443), "{host}");
        assert!(!policy.redacts(&name("bcher.test")), "{host}");
    }
    assert!(
        Target::parse("api.test.").is_err(),
        "a dot at the end is refused, not guessed about"
    );
}

#[test]
fn a_secret_opens_no_way() {
    let policy = Policy::compile(
        &NetworkPolicy::default(),
        &Floor::default(),
        &[grant("key", &["api.test"])],
    )
    .unwrap();
    let decision = tls("api.test", 443).ask(&policy, None);
    assert!(!decision.is_allowed());
    assert!(
        decision.reason.contains("`key` is bound to it"),
        "{}",
        decision.reason
    );
    assert!(policy.name(&name("api.test")).reason.contains("add a rule"));
}

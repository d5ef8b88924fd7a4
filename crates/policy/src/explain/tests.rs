use atoll_types::{Injection, NetworkPolicy, NetworkRule, Preset, RuleAction, SecretBinding, SecretId};

use super::*;
use crate::{Floor, Grant};

fn policy() -> Policy {
    let rule = |action, to: &str| NetworkRule::new(action, to);
    let words = NetworkPolicy {
        preset: Some(Preset::PackageRegistries),
        rules: vec![
            NetworkRule {
                name: Some("read the api".into()),
                methods: vec!["GET".into()],
                paths: vec!["/v1/**".into()],
                ..rule(RuleAction::Allow, "api.example.com")
            },
            NetworkRule {
                paths: vec!["/v1/admin/**".into()],
                ..rule(RuleAction::Deny, "*.example.com")
            },
            rule(RuleAction::Allow, "192.0.2.0/24"),
        ],
        ..NetworkPolicy::default()
    };
    let grant = Grant {
        secret: SecretRef {
            id: SecretId::from_entropy([1; 20]),
            name: "api-key".into(),
        },
        binding: SecretBinding {
            hosts: vec!["api.example.com".into()],
            ports: Vec::new(),
            methods: Vec::new(),
            paths: Vec::new(),
            plain_http: false,
            redact: false,
            inject: Injection::Bearer,
        },
        expires: None,
        env: None,
    };
    Policy::compile(&words, &Floor::default(), &[grant]).unwrap()
}

fn told(target: &str, method: &str) -> String {
    let question = Question::parse(target, Some(method)).unwrap();
    policy().explain(&question, Timestamp(0)).to_string()
}

#[test]
fn an_allowed_request_is_explained() {
    insta::assert_snapshot!(told("https://api.example.com/v1/users", "GET"), @r"
      1. name: may be resolved: api.example.com is within `api.example.com`
      2. floor: the address is checked when it is dialled, against the floor and against denied ranges
      3. rules[1] (deny *.example.com, any method on /v1/admin/**): does not match: it is about other requests
    + 4. read the api (allow api.example.com ports 80, 443 TCP, GET on /v1/**): allows GET to api.example.com:443
    allowed by read the api
    Atoll reads the requests on this connection.
    The secret `api-key` goes into the request.
    ");
}

#[test]
fn a_denied_request_is_explained() {
    insta::assert_snapshot!(told("https://api.example.com/v1/admin/keys", "GET"), @r"
      1. name: may be resolved: api.example.com is within `api.example.com`
      2. floor: the address is checked when it is dialled, against the floor and against denied ranges
    - 3. rules[1] (deny *.example.com, any method on /v1/admin/**): denies GET to api.example.com:443
    denied by rules[1]
    ");
    insta::assert_snapshot!(told("https://api.example.com/v1/users", "POST"), @r"
      1. name: may be resolved: api.example.com is within `api.example.com`
      2. floor: the address is checked when it is dialled, against the floor and against denied ranges
      3. rules[1] (deny *.example.com, any method on /v1/admin/**): does not match: it is about other requests
      4. read the api (allow api.example.com ports 80, 443 TCP, GET on /v1/**): does not match: read the api allows GET on /v1/** only
      5. other rules: 21 are about other destinations
    - 6. default: no rule allows POST to api.example.com:443: read the api allows GET on /v1/** only
    denied by default
    ");
}

#[test]
fn an_unknown_name_is_explained() {
    insta::assert_snapshot!(told("https://evil.com/", "GET"), @r"
    - 1. name: no rule allows the name evil.com
    denied by default
    ");
}

#[test]
fn a_spliced_connection_is_explained() {
    insta::assert_snapshot!(told("pypi.org", "GET"), @r"
      1. name: may be resolved: pypi.org is within `pypi.org`
      2. floor: the address is checked when it is dialled, against the floor and against denied ranges
    + 3. preset package-registries: pypi.org (allow pypi.org ports 80, 443 TCP): allows pypi.org:443 over TCP
    allowed by preset package-registries: pypi.org
    ");
    insta::assert_snapshot!(told("pypi.org:22", "GET"), @r"
      1. name: may be resolved: pypi.org is within `pypi.org`
      2. floor: the address is checked when it is dialled, against the floor and against denied ranges
      3. preset package-registries: pypi.org (allow pypi.org ports 80, 443 TCP): does not match: preset package-registries: pypi.org allows TCP ports 80, 443 only
      4. other rules: 22 are about other destinations
    - 5. default: no rule allows pypi.org:22 over TCP: preset package-registries: pypi.org allows TCP ports 80, 443 only
    denied by default
    ");
}

#[test]
fn addresses_are_explained() {
    insta::assert_snapshot!(told("tcp://192.0.2.7:5432", "GET"), @r"
      1. floor: 192.0.2.7 is not refused on this server
    + 2. rules[2] (allow 192.0.2.0/24 TCP): allows 192.0.2.7:5432 over TCP
    allowed by rules[2]
    ");
    insta::assert_snapshot!(told("http://169.254.169.254/latest/meta-data", "GET"), @r"
    - 1. floor: 169.254.169.254 is refused on this server: metadata
    denied by floor: metadata
    ");
    insta::assert_snapshot!(told("udp://192.0.2.7:443", "GET"), @r"
    - 1. protocol: UDP port 443 is never relayed: QUIC cannot be checked by name; clients fall back to TCP
    denied by protocol
    ");
}

#[test]
fn questions_are_read_as_people_write_them() {
    for (target, host, port, kind, path) in [
        (
            "https://Example.com/a?b#c",
            "example.com",
            443,
            FlowKind::Tls,
            Some("/a?b"),
        ),
        ("http://example.com", "example.com", 80, FlowKind::Http, Some("/")),
        (
            "https://example.com:8443?x",
            "example.com",
            8443,
            FlowKind::Tls,
            Some("/"),
        ),
        (
            "wss://example.com/s",
            "example.com",
            443,
            FlowKind::Tls,
            Some("/s"),
        ),
        ("example.com", "example.com", 443, FlowKind::Tls, Some("/")),
        ("example.com/a", "example.com", 443, FlowKind::Tls, Some("/a")),
        ("example.com:80", "example.com", 80, FlowKind::Http, Some("/")),
        ("example.com:22", "example.com", 22, FlowKind::Opaque, None),
        (
            "tcp://example.com:443",
            "example.com",
            443,
            FlowKind::Opaque,
            None,
        ),
        ("192.0.2.1:22", "192.0.2.1", 22, FlowKind::Opaque, None),
        ("[2001:db8::1]:22", "2001:db8::1", 22, FlowKind::Opaque, None),
        ("2001:db8::1", "2001:db8::1", 443, FlowKind::Tls, Some("/")),
        (
            "https://bücher.example/",
            "xn--bcher-kva.example",
            443,
            FlowKind::Tls,
            Some("/"),
        ),
    ] {
        let question = Question::parse(target, None).unwrap();
        let name = question.name.as_ref().map(ToString::to_string);
        let found = name.or(question.address.map(|address| address.to_string()));
        assert_eq!(found.as_deref(), Some(host), "{target}");
        assert_eq!((question.port, question.kind), (port, kind), "{target}");
        assert_eq!(question.path.as_deref(), path, "{target}");
    }
    for target in [
        "",
        "https://",
        "https:///a",
        "ftp://example.com/",
        "tcp://example.com",
        "udp://192.0.2.1",
        "https://me:pw@example.com/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:+80/",
        "https://0x7f.1/",
        "https://2130706433/",
        "https://127.1/",
        "https://example.com./",
        "https://[::1/",
        "https://[::1]x/",
        "https://exa mple.com/",
    ] {
        assert!(Question::parse(target, None).is_err(), "{target}");
    }
}

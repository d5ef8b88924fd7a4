//! Tables: what each pitfall of egress filtering comes to, and what a wrong policy is answered.

mod model;
mod secrets;

use std::net::IpAddr;

use atoll_types::{NetworkRule, PortRange, Preset};

use super::*;
use secrets::grant;

fn allow(to: &str) -> NetworkRule {
    NetworkRule::new(RuleAction::Allow, to)
}

fn deny(to: &str) -> NetworkRule {
    NetworkRule::new(RuleAction::Deny, to)
}

fn ports(rule: NetworkRule, ports: &[&str]) -> NetworkRule {
    let ports = ports.iter().map(|text| text.parse().unwrap()).collect();
    NetworkRule { ports, ..rule }
}

fn requests(rule: NetworkRule, methods: &[&str], paths: &[&str]) -> NetworkRule {
    let owned = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    NetworkRule {
        methods: owned(methods),
        paths: owned(paths),
        ..rule
    }
}

fn udp(rule: NetworkRule) -> NetworkRule {
    NetworkRule {
        protocol: Some(Protocol::Udp),
        ..rule
    }
}

fn words(rules: Vec<NetworkRule>) -> NetworkPolicy {
    NetworkPolicy {
        rules,
        ..NetworkPolicy::default()
    }
}

fn policy(rules: Vec<NetworkRule>) -> Policy {
    Policy::compile(&words(rules), &Floor::default(), &[]).unwrap()
}

fn preset(preset: Preset, rules: Vec<NetworkRule>) -> Policy {
    let words = NetworkPolicy {
        preset: Some(preset),
        rules,
        ..NetworkPolicy::default()
    };
    Policy::compile(&words, &Floor::default(), &[]).unwrap()
}

fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

/// A flow as a table can say it: what is dialled (a name or an address), where the name leads, and what it claims.
struct Try<'a> {
    to: &'a str,
    port: u16,
    leads_to: Option<&'a str>,
    kind: FlowKind,
    claims: Option<&'a str>,
    protocol: Protocol,
}

/// An honest TLS connection to a public address.
fn tls(to: &str, port: u16) -> Try<'_> {
    let literal = to.parse::<IpAddr>().is_ok();
    Try {
        to,
        port,
        leads_to: (!literal).then_some("203.0.113.7"),
        kind: FlowKind::Tls,
        claims: (!literal).then_some(to),
        protocol: Protocol::Tcp,
    }
}

fn http(to: &str, port: u16) -> Try<'_> {
    Try {
        kind: FlowKind::Http,
        ..tls(to, port)
    }
}

fn opaque(to: &str, port: u16) -> Try<'_> {
    Try {
        kind: FlowKind::Opaque,
        claims: None,
        ..tls(to, port)
    }
}

fn datagram(to: &str, port: u16) -> Try<'_> {
    Try {
        protocol: Protocol::Udp,
        ..opaque(to, port)
    }
}

impl<'a> Try<'a> {
    fn claiming(self, claims: Option<&'a str>) -> Self {
        Self { claims, ..self }
    }

    fn leading_to(self, address: &'a str) -> Self {
        Self {
            leads_to: Some(address),
            ..self
        }
    }

    fn ask(&self, policy: &Policy, request: Option<(&str, &str)>) -> Decision {
        let literal = self.to.parse::<IpAddr>().ok();
        let dialled = literal.is_none().then(|| name(self.to));
        let claimed = self.claims.map(name);
        let flow = Flow {
            protocol: self.protocol,
            port: self.port,
            name: dialled.as_ref(),
            address: literal.or_else(|| self.leads_to.map(|text| text.parse().unwrap())),
            kind: self.kind,
            claimed: claimed.as_ref(),
        };
        match request {
            None => policy.connect(&flow),
            Some((method, path)) => policy.request(&HttpRequest { flow, method, path }),
        }
    }

    /// `+rule` where it is allowed, `-rule` where it is not.
    fn outcome(&self, policy: &Policy) -> String {
        sign(&self.ask(policy, None))
    }

    fn asks(&self, policy: &Policy, method: &str, path: &str) -> String {
        sign(&self.ask(policy, Some((method, path))))
    }
}

fn sign(decision: &Decision) -> String {
    let sign = if decision.is_allowed() { '+' } else { '-' };
    format!("{sign}{}", decision.rule)
}

#[test]
fn nothing_is_allowed_by_default() {
    for policy in [
        policy(Vec::new()),
        preset(Preset::None, Vec::new()),
        policy(vec![deny("*")]),
    ] {
        for to in ["pypi.org", "203.0.113.7", "2001:db8::1"] {
            for port in [22, 80, 443] {
                assert!(!tls(to, port).ask(&policy, None).is_allowed());
                assert!(!http(to, port).ask(&policy, Some(("GET", "/"))).is_allowed());
                assert!(!opaque(to, port).ask(&policy, None).is_allowed());
                assert!(!datagram(to, port).ask(&policy, None).is_allowed());
            }
        }
        assert!(!policy.name(&name("pypi.org")).is_allowed());
    }
}

#[test]
fn names_that_no_rule_allows_are_not_resolved() {
    let policy = policy(vec![
        allow("pypi.org"),
        allow("*.example.com"),
        deny("secret.example.com"),
        ports(allow("half.test"), &["443", "8443"]),
        ports(deny("half.test"), &["443"]),
        ports(allow("none.test"), &["443"]),
        ports(deny("none.test"), &["400-500"]),
        requests(deny("*.example.com"), &["POST"], &[]),
        // A rule about addresses must not turn DNS into a way out.
        allow("0.0.0.0/0"),
    ]);
    for (text, outcome) in [
        ("pypi.org", "+rules[0]"),
        ("a.example.com", "+rules[1]"),
        ("a.b.example.com", "+rules[1]"),
        ("example.com", "-default"),
        ("secret.example.com", "-rules[2]"),
        ("data.pypi.org", "-default"),
        ("half.test", "+rules[3]"),
        ("none.test", "-rules[6]"),
        ("evil.com", "-default"),
        ("localhost", "-floor: loopback"),
    ] {
        assert_eq!(sign(&policy.name(&name(text))), outcome, "{text}");
    }
}

#[test]
fn where_a_name_leads_is_checked_when_it_is_dialled() {
    let policy = preset(Preset::AllPublic, vec![deny("203.0.113.0/28")]);
    for (address, outcome) in [
        ("198.51.100.1", "+preset all-public: *"),
        ("127.0.0.1", "-floor: loopback"),
        ("169.254.169.254", "-floor: metadata"),
        ("10.0.0.1", "-floor: private"),
        ("::1", "-floor: loopback"),
        ("::ffff:10.0.0.1", "-floor: IPv4-mapped"),
        ("64:ff9b::a00:1", "-floor: NAT64"),
        ("198.18.0.9", "-floor: synthetic"),
        ("203.0.113.9", "-rules[0]"),
    ] {
        let flow = tls("rebind.test", 443).leading_to(address);
        assert_eq!(flow.outcome(&policy), outcome, "{address}");
        assert_eq!(
            policy.address(address.parse().unwrap()).is_some(),
            outcome.starts_with("-floor")
        );
    }
}

#[test]
fn an_exception_for_nat64_does_not_hide_a_denied_address() {
    let floor = Floor::new(&crate::FloorConfig {
        allow_private: vec!["64:ff9b::/96".into()],
        ..crate::FloorConfig::default()
    })
    .unwrap();
    let rules = words(vec![deny("203.0.113.0/24"), allow("::/0")]);
    let policy = Policy::compile(&rules, &floor, &[]).unwrap();
    assert_eq!(opaque("64:ff9b::cb00:7107", 22).outcome(&policy), "-rules[0]");
    assert_eq!(opaque("64:ff9b::c633:6401", 22).outcome(&policy), "+rules[1]");
}

#[test]
fn a_literal_address_matches_only_rules_about_addresses() {
    let policy = policy(vec![
        ports(allow("*"), &["1-65535"]),
        ports(allow("198.51.100.0/24"), &["5432"]),
        deny("evil.com"),
        requests(deny("api.test"), &["POST"], &[]),
    ]);
    // Whatever it claims to be.
    assert_eq!(
        tls("203.0.113.7", 443)
            .claiming(Some("pypi.org"))
            .outcome(&policy),
        "-default"
    );
    assert_eq!(
        http("203.0.113.7", 80)
            .claiming(Some("pypi.org"))
            .outcome(&policy),
        "-default"
    );
    assert_eq!(opaque("203.0.113.7", 5432).outcome(&policy), "-default");
    assert_eq!(opaque("198.51.100.7", 5432).outcome(&policy), "+rules[1]");
    assert_eq!(tls("198.51.100.7", 5432).outcome(&policy), "+rules[1]");
    assert_eq!(opaque("198.51.100.7", 5433).outcome(&policy), "-default");
    // What it claims can only cost it something; what cannot be read for a rule that must read it, too.
    let claims = |text| tls("198.51.100.7", 5432).claiming(Some(text)).outcome(&policy);
    assert_eq!(claims("other.test"), "+rules[1]");
    assert_eq!(claims("evil.com"), "-rules[2]");
    assert_eq!(claims("api.test"), "-rules[3]");
    assert_eq!(claims("localhost"), "-floor: loopback");
    let plain = http("198.51.100.7", 5432).claiming(Some("api.test"));
    assert_eq!(plain.outcome(&policy), "+rules[1]");
    assert_eq!(plain.asks(&policy, "GET", "/"), "+rules[1]");
    assert_eq!(plain.asks(&policy, "POST", "/"), "-rules[3]");
}

#[test]
fn the_name_that_is_dialled_and_the_one_that_is_claimed_agree() {
    let policy = preset(Preset::AllPublic, vec![allow("cdn.test")]);
    for flow in [tls("cdn.test", 443), http("cdn.test", 80)] {
        assert_eq!(flow.outcome(&policy), "+rules[0]");
        let fronting = flow.claiming(Some("hidden.test"));
        assert_eq!(fronting.outcome(&policy), "-name_mismatch");
        // Also the tenth request of a connection that began honestly.
        assert_eq!(fronting.asks(&policy, "GET", "/"), "-name_mismatch");
    }
}

#[test]
fn without_a_name_only_an_address_rule_helps() {
    let policy = policy(vec![allow("pypi.org"), allow("198.51.100.0/24")]);
    for flow in [tls("pypi.org", 443), http("pypi.org", 80)] {
        let nameless = flow.claiming(None);
        assert_eq!(nameless.outcome(&policy), "-default");
        assert_eq!(nameless.leading_to("198.51.100.7").outcome(&policy), "+rules[1]");
    }
    let decision = tls("pypi.org", 443).claiming(None).ask(&policy, None);
    assert!(decision.reason.contains("SNI"), "{}", decision.reason);
}

#[test]
fn what_cannot_be_read_is_denied_to_requests_as_to_the_connection() {
    let policy = policy(vec![requests(deny("*"), &[], &["/a"]), allow("198.51.100.0/24")]);
    let nameless = tls("pypi.org", 443).claiming(None).leading_to("198.51.100.7");
    assert_eq!(nameless.outcome(&policy), "-rules[0]");
    let request = nameless.ask(&policy, Some(("GET", "/other")));
    assert!(!request.is_allowed(), "{}", request.reason);
}

#[test]
fn other_protocols_need_their_port_written_down() {
    let policy = policy(vec![
        allow("web.test"),
        ports(allow("git.test"), &["22", "443"]),
        requests(ports(allow("api.test"), &["443"]), &["GET"], &[]),
        requests(deny("git.test"), &["DELETE"], &["/x/**"]),
        ports(allow("db.test"), &["5432"]),
    ]);
    for (flow, outcome) in [
        (opaque("web.test", 443), "-default"),
        (opaque("web.test", 80), "-default"),
        (tls("web.test", 443), "+rules[0]"),
        (http("web.test", 80), "+rules[0]"),
        (http("web.test", 443), "+rules[0]"),
        (tls("web.test", 8443), "-default"),
        (opaque("db.test", 5432), "+rules[4]"),
        (tls("db.test", 5432), "+rules[4]"),
        // A rule that must read requests cannot let through what it cannot read.
        (opaque("api.test", 443), "-default"),
        (opaque("git.test", 22), "-rules[3]"),
        (tls("git.test", 443), "+rules[1]"),
        (tls("git.test", 443).claiming(None), "-rules[3]"),
    ] {
        assert_eq!(
            flow.outcome(&policy),
            outcome,
            "{}:{} {:?}",
            flow.to,
            flow.port,
            flow.kind
        );
    }
}

#[test]
fn udp_is_by_address_and_never_quic_or_dns() {
    let policy = preset(
        Preset::AllPublic,
        vec![udp(allow("198.51.100.0/24")), deny("198.51.100.9")],
    );
    for (flow, outcome) in [
        (datagram("198.51.100.1", 123), "+rules[0]"),
        (datagram("198.51.100.1", 443), "-protocol"),
        (datagram("198.51.100.1", 53), "-protocol"),
        (datagram("198.51.100.1", 853), "-protocol"),
        (datagram("198.51.100.1", 5353), "-protocol"),
        (datagram("198.51.100.1", 5355), "-protocol"),
        // A deny without a protocol is about both.
        (datagram("198.51.100.9", 123), "-rules[1]"),
        (datagram("203.0.113.1", 123), "-default"),
        (datagram("ntp.test", 123), "-default"),
        (datagram("ntp.test", 123).leading_to("198.51.100.3"), "+rules[0]"),
        (datagram("239.1.1.1", 1900), "-floor: multicast"),
        (tls("198.51.100.1", 443), "+preset all-public: 0.0.0.0/0"),
    ] {
        assert_eq!(flow.outcome(&policy), outcome, "{}:{}", flow.to, flow.port);
    }
}

#[test]
fn both_families_go_the_same_way() {
    let policy = policy(vec![
        ports(allow("198.51.100.0/24"), &["22"]),
        ports(allow("2001:db8:1::/48"), &["22"]),
    ]);
    assert_eq!(opaque("198.51.100.1", 22).outcome(&policy), "+rules[0]");
    assert_eq!(opaque("2001:db8:1::1", 22).outcome(&policy), "+rules[1]");
    assert_eq!(opaque("2001:db8:2::1", 22).outcome(&policy), "-default");
    assert_eq!(
        opaque("::ffff:198.51.100.1", 22).outcome(&policy),
        "-floor: IPv4-mapped"
    );
    assert_eq!(opaque("2002:c633:6401::1", 22).outcome(&policy), "-floor: 6to4");
}

#[test]
fn a_deny_wins_wherever_it_stands() {
    let policy = preset(
        Preset::AllPublic,
        vec![
            allow("a.evil.com"),
            deny("*.evil.com"),
            NetworkRule {
                name: Some("no mail".into()),
                ..ports(deny("0.0.0.0/0"), &["25", "465", "587"])
            },
        ],
    );
    assert_eq!(tls("a.evil.com", 443).outcome(&policy), "-rules[1]");
    assert_eq!(opaque("a.evil.com", 9999).outcome(&policy), "-rules[1]");
    assert_eq!(opaque("mail.test", 25).outcome(&policy), "-no mail");
    assert_eq!(opaque("203.0.113.1", 587).outcome(&policy), "-no mail");
    assert_eq!(tls("evil.com", 443).outcome(&policy), "+preset all-public: *");
    assert_eq!(opaque("mail.test", 26).outcome(&policy), "+preset all-public: *");
}

#[test]
fn requests_are_checked_by_method_and_path() {
    let policy = policy(vec![
        requests(allow("api.test"), &["GET", "HEAD"], &["/v1/**"]),
        requests(allow("api.test"), &["POST"], &["/v1/jobs"]),
        requests(deny("api.test"), &[], &["/v1/admin/**"]),
        allow("plain.test"),
        requests(deny("plain.test"), &["DELETE"], &[]),
    ]);
    for (method, path, outcome) in [
        ("GET", "/v1/users", "+rules[0]"),
        ("GET", "/v1/users?next=/v1/admin", "+rules[0]"),
        ("HEAD", "/v1", "+rules[0]"),
        ("POST", "/v1/jobs", "+rules[1]"),
        ("POST", "/v1/jobs/", "+rules[1]"),
        ("POST", "/v1/users", "-default"),
        ("GET", "/v2", "-default"),
        ("GET", "/v1/admin", "-rules[2]"),
        ("GET", "/v1/admin/keys", "-rules[2]"),
        ("GET", "/v1/%61dmin/keys", "-rules[2]"),
        // What could be understood in two ways is refused by the rules that look at paths.
        ("GET", "/v1/x/../admin/keys", "-rules[2]"),
        ("GET", "/v1//admin", "-rules[2]"),
        ("GET", "/v1/x%2f..%2fadmin", "-rules[2]"),
        ("GET", "/v1/admin%00", "-rules[2]"),
        ("GET", "/v1\\admin", "-rules[2]"),
        ("GET", "/v1/;/admin", "-rules[2]"),
        ("OPTIONS", "*", "-rules[2]"),
    ] {
        assert_eq!(
            tls("api.test", 443).asks(&policy, method, path),
            outcome,
            "{method} {path}"
        );
        assert_eq!(
            http("api.test", 80).asks(&policy, method, path),
            outcome,
            "{method} {path}"
        );
    }
    // Rules that do not look at paths do not care.
    assert_eq!(
        tls("plain.test", 443).asks(&policy, "GET", "/a//../b"),
        "+rules[3]"
    );
    assert_eq!(
        tls("plain.test", 443).asks(&policy, "DELETE", "/a//../b"),
        "-rules[4]"
    );
    assert_eq!(tls("plain.test", 443).asks(&policy, "delete", "/"), "-rules[4]");
    for (host, port, inspected) in [
        ("api.test", 443, true),
        ("api.test", 80, true),
        // Because of the deny, which is about all ports.
        ("api.test", 8443, true),
        ("plain.test", 443, true),
        ("other.test", 443, false),
    ] {
        assert_eq!(policy.inspects(&name(host), port), inspected, "{host}:{port}");
    }
    let decision = tls("api.test", 443).ask(&policy, Some(("POST", "/v1/users")));
    assert!(
        decision
            .reason
            .contains("rules[0] allows GET, HEAD on /v1/** only"),
        "{}",
        decision.reason
    );
}

#[test]
fn wildcards_end_at_labels() {
    let policy = policy(vec![allow("*.example.com")]);
    for (to, allowed) in [
        ("a.example.com", true),
        ("a.b.example.com", true),
        ("example.com", false),
        ("notexample.com", false),
        ("example.com.evil.net", false),
        ("a.example.comm", false),
    ] {
        assert_eq!(tls(to, 443).ask(&policy, None).is_allowed(), allowed, "{to}");
    }
}

#[test]
fn presets_are_what_they_say() {
    let registries = preset(Preset::PackageRegistries, Vec::new());
    for host in [
        "pypi.org",
        "files.pythonhosted.org",
        "registry.npmjs.org",
        "index.crates.io",
        "deb.debian.org",
    ] {
        let rule = format!("+preset package-registries: {host}");
        assert_eq!(tls(host, 443).outcome(&registries), rule);
        assert_eq!(http(host, 80).outcome(&registries), rule);
        assert_eq!(tls(host, 8443).outcome(&registries), "-default");
        assert!(!registries.inspects(&name(host), 443));
    }
    assert_eq!(tls("github.com", 443).outcome(&registries), "-default");
    assert_eq!(tls("evil.pypi.org", 443).outcome(&registries), "-default");
    let public = preset(Preset::AllPublic, Vec::new());
    assert_eq!(tls("github.com", 443).outcome(&public), "+preset all-public: *");
    assert_eq!(opaque("github.com", 22).outcome(&public), "+preset all-public: *");
    assert_eq!(
        opaque("203.0.113.1", 22).outcome(&public),
        "+preset all-public: 0.0.0.0/0"
    );
    assert_eq!(
        opaque("2001:db8::1", 22).outcome(&public),
        "+preset all-public: ::/0"
    );
    assert_eq!(datagram("203.0.113.1", 123).outcome(&public), "-default");
}

#[test]
fn a_wrong_policy_is_answered_with_its_place_and_what_to_write() {
    let named = |rule: NetworkRule, name: &str| NetworkRule {
        name: Some(name.into()),
        ..rule
    };
    let limited = |limits| NetworkPolicy {
        limits,
        ..NetworkPolicy::default()
    };
    for (policy, place, remedy) in [
        (
            words(vec![allow("a.test"), allow("https://b.test/")]),
            "rules[1]",
            "without `https://`",
        ),
        (
            words(vec![named(allow("127.1"), "mine")]),
            "rules[0] \"mine\"",
            "four parts",
        ),
        (
            words(vec![named(allow("a.test"), "default")]),
            "rules[0]",
            "at most 64",
        ),
        (
            words(vec![named(allow("a.test"), "floor: private")]),
            "rules[0]",
            "at most 64",
        ),
        (
            words(vec![named(allow("a.test"), "rules[7]")]),
            "rules[0]",
            "at most 64",
        ),
        (
            words(vec![named(allow("a.test"), "x"), named(allow("b.test"), "x")]),
            "rules[1]",
            "its own name",
        ),
        (
            words(vec![udp(allow("a.test"))]),
            "rules[0]",
            "range of addresses",
        ),
        (
            words(vec![udp(ports(allow("192.0.2.0/24"), &["443"]))]),
            "rules[0]",
            "leave the rule out",
        ),
        (
            words(vec![requests(allow("192.0.2.0/24"), &["GET"], &[])]),
            "rules[0]",
            "host name",
        ),
        (
            words(vec![requests(allow("a.test"), &["get"], &[])]),
            "rules[0]",
            "capital letters",
        ),
        (
            words(vec![requests(allow("a.test"), &[], &["v1"])]),
            "rules[0]",
            "/simple/**",
        ),
        (
            words(vec![ports(allow("a.test"), &["1"; 65])]),
            "rules[0]",
            "split the rule",
        ),
        (words(vec![allow("a.test"); 257]), "rules", "at most 256"),
        (
            limited(NetworkLimits {
                connections: Some(0),
                ..NetworkLimits::default()
            }),
            "limits.connections",
            "leave it out",
        ),
    ] {
        let error = Policy::compile(&policy, &Floor::default(), &[]).unwrap_err();
        assert_eq!(error.place, place, "{error}");
        assert!(error.remedy.contains(remedy), "{error}");
    }
    let bad = Grant {
        env: Some("A-B".into()),
        ..grant("key", &["a.test"])
    };
    for (grants, place) in [
        (vec![grant("key", &["*"])], "secrets[0] \"key\" hosts[0]"),
        (vec![bad], "secrets[0] \"key\""),
        (vec![grant("key", &["a.test"]); 65], "secrets"),
    ] {
        let error = Policy::compile(&NetworkPolicy::default(), &Floor::default(), &grants).unwrap_err();
        assert_eq!(error.place, place);
    }
}

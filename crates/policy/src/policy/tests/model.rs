//! The policy against a reading of the same words that is slow and simple: no index, no compiled form, no shared code
//! but the types.

use std::net::IpAddr;

use atoll_types::{NetworkRule, PortRange, Protocol, RuleAction};
use proptest::prelude::*;

use super::{name, words};
use crate::{Floor, Flow, FlowKind, HttpRequest, Policy};

const NAMES: &[&str] = &["a.test", "b.a.test", "c.b.a.test", "ba.test", "test", "b.test"];
const ADDRESSES: &[&str] = &[
    "203.0.113.1",
    "203.0.113.9",
    "198.51.100.1",
    "2001:db8::1",
    "10.0.0.1",
];
const NETS: &[&str] = &[
    "203.0.113.0/24",
    "203.0.113.8/29",
    "198.51.100.1",
    "2001:db8::/32",
    "0.0.0.0/0",
    "::/0",
];
const PORTS: &[u16] = &[22, 79, 80, 81, 443, 444];
const PATTERNS: &[&str] = &["/a", "/a/*", "/a/**", "/**/z", "/"];
const PATHS: &[&str] = &[
    "/", "/a", "/a/", "/a/b", "/a/b/z", "/z?a", "/a/../b", "/a%2fb", "/%61",
];
const METHODS: &[&str] = &["GET", "POST"];

#[derive(Debug, Clone)]
struct Case {
    rules: Vec<NetworkRule>,
    protocol: Protocol,
    port: u16,
    name: Option<&'static str>,
    address: Option<&'static str>,
    kind: FlowKind,
    claimed: Option<&'static str>,
    request: Option<(&'static str, &'static str)>,
}

fn a_rule() -> impl Strategy<Value = NetworkRule> {
    let host = prop_oneof![
        3 => prop::sample::select(NAMES).prop_map(str::to_owned),
        3 => prop::sample::select(NAMES).prop_map(|name| format!("*.{name}")),
        1 => Just("*".to_owned()),
    ];
    let requests = prop_oneof![
        2 => Just((Vec::new(), Vec::new())),
        1 => (
            prop::collection::vec(prop::sample::select(METHODS).prop_map(str::to_owned), 0..2),
            prop::collection::vec(prop::sample::select(PATTERNS).prop_map(str::to_owned), 0..3),
        ),
    ];
    let by_name = (host, requests).prop_map(|(to, (methods, paths))| (to, None, methods, paths));
    let by_net = (
        prop::sample::select(NETS),
        prop::option::of(prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)]),
    )
        .prop_map(|(to, protocol)| (to.to_owned(), protocol, Vec::new(), Vec::new()));
    let range = (prop::sample::select(PORTS), prop::sample::select(PORTS))
        .prop_map(|(a, b): (u16, u16)| PortRange::new(a.min(b), a.max(b)).unwrap());
    (
        prop_oneof![2 => Just(RuleAction::Allow), 1 => Just(RuleAction::Deny)],
        prop_oneof![3 => by_name, 1 => by_net],
        prop::collection::vec(range, 0..3),
    )
        .prop_map(|(action, (to, protocol, methods, paths), ports)| NetworkRule {
            ports,
            protocol,
            methods,
            paths,
            ..NetworkRule::new(action, to)
        })
        .prop_filter("refused when compiled", |rule| {
            rule.protocol != Some(Protocol::Udp) || rule.ports != [PortRange::single(443).unwrap()]
        })
}

prop_compose! {
    fn a_case()(
        rules in prop::collection::vec(a_rule(), 0..7),
        udp in prop::bool::weighted(0.15),
        port in prop::sample::select(PORTS),
        name in prop::option::weighted(0.8, prop::sample::select(NAMES)),
        address in prop::option::weighted(0.8, prop::sample::select(ADDRESSES)),
        kind in prop::sample::select(&[FlowKind::Tls, FlowKind::Http, FlowKind::Opaque][..]),
        honest in prop::bool::weighted(0.7),
        other in prop::option::of(prop::sample::select(NAMES)),
        request in prop::option::of((prop::sample::select(METHODS), prop::sample::select(PATHS))),
    ) -> Case {
        Case {
            rules,
            protocol: if udp { Protocol::Udp } else { Protocol::Tcp },
            port,
            name,
            address: if name.is_none() { address.or(Some(ADDRESSES[0])) } else { address },
            kind,
            claimed: match kind {
                FlowKind::Opaque => None,
                _ if honest => name,
                _ => other,
            },
            request: request.filter(|_| kind != FlowKind::Opaque),
        }
    }
}

impl Case {
    fn ask(&self, policy: &Policy, with_request: bool) -> crate::Decision {
        let (dialled, claimed) = (self.name.map(name), self.claimed.map(name));
        let flow = Flow {
            protocol: self.protocol,
            port: self.port,
            name: dialled.as_ref(),
            address: self.address(),
            kind: self.kind,
            claimed: claimed.as_ref(),
        };
        match self.request {
            Some((method, path)) if with_request => policy.request(&HttpRequest { flow, method, path }),
            _ => policy.connect(&flow),
        }
    }

    fn address(&self) -> Option<IpAddr> {
        self.address.map(|text| text.parse().unwrap())
    }

    /// The verdict and the rule.
    fn slow(&self, with_request: bool) -> (bool, String) {
        let request = self.request.filter(|_| with_request);
        if self.protocol == Protocol::Udp && self.port == 443 {
            return (false, "protocol".into());
        }
        if self.address == Some("10.0.0.1") {
            return (false, "floor: private".into());
        }
        if let (Some(name), Some(claimed)) = (self.name, self.claimed)
            && name != claimed
        {
            return (false, "name_mismatch".into());
        }
        for (at, rule) in self.rules.iter().enumerate() {
            let about = self
                .name
                .or(self.claimed)
                .is_some_and(|name| is_about(&rule.to, name))
                || self.is_within(&rule.to);
            if rule.action != RuleAction::Deny || !about || !covers(rule, self.protocol, self.port) {
                continue;
            }
            let about_requests = !(rule.methods.is_empty() && rule.paths.is_empty());
            let legible = match self.kind {
                FlowKind::Http => true,
                FlowKind::Tls => self.name.is_some() && self.claimed.is_some(),
                FlowKind::Opaque => false,
            };
            let denied = match request {
                _ if !about_requests || !legible => true,
                Some((method, path)) => about_request(rule, method, path) != Some(false),
                None => false,
            };
            if denied {
                return (false, format!("rules[{at}]"));
            }
        }
        for (at, rule) in self.rules.iter().enumerate() {
            if rule.action != RuleAction::Allow || !covers(rule, self.protocol, self.port) {
                continue;
            }
            let about_requests = !(rule.methods.is_empty() && rule.paths.is_empty());
            let by_name = self.name.is_some_and(|name| is_about(&rule.to, name))
                && match self.kind {
                    FlowKind::Opaque => !rule.ports.is_empty() && !about_requests,
                    FlowKind::Tls | FlowKind::Http => self.claimed.is_some(),
                };
            let request_fits = match request {
                Some((method, path)) => about_request(rule, method, path) == Some(true),
                None => true,
            };
            if self.is_within(&rule.to) || (by_name && request_fits) {
                return (true, format!("rules[{at}]"));
            }
        }
        (false, "default".into())
    }

    fn is_within(&self, to: &str) -> bool {
        let Some(address) = self.address() else {
            return false;
        };
        let (net, bits) = match to.split_once('/') {
            Some((net, bits)) => (net, bits.parse().unwrap()),
            None => (to, 128),
        };
        let number = |address: IpAddr| match address {
            IpAddr::V4(v4) => (true, u128::from(u32::from(v4)) << 96),
            IpAddr::V6(v6) => (false, u128::from(v6)),
        };
        let Ok(net) = net.parse() else {
            return false;
        };
        let ((family, a), (other, b)) = (number(address), number(net));
        family == other && (bits == 0 || (a ^ b) >> (128 - bits) == 0)
    }
}

fn is_about(to: &str, name: &str) -> bool {
    match to.strip_prefix('*') {
        Some("") => true,
        Some(suffix) => name.ends_with(suffix),
        None => name == to,
    }
}

fn covers(rule: &NetworkRule, protocol: Protocol, port: u16) -> bool {
    let is_name = !rule.to.starts_with(|c: char| c.is_ascii_digit() || c == ':');
    let protocol_fits = match (rule.action, rule.protocol) {
        (_, Some(own)) => own == protocol,
        (RuleAction::Allow, None) => protocol == Protocol::Tcp,
        (RuleAction::Deny, None) => true,
    };
    protocol_fits
        && if !rule.ports.is_empty() {
            rule.ports.iter().any(|range| range.contains(port))
        } else {
            rule.action == RuleAction::Deny || !is_name || port == 80 || port == 443
        }
}

/// `None` where nobody can tell.
fn about_request(rule: &NetworkRule, method: &str, path: &str) -> Option<bool> {
    if !rule.methods.is_empty() && !rule.methods.iter().any(|known| known == method) {
        return Some(false);
    }
    if rule.paths.is_empty() {
        return Some(true);
    }
    if path.contains("..") || path.contains("%2f") {
        return None;
    }
    let path = path.replace("%61", "a");
    let parts = |text: &str| -> Vec<String> {
        text.split(['/', '?'])
            .filter(|part| !part.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let path = parts(path.split('?').next().unwrap());
    Some(rule.paths.iter().any(|pattern| fits(&parts(pattern), &path)))
}

fn fits(pattern: &[String], path: &[String]) -> bool {
    match pattern {
        [] => path.is_empty(),
        [first, rest @ ..] if first == "**" => (0..=path.len()).any(|taken| fits(rest, &path[taken..])),
        [first, rest @ ..] => {
            path.first()
                .is_some_and(|segment| first == "*" || first == segment)
                && fits(rest, &path[1..])
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn decisions_are_those_of_the_slow_reading(case in a_case()) {
        let policy = Policy::compile(&words(case.rules.clone()), &Floor::default(), &[]).unwrap();
        let connect = case.ask(&policy, false);
        prop_assert_eq!((connect.is_allowed(), connect.rule.to_string()), case.slow(false), "{}", connect.reason);
        let request = case.ask(&policy, true);
        prop_assert_eq!((request.is_allowed(), request.rule.to_string()), case.slow(true), "{}", request.reason);
        // Nothing is sent on a connection that may not be made.
        prop_assert!(connect.is_allowed() || !request.is_allowed());
    }

    #[test]
    fn a_name_is_resolved_exactly_if_a_connection_by_it_could_be_allowed(
        rules in prop::collection::vec(a_rule(), 0..7),
        host in prop::sample::select(NAMES),
    ) {
        let policy = Policy::compile(&words(rules.clone()), &Floor::default(), &[]).unwrap();
        // Every end of a range of ports and its neighbours.
        let reachable = [1, 21, 22, 23, 78, 79, 80, 81, 82, 442, 443, 444, 445, 65535].into_iter().any(|port| {
            let covering = |action, whole: bool| rules.iter().any(|rule| {
                rule.action == action
                    && is_about(&rule.to, host)
                    && covers(rule, Protocol::Tcp, port)
                    && (!whole || (rule.methods.is_empty() && rule.paths.is_empty()))
            });
            covering(RuleAction::Allow, false) && !covering(RuleAction::Deny, true)
        });
        prop_assert_eq!(policy.name(&name(host)).is_allowed(), reachable);
    }

    #[test]
    fn a_deny_never_allows_and_an_allow_never_denies(case in a_case(), rule in a_rule()) {
        let before = Policy::compile(&words(case.rules.clone()), &Floor::default(), &[]).unwrap();
        let mut more = case.rules.clone();
        more.push(rule.clone());
        let after = Policy::compile(&words(more), &Floor::default(), &[]).unwrap();
        let (before, after) = (case.ask(&before, true).is_allowed(), case.ask(&after, true).is_allowed());
        match rule.action {
            RuleAction::Allow => prop_assert!(after >= before),
            RuleAction::Deny => prop_assert!(after <= before),
        }
    }

    #[test]
    fn a_request_to_read_makes_the_connection_inspected(case in a_case()) {
        let policy = Policy::compile(&words(case.rules.clone()), &Floor::default(), &[]).unwrap();
        let (Some(host), FlowKind::Tls) = (case.name, case.kind) else { return Ok(()) };
        // If any request is answered otherwise than the connection, the connection has to be read.
        let differs = METHODS.iter().flat_map(|method| PATHS.iter().map(move |path| (*method, *path))).any(|request| {
            let asked = Case { request: Some(request), ..case.clone() };
            asked.ask(&policy, true).is_allowed() != asked.ask(&policy, false).is_allowed()
        });
        prop_assert!(!differs || policy.inspects(&name(host), case.port));
    }
}

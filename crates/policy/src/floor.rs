//! What no sandbox reaches, whatever its rules say: the host, its neighbours, the cloud's metadata service.
//!
//! What must hold: only the operator makes exceptions, and only for ranges that are refused in the first place. An
//! address that carries another in it (NAT64, 6to4 and the like) is as refused as the one that it carries. The
//! documentation ranges (192.0.2.0/24 and so on) are not in the list: nobody is there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

use crate::target::Target;
use crate::{Decision, Name, PolicyError, RuleName};

/// Refused unless the operator lists a range that contains the address.
const RANGES: &[(&str, &str)] = &[
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "shared address space"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "special purpose"),
    ("192.168.0.0/16", "private"),
    ("::1/128", "loopback"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    // Addresses that carry an IPv4 address: see `carried`.
    ("::/96", "IPv4-compatible"),
    ("::ffff:0:0/96", "IPv4-mapped"),
    ("::ffff:0:0:0/96", "IPv4-translated"),
    ("64:ff9b::/96", "NAT64"),
    ("64:ff9b:1::/48", "NAT64"),
    ("2002::/16", "6to4"),
    ("2001::/32", "Teredo"),
];

/// Refused always: nobody can be dialled there, or Atoll itself uses it (198.18.0.0/15 is where the links of sandboxes
/// and the addresses that stand for names are).
const NEVER: &[(&str, &str)] = &[
    ("0.0.0.0/8", "unspecified"),
    ("198.18.0.0/15", "synthetic"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("ff00::/8", "multicast"),
];

/// Refused unless the operator lists exactly this address; a wide exception must not hand out credentials.
const METADATA: &[&str] = &[
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "fd20:ce::254",
];

/// Names of the same things. They and what is below them are refused before anybody is asked for their address.
const NAMES: &[(&str, &str)] = &[
    ("localhost", "loopback"),
    ("localhost.localdomain", "loopback"),
    ("localhost6.localdomain6", "loopback"),
    ("localhost6", "loopback"),
    ("ip6-localhost", "loopback"),
    ("ip6-loopback", "loopback"),
    ("metadata", "metadata"),
    ("metadata.google.internal", "metadata"),
    ("metadata.goog", "metadata"),
    ("instance-data", "metadata"),
    ("instance-data.ec2.internal", "metadata"),
];

/// What the operator and the machine add to the built-in list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FloorConfig {
    /// Exceptions: ranges of the built-in list, or single addresses (of the host itself, say).
    pub allow_private: Vec<String>,
    /// More to refuse: names, wildcards, ranges.
    pub deny: Vec<String>,
    /// Names of the server's own services for sandboxes. No preset, wildcard or range allows them: only a rule that names
    /// them does, and then plain HTTP alone.
    pub internal: Vec<Name>,
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct Floor(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    exceptions: Vec<IpNet>,
    denied: Vec<(Target, RuleName)>,
    internal: Vec<Name>,
    never: Vec<(IpNet, &'static str)>,
    ranges: Vec<(IpNet, &'static str)>,
    metadata: Vec<IpAddr>,
}

impl Default for Floor {
    fn default() -> Self {
        Self(Arc::new(Inner::built_in()))
    }
}

impl Floor {
    pub fn new(config: &FloorConfig) -> Result<Self, PolicyError> {
        let mut inner = Inner::built_in();
        inner.internal.clone_from(&config.internal);
        for (at, text) in config.allow_private.iter().enumerate() {
            let place = format!("allow_private[{at}]");
            inner.exceptions.push(inner.read_exception(text, &place)?);
        }
        for (at, text) in config.deny.iter().enumerate() {
            let place = format!("deny[{at}]");
            let target = Target::parse(text).map_err(|problem| problem.at(&place))?;
            if target == Target::Any {
                return Err(PolicyError::new(
                    place,
                    "`*` would refuse every name",
                    "leave it out: sandboxes reach nothing unless their policy says so",
                ));
            }
            inner
                .denied
                .push((target, RuleName::from(format!("floor: operator's deny {text}"))));
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Why an address is refused, if it is.
    pub fn address(&self, address: IpAddr) -> Option<Decision> {
        let (refused, (rule, what)) = std::iter::once(address)
            .chain(carried(address))
            .find_map(|one| Some((one, self.0.refuses(one)?)))?;
        let reason = if refused == address {
            format!("{address} is refused on this server: {what}")
        } else {
            format!("{address} leads to {refused}, which is refused on this server: {what}")
        };
        Some(Decision::deny(&rule, reason))
    }

    /// Why an address is refused because it is one of the host's own, which `is_own` knows. They change over time, so it
    /// is asked for each connection, right before it is made. Only an exception for exactly this address helps.
    pub fn own_address(&self, address: IpAddr, is_own: impl Fn(IpAddr) -> bool) -> Option<Decision> {
        let own = std::iter::once(address)
            .chain(carried(address))
            .find(|one| is_own(*one) && !self.0.excepts_exactly(*one))?;
        let reason = if own == address {
            format!("{address} is refused on this server: it is the server's own")
        } else {
            format!("{address} leads to {own}, which is refused on this server: it is the server's own")
        };
        Some(Decision::deny(&RuleName::from("floor: own address"), reason))
    }

    /// Whether it is one of the server's own services: see [`FloorConfig::internal`].
    pub(crate) fn is_internal(&self, name: &Name) -> bool {
        self.0.internal.contains(name)
    }

    /// Why a name is refused, if it is, before its address is known.
    pub fn name(&self, name: &Name) -> Option<Decision> {
        let known = NAMES.iter().find(|(refused, _)| {
            std::iter::once(name.as_str())
                .chain(name.parents())
                .any(|it| it == *refused)
        });
        if let Some((_, what)) = known {
            return Some(Decision::deny(
                &RuleName::from(format!("floor: {what}")),
                format!("the name {name} is refused on this server: {what}"),
            ));
        }
        let (_, rule) = self
            .0
            .denied
            .iter()
            .find(|(target, _)| target.matches_name(name))?;
        Some(Decision::deny(
            rule,
            format!("the operator of this server refuses the name {name}"),
        ))
    }
}

impl Inner {
    fn built_in() -> Self {
        let nets = |list: &[(&str, &'static str)]| {
            list.iter()
                .filter_map(|(net, what)| Some((net.parse().ok()?, *what)))
                .collect()
        };
        Self {
            never: nets(NEVER),
            ranges: nets(RANGES),
            metadata: METADATA.iter().filter_map(|text| text.parse().ok()).collect(),
            ..Self::default()
        }
    }

    fn read_exception(&self, text: &str, place: &str) -> Result<IpNet, PolicyError> {
        let Target::Net(net) = Target::parse(text).map_err(|problem| problem.at(place))? else {
            return Err(PolicyError::new(
                place,
                format!("`{text}` is not a range of addresses"),
                "write for example 10.1.0.0/16",
            ));
        };
        if let Some((never, what)) = self.never.iter().find(|(never, _)| never.contains(&net)) {
            return Err(PolicyError::new(
                place,
                format!("{net} is in {never} ({what}), which no sandbox can reach"),
                "leave it out",
            ));
        }
        let single = net.prefix_len() == net.max_prefix_len();
        if !single && !self.ranges.iter().any(|(range, _)| range.contains(&net)) {
            return Err(PolicyError::new(
                place,
                format!("{net} is not within a range that is refused"),
                "list only what sandboxes may reach of the private ranges, for example 10.1.0.0/16",
            ));
        }
        Ok(net)
    }

    /// By which rule, and what the address is.
    fn refuses(&self, address: IpAddr) -> Option<(RuleName, String)> {
        let floor = |what: &str| Some((RuleName::from(format!("floor: {what}")), what.to_owned()));
        if let Some((_, rule)) = self
            .denied
            .iter()
            .find(|(target, _)| matches!(target, Target::Net(net) if net.contains(&address)))
        {
            return Some((rule.clone(), "the operator listed it".to_owned()));
        }
        let within = |list: &[(IpNet, &'static str)]| {
            list.iter()
                .find(|(net, _)| net.contains(&address))
                .map(|(_, what)| *what)
        };
        if let Some(what) = within(&self.never) {
            return floor(what);
        }
        if self.metadata.contains(&address) && !self.excepts_exactly(address) {
            return floor("metadata");
        }
        match within(&self.ranges) {
            Some(what) if !self.exceptions.iter().any(|net| net.contains(&address)) => floor(what),
            _ => None,
        }
    }

    fn excepts_exactly(&self, address: IpAddr) -> bool {
        self.exceptions.contains(&IpNet::from(address))
    }
}

/// The IPv4 addresses that an IPv6 address carries: where a packet to it would end up, or who relays it.
pub(crate) fn carried(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let [first, second] = match address {
        IpAddr::V4(_) => [None, None],
        IpAddr::V6(v6) => carried_v6(v6),
    };
    first.into_iter().chain(second).map(IpAddr::V4)
}

fn carried_v6(address: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let v4 = |high: u16, low: u16| Some(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)));
    match address.segments() {
        // The two that are IPv6's own.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => [None, None],
        // Compatible, mapped, translated, NAT64 (the well-known prefix and the local one with 96 bits).
        [0, 0, 0, 0, 0, 0, a, b]
        | [0, 0, 0, 0, 0, 0xffff, a, b]
        | [0, 0, 0, 0, 0xffff, 0, a, b]
        | [0x64, 0xff9b, 0, 0, 0, 0, a, b]
        | [0x64, 0xff9b, 1, _, _, _, a, b] => [v4(a, b), None],
        [0x2002, a, b, ..] => [v4(a, b), None],
        // Teredo: its server, and its client with all bits turned.
        [0x2001, 0, a, b, _, _, c, d] => [v4(a, b), v4(!c, !d)],
        _ => [None, None],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(floor: &Floor, address: &str) -> Option<String> {
        floor
            .address(address.parse().unwrap())
            .map(|decision| decision.rule.to_string())
    }

    #[test]
    fn the_lists_are_readable() {
        let inner = Inner::built_in();
        assert_eq!(inner.ranges.len(), RANGES.len());
        assert_eq!(inner.never.len(), NEVER.len());
        assert_eq!(inner.metadata.len(), METADATA.len());
        for (name, _) in NAMES {
            assert!(Name::parse(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn what_is_not_public_is_refused() {
        let floor = Floor::default();
        for (address, what) in [
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("10.255.0.1", "private"),
            ("100.64.0.1", "shared address space"),
            ("127.0.0.1", "loopback"),
            ("127.255.255.254", "loopback"),
            ("169.254.1.1", "link-local"),
            ("169.254.169.254", "metadata"),
            ("168.63.129.16", "metadata"),
            ("172.16.0.1", "private"),
            ("172.31.255.255", "private"),
            ("192.0.0.8", "special purpose"),
            ("192.168.1.1", "private"),
            ("198.18.0.5", "synthetic"),
            ("198.19.255.1", "synthetic"),
            ("224.0.0.251", "multicast"),
            ("239.1.1.1", "multicast"),
            ("240.0.0.1", "reserved"),
            ("255.255.255.255", "reserved"),
            ("::", "unspecified"),
            ("::1", "loopback"),
            ("fc00::1", "private"),
            ("fd12::1", "private"),
            ("fd00:ec2::254", "metadata"),
            ("fe80::1", "link-local"),
            ("fec0::1", "site-local"),
            ("ff02::fb", "multicast"),
            ("::ffff:8.8.8.8", "IPv4-mapped"),
            ("::ffff:127.0.0.1", "IPv4-mapped"),
            ("::127.0.0.1", "IPv4-compatible"),
            ("64:ff9b::7f00:1", "NAT64"),
            ("2002:7f00:1::", "6to4"),
            ("2001:0:1:2:3:4:5:6", "Teredo"),
        ] {
            assert_eq!(rule(&floor, address), Some(format!("floor: {what}")), "{address}");
        }
        for address in [
            "1.1.1.1",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "198.17.0.1",
            "198.20.0.1",
            "203.0.113.7",
            "2001:db8::1",
            "2606:4700::1111",
        ] {
            assert_eq!(rule(&floor, address), None, "{address}");
        }
    }

    #[test]
    fn the_operator_makes_exceptions_but_not_by_accident() {
        let floor = Floor::new(&FloorConfig {
            allow_private: [
                "10.1.0.0/16",
                "169.254.0.0/16",
                "64:ff9b::/96",
                "2002::/16",
                "2001::/32",
                "192.168.0.7",
            ]
            .map(String::from)
            .to_vec(),
            deny: vec![
                "10.1.9.0/24".into(),
                "*.corp.example".into(),
                "203.0.113.0/24".into(),
            ],
            ..FloorConfig::default()
        })
        .unwrap();
        for (address, refused) in [
            ("10.1.2.3", None),
            ("10.2.2.3", Some("floor: private")),
            ("192.168.0.7", None),
            ("10.1.9.1", Some("floor: operator's deny 10.1.9.0/24")),
            ("169.254.3.4", None),
            ("169.254.169.254", Some("floor: metadata")),
            // What they carry is looked at even where the range itself is excepted.
            ("64:ff9b::808:808", None),
            ("64:ff9b::a01:203", None),
            ("64:ff9b::a02:203", Some("floor: private")),
            (
                "64:ff9b::cb00:7107",
                Some("floor: operator's deny 203.0.113.0/24"),
            ),
            ("2002:a9fe:a9fe::1", Some("floor: metadata")),
            // Teredo: the server 8.8.8.8, the client 127.0.0.1 turned.
            ("2001:0:808:808::80ff:fffe", Some("floor: loopback")),
            ("2001:0:7f00:1::f7f7:f7f7", Some("floor: loopback")),
            ("2001:0:808:808::f7f7:f7f7", None),
        ] {
            assert_eq!(rule(&floor, address).as_deref(), refused, "{address}");
        }
        let name = Name::parse("git.corp.example").unwrap();
        assert!(floor.name(&name).is_some());
    }

    #[test]
    fn the_hosts_own_addresses_are_refused_unless_listed_one_by_one() {
        let floor = Floor::new(&FloorConfig {
            allow_private: ["10.1.0.0/16", "64:ff9b::/96", "192.168.0.7", "203.0.113.9"]
                .map(String::from)
                .to_vec(),
            ..FloorConfig::default()
        })
        .unwrap();
        let own: Vec<IpAddr> = [
            "10.1.0.5",
            "192.168.0.7",
            "203.0.113.8",
            "203.0.113.9",
            "2001:db8::5",
        ]
        .map(|text| text.parse().unwrap())
        .to_vec();
        for (address, refused) in [
            ("10.1.0.5", true),
            ("10.1.0.6", false),
            ("192.168.0.7", false),
            ("203.0.113.8", true),
            ("203.0.113.9", false),
            ("2001:db8::5", true),
            ("2001:db8::6", false),
            // By way of somebody who translates.
            ("64:ff9b::cb00:7108", true),
            ("64:ff9b::cb00:7109", false),
        ] {
            let found = floor.own_address(address.parse().unwrap(), |address| own.contains(&address));
            assert_eq!(found.is_some(), refused, "{address}");
            assert!(found.is_none_or(|decision| decision.rule.as_str() == "floor: own address"));
        }
    }

    #[test]
    fn senseless_exceptions_are_refused() {
        for (text, problem) in [
            ("0.0.0.0/0", "not within a range"),
            ("8.0.0.0/8", "not within a range"),
            ("::/0", "not within a range"),
            ("198.18.0.0/16", "no sandbox can reach"),
            ("224.0.0.1", "no sandbox can reach"),
            ("corp.example", "not a range"),
            ("10.1.0.5/16", "bits set"),
        ] {
            let error = Floor::new(&FloorConfig {
                allow_private: vec!["10.0.0.0/8".into(), text.into()],
                ..FloorConfig::default()
            })
            .unwrap_err();
            assert_eq!(error.place, "allow_private[1]");
            assert!(error.problem.contains(problem), "{text}: {error}");
        }
        let everything = FloorConfig {
            deny: vec!["*".into()],
            ..FloorConfig::default()
        };
        assert!(Floor::new(&everything).is_err());
    }

    #[test]
    fn names_of_refused_things_are_refused() {
        let floor = Floor::default();
        for (name, refused) in [
            ("localhost", true),
            ("a.localhost", true),
            ("metadata.google.internal", true),
            ("metadata", true),
            ("notlocalhost", false),
            ("localhost.example.com", false),
            ("pypi.org", false),
        ] {
            assert_eq!(
                floor.name(&Name::parse(name).unwrap()).is_some(),
                refused,
                "{name}"
            );
        }
    }
}

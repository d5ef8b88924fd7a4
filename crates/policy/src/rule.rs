//! One rule, read and completed with what it means where it says nothing.

use std::fmt;

use atoll_types::{NetworkRule, PortRange, Protocol, RuleAction};

use crate::error::Problem;
use crate::path::Requests;
use crate::ports::Ports;
use crate::target::{Target, shown};
use crate::{PolicyError, RuleName};

const MAX_NAME_BYTES: usize = 64;
pub(crate) const MAX_PORTS: usize = 64;

/// UDP that is never relayed, because it would go around the policy, and what to do instead.
pub(crate) const REFUSED_UDP: &[(u16, &str)] = &[
    (53, "DNS is answered by Atoll itself"),
    (443, "QUIC cannot be checked by name; clients fall back to TCP"),
    (853, "DNS over QUIC would go around the policy for names"),
    (5353, "multicast DNS does not leave the sandbox"),
    (5355, "link-local name resolution does not leave the sandbox"),
];

#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub name: RuleName,
    pub action: RuleAction,
    pub target: Target,
    pub ports: Ports,
    /// Whether somebody wrote the ports down. Only then may an allow by name let through what has no name in it.
    pub ports_written: bool,
    /// `None` means both.
    pub protocol: Option<Protocol>,
    pub requests: Requests,
}

impl Rule {
    /// A rule of a user, at its index.
    pub(crate) fn read(at: usize, rule: &NetworkRule) -> Result<Self, PolicyError> {
        let index = format!("rules[{at}]");
        let Some(name) = &rule.name else {
            return Self::build(index.clone().into(), rule).map_err(|problem| problem.at(index));
        };
        check_name(name).map_err(|problem| problem.at(&index))?;
        Self::build(name.as_str().into(), rule).map_err(|problem| problem.at(format!("{index} \"{name}\"")))
    }

    /// A rule under a name that was checked or is Atoll's own.
    pub(crate) fn build(name: RuleName, rule: &NetworkRule) -> Result<Self, Problem> {
        let target = Target::parse(&rule.to)?;
        if rule.ports.len() > MAX_PORTS {
            return Err(Problem::new(
                format!("it has {} ranges of ports", rule.ports.len()),
                format!("at most {MAX_PORTS} are allowed; split the rule"),
            ));
        }
        let requests = Requests::parse(&rule.methods, &rule.paths)?;
        let about_addresses = matches!(target, Target::Net(_));
        if about_addresses && !requests.are_all() {
            return Err(Problem::new(
                format!("methods and paths cannot be checked for the address range {target}"),
                "write a host name into `to`, or leave `methods` and `paths` out",
            ));
        }
        if rule.protocol == Some(Protocol::Udp) {
            check_udp(rule, about_addresses)?;
        }
        let ports = match (rule.action, about_addresses) {
            _ if !rule.ports.is_empty() => Ports::new(&rule.ports),
            (RuleAction::Allow, false) => Ports::of(&[80, 443]),
            (RuleAction::Allow, true) | (RuleAction::Deny, _) => Ports::all(),
        };
        Ok(Self {
            name,
            action: rule.action,
            target,
            ports,
            ports_written: !rule.ports.is_empty(),
            protocol: match rule.action {
                RuleAction::Allow => Some(rule.protocol.unwrap_or(Protocol::Tcp)),
                RuleAction::Deny => rule.protocol,
            },
            requests,
        })
    }

    pub(crate) fn covers(&self, protocol: Protocol, port: u16) -> bool {
        self.protocol.is_none_or(|own| own == protocol) && self.ports.contains(port)
    }

    /// Whether its requests have to be read to know whether it matches.
    pub(crate) fn reads_requests(&self) -> bool {
        !self.requests.are_all()
    }
}

fn check_udp(rule: &NetworkRule, about_addresses: bool) -> Result<(), Problem> {
    if !about_addresses {
        return Err(Problem::new(
            format!("UDP to the name `{}` cannot be checked by name", shown(&rule.to)),
            "write the range of addresses into `to`, as in 192.0.2.0/24, or leave `protocol` out",
        ));
    }
    for (port, why) in REFUSED_UDP {
        if rule.action == RuleAction::Allow && rule.ports.iter().copied().eq(PortRange::single(*port)) {
            return Err(Problem::new(
                format!("UDP port {port} is never relayed: {why}"),
                "leave the rule out",
            ));
        }
    }
    Ok(())
}

/// A rule's name stands in the ledger beside those that Atoll gives itself, and must not look like one of them.
fn check_name(name: &str) -> Result<(), Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b' ');
    let reserved = [RuleName::DEFAULT, RuleName::NAME_MISMATCH, RuleName::PROTOCOL];
    if name.is_empty()
        || name.len() > MAX_NAME_BYTES
        || name.trim() != name
        || !name.bytes().all(plain)
        || reserved.contains(&name)
    {
        return Err(Problem::new(
            format!("`{}` cannot be the name of a rule", shown(name)),
            format!(
                "write at most {MAX_NAME_BYTES} letters, digits, spaces, `-`, `_` or `.`, and none of {}",
                reserved.join(", ")
            ),
        ));
    }
    Ok(())
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.action {
            RuleAction::Allow => "allow",
            RuleAction::Deny => "deny",
        };
        write!(f, "{verb} {}", self.target)?;
        if !self.ports.is_all() {
            write!(f, " ports {}", self.ports)?;
        }
        if let Some(protocol) = self.protocol {
            write!(f, " {protocol}")?;
        }
        if self.reads_requests() {
            write!(f, ", {}", self.requests.describe())?;
        }
        Ok(())
    }
}

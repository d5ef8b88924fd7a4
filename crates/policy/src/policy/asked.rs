//! One question against one rule.

use std::net::IpAddr;

use atoll_types::{EgressVerdict, Protocol};

use crate::explain::Trace;
use crate::path::{Match, Path};
use crate::rule::Rule;
use crate::target::{Target, shown};
use crate::{Decision, Flow, FlowKind};

/// One flow, and the request on it if that is what is asked.
pub(super) struct Asked<'a> {
    pub(super) flow: &'a Flow<'a>,
    pub(super) request: Option<(&'a str, Path<'a>)>,
}

impl Asked<'_> {
    pub(super) fn denied_by(&self, rule: &Rule, trace: &mut Trace<'_>) -> Option<Decision> {
        let flow = self.flow;
        if !rule.covers(flow.protocol, flow.port) {
            trace.rule(rule, "does not match: it is about other ports");
            return None;
        }
        let reason = if !rule.reads_requests() {
            format!("{} denies {}", rule.name, self.what())
        } else if !self.flow.is_legible() {
            format!(
                "{} denies some requests, and what is in this connection cannot be read",
                rule.name
            )
        } else if let Some((method, path)) = &self.request {
            match rule.requests.matches(method, path) {
                Match::Yes => format!("{} denies {}", rule.name, self.what()),
                Match::Unclear(why) => {
                    format!(
                        "{} denies some paths, and this one is not clear: {why}",
                        rule.name
                    )
                }
                Match::No => {
                    trace.rule(rule, "does not match: it is about other requests");
                    return None;
                }
            }
        } else {
            trace.rule(rule, "is checked for each request");
            return None;
        };
        Some(trace.rule_decides(rule, EgressVerdict::Denied, reason))
    }

    /// The decision, or why the rule does not allow it.
    pub(super) fn allowed_by(&self, rule: &Rule, trace: &mut Trace<'_>) -> Result<Decision, WhyNot> {
        if let Some(why) = self.not_allowed_by(rule) {
            trace.misses(rule, || why.words(rule));
            return Err(why);
        }
        let checked = match &self.request {
            None if rule.reads_requests() => ", and each request is checked",
            _ => "",
        };
        let reason = format!("{} allows {}{checked}", rule.name, self.what());
        Ok(trace.rule_decides(rule, EgressVerdict::Allowed, reason))
    }

    fn not_allowed_by(&self, rule: &Rule) -> Option<WhyNot> {
        if !rule.covers(self.flow.protocol, self.flow.port) {
            return Some(WhyNot::Ports);
        }
        if !matches!(rule.target, Target::Net(_))
            && let Some(why) = self.name_does_not_count(rule)
        {
            return Some(why);
        }
        let (method, path) = self.request.as_ref().filter(|_| rule.reads_requests())?;
        match rule.requests.matches(method, path) {
            Match::Yes => None,
            Match::No => Some(WhyNot::Request),
            Match::Unclear(why) => Some(WhyNot::Unclear(why)),
        }
    }

    /// Why an allow by name cannot vouch for this flow, although it is about its name and port.
    fn name_does_not_count(&self, rule: &Rule) -> Option<WhyNot> {
        match self.flow.kind {
            FlowKind::Tls if self.flow.claimed.is_none() => Some(WhyNot::NoSni),
            FlowKind::Http if self.flow.claimed.is_none() => Some(WhyNot::NoHost),
            FlowKind::Opaque if rule.reads_requests() => Some(WhyNot::NotHttp),
            FlowKind::Opaque if !rule.ports_written => Some(WhyNot::PortNotListed),
            FlowKind::Tls | FlowKind::Http | FlowKind::Opaque => None,
        }
    }

    /// `GET of example.com:443`, `192.0.2.1:22 over TCP`.
    pub(super) fn what(&self) -> String {
        let Flow {
            protocol,
            port,
            name,
            address,
            ..
        } = self.flow;
        let place = match (name, address) {
            (Some(name), _) => format!("{name}:{port}"),
            (None, Some(IpAddr::V6(v6))) => format!("[{v6}]:{port}"),
            (None, Some(v4)) => format!("{v4}:{port}"),
            (None, None) => format!("an unknown destination on port {port}"),
        };
        match &self.request {
            Some((method, _)) => format!("{} to {place}", shown(method)),
            None => format!("{place} over {protocol}"),
        }
    }
}

/// Why a rule does not allow something. Words are made of it only for who reads them: there may be many rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhyNot {
    Ports,
    NoSni,
    NoHost,
    NotHttp,
    PortNotListed,
    Request,
    Unclear(&'static str),
}

impl WhyNot {
    pub(super) fn words(self, rule: &Rule) -> String {
        let name = &rule.name;
        match self {
            Self::Ports => {
                let protocol = rule.protocol.unwrap_or(Protocol::Tcp);
                format!("{name} allows {protocol} ports {} only", rule.ports)
            }
            Self::NoSni => {
                "the TLS handshake names no host (SNI), so only a rule about addresses could allow it"
                    .to_owned()
            }
            Self::NoHost => {
                "the request names no host, so only a rule about addresses could allow it".to_owned()
            }
            Self::NotHttp => {
                format!("{name} is about HTTP requests, and this connection is neither TLS nor HTTP")
            }
            Self::PortNotListed => {
                format!("the connection is neither TLS nor HTTP, and {name} does not list its port")
            }
            Self::Request => format!("{name} allows {} only", rule.requests.describe()),
            Self::Unclear(why) => format!("{name} allows some paths, and this one is not clear: {why}"),
        }
    }
}

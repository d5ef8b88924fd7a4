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
        } else if !self.requests_can_be_read() {
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
    pub(super) fn allowed_by(&self, rule: &Rule, trace: &mut Trace<'_>) -> Result<Decision, String> {
        let flow = self.flow;
        let by_address = matches!(rule.target, Target::Net(_));
        let why_not = if !rule.covers(flow.protocol, flow.port) {
            let protocol = rule.protocol.unwrap_or(Protocol::Tcp);
            Some(format!(
                "{} allows {protocol} ports {} only",
                rule.name, rule.ports
            ))
        } else if by_address {
            None
        } else {
            self.name_does_not_count(rule)
        };
        if let Some(why) = why_not {
            trace.rule(rule, &format!("does not match: {why}"));
            return Err(why);
        }
        let reason = if !rule.reads_requests() {
            format!("{} allows {}", rule.name, self.what())
        } else if let Some((method, path)) = &self.request {
            let why = match rule.requests.matches(method, path) {
                Match::Yes => None,
                Match::No => Some(format!("{} allows {} only", rule.name, rule.requests.describe())),
                Match::Unclear(why) => Some(format!(
                    "{} allows some paths, and this one is not clear: {why}",
                    rule.name
                )),
            };
            if let Some(why) = why {
                trace.rule(rule, &format!("does not match: {why}"));
                return Err(why);
            }
            format!("{} allows {}", rule.name, self.what())
        } else {
            format!(
                "{} allows {}, and each request is checked",
                rule.name,
                self.what()
            )
        };
        Ok(trace.rule_decides(rule, EgressVerdict::Allowed, reason))
    }

    /// Why an allow by name cannot vouch for this flow, although it is about its name and port.
    fn name_does_not_count(&self, rule: &Rule) -> Option<String> {
        match self.flow.kind {
            FlowKind::Tls if self.flow.claimed.is_none() => Some(
                "the TLS handshake names no host (SNI), so only a rule about addresses could allow it"
                    .to_owned(),
            ),
            FlowKind::Http if self.flow.claimed.is_none() => {
                Some("the request names no host, so only a rule about addresses could allow it".to_owned())
            }
            FlowKind::Opaque if rule.reads_requests() => Some(format!(
                "{} is about HTTP requests, and this connection is neither TLS nor HTTP",
                rule.name
            )),
            FlowKind::Opaque if !rule.ports_written => Some(format!(
                "the connection is neither TLS nor HTTP, and {} does not list its port",
                rule.name
            )),
            FlowKind::Tls | FlowKind::Http | FlowKind::Opaque => None,
        }
    }

    /// Whether whoever asks can see each request, and will ask for it.
    fn requests_can_be_read(&self) -> bool {
        match self.flow.kind {
            FlowKind::Http => true,
            FlowKind::Tls => self.flow.name.is_some() && self.flow.claimed.is_some(),
            FlowKind::Opaque => false,
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

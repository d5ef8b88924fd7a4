//! The same decision, told step by step.

use std::fmt;
use std::net::IpAddr;

use atoll_types::{EgressVerdict, Protocol, SecretRef, Timestamp};

use crate::error::Problem;
use crate::rule::Rule;
use crate::target::shown;
use crate::{Decision, Flow, FlowKind, HttpRequest, Name, Policy, PolicyError, RuleName};

/// What somebody wants to know about: an honest attempt, in which the guest names the host that it dials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub protocol: Protocol,
    pub port: u16,
    pub name: Option<Name>,
    /// Where the name is known to lead, or what is dialled.
    pub address: Option<IpAddr>,
    pub kind: FlowKind,
    pub method: String,
    /// `None` where no request is sent.
    pub path: Option<String>,
}

/// A decision with everything that led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    pub decision: Decision,
    pub steps: Vec<Step>,
    /// Whether Atoll would read the requests on this connection.
    pub inspected: bool,
    /// Those that would go into the request.
    pub secrets: Vec<SecretRef>,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// `name`, `floor`, `rules[1] (allow *.example.com ports 443 TCP)`
    pub check: String,
    pub finding: String,
    /// Set where this step decided.
    pub verdict: Option<EgressVerdict>,
}

impl Question {
    /// Reads a URL (`https`, `http`, `wss`, `ws`, `tcp`, `udp`), `host`, `host:port` or an address. Without a scheme it
    /// is TLS, but plain HTTP on port 80, and neither on a port that is known for nothing of the kind.
    pub fn parse(target: &str, method: Option<&str>) -> Result<Self, PolicyError> {
        Self::read(target, method).map_err(|problem| problem.at("url"))
    }

    fn read(target: &str, method: Option<&str>) -> Result<Self, Problem> {
        let wrong = |why: &str, remedy: &str| Problem::new(format!("`{}` {why}", shown(target)), remedy);
        let (scheme, rest) = match target.split_once("://") {
            Some((scheme, rest)) => (Some(scheme.to_ascii_lowercase()), rest),
            None => (None, target),
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        if authority.contains('@') {
            return Err(wrong(
                "has a user name in it",
                "write it without; it does not matter here",
            ));
        }
        let (host, port) = split_port(authority).ok_or_else(|| {
            wrong(
                "has no readable port",
                "write for example https://example.com:8443/",
            )
        })?;
        let (protocol, kind, usual) = match scheme.as_deref() {
            Some("https" | "wss") => (Protocol::Tcp, FlowKind::Tls, Some(443)),
            Some("http" | "ws") => (Protocol::Tcp, FlowKind::Http, Some(80)),
            Some("tcp") => (Protocol::Tcp, FlowKind::Opaque, None),
            Some("udp") => (Protocol::Udp, FlowKind::Opaque, None),
            Some(_) => {
                return Err(wrong(
                    "has an unknown scheme",
                    "use https, http, wss, ws, tcp or udp",
                ));
            }
            None => match port {
                None | Some(443 | 8443) => (Protocol::Tcp, FlowKind::Tls, Some(443)),
                Some(80 | 8080) => (Protocol::Tcp, FlowKind::Http, None),
                Some(_) => (Protocol::Tcp, FlowKind::Opaque, None),
            },
        };
        let port = port.or(usual).ok_or_else(|| {
            wrong(
                "has no port",
                "write one behind a colon, for example tcp://example.com:22",
            )
        })?;
        let (name, address) = match host.parse::<IpAddr>() {
            Ok(address) => (None, Some(address)),
            Err(_) => match Name::parse_written(host) {
                Ok(name) => (Some(name), None),
                Err(why) => {
                    return Err(wrong(
                        &format!("has a host that is neither a name nor an address: {why}"),
                        "sandboxes cannot reach it under this name, whatever the policy is",
                    ));
                }
            },
        };
        let path = match kind {
            FlowKind::Opaque => None,
            _ if path.starts_with('/') => Some(path.split('#').next().unwrap_or_default().to_owned()),
            FlowKind::Tls | FlowKind::Http => Some("/".to_owned()),
        };
        Ok(Self {
            protocol,
            port,
            name,
            address,
            kind,
            method: method.unwrap_or("GET").to_owned(),
            path,
        })
    }

    fn flow(&self) -> Flow<'_> {
        Flow {
            protocol: self.protocol,
            port: self.port,
            name: self.name.as_ref(),
            address: self.address,
            kind: self.kind,
            claimed: match self.kind {
                FlowKind::Tls | FlowKind::Http => self.name.as_ref(),
                FlowKind::Opaque => None,
            },
        }
    }
}

/// The host and the port; `None` where there is something behind the colon that is no port.
fn split_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']')?;
            match behind {
                "" => (host, None),
                _ => (host, Some(behind.strip_prefix(':')?)),
            }
        }
        // An address without brackets has more than one colon.
        None if authority.matches(':').count() > 1 => (authority, None),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    match port {
        None => Some((host, None)),
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            let port: u16 = digits.parse().ok()?;
            (port > 0).then_some((host, Some(port)))
        }
        Some(_) => None,
    }
}

impl Policy {
    /// What would be decided, and how it came to that.
    pub fn explain(&self, question: &Question, now: Timestamp) -> Explanation {
        let mut steps = Vec::new();
        let flow = question.flow();
        let request = question.path.as_deref().map(|path| HttpRequest {
            flow,
            method: &question.method,
            path,
        });
        let inspected = question.kind == FlowKind::Tls
            && question
                .name
                .as_ref()
                .is_some_and(|name| self.inspects(name, question.port));
        let mut trace = Trace(Some(&mut steps));
        let resolvable = question.name.as_ref().map(|name| self.name(name));
        let decision = match resolvable {
            Some(refused) if !refused.is_allowed() => {
                trace.decided("name", &refused);
                refused
            }
            resolved => {
                if let Some(resolved) = resolved {
                    trace.note("name", None, || format!("may be resolved: {}", resolved.reason));
                }
                // A request in TLS that is not read is not looked at, so it must not be explained.
                let looked_at = request
                    .as_ref()
                    .filter(|_| inspected || question.kind == FlowKind::Http);
                self.decide(&flow, looked_at, &mut trace)
            }
        };
        let secrets: Vec<SecretRef> = match &request {
            Some(request) if decision.is_allowed() => self
                .grants(request, now)
                .map(|grant| grant.secret.clone())
                .collect(),
            _ => Vec::new(),
        };
        Explanation {
            decision,
            steps,
            inspected,
            secrets,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.steps.iter().enumerate() {
            let mark = match step.verdict {
                None => "  ",
                Some(EgressVerdict::Allowed) => "+ ",
                Some(EgressVerdict::Denied) => "- ",
            };
            writeln!(f, "{mark}{}. {}: {}", at + 1, step.check, step.finding)?;
        }
        let verdict = match self.decision.verdict {
            EgressVerdict::Allowed => "allowed",
            EgressVerdict::Denied => "denied",
        };
        writeln!(f, "{verdict} by {}", self.decision.rule)?;
        if self.decision.is_allowed() && self.inspected {
            writeln!(f, "Atoll reads the requests on this connection.")?;
        }
        for secret in &self.secrets {
            writeln!(f, "The secret `{}` goes into the request.", secret.name)?;
        }
        Ok(())
    }
}

/// Takes down what [`Policy::decide`] does, where somebody wants to know; costs nothing where nobody does.
pub(crate) struct Trace<'a>(Option<&'a mut Vec<Step>>);

impl Trace<'_> {
    pub(crate) fn off() -> Self {
        Trace(None)
    }

    pub(crate) fn note(
        &mut self,
        check: &str,
        verdict: Option<EgressVerdict>,
        finding: impl FnOnce() -> String,
    ) {
        if let Some(steps) = &mut self.0 {
            steps.push(Step {
                check: check.to_owned(),
                finding: finding(),
                verdict,
            });
        }
    }

    pub(crate) fn rule(&mut self, rule: &Rule, finding: &str) {
        if self.0.is_some() {
            self.note(&format!("{} ({rule})", rule.name), None, || finding.to_owned());
        }
    }

    pub(crate) fn misses(&mut self, rule: &Rule, why: impl FnOnce() -> String) {
        if self.0.is_some() {
            self.rule(rule, &format!("does not match: {}", why()));
        }
    }

    pub(crate) fn rule_decides(&mut self, rule: &Rule, verdict: EgressVerdict, reason: String) -> Decision {
        if self.0.is_some() {
            // A decision stands alone and begins with the rule's name, which is already said here.
            let finding = reason
                .strip_prefix(rule.name.as_str())
                .map_or(reason.as_str(), str::trim_start);
            self.note(&format!("{} ({rule})", rule.name), Some(verdict), || {
                finding.to_owned()
            });
        }
        Decision {
            verdict,
            rule: rule.name.clone(),
            reason,
        }
    }

    pub(crate) fn decided(&mut self, check: &str, decision: &Decision) {
        self.note(check, Some(decision.verdict), || decision.reason.clone());
    }

    pub(crate) fn deny(&mut self, check: &str, rule: &RuleName, reason: String) -> Decision {
        let decision = Decision::deny(rule, reason);
        self.decided(check, &decision);
        decision
    }
}

#[cfg(test)]
mod tests;

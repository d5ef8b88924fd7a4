//! The compiled policy and the one function that decides.
//!
//! The order is fixed: protocols that are always refused, the floor, agreement of the names, denies, allows, default.
//! `connect`, `request` and `explain` all run through [`Policy::decide`], so that none can be more generous than
//! another.

mod asked;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use atoll_types::{NetworkLimits, NetworkPolicy, Protocol, RuleAction, Timestamp};

use crate::error::PolicyError;
use crate::explain::Trace;
use crate::floor::carried;
use crate::grant::{Bound, check_env};
use crate::path::Path;
use crate::ports::Ports;
use crate::preset;
use crate::rule::{REFUSED_UDP, Rule};
use crate::target::Target;
use crate::{Decision, Floor, Flow, FlowKind, Grant, HttpRequest, Name, RuleName};
use asked::Asked;

const MAX_RULES: usize = 256;
const MAX_GRANTS: usize = 64;

/// What one sandbox may reach, ready to be asked.
#[derive(Debug)]
pub struct Policy {
    floor: Floor,
    limits: NetworkLimits,
    /// The user's in their order, then the preset's.
    rules: Vec<Rule>,
    exact: HashMap<Name, Vec<usize>>,
    /// By the name behind `*.`.
    below: HashMap<Name, Vec<usize>>,
    any: Vec<usize>,
    nets: Vec<usize>,
    grants: Vec<Grant>,
    bounds: Vec<Bound>,
}

impl Policy {
    pub fn compile(policy: &NetworkPolicy, floor: &Floor, grants: &[Grant]) -> Result<Self, PolicyError> {
        if policy.rules.len() > MAX_RULES {
            return Err(PolicyError::new(
                "rules",
                format!("there are {} rules", policy.rules.len()),
                format!("at most {MAX_RULES} are allowed; use wildcards or ranges"),
            ));
        }
        if grants.len() > MAX_GRANTS {
            return Err(PolicyError::new(
                "secrets",
                format!("there are {} secrets", grants.len()),
                format!("at most {MAX_GRANTS} are allowed in one sandbox"),
            ));
        }
        check_limits(&policy.limits)?;
        let mut compiled = Self {
            floor: floor.clone(),
            limits: policy.limits,
            rules: Vec::new(),
            exact: HashMap::new(),
            below: HashMap::new(),
            any: Vec::new(),
            nets: Vec::new(),
            grants: grants.to_vec(),
            bounds: Vec::new(),
        };
        let mut names = HashSet::new();
        for (at, written) in policy.rules.iter().enumerate() {
            if let Some(name) = &written.name
                && !names.insert(name)
            {
                return Err(PolicyError::new(
                    format!("rules[{at}]"),
                    format!("another rule is named `{name}` too"),
                    "give each its own name, so that decisions can say which one made them",
                ));
            }
            compiled.add(Rule::read(at, written)?);
        }
        for written in policy.preset.map(preset::rules).unwrap_or_default() {
            let name = written.name.clone().unwrap_or_default();
            compiled.add(Rule::build(name.as_str().into(), &written).map_err(|problem| problem.at(name))?);
        }
        for (at, grant) in grants.iter().enumerate() {
            let place = format!("secrets[{at}] \"{}\"", grant.secret.name);
            compiled.bounds.push(Bound::read(&grant.binding).map_err(|error| {
                PolicyError::new(format!("{place} {}", error.place), error.problem, error.remedy)
            })?);
            if let Some(env) = &grant.env {
                check_env(env).map_err(|problem| problem.at(place))?;
            }
        }
        Ok(compiled)
    }

    fn add(&mut self, rule: Rule) {
        let at = self.rules.len();
        match &rule.target {
            Target::Any => self.any.push(at),
            Target::Exact(name) => self.exact.entry(name.clone()).or_default().push(at),
            Target::Below(name) => self.below.entry(name.clone()).or_default().push(at),
            Target::Net(_) => self.nets.push(at),
        }
        self.rules.push(rule);
    }

    pub fn limits(&self) -> &NetworkLimits {
        &self.limits
    }

    pub fn all_grants(&self) -> &[Grant] {
        &self.grants
    }

    /// Whether a name may be resolved at all: whether some TCP connection to it could be allowed. Rules about addresses
    /// do not count, because a question about a name can itself carry data away.
    pub fn name(&self, name: &Name) -> Decision {
        if let Some(refused) = self.floor.name(name) {
            return refused;
        }
        let about = self.about_name(name);
        let rules = || about.iter().map(|at| &self.rules[*at]);
        let denies = || {
            rules().filter(|rule| {
                rule.action == RuleAction::Deny
                    && !rule.reads_requests()
                    && rule.protocol != Some(Protocol::Udp)
            })
        };
        // Once for all: a guest asks as often as it likes, and there may be many of both.
        let denied = Ports::union(denies().map(|deny| &deny.ports));
        for allow in rules().filter(|rule| rule.action == RuleAction::Allow) {
            if !allow.ports.minus(&denied).is_empty() {
                return Decision::allow(&allow.name, format!("{name} is within `{}`", allow.target));
            }
        }
        match denies().next() {
            Some(deny) => Decision::deny(&deny.name, format!("{} denies `{}`", deny.name, deny.target)),
            None => Decision::deny(
                &RuleName::DEFAULT.into(),
                format!("no rule allows the name {name}{}", self.hint(name)),
            ),
        }
    }

    /// The floor's refusal of an address, if it refuses it.
    pub fn address(&self, address: IpAddr) -> Option<Decision> {
        self.floor.address(address)
    }

    /// The floor's refusal of an address of the host itself: see [`Floor::own_address`].
    pub fn own_address(&self, address: IpAddr, is_own: impl Fn(IpAddr) -> bool) -> Option<Decision> {
        self.floor.own_address(address, is_own)
    }

    /// Whether a connection may be made. Where [`inspects`](Self::inspects) says so, each of its requests must be asked
    /// for as well.
    pub fn connect(&self, flow: &Flow<'_>) -> Decision {
        self.decide(flow, None, &mut Trace::off())
    }

    /// Whether connections to it have to be intercepted: some rule is about requests to it, or a secret is bound to it.
    pub fn inspects(&self, name: &Name, port: u16) -> bool {
        self.about_name(name)
            .into_iter()
            .map(|at| &self.rules[at])
            .any(|rule| rule.reads_requests() && rule.covers(Protocol::Tcp, port))
            || self.bounds.iter().any(|bound| bound.covers(name, port))
    }

    /// Whether answers from it are to be searched for echoes of a secret.
    pub fn redacts(&self, name: &Name) -> bool {
        self.grants
            .iter()
            .zip(&self.bounds)
            .any(|(grant, bound)| grant.binding.redact && bound.names(name))
    }

    /// Whether there is anything at all that it has to intercept: whether the sandbox must trust its authority.
    pub fn inspects_any(&self) -> bool {
        !self.grants.is_empty() || self.rules.iter().any(Rule::reads_requests)
    }

    /// Whether a request may be sent. Includes the question whether its connection may be made.
    pub fn request(&self, request: &HttpRequest<'_>) -> Decision {
        self.decide(&request.flow, Some(request), &mut Trace::off())
    }

    /// The secrets that go into a request, which must have been allowed.
    pub fn grants<'p>(
        &'p self,
        request: &HttpRequest<'_>,
        now: Timestamp,
    ) -> impl Iterator<Item = &'p Grant> + use<'p> {
        let path = Path::parse(request.path);
        let matching: Vec<&Grant> = self
            .grants
            .iter()
            .zip(&self.bounds)
            .filter(|(grant, bound)| {
                grant.expires.is_none_or(|expires| now < expires) && bound.matches(request, &path)
            })
            .map(|(grant, _)| grant)
            .collect();
        matching.into_iter()
    }

    pub(crate) fn decide(
        &self,
        flow: &Flow<'_>,
        request: Option<&HttpRequest<'_>>,
        trace: &mut Trace<'_>,
    ) -> Decision {
        if let Some(refused) = self.always_refused(flow, trace) {
            return refused;
        }
        let question = Asked {
            flow,
            request: request.map(|request| (request.method, Path::parse(request.path))),
        };
        let about = self.about(flow);
        let mut others = self.rules.len();
        for at in &about {
            others -= 1;
            let rule = &self.rules[*at];
            if rule.action == RuleAction::Deny
                && let Some(decision) = question.denied_by(rule, trace)
            {
                return decision;
            }
        }
        let mut near_miss = None;
        for at in &about {
            let rule = &self.rules[*at];
            if rule.action == RuleAction::Allow {
                match question.allowed_by(rule, trace) {
                    Ok(decision) => return decision,
                    // Only the first is told, and words for all of them would cost more than the decision.
                    Err(why) => {
                        near_miss.get_or_insert_with(|| why.words(rule));
                    }
                }
            }
        }
        trace.note("other rules", None, || match others {
            0 => "there are none".to_owned(),
            1 => "1 is about other destinations".to_owned(),
            some => format!("{some} are about other destinations"),
        });
        let why = match (near_miss, flow.name) {
            (Some(why), _) => format!(": {why}"),
            (None, Some(name)) => self.hint(name),
            (None, None) => String::new(),
        };
        let decision = Decision::deny(
            &RuleName::DEFAULT.into(),
            format!("no rule allows {}{why}", question.what()),
        );
        trace.decided("default", &decision);
        decision
    }

    /// What comes before every rule.
    fn always_refused(&self, flow: &Flow<'_>, trace: &mut Trace<'_>) -> Option<Decision> {
        if flow.protocol == Protocol::Udp
            && let Some((port, why)) = REFUSED_UDP.iter().find(|(port, _)| *port == flow.port)
        {
            let reason = format!("UDP port {port} is never relayed: {why}");
            return Some(trace.deny("protocol", &RuleName::PROTOCOL.into(), reason));
        }
        for name in flow.name.into_iter().chain(flow.claimed) {
            if let Some(refused) = self.floor.name(name) {
                trace.decided("floor", &refused);
                return Some(refused);
            }
        }
        match flow.address {
            Some(address) => {
                if let Some(refused) = self.floor.address(address) {
                    trace.decided("floor", &refused);
                    return Some(refused);
                }
                trace.note("floor", None, || {
                    format!("{address} is not refused on this server")
                });
            }
            None => trace.note("floor", None, || {
                "the address is checked when it is dialled, against the floor and against denied ranges"
                    .to_owned()
            }),
        }
        let name = flow.name?;
        if let Some(claimed) = flow.claimed
            && name != claimed
        {
            let word = match flow.kind {
                FlowKind::Tls => "the TLS handshake or the request in it",
                FlowKind::Http | FlowKind::Opaque => "the request",
            };
            let reason = format!("the connection leads to {name}, but {word} names {claimed}");
            return Some(trace.deny("names", &RuleName::NAME_MISMATCH.into(), reason));
        }
        self.unreadable(name, flow, trace)
    }

    /// Refuses what nobody could read where everything has to be: past a secret's binding no answer is searched for
    /// echoes, and a service of our own is for requests only.
    fn unreadable(&self, name: &Name, flow: &Flow<'_>, trace: &mut Trace<'_>) -> Option<Decision> {
        let protocol = RuleName::PROTOCOL.into();
        if self.floor.is_internal(name) && flow.kind != FlowKind::Http {
            let reason = format!("{name} is a service of Atoll's own, which is spoken to in plain HTTP only");
            return Some(trace.deny("protocol", &protocol, reason));
        }
        if flow.protocol != Protocol::Tcp || flow.is_legible() {
            return None;
        }
        let (grant, _) = self
            .grants
            .iter()
            .zip(&self.bounds)
            .find(|(_, bound)| bound.covers(name, flow.port))?;
        let reason = format!(
            "the secret `{}` is bound to {name}:{}, so only HTTP that can be read goes there",
            grant.secret.name, flow.port
        );
        Some(trace.deny("protocol", &protocol, reason))
    }

    /// All rules whose destination is the flow's, in their order.
    fn about(&self, flow: &Flow<'_>) -> Vec<usize> {
        let mut found = flow.name.map(|name| self.about_name(name)).unwrap_or_default();
        if flow.name.is_none()
            && let Some(claimed) = flow.claimed
        {
            // The guest says that it is going there. It can only lose by it.
            found.extend(
                self.about_name(claimed)
                    .into_iter()
                    .filter(|at| self.rules[*at].action == RuleAction::Deny),
            );
        }
        if let Some(address) = flow.address {
            let internal = flow.name.is_some_and(|name| self.floor.is_internal(name));
            found.extend(self.nets.iter().filter(|at| {
                self.net_matches(**at, address) && !(internal && self.rules[**at].action == RuleAction::Allow)
            }));
        }
        found.sort_unstable();
        found
    }

    fn net_matches(&self, at: usize, address: IpAddr) -> bool {
        let rule = &self.rules[at];
        let Target::Net(net) = &rule.target else {
            return false;
        };
        // What is denied is denied also when it is carried in another address; what is allowed is allowed as written.
        net.contains(&address)
            || (rule.action == RuleAction::Deny && carried(address).any(|inner| net.contains(&inner)))
    }

    /// All rules whose destination is this name, in their order.
    fn about_name(&self, name: &Name) -> Vec<usize> {
        let mut found = self.any.clone();
        found.extend(self.exact.get(name).into_iter().flatten());
        if !self.below.is_empty() {
            found.extend(
                name.parents()
                    .filter_map(|parent| self.below.get(parent))
                    .flatten(),
            );
        }
        if self.floor.is_internal(name) {
            found.retain(|at| {
                let rule = &self.rules[*at];
                rule.action == RuleAction::Deny || matches!(rule.target, Target::Exact(_))
            });
        }
        found.sort_unstable();
        found
    }

    /// What whoever is refused may not have thought of.
    fn hint(&self, name: &Name) -> String {
        if self.floor.is_internal(name) {
            return " (it is a service of Atoll's own: only a rule that names it allows it, no wildcard, range or preset)"
                .to_owned();
        }
        let bound = self
            .grants
            .iter()
            .zip(&self.bounds)
            .find(|(_, bound)| bound.names(name));
        match bound {
            Some((grant, _)) => format!(
                " (the secret `{}` is bound to it, but a secret does not open the way: add a rule)",
                grant.secret.name
            ),
            None => String::new(),
        }
    }
}

fn check_limits(limits: &NetworkLimits) -> Result<(), PolicyError> {
    let zero = [
        ("connections", limits.connections.map(u64::from)),
        ("bytes_per_second", limits.bytes_per_second),
        ("total_bytes", limits.total_bytes),
        ("total_connections", limits.total_connections),
    ]
    .into_iter()
    .find(|(_, limit)| *limit == Some(0));
    match zero {
        Some((field, _)) => Err(PolicyError::new(
            format!("limits.{field}"),
            "it is zero",
            "leave it out for no limit; to allow nothing, leave out preset and rules",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;

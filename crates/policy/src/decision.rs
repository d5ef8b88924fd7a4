//! The question and the answer.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use atoll_types::{EgressVerdict, Protocol};

use crate::Name;

/// A connection (or a datagram's way) that a sandbox asks for.
#[derive(Debug, Clone, Copy)]
pub struct Flow<'a> {
    pub protocol: Protocol,
    /// As the guest dialled it.
    pub port: u16,
    /// The name that Atoll resolves and dials: the one behind the synthetic address, or, where that is no longer known,
    /// the one that the guest claims. `None` where the guest dialled a real address.
    pub name: Option<&'a Name>,
    /// What is dialled in the end: one address that `name` resolved to, or the one that the guest dialled. `None` only
    /// while `name` is not resolved yet; then rules about addresses cannot match and the question must be asked again.
    pub address: Option<IpAddr>,
    pub kind: FlowKind,
    /// The name in the guest's own first bytes: SNI, `Host` or `:authority`. `None` where there is none or it is not a
    /// valid name.
    pub claimed: Option<&'a Name>,
}

impl Flow<'_> {
    /// Whether whoever asks can see each request on it, and will ask for it.
    pub(crate) fn is_legible(&self) -> bool {
        match self.kind {
            FlowKind::Http => true,
            FlowKind::Tls => self.name.is_some() && self.claimed.is_some(),
            FlowKind::Opaque => false,
        }
    }
}

/// What the guest's first bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlowKind {
    /// A ClientHello.
    Tls,
    /// An HTTP request in the clear.
    Http,
    /// Anything else, also nothing yet: server-first protocols, datagrams.
    Opaque,
}

/// One request on a connection that Atoll reads: intercepted TLS or plain HTTP.
#[derive(Debug, Clone, Copy)]
pub struct HttpRequest<'a> {
    /// The connection it came on. `claimed` is the host of this very request (`Host` or `:authority`), so that each
    /// request on a connection is checked against the name that is dialled. `kind` is `Tls` where it came out of an
    /// intercepted connection.
    pub flow: Flow<'a>,
    pub method: &'a str,
    /// As it stands on the request line or in `:path`: encoded, with or without its query, which is not looked at.
    pub path: &'a str,
}

/// Allowed or denied, by which rule and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    pub verdict: EgressVerdict,
    pub rule: RuleName,
    /// One sentence for a person. Holds names, addresses and ports, never a query or a secret.
    pub reason: String,
}

impl Decision {
    pub fn is_allowed(&self) -> bool {
        self.verdict == EgressVerdict::Allowed
    }

    pub(crate) fn allow(rule: &RuleName, reason: impl Into<String>) -> Self {
        Self {
            verdict: EgressVerdict::Allowed,
            rule: rule.clone(),
            reason: reason.into(),
        }
    }

    pub(crate) fn deny(rule: &RuleName, reason: impl Into<String>) -> Self {
        Self {
            verdict: EgressVerdict::Denied,
            rule: rule.clone(),
            reason: reason.into(),
        }
    }
}

/// What made a decision, as people know it: a rule's own name, `rules[2]`, `preset package-registries: pypi.org`,
/// `floor: link-local`, `name_mismatch` or `default`. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RuleName(Arc<str>);

impl RuleName {
    /// No rule matched.
    pub const DEFAULT: &'static str = "default";
    /// The name that is dialled and the one that the guest claims differ.
    pub const NAME_MISMATCH: &'static str = "name_mismatch";
    /// A protocol that is refused whatever the rules say: QUIC, multicast DNS and the like.
    pub const PROTOCOL: &'static str = "protocol";

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RuleName {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for RuleName {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for RuleName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

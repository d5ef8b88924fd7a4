//! What a sandbox may reach, and with which secrets, as people write it.
//!
//! These are words only: whether they make sense and what they mean for one connection is decided by the crate
//! `policy`. What must hold: the default of every type here allows nothing, and an unknown field is refused, because a
//! misspelt restriction that is silently ignored is a hole.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SecretId;

/// What one sandbox may reach. Nothing, unless a rule or the preset allows it; allows add up, and a deny that matches
/// wins over every allow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkPolicy {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<NetworkRule>,
    #[serde(skip_serializing_if = "NetworkLimits::is_unlimited")]
    pub limits: NetworkLimits,
}

/// Rules that many people need, kept by Atoll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Nothing. Rules may add to it.
    None,
    /// The public indexes and file hosts of the usual package managers.
    PackageRegistries,
    /// Every name and every public address, over TCP.
    AllPublic,
}

impl Preset {
    pub const ALL: [Self; 3] = [Self::None, Self::PackageRegistries, Self::AllPublic];

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::PackageRegistries => "package-registries",
            Self::AllPublic => "all-public",
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|preset| preset.name() == text)
            .ok_or_else(|| format!("unknown preset `{text}`; one of none, package-registries, all-public"))
    }
}

/// One rule. Which fields are left out matters: see each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    /// How decisions refer to it; `rules[2]` where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub action: RuleAction,
    /// `pypi.org`, `*.pypi.org` (everything below it, not itself), `*` (any name), `10.0.0.0/8`, `2001:db8::/32` or one
    /// address.
    pub to: String,
    /// None means, for an allow: 80 and 443 where `to` is a name, all where it is a range of addresses. For a deny: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortRange>,
    /// None means, for an allow: TCP. For a deny: both. UDP is allowed by address only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Only requests with one of these methods. Needs a name in `to`, and makes Atoll read the requests to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Only requests to one of these paths: `*` stands for a part of a segment, `**` for any number of segments. Needs a
    /// name in `to`, and makes Atoll read the requests to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
}

impl NetworkRule {
    /// A rule without further restrictions.
    pub fn new(action: RuleAction, to: impl Into<String>) -> Self {
        Self {
            name: None,
            action,
            to: to.into(),
            ports: Vec::new(),
            protocol: None,
            methods: Vec::new(),
            paths: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleAction {
    Allow,
    Deny,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        })
    }
}

/// One port or a range of them, both ends included; never empty and never port 0. Written as `443`, `"443"` or
/// `"8000-8100"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    pub const ALL: Self = Self {
        first: 1,
        last: u16::MAX,
    };

    /// `None` where it would be empty or begin at port 0.
    pub const fn new(first: u16, last: u16) -> Option<Self> {
        if first == 0 || last < first {
            None
        } else {
            Some(Self { first, last })
        }
    }

    /// `None` for port 0.
    pub const fn single(port: u16) -> Option<Self> {
        Self::new(port, port)
    }

    pub const fn first(self) -> u16 {
        self.first
    }

    pub const fn last(self) -> u16 {
        self.last
    }

    pub const fn contains(self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}-{}", self.first, self.last)
        }
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // `u16::from_str` would take a sign.
        let port = |part: &str| {
            part.bytes()
                .all(|byte| byte.is_ascii_digit())
                .then(|| part.parse::<u16>().ok())
                .flatten()
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        port(first)
            .zip(port(last))
            .and_then(|(first, last)| Self::new(first, last))
            .ok_or_else(|| {
                format!("`{text}` is not a port or a range of ports; write for example 443 or 8000-8100, from 1 to 65535")
            })
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.first == self.last {
            serializer.serialize_u16(self.first)
        } else {
            serializer.collect_str(self)
        }
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl Visitor<'_> for Reader {
            type Value = PortRange;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port such as 443 or a range of ports such as \"8000-8100\"")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<PortRange, E> {
                number.to_string().parse().map_err(E::custom)
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<PortRange, E> {
                number.to_string().parse().map_err(E::custom)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<PortRange, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(Reader)
    }
}

/// How much, where the rules say to whom. `None` means no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetworkLimits {
    /// Connections at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// Both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// A budget for the whole life of the sandbox, both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// A budget for the whole life of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_connections: Option<u64>,
}

impl NetworkLimits {
    pub fn is_unlimited(&self) -> bool {
        *self == Self::default()
    }
}

/// A secret that a sandbox may use. Its value never enters the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretUse {
    /// The secret's name.
    pub secret: String,
    /// The variable that holds a placeholder of the secret in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
}

/// Which secret is meant, without its value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SecretRef {
    pub id: SecretId,
    pub name: String,
}

/// Where a secret goes, and how. It goes nowhere else, whatever a sandbox's rules allow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretBinding {
    /// `api.example.com` or `*.example.com`; at least one.
    pub hosts: Vec<String>,
    /// None means 443.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortRange>,
    /// None means all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// None means all; written as in [`NetworkRule::paths`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Whether it may also go out over plain HTTP, where everybody on the way can read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// Whether echoes of the value are also blotted out in the bodies of answers; in their headers they always are. Such
    /// answers are asked for uncompressed and whole.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub redact: bool,
    pub inject: Injection,
}

/// The shape in which a secret is put into a request: `"bearer"`, `{"header": {"name": "x-api-key"}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Injection {
    /// As this header; one that the guest sent is overwritten.
    Header { name: String },
    /// `authorization: Bearer <value>`, overwriting.
    Bearer,
    /// `authorization: Basic <username:value>`, overwriting.
    Basic { username: String },
    /// As this parameter of the query, overwriting.
    Query { name: String },
    /// Wherever the guest put the placeholder: in a header, in basic authentication, in the query.
    Placeholder,
}

/// What became of an attempt to reach something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EgressVerdict {
    Allowed,
    Denied,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_reads_and_writes_as_people_write_it() {
        let text = r#"{"preset":"package-registries","rules":[{"name":"api","action":"allow","to":"api.example.com","ports":[443,"8000-8100"],"methods":["GET"],"paths":["/v1/**"]},{"action":"deny","to":"10.0.0.0/8","protocol":"udp"}],"limits":{"connections":8}}"#;
        let policy: NetworkPolicy = serde_json::from_str(text).unwrap();
        assert_eq!(
            policy.rules[0].ports,
            [
                PortRange::single(443).unwrap(),
                PortRange::new(8000, 8100).unwrap()
            ]
        );
        assert_eq!(serde_json::to_string(&policy).unwrap(), text);
        assert_eq!(
            serde_json::from_str::<NetworkPolicy>("{}").unwrap(),
            NetworkPolicy::default()
        );
    }

    #[test]
    fn unknown_fields_are_refused_everywhere() {
        for text in [
            r#"{"rule":[]}"#,
            r#"{"rules":[{"action":"allow","to":"a.example","port":443}]}"#,
            r#"{"limits":{"bytes":1}}"#,
            r#"{"preset":"everything"}"#,
        ] {
            assert!(serde_json::from_str::<NetworkPolicy>(text).is_err(), "{text}");
        }
        for text in [
            r#"{"hosts":["a.example"],"inject":{"bearer":{"name":"x"}}}"#,
            r#"{"hosts":["a.example"],"inject":{"header":{"name":"x","prefix":"y"}}}"#,
            r#"{"hosts":["a.example"],"inject":"bearer","method":["GET"]}"#,
        ] {
            assert!(serde_json::from_str::<SecretBinding>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_binding_reads_and_writes_as_people_write_it() {
        for inject in [
            r#""bearer""#,
            r#""placeholder""#,
            r#"{"header":{"name":"x-api-key"}}"#,
            r#"{"basic":{"username":"me"}}"#,
            r#"{"query":{"name":"key"}}"#,
        ] {
            let text = format!(r#"{{"hosts":["a.example"],"inject":{inject}}}"#);
            let binding: SecretBinding = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&binding).unwrap(), text);
            assert!(!binding.plain_http);
        }
    }

    #[test]
    fn ports_are_strict() {
        for good in ["1", "443", "65535", "8000-8100", "1-65535", "443-443"] {
            assert!(good.parse::<PortRange>().is_ok(), "{good}");
        }
        for bad in [
            "", "0", "-1", "+443", "65536", "443-", "-443", "9-8", "0-9", "1-2-3", " 443", "https", "4.3",
        ] {
            assert!(bad.parse::<PortRange>().is_err(), "{bad}");
        }
        for bad in ["0", "-1", "70000", "4.5", "null", "[443]", "true"] {
            assert!(serde_json::from_str::<PortRange>(bad).is_err(), "{bad}");
        }
    }
}

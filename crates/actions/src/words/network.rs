//! Words about what a sandbox may reach, which requests and answers share.

use atoll_types::{
    NetworkLimits, NetworkPolicy, NetworkRule, PortRange, Preset, Protocol, RuleAction, SecretUse,
};
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{AnyOfBuilder, Object, Schema, SchemaType, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

/// Rules that many people need, kept by Atoll. `none` allows nothing; `package-registries` the public indexes and file
/// hosts of the usual package managers; `all-public` every name and every public address, over TCP.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = NetworkPreset)]
pub(crate) enum PresetName {
    None,
    PackageRegistries,
    AllPublic,
}

impl PresetName {
    fn of(preset: Preset) -> Self {
        match preset {
            Preset::None => Self::None,
            Preset::PackageRegistries => Self::PackageRegistries,
            Preset::AllPublic => Self::AllPublic,
        }
    }

    fn into_preset(self) -> Preset {
        match self {
            Self::None => Preset::None,
            Self::PackageRegistries => Preset::PackageRegistries,
            Self::AllPublic => Preset::AllPublic,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RuleAction)]
pub(crate) enum ActionName {
    Allow,
    Deny,
}

impl ActionName {
    fn of(action: RuleAction) -> Self {
        match action {
            RuleAction::Allow => Self::Allow,
            RuleAction::Deny => Self::Deny,
        }
    }

    fn into_action(self) -> RuleAction {
        match self {
            Self::Allow => RuleAction::Allow,
            Self::Deny => RuleAction::Deny,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = NetworkProtocol)]
pub(crate) enum ProtocolName {
    Tcp,
    Udp,
}

impl ProtocolName {
    fn of(protocol: Protocol) -> Self {
        match protocol {
            Protocol::Tcp => Self::Tcp,
            Protocol::Udp => Self::Udp,
        }
    }

    fn into_protocol(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::Tcp,
            Self::Udp => Protocol::Udp,
        }
    }
}

/// One port or a range of them: `443` or `"8000-8100"`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ports(pub PortRange);

impl PartialSchema for Ports {
    fn schema() -> RefOr<Schema> {
        let port = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .minimum(Some(1))
            .maximum(Some(65535));
        let range = Object::builder()
            .schema_type(SchemaType::Type(Type::String))
            .pattern(Some("^[0-9]{1,5}(-[0-9]{1,5})?$"))
            .examples(["8000-8100"]);
        let either = AnyOfBuilder::new()
            .item(port)
            .item(range)
            .description(Some("One port, or a range of them with both ends included."));
        either.into()
    }
}

impl ToSchema for Ports {
    fn name() -> std::borrow::Cow<'static, str> {
        "Ports".into()
    }
}

impl Ports {
    pub fn of(ports: Vec<PortRange>) -> Vec<Self> {
        ports.into_iter().map(Self).collect()
    }

    pub fn into_ranges(ports: Vec<Self>) -> Vec<PortRange> {
        ports.into_iter().map(|ports| ports.0).collect()
    }
}

/// What a sandbox may reach: nothing but what the preset or a rule allows. A `deny` that matches wins over every `allow`,
/// and what the operator refuses comes before both.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(as = NetworkPolicy)]
pub struct PolicyWords {
    #[serde(skip_serializing_if = "Option::is_none")]
    preset: Option<PresetName>,
    #[schema(max_items = 256)]
    rules: Vec<RuleWords>,
    limits: LimitsWords,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NetworkRule)]
pub(crate) struct RuleWords {
    /// How decisions refer to it; absent: by its place, such as `rules[2]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    action: ActionName,
    /// A name, `*.` and a name for everything below it, `*` for any name, an address or a range of addresses.
    #[schema(min_length = 1, examples("pypi.org", "*.example.com", "10.1.0.0/16"))]
    to: String,
    /// Empty, for an `allow`: 80 and 443 of a name, all of addresses. Empty, for a `deny`: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ports: Vec<Ports>,
    /// Absent, for an `allow`: TCP. Absent, for a `deny`: both. UDP can be allowed to addresses only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    protocol: Option<ProtocolName>,
    /// Only requests with one of these methods. Atoll reads the requests to a name with such a rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(examples(json!(["GET", "HEAD"])))]
    methods: Vec<String>,
    /// Only requests to one of these paths: `*` is a part of a segment, `**` any number of segments. Atoll reads the
    /// requests to a name with such a rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(examples(json!(["/v1/**"])))]
    paths: Vec<String>,
}

/// How much may go through; what is absent has no limit of its own.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(as = NetworkLimits)]
pub(crate) struct LimitsWords {
    /// Connections at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    connections: Option<u32>,
    /// Both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<u64>,
    /// A budget for the whole life of the sandbox, both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_bytes: Option<u64>,
    /// A budget for the whole life of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_connections: Option<u64>,
}

impl PolicyWords {
    pub fn of(policy: NetworkPolicy) -> Self {
        let NetworkPolicy {
            preset,
            rules,
            limits,
        } = policy;
        Self {
            preset: preset.map(PresetName::of),
            rules: rules.into_iter().map(RuleWords::of).collect(),
            limits: LimitsWords {
                connections: limits.connections,
                bytes_per_second: limits.bytes_per_second,
                total_bytes: limits.total_bytes,
                total_connections: limits.total_connections,
            },
        }
    }

    pub fn into_policy(self) -> NetworkPolicy {
        NetworkPolicy {
            preset: self.preset.map(PresetName::into_preset),
            rules: self.rules.into_iter().map(RuleWords::into_rule).collect(),
            limits: NetworkLimits {
                connections: self.limits.connections,
                bytes_per_second: self.limits.bytes_per_second,
                total_bytes: self.limits.total_bytes,
                total_connections: self.limits.total_connections,
            },
        }
    }
}

impl RuleWords {
    fn of(rule: NetworkRule) -> Self {
        Self {
            name: rule.name,
            action: ActionName::of(rule.action),
            to: rule.to,
            ports: Ports::of(rule.ports),
            protocol: rule.protocol.map(ProtocolName::of),
            methods: rule.methods,
            paths: rule.paths,
        }
    }

    fn into_rule(self) -> NetworkRule {
        NetworkRule {
            name: self.name,
            action: self.action.into_action(),
            to: self.to,
            ports: Ports::into_ranges(self.ports),
            protocol: self.protocol.map(ProtocolName::into_protocol),
            methods: self.methods,
            paths: self.paths,
        }
    }
}

/// A secret that a sandbox may use without ever holding it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SecretUse)]
pub struct SecretUseWords {
    /// Its name.
    #[schema(min_length = 1, max_length = 64)]
    secret: String,
    /// A variable of the sandbox's environment that holds a placeholder, which is replaced on the way out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(examples("GITHUB_TOKEN"))]
    env: Option<String>,
}

impl SecretUseWords {
    pub fn of(uses: Vec<SecretUse>) -> Vec<Self> {
        uses.into_iter()
            .map(|used| Self {
                secret: used.secret,
                env: used.env,
            })
            .collect()
    }

    pub fn into_uses(words: Vec<Self>) -> Vec<SecretUse> {
        words
            .into_iter()
            .map(|words| SecretUse {
                secret: words.secret,
                env: words.env,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use atoll_front::extract::parse_json;

    #[test]
    fn a_policy_arrives_and_is_shown_as_people_write_it() {
        let text = r#"{"preset":"package-registries","rules":[{"name":"api","action":"allow","to":"api.example.com","ports":[443,"8000-8100"],"methods":["GET"],"paths":["/v1/**"]},{"action":"deny","to":"10.0.0.0/8","protocol":"udp"}],"limits":{"connections":8,"total_bytes":9}}"#;
        let policy = parse_json::<PolicyWords>(text.as_bytes()).unwrap().into_policy();
        // The wire and the word in the middle are spelled alike, though neither knows the other.
        assert_eq!(policy, serde_json::from_str::<NetworkPolicy>(text).unwrap());
        assert_eq!(serde_json::to_string(&PolicyWords::of(policy)).unwrap(), text);
        let empty = parse_json::<PolicyWords>(b"{}").unwrap().into_policy();
        assert_eq!(empty, NetworkPolicy::default());
    }

    #[test]
    fn what_is_unknown_or_wrong_is_refused_by_name() {
        for (text, named) in [
            (r#"{"rule":[]}"#, "rule"),
            (r#"{"preset":"everything"}"#, "everything"),
            (
                r#"{"rules":[{"action":"allow","to":"a.example","port":443}]}"#,
                "port",
            ),
            (
                r#"{"rules":[{"action":"allow","to":"a.example","ports":["9-8"]}]}"#,
                "9-8",
            ),
            (r#"{"rules":[{"action":"permit","to":"a.example"}]}"#, "permit"),
            (r#"{"limits":{"bytes":1}}"#, "bytes"),
        ] {
            let fault = parse_json::<PolicyWords>(text.as_bytes()).unwrap_err();
            assert!(fault.message.contains(named), "{fault}");
        }
    }
}

//! Network options: from E2B's words to a policy of ours and to secrets.
//!
//! ```text
//!   allow_internet_access, allowOut, denyOut  ──> NetworkPolicy
//!   rules: {host: [{transform: {headers}}]}   ──> secrets that only these sandboxes have, put in on the way out
//! ```
//! What must hold: the two sides order things differently. There, what `allowOut` names is allowed although `denyOut` names
//! it too; here a deny wins over every allow. So a denied range is written without the parts that are allowed.

use atoll_identity::Caller;
use atoll_sandboxes::PrivateSecret;
use atoll_types::{
    Injection, NetworkPolicy, NetworkRule, PortRange, Preset, RuleAction, SecretBinding, SecretUse,
};
use axum::extract::State;
use ipnet::IpNet;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use zeroize::Zeroizing;

use super::read::{Id, Read};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};
use crate::extras::Extras;

/// E2B's bounds.
const MOST_HOSTS: usize = 10;
const MOST_HEADERS: usize = 20;
const LONGEST_HEADER_NAME: usize = 64;
const LONGEST_HEADER_VALUE: usize = 2048;
/// What its placeholders for identities begin with.
const IDENTITY: &str = "${e2b.";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub(crate) struct NetworkConfig {
    allow_public_traffic: Option<bool>,
    mask_request_host: Option<String>,
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    dns_servers: Option<Vec<String>>,
    egress_proxy: Option<Value>,
    https_ports: Option<Vec<u16>>,
    rules: Option<Rules>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NetworkUpdate {
    #[serde(rename = "allowOut")]
    allow_out: Option<Vec<String>>,
    #[serde(rename = "denyOut")]
    deny_out: Option<Vec<String>>,
    #[serde(rename = "dnsServers")]
    dns_servers: Option<Vec<String>>,
    #[serde(rename = "egressProxy")]
    egress_proxy: Option<Value>,
    rules: Option<Rules>,
    allow_internet_access: Option<bool>,
}

/// By host; in the order that they were written in.
#[derive(Debug, Default)]
struct Rules(Vec<(String, Vec<HostRule>)>);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostRule {
    transform: Option<Transform>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Transform {
    #[serde(default)]
    headers: Headers,
}

/// Names and values of headers. The values are secrets.
#[derive(Default)]
struct Headers(Vec<(String, Zeroizing<String>)>);

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|(name, _)| name))
            .finish()
    }
}

impl<'de> Deserialize<'de> for Rules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        std::collections::BTreeMap::deserialize(deserializer).map(|map| Self(map.into_iter().collect()))
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        std::collections::BTreeMap::<String, String>::deserialize(deserializer).map(|map| {
            let hidden = |(name, value)| (name, Zeroizing::new(value));
            Self(map.into_iter().map(hidden).collect())
        })
    }
}

/// What a request asks of the way out, checked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// `None`: what the template or the operator says.
    pub(crate) policy: Option<NetworkPolicy>,
    headers: Vec<Header>,
}

/// One header for one host.
#[derive(PartialEq, Eq)]
struct Header {
    value: Zeroizing<String>,
    binding: SecretBinding,
}

impl std::fmt::Debug for Header {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Header").field(&self.binding).finish()
    }
}

/// The secrets of a request. They are kept for as long as this is, and afterwards for as long as a sandbox uses them.
#[derive(Debug, Default)]
pub(crate) struct Lent(Vec<PrivateSecret>);

impl Lent {
    pub(crate) fn uses(&self) -> Vec<SecretUse> {
        self.0.iter().map(PrivateSecret::used).collect()
    }
}

impl Asked {
    pub(crate) async fn lend(&mut self, app: &App, caller: &Caller) -> Answer<Lent> {
        let mut lent = Vec::with_capacity(self.headers.len());
        for mut header in self.headers.drain(..) {
            let value = Zeroizing::new(std::mem::take(&mut *header.value).into_bytes());
            lent.push(
                app.sandboxes
                    .lend_privately(caller, value, header.binding)
                    .await?,
            );
        }
        Ok(Lent(lent))
    }
}

/// What decides whether a sandbox that says nothing reaches the internet: the operator, and whether anything can.
pub(crate) fn reaches_internet(app: &App) -> bool {
    app.options.internet && app.sandboxes.has_way_out()
}

/// Everything public, or nothing.
pub(crate) fn open(open: bool) -> NetworkPolicy {
    match open {
        true => open_but(&[], &[]),
        false => NetworkPolicy::default(),
    }
}

/// What a sandbox may reach that was asked for with these options.
pub(crate) fn ask(
    network: Option<NetworkConfig>,
    internet: Option<bool>,
    usual: bool,
    extras: &mut Extras,
) -> Answer<Asked> {
    let network = network.unwrap_or_default();
    refuse_given(
        "network.dnsServers",
        network.dns_servers.is_some_and(|list| !list.is_empty()),
        NO_DNS,
    )?;
    refuse_given("network.egressProxy", network.egress_proxy.is_some(), NO_PROXY)?;
    extras.private_ports = network.allow_public_traffic == Some(false);
    extras.mask_host = network.mask_request_host.map(masked).transpose()?;
    Ways {
        place: "network.",
        internet,
        usual,
        allow: network.allow_out.unwrap_or_default(),
        deny: network.deny_out.unwrap_or_default(),
        https_ports: network.https_ports.unwrap_or_default(),
        rules: network.rules.unwrap_or_default(),
    }
    .read()
}

/// What stands for the port in a masked host.
pub(crate) const PORT_MARK: &str = "${PORT}";

/// A host that servers may be shown instead of theirs: a name or an address, perhaps with a port.
fn masked(host: String) -> Answer<String> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port)),
        _ => (host.as_str(), None),
    };
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let bracketed = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_address = bracketed.is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok());
    let is_name = name.len() <= 253 && name.replace(PORT_MARK, "0").split('.').all(label);
    let is_port = port.is_none_or(|port| port == PORT_MARK || atoll_front::host::parse_port(port).is_some());
    match (is_address || is_name) && is_port {
        true => Ok(host),
        false => Err(Refusal::invalid(format!(
            "mask request host is not valid: {}",
            host.chars().take(100).collect::<String>().escape_default()
        ))),
    }
}

const NO_DNS: &str = "names are looked up by the server, which dials what it found";
const NO_PROXY: &str = "what leaves a sandbox leaves through the server's own proxy";

fn refuse_given(field: &str, given: bool, why: &str) -> Answer<()> {
    match given {
        true => Err(Refusal::unsupported(field, why)),
        false => Ok(()),
    }
}

/// Replaces what was asked for before; what is not mentioned is as if it never had been.
pub(crate) async fn update(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<NetworkUpdate>,
) -> Answer<axum::http::StatusCode> {
    super::life::known(&app, &caller, &id).await?;
    refuse_given(
        "dnsServers",
        request.dns_servers.is_some_and(|list| !list.is_empty()),
        NO_DNS,
    )?;
    refuse_given("egressProxy", request.egress_proxy.is_some(), NO_PROXY)?;
    let mut asked = Ways {
        place: "",
        internet: request.allow_internet_access,
        usual: reaches_internet(&app),
        allow: request.allow_out.unwrap_or_default(),
        deny: request.deny_out.unwrap_or_default(),
        https_ports: Vec::new(),
        rules: request.rules.unwrap_or_default(),
    }
    .read()?;
    let lent = asked.lend(&app, &caller).await?;
    app.sandboxes
        .set_network(&caller, &id, asked.policy.unwrap_or_default(), Some(lent.uses()))
        .await?;
    Ok(axum::http::StatusCode::NO_CONTENT)
}

/// The options that have to do with what leaves a sandbox.
struct Ways {
    /// Where the fields stand, for messages.
    place: &'static str,
    internet: Option<bool>,
    usual: bool,
    allow: Vec<String>,
    deny: Vec<String>,
    https_ports: Vec<u16>,
    rules: Rules,
}

impl Ways {
    fn read(self) -> Answer<Asked> {
        let mut allowed = Vec::new();
        let mut names = Vec::new();
        for text in &self.allow {
            match range(text) {
                Some(range) => allowed.push(range),
                None => names.push(text.clone()),
            }
        }
        let mut denied = Vec::new();
        for text in &self.deny {
            denied.push(range(text).ok_or_else(|| {
                Refusal::invalid(format!(
                    "`{}denyOut` takes addresses and ranges of them only, not `{}`",
                    self.place,
                    text.escape_default()
                ))
            })?);
        }
        let everything = |range: &IpNet| range.prefix_len() == 0;
        let closed = self.internet == Some(false) || denied.iter().any(everything);
        if !names.is_empty() && !closed {
            return Err(Refusal::invalid(format!(
                "`{}allowOut` has a domain, so `denyOut` must include 'ALL_TRAFFIC' (0.0.0.0/0): everything else would be \
                 allowed anyway",
                self.place
            )));
        }
        // Clients send `allow_internet_access: true` when nobody asked for anything, so that means no more than nothing.
        let policy = if allowed.iter().any(everything) || (self.usual && !closed) {
            Some(open_but(&denied, &allowed))
        } else if closed || !allowed.is_empty() {
            Some(self.closed_but(&names, &allowed)?)
        } else {
            None
        };
        Ok(Asked {
            policy,
            headers: self.headers()?,
        })
    }

    /// Ports at which a name counts.
    fn ports(&self, first: &[u16]) -> Answer<Vec<PortRange>> {
        first
            .iter()
            .chain(&self.https_ports)
            .map(|port| {
                PortRange::single(*port)
                    .ok_or_else(|| Refusal::invalid(format!("`{}httpsPorts` has port 0", self.place)))
            })
            .collect()
    }

    fn closed_but(&self, names: &[String], allowed: &[IpNet]) -> Answer<NetworkPolicy> {
        let ports = match self.https_ports.is_empty() {
            // The usual ones.
            true => Vec::new(),
            false => self.ports(&[80, 443])?,
        };
        let by_name = names.iter().map(|name| NetworkRule {
            ports: ports.clone(),
            ..NetworkRule::new(RuleAction::Allow, name)
        });
        let by_range = allowed
            .iter()
            .map(|range| NetworkRule::new(RuleAction::Allow, range.to_string()));
        Ok(NetworkPolicy {
            rules: by_name.chain(by_range).collect(),
            ..NetworkPolicy::default()
        })
    }

    fn headers(&self) -> Answer<Vec<Header>> {
        let place = format!("{}rules", self.place);
        if self.rules.0.len() > MOST_HOSTS {
            return Err(Refusal::invalid(format!(
                "`{place}` has more than {MOST_HOSTS} hosts"
            )));
        }
        let ports = self.ports(&[443])?;
        let mut headers = Vec::new();
        for (host, rules) in &self.rules.0 {
            let place = format!("{place}.{}", host.escape_default());
            if rules.len() > 1 {
                return Err(Refusal::invalid(format!("`{place}` has more than one transform")));
            }
            let transforms = rules.iter().filter_map(|rule| rule.transform.as_ref());
            for (name, value) in transforms.flat_map(|transform| &transform.headers.0) {
                check_header(&place, name, value)?;
                headers.push(Header {
                    value: value.clone(),
                    binding: SecretBinding {
                        hosts: vec![host.clone()],
                        ports: ports.clone(),
                        methods: Vec::new(),
                        paths: Vec::new(),
                        plain_http: false,
                        redact: false,
                        inject: Injection::Header { name: name.clone() },
                    },
                });
            }
            if headers.len() > MOST_HOSTS * MOST_HEADERS {
                return Err(Refusal::invalid(format!("`{place}` has too many headers")));
            }
        }
        Ok(headers)
    }
}

fn check_header(place: &str, name: &str, value: &str) -> Answer<()> {
    let wrong = |why: &str| {
        Err(Refusal::invalid(format!(
            "`{place}` has a header `{}` {why}",
            name.chars()
                .take(LONGEST_HEADER_NAME)
                .collect::<String>()
                .escape_default()
        )))
    };
    if name.len() > LONGEST_HEADER_NAME || axum::http::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return wrong("that is no name of one");
    }
    if value.contains(IDENTITY) {
        return wrong("with an identity, which this server does not issue");
    }
    if value.is_empty()
        || value.len() > LONGEST_HEADER_VALUE
        || axum::http::HeaderValue::from_str(value).is_err()
    {
        return wrong("whose value cannot be sent");
    }
    Ok(())
}

/// Everything public but what is denied and not allowed.
fn open_but(denied: &[IpNet], allowed: &[IpNet]) -> NetworkPolicy {
    let mut closed: Vec<IpNet> = denied.iter().flat_map(|range| without(*range, allowed)).collect();
    closed.sort_unstable();
    closed.dedup();
    // What is open anyway is said all the same, so that whoever asks finds it again.
    let said = allowed.iter().filter(|range| range.prefix_len() > 0);
    let rule = |action, range: &IpNet| NetworkRule::new(action, range.to_string());
    NetworkPolicy {
        preset: Some(Preset::AllPublic),
        rules: closed
            .iter()
            .map(|range| rule(RuleAction::Deny, range))
            .chain(said.map(|range| rule(RuleAction::Allow, range)))
            .collect(),
        ..NetworkPolicy::default()
    }
}

/// What is left of a range when others are taken out of it: as many pieces as there are bits between them, at most.
fn without(range: IpNet, holes: &[IpNet]) -> Vec<IpNet> {
    if holes.iter().any(|hole| hole.contains(&range)) {
        return Vec::new();
    }
    let inside: Vec<IpNet> = holes
        .iter()
        .copied()
        .filter(|hole| range.contains(hole))
        .collect();
    if inside.is_empty() {
        return vec![range];
    }
    match range.subnets(range.prefix_len() + 1) {
        Ok(halves) => halves.flat_map(|half| without(half, &inside)).collect(),
        // A single address, which has no halves, and which no other one is inside of.
        Err(_) => vec![range],
    }
}

/// An address or a range of them, however its host bits are set.
fn range(text: &str) -> Option<IpNet> {
    let range = text
        .parse::<IpNet>()
        .ok()
        .or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from))?;
    Some(range.trunc())
}

/// The options as a client is shown them, from what is in force.
pub(crate) fn shown(policy: Option<&NetworkPolicy>) -> (bool, Vec<String>, Vec<String>) {
    let policy = policy.cloned().unwrap_or_default();
    let open = policy.preset == Some(Preset::AllPublic);
    let of = |action| {
        let rules = policy.rules.iter().filter(move |rule| rule.action == action);
        rules.map(|rule| plain(&rule.to)).collect::<Vec<_>>()
    };
    let denied = match open {
        true => of(RuleAction::Deny),
        false => vec!["0.0.0.0/0".to_owned()],
    };
    (open, of(RuleAction::Allow), denied)
}

/// A single address without the length that it has in rules.
fn plain(to: &str) -> String {
    match to.parse::<IpNet>() {
        Ok(range) if range.prefix_len() == range.max_prefix_len() => range.addr().to_string(),
        _ => to.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masked_host_is_one() {
        for fine in [
            "localhost",
            "localhost:${PORT}",
            "localhost:8080",
            "a.example.org",
            "my_host",
            "127.0.0.1:${PORT}",
            "[::1]:80",
            "${PORT}.example.org",
        ] {
            assert_eq!(masked(fine.to_owned()).as_deref(), Ok(fine));
        }
        for wrong in [
            "",
            "-https://abcd",
            "a b",
            "a/b",
            "a:b",
            "a:99999",
            "a..b",
            "x\r\ny",
            "\u{e9}.org",
            "::1",
        ] {
            assert!(masked(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_was_asked_for_is_found_again() {
        let asked = read(
            r#"{"allowOut":["8.8.8.8"],"denyOut":["10.0.0.0/8"]}"#,
            Some(true),
            true,
        )
        .unwrap();
        let (open, allowed, denied) = shown(asked.policy.as_ref());
        assert!(open);
        assert_eq!(
            (allowed, denied),
            (vec!["8.8.8.8".to_owned()], vec!["10.0.0.0/8".to_owned()])
        );
    }

    fn read(json: &str, internet: Option<bool>, usual: bool) -> Answer<Asked> {
        let network: NetworkConfig =
            serde_json::from_str(json).map_err(|error| Refusal::invalid(error.to_string()))?;
        ask(Some(network), internet, usual, &mut Extras::default())
    }

    fn words(asked: &Asked) -> Vec<String> {
        let Some(policy) = &asked.policy else {
            return vec!["unsaid".to_owned()];
        };
        let preset = policy.preset.map(|preset| preset.to_string());
        let rules = policy
            .rules
            .iter()
            .map(|rule| format!("{:?} {}", rule.action, rule.to));
        preset.into_iter().chain(rules).collect()
    }

    #[test]
    fn what_is_allowed_is_taken_out_of_what_is_denied() {
        for (json, internet, usual, expected) in [
            ("{}", None, true, &["all-public"][..]),
            ("{}", None, false, &["unsaid"]),
            ("{}", Some(true), false, &["unsaid"]),
            (
                r#"{"allowOut":["1.1.1.1"]}"#,
                Some(true),
                false,
                &["Allow 1.1.1.1/32"],
            ),
            ("{}", Some(false), true, &[]),
            (
                r#"{"denyOut":["8.8.8.8"]}"#,
                None,
                true,
                &["all-public", "Deny 8.8.8.8/32"],
            ),
            (r#"{"denyOut":["0.0.0.0/0"]}"#, Some(true), true, &[]),
            (
                r#"{"denyOut":["0.0.0.0/0"],"allowOut":["1.1.1.1","*.example.com"]}"#,
                None,
                true,
                &["Allow *.example.com", "Allow 1.1.1.1/32"],
            ),
            (
                r#"{"denyOut":["8.8.8.0/29"],"allowOut":["8.8.8.2/31"]}"#,
                None,
                true,
                &[
                    "all-public",
                    "Deny 8.8.8.0/31",
                    "Deny 8.8.8.4/30",
                    "Allow 8.8.8.2/31",
                ],
            ),
            (
                r#"{"denyOut":["8.8.8.8"],"allowOut":["8.8.0.0/16"]}"#,
                None,
                true,
                &["all-public", "Allow 8.8.0.0/16"],
            ),
            (
                r#"{"denyOut":["0.0.0.0/0"],"allowOut":["0.0.0.0/0"]}"#,
                None,
                true,
                &["all-public"],
            ),
        ] {
            let asked = read(json, internet, usual).unwrap();
            assert_eq!(words(&asked), expected, "{json}");
        }
    }

    #[test]
    fn pieces_of_a_range_are_the_range() {
        let all: IpNet = "10.0.0.0/8".parse().unwrap();
        let holes: Vec<IpNet> = ["10.1.2.3/32", "10.200.0.0/16", "11.0.0.0/8"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let pieces = without(all, &holes);
        let size = |net: &IpNet| 1u64 << (32 - net.prefix_len());
        assert_eq!(
            pieces.iter().map(size).sum::<u64>(),
            size(&all) - size(&holes[0]) - size(&holes[1])
        );
        assert!(pieces.iter().all(|piece| {
            holes
                .iter()
                .all(|hole| !piece.contains(hole) && !hole.contains(piece))
        }));
    }

    #[test]
    fn headers_become_secrets_of_their_host() {
        let json = r#"{"rules":{"api.example.com":[{"transform":{"headers":{"X-Key":"hush"}}}]},"httpsPorts":[8443]}"#;
        let asked = read(json, None, true).unwrap();
        let [header] = &asked.headers[..] else { panic!() };
        assert_eq!(header.binding.hosts, ["api.example.com"]);
        assert_eq!(header.binding.ports.len(), 2);
        assert!(!header.binding.plain_http);
        assert!(!format!("{asked:?}").contains("hush"));
    }

    #[test]
    fn what_cannot_be_served_is_named() {
        for (json, named) in [
            (r#"{"dnsServers":["1.1.1.1"]}"#, "network.dnsServers"),
            (r#"{"egressProxy":{"address":"a:1"}}"#, "network.egressProxy"),
            (r#"{"denyOut":["example.com"]}"#, "network.denyOut"),
            (r#"{"allowOut":["example.com"]}"#, "network.allowOut"),
            (r#"{"httpsPorts":[0]}"#, "httpsPorts"),
            (r#"{"rules":{"a.example":[{"rewrite":{}}]}}"#, "rewrite"),
            (r#"{"rules":{"a.example":[{},{}]}}"#, "network.rules.a.example"),
            (
                r#"{"rules":{"a.example":[{"transform":{"headers":{"A":"${e2b.identity.tokens.x}"}}}]}}"#,
                "identity",
            ),
            (
                r#"{"rules":{"a.example":[{"transform":{"headers":{"A b":"x"}}}]}}"#,
                "`A b`",
            ),
            (
                r#"{"rules":{"a.example":[{"transform":{"headers":{"A":"x\ny"}}}]}}"#,
                "`A`",
            ),
        ] {
            let message = read(json, None, true).unwrap_err().message;
            assert!(message.contains(named), "{json}: {message}");
        }
    }
}

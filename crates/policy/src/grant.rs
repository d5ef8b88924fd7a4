//! Which secret goes into which request.
//!
//! What must hold: a secret goes only to hosts that its binding names, dialled by that name, and never over a
//! connection that others can read unless the binding says so. A grant allows no connection: rules do that.

use atoll_types::{Injection, SecretBinding, SecretRef, Timestamp};

use crate::decision::FlowKind;
use crate::error::Problem;
use crate::path::{Match, Path, Requests};
use crate::ports::Ports;
use crate::rule::MAX_PORTS;
use crate::target::{Target, shown};
use crate::{HttpRequest, Name, PolicyError};

const MAX_HOSTS: usize = 32;
const MAX_WORD_BYTES: usize = 128;

/// Headers that say where a request goes or where it ends; whoever can set them can smuggle one.
const REFUSED_HEADERS: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A secret that a sandbox may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub secret: SecretRef,
    pub binding: SecretBinding,
    /// From then on it is as if it were not there.
    pub expires: Option<Timestamp>,
    /// The variable that holds its placeholder in the sandbox.
    pub env: Option<String>,
}

/// Whether a binding makes sense, to be asked when a secret is set. Places are relative to the binding: `hosts[0]`.
pub fn check_binding(binding: &SecretBinding) -> Result<(), PolicyError> {
    Bound::read(binding).map(drop)
}

/// A binding, read.
#[derive(Debug)]
pub(crate) struct Bound {
    hosts: Vec<Target>,
    ports: Ports,
    requests: Requests,
    plain_http: bool,
}

impl Bound {
    pub(crate) fn read(binding: &SecretBinding) -> Result<Self, PolicyError> {
        if binding.hosts.is_empty() || binding.hosts.len() > MAX_HOSTS {
            return Err(PolicyError::new(
                "hosts",
                format!("it has {} hosts", binding.hosts.len()),
                format!("write from 1 to {MAX_HOSTS}: the hosts that may be sent the secret"),
            ));
        }
        if binding.ports.len() > MAX_PORTS {
            return Err(PolicyError::new(
                "ports",
                format!("it has {} ranges of ports", binding.ports.len()),
                format!("write at most {MAX_PORTS}"),
            ));
        }
        let hosts = binding.hosts.iter().enumerate().map(|(at, host)| {
            let place = format!("hosts[{at}]");
            let target = Target::parse(host).map_err(|problem| problem.at(&place))?;
            let narrow = match &target {
                Target::Exact(_) => true,
                Target::Below(parent) => parent.labels().nth(1).is_some(),
                Target::Any | Target::Net(_) => false,
            };
            narrow.then_some(target).ok_or_else(|| {
                PolicyError::new(
                    place,
                    format!("a secret cannot be bound to `{}`", shown(host)),
                    "write a host such as api.example.com, or *.example.com for everything below it",
                )
            })
        });
        check_injection(&binding.inject).map_err(|problem| problem.at("inject"))?;
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            ports: if binding.ports.is_empty() {
                Ports::of(&[443])
            } else {
                Ports::new(&binding.ports)
            },
            requests: Requests::parse(&binding.methods, &binding.paths)
                .map_err(|problem| problem.at("methods and paths"))?,
            plain_http: binding.plain_http,
        })
    }

    /// Whether some request to it may get the secret.
    pub(crate) fn covers(&self, name: &Name, port: u16) -> bool {
        self.ports.contains(port) && self.names(name)
    }

    /// Whether it is bound to this name, on whichever port.
    pub(crate) fn names(&self, name: &Name) -> bool {
        self.hosts.iter().any(|host| host.matches_name(name))
    }

    pub(crate) fn matches(&self, request: &HttpRequest<'_>, path: &Path<'_>) -> bool {
        let flow = &request.flow;
        let readable_by_us_only = match flow.kind {
            FlowKind::Tls => true,
            FlowKind::Http => self.plain_http,
            FlowKind::Opaque => false,
        };
        readable_by_us_only
            && flow.claimed == flow.name
            && flow.name.is_some_and(|name| self.covers(name, flow.port))
            && self.requests.matches(request.method, path) == Match::Yes
    }
}

/// A variable's name, as every shell takes it.
pub(crate) fn check_env(name: &str) -> Result<(), Problem> {
    let good = name.len() <= MAX_WORD_BYTES
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if good {
        return Ok(());
    }
    Err(Problem::new(
        format!("`{}` is not the name of a variable", shown(name)),
        "write for example API_KEY: letters, digits and underscores, no digit first",
    ))
}

fn check_injection(inject: &Injection) -> Result<(), Problem> {
    let fits = |text: &str| !text.is_empty() && text.len() <= MAX_WORD_BYTES;
    match inject {
        Injection::Header { name } => {
            let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            if !fits(name) || !name.bytes().all(token) {
                return Err(Problem::new(
                    format!("`{}` is not the name of a header", shown(name)),
                    "write for example x-api-key",
                ));
            }
            if REFUSED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
                return Err(Problem::new(
                    format!(
                        "the header `{name}` says where a request goes or ends, and cannot carry a secret"
                    ),
                    "write another, for example authorization or x-api-key",
                ));
            }
        }
        Injection::Basic { username } => {
            let plain = |c: char| c != ':' && !c.is_control();
            if username.len() > MAX_WORD_BYTES || !username.chars().all(plain) {
                return Err(Problem::new(
                    format!("`{}` cannot be a user name", shown(username)),
                    format!("write at most {MAX_WORD_BYTES} bytes, without a colon"),
                ));
            }
        }
        Injection::Query { name } => {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
            if !fits(name) || !name.bytes().all(plain) {
                return Err(Problem::new(
                    format!("`{}` is not the name of a query parameter", shown(name)),
                    "write for example api_key: letters, digits, `-`, `.`, `_` or `~`",
                ));
            }
        }
        Injection::Bearer | Injection::Placeholder => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binding(host: &str, inject: Injection) -> SecretBinding {
        SecretBinding {
            hosts: vec![host.into()],
            ports: Vec::new(),
            methods: Vec::new(),
            paths: Vec::new(),
            plain_http: false,
            redact: false,
            inject,
        }
    }

    #[test]
    fn a_secret_is_bound_to_somebody() {
        for host in ["api.example.com", "*.example.com", "intranet"] {
            assert_eq!(check_binding(&binding(host, Injection::Bearer)), Ok(()), "{host}");
        }
        for host in [
            "*",
            "*.com",
            "10.0.0.0/8",
            "10.0.0.1",
            "https://a.example",
            "a.example:443",
            "",
        ] {
            let error = check_binding(&binding(host, Injection::Bearer)).unwrap_err();
            assert_eq!(error.place, "hosts[0]", "{host}");
        }
        let nobody = SecretBinding {
            hosts: Vec::new(),
            ..binding("a", Injection::Bearer)
        };
        assert_eq!(check_binding(&nobody).unwrap_err().place, "hosts");
    }

    #[test]
    fn a_shape_cannot_break_a_request() {
        let header = |name: &str| Injection::Header { name: name.into() };
        let query = |name: &str| Injection::Query { name: name.into() };
        let basic = |name: &str| Injection::Basic {
            username: name.into(),
        };
        for good in [
            header("X-Api-Key"),
            query("api_key"),
            basic("me"),
            basic(""),
            Injection::Placeholder,
        ] {
            assert_eq!(
                check_binding(&binding("a.example", good.clone())),
                Ok(()),
                "{good:?}"
            );
        }
        for bad in [
            header(""),
            header("x y"),
            header("x\r\ny"),
            header("Host"),
            header("Content-Length"),
            header("transfer-encoding"),
            query(""),
            query("a&b"),
            query("a=b"),
            basic("a:b"),
            basic("a\nb"),
        ] {
            let error = check_binding(&binding("a.example", bad.clone())).unwrap_err();
            assert_eq!(error.place, "inject", "{bad:?}");
        }
        for (env, good) in [
            ("API_KEY", true),
            ("_x1", true),
            ("1x", false),
            ("", false),
            ("A-B", false),
            ("A=B", false),
        ] {
            assert_eq!(check_env(env).is_ok(), good, "{env}");
        }
    }
}

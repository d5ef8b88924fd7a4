//! Where a rule points to, read strictly: what is not clearly a name, a wildcard or a range of addresses is refused
//! with what to write instead.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::error::Problem;
use crate::{Name, NameError};

/// Longer than any name with its wildcard, in any script.
const MAX_BYTES: usize = 1100;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// `*`: any name.
    Any,
    Exact(Name),
    /// `*.x`: every name below it, not itself.
    Below(Name),
    Net(IpNet),
}

impl Target {
    pub(crate) fn parse(text: &str) -> Result<Self, Problem> {
        let wrong = |remedy: &str| {
            Err(Problem::new(
                format!("`{}` is not a destination", shown(text)),
                remedy,
            ))
        };
        if text.is_empty() {
            return wrong(
                "write a host such as pypi.org, a wildcard such as *.pypi.org, or a range such as 10.0.0.0/8",
            );
        }
        if text.len() > MAX_BYTES {
            return wrong("it is too long for a name");
        }
        if text == "*" {
            return Ok(Self::Any);
        }
        if let Some(net) = parse_net(text)? {
            return Ok(Self::Net(net));
        }
        if text.contains("://") {
            return wrong("write only the host, without `https://` and the path");
        }
        if text.starts_with('[') {
            return wrong("write the address without brackets, and ports into `ports`");
        }
        if text.contains('/') {
            return wrong(
                "write only the host and put the path into `paths`; a range needs an address before the `/`",
            );
        }
        if text.contains(':') {
            return wrong("write only the host and put the port into `ports`");
        }
        let (below, host) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        if host.contains('*') {
            return wrong("`*` may only stand alone or as the whole first label, as in *.example.com");
        }
        match Name::parse_written(host) {
            Ok(name) if below => Ok(Self::Below(name)),
            Ok(name) => Ok(Self::Exact(name)),
            Err(why) => Err(Problem::new(
                format!("`{}` is not a host name: {why}", shown(text)),
                match why {
                    NameError::Number => {
                        "write an address with all its four parts, in decimal, as in 127.0.0.1"
                    }
                    NameError::EmptyLabel => "write it without the superfluous dot",
                    _ => "write a host such as pypi.org, or *.pypi.org for everything below it",
                },
            )),
        }
    }

    pub(crate) fn matches_name(&self, name: &Name) -> bool {
        match self {
            Self::Any => true,
            Self::Exact(exact) => exact == name,
            Self::Below(parent) => name
                .as_str()
                .strip_suffix(parent.as_str())
                .is_some_and(|rest| rest.ends_with('.')),
            Self::Net(_) => false,
        }
    }
}

/// `None` where it is not about addresses at all.
fn parse_net(text: &str) -> Result<Option<IpNet>, Problem> {
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let Ok(address) = address.parse::<IpAddr>() else {
        return Ok(None);
    };
    let widest = if address.is_ipv4() { 32 } else { 128 };
    let length = match prefix {
        None => Some(widest),
        Some(digits) => read_prefix(digits).filter(|length| *length <= widest),
    };
    let Some(net) = length.and_then(|length| IpNet::new(address, length).ok()) else {
        return Err(Problem::new(
            format!("`{}` is not a range of addresses", shown(text)),
            format!("write a number from 0 to {widest} behind the `/`"),
        ));
    };
    if net.trunc() != net {
        return Err(Problem::new(
            format!("`{text}` has bits set behind its prefix"),
            format!(
                "write {} for the range or {address} for the one address",
                net.trunc()
            ),
        ));
    }
    if let IpNet::V6(v6) = net
        && v6.prefix_len() >= 96
        && let Some(v4) = v6.addr().to_ipv4_mapped()
    {
        return Err(Problem::new(
            format!("`{text}` is an IPv4 range in IPv6 writing, which never appears as a destination"),
            format!("write {v4}/{}", v6.prefix_len() - 96),
        ));
    }
    Ok(Some(net))
}

fn read_prefix(digits: &str) -> Option<u8> {
    let plain =
        digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    plain.then(|| digits.parse().ok()).flatten()
}

/// What a person wrote, made harmless and short enough for a message.
pub(crate) fn shown(text: &str) -> String {
    const LONGEST: usize = 80;
    let short: String = text.chars().take(LONGEST).collect();
    let dots = if short.len() < text.len() { "…" } else { "" };
    format!("{}{dots}", short.escape_debug())
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Exact(name) => name.fmt(f),
            Self::Below(name) => write!(f, "*.{name}"),
            Self::Net(net) => net.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read() {
        for (text, shown) in [
            ("*", "*"),
            ("PyPI.org", "pypi.org"),
            ("*.pypi.org", "*.pypi.org"),
            ("*.bücher.example", "*.xn--bcher-kva.example"),
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("10.1.2.3", "10.1.2.3/32"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("2001:DB8::1", "2001:db8::1/128"),
        ] {
            assert_eq!(Target::parse(text).map(|t| t.to_string()).as_deref(), Ok(shown));
        }
    }

    #[test]
    fn everything_else_is_refused_with_what_to_write() {
        for (text, remedy) in [
            ("", "write a host"),
            ("https://pypi.org/simple", "without `https://`"),
            ("pypi.org/simple", "`paths`"),
            ("pypi.org:443", "`ports`"),
            ("[::1]", "without brackets"),
            ("[::1]:443", "without brackets"),
            ("pypi.org.", "superfluous dot"),
            ("**.pypi.org", "may only stand"),
            ("a.*.org", "may only stand"),
            ("*pypi.org", "may only stand"),
            ("*.*", "may only stand"),
            ("*.", "write a host"),
            ("10.0.0.5/8", "write 10.0.0.0/8"),
            ("10.0.0.0/33", "from 0 to 32"),
            ("10.0.0.0/08", "from 0 to 32"),
            ("10.0.0.0/+8", "from 0 to 32"),
            ("10.0.0.0/", "from 0 to 32"),
            ("10.0.0/8", "`paths`"),
            ("2001:db8::/129", "from 0 to 128"),
            ("::ffff:10.0.0.0/104", "write 10.0.0.0/8"),
            ("::ffff:127.0.0.1", "write 127.0.0.1/32"),
            ("fe80::1%eth0", "`ports`"),
            ("127.1", "four parts"),
            ("0x7f.1", "four parts"),
            ("2130706433", "four parts"),
            ("010.0.0.1", "four parts"),
            ("10.0.0.1/255.0.0.0", "from 0 to 32"),
            ("pypi.org\0", "write a host"),
            ("pypi org", "write a host"),
        ] {
            let problem = Target::parse(text).unwrap_err();
            assert!(problem.remedy.contains(remedy), "{text:?}: {problem:?}");
        }
    }

    #[test]
    fn a_wildcard_ends_at_a_label() {
        let below = Target::parse("*.pypi.org").unwrap();
        for (name, matches) in [
            ("a.pypi.org", true),
            ("a.b.pypi.org", true),
            ("pypi.org", false),
            ("evilpypi.org", false),
            ("pypi.org.evil.com", false),
        ] {
            assert_eq!(below.matches_name(&Name::parse(name).unwrap()), matches, "{name}");
        }
    }
}

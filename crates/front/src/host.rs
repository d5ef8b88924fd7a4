//! Whom a request is for, by its host: the API, or a port inside a sandbox, as `{port}-{sandbox}.{domain}`.
//!
//! What must hold: this is the only place that reads such names, so that whoever looks at a request sends it to the same place;
//! and what comes near to naming a port never means the API, because a typing error must not move a request from a sandbox's
//! origin to ours.

use atoll_types::SandboxId;
use http::header::HOST;
use http::{HeaderMap, Uri};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Api,
    Port {
        sandbox: SandboxId,
        port: u16,
    },
    /// It has the form of a port's host name but names none.
    Nowhere {
        host: String,
    },
    /// No single host can be told.
    Ambiguous,
}

/// Whom a request is for.
pub fn target(uri: &Uri, headers: &HeaderMap, domains: &[String]) -> Target {
    let mut hosts = headers.get_all(HOST).iter();
    let named = hosts.next();
    // Two names are none: whoever stands before us may have looked at the other one.
    if hosts.next().is_some() {
        return Target::Ambiguous;
    }
    // An absolute request target outranks the header (RFC 9112, 3.2.2).
    let host = match (uri.authority(), named) {
        (Some(authority), _) => authority.as_str(),
        (None, Some(host)) => match host.to_str() {
            Ok(host) => host,
            Err(_) => return Target::Ambiguous,
        },
        (None, None) => return Target::Api,
    };
    // A name with a user before it, or with more behind it, is one that others read otherwise.
    match host.contains(['@', '/', '\\', '#', '?', '%', ' ']) {
        true => Target::Ambiguous,
        false => parse(host, domains),
    }
}

/// The host that a request was sent to, as its client wrote it: what links back to it begin with.
pub fn authority<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    let named = uri.authority().map(http::uri::Authority::as_str);
    named.or_else(|| headers.get(HOST)?.to_str().ok())
}

fn parse(authority: &str, domains: &[String]) -> Target {
    let host = without_port(authority).trim_end_matches('.').to_ascii_lowercase();
    let label = domains.iter().find_map(|domain| {
        let label = host.strip_suffix(domain.as_str())?.strip_suffix('.')?;
        (!label.contains('.')).then_some(label)
    });
    let Some((port, id)) = label.and_then(|label| label.split_once('-')) else {
        return Target::Api;
    };
    // Some clients put an id of their own behind the sandbox's.
    let mut ids = id.split('-').map(SandboxId::from_bare);
    match (parse_port(port), ids.next()) {
        (Some(port), Some(Ok(sandbox))) => Target::Port { sandbox, port },
        (_, Some(Ok(_))) => Target::Nowhere { host },
        _ if port.bytes().any(|byte| byte.is_ascii_digit()) || ids.any(|id| id.is_ok()) => {
            Target::Nowhere { host }
        }
        _ => Target::Api,
    }
}

/// The number of a port, written in the one way that there is: digits, of which the first is not zero.
pub fn parse_port(text: &str) -> Option<u16> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain)
}

/// The name and the port of `host[:port]`; the name in small letters.
pub fn split(authority: &str) -> (String, Option<u16>) {
    let host = without_port(authority);
    let port = authority[host.len()..].strip_prefix(':').and_then(parse_port);
    (host.trim_end_matches('.').to_ascii_lowercase(), port)
}

/// What stands behind the `api.` of a host name, under which E2B's clients look for its API.
pub fn of_api(name: &str) -> Option<&str> {
    name.strip_prefix("api.")
}

/// The host name of `host[:port]`.
fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        _ => authority,
    }
}

/// The TCP port that a request came to, as its `Host` says.
pub fn port_of(headers: &HeaderMap) -> Option<u16> {
    let host = headers.get(HOST)?.to_str().ok()?;
    parse_port(host[without_port(host).len()..].strip_prefix(':')?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BARE: &str = "abcdefghijkmnpqrstuv";

    fn domains() -> [String; 2] {
        ["localhost".to_owned(), "boxes.example.org".to_owned()]
    }

    fn named(host: &str) -> Target {
        let headers = HeaderMap::from_iter([(HOST, host.parse().unwrap())]);
        target(&Uri::from_static("/"), &headers, &domains())
    }

    fn port(port: u16) -> Target {
        Target::Port {
            sandbox: SandboxId::from_bare(BARE).unwrap(),
            port,
        }
    }

    #[test]
    fn ports_are_told_from_the_api_by_name() {
        for (host, number) in [
            (format!("8080-{BARE}.localhost:4000"), 8080),
            (format!("80-{}.LOCALHOST.", BARE.to_uppercase()), 80),
            (format!("3000-{BARE}.boxes.example.org"), 3000),
            (format!("80-{BARE}-5c1f3a.localhost"), 80),
            (format!("65535-{BARE}.localhost"), 65535),
        ] {
            assert_eq!(named(&host), port(number), "{host}");
        }
        for api in [
            "localhost",
            "localhost:4000",
            "127.0.0.1:4000",
            "[::1]:4000",
            "example.org",
            "my-host.localhost",
            "-x.localhost",
        ] {
            assert_eq!(named(api), Target::Api, "{api}");
        }
        assert_eq!(named(&format!("8080-{BARE}.evil.org")), Target::Api);
        assert_eq!(named(&format!("a.8080-{BARE}.localhost")), Target::Api);
    }

    #[test]
    fn what_is_almost_a_port_is_nowhere() {
        for wrong in [
            "+8080", "08080", "0", "70000", "-80", "", "80a", "x", "８０", "0x50", " 80", "8_0",
        ] {
            let host = format!("{wrong}-{BARE}.localhost");
            let Ok(value) = http::HeaderValue::from_bytes(host.as_bytes()) else {
                continue;
            };
            let headers = HeaderMap::from_iter([(HOST, value)]);
            let found = target(&Uri::from_static("/"), &headers, &domains());
            assert!(
                matches!(found, Target::Nowhere { .. } | Target::Ambiguous),
                "{host}: {found:?}"
            );
        }
        assert!(matches!(named("80-short.localhost"), Target::Nowhere { .. }));
    }

    #[test]
    fn what_others_read_otherwise_is_nobodys() {
        for host in [
            format!("x@80-{BARE}.localhost"),
            format!("evil.org/#@80-{BARE}.localhost"),
            format!("80-{BARE}.localhost/x"),
            format!("80-{BARE}.localhost?x"),
            "a@localhost".to_owned(),
        ] {
            assert_eq!(named(&host), Target::Ambiguous, "{host}");
        }
    }

    #[test]
    fn two_hosts_are_none() {
        let mut headers = HeaderMap::new();
        headers.append(HOST, "localhost".parse().unwrap());
        headers.append(HOST, "other".parse().unwrap());
        assert_eq!(target(&Uri::from_static("/"), &headers, &[]), Target::Ambiguous);
    }

    #[test]
    fn the_port_is_read_off_the_host() {
        let port = |host: &str| port_of(&HeaderMap::from_iter([(HOST, host.parse().unwrap())]));
        assert_eq!(port("localhost:4000"), Some(4000));
        assert_eq!(port("[::1]:4000"), Some(4000));
        assert_eq!(port("localhost"), None);
        assert_eq!(port("[::1]"), None);
        assert_eq!(port("localhost:+4000"), None);
    }

    proptest! {
        /// Every port has one name, and every name that leads to a port is that name.
        #[test]
        fn a_port_has_one_name(number in 1..=u16::MAX) {
            prop_assert_eq!(named(&format!("{number}-{BARE}.localhost")), port(number));
        }

        #[test]
        fn only_plain_digits_name_a_port(text in "[ -~]{0,8}") {
            let host = format!("{text}-{BARE}.localhost");
            let Ok(value) = host.parse::<http::HeaderValue>() else { return Ok(()) };
            let headers = HeaderMap::from_iter([(HOST, value)]);
            if let Target::Port { port, .. } = target(&Uri::from_static("/"), &headers, &domains()) {
                let shown = port.to_string();
                prop_assert_eq!(text, shown);
            }
        }

        #[test]
        fn any_host_is_read_without_panic(text in "\\PC{0,60}") {
            if let Ok(value) = http::HeaderValue::from_bytes(text.as_bytes()) {
                let headers = HeaderMap::from_iter([(HOST, value)]);
                let _read = target(&Uri::from_static("/"), &headers, &domains());
                let _read = port_of(&headers);
            }
        }
    }
}

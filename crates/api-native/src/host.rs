//! Whom a request is for, by its `Host`: the API, or a port inside a sandbox.

use atoll_types::SandboxId;
use axum::http::header::HOST;
use axum::http::{HeaderMap, Uri};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    Api,
    Port {
        sandbox: SandboxId,
        port: u16,
    },
    /// It has the form of a port's host name but names none. Never the API: a typing error must not move a request from
    /// a sandbox's origin to ours.
    Nowhere {
        host: String,
    },
    /// No single host can be told.
    Ambiguous,
}

pub(crate) fn target(uri: &Uri, headers: &HeaderMap, domains: &[String]) -> Target {
    let mut hosts = headers.get_all(HOST).iter();
    let named = hosts.next();
    if hosts.next().is_some() {
        return Target::Ambiguous;
    }
    // an absolute request target outranks the header (RFC 9112, 3.2.2)
    match (uri.authority(), named) {
        (Some(authority), _) => parse(authority.as_str(), domains),
        (None, Some(host)) => match host.to_str() {
            Ok(host) => parse(host, domains),
            Err(_) => Target::Ambiguous,
        },
        (None, None) => Target::Api,
    }
}

pub(crate) fn parse(authority: &str, domains: &[String]) -> Target {
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = without_port(host).trim_end_matches('.').to_ascii_lowercase();
    let label = domains.iter().find_map(|domain| {
        let label = host.strip_suffix(domain.as_str())?.strip_suffix('.')?;
        (!label.contains('.')).then_some(label)
    });
    let Some((port, bare)) = label.and_then(|label| label.split_once('-')) else {
        return Target::Api;
    };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Target::Api;
    }
    match (port.parse::<u16>(), SandboxId::from_bare(bare)) {
        (Ok(port), Ok(sandbox)) if port > 0 => Target::Port { sandbox, port },
        _ => Target::Nowhere { host },
    }
}

/// The host name of `host[:port]`.
fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !host.ends_with(':') => host,
        _ => authority,
    }
}

/// The TCP port that a request came to, as its `Host` says.
pub(crate) fn port_of(headers: &HeaderMap) -> Option<u16> {
    let host = headers.get(HOST)?.to_str().ok()?;
    host[without_port(host).len()..].strip_prefix(':')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(host: &str, expected: &Target) {
        let headers = HeaderMap::from_iter([(HOST, host.parse().unwrap())]);
        let domains = ["localhost".to_owned(), "boxes.example.org".to_owned()];
        let found = target(&Uri::from_static("/"), &headers, &domains);
        assert_eq!(&found, expected, "{host}");
    }

    #[test]
    fn ports_are_told_from_the_api_by_name() {
        let id = "sbx_abcdefghijkmnpqrstuv";
        let sandbox = id.parse::<SandboxId>().unwrap();
        let bare = sandbox.bare();
        let port = |port| Target::Port {
            sandbox: sandbox.clone(),
            port,
        };
        check(&format!("8080-{bare}.localhost:4000"), &port(8080));
        check(&format!("80-{}.LOCALHOST.", bare.to_uppercase()), &port(80));
        check(&format!("3000-{bare}.boxes.example.org"), &port(3000));
        for api in [
            "localhost",
            "localhost:4000",
            "127.0.0.1:4000",
            "[::1]:4000",
            "example.org",
            "my-host.localhost",
            "-x.localhost",
        ] {
            check(api, &Target::Api);
        }
        check(&format!("8080-{bare}.evil.org"), &Target::Api);
        check(&format!("a.8080-{bare}.localhost"), &Target::Api);
        for nowhere in [
            format!("0-{bare}.localhost"),
            format!("70000-{bare}.localhost"),
            "80-short.localhost".into(),
        ] {
            check(
                &nowhere,
                &Target::Nowhere {
                    host: nowhere.clone(),
                },
            );
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
    }
}

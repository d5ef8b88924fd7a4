//! Under which domain a client finds the sandboxes that it is told of.
//!
//! Clients reach `{port}-{sandbox}.{domain}`, and with no domain in the answer they take the one that they are configured with:
//! E2B's own cloud, for whoever set `E2B_API_URL` alone. So there is always one in it that leads here from where the client
//! stands: by the name and the port that it came by, if the name is ours. A port is part of the domain, as the clients have it.
//!
//! Nothing but a number is taken over from what a client sends.

use std::convert::Infallible;

use atoll_front::host;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::{App, Options};

/// `None`: the client came by a name of its own that leads here, and goes on with that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Domain(pub(crate) Option<String>);

impl FromRequestParts<App> for Domain {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Infallible> {
        let authority = host::authority(&parts.uri, &parts.headers).unwrap_or_default();
        Ok(Self(domain(authority, &app.options)))
    }
}

fn domain(authority: &str, options: &Options) -> Option<String> {
    let (name, port) = host::split(authority);
    let below_api = host::of_api(&name);
    let named = below_api.unwrap_or(&name);
    let (domain, port) = match options.domains.iter().find(|domain| *domain == named) {
        Some(domain) => (domain, options.public_port.or(port)),
        None if below_api.is_some() => return None,
        None => {
            let public = options.public_port.or(options.tls_port);
            (options.domains.first()?, public.or(port))
        }
    };
    Some(match port {
        None | Some(443) => domain.clone(),
        Some(port) => format!("{domain}:{port}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(authority: &str, options: &Options) -> Option<String> {
        domain(authority, options)
    }

    fn options(domains: &[&str], public_port: Option<u16>, tls_port: Option<u16>) -> Options {
        Options {
            public_scheme: "http".into(),
            domains: domains.iter().map(|&domain| domain.to_owned()).collect(),
            public_port,
            tls_port,
            internet: true,
            scratch: "/nonexistent".into(),
        }
    }

    #[test]
    fn a_client_is_told_a_domain_that_leads_back_the_way_it_came() {
        let local = options(&["localhost"], None, None);
        for (came_by, is_told) in [
            ("127.0.0.1:7070", "localhost:7070"),
            ("localhost:7070", "localhost:7070"),
            ("api.localhost:7070", "localhost:7070"),
            ("API.LOCALHOST:9000", "localhost:9000"),
            ("[::1]:7070", "localhost:7070"),
            ("api.localhost", "localhost"),
            ("api.localhost:443", "localhost"),
            ("10.0.0.5:80", "localhost:80"),
            ("", "localhost"),
            ("localhost:nonsense", "localhost"),
        ] {
            assert_eq!(told(came_by, &local).as_deref(), Some(is_told), "{came_by}");
        }
        assert_eq!(
            told("api.boxes.lan:7070", &local),
            None,
            "it goes on with its own"
        );
    }

    #[test]
    fn a_configured_domain_is_told_with_the_port_that_the_world_sees() {
        let domains = ["boxes.example.org", "localhost"];
        let plain = options(&domains, None, Some(8443));
        for (came_by, is_told) in [
            ("api.boxes.example.org:8443", "boxes.example.org:8443"),
            ("boxes.example.org", "boxes.example.org"),
            ("127.0.0.1:7070", "boxes.example.org:8443"),
            ("api.localhost:7070", "localhost:7070"),
        ] {
            assert_eq!(told(came_by, &plain).as_deref(), Some(is_told), "{came_by}");
        }
        let behind_another = options(&domains, Some(443), None);
        for came_by in [
            "127.0.0.1:7070",
            "boxes.example.org:7070",
            "api.boxes.example.org",
        ] {
            assert_eq!(
                told(came_by, &behind_another).as_deref(),
                Some("boxes.example.org")
            );
        }
    }
}

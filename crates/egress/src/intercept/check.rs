//! Whether a request is one that can be read in one way only, and where it wants to go.

use atoll_http_rules::strip_hop_by_hop;
use atoll_policy::{Name, RuleName};
use hyper::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode, Version};

/// A request that is refused whatever the policy says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bad {
    pub(super) status: StatusCode,
    pub(super) rule: &'static str,
    pub(super) reason: &'static str,
    pub(super) hint: &'static str,
}

/// What is told apart before the head is cleaned.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    /// Wants to be told before it sends its body.
    pub(super) continues: bool,
    pub(super) trailers: bool,
}

pub(super) fn method(method: &Method) -> Result<(), Bad> {
    let refuse = |reason, hint| {
        Err(Bad {
            status: StatusCode::METHOD_NOT_ALLOWED,
            rule: RuleName::PROTOCOL,
            reason,
            hint,
        })
    };
    match method.as_str() {
        "CONNECT" => refuse(
            "there is no proxy to CONNECT through: connections are let through or refused as they are",
            "connect to the host itself; for a WebSocket, use HTTP/1.1",
        ),
        // They answer with the request, which by then has secrets in it.
        "TRACE" | "TRACK" => refuse(
            "requests that are answered with themselves are refused",
            "use another method",
        ),
        _ => Ok(()),
    }
}

/// Every place where a request names its host must name `name` and `port`, and there must be one.
pub(super) fn authority(parts: &Parts, name: &Name, port: u16) -> Result<(), Bad> {
    let bad = |status, rule, reason| Bad {
        status,
        rule,
        reason,
        hint: "send each request on a connection to its own host",
    };
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(bad(
            StatusCode::BAD_REQUEST,
            RuleName::PROTOCOL,
            "the request has more than one Host header",
        ));
    }
    let from_uri = parts
        .uri
        .authority()
        .map(|authority| authority.as_str().as_bytes());
    let mut named = from_uri
        .into_iter()
        .chain(host.map(HeaderValue::as_bytes))
        .peekable();
    if named.peek().is_none() {
        return Err(bad(
            StatusCode::BAD_REQUEST,
            RuleName::PROTOCOL,
            "the request does not say for which host it is",
        ));
    }
    match named.all(|authority| is_for(authority, name, port)) {
        true => Ok(()),
        false => Err(bad(
            StatusCode::FORBIDDEN,
            RuleName::NAME_MISMATCH,
            "the request is for another host or port than the connection",
        )),
    }
}

/// A port that is left out is the connection's own: it is what the server is told in any case.
fn is_for(authority: &[u8], name: &Name, port: u16) -> bool {
    let mut parts = authority.splitn(2, |byte| *byte == b':');
    let host = parts.next().unwrap_or_default();
    let same_port = parts.next().is_none_or(|text| {
        !text.is_empty()
            && text.iter().all(u8::is_ascii_digit)
            && std::str::from_utf8(text).is_ok_and(|text| text.parse() == Ok(port))
    });
    same_port && Name::parse_bytes(host).as_ref() == Ok(name)
}

pub(super) fn framing(parts: &Parts) -> Result<Wishes, Bad> {
    let bad = |status, reason| {
        Err(Bad {
            status,
            rule: RuleName::PROTOCOL,
            reason,
            hint: "send the body as it is, with a length or in chunks",
        })
    };
    let encodings: Vec<_> = parts.headers.get_all(TRANSFER_ENCODING).iter().collect();
    match encodings.as_slice() {
        [] => {}
        [one] if one.as_bytes().eq_ignore_ascii_case(b"chunked") => {}
        _ => {
            return bad(
                StatusCode::NOT_IMPLEMENTED,
                "the body is encoded for transfer in a way other than in chunks",
            );
        }
    }
    let mut expects = parts.headers.get_all(EXPECT).iter();
    let continues = match (expects.next(), expects.next()) {
        (None, _) => false,
        (Some(one), None) if one.as_bytes().eq_ignore_ascii_case(b"100-continue") => true,
        _ => {
            return bad(
                StatusCode::EXPECTATION_FAILED,
                "the request expects what cannot be met",
            );
        }
    };
    Ok(Wishes {
        continues: continues && parts.version == Version::HTTP_11,
        trailers: has_token(&parts.headers, &TE, "trailers"),
    })
}

/// What a server that takes trailers for headers must not find behind a body: what frames or routes the request, or says
/// who sends it.
pub(super) fn strip_from_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    for name in [
        AUTHORIZATION,
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        CONTENT_TYPE,
        COOKIE,
        EXPECT,
        HOST,
        TRAILER,
    ] {
        trailers.remove(name);
    }
}

pub(super) fn has_token(headers: &HeaderMap, name: &HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|found| found.eq_ignore_ascii_case(token.as_bytes()))
}

fn tokens<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h [u8]> {
    headers
        .get_all(name)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_request_names_its_host_in_one_way() {
        let name = Name::parse("api.example.com").unwrap();
        for (uri, hosts) in [
            ("/", &["api.example.com"][..]),
            ("/", &["API.Example.COM"]),
            ("/", &["api.example.com:8443"]),
            ("https://api.example.com/", &[]),
            ("https://api.example.com:8443/", &["api.example.com"]),
            ("http://api.example.com/", &["api.example.com"]),
            ("//evil.example/", &["api.example.com"]),
        ] {
            let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            assert_eq!(
                authority(&parts(uri, &headers), &name, 8443),
                Ok(()),
                "{uri} {hosts:?}"
            );
        }
        for (uri, hosts) in [
            ("/", &[][..]),
            ("/", &[""]),
            ("/", &["evil.example"]),
            ("/", &["api.example.com", "api.example.com"]),
            ("/", &["api.example.com", "evil.example"]),
            ("/", &["api.example.com:443"]),
            ("/", &["api.example.com:"]),
            ("/", &["api.example.com:+8443"]),
            ("/", &["api.example.com:8443:8443"]),
            ("/", &["api.example.com:18443"]),
            ("/", &["api.example.com:74000"]),
            ("/", &["api.example.com."]),
            ("/", &["user@api.example.com"]),
            ("/", &["api.example.com@evil.example"]),
            ("/", &["api.example.com, evil.example"]),
            ("/", &["api.example.com/evil"]),
            ("/", &["evil.example#api.example.com"]),
            ("/", &["xapi.example.com"]),
            ("/", &["127.0.0.1"]),
            ("/", &["[::1]"]),
            ("https://evil.example/", &["api.example.com"]),
            ("https://api.example.com/", &["evil.example"]),
            ("https://user@api.example.com/", &[]),
            ("https://api.example.com:443/", &[]),
        ] {
            let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            assert!(
                authority(&parts(uri, &headers), &name, 8443).is_err(),
                "{uri} {hosts:?}"
            );
        }
    }

    #[test]
    fn what_a_connection_header_names_is_not_passed_on() {
        let mut parts = parts(
            "/",
            &[
                ("connection", "close, X-Mine"),
                ("connection", "http2-settings , upgrade"),
                ("x-mine", "1"),
                ("upgrade", "h2c"),
                ("http2-settings", "AAMAAABk"),
                ("te", "trailers, deflate"),
                ("keep-alive", "timeout=5"),
                ("proxy-authorization", "Basic eA=="),
                ("transfer-encoding", "chunked"),
                ("x-other", "2"),
            ],
        );
        assert!(framing(&parts).unwrap().trailers);
        strip_hop_by_hop(&mut parts.headers);
        assert_eq!(
            parts.headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["x-other"]
        );
    }

    #[test]
    fn odd_framing_and_methods_are_refused() {
        for headers in [
            &[("transfer-encoding", "gzip, chunked")][..],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
            &[("transfer-encoding", "identity")],
            &[("expect", "the unexpected")],
            &[("expect", "100-continue"), ("expect", "100-continue")],
        ] {
            assert!(framing(&parts("/", headers)).is_err(), "{headers:?}");
        }
        for (refused, text) in [
            (true, "TRACE"),
            (true, "TRACK"),
            (true, "CONNECT"),
            (false, "PROPFIND"),
        ] {
            assert_eq!(
                method(&Method::from_bytes(text.as_bytes()).unwrap()).is_err(),
                refused,
                "{text}"
            );
        }
    }
}

//! Rules of HTTP that everybody must read or write alike: which headers a proxy passes on, and how a text becomes a part of
//! a path.

use http::header::{self, HeaderMap, HeaderName};

/// Headers that concern one connection only and are never passed on (RFC 9110, 7.6.1, and what older documents list), beside
/// those that `Connection` names. `Trailer` is not one: it says what follows the body, wherever that goes.
pub const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("http2-settings"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The options of all `Connection` headers, as they are written.
pub fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
}

/// Takes away what concerns one connection only, and what the message itself says does.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = connection_options(headers)
        .filter_map(|name| name.parse().ok())
        // These frame and route the message; naming them must not take that away.
        .filter(|name| *name != header::CONTENT_LENGTH && *name != header::HOST)
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Makes any text one segment of a path.
pub fn segment(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn headers_of_one_hop_stay_there() {
        let mut sent = headers(&[
            ("connection", "close, X-Private, Content-Length"),
            ("connection", "x-other"),
            ("x-private", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("http2-settings", "AAMAAABk"),
            ("proxy-authorization", "Basic eDp5"),
            ("content-length", "3"),
            ("accept", "*/*"),
        ]);
        strip_hop_by_hop(&mut sent);
        assert_eq!(sent, headers(&[("content-length", "3"), ("accept", "*/*")]));
    }

    #[test]
    fn a_segment_stays_one_segment() {
        assert_eq!(segment("a b/c?d#é"), "a%20b%2Fc%3Fd%23%C3%A9");
    }
}

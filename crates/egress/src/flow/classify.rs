//! What the first bytes of a connection are.

use atoll_policy::Name;

use super::hello::{self, Hello, HelloError};

/// Ports on which the client is known to speak first: what it says decides.
pub(super) const CLIENT_FIRST: [u16; 8] = [80, 443, 8000, 8080, 8443, 3128, 5000, 8888];
/// Ports on which the server is known to speak first: waiting for the client would only delay it.
pub(super) const SERVER_FIRST: [u16; 14] = [
    21, 22, 23, 25, 110, 119, 143, 587, 2222, 3306, 4190, 5900, 6667, 33060,
];

pub(super) const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
const GSS_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";
/// No method that is in use is longer.
const LONGEST_METHOD: usize = 24;
/// A request line that is still not complete is not waited for.
const LONGEST_LINE: usize = 4096;
/// Headers of the first request that are looked at for its host.
const MOST_HEADERS: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum First {
    /// Not to be told yet.
    More,
    Tls(Hello),
    /// TLS, but not in a way that can be trusted.
    BadTls(HelloError),
    Http,
    /// PostgreSQL asks whether it may begin TLS.
    PostgresTls,
    /// PostgreSQL asks whether it may begin GSSAPI encryption.
    PostgresGss,
    Opaque,
}

pub(crate) fn classify(bytes: &[u8]) -> First {
    if bytes.is_empty() {
        return First::More;
    }
    if hello::is_tls(bytes) {
        return match hello::read(bytes) {
            Ok(hello) => First::Tls(hello),
            Err(HelloError::Incomplete) => First::More,
            Err(bad) => First::BadTls(bad),
        };
    }
    for (request, first) in [
        (SSL_REQUEST, First::PostgresTls),
        (GSS_REQUEST, First::PostgresGss),
    ] {
        // Whoever asks waits for the answer, so nothing follows.
        if bytes == request {
            return first;
        }
    }
    if bytes.len() < SSL_REQUEST.len() && SSL_REQUEST.starts_with(bytes) {
        return First::More;
    }
    http(bytes)
}

fn http(bytes: &[u8]) -> First {
    if bytes.starts_with(H2_PREFACE) {
        return First::Http;
    }
    let line_end = bytes.iter().position(|byte| *byte == b'\n');
    let line = &bytes[..line_end.unwrap_or(bytes.len())];
    let method = line
        .iter()
        .position(|byte| !byte.is_ascii_uppercase() && *byte != b'-');
    match method {
        None if line_end.is_none() && line.len() <= LONGEST_METHOD => First::More,
        // `GET /`, `OPTIONS *`, `GET http://`, `CONNECT a:1`: all are HTTP. What is not, such as `QUIT` or `EHLO x`, is
        // told apart by the end of the line.
        Some(at) if at > 0 && at <= LONGEST_METHOD && line[at] == b' ' => match line_end {
            // Whoever reads requests has a limit of its own for what is still to come.
            None if line.len() > LONGEST_LINE => First::Http,
            None => First::More,
            Some(_) if is_request_line(line) => First::Http,
            Some(_) => First::Opaque,
        },
        _ => First::Opaque,
    }
}

fn is_request_line(line: &[u8]) -> bool {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    line.ends_with(b" HTTP/1.1") || line.ends_with(b" HTTP/1.0")
}

/// The host that a request names, for a connection of which nothing else is known. `Err` until its head is complete.
pub(crate) fn host_of(bytes: &[u8]) -> Result<Option<Name>, Incomplete> {
    if bytes.starts_with(H2_PREFACE) {
        return Ok(None);
    }
    // An empty line ends a head also where lines end without CR, as whoever reads the request later sees it: a host
    // beyond it stands in the body.
    let end = (0..bytes.len())
        .find(|at| bytes[*at..].starts_with(b"\n\n") || bytes[*at..].starts_with(b"\n\r\n"))
        .ok_or(Incomplete)?;
    let mut hosts = bytes[..end]
        .split(|byte| *byte == b'\n')
        .skip(1)
        .take(MOST_HEADERS)
        .filter_map(|line| {
            let (name, value) = line.split_at_checked(5)?;
            name.eq_ignore_ascii_case(b"host:").then(|| value.trim_ascii())
        });
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return Ok(None);
    };
    let host = host
        .iter()
        .rposition(|byte| *byte == b':')
        .filter(|at| host[at + 1..].iter().all(u8::is_ascii_digit))
        .map_or(host, |at| &host[..at]);
    Ok(Name::parse_bytes(host).ok())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Incomplete;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn http_is_told_from_other_protocols_in_which_words_come_first() {
        for request in [
            "GET / HTTP/1.1\r\n",
            "OPTIONS * HTTP/1.1\r\n",
            "M-SEARCH * HTTP/1.1\r\n",
            "POST http://a.example/ HTTP/1.0\n",
            "CONNECT a.example:22 HTTP/1.1\r\nHost: x\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ] {
            assert_eq!(classify(request.as_bytes()), First::Http, "{request:?}");
            let line = request.find('\n').unwrap();
            for end in 0..line {
                assert_eq!(
                    classify(&request.as_bytes()[..end]),
                    First::More,
                    "{request:?} {end}"
                );
            }
        }
        for other in [
            "EHLO a.example\r\n",
            "QUIT\r\n",
            "SSH-2.0-OpenSSH\r\n",
            "git-upload-pack /x\0host=a.example\0",
            "GET /\r\n",
            " GET / HTTP/1.1\r\n",
            "get / HTTP/1.1\r\n",
            "GET\t/ HTTP/1.1\r\n",
            "GET / HTTP/3.0\r\n",
            "*1\r\n$4\r\nPING\r\n",
            "\x00\x00\x00\x08\x00\x03\x00\x00",
            "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            "\n",
        ] {
            assert_eq!(classify(other.as_bytes()), First::Opaque, "{other:?}");
        }
    }

    #[test]
    fn a_host_beyond_the_head_is_none() {
        let host = |head: &str| host_of(head.as_bytes()).map(|name| name.map(|name| name.to_string()));
        assert_eq!(
            host("GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"),
            Ok(Some("a.example".into()))
        );
        assert_eq!(
            host("GET / HTTP/1.1\nHost: a.example:80\n\n"),
            Ok(Some("a.example".into()))
        );
        for body in [
            "POST / HTTP/1.1\r\nX: y\r\n\nHost: a.example\r\n\r\n",
            "POST / HTTP/1.1\nX: y\n\r\nHost: a.example\r\n\r\n",
        ] {
            assert_eq!(host(body), Ok(None), "{body:?}");
        }
        assert_eq!(host("GET / HTTP/1.1\r\nHost: a.example\r\n"), Err(Incomplete));
    }

    #[test]
    fn postgres_asks_before_it_speaks_tls() {
        assert_eq!(classify(&SSL_REQUEST), First::PostgresTls);
        assert_eq!(classify(&GSS_REQUEST), First::PostgresGss);
        for end in 0..8 {
            assert_eq!(classify(&SSL_REQUEST[..end]), First::More);
        }
    }

    #[test]
    fn tls_is_read_as_far_as_its_name() {
        let hello = hello::tests::hello_for("a.example");
        assert!(matches!(classify(&hello), First::Tls(hello) if hello.name.is_some()));
        assert_eq!(classify(&hello[..20]), First::More);
        assert_eq!(
            classify(b"\x16\x03\x01\0\0"),
            First::BadTls(HelloError::Malformed)
        );
        assert_eq!(classify(b"\x16\x02"), First::Opaque);
    }

    #[test]
    fn a_request_names_one_host_or_none() {
        let host = |head: &str| host_of(head.as_bytes()).map(|name| name.map(|name| name.to_string()));
        assert_eq!(
            host("GET / HTTP/1.1\r\nAccept: */*\r\nhOsT:  A.Example:8080 \r\n\r\nbody"),
            Ok(Some("a.example".to_owned()))
        );
        for none in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n",
            "GET / HTTP/1.1\r\nX-Host: a.example\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ] {
            assert_eq!(host(none), Ok(None), "{none:?}");
        }
        assert_eq!(host("GET / HTTP/1.1\r\nHost: a.example\r\n"), Err(Incomplete));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = classify(&bytes);
            let _ = host_of(&bytes);
        }

        #[test]
        fn more_bytes_never_change_a_verdict_but_from_undecided(text in "[A-Z]{0,8}[ /a-z:]{0,12}( HTTP/1\\.[01])?(\r\n)?.{0,8}") {
            let bytes = text.as_bytes();
            let mut decided = None;
            for end in 1..=bytes.len() {
                let first = classify(&bytes[..end]);
                match (&decided, first) {
                    (None, First::More) => {}
                    (None, other) => decided = Some(other),
                    (Some(before), now) => prop_assert_eq!(before, &now),
                }
            }
        }
    }
}

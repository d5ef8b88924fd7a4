//! What the first bytes of a connection are.

use atoll_policy::Name;
use bytes::BytesMut;

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
/// A request line that is still not complete is not waited for.
const LONGEST_LINE: usize = 4096;
/// Headers of the first request that are looked at for its host.
const MOST_HEADERS: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum First {
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

pub(super) fn classify(bytes: &[u8]) -> First {
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

/// Whether it is a request, read as the most lenient server would read it: with blanks before it, in any case, with any
/// method, between any blanks, in any version, also in one that has none. What is then not a request for those who read
/// strictly is refused by them; what is not one for anybody is something else.
fn http(bytes: &[u8]) -> First {
    let Some(start) = bytes.iter().position(|byte| !is_blank(*byte)) else {
        return First::More;
    };
    let bytes = &bytes[start..];
    let end = line_end(bytes);
    let line = &bytes[..end.unwrap_or(bytes.len())];
    let Some(method) = line.iter().position(|byte| !is_token(*byte)) else {
        return match end {
            None if line.len() <= LONGEST_LINE => First::More,
            _ => First::Opaque,
        };
    };
    if method == 0 || !is_blank(line[method]) {
        return First::Opaque;
    }
    let (method, rest) = line.split_at(method);
    match end {
        // Whoever reads requests has a limit of its own for what is still to come.
        None if line.len() > LONGEST_LINE => First::Http,
        None => First::More,
        // What is not HTTP, such as `QUIT` or `EHLO x`, is told apart by the end of the line.
        Some(_) if names_version(rest) || is_oldest(method, rest) => First::Http,
        Some(_) => First::Opaque,
    }
}

/// Where the first line ends, at whichever end of a line. A return at the very end may have its feed still to come.
fn line_end(bytes: &[u8]) -> Option<usize> {
    let at = bytes.iter().position(|byte| matches!(byte, b'\r' | b'\n'))?;
    (bytes[at] == b'\n' || at + 1 < bytes.len()).then_some(at)
}

/// ` HTTP/1`, in any case.
fn names_version(rest: &[u8]) -> bool {
    rest.windows(7).any(|window| {
        is_blank(window[0]) && window[1..6].eq_ignore_ascii_case(b"http/") && window[6].is_ascii_digit()
    })
}

/// The oldest form of a request, without a version: `GET /`.
fn is_oldest(method: &[u8], rest: &[u8]) -> bool {
    let target = rest.trim_ascii();
    method.eq_ignore_ascii_case(b"get")
        && (target.starts_with(b"/") || target.windows(3).any(|window| window == b"://"))
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0x0b | 0x0c)
}

/// What a method consists of.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Looks on where a connection had to go on before it was clear what it is, because who speaks first waits for an answer
/// or does not speak at all.
///
/// What must hold: nobody becomes something else than what was decided about by taking their time.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// What came so far; of a long first line only its end.
    seen: BytesMut,
    /// Whether the beginning is no longer in `seen`.
    long: bool,
}

impl Gate {
    pub(super) fn new(seen: &[u8]) -> Self {
        Self {
            seen: seen.into(),
            long: false,
        }
    }

    /// Whether nothing has passed yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.seen.is_empty() && !self.long
    }

    /// What it is with these bytes too, which were not passed on yet; `More` where that is not clear, `Opaque` where there
    /// is nothing more to look for.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> First {
        self.seen.extend_from_slice(bytes);
        if !self.long && self.seen.len() <= LONGEST_LINE {
            return classify(&self.seen);
        }
        self.long = true;
        let end = line_end(&self.seen);
        if names_version(&self.seen[..end.unwrap_or(self.seen.len())]) {
            return First::Http;
        }
        if end.is_some() {
            return First::Opaque;
        }
        // As much as a version may have begun with.
        let _ = self.seen.split_to(self.seen.len() - 7);
        First::More
    }

    /// The same at the end of what the guest says, which some take for the end of a line.
    pub(super) fn finish(&mut self) -> First {
        self.feed(b"\n")
    }
}

/// The host that a request names, for a connection of which nothing else is known. `Err` until its head is complete.
pub(super) fn host_of(bytes: &[u8]) -> Result<Option<Name>, Incomplete> {
    if bytes.starts_with(H2_PREFACE) {
        return Ok(None);
    }
    let end = bytes
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
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
pub(super) struct Incomplete;

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
            "\r\nSSH-2.0-OpenSSH\r\n",
            "GET key\r\n",
            "SET /key value\r\n",
            "NICK http\r\n",
            "*1\r\n$4\r\nPING\r\n",
            "@RSYNCD: 31.0\n",
            "AMQP\x00\x00\x09\x01",
            "\x00\x00\x00\x08\x00\x03\x00\x00",
            "{\"json\": 1",
        ] {
            assert_eq!(classify(other.as_bytes()), First::Opaque, "{other:?}");
        }
        // Nobody knows yet.
        for more in [
            "git-upload-pack /x\0host=a.example\0",
            "ruok",
            "\r\n\n ",
            "HELLO world",
        ] {
            assert_eq!(classify(more.as_bytes()), First::More, "{more:?}");
        }
    }

    /// Whatever some server may take for a request is one here too.
    #[test]
    fn a_request_in_disguise_is_a_request() {
        let long = format!("{} / HTTP/1.1\r\n", "X".repeat(300));
        for request in [
            "gET / HTTP/1.1\r\n",
            "get / http/1.1\r\n",
            "GeT / HtTp/1.0\n",
            "\r\n\r\nGET / HTTP/1.1\r\n",
            "\n \tGET / HTTP/1.1\r\n",
            "GET\t/\tHTTP/1.1\r\n",
            "GET  /   HTTP/1.1  \r\n",
            "GET / HTTP/1.1\rHost: a\r\n",
            "GET /\x00 HTTP/1.1\r\n",
            "GET / HTTP/3.0\r\n",
            "GET / HTTP/0.9\r\n",
            "GET /\r\n",
            "get /index.html\n",
            "GET http://other.example/\r\n",
            "FROBNICATE-the_thing! / HTTP/1.1\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            long.as_str(),
        ] {
            assert_eq!(classify(request.as_bytes()), First::Http, "{request:?}");
            // Nor does it help to take one's time.
            let mut gate = Gate::default();
            let found = request
                .bytes()
                .map(|byte| gate.feed(&[byte]))
                .find(|first| *first != First::More);
            assert_eq!(found, Some(First::Http), "{request:?}");
        }
        let mut gate = Gate::default();
        assert_eq!(gate.feed(b"gET / HTTP/1.0"), First::More);
        assert_eq!(gate.finish(), First::Http, "the end of the stream ends the line");
        // A line of any length, in pieces of any size.
        for size in [1, 3, 1000, 5000, 70_000] {
            let line = format!("gET /{} HTTP/1.1\r\n", "a".repeat(60_000));
            let mut gate = Gate::default();
            let found = line
                .as_bytes()
                .chunks(size)
                .map(|piece| gate.feed(piece))
                .find(|first| *first != First::More);
            assert_eq!(found, Some(First::Http), "{size}");
            assert!(gate.seen.len() <= LONGEST_LINE + size + 8);
            let mut gate = Gate::default();
            let other = format!("word {}\n", "a".repeat(60_000));
            let found = other
                .as_bytes()
                .chunks(size)
                .map(|piece| gate.feed(piece))
                .find(|first| *first != First::More);
            assert_eq!(found, Some(First::Opaque), "{size}");
        }
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

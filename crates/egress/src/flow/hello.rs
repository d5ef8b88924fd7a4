//! Reads a TLS ClientHello as far as needed to know whom it is for.
//!
//! ```text
//!   record: 22, 3, x, length16 ── its bytes, of all records together:
//!       1, length24 ── version16, random[32], session<8>, suites<16>, compression<8>, extensions<16>
//!                                                                        └── type16, data<16>: 0 = server_name, 0xfe0d = ECH
//! ```
//! What must hold: it never panics and never reads past what it was given; a hello that two parsers might read in two
//! ways (a second name, a second list of names, lengths that do not fit) has no name for us, but is refused.

use atoll_policy::Name;

/// What a ClientHello says about where it wants to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// `None` where it names nobody.
    pub name: Option<Name>,
    /// Whether it offers, or pretends to offer, an encrypted one in which another name may be.
    pub encrypted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    /// Not an error, but not enough either.
    #[error("it is not complete")]
    Incomplete,
    #[error("its records or lengths do not fit together")]
    Malformed,
    #[error("it names its host in a way that could be understood differently")]
    Name,
}

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_HELLO: u16 = 0xfe0d;
const HOST_NAME: u8 = 0;
const RECORD_HEAD: usize = 5;
/// The longest plaintext record that TLS allows.
const LONGEST_RECORD: usize = 1 << 14;

/// Whether this can be the beginning of a TLS record with a handshake; also true of the first few bytes of one.
pub(crate) fn is_tls(bytes: &[u8]) -> bool {
    bytes.first() == Some(&HANDSHAKE) && bytes.get(1).is_none_or(|major| *major == 3)
}

/// Reads a hello from the beginning of `bytes`, which is what has come so far.
pub(crate) fn read(bytes: &[u8]) -> Result<Hello, HelloError> {
    let handshake = join_records(bytes)?;
    let mut rest = Reader(&handshake);
    // Its length is known to be there, so from here on too few bytes mean that lengths contradict each other.
    rest.take(4)?;
    parse(rest).map_err(|error| match error {
        HelloError::Incomplete => HelloError::Malformed,
        other => other,
    })
}

/// The handshake message with its head, out of as many records as it was cut into.
fn join_records(mut bytes: &[u8]) -> Result<Vec<u8>, HelloError> {
    let mut joined: Vec<u8> = Vec::new();
    loop {
        if let [kind, high, middle, low, ..] = joined[..] {
            if kind != CLIENT_HELLO {
                return Err(HelloError::Malformed);
            }
            let len = 4 + usize::from(high) * 65_536 + usize::from(middle) * 256 + usize::from(low);
            if joined.len() >= len {
                joined.truncate(len);
                return Ok(joined);
            }
        }
        let Some((head, rest)) = bytes.split_at_checked(RECORD_HEAD) else {
            return Err(if bytes.is_empty() || is_tls(bytes) {
                HelloError::Incomplete
            } else {
                HelloError::Malformed
            });
        };
        let len = usize::from(u16::from_be_bytes([head[3], head[4]]));
        // An empty record says nothing and could be sent for ever.
        if !is_tls(head) || len == 0 || len > LONGEST_RECORD {
            return Err(HelloError::Malformed);
        }
        let here = rest.len().min(len);
        joined.extend_from_slice(&rest[..here]);
        bytes = &rest[here..];
    }
}

fn parse(mut hello: Reader<'_>) -> Result<Hello, HelloError> {
    hello.take(2 + 32)?;
    hello.vector8()?;
    hello.vector16()?;
    hello.vector8()?;
    let mut found = Hello {
        name: None,
        encrypted: false,
    };
    // Hellos without extensions are allowed, and name nobody.
    if hello.is_empty() {
        return Ok(found);
    }
    let mut extensions = Reader(hello.vector16()?);
    if !hello.is_empty() {
        return Err(HelloError::Malformed);
    }
    let mut named = false;
    while !extensions.is_empty() {
        let kind = extensions.number16()?;
        let data = extensions.vector16()?;
        match kind {
            SERVER_NAME if named => return Err(HelloError::Name),
            SERVER_NAME => {
                named = true;
                found.name = Some(parse_names(data)?);
            }
            ENCRYPTED_HELLO => found.encrypted = true,
            _ => {}
        }
    }
    Ok(found)
}

/// The one name in the list; the list may hold several, of several types, but nobody sends that.
fn parse_names(data: &[u8]) -> Result<Name, HelloError> {
    let mut outer = Reader(data);
    let mut list = Reader(outer.vector16()?);
    let kind = list.take(1)?;
    let name = list.vector16()?;
    if kind != [HOST_NAME] || !list.is_empty() || !outer.is_empty() {
        return Err(HelloError::Name);
    }
    Name::parse_bytes(name).map_err(|_| HelloError::Name)
}

/// Takes bytes from the front, or says that there are not enough.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], HelloError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(HelloError::Incomplete)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number16(&mut self) -> Result<u16, HelloError> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn vector8(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.take(1)?[0];
        self.take(len.into())
    }

    fn vector16(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.number16()?;
        self.take(len.into())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vector16(data: &[u8]) -> Vec<u8> {
        let mut out = u16::try_from(data.len()).unwrap().to_be_bytes().to_vec();
        out.extend_from_slice(data);
        out
    }

    fn extension(kind: u16, data: &[u8]) -> Vec<u8> {
        let mut out = kind.to_be_bytes().to_vec();
        out.extend(vector16(data));
        out
    }

    fn names(names: &[&[u8]]) -> Vec<u8> {
        let mut list = Vec::new();
        for name in names {
            list.push(HOST_NAME);
            list.extend(vector16(name));
        }
        extension(SERVER_NAME, &vector16(&list))
    }

    /// A handshake message with these extensions.
    fn message(extensions: &[u8]) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend(vector16(extensions));
        let mut out = vec![CLIENT_HELLO, 0];
        out.extend(vector16(&body));
        out
    }

    fn records(message: &[u8], len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for part in message.chunks(len) {
            out.extend([HANDSHAKE, 3, 1]);
            out.extend(vector16(part));
        }
        out
    }

    /// A hello for `name`, in one record.
    pub(crate) fn hello_for(name: &str) -> Vec<u8> {
        records(&message(&names(&[name.as_bytes()])), LONGEST_RECORD)
    }

    /// One that names nobody.
    pub(crate) fn nameless_hello() -> Vec<u8> {
        records(&message(&extension(43, &[2, 3, 4])), LONGEST_RECORD)
    }

    /// One that names two.
    pub(crate) fn two_faced_hello(one: &str, other: &str) -> Vec<u8> {
        let both = [names(&[one.as_bytes()]), names(&[other.as_bytes()])].concat();
        records(&message(&both), LONGEST_RECORD)
    }

    /// A hello for `name` that holds another, which nobody can read.
    pub(crate) fn encrypted_hello_for(name: &str) -> Vec<u8> {
        let both = [names(&[name.as_bytes()]), extension(ENCRYPTED_HELLO, &[0; 100])].concat();
        records(&message(&both), LONGEST_RECORD)
    }

    fn name(text: &str) -> Option<Name> {
        Some(Name::parse(text).unwrap())
    }

    #[test]
    fn the_name_is_found_however_the_hello_is_cut() {
        let message = message(
            &[
                extension(0xaaaa, b""),
                names(&[b"PyPI.org"]),
                extension(43, &[2, 3, 4]),
            ]
            .concat(),
        );
        for len in [1, 2, 3, 7, 50, LONGEST_RECORD] {
            let bytes = records(&message, len);
            let hello = read(&bytes).unwrap();
            assert_eq!(hello.name, name("pypi.org"));
            assert!(!hello.encrypted);
            for end in 0..bytes.len() {
                assert_eq!(read(&bytes[..end]), Err(HelloError::Incomplete), "{end} of {len}");
            }
            // What follows, such as early data, does not matter.
            assert!(read(&[&bytes[..], b"\x17\x03\x03garbage"].concat()).is_ok());
        }
    }

    #[test]
    fn it_may_name_nobody_and_may_have_an_encrypted_one() {
        let nobody = Hello {
            name: None,
            encrypted: false,
        };
        assert_eq!(read(&records(&message(b""), 100)).unwrap(), nobody);
        let hello = read(&records(&message(&extension(ENCRYPTED_HELLO, &[0; 200])), 100)).unwrap();
        assert_eq!(
            hello,
            Hello {
                encrypted: true,
                ..nobody
            }
        );
    }

    #[test]
    fn two_readings_are_one_too_many() {
        let twice = [names(&[b"a.example"]), names(&[b"b.example"])].concat();
        let two = names(&[b"a.example", b"b.example"]);
        let other_type = extension(
            SERVER_NAME,
            &vector16(&[&[9], &vector16(b"a.example")[..]].concat()),
        );
        let trailing = extension(
            SERVER_NAME,
            &[names(&[b"a.example"])[4..].to_vec(), vec![0]].concat(),
        );
        let address = names(&[b"192.0.2.1"]);
        let nul = names(&[b"a.example\0.b.example"]);
        let dot = names(&[b"a.example."]);
        let empty = extension(SERVER_NAME, &vector16(b""));
        for bad in [&twice, &two, &other_type, &trailing, &address, &nul, &dot] {
            assert_eq!(
                read(&records(&message(bad), 100)),
                Err(HelloError::Name),
                "{bad:?}"
            );
        }
        assert_eq!(read(&records(&message(&empty), 100)), Err(HelloError::Malformed));
    }

    #[test]
    fn nonsense_is_noticed_at_once_rather_than_waited_for() {
        let good = hello_for("a.example");
        for (at, value) in [(0, 23), (1, 2), (5, 2)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(read(&bad), Err(HelloError::Malformed), "{at}");
        }
        // An empty record, one that is too long, and one of another kind in between.
        assert_eq!(read(&[22, 3, 1, 0, 0]), Err(HelloError::Malformed));
        assert_eq!(read(&[22, 3, 1, 0x40, 1]), Err(HelloError::Malformed));
        let cut = records(&good[5..], 10);
        assert_eq!(
            read(&[&cut[..15], b"\x15\x03\x03\0\x02\x01\0"].concat()),
            Err(HelloError::Malformed)
        );
        // Lengths inside that lead outside.
        let mut long = good;
        long[5 + 4 + 34] = 255;
        assert_eq!(read(&long), Err(HelloError::Malformed));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = read(&bytes);
            let _ = read(&records(&bytes, 1 + bytes.len() % 300));
            let _ = read(&records(&message(&bytes), 300));
        }

        #[test]
        fn a_changed_byte_never_panics_and_never_loses_bounds(at in 0..80_usize, value: u8) {
            let mut bytes = hello_for("registry.example.org");
            let at = at % bytes.len();
            bytes[at] = value;
            let _ = read(&bytes);
        }
    }
}

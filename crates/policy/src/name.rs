//! A DNS name that every part of the egress path reads the same way.
//!
//! Two programs that disagree about what a name says are how allow-lists are bypassed: a NUL that ends it for one of
//! them, a dot at the end, capital letters, `0x7f.1` which is a name to a parser and an address to `inet_aton`. So a
//! name is parsed once, into this type, and only this type is compared.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// As RFC 1035 has it, without the dot at the end.
const MAX_BYTES: usize = 253;
const MAX_LABEL_BYTES: usize = 63;

/// Lower case; labels of letters, digits, hyphens and underscores; no dot at the end; nothing that could be an address.
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("it is empty")]
    Empty,
    #[error("it is longer than {MAX_BYTES} bytes")]
    TooLong,
    #[error("it has an empty label: a dot at the beginning, at the end or beside another")]
    EmptyLabel,
    #[error("one of its labels is longer than {MAX_LABEL_BYTES} bytes")]
    LabelTooLong,
    #[error(
        "it contains the byte 0x{0:02x}; only letters, digits, hyphens, underscores and dots may be in a name"
    )]
    Byte(u8),
    #[error("one of its labels begins or ends with a hyphen")]
    Hyphen,
    #[error("its last label is a number, so that some programs would read it as an address")]
    Number,
    #[error("it is not a valid internationalized name")]
    Idna,
}

impl Name {
    /// Reads what a guest sent (SNI, `Host`): ASCII only, no conversion but to lower case.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        Self::parse_bytes(text.as_bytes())
    }

    pub fn parse_bytes(bytes: &[u8]) -> Result<Self, NameError> {
        // The length first: nothing is done with a name of megabytes.
        match bytes.len() {
            0 => return Err(NameError::Empty),
            1..=MAX_BYTES => {}
            _ => return Err(NameError::TooLong),
        }
        Self::from_labels(bytes.split(|byte| *byte == b'.'))
    }

    /// Reads the labels of a DNS message, in which a label may contain anything, also a dot.
    pub fn from_labels<'a>(labels: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, NameError> {
        let mut text = String::with_capacity(64);
        let mut last_is_number = false;
        for label in labels {
            if !text.is_empty() {
                text.push('.');
            }
            if text.len() + label.len() > MAX_BYTES {
                return Err(NameError::TooLong);
            }
            push_label(&mut text, label)?;
            last_is_number = is_number(label);
        }
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if last_is_number {
            return Err(NameError::Number);
        }
        Ok(Self(text.into()))
    }

    /// Reads what a person wrote: also in other scripts, converted to the form that is sent in DNS.
    pub(crate) fn parse_written(text: &str) -> Result<Self, NameError> {
        if text.is_ascii() {
            return Self::parse(text);
        }
        // A character may take many bytes; this is only to bound the work.
        if text.len() > MAX_BYTES * 4 {
            return Err(NameError::TooLong);
        }
        Self::parse(&idna::domain_to_ascii_strict(text).map_err(|_| NameError::Idna)?)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn labels(&self) -> impl Iterator<Item = &str> {
        self.0.split('.')
    }

    /// The names that it is below, nearest first: `c.com` and `com` of `b.c.com`.
    pub(crate) fn parents(&self) -> impl Iterator<Item = &str> {
        std::iter::successors(self.0.split_once('.').map(|(_, rest)| rest), |parent| {
            parent.split_once('.').map(|(_, rest)| rest)
        })
    }
}

fn push_label(text: &mut String, label: &[u8]) -> Result<(), NameError> {
    match label.len() {
        0 => return Err(NameError::EmptyLabel),
        1..=MAX_LABEL_BYTES => {}
        _ => return Err(NameError::LabelTooLong),
    }
    for byte in label {
        if !(byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
            return Err(NameError::Byte(*byte));
        }
        text.push(char::from(byte.to_ascii_lowercase()));
    }
    if label.starts_with(b"-") || label.ends_with(b"-") {
        return Err(NameError::Hyphen);
    }
    Ok(())
}

/// Whether `inet_aton` or a browser takes a host that ends in this label for an address: `1`, `0177`, `0x7f`, `0x`.
fn is_number(label: &[u8]) -> bool {
    match label {
        [b'0', b'x' | b'X', hex @ ..] => hex.iter().all(u8::is_ascii_hexdigit),
        digits => digits.iter().all(u8::is_ascii_digit),
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::parse(text)
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_folded() {
        for (text, name) in [
            ("pypi.org", "pypi.org"),
            ("PyPI.ORG", "pypi.org"),
            ("_acme-challenge.example.com", "_acme-challenge.example.com"),
            (
                "r3---sn-4g5e6nz7.googlevideo.com",
                "r3---sn-4g5e6nz7.googlevideo.com",
            ),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("127.0.0.1.nip.io", "127.0.0.1.nip.io"),
            ("3com", "3com"),
            ("a.0xg", "a.0xg"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(Name::parse(text).map(|n| n.to_string()).as_deref(), Ok(name));
        }
    }

    #[test]
    fn what_could_be_an_address_or_read_in_two_ways_is_not_a_name() {
        for (text, why) in [
            ("", NameError::Empty),
            (".", NameError::EmptyLabel),
            ("pypi.org.", NameError::EmptyLabel),
            (".pypi.org", NameError::EmptyLabel),
            ("pypi..org", NameError::EmptyLabel),
            ("127.0.0.1", NameError::Number),
            ("127.1", NameError::Number),
            ("2130706433", NameError::Number),
            ("0x7f.1", NameError::Number),
            ("0x7f000001", NameError::Number),
            ("0X7F000001", NameError::Number),
            ("1.0x", NameError::Number),
            ("0177.0.0.01", NameError::Number),
            ("evil.com.1", NameError::Number),
            ("[::ffff:127.0.0.1]", NameError::Byte(b'[')),
            ("::1", NameError::Byte(b':')),
            ("evil.com\0.pypi.org", NameError::Byte(0)),
            ("evil.com%00.pypi.org", NameError::Byte(b'%')),
            ("evil.com%2f.pypi.org", NameError::Byte(b'%')),
            ("evil.com/.pypi.org", NameError::Byte(b'/')),
            ("user@pypi.org", NameError::Byte(b'@')),
            ("pypi.org:443", NameError::Byte(b':')),
            ("pypi.org ", NameError::Byte(b' ')),
            ("pypi.org\r\nx: y", NameError::Byte(b'\r')),
            ("*.pypi.org", NameError::Byte(b'*')),
            ("bücher.example", NameError::Byte(0xc3)),
            ("pypi。org", NameError::Byte(0xe3)),
            ("-a.example", NameError::Hyphen),
            ("a-.example", NameError::Hyphen),
        ] {
            assert_eq!(Name::parse(text), Err(why), "{text:?}");
        }
        let label = "a".repeat(64);
        assert_eq!(Name::parse(&label), Err(NameError::LabelTooLong));
        assert!(Name::parse(&label[1..]).is_ok());
        let long = format!("{}a", "a.".repeat(126));
        assert_eq!(long.len(), 253);
        assert!(Name::parse(&long).is_ok());
        assert_eq!(Name::parse(&format!("a{long}")), Err(NameError::TooLong));
        assert_eq!(Name::parse(&"a".repeat(1 << 20)), Err(NameError::TooLong));
    }

    #[test]
    fn a_label_on_the_wire_cannot_smuggle_a_dot() {
        assert_eq!(
            Name::from_labels([&b"evil.com"[..], b"pypi", b"org"]),
            Err(NameError::Byte(b'.'))
        );
        assert_eq!(Name::from_labels([&b"PyPI"[..], b"org"]), Name::parse("pypi.org"));
        assert_eq!(Name::from_labels([]), Err(NameError::Empty));
        assert_eq!(
            Name::from_labels([[b'a'; 63].as_slice(); 4]),
            Err(NameError::TooLong)
        );
    }

    #[test]
    fn people_may_write_other_scripts_but_not_addresses_in_them() {
        assert_eq!(
            Name::parse_written("Bücher.example").unwrap().as_str(),
            "xn--bcher-kva.example"
        );
        assert_eq!(Name::parse_written("１２７.0.0.1"), Err(NameError::Number));
        assert!(Name::parse_written("a\u{202e}b.example").is_err());
        assert!(Name::parse_written("％00.example").is_err());
    }

    #[test]
    fn parents_stop_at_label_boundaries() {
        let name = Name::parse("a.b.c.com").unwrap();
        assert_eq!(name.parents().collect::<Vec<_>>(), ["b.c.com", "c.com", "com"]);
        assert_eq!(Name::parse("com").unwrap().parents().count(), 0);
    }
}

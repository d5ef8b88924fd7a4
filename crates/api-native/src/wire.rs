//! Spellings that several areas share: times, modes, and bytes that are usually but not always text.

use atoll_types::{Code, Timestamp};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::Failure;

/// RFC 3339 in UTC with milliseconds.
pub(crate) fn time(at: Timestamp) -> String {
    let at = jiff::Timestamp::from_millisecond(at.0).unwrap_or(if at.0 < 0 {
        jiff::Timestamp::MIN
    } else {
        jiff::Timestamp::MAX
    });
    format!("{at:.3}")
}

/// A time that a request may name.
pub(crate) fn maybe_time(field: &'static str, text: Option<&str>) -> Result<Option<Timestamp>, Failure> {
    let Some(text) = text else { return Ok(None) };
    match text.parse::<jiff::Timestamp>() {
        Ok(at) => Ok(Some(Timestamp(at.as_millisecond()))),
        Err(_) => Err(Failure::new(
            Code::InvalidTime,
            format!("`{field}` is not a time; write RFC 3339, such as 2030-01-31T12:00:00Z"),
        )),
    }
}

/// Bytes of a stream: one of the two, `base64` only where the bytes are not UTF-8.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Chunk {
    Text(String),
    Base64(String),
}

impl Chunk {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self::Text(text),
            Err(error) => Self::Base64(STANDARD.encode(error.as_bytes())),
        }
    }
}

/// A readable spelling, plus the exact bytes in base64 where the readable one lost something.
pub(crate) fn readable(bytes: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.into(), None),
        Err(_) => (
            String::from_utf8_lossy(bytes).into_owned(),
            Some(STANDARD.encode(bytes)),
        ),
    }
}

/// Reads a name given as text or, exactly, as base64.
pub(crate) fn exactly_one(
    field: &'static str,
    text: Option<String>,
    encoded: Option<String>,
) -> Result<Vec<u8>, Failure> {
    match (text, encoded) {
        (Some(text), None) => Ok(text.into_bytes()),
        (None, Some(encoded)) => from_base64(field, &encoded),
        (None, None) => Err(Failure::new(
            Code::MissingField,
            format!("`{field}` is missing; give it, or `{field}_base64` if it is not UTF-8"),
        )),
        (Some(_), Some(_)) => Err(Failure::new(
            Code::ContradictingFields,
            format!("`{field}` and `{field}_base64` exclude each other"),
        )),
    }
}

pub(crate) fn from_base64(field: &'static str, encoded: &str) -> Result<Vec<u8>, Failure> {
    STANDARD.decode(encoded).map_err(|error| {
        Failure::new(
            Code::InvalidBase64,
            format!("`{field}_base64` is not base64: {error}"),
        )
    })
}

/// Permission bits as people write them: octal.
pub(crate) fn mode(text: &str) -> Result<u32, Failure> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let octal = !digits.is_empty() && digits.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    match u32::from_str_radix(digits, 8) {
        Ok(mode) if octal && mode <= 0o7777 => Ok(mode),
        _ => Err(Failure::new(
            Code::InvalidMode,
            format!("`{text}` is not a file mode; write octal digits up to 7777, such as 0644"),
        )),
    }
}

pub(crate) fn show_mode(mode: u32) -> String {
    format!("{:04o}", mode & 0o7777)
}

/// `name=value`, as labels and build arguments are written in a query.
pub(crate) fn pair(field: &'static str, text: &str) -> Result<(String, String), Failure> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.into(), value.into())),
        _ => Err(Failure::new(
            Code::InvalidQuery,
            format!("`{field}={text}`: expected `{field}=NAME=VALUE`"),
        )),
    }
}

/// A number in a query that must lie in a range.
pub(crate) fn within(
    field: &'static str,
    value: u64,
    range: std::ops::RangeInclusive<u64>,
) -> Result<u64, Failure> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Failure::new(
        Code::OutOfRange,
        format!(
            "`{field}` is {value}; it must be from {} to {}",
            range.start(),
            range.end()
        ),
    ))
}

/// The longest duration that the wire carries, in milliseconds: what every JSON reader keeps exactly (2^53 - 1).
pub(crate) const MAX_MILLIS: u64 = 9_007_199_254_740_991;

/// A duration in milliseconds.
pub(crate) fn duration(field: &'static str, millis: u64) -> Result<u64, Failure> {
    within(field, millis, 1..=MAX_MILLIS)
}

/// A name that somebody gives to something.
pub(crate) fn name(field: &'static str, text: String) -> Result<String, Failure> {
    let length = text.chars().count();
    if (1..=255).contains(&length) {
        return Ok(text);
    }
    Err(Failure::new(
        Code::OutOfRange,
        format!("`{field}` has {length} characters; it must have 1 to 255"),
    ))
}

/// Cuts a byte stream into text without tearing characters apart: up to three bytes of an unfinished one wait for the
/// next chunk.
#[derive(Debug, Default)]
pub(crate) struct TextCutter {
    held: Vec<u8>,
}

impl TextCutter {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Option<Chunk> {
        let mut whole = std::mem::take(&mut self.held);
        whole.extend_from_slice(bytes);
        if let Err(error) = std::str::from_utf8(&whole)
            && error.error_len().is_none()
        {
            self.held = whole.split_off(error.valid_up_to());
        }
        (!whole.is_empty()).then(|| Chunk::new(whole))
    }

    pub(crate) fn finish(&mut self) -> Option<Chunk> {
        let held = std::mem::take(&mut self.held);
        (!held.is_empty()).then(|| Chunk::new(held))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_with_milliseconds() {
        assert_eq!(time(Timestamp(1_700_000_000_120)), "2023-11-14T22:13:20.120Z");
        assert_eq!(time(Timestamp(0)), "1970-01-01T00:00:00.000Z");
        assert!(time(Timestamp(i64::MAX)).starts_with("9999-"));
        let read = |text| maybe_time("at", Some(text)).ok().flatten();
        assert_eq!(
            read("2023-11-14T22:13:20.120Z"),
            Some(Timestamp(1_700_000_000_120))
        );
        assert_eq!(
            read("2023-11-14T23:13:20+01:00"),
            Some(Timestamp(1_700_000_000_000))
        );
        assert_eq!(maybe_time("at", None).ok(), Some(None));
        for bad in ["", "tomorrow", "2023-11-14", "1700000000"] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("0644").ok(), Some(0o644));
        assert_eq!(mode("0o755").ok(), Some(0o755));
        assert_eq!(mode("1777").ok(), Some(0o1777));
        for bad in ["", "8", "+644", "99999", "rwx", "0o"] {
            assert!(mode(bad).is_err(), "{bad}");
        }
        assert_eq!(show_mode(0o100_644), "0644");
    }

    #[test]
    fn durations_and_names_are_bounded() {
        assert_eq!(duration("timeout_ms", 1).ok(), Some(1));
        assert!(duration("timeout_ms", 0).is_err());
        assert!(duration("timeout_ms", u64::MAX).is_err());
        assert!(name("name", "é".repeat(255)).is_ok());
        assert!(name("name", String::new()).is_err());
        assert!(name("name", "x".repeat(256)).is_err());
    }

    #[test]
    fn names_come_as_text_or_exactly() {
        assert_eq!(
            exactly_one("path", Some("/a".into()), None).ok(),
            Some(b"/a".to_vec())
        );
        assert_eq!(
            exactly_one("path", None, Some("/w==".into())).ok(),
            Some(vec![0xff])
        );
        assert!(exactly_one("path", None, None).is_err());
        assert!(exactly_one("path", Some("/a".into()), Some("/w==".into())).is_err());
        assert!(exactly_one("path", None, Some("%".into())).is_err());
        assert_eq!(readable(b"a\xff"), ("a\u{fffd}".into(), Some("Yf8=".into())));
        assert_eq!(readable("ä".as_bytes()), ("ä".into(), None));
    }

    #[test]
    fn characters_are_not_torn_apart() {
        let mut cutter = TextCutter::default();
        assert_eq!(cutter.push(b"a\xe2\x82"), Some(Chunk::Text("a".into())));
        assert!(!cutter.is_empty());
        assert_eq!(cutter.push(b"\xac!"), Some(Chunk::Text("€!".into())));
        assert_eq!(cutter.push(b"\xe2"), None);
        assert_eq!(cutter.finish(), Some(Chunk::Base64("4g==".into())));
        assert_eq!(cutter.push(b"\xff\xfe"), Some(Chunk::Base64("//4=".into())));
        assert!(cutter.is_empty());
    }
}

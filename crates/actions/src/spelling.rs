//! Spellings that requests and answers share: times, modes, durations, and bytes that are usually but not always text.

use std::collections::BTreeMap;

use atoll_sandboxes::OWN_LABELS;
use atoll_types::{Code, Fault, Timestamp};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Makes one of our types of JSON that was read before, naming the field that is wrong. `T` must refuse unknown fields.
pub fn parse_value<T: DeserializeOwned>(value: Value) -> Result<T, Fault> {
    serde_path_to_error::deserialize(value).map_err(|error| Fault::new(Code::InvalidBody, error.to_string()))
}

/// RFC 3339 in UTC with milliseconds.
pub fn time(at: Timestamp) -> String {
    let at = jiff::Timestamp::from_millisecond(at.0).unwrap_or(if at.0 < 0 {
        jiff::Timestamp::MIN
    } else {
        jiff::Timestamp::MAX
    });
    format!("{at:.3}")
}

/// A readable spelling, plus the exact bytes in base64 where the readable one lost something.
pub fn readable(bytes: &[u8]) -> (String, Option<String>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.into(), None),
        Err(_) => (
            String::from_utf8_lossy(bytes).into_owned(),
            Some(STANDARD.encode(bytes)),
        ),
    }
}

/// Reads a name given as text or, exactly, as base64.
pub fn exactly_one(
    field: &'static str,
    text: Option<String>,
    encoded: Option<String>,
) -> Result<Vec<u8>, Fault> {
    match (text, encoded) {
        (Some(text), None) => Ok(text.into_bytes()),
        (None, Some(encoded)) => from_base64(field, &encoded),
        (None, None) => Err(Fault::new(
            Code::MissingField,
            format!("`{field}` is missing; give it, or `{field}_base64` if it is not UTF-8"),
        )),
        (Some(_), Some(_)) => Err(Fault::new(
            Code::ContradictingFields,
            format!("`{field}` and `{field}_base64` exclude each other"),
        )),
    }
}

pub fn from_base64(field: &'static str, encoded: &str) -> Result<Vec<u8>, Fault> {
    STANDARD.decode(encoded).map_err(|error| {
        Fault::new(
            Code::InvalidBase64,
            format!("`{field}_base64` is not base64: {error}"),
        )
    })
}

/// Permission bits as people write them: octal.
pub fn mode(text: &str) -> Result<u32, Fault> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let octal = !digits.is_empty() && digits.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    match u32::from_str_radix(digits, 8) {
        Ok(mode) if octal && mode <= 0o7777 => Ok(mode),
        _ => Err(Fault::new(
            Code::InvalidMode,
            format!("`{text}` is not a file mode; write octal digits up to 7777, such as 0644"),
        )),
    }
}

pub fn show_mode(mode: u32) -> String {
    format!("{:04o}", mode & 0o7777)
}

/// A number in a query that must lie in a range.
pub fn within(field: &'static str, value: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64, Fault> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Fault::new(
        Code::OutOfRange,
        format!(
            "`{field}` is {value}; it must be from {} to {}",
            range.start(),
            range.end()
        ),
    ))
}

/// The longest duration that the wire carries, in milliseconds: what every JSON reader keeps exactly (2^53 - 1).
pub const MAX_MILLIS: u64 = 9_007_199_254_740_991;

/// A duration in milliseconds.
pub fn duration(field: &'static str, millis: u64) -> Result<u64, Fault> {
    within(field, millis, 1..=MAX_MILLIS)
}

/// A name that somebody gives to something.
pub fn name(field: &'static str, text: String) -> Result<String, Fault> {
    let length = text.chars().count();
    if (1..=255).contains(&length) {
        return Ok(text);
    }
    Err(Fault::new(
        Code::OutOfRange,
        format!("`{field}` has {length} characters; it must have 1 to 255"),
    ))
}

/// Labels as a caller may give them: none of the server's own.
pub fn labels(labels: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Fault> {
    match labels.keys().find(|name| name.starts_with(OWN_LABELS)) {
        None => Ok(labels),
        Some(name) => {
            let message = format!("the label `{name}` is the server's own");
            Err(Fault::new(Code::LabelInvalid, message)
                .hint(format!("use a name that does not begin with `{OWN_LABELS}`")))
        }
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
    }

    #[test]
    fn labels_of_the_servers_own_are_not_for_callers() {
        let given = |name: &str| labels(BTreeMap::from([(name.to_owned(), "x".to_owned())]));
        assert!(given("atollx").is_ok());
        let fault = given("atoll.e2b").unwrap_err();
        assert_eq!(fault.code, Code::LabelInvalid);
        assert!(fault.message.contains("atoll.e2b"), "{fault}");
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
}

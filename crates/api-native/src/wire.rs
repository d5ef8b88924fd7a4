//! Spellings that several areas share, with those that are not of this API alone.

use atoll_types::{Code, Cursor, Timestamp};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use utoipa::ToSchema;

pub(crate) use atoll_actions::spelling::{duration, exactly_one, mode, name, readable, time, within};

use crate::error::Failure;

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

/// Where a page of a list begins, and how many it holds.
pub(crate) fn page(cursor: Option<String>, limit: Option<u64>) -> Result<(Option<Cursor>, usize), Failure> {
    let limit = within("limit", limit.unwrap_or(50), 1..=100)?;
    let after = cursor.map(|text| text.parse()).transpose();
    let after = after.map_err(|why: String| Failure::new(Code::CursorInvalid, why))?;
    Ok((after, usize::try_from(limit).unwrap_or(usize::MAX)))
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
    fn times_are_read_as_they_are_written() {
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

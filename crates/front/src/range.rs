//! The `Range` header (RFC 9110, section 14), as far as downloads need it: one range of bytes.

use http::{HeaderMap, header};

/// What part of a file is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// From `first` to `last`, both included, or to the end.
    From { first: u64, last: Option<u64> },
    /// The last so many bytes.
    Suffix(u64),
}

/// Reads the header. `None` for what we do not serve (other units, several ranges, nonsense): a server answers those
/// with the whole file.
pub fn parse(header: &str) -> Option<Asked> {
    let (unit, range) = header.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") || range.contains(',') {
        return None;
    }
    match range.trim().split_once('-')? {
        ("", suffix) => Some(Asked::Suffix(number(suffix)?)),
        (first, "") => Some(Asked::From {
            first: number(first)?,
            last: None,
        }),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (first <= last).then_some(Asked::From {
                first,
                last: Some(last),
            })
        }
    }
}

fn number(text: &str) -> Option<u64> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// A part that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub first: u64,
    pub length: u64,
}

impl Asked {
    /// The part of a file of `size` bytes; `None` if it has no such part.
    pub fn of(self, size: u64) -> Option<Part> {
        let (first, end) = match self {
            Self::From { first, last } => (first, last.map_or(size, |last| last.saturating_add(1).min(size))),
            Self::Suffix(length) => (size.saturating_sub(length), size),
        };
        (first < end).then(|| Part {
            first,
            length: end - first,
        })
    }
}

impl Part {
    /// What `Content-Range` says of it.
    pub fn header(self, size: u64) -> String {
        format!("bytes {}-{}/{size}", self.first, self.first + self.length - 1)
    }
}

/// What a request asks for; `None`: the whole file.
pub fn asked(headers: &HeaderMap) -> Option<Asked> {
    // With `If-Range` it is for the file as it was, and nobody here knows versions of files.
    let value = headers
        .get(header::RANGE)
        .filter(|_| !headers.contains_key(header::IF_RANGE))?;
    parse(value.to_str().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_is_understood() {
        let part =
            |header: &str| parse(header).map(|asked| asked.of(10).map(|part| (part.first, part.length)));
        assert_eq!(part("bytes=0-3"), Some(Some((0, 4))));
        assert_eq!(part("bytes=4-"), Some(Some((4, 6))));
        assert_eq!(part("Bytes = 8-100"), Some(Some((8, 2))));
        assert_eq!(part("bytes=-4"), Some(Some((6, 4))));
        assert_eq!(part("bytes=-100"), Some(Some((0, 10))));
        assert_eq!(part("bytes=10-"), Some(None));
        assert_eq!(part("bytes=-0"), Some(None));
        assert_eq!(part(&format!("bytes=0-{}", u64::MAX)), Some(Some((0, 10))));
        let whole = parse("bytes=0-99").and_then(|asked| asked.of(10));
        assert_eq!(whole.unwrap().header(10), "bytes 0-9/10");
        for ignored in [
            "bytes=0-1,3-4",
            "lines=1-2",
            "bytes=5-2",
            "bytes=-",
            "bytes=a-b",
            "bytes",
            "bytes=+1-2",
        ] {
            assert_eq!(part(ignored), None, "{ignored}");
        }
        let mut headers = HeaderMap::from_iter([(header::RANGE, "bytes=2-4".parse().unwrap())]);
        assert!(asked(&headers).is_some());
        headers.insert(header::IF_RANGE, "\"v1\"".parse().unwrap());
        assert_eq!(asked(&headers), None);
    }
}

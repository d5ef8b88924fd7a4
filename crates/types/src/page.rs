//! Lists that are longer than one answer.
//!
//! Rows are listed newest first by `(created_at, id)`. A cursor names the last row that was seen, not a position, so that
//! rows which are inserted or removed between two pages neither repeat nor hide others.

use std::fmt;
use std::str::FromStr;

use crate::Timestamp;

/// The most rows in one page.
pub const MAX_PAGE: usize = 100;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Where the next page begins; `None` on the last one.
    pub next: Option<Cursor>,
}

/// A place in a list. Its text form is opaque to callers and safe in a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor {
    pub created_at: Timestamp,
    pub id: String,
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.created_at.0, self.id)
    }
}

impl FromStr for Cursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || "not a cursor of this server; leave it out to begin at the first page".to_owned();
        let (millis, id) = text.split_once('.').ok_or_else(bad)?;
        if id.is_empty()
            || id.len() > 64
            || !id
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        {
            return Err(bad());
        }
        Ok(Self {
            created_at: Timestamp(millis.parse().map_err(|_| bad())?),
            id: id.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_its_text_form() {
        let cursor = Cursor {
            created_at: Timestamp(-5),
            id: "sbx_abc".into(),
        };
        assert_eq!(cursor.to_string().parse().as_ref(), Ok(&cursor));
        for text in ["", ".", "1.", "x.sbx_a", "1.sbx_'", "99999999999999999999.sbx_a"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
    }
}

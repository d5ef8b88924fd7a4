//! Units: byte sizes as people write them, and points in time.

use serde::{Deserialize, Serialize};

pub const KIB: u64 = 1024;
pub const MIB: u64 = 1024 * KIB;
pub const GIB: u64 = 1024 * MIB;

/// A point in time: milliseconds since the Unix epoch. Whoever decides is handed one; nobody below the application
/// layer reads a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    #[must_use]
    pub fn plus_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add(i64::try_from(millis).unwrap_or(i64::MAX)))
    }

    /// Milliseconds from `earlier` to `self`; zero when the clock went backwards.
    pub fn millis_since(self, earlier: Self) -> u64 {
        u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0)
    }
}

/// Reads sizes such as `512M`, `1.5GiB` or `1048576`. All units are powers of 1024, as memory limits are.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let scale = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        "t" | "tb" | "tib" => 1024 * GIB,
        other => {
            return Err(format!(
                "unknown unit `{other}` in size `{text}`; use K, M, G or T"
            ));
        }
    };
    let bad = || format!("`{text}` is not a size; write for example 512M or 2G");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(bad);
    }
    let value: f64 = number.parse().map_err(|_| bad())?;
    let bytes = value * scale as f64;
    if !(0.0..9.0e18).contains(&bytes) {
        return Err(bad());
    }
    Ok(bytes as u64)
}

/// Writes a size the way [`parse_bytes`] reads it.
pub fn format_bytes(bytes: u64) -> String {
    for (unit, scale) in [("GiB", GIB), ("MiB", MIB), ("KiB", KIB)] {
        if bytes >= scale {
            let value = bytes as f64 / scale as f64;
            return if bytes.is_multiple_of(scale) {
                format!("{} {unit}", bytes / scale)
            } else {
                format!("{value:.1} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("512M", 512 * MIB),
            ("1.5GiB", GIB + GIB / 2),
            ("2 kb", 2048),
            ("7b", 7),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1.2.3", "12X", "99999999999T"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_readably() {
        assert_eq!(format_bytes(512 * MIB), "512 MiB");
        assert_eq!(format_bytes(GIB + GIB / 2), "1.5 GiB");
        assert_eq!(format_bytes(7), "7 B");
    }
}

//! Time as a number, and as the messages spell it.

use prost_wkt_types::{Duration, Timestamp};

/// Nanoseconds: since 1970 where a point in time is meant, otherwise a length of time. Zero means "not set" for both, as on
/// the wire.
pub type Nanos = i64;

const SECOND: i64 = 1_000_000_000;

pub fn stamp(at: Nanos) -> Timestamp {
    Timestamp {
        seconds: at.div_euclid(SECOND),
        nanos: i32::try_from(at.rem_euclid(SECOND)).unwrap_or(0),
    }
}

/// `None` for "not set".
pub(crate) fn maybe_stamp(at: Nanos) -> Option<Timestamp> {
    (at != 0).then(|| stamp(at))
}

pub fn unstamp(at: Option<&Timestamp>) -> Nanos {
    at.map_or(0, |at| {
        at.seconds
            .saturating_mul(SECOND)
            .saturating_add(i64::from(at.nanos))
    })
}

pub fn duration(length: Nanos) -> Duration {
    Duration {
        seconds: length / SECOND,
        nanos: i32::try_from(length % SECOND).unwrap_or(0),
    }
}

pub fn nanos(length: Option<&Duration>) -> Nanos {
    length.map_or(0, |length| {
        length
            .seconds
            .saturating_mul(SECOND)
            .saturating_add(i64::from(length.nanos))
    })
}

pub(crate) const fn seconds(count: i64) -> Nanos {
    count * SECOND
}

/// The earlier of two points in time, where zero means never.
pub(crate) fn earlier(one: Nanos, other: Nanos) -> Nanos {
    match (one, other) {
        (0, at) | (at, 0) => at,
        (one, other) => one.min(other),
    }
}

/// `from + length`, or never if no length is set.
pub(crate) fn after(from: Nanos, length: Nanos) -> Nanos {
    if length <= 0 {
        0
    } else {
        from.saturating_add(length)
    }
}

pub(crate) fn is_due(at: Nanos, now: Nanos) -> bool {
    at != 0 && at <= now
}

/// RFC 3339, as nanoseconds since 1970.
pub fn parse_time(text: &str) -> Option<Nanos> {
    let at: jiff::Timestamp = text.parse().ok()?;
    i64::try_from(at.as_nanosecond()).ok()
}

/// "90s", "1h30m", "500ms".
pub fn parse_length(text: &str) -> Option<Nanos> {
    crate::schedule::length_of(text).ok()
}

/// RFC 3339, in UTC.
pub fn time_text(at: Nanos) -> String {
    jiff::Timestamp::from_nanosecond(i128::from(at)).map_or(String::new(), |at| at.to_string())
}

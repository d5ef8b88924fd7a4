//! When a schedule acts: calendars and intervals, in a time zone, less what is excluded.

use jiff::civil;
use jiff::tz::TimeZone;
use temporalio_protos::temporal::api::schedule::v1 as proto;

use crate::time::{Nanos, nanos, unstamp};

/// Nobody plans beyond it, and a search for a date that never comes has to end.
const LAST_YEAR: i16 = 2100;
const SECOND: Nanos = 1_000_000_000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(pub String);

/// A set of small numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Field(Vec<proto::Range>);

impl Field {
    fn has(&self, value: i32) -> bool {
        self.0.iter().any(|range| {
            let end = range.end.max(range.start);
            let step = range.step.max(1);
            value >= range.start && value <= end && (value - range.start) % step == 0
        })
    }

    fn is_any(&self) -> bool {
        self.0.is_empty()
    }
}

/// Points in time of which every field matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calendar {
    second: Field,
    minute: Field,
    hour: Field,
    day: Field,
    month: Field,
    year: Field,
    weekday: Field,
    /// Either day matches, as in cron, if both are given.
    either_day: bool,
    comment: String,
}

/// What a field may say: its bounds, and names for its numbers.
struct Grammar {
    name: &'static str,
    low: i32,
    high: i32,
    words: &'static [&'static str],
    first_word: i32,
}

const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

const SECOND_OF: Grammar = Grammar {
    name: "Second",
    low: 0,
    high: 59,
    words: &[],
    first_word: 0,
};
const MINUTE_OF: Grammar = Grammar {
    name: "Minute",
    low: 0,
    high: 59,
    words: &[],
    first_word: 0,
};
const HOUR_OF: Grammar = Grammar {
    name: "Hour",
    low: 0,
    high: 23,
    words: &[],
    first_word: 0,
};
const DAY_OF: Grammar = Grammar {
    name: "DayOfMonth",
    low: 1,
    high: 31,
    words: &[],
    first_word: 0,
};
const MONTH_OF: Grammar = Grammar {
    name: "Month",
    low: 1,
    high: 12,
    words: &MONTHS,
    first_word: 1,
};
const YEAR_OF: Grammar = Grammar {
    name: "Year",
    low: 2000,
    high: 2100,
    words: &[],
    first_word: 0,
};
const WEEKDAY_OF: Grammar = Grammar {
    name: "DayOfWeek",
    low: 0,
    high: 7,
    words: &DAYS,
    first_word: 0,
};

impl Grammar {
    fn parse(&self, text: &str, default: &str) -> Result<Field, SpecError> {
        let text = text.trim();
        let text = if text.is_empty() { default } else { text };
        if text == "*" || text == "?" {
            return Ok(Field(Vec::new()));
        }
        let ranges = text
            .split(',')
            .map(|part| self.range(part))
            .collect::<Result<_, _>>()?;
        Ok(Field(ranges))
    }

    fn range(&self, part: &str) -> Result<proto::Range, SpecError> {
        let bad = || {
            SpecError(format!(
                "{} is not in range [{}-{}]: {part:?}",
                self.name, self.low, self.high
            ))
        };
        let (span, step) = match part.split_once('/') {
            Some((span, step)) => (span, step.trim().parse::<i32>().map_err(|_| bad())?),
            None => (part, 1),
        };
        if step < 1 {
            return Err(bad());
        }
        let (start, end) = match span.trim() {
            "*" | "" => (self.low, if self.high == 7 { 6 } else { self.high }),
            span => match span.split_once('-') {
                Some((start, end)) => (self.number(start)?, self.number(end)?),
                None => {
                    let start = self.number(span)?;
                    (start, if part.contains('/') { self.high } else { start })
                }
            },
        };
        if end < start || start < self.low || end > self.high {
            return Err(bad());
        }
        Ok(proto::Range { start, end, step })
    }

    fn number(&self, text: &str) -> Result<i32, SpecError> {
        let text = text.trim().to_ascii_lowercase();
        let word = self
            .words
            .iter()
            .position(|word| text.len() >= 3 && text.starts_with(word));
        match word {
            Some(at) => Ok(self.first_word + i32::try_from(at).unwrap_or(0)),
            None => text
                .parse()
                .map_err(|_| SpecError(format!("{} has an invalid value {text:?}", self.name))),
        }
    }
}

impl Calendar {
    /// Five fields as in cron, or six with a year, or seven with seconds before and a year behind.
    pub fn from_cron(text: &str) -> Result<Self, SpecError> {
        let (text, comment) = text.split_once('#').unwrap_or((text, ""));
        let fields: Vec<&str> = text.split_whitespace().collect();
        let text = match fields.as_slice() {
            ["@yearly" | "@annually"] => "0 0 1 1 *",
            ["@monthly"] => "0 0 1 * *",
            ["@weekly"] => "0 0 * * 0",
            ["@daily" | "@midnight"] => "0 0 * * *",
            ["@hourly"] => "0 * * * *",
            _ => text,
        };
        let fields: Vec<&str> = text.split_whitespace().collect();
        let (second, rest, year) = match fields.len() {
            5 => ("0", &fields[..], "*"),
            6 => ("0", &fields[..5], fields[5]),
            7 => (fields[0], &fields[1..6], fields[6]),
            count => {
                return Err(SpecError(format!(
                    "CronString does not have 5-7 fields: it has {count}"
                )));
            }
        };
        let calendar = Self {
            second: SECOND_OF.parse(second, "0")?,
            minute: MINUTE_OF.parse(rest[0], "0")?,
            hour: HOUR_OF.parse(rest[1], "0")?,
            day: DAY_OF.parse(rest[2], "*")?,
            month: MONTH_OF.parse(rest[3], "*")?,
            weekday: WEEKDAY_OF.parse(rest[4], "*")?,
            year: YEAR_OF.parse(year, "*")?,
            either_day: false,
            comment: comment.trim().to_owned(),
        };
        Ok(calendar.all_if_any())
    }

    pub(crate) fn with_either_day(mut self) -> Self {
        self.either_day = true;
        self
    }

    fn from_words(spec: &proto::CalendarSpec) -> Result<Self, SpecError> {
        let calendar = Self {
            second: SECOND_OF.parse(&spec.second, "0")?,
            minute: MINUTE_OF.parse(&spec.minute, "0")?,
            hour: HOUR_OF.parse(&spec.hour, "0")?,
            day: DAY_OF.parse(&spec.day_of_month, "*")?,
            month: MONTH_OF.parse(&spec.month, "*")?,
            weekday: WEEKDAY_OF.parse(&spec.day_of_week, "*")?,
            year: YEAR_OF.parse(&spec.year, "*")?,
            either_day: false,
            comment: spec.comment.clone(),
        };
        Ok(calendar.all_if_any())
    }

    /// For the time of day an empty set means zero, so "any" has to be spelled out.
    fn all_if_any(mut self) -> Self {
        for (field, high) in [
            (&mut self.second, 59),
            (&mut self.minute, 59),
            (&mut self.hour, 23),
        ] {
            if field.is_any() {
                field.0.push(proto::Range {
                    start: 0,
                    end: high,
                    step: 1,
                });
            }
        }
        for (field, low, high) in [
            (&mut self.day, 1, 31),
            (&mut self.month, 1, 12),
            (&mut self.weekday, 0, 6),
        ] {
            if field.is_any() {
                field.0.push(proto::Range {
                    start: low,
                    end: high,
                    step: 1,
                });
            }
        }
        self
    }

    fn from_structure(spec: &proto::StructuredCalendarSpec) -> Self {
        let zero = |ranges: &[proto::Range]| {
            if ranges.is_empty() {
                Field(vec![proto::Range {
                    start: 0,
                    end: 0,
                    step: 1,
                }])
            } else {
                Field(ranges.to_vec())
            }
        };
        Self {
            second: zero(&spec.second),
            minute: zero(&spec.minute),
            hour: zero(&spec.hour),
            day: Field(spec.day_of_month.clone()),
            month: Field(spec.month.clone()),
            year: Field(spec.year.clone()),
            weekday: Field(spec.day_of_week.clone()),
            either_day: false,
            comment: spec.comment.clone(),
        }
        .all_if_any()
    }

    fn to_structure(&self) -> proto::StructuredCalendarSpec {
        proto::StructuredCalendarSpec {
            second: self.second.0.clone(),
            minute: self.minute.0.clone(),
            hour: self.hour.0.clone(),
            day_of_month: self.day.0.clone(),
            month: self.month.0.clone(),
            year: self.year.0.clone(),
            day_of_week: self.weekday.0.clone(),
            comment: self.comment.clone(),
        }
    }

    fn has_day(&self, date: civil::Date) -> bool {
        let day = self.day.has(i32::from(date.day()));
        let number = i32::from(date.weekday().to_sunday_zero_offset());
        let weekday = self.weekday.has(number) || (number == 0 && self.weekday.has(7));
        let is_all = |field: &Field, low: i32, high: i32| (low..=high).all(|value| field.has(value));
        if self.either_day && !is_all(&self.day, 1, 31) && !is_all(&self.weekday, 0, 6) {
            day || weekday
        } else {
            day && weekday
        }
    }

    fn has(&self, at: civil::DateTime) -> bool {
        (self.year.is_any() || self.year.has(i32::from(at.year())))
            && self.month.has(i32::from(at.month()))
            && self.has_day(at.date())
            && self.hour.has(i32::from(at.hour()))
            && self.minute.has(i32::from(at.minute()))
            && self.second.has(i32::from(at.second()))
    }

    /// The first match later than `after`.
    fn next(&self, after: civil::DateTime) -> Option<civil::DateTime> {
        let mut at = whole(after)?.checked_add(jiff::Span::new().seconds(1)).ok()?;
        while at.year() <= LAST_YEAR {
            let midnight = at.date().to_datetime(civil::Time::midnight());
            let step = jiff::Span::new();
            at = if !self.year.is_any() && !self.year.has(i32::from(at.year())) {
                civil::date(at.year(), 12, 31)
                    .to_datetime(civil::Time::midnight())
                    .checked_add(step.days(1))
                    .ok()?
            } else if !self.month.has(i32::from(at.month())) {
                at.date()
                    .last_of_month()
                    .to_datetime(civil::Time::midnight())
                    .checked_add(step.days(1))
                    .ok()?
            } else if !self.has_day(at.date()) {
                midnight.checked_add(step.days(1)).ok()?
            } else if !self.hour.has(i32::from(at.hour())) {
                midnight.checked_add(step.hours(i64::from(at.hour()) + 1)).ok()?
            } else if !self.minute.has(i32::from(at.minute())) {
                let minutes = i64::from(at.hour()) * 60 + i64::from(at.minute()) + 1;
                midnight.checked_add(step.minutes(minutes)).ok()?
            } else if self.second.has(i32::from(at.second())) {
                return Some(at);
            } else {
                at.checked_add(step.seconds(1)).ok()?
            };
        }
        None
    }

    pub(crate) fn next_in(&self, zone: &TimeZone, after: Nanos) -> Option<Nanos> {
        let mut from = civil_in(zone, after)?;
        // A time that a clock change skips does not come.
        for _ in 0..100 {
            let at = self.next(from)?;
            let found = zone.to_ambiguous_zoned(at).compatible().ok()?;
            let found_nanos = i64::try_from(found.timestamp().as_nanosecond()).ok()?;
            if found_nanos > after && found.datetime() == at {
                return Some(found_nanos);
            }
            from = at;
        }
        None
    }
}

fn whole(at: civil::DateTime) -> Option<civil::DateTime> {
    at.with().subsec_nanosecond(0).build().ok()
}

fn civil_in(zone: &TimeZone, at: Nanos) -> Option<civil::DateTime> {
    let stamp = jiff::Timestamp::from_nanosecond(i128::from(at)).ok()?;
    Some(zone.to_datetime(stamp))
}

/// A schedule's spec, understood.
#[derive(Debug, Clone)]
pub struct Spec {
    calendars: Vec<Calendar>,
    intervals: Vec<(Nanos, Nanos)>,
    excluded: Vec<Calendar>,
    start: Nanos,
    end: Nanos,
    jitter: Nanos,
    zone: TimeZone,
    zone_name: String,
}

impl Spec {
    pub fn parse(spec: &proto::ScheduleSpec) -> Result<Self, SpecError> {
        let mut zone_name = spec.timezone_name.clone();
        let mut calendars = Vec::new();
        let mut intervals = Vec::new();
        for calendar in &spec.structured_calendar {
            calendars.push(Calendar::from_structure(calendar));
        }
        for calendar in &spec.calendar {
            calendars.push(Calendar::from_words(calendar)?);
        }
        for text in &spec.cron_string {
            let mut text = text.trim();
            for prefix in ["CRON_TZ=", "TZ="] {
                if let Some((zone, rest)) = text.strip_prefix(prefix).and_then(|rest| rest.split_once(' ')) {
                    zone_name = zone.to_owned();
                    text = rest.trim();
                }
            }
            if let Some(every) = text.strip_prefix("@every") {
                let (length, phase) = every.split_once('/').unwrap_or((every, ""));
                let phase = if phase.trim().is_empty() {
                    0
                } else {
                    length_of(phase.trim())?
                };
                intervals.push((length_of(length.trim())?, phase));
            } else {
                calendars.push(Calendar::from_cron(text)?);
            }
        }
        for interval in &spec.interval {
            let length = nanos(interval.interval.as_ref());
            let phase = nanos(interval.phase.as_ref());
            if length < SECOND {
                return Err(SpecError("interval is too small".to_owned()));
            }
            if phase < 0 || phase >= length {
                return Err(SpecError("phase is out of range".to_owned()));
            }
            intervals.push((length, phase));
        }
        let mut excluded: Vec<_> = spec
            .exclude_structured_calendar
            .iter()
            .map(Calendar::from_structure)
            .collect();
        for calendar in &spec.exclude_calendar {
            excluded.push(Calendar::from_words(calendar)?);
        }
        let zone = if zone_name.is_empty() {
            TimeZone::UTC
        } else {
            TimeZone::get(&zone_name).map_err(|_| SpecError(format!("unknown time zone {zone_name}")))?
        };
        Ok(Self {
            calendars,
            intervals,
            excluded,
            start: unstamp(spec.start_time.as_ref()),
            end: unstamp(spec.end_time.as_ref()),
            jitter: nanos(spec.jitter.as_ref()),
            zone,
            zone_name,
        })
    }

    /// The same spec with every calendar spelled out, as it is shown.
    pub fn canonical(&self, spec: &proto::ScheduleSpec) -> proto::ScheduleSpec {
        proto::ScheduleSpec {
            structured_calendar: self.calendars.iter().map(Calendar::to_structure).collect(),
            interval: self
                .intervals
                .iter()
                .map(|(interval, phase)| proto::IntervalSpec {
                    interval: Some(crate::duration(*interval)),
                    phase: Some(crate::duration(*phase)),
                })
                .collect(),
            exclude_structured_calendar: self.excluded.iter().map(Calendar::to_structure).collect(),
            start_time: spec.start_time,
            end_time: spec.end_time,
            jitter: spec.jitter,
            timezone_name: self.zone_name.clone(),
            timezone_data: spec.timezone_data.clone(),
            ..Default::default()
        }
    }

    /// The next nominal time later than `after`, and when to act for it. `seed` tells schedules with the same spec apart.
    pub fn next(&self, after: Nanos, seed: &str) -> Option<(Nanos, Nanos)> {
        let mut from = after;
        if self.start != 0 {
            from = from.max(self.start - 1);
        }
        loop {
            let nominal = self.next_nominal(from)?;
            if self.end != 0 && nominal > self.end {
                return None;
            }
            let excluded = civil_in(&self.zone, nominal)
                .is_some_and(|at| self.excluded.iter().any(|calendar| calendar.has(at)));
            if excluded {
                from = nominal;
                continue;
            }
            return Some((nominal, self.jittered(nominal, seed)));
        }
    }

    fn next_nominal(&self, after: Nanos) -> Option<Nanos> {
        let calendars = self
            .calendars
            .iter()
            .filter_map(|calendar| calendar.next_in(&self.zone, after));
        let intervals = self.intervals.iter().map(|(length, phase)| {
            let steps = (after - phase).div_euclid(*length) + 1;
            steps * length + phase
        });
        calendars.chain(intervals).min()
    }

    /// Spreads what is due at once. The same schedule and time give the same delay, and never one beyond the next time.
    fn jittered(&self, nominal: Nanos, seed: &str) -> Nanos {
        let mut limit = self.jitter;
        if limit <= 0 {
            return nominal;
        }
        if let Some(next) = self.next_nominal(nominal) {
            limit = limit.min(next - nominal);
        }
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in seed.bytes().chain(nominal.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let spread = i64::try_from(hash >> 1).unwrap_or(0) % limit.max(1);
        nominal + spread
    }
}

/// "90s", "1h30m", "500ms".
pub(crate) fn length_of(text: &str) -> Result<Nanos, SpecError> {
    let bad = || SpecError(format!("invalid length of time {text:?}"));
    let mut total: f64 = 0.0;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest
            .find(|letter: char| !letter.is_ascii_digit() && letter != '.')
            .ok_or_else(bad)?;
        let value: f64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let letters = rest
            .find(|letter: char| letter.is_ascii_digit() || letter == '.')
            .unwrap_or(rest.len());
        let unit = match &rest[..letters] {
            "ns" => 1.0,
            "us" | "µs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" => 60e9,
            "h" => 3600e9,
            "d" => 86_400e9,
            _ => return Err(bad()),
        };
        total += value * unit;
        rest = &rest[letters..];
    }
    if !(0.0..9e18).contains(&total) {
        return Err(bad());
    }
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    Ok(total as i64)
}

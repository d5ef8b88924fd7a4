//! Calendars: sets of points in time of which every field matches, spelled field by field or as cron does.
//!
//! A field keeps the ranges as they were written, because they are shown again, and its numbers as bits, because a search
//! asks for them often.

use jiff::civil;
use temporalio_protos::temporal::api::schedule::v1 as proto;

use crate::schedule::SpecError;

/// Nobody plans beyond it, and a search for a date that never comes has to end.
pub(crate) const LAST_YEAR: i16 = 2100;
const FIRST_YEAR: i32 = 2000;
/// A field has at most 101 numbers; who needs more ranges says some of them twice.
const MOST_RANGES: usize = 101;

/// A set of small numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    ranges: Vec<proto::Range>,
    /// The number that the lowest bit stands for.
    base: i32,
    bits: u128,
}

impl Field {
    /// What is beyond the bounds of the field is never asked for.
    fn new(ranges: Vec<proto::Range>, grammar: &Grammar) -> Result<Self, SpecError> {
        if ranges.len() > MOST_RANGES {
            return Err(grammar.too_many(ranges.len()));
        }
        let base = if grammar.low == FIRST_YEAR { FIRST_YEAR } else { 0 };
        let mut bits = 0;
        for range in &ranges {
            let (start, end) = (i64::from(range.start), i64::from(range.end.max(range.start)));
            let step = i64::from(range.step.max(1));
            for value in grammar.low..=grammar.high {
                let wide = i64::from(value);
                if wide >= start && wide <= end && (wide - start) % step == 0 {
                    bits |= 1 << (value - base);
                }
            }
        }
        Ok(Self { ranges, base, bits })
    }

    pub(crate) fn has(&self, value: i32) -> bool {
        let at = value - self.base;
        (0..128).contains(&at) && self.bits >> at & 1 == 1
    }

    /// The smallest number of the set that is not smaller than this one.
    pub(crate) fn from(&self, value: i32) -> Option<i32> {
        let at = u32::try_from(value - self.base).ok()?;
        let rest = self.bits.checked_shr(at)?;
        (rest != 0).then(|| value.saturating_add_unsigned(rest.trailing_zeros()))
    }

    pub(crate) fn bits(&self) -> u128 {
        self.bits
    }

    fn is_within(&self, other: &Self) -> bool {
        self.bits & !other.bits == 0
    }

    fn is_any(&self) -> bool {
        self.ranges.is_empty()
    }

    fn is_full(&self, low: i32, high: i32) -> bool {
        (low..=high).all(|value| self.has(value))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Calendar {
    pub(crate) second: Field,
    pub(crate) minute: Field,
    pub(crate) hour: Field,
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
            return Field::new(Vec::new(), self);
        }
        // Before they are read: they may be as many as fit into a message.
        let count = text.bytes().filter(|byte| *byte == b',').count() + 1;
        if count > MOST_RANGES {
            return Err(self.too_many(count));
        }
        let ranges = text
            .split(',')
            .map(|part| self.range(part))
            .collect::<Result<_, _>>()?;
        Field::new(ranges, self)
    }

    fn too_many(&self, count: usize) -> SpecError {
        SpecError(format!(
            "{} has {count} ranges, and may have {MOST_RANGES}: join those that touch",
            self.name
        ))
    }

    /// All that the field may be.
    fn whole(&self) -> proto::Range {
        proto::Range {
            start: self.low,
            // Sunday is 0 and 7.
            end: if self.high == 7 { 6 } else { self.high },
            step: 1,
        }
    }

    fn range(&self, part: &str) -> Result<proto::Range, SpecError> {
        let bad = || {
            SpecError(format!(
                "{} is not in range [{}-{}]: {:?}",
                self.name,
                self.low,
                self.high,
                beginning(part)
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
            "*" | "" => (self.whole().start, self.whole().end),
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
            None => text.parse().map_err(|_| {
                SpecError(format!(
                    "{} has an invalid value {:?}",
                    self.name,
                    beginning(&text)
                ))
            }),
        }
    }
}

/// As much of a text as is worth repeating.
pub(crate) fn beginning(text: &str) -> &str {
    text.char_indices().nth(40).map_or(text, |(end, _)| &text[..end])
}

/// The parts of a calendar's date and time, from the widest. Seconds are looked at as a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unit {
    Year = 1,
    Month,
    Day,
    Hour,
    Minute,
}

impl Calendar {
    /// Five fields as in cron, or six with a year, or seven with seconds before and a year behind.
    pub(crate) fn from_cron(text: &str) -> Result<Self, SpecError> {
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
        Self {
            second: SECOND_OF.parse(second, "0")?,
            minute: MINUTE_OF.parse(rest[0], "0")?,
            hour: HOUR_OF.parse(rest[1], "0")?,
            day: DAY_OF.parse(rest[2], "*")?,
            month: MONTH_OF.parse(rest[3], "*")?,
            weekday: WEEKDAY_OF.parse(rest[4], "*")?,
            year: YEAR_OF.parse(year, "*")?,
            either_day: false,
            comment: comment.trim().to_owned(),
        }
        .complete()
    }

    pub(crate) fn with_either_day(mut self) -> Self {
        self.either_day = !self.day.is_full(1, 31) && !self.weekday.is_full(0, 6);
        self
    }

    pub(crate) fn from_words(spec: &proto::CalendarSpec) -> Result<Self, SpecError> {
        Self {
            second: SECOND_OF.parse(&spec.second, "0")?,
            minute: MINUTE_OF.parse(&spec.minute, "0")?,
            hour: HOUR_OF.parse(&spec.hour, "0")?,
            day: DAY_OF.parse(&spec.day_of_month, "*")?,
            month: MONTH_OF.parse(&spec.month, "*")?,
            weekday: WEEKDAY_OF.parse(&spec.day_of_week, "*")?,
            year: YEAR_OF.parse(&spec.year, "*")?,
            either_day: false,
            comment: spec.comment.clone(),
        }
        .complete()
    }

    pub(crate) fn from_structure(spec: &proto::StructuredCalendarSpec) -> Result<Self, SpecError> {
        let zero = |ranges: &[proto::Range]| match ranges {
            [] => vec![proto::Range {
                start: 0,
                end: 0,
                step: 1,
            }],
            ranges => ranges.to_vec(),
        };
        Self {
            second: Field::new(zero(&spec.second), &SECOND_OF)?,
            minute: Field::new(zero(&spec.minute), &MINUTE_OF)?,
            hour: Field::new(zero(&spec.hour), &HOUR_OF)?,
            day: Field::new(spec.day_of_month.clone(), &DAY_OF)?,
            month: Field::new(spec.month.clone(), &MONTH_OF)?,
            year: Field::new(spec.year.clone(), &YEAR_OF)?,
            weekday: Field::new(spec.day_of_week.clone(), &WEEKDAY_OF)?,
            either_day: false,
            comment: spec.comment.clone(),
        }
        .complete()
    }

    /// Every second there is, or the same second of every minute.
    pub(crate) fn any(second: Option<i8>) -> Result<Self, SpecError> {
        let all = |grammar: &Grammar| Field::new(vec![grammar.whole()], grammar);
        let mut calendar = Self {
            second: all(&SECOND_OF)?,
            minute: all(&MINUTE_OF)?,
            hour: all(&HOUR_OF)?,
            day: all(&DAY_OF)?,
            month: all(&MONTH_OF)?,
            year: Field::new(Vec::new(), &YEAR_OF)?,
            weekday: all(&WEEKDAY_OF)?,
            either_day: false,
            comment: String::new(),
        };
        if let Some(second) = second {
            calendar.second.bits = 1 << second.clamp(0, 59);
        }
        calendar.complete()
    }

    /// Spells out what "any" means, and which day is Sunday.
    fn complete(mut self) -> Result<Self, SpecError> {
        for (field, grammar) in [
            (&mut self.second, &SECOND_OF),
            (&mut self.minute, &MINUTE_OF),
            (&mut self.hour, &HOUR_OF),
            (&mut self.day, &DAY_OF),
            (&mut self.month, &MONTH_OF),
            (&mut self.weekday, &WEEKDAY_OF),
        ] {
            // For the time of day an empty set means zero, so "any" has to be spelled out.
            if field.is_any() {
                *field = Field::new(vec![grammar.whole()], grammar)?;
            }
        }
        if self.year.is_any() {
            self.year.bits = u128::MAX;
        }
        if self.weekday.has(7) {
            self.weekday.bits |= 1;
        }
        self.weekday.bits &= 0x7f;
        Ok(self)
    }

    pub(crate) fn to_structure(&self) -> proto::StructuredCalendarSpec {
        proto::StructuredCalendarSpec {
            second: self.second.ranges.clone(),
            minute: self.minute.ranges.clone(),
            hour: self.hour.ranges.clone(),
            day_of_month: self.day.ranges.clone(),
            month: self.month.ranges.clone(),
            year: self.year.ranges.clone(),
            day_of_week: self.weekday.ranges.clone(),
            comment: self.comment.clone(),
        }
    }

    fn has_year(&self, date: civil::Date) -> bool {
        self.year.is_any() || self.year.has(i32::from(date.year()))
    }

    fn has_day(&self, date: civil::Date) -> bool {
        let day = self.day.has(i32::from(date.day()));
        let weekday = self
            .weekday
            .has(i32::from(date.weekday().to_sunday_zero_offset()));
        if self.either_day {
            day || weekday
        } else {
            day && weekday
        }
    }

    /// The widest unit of a time that does not match. Seconds are not looked at.
    pub(crate) fn misses(&self, at: civil::DateTime) -> Option<Unit> {
        if !self.has_year(at.date()) {
            Some(Unit::Year)
        } else if !self.month.has(i32::from(at.month())) {
            Some(Unit::Month)
        } else if !self.has_day(at.date()) {
            Some(Unit::Day)
        } else if !self.hour.has(i32::from(at.hour())) {
            Some(Unit::Hour)
        } else if !self.minute.has(i32::from(at.minute())) {
            Some(Unit::Minute)
        } else {
            None
        }
    }

    pub(crate) fn has(&self, at: civil::DateTime) -> bool {
        self.misses(at).is_none() && self.second.has(i32::from(at.second()))
    }

    /// How much of another calendar this one covers: where this one matches from the year down to the unit that is
    /// returned, it has all that the other has within that unit. `None`: not even all seconds of a minute.
    pub(crate) fn covers(&self, other: &Self) -> Option<Cover> {
        let days = if other.either_day {
            self.day.is_full(1, 31) && self.weekday.is_full(0, 6)
        } else {
            other.day.is_within(&self.day) && other.weekday.is_within(&self.weekday)
        };
        let mut covered = None;
        for (cover, is_within) in [
            (Cover::Within(Unit::Minute), other.second.is_within(&self.second)),
            (Cover::Within(Unit::Hour), other.minute.is_within(&self.minute)),
            (Cover::Within(Unit::Day), other.hour.is_within(&self.hour)),
            (Cover::Within(Unit::Month), days),
            (Cover::Within(Unit::Year), other.month.is_within(&self.month)),
            (Cover::All, other.year.is_within(&self.year)),
        ] {
            if !is_within {
                break;
            }
            covered = Some(cover);
        }
        covered
    }
}

/// How much of a calendar another one covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cover {
    /// Each such unit that matches, wholly.
    Within(Unit),
    All,
}

//! When a schedule acts: calendars and intervals, in a time zone, less what is excluded.
//!
//! What must hold: however a spec was made, asking it for its next time takes at most [`REACH`] steps.

use jiff::tz::TimeZone;
use temporalio_protos::temporal::api::schedule::v1 as proto;

use crate::calendar::{Calendar, beginning};
use crate::search::{Interval, Search, Seek, Work};
use crate::time::{Nanos, nanos, unstamp};

const SECOND: Nanos = 1_000_000_000;
/// How many calendars and intervals a spec may have, and how many exclusions.
const MOST_RULES: usize = 100;
const MOST_EXCLUSIONS: usize = 500;
/// How many steps are made to find one time: about a millisecond. All days of a century are fewer.
const REACH: u32 = 40_000;
/// Steps that asking for a time costs at least.
const QUESTION: u32 = 30;
/// The first of January 2000. What had no time since then will have none.
const LONG_AGO: Nanos = 946_684_800 * SECOND;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(pub String);

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// A time of the spec, and when to act for it.
    At {
        nominal: Nanos,
        actual: Nanos,
    },
    Never,
    /// Nothing up to here, and perhaps something later: ask again from there.
    NotUntil(Nanos),
}

/// A schedule's spec, understood.
#[derive(Debug, Clone)]
pub struct Spec {
    calendars: Vec<Calendar>,
    intervals: Vec<Interval>,
    excluded: Vec<Calendar>,
    start: Nanos,
    end: Nanos,
    jitter: Nanos,
    zone: TimeZone,
    zone_name: String,
}

impl Spec {
    pub fn parse(spec: &proto::ScheduleSpec) -> Result<Self, SpecError> {
        let rules = spec.structured_calendar.len()
            + spec.calendar.len()
            + spec.cron_string.len()
            + spec.interval.len();
        let exclusions = spec.exclude_structured_calendar.len() + spec.exclude_calendar.len();
        for (what, count, most) in [
            ("calendars and intervals", rules, MOST_RULES),
            ("exclusions", exclusions, MOST_EXCLUSIONS),
        ] {
            if count > most {
                return Err(SpecError(format!(
                    "it has {count} {what}, and may have {most}: join some, or make several schedules"
                )));
            }
        }
        let mut zone_name = spec.timezone_name.clone();
        let mut calendars = Vec::new();
        let mut intervals = Vec::new();
        for calendar in &spec.structured_calendar {
            calendars.push(Calendar::from_structure(calendar)?);
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
                intervals.push(interval(length_of(length.trim())?, phase)?);
            } else {
                calendars.push(Calendar::from_cron(text)?);
            }
        }
        for wanted in &spec.interval {
            let length = nanos(wanted.interval.as_ref());
            intervals.push(interval(length, nanos(wanted.phase.as_ref()))?);
        }
        let mut excluded = Vec::new();
        for calendar in &spec.exclude_structured_calendar {
            excluded.push(Calendar::from_structure(calendar)?);
        }
        for calendar in &spec.exclude_calendar {
            excluded.push(Calendar::from_words(calendar)?);
        }
        let zone = if zone_name.is_empty() {
            TimeZone::UTC
        } else {
            TimeZone::get(&zone_name)
                .map_err(|_| SpecError(format!("unknown time zone {}", beginning(&zone_name))))?
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

    /// Refuses what says when to act and yet never would, or only after a longer search than a server can make each time.
    /// One that is over, or says nothing at all, may still be triggered by hand.
    pub fn check(&self, now: Nanos) -> Result<(), SpecError> {
        if self.calendars.is_empty() && self.intervals.is_empty() {
            return Ok(());
        }
        let found = match self
            .next_nominal(now.max(self.start.saturating_sub(1)), &self.excluded)
            .0
        {
            Search::Never => self.next_nominal(LONG_AGO, &self.excluded).0,
            other => other,
        };
        match found {
            Search::Found(_) => Ok(()),
            Search::Never => Err(SpecError(
                "it never matches: no date has all of its fields, or what is excluded covers every match; \
                 change the calendars or the exclusions"
                    .to_owned(),
            )),
            Search::NotUntil(until) => Err(SpecError(format!(
                "no match was found within {REACH} steps, up to {}: what is excluded covers every match until then; \
                 exclude less, or whole days, or write fewer calendars",
                crate::time::time_text(until)
            ))),
        }
    }

    pub(crate) fn jitter(&self) -> Nanos {
        self.jitter.max(0)
    }

    /// The same spec with every calendar spelled out, as it is shown.
    pub fn canonical(&self, spec: &proto::ScheduleSpec) -> proto::ScheduleSpec {
        proto::ScheduleSpec {
            structured_calendar: self.calendars.iter().map(Calendar::to_structure).collect(),
            interval: self
                .intervals
                .iter()
                .map(|interval| proto::IntervalSpec {
                    interval: Some(crate::duration(interval.length)),
                    phase: Some(crate::duration(interval.phase)),
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
    /// What it costs is taken from `work`; the answer does not depend on how much of that is left.
    pub fn next(&self, after: Nanos, seed: &str, work: &mut Work) -> Next {
        let mut from = after;
        if self.start != 0 {
            from = from.max(self.start.saturating_sub(1));
        }
        let (found, steps) = self.next_nominal(from, &self.excluded);
        work.take(steps.saturating_add(QUESTION));
        let is_over = |at: Nanos| self.end != 0 && at > self.end;
        match found {
            Search::Found(nominal) if !is_over(nominal) => Next::At {
                nominal,
                actual: self.jittered(nominal, seed, work),
            },
            Search::NotUntil(until) if !is_over(until) => Next::NotUntil(until),
            _ => Next::Never,
        }
    }

    /// The first of all calendars and intervals, each of which gets its share of the steps; and how many were made.
    fn next_nominal(&self, after: Nanos, excluded: &[Calendar]) -> (Search<Nanos>, u32) {
        let rules = u32::try_from(self.calendars.len() + self.intervals.len()).unwrap_or(u32::MAX);
        let share = REACH / rules.max(1);
        let mut steps: u32 = 0;
        let (mut first, mut known): (Option<Nanos>, Option<Nanos>) = (None, None);
        let mut note = |found: Search<Nanos>, work: Work| {
            steps = steps.saturating_add(share - work.left());
            let earlier = |one: Option<Nanos>, other: Nanos| Some(one.map_or(other, |one| one.min(other)));
            match found {
                Search::Found(at) => first = earlier(first, at),
                Search::NotUntil(until) => known = earlier(known, until),
                Search::Never => {}
            }
        };
        for calendar in &self.calendars {
            let mut work = Work::new(share);
            note(
                Seek::new(calendar, excluded).next_in(&self.zone, after, &mut work),
                work,
            );
        }
        for interval in &self.intervals {
            let mut work = Work::new(share);
            note(interval.next_in(&self.zone, after, excluded, &mut work), work);
        }
        let found = match (first, known) {
            (Some(at), Some(until)) if until < at => Search::NotUntil(until),
            (Some(at), _) => Search::Found(at),
            (None, Some(until)) => Search::NotUntil(until),
            (None, None) => Search::Never,
        };
        (found, steps)
    }

    /// Spreads what is due at once. The same schedule and time give the same delay, and never one beyond the next time.
    fn jittered(&self, nominal: Nanos, seed: &str, work: &mut Work) -> Nanos {
        let mut limit = self.jitter;
        if limit <= 0 {
            return nominal;
        }
        let (next, steps) = self.next_nominal(nominal, &[]);
        work.take(steps);
        if let Search::Found(next) | Search::NotUntil(next) = next {
            limit = limit.min(next.saturating_sub(nominal));
        }
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in seed.bytes().chain(nominal.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let spread = i64::try_from(hash >> 1).unwrap_or(0) % limit.max(1);
        nominal.saturating_add(spread)
    }
}

fn interval(length: Nanos, phase: Nanos) -> Result<Interval, SpecError> {
    if length < SECOND {
        return Err(SpecError("interval is too small: at least a second".to_owned()));
    }
    if phase < 0 || phase >= length {
        return Err(SpecError("phase is out of range".to_owned()));
    }
    Ok(Interval { length, phase })
}

/// "90s", "1h30m", "500ms".
pub(crate) fn length_of(text: &str) -> Result<Nanos, SpecError> {
    let bad = || SpecError(format!("invalid length of time {:?}", beginning(text)));
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

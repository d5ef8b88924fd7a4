//! The search for the next time of a calendar or an interval, less what is excluded.
//!
//! Who writes a spec decides how far away its next time is, and whether there is any. So a search is bounded by work: it
//! counts its steps, and when they are used up it says up to where there is nothing. Whoever wants to know more asks again
//! from there. The same question with the same steps gets the same answer.
//!
//! ```text
//!   after ──> year? month? day? hour? minute? ── no, or all that matches in it is excluded ──> the next such unit
//!                                            └── yes ──> the first second that is left ──> a time
//! ```

use jiff::civil;
use jiff::tz::TimeZone;

use crate::calendar::{Calendar, Cover, LAST_YEAR, Unit};
use crate::time::Nanos;

const SECOND: Nanos = 1_000_000_000;
/// What asking a time zone costs, in steps.
const ZONE: u32 = 8;
/// Clocks are not put back by more, since 1970.
const MOST_PUT_BACK: Nanos = 3 * 3600 * SECOND;

/// Steps that may still be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work(u32);

impl Work {
    pub const fn new(steps: u32) -> Self {
        Self(steps)
    }

    pub const fn is_spent(self) -> bool {
        self.0 == 0
    }

    /// Whether there were as many left.
    pub(crate) const fn take(&mut self, steps: u32) -> bool {
        let enough = self.0 >= steps;
        self.0 = self.0.saturating_sub(steps);
        enough
    }

    /// A part of it, which has not been used yet.
    pub(crate) const fn left(self) -> u32 {
        self.0
    }
}

/// What a search found out about the times later than some point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Search<T> {
    Found(T),
    /// There is none.
    Never,
    /// There is none up to here, and the steps are used up.
    NotUntil(T),
}

/// What a calendar is searched for, and what is left out.
#[derive(Debug)]
pub(crate) struct Seek<'a> {
    calendar: &'a Calendar,
    excluded: &'a [Calendar],
    covers: Vec<Option<Cover>>,
}

impl<'a> Seek<'a> {
    pub(crate) fn new(calendar: &'a Calendar, excluded: &'a [Calendar]) -> Self {
        Self {
            calendar,
            excluded,
            covers: excluded.iter().map(|other| other.covers(calendar)).collect(),
        }
    }

    /// What one step costs: every exclusion is looked at.
    fn cost(&self) -> u32 {
        u32::try_from(self.excluded.len())
            .unwrap_or(u32::MAX)
            .saturating_add(1)
    }

    /// The first match later than `after`. At least one step is made, so that whoever goes on where this stopped gets on.
    pub(crate) fn next(&self, after: civil::DateTime, work: &mut Work) -> Search<civil::DateTime> {
        if self.covers.contains(&Some(Cover::All)) {
            return Search::Never;
        }
        let Some(mut at) = second_after(after) else {
            return Search::Never;
        };
        let mut is_first = true;
        while at.year() <= LAST_YEAR {
            if !work.take(self.cost()) && !is_first {
                return Search::NotUntil(at);
            }
            is_first = false;
            let later = match self.look(at) {
                Ok(found) => return Search::Found(found),
                Err(later) => later,
            };
            match later {
                Some(later) => at = later,
                None => return Search::Never,
            }
        }
        Search::Never
    }

    /// The first match in the minute of `at`; or where to look next, nothing being before that.
    fn look(&self, at: civil::DateTime) -> Result<civil::DateTime, Option<civil::DateTime>> {
        let missed = self.calendar.misses(at);
        let mut skipped = missed;
        let mut taken: u128 = 0;
        for (excluded, cover) in self.excluded.iter().zip(&self.covers) {
            let misses = excluded.misses(at);
            if misses.is_none() {
                taken |= excluded.second.bits();
            }
            if let Some(Cover::Within(unit)) = *cover
                && misses.is_none_or(|missed| missed > unit)
            {
                skipped = Some(skipped.map_or(unit, |known| known.min(unit)));
            }
        }
        let date = at.date();
        match skipped {
            // The clock's own numbers say where it goes on.
            Some(Unit::Hour) if missed == Some(Unit::Hour) => {
                match self.calendar.hour.from(i32::from(at.hour()) + 1) {
                    Some(hour) => Err(moment(date, hour, 0, 0)),
                    None => Err(next_unit(at, Unit::Day)),
                }
            }
            Some(Unit::Minute) if missed == Some(Unit::Minute) => {
                match self.calendar.minute.from(i32::from(at.minute()) + 1) {
                    Some(minute) => Err(moment(date, i32::from(at.hour()), minute, 0)),
                    None => Err(next_unit(at, Unit::Hour)),
                }
            }
            Some(unit) => Err(next_unit(at, unit)),
            None => {
                let free = self.calendar.second.bits() & !taken & (u128::MAX << at.second());
                match i32::try_from(free.trailing_zeros()) {
                    Ok(second @ 0..60) => {
                        let (hour, minute) = (i32::from(at.hour()), i32::from(at.minute()));
                        moment(date, hour, minute, second).ok_or(None)
                    }
                    _ => Err(next_unit(at, Unit::Minute)),
                }
            }
        }
    }

    /// The same, as points in time. A time that a clock change skips does not come; one that comes twice comes once.
    pub(crate) fn next_in(&self, zone: &TimeZone, after: Nanos, work: &mut Work) -> Search<Nanos> {
        let Some(mut from) = civil_in(zone, after) else {
            return Search::Never;
        };
        loop {
            let at = match self.next(from, work) {
                Search::Found(at) => at,
                Search::Never => return Search::Never,
                Search::NotUntil(at) => return not_until(zone, at, after),
            };
            let Some(found) = zone
                .to_ambiguous_zoned(at)
                .compatible()
                .ok()
                .filter(|found| found.datetime() == at)
                .and_then(|found| i64::try_from(found.timestamp().as_nanosecond()).ok())
                .filter(|found| *found > after)
            else {
                from = at;
                if work.take(ZONE) {
                    continue;
                }
                return not_until(zone, at, after);
            };
            return Search::Found(found);
        }
    }
}

/// A length of time that is counted from 1970, and how much later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) length: Nanos,
    pub(crate) phase: Nanos,
}

impl Interval {
    fn after(self, after: Nanos) -> Option<Nanos> {
        let steps = after
            .checked_sub(self.phase)?
            .div_euclid(self.length)
            .checked_add(1)?;
        let at = steps.checked_mul(self.length)?.checked_add(self.phase)?;
        (civil_in(&TimeZone::UTC, at)?.year() <= LAST_YEAR).then_some(at)
    }

    pub(crate) fn next_in(
        self,
        zone: &TimeZone,
        after: Nanos,
        excluded: &[Calendar],
        work: &mut Work,
    ) -> Search<Nanos> {
        if excluded.is_empty() {
            return self.after(after).map_or(Search::Never, Search::Found);
        }
        let cost = u32::try_from(excluded.len())
            .unwrap_or(u32::MAX)
            .saturating_add(ZONE);
        let mut from = after;
        let mut is_first = true;
        // All of its times are at the same second of a minute: no zone is off by a part of one.
        let second = civil_in(&TimeZone::UTC, self.phase)
            .map(|at| at.second())
            .filter(|_| self.length % (60 * SECOND) == 0);
        let Ok(any) = Calendar::any(second) else {
            return Search::Never;
        };
        let free = Seek::new(&any, excluded);
        loop {
            let Some(nominal) = self.after(from) else {
                return Search::Never;
            };
            if !work.take(cost) && !is_first {
                return Search::NotUntil(from);
            }
            is_first = false;
            let Some(at) = civil_in(zone, nominal) else {
                return Search::Never;
            };
            if !excluded.iter().any(|calendar| calendar.has(at)) {
                return Search::Found(nominal);
            }
            let (free, is_found) = match free.next(at, work) {
                Search::Found(free) => (free, true),
                Search::NotUntil(free) => (free, false),
                Search::Never => return Search::Never,
            };
            // Where clocks are put back in between, earlier numbers come once more.
            let back = match (civil_in(zone, nominal), instant(zone, free)) {
                (Some(at), Some(later))
                    if distance(at, free) == Some(later.saturating_sub(whole(nominal))) =>
                {
                    0
                }
                _ => MOST_PUT_BACK,
            };
            let later = instant(zone, free).map_or(nominal, |free| free.saturating_sub(1 + back));
            from = nominal.max(later);
            if !is_found {
                return Search::NotUntil(from);
            }
        }
    }
}

/// Nothing is before that time of the clock. Later than `after` in any case: a step was made.
fn not_until(zone: &TimeZone, at: civil::DateTime, after: Nanos) -> Search<Nanos> {
    let until = instant(zone, at).map_or(after, |at| at.saturating_sub(1));
    Search::NotUntil(if until > after {
        until
    } else {
        after.saturating_add(SECOND)
    })
}

/// The first second that is later.
fn second_after(at: civil::DateTime) -> Option<civil::DateTime> {
    let whole = at.with().subsec_nanosecond(0).build().ok()?;
    whole.checked_add(jiff::Span::new().seconds(1)).ok()
}

fn moment(date: civil::Date, hour: i32, minute: i32, second: i32) -> Option<civil::DateTime> {
    let small = |number: i32| i8::try_from(number).ok();
    civil::Time::new(small(hour)?, small(minute)?, small(second)?, 0)
        .ok()
        .map(|time| date.to_datetime(time))
}

/// Where the next year, month, day, hour or minute begins.
fn next_unit(at: civil::DateTime, unit: Unit) -> Option<civil::DateTime> {
    let date = at.date();
    let midnight = |date: civil::Date| Some(date.to_datetime(civil::Time::midnight()));
    match unit {
        Unit::Year => civil::Date::new(at.year().checked_add(1)?, 1, 1)
            .ok()
            .and_then(midnight),
        Unit::Month => date.last_of_month().tomorrow().ok().and_then(midnight),
        Unit::Day => date.tomorrow().ok().and_then(midnight),
        Unit::Hour if at.hour() == 23 => next_unit(at, Unit::Day),
        Unit::Hour => moment(date, i32::from(at.hour()) + 1, 0, 0),
        Unit::Minute if at.minute() == 59 => next_unit(at, Unit::Hour),
        Unit::Minute => moment(date, i32::from(at.hour()), i32::from(at.minute()) + 1, 0),
    }
}

fn civil_in(zone: &TimeZone, at: Nanos) -> Option<civil::DateTime> {
    let stamp = jiff::Timestamp::from_nanosecond(i128::from(at)).ok()?;
    Some(zone.to_datetime(stamp))
}

/// The first point in time at which clocks show this, or would if they were not put forward.
fn instant(zone: &TimeZone, at: civil::DateTime) -> Option<Nanos> {
    let earlier = zone.to_ambiguous_zoned(at).earlier().ok()?;
    i64::try_from(earlier.timestamp().as_nanosecond()).ok()
}

fn whole(at: Nanos) -> Nanos {
    at - at.rem_euclid(SECOND)
}

/// From one time of the clock, without its fraction, to another, as if clocks were never changed.
fn distance(from: civil::DateTime, to: civil::DateTime) -> Option<Nanos> {
    let from = from.with().subsec_nanosecond(0).build().ok()?;
    i64::try_from(to.duration_since(from).as_nanos()).ok()
}

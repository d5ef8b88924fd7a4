//! The cron schedule of a workflow, which runs again and again under one id.

use jiff::tz::TimeZone;

use crate::calendar::{Calendar, beginning};
use crate::schedule::{SpecError, length_of};
use crate::search::{Search, Seek, Work};
use crate::time::{Nanos, seconds};

/// More steps than there are days until the last year that is searched, so that the search never ends before its time.
const REACH: u32 = 100_000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CronError(String);

#[derive(Debug, Clone)]
pub struct Cron {
    zone: TimeZone,
    rule: Rule,
}

#[derive(Debug, Clone)]
enum Rule {
    Every(Nanos),
    Calendar(Box<Calendar>),
}

impl From<SpecError> for CronError {
    fn from(error: SpecError) -> Self {
        Self(error.0)
    }
}

impl Cron {
    pub fn parse(text: &str) -> Result<Self, CronError> {
        let mut zone = TimeZone::UTC;
        let mut text = text.trim();
        for prefix in ["CRON_TZ=", "TZ="] {
            if let Some((name, rest)) = text.strip_prefix(prefix).and_then(|rest| rest.split_once(' ')) {
                zone = TimeZone::get(name)
                    .map_err(|_| CronError(format!("unknown time zone {}", beginning(name))))?;
                text = rest.trim();
            }
        }
        let rule = if let Some(every) = text.strip_prefix("@every") {
            // Whole seconds, and at least one.
            let length = length_of(every.trim())?;
            Rule::Every((length / seconds(1)).max(1) * seconds(1))
        } else {
            if text.split_whitespace().count() > 5 {
                return Err(CronError("expected exactly 5 fields".to_owned()));
            }
            Rule::Calendar(Box::new(Calendar::from_cron(text)?.with_either_day()))
        };
        Ok(Self { zone, rule })
    }

    /// The first time after `started` that is not before `now`, at a whole number of seconds from `now`.
    pub fn next_after(&self, started: Nanos, now: Nanos) -> Option<Nanos> {
        let at = match &self.rule {
            Rule::Every(length) => {
                let since = now.saturating_sub(started).max(0);
                let steps = since.saturating_add(length - 1) / length;
                started.saturating_add(steps.max(1).saturating_mul(*length))
            }
            Rule::Calendar(calendar) => {
                let after = started.max(now.saturating_sub(1));
                match Seek::new(calendar, &[]).next_in(&self.zone, after, &mut Work::new(REACH)) {
                    Search::Found(at) => at,
                    Search::Never | Search::NotUntil(_) => return None,
                }
            }
        };
        let wait = at.saturating_sub(now).max(0);
        let whole = wait.saturating_add(seconds(1) - 1) / seconds(1);
        Some(now.saturating_add(whole.saturating_mul(seconds(1))))
    }
}

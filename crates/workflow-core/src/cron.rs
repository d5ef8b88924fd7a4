//! The cron schedule of a workflow, which runs again and again under one id.

use jiff::tz::TimeZone;

use crate::schedule::{Calendar, SpecError, length_of};
use crate::time::{Nanos, seconds};

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
                zone = TimeZone::get(name).map_err(|_| CronError(format!("unknown time zone {name}")))?;
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
                let steps = ((now - started).max(0) + length - 1) / length;
                started + steps.max(1) * length
            }
            Rule::Calendar(calendar) => calendar.next_in(&self.zone, started.max(now - 1))?,
        };
        let wait = (at - now).max(0);
        Some(now + (wait + seconds(1) - 1) / seconds(1) * seconds(1))
    }
}

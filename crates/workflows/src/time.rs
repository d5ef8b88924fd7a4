//! The time of the engine: the machine's, but never going back, and never standing still.
//!
//! Where the machine's clock is set back, what waits for a timer must not wait for the machine to come there again. So time goes on,
//! a little slower than it passes, until the machine's clock has caught up.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use atoll_workflow_core::Nanos;

/// How much of a second passes in a second while the engine is ahead.
const PACE: (Nanos, Nanos) = (4, 5);

#[derive(Debug, Default)]
pub(crate) struct Time(Mutex<Option<(Nanos, Instant)>>);

impl Time {
    /// Nanoseconds since 1970.
    pub(crate) fn now(&self) -> Nanos {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX));
        let at = Instant::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = match *last {
            Some((told, when)) => after(told, at.saturating_duration_since(when), wall),
            None => wall,
        };
        *last = Some((now, at));
        now
    }
}

/// What time it is, so long after it was `told`.
fn after(told: Nanos, elapsed: Duration, wall: Nanos) -> Nanos {
    let elapsed = i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX);
    let slowed = (elapsed / PACE.1).saturating_mul(PACE.0) + elapsed % PACE.1 * PACE.0 / PACE.1;
    wall.max(told.saturating_add(slowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn time_follows_the_machines_and_goes_on_where_that_is_set_back() {
        let second = Duration::from_secs(1);
        assert_eq!(after(100 * SECOND, second, 101 * SECOND), 101 * SECOND);
        assert_eq!(after(100 * SECOND, second, 3600 * SECOND), 3600 * SECOND);
        // Set back by an hour: neither back nor still.
        let mut told = 3700 * SECOND;
        for passed in 1..=10 {
            told = after(told, second, (100 + passed) * SECOND);
        }
        assert_eq!(told, 3708 * SECOND);
        // The machine catches up in the end.
        assert_eq!(after(told, second, 3709 * SECOND), 3709 * SECOND);
    }

    #[test]
    fn nobody_is_told_less_than_before() {
        let time = Time::default();
        let mut last = 0;
        for _ in 0..1000 {
            let now = time.now();
            assert!(now >= last);
            last = now;
        }
    }
}

//! The time of the engine: the machine's, but never going back, and never standing still.
//!
//! Where the machine's clock is set back, what waits for a timer must not wait for the machine to come there again. So time goes on,
//! a little slower than it passes, until the machine's clock has caught up. Every run says when it was written, and while the time
//! is ahead it is written down by itself, so that a restart does not turn it back either: what was about to be due would wait as
//! long as the clock was wrong. More than a day ahead is not carried over: then a restart is how the right time comes back, and
//! what workers have is counted from then on (`Run::set_back`).

use parking_lot::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use atoll_store::{WorkflowItem, WorkflowStore};
use atoll_workflow_core::Nanos;

use crate::{Refusal, unavailable};

const KIND: &str = "time";
const SECOND: Nanos = 1_000_000_000;
/// How far ahead is carried over, and from where on it is worth to be written down.
const CARRIED: std::ops::RangeInclusive<Nanos> = 1..=24 * 3600 * SECOND;
const WRITTEN: std::ops::RangeInclusive<Nanos> = SECOND..=24 * 3600 * SECOND;

/// How much of a second passes in a second while the engine is ahead.
const PACE: (Nanos, Nanos) = (4, 5);

#[derive(Debug)]
pub(crate) struct Time {
    wall: fn() -> Nanos,
    told: Mutex<Option<(Nanos, Instant)>>,
}

/// The machine's clock.
pub(crate) fn wall() -> Nanos {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
}

impl Time {
    /// Goes on from where the engine was before, if that is ahead; `written` is when it last wrote a run.
    pub(crate) async fn load(
        store: &dyn WorkflowStore,
        wall: fn() -> Nanos,
        written: Option<Nanos>,
    ) -> Result<Self, Refusal> {
        let kept = store.workflow_items(KIND).await.map_err(unavailable)?;
        let told = kept.first().and_then(|item| item.body.as_slice().try_into().ok());
        Ok(Self::going_on(told.map(Nanos::from_le_bytes).max(written), wall))
    }

    fn going_on(told: Option<Nanos>, wall: fn() -> Nanos) -> Self {
        let told = told.filter(|told| CARRIED.contains(&told.saturating_sub(wall())));
        Self {
            wall,
            told: Mutex::new(told.map(|told| (told, Instant::now()))),
        }
    }

    /// Writes it down while it is ahead, and forgets that once it is not. `kept` says whether it was written down before.
    pub(crate) async fn keep(&self, store: &dyn WorkflowStore, kept: &mut bool) {
        let now = self.now();
        let ahead = WRITTEN.contains(&now.saturating_sub((self.wall)()));
        let (namespace, id) = (String::new(), KIND.to_owned());
        let written = match ahead {
            true => {
                let body = now.to_le_bytes().to_vec();
                let item = WorkflowItem { namespace, id, body };
                store.put_workflow_item(KIND, item).await
            }
            false if *kept => store.delete_workflow_item(KIND, namespace, id).await,
            false => return,
        };
        match written {
            Ok(()) => *kept = ahead,
            Err(error) => tracing::warn!(%error, "the engine's time could not be written down"),
        }
    }

    /// Nanoseconds since 1970.
    pub(crate) fn now(&self) -> Nanos {
        let wall = (self.wall)();
        let at = Instant::now();
        let mut last = self.told.lock();
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

    #[test]
    fn a_restart_does_not_turn_it_back() {
        let wall = wall();
        for (ahead, carried) in [(0, false), (7200, true), (-7200, false), (48 * 3600, false)] {
            let time = Time::going_on(Some(wall + ahead * SECOND), super::wall);
            assert_eq!(time.now() > wall + 3600 * SECOND, carried, "{ahead}");
        }
        assert!(Time::going_on(None, super::wall).now() >= wall);
    }

    #[tokio::test]
    async fn what_is_ahead_is_written_down_until_it_is_not() {
        let place = tempfile::tempdir().unwrap();
        let store = atoll_store::sqlite::open_workflows(&place.path().join("db")).unwrap();
        let mut kept = false;
        let ahead = Time::going_on(Some(wall() + 7200 * SECOND), wall);
        ahead.keep(&*store, &mut kept).await;
        assert!(kept && Time::load(&*store, wall, None).await.unwrap().now() > wall() + 3600 * SECOND);
        let right = Time::going_on(None, wall);
        right.keep(&*store, &mut kept).await;
        assert!(!kept && Time::load(&*store, wall, None).await.unwrap().now() < wall() + 3600 * SECOND);
        store.close().await;
    }

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
        let time = Time::going_on(None, wall);
        let mut last = 0;
        for _ in 0..1000 {
            let now = time.now();
            assert!(now >= last);
            last = now;
        }
    }
}

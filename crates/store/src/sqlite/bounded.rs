//! Questions that a caller can make long: they are given up after so many steps or so much time, or when nobody waits for the
//! answer any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use crate::Error;

/// How often steps are counted.
const COUNTED: i32 = 1_000;

/// How long a question may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Steps of SQLite's machine, some ten million a second at least.
    pub(super) steps: u64,
    /// However fast they are.
    pub(super) time: Duration,
}

/// Whether somebody still waits.
#[derive(Debug, Clone, Default)]
pub(super) struct Waits(Arc<AtomicBool>);

/// Dropped with whoever waits.
#[derive(Debug)]
pub(super) struct Waiter(Waits);

impl Waits {
    pub(super) fn waiter(&self) -> Waiter {
        Waiter(self.clone())
    }

    fn no_more(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// Asks, and gives up if it takes too many steps, or too long, or nobody waits any more.
pub(super) fn bounded<T>(
    db: &Connection,
    what: &'static str,
    bounds: Bounds,
    waits: &Waits,
    ask: impl FnOnce(&Connection) -> Result<T, Error>,
) -> Result<T, Error> {
    let Bounds { steps, time } = bounds;
    let mut left = steps / u64::from(COUNTED.unsigned_abs());
    let (waits, until) = (waits.clone(), Instant::now() + time);
    let count = move || {
        left = left.saturating_sub(1);
        left == 0 || waits.no_more() || Instant::now() >= until
    };
    db.progress_handler(COUNTED, Some(count));
    let answer = ask(db);
    db.progress_handler(0, None::<fn() -> bool>);
    match answer {
        Err(error) if error.is_interrupted() => Err(Error::TooMuchWork { what, steps }),
        other => other,
    }
}

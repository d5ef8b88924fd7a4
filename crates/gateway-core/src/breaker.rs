//! When to leave a provider alone.
//!
//! ```text
//!              failures in a row           time is up
//!   Closed ──────────────────────> Open ──────────────> Half open: one call may try
//!      ^                             ^                      │
//!      │                             └─── it fails: longer ─┤
//!      └──────────────────────────────────── it works ──────┘
//! ```

use atoll_types::Timestamp;

/// Failures in a row that open it.
const FAILURES: u32 = 5;
const FIRST_PAUSE: u64 = 5_000;
const LONGEST_PAUSE: u64 = 120_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    Closed {
        failures: u32,
    },
    Open {
        until: Timestamp,
        pause: u64,
    },
    /// One call has been let through; until it is back nobody else is, but for as long as a pause at most.
    HalfOpen {
        until: Timestamp,
        pause: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Breaker(BreakerState);

impl Default for Breaker {
    fn default() -> Self {
        Self(BreakerState::Closed { failures: 0 })
    }
}

impl Breaker {
    pub fn state(&self) -> BreakerState {
        self.0
    }

    /// Whether a call would be let through; changes nothing.
    pub fn would_allow(&self, now: Timestamp) -> bool {
        match self.0 {
            BreakerState::Closed { .. } => true,
            BreakerState::Open { until, .. } | BreakerState::HalfOpen { until, .. } => now >= until,
        }
    }

    /// Asks to make a call, which must be followed by [`Breaker::record`] or be forgotten.
    pub fn enter(&mut self, now: Timestamp) -> bool {
        if !self.would_allow(now) {
            return false;
        }
        if let BreakerState::Open { pause, .. } | BreakerState::HalfOpen { pause, .. } = self.0 {
            self.0 = BreakerState::HalfOpen {
                until: now.plus_millis(pause),
                pause,
            };
        }
        true
    }

    /// A call came back. A refusal that is the caller's own fault is a success here: the provider works.
    pub fn record(&mut self, worked: bool, now: Timestamp) {
        self.0 = match (self.0, worked) {
            (BreakerState::Open { .. }, false) => self.0,
            (_, true) => BreakerState::Closed { failures: 0 },
            (BreakerState::Closed { failures }, false) if failures + 1 < FAILURES => BreakerState::Closed {
                failures: failures + 1,
            },
            (BreakerState::Closed { .. }, false) => BreakerState::Open {
                until: now.plus_millis(FIRST_PAUSE),
                pause: FIRST_PAUSE,
            },
            (BreakerState::HalfOpen { pause, .. }, false) => {
                let pause = (pause * 2).min(LONGEST_PAUSE);
                BreakerState::Open {
                    until: now.plus_millis(pause),
                    pause,
                }
            }
        };
    }
}

/// How many calls may be tried again: a fifth of all calls, and a few at once. When everything fails, retries would only
/// make more of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryBudget {
    fifths: u32,
}

const MOST_FIFTHS: u32 = 100;

impl Default for RetryBudget {
    fn default() -> Self {
        Self { fifths: MOST_FIFTHS }
    }
}

impl RetryBudget {
    /// A call has begun.
    pub fn deposit(&mut self) {
        self.fifths = (self.fifths + 1).min(MOST_FIFTHS);
    }

    /// Whether one more attempt may be made.
    pub fn withdraw(&mut self) -> bool {
        let enough = self.fifths >= 5;
        if enough {
            self.fifths -= 5;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_tries_again_and_closes() {
        let mut breaker = Breaker::default();
        let start = Timestamp(0);
        for _ in 0..FAILURES {
            assert!(breaker.enter(start));
            breaker.record(false, start);
        }
        assert!(!breaker.enter(start.plus_millis(FIRST_PAUSE - 1)));
        let later = start.plus_millis(FIRST_PAUSE);
        assert!(breaker.enter(later), "one may try");
        assert!(!breaker.enter(later), "and only one");
        breaker.record(false, later);
        assert!(
            !breaker.enter(later.plus_millis(2 * FIRST_PAUSE - 1)),
            "the second pause is longer"
        );
        let again = later.plus_millis(2 * FIRST_PAUSE);
        assert!(breaker.enter(again));
        breaker.record(true, again);
        assert_eq!(breaker, Breaker::default());
    }

    #[test]
    fn a_probe_that_never_comes_back_blocks_nobody_for_ever() {
        let mut breaker = Breaker(BreakerState::Open {
            until: Timestamp(0),
            pause: FIRST_PAUSE,
        });
        assert!(breaker.enter(Timestamp(0)));
        assert!(!breaker.enter(Timestamp(1)));
        assert!(breaker.enter(Timestamp(0).plus_millis(FIRST_PAUSE)));
    }

    #[test]
    fn retries_are_a_fifth_of_calls() {
        let mut budget = RetryBudget::default();
        while budget.withdraw() {}
        let mut retried = 0;
        for _ in 0..1000 {
            budget.deposit();
            retried += u32::from(budget.withdraw());
        }
        assert_eq!(retried, 200);
    }
}

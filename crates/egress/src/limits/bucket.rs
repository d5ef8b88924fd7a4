//! A token bucket that may go into debt: what was taken is paid for by waiting afterwards, so nobody needs to know
//! beforehand how much there will be.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Bucket {
    /// Tokens each second.
    rate: u64,
    /// How much may be saved up while nothing is taken.
    burst: Duration,
    /// When everything taken so far is paid for. The more it lies in the past, the more is saved up.
    paid: Option<Instant>,
}

impl Bucket {
    /// `rate` a second, and `burst` at once after a pause.
    pub(crate) fn new(rate: u64, burst: u64) -> Self {
        let rate = rate.max(1);
        Self {
            rate,
            burst: cost(burst, rate),
            paid: None,
        }
    }

    /// For bytes: at most a quarter of a second's worth at once, but a few packets always.
    pub(crate) fn for_bandwidth(rate: u64) -> Self {
        Self::new(rate, (rate / 4).max(16 * 1024))
    }

    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }

    /// Takes `amount`. The answer is when the next may be taken, where that is not now.
    pub(crate) fn take(&mut self, amount: u64, now: Instant) -> Option<Instant> {
        let paid = self.paid_from(now) + cost(amount, self.rate);
        self.paid = Some(paid);
        // `paid` may lie `burst` ahead before anybody has to wait.
        let free = paid.checked_sub(self.burst).unwrap_or(now);
        (free > now).then_some(free)
    }

    /// Takes `amount` if it is there now, else nothing.
    pub(crate) fn try_take(&mut self, amount: u64, now: Instant) -> bool {
        let paid = self.paid_from(now) + cost(amount, self.rate);
        let affordable = paid <= now + self.burst;
        if affordable {
            self.paid = Some(paid);
        }
        affordable
    }

    fn paid_from(&self, now: Instant) -> Instant {
        self.paid.map_or(now, |paid| paid.max(now))
    }
}

fn cost(amount: u64, rate: u64) -> Duration {
    let nanos = u128::from(amount) * 1_000_000_000 / u128::from(rate);
    // Bounded, so that no sum of it and the present leaves the range of the clock.
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX).min(86_400_000_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_free_and_the_rest_takes_its_time() {
        let start = Instant::now();
        let mut bucket = Bucket::new(1000, 500);
        assert_eq!(bucket.take(500, start), None);
        let free = bucket.take(1000, start).unwrap();
        assert_eq!(free - start, Duration::from_secs(1));
        // Waiting pays, and saves up no more than the burst.
        let later = start + Duration::from_secs(100);
        assert_eq!(bucket.take(500, later), None);
        assert!(bucket.take(1, later).is_some());
    }

    #[test]
    fn trying_takes_all_or_nothing() {
        let now = Instant::now();
        let mut bucket = Bucket::new(10, 3);
        assert!((0..3).all(|_| bucket.try_take(1, now)));
        assert!(!bucket.try_take(1, now));
        assert!(bucket.try_take(1, now + Duration::from_millis(100)));
        assert!(!bucket.try_take(1, now + Duration::from_millis(100)));
    }

    #[test]
    fn over_a_long_time_the_rate_holds() {
        let start = Instant::now();
        let mut bucket = Bucket::for_bandwidth(64 * 1024);
        let mut now = start;
        let mut moved = 0;
        while now < start + Duration::from_secs(60) {
            moved += 4096;
            now = bucket.take(4096, now).unwrap_or(now);
        }
        let exact = 60 * 64 * 1024;
        assert!((exact..exact + 32 * 1024).contains(&moved), "{moved}");
    }

    #[test]
    fn absurd_amounts_do_not_overflow() {
        let mut bucket = Bucket::new(1, 1);
        assert!(bucket.take(u64::MAX, Instant::now()).is_some());
    }
}

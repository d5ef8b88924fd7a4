//! How often a key may call, and how many tokens it may use, in a minute.

use atoll_types::Timestamp;

const MINUTE: u64 = 60_000;

/// What a key may do; `None`: as much as it likes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimit {
    pub requests_per_minute: Option<u64>,
    pub tokens_per_minute: Option<u64>,
}

/// Two buckets that fill steadily and hold a minute's worth.
#[derive(Debug, Clone)]
pub struct Rate {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

#[derive(Debug, Clone)]
struct Bucket {
    per_minute: u64,
    /// In thousandths; below zero after a correction upwards.
    level: i128,
    at: Timestamp,
}

impl Rate {
    pub fn new(limit: RateLimit, now: Timestamp) -> Self {
        let bucket = |per_minute: u64| Bucket {
            per_minute,
            level: i128::from(per_minute) * 1000,
            at: now,
        };
        Self {
            requests: limit.requests_per_minute.map(bucket),
            tokens: limit.tokens_per_minute.map(bucket),
        }
    }

    /// Takes one request and `tokens`, or says how many milliseconds to wait. More tokens than a minute holds pass when the
    /// bucket is full, and have to be waited for afterwards.
    pub fn take(&mut self, tokens: u64, now: Timestamp) -> Result<(), u64> {
        let wait = [(&mut self.requests, 1), (&mut self.tokens, tokens)]
            .into_iter()
            .filter_map(|(bucket, count)| bucket.as_mut().map(|bucket| bucket.wait(count, now)))
            .max()
            .unwrap_or(0);
        if wait > 0 {
            return Err(wait);
        }
        self.spend(1, tokens);
        Ok(())
    }

    /// Puts right what was taken as an estimate.
    pub fn correct(&mut self, estimated: u64, actual: u64) {
        if let Some(bucket) = &mut self.tokens {
            bucket.level += (i128::from(estimated) - i128::from(actual)) * 1000;
        }
    }

    fn spend(&mut self, requests: u64, tokens: u64) {
        for (bucket, count) in [(&mut self.requests, requests), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.level -= i128::from(count) * 1000;
            }
        }
    }
}

impl Bucket {
    fn wait(&mut self, count: u64, now: Timestamp) -> u64 {
        if self.per_minute == 0 {
            // Nothing ever comes in. Keys that are made now have more, but there may be older ones.
            return if count == 0 { 0 } else { MINUTE };
        }
        let full = i128::from(self.per_minute) * 1000;
        let gained = i128::from(now.millis_since(self.at)) * full / i128::from(MINUTE);
        // A clock that went back gives nothing, and does not give it twice either.
        self.at = self.at.max(now);
        self.level = (self.level + gained).min(full);
        let missing = (i128::from(count) * 1000).min(full) - self.level;
        if missing <= 0 {
            return 0;
        }
        u64::try_from((missing * i128::from(MINUTE) + full - 1) / full).unwrap_or(MINUTE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_holds_what_it_says() {
        let start = Timestamp(1_000_000);
        let limit = RateLimit {
            requests_per_minute: Some(3),
            tokens_per_minute: Some(100),
        };
        let mut rate = Rate::new(limit, start);
        for _ in 0..3 {
            assert_eq!(rate.take(10, start), Ok(()));
        }
        assert_eq!(rate.take(10, start), Err(20_000));
        assert_eq!(rate.take(10, start.plus_millis(20_000)), Ok(()));
        // The clock going back neither gives nor takes.
        assert_eq!(rate.take(10, start), Err(20_000));
    }

    #[test]
    fn nothing_a_minute_is_nothing() {
        let limit = |requests_per_minute, tokens_per_minute| RateLimit {
            requests_per_minute,
            tokens_per_minute,
        };
        for limit in [limit(Some(0), None), limit(None, Some(0))] {
            let mut rate = Rate::new(limit, Timestamp(0));
            assert_eq!(rate.take(1, Timestamp(0)), Err(MINUTE), "{limit:?}");
        }
    }

    #[test]
    fn estimates_are_put_right() {
        let start = Timestamp(0);
        let mut rate = Rate::new(
            RateLimit {
                requests_per_minute: None,
                tokens_per_minute: Some(600),
            },
            start,
        );
        assert_eq!(
            rate.take(10_000, start),
            Ok(()),
            "a full bucket lets a large one through"
        );
        assert!(rate.take(1, start).is_err());
        rate.correct(10_000, 100);
        assert_eq!(rate.take(500, start), Ok(()));
        assert_eq!(rate.take(10, start), Err(1000));
    }
}

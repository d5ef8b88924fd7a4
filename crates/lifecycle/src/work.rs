//! Whether a sandbox that nobody uses is at work all the same, and since when it is not.
//!
//! ```text
//!   last use ─────┬──────────────────────────────── idle time ───────────────────────────────┐
//!                 └─ mark: CPU counted until here ── CPU since then ── connections ── look ──┘
//!                                                                                      │
//!              it worked: its idle time begins again with the last moment of work <────┴────> it did not: it is idle
//! ```
//! Calls, streams, connections to its ports and commands that were started through an API are uses, which whoever knows of
//! them notes when they happen. What is left is what nobody is told of: its own connections to the world, and its CPU time.
//! Both are looked at only when the idle time is over.
//!
//! What must hold: one that was connected within its idle time, or has used the share of a CPU that counts as work within
//! the second half of it, is not idle. What it computed before its last use may be taken for work once, so it may stay one
//! idle time longer than it should; never shorter.

use atoll_types::Timestamp;

/// From this share of one CPU on a sandbox works, in thousandths, on average over the time that is looked at. What its agent,
/// its kernel and a server that waits for requests take together is a tenth of it.
pub const WORKS_FROM_PER_MILLE: u64 = 20;

/// What the host had counted of an instance's CPU time at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuMark {
    pub at: Timestamp,
    pub micros: u64,
}

impl CpuMark {
    /// Before anything was counted: what an instance has used by the first look counts as a whole.
    pub const NONE: Self = Self {
        at: Timestamp(i64::MIN),
        micros: 0,
    };

    /// The mark to count from, now that the host has counted this much: from early in the idle time that runs, if that can be
    /// had, and else from before it.
    #[must_use]
    pub fn moved_to(self, seen: Self, last_used_at: Timestamp, idle_millis: u64) -> Self {
        let is_early = seen.at.millis_since(last_used_at) <= idle_millis / 2;
        if self.at < last_used_at && is_early {
            seen
        } else {
            self
        }
    }
}

/// What a sandbox has done that nobody asked it for, as seen at the end of its idle time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// When it last had a connection to the world: now, if one is open.
    pub connected_at: Option<Timestamp>,
    /// The mark, and what is counted now.
    pub cpu: (CpuMark, CpuMark),
}

impl Work {
    /// The last moment at which it is known to have worked since it was last used.
    pub fn last_at(&self, last_used_at: Timestamp) -> Option<Timestamp> {
        let (mark, seen) = self.cpu;
        // Of what was used before the idle time nobody knows how much it was, so all of it counts.
        let over_millis = seen.at.millis_since(mark.at.max(last_used_at));
        // A counter that went backwards is that of another instance.
        let used_micros = seen.micros.checked_sub(mark.micros).unwrap_or(seen.micros);
        let computed = used_micros > 0 && used_micros >= over_millis.saturating_mul(WORKS_FROM_PER_MILLE);
        let computed_at = computed.then_some(seen.at);
        computed_at
            .max(self.connected_at)
            .filter(|worked_at| *worked_at > last_used_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USED: Timestamp = Timestamp(1_000_000);
    const IDLE: u64 = 60_000;

    fn mark(after_use: i64, micros: u64) -> CpuMark {
        CpuMark {
            at: Timestamp(USED.0 + after_use),
            micros,
        }
    }

    fn computed(from: CpuMark, to: CpuMark) -> Option<u64> {
        let work = Work {
            connected_at: None,
            cpu: (from, to),
        };
        work.last_at(USED).map(|at| at.millis_since(USED))
    }

    #[test]
    fn two_percent_of_a_cpu_over_the_time_since_the_mark_is_work() {
        assert_eq!(computed(mark(0, 5), mark(60_000, 5)), None);
        assert_eq!(computed(mark(0, 5), mark(60_000, 5 + 1_199_999)), None);
        assert_eq!(computed(mark(0, 5), mark(60_000, 5 + 1_200_000)), Some(60_000));
        // From early in the idle time on.
        assert_eq!(computed(mark(30_000, 9_000_000), mark(60_000, 9_599_999)), None);
        assert_eq!(
            computed(mark(30_000, 9_000_000), mark(60_000, 9_600_000)),
            Some(60_000)
        );
        // Nothing is no work, in no time either.
        assert_eq!(computed(mark(60_000, 9), mark(60_000, 9)), None);
        // A new instance is counted from its beginning.
        assert_eq!(computed(mark(0, 9_000_000), mark(60_000, 0)), None);
        assert_eq!(
            computed(mark(0, 9_000_000), mark(60_000, 1_200_000)),
            Some(60_000)
        );
    }

    #[test]
    fn what_was_used_before_the_idle_time_is_never_spread_over_the_time_before_it() {
        // Hours of sleep before the last use do not hide a minute of work after it.
        let hours_ago = mark(-36_000_000, 0);
        assert_eq!(computed(hours_ago, mark(60_000, 1_200_000)), Some(60_000));
        assert_eq!(computed(hours_ago, mark(60_000, 1_199_999)), None);
        assert_eq!(computed(CpuMark::NONE, mark(60_000, 1_200_000)), Some(60_000));
    }

    #[test]
    fn the_mark_is_from_early_in_the_idle_time_or_from_before_it() {
        let moved = |from: CpuMark, to: CpuMark| from.moved_to(to, USED, IDLE) == to;
        assert!(moved(CpuMark::NONE, mark(0, 1)));
        assert!(moved(mark(-1, 0), mark(30_000, 1)), "the latest until half of it");
        assert!(
            !moved(mark(-1, 0), mark(30_001, 1)),
            "else what is done late is missed"
        );
        assert!(!moved(mark(0, 0), mark(10, 1)), "the first after the use");
        assert!(moved(mark(-9, 0), mark(-5, 1)), "a look while it is used");
    }

    #[test]
    fn a_connection_is_work_until_it_ends() {
        let connected = |at| Work {
            connected_at: Some(at),
            cpu: (CpuMark::NONE, CpuMark::NONE),
        };
        let ended = USED.plus_millis(7);
        assert_eq!(connected(ended).last_at(USED), Some(ended));
        assert_eq!(connected(USED).last_at(USED), None, "before its last use");
        // The later of the two counts.
        let both = Work {
            connected_at: Some(ended),
            cpu: (mark(0, 0), mark(60_000, 60_000_000)),
        };
        assert_eq!(both.last_at(USED), Some(USED.plus_millis(60_000)));
    }
}

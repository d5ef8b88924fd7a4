//! Days, weeks and months of UTC, from milliseconds since the epoch.

use atoll_types::{BudgetWindow, Timestamp};
use jiff::SignedDuration;
use jiff::civil::{Date, date};

const DAY: i64 = 24 * 60 * 60 * 1000;
/// After 400 years the calendar, its weeks too, begins again: 146,097 days, which are whole weeks.
const ERA: i64 = 146_097 * DAY;
const EPOCH: Date = date(1970, 1, 1);

/// One stretch of time in which a budget counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Window {
    pub start: Timestamp,
    /// Exclusive; `None`: it never ends.
    pub end: Option<Timestamp>,
}

impl Window {
    /// The one that contains `now`.
    pub fn containing(kind: BudgetWindow, now: Timestamp) -> Self {
        // Timestamps reach further than the calendar of `jiff`, so the day is looked up in the era that begins at the epoch.
        let in_era = now.0.rem_euclid(ERA);
        let today = EPOCH.saturating_add(days(in_era / DAY));
        let (first, next) = match kind {
            BudgetWindow::Total => {
                return Self {
                    start: Timestamp(i64::MIN),
                    end: None,
                };
            }
            BudgetWindow::Day => (today, today.saturating_add(days(1))),
            BudgetWindow::Week => {
                let since_monday = i64::from(today.weekday().to_monday_zero_offset());
                let monday = today.saturating_sub(days(since_monday));
                (monday, monday.saturating_add(days(7)))
            }
            BudgetWindow::Month => (
                today.first_of_month(),
                today.last_of_month().saturating_add(days(1)),
            ),
        };
        let from_now = |date: Date| date.duration_since(EPOCH).as_secs() * 1000 - in_era;
        Self {
            // The first and the last windows of all time reach beyond it.
            start: Timestamp(now.0.saturating_add(from_now(first))),
            end: now.0.checked_add(from_now(next)).map(Timestamp),
        }
    }
}

fn days(number: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 2024-02-29T12:00:00Z, a Thursday.
    const LEAP: Timestamp = Timestamp(1_709_208_000_000);

    #[test]
    fn windows_are_those_of_the_calendar() {
        for (kind, start, end) in [
            (BudgetWindow::Day, 1_709_164_800_000, 1_709_251_200_000),
            (BudgetWindow::Week, 1_708_905_600_000, 1_709_510_400_000),
            (BudgetWindow::Month, 1_706_745_600_000, 1_709_251_200_000),
        ] {
            let window = Window::containing(kind, LEAP);
            assert_eq!(
                window,
                Window {
                    start: Timestamp(start),
                    end: Some(Timestamp(end))
                },
                "{kind}"
            );
        }
    }

    #[test]
    fn the_ends_of_time_are_in_windows_too() {
        for kind in [BudgetWindow::Day, BudgetWindow::Week, BudgetWindow::Month] {
            let first = Window::containing(kind, Timestamp(i64::MIN));
            assert_eq!(first.start, Timestamp(i64::MIN), "{kind}");
            assert_eq!(
                Window::containing(kind, first.end.unwrap()).start,
                first.end.unwrap()
            );
            let last = Window::containing(kind, Timestamp(i64::MAX));
            assert_eq!(last.end, None, "{kind}");
            assert!(last.start.0 > i64::MAX - 31 * DAY, "{kind}");
        }
    }

    proptest! {
        #[test]
        fn windows_tile_time(now in i64::MIN / 2..i64::MAX / 2) {
            check_tiling(now)?;
        }

        #[test]
        fn windows_tile_our_time(now in -4_000_000_000_000_i64..8_000_000_000_000) {
            check_tiling(now)?;
        }
    }

    fn check_tiling(now: i64) -> Result<(), TestCaseError> {
        for kind in [BudgetWindow::Day, BudgetWindow::Week, BudgetWindow::Month] {
            let window = Window::containing(kind, Timestamp(now));
            let end = window.end.unwrap();
            prop_assert!(window.start.0 <= now && now < end.0);
            let days = (end.0 - window.start.0) / DAY;
            let right = match kind {
                BudgetWindow::Day => days == 1,
                BudgetWindow::Week => days == 7,
                _ => (28..=31).contains(&days),
            };
            prop_assert!(right, "{kind}: {days} days");
            prop_assert_eq!(Window::containing(kind, end).start, end);
            prop_assert_eq!(Window::containing(kind, window.start), window);
        }
        Ok(())
    }
}

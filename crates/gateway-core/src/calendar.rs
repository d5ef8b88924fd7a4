//! Days, weeks and months of UTC, from milliseconds since the epoch.

use atoll_types::{BudgetWindow, Timestamp};

const DAY: i64 = 24 * 60 * 60 * 1000;

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
        let day = now.0.div_euclid(DAY);
        let (first, last) = match kind {
            BudgetWindow::Total => {
                return Self {
                    start: Timestamp(i64::MIN),
                    end: None,
                };
            }
            BudgetWindow::Day => (day, day + 1),
            // The epoch was a Thursday.
            BudgetWindow::Week => {
                let monday = day - (day + 3).rem_euclid(7);
                (monday, monday + 7)
            }
            BudgetWindow::Month => {
                let (year, month) = year_and_month(day);
                let (next_year, next) = if month == 12 {
                    (year + 1, 1)
                } else {
                    (year, month + 1)
                };
                (first_day(year, month), first_day(next_year, next))
            }
        };
        Self {
            start: Timestamp(first * DAY),
            end: Some(Timestamp(last * DAY)),
        }
    }
}

/// The Gregorian calendar in eras of 400 years, with the year beginning in March so that the leap day is its last
/// (Howard Hinnant's `civil_from_days`).
fn year_and_month(day: i64) -> (i64, i64) {
    let shifted = day + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month)
}

/// The inverse, for the first of a month.
fn first_day(year: i64, month: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let from_march = (month + 9) % 12;
    let of_year = (153 * from_march + 2) / 5;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
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

    proptest! {
        #[test]
        fn windows_tile_time(now in -4_000_000_000_000_i64..8_000_000_000_000) {
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
        }
    }
}

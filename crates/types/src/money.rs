//! Money, exactly: US dollars in whole picodollars.
//!
//! Prices of models are quoted in dollars per million tokens with at most six decimals, so one token costs a whole number
//! of picodollars and no sum is ever rounded. An `i64` of them holds nine million dollars.

use std::fmt;
use std::ops::{Add, AddAssign};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const PER_DOLLAR: i64 = 1_000_000_000_000;
const DECIMALS: usize = 12;

/// An amount of US dollars. Sums stop at the largest amount rather than wrap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Usd(i64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsdError(String);

impl fmt::Display for UsdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is not an amount of dollars: write for example 25 or 0.50, below nine million, with at most twelve decimals",
            self.0.escape_default()
        )
    }
}

impl std::error::Error for UsdError {}

impl Usd {
    pub const ZERO: Self = Self(0);
    pub const MAX: Self = Self(i64::MAX);

    pub const fn from_pico(pico: i64) -> Self {
        Self(pico)
    }

    pub const fn pico(self) -> i64 {
        self.0
    }

    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This amount, `count` times.
    #[must_use]
    pub fn times(self, count: u64) -> Self {
        Self(self.0.saturating_mul(i64::try_from(count).unwrap_or(i64::MAX)))
    }

    /// A millionth of it; `None` where that is no whole number of picodollars.
    pub fn millionth(self) -> Option<Self> {
        (self.0 % 1_000_000 == 0).then_some(Self(self.0 / 1_000_000))
    }
}

impl Add for Usd {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Usd {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Usd {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

/// All decimals that matter, and at least two.
impl fmt::Display for Usd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let whole = self.0.unsigned_abs() / PER_DOLLAR.unsigned_abs();
        let decimals = format!("{:012}", self.0.unsigned_abs() % PER_DOLLAR.unsigned_abs());
        let shown = decimals.trim_end_matches('0').len().max(2);
        write!(f, "{sign}{whole}.{}", &decimals[..shown])
    }
}

impl FromStr for Usd {
    type Err = UsdError;

    fn from_str(text: &str) -> Result<Self, UsdError> {
        let bad = || UsdError(text.chars().take(40).collect());
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (whole, decimals) = digits.split_once('.').unwrap_or((digits, "0"));
        let are_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        // Zeros at the end say nothing.
        let decimals = if are_digits(decimals) {
            decimals.trim_end_matches('0')
        } else {
            return Err(bad());
        };
        if !are_digits(whole) || decimals.len() > DECIMALS {
            return Err(bad());
        }
        let whole: i64 = whole.parse().map_err(|_| bad())?;
        let pico: i64 = format!("{decimals:0<DECIMALS$}").parse().map_err(|_| bad())?;
        let amount = whole
            .checked_mul(PER_DOLLAR)
            .and_then(|whole| whole.checked_add(pico));
        amount
            .map(|amount| Self(if negative { -amount } else { amount }))
            .ok_or_else(bad)
    }
}

impl Serialize for Usd {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Usd {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_survive_their_text_form() {
        for (text, shown) in [
            ("0", "0.00"),
            ("25", "25.00"),
            ("0.5", "0.50"),
            ("0.000000000001", "0.000000000001"),
            ("1.2500000000000000", "1.25"),
            ("-3.1", "-3.10"),
            ("9223372.036854775807", "9223372.036854775807"),
        ] {
            let amount: Usd = text.parse().unwrap();
            assert_eq!(amount.to_string(), shown);
            assert_eq!(shown.parse(), Ok(amount));
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "1e3",
            "+1",
            " 1",
            "1,5",
            "0.0000000000001",
            "9223373",
            "--1",
            "0x1",
        ] {
            assert!(text.parse::<Usd>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn sums_stop_rather_than_wrap() {
        assert_eq!(Usd::MAX + Usd::from_pico(1), Usd::MAX);
        assert_eq!(Usd::from_pico(2).times(u64::MAX), Usd::MAX);
    }
}

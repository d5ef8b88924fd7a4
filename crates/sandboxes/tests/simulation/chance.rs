//! Choices that follow from a seed.

use std::time::Duration;

#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut chance = Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ stream);
        chance.next();
        chance
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }

    pub(crate) fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        let at = self.below(all.len() as u64);
        all.get(usize::try_from(at).unwrap())
    }

    /// Mostly nothing or a moment, at times long.
    pub(crate) fn pause(&mut self) -> Duration {
        Duration::from_millis(match self.below(10) {
            0..=3 => 0,
            4..=6 => self.below(10),
            7 | 8 => self.below(2000),
            _ => self.below(90_000),
        })
    }
}

//! Chance that can be repeated: the seed is printed, and `ATOLL_SEED` sets it.

use std::time::{SystemTime, UNIX_EPOCH};

/// SplitMix64: small, and good enough to choose moments and operations.
#[derive(Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// Seeded from `ATOLL_SEED`, else from the clock; says which.
    pub fn seeded() -> Self {
        let given = std::env::var("ATOLL_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        });
        eprintln!("seed: ATOLL_SEED={seed} repeats the choices of this run");
        Self::from_seed(seed)
    }

    pub fn from_seed(seed: u64) -> Self {
        Self { state: seed }
    }

    #[expect(
        clippy::should_implement_trait,
        reason = "it never ends, so it is no iterator"
    )]
    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

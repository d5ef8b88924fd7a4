//! Choices that a seed repeats. Every actor draws from a stream of its own, so that what one does not depend on how fast
//! the others are.

/// SplitMix64: small, and good enough to choose what happens next.
#[derive(Debug, Clone)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// The stream of one actor of a run.
    pub(super) fn of(seed: u64, actor: &str) -> Self {
        // FNV-1a: the same on every machine and in every version.
        let name = actor.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { state: seed ^ name }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// The same as an index.
    pub(super) fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or_default()
    }

    pub(super) fn one<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.index(of.len()))
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub(super) fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    /// Letters and digits that a name may have.
    pub(super) fn word(&mut self) -> String {
        format!("{:012x}", self.next() >> 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_actors_differ() {
        let draw = |seed, actor: &str| Random::of(seed, actor).next();
        assert_eq!(draw(7, "native"), draw(7, "native"));
        assert_ne!(draw(7, "native"), draw(7, "e2b"));
        assert_ne!(draw(7, "native"), draw(8, "native"));
        assert_eq!(Random::of(1, "x").bytes(13).len(), 13);
    }
}

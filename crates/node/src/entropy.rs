//! Randomness for ids and secrets, from the kernel.

use std::str::FromStr;

use atoll_types::Id;

/// A fresh id.
pub fn id<I: FreshId>() -> I {
    I::fresh()
}

pub trait FreshId {
    fn fresh() -> Self;
}

impl<K> FreshId for Id<K>
where
    Self: FromStr,
    K: atoll_types::Kind,
{
    fn fresh() -> Self {
        Self::from_entropy(bytes())
    }
}

/// Random bytes.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if crate::testing::fill(&mut bytes) {
        return bytes;
    }
    getrandom::fill(&mut bytes).expect("the kernel's random source works, or nothing here is safe");
    bytes
}

//! Randomness for ids and secrets, from the kernel.

use atoll_types::{Id, Kind};

/// A fresh id.
pub(crate) fn id<K: Kind>() -> Id<K> {
    Id::from_entropy(bytes())
}

/// Random bytes.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel's random source works, or nothing here is safe");
    bytes
}

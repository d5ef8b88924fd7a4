//! What makes a server do the same each time, for simulations: ids that follow from a seed, and no threads.
//!
//! Only with the feature of that name, which no program enables, can a thread be made so.

/// Whether this thread is to do the same each time.
#[cfg(not(feature = "testing"))]
pub(crate) fn is_determined() -> bool {
    false
}

#[cfg(not(feature = "testing"))]
pub(crate) fn fill(_: &mut [u8]) -> bool {
    false
}

#[cfg(feature = "testing")]
pub use determined::determined_by;
#[cfg(feature = "testing")]
pub(crate) use determined::{fill, is_determined};

#[cfg(feature = "testing")]
mod determined {
    use std::cell::Cell;

    thread_local! {
        static STATE: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// From now on, on this thread, ids follow from this seed, and work that blocks is done where it is asked for. Nothing
    /// that is made so is secret.
    pub fn determined_by(seed: u64) {
        STATE.set(Some(seed));
    }

    pub(crate) fn is_determined() -> bool {
        STATE.get().is_some()
    }

    /// Fills it, if this thread is determined.
    pub(crate) fn fill(bytes: &mut [u8]) -> bool {
        let Some(mut state) = STATE.get() else {
            return false;
        };
        for chunk in bytes.chunks_mut(8) {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            chunk.copy_from_slice(&z.to_le_bytes()[..chunk.len()]);
        }
        STATE.set(Some(state));
        true
    }
}

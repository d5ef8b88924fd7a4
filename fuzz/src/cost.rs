//! What a piece of work costs in memory, counted by the allocator: a short input must not make much of it.
//!
//! Counted for each thread, so that tests beside each other do not disturb each other; what a target does on other threads is
//! not counted.

#![allow(
    unsafe_code,
    reason = "an allocator is an unsafe trait; this one hands everything on"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Bytes that were taken while something ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// The most that was held at once.
    pub peak: u64,
    /// All together, freed or not: a measure of work.
    pub total: u64,
}

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
    static TOTAL: Cell<u64> = const { Cell::new(0) };
}

/// Runs `work` and says what it cost.
pub fn of(work: impl FnOnce()) -> Cost {
    let before = HELD.get();
    let total = TOTAL.get();
    PEAK.set(before);
    work();
    Cost {
        peak: u64::try_from(PEAK.get() - before).unwrap_or(0),
        total: TOTAL.get() - total,
    }
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn taken(bytes: usize) {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    // While a thread ends its counters may be gone, and nobody looks at them.
    let _ = HELD.try_with(|held| {
        let now = held.get().saturating_add(bytes);
        held.set(now);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now)));
    });
    let _ = TOTAL.try_with(|total| total.set(total.get().saturating_add(bytes.unsigned_abs())));
}

fn given_back(bytes: usize) {
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    let _ = HELD.try_with(|held| held.set(held.get().saturating_sub(bytes)));
}

// SAFETY: every call is handed on to the system's allocator unchanged; counting touches memory of this thread alone and
// allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as our caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        given_back(layout.size());
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        given_back(layout.size());
        taken(size);
        // SAFETY: as our caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_and_total_are_told_apart() {
        let cost = of(|| {
            for _ in 0..10 {
                std::hint::black_box(vec![0_u8; 1000]);
            }
        });
        assert_eq!(
            cost,
            Cost {
                peak: 1000,
                total: 10_000
            }
        );
        assert_eq!(of(|| {}), Cost::default());
    }
}

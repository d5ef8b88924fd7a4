//! A value that many look at and some wait for.
//!
//! Like tokio's `watch`, but those who wait are woken in the order in which they came. `watch` wakes them in a random one, so
//! that whoever came first may be served last, and no simulation is the same twice.

use parking_lot::{RwLock, RwLockReadGuard};

use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Shown<T> {
    value: RwLock<T>,
    changed: Notify,
}

impl<T: Clone> Shown<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: RwLock::new(value),
            changed: Notify::new(),
        }
    }

    /// Not to be held for long: whoever has something new to show waits.
    pub(crate) fn borrow(&self) -> RwLockReadGuard<'_, T> {
        self.value.read()
    }

    pub(crate) fn replace(&self, value: T) {
        *self.value.write() = value;
        self.changed.notify_waiters();
    }

    /// Has those who wait look again, at what has changed beside the value.
    pub(crate) fn look_again(&self) {
        self.changed.notify_waiters();
    }

    /// The first value from now on that is as wanted.
    pub(crate) async fn wait_for(&self, wanted: impl Fn(&T) -> bool) -> T {
        loop {
            // Before the look, so that no change is missed between the two.
            let changed = self.changed.notified();
            {
                let value = self.borrow();
                if wanted(&value) {
                    return value.clone();
                }
            }
            changed.await;
        }
    }
}

//! A channel around a guest that is held still: nothing may be under way in the pipes when its memory is saved.
//!
//! ```text
//!   hold ── taken ── (the guest is paused) ── delivered ── (it is saved) ── (it goes on) ── release
//! ```
//! What must hold:
//! - Bytes that wait in a pipe are lost when a sentry is saved, or turn up in every copy of it. So before: what was sent
//!   has been taken, at the border of a frame, and what was said has been read.
//! - What is asked of a guest that is held still waits in the outbox, within its bounds, and goes out afterwards.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_guest_protocol::FrameKind;
use tokio::time::Instant;

use super::{Guest, Inner};

/// Refers to a channel without keeping it open.
#[derive(Debug, Clone)]
pub struct WeakGuest(Weak<Inner>);

impl WeakGuest {
    pub fn upgrade(&self) -> Option<Guest> {
        self.0.upgrade().map(|inner| Guest { inner })
    }
}

impl Guest {
    pub fn downgrade(&self) -> WeakGuest {
        WeakGuest(Arc::downgrade(&self.inner))
    }

    /// From now on no frame is begun; one that was begun is completed.
    pub fn hold(&self) {
        self.inner.shared.lock_outbox().held = true;
    }

    /// Lets everything out that was held back. The guest gets at least a ping: after a save it notices waiting bytes
    /// only when another one comes.
    pub fn release(&self) {
        self.inner.shared.lock_outbox().held = false;
        self.ping();
    }

    /// Waits until the guest has read all that was sent. `false`: it has not.
    pub async fn taken(&self, within: Duration) -> bool {
        let shared = &self.inner.shared;
        until(within, || {
            shared.lock_outbox().is_at_border() && shared.wire.is_taken()
        })
        .await
    }

    /// Waits until we have read all that the guest has said. `false`: more is still there.
    pub async fn delivered(&self, within: Duration) -> bool {
        until(within, || self.inner.shared.wire.is_delivered()).await
    }

    /// Whether the guest answers a ping.
    pub async fn answers(&self, within: Duration) -> bool {
        let number = self.ping();
        until(within, || {
            self.inner.shared.ponged.load(Ordering::Relaxed) >= number
        })
        .await
    }

    /// Whether there is somebody: it answers a ping, or is held still, where nobody can ask it anything.
    pub async fn is_there(&self, within: Duration) -> bool {
        let shared = &self.inner.shared;
        let number = self.ping();
        until(within, || {
            shared.ponged.load(Ordering::Relaxed) >= number || shared.lock_outbox().held
        })
        .await
    }

    fn ping(&self) -> u64 {
        let number = self.inner.shared.pings.fetch_add(1, Ordering::Relaxed) + 1;
        let payload = number.to_le_bytes().to_vec();
        self.push(FrameKind::Ping, 0, 0, payload.into(), None);
        number
    }
}

/// Asks again and again, at first very often: mostly it is a matter of microseconds.
async fn until(within: Duration, done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + within;
    let mut turns = 0;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        turns += 1;
        if turns < 50 {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

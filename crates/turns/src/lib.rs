//! Places that are waited for, shared fairly: each project (or whatever `K` is) has a few of its own, and where all together are
//! limited, too, it waits for its own first.
//!
//! What must hold: whoever waits for a place of its own holds none of the common ones, so a project that has taken all of its
//! own waits for itself alone. Nothing is remembered of those who neither hold a place nor wait for one. Whoever stops
//! waiting has taken nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[derive(Debug)]
pub struct Turns<K> {
    /// `None`: no limit for all together.
    all: Option<Arc<Semaphore>>,
    of_one: usize,
    /// Of those who hold a place or wait for one.
    own: Mutex<HashMap<K, Weak<Semaphore>>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
#[must_use = "the place is given back when this is dropped"]
pub struct Turn {
    // Given back in this order: the common one, for which others wait, first.
    _of_all: Option<OwnedSemaphorePermit>,
    _own: Option<OwnedSemaphorePermit>,
}

impl<K: Hash + Eq + Clone> Turns<K> {
    /// `of_one` places for each, `all` for all together.
    pub fn new(of_one: usize, all: usize) -> Self {
        Self {
            all: Some(Arc::new(Semaphore::new(all))),
            ..Self::each(of_one)
        }
    }

    /// `of_one` places for each, however many there are.
    pub fn each(of_one: usize) -> Self {
        Self {
            all: None,
            of_one: of_one.max(1),
            own: Mutex::default(),
        }
    }

    /// Waits for a place, first come, first served.
    pub async fn take(&self, who: &K) -> Turn {
        // Nobody closes what is waited for, so there is always a permit.
        let own = self.of(who).acquire_owned().await.ok();
        let of_all = match &self.all {
            Some(all) => Arc::clone(all).acquire_owned().await.ok(),
            None => None,
        };
        Turn {
            _of_all: of_all,
            _own: own,
        }
    }

    fn of(&self, who: &K) -> Arc<Semaphore> {
        let mut owns = self.own.lock();
        if let Some(own) = owns.get(who).and_then(Weak::upgrade) {
            return own;
        }
        owns.retain(|_, other| other.strong_count() > 0);
        let own = Arc::new(Semaphore::new(self.of_one));
        owns.insert(who.clone(), Arc::downgrade(&own));
        own
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(1);

    async fn waits(turns: &Turns<u8>, who: u8) -> bool {
        tokio::time::timeout(SOON, turns.take(&who)).await.is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn each_waits_for_itself_and_leaves_places_to_others() {
        let turns = Turns::new(2, 4);
        let first = turns.take(&1).await;
        let second = turns.take(&1).await;
        assert!(waits(&turns, 1).await);
        // Whoever waited, and stopped, holds nothing of what others need.
        let others = [turns.take(&2).await, turns.take(&3).await];
        assert!(waits(&turns, 4).await, "there are four");
        drop(others);
        let (third, ()) = tokio::join!(turns.take(&1), async { drop(first) });
        drop((second, third));
        assert_eq!(turns.all.as_ref().unwrap().available_permits(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_for_all_nobody_waits_for_others() {
        let turns = Turns::each(1);
        let held: Vec<Turn> = {
            let mut held = Vec::new();
            for who in 0..100 {
                held.push(turns.take(&who).await);
            }
            held
        };
        assert!(waits(&turns, 7).await);
        drop(held);
        let _one = turns.take(&7).await;
        assert_eq!(turns.own.lock().len(), 1, "those who hold nothing are forgotten");
    }
}

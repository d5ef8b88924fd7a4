//! Answers that are given again: exactly the same request, by the same caller, who asked for it.
//!
//! In memory only, bounded, and gone with the server. What must hold: an answer is kept only if it was complete; it is
//! given only to whom it was given before (project, key and sandbox); and it costs nothing, since nobody was asked.

use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use atoll_types::Timestamp;
use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::{Request, Who};

/// Longer answers are not kept.
pub(crate) const LARGEST: usize = 1024 * 1024;
/// What all of them may hold together.
const MOST_BYTES: usize = 64 * 1024 * 1024;
/// What an answer costs beside its bytes, so that many small ones are bounded, too.
const OVERHEAD: usize = 200;

#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    entries: HashMap<[u8; 32], Entry>,
    /// Oldest first; those that were replaced are in it more than once.
    order: VecDeque<([u8; 32], u64)>,
    bytes: usize,
    count: u64,
}

#[derive(Debug)]
struct Entry {
    body: Bytes,
    until: Timestamp,
    /// Tells it apart from what was kept in its place before.
    number: u64,
}

/// Where the answer to a request is kept, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    digest: [u8; 32],
    keep: Duration,
}

impl Slot {
    /// `None`: the caller did not ask for it.
    pub(crate) fn of(who: &Who, request: &Request) -> Option<Self> {
        let keep = request.keep?;
        let spender = &who.spender;
        let mut hash = Sha256::new();
        let stream = match request.stream {
            None => "as said",
            Some(true) => "stream",
            Some(false) => "whole",
        };
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(spender.project.as_str().as_bytes());
        part(spender.key.as_ref().map_or("", |key| key.as_str()).as_bytes());
        part(spender.sandbox.as_ref().map_or("", |id| id.as_str()).as_bytes());
        part(request.dialect.name().as_bytes());
        part(request.model.as_deref().unwrap_or_default().as_bytes());
        part(stream.as_bytes());
        for (name, value) in &request.headers {
            part(name.as_bytes());
            part(value.as_bytes());
        }
        part(&request.body);
        Some(Self {
            digest: hash.finalize().into(),
            keep,
        })
    }
}

impl Cache {
    pub(crate) fn get(&self, slot: &Slot, now: Timestamp) -> Option<Bytes> {
        let inner = self.inner();
        let entry = inner.entries.get(&slot.digest)?;
        (now < entry.until).then(|| entry.body.clone())
    }

    pub(crate) fn put(&self, slot: &Slot, body: Bytes, now: Timestamp) {
        if body.len() > LARGEST {
            return;
        }
        let mut inner = self.inner();
        let keep = u64::try_from(slot.keep.as_millis()).unwrap_or(u64::MAX);
        inner.count += 1;
        let entry = Entry {
            until: now.plus_millis(keep),
            number: inner.count,
            body,
        };
        inner.bytes += entry.body.len() + OVERHEAD;
        inner.order.push_back((slot.digest, entry.number));
        if let Some(before) = inner.entries.insert(slot.digest, entry) {
            inner.bytes -= before.body.len() + OVERHEAD;
        }
        inner.shrink(MOST_BYTES);
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }
}

impl Inner {
    /// Forgets the oldest until the rest fits.
    fn shrink(&mut self, most: usize) {
        while self.bytes > most || self.order.len() > 2 * self.entries.len() + 16 {
            let Some((digest, number)) = self.order.pop_front() else {
                return;
            };
            let is_it = |entry: &Entry| entry.number == number;
            // Of those that were replaced only the place in the order is left.
            if self.entries.get(&digest).is_some_and(is_it)
                && let Some(gone) = self.entries.remove(&digest)
            {
                self.bytes -= gone.body.len() + OVERHEAD;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(n: u8) -> Slot {
        Slot {
            digest: [n; 32],
            keep: Duration::from_secs(1),
        }
    }

    #[test]
    fn answers_are_forgotten_when_their_time_is_up() {
        let cache = Cache::default();
        cache.put(&slot(1), Bytes::from_static(b"a"), Timestamp(0));
        assert_eq!(
            cache.get(&slot(1), Timestamp(999)).as_deref(),
            Some(b"a".as_slice())
        );
        assert_eq!(cache.get(&slot(1), Timestamp(1000)), None);
        assert_eq!(cache.get(&slot(2), Timestamp(0)), None);
        cache.put(&slot(3), vec![0; LARGEST + 1].into(), Timestamp(0));
        assert_eq!(cache.get(&slot(3), Timestamp(0)), None);
    }

    #[test]
    fn the_oldest_make_room_and_what_is_replaced_is_not_counted_twice() {
        let mut inner = Inner::default();
        let put = |inner: &mut Inner, n: u8, number: u64| {
            let body = Bytes::from(vec![n; 100]);
            inner.bytes += 100 + OVERHEAD;
            inner.order.push_back(([n; 32], number));
            let entry = Entry {
                body,
                until: Timestamp(0),
                number,
            };
            if inner.entries.insert([n; 32], entry).is_some() {
                inner.bytes -= 100 + OVERHEAD;
            }
            inner.shrink(3 * (100 + OVERHEAD));
        };
        for (number, n) in [1, 2, 1, 3, 4].into_iter().enumerate() {
            put(&mut inner, n, number as u64);
        }
        // 1 was kept anew after 2, so 2 is the oldest.
        let mut left: Vec<u8> = inner.entries.keys().map(|key| key[0]).collect();
        left.sort_unstable();
        assert_eq!((left, inner.bytes), (vec![1, 3, 4], 3 * (100 + OVERHEAD)));
        for number in 10..1000 {
            put(&mut inner, 4, number);
        }
        assert!(inner.order.len() <= 2 * inner.entries.len() + 16);
    }
}

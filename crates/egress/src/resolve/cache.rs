//! What was answered lately, for everybody: answers do not depend on who asks.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use atoll_policy::Name;
use hickory_proto::rr::RecordType;
use hickory_proto::serialize::binary::BinEncodable;
use tokio::time::Instant;

use super::Answer;

const MOST: usize = 4096;
/// Larger answers are not kept, so that the whole has a bound.
const LARGEST: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: Mutex<HashMap<(Name, RecordType), Entry>>,
}

#[derive(Debug)]
struct Entry {
    answer: Arc<Answer>,
    until: Instant,
}

impl Cache {
    pub(super) fn get(&self, name: &Name, kind: RecordType) -> Option<Arc<Answer>> {
        let entries = self.entries.lock();
        entries
            .get(&(name.clone(), kind))
            .filter(|entry| entry.until > Instant::now())
            .map(|entry| Arc::clone(&entry.answer))
    }

    #[cfg(test)]
    pub(super) fn clear(&self) {
        self.entries.lock().clear();
    }

    pub(super) fn put(&self, name: &Name, kind: RecordType, answer: &Arc<Answer>) {
        let size: usize = answer
            .records
            .iter()
            .map(|record| record.to_bytes().map_or(LARGEST, |bytes| bytes.len()))
            .sum();
        if size > LARGEST {
            return;
        }
        let now = Instant::now();
        let mut entries = self.entries.lock();
        if entries.len() >= MOST {
            make_room(&mut entries, now);
        }
        entries.insert(
            (name.clone(), kind),
            Entry {
                answer: Arc::clone(answer),
                until: now + answer.ttl,
            },
        );
    }
}

/// Drops what is over, and where that is not much, a sixteenth of the rest: what ends first.
fn make_room(entries: &mut HashMap<(Name, RecordType), Entry>, now: Instant) {
    entries.retain(|_, entry| entry.until > now);
    if entries.len() > MOST - MOST / 16 {
        let mut ends: Vec<_> = entries.values().map(|entry| entry.until).collect();
        let (_, limit, _) = ends.select_nth_unstable(MOST / 16);
        let limit = *limit;
        entries.retain(|_, entry| entry.until > limit);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn answer(seconds: u64) -> Arc<Answer> {
        Arc::new(Answer {
            exists: false,
            records: Vec::new(),
            ttl: Duration::from_secs(seconds),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_known_is_bounded_and_ends() {
        let cache = Cache::default();
        for n in 0..3 * MOST {
            let name = Name::parse(&format!("n{n}.example")).unwrap();
            cache.put(&name, RecordType::A, &answer(60 + (n as u64 % 100)));
            assert!(cache.get(&name, RecordType::A).is_some());
            assert!(cache.get(&name, RecordType::AAAA).is_none());
        }
        assert!(cache.entries.lock().len() <= MOST);
        let name = Name::parse("short.example").unwrap();
        cache.put(&name, RecordType::A, &answer(5));
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(cache.get(&name, RecordType::A).is_none());
    }
}

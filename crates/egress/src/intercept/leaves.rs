//! Certificates that were issued, so that a busy name costs a signature once.
//!
//! A guest may ask for as many names as its policy allows by wildcard. So the number is bounded for each lineage and in
//! total, and what was used longest ago goes first. Looking for it takes a walk over a bounded table, when one is full.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use atoll_broker::{MasterKey, TrustId};
use atoll_policy::Name;
use rustls::sign::CertifiedKey;

use super::InterceptError;
use super::authority::Authority;

/// After this, a leaf is issued anew; it holds for a year.
const FRESH: Duration = Duration::from_secs(7 * 24 * 60 * 60);

#[derive(Debug)]
pub(super) struct Leaves {
    key: MasterKey,
    most_trusts: usize,
    most_each: usize,
    most: usize,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    trusts: HashMap<TrustId, Trust>,
    /// Of all trusts together.
    leaves: usize,
    clock: u64,
}

#[derive(Debug)]
struct Trust {
    authority: Arc<Authority>,
    leaves: HashMap<Name, Leaf>,
    used: u64,
}

#[derive(Debug)]
struct Leaf {
    certified: Arc<CertifiedKey>,
    issued: SystemTime,
    used: u64,
}

impl Leaves {
    pub(super) fn new(key: MasterKey) -> Self {
        Self::bounded(key, 1024, 256, 4096)
    }

    fn bounded(key: MasterKey, most_trusts: usize, most_each: usize, most: usize) -> Self {
        Self {
            key,
            most_trusts,
            most_each,
            most,
            cache: Mutex::default(),
        }
    }

    pub(super) fn pem(&self, trust: &TrustId) -> Result<String, InterceptError> {
        Ok(self.authority(trust)?.pem().to_owned())
    }

    pub(super) fn get(&self, trust: &TrustId, name: &Name) -> Result<Arc<CertifiedKey>, InterceptError> {
        let now = SystemTime::now();
        if let Some(leaf) = self.lock().find(trust, name, now) {
            return Ok(leaf);
        }
        // Not under the lock: this is the expensive part. Two that come at once issue two, and one of them is kept.
        let certified = self.authority(trust)?.issue(name, now)?;
        let mut cache = self.lock();
        cache.keep(trust, name, &certified, now, self.most_each);
        while cache.leaves > self.most {
            cache.drop_oldest_trust();
        }
        Ok(certified)
    }

    fn authority(&self, trust: &TrustId) -> Result<Arc<Authority>, InterceptError> {
        if let Some(known) = self.lock().touch(trust) {
            return Ok(known.authority.clone());
        }
        let authority = Arc::new(Authority::derive(&self.key, trust)?);
        let mut cache = self.lock();
        while cache.trusts.len() >= self.most_trusts && !cache.trusts.contains_key(trust) {
            cache.drop_oldest_trust();
        }
        let fresh = Trust {
            authority,
            leaves: HashMap::new(),
            used: 0,
        };
        cache.trusts.entry(trust.clone()).or_insert(fresh);
        // The one that is in there: whoever else came at once must see the same certificate.
        let known = cache.touch(trust).map(|known| known.authority.clone());
        known.ok_or(InterceptError::Library)
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Cache> {
        self.cache.lock()
    }
}

impl Cache {
    fn touch(&mut self, trust: &TrustId) -> Option<&mut Trust> {
        self.clock += 1;
        let known = self.trusts.get_mut(trust)?;
        known.used = self.clock;
        Some(known)
    }

    fn find(&mut self, trust: &TrustId, name: &Name, now: SystemTime) -> Option<Arc<CertifiedKey>> {
        let trust = self.touch(trust)?;
        let used = trust.used;
        let leaf = trust.leaves.get_mut(name)?;
        // A clock that went backwards says nothing about the age; issue anew.
        let fresh = now.duration_since(leaf.issued).is_ok_and(|age| age < FRESH);
        leaf.used = used;
        fresh.then(|| leaf.certified.clone())
    }

    fn keep(
        &mut self,
        trust: &TrustId,
        name: &Name,
        certified: &Arc<CertifiedKey>,
        issued: SystemTime,
        most_each: usize,
    ) {
        // Another may have crowded the trust out meanwhile: then the leaf serves its one connection.
        let Some(trust) = self.touch(trust) else { return };
        let before = trust.leaves.len();
        if before >= most_each && !trust.leaves.contains_key(name) {
            remove_oldest(&mut trust.leaves, |leaf| leaf.used);
        }
        let leaf = Leaf {
            certified: certified.clone(),
            issued,
            used: trust.used,
        };
        trust.leaves.insert(name.clone(), leaf);
        let after = trust.leaves.len();
        self.leaves = self.leaves + after - before;
    }

    fn drop_oldest_trust(&mut self) {
        if let Some(dropped) = remove_oldest(&mut self.trusts, |trust| trust.used) {
            self.leaves -= dropped.leaves.len();
        }
    }
}

fn remove_oldest<K: Clone + Eq + Hash, V>(map: &mut HashMap<K, V>, used: impl Fn(&V) -> u64) -> Option<V> {
    let oldest = map
        .iter()
        .min_by_key(|(_, value)| used(value))
        .map(|(key, _)| key.clone())?;
    map.remove(&oldest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::parse(text).unwrap()
    }

    #[test]
    fn a_leaf_is_issued_once_and_the_oldest_goes_first() {
        let leaves = Leaves::bounded(MasterKey::new([1; 32]), 8, 2, 8);
        let trust = TrustId::new("t");
        let a = leaves.get(&trust, &name("a.example")).unwrap();
        let b = leaves.get(&trust, &name("b.example")).unwrap();
        assert!(Arc::ptr_eq(&a, &leaves.get(&trust, &name("a.example")).unwrap()));
        leaves.get(&trust, &name("c.example")).unwrap();
        assert!(Arc::ptr_eq(&a, &leaves.get(&trust, &name("a.example")).unwrap()));
        assert!(!Arc::ptr_eq(&b, &leaves.get(&trust, &name("b.example")).unwrap()));
    }

    #[test]
    fn the_cache_is_bounded_whoever_asks() {
        let leaves = Leaves::bounded(MasterKey::new([1; 32]), 4, 3, 6);
        for trust in 0..9 {
            for host in 0..5 {
                let trust = TrustId::new(format!("t{trust}"));
                leaves.get(&trust, &name(&format!("h{host}.example"))).unwrap();
                let cache = leaves.lock();
                assert!(cache.trusts.len() <= 4 && cache.leaves <= 6);
                let counted: usize = cache.trusts.values().map(|trust| trust.leaves.len()).sum();
                assert_eq!(counted, cache.leaves);
                assert!(cache.trusts.values().all(|trust| trust.leaves.len() <= 3));
            }
        }
    }

    #[test]
    fn an_old_leaf_is_issued_anew() {
        let leaves = Leaves::new(MasterKey::new([1; 32]));
        let trust = TrustId::new("t");
        let host = name("a.example");
        let first = leaves.get(&trust, &host).unwrap();
        for offset in [FRESH, Duration::from_secs(3600)] {
            let mut cache = leaves.lock();
            let leaf = cache
                .trusts
                .get_mut(&trust)
                .unwrap()
                .leaves
                .get_mut(&host)
                .unwrap();
            leaf.issued = match offset {
                FRESH => SystemTime::now() - offset,
                ahead => SystemTime::now() + ahead,
            };
            drop(cache);
            assert!(!Arc::ptr_eq(&first, &leaves.get(&trust, &host).unwrap()));
        }
    }
}

//! What an open vault keeps in memory: which chunks are where, and who must not lose any.
//!
//! What must hold: whatever the index offers is on the disk and stays there at least until it is taken out of the index.
//! A save that uses an offered chunk notes it in the same critical section; a collection takes chunks out in one critical
//! section in which it also sees all notes, and punches afterwards. Whatever is offered is also known to be what its hash says:
//! what another program wrote is read once more before it is shared, so nobody can make one save lose what is in it by
//! changing what another is of.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::key::{ChunkHash, Domain};
use crate::manifest::{ChunkRef, Manifest};
use crate::pack::{Kind, PackId, Place};

pub(crate) type ByHash<V> = HashMap<ChunkHash, V, BuildHasherDefault<Taken>>;

/// Takes the number that a [`ChunkHash`] offers as it is.
#[derive(Debug, Default)]
pub(crate) struct Taken(u64);

impl Hasher for Taken {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Chunks to share, by domain.
    index: HashMap<Arc<str>, ByHash<Known>>,
    /// Packs whose bytes are known to have reached the disk: those that a durable manifest refers to.
    synced: HashSet<PackId>,
    running: HashMap<u64, Running>,
    readers: HashMap<u64, Arc<Manifest>>,
    /// Saved, but their owner has not yet noted it: see [`crate::Saved`].
    held: HashMap<String, u64>,
    /// Committed since the collection under way began; `None` when there is none.
    fresh: Option<Vec<Arc<Manifest>>>,
    damaged: BTreeSet<String>,
    last_number: u64,
}

/// A chunk that is there.
#[derive(Debug, Clone, Copy)]
struct Known {
    place: Place,
    /// It was written by us, or read since.
    sure: bool,
}

/// A save that is not finished.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) id: String,
    pub(crate) pack: PackId,
    /// Chunks of others that it refers to.
    pub(crate) pins: HashSet<Place>,
    /// Whose it is, and the file without a name into which one of its streams is being written.
    pub(crate) unnamed: Option<([u8; 8], Arc<File>)>,
}

impl State {
    pub(crate) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Offers the chunks of a manifest to later saves. `usable` says of a pack whether it may be shared from.
    pub(crate) fn index(&mut self, manifest: &Manifest, usable: impl Fn(&ChunkRef) -> bool) {
        let index = self.index.entry(Arc::clone(&manifest.domain.name)).or_default();
        for chunk in manifest.chunks().filter(|chunk| usable(chunk)) {
            let new = Known {
                place: chunk.place,
                sure: manifest.packs.get(&chunk.place.pack) != Some(&Kind::Adopted),
            };
            let known = index.entry(chunk.hash).or_insert(new);
            if new.sure && !known.sure {
                *known = new;
            }
        }
    }

    /// A chunk that is there already; from now on it stays for the save that asked.
    pub(crate) fn share(&mut self, save: u64, domain: &Domain, hash: &ChunkHash, len: u32) -> Option<Place> {
        let known = *self.index.get(&domain.name)?.get(hash)?;
        self.pin(save, known, len)
            .filter(|known| known.sure)
            .map(|known| known.place)
    }

    /// Where a chunk is of which it has to be found out whether it is what was hashed; from now on it stays, too.
    pub(crate) fn unsure(&mut self, save: u64, domain: &Domain, hash: &ChunkHash, len: u32) -> Option<Place> {
        let known = *self.index.get(&domain.name)?.get(hash)?;
        let unsure = Some(known).filter(|known| !known.sure)?;
        self.pin(save, unsure, len).map(|known| known.place)
    }

    fn pin(&mut self, save: u64, known: Known, len: u32) -> Option<Known> {
        if known.place.len != len {
            return None;
        }
        self.running.get_mut(&save)?.pins.insert(known.place);
        Some(known)
    }

    /// A chunk was read and is what its hash says.
    pub(crate) fn assure(&mut self, domain: &Domain, chunk: &ChunkRef) {
        if let Some(known) = self
            .index
            .get_mut(&domain.name)
            .and_then(|index| index.get_mut(&chunk.hash))
            && known.place == chunk.place
        {
            known.sure = true;
        }
    }

    /// A chunk turned out to be broken: nobody else shall rely on it.
    pub(crate) fn disown(&mut self, domain: &Domain, chunk: &ChunkRef) {
        if let Some(index) = self.index.get_mut(&domain.name)
            && index
                .get(&chunk.hash)
                .is_some_and(|known| known.place == chunk.place)
        {
            index.remove(&chunk.hash);
        }
    }

    /// Those of `packs` that have to reach the disk before a manifest that refers to them may call itself durable.
    pub(crate) fn unsynced<'p>(&self, packs: impl Iterator<Item = &'p PackId>) -> Vec<PackId> {
        packs
            .filter(|pack| !self.synced.contains(pack))
            .copied()
            .collect()
    }

    pub(crate) fn note_synced(&mut self, manifest: &Manifest) {
        if manifest.durable {
            self.synced.extend(manifest.packs.keys());
        }
    }

    pub(crate) fn start(&mut self, id: &str, pack: PackId) -> u64 {
        let number = self.number();
        let running = Running {
            id: id.to_owned(),
            pack,
            pins: HashSet::new(),
            unnamed: None,
        };
        self.running.insert(number, running);
        number
    }

    /// What a save takes that no directory shows.
    pub(crate) fn note_unnamed(&mut self, save: u64, unnamed: Option<([u8; 8], Arc<File>)>) {
        if let Some(running) = self.running.get_mut(&save) {
            running.unnamed = unnamed;
        }
    }

    pub(crate) fn unnamed(&self) -> impl Iterator<Item = &([u8; 8], Arc<File>)> {
        self.running
            .values()
            .filter_map(|running| running.unnamed.as_ref())
    }

    pub(crate) fn is_running(&self, id: &str) -> bool {
        self.running.values().any(|running| running.id == id)
    }

    pub(crate) fn end(&mut self, save: u64) {
        self.running.remove(&save);
    }

    /// A save has become visible.
    pub(crate) fn commit(&mut self, save: u64, manifest: &Arc<Manifest>) {
        self.end(save);
        self.index(manifest, |_| true);
        self.note_synced(manifest);
        if let Some(fresh) = &mut self.fresh {
            fresh.push(Arc::clone(manifest));
        }
        *self.held.entry(manifest.id.clone()).or_default() += 1;
    }

    pub(crate) fn is_held(&self, id: &str) -> bool {
        self.held.contains_key(id)
    }

    pub(crate) fn release(&mut self, id: &str) {
        if let Some(count) = self.held.get_mut(id) {
            *count -= 1;
            if *count == 0 {
                self.held.remove(id);
            }
        }
    }

    pub(crate) fn read(&mut self, manifest: &Arc<Manifest>) -> u64 {
        let number = self.number();
        self.readers.insert(number, Arc::clone(manifest));
        number
    }

    pub(crate) fn unread(&mut self, number: u64) {
        self.readers.remove(&number);
    }

    pub(crate) fn damaged(&self) -> impl Iterator<Item = &String> {
        self.damaged.iter()
    }

    pub(crate) fn note_damaged(&mut self, id: &str, damaged: bool) {
        if damaged {
            self.damaged.insert(id.to_owned());
        } else {
            self.damaged.remove(id);
        }
    }

    /// From now on every commit is also told to the collection under way.
    pub(crate) fn collect(&mut self) {
        self.fresh = Some(Vec::new());
    }

    pub(crate) fn collected(&mut self) {
        self.fresh = None;
    }

    /// What is in use beyond the manifests that the collection has read: manifests committed since or being read, and the
    /// chunks and own packs of saves that are not finished.
    pub(crate) fn in_use(&self) -> (Vec<Arc<Manifest>>, Vec<&Running>) {
        let fresh = self.fresh.iter().flatten();
        let manifests = fresh.chain(self.readers.values()).cloned().collect();
        (manifests, self.running.values().collect())
    }

    /// Stops offering chunks of which `live` does not say that they stay, and forgets packs that go.
    pub(crate) fn withdraw(&mut self, live: impl Fn(&Place) -> bool, gone: impl Fn(&PackId) -> bool) {
        for index in self.index.values_mut() {
            index.retain(|_, known| live(&known.place));
        }
        self.index.retain(|_, index| !index.is_empty());
        self.synced.retain(|pack| !gone(pack));
    }
}

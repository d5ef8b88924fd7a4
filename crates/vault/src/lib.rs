//! Where saved sandboxes lie: memory and filesystems, of which most is the same as last time.
//!
//! ```text
//!   <dir>/vault.json                 version, secret of the chunk hashes, check value of the key; 0600
//!   <dir>/manifests/<id>             what is saved under an id: streams and references to chunks
//!   <dir>/packs/<domain tag>-<id>    the chunks that were new in one save
//!   <dir>/tmp/                       what is not finished; emptied when the vault is opened
//!   <dir>/lock                       held by the process that has the vault open
//!
//!   producer ──pipe──> reader ──1 MiB, cut into chunks──> pool: hash, known? else (encrypt and) write ──> pack
//!                         └─ a thread per stream              └─ a few threads per vault
//!   producer ──file──> reader ──1 MiB, cut into chunks──> pool: hash, known? then a hole ──> the file is the pack
//! ```
//! What must hold:
//! - Manifests are the only truth. One becomes visible by one rename, after every pack that it refers to; there are no
//!   counters that could be wrong after a crash.
//! - A durable save is on the disk, with everything that it shares, before it is acknowledged. One that is not finished
//!   leaves nothing: not when it is dropped, not when the disk is full, not when the process is killed.
//! - What is read back is what was saved, or an error: each chunk and each manifest is verified whenever it is read.
//! - A chunk is shared only if it is known to be what its hash says: written by us, or read since. Nobody who could write to
//!   a file before it became a pack can do so afterwards, or have others' saves refer to what it spoiled.
//! - Chunks are shared within a domain only, and named by a keyed hash: nobody learns from sizes or speed what others keep.
//! - With a key, nothing saved reaches the disk in plain. Without it, or with another, the vault does not open.
//! - A collection never takes a chunk that a manifest, a running save or an open reader refers to. While a manifest that is
//!   to stay cannot be read, nobody knows what it refers to, so no chunk is taken at all.
//! - Memory is bounded: a few buffers per stream, and about 64 bytes for each chunk of 64 KiB in the index.
//!
//! Every call does file work: make it from a thread that may block.

mod cut;
mod disk;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gc;
mod key;
mod lease;
mod manifest;
mod opened;
mod pack;
mod pool;
mod portable;
mod save;
mod state;
mod wire;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;

pub use error::{Error, Result};
pub use gc::GcReport;
pub use key::VaultKey;
pub use opened::{Opened, StreamInfo};
pub use save::{Growing, Save, Saved};

use disk::{Disk, allocated, check_domain, check_id, remove, sync_dir};
use error::IoContext;
use key::Secrets;
use manifest::{ChunkRef, Manifest};
use pack::{parse_file_name, stored_len};
use pool::Pool;
use state::State;

/// An open vault; cheap to clone.
#[derive(Debug, Clone)]
pub struct Vault {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    disk: Disk,
    secrets: Secrets,
    pool: Pool,
    state: Mutex<State>,
    /// Held by the one collection that may be under way.
    collecting: Mutex<()>,
}

/// What a vault, or one domain of it, takes on the disk: allocated blocks, so holes do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub packs: u64,
}

impl Vault {
    /// Opens the vault in `dir`, making it if needed. Manifests that are damaged do not prevent it: see
    /// [`Vault::damaged`]. Once opened with a key a vault needs that key; what it held before stays as it is.
    pub fn open(dir: impl AsRef<Path>, key: Option<VaultKey>) -> Result<Self> {
        let disk = Disk::open(dir.as_ref())?;
        let secrets = disk.secrets(key)?;
        let pool = Pool::new().doing("start threads for", disk.dir())?;
        let shared = Shared {
            disk,
            secrets,
            pool,
            state: Mutex::default(),
            collecting: Mutex::default(),
        };
        shared.load()?;
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Starts to save something under `id`, sharing with what else is saved in `domain`. Nothing is visible before
    /// [`Save::finish`], and nothing stays without it.
    pub fn begin(&self, id: &str, domain: &str) -> Result<Save> {
        check_id(id)?;
        check_domain(domain)?;
        Save::begin(&self.shared, id, domain)
    }

    /// Saves under `to` what is saved under `from`, in the same domain. Nothing is copied but references.
    pub fn copy(&self, from: &str, to: &str) -> Result<Saved> {
        check_id(to)?;
        // Open, so that a collection leaves alone what it refers to.
        let source = self.open_saved(from)?;
        Save::begin(&self.shared, to, source.domain())?.finish_as(source.manifest())
    }

    /// Whether what is saved reaches the disk encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.shared.secrets.encrypts()
    }

    /// Opens what is saved under `id`. It can be read until the end even if it is deleted meanwhile.
    pub fn open_saved(&self, id: &str) -> Result<Opened> {
        check_id(id)?;
        Opened::open(&self.shared, id)
    }

    /// Whether something, damaged or not, is saved under `id`.
    pub fn contains(&self, id: &str) -> bool {
        check_id(id).is_ok() && self.shared.disk.manifest(id).exists()
    }

    /// The ids under which something is saved, damaged ones included.
    pub fn ids(&self) -> Result<Vec<String>> {
        self.shared.disk.ids()
    }

    /// The ids whose manifests were found to be unreadable. As long as they are there nothing can be collected.
    pub fn damaged(&self) -> Vec<String> {
        self.shared.state.lock().damaged().cloned().collect()
    }

    /// Forgets what is saved under `id`, durably. The space comes back with [`Vault::gc`].
    pub fn delete(&self, id: &str) -> Result<()> {
        check_id(id)?;
        if !self.contains(id) {
            return Err(Error::NotFound { id: id.to_owned() });
        }
        remove(&self.shared.disk.manifest(id))?;
        self.shared.state.lock().note_damaged(id, false);
        sync_dir(&self.shared.disk.manifests_dir())
    }

    /// What the whole vault takes on the disk, manifests included.
    pub fn usage(&self) -> Result<Usage> {
        let mut usage = self.shared.packs_usage(None)?;
        for id in self.ids()? {
            usage.bytes += allocated(&self.shared.disk.manifest(&id))?;
        }
        Ok(usage)
    }

    /// What the packs written by `domain` take, saves under way included. Space of deleted saves counts until
    /// [`Vault::gc`] has run.
    pub fn usage_of(&self, domain: &str) -> Result<Usage> {
        check_domain(domain)?;
        self.shared
            .packs_usage(Some(self.shared.secrets.domain(domain).tag))
    }
}

impl Shared {
    /// Builds the index from the manifests.
    fn load(&self) -> Result<()> {
        let mut sizes = HashMap::new();
        for (tag, pack) in self.disk.packs()? {
            let path = self.disk.pack(tag, pack);
            sizes.insert(pack, fs::metadata(&path).doing("look at", &path)?.len());
        }
        let sealed = self.secrets.encrypts();
        let mut state = self.state.lock();
        self.each_manifest(&self.disk.ids()?, &mut |id, manifest| match manifest {
            Ok(manifest) => {
                // Not shared: what is in a pack that lost bytes, and what is plain while we encrypt, so that the last
                // plain chunk goes with the last save that was made without the key.
                let usable = |chunk: &ChunkRef| {
                    let end = chunk.place.offset + stored_len(chunk.place.len, sealed);
                    manifest.is_sealed(chunk.place.pack) == sealed
                        && sizes.get(&chunk.place.pack).is_some_and(|size| end <= *size)
                };
                state.index(&manifest, usable);
                state.note_synced(&manifest);
            }
            Err(error) => {
                tracing::warn!(id, %error, "saved state cannot be read");
                state.note_damaged(id, true);
            }
        });
        Ok(())
    }

    /// Reads manifests on several threads and hands them over one at a time, in any order.
    fn each_manifest(&self, ids: &[String], each: &mut dyn FnMut(&str, Result<Manifest>)) {
        let next = AtomicUsize::new(0);
        let (sender, receiver) = sync_channel(4);
        std::thread::scope(|scope| {
            for _ in 0..pool::threads().min(ids.len()) {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let manifest = Manifest::load(&self.disk.manifest(id), id, &self.secrets);
                        if sender.send((id, manifest)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            for (id, manifest) in receiver {
                each(id, manifest);
            }
        });
    }

    fn packs_usage(&self, tag: Option<[u8; 8]>) -> Result<Usage> {
        let mut usage = Usage::default();
        let unnamed: Vec<_> = self.state.lock().unnamed().cloned().collect();
        for (_, file) in unnamed.iter().filter(|(of, _)| tag.is_none_or(|tag| tag == *of)) {
            let data = file.metadata().doing("look at", self.disk.dir())?;
            usage.bytes += data.blocks() * 512;
            usage.packs += 1;
        }
        for dir in [self.disk.packs_dir(), self.disk.tmp_dir()] {
            for name in disk::names(&dir)? {
                if parse_file_name(&name).is_some_and(|(of, _)| tag.is_none_or(|tag| tag == of)) {
                    usage.bytes += allocated(&dir.join(&name))?;
                    usage.packs += 1;
                }
            }
        }
        Ok(usage)
    }
}

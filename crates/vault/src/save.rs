//! Saving: streams come in, are cut, hashed and compared with what is there, and what is new is written to a pack.
//!
//! ```text
//!   begin ──> grow(name)? ──> stream(name)* / file(name, reader)* ──> finish ──> visible
//!                  │                                    │
//!                  └──────── dropped, failed ───────────┴──> nothing left
//! ```
//! The new chunks of one stream may lie where another program wrote them: see [`growing`]. Those of all others are appended.
//!
//! `finish` gives the pack its name, lets pack and manifest reach the disk side by side when it is to be durable, and then
//! renames the manifest: a crash in between leaves at most a pack that no manifest knows, which the next collection removes.

mod growing;
mod intake;

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use growing::Growing;
use rustix::event::{EventfdFlags, eventfd};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::Shared;
use crate::disk::{check_stream, create, give_name, remove, sync_dir};
use crate::error::{Error, IoContext, Result};
use crate::key::{ChunkHash, Domain, Seal, random};
use crate::manifest::{ChunkRef, Manifest, Ref, Stream};
use crate::pack::{Kind, Pack, PackId, Place, file_name, stored_len};
use crate::state::ByHash;

const MAX_STREAMS: usize = 64;
pub(crate) const MAX_META: usize = 16 << 20;
const PIPE_BYTES: usize = 1 << 20;
/// How long the end of a stream may take when its writer is said to be done.
const PATIENCE: Duration = Duration::from_secs(30);

/// A save under way. Dropping it gives it up; writers of its streams then get `EPIPE`.
pub struct Save {
    inner: Arc<Inner>,
    streams: Mutex<Vec<Slot>>,
    finished: bool,
}

/// What a save wrote. Keep it until the save is noted wherever the `live` of [`crate::Vault::gc`] looks: until then no
/// collection takes the save away.
#[derive(Debug)]
pub struct Saved {
    /// What the streams are long.
    pub total_bytes: u64,
    /// What was added to the vault: new chunks and the manifest.
    pub stored_bytes: u64,
    _hold: Hold,
}

/// Weak, so that a forgotten one does not keep the vault locked.
#[derive(Debug)]
struct Hold {
    shared: Weak<Shared>,
    id: String,
}

struct Slot {
    name: String,
    work: Work,
}

enum Work {
    Done(Vec<Ref>),
    Thread(JoinHandle<Result<Vec<Ref>, ()>>),
}

/// What the threads of a save share.
struct Inner {
    shared: Arc<Shared>,
    number: u64,
    id: String,
    domain: Domain,
    pack: PackId,
    seal: Option<Seal>,
    new: Mutex<New>,
    /// Told when nothing grows any more in what may become the pack.
    settled: Condvar,
    /// The first thing that went wrong.
    failed: Mutex<Option<Error>>,
    /// Becomes readable when the save is given up.
    stop: OwnedFd,
    /// Set when the producer is said to be done: then whatever it wrote is in the pipes.
    finishing: OnceLock<Instant>,
}

/// The pack of this save.
#[derive(Default)]
struct New {
    chunks: ByHash<Place>,
    /// Where the next chunk is appended.
    end: u64,
    /// What its chunks take.
    stored: u64,
    file: Option<Arc<File>>,
    /// The file was written by another program, and has no name yet.
    adopted: bool,
    /// The stream that another program is still writing into what may become the pack: nothing can be appended yet.
    growing: Option<String>,
}

/// A chunk that was hashed.
struct Hashed {
    hash: ChunkHash,
    len: u32,
    /// Where in the pack it is already, if it is new.
    lies: Option<u64>,
}

type Placed = (Vec<(Place, bool)>, Option<Arc<File>>);

impl Save {
    pub(crate) fn begin(shared: &Arc<Shared>, id: &str, domain: &str) -> Result<Self> {
        let pack = PackId(random()?);
        let secrets = &shared.secrets;
        let seal = secrets.encrypts().then(|| secrets.pack_seal(pack)).transpose()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).doing("make an eventfd for", shared.disk.dir())?;
        let number = {
            let mut state = shared.state.lock();
            if state.is_running(id) || shared.disk.manifest(id).exists() {
                return Err(Error::Exists { id: id.to_owned() });
            }
            state.start(id, pack)
        };
        Ok(Self {
            inner: Arc::new(Inner {
                shared: Arc::clone(shared),
                number,
                id: id.to_owned(),
                domain: secrets.domain(domain),
                pack,
                seal,
                new: Mutex::default(),
                settled: Condvar::default(),
                failed: Mutex::default(),
                stop,
                finishing: OnceLock::new(),
            }),
            streams: Mutex::default(),
            finished: false,
        })
    }

    pub fn id(&self) -> &str {
        &self.inner.id
    }

    /// The write end of a pipe: what is written to it until it is closed is the stream. May be called for several streams,
    /// which are read side by side.
    pub fn stream(&self, name: &str) -> Result<OwnedFd> {
        let mut streams = self.new_stream(name)?;
        let path = self.inner.pack_tmp();
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).doing("make a pipe for", &path)?;
        rustix::io::ioctl_fionbio(&read, true).doing("make a pipe for", &path)?;
        // Bigger is faster, and not always allowed.
        let _ = fcntl_setpipe_size(&read, PIPE_BYTES);
        let (inner, stream) = (Arc::clone(&self.inner), name.to_owned());
        let thread = std::thread::Builder::new().name("vault-stream".into());
        let thread = thread.spawn(move || {
            let result = intake::from_pipe(&inner, &stream, &read);
            result.map_err(|error| inner.fail(error))
        });
        streams.push(Slot {
            name: name.to_owned(),
            work: Work::Thread(thread.doing("start a thread for", &path)?),
        });
        Ok(write)
    }

    /// Saves a whole file, from its beginning, on a thread of its own, which waits until nothing grows any more.
    pub fn part(&self, name: &str, mut whole: File) -> Result<()> {
        let mut streams = self.free_slot(name)?;
        let path = self.inner.pack_tmp();
        std::io::Seek::rewind(&mut whole).doing("read a part for", &path)?;
        let (inner, stream) = (Arc::clone(&self.inner), name.to_owned());
        let thread = std::thread::Builder::new().name("vault-part".into());
        let thread = thread.spawn(move || {
            inner.wait_until_settled();
            let result = intake::from_reader(&inner, &stream, &mut whole);
            result.map_err(|error| inner.fail(error))
        });
        streams.push(Slot {
            name: name.to_owned(),
            work: Work::Thread(thread.doing("start a thread for", &path)?),
        });
        Ok(())
    }

    /// Saves all that `reader` gives, on this thread.
    pub fn file(&self, name: &str, reader: &mut dyn std::io::Read) -> Result<()> {
        let at = {
            let mut streams = self.new_stream(name)?;
            streams.push(Slot {
                name: name.to_owned(),
                work: Work::Done(Vec::new()),
            });
            streams.len() - 1
        };
        match intake::from_reader(&self.inner, name, reader) {
            Ok(refs) => {
                self.streams.lock()[at].work = Work::Done(refs);
                Ok(())
            }
            Err(error) => {
                // A file that came half must not be finished as if it were whole.
                self.inner.fail(Error::Stopped);
                Err(error)
            }
        }
    }

    /// For what begins at once.
    fn new_stream(&self, name: &str) -> Result<MutexGuard<'_, Vec<Slot>>> {
        let streams = self.free_slot(name)?;
        match &self.inner.new.lock().growing {
            Some(growing) => Err(Error::Growing {
                name: name.to_owned(),
                growing: growing.clone(),
            }),
            None => Ok(streams),
        }
    }

    fn free_slot(&self, name: &str) -> Result<MutexGuard<'_, Vec<Slot>>> {
        check_stream(name)?;
        let streams = self.streams.lock();
        if streams.len() >= MAX_STREAMS {
            return Err(Error::Limit {
                what: "the number of streams",
                limit: MAX_STREAMS as u64,
            });
        }
        if streams.iter().any(|slot| slot.name == name) {
            return Err(Error::BadName {
                what: "stream name",
                name: name.to_owned(),
                rule: "each stream of a save needs a name of its own",
            });
        }
        Ok(streams)
    }

    /// Makes the save visible. To be called only after the producer has reported success and closed its streams: a stream
    /// that ends early looks like one that ends. `meta` is kept with it; `durable` lets everything reach the disk first.
    pub fn finish(self, meta: Vec<u8>, durable: bool) -> Result<Saved> {
        if meta.len() > MAX_META {
            return Err(Error::Limit {
                what: "the description of a save",
                limit: MAX_META as u64,
            });
        }
        let _ = self.inner.finishing.set(Instant::now());
        let streams = self.join();
        if let Some(error) = self.inner.failed.lock().take() {
            return Err(error);
        }
        let (own, adopted) = (self.inner.pack, self.inner.new.lock().adopted);
        let sealed = self.inner.seal.is_some();
        let kind = |pack| match (sealed, adopted && pack == own) {
            // What is shared has our way of sealing: nothing else is offered.
            (true, _) => Kind::Sealed,
            (false, true) => Kind::Adopted,
            // What we share from a pack that was adopted was read before.
            (false, false) => Kind::Plain,
        };
        self.commit(streams, meta, kind, durable)
    }

    /// Makes it a save of the very chunks that another save is of.
    pub(crate) fn finish_as(self, source: &Manifest) -> Result<Saved> {
        let kind = |pack| source.packs.get(&pack).copied().unwrap_or(Kind::Plain);
        self.commit(source.streams.clone(), source.meta.clone(), kind, true)
    }

    fn commit(
        mut self,
        streams: Vec<Stream>,
        meta: Vec<u8>,
        kind: impl Fn(PackId) -> Kind,
        durable: bool,
    ) -> Result<Saved> {
        let (manifest, stored_bytes) = self.inner.commit(streams, meta, kind, durable)?;
        self.finished = true;
        Ok(Saved {
            total_bytes: manifest
                .streams
                .iter()
                .map(Stream::len)
                .fold(0, u64::saturating_add),
            stored_bytes,
            _hold: Hold {
                shared: Arc::downgrade(&self.inner.shared),
                id: manifest.id.clone(),
            },
        })
    }

    /// Gives the save up and says why, if the vault was the reason: then the producer saw only `EPIPE`.
    pub fn abort(self) -> Option<Error> {
        self.stop();
        self.inner
            .failed
            .lock()
            .take()
            .filter(|error| !matches!(error, Error::Stopped))
    }

    fn stop(&self) {
        // Cannot fail: the counter is at 0 or 1.
        let _ = rustix::io::write(&self.inner.stop, &1_u64.to_ne_bytes());
        self.join();
    }

    /// Waits for the threads. What they could not do is in `failed`.
    fn join(&self) -> Vec<Stream> {
        let slots = std::mem::take(&mut *self.streams.lock());
        let mut streams = Vec::with_capacity(slots.len());
        for Slot { name, work } in slots {
            let refs = match work {
                Work::Done(refs) => refs,
                Work::Thread(thread) => match thread.join() {
                    Ok(Ok(refs)) => refs,
                    Ok(Err(())) => Vec::new(),
                    Err(_) => {
                        self.inner.fail(Error::Stopped);
                        Vec::new()
                    }
                },
            };
            streams.push(Stream { name, refs });
        }
        streams
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if !self.finished {
            self.stop();
            self.inner.clean();
            self.inner.shared.state.lock().end(self.inner.number);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.state.lock().release(&self.id);
        }
    }
}

impl fmt::Debug for Save {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Save({})", self.inner.id)
    }
}

impl Inner {
    /// Remembers the first error.
    fn fail(&self, error: Error) {
        self.failed.lock().get_or_insert(error);
    }

    /// Nothing grows any more.
    fn settle(&self) {
        self.new.lock().growing = None;
        self.settled.notify_all();
    }

    fn wait_until_settled(&self) {
        let mut new = self.new.lock();
        while new.growing.is_some() {
            self.settled.wait(&mut new);
        }
    }

    fn pack_tmp(&self) -> PathBuf {
        self.shared.disk.tmp(&file_name(self.domain.tag, self.pack))
    }

    fn manifest_tmp(&self) -> PathBuf {
        self.shared.disk.tmp(&format!("{}.manifest", self.id))
    }

    /// Says for each chunk where it lies or is to be written, and whether it is to be written, and gives the pack to write
    /// to. What is new stays where it lies or, if it lies nowhere yet, gets places one after another.
    fn place(&self, chunks: &[Hashed], scratch: &mut Vec<u8>) -> Result<Placed> {
        self.make_sure(chunks, scratch);
        let mut new = self.new.lock();
        let mut state = self.shared.state.lock();
        let mut places = Vec::with_capacity(chunks.len());
        for Hashed { hash, len, lies } in chunks {
            let known = new.chunks.get(hash).copied();
            let known = known.or_else(|| state.share(self.number, &self.domain, hash, *len));
            places.push(known.map_or_else(
                || {
                    let place = Place {
                        pack: self.pack,
                        offset: lies.unwrap_or(new.end),
                        len: *len,
                    };
                    let stored = stored_len(*len, self.seal.is_some());
                    if lies.is_none() {
                        new.end += stored;
                    }
                    new.stored += stored;
                    new.chunks.insert(*hash, place);
                    (place, lies.is_none())
                },
                |place| (place, false),
            ));
        }
        drop(state);
        if new.end > 0 && new.file.is_none() {
            new.file = Some(Arc::new(create(&self.pack_tmp())?));
        }
        Ok((places, new.file.clone()))
    }

    /// Reads those of the chunks that are there already but that nobody has looked at since another program wrote them. What
    /// is not what its hash says is not offered any more.
    fn make_sure(&self, chunks: &[Hashed], scratch: &mut Vec<u8>) {
        let unsure: Vec<ChunkRef> = {
            let mut state = self.shared.state.lock();
            let place = |one: &Hashed| {
                let place = state.unsure(self.number, &self.domain, &one.hash, one.len)?;
                Some(ChunkRef {
                    hash: one.hash,
                    place,
                })
            };
            chunks.iter().filter_map(place).collect()
        };
        let mut last: Option<(PackId, Result<Pack>)> = None;
        for chunk in unsure {
            let id = chunk.place.pack;
            let (_, pack) = match last.take() {
                Some(one) if one.0 == id => last.insert(one),
                _ => {
                    let path = self.shared.disk.pack(self.domain.tag, id);
                    last.insert((id, Pack::open(&path, id, false, &self.shared.secrets)))
                }
            };
            let good = pack
                .as_ref()
                .is_ok_and(|pack| pack.read(&self.domain, &[&chunk], scratch).is_ok());
            let mut state = self.shared.state.lock();
            if good {
                state.assure(&self.domain, &chunk);
            } else {
                tracing::warn!(pack = %id, offset = chunk.place.offset, "a saved chunk is not what was saved");
                state.disown(&self.domain, &chunk);
            }
        }
    }

    fn commit(
        &self,
        streams: Vec<Stream>,
        meta: Vec<u8>,
        kind: impl Fn(PackId) -> Kind,
        durable: bool,
    ) -> Result<(Arc<Manifest>, u64)> {
        let disk = &self.shared.disk;
        let mut manifest = Manifest {
            id: self.id.clone(),
            domain: self.domain.clone(),
            durable,
            meta,
            packs: HashMap::new(),
            streams,
        };
        manifest.packs = manifest
            .chunks()
            .map(|chunk| (chunk.place.pack, kind(chunk.place.pack)))
            .collect();
        let data = manifest.encode(&self.shared.secrets)?;
        let path = self.manifest_tmp();
        let file = create(&path)?;
        (&file).write_all(&data).doing("write", &path)?;
        let (pack, adopted, stored) = {
            let new = self.new.lock();
            (new.file.clone(), new.adopted, new.stored)
        };
        if let Some(pack) = pack {
            let (from, to) = (self.pack_tmp(), disk.pack(self.domain.tag, self.pack));
            if adopted {
                self.shared.state.lock().note_unnamed(self.number, None);
                give_name(&pack, &to)?;
            } else {
                fs::rename(&from, to).doing("rename", &from)?;
            }
        }
        if durable {
            std::thread::scope(|scope| {
                let packs = scope.spawn(|| self.sync_packs(&manifest));
                file.sync_data().doing("sync", &path)?;
                packs.join().unwrap_or(Err(Error::Stopped))
            })?;
        }
        let visible = disk.manifest(&self.id);
        fs::rename(&path, &visible).doing("rename", &path)?;
        if durable {
            sync_dir(&disk.manifests_dir())?;
        }
        let manifest = Arc::new(manifest);
        self.shared.state.lock().commit(self.number, &manifest);
        Ok((manifest, stored + data.len() as u64))
    }

    /// Our own pack, and those we share from that nobody has waited for yet.
    fn sync_packs(&self, manifest: &Manifest) -> Result<()> {
        let disk = &self.shared.disk;
        let packs = self.shared.state.lock().unsynced(manifest.packs.keys());
        for pack in &packs {
            let path = disk.pack(self.domain.tag, *pack);
            let file = File::open(&path).doing("open", &path)?;
            file.sync_data().doing("sync", &path)?;
        }
        if packs.is_empty() {
            return Ok(());
        }
        sync_dir(&disk.packs_dir())
    }

    /// Removes what there may be of a save that was given up: what makes it visible first.
    fn clean(&self) {
        let disk = &self.shared.disk;
        for path in [
            disk.manifest(&self.id),
            self.manifest_tmp(),
            disk.pack(self.domain.tag, self.pack),
            self.pack_tmp(),
        ] {
            if let Err(error) = remove(&path) {
                tracing::warn!(%error, "a save that was given up leaves a file behind");
            }
        }
    }
}

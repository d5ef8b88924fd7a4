//! Reading back what was saved.
//!
//! ```text
//!   refs of a stream:   chunk chunk chunk │ zeros │ chunk │ chunk chunk ...
//!                       └ side by side in ┘  hole └ other ┘ └ ...
//!                         one pack: one read, one write, by any of a few threads
//! ```
//! What must hold: no byte is handed out before the chunk that it belongs to was verified. As long as it is open, what is saved
//! can be read to its end, whatever is deleted and collected meanwhile.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::Shared;
use crate::error::{Error, IoContext, Result};
use crate::manifest::{ChunkRef, Manifest, Ref, Stream};
use crate::pack::{Pack, PackId, stored_len};
use crate::pool::threads;
use crate::state::lock;

/// What is read at once, and the least that is worth more than one thread.
const RUN: u64 = 1 << 20;
const SMALL: u64 = 4 << 20;
/// Packs kept open; a save that shares from hundreds must not use up the descriptors.
const OPEN_PACKS: usize = 64;

/// Something saved, open for reading.
#[derive(Debug)]
pub struct Opened {
    shared: Arc<Shared>,
    manifest: Arc<Manifest>,
    number: u64,
    packs: Mutex<HashMap<PackId, Arc<Pack>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamInfo {
    pub name: String,
    pub len: u64,
}

/// Chunks that follow one another both in the stream and in their pack.
struct Run<'m> {
    at: u64,
    chunks: Vec<&'m ChunkRef>,
}

/// What [`Opened::walk`] hands over.
pub(crate) enum Part<'d> {
    Zero(u64),
    Data(&'d [u8]),
}

impl Opened {
    pub(crate) fn open(shared: &Arc<Shared>, id: &str) -> Result<Self> {
        let path = shared.disk.manifest(id);
        let manifest = Manifest::load(&path, id, &shared.secrets);
        let mut state = lock(&shared.state);
        if let Err(error) = &manifest {
            state.note_damaged(id, !matches!(error, Error::NotFound { .. }));
        }
        let manifest = Arc::new(manifest?);
        // If it is still there, no collection has yet decided without us; from here on each sees us.
        if !path.exists() {
            return Err(Error::NotFound { id: id.to_owned() });
        }
        Ok(Self {
            shared: Arc::clone(shared),
            number: state.read(&manifest),
            manifest,
            packs: Mutex::default(),
        })
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn id(&self) -> &str {
        &self.manifest.id
    }

    pub fn domain(&self) -> &str {
        &self.manifest.domain.name
    }

    /// What was given to [`crate::Save::finish`].
    pub fn meta(&self) -> &[u8] {
        &self.manifest.meta
    }

    pub fn streams(&self) -> Vec<StreamInfo> {
        let info = |stream: &Stream| StreamInfo {
            name: stream.name.clone(),
            len: stream.len(),
        };
        self.manifest.streams.iter().map(info).collect()
    }

    /// Writes a stream to a file, whose contents it replaces. Zeros become holes. Says how long the stream is.
    pub fn read_to(&self, name: &str, file: &File) -> Result<u64> {
        let stream = self.stream(name)?;
        let (target, len) = (Path::new(name), stream.len());
        file.set_len(0).doing("write stream", target)?;
        file.set_len(len).doing("write stream", target)?;
        let runs = self.runs(stream);
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut buf = Vec::new();
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let copied = self
                    .read_run(run, &mut buf)
                    .and_then(|n| file.write_all_at(&buf[..n], run.at).doing("write stream", target));
                if copied.is_err() {
                    next.store(runs.len(), Ordering::Relaxed);
                    return copied;
                }
            }
            Ok(())
        };
        if len < SMALL {
            return work().map(|()| len);
        }
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads()).map(|_| scope.spawn(work)).collect();
            let mine = work();
            let theirs = helpers
                .into_iter()
                .map(|one| one.join().unwrap_or(Err(Error::Stopped)));
            theirs.fold(mine, |sum, one| sum.and(one))
        })?;
        Ok(len)
    }

    /// Writes a stream, zeros and all, to whatever takes bytes.
    pub fn write_to(&self, name: &str, out: &mut dyn Write) -> Result<u64> {
        let zeros = [0; 1 << 16];
        self.walk(name, &mut |part| {
            match part {
                Part::Data(data) => out.write_all(data),
                Part::Zero(len) => std::io::copy(
                    &mut std::io::Read::take(&mut std::io::repeat(0), len % (1 << 16)),
                    out,
                )
                .and_then(|_| (0..len >> 16).try_for_each(|_| out.write_all(&zeros))),
            }
            .doing("write stream", Path::new(name))
        })
    }

    /// Reads everything and keeps nothing: is it still what was saved?
    pub fn verify(&self) -> Result<()> {
        for stream in &self.manifest.streams {
            self.walk(&stream.name, &mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// Hands a stream over from its beginning to its end.
    pub(crate) fn walk(&self, name: &str, each: &mut dyn FnMut(Part<'_>) -> Result<()>) -> Result<u64> {
        let stream = self.stream(name)?;
        let (mut at, mut buf) = (0, Vec::new());
        let zeros = |at: u64, to: u64, each: &mut dyn FnMut(Part<'_>) -> Result<()>| {
            if to > at {
                each(Part::Zero(to - at))
            } else {
                Ok(())
            }
        };
        for run in self.runs(stream) {
            zeros(at, run.at, each)?;
            let n = self.read_run(&run, &mut buf)?;
            each(Part::Data(&buf[..n]))?;
            at = run.at + n as u64;
        }
        zeros(at, stream.len(), each)?;
        Ok(stream.len())
    }

    fn stream(&self, name: &str) -> Result<&Stream> {
        let mut streams = self.manifest.streams.iter();
        streams
            .find(|stream| stream.name == name)
            .ok_or_else(|| Error::NoStream {
                id: self.manifest.id.clone(),
                name: name.to_owned(),
            })
    }

    fn runs<'m>(&self, stream: &'m Stream) -> Vec<Run<'m>> {
        let mut runs: Vec<Run<'m>> = Vec::new();
        // Where the last run ends: in the stream, in its pack, and how long it is.
        let mut last = None;
        let mut at = 0;
        for one in &stream.refs {
            if let Ref::Chunk(chunk) = one {
                let place = chunk.place;
                let end = place.offset + stored_len(place.len, self.manifest.is_sealed(place.pack));
                let len = u64::from(place.len);
                match (last, runs.last_mut()) {
                    (Some((to, pack, offset, size)), Some(run))
                        if to == at && pack == place.pack && offset == place.offset && size + len <= RUN =>
                    {
                        run.chunks.push(chunk);
                        last = Some((at + len, pack, end, size + len));
                    }
                    _ => {
                        let chunks = vec![chunk];
                        runs.push(Run { at, chunks });
                        last = Some((at + len, place.pack, end, len));
                    }
                }
            }
            at = at.saturating_add(one.len());
        }
        runs
    }

    fn read_run(&self, run: &Run<'_>, buf: &mut Vec<u8>) -> Result<usize> {
        let Some(first) = run.chunks.first() else {
            return Ok(0);
        };
        let pack = self.pack(first.place.pack)?;
        let domain = &self.manifest.domain;
        pack.read(domain, &run.chunks, buf).map_err(|broken| {
            lock(&self.shared.state).disown(domain, &broken.chunk);
            let path = self.shared.disk.pack(domain.tag, first.place.pack);
            broken.into_error(&self.manifest.id, &path)
        })
    }

    fn pack(&self, id: PackId) -> Result<Arc<Pack>> {
        let mut packs = lock(&self.packs);
        if let Some(pack) = packs.get(&id) {
            return Ok(Arc::clone(pack));
        }
        if packs.len() >= OPEN_PACKS {
            packs.clear();
        }
        let path = self.shared.disk.pack(self.manifest.domain.tag, id);
        let sealed = self.manifest.is_sealed(id);
        let pack = Arc::new(Pack::open(&path, id, sealed, &self.shared.secrets)?);
        packs.insert(id, Arc::clone(&pack));
        Ok(pack)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        lock(&self.shared.state).unread(self.number);
    }
}

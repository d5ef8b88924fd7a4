//! Reading back what was saved.
//!
//! ```text
//!   refs of a stream:   chunk chunk chunk │ zeros │ chunk │ chunk chunk ...
//!                       └ side by side in ┘  hole └ other ┘ └ ...
//!                         one pack: one read, one write, by any of a few threads
//! ```
//! What must hold: no byte is handed out before the chunk that it belongs to was verified. As long as it is open, what is saved
//! can be read to its end, whatever is deleted and collected meanwhile; and so can a pack that was lent, as long as whoever it
//! was lent to has it open.

use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::Shared;
use crate::cut::is_zero;
use crate::disk::reopen;
use crate::error::{Error, IoContext, Result};
use crate::manifest::{ChunkRef, Manifest, Ref, Stream};
use crate::pack::{Kind, Pack, PackId, stored_len};
use crate::pool::threads;

/// What is read at once, and the least that is worth more than one thread.
const RUN: u64 = 1 << 20;
const SMALL: u64 = 4 << 20;
/// One part in so many is little.
const LITTLE: u64 = 8;
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
        let mut state = shared.state.lock();
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
        self.each_run(stream, &|data, at| {
            file.write_all_at(data, at).doing("write stream", target)
        })?;
        Ok(len)
    }

    /// The pack that a stream lies in, to be read only, if it lies there as it was written: from its beginning, with zeros where
    /// it has zeros, and little of it elsewhere, which is then put where it was. Everything was verified then. What follows
    /// behind the end of the stream is of the same save, or of the one that it is a copy of.
    pub fn lend(&self, name: &str) -> Result<Option<File>> {
        let stream = self.stream(name)?;
        // In one that this save only shares from lies what is another's.
        let own = |(id, kind): (&PackId, &Kind)| (*kind == Kind::Adopted).then_some(*id);
        let Some(pack) = self.manifest.packs.iter().find_map(own) else {
            return Ok(None);
        };
        let Layout {
            len,
            zeros,
            elsewhere,
            missing,
        } = Layout::of(stream, pack);
        if missing > len / LITTLE {
            return Ok(None);
        }
        let path = self.shared.disk.pack(self.manifest.domain.tag, pack);
        let file = File::open(&path).doing("open", &path)?;
        if file.metadata().doing("look at", &path)?.len() < len {
            return Ok(None);
        }
        for (from, to) in zeros {
            if !is_zero_between(&file, from, to).doing("read", &path)? {
                return Ok(None);
            }
        }
        // Nobody refers to what is put there, so a collection that has begun would take it away again. One that begins later
        // sees that the file is open.
        let _no_collection = match (elsewhere.is_empty(), self.shared.collecting.try_lock()) {
            (true, _) => None,
            (false, Some(guard)) => Some(guard),
            (false, None) => return Ok(None),
        };
        let filling = match elsewhere.is_empty() {
            true => None,
            false => Some(reopen(&file, true)?),
        };
        self.each_run(stream, &|data, at| match &filling {
            Some(file) if elsewhere.contains(&at) => file.write_all_at(data, at).doing("write", &path),
            _ => Ok(()),
        })?;
        std::io::Seek::rewind(&mut &file).doing("read", &path)?;
        Ok(Some(file))
    }

    /// Hands over what is not zero, verified, in any order and from several threads.
    fn each_run(&self, stream: &Stream, each: &(dyn Fn(&[u8], u64) -> Result<()> + Sync)) -> Result<()> {
        let runs = self.runs(stream);
        let next = AtomicUsize::new(0);
        let work = || -> Result<()> {
            let mut buf = Vec::new();
            while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let done = self.read_run(run, &mut buf).and_then(|n| each(&buf[..n], run.at));
                if done.is_err() {
                    next.store(runs.len(), Ordering::Relaxed);
                    return done;
                }
            }
            Ok(())
        };
        if stream.len() < SMALL {
            return work();
        }
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads()).map(|_| scope.spawn(work)).collect();
            let mine = work();
            let theirs = helpers
                .into_iter()
                .map(|one| one.join().unwrap_or(Err(Error::Stopped)));
            theirs.fold(mine, |sum, one| sum.and(one))
        })
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
            self.shared.state.lock().disown(domain, &broken.chunk);
            let path = self.shared.disk.pack(domain.tag, first.place.pack);
            broken.into_error(&self.manifest.id, &path)
        })
    }

    fn pack(&self, id: PackId) -> Result<Arc<Pack>> {
        let mut packs = self.packs.lock();
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

/// How a stream lies in the pack that it was written into.
struct Layout {
    len: u64,
    zeros: Vec<(u64, u64)>,
    /// Where in the stream something begins that lies elsewhere.
    elsewhere: HashSet<u64>,
    /// How much that is.
    missing: u64,
}

impl Layout {
    fn of(stream: &Stream, pack: PackId) -> Self {
        let mut layout = Self {
            len: 0,
            zeros: Vec::new(),
            elsewhere: HashSet::new(),
            missing: 0,
        };
        for one in &stream.refs {
            let at = layout.len;
            layout.len = at.saturating_add(one.len());
            match one {
                Ref::Zero(_) => layout.zeros.push((at, layout.len)),
                Ref::Chunk(chunk) if (chunk.place.pack, chunk.place.offset) != (pack, at) => {
                    layout.elsewhere.insert(at);
                    layout.missing += one.len();
                }
                Ref::Chunk(_) => {}
            }
        }
        layout
    }
}

/// Whether there is nothing but zeros, or nothing at all.
fn is_zero_between(file: &File, from: u64, to: u64) -> std::io::Result<bool> {
    let (mut at, mut buf) = (from, vec![0; 1 << 16]);
    while at < to {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.max(at),
            Err(Errno::NXIO) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        if start >= to {
            return Ok(true);
        }
        let end = seek(file, SeekFrom::Hole(start))?.clamp(start + 1, to);
        at = start;
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(buf.len());
            file.read_exact_at(&mut buf[..len], at)?;
            if !is_zero(&buf[..len]) {
                return Ok(false);
            }
            at += len as u64;
        }
    }
    Ok(true)
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.shared.state.lock().unread(self.number);
    }
}

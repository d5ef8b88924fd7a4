//! A stream that another program is still writing, into a file that becomes the pack.
//!
//! ```text
//!   file without a name    ████████████ zeros ████████████████ ...   written front to back by another program
//!   read, cut, hashed      new    known       new     known          behind it
//!   whole, nobody writes   ████░░░░░░░░░░░░░░░████████░░░░░░░│other streams   what is not new is punched out
//! ```
//! Memory is most of a save and most of it is new, so it is written once: a chunk that is new stays where it was written, and
//! need not be copied to be read, either ([`crate::Opened::lend`]). When less than half is new, or somebody may still write to
//! the file, the new chunks are copied to a pack of ours, and the file is forgotten. With a key nothing plain may reach the disk: then the file is one that the caller gives, and is copied too.
//!
//! What must hold:
//! - Whoever writes the file is not trusted. It may write again what was read and hashed before. What was copied is compared
//!   with its hash once more. What stays where it is is compared before anybody else shares it ([`crate::state`]), and like
//!   every chunk whenever it is read back: so whoever did that has spoiled its own save, which then counts as damaged, and
//!   nothing else.
//! - A file is taken over only when nobody has it open for writing any more: a pack changes by holes alone. To open it again
//!   takes its name and our rights.
//! - It has no name before the save is finished, so whatever happens earlier leaves nothing.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Inner, New, PATIENCE, Save, Slot, Work, intake};
use crate::cut::{self, Cut};
use crate::disk::{punch, reopen, unnamed};
use crate::error::{Error, IoContext, Result};
use crate::gc::{block_size, gaps};
use crate::lease::nobody_writes;
use crate::manifest::{ChunkRef, Ref};

/// How often it is looked whether there is more.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000,
};

const GROWS: u8 = 0;
const GIVEN_UP: u8 = 1;
const WHOLE: u8 = 2;

/// How long whoever says that it is done may take to close the file.
const CLOSING: Duration = Duration::from_millis(20);

/// A stream that is being taken in while its file grows. Dropping it before it is finished gives up the save.
#[derive(Debug)]
pub struct Growing {
    told: Arc<AtomicU8>,
    done: Receiver<()>,
}

impl Save {
    /// A file to write a stream into, from its beginning to its end and nothing twice. It is read as it grows. If nothing
    /// else was saved before, and there is no key, it may become the pack of this save; then no other stream can begin before
    /// this one is finished. Else it is one from `elsewhere`.
    pub fn grow(
        &self,
        name: &str,
        elsewhere: impl FnOnce() -> std::io::Result<File>,
    ) -> Result<(File, Growing)> {
        let inner = &self.inner;
        let mut streams = self.new_stream(name)?;
        let room = match inner.seal.is_none() && streams.is_empty() {
            true => unnamed(&inner.shared.disk.packs_dir())?,
            false => None,
        };
        let in_place = room.is_some();
        let file = match room {
            Some(file) => file,
            None => elsewhere().doing("make room for stream", Path::new(name))?,
        };
        // To be read only: as long as we could write, nobody can tell whether others do.
        let reader = Arc::new(reopen(&file, false)?);
        let told = Arc::new(AtomicU8::new(GROWS));
        let (sender, done) = sync_channel(1);
        let growth = Growth {
            inner: Arc::clone(inner),
            name: name.to_owned(),
            told: Arc::clone(&told),
            file: Arc::clone(&reader),
        };
        let thread = std::thread::Builder::new().name("vault-growing".into());
        let thread = thread.spawn(move || {
            let taken = growth.take_in(in_place);
            let taken = taken.map_err(|error| growth.inner.fail(error));
            growth.inner.settle();
            drop(growth);
            if taken.is_ok() {
                let _ = sender.send(());
            }
            taken
        });
        streams.push(Slot {
            name: name.to_owned(),
            work: Work::Thread(thread.doing("start a thread for stream", Path::new(name))?),
        });
        if in_place {
            inner.new.lock().growing = Some(name.to_owned());
            let unnamed = Some((inner.domain.tag, reader));
            inner.shared.state.lock().note_unnamed(inner.number, unnamed);
        }
        Ok((file, Growing { told, done }))
    }
}

impl Growing {
    /// The file is whole. It should be closed: what somebody can still write to is copied.
    pub fn whole(&self) {
        self.told.store(WHOLE, Ordering::Release);
    }

    /// Waits until all of the whole file was taken in. If this fails, [`Save::abort`] says why.
    pub fn finish(self) -> Result<()> {
        self.whole();
        self.done.recv().map_err(|_| Error::Stopped)
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        let _ = self
            .told
            .compare_exchange(GROWS, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
    }
}

struct Growth {
    inner: Arc<Inner>,
    name: String,
    told: Arc<AtomicU8>,
    file: Arc<File>,
}

impl Growth {
    fn take_in(&self, in_place: bool) -> Result<Vec<Ref>> {
        let mut at = 0;
        let mut refs = intake::from_pieces(&self.inner, in_place, &mut |buf| {
            let read = self.more(buf, at)?;
            at += read as u64;
            Ok(read)
        })?;
        if in_place {
            self.settle(at, &mut refs)?;
        }
        Ok(refs)
    }

    /// What there is from `at` on; nothing only at the end.
    fn more(&self, buf: &mut [u8], at: u64) -> Result<usize> {
        let path = Path::new(&self.name);
        loop {
            // Looked at before the file: what is whole then is whole.
            let told = self.told.load(Ordering::Acquire);
            if told == GIVEN_UP {
                return Err(Error::Stopped);
            }
            match self.file.read_at(buf, at) {
                Ok(0) if told == GROWS => self.wait()?,
                Ok(0) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => return read.doing("read stream", path),
            }
        }
        self.is_long(at).map(|()| 0)
    }

    /// Refuses a file that is not as long as what was read of it.
    fn is_long(&self, at: u64) -> Result<()> {
        let path = Path::new(&self.name);
        let len = self.file.metadata().doing("read stream", path)?.len();
        if len == at {
            return Ok(());
        }
        let why = format!("{at} bytes of it were read, and now it has {len}");
        Err(Error::io(std::io::Error::other(why), "read stream", path))
    }

    /// A moment, or until the save is given up.
    fn wait(&self) -> Result<()> {
        let stop = PollFd::from_borrowed_fd(self.inner.stop.as_fd(), PollFlags::IN);
        match poll(&mut [stop], Some(&LOOK_EVERY)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Err(Error::Stopped),
            Err(error) => return Err(error).doing("read stream", Path::new(&self.name)),
        }
        match self.inner.finishing.get() {
            Some(since) if since.elapsed() > PATIENCE => Err(Error::NotClosed {
                name: self.name.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Makes the file the pack, or copies from it what is new.
    fn settle(&self, len: u64, refs: &mut [Ref]) -> Result<()> {
        let inner = &self.inner;
        let worthwhile = {
            let new = inner.new.lock();
            new.stored > 0 && new.stored >= len / 2
        };
        let settled = worthwhile && self.closed()?;
        let mut new = inner.new.lock();
        tracing::debug!(
            stream = self.name,
            len,
            new = new.stored,
            adopted = settled,
            "a stream is whole"
        );
        if settled {
            self.is_long(len)?;
            self.adopt(len, refs, &mut new)?;
            return Ok(());
        }
        // Nothing else was saved yet, so nothing else refers to what lies in the file.
        let growing = new.growing.take();
        *new = New {
            growing,
            ..New::default()
        };
        drop(new);
        self.copy(refs)?;
        inner.shared.state.lock().note_unnamed(inner.number, None);
        Ok(())
    }

    /// Waits until nobody can write to the file any more, if that is soon.
    fn closed(&self) -> Result<bool> {
        let began = Instant::now();
        while !nobody_writes(&self.file) {
            if began.elapsed() > CLOSING {
                tracing::debug!(
                    stream = self.name,
                    "somebody keeps a file open that is to be a pack"
                );
                return Ok(false);
            }
            self.wait()?;
        }
        Ok(true)
    }

    fn adopt(&self, len: u64, refs: &[Ref], new: &mut New) -> Result<()> {
        let path = self.inner.pack_tmp();
        let file = reopen(&self.file, true)?;
        let block = block_size(&file.metadata().doing("look at", &path)?);
        let mut chunks = BTreeMap::new();
        for one in refs {
            if let Ref::Chunk(ChunkRef { place, .. }) = one
                && place.pack == self.inner.pack
            {
                chunks.insert(place.offset, place.offset + u64::from(place.len));
            }
        }
        // Now, before it is written back: what is not on the disk yet need not be taken off it.
        for (from, to) in gaps(&chunks, len, block) {
            match punch(&file, from.next_multiple_of(block), to / block * block, &path) {
                // It stays, as what a collection would punch.
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::Unsupported => break,
                other => other?,
            }
        }
        new.end = len.next_multiple_of(block);
        new.file = Some(Arc::new(file));
        new.adopted = true;
        Ok(())
    }

    /// Copies what is new to a pack of ours.
    fn copy(&self, refs: &mut [Ref]) -> Result<()> {
        let inner = &self.inner;
        let (mut buf, mut scratch) = (vec![0; cut::MAX], Vec::new());
        // Where what lay here is now.
        let mut moved: HashMap<u64, Ref> = HashMap::new();
        for one in refs {
            let Ref::Chunk(chunk) = one else { continue };
            if chunk.place.pack != inner.pack {
                continue;
            }
            if let Some(there) = moved.get(&chunk.place.offset) {
                *one = *there;
                continue;
            }
            let data = &mut buf[..chunk.place.len as usize];
            let path = Path::new(&self.name);
            self.file
                .read_exact_at(data, chunk.place.offset)
                .doing("read stream", path)?;
            let whole = Cut {
                start: 0,
                end: data.len(),
                zero: false,
            };
            let stored = intake::store(inner, data, &[whole], None, &mut scratch)?;
            let there = match stored.first() {
                Some(there @ Ref::Chunk(new)) if new.hash == chunk.hash => *there,
                _ => {
                    let why = format!("what is at byte {} changed after it was read", chunk.place.offset);
                    return Err(Error::io(std::io::Error::other(why), "read stream", path));
                }
            };
            moved.insert(chunk.place.offset, there);
            *one = there;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    /// A writer takes back what was read already.
    #[test]
    fn a_file_that_shrinks_is_not_taken_for_whole() {
        let directory = tempfile::tempdir().unwrap();
        let vault = crate::Vault::open(directory.path(), None).unwrap();
        let save = vault.begin("a", "prj").unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 3000], 0).unwrap();
        let growth = Growth {
            inner: Arc::clone(&save.inner),
            name: "pages".into(),
            told: Arc::new(AtomicU8::new(GROWS)),
            file: Arc::new(reopen(&file, false).unwrap()),
        };
        let mut buf = [0; 2000];
        assert_eq!(growth.more(&mut buf, 0).unwrap(), 2000);
        file.set_len(1500).unwrap();
        growth.told.store(WHOLE, Ordering::Release);
        let error = growth.more(&mut buf, 2000).unwrap_err();
        assert!(error.to_string().contains("now it has 1500"), "{error}");
        file.set_len(2000).unwrap();
        assert_eq!(growth.more(&mut buf, 2000).unwrap(), 0, "as long as was read");
    }
}

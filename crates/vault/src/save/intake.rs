//! One stream on its way in: read, cut, handed to the pool in pieces, and put together again in order. What is new is written
//! to the pack, unless the stream is being read from what is to become the pack: then it stays where it lies.
//!
//! What must hold: at most [`BUFFERS`] buffers per stream, each either being filled here or with the pool; when a function of
//! this module returns, the pool works for the stream no more.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::unix::fs::FileExt;

use super::{Hashed, Inner, PATIENCE};
use crate::cut::{self, Cut, Cutter};
use crate::error::{Error, IoContext, Result};
use crate::key::chunk_aad;
use crate::manifest::{ChunkRef, Ref, push_ref};

/// What is cut and handed on at a time, and room for the chunk that is not complete.
const SEGMENT: usize = (1 << 20) + cut::MAX;
const BUFFERS: usize = 4;

pub(super) fn from_pipe(inner: &Arc<Inner>, name: &str, pipe: &OwnedFd) -> Result<Vec<Ref>> {
    Intake::new(inner, false).take(&mut |buf| {
        loop {
            match rustix::io::read(pipe, &mut *buf) {
                Ok(n) => return Ok(n),
                Err(Errno::AGAIN) => wait(inner, name, pipe)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).doing("read stream", Path::new(name)),
            }
        }
    })
}

pub(super) fn from_reader(
    inner: &Arc<Inner>,
    name: &str,
    reader: &mut dyn std::io::Read,
) -> Result<Vec<Ref>> {
    Intake::new(inner, false).take(&mut |buf| {
        loop {
            match reader.read(buf) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other.doing("read stream", Path::new(name)),
            }
        }
    })
}

/// A stream that `read` gives piece by piece, and nothing at its end. `in_place`: it is read from what is to become the pack.
pub(super) fn from_pieces(
    inner: &Arc<Inner>,
    in_place: bool,
    read: &mut dyn FnMut(&mut [u8]) -> Result<usize>,
) -> Result<Vec<Ref>> {
    Intake::new(inner, in_place).take(read)
}

/// Until there is something to read, or the save is given up.
fn wait(inner: &Inner, name: &str, pipe: &OwnedFd) -> Result<()> {
    let mut fds = [
        PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(inner.stop.as_fd(), PollFlags::IN),
    ];
    let second = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    match poll(&mut fds, Some(&second)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error).doing("read stream", Path::new(name)),
    }
    if !fds[1].revents().is_empty() {
        return Err(Error::Stopped);
    }
    let late = inner
        .finishing
        .get()
        .is_some_and(|since| since.elapsed() > PATIENCE);
    if late && fds[0].revents().is_empty() {
        return Err(Error::NotClosed {
            name: name.to_owned(),
        });
    }
    Ok(())
}

struct Intake<'i> {
    inner: &'i Arc<Inner>,
    in_place: bool,
    sender: Sender<Done>,
    done: Receiver<Done>,
    free: Vec<Vec<u8>>,
    buffers: usize,
    away: usize,
    /// Results by number of the piece.
    pieces: Vec<Vec<Ref>>,
}

struct Done {
    piece: usize,
    buf: Vec<u8>,
    refs: Result<Vec<Ref>>,
}

/// Answers for a piece exactly once, also when its job dies.
struct Reply {
    sender: Sender<Done>,
    piece: usize,
    sent: bool,
}

impl Reply {
    fn send(&mut self, buf: Vec<u8>, refs: Result<Vec<Ref>>) {
        self.sent = true;
        // Nobody listens only when the reader has died, and then nobody waits.
        let _ = self.sender.send(Done {
            piece: self.piece,
            buf,
            refs,
        });
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.sent {
            self.send(Vec::new(), Err(Error::Stopped));
        }
    }
}

impl<'i> Intake<'i> {
    fn new(inner: &'i Arc<Inner>, in_place: bool) -> Self {
        let (sender, done) = channel();
        Self {
            inner,
            in_place,
            sender,
            done,
            free: Vec::new(),
            buffers: 0,
            away: 0,
            pieces: Vec::new(),
        }
    }

    fn take(mut self, read: &mut dyn FnMut(&mut [u8]) -> Result<usize>) -> Result<Vec<Ref>> {
        let mut result = self.read_all(read);
        while self.away > 0 {
            result = result.and(self.collect());
        }
        for buf in self.free.drain(..) {
            self.inner.shared.pool.give_back(buf);
        }
        result?;
        let mut refs = Vec::with_capacity(self.pieces.iter().map(Vec::len).sum());
        for one in self.pieces.into_iter().flatten() {
            push_ref(&mut refs, one);
        }
        Ok(refs)
    }

    fn read_all(&mut self, read: &mut dyn FnMut(&mut [u8]) -> Result<usize>) -> Result<()> {
        let (mut cutter, mut cuts) = (Cutter::default(), Vec::new());
        let mut buf = self.buffer()?;
        // Where in the stream the buffer begins.
        let mut base = 0;
        let mut filled = 0;
        loop {
            let n = read(&mut buf[filled..])?;
            if n == 0 {
                break;
            }
            filled += n;
            cutter.scan(&buf[..filled], &mut cuts);
            if filled == buf.len() {
                let rest = cutter.settle(&mut cuts);
                let mut next = self.buffer()?;
                filled -= rest;
                next[..filled].copy_from_slice(&buf[rest..]);
                cutter.rebase();
                let lies = self.in_place.then_some(base);
                base += rest as u64;
                self.hand_on(std::mem::replace(&mut buf, next), std::mem::take(&mut cuts), lies);
            }
        }
        cutter.finish(&buf[..filled], &mut cuts);
        // The end of a stream, and so all of a small one, is not worth a change of threads.
        let lies = self.in_place.then_some(base);
        let refs = store(self.inner, &buf, &cuts, lies, &mut Vec::new())?;
        self.pieces.push(refs);
        self.free.push(buf);
        Ok(())
    }

    /// An empty buffer; waits for one to come back when there are enough.
    fn buffer(&mut self) -> Result<Vec<u8>> {
        if self.buffers < BUFFERS {
            self.buffers += 1;
            return Ok(self.inner.shared.pool.buffer(SEGMENT));
        }
        while self.free.is_empty() {
            self.collect()?;
        }
        Ok(self.free.pop().unwrap_or_default())
    }

    fn collect(&mut self) -> Result<()> {
        // Cannot fail: we hold a sender ourselves.
        let done = self.done.recv().map_err(|_| Error::Stopped)?;
        self.away -= 1;
        self.free.push(done.buf);
        self.pieces[done.piece] = done.refs?;
        Ok(())
    }

    fn hand_on(&mut self, buf: Vec<u8>, cuts: Vec<Cut>, lies: Option<u64>) {
        let mut reply = Reply {
            sender: self.sender.clone(),
            piece: self.pieces.len(),
            sent: false,
        };
        self.pieces.push(Vec::new());
        self.away += 1;
        let inner = Arc::clone(self.inner);
        self.inner.shared.pool.run(Box::new(move |scratch| {
            let refs = store(&inner, &buf, &cuts, lies, scratch);
            // Before the answer: whoever gets it may drop the vault and expect it to be closed.
            drop(inner);
            reply.send(buf, refs);
        }));
    }
}

/// Hashes the pieces of a buffer and writes those that are new. `lies`: where in the pack the buffer was read from; then there
/// is nothing to be written.
pub(super) fn store(
    inner: &Inner,
    buf: &[u8],
    cuts: &[Cut],
    lies: Option<u64>,
    scratch: &mut Vec<u8>,
) -> Result<Vec<Ref>> {
    let data = || cuts.iter().filter(|cut| !cut.zero);
    let hashes: Vec<_> = data()
        .map(|cut| {
            // At most cut::MAX.
            let len = u32::try_from(cut.end - cut.start).unwrap_or(u32::MAX);
            Hashed {
                hash: inner.domain.hash(&buf[cut.start..cut.end]),
                len,
                lies: lies.map(|from| from + cut.start as u64),
            }
        })
        .collect();
    let (places, file) = inner.place(&hashes, scratch)?;
    if let Some(file) = file {
        let path = inner.pack_tmp();
        let write = |bytes: &[u8], at: u64| file.write_all_at(bytes, at).doing("write", &path);
        let mut new = data()
            .zip(&hashes)
            .zip(&places)
            .filter_map(|((cut, one), (place, new))| new.then_some((cut, &one.hash, place.offset)));
        if let Some(seal) = &inner.seal {
            scratch.clear();
            let mut at = None;
            for (cut, hash, offset) in new {
                // Places of one call follow one another, so what is sealed does too.
                at.get_or_insert(offset);
                let from = scratch.len();
                scratch.extend_from_slice(&buf[cut.start..cut.end]);
                seal.seal(offset, &chunk_aad(&inner.domain, hash), scratch, from)?;
            }
            at.map_or(Ok(()), |at| write(scratch, at))?;
        } else if let Some((first, _, offset)) = new.next() {
            let (mut start, mut end, mut at) = (first.start, first.end, offset);
            for (cut, _, offset) in new {
                if cut.start != end {
                    write(&buf[start..end], at)?;
                    (start, at) = (cut.start, offset);
                }
                end = cut.end;
            }
            write(&buf[start..end], at)?;
        }
    }
    let mut placed = hashes.iter().zip(&places);
    let mut refs = Vec::with_capacity(cuts.len());
    for cut in cuts {
        if cut.zero {
            push_ref(&mut refs, Ref::Zero((cut.end - cut.start) as u64));
        } else if let Some((Hashed { hash, .. }, (place, _))) = placed.next() {
            let (hash, place) = (*hash, *place);
            refs.push(Ref::Chunk(ChunkRef { hash, place }));
        }
    }
    Ok(refs)
}

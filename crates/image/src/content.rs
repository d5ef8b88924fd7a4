//! What a file of the tree contains: bytes in memory or a range of a file on disk. Nothing is copied until the image is
//! written, and a range keeps its file open, so the file may already have been unlinked.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, IoContext, Result};

/// An open file that contents point into.
#[derive(Debug)]
pub struct Backing {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Backing {
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let file = File::open(path).doing("open", path)?;
        Self::from_file(file, path)
    }

    pub fn from_file(file: File, path: &Path) -> Result<Arc<Self>> {
        let len = file.metadata().doing("read the size of", path)?.len();
        Ok(Arc::new(Self {
            file,
            path: path.to_owned(),
            len,
        }))
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(buf, offset).doing("read", &self.path)
    }
}

#[derive(Debug, Clone)]
pub struct Content {
    source: Source,
    offset: u64,
    len: u64,
}

#[derive(Debug, Clone)]
enum Source {
    Bytes(Arc<[u8]>),
    File(Arc<Backing>),
    /// Opened only while it is read: a build context may have more files than a process may have open.
    Unopened(Arc<Path>),
    /// Zeros, but for some pieces.
    Sparse(Arc<Sparse>),
}

#[derive(Debug)]
struct Sparse {
    /// All pieces, one behind the other.
    data: Content,
    /// Where each begins and ends in the file, in order, and where it begins in `data`.
    pieces: Vec<(u64, u64, u64)>,
}

impl Sparse {
    fn read_at(&self, buf: &mut [u8], at: u64) -> Result<()> {
        buf.fill(0);
        let end = at + buf.len() as u64;
        let first = self.pieces.partition_point(|(_, to, _)| *to <= at);
        for (from, to, data) in &self.pieces[first..] {
            if *from >= end {
                break;
            }
            let (start, stop) = ((*from).max(at), (*to).min(end));
            // Both lie within `buf`.
            let part = &mut buf[(start - at) as usize..(stop - at) as usize];
            self.data.read_at(part, data + (start - from))?;
        }
        Ok(())
    }
}

impl Content {
    pub fn bytes(bytes: impl Into<Arc<[u8]>>) -> Self {
        let bytes = bytes.into();
        Self {
            offset: 0,
            len: bytes.len() as u64,
            source: Source::Bytes(bytes),
        }
    }

    /// A range of a file. Fails when the file is shorter, so that a later read can only fail by a fault of the disk.
    pub fn range(backing: &Arc<Backing>, offset: u64, len: u64) -> Result<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= backing.len => Ok(Self {
                source: Source::File(Arc::clone(backing)),
                offset,
                len,
            }),
            _ => Err(Error::Invalid(format!(
                "`{}` is cut short: it has {} bytes, {len} at {offset} were expected",
                backing.path.display(),
                backing.len
            ))),
        }
    }

    pub fn whole_file(path: &Path) -> Result<Self> {
        let backing = Backing::open(path)?;
        let len = backing.len;
        Self::range(&backing, 0, len)
    }

    /// A file of `len` bytes that is opened when it is read. The last part of its path is not followed if it has
    /// become a symbolic link meanwhile.
    pub(crate) fn unopened(path: &Path, len: u64) -> Self {
        Self {
            source: Source::Unopened(path.into()),
            offset: 0,
            len,
        }
    }

    /// Zeros, but for these pieces (where, and how long, in order), whose bytes are `data`.
    pub(crate) fn sparse(data: Self, map: &[(u64, u64)], len: u64) -> Self {
        let mut taken = 0;
        let pieces = map.iter().map(|(start, length)| {
            let piece = (*start, start + length, taken);
            taken += length;
            piece
        });
        let pieces = pieces.collect();
        Self {
            source: Source::Sparse(Arc::new(Sparse { data, pieces })),
            offset: 0,
            len,
        }
    }

    /// This content with its file open, for many reads.
    pub(crate) fn opened(&self) -> Result<Self> {
        let Source::Unopened(path) = &self.source else {
            return Ok(self.clone());
        };
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() | rustix::fs::OFlags::NONBLOCK.bits();
        let file = File::options()
            .read(true)
            .custom_flags(flags.cast_signed())
            .open(path)
            .doing("open", path)?;
        let backing = Backing::from_file(file, path)?;
        Self::range(&backing, self.offset, self.len)
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of this content. Fails when it is shorter.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Self {
                source: self.source.clone(),
                offset: self.offset + offset,
                len,
            }),
            _ => Err(past_the_end()),
        }
    }

    /// The open file that it is a range of, and where the range begins.
    pub(crate) fn file_range(&self) -> Option<(&Arc<Backing>, u64)> {
        match &self.source {
            Source::File(backing) => Some((backing, self.offset)),
            Source::Bytes(_) | Source::Unopened(_) | Source::Sparse(_) => None,
        }
    }

    /// Where the content lies, for error messages.
    pub(crate) fn path(&self) -> &Path {
        match &self.source {
            Source::Bytes(_) => Path::new("(memory)"),
            Source::File(backing) => &backing.path,
            Source::Unopened(path) => path,
            Source::Sparse(sparse) => sparse.data.path(),
        }
    }

    pub fn read_at(&self, buf: &mut [u8], at: u64) -> Result<()> {
        if at.saturating_add(buf.len() as u64) > self.len {
            return Err(past_the_end());
        }
        let at = self.offset + at;
        match &self.source {
            Source::Bytes(bytes) => {
                let range = usize::try_from(at)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(buf.len())?))
                    .ok_or_else(past_the_end)?;
                buf.copy_from_slice(range);
                Ok(())
            }
            Source::File(backing) => backing.read_exact_at(buf, at),
            Source::Unopened(_) => self.opened()?.read_at(buf, at - self.offset),
            Source::Sparse(sparse) => sparse.read_at(buf, at),
        }
    }

    /// The whole content, when it has at most `limit` bytes.
    pub fn read_to_vec(&self, limit: u64) -> Result<Vec<u8>> {
        if self.len > limit {
            return Err(Error::Limit {
                what: format!("a file of {} bytes that must be read whole", self.len),
                limit,
            });
        }
        let mut all = vec![0; usize::try_from(self.len).unwrap_or(usize::MAX)];
        self.read_at(&mut all, 0)?;
        Ok(all)
    }

    /// Hands the content over in pieces of at most `buf.len()` bytes.
    pub(crate) fn for_each_piece(
        &self,
        buf: &mut [u8],
        mut piece: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        let opened = self.opened()?;
        while at < self.len {
            let want = buf
                .len()
                .min(usize::try_from(self.len - at).unwrap_or(usize::MAX));
            opened.read_at(&mut buf[..want], at)?;
            piece(&buf[..want])?;
            at += want as u64;
        }
        Ok(())
    }

    pub fn copy_to(&self, out: &mut dyn Write) -> Result<()> {
        let mut buf = vec![0; 256 * 1024];
        self.for_each_piece(&mut buf, |piece| {
            out.write_all(piece).doing("write", Path::new("a copy of a file"))
        })
    }

    /// As [`std::io::Read`].
    pub fn reader(&self) -> Reader {
        Reader {
            content: self.clone(),
            at: 0,
        }
    }
}

fn past_the_end() -> Error {
    Error::Invalid("read past the end of a file".into())
}

#[derive(Debug)]
pub struct Reader {
    content: Content,
    at: u64,
}

impl io::Read for Reader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.content.len - self.at).unwrap_or(usize::MAX);
        let want = buf.len().min(left);
        self.content
            .read_at(&mut buf[..want], self.at)
            .map_err(io::Error::other)?;
        self.at += want as u64;
        Ok(want)
    }
}

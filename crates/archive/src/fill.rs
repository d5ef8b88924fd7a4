//! From a stream to a tree.
//!
//! Each entry is made below a directory that was just opened from the root without following a link. What is in its way is
//! removed first if it is no directory, so nothing is ever written through an old name; a file gets its owner and mode
//! through its descriptor, after its content.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::format::{BLOCK, padding};
use crate::header::{self, Entry, Kind, read_whole};
use crate::paths::Times;
use crate::{Budget, Dialect, Ids, Notes, Tally, about, at, invalid, shown, sparse};

const BUFFER: usize = 256 << 10;
const TOO_MANY: &str = "the stream holds too many files and directories";
/// Of a path that is handed to the kernel in one piece.
const PIECE: usize = 2048;

/// Makes what the stream says below `root` (a directory opened for reading), on top of what is there. Reads up to the
/// stream's end mark. After an error the tree holds some of it.
pub fn unpack(root: BorrowedFd<'_>, dialect: Dialect, ids: Ids, input: &mut dyn Read) -> io::Result<Tally> {
    unpack_within(root, dialect, ids, &mut { Budget::ENDLESS }, input)
}

/// [`unpack`] of what the budget allows; takes from it what was used.
pub fn unpack_within(
    root: BorrowedFd<'_>,
    dialect: Dialect,
    ids: Ids,
    budget: &mut Budget,
    input: &mut dyn Read,
) -> io::Result<Tally> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = Rc::new(rustix::fs::openat(root, ".", flags, Mode::empty())?);
    let mut filler = Filler {
        near: (Vec::new(), Rc::clone(&root)),
        root,
        dialect,
        ids,
        budget,
        tally: Tally::default(),
        times: Times::default(),
        whiteouts: BTreeSet::new(),
        buffer: vec![0; BUFFER],
    };
    while let Some(entry) = header::read(input)? {
        filler.one(&entry, input)?;
    }
    filler.set_times();
    Ok(filler.tally)
}

struct Filler<'a> {
    root: Rc<OwnedFd>,
    /// The directory used last, and its path.
    near: (Vec<u8>, Rc<OwnedFd>),
    dialect: Dialect,
    ids: Ids,
    budget: &'a mut Budget,
    tally: Tally,
    /// Of directories, for the end: making something in one changes its time.
    times: Times,
    /// Of what is applied: no trace of them is left in the tree.
    whiteouts: BTreeSet<Vec<u8>>,
    buffer: Vec<u8>,
}

impl Filler<'_> {
    fn one(&mut self, entry: &Entry, input: &mut dyn Read) -> io::Result<()> {
        let path = entry.path.as_slice();
        let top = path.split(|byte| *byte == b'/').next().unwrap_or_default();
        if self.dialect.not_ours(top) {
            return skip_content(entry, input);
        }
        if self.applies() && self.leads_away(entry) {
            self.tally.skipped.mounts += 1;
            return skip_content(entry, input);
        }
        let layer = self.dialect != Dialect::Plain;
        match entry.kind {
            Kind::Fifo if !layer => self.tally.skipped.fifos += 1,
            Kind::Device => self.tally.skipped.devices += 1,
            Kind::Whiteout if !layer => self.tally.skipped.devices += 1,
            _ => {
                self.tally.entries += 1;
                Budget::spend(&mut self.budget.entries, 1, TOO_MANY)?;
                self.fits(path)?;
                if entry.kind == Kind::Directory {
                    return self.directory(entry).map_err(|error| about(path, &error));
                }
                let (parent, name) = split(path);
                if name.is_empty() {
                    return Err(invalid("the root of the tree is not a directory"));
                }
                let parent = self.dir(parent).map_err(|error| about(path, &error))?;
                if self.applies() {
                    remove(parent.as_fd(), name).map_err(at(path))?;
                    if self.hides(entry) {
                        return Ok(());
                    }
                }
                self.leaf(entry, parent.as_fd(), name, input)?;
            }
        }
        Ok(())
    }

    fn fits(&self, path: &[u8]) -> io::Result<()> {
        match path.split(|byte| *byte == b'/').count() > self.budget.depth {
            true => Err(invalid(format!(
                "{}: more than {} levels of directories",
                shown(path),
                self.budget.depth
            ))),
            false => Ok(()),
        }
    }

    fn mode(&self, entry: &Entry) -> Mode {
        Mode::from_raw_mode(match (self.budget.private, entry.kind) {
            (false, _) => entry.mode,
            (true, Kind::Directory) => entry.mode & 0o777 | 0o700,
            (true, _) => entry.mode & 0o777 | 0o400,
        })
    }

    fn applies(&self) -> bool {
        matches!(self.dialect, Dialect::Applied { .. })
    }

    /// Whether an entry is only there to hide another. (gVisor has one whiteout, and links to it.)
    fn hides(&mut self, entry: &Entry) -> bool {
        match entry.kind {
            Kind::Whiteout => self.whiteouts.insert(entry.path.clone()),
            Kind::HardLink => self.whiteouts.contains(&entry.target),
            _ => false,
        }
    }

    /// Whether an entry is in another filesystem, or is the root of one.
    fn leads_away(&mut self, entry: &Entry) -> bool {
        let (parent, name) = split(&entry.path);
        let crosses = |error: &io::Error| error.raw_os_error() == Some(Errno::XDEV.raw_os_error());
        match self.dir(parent) {
            Ok(_) if name.is_empty() || entry.kind != Kind::Directory => false,
            Ok(parent) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let opened = rustix::fs::openat2(&parent, name, flags, Mode::empty(), resolve());
                matches!(opened, Err(Errno::XDEV))
            }
            Err(error) => crosses(&error),
        }
    }

    fn leaf(
        &mut self,
        entry: &Entry,
        parent: BorrowedFd<'_>,
        name: &[u8],
        input: &mut dyn Read,
    ) -> io::Result<()> {
        let path = entry.path.as_slice();
        match entry.kind {
            Kind::File => {
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mode = Mode::from_raw_mode(0o600);
                let file = replacing(parent, name, || rustix::fs::openat(parent, name, flags, mode))
                    .map_err(at(path))?;
                self.content(entry, &file, input)?;
                self.own_file(entry, &file).map_err(at(path))
            }
            Kind::Symlink => {
                let make = || rustix::fs::symlinkat(entry.target.as_slice(), parent, name);
                replacing(parent, name, make).map_err(at(path))?;
                self.own(entry, parent, name).map_err(at(path))
            }
            Kind::HardLink => {
                self.fits(&entry.target)?;
                let (from, first) = split(&entry.target);
                let from = self.dir(from).map_err(|error| about(path, &error))?;
                if entry.target == entry.path {
                    return Err(invalid(format!("{}: a link to itself", shown(path))));
                }
                let make = || rustix::fs::linkat(&from, first, parent, name, AtFlags::empty());
                replacing(parent, name, make).map_err(at(path))
            }
            Kind::Fifo => {
                let mode = self.mode(entry);
                let make = || rustix::fs::mknodat(parent, name, FileType::Fifo, mode, 0);
                replacing(parent, name, make).map_err(at(path))?;
                self.own(entry, parent, name).map_err(at(path))?;
                // A layer that nobody uses yet: the name is still what was just made.
                rustix::fs::chmodat(parent, name, mode, AtFlags::empty()).map_err(at(path))
            }
            Kind::Whiteout => {
                let make = || rustix::fs::mknodat(parent, name, FileType::CharacterDevice, Mode::empty(), 0);
                replacing(parent, name, make).map_err(at(path))
            }
            Kind::Directory | Kind::Device => Ok(()),
        }
    }

    fn content(&mut self, entry: &Entry, file: &OwnedFd, input: &mut dyn Read) -> io::Result<()> {
        let size = entry.real_size.unwrap_or(entry.size);
        Budget::spend(&mut self.budget.bytes, size, "the files are too large together")?;
        let (pieces, mut left) = match (entry.real_size, &entry.map) {
            (None, _) => {
                // Not everybody who writes archives knows of holes (gVisor): a long run of zeros is one.
                if entry.size >= BUFFER as u64 {
                    rustix::fs::ftruncate(file, entry.size).map_err(at(&entry.path))?;
                }
                (vec![(0, entry.size)], entry.size)
            }
            (Some(real_size), Some(map)) => {
                rustix::fs::ftruncate(file, real_size).map_err(at(&entry.path))?;
                (map.clone(), entry.size)
            }
            (Some(real_size), None) => {
                let (map, taken) = sparse::read_map(input, entry.size, real_size)?;
                rustix::fs::ftruncate(file, real_size).map_err(at(&entry.path))?;
                (map, entry.size - taken)
            }
        };
        self.tally.bytes += left;
        let padding = padding(left).len();
        for (start, length) in pieces {
            let mut done = 0;
            while done < length {
                let want = usize::try_from(length - done).map_or(BUFFER, |rest| rest.min(BUFFER));
                read_whole(input, &mut self.buffer[..want])?;
                let piece = &self.buffer[..want];
                if want < BUFFER || piece.iter().any(|byte| *byte != 0) {
                    write_at(file, piece, start + done).map_err(at(&entry.path))?;
                }
                done += want as u64;
                left -= want as u64;
            }
        }
        debug_assert_eq!(left, 0);
        read_whole(input, &mut self.buffer[..padding])
    }

    /// Makes a directory, or takes the one that is there, and makes it as the entry says.
    fn directory(&mut self, entry: &Entry) -> io::Result<()> {
        let dir = if entry.path.is_empty() {
            Rc::clone(&self.root)
        } else {
            let (parent, name) = split(&entry.path);
            let parent = self.dir(parent)?;
            Rc::new(make_dir(parent.as_fd(), name)?)
        };
        // The root of a plain tree is the place that it is put into: whose that is, is not the stream's to say.
        if self.dialect == Dialect::Plain && entry.path.is_empty() {
            self.times.set(&entry.path, entry.mtime);
            return Ok(());
        }
        if let (Some(uid), Some(gid)) = (self.ids.to_tree(entry.uid), self.ids.to_tree(entry.gid)) {
            rustix::fs::fchown(&dir, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        rustix::fs::fchmod(&dir, self.mode(entry))?;
        match self.dialect {
            Dialect::Layer { notes, .. } => take_notes(entry, &dir, notes)?,
            Dialect::Applied { .. } if entry.redirect.is_some() => {
                return Err(invalid(
                    "a directory of the template was moved; only a jail can restore that",
                ));
            }
            Dialect::Applied { .. } if entry.opaque => empty(dir.as_fd())?,
            Dialect::Applied { .. } | Dialect::Plain => {}
        }
        self.times.set(&entry.path, entry.mtime);
        self.near = (entry.path.clone(), dir);
        Ok(())
    }

    /// The directory at `path`, made where it is missing.
    fn dir(&mut self, path: &[u8]) -> io::Result<Rc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Rc::clone(&self.root));
        }
        // In a tree that others use it may have moved meanwhile: then we are where it went, which is still inside.
        if self.near.0 == path {
            return Ok(Rc::clone(&self.near.1));
        }
        let mut dir = Rc::clone(&self.root);
        let mut rest = path;
        while !rest.is_empty() {
            let cut = if rest.len() <= PIECE {
                rest.len()
            } else {
                // Names are shorter than a piece, so there is one.
                rest[..PIECE]
                    .iter()
                    .rposition(|byte| *byte == b'/')
                    .unwrap_or(rest.len())
            };
            dir = Rc::new(open_or_make(dir.as_fd(), &rest[..cut], &mut self.budget.entries)?);
            rest = rest.get(cut + 1..).unwrap_or_default();
        }
        self.near = (path.to_vec(), Rc::clone(&dir));
        Ok(dir)
    }

    fn own_file(&self, entry: &Entry, file: &OwnedFd) -> rustix::io::Result<()> {
        if let (Some(uid), Some(gid)) = (self.ids.to_tree(entry.uid), self.ids.to_tree(entry.gid)) {
            rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
        }
        // After the owner, whose change takes a setuid bit away.
        rustix::fs::fchmod(file, self.mode(entry))?;
        rustix::fs::futimens(file, &times(entry.mtime))
    }

    /// For what cannot be opened. Should the name mean something else by now, then something in the same tree.
    fn own(&self, entry: &Entry, parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
        if let (Some(uid), Some(gid)) = (self.ids.to_tree(entry.uid), self.ids.to_tree(entry.gid)) {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            rustix::fs::chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        rustix::fs::utimensat(parent, name, &times(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Not worth failing for: a directory may be gone again in a tree that others use.
    fn set_times(&mut self) {
        let all = std::mem::take(&mut self.times);
        all.for_each(|path, mtime| {
            let (parent, name) = split(path);
            if name.is_empty() {
                let _ = rustix::fs::futimens(&self.root, &times(mtime));
            } else if let Ok(parent) = self.dir(parent) {
                let _ = rustix::fs::utimensat(&parent, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW);
            }
        });
    }
}

fn take_notes(entry: &Entry, dir: &OwnedFd, notes: Notes) -> io::Result<()> {
    if entry.opaque {
        rustix::fs::fsetxattr(dir, notes.name("opaque"), b"y", XattrFlags::empty())?;
    }
    if let Some(redirect) = &entry.redirect {
        if notes == Notes::User {
            return Err(invalid(
                "a directory of the template was moved; only a server run by root can restore that",
            ));
        }
        // The kernel looks it up below the template's root, name by name; still, no nonsense.
        let inner = redirect.strip_prefix(b"/").unwrap_or(redirect);
        let plain =
            |part: &[u8]| !matches!(part, b"" | b"." | b"..") && part.len() <= 255 && !part.contains(&0);
        let is_name = redirect.starts_with(b"/") || !inner.contains(&b'/');
        if !is_name || !inner.split(|byte| *byte == b'/').all(plain) {
            return Err(invalid(format!(
                "moved from {}, which is no path",
                shown(redirect)
            )));
        }
        rustix::fs::fsetxattr(dir, notes.name("redirect"), redirect, XattrFlags::empty())?;
    }
    Ok(())
}

/// Makes something under a name that may be taken.
fn replacing<T>(
    parent: BorrowedFd<'_>,
    name: &[u8],
    make: impl Fn() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
            make()
        }
        other => other,
    }
}

/// Removes whatever is under a name, if anything. A mount point stays, and so do the directories above it.
fn remove(parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve()) {
        Ok(dir) => empty(dir.as_fd())?,
        Err(Errno::XDEV) => return Ok(()),
        Err(error) => return Err(error),
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::BUSY | Errno::NOTEMPTY) => Ok(()),
        other => other,
    }
}

fn empty(dir: BorrowedFd<'_>) -> rustix::io::Result<()> {
    // All names first: what is removed while a directory is being read may make it pass over others.
    let names: Vec<_> = rustix::fs::Dir::read_from(dir)?
        .map(|entry| entry.map(|entry| entry.file_name().to_owned()))
        .collect::<rustix::io::Result<_>>()?;
    names
        .iter()
        .map(|name| name.to_bytes())
        .filter(|name| !matches!(*name, b"." | b".."))
        .try_for_each(|name| remove(dir, name))
}

fn resolve() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV
}

fn make_dir(parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat2(parent, name, flags, Mode::empty(), resolve());
    let make = || rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755));
    match make() {
        Ok(()) => open(),
        Err(Errno::EXIST) => match open() {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
                make()?;
                open()
            }
            other => other,
        },
        Err(error) => Err(error),
    }
}

/// What is made is taken from `room`.
fn open_or_make(from: BorrowedFd<'_>, path: &[u8], room: &mut u64) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open =
        |from: BorrowedFd<'_>, path: &[u8]| rustix::fs::openat2(from, path, flags, Mode::empty(), resolve());
    match open(from, path) {
        Err(Errno::NOENT) => {}
        other => return Ok(other?),
    }
    let mut dir: Option<OwnedFd> = None;
    for name in path.split(|byte| *byte == b'/') {
        let parent = dir.as_ref().map_or(from, AsFd::as_fd);
        let next = match open(parent, name) {
            Err(Errno::NOENT) => {
                Budget::spend(room, 1, TOO_MANY)?;
                make_dir(parent, name)?
            }
            other => other?,
        };
        dir = Some(next);
    }
    dir.ok_or_else(|| Errno::NOENT.into())
}

/// The directory and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

fn times((seconds, nanos): (i64, u32)) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: seconds,
            tv_nsec: nanos.into(),
        },
    }
}

fn write_at(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(written) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn skip_content(entry: &Entry, input: &mut dyn Read) -> io::Result<()> {
    skip(input, entry.size.next_multiple_of(BLOCK as u64))
}

fn skip(input: &mut dyn Read, bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut input.take(bytes), &mut io::sink())?;
    if skipped < bytes {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the stream ends early",
        ));
    }
    Ok(())
}

//! From a tree to a stream.
//!
//! ```text
//!   levels:  root ── a ── b ── ... ── current       each with the names still to do, sorted
//!              fd    fd   -    ...  -  fd            those in the middle are let go and opened again on the way back,
//!                                                    so that depth costs no descriptors
//! ```

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::format::padding;
use crate::header::{self, Entry, Kind};
use crate::paths::Directories;
use crate::{Dialect, Ids, LONGEST_PATH, Tally, at, invalid, shown, sparse};

/// Directories that are open at once, at either end of the way.
const KEPT_OPEN: usize = 48;
const BUFFER: usize = 1 << 20;
/// An overlay's note about a moved directory is a path.
const LONGEST_NOTE: usize = 4096;

/// Writes the tree below `root` (a directory opened for reading) as a stream.
///
/// In the plain dialect the tree may change meanwhile: what vanishes is left out, a file that shrinks is filled up with
/// zeros. A layer has to be still.
pub fn pack(root: BorrowedFd<'_>, dialect: Dialect, ids: Ids, out: &mut dyn Write) -> io::Result<Tally> {
    let root = rustix::fs::openat(root, ".", directory_flags(), Mode::empty())?;
    let mut packer = Packer {
        out,
        dialect,
        ids,
        tally: Tally::default(),
        links: HashMap::new(),
        directories: Directories::default(),
        buffer: vec![0; BUFFER],
    };
    packer.tree(root)?;
    header::write_end(packer.out)?;
    Ok(packer.tally)
}

struct Packer<'a> {
    out: &'a mut dyn Write,
    dialect: Dialect,
    ids: Ids,
    tally: Tally,
    /// Of files with several names, as long as some are still to come.
    links: HashMap<u64, First>,
    directories: Directories,
    buffer: Vec<u8>,
}

/// Where a file was first met.
struct First {
    directory: u32,
    name: Box<[u8]>,
    /// How many of its names are still to come.
    left: u64,
}

struct Level {
    name: CString,
    dir: Option<OwnedFd>,
    /// To do, the last one first.
    names: Vec<CString>,
    /// How long the path is without this level.
    parent_length: usize,
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn resolve() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV
}

impl Packer<'_> {
    fn tree(&mut self, root: OwnedFd) -> io::Result<()> {
        let mut path = Vec::new();
        let stat = rustix::fs::fstat(&root)?;
        self.directory(&path, &root, &stat)?;
        let mut names = names_in(&root)?;
        if let Dialect::Layer { not_ours, .. } = self.dialect {
            names.retain(|name| !not_ours.iter().any(|other| other.as_bytes() == name.to_bytes()));
        }
        let mut levels = vec![Level {
            name: c".".to_owned(),
            dir: Some(root),
            names,
            parent_length: 0,
        }];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.pop() else {
                path.truncate(level.parent_length);
                levels.pop();
                self.directories.leave();
                continue;
            };
            if level.dir.is_none() && !reopen(&mut levels).map_err(at(&path))? {
                // Only in a tree that somebody is changing: the way back is gone, and with it what was below.
                self.unless_live(&path)?;
                if let Some(level) = levels.last_mut() {
                    level.names.clear();
                }
                continue;
            }
            let Some(dir) = levels.last().and_then(|level| level.dir.as_ref()) else {
                continue;
            };
            let parent_length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            let below = if path.len() > LONGEST_PATH {
                self.too_long(&path)?;
                None
            } else {
                self.one(&path, dir.as_fd(), &name)?
            };
            match below {
                Some(dir) => {
                    let names = names_in(&dir).map_err(at(&path))?;
                    self.directories.enter();
                    levels.push(Level {
                        name,
                        dir: Some(dir),
                        names,
                        parent_length,
                    });
                    let deep = levels.len();
                    if deep > 2 * KEPT_OPEN {
                        levels[deep - KEPT_OPEN].dir = None;
                    }
                }
                None => path.truncate(parent_length),
            }
        }
        Ok(())
    }

    /// One entry of `dir`. Gives the directory to go into, if it is one.
    fn one(&mut self, path: &[u8], dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return self.unless_live(path).map(|()| None),
            Err(error) => return Err(at(path)(error)),
        };
        let layer = matches!(self.dialect, Dialect::Layer { .. });
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return self.enter(path, dir, name),
            FileType::RegularFile => self.file(path, dir, name)?,
            FileType::Symlink => match rustix::fs::readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    let entry = Entry {
                        target: target.into_bytes(),
                        ..self.entry(path, Kind::Symlink, &stat)
                    };
                    if !self.linked(path, &stat)? {
                        self.put(&entry)?;
                    }
                }
                Err(Errno::NOENT | Errno::INVAL) => self.unless_live(path)?,
                Err(error) => return Err(at(path)(error)),
            },
            FileType::CharacterDevice if layer && stat.st_rdev == 0 => {
                self.put(&Entry::new(path, Kind::Whiteout))?;
            }
            FileType::Fifo if layer => {
                if !self.linked(path, &stat)? {
                    self.put(&self.entry(path, Kind::Fifo, &stat))?;
                }
            }
            FileType::Fifo => self.tally.skipped.fifos += 1,
            FileType::Socket => self.tally.skipped.sockets += 1,
            _ => self.tally.skipped.devices += 1,
        }
        Ok(None)
    }

    fn enter(&mut self, path: &[u8], dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let below = match rustix::fs::openat2(dir, name, directory_flags(), Mode::empty(), resolve()) {
            Ok(below) => below,
            Err(Errno::XDEV) => {
                self.tally.skipped.mounts += 1;
                return Ok(None);
            }
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return self.unless_live(path).map(|()| None),
            Err(error) => return Err(at(path)(error)),
        };
        let stat = rustix::fs::fstat(&below).map_err(at(path))?;
        self.directory(path, &below, &stat)?;
        Ok(Some(below))
    }

    fn directory(&mut self, path: &[u8], dir: &OwnedFd, stat: &Stat) -> io::Result<()> {
        let mut entry = self.entry(path, Kind::Directory, stat);
        if let Dialect::Layer { notes, .. } = self.dialect {
            entry.opaque = note(dir, &notes.name("opaque")).map_err(at(path))?.as_deref() == Some(b"y");
            entry.redirect = note(dir, &notes.name("redirect")).map_err(at(path))?;
        }
        self.put(&entry)
    }

    fn file(&mut self, path: &[u8], dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        // Should it have become a FIFO, this does not wait; and a device's driver is not asked, for lack of permission.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve()) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::XDEV | Errno::ACCESS) => {
                return self.unless_live(path);
            }
            Err(error) => return Err(at(path)(error)),
        };
        let stat = rustix::fs::fstat(&file).map_err(at(path))?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return self.unless_live(path);
        }
        if self.linked(path, &stat)? {
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        let mut entry = self.entry(path, Kind::File, &stat);
        let (list, pieces) = match sparse::map_of(file.as_fd(), size, blocks)? {
            Some(map) => {
                entry.real_size = Some(size);
                (sparse::text_of(&map), map)
            }
            None => (Vec::new(), vec![(0, size)]),
        };
        let data: u64 = pieces.iter().map(|(_, length)| length).sum();
        entry.size = list.len() as u64 + data;
        self.put(&entry)?;
        self.out.write_all(&list)?;
        for (start, length) in pieces {
            self.copy(path, &file, start, length)?;
        }
        self.tally.bytes += data;
        self.out.write_all(padding(data))
    }

    /// Exactly `length` bytes, because a header has said so; zeros in place of what was cut off meanwhile.
    fn copy(&mut self, path: &[u8], file: &OwnedFd, start: u64, length: u64) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let want = usize::try_from(length - done).map_or(BUFFER, |left| left.min(BUFFER));
            let buffer = &mut self.buffer[..want];
            let read = match rustix::io::pread(file, &mut *buffer, start + done) {
                Ok(0) => {
                    buffer.fill(0);
                    want
                }
                Ok(read) => read,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(at(path)(error)),
            };
            self.out.write_all(&self.buffer[..read])?;
            done += read as u64;
        }
        Ok(())
    }

    /// Writes a link if this file was met before under another name.
    fn linked(&mut self, path: &[u8], stat: &Stat) -> io::Result<bool> {
        if stat.st_nlink < 2 {
            return Ok(false);
        }
        let Some(first) = self.links.get_mut(&stat.st_ino) else {
            let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
                Some(slash) => (&path[..slash], &path[slash + 1..]),
                None => (&path[..0], path),
            };
            let first = First {
                directory: self.directories.here(parent),
                name: name.into(),
                left: stat.st_nlink - 1,
            };
            self.links.insert(stat.st_ino, first);
            return Ok(false);
        };
        let entry = Entry {
            target: self.directories.path(first.directory, &first.name),
            ..Entry::new(path, Kind::HardLink)
        };
        first.left -= 1;
        if first.left == 0 {
            self.links.remove(&stat.st_ino);
        }
        let entry = Entry {
            mode: stat.st_mode & 0o7777,
            ..entry
        };
        self.put(&entry).map(|()| true)
    }

    fn entry(&self, path: &[u8], kind: Kind, stat: &Stat) -> Entry {
        Entry {
            mode: stat.st_mode & 0o7777,
            uid: self.ids.to_stream(stat.st_uid),
            gid: self.ids.to_stream(stat.st_gid),
            mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
            ..Entry::new(path, kind)
        }
    }

    fn put(&mut self, entry: &Entry) -> io::Result<()> {
        self.tally.entries += 1;
        entry.write(self.out)
    }

    fn too_long(&mut self, path: &[u8]) -> io::Result<()> {
        if matches!(self.dialect, Dialect::Layer { .. }) {
            return Err(invalid(format!(
                "a path longer than {LONGEST_PATH} bytes begins with {}; remove it first",
                shown(path)
            )));
        }
        self.tally.skipped.too_long += 1;
        Ok(())
    }

    /// What is not as it was a moment ago is fine in a tree that is in use, and wrong in one that is still.
    fn unless_live(&self, path: &[u8]) -> io::Result<()> {
        match self.dialect {
            Dialect::Plain => Ok(()),
            Dialect::Layer { .. } | Dialect::Applied { .. } => {
                Err(invalid(format!("{} changed while it was read", shown(path))))
            }
        }
    }
}

/// Opens the last level again, from the nearest one that is still open. False: it is not there any more.
fn reopen(levels: &mut [Level]) -> rustix::io::Result<bool> {
    let Some(nearest) = levels.iter().rposition(|level| level.dir.is_some()) else {
        return Ok(false);
    };
    for below in nearest + 1..levels.len() {
        let Some(parent) = &levels[below - 1].dir else {
            return Ok(false);
        };
        let name = &levels[below].name;
        match rustix::fs::openat2(parent, name, directory_flags(), Mode::empty(), resolve()) {
            Ok(dir) => levels[below].dir = Some(dir),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => return Ok(false),
            Err(error) => return Err(error),
        }
        if below > nearest + KEPT_OPEN && below > KEPT_OPEN {
            levels[below - KEPT_OPEN].dir = None;
        }
    }
    Ok(true)
}

/// Sorted so that the first is taken first from the end, and so that the same tree gives the same stream.
fn names_in(dir: &OwnedFd) -> rustix::io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable_by(|one, other| other.cmp(one));
    Ok(names)
}

fn note(dir: &OwnedFd, name: &str) -> rustix::io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; LONGEST_NOTE];
    match rustix::fs::fgetxattr(dir, name, &mut *value) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

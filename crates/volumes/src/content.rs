//! Single files and directories in a volume, for callers outside of sandboxes.
//!
//! What must hold:
//! - The tree is hostile and changes under our hands. Every path is resolved by the kernel below the volume's root
//!   (`openat2`, beneath it and on its filesystem): a link may lead to another place in the volume, never out of it. What
//!   is then done is done to the open file, not to its name.
//! - Nothing is opened for reading or writing that was not found to be a plain file, so a FIFO holds nobody up and a device
//!   is nobody's.
//! - A file is written whole or not at all: it gets its name when all its bytes are on the disk.
//! - Memory is bounded: listings are refused beyond [`MOST_LISTED`] entries; removing needs two open directories, however deep the tree.

mod path;
mod remove;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::elsewhere::{Answer, Op, Streams, WireEntry, confused};
use crate::error::{Error, Result};
use crate::{Kind, Volumes};
use path::Inside;

/// The most entries of one listing, and the most bytes of their paths.
pub const MOST_LISTED: usize = 50_000;
const MOST_PATHS: usize = 16 << 20;
/// What one listing may take in memory.
pub const LARGEST_LISTING: u64 = (MOST_PATHS + MOST_LISTED * size_of::<Entry>()) as u64;
/// A lookup below the root is asked to be repeated when something was moved meanwhile.
const ATTEMPTS: usize = 64;
const PIECE: usize = 256 * 1024;

/// What stands at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// From the volume's root, which is `/`.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    pub changed: SystemTime,
    /// Where a symlink points; the guest's words.
    pub target: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A FIFO, a socket, a device.
    Other,
}

/// What is to be set; the rest stays, or is root's and usual for what is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mode: Option<u32>,
}

/// How a file is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    pub metadata: Metadata,
    /// In place of a file that is there.
    pub replace: bool,
    /// How many bytes there will be, where that is known: what cannot fit is refused before anything is written.
    pub length: Option<u64>,
}

impl Volumes {
    /// What stands there; a symlink is told, not followed.
    pub fn entry(&self, id: &str, path: &str) -> Result<Entry> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::Entry {
                    id: id.into(),
                    path: path.into(),
                },
                Streams::default(),
            )? {
                Answer::Entry(entry) => Ok(entry.into_entry()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        self.within(id, |root| {
            let open = lookup(root, &path, OFlags::PATH | OFlags::NOFOLLOW)?;
            entry_of(&open, path.absolute())
        })
    }

    /// What is below a directory, sorted by path; `depth` 1 is the directory itself.
    pub fn entries(&self, id: &str, path: &str, depth: u32) -> Result<Vec<Entry>> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::Entries {
                    id: id.into(),
                    path: path.into(),
                    depth,
                },
                Streams::default(),
            )? {
                Answer::Entries(entries) => Ok(entries.into_iter().map(WireEntry::into_entry).collect()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        self.within(id, |root| list(root, path, depth))
    }

    /// Makes a directory; with `parents` also those above it, and one that is there is fine.
    pub fn make_dir(&self, id: &str, path: &str, metadata: Metadata, parents: bool) -> Result<Entry> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::MakeDir {
                    id: id.into(),
                    path: path.into(),
                    metadata,
                    parents,
                },
                Streams::default(),
            )? {
                Answer::Entry(entry) => Ok(entry.into_entry()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        check(&path, metadata)?;
        self.writable(id)?;
        self.within(id, |root| {
            if parents {
                for above in path.above() {
                    match make_one_dir(root, &above, metadata) {
                        Ok(_) | Err(Error::EntryExists { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
            match make_one_dir(root, &path, metadata) {
                Err(Error::EntryExists { .. }) if parents => {
                    let open = lookup(root, &path, OFlags::PATH | OFlags::DIRECTORY)?;
                    entry_of(&open, path.absolute())
                }
                other => other,
            }
        })
    }

    /// Hands out what stands there, then as many bytes as it says. A link to a file in the volume is followed.
    pub fn read_file(
        &self,
        id: &str,
        path: &str,
        begin: impl FnOnce(&Entry),
        out: &mut dyn Write,
    ) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            let mut begin = Some(begin);
            let mut told = |entry: &Entry| {
                if let Some(begin) = begin.take() {
                    begin(entry);
                }
            };
            let streams = Streams {
                begin: Some(&mut told),
                output: Some(out),
                ..Streams::default()
            };
            let op = Op::ReadFile {
                id: id.into(),
                path: path.into(),
            };
            return keeper.ask(op, streams).map(drop);
        }
        let path = Inside::parse(path)?;
        self.within(id, |root| {
            let failed = |error: io::Error| path.failed("reading", error);
            let open = lookup(root, &path, OFlags::PATH)?;
            let entry = entry_of(&open, path.absolute())?;
            if entry.kind != EntryKind::File {
                return Err(path.wrong(entry.kind));
            }
            let file = reopen(&open, OFlags::RDONLY).map_err(|error| failed(error.into()))?;
            begin(&entry);
            let copied = io::copy(&mut file.take(entry.size), out).map_err(failed)?;
            if copied < entry.size {
                return Err(failed(io::Error::other("it became shorter meanwhile")));
            }
            Ok(())
        })
    }

    /// Writes a file, whole or not at all. Durable on success.
    pub fn write_file(&self, id: &str, path: &str, how: WriteFile, input: &mut dyn Read) -> Result<Entry> {
        if let Some(keeper) = &self.keeper {
            let streams = Streams {
                input: Some(input),
                ..Streams::default()
            };
            let op = Op::WriteFile {
                id: id.into(),
                path: path.into(),
                how,
            };
            return match keeper.ask(op, streams)? {
                Answer::Entry(entry) => Ok(entry.into_entry()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        check(&path, how.metadata)?;
        self.writable(id)?;
        self.within(id, |root| write(id, root, &path, how, input))
    }

    /// Changes owner, group and permissions of a file or directory. Durable on success.
    pub fn set_metadata(&self, id: &str, path: &str, metadata: Metadata) -> Result<Entry> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::SetMetadata {
                    id: id.into(),
                    path: path.into(),
                    metadata,
                },
                Streams::default(),
            )? {
                Answer::Entry(entry) => Ok(entry.into_entry()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        check(&path, metadata)?;
        self.writable(id)?;
        self.within(id, |root| {
            let open = lookup(root, &path, OFlags::PATH)?;
            let kind = entry_of(&open, path.absolute())?.kind;
            if !matches!(kind, EntryKind::File | EntryKind::Directory) {
                return Err(path.wrong(kind));
            }
            apply(&open, metadata)
                .and_then(|()| reopen(&open, OFlags::RDONLY)?.sync_all())
                .map_err(|error| path.failed("changing", error))?;
            entry_of(&open, path.absolute())
        })
    }

    /// Removes what stands there with all that is below; a link itself, not what it leads to. Durable on success.
    pub fn remove(&self, id: &str, path: &str) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::Remove {
                    id: id.into(),
                    path: path.into(),
                },
                Streams::default(),
            )? {
                Answer::Done => Ok(()),
                _ => Err(confused()),
            };
        }
        let path = Inside::parse(path)?;
        self.writable(id)?;
        self.within(id, |root| {
            let (parent, name) = parent_of(root, &path)?;
            remove::tree(parent.as_fd(), &name).map_err(|error| match error {
                remove::Stopped::Failed(error) => path.refused(error, "removing"),
                remove::Stopped::GoesOn => Error::Busy {
                    id: id.to_owned(),
                    why: "something keeps writing into the directory that is to go".into(),
                },
            })?;
            rustix::fs::fsync(&parent).map_err(|error| path.failed("removing", error.into()))
        })
    }

    fn writable(&self, id: &str) -> Result<()> {
        match self.kind(id)? {
            Kind::Sealed => Err(Error::Sealed(id.to_owned())),
            Kind::Disk => Ok(()),
        }
    }
}

fn check(path: &Inside, metadata: Metadata) -> Result<()> {
    if metadata.mode.is_some_and(|mode| mode > 0o7777) {
        return Err(path.invalid("a mode is at most 0o7777"));
    }
    // The kernel reads it as "leave it as it is".
    if metadata.uid == Some(u32::MAX) || metadata.gid == Some(u32::MAX) {
        return Err(path.invalid("4294967295 is nobody's id"));
    }
    Ok(())
}

/// Opens what a path leads to below the root.
fn lookup(root: BorrowedFd<'_>, path: &Inside, flags: OFlags) -> Result<OwnedFd> {
    open_below(root, path.relative(), flags).map_err(|error| path.refused(error, "opening"))
}

fn open_below(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    for _ in 1..ATTEMPTS {
        match rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), inside) {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// The directory that a path's last name stands in, and that name.
fn parent_of(root: BorrowedFd<'_>, path: &Inside) -> Result<(OwnedFd, PathBuf)> {
    let Some((parent, name)) = path.split() else {
        return Err(path.invalid("it is the volume's root"));
    };
    let open = open_below(root, parent, OFlags::RDONLY | OFlags::DIRECTORY)
        .map_err(|error| path.refused(error, "opening"))?;
    Ok((open, name.to_owned()))
}

/// The same file once more, for more than its name.
fn reopen(open: &OwnedFd, flags: OFlags) -> rustix::io::Result<File> {
    let place = format!("/proc/self/fd/{}", open.as_raw_fd());
    Ok(rustix::fs::openat(
        CWD,
        place,
        flags | OFlags::CLOEXEC | OFlags::NOCTTY,
        Mode::empty(),
    )?
    .into())
}

/// Ids first: a change of owner takes the setuid bit away.
fn apply(open: &OwnedFd, metadata: Metadata) -> io::Result<()> {
    if metadata.uid.is_some() || metadata.gid.is_some() {
        let (uid, gid) = (metadata.uid.map(Uid::from_raw), metadata.gid.map(Gid::from_raw));
        rustix::fs::chownat(open, "", uid, gid, AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = metadata.mode {
        let place = format!("/proc/self/fd/{}", open.as_raw_fd());
        rustix::fs::chmodat(CWD, place, Mode::from_raw_mode(mode), AtFlags::empty())?;
    }
    Ok(())
}

fn make_one_dir(root: BorrowedFd<'_>, path: &Inside, metadata: Metadata) -> Result<Entry> {
    if path.split().is_none() {
        return Err(Error::EntryExists { path: path.shown() });
    }
    let (parent, name) = parent_of(root, path)?;
    let failed = |error| path.refused(error, "making");
    rustix::fs::mkdirat(&parent, &name, Mode::from_raw_mode(0o700)).map_err(failed)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(&parent, &name, flags, Mode::empty()).map_err(failed)?;
    let whole = Metadata {
        mode: metadata.mode.or(Some(0o755)),
        ..metadata
    };
    apply(&made, whole)
        .and_then(|()| Ok(rustix::fs::fsync(&made)?))
        .and_then(|()| Ok(rustix::fs::fsync(&parent)?))
        .map_err(|error| path.failed("making", error))?;
    entry_of(&made, path.absolute())
}

fn list(root: BorrowedFd<'_>, path: Inside, depth: u32) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    let mut paths = 0;
    let mut todo = vec![(path, 1)];
    while let Some((path, level)) = todo.pop() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        // Only the first may be a link: those below are told, not entered.
        let flags = if level == 1 {
            flags
        } else {
            flags | OFlags::NOFOLLOW
        };
        let open = match lookup(root, &path, flags) {
            Ok(open) => open,
            // Gone or another thing meanwhile.
            Err(_) if level > 1 => continue,
            Err(error) => return Err(error),
        };
        let failed = |error: Errno| path.failed("listing", error.into());
        for item in Dir::read_from(&open).map_err(failed)? {
            let item = item.map_err(failed)?;
            let name = item.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match rustix::fs::statat(&open, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed(error)),
            };
            let below = path.join(name);
            let mut entry = described(&stat, below.absolute());
            if entry.kind == EntryKind::Symlink {
                entry.target = target_of(&open, name);
            }
            if entry.kind == EntryKind::Directory && level < depth {
                todo.push((below, level + 1));
            }
            paths +=
                entry.path.as_os_str().len() + entry.target.as_ref().map_or(0, |path| path.as_os_str().len());
            found.push(entry);
            if found.len() > MOST_LISTED || paths > MOST_PATHS {
                return Err(path.invalid("there is too much in it for one listing; list less deeply"));
            }
        }
    }
    found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

fn write(
    id: &str,
    root: BorrowedFd<'_>,
    path: &Inside,
    how: WriteFile,
    input: &mut dyn Read,
) -> Result<Entry> {
    let (parent, name) = parent_of(root, path)?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::Full {
            id: id.to_owned(),
            why: error.to_string(),
        },
        _ => path.failed("writing", error),
    };
    // Said before the bytes are sent; decided when the file gets its name.
    match rustix::fs::statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if !how.replace || FileType::from_raw_mode(stat.st_mode).is_dir() => {
            return Err(Error::EntryExists { path: path.shown() });
        }
        Ok(_) | Err(Errno::NOENT) => {}
        Err(error) => return Err(path.refused(error, "writing")),
    }
    if let Some(length) = how.length {
        let room = rustix::fs::fstatvfs(&parent).map_err(|error| failed(error.into()))?;
        if length > room.f_bavail.saturating_mul(room.f_frsize) {
            return Err(Error::Full {
                id: id.to_owned(),
                why: format!("{length} bytes do not fit"),
            });
        }
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&parent, ".", flags, Mode::from_raw_mode(0o600));
    let mut file = File::from(file.map_err(|error| failed(error.into()))?);
    let mut piece = vec![0; PIECE];
    loop {
        let count = match input.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(Error::BrokeOff {
                    path: path.shown(),
                    why: error.to_string(),
                });
            }
        };
        file.write_all(&piece[..count]).map_err(failed)?;
    }
    let file = OwnedFd::from(file);
    let whole = Metadata {
        mode: how.metadata.mode.or(Some(0o644)),
        ..how.metadata
    };
    apply(&file, whole).map_err(failed)?;
    rustix::fs::fsync(&file).map_err(|error| failed(error.into()))?;
    name_it(&file, &parent, &name, how.replace).map_err(|error| path.refused(error, "writing"))?;
    rustix::fs::fsync(&parent).map_err(|error| failed(error.into()))?;
    entry_of(&file, path.absolute())
}

/// Gives a file without a name one. In place of another it needs a name in between.
fn name_it(file: &OwnedFd, parent: &OwnedFd, name: &Path, replace: bool) -> rustix::io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let link = |name: &Path| rustix::fs::linkat(file, "", parent, name, AtFlags::EMPTY_PATH);
    match link(name) {
        Err(Errno::EXIST) if replace => {}
        other => return other,
    }
    for _ in 1..ATTEMPTS {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let between = PathBuf::from(format!(".new-{:x}-{number:x}", now.as_nanos()));
        match link(&between) {
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
            Ok(()) => {
                return rustix::fs::renameat(parent, &between, parent, name).inspect_err(|_| {
                    let _ = rustix::fs::unlinkat(parent, &between, AtFlags::empty());
                });
            }
        }
    }
    Err(Errno::EXIST)
}

fn entry_of(open: &OwnedFd, path: PathBuf) -> Result<Entry> {
    let stat = rustix::fs::fstat(open).map_err(|error| Error::Io {
        what: "looking at a file".into(),
        source: error.into(),
    })?;
    let mut entry = described(&stat, path);
    if entry.kind == EntryKind::Symlink {
        entry.target = target_of(open, c"");
    }
    Ok(entry)
}

fn target_of(at: &OwnedFd, name: &std::ffi::CStr) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt as _;
    let target = rustix::fs::readlinkat(at, name, Vec::new()).ok()?;
    Some(std::ffi::OsString::from_vec(target.into_bytes()).into())
}

fn described(stat: &Stat, path: PathBuf) -> Entry {
    Entry {
        path,
        kind: match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Directory,
            FileType::Symlink => EntryKind::Symlink,
            _ => EntryKind::Other,
        },
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        accessed: moment(stat.st_atime, stat.st_atime_nsec),
        modified: moment(stat.st_mtime, stat.st_mtime_nsec),
        changed: moment(stat.st_ctime, stat.st_ctime_nsec),
        target: None,
    }
}

/// A guest may set any time; one that the clock cannot name is 1970.
fn moment(seconds: i64, nanos: u64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let second = if seconds < 0 {
        UNIX_EPOCH.checked_sub(whole)
    } else {
        UNIX_EPOCH.checked_add(whole)
    };
    second
        .and_then(|second| second.checked_add(Duration::from_nanos(nanos)))
        .unwrap_or(UNIX_EPOCH)
}

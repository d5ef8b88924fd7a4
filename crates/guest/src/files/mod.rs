//! Everything that streams do with files. All of it runs on the loop in small steps: no threads, nothing that waits.
//!
//! A request that names a user is done with that user's permissions ([`crate::acting`]). One that names nobody is the
//! sandbox's owner's and is done with the agent's privileges, inside the sandbox's own root. What is created belongs to the
//! request's user, or to the configured one.

pub(crate) mod attributes;
pub(crate) mod change;
pub(crate) mod list;
pub(crate) mod read;
pub(crate) mod remove;
pub(crate) mod tar_format;
pub(crate) mod tar_in;
pub(crate) mod tar_out;
pub(crate) mod watch;
pub(crate) mod write;

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use atoll_guest_protocol::{Configure, EntryKind, FileStat};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::failure::{Outcome, from_io, show};
use crate::users::{Account, Users};

/// Where a request points, and to whom belongs what it creates.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) owner: Option<Owner>,
    base: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl Owner {
    pub(crate) fn ids(self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))
    }

    /// `None` leaves it with the agent's. Failing is no reason to lose the file: a tier may not let us.
    pub(crate) fn give(owner: Option<Self>, fd: &OwnedFd) {
        if let Some(owner) = owner {
            let (uid, gid) = owner.ids();
            let _ = rustix::fs::fchown(fd, uid, gid);
        }
    }
}

impl Place {
    /// A relative path starts at the named user's home, or at the configured directory if nobody is named. An empty name is
    /// the configured user's.
    pub(crate) fn new(path: &[u8], user: Option<&str>, config: &Configure) -> Outcome<Self> {
        let user = user.filter(|user| !user.is_empty());
        let spec = user.unwrap_or(&config.user);
        let account = match spec {
            "" => None,
            spec => Some(Users::load().find(spec)?),
        };
        let base = match (&account, user) {
            (_, None) if !config.workdir.is_empty() => config.workdir.clone(),
            (Some(Account { home, .. }), _) => home.clone(),
            (None, _) => "/".to_owned(),
        };
        Ok(Self {
            path: to_path(crate::path::absolute(base.as_bytes(), path)?),
            owner: account.map(|account| Owner {
                uid: account.uid,
                gid: account.gid,
            }),
            base: base.into_bytes(),
        })
    }

    /// Another path of the same request.
    pub(crate) fn sibling(&self, path: &[u8]) -> Outcome<PathBuf> {
        Ok(to_path(crate::path::absolute(&self.base, path)?))
    }

    pub(crate) fn failure(&self, attempt: &str, error: &io::Error) -> atoll_guest_protocol::Failure {
        from_io(
            format!("{attempt} {}", show(self.path.as_os_str().as_bytes())),
            error,
        )
    }
}

pub(crate) fn to_path(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

pub(crate) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

pub(crate) fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// Opens for reading, and never hangs on what only looks like a file.
pub(crate) fn open_regular(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    refuse_special(file.metadata()?.file_type())?;
    Ok(file.into())
}

/// Opens a directory for reading, but not what a symlink in its place points to.
///
/// By way of `O_PATH`, because gVisor (September 2026) follows the symlink for `O_DIRECTORY | O_NOFOLLOW` without it.
pub(crate) fn open_directory(parent: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let itself = rustix::fs::openat(parent, name, path, Mode::empty())?;
    let read = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&itself, c".", read, Mode::empty())
}

pub(crate) fn refuse_special(kind: fs::FileType) -> io::Result<()> {
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if kind.is_fifo() || kind.is_socket() || kind.is_block_device() || kind.is_char_device() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    Ok(())
}

/// Makes stats, remembering the names of owners for the many files of a listing.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    users: Option<Rc<Users>>,
    user_names: BTreeMap<u32, Option<String>>,
    group_names: BTreeMap<u32, Option<String>>,
}

impl Stats {
    /// Of the thing itself: a symlink is not followed.
    pub(crate) fn of(&mut self, path: &Path) -> io::Result<FileStat> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(self.with_metadata(path, &metadata))
    }

    pub(crate) fn with_metadata(&mut self, path: &Path, metadata: &fs::Metadata) -> FileStat {
        let file_type = metadata.file_type();
        let kind = if file_type.is_symlink() {
            EntryKind::Symlink
        } else if file_type.is_dir() {
            EntryKind::Directory
        } else if file_type.is_file() {
            EntryKind::File
        } else {
            EntryKind::Other
        };
        let users = self.users.get_or_insert_with(Users::load);
        let named = |names: &mut BTreeMap<u32, Option<String>>, id, find: fn(&Users, u32) -> Option<&str>| {
            names
                .entry(id)
                .or_insert_with(|| find(users, id).map(str::to_owned))
                .clone()
        };
        FileStat {
            path: bytes(path).to_vec(),
            kind,
            size: metadata.len(),
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            owner: named(&mut self.user_names, metadata.uid(), Users::user_name),
            group: named(&mut self.group_names, metadata.gid(), Users::group_name),
            modified_millis: metadata.mtime().saturating_mul(1000) + metadata.mtime_nsec() / 1_000_000,
            target: match kind {
                EntryKind::Symlink => fs::read_link(path)
                    .ok()
                    .map(|target| target.into_os_string().into_vec()),
                _ => None,
            },
        }
    }
}

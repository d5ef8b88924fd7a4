//! Removing a tree that somebody hostile made, and may still be making.
//!
//! ```text
//!   doomed/a/b/c/d      a is emptied: what in it is no directory goes, what is one and not empty moves up
//!   doomed/.old-1/c/d   a goes; then .old-1 (it was b) is emptied, and so on
//! ```
//! So two directories are open at a time, however deep the tree, and each directory is moved at most once. No link is
//! followed: every step is from an open directory to one of its names.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::path::Arg;

/// More steps than any tree needs whose entries a volume can hold: somebody makes new ones as fast as they go.
const MOST_STEPS: u64 = 1 << 26;

#[derive(Debug)]
pub(super) enum Stopped {
    Failed(Errno),
    /// It does not get empty.
    GoesOn,
}

impl From<Errno> for Stopped {
    fn from(error: Errno) -> Self {
        Self::Failed(error)
    }
}

/// Removes what has this name, with all that is below.
pub(super) fn tree(parent: BorrowedFd<'_>, name: &Path) -> Result<(), Stopped> {
    let mut steps = Steps::default();
    loop {
        match remove_one(parent, name)? {
            Removed::Yes => return Ok(()),
            Removed::NotEmpty => {}
        }
        let doomed = open_dir(parent, name)?;
        for_each(doomed.as_fd(), |child| {
            steps.one()?;
            match gone(remove_one(doomed.as_fd(), child))? {
                Removed::Yes => return Ok(()),
                Removed::NotEmpty => {}
            }
            empty(doomed.as_fd(), child, &mut steps)
        })?;
    }
}

/// Empties a directory of the doomed one: what cannot go at once moves up into that.
fn empty(doomed: BorrowedFd<'_>, name: &CStr, steps: &mut Steps) -> Result<(), Stopped> {
    let dir = match open_dir(doomed, name) {
        // Another thing by now; the next round sees it.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        other => other?,
    };
    for_each(dir.as_fd(), |child| {
        steps.one()?;
        match gone(remove_one(dir.as_fd(), child))? {
            Removed::Yes => return Ok(()),
            Removed::NotEmpty => {}
        }
        loop {
            steps.one()?;
            let up = format!(".old-{}", steps.0);
            let flags = rustix::fs::RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(&dir, child, doomed, &up, flags) {
                Err(Errno::EXIST) => {}
                Err(Errno::NOENT) | Ok(()) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    })?;
    drop(dir);
    gone(remove_one(doomed, name))?;
    Ok(())
}

enum Removed {
    Yes,
    NotEmpty,
}

fn remove_one(dir: BorrowedFd<'_>, name: impl Arg + Copy) -> rustix::io::Result<Removed> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) => return Ok(Removed::Yes),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error),
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) => Ok(Removed::Yes),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(Removed::NotEmpty),
        Err(error) => Err(error),
    }
}

/// Somebody else removed it: as well.
fn gone(removed: rustix::io::Result<Removed>) -> rustix::io::Result<Removed> {
    match removed {
        Err(Errno::NOENT) => Ok(Removed::Yes),
        other => other,
    }
}

fn open_dir(parent: BorrowedFd<'_>, name: impl Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

fn for_each(dir: BorrowedFd<'_>, mut act: impl FnMut(&CStr) -> Result<(), Stopped>) -> Result<(), Stopped> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            act(entry.file_name())?;
        }
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Steps(u64);

impl Steps {
    fn one(&mut self) -> Result<(), Stopped> {
        self.0 += 1;
        if self.0 > MOST_STEPS {
            return Err(Stopped::GoesOn);
        }
        Ok(())
    }
}

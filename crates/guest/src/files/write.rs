//! Bytes of the host into a file.
//!
//! What must hold: whoever looks at the name sees the old content or the whole new one (`Replace`, `CreateNew`); a
//! stream that breaks off leaves nothing behind. `InPlace` gives both up, for those who need the same file to change.

use std::fs::{self, File};
use std::io::{self, IoSlice, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use atoll_guest_protocol::{FRAME_COST, FailureKind, Message, WriteFile, WriteMode};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};

use crate::failure::{Outcome, failure, invalid, show};
use crate::files::change::make_directories;
use crate::files::{Owner, Place, Stats, bytes, refuse_special};
use crate::job::{Context, Job, Step};

#[derive(Debug)]
pub(crate) struct Writing {
    place: Place,
    file: File,
    /// The name that it has until it is complete.
    temporary: Option<PathBuf>,
    create_new: bool,
    /// Of one that will take another's place; see [`Writing::hurry`].
    early: Option<Early>,
    widened: bool,
    finished: bool,
}

/// How much was written, and how much of that is on its way to the disk.
#[derive(Debug, Default)]
struct Early {
    written: u64,
    on_its_way: u64,
}

const EARLY_PIECE: u64 = 32 * 1024 * 1024;

impl Writing {
    pub(crate) fn open(request: &WriteFile, mut place: Place) -> Outcome<Box<dyn Job>> {
        if request.parents
            && let Some(parent) = place.path.parent()
        {
            make_directories(parent, place.owner, 0o755)?;
        }
        place.path = through_symlinks(&place.path).map_err(|error| place.failure("cannot write", &error))?;
        let existing = match fs::symlink_metadata(&place.path) {
            Ok(metadata) => {
                refuse_special(metadata.file_type()).map_err(|error| match error.raw_os_error() {
                    Some(libc::EINVAL) => invalid(format!("{} is not a file", show(bytes(&place.path)))),
                    _ => place.failure("cannot write", &error),
                })?;
                Some(metadata)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(place.failure("cannot write", &error)),
        };
        let create_new = request.write == WriteMode::CreateNew;
        if create_new && existing.is_some() {
            let text = format!("{} exists", show(bytes(&place.path)));
            return Err(failure(FailureKind::AlreadyExists, text));
        }
        let (file, temporary) = match request.write {
            WriteMode::Append => (open_itself(&place.path, OFlags::APPEND), None),
            WriteMode::InPlace => (open_itself(&place.path, OFlags::TRUNC), None),
            WriteMode::Replace | WriteMode::CreateNew => match create_beside(&place.path) {
                Ok((file, path)) => (Ok(file), Some(path)),
                Err(error) => (Err(error), None),
            },
        };
        let writing = match file {
            Ok(file) => Self {
                place,
                file: File::from(file),
                early: (temporary.is_some() && existing.is_some()).then(Early::default),
                temporary,
                create_new,
                widened: false,
                finished: false,
            },
            Err(error) => return Err(place.failure("cannot write", &error)),
        };
        writing
            .dress(request, existing.as_ref())
            .map_err(|error| writing.place.failure("cannot set the owner or mode of", &error))?;
        Ok(Box::new(writing))
    }

    /// Gives the file its owner and mode: what it had before, else what was asked for.
    fn dress(&self, request: &WriteFile, existing: Option<&fs::Metadata>) -> io::Result<()> {
        if request.write == WriteMode::InPlace {
            if let Some(owner) = self.place.owner {
                let _ = std::os::unix::fs::fchown(&self.file, Some(owner.uid), Some(owner.gid));
            }
            return match request.mode {
                Some(mode) => self
                    .file
                    .set_permissions(fs::Permissions::from_mode(mode & 0o7777)),
                None => Ok(()),
            };
        }
        let fresh = self.temporary.is_some() || existing.is_none();
        if fresh {
            let owner = match existing {
                Some(existing) => Some(Owner {
                    uid: existing.uid(),
                    gid: existing.gid(),
                }),
                None => self.place.owner,
            };
            if let Some(owner) = owner {
                let _ = std::os::unix::fs::fchown(&self.file, Some(owner.uid), Some(owner.gid));
            }
        }
        let mode = request.mode.or_else(|| {
            let kept = existing.map_or(0o644, MetadataExt::mode);
            fresh.then_some(kept)
        });
        match mode {
            Some(mode) => self
                .file
                .set_permissions(fs::Permissions::from_mode(mode & 0o7777)),
            None => Ok(()),
        }
    }

    /// Filesystems on disks have all of a file on its way there before they let it take another's place. Were that left for
    /// the end, everybody else would wait for it. No more than a wish; files in memory do not care.
    fn hurry(&mut self, count: usize) {
        let Some(early) = &mut self.early else { return };
        early.written += count as u64;
        let waiting = early.written - early.on_its_way;
        if waiting >= EARLY_PIECE {
            let length = std::num::NonZeroU64::new(waiting);
            let _ = rustix::fs::fadvise(&self.file, early.on_its_way, length, rustix::fs::Advice::DontNeed);
            early.on_its_way = early.written;
        }
    }

    /// Puts the file under its name.
    fn commit(&mut self) -> io::Result<()> {
        let Some(temporary) = self.temporary.take() else {
            return Ok(());
        };
        let put = match self.create_new {
            false => fs::rename(&temporary, &self.place.path),
            true => rustix::fs::renameat_with(CWD, &temporary, CWD, &self.place.path, RenameFlags::NOREPLACE)
                .map_err(io::Error::from),
        };
        if put.is_err() {
            self.temporary = Some(temporary);
        }
        put
    }
}

impl Job for Writing {
    fn step(&mut self, cx: &mut Context<'_>) -> Step {
        if !self.finished {
            if !std::mem::replace(&mut self.widened, true) {
                cx.widen();
            }
            return Step::Wait;
        }
        if self.temporary.is_some()
            && let Err(error) = self.commit()
        {
            return Step::Done(Err(self.place.failure("cannot write", &error)));
        }
        match Stats::default().of(&self.place.path).map(Message::Stat) {
            Ok(stat) if cx.message(&stat) => Step::Done(Ok(())),
            Ok(_) => Step::Wait,
            Err(error) => Step::Done(Err(self.place.failure("cannot look at", &error))),
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Outcome {
        if self.finished {
            return Err(invalid("data after the end of the file"));
        }
        self.finished = bytes.is_empty();
        self.file
            .write_all(bytes)
            .map_err(|error| self.place.failure("cannot write", &error))?;
        self.hurry(bytes.len());
        cx.consumed(bytes.len() + FRAME_COST as usize);
        Ok(())
    }

    fn data_run(&mut self, cx: &mut Context<'_>, pieces: &[&[u8]]) -> Outcome {
        if self.finished {
            return Err(invalid("data after the end of the file"));
        }
        let mut slices: Vec<_> = pieces.iter().map(|bytes| IoSlice::new(bytes)).collect();
        write_all(&mut self.file, &mut slices).map_err(|error| self.place.failure("cannot write", &error))?;
        let bytes: usize = pieces.iter().map(|bytes| bytes.len()).sum();
        self.hurry(bytes);
        cx.consumed(bytes + pieces.len() * FRAME_COST as usize);
        Ok(())
    }
}

fn write_all(file: &mut File, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// Where a chain of symlinks ends: that is what gets written, and the links stay.
fn through_symlinks(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..40 {
        match fs::read_link(&path) {
            Ok(target) => {
                path.pop();
                path.push(target); // an absolute target replaces all
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// The file that is there, or a new one.
fn open_itself(path: &Path, how: OFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY
        | how
        | OFlags::CREATE
        | OFlags::NONBLOCK
        | OFlags::NOFOLLOW
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?);
    refuse_special(file.metadata()?.file_type())?;
    Ok(file.into())
}

/// A new file in the same directory, so that the rename at the end crosses no border.
fn create_beside(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let parent = path.parent().ok_or(io::Error::from_raw_os_error(libc::EISDIR))?;
    for _ in 0..100 {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = parent.join(format!(".atoll-{}-{number}.tmp", std::process::id()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o600)) {
            Ok(fd) => return Ok((fd, temporary)),
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EEXIST))
}

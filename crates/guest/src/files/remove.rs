//! `rm -r` in small steps, by descriptors: a directory that is swapped for a symlink meanwhile is not followed.

use std::ffi::CString;
use std::io;

use rustix::fs::{AtFlags, CWD, Dir, unlinkat};
use rustix::io::Errno;

use crate::failure::{Outcome, failure, show};
use crate::files::{Place, bytes, open_directory};
use crate::job::{Answer, Context, Job, Step};

/// Per step: about a millisecond.
const PER_STEP: usize = 128;
/// How often a directory that fills up while it is emptied is tried again.
const PATIENCE: u32 = 5;

struct Level {
    directory: Dir,
    name: CString,
    attempts: u32,
}

pub(crate) struct Remove {
    place: Place,
    levels: Vec<Level>,
}

impl Remove {
    pub(crate) fn open(place: Place, recursive: bool) -> Outcome<Box<dyn Job>> {
        match unlinkat(CWD, &place.path, AtFlags::empty()) {
            Ok(()) => return Ok(Answer::nothing()),
            // Linux says EISDIR of a directory, POSIX EPERM.
            Err(Errno::ISDIR | Errno::PERM) if place.path.is_dir() => {}
            Err(error) => return Err(place.failure("cannot remove", &error.into())),
        }
        if !recursive {
            let text = format!(
                "{} is a directory; removing it needs `recursive`",
                show(bytes(&place.path))
            );
            return Err(failure(atoll_guest_protocol::FailureKind::IsADirectory, text));
        }
        let opened = CString::new(bytes(&place.path))
            .map_err(io::Error::from)
            .and_then(|name| Ok(Level::open(CWD, name)?));
        match opened {
            Ok(top) => Ok(Box::new(Self {
                place,
                levels: vec![top],
            })),
            Err(error) => Err(place.failure("cannot remove", &error)),
        }
    }

    /// Removes one entry, enters a directory, or leaves an emptied one. `true` when the top is gone.
    fn advance(&mut self) -> Result<bool, Errno> {
        let Some(level) = self.levels.last_mut() else {
            return Ok(true);
        };
        let Some(entry) = level.directory.read() else {
            return self.leave();
        };
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            return Ok(false);
        }
        let here = level.directory.fd()?;
        match unlinkat(here, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                let below = Level::open(here, name.to_owned())?;
                self.levels.push(below);
            }
            Err(error) => return Err(error),
        }
        Ok(false)
    }

    fn leave(&mut self) -> Result<bool, Errno> {
        let Some(mut level) = self.levels.pop() else {
            return Ok(true);
        };
        let removed = match self.levels.last() {
            Some(parent) => unlinkat(parent.directory.fd()?, &level.name, AtFlags::REMOVEDIR),
            None => unlinkat(CWD, &level.name, AtFlags::REMOVEDIR),
        };
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(self.levels.is_empty()),
            Err(Errno::NOTEMPTY | Errno::EXIST) if level.attempts < PATIENCE => {
                level.attempts += 1;
                level.directory.rewind();
                self.levels.push(level);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

impl Level {
    fn open(parent: impl std::os::fd::AsFd, name: CString) -> Result<Self, Errno> {
        Ok(Self {
            directory: Dir::new(open_directory(parent, &name)?)?,
            name,
            attempts: 0,
        })
    }
}

impl Job for Remove {
    fn step(&mut self, _cx: &mut Context<'_>) -> Step {
        for _ in 0..PER_STEP {
            match self.advance() {
                Ok(true) => return Step::Done(Ok(())),
                Ok(false) => {}
                Err(error) => {
                    return Step::Done(Err(self.place.failure("cannot remove all of", &error.into())));
                }
            }
        }
        Step::Again
    }
}

//! What is in a volume as a tar stream, out and in, also while sandboxes use it.
//!
//! A volume in use is read as it is when each file's turn comes, as `tar` of a live directory does: no file is torn out of
//! its size, but two files may be of different moments. Holding the filesystem still meanwhile would hold every sandbox
//! that writes to it for as long as the reader takes. Stop or pause them first for one moment in time.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use atoll_archive::{Dialect, Ids, Tally};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::elsewhere::{Answer, Op, Streams, confused};
use crate::error::{Doing, Error, Result};
use crate::loops::{self, Access};
use crate::{Kind, SEALED, Volumes, disk};

impl Volumes {
    /// Writes everything in it as a PAX tar stream. Sockets, FIFOs and devices are left out and counted.
    pub fn export(&self, id: &str, out: &mut dyn Write) -> Result<Tally> {
        if let Some(keeper) = &self.keeper {
            let streams = Streams {
                output: Some(out),
                ..Streams::default()
            };
            return counted(&keeper.ask(Op::Export { id: id.into() }, streams)?);
        }
        let open = self.look_into(id)?;
        let done = atoll_archive::pack(open.root.as_fd(), Dialect::Plain, Ids::Same, out)
            .doing(|| format!("exporting volume {id}"));
        self.let_go(id, open);
        done
    }

    /// Puts everything from a tar stream into it, over what is there. On success it is durable; after an error some of
    /// it is there.
    pub fn import(&self, id: &str, input: &mut dyn Read) -> Result<Tally> {
        if let Some(keeper) = &self.keeper {
            let streams = Streams {
                input: Some(input),
                ..Streams::default()
            };
            return counted(&keeper.ask(Op::Import { id: id.into() }, streams)?);
        }
        if self.kind(id)? == Kind::Sealed {
            return Err(Error::Sealed(id.to_owned()));
        }
        let open = self.look_into(id)?;
        let done = atoll_archive::unpack(open.root.as_fd(), Dialect::Plain, Ids::Same, input);
        let synced = rustix::fs::syncfs(&open.root);
        self.let_go(id, open);
        let tally = done.map_err(|error| match error.kind() {
            _ if atoll_archive::is_full(&error) => Error::Full {
                id: id.to_owned(),
                why: error.to_string(),
            },
            // The last three: an entry is in the way of another, or of what is there.
            std::io::ErrorKind::InvalidData
            | std::io::ErrorKind::UnexpectedEof
            | std::io::ErrorKind::NotADirectory
            | std::io::ErrorKind::IsADirectory
            | std::io::ErrorKind::AlreadyExists => Error::Archive {
                id: id.to_owned(),
                why: error.to_string(),
            },
            _ => Error::Io {
                what: format!("importing into volume {id}"),
                source: error,
            },
        })?;
        synced.doing(|| format!("syncing volume {id}"))?;
        Ok(tally)
    }

    /// Does something with the volume's root, which is mounted for it where nobody else uses it.
    pub(crate) fn within<T>(&self, id: &str, work: impl FnOnce(BorrowedFd<'_>) -> Result<T>) -> Result<T> {
        let open = self.look_into(id)?;
        let done = work(open.root.as_fd());
        self.let_go(id, open);
        done
    }

    fn look_into(&self, id: &str) -> Result<Open> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let doing = || format!("looking into volume {id}");
        // Until the directory is open, nobody may unmount it: what is below the mount is the host's.
        let _lock = self.lock()?;
        if self.kind(id)? == Kind::Sealed {
            let image = self.place(id)?.join(SEALED);
            let mount = match disk::mount_sealed(&image.to_string_lossy()) {
                Err(Errno::NOTBLK) => disk::mount_sealed(&loops::attach(&image, Access::ReadOnly)?.path()),
                other => other,
            };
            let root = rustix::fs::openat(mount.doing(doing)?, ".", flags, Mode::empty()).doing(doing)?;
            return Ok(Open { root, ours: false });
        }
        let ours = self.mounted(id)?.is_none();
        let mounted = self.attach_locked(id)?;
        let root = rustix::fs::openat(CWD, &mounted.path, flags, Mode::empty()).doing(doing)?;
        Ok(Open { root, ours })
    }

    fn let_go(&self, id: &str, open: Open) {
        let Open { root, ours } = open;
        drop(root);
        if ours {
            let done = self.lock().and_then(|_lock| {
                // Somebody attached it meanwhile and counts on it.
                if self.wanted().contains(id) {
                    return Ok(());
                }
                self.detach_locked(id)
            });
            match done {
                // Another transfer goes on.
                Ok(()) | Err(Error::Busy { .. }) => {}
                Err(error) => tracing::warn!(%error, volume = id, "stays mounted"),
            }
        }
    }
}

fn counted(answer: &Answer) -> Result<Tally> {
    let Answer::Tally([entries, bytes, sockets, fifos, devices, too_long, mounts]) = *answer else {
        return Err(confused());
    };
    let skipped = atoll_archive::Skipped {
        sockets,
        fifos,
        devices,
        too_long,
        mounts,
    };
    Ok(Tally {
        entries,
        bytes,
        skipped,
    })
}

struct Open {
    root: OwnedFd,
    /// Mounted for this, so to be unmounted after it.
    ours: bool,
}

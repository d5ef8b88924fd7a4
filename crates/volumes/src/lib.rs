//! Volumes: storage that outlives sandboxes.
//!
//! ```text
//!   <dir>/.lock                one at a time, whichever process
//!   <dir>/.new-<id>/           being made; .deleted-<id>/ being removed
//!   <dir>/<id>/disk.ext4       a disk with holes, as large as the volume may get; the filesystem enforces that
//!   <dir>/<id>/mnt             where it is mounted while attached
//!   <dir>/<id>/input.erofs     instead of both, of a sealed volume: an image that is only ever read
//!
//!   disk.ext4 ── one loop device ── one filesystem ──┬── <id>/mnt on the host
//!                                                    ├── /data in one sandbox       (a copy of the mount, in its own
//!                                                    └── /work in another            mount namespace)
//! ```
//! What must hold:
//! - One image never has two loop devices; see [`loops`](self). A sandbox holds a copy of the mount, so it keeps device
//!   and filesystem alive when this server dies or unmounts: whoever attaches next finds the device and mounts the very
//!   same filesystem once more.
//! - Bytes in a volume are a guest's. On the host the mount honours no setuid bit and no device node, nothing is executed
//!   from it, and nothing outside of it is reached through a path in it: see [`content`](self) and `atoll-archive`.
//! - Nothing is ever unmounted lazily. In use is an answer, not something to force.
//! - A volume has its name only when it is whole and on the disk, and loses it before anything of it is removed.
//!
//! The mount takes the propagation of where it is mounted. Where that is shared (systemd), unmounting reaches the copies
//! in other mount namespaces of the host too; a private one would live on in them.
//!
//! An image has holes, so volumes may together promise more than the host's disk has. When that is full, a volume's
//! filesystem gets I/O errors and stops accepting writes; what was synced before is safe.

mod content;
mod disk;
pub mod elsewhere;
mod error;
mod loops;
mod mounts;
mod transfer;

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, RenameFlags};
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

pub use atoll_archive::{Skipped, Tally};
pub use content::{Entry, EntryKind, LARGEST_LISTING, MOST_LISTED, Metadata, WriteFile};
pub use disk::{LEAST, MOST, Usage};
use elsewhere::{Answer, Elsewhere, Op, Streams, confused};
use error::Doing;
pub use error::{Error, Result};
use loops::{Access, LoopDevice};

const DISK: &str = "disk.ext4";
const SEALED: &str = "input.erofs";
const MOUNT: &str = "mnt";
const NEW: &str = ".new-";
const DELETED: &str = ".deleted-";
const LONGEST_ID: usize = 64;
/// A mount namespace that is being torn down (a sandbox that has just ended, a jailer that has just started one) holds its
/// copies a moment longer.
const LETTING_GO: Duration = Duration::from_secs(2);

/// All volumes of one server. Every call may block for as long as the disk takes.
#[derive(Debug)]
pub struct Volumes {
    dir: PathBuf,
    /// Those that somebody asked to be attached, and not just for a transfer.
    wanted: Mutex<HashSet<String>>,
    /// Where another process keeps them.
    keeper: Option<Box<dyn Elsewhere>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Disk,
    /// Read-only: an EROFS image.
    Sealed,
}

/// A volume that can be given to sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// Of a disk the directory where it is mounted, of a sealed volume its image.
    pub path: PathBuf,
    pub kind: Kind,
}

/// What [`Volumes::recover`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovered {
    /// Half-made and half-removed ones that are gone now.
    pub swept: usize,
    pub detached: Vec<String>,
    /// Nobody should, but somebody does use them.
    pub busy: Vec<String>,
}

impl Volumes {
    /// Touches nothing but the directory itself; a server then calls [`Self::recover`].
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        let doing = || format!("preparing {}", dir.display());
        // Passed through by the sandboxes' users, listed by nobody.
        let made = fs::DirBuilder::new().recursive(true).mode(0o711).create(&dir);
        made.doing(doing)?;
        // As the mount table names it.
        let dir = fs::canonicalize(&dir).doing(doing)?;
        Ok(Self {
            dir,
            wanted: Mutex::default(),
            keeper: None,
        })
    }

    /// Those that another process keeps.
    pub fn elsewhere(keeper: Box<dyn Elsewhere>) -> Self {
        Self {
            dir: PathBuf::new(),
            wanted: Mutex::default(),
            keeper: Some(keeper),
        }
    }

    /// Makes an empty disk. On success it is durable, on error nothing is left.
    pub fn create(&self, id: &str, bytes: u64) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Create { id: id.into(), bytes }, Streams::default())? {
                Answer::Done => Ok(()),
                _ => Err(confused()),
            };
        }
        if !(LEAST..=MOST).contains(&bytes) {
            return Err(Error::Size {
                asked: bytes,
                least: LEAST,
                most: MOST,
            });
        }
        self.make(id, |new| {
            fs::DirBuilder::new().mode(0o711).create(new.join(MOUNT))?;
            disk::make(&new.join(DISK), bytes.next_multiple_of(4096))
        })
    }

    /// Makes a sealed volume of an EROFS image, which is moved in place; it has to be on the same filesystem. On error the
    /// image may be gone.
    pub fn seal(&self, id: &str, image: &Path) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::Seal {
                    id: id.into(),
                    image: image.to_owned(),
                },
                Streams::default(),
            )? {
                Answer::Done => Ok(()),
                _ => Err(confused()),
            };
        }
        self.make(id, |new| {
            // Whoever made it may not have made a plain file, and may put another in its place meanwhile: no link is
            // followed, nothing that waits for somebody is waited for, and what is kept is what was looked at.
            let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
            let file = fs::OpenOptions::new()
                .read(true)
                .custom_flags(flags.bits().cast_signed())
                .open(image)?;
            let looked_at = file.metadata()?;
            if !looked_at.is_file() {
                return Err(std::io::Error::other("the image is not a plain file"));
            }
            file.sync_all()?;
            fs::rename(image, new.join(SEALED))?;
            let kept = fs::symlink_metadata(new.join(SEALED))?;
            match (kept.dev(), kept.ino()) == (looked_at.dev(), looked_at.ino()) {
                true => Ok(()),
                false => Err(std::io::Error::other("the image was changed for another file")),
            }
        })
    }

    fn make(&self, id: &str, furnish: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
        let place = self.place(id)?;
        let _lock = self.lock()?;
        if place.exists() {
            return Err(Error::Exists(id.to_owned()));
        }
        let new = self.dir.join(format!("{NEW}{id}"));
        let made = remove_tree(&new)
            .and_then(|()| fs::DirBuilder::new().mode(0o711).create(&new))
            .and_then(|()| furnish(&new))
            .and_then(|()| File::open(&new)?.sync_all())
            .and_then(|()| {
                let here = rustix::fs::CWD;
                rustix::fs::renameat_with(here, &new, here, &place, RenameFlags::NOREPLACE)?;
                File::open(&self.dir)?.sync_all()
            });
        made.map_err(|error| {
            let _ = remove_tree(&new);
            // mkfs only says it.
            if error.kind() == ErrorKind::StorageFull || error.to_string().contains("No space left") {
                return Error::HostFull { id: id.to_owned() };
            }
            Error::Io {
                what: format!("making volume {id}"),
                source: error,
            }
        })
    }

    /// Mounts it if it is not mounted. Any number of sandboxes may then use it.
    pub fn attach(&self, id: &str) -> Result<Mounted> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Attach { id: id.into() }, Streams::default())? {
                Answer::Mounted(mounted) => Ok(mounted),
                _ => Err(confused()),
            };
        }
        let _lock = self.lock()?;
        let mounted = self.attach_locked(id)?;
        self.wanted().insert(id.to_owned());
        Ok(mounted)
    }

    fn attach_locked(&self, id: &str) -> Result<Mounted> {
        let place = self.place(id)?;
        let (image, at) = (place.join(DISK), place.join(MOUNT));
        match self.kind(id)? {
            Kind::Sealed => {
                return Ok(Mounted {
                    path: place.join(SEALED),
                    kind: Kind::Sealed,
                });
            }
            Kind::Disk if self.mounted(id)?.is_some() => {}
            Kind::Disk => {
                let device = match loops::find(&image)? {
                    Some(device) => device,
                    None => loops::attach(&image, Access::Write)?,
                };
                let mount = disk::mount(id, &device)?;
                mounts::attach(&mount, &at).doing(|| format!("mounting on {}", at.display()))?;
                forget_lost_and_found(&at);
            }
        }
        Ok(Mounted {
            path: at,
            kind: Kind::Disk,
        })
    }

    /// Unmounts it. [`Error::Busy`]: a sandbox, or whoever has something open in it, keeps it; it can be attached again at
    /// any time. Everything written is on the disk when this succeeds.
    pub fn detach(&self, id: &str) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Detach { id: id.into() }, Streams::default())? {
                Answer::Done => Ok(()),
                _ => Err(confused()),
            };
        }
        let _lock = self.lock()?;
        self.wanted().remove(id);
        self.detach_locked(id)
    }

    fn detach_locked(&self, id: &str) -> Result<()> {
        if self.kind(id)? == Kind::Sealed {
            return Ok(());
        }
        let busy = |why: &'static str| Error::Busy {
            id: id.to_owned(),
            why: why.into(),
        };
        let at = self.place(id)?.join(MOUNT);
        while self.mounted(id)?.is_some() {
            match rustix::mount::unmount(&at, UnmountFlags::NOFOLLOW) {
                Ok(()) => {}
                Err(rustix::io::Errno::BUSY) => {
                    return Err(busy("something on the host has a file of it open"));
                }
                Err(error) => return Err(error).doing(|| format!("unmounting {}", at.display())),
            }
        }
        let deadline = Instant::now() + LETTING_GO;
        while self.device(id)?.is_some() {
            if Instant::now() > deadline {
                return Err(busy("a sandbox has it mounted"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// After a start of the server: removes what is half-made, unmounts what nobody uses. `in_use` are those of the
    /// sandboxes that run on.
    pub fn recover(&self, in_use: &[&str]) -> Result<Recovered> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(
                Op::Recover {
                    in_use: in_use.iter().map(|id| (*id).to_owned()).collect(),
                },
                Streams::default(),
            )? {
                Answer::Recovered(recovered) => Ok(recovered),
                _ => Err(confused()),
            };
        }
        let _lock = self.lock()?;
        self.wanted().extend(in_use.iter().map(|id| (*id).to_owned()));
        let mut recovered = Recovered::default();
        for entry in fs::read_dir(&self.dir).doing(|| "listing the volumes")?.flatten() {
            let name = entry.file_name();
            let half = [NEW, DELETED]
                .iter()
                .any(|half| name.as_encoded_bytes().starts_with(half.as_bytes()));
            if half {
                remove_tree(&entry.path()).doing(|| format!("removing {}", entry.path().display()))?;
                recovered.swept += 1;
            }
        }
        for (id, _) in self.list()? {
            if in_use.contains(&id.as_str()) {
                continue;
            }
            let was = self.kind(&id)? == Kind::Disk
                && (self.mounted(&id)?.is_some() || self.device(&id)?.is_some());
            if !was {
                continue;
            }
            match self.detach_locked(&id) {
                Ok(()) => recovered.detached.push(id),
                Err(Error::Busy { .. }) => recovered.busy.push(id),
                Err(error) => return Err(error),
            }
        }
        Ok(recovered)
    }

    /// Removes it for good. Succeeds when there is none.
    pub fn delete(&self, id: &str) -> Result<()> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Delete { id: id.into() }, Streams::default())? {
                Answer::Done => Ok(()),
                _ => Err(confused()),
            };
        }
        let place = self.place(id)?;
        let _lock = self.lock()?;
        match self.detach_locked(id) {
            Err(Error::NotFound(_)) => return Ok(()),
            other => other?,
        }
        let gone = self.dir.join(format!("{DELETED}{id}"));
        remove_tree(&gone)
            .and_then(|()| fs::rename(&place, &gone))
            .and_then(|()| File::open(&self.dir)?.sync_all())
            .and_then(|()| remove_tree(&gone))
            .doing(|| format!("removing volume {id}"))
    }

    /// Every volume here, by id.
    pub fn list(&self) -> Result<Vec<(String, Kind)>> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::List, Streams::default())? {
                Answer::Listed(listed) => Ok(listed),
                _ => Err(confused()),
            };
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir).doing(|| "listing the volumes")?.flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if let Ok(kind) = self.kind(&name) {
                found.push((name, kind));
            }
        }
        found.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        Ok(found)
    }

    pub fn usage(&self, id: &str) -> Result<Usage> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Usage { id: id.into() }, Streams::default())? {
                Answer::Usage(usage) => Ok(usage),
                _ => Err(confused()),
            };
        }
        let place = self.place(id)?;
        let doing = || format!("measuring volume {id}");
        if self.kind(id)? == Kind::Sealed {
            let bytes = fs::metadata(place.join(SEALED)).doing(doing)?.len();
            return Ok(Usage {
                used: bytes,
                limit: bytes,
                on_host: bytes,
            });
        }
        let at = place.join(MOUNT);
        let mounted = self.mounted(id)?.map(|_| at.as_path());
        disk::usage(&place.join(DISK), mounted).doing(doing)
    }

    pub fn kind(&self, id: &str) -> Result<Kind> {
        if let Some(keeper) = &self.keeper {
            return match keeper.ask(Op::Kind { id: id.into() }, Streams::default())? {
                Answer::Kind(kind) => Ok(kind),
                _ => Err(confused()),
            };
        }
        let place = self.place(id)?;
        for (name, kind) in [(DISK, Kind::Disk), (SEALED, Kind::Sealed)] {
            if place.join(name).exists() {
                return Ok(kind);
            }
        }
        Err(Error::NotFound(id.to_owned()))
    }

    /// The device that is mounted at the volume's place, if one is.
    fn mounted(&self, id: &str) -> Result<Option<LoopDevice>> {
        let place = self.place(id)?;
        let at = place.join(MOUNT);
        let Some((major, minor)) = mounts::device_at(&at).doing(|| "reading the mount table")? else {
            return Ok(None);
        };
        let device = match major {
            mounts::LOOP => loops::open_if_of(minor, &place.join(DISK))?,
            _ => None,
        };
        match device {
            Some(device) => Ok(Some(device)),
            None => Err(Error::Io {
                what: format!("looking at {}", at.display()),
                source: std::io::Error::other("something else is mounted there; unmount it first"),
            }),
        }
    }

    fn wanted(&self) -> MutexGuard<'_, HashSet<String>> {
        self.wanted.lock()
    }

    fn device(&self, id: &str) -> Result<Option<LoopDevice>> {
        loops::find(&self.place(id)?.join(DISK))
    }

    fn place(&self, id: &str) -> Result<PathBuf> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if id.is_empty() || id.len() > LONGEST_ID || !id.bytes().all(plain) {
            return Err(Error::BadId(id.to_owned()));
        }
        Ok(self.dir.join(id))
    }

    /// Released when it is dropped, or this process dies.
    fn lock(&self) -> Result<File> {
        let doing = || "taking the lock on the volumes";
        let open = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join(".lock"));
        let file = open.doing(doing)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).doing(doing)?;
        Ok(file)
    }
}

/// mkfs makes one; it is nobody's, and e2fsck makes another when it needs one.
fn forget_lost_and_found(at: &Path) {
    use std::os::unix::fs::MetadataExt;
    const LOST_AND_FOUND: u64 = 11;
    let path = at.join("lost+found");
    if fs::symlink_metadata(&path)
        .is_ok_and(|meta| meta.is_dir() && meta.ino() == LOST_AND_FOUND && meta.uid() == 0)
    {
        // Fails when there is something in it.
        let _ = fs::remove_dir(&path);
    }
}

/// Succeeds when there is nothing.
fn remove_tree(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

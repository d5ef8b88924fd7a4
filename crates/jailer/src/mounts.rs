//! Volumes and inputs: mounts of the host that a jail sees too.
//!
//! ```text
//!   host: ext4 of a volume, uid 1000 ──┬── copy, ids mapped by jail A's user namespace ──> A: uid 1000 (host 268436456)
//!                                      └── copy, ids mapped by jail B's user namespace ──> B: uid 1000 (host 268501992)
//! ```
//! So a file belongs to the same user in every jail, and on the volume, whatever range of host ids a jail has.
//!
//! What must hold:
//! - Only what is itself a mount is lent. Were a volume not mounted when its jail starts, the jail would get the directory
//!   below: the host's disk, without a limit.
//! - A mount point is looked up within the jail's tree as the guest would, but before the guest runs; whatever the
//!   template or a restored layer put in the way (links, say) leads nowhere else, and not onto what the jailer mounted.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MoveMountFlags, move_mount};

use crate::error::{Doing, Error, Result};
use crate::spec::{Ids, MountSource, Spec};
use crate::tree::{Owner, copy_of};
use crate::{disk, sys};

/// Takes them from the host's mount namespace, which is to be left afterwards.
pub(crate) fn open(spec: &Spec) -> Result<Vec<OwnedFd>> {
    if spec.ids == Ids::Own && !spec.mounts.is_empty() {
        return Err(Error::new("volumes and inputs need a server run by root"));
    }
    let take = |source: &MountSource| match source {
        MountSource::Image(path) => disk::mount_image(std::slice::from_ref(path)),
        MountSource::Tree(path) => {
            let stat = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE)
                .doing(|| format!("looking at {}", path.display()))?;
            if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                return Err(Error::new(format!("nothing is mounted at {}", path.display())));
            }
            copy_of(path)
        }
    };
    spec.mounts.iter().map(|mount| take(&mount.source)).collect()
}

/// Attaches them in the tree at the working directory.
pub(crate) fn attach_all(spec: &Spec, mounts: &[OwnedFd], owner: &Owner<'_>) -> Result<()> {
    for (wanted, mount) in spec.mounts.iter().zip(mounts) {
        let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        if wanted.read_only {
            attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
        }
        let attributes = u64::from(attributes.bits()) | sys::MOUNT_ATTR_IDMAP;
        sys::mount_setattr(mount.as_fd(), attributes, Some(owner.user_namespace)).doing(|| {
            let at = wanted.at.display();
            format!("mapping the ids of what is for {at} (its filesystem has to support idmapped mounts)")
        })?;
        let at = point(&wanted.at, owner)?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(mount, "", &at, "", flags).doing(|| format!("mounting on {}", wanted.at.display()))?;
    }
    Ok(())
}

/// The directory at a path of the jail, made if missing.
fn point(path: &Path, owner: &Owner<'_>) -> Result<OwnedFd> {
    let shown = path.display();
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::RootDir => {}
            Component::Normal(name) => names.push(name),
            _ => return Err(Error::new(format!("{shown} is not a plain path"))),
        }
    }
    if names.is_empty() || !path.is_absolute() {
        return Err(Error::new(format!(
            "nothing can be mounted on {shown:?}; name a directory below /"
        )));
    }
    let mut so_far = std::path::PathBuf::new();
    let mut dir = look(Path::new(".")).doing(|| "opening the jail's root")?;
    for name in names {
        so_far.push(name);
        dir = match look(&so_far) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => {
                make(&dir, name, owner).doing(|| format!("making {shown}"))?;
                look(&so_far).doing(|| format!("opening {shown}"))?
            }
            Err(Errno::XDEV) => {
                let why = "it lies within another mount of the jail";
                return Err(Error::new(format!("nothing can be mounted on {shown}: {why}")));
            }
            Err(error) => return Err(error).doing(|| format!("opening {shown}")),
        };
    }
    Ok(dir)
}

/// Links are followed as the guest would, with the jail's root as theirs, and never onto another mount.
fn look(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve)
}

fn make(parent: &OwnedFd, name: &OsStr, owner: &Owner<'_>) -> rustix::io::Result<()> {
    // A link to nowhere is in the way, too, and nothing is made through it.
    rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
    let root = owner.id(0);
    let (uid, gid) = (Some(Uid::from_raw(root)), Some(Gid::from_raw(root)));
    rustix::fs::chownat(parent, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
}

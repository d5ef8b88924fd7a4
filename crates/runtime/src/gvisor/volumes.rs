//! Volumes and inputs: what of the host an instance sees beside its template.
//!
//! ```text
//!   volume, uid 1000 ── copy of its mount, ids mapped by a user namespace of the instance's range
//!                         └── attached at <instance>/mounts/<n>, only in the mount namespace that `runsc` starts in
//!                               └── bind mount of the bundle, through a gofer ──> uid 1000 inside
//! ```
//! So a file belongs to the same user in every instance, and on the volume, whatever range of host ids an instance has.
//! An EROFS image needs none of that: the sentry reads it itself.
//!
//! What must hold:
//! - Only what is itself a mount is lent. Were a volume not mounted, the instance would get the directory below: the
//!   host's disk, without a limit.
//! - No mount appears in the host's own namespace, so that none can be left behind: the copies end with the instance.
//! - Set-id bits and device nodes on a volume mean nothing, inside and outside.
#![expect(
    unsafe_code,
    reason = "rustix has no mount_setattr, and a user namespace needs a process to be made by"
)]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use serde_json::{Value, json};

use crate::cause::Doing;
use crate::{Cause, Mount, MountSource, uids};

/// A copy of a mount that is still to be attached.
#[derive(Debug)]
pub(super) struct Volume {
    copy: OwnedFd,
    at: CString,
}

impl Volume {
    /// Between fork and exec, in a mount namespace of its own: makes one system call and touches no memory but its own.
    pub(super) fn attach(&self) -> io::Result<()> {
        // SAFETY: both paths are C strings that outlive the call.
        let moved = unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                self.copy.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_FDCWD,
                self.at.as_ptr(),
                libc::MOVE_MOUNT_F_EMPTY_PATH,
            )
        };
        match moved {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Where a volume is attached for `runsc` to find.
fn point(dir: &Path, number: usize) -> PathBuf {
    dir.join("mounts").join(number.to_string())
}

/// What the bundle says of them. `dir` is the instance's directory.
pub(super) fn entries(mounts: &[Mount], dir: &Path) -> Vec<Value> {
    let entry = |(number, mount): (usize, &Mount)| match &mount.source {
        MountSource::Erofs(image) => {
            json!({"destination": mount.path, "type": "erofs", "source": image,
                   "options": ["ro", "nosuid", "nodev"]})
        }
        MountSource::Directory(_) => {
            let access = if mount.read_only { "ro" } else { "rw" };
            json!({"destination": mount.path, "type": "bind", "source": point(dir, number),
                   "options": ["bind", access, "nosuid", "nodev"]})
        }
    };
    mounts.iter().enumerate().map(entry).collect()
}

/// Whether one of them is served by a gofer.
pub(super) fn need_gofer(mounts: &[Mount]) -> bool {
    mounts
        .iter()
        .any(|mount| matches!(mount.source, MountSource::Directory(_)))
}

/// Takes copies of the volumes' mounts for an instance with these ids.
pub(super) fn take(mounts: &[Mount], dir: &Path, first_uid: u32) -> Result<Vec<Volume>, Cause> {
    if !need_gofer(mounts) {
        return Ok(Vec::new());
    }
    let ids = user_namespace(first_uid).doing(|| "mapping the ids of volumes")?;
    let mut volumes = Vec::new();
    for (number, mount) in mounts.iter().enumerate() {
        let MountSource::Directory(path) = &mount.source else {
            continue;
        };
        let volume = volume(path, mount.read_only, ids.as_fd(), &point(dir, number));
        volumes.push(volume.doing(|| format!("lending {}", path.display()))?);
    }
    Ok(volumes)
}

fn volume(path: &Path, read_only: bool, ids: BorrowedFd<'_>, at: &Path) -> io::Result<Volume> {
    let stat = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE)?;
    if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(io::Error::other("nothing is mounted there"));
    }
    fs::create_dir_all(at)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = open_tree(CWD, path, flags)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if read_only {
        attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    map_ids(copy.as_fd(), u64::from(attributes.bits()), ids)?;
    Ok(Volume {
        copy,
        at: CString::new(at.as_os_str().as_bytes())?,
    })
}

fn map_ids(mount: BorrowedFd<'_>, attributes: u64, ids: BorrowedFd<'_>) -> io::Result<()> {
    const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
    let attr = [
        attributes | MOUNT_ATTR_IDMAP,
        0,
        0,
        u64::from(ids.as_raw_fd().unsigned_abs()),
    ];
    // SAFETY: the path is an empty C string, `attr` a whole `struct mount_attr`; both outlive the call.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            attr.as_ptr(),
            size_of_val(&attr),
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A user namespace in which 0 is the first of these ids. It belongs to a process that waits and is gone afterwards.
fn user_namespace(first: u32) -> io::Result<OwnedFd> {
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    // SAFETY: as `fork`: no stack of its own. The child makes two system calls and touches nothing else.
    let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match child {
        0 => loop {
            // SAFETY: neither takes a pointer. Should this server die first, so does the child.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::pause();
            }
        },
        1.. => {}
        _ => return Err(io::Error::last_os_error()),
    }
    let made = (|| {
        for map in ["uid_map", "gid_map"] {
            fs::write(
                format!("/proc/{child}/{map}"),
                format!("0 {first} {}", uids::RANGE),
            )?;
        }
        Ok(fs::File::open(format!("/proc/{child}/ns/user"))?.into())
    })();
    let pid = i32::try_from(child).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
    made
}

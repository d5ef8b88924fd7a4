//! Filesystems in files: the template's EROFS image and the ext4 file of a disk-backed writable layer.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use crate::error::{Doing, Error, Result};
use crate::sys;

/// Mounts an EROFS image, attached to nothing: it lives as long as the descriptor or a copy of the mount. Behind its own file
/// come those that its device table lists, if it has one.
///
/// Linux 6.12 and up read files directly; before, loop devices that go away by themselves stand between.
pub fn mount_image(files: &[PathBuf]) -> Result<OwnedFd> {
    let [image, ..] = files else {
        return Err(Error::new("an image of no files"));
    };
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let open = |path: &PathBuf| {
        rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("opening {}", path.display()))
    };
    let opened = files.iter().map(open).collect::<Result<Vec<OwnedFd>>>()?;
    // What a mount table shows, also the jail's; a descriptor's number tells nothing of the host.
    let named = opened
        .iter()
        .map(|file| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())));
    match mount("erofs", &named.collect::<Vec<_>>(), &["ro"], attributes) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Err(Error::new(format!("{} is not an EROFS image", image.display())))
        }
        Err(error) if error.raw_os_error() == Some(libc::ENOTBLK) => {
            let devices = files.iter().map(|file| attach(file, Access::ReadOnly));
            let devices = devices.collect::<Result<Vec<LoopDevice>>>()?;
            let named = devices.iter().map(|device| PathBuf::from(&device.path));
            mount("erofs", &named.collect::<Vec<_>>(), &["ro"], attributes)
        }
        other => other,
    }
}

/// Mounts a file that holds ext4, through a loop device that goes away with the mount.
pub(crate) fn mount_ext4(file: &Path) -> Result<OwnedFd> {
    let device = attach(file, Access::Write)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    // A file that replaces another need not be on the disk before that: the layer does not outlive the host. And what was never
    // written reads as zeros: nobody need write them, hundreds of MiB for a large disk.
    mount(
        "ext4",
        &[PathBuf::from(&device.path)],
        &["rw", "noauto_da_alloc", "noinit_itable"],
        attributes,
    )
}

/// The first is the source, the others are devices that it also needs.
fn mount(kind: &str, sources: &[PathBuf], flags: &[&str], attributes: MountAttrFlags) -> Result<OwnedFd> {
    let shown = sources.first().map_or(Path::new(""), |source| source.as_path());
    let doing = || format!("mounting {} as {kind}", shown.display());
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).doing(doing)?;
    for (index, source) in sources.iter().enumerate() {
        let key = if index == 0 { "source" } else { "device" };
        fsconfig_set_string(&context, key, source).doing(doing)?;
    }
    for flag in flags {
        fsconfig_set_flag(&context, *flag).doing(doing)?;
    }
    fsconfig_create(&context).doing(doing)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).doing(doing)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    ReadOnly,
    Write,
}

struct LoopDevice {
    path: String,
    /// Keeps the device from clearing itself until it is mounted.
    _open: OwnedFd,
}

fn attach(file: &Path, access: Access) -> Result<LoopDevice> {
    const LOOP_CTL_GET_FREE: u64 = 0x4C82;
    const LO_FLAGS_READ_ONLY: u64 = 1;
    const LO_FLAGS_AUTOCLEAR: u64 = 4;
    let mode = match access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::Write => OFlags::RDWR,
    } | OFlags::CLOEXEC;
    let open = |path: &Path, mode| {
        rustix::fs::openat(CWD, path, mode, Mode::empty()).doing(|| format!("opening {}", path.display()))
    };
    let backing = open(file, mode)?;
    let control = open(Path::new("/dev/loop-control"), OFlags::RDWR | OFlags::CLOEXEC)?;
    // Between asking for a free device and taking it another may take it; then ask again.
    for _ in 0..64 {
        let number =
            sys::loop_ioctl(control.as_fd(), LOOP_CTL_GET_FREE, 0).doing(|| "asking for a loop device")?;
        let path = format!("/dev/loop{number}");
        let device = open(Path::new(&path), mode)?;
        // struct loop_config: fd, block size; struct loop_info64 with its flags at byte 60; 64 reserved bytes.
        let mut config = [0u64; 38];
        let flags = LO_FLAGS_AUTOCLEAR
            | match access {
                Access::ReadOnly => LO_FLAGS_READ_ONLY,
                Access::Write => 0,
            };
        config[0] = backing.as_raw_fd() as u64 | (4096u64 << 32);
        config[7] = flags << 32;
        match sys::loop_configure(device.as_fd(), &config) {
            Ok(()) => return Ok(LoopDevice { path, _open: device }),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error).doing(|| format!("attaching {} to {path}", file.display())),
        }
    }
    Err(Error::new(
        "every free loop device was taken by others; try again",
    ))
}

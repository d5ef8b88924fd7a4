//! Loop devices: files as disks.
//!
//! What must hold: one file has one loop device. Two would be two disks to the kernel, with a filesystem each that knows
//! nothing of the other, and that is the end of the data. So a device is looked for before one is made, by the file's
//! device and inode numbers, as the kernel itself tells them; and while it is held open it cannot pass to another file.
#![expect(unsafe_code, reason = "ioctls of the loop driver, which rustix does not wrap")]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};

use crate::error::{Doing, Error, Result};

const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_GET_STATUS64: u64 = 0x4C05;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
const LO_FLAGS_READ_ONLY: u64 = 1;
const LO_FLAGS_AUTOCLEAR: u64 = 4;

/// A device that keeps its file as long as this value lives, or it is mounted.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    pub(crate) number: u32,
    _open: OwnedFd,
}

impl LoopDevice {
    pub(crate) fn path(&self) -> String {
        format!("/dev/loop{}", self.number)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    Write,
}

/// The device of a file, if it has one.
pub(crate) fn find(file: &Path) -> Result<Option<LoopDevice>> {
    let wanted = fs::metadata(file).doing(|| format!("looking at {}", file.display()))?;
    for entry in fs::read_dir("/sys/block")
        .doing(|| "listing /sys/block")?
        .flatten()
    {
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("loop")?.parse().ok());
        // Only a device that has a file has this directory.
        let Some(number) = number.filter(|_| entry.path().join("loop").exists()) else {
            continue;
        };
        if let Some(device) = open_if(number, &wanted)? {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// The device with this number, if the file is its.
pub(crate) fn open_if_of(number: u32, file: &Path) -> Result<Option<LoopDevice>> {
    let wanted = fs::metadata(file).doing(|| format!("looking at {}", file.display()))?;
    open_if(number, &wanted)
}

fn open_if(number: u32, wanted: &fs::Metadata) -> Result<Option<LoopDevice>> {
    let path = format!("/dev/loop{number}");
    let open = match rustix::fs::openat(CWD, &path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(open) => open,
        // It was let go meanwhile.
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NXIO | rustix::io::Errno::NODEV) => {
            return Ok(None);
        }
        Err(error) => return Err(error).doing(|| format!("opening {path}")),
    };
    // Asked after it was opened: from now on it keeps its file.
    let (device, inode) = match status(&open) {
        Ok(found) => found,
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) => return Err(error).doing(|| format!("asking {path} for its file")),
    };
    let same = |a: u64, b: u64| {
        rustix::fs::major(a) == rustix::fs::major(b) && rustix::fs::minor(a) == rustix::fs::minor(b)
    };
    let found = inode == wanted.ino() && same(device, wanted.dev());
    Ok(found.then_some(LoopDevice { number, _open: open }))
}

/// Gives a file a device that goes away with its last user. The caller has made sure that it has none.
pub(crate) fn attach(file: &Path, access: Access) -> Result<LoopDevice> {
    let (mode, flags) = match access {
        Access::ReadOnly => (OFlags::RDONLY, LO_FLAGS_AUTOCLEAR | LO_FLAGS_READ_ONLY),
        Access::Write => (OFlags::RDWR, LO_FLAGS_AUTOCLEAR),
    };
    let open = |path: &Path, mode: OFlags| {
        rustix::fs::openat(CWD, path, mode | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("opening {}", path.display()))
    };
    let backing = open(file, mode)?;
    let control = open(Path::new("/dev/loop-control"), OFlags::RDWR)?;
    // Between asking for a free device and taking it another may take it; then ask again.
    for _ in 0..64 {
        let number = ioctl(&control, LOOP_CTL_GET_FREE, None).doing(|| "asking for a loop device")?;
        let device = open(Path::new(&format!("/dev/loop{number}")), mode)?;
        // struct loop_config: fd, block size; struct loop_info64 with its flags at byte 60; 64 reserved bytes.
        let mut config = [0u64; 38];
        config[0] = backing.as_raw_fd() as u64 | (4096u64 << 32);
        config[7] = flags << 32;
        match ioctl(&device, LOOP_CONFIGURE, Some(&mut config)) {
            Ok(_) => {
                return Ok(LoopDevice {
                    number,
                    _open: device,
                });
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error).doing(|| format!("giving {} a loop device", file.display())),
        }
    }
    Err(Error::Io {
        what: "taking a loop device".into(),
        source: io::Error::other("every free one was taken by others; try again"),
    })
}

/// Device and inode of a loop device's file.
fn status(device: &OwnedFd) -> io::Result<(u64, u64)> {
    let mut info = [0u64; 38];
    ioctl(device, LOOP_GET_STATUS64, Some(&mut info))?;
    Ok((info[0], info[1]))
}

/// With the longest structure that any of these calls reads or writes (`struct loop_config`), or none.
fn ioctl(fd: &OwnedFd, request: u64, argument: Option<&mut [u64; 38]>) -> io::Result<u32> {
    let pointer = argument.map_or(std::ptr::null_mut(), |argument| argument.as_mut_ptr());
    // SAFETY: callers pass LOOP_CTL_GET_FREE with no structure, or LOOP_CONFIGURE (304 bytes, read) or LOOP_GET_STATUS64
    // (232 bytes, written) with 304 bytes that outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, fd.as_raw_fd(), request, pointer) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    u32::try_from(result).map_err(io::Error::other)
}

//! The file behind a writable layer on disk.
#![expect(unsafe_code, reason = "a mapping of a file is made and removed again")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr::null_mut;

use rustix::fs::{Mode, OFlags};

/// A file in this directory that has no name, so it goes with the last who has it open.
pub(super) fn make(dir: &Path) -> io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir, flags | OFlags::TMPFILE, mode).or_else(|_| {
        // Not every filesystem can do that.
        let name = dir.join("layer");
        let file = rustix::fs::open(&name, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
        rustix::fs::unlink(&name)?;
        Ok::<_, rustix::io::Errno>(file)
    })?;
    measure(&file);
    Ok(file)
}

/// Where the kernel measures (IMA) what is mapped to be executed, it does so once and reads the whole file for it. Now that
/// is nothing; later it would fill all the holes of a sparse file. The sentry leaves this to whoever makes the file.
fn measure(file: &OwnedFd) {
    // SAFETY: makes a new mapping of one page, which nobody touches, and removes that one.
    unsafe {
        let page = libc::mmap(
            null_mut(),
            4096,
            libc::PROT_EXEC,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        if page != libc::MAP_FAILED {
            libc::munmap(page, 4096);
        }
    }
}

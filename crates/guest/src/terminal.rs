//! Pseudo-terminals, opened by hand: no `openpty`, which would look names up in `/proc`.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use atoll_guest_protocol::PtySize;

use crate::users::Account;

#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) master: OwnedFd,
    pub(crate) slave: OwnedFd,
}

pub(crate) fn open(size: PtySize, account: &Account) -> io::Result<Pair> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/ptmx", flags | OFlags::NONBLOCK, Mode::empty())
        .or_else(|_| rustix::fs::open("/dev/pts/ptmx", flags | OFlags::NONBLOCK, Mode::empty()))?;
    let unlock: c_int = 0;
    let mut number: c_int = 0;
    // SAFETY: both take a pointer to an int that lives through the call.
    let failed = unsafe {
        libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) < 0
            || libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) < 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    let slave = match rustix::fs::open(format!("/dev/pts/{number}"), flags, Mode::empty()) {
        Ok(slave) => slave,
        Err(error) => open_peer(&master).map_err(|_| io::Error::from(error))?,
    };
    // So that the user's programs may open it again by name. Not every tier lets us; it is a courtesy.
    let _ = rustix::fs::fchown(
        &slave,
        Some(rustix::fs::Uid::from_raw(account.uid)),
        Some(rustix::fs::Gid::from_raw(account.gid)),
    );
    let _ = rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620));
    resize(&master, size)?;
    Ok(Pair { master, slave })
}

/// Without a name: for a root where `/dev/pts` is another instance.
fn open_peer(master: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: plain numbers; the kernel answers with a new descriptor.
    let fd = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Programs in the foreground get SIGWINCH from the kernel.
pub(crate) fn resize(master: &OwnedFd, size: PtySize) -> io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

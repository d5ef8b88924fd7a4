//! The two FIFOs of an instance.
#![expect(unsafe_code, reason = "registering for one direction only is unsafe in tokio")]

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::ChannelError;

/// As much as an unprivileged process may ask for by default, and enough for bulk data to flow without a switch per
/// frame.
const PIPE_SIZE: usize = 1 << 20;

/// Where an instance's FIFOs stand: `in` carries bytes to the guest's stdin, `out` those from its stdout.
#[derive(Debug, Clone)]
pub struct Fifos {
    pub to_guest: PathBuf,
    pub from_guest: PathBuf,
}

impl Fifos {
    /// The names in an instance's directory, whether they exist or not.
    pub fn in_dir(dir: &Path) -> Self {
        Self {
            to_guest: dir.join("in"),
            from_guest: dir.join("out"),
        }
    }

    /// Makes both.
    pub fn create(dir: &Path) -> io::Result<Self> {
        let fifos = Self::in_dir(dir);
        for path in [&fifos.to_guest, &fifos.from_guest] {
            rustix::fs::mknodat(
                rustix::fs::CWD,
                path,
                rustix::fs::FileType::Fifo,
                Mode::RUSR | Mode::WUSR,
                0,
            )?;
        }
        Ok(fifos)
    }

    /// Stdin and stdout for the agent: open file descriptions of their own (a guest may change their flags), blocking,
    /// and open both ways, so that the agent sees no end of file while no server runs.
    pub fn open_for_guest(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let open = |path: &Path| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        Ok((open(&self.to_guest)?, open(&self.from_guest)?))
    }
}

impl Fifos {
    /// For the host's end, to be handed to [`super::Guest::over`]: to the guest, and from it.
    pub fn open_for_host(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        Ok((open(&self.to_guest)?, open(&self.from_guest)?))
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&fd)?;
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a FIFO"));
    }
    // Best effort: a smaller pipe is only slower.
    let _ = rustix::pipe::fcntl_setpipe_size(&fd, PIPE_SIZE);
    Ok(fd)
}

pub(super) fn open_named(path: &Path) -> Result<OwnedFd, ChannelError> {
    open(path).map_err(|error| ChannelError::io(format!("opening {}", path.display()), error))
}

pub(super) fn register(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>, ChannelError> {
    // SAFETY: `OwnedFd` gives the same open descriptor until it is dropped, which `AsyncFd` does after deregistering.
    unsafe {
        AsyncFd::register_with_interest(fd, interest)
            .map_err(|error| ChannelError::io("watching a FIFO", io::Error::from(error)))
    }
}

//! What carries the bytes of a channel: the FIFOs of an instance or, in tests, a line within this process.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

use super::{ChannelError, fifo};

#[derive(Debug)]
pub(super) enum Wire {
    Fifos {
        to_guest: AsyncFd<OwnedFd>,
        from_guest: AsyncFd<OwnedFd>,
    },
    #[cfg(feature = "testing")]
    Line(std::sync::Arc<super::line::Line>),
}

/// There may be something to do. Whoever finds that there is nothing clears it, and waits again.
pub(super) enum Ready<'a> {
    Fifo(AsyncFdReadyGuard<'a, OwnedFd>),
    #[cfg(feature = "testing")]
    Line,
}

impl Ready<'_> {
    pub(super) fn clear(&mut self) {
        match self {
            Self::Fifo(guard) => guard.clear_ready(),
            #[cfg(feature = "testing")]
            Self::Line => {}
        }
    }
}

impl Wire {
    pub(super) fn fifos(to_guest: OwnedFd, from_guest: OwnedFd) -> Result<Self, ChannelError> {
        Ok(Self::Fifos {
            to_guest: fifo::register(to_guest, Interest::WRITABLE)?,
            from_guest: fifo::register(from_guest, Interest::READABLE)?,
        })
    }

    /// Never blocks.
    pub(super) fn write(&self, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        match self {
            Self::Fifos { to_guest, .. } => rustix::io::writev(to_guest.get_ref(), slices),
            #[cfg(feature = "testing")]
            Self::Line(line) => Ok(line.write(slices)),
        }
    }

    /// Never blocks.
    pub(super) fn read(&self, space: &mut [u8]) -> Result<usize, Errno> {
        match self {
            Self::Fifos { from_guest, .. } => rustix::io::read(from_guest.get_ref(), space),
            #[cfg(feature = "testing")]
            Self::Line(line) => line.read(space),
        }
    }

    pub(super) async fn writable(&self) -> io::Result<Ready<'_>> {
        match self {
            Self::Fifos { to_guest, .. } => to_guest.writable().await.map(Ready::Fifo),
            #[cfg(feature = "testing")]
            Self::Line(_) => Ok(Ready::Line),
        }
    }

    pub(super) async fn readable(&self) -> io::Result<Ready<'_>> {
        match self {
            Self::Fifos { from_guest, .. } => from_guest.readable().await.map(Ready::Fifo),
            #[cfg(feature = "testing")]
            Self::Line(line) => {
                line.readable().await;
                Ok(Ready::Line)
            }
        }
    }

    /// Whether the guest has read all that was sent.
    pub(super) fn is_taken(&self) -> bool {
        match self {
            Self::Fifos { to_guest, .. } => is_empty(to_guest.get_ref()),
            #[cfg(feature = "testing")]
            Self::Line(_) => true,
        }
    }

    /// Whether we have read all that the guest has said.
    pub(super) fn is_delivered(&self) -> bool {
        match self {
            Self::Fifos { from_guest, .. } => is_empty(from_guest.get_ref()),
            #[cfg(feature = "testing")]
            Self::Line(line) => line.is_empty(),
        }
    }
}

fn is_empty(pipe: &OwnedFd) -> bool {
    rustix::io::ioctl_fionread(pipe).is_ok_and(|bytes| bytes == 0)
}

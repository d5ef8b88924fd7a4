//! Being told to end, while a server runs that has to be stopped: Ctrl-C, and SIGTERM.

use atoll_client::output::{Doing, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Hears of both from when it is made, whether or not somebody waits by then.
#[derive(Debug)]
pub(crate) struct Interrupt {
    interrupted: Signal,
    terminated: Signal,
}

impl Interrupt {
    pub(crate) fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).doing("cannot listen for signals");
        Ok(Self {
            interrupted: listen(SignalKind::interrupt())?,
            terminated: listen(SignalKind::terminate())?,
        })
    }

    pub(crate) async fn heard(&mut self) {
        tokio::select! {
            _ = self.interrupted.recv() => {}
            _ = self.terminated.recv() => {}
        }
    }
}

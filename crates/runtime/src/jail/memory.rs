//! Out of memory in a jail: the whole jail goes, and says why.
//!
//! cgroup v2 does it by itself (`memory.oom.group`). v1 kills one process at a time, which would leave a crippled
//! sandbox; there the kernel tells us, and we finish its work.
#![expect(unsafe_code, reason = "registering for one direction only is unsafe in tokio")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use atoll_types::InstanceId;
use rustix::event::EventfdFlags;
use rustix::fs::{Mode, OFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cgroup::Group;
use crate::process::Handle;

/// The kernel tells before it kills. How long to look for the victim before taking it for a false alarm (a limit that was
/// raised just then).
const LOOK_FOR: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Ends the jail when it has exceeded its memory. The task lives as long as the jail does.
pub(super) fn guard(id: InstanceId, process: Handle, group: Group) {
    tokio::spawn(async move {
        tokio::select! {
            _ = process.ended() => return,
            () = exceeded(&group) => {}
        }
        tracing::info!(instance = %id, "out of memory; ending the jail");
        if let Err(error) = group.kill_all().await {
            tracing::error!(%error, instance = %id, "a jail out of memory could not be killed");
        }
    });
}

/// Completes when the kernel has killed something in the group for its memory; never on cgroup v2, where everything in it
/// is dead then. Cancel-safe.
async fn exceeded(group: &Group) {
    let listener = match Listener::new(group) {
        Ok(Some(listener)) => listener,
        Ok(None) => return std::future::pending().await,
        Err(error) => {
            tracing::warn!(%error, "cannot listen for out-of-memory events; looking every second instead");
            while !has_victim(group, Duration::ZERO).await {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            return;
        }
    };
    // It may have happened before we listened.
    let mut patience = Duration::ZERO;
    while !has_victim(group, patience).await {
        patience = LOOK_FOR;
        if listener.event().await.is_err() {
            return std::future::pending().await;
        }
    }
}

async fn has_victim(group: &Group, within: Duration) -> bool {
    let deadline = tokio::time::Instant::now() + within;
    loop {
        match group.oom_kills() {
            Ok(0) => {}
            Ok(_) => return true,
            // The group is gone, and with it everybody.
            Err(_) => return std::future::pending().await,
        }
        if tokio::time::Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// An eventfd that cgroup v1 adds to whenever the group runs out of memory.
struct Listener {
    events: AsyncFd<OwnedFd>,
    /// The registration ends when this is closed.
    _control: OwnedFd,
}

impl Listener {
    /// `None` on cgroup v2.
    fn new(group: &Group) -> io::Result<Option<Self>> {
        let open =
            |path: &std::path::Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
        for dir in group.procs_files().iter().filter_map(|file| file.parent()) {
            let control = match open(&dir.join("memory.oom_control"), OFlags::RDONLY) {
                Ok(control) => control,
                Err(rustix::io::Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            let events = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let register = open(&dir.join("cgroup.event_control"), OFlags::WRONLY)?;
            let words = format!("{} {}", events.as_raw_fd(), control.as_raw_fd());
            rustix::io::write(&register, words.as_bytes())?;
            // SAFETY: `OwnedFd` gives the same open descriptor until it is dropped, which `AsyncFd` does after deregistering.
            let events = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE)? };
            return Ok(Some(Self {
                events,
                _control: control,
            }));
        }
        Ok(None)
    }

    async fn event(&self) -> io::Result<()> {
        loop {
            let mut ready = self.events.readable().await?;
            let mut count = [0; 8];
            match ready
                .try_io(|events| rustix::io::read(events.get_ref(), &mut count).map_err(io::Error::from))
            {
                Ok(read) => return read.map(|_| ()),
                Err(_would_block) => {}
            }
        }
    }
}

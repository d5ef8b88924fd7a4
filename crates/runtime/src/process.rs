//! A process of the host that can be named again after a restart of the server.
//!
//! What must hold: a pid alone names nobody, since the kernel uses it again. Pid, start time and boot together do.
#![expect(unsafe_code, reason = "registering for one direction only is unsafe in tokio")]

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Clock ticks from boot to its start.
    started: u64,
    boot: String,
}

impl Process {
    /// Takes down who has this pid now. `None`: nobody, or only the remains of somebody.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            started: started(pid)?,
            boot: boot_id().to_owned(),
        })
    }

    /// A handle to it if it still runs.
    pub(crate) fn open(&self) -> Option<Handle> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Asked after the handle exists: now the pid cannot pass to another unnoticed.
        (self.boot == boot_id() && started(self.pid) == Some(self.started)).then_some(Handle { pidfd })
    }
}

/// Refers to one process for good, also when it is gone.
#[derive(Debug)]
pub(crate) struct Handle {
    pidfd: OwnedFd,
}

impl Handle {
    /// Succeeds when it is gone already.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Err(error) if error != rustix::io::Errno::SRCH => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Waits for its end. Cancel-safe.
    pub(crate) async fn ended(self) -> io::Result<()> {
        // SAFETY: `OwnedFd` gives the same open descriptor until it is dropped, which `AsyncFd` does after deregistering.
        let pidfd = unsafe { AsyncFd::register_with_interest(self.pidfd, Interest::READABLE)? };
        let _ready = pidfd.readable().await?;
        Ok(())
    }
}

/// Field 22 of `/proc/<pid>/stat`; none for a zombie, which runs no more.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in parentheses that may itself contain any of them.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_or_else(|_| String::new(), |id| id.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_is_itself_until_it_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id()).unwrap();
        let json = serde_json::to_string(&process).unwrap();
        let process: Process = serde_json::from_str(&json).unwrap();
        let handle = process.open().unwrap();
        handle.kill().unwrap();
        handle.ended().await.unwrap();
        assert!(process.open().is_none(), "a zombie runs no more");
        child.wait().unwrap();
        assert!(process.open().is_none());
    }

    #[test]
    fn another_with_the_same_pid_is_somebody_else() {
        let own = Process::of(std::process::id()).unwrap();
        assert!(own.open().is_some());
        assert!(
            Process {
                started: own.started + 1,
                ..own.clone()
            }
            .open()
            .is_none()
        );
        assert!(
            Process {
                boot: "another".into(),
                ..own
            }
            .open()
            .is_none()
        );
    }
}

//! Capabilities: which there are, and dropping them for good.

use crate::error::{Doing, Result};
use crate::sys;

/// Beyond the last one that a kernel knows, asking for one fails.
const LAST: u64 = 63;

pub const CHOWN: u64 = 1;
pub const DAC_OVERRIDE: u64 = 1 << 1;
pub const DAC_READ_SEARCH: u64 = 1 << 2;
pub const FOWNER: u64 = 1 << 3;
pub const FSETID: u64 = 1 << 4;
pub const KILL: u64 = 1 << 5;
pub const SETGID: u64 = 1 << 6;
pub const SETUID: u64 = 1 << 7;
pub const SETPCAP: u64 = 1 << 8;
pub const NET_BIND_SERVICE: u64 = 1 << 10;
pub const NET_ADMIN: u64 = 1 << 12;
pub const NET_RAW: u64 = 1 << 13;
pub const IPC_LOCK: u64 = 1 << 14;
pub const SYS_CHROOT: u64 = 1 << 18;
pub const SYS_PTRACE: u64 = 1 << 19;
pub const SYS_ADMIN: u64 = 1 << 21;
pub const SYS_RESOURCE: u64 = 1 << 24;
pub const MKNOD: u64 = 1 << 27;
pub const SETFCAP: u64 = 1 << 31;
pub const BPF: u64 = 1 << 39;

/// Takes everything but `kept` out of the bounding set: no program that is started from here can have it, whatever its file
/// says. Needs [`SETPCAP`].
pub fn bound_to(kept: u64) -> Result<()> {
    for capability in 0..=LAST {
        if kept & (1 << capability) != 0 {
            continue;
        }
        match sys::prctl(libc::PR_CAPBSET_DROP, capability, 0) {
            Ok(_) => {}
            // Beyond the last one that this kernel knows.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error).doing(|| format!("dropping capability {capability}")),
        }
    }
    Ok(())
}

/// Takes everything but `kept` away from this thread, and from what it starts.
pub fn keep_only(kept: u64) -> Result<()> {
    let permitted = sys::permitted_capabilities().doing(|| "asking for the capabilities")?;
    if permitted & SETPCAP != 0 {
        bound_to(kept)?;
    }
    sys::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as u64, 0)
        .doing(|| "clearing the ambient capabilities")?;
    sys::set_capabilities(permitted & kept).doing(|| "setting the capabilities")
}

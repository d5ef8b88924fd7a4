//! Landlock: which files a process and all that come from it may touch, and how.
//!
//! Whoever is under a rule about files may not mount, unmount or pivot, nor trace a process that is not under it too.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};

use crate::error::{Doing, Error, Result};
use crate::sys;

/// Before generation 2 every rename between directories would fail.
const OLDEST: u32 = 2;

pub const EXECUTE: u64 = 1;
pub const WRITE_FILE: u64 = 1 << 1;
pub const READ_FILE: u64 = 1 << 2;
pub const READ_DIR: u64 = 1 << 3;
pub const MAKE_CHAR: u64 = 1 << 6;
pub const MAKE_SOCK: u64 = 1 << 9;
pub const MAKE_FIFO: u64 = 1 << 10;
pub const MAKE_BLOCK: u64 = 1 << 11;
pub const TRUNCATE: u64 = 1 << 14;
pub const IOCTL_DEV: u64 = 1 << 15;

/// To look at files and directories.
pub const READ: u64 = READ_FILE | READ_DIR;
/// To make, change and remove files, directories and links; nothing that is more than that.
pub const CHANGE: u64 = ((1 << 15) - 1) & !(EXECUTE | MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK | MAKE_FIFO);
/// What can be allowed of a single file.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;

/// What to do where [`check`] says no.
pub const REMEDY: &str =
    "boot Linux 5.19 or newer, with CONFIG_SECURITY_LANDLOCK=y and `landlock` in its lsm= list";

/// Whether this kernel can do it, and if not, why.
pub fn check() -> std::result::Result<u32, String> {
    match sys::landlock_abi() {
        0 => Err("this kernel has no Landlock".into()),
        abi if abi < OLDEST => Err(format!(
            "Landlock generation {abi} is too old: {OLDEST} is needed"
        )),
        abi => Ok(abi),
    }
}

/// Rules being put together: what is not allowed by one is refused.
#[derive(Debug)]
pub struct Rules {
    ruleset: OwnedFd,
    handled: u64,
}

impl Rules {
    /// Everything that this kernel knows to refuse is. Signals and abstract unix sockets stay within the domain (6.12 and up).
    pub fn new() -> Result<Self> {
        let abi = check().map_err(Error::new)?;
        let handled: u64 = match abi {
            2 => (1 << 14) - 1,
            3 | 4 => (1 << 15) - 1,
            _ => (1 << 16) - 1,
        };
        // struct landlock_ruleset_attr: files (1), network (4), scopes (6).
        let scopes = 0b11; // abstract unix sockets, signals
        let words = [handled, 0, scopes];
        let known = match abi {
            2 | 3 => 1,
            4 | 5 => 2,
            _ => 3,
        };
        let ruleset = sys::landlock_ruleset(&words[..known]).doing(|| "making a Landlock ruleset")?;
        Ok(Self { ruleset, handled })
    }

    /// Allows `access` to a file, or to a directory and all that is below it, now and later. Of what this kernel cannot
    /// refuse nothing has to be allowed.
    pub fn allow(&self, path: &Path, access: u64) -> Result<()> {
        let at = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("opening {} for Landlock", path.display()))?;
        let stat = rustix::fs::fstat(&at).doing(|| format!("looking at {}", path.display()))?;
        let mut access = access & self.handled;
        if !FileType::from_raw_mode(stat.st_mode).is_dir() {
            access &= OF_FILES;
        }
        if access == 0 {
            return Ok(());
        }
        sys::landlock_allow(&self.ruleset, &at, access)
            .doing(|| format!("allowing {} in Landlock", path.display()))
    }

    /// The same for what may be absent.
    pub fn allow_if_there(&self, path: &Path, access: u64) -> Result<()> {
        match self.allow(path, access) {
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES | libc::ELOOP)
                ) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Puts them in force for this thread and all that comes from it. Needs `no_new_privs`, or the power to do without.
    pub fn enforce(self) -> Result<()> {
        sys::landlock_restrict(&self.ruleset).doing(|| "entering the Landlock domain")
    }
}

//! Landlock: what the jail's processes may do to files, said a second time.
//!
//! The mount namespace already shows them nothing but their own tree. This layer also holds if that one is got around:
//! - nobody creates a device node, anywhere;
//! - nobody mounts, unmounts or pivots (Landlock refuses that to everyone under a file rule);
//! - device `ioctl`s only below `/dev`;
//! - signals and abstract unix sockets stay within the jail (kernel 6.12 and up).

use rustix::fs::{CWD, Mode, OFlags};

use crate::error::{Doing, Error, Result};
use crate::sys;

/// Before generation 2 every rename between directories would fail.
const OLDEST: u32 = 2;

const MAKE_CHAR: u64 = 1 << 6;
const MAKE_BLOCK: u64 = 1 << 11;
const IOCTL_DEV: u64 = 1 << 15;

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

/// Restricts this process and all that come from it to the tree at `/`.
pub(crate) fn restrict() -> Result<()> {
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
    let everywhere = handled & !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV);
    for (path, access) in [("/", everywhere), ("/dev", handled & IOCTL_DEV)] {
        if access == 0 {
            continue;
        }
        let at = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("opening {path} for Landlock"))?;
        sys::landlock_allow(&ruleset, &at, access).doing(|| format!("allowing {path} in Landlock"))?;
    }
    sys::landlock_restrict(&ruleset).doing(|| "entering the Landlock domain")
}

//! Landlock: what the jail's processes may do to files, said a second time.
//!
//! The mount namespace already shows them nothing but their own tree. This layer also holds if that one is got around:
//! - nobody creates a device node, anywhere;
//! - nobody mounts, unmounts or pivots (Landlock refuses that to everyone under a file rule);
//! - device `ioctl`s only below `/dev`;
//! - signals and abstract unix sockets stay within the jail (kernel 6.12 and up).

use std::path::Path;

use atoll_confine::landlock::{IOCTL_DEV, MAKE_BLOCK, MAKE_CHAR, Rules};
pub use atoll_confine::landlock::{REMEDY, check};

use crate::error::Result;

/// Restricts this process and all that come from it to the tree at `/`.
pub(crate) fn restrict() -> Result<()> {
    let rules = Rules::new()?;
    rules.allow(Path::new("/"), !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV))?;
    rules.allow(Path::new("/dev"), IOCTL_DEV)?;
    rules.enforce()
}

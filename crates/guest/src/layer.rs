//! `atoll-guest apply-layer`: unpacks a saved writable layer, read from stdin, over the root it runs in.
//!
//! For tiers whose writable layer the host cannot fill from outside. The host starts it as root's command before it lets
//! anybody else in.
//!
//! What must hold: the stream is hostile, but so is the guest it came from and the one it goes to; it can only harm this
//! guest. What the runtime mounts is left alone.

use std::ffi::c_int;
use std::io::BufReader;
use std::os::fd::AsFd;

use atoll_archive::{Dialect, Ids};
use rustix::fs::{Mode, OFlags};

pub(crate) const APPLY: &str = "apply-layer";

/// Says what went wrong on stderr.
pub(crate) fn main() -> c_int {
    match apply() {
        Ok(()) => 0,
        Err(error) if atoll_archive::is_full(&error) => {
            eprintln!("what was saved does not fit into a disk of this size; ask for a larger one ({error})");
            1
        }
        Err(error) => {
            eprintln!("unpacking the saved layer: {error}");
            1
        }
    }
}

fn apply() -> std::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, Mode::empty())?;
    let dialect = Dialect::Applied {
        not_ours: &[".atoll", ".atoll-disk", "dev", "proc", "sys"],
    };
    let mut input = BufReader::with_capacity(256 << 10, std::io::stdin());
    atoll_archive::unpack(root.as_fd(), dialect, Ids::Same, &mut input)?;
    Ok(())
}

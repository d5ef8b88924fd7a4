//! A server that is run by an ordinary user, as far as root can arrange that on this machine.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, lchown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::host;

/// `nobody` of Debian: no rights, and no processes of its own.
pub const USER: u32 = 65534;

const PROGRAM: &str = "atoll";

/// Gives the user a directory with all that a server needs, and cgroups to make its own in.
pub(crate) fn hand_over(dir: &Path, cgroup: &str) {
    // The program may lie where only root gets to.
    fs::copy(crate::binary(), dir.join(PROGRAM)).expect("the program is copied");
    give(dir);
    for hierarchy in host::cgroup_hierarchies() {
        let group = hierarchy.join(cgroup);
        // Not every hierarchy has groups of its own.
        if fs::create_dir(&group).is_ok() {
            give(&group);
        }
    }
}

pub(crate) fn command(dir: &Path) -> Command {
    let mut command = Command::new(dir.join(PROGRAM));
    // With the ids go the supplementary groups.
    command
        .uid(USER)
        .gid(USER)
        .env("HOME", dir)
        .env("TMPDIR", dir)
        .current_dir(dir);
    command
}

/// A file that has other names stays whose it is: images are shared.
fn give(path: &Path) {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return;
    };
    if metadata.is_dir() {
        chown(path, Some(USER), Some(USER)).expect("a directory changes hands");
        for entry in fs::read_dir(path).expect("a directory").flatten() {
            give(&entry.path());
        }
    } else if metadata.nlink() == 1 {
        // Some files of cgroups belong to the kernel.
        let _stays = lchown(path, Some(USER), Some(USER));
    }
}

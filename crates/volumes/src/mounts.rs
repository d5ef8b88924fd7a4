//! The host's mount table.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, move_mount};

/// The major number of loop devices.
pub(crate) const LOOP: u32 = 7;

pub(crate) fn attach(mount: &OwnedFd, at: &Path) -> rustix::io::Result<()> {
    move_mount(mount, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// The device of what is mounted at this very path, the topmost if several are.
pub(crate) fn device_at(at: &Path) -> io::Result<Option<(u32, u32)>> {
    Ok(find(&fs::read("/proc/self/mountinfo")?, at))
}

fn find(table: &[u8], at: &Path) -> Option<(u32, u32)> {
    let lines = table.split(|byte| *byte == b'\n');
    let mut found = lines.filter_map(|line| {
        // id, parent, device, root, mount point, ...
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let (device, point) = (fields.next()?, fields.nth(1)?);
        if unescaped(point) != at.as_os_str().as_bytes() {
            return None;
        }
        let (major, minor) = std::str::from_utf8(device).ok()?.split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    found.next_back()
}

/// The kernel writes blanks and the like as `\040`.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let code = (*first == b'\\').then(|| after.get(..3)).flatten();
        let code = code.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match code {
            Some(code) => {
                plain.push(code);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topmost_mount_at_the_very_path_counts() {
        let table = b"1 0 254:0 / / rw - ext4 /dev/vda rw\n\
            2 1 7:3 / /a\\040b/mnt rw,nosuid - ext4 /dev/loop3 rw\n\
            3 1 7:4 / /a\\040b/mnt rw,nosuid - ext4 /dev/loop4 rw\n\
            4 1 7:5 / /a\\040b/mnt2 rw - ext4 /dev/loop5 rw\n";
        assert_eq!(find(table, Path::new("/a b/mnt")), Some((7, 4)));
        assert_eq!(find(table, Path::new("/a b")), None);
    }
}

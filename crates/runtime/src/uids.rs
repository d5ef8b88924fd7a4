//! Which host uids an instance uses: 65,536 of its own, so that even a guest that breaks out of the sentry is nobody,
//! and not the same nobody as another guest.
//!
//! A range is taken by making the symlink `<state>/uids/<slot>` that names the instance: no lock, no table, and after a
//! crash the name says whose it is. The slots to try follow from the id, so that releasing needs nothing but the id.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::Path;

use atoll_types::InstanceId;

pub(crate) const RANGE: u32 = 65_536;
/// Ranges from 0x1000_0000 to 0x6fff_ffff: above every ordinary user, below the sign bit (devpts of older kernels reads
/// its `gid=` as a signed number).
const FIRST_SLOT: u32 = 0x1000;
const SLOTS: u32 = 0x6000;
const TRIES: u32 = 32;

/// The slots that an instance may take, in order.
fn slots(id: &InstanceId) -> impl Iterator<Item = u32> {
    // FNV-1a; ids are random, so anything spreads.
    let hash = id.bare().bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    (0..TRIES).map(move |step| FIRST_SLOT + hash.wrapping_add(step * 7919) % SLOTS)
}

/// Takes a range and returns its first uid.
pub(crate) fn take(state_dir: &Path, id: &InstanceId) -> io::Result<u32> {
    let dir = state_dir.join("uids");
    for slot in slots(id) {
        let link = dir.join(slot.to_string());
        let made = symlink(id.as_str(), &link).or_else(|error| {
            if error.kind() != ErrorKind::NotFound {
                return Err(error);
            }
            fs::create_dir_all(&dir)?;
            symlink(id.as_str(), &link)
        });
        match made {
            Ok(()) => return Ok(slot * RANGE),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no free range of user ids; too many instances"))
}

/// Gives back whatever the instance holds.
pub(crate) fn release(state_dir: &Path, id: &InstanceId) -> io::Result<()> {
    for slot in slots(id) {
        let link = state_dir.join("uids").join(slot.to_string());
        match fs::read_link(&link) {
            Ok(owner) if owner.as_os_str() == id.as_str() => {
                return match fs::remove_file(&link) {
                    // Somebody else destroys the same instance.
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                    other => other,
                };
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_disjoint_and_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<_> = (0..200u8)
            .map(|n| {
                InstanceId::from_entropy([
                    n.wrapping_mul(37),
                    n,
                    1,
                    2,
                    3,
                    4,
                    5,
                    6,
                    7,
                    8,
                    9,
                    0,
                    1,
                    2,
                    3,
                    4,
                    5,
                    n / 32,
                    8,
                    9,
                ])
            })
            .collect();
        let mut bases: Vec<_> = ids.iter().map(|id| take(dir.path(), id).unwrap()).collect();
        bases.sort_unstable();
        assert!(bases.windows(2).all(|pair| pair[1] - pair[0] >= RANGE));
        for id in &ids {
            release(dir.path(), id).unwrap();
            release(dir.path(), id).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path().join("uids")).unwrap().count(), 0);
    }
}

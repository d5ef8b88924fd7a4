//! Whether somebody else has a file open, in whatever process or on its way to one: the kernel counts, and grants a lease only
//! when it has counted none.
#![expect(unsafe_code, reason = "there is no safe call for leases")]

use std::fs::File;
use std::os::fd::AsRawFd;

/// Says which signal tells of somebody who wants the file. The same number on all architectures of Linux; missing in `libc`.
const F_SETSIG: libc::c_int = 10;

/// Whether nobody has the file open for writing, or mapped to be written. `file` is to be open for reading only. Who could open
/// it again is not asked.
pub(crate) fn nobody_writes(file: &File) -> bool {
    granted(file, libc::F_RDLCK)
}

/// Whether it is known that somebody else has the file open. `file` is to be open for reading and writing. Where the filesystem
/// knows no leases it is not known, and nothing was ever taken over or lent.
pub(crate) fn somebody_has(file: &File) -> bool {
    !granted(file, libc::F_WRLCK) && std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock
}

/// Takes a lease and gives it back at once.
fn granted(file: &File, kind: libc::c_int) -> bool {
    // SAFETY: the descriptor is open, and these commands take a number, not an address.
    let set = |command, value: libc::c_int| unsafe { libc::fcntl(file.as_raw_fd(), command, value) } == 0;
    // If somebody opens the file in this moment, we are told by a signal. By default that would be the end of us; this one is
    // ignored.
    set(F_SETSIG, libc::SIGURG) && set(libc::F_SETLEASE, kind) && set(libc::F_SETLEASE, libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;
    use crate::disk::reopen;

    #[test]
    fn a_writer_is_noticed_wherever_its_descriptor_is() {
        let file = tempfile::tempfile().unwrap();
        let reader = reopen(&file, false).unwrap();
        assert!(!nobody_writes(&reader), "it is open here");
        // Sent and not received: no process has it, and whoever receives it can write.
        let (ours, theirs) = UnixStream::pair().unwrap();
        {
            let files = [file.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            assert!(beside.push(SendAncillaryMessage::ScmRights(&files)));
            sendmsg(&ours, &[IoSlice::new(b"x")], &mut beside, SendFlags::empty()).unwrap();
        }
        drop(file);
        assert!(!nobody_writes(&reader), "it is on its way to somebody");
        drop((ours, theirs));
        assert!(nobody_writes(&reader));
        assert!(nobody_writes(&reader), "what was granted was given back");
        drop(reopen(&reader, true).unwrap());
    }

    #[test]
    fn a_reader_is_noticed_too() {
        let file = tempfile::tempfile().unwrap();
        assert!(!somebody_has(&file));
        let reader = reopen(&file, false).unwrap();
        assert!(somebody_has(&file));
        drop(reader);
        assert!(!somebody_has(&file));
    }
}

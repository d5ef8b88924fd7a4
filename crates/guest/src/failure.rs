//! Turns what went wrong inside into what the host is told: a kind to act on and a sentence to show.

use std::fmt::Display;
use std::io;

use atoll_guest_protocol::{Failure, FailureKind};

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

pub(crate) fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure {
        kind,
        message: message.into(),
    }
}

pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    failure(FailureKind::Invalid, message)
}

/// `what` names the thing and the attempt: "cannot open /etc/x".
pub(crate) fn from_io(what: impl Display, error: &io::Error) -> Failure {
    let errno = error.raw_os_error().unwrap_or(0);
    failure(kind_of(errno), format!("{what}: {}", describe(error)))
}

pub(crate) fn from_errno(what: impl Display, errno: i32) -> Failure {
    from_io(what, &io::Error::from_raw_os_error(errno))
}

/// Paths are bytes; what people read is text.
pub(crate) fn show(path: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(path)
}

fn kind_of(errno: i32) -> FailureKind {
    match errno {
        libc::ENOENT | libc::ESRCH | libc::ENXIO | libc::ENODEV => FailureKind::NotFound,
        libc::EEXIST => FailureKind::AlreadyExists,
        libc::EACCES | libc::EPERM | libc::EROFS => FailureKind::PermissionDenied,
        libc::ENOTDIR => FailureKind::NotADirectory,
        libc::EISDIR => FailureKind::IsADirectory,
        libc::ENOTEMPTY => FailureKind::DirectoryNotEmpty,
        libc::ENOSPC | libc::EDQUOT => FailureKind::NoSpace,
        libc::E2BIG | libc::EFBIG => FailureKind::TooLarge,
        libc::EAGAIN | libc::EBUSY | libc::ETXTBSY | libc::EMFILE | libc::ENFILE | libc::ENOMEM => {
            FailureKind::Busy
        }
        libc::ECONNREFUSED => FailureKind::Refused,
        libc::EINVAL | libc::ENAMETOOLONG | libc::ELOOP => FailureKind::Invalid,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EXDEV => FailureKind::Unsupported,
        _ => FailureKind::Io,
    }
}

/// The system's words without the "(os error 2)" that std appends.
fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(at) => text[..at].to_lowercase(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_and_why() {
        let failure = from_errno("cannot open /x", libc::ENOENT);
        assert_eq!(failure.kind, FailureKind::NotFound);
        assert_eq!(failure.message, "cannot open /x: no such file or directory");
        assert_eq!(from_errno("x", libc::ENOSPC).kind, FailureKind::NoSpace);
    }
}

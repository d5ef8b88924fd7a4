//! How failures below become faults that callers understand.

use atoll_guest_protocol::{Failure, FailureKind};
use atoll_runtime::Kind;
pub(crate) use atoll_runtime::channel::ANSWER_WITHIN;
use atoll_runtime::channel::ChannelError;
use atoll_types::{Code, Fault};

use crate::cell::Cell;

/// A failure that the guest reported for one operation.
pub(crate) fn from_failure(failure: &Failure) -> Fault {
    let code = match failure.kind {
        FailureKind::Invalid => Code::InvalidInSandbox,
        FailureKind::NotFound => Code::NotFoundInSandbox,
        FailureKind::AlreadyExists => Code::AlreadyExists,
        FailureKind::PermissionDenied => Code::PermissionDeniedInSandbox,
        FailureKind::NotADirectory => Code::NotADirectory,
        FailureKind::IsADirectory => Code::IsADirectory,
        FailureKind::DirectoryNotEmpty => Code::DirectoryNotEmpty,
        FailureKind::NoSpace => Code::DiskFull,
        FailureKind::TooLarge => Code::TooLarge,
        FailureKind::Busy => Code::SandboxBusy,
        FailureKind::Refused => Code::ConnectionRefused,
        FailureKind::Unsupported => Code::UnsupportedInSandbox,
        FailureKind::Io => Code::IoErrorInSandbox,
    };
    // The message was written by the guest: keep it short and printable.
    let message: String = failure
        .message
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect();
    let fault = Fault::new(code, message);
    match failure.kind {
        FailureKind::NoSpace => fault.hint("remove files, or create the sandbox with a larger disk"),
        _ => fault,
    }
}

/// An error of the channel to a sandbox's guest. When the instance is gone, says why.
pub(crate) async fn from_channel(cell: &Cell, error: ChannelError) -> Fault {
    match error {
        ChannelError::Failed(failure) => from_failure(&failure),
        ChannelError::Closed => cell.explain_end().await,
        ChannelError::Busy => Fault::new(Code::SandboxBusy, error.to_string()),
        ChannelError::TooLarge { .. } => Fault::new(Code::RequestTooLarge, error.to_string()),
        ChannelError::Protocol(_) => {
            tracing::warn!(sandbox = %cell.id, %error, "the guest broke the protocol");
            Fault::new(Code::GuestProtocolViolation, error.to_string())
                .hint("something in the sandbox has taken over its agent; kill the sandbox")
        }
        ChannelError::TimedOut(_) => unreachable_guest(),
        ChannelError::Ended | ChannelError::Generation { .. } | ChannelError::Io { .. } => {
            Fault::new(Code::GuestUnreachable, error.to_string())
        }
    }
}

/// The agent does not answer although its instance runs.
pub(crate) fn unreachable_guest() -> Fault {
    Fault::new(Code::GuestUnreachable, "the sandbox's agent does not answer")
        .hint("something in the sandbox has stopped its agent; kill the sandbox")
}

/// An answer that the protocol does not allow here.
pub(crate) fn unexpected() -> Fault {
    Fault::new(
        Code::GuestProtocolViolation,
        "the guest agent gave an answer that makes no sense",
    )
    .hint("something in the sandbox has taken over its agent; kill the sandbox")
}

pub(crate) fn from_store(error: &atoll_store::Error) -> Fault {
    if matches!(error, atoll_store::Error::VersionConflict(_)) {
        return Fault::new(Code::SandboxContended, error.to_string())
            .hint("look at it again, then try again");
    }
    tracing::error!(%error, "the store failed");
    match error {
        atoll_store::Error::Full { .. } => server_full(error.to_string()),
        _ => Fault::internal(format!("the server's database failed: {error}")),
    }
}

pub(crate) fn from_runtime(error: &atoll_runtime::Error) -> Fault {
    match error.kind() {
        Kind::HostFull => server_full(error.to_string()),
        _ => Fault::new(Code::RuntimeFailed, error.to_string()),
    }
}

/// A file to work with could not be made.
pub(crate) fn from_scratch(error: &std::io::Error) -> Fault {
    match error.kind() {
        std::io::ErrorKind::StorageFull => server_full(format!("making room for saved state: {error}")),
        _ => Fault::internal(format!("making room for saved state: {error}")),
    }
}

/// The disk of the server, and not of a sandbox.
pub(crate) fn server_full(message: String) -> Fault {
    Fault::new(Code::ServerDiskFull, message)
        .hint("free space on the host (`atoll gc`) and try again; nothing was changed")
}

pub(crate) fn from_image(error: &atoll_image::Error) -> Fault {
    match error {
        atoll_image::Error::InUse { .. } => Fault::new(Code::TemplateInUse, error.to_string()),
        _ => Fault::new(Code::TemplateFailed, error.to_string()),
    }
}

pub(crate) fn from_vault(error: &atoll_vault::Error) -> Fault {
    use atoll_vault::Error;
    match error {
        Error::Full { .. } => server_full(error.to_string()),
        Error::Damaged { .. } => Fault::new(Code::SavedStateDamaged, error.to_string())
            .hint("the file on disk changed since it was saved; delete the snapshot or sandbox, it cannot come back"),
        Error::Limit { .. } => Fault::new(Code::TooLarge, error.to_string()),
        Error::NotFound { .. } => Fault::new(Code::SavedStateLost, error.to_string()),
        _ => Fault::new(Code::VaultFailed, error.to_string()),
    }
}

pub(crate) fn from_volumes(error: &atoll_volumes::Error) -> Fault {
    use atoll_volumes::Error;
    let code = match error {
        Error::Size { .. } => Code::VolumeSizeInvalid,
        Error::Busy { .. } => Code::VolumeInUse,
        Error::Full { .. } => Code::DiskFull,
        Error::HostFull { .. } => Code::ServerDiskFull,
        Error::Sealed(_) => Code::VolumeReadOnly,
        Error::Archive { .. } => Code::ArchiveInvalid,
        Error::BadPath { .. } => Code::PathInvalid,
        Error::NoEntry { .. } => Code::PathNotFound,
        Error::EntryExists { .. } => Code::AlreadyExists,
        Error::BrokeOff { .. } => Code::UploadBrokeOff,
        Error::NotFound(_) => Code::VolumeLost,
        Error::Damaged { .. } => Code::VolumeDamaged,
        _ => Code::VolumeFailed,
    };
    Fault::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io;

    use atoll_runtime::{Cause, Error, Told};
    use atoll_types::{InstanceId, Isolation};

    use super::*;

    #[test]
    fn a_full_disk_is_known_by_its_kind_and_by_no_text() {
        let id = InstanceId::from_entropy([1; 20]);
        let writing = |kind: io::ErrorKind| Cause::Io {
            what: "writing config.json".into(),
            source: kind.into(),
        };
        let start = |source| Error::Start {
            isolation: Isolation::Gvisor,
            source,
        };
        let save = |source| Error::Save {
            id: id.clone(),
            source,
        };
        let code = |error: &Error| from_runtime(error).code;
        let full = writing(io::ErrorKind::StorageFull);
        assert_eq!(code(&start(full)), Code::ServerDiskFull);
        // As another process told it.
        let told = Told::from(writing(io::ErrorKind::StorageFull));
        let error = save(told.clone().into());
        assert_eq!(from_runtime(&error).code, Code::ServerDiskFull);
        assert_eq!(from_runtime(&error).message, error.to_string());
        let thaw = Error::Io {
            what: "letting it go on".into(),
            source: told.into(),
        };
        assert_eq!(code(&thaw), Code::ServerDiskFull);
        let denied = writing(io::ErrorKind::PermissionDenied);
        assert_eq!(code(&start(denied)), Code::RuntimeFailed);
        // The disk of an instance, in the words of its agent.
        let inside = Cause::new(Kind::Agent, "apply-layer: No space left on device");
        assert_eq!(code(&start(inside)), Code::RuntimeFailed);
    }
}

//! How failures below become faults that callers understand.

use atoll_guest_protocol::{Failure, FailureKind};
pub(crate) use atoll_runtime::channel::ANSWER_WITHIN;
use atoll_runtime::channel::ChannelError;
use atoll_types::{Fault, FaultKind};

use crate::cell::Cell;

/// Something of this name is there.
pub(crate) const ALREADY_EXISTS: &str = "already_exists";

/// A failure that the guest reported for one operation.
pub(crate) fn from_failure(failure: &Failure) -> Fault {
    let (kind, code) = match failure.kind {
        FailureKind::Invalid => (FaultKind::Invalid, "invalid_in_sandbox"),
        FailureKind::NotFound => (FaultKind::NotFound, "not_found_in_sandbox"),
        FailureKind::AlreadyExists => (FaultKind::Conflict, ALREADY_EXISTS),
        FailureKind::PermissionDenied => (FaultKind::Forbidden, "permission_denied_in_sandbox"),
        FailureKind::NotADirectory => (FaultKind::Invalid, "not_a_directory"),
        FailureKind::IsADirectory => (FaultKind::Invalid, "is_a_directory"),
        FailureKind::DirectoryNotEmpty => (FaultKind::Conflict, "directory_not_empty"),
        FailureKind::NoSpace => (FaultKind::LimitExceeded, "disk_full"),
        FailureKind::TooLarge => (FaultKind::TooLarge, "too_large"),
        FailureKind::Busy => (FaultKind::LimitExceeded, "sandbox_busy"),
        FailureKind::Refused => (FaultKind::GuestFailed, "connection_refused"),
        FailureKind::Unsupported => (FaultKind::Unsupported, "unsupported_in_sandbox"),
        FailureKind::Io => (FaultKind::GuestFailed, "io_error_in_sandbox"),
    };
    // The message was written by the guest: keep it short and printable.
    let message: String = failure
        .message
        .chars()
        .filter(|c| !c.is_control())
        .take(500)
        .collect();
    let fault = Fault::new(kind, code, message);
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
        ChannelError::Busy => Fault::new(FaultKind::LimitExceeded, "sandbox_busy", error.to_string()),
        ChannelError::TooLarge { .. } => {
            Fault::new(FaultKind::TooLarge, "request_too_large", error.to_string())
        }
        ChannelError::Protocol(_) => {
            tracing::warn!(sandbox = %cell.id, %error, "the guest broke the protocol");
            Fault::new(
                FaultKind::GuestFailed,
                "guest_protocol_violation",
                error.to_string(),
            )
            .hint("something in the sandbox has taken over its agent; kill the sandbox")
        }
        ChannelError::TimedOut(_) => unreachable_guest(),
        ChannelError::Ended | ChannelError::Generation { .. } | ChannelError::Io { .. } => {
            Fault::new(FaultKind::GuestFailed, "guest_unreachable", error.to_string())
        }
    }
}

/// The agent does not answer although its instance runs.
pub(crate) fn unreachable_guest() -> Fault {
    Fault::new(
        FaultKind::GuestFailed,
        "guest_unreachable",
        "the sandbox's agent does not answer",
    )
    .hint("something in the sandbox has stopped its agent; kill the sandbox")
}

/// An answer that the protocol does not allow here.
pub(crate) fn unexpected() -> Fault {
    Fault::new(
        FaultKind::GuestFailed,
        "guest_protocol_violation",
        "the guest agent gave an answer that makes no sense",
    )
    .hint("something in the sandbox has taken over its agent; kill the sandbox")
}

pub(crate) fn from_store(error: &atoll_store::Error) -> Fault {
    tracing::error!(%error, "the store failed");
    Fault::internal(format!("the server's database failed: {error}"))
}

pub(crate) fn from_runtime(error: &atoll_runtime::Error) -> Fault {
    let message = error.to_string();
    // Other programs write into our files, and say so in words, Go's or ours.
    if message.to_lowercase().contains("no space left on device") {
        return disk_full(message);
    }
    Fault::new(FaultKind::Internal, "runtime_failed", message)
}

/// A file to work with could not be made.
pub(crate) fn from_scratch(error: &std::io::Error) -> Fault {
    match error.kind() {
        std::io::ErrorKind::StorageFull => disk_full(format!("making room for saved state: {error}")),
        _ => Fault::internal(format!("making room for saved state: {error}")),
    }
}

fn disk_full(message: String) -> Fault {
    Fault::new(FaultKind::LimitExceeded, "disk_full", message)
        .hint("free space on the host (`atoll gc`) and try again; nothing was changed")
}

pub(crate) fn from_image(error: &atoll_image::Error) -> Fault {
    match error {
        atoll_image::Error::InUse { .. } => {
            Fault::new(FaultKind::Conflict, "template_in_use", error.to_string())
        }
        _ => Fault::invalid("template_failed", error.to_string()),
    }
}

pub(crate) fn from_vault(error: &atoll_vault::Error) -> Fault {
    use atoll_vault::Error;
    match error {
        Error::Full { .. } => disk_full(error.to_string()),
        Error::Damaged { .. } => Fault::new(FaultKind::Internal, "saved_state_damaged", error.to_string())
            .hint("the file on disk changed since it was saved; delete the snapshot or sandbox, it cannot come back"),
        Error::Limit { .. } => Fault::new(FaultKind::TooLarge, "too_large", error.to_string()),
        Error::NotFound { .. } => Fault::new(FaultKind::Gone, "saved_state_lost", error.to_string()),
        _ => Fault::new(FaultKind::Internal, "vault_failed", error.to_string()),
    }
}

pub(crate) fn from_volumes(error: &atoll_volumes::Error) -> Fault {
    use atoll_volumes::Error;
    let (kind, code) = match error {
        Error::Size { .. } => (FaultKind::Invalid, "volume_size_invalid"),
        Error::Busy { .. } => (FaultKind::Conflict, "volume_in_use"),
        Error::Full { .. } => (FaultKind::LimitExceeded, "disk_full"),
        Error::Sealed(_) => (FaultKind::Conflict, "volume_read_only"),
        Error::Archive { .. } => (FaultKind::Invalid, "archive_invalid"),
        Error::BadPath { .. } => (FaultKind::Invalid, "path_invalid"),
        Error::NoEntry { .. } => (FaultKind::NotFound, "path_not_found"),
        Error::EntryExists { .. } => (FaultKind::Conflict, "already_exists"),
        Error::BrokeOff { .. } => (FaultKind::Invalid, "upload_broke_off"),
        Error::NotFound(_) => (FaultKind::Gone, "volume_lost"),
        Error::Damaged { .. } => (FaultKind::Internal, "volume_damaged"),
        _ => (FaultKind::Internal, "volume_failed"),
    };
    Fault::new(kind, code, error.to_string())
}

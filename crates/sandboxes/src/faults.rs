//! How failures below become faults that callers understand.

use atoll_guest_protocol::{Failure, FailureKind};
use atoll_node::ChannelError;
pub(crate) use atoll_node::{ANSWER_WITHIN, server_full};
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
        FailureKind::NoSuchUser => Code::NoSuchUserInSandbox,
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

/// Something about a sandbox's instance that did not work out.
pub(crate) async fn from_node(cell: &Cell, failed: atoll_node::Failed) -> Fault {
    match failed {
        atoll_node::Failed::Guest(error) => from_channel(cell, error).await,
        atoll_node::Failed::Fault(fault) => fault,
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

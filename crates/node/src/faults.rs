//! How failures of this machine become faults that callers understand.

use atoll_runtime::Kind;
use atoll_types::{Code, Fault};

pub(crate) fn from_runtime(error: &atoll_runtime::Error) -> Fault {
    match error.kind() {
        Kind::HostFull => server_full(error.to_string()),
        Kind::Silent => Fault::new(Code::GuestUnreachable, error.to_string())
            .hint("use a snapshot from before its agent was stopped, or create a new sandbox"),
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
pub fn server_full(message: String) -> Fault {
    Fault::new(Code::ServerDiskFull, message)
        .hint("free space on the host (`atoll gc`) and try again; nothing was changed")
}

pub fn from_image(error: &atoll_image::Error) -> Fault {
    match error {
        atoll_image::Error::InUse { .. } => Fault::new(Code::TemplateInUse, error.to_string()),
        atoll_image::Error::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            server_full(error.to_string())
        }
        atoll_image::Error::Refused(fault) => fault.clone(),
        atoll_image::Error::Dockerfile { line, .. }
        | atoll_image::Error::StepFailed { line, .. }
        | atoll_image::Error::Runner { line, .. } => {
            Fault::new(Code::TemplateFailed, error.to_string()).at_line(*line)
        }
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
    fn trouble_is_known_by_its_kind_and_by_no_text() {
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
        // While a template is made.
        let made = |kind: io::ErrorKind| atoll_image::Error::Io {
            doing: "write",
            path: "/blobs/new".into(),
            source: kind.into(),
        };
        assert_eq!(
            from_image(&made(io::ErrorKind::StorageFull)).code,
            Code::ServerDiskFull
        );
        assert_eq!(
            from_image(&made(io::ErrorKind::PermissionDenied)).code,
            Code::TemplateFailed
        );
        let denied = writing(io::ErrorKind::PermissionDenied);
        assert_eq!(code(&start(denied)), Code::RuntimeFailed);
        // What a guest did to its own saved state is no failure of the server.
        let silent = Cause::new(Kind::Silent, "what was restored does not answer");
        assert_eq!(code(&start(silent)), Code::GuestUnreachable);
        // The disk of an instance, in the words of its agent.
        let inside = Cause::new(Kind::Agent, "apply-layer: No space left on device");
        assert_eq!(code(&start(inside)), Code::RuntimeFailed);
    }
}

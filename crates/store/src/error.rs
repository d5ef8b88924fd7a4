//! What can go wrong with the store, told apart by what the caller can do about it.

use std::path::PathBuf;

use atoll_types::SandboxId;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the database {path} could not be opened")]
    Open {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    #[error(
        "the database {path} was written by a newer Atoll (schema {found}, this one knows {supported}); \
         use that version or newer, or restore a backup"
    )]
    Newer {
        path: PathBuf,
        found: i64,
        supported: i64,
    },
    #[error("{path} is an SQLite database, but not one of Atoll's")]
    Foreign { path: PathBuf },
    /// The row was changed by somebody else since it was read: read it again and decide again.
    #[error("sandbox {0} was changed meanwhile")]
    VersionConflict(SandboxId),
    #[error("there is no {what} {id}")]
    NotFound { what: &'static str, id: String },
    #[error("there is a {what} named {name:?} already")]
    NameTaken { what: &'static str, name: String },
    #[error("{what} {id} is in use by {by}")]
    InUse {
        what: &'static str,
        id: String,
        by: String,
    },
    #[error("idempotency key {key:?} was used for a different request, which made {sandbox}")]
    IdempotencyConflict { key: String, sandbox: SandboxId },
    #[error("the project has {live} live sandboxes; its limit is {limit}")]
    QuotaExceeded { live: u64, limit: u64 },
    #[error("the disk of the database is full ({what}); nothing was written. Free some space and try again")]
    Full { what: &'static str },
    /// Something in the file cannot be understood: a bug, or a damaged disk.
    #[error("{what} in the database cannot be read: {detail}")]
    Corrupt { what: &'static str, detail: String },
    /// The whole group of writes that this one was part of failed; nothing of it was written.
    #[error("the database could not commit ({what}): {detail}")]
    Commit { what: &'static str, detail: String },
    /// Given up: somebody's question would keep others waiting.
    #[error("{what}: this takes more than {steps} steps of the database, or too long")]
    TooMuchWork { what: &'static str, steps: u64 },
    #[error("the store is closed")]
    Closed,
    #[error("the database refused to {what}")]
    Sqlite {
        what: &'static str,
        #[source]
        source: rusqlite::Error,
    },
}

impl Error {
    /// Turns an error of SQLite during `what` into one of ours.
    pub(crate) fn from_sqlite(what: &'static str, source: rusqlite::Error) -> Self {
        match source {
            source if is_full(&source) => Self::Full { what },
            rusqlite::Error::FromSqlConversionFailure(_, _, detail) => Self::Corrupt {
                what: "a column",
                detail: detail.to_string(),
            },
            source => Self::Sqlite { what, source },
        }
    }

    /// The same error for each of the writes that shared a transaction.
    pub(crate) fn commit(what: &'static str, source: &rusqlite::Error) -> Self {
        if is_full(source) {
            return Self::Full { what };
        }
        Self::Commit {
            what,
            detail: source.to_string(),
        }
    }
}

/// So that `?` works inside of a job; the engine replaces the placeholder by the name of the job.
impl From<rusqlite::Error> for Error {
    fn from(source: rusqlite::Error) -> Self {
        Self::from_sqlite("run a statement", source)
    }
}

pub(crate) fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
}

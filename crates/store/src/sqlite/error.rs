//! Errors of SQLite as errors of a store.

use crate::Error;

impl Error {
    /// Turns an error of SQLite during `what` into one of ours.
    pub(super) fn from_sqlite(what: &'static str, source: rusqlite::Error) -> Self {
        match source {
            source if is_full(&source) => Self::Full { what },
            rusqlite::Error::FromSqlConversionFailure(_, _, detail) => Self::Corrupt {
                what: "a column",
                detail: detail.to_string(),
            },
            source => Self::Refused {
                what,
                source: source.into(),
            },
        }
    }

    /// The same error for each of the writes that shared a transaction.
    pub(super) fn commit(what: &'static str, source: &rusqlite::Error) -> Self {
        if is_full(source) {
            return Self::Full { what };
        }
        Self::Commit {
            what,
            detail: source.to_string(),
        }
    }

    /// Whether it is a statement that was interrupted.
    pub(super) fn is_interrupted(&self) -> bool {
        let Self::Refused { source, .. } = self else {
            return false;
        };
        let source = source.downcast_ref::<rusqlite::Error>();
        source.and_then(rusqlite::Error::sqlite_error_code) == Some(rusqlite::ErrorCode::OperationInterrupted)
    }
}

/// So that `?` works inside of a job; the engine replaces the placeholder by the name of the job.
impl From<rusqlite::Error> for Error {
    fn from(source: rusqlite::Error) -> Self {
        Self::from_sqlite("run a statement", source)
    }
}

fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
}

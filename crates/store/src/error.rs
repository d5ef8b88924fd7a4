//! What can go wrong with the store, told apart by what the caller can do about it.

use std::path::PathBuf;

use atoll_types::SandboxId;

/// What an implementation says about its own trouble, for people.
type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the database {path} could not be opened")]
    Open {
        path: PathBuf,
        #[source]
        source: Cause,
    },
    #[error(
        "the database {path} was written by a newer Atoll (schema of {part} {found}, this one knows {supported}); \
         use that version or newer, or restore a backup"
    )]
    Newer {
        path: PathBuf,
        /// The domain, or the whole file.
        part: String,
        found: i64,
        supported: i64,
    },
    #[error("{path} is an SQLite database, but not one of Atoll's")]
    Foreign { path: PathBuf },
    #[error(
        "the database {path} holds {domain}, which belong into another file of Atoll's; is it under the right name?"
    )]
    Misplaced { path: PathBuf, domain: String },
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
    Refused {
        what: &'static str,
        #[source]
        source: Cause,
    },
}

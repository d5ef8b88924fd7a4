//! Everything that can go wrong while state is saved, kept or read back. A message says what was being done, with which
//! thing, and what can be done about it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error(
        "the disk is full: cannot {doing} `{}`; what was saved before is intact and nothing is left of this; free space (`atoll gc`) and try again",
        path.display()
    )]
    Full { doing: &'static str, path: PathBuf },
    #[error("{what} is damaged")]
    Damaged { what: String },
    #[error("the vault is encrypted; configure the key with which it was made")]
    KeyMissing,
    #[error("the vault is encrypted with another key")]
    WrongKey,
    #[error("not a vault key: expected 32 bytes, or 64 hexadecimal digits")]
    BadKey,
    #[error("nothing is saved under `{id}`")]
    NotFound { id: String },
    #[error("something is saved, or being saved, under `{id}` already")]
    Exists { id: String },
    #[error("`{id}` holds no stream `{name}`")]
    NoStream { id: String, name: String },
    #[error("the vault `{}` is open in another process", path.display())]
    InUse { path: PathBuf },
    #[error("refused {what} `{name}`: {rule}")]
    BadName {
        what: &'static str,
        name: String,
        rule: &'static str,
    },
    #[error("refused: {what} is more than {limit}")]
    Limit { what: &'static str, limit: u64 },
    /// The producer said it was done, yet somebody still holds the write end of a stream.
    #[error("stream `{name}` was not closed by its writer; the save was given up")]
    NotClosed { name: String },
    #[error("stream `{name}` cannot be saved while `{growing}` is still being written: it goes behind it")]
    Growing { name: String, growing: String },
    #[error("the save was given up")]
    Stopped,
    #[error("cannot {doing} `{}`: {source}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn damaged(what: impl Into<String>) -> Self {
        Self::Damaged { what: what.into() }
    }

    pub(crate) fn io(source: std::io::Error, doing: &'static str, path: &Path) -> Self {
        let path = path.to_owned();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::Full { doing, path },
            _ => Self::Io { doing, path, source },
        }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == ErrorKind::NotFound)
    }
}

pub(crate) trait IoContext<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> IoContext<T> for std::result::Result<T, E> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::io(source.into(), doing, path))
    }
}

//! What can go wrong with a volume, by what the caller can do about it.

use std::borrow::Cow;
use std::io;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{0}` is no volume's id")]
    BadId(String),
    #[error("volume {0} is not here")]
    NotFound(String),
    #[error("volume {0} exists already")]
    Exists(String),
    #[error("a volume of {asked} bytes is not possible; from {least} to {most} are")]
    Size { asked: u64, least: u64, most: u64 },
    /// Something still uses it: a sandbox, or a backup that is running. Nothing is lost; try again when it has ended.
    #[error("volume {id} is in use: {why}")]
    Busy { id: String, why: Cow<'static, str> },
    /// The volume, when bytes were to go into it. What was half-made is gone, except that an import leaves what fitted.
    #[error("no space left for volume {id}: {why}")]
    Full { id: String, why: String },
    /// The host's disk, when the volume was to be made. What was half-made is gone.
    #[error("no space left for volume {id}: the host's disk is full")]
    HostFull { id: String },
    /// `e2fsck -p` could not repair it without losing something. The image is untouched by us.
    #[error("volume {id} is damaged: {why}; look at it with e2fsck")]
    Damaged { id: String, why: String },
    #[error("volume {0} is sealed: it can be read only")]
    Sealed(String),
    /// What was to go into it is no archive that can be taken.
    #[error("the archive for volume {id} was refused: {why}")]
    Archive { id: String, why: String },
    /// The caller's path, or what a guest put in its way.
    #[error("the path `{path}` is refused: {why}")]
    BadPath { path: String, why: Cow<'static, str> },
    #[error("there is nothing at `{path}`")]
    NoEntry { path: String },
    #[error("there is something at `{path}` already")]
    EntryExists { path: String },
    /// Nothing was changed.
    #[error("the bytes for `{path}` broke off: {why}")]
    BrokeOff { path: String, why: String },
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
}

/// Says what was being done when a call failed.
pub(crate) trait Doing<T> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for std::result::Result<T, E> {
    fn doing<S: Into<String>>(self, what: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|source| Error::Io {
            what: what().into(),
            source: source.into(),
        })
    }
}

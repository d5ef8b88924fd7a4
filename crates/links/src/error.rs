//! What can go wrong with a link, by what the caller can do about it.

use std::io;

use atoll_types::InstanceId;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not as root, or in a container that may not: sandboxes then have no network.
    #[error("links cannot be made here: {0}")]
    Unsupported(String),
    #[error(
        "another server uses the links in {0}; stop it first, or give this one a state directory of its own"
    )]
    InUse(String),
    #[error("instance {0} has a link already; release that one first")]
    Leased(InstanceId),
    #[error("all {0} links of this machine are in use; end a sandbox first")]
    Full(u16),
    #[error("links are closed")]
    Closed,
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

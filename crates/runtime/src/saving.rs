//! Words for what outlives an instance: the bytes it is saved into and comes back from, and the storage it is lent.
//!
//! A runtime decides how an instance is cut into named streams (a jail is one, `layer`; gVisor's checkpoints are
//! several); whoever keeps them only has to give the same bytes back under the same names. What stands in them is hostile:
//! the guest wrote most of it, and a snapshot may have come from elsewhere.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use atoll_types::SaveKind;

/// Where a saved instance goes.
pub trait SaveSink: Send + Sync + Debug {
    /// The writable, blocking descriptor of a stream. Each name is asked for once; closing it ends the stream.
    fn stream(&self, name: &str) -> io::Result<OwnedFd>;

    /// An empty file without a name, to write a stream into that is not made from its beginning to its end.
    fn scratch(&self) -> io::Result<File>;

    /// Such a file as a whole stream, whatever its position is. It is not written to any more. May return before it was
    /// read.
    fn part(&self, name: &str, whole: File) -> io::Result<()>;

    /// A file to write a large stream into, front to back and nothing twice, which is taken in while it grows. Until that is
    /// finished only whole parts can be handed over. `None`: this sink waits until it is whole, and takes it as a part.
    fn growing(&self, name: &str) -> io::Result<Option<(File, Box<dyn Growing>)>> {
        let _ = name;
        Ok(None)
    }
}

/// A stream that is taken in while its file grows. Dropping it gives it up.
pub trait Growing: Send + Debug {
    /// The file is whole, and whoever wrote it has closed it.
    fn whole(&self);

    /// Waits until all of the whole file was taken in.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// Where a saved instance comes from.
#[async_trait]
pub trait SaveSource: Send + Sync + Debug {
    /// The whole stream as a file that can be read and seeked, from its beginning.
    async fn file(&self, name: &str) -> io::Result<File>;

    /// The same for a reader that knows how long the stream is and seeks: something else may follow behind its end.
    async fn at_least(&self, name: &str) -> io::Result<File> {
        self.file(name).await
    }

    fn names(&self) -> Vec<String>;
}

/// What an instance is to go on from.
#[derive(Debug, Clone)]
pub struct Restore {
    pub kind: SaveKind,
    pub source: Arc<dyn SaveSource>,
}

/// Something of the host that is seen inside. The ids of its files are the same in every instance: user 1000 inside is
/// user 1000 on it, whatever ids of the host the instance was given. Never honours setuid bits or device nodes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mount {
    pub source: MountSource,
    /// Absolute; made if it is not there. Not within what the runtime itself mounts (`/proc`, `/dev`, `/sys`, `/.atoll`).
    pub path: String,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum MountSource {
    /// A directory of the host: a volume where it is mounted. Several instances may share it.
    Directory(PathBuf),
    /// An EROFS image; read-only whatever the mount says.
    Erofs(PathBuf),
}

/// What a runtime can save.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Saves {
    /// Memory too, or only files.
    pub memory: bool,
    /// Memory comes back only with the version that saved it.
    pub runtime_version: String,
    /// Memory comes back only on processors that have all of these.
    pub cpu_features: Vec<String>,
}

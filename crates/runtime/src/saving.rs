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
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

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

    /// Begins to take in a file of [`SaveSink::scratch`] as a stream while it is still being written, front to back.
    /// `None`: this sink waits until it is whole, and takes it as a part.
    fn growing(&self, name: &str, file: &File) -> io::Result<Option<Follower>> {
        let _ = (name, file);
        Ok(None)
    }
}

/// How often a follower looks whether there is more.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// What it hands on at a time.
const STEP: usize = 1 << 20;

const GROWING: u8 = 0;
const WHOLE: u8 = 1;
const GIVEN_UP: u8 = 2;

/// Hands a file on to a pipe while it grows. What was handed on must not change any more. Dropping it gives up.
#[derive(Debug)]
pub struct Follower {
    state: Arc<AtomicU8>,
    thread: Option<JoinHandle<io::Result<u64>>>,
    file: File,
}

impl Follower {
    pub fn start(file: &File, pipe: OwnedFd) -> io::Result<Self> {
        let state = Arc::new(AtomicU8::new(GROWING));
        let (theirs, source) = (Arc::clone(&state), file.try_clone()?);
        let thread = std::thread::Builder::new().name("save-follower".into());
        let thread = thread.spawn(move || hand_on(&source, &pipe, &theirs))?;
        Ok(Self {
            state,
            thread: Some(thread),
            file: file.try_clone()?,
        })
    }

    /// The file is whole: waits until all of it was handed on.
    pub fn finish(mut self) -> io::Result<()> {
        self.state.store(WHOLE, Ordering::Release);
        let handed_on = match self.thread.take().map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome?,
            _ => return Err(io::Error::other("a thread that saves broke down")),
        };
        let length = self.file.metadata()?.len();
        if handed_on != length {
            return Err(io::Error::other(format!(
                "{handed_on} of {length} bytes were handed on"
            )));
        }
        Ok(())
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.state.store(GIVEN_UP, Ordering::Release);
            let _ = thread.join();
        }
    }
}

fn hand_on(file: &File, pipe: &OwnedFd, state: &AtomicU8) -> io::Result<u64> {
    let mut at = 0;
    loop {
        // Looked at before the file: what is whole then is whole.
        let seen = state.load(Ordering::Acquire);
        if seen == GIVEN_UP {
            return Ok(at);
        }
        let mut from = at;
        let flags = rustix::pipe::SpliceFlags::empty();
        match rustix::pipe::splice(file, Some(&mut from), pipe, None, STEP, flags) {
            Ok(0) if seen == WHOLE => return Ok(at),
            Ok(0) => std::thread::sleep(LOOK_EVERY),
            Ok(count) => at += count as u64,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Where a saved instance comes from.
#[async_trait]
pub trait SaveSource: Send + Sync + Debug {
    /// The whole stream as a file that can be read and seeked, from its beginning.
    async fn file(&self, name: &str) -> io::Result<File>;

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub source: MountSource,
    /// Absolute; made if it is not there. Not within what the runtime itself mounts (`/proc`, `/dev`, `/sys`, `/.atoll`).
    pub path: String,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountSource {
    /// A directory of the host: a volume where it is mounted. Several instances may share it.
    Directory(PathBuf),
    /// An EROFS image; read-only whatever the mount says.
    Erofs(PathBuf),
}

/// What a runtime can save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saves {
    /// Memory too, or only files.
    pub memory: bool,
    /// Memory comes back only with the version that saved it.
    pub runtime_version: String,
    /// Memory comes back only on processors that have all of these.
    pub cpu_features: Vec<String>,
}

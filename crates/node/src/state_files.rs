//! Between a runtime, which writes and reads the parts of a saved instance as plain descriptors, and where they lie:
//! the vault, or for a moment (a fork) in files without a name.
//!
//! What must hold: where saved state is encrypted at rest, its plaintext is only ever in memory; what lies in scratch
//! files has no name, so that a crash leaves nothing.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use atoll_runtime::{Growing, SaveSink, SaveSource};
use atoll_types::{Code, Fault};

use crate::faults::{from_scratch, from_vault};

/// Parts up to this size are packed. Larger ones are memory, of which most is the same as last time; packed it would not be.
const SMALL: u64 = 1024 * 1024;
/// The end of the name of a packed part.
const PACKED: &str = ".zst";

/// A file without a name to put plain state into.
#[derive(Debug, Clone)]
pub(crate) struct Scratch {
    dir: PathBuf,
    /// Whether plain state must not reach a disk.
    in_memory: bool,
}

impl Scratch {
    pub(crate) fn new(dir: PathBuf, in_memory: bool) -> Self {
        Self { dir, in_memory }
    }

    fn file(&self) -> io::Result<File> {
        use rustix::fs::{MemfdFlags, Mode, OFlags};
        if self.in_memory {
            return Ok(rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC)?.into());
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.dir, flags, Mode::RUSR | Mode::WUSR)?.into())
    }
}

/// The same file, with a position of its own.
fn reopen(file: &File) -> io::Result<File> {
    File::open(Path::new("/proc/self/fd").join(file.as_raw_fd().to_string()))
}

/// The parts of an instance, saved for a moment.
#[derive(Debug)]
pub(crate) struct Parts {
    scratch: Scratch,
    files: Mutex<BTreeMap<String, File>>,
}

impl Parts {
    pub(crate) fn new(scratch: Scratch) -> Self {
        Self {
            scratch,
            files: Mutex::default(),
        }
    }
}

impl SaveSink for Parts {
    fn stream(&self, name: &str) -> io::Result<OwnedFd> {
        let file = self.scratch.file()?;
        let theirs = file.try_clone()?;
        let mut files = self.files.lock();
        files.insert(name.to_owned(), file);
        Ok(theirs.into())
    }

    fn scratch(&self) -> io::Result<File> {
        self.scratch.file()
    }

    fn part(&self, name: &str, whole: File) -> io::Result<()> {
        let mut files = self.files.lock();
        files.insert(name.to_owned(), whole);
        Ok(())
    }
}

#[async_trait]
impl SaveSource for Parts {
    async fn file(&self, name: &str) -> io::Result<File> {
        let files = self.files.lock();
        files.get(name).ok_or_else(|| missing(name)).and_then(reopen)
    }

    fn names(&self) -> Vec<String> {
        let files = self.files.lock();
        files.keys().cloned().collect()
    }
}

/// Where a runtime writes the parts of an instance that is to be kept.
#[derive(Debug)]
pub(crate) struct IntoVault {
    save: atoll_vault::Save,
    scratch: Scratch,
}

impl IntoVault {
    pub(crate) fn new(save: atoll_vault::Save, scratch: Scratch) -> Self {
        Self { save, scratch }
    }

    pub(crate) fn into_inner(self) -> atoll_vault::Save {
        self.save
    }
}

impl SaveSink for IntoVault {
    fn stream(&self, name: &str) -> io::Result<OwnedFd> {
        self.save.stream(name).map_err(io_error)
    }

    fn scratch(&self) -> io::Result<File> {
        self.scratch.file()
    }

    fn part(&self, name: &str, whole: File) -> io::Result<()> {
        if whole.metadata()?.len() > SMALL {
            return self.save.part(name, whole).map_err(io_error);
        }
        // The state of a kernel shrinks to a fifth in about a millisecond.
        let packed = self.scratch.file()?;
        zstd::stream::copy_encode(&whole, &packed, 3)?;
        self.save
            .part(&format!("{name}{PACKED}"), packed)
            .map_err(io_error)
    }

    fn growing(&self, name: &str) -> io::Result<Option<(File, Box<dyn Growing>)>> {
        let (file, growing) = self.save.grow(name, || self.scratch.file()).map_err(io_error)?;
        Ok(Some((file, Box::new(IntoPack(growing)))))
    }
}

/// A part that may become a pack of the vault as it is.
#[derive(Debug)]
struct IntoPack(atoll_vault::Growing);

impl Growing for IntoPack {
    fn whole(&self) {
        self.0.whole();
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.0.finish().map_err(io_error)
    }
}

/// The parts of a saved instance: read, checked and laid out as files when the runtime asks for them. That is when it has
/// something to wait for; earlier, reading would only take the processors from it.
#[derive(Debug)]
pub(crate) struct FromVault {
    opened: Arc<atoll_vault::Opened>,
    scratch: Scratch,
    names: Vec<String>,
    /// By name, and whether they may be longer.
    parts: tokio::sync::Mutex<HashMap<(String, bool), Result<File, Fault>>>,
}

impl FromVault {
    pub(crate) fn new(opened: atoll_vault::Opened, scratch: &Scratch) -> Self {
        let names = opened
            .streams()
            .into_iter()
            .map(|stream| match stream.name.strip_suffix(PACKED) {
                Some(name) => name.to_owned(),
                None => stream.name,
            });
        Self {
            names: names.collect(),
            opened: Arc::new(opened),
            scratch: scratch.clone(),
            parts: tokio::sync::Mutex::default(),
        }
    }
}

#[async_trait]
impl SaveSource for FromVault {
    async fn file(&self, name: &str) -> io::Result<File> {
        self.part(name, false).await
    }

    async fn at_least(&self, name: &str) -> io::Result<File> {
        self.part(name, true).await
    }

    fn names(&self) -> Vec<String> {
        self.names.clone()
    }
}

impl FromVault {
    /// `at_least`: it may be longer than it was.
    async fn part(&self, name: &str, at_least: bool) -> io::Result<File> {
        if !self.names.iter().any(|known| known == name) {
            return Err(missing(name));
        }
        let mut parts = self.parts.lock().await;
        let key = (name.to_owned(), at_least);
        if !parts.contains_key(&key) {
            let (opened, scratch, part) = (Arc::clone(&self.opened), self.scratch.clone(), name.to_owned());
            let read = crate::blocking::run(move || {
                let lent = match at_least {
                    true => opened.lend(&part).map_err(|e| from_vault(&e))?,
                    false => None,
                };
                match lent {
                    Some(pack) => Ok(pack),
                    None => read_part(&opened, &scratch, &part),
                }
            });
            parts.insert(key.clone(), read.await.map_err(io::Error::other)?);
        }
        match parts.get(&key) {
            Some(Ok(file)) => reopen(file),
            Some(Err(fault)) => Err(io::Error::other(fault.clone())),
            None => Err(missing(name)),
        }
    }
}

fn read_part(opened: &atoll_vault::Opened, scratch: &Scratch, name: &str) -> Result<File, Fault> {
    let file = scratch.file().map_err(|e| from_scratch(&e))?;
    let packed = format!("{name}{PACKED}");
    if !opened.streams().iter().any(|stream| stream.name == packed) {
        opened.read_to(name, &file).map_err(|e| from_vault(&e))?;
        return Ok(file);
    }
    let mut bytes = Vec::new();
    opened.write_to(&packed, &mut bytes).map_err(|e| from_vault(&e))?;
    // It may have come from elsewhere: no more than we would have packed.
    let unpacked = zstd::Decoder::new(bytes.as_slice())
        .and_then(|decoder| io::copy(&mut decoder.take(SMALL + 1), &mut &file))
        .map_err(|e| Fault::new(Code::SavedStateDamaged, e.to_string()))?;
    if unpacked > SMALL {
        return Err(Fault::new(
            Code::SavedStateDamaged,
            format!("the saved {name} is larger than it can be"),
        ));
    }
    Ok(file)
}

/// As a runtime can tell it apart.
fn io_error(error: atoll_vault::Error) -> io::Error {
    match error {
        atoll_vault::Error::Full { .. } => io::Error::new(io::ErrorKind::StorageFull, error),
        _ => io::Error::other(error),
    }
}

/// Why saved state could not be read, if that is what a boot from it failed for: a runtime passes on what sort of trouble it
/// was, and not the fault.
pub(crate) async fn why_unreadable(source: &dyn SaveSource) -> Option<Fault> {
    for name in source.names() {
        if let Err(error) = source.file(&name).await
            && let Some(fault) = error.get_ref().and_then(|why| why.downcast_ref::<Fault>())
        {
            return Some(fault.clone());
        }
    }
    None
}

fn missing(name: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::NotFound,
        format!("the saved state has no part called {name}"),
    )
}

//! Moving files between this machine and the server: bytes as they are, directories as tar, never more than a few chunks
//! in memory.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};

use bytes::{Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use indicatif::ProgressBar;
use reqwest::{Body, Response};
use tokio::sync::mpsc;

use crate::output::{Doing, Error, Output, Result, byte_bar};

const CHUNK: usize = 256 * 1024;
/// Chunks on their way between a blocking thread and the connection.
const AHEAD: usize = 4;

/// A request body that reads a file, or anything else that can be read, on a thread of its own.
pub fn body_from(mut reader: impl Read + Send + 'static, bar: ProgressBar) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
    tokio::task::spawn_blocking(move || {
        // A few buffers go round: new ones would be new pages, which the kernel has to clear.
        let (back, free) = std::sync::mpsc::channel::<Vec<u8>>();
        for _ in 0..AHEAD {
            let _kept = back.send(Vec::new());
        }
        while let Ok(mut buffer) = free.recv() {
            buffer.resize(CHUNK, 0);
            let chunk = match reader.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => Ok(Bytes::from_owner(Lent {
                    buffer,
                    length,
                    back: back.clone(),
                })),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    let _kept = back.send(buffer);
                    continue;
                }
                Err(error) => Err(error),
            };
            let last = chunk.is_err();
            bar.inc(chunk.as_ref().map_or(0, |chunk| chunk.len() as u64));
            if sender.blocking_send(chunk).is_err() || last {
                return;
            }
        }
    });
    Body::wrap_stream(received(receiver))
}

/// A request body that is a file of this machine, or stdin for `-`; with a bar over it.
pub fn body_from_path(output: Output, path: &Path) -> Result<(Body, ProgressBar)> {
    let shown = path.display().to_string();
    if path == Path::new("-") {
        let bar = byte_bar(output, "sending", None);
        return Ok((body_from(std::io::stdin(), bar.clone()), bar));
    }
    let reading = || format!("cannot read {shown}");
    let file = fs::File::open(path).doing(reading())?;
    let length = file.metadata().doing(reading())?.len();
    let bar = byte_bar(output, &shown, Some(length));
    Ok((body_from(file, bar.clone()), bar))
}

/// A buffer on its way to the connection, which comes back when it has been sent.
struct Lent {
    buffer: Vec<u8>,
    length: usize,
    back: std::sync::mpsc::Sender<Vec<u8>>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _gone = self.back.send(std::mem::take(&mut self.buffer));
    }
}

/// A request body that is a tar stream of a directory or file, whose first path component is `name` (empty: none).
pub fn body_from_tar(path: PathBuf, name: String, bar: ProgressBar) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
    tokio::task::spawn_blocking(move || {
        let writer = ChunkWriter {
            sender: sender.clone(),
            buffer: BytesMut::with_capacity(CHUNK),
            bar,
        };
        let mut tar = tar::Builder::new(writer);
        tar.follow_symlinks(false);
        let inside = if name.is_empty() {
            Path::new(".")
        } else {
            Path::new(&name)
        };
        let packed = if path.is_dir() {
            tar.append_dir_all(inside, &path)
        } else {
            tar.append_path_with_name(&path, inside)
        };
        let finished = packed
            .and_then(|()| tar.into_inner())
            .and_then(|mut writer| writer.flush());
        if let Err(error) = finished {
            let _gone = sender.blocking_send(Err(error));
        }
    });
    Body::wrap_stream(received(receiver))
}

fn received(receiver: mpsc::Receiver<io::Result<Bytes>>) -> impl Stream<Item = io::Result<Bytes>> {
    futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|item| (item, receiver))
    })
}

/// Gathers small writes into chunks and hands them to the connection, waiting when it is slower.
struct ChunkWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: BytesMut,
    bar: ProgressBar,
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.bar.inc(self.buffer.len() as u64);
        let chunk = std::mem::replace(&mut self.buffer, BytesMut::with_capacity(CHUNK)).freeze();
        self.sender
            .blocking_send(Ok(chunk))
            .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}

/// Writes a response to a file (which appears only when complete) or, for `-`, to stdout.
pub async fn save(response: Response, to: &Path, bar: &ProgressBar) -> Result<()> {
    if to == Path::new("-") {
        return copy(response, io::stdout(), bar).await;
    }
    let part = part_of(to);
    let outcome = async {
        let file = fs::File::create(&part).doing(format_args!("cannot write {}", part.display()))?;
        if to.exists() {
            copy(response, WrittenEarly::new(file), bar).await?;
        } else {
            copy(response, file, bar).await?;
        }
        tokio::fs::rename(&part, to)
            .await
            .doing(format_args!("cannot write {}", to.display()))
    };
    let outcome = outcome.await;
    if outcome.is_err() {
        let _absent = fs::remove_file(&part);
    }
    outcome
}

/// A file that is to take another one's place. Filesystems have all of such a file on its way to the disk before they let it;
/// so that this is not left for the end, it begins with the first pieces.
struct WrittenEarly {
    file: fs::File,
    written: u64,
    on_its_way: u64,
}

impl WrittenEarly {
    const PIECE: u64 = 32 * 1024 * 1024;

    fn new(file: fs::File) -> Self {
        Self {
            file,
            written: 0,
            on_its_way: 0,
        }
    }
}

impl Write for WrittenEarly {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.written += count as u64;
        let waiting = self.written - self.on_its_way;
        if waiting >= Self::PIECE {
            // Linux begins to write what it is told that nobody needs in memory. No more than a wish.
            let advice = rustix::fs::Advice::DontNeed;
            let length = std::num::NonZeroU64::new(waiting);
            let _slower = rustix::fs::fadvise(&self.file, self.on_its_way, length, advice);
            self.on_its_way = self.written;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn part_of(to: &Path) -> PathBuf {
    let mut name = to.file_name().unwrap_or_default().to_owned();
    name.push(format!(".part-{}", std::process::id()));
    to.with_file_name(name)
}

/// Writes on a thread of its own, while the next chunks arrive.
async fn copy(response: Response, mut to: impl Write + Send + 'static, bar: &ProgressBar) -> Result<()> {
    let (sender, mut receiver) = mpsc::channel::<Bytes>(AHEAD);
    let writing = tokio::task::spawn_blocking(move || {
        while let Some(chunk) = receiver.blocking_recv() {
            to.write_all(&chunk)?;
        }
        to.flush()
    });
    let mut body = response.bytes_stream();
    let mut received = Ok(());
    while let Some(chunk) = body.next().await {
        match chunk.doing("the download broke off") {
            Ok(chunk) => {
                bar.inc(chunk.len() as u64);
                // The other side is gone when it has failed; it says why.
                if sender.send(chunk).await.is_err() {
                    break;
                }
            }
            Err(error) => {
                received = Err(error);
                break;
            }
        }
    }
    drop(sender);
    let written = writing.await.doing("writing what was downloaded")?;
    written.doing("cannot write what was downloaded")?;
    received
}

/// Unpacks a tar response into the directory `into`. With `rename`, the first path component is replaced by it.
pub async fn unpack(
    response: Response,
    into: &Path,
    rename: Option<String>,
    bar: &ProgressBar,
) -> Result<()> {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
    let into = into.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || {
        unpack_from(
            ChunkReader {
                receiver,
                chunk: Bytes::new(),
            },
            &into,
            rename.as_deref(),
        )
    });
    let mut body = response.bytes_stream();
    while let Some(chunk) = body.next().await {
        bar.inc(chunk.as_ref().map_or(0, |chunk| chunk.len() as u64));
        // The other side is gone when it has failed; it says why.
        if sender.send(chunk.map_err(io::Error::other)).await.is_err() {
            break;
        }
    }
    drop(sender);
    unpacking.await.doing("unpacking")?
}

/// Members that would land outside of `into`, and devices, are refused.
///
/// With `rename`, everything is unpacked into a new directory beside the target, and the one directory that it holds then
/// gets the name. So nothing half done is ever seen under that name, and no link of the archive's is on the way to it.
fn unpack_from(reader: impl Read, into: &Path, rename: Option<&str>) -> Result<()> {
    fs::create_dir_all(into).doing(format_args!("cannot create {}", into.display()))?;
    let Some(name) = rename else {
        return unpack_members(reader, into).map(drop);
    };
    let target = into.join(name);
    if target.parent() != Some(into) || target.file_name().is_none() {
        return Err(Error::new(format!("`{name}` is not the name of a directory")));
    }
    if fs::symlink_metadata(&target).is_ok() {
        return Err(Error::new(format!("{} is already there", target.display()))
            .hint("remove it, or name a place that does not exist yet"));
    }
    let writing = || format!("cannot write {}", target.display());
    let beside = tempfile::Builder::new()
        .prefix(".atoll-part-")
        .tempdir_in(into)
        .doing(writing())?;
    let unpacked = match unpack_members(reader, beside.path())? {
        Some(first) => beside.path().join(first),
        // A whole filesystem: its members have no name in common.
        None => {
            let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(beside.path(), everyone).doing(writing())?;
            return fs::rename(beside.keep(), &target).doing(writing());
        }
    };
    let alone = fs::read_dir(beside.path()).doing(writing())?.count() == 1;
    if !alone || !fs::symlink_metadata(&unpacked).doing(writing())?.is_dir() {
        return Err(Error::new("the archive holds something else than one directory"));
    }
    fs::rename(&unpacked, &target).doing(writing())
}

/// What the first member's path begins with, unless that is the root.
fn unpack_members(reader: impl Read, into: &Path) -> Result<Option<PathBuf>> {
    let mut first = None;
    let mut archive = tar::Archive::new(reader);
    archive.set_preserve_mtime(true);
    for entry in archive.entries().doing("cannot read the archive")? {
        let mut entry = entry.doing("cannot read the archive")?;
        let kind = entry.header().entry_type();
        let name = entry
            .path()
            .doing("a name in the archive cannot be used here")?
            .into_owned();
        let allowed = kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link();
        if !allowed {
            continue;
        }
        let unpacked = entry
            .unpack_in(into)
            .doing(format_args!("cannot unpack {}", name.display()))?;
        if !unpacked {
            return Err(Error::new(format!(
                "the archive holds a path that leads outside: {}",
                name.display()
            )));
        }
        first.get_or_insert_with(|| match name.components().next() {
            Some(Component::Normal(part)) => Some(PathBuf::from(part)),
            _ => None,
        });
    }
    Ok(first.flatten())
}

/// Reads what the connection delivers, from a blocking thread.
struct ChunkReader {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    chunk: Bytes,
}

impl Read for ChunkReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.receiver.blocking_recv() {
                Some(chunk) => self.chunk = chunk?,
                None => return Ok(0),
            }
        }
        let count = buffer.len().min(self.chunk.len());
        buffer[..count].copy_from_slice(&self.chunk.split_to(count));
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(names: &[&str]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(2);
            header.set_mode(0o644);
            header.set_cksum();
            tar.append(&header, &b"hi"[..]).unwrap();
        }
        tar.into_inner().unwrap()
    }

    #[test]
    fn archives_are_unpacked_and_renamed() {
        let dir = tempfile::tempdir().unwrap();
        unpack_from(&archive(&["a/b"])[..], dir.path(), None).unwrap();
        unpack_from(&archive(&["a/b"])[..], dir.path(), Some("c")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("a/b")).unwrap(), "hi");
        assert_eq!(fs::read_to_string(dir.path().join("c/b")).unwrap(), "hi");
    }

    /// A link, and then a file behind it, further down than what is there.
    fn archive_with_a_link(link: &str, to: &Path, behind: &str) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        tar.append_link(&mut header, link, to).unwrap();
        let mut archive = tar.into_inner().unwrap();
        // Without the two blocks that end it.
        archive.truncate(archive.len() - 1024);
        archive.extend(self::archive(&[behind]));
        archive
    }

    #[test]
    fn nothing_is_written_outside() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("inner");
        fs::create_dir(&dir).unwrap();
        for rename in [None, Some("c")] {
            assert!(unpack_from(&archive(&["x/../../evil"])[..], &dir, rename).is_err());
        }
        std::os::unix::fs::symlink("..", dir.join("link")).unwrap();
        assert!(unpack_from(&archive(&["link/evil"])[..], &dir, None).is_err());
        for evil in ["x/evil", "x/sub/evil"] {
            assert!(unpack_from(&archive(&[evil])[..], &dir, Some("link")).is_err());
        }
        let before: Vec<_> = fs::read_dir(outer.path()).unwrap().collect();
        assert_eq!(before.len(), 1, "{before:?}");
    }

    #[test]
    fn no_directory_is_made_through_a_link_of_the_archive() {
        let outer = tempfile::tempdir().unwrap();
        let (dir, elsewhere) = (outer.path().join("inner"), outer.path().join("elsewhere"));
        fs::create_dir(&dir).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        for rename in [None, Some("c")] {
            for (link, behind) in [("x/link", "x/link/a/b/evil"), ("x", "x/a/b/evil")] {
                let hostile = archive_with_a_link(link, &elsewhere, behind);
                assert!(unpack_from(&hostile[..], &dir, rename).is_err(), "{behind}");
                let made: Vec<_> = fs::read_dir(&elsewhere).unwrap().collect();
                assert!(made.is_empty(), "{behind}: {made:?}");
            }
        }
        assert!(!dir.join("c").exists(), "what was refused leaves nothing");
        let left = fs::read_dir(&dir)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name());
        assert!(left.into_iter().all(|name| name == "x"), "nor a part of it");
    }

    #[test]
    fn a_whole_filesystem_gets_a_name_and_none_is_mixed_with_another() {
        let dir = tempfile::tempdir().unwrap();
        unpack_from(&archive(&["./etc/a", "./usr/b"])[..], dir.path(), Some("root")).unwrap();
        assert!(dir.path().join("root/etc/a").exists() && dir.path().join("root/usr/b").exists());
        let again = unpack_from(&archive(&["x/a"])[..], dir.path(), Some("root")).unwrap_err();
        assert!(again.message.contains("already there"), "{again}");
        assert!(unpack_from(&archive(&["x/a", "y/b"])[..], dir.path(), Some("two")).is_err());
        assert!(!dir.path().join("two").exists());
    }

    #[tokio::test]
    async fn a_directory_survives_the_way_there_and_back() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("deep")).unwrap();
        fs::write(from.join("deep/file"), vec![7; 3 * CHUNK]).unwrap();
        let body = body_from_tar(from, "name".into(), ProgressBar::hidden());
        let response = Response::from(http::Response::new(body));
        unpack(response, &dir.path().join("to"), None, &ProgressBar::hidden())
            .await
            .unwrap();
        assert_eq!(
            fs::read(dir.path().join("to/name/deep/file")).unwrap().len(),
            3 * CHUNK
        );
    }
}

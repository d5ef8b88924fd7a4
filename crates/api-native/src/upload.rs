//! What templates are built from when it comes over the network: a build context, which is a tar archive unpacked into a
//! private directory on the server, or an image archive, kept as it is.
//!
//! What must hold:
//! - Nothing is written outside the directory: names do not climb, and no symlink is followed on the way (`archive`).
//! - Nothing is read outside of it. Symlinks are files of the context, as they are, and may lead anywhere; builds do not
//!   follow them on this machine, and the Dockerfile is opened beneath the directory.
//! - Only files, directories and links; no devices. Number, depth and size are bounded, of what is made (holes included)
//!   and of the archive itself; the directory dies with its owner.
//! - What has arrived counts as the project's storage until it is gone.

use parking_lot::Mutex;
use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_archive::{Budget, Dialect, Ids, is_full, is_too_much, unpack_within};
use atoll_front::upload::Incoming;
use atoll_identity::Caller;
use atoll_sandboxes::UploadRoom;
use atoll_types::{Code, Fault};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use tempfile::TempDir;
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::App;
use crate::error::{Answer, Failure};

/// How many uploads are received at once, in all and of one project.
pub(crate) const AT_ONCE: usize = 64;
pub(crate) const OF_A_PROJECT: usize = 4;
const ARCHIVE: &str = "image.tar";
const MAX_ENTRIES: u64 = 200_000;
const MAX_DEPTH: usize = 250;
/// What the headers of one entry may have on average: names of some kilobytes.
const HEADER_BYTES: u64 = 8 << 10;
const DOCKERFILE_BYTES: u64 = 1024 * 1024;

/// A directory that is deleted when this is dropped.
#[derive(Debug)]
pub(crate) struct Upload {
    directory: Option<TempDir>,
    /// Taken until the directory is gone.
    room: Option<Arc<UploadRoom>>,
}

impl Upload {
    pub(crate) fn path(&self) -> &Path {
        self.directory.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Where an image archive is.
    pub(crate) fn file(&self) -> PathBuf {
        self.path().join(ARCHIVE)
    }

    /// Reads a text file of the context.
    pub(crate) async fn read_text(self, name: String) -> Answer<(Self, String)> {
        blocking(move || {
            let text = read_text(self.path(), &name)?;
            Ok((self, text))
        })
        .await
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let (directory, room) = (self.directory.take(), self.room.take());
        // Deleting a large tree takes a while, and this may be dropped on a thread that serves others.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || {
                drop(directory);
                drop(room);
            });
        }
    }
}

/// Receives and unpacks a build context.
pub(crate) async fn context(app: &App, caller: &Caller, body: Incoming) -> Answer<Upload> {
    receive(app, caller, body, |body, root, limit| {
        unpack(body, root, limit, MAX_ENTRIES)
    })
    .await
}

/// Receives an image archive into [`Upload::file`].
pub(crate) async fn archive(app: &App, caller: &Caller, body: Incoming) -> Answer<Upload> {
    receive(app, caller, body, |mut body, root, limit| {
        let written = write_file(&mut body, &root.join(ARCHIVE), 0o600, limit);
        match written.map_err(|error| failed(Path::new("the archive"), &error))? {
            Some(_) => Ok(()),
            None => Err(too_large(format!(
                "an image archive may hold at most {limit} bytes"
            ))),
        }
    })
    .await
}

type Pieces = SyncIoBridge<StreamReader<stream::BoxStream<'static, io::Result<Bytes>>, Bytes>>;

/// Hands a body to `take`, with a new directory to put it into and a limit.
async fn receive(
    app: &App,
    caller: &Caller,
    body: Incoming,
    take: impl FnOnce(Pieces, &Path, u64) -> Answer<()> + Send + 'static,
) -> Answer<Upload> {
    let _slot = app.receiving.take(caller.project())?;
    let room = Arc::new(app.sandboxes.upload_room(caller.project()).await?);
    let (counted, refused) = (Arc::clone(&room), WhyNot::default());
    let told = refused.clone();
    let pieces = body
        .kept(move |bytes| counted.take(bytes))
        .map(move |piece| piece.map_err(|fault| told.tell(fault)));
    let incoming = SyncIoBridge::new(StreamReader::new(pieces.boxed()));
    let scratch = app.options.scratch.clone();
    let limit = app.options.upload_bytes;
    blocking(move || {
        let directory = tempfile::Builder::new()
            .prefix("upload-")
            .tempdir_in(&scratch)
            .map_err(|error| {
                Fault::internal(format!(
                    "cannot make a directory in {}: {error}",
                    scratch.display()
                ))
            })?;
        let upload = Upload {
            directory: Some(directory),
            room: Some(room),
        };
        match take(incoming, upload.path(), limit) {
            Ok(()) => Ok(upload),
            Err(failure) => Err(refused.or(failure)),
        }
    })
    .await
}

/// Why nothing more was taken, for those who know only that reading failed.
#[derive(Debug, Clone, Default)]
struct WhyNot(Arc<Mutex<Option<Fault>>>);

impl WhyNot {
    fn tell(&self, fault: Fault) -> io::Error {
        *self.0.lock() = Some(fault);
        io::ErrorKind::UnexpectedEof.into()
    }

    fn or(&self, failure: Failure) -> Failure {
        let fault = self.0.lock().take();
        fault.map_or(failure, Failure::from)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Answer<T> + Send + 'static) -> Answer<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(Fault::internal(format!("receiving an upload: {error}")).into()),
    }
}

/// Unpacks an archive below `root`, an empty directory that nobody else writes to.
fn unpack(archive: impl Read, root: &Path, limit: u64, entries: u64) -> Answer<()> {
    let directory = std::fs::File::open(root).map_err(|error| failed(root, &error))?;
    let mut budget = Budget {
        bytes: limit,
        entries,
        depth: MAX_DEPTH,
        private: true,
    };
    let mut archive = archive.take(limit.saturating_add(entries * HEADER_BYTES));
    let done = unpack_within(
        directory.as_fd(),
        Dialect::Plain,
        Ids::Own,
        &mut budget,
        &mut archive,
    );
    let too_much = archive.limit() == 0 || done.as_ref().is_err_and(is_too_much);
    match done {
        Err(_) if too_much => Err(too_large(format!(
            "a build context may hold at most {limit} bytes in {entries} files and directories"
        ))),
        Err(error) if is_full(&error) => {
            Err(Fault::internal(format!("cannot unpack the build context: {error}")).into())
        }
        Err(error) => Err(unreadable(&error)),
        Ok(tally) if tally.skipped.total() > 0 => Err(Failure::new(
            Code::InvalidContext,
            "the context holds something that is neither a file, a directory nor a link",
        )),
        Ok(_) => Ok(()),
    }
}

/// Writes at most `room` bytes; `None` if there were more.
fn write_file(from: &mut impl Read, to: &Path, mode: u32, room: u64) -> io::Result<Option<u64>> {
    // Anew rather than over what is there, which may be a hard link to another file.
    match std::fs::remove_file(to) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    let copied = io::copy(&mut from.take(room.saturating_add(1)), &mut file)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode | 0o400))?;
    Ok((copied <= room).then_some(copied))
}

fn read_text(root: &Path, name: &str) -> Answer<String> {
    let missing = |why: String| {
        Failure::new(
            Code::NoDockerfile,
            format!("the context's `{name}` cannot be read: {why}"),
        )
        .hint("name it with `dockerfile=`, relative to the context")
    };
    // A link may lead from one place of the context to another, and not out of it.
    let beneath = std::fs::File::open(root).and_then(|root| {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        Ok(rustix::fs::openat2(&root, name, flags, Mode::empty(), resolve)?)
    });
    let file = std::fs::File::from(beneath.map_err(|error| missing(error.to_string()))?);
    let mut text = String::new();
    file.take(DOCKERFILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|error| missing(error.to_string()))?;
    if text.len() as u64 > DOCKERFILE_BYTES {
        return Err(too_large(format!(
            "a Dockerfile may hold at most {DOCKERFILE_BYTES} bytes"
        )));
    }
    Ok(text)
}

fn unreadable(error: &io::Error) -> Failure {
    Failure::new(
        Code::InvalidContext,
        format!("the body is not an archive that can be unpacked: {error}"),
    )
}

/// Most failures come from what the archive holds (a file where a directory must be); a full disk is ours.
fn failed(name: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem => {
            Fault::internal(format!("cannot unpack `{}`: {error}", name.display())).into()
        }
        _ => Failure::new(
            Code::InvalidContext,
            format!("cannot unpack `{}`: {error}", name.display()),
        ),
    }
}

fn too_large(message: String) -> Failure {
    Fault::new(Code::ContextTooLarge, message).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Member {
        File(&'static str),
        Symlink(&'static str),
        Hard(&'static str),
        Device,
    }
    use Member::{Device, File, Hard, Symlink};

    /// Writes names as they are; the tar crate's own builder refuses the hostile ones.
    fn archive(members: &[(&str, Member)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, member) in members {
            let mut header = tar::Header::new_ustar();
            let (kind, content, link) = match member {
                File(content) => (tar::EntryType::Regular, *content, ""),
                Symlink(target) => (tar::EntryType::Symlink, "", *target),
                Hard(target) => (tar::EntryType::Link, "", *target),
                Device => (tar::EntryType::Char, "", ""),
            };
            header.set_entry_type(kind);
            header.set_mode(0o755);
            header.set_size(content.len() as u64);
            let raw = header.as_old_mut();
            raw.name[..name.len()].copy_from_slice(name.as_bytes());
            raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
            header.set_cksum();
            builder.append(&header, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn check(members: &[(&str, Member)]) -> Result<TempDir, Failure> {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(directory.path().join("secret"), "secret").unwrap();
        let done = unpack(&archive(members)[..], &root, 100, MAX_ENTRIES);
        assert_eq!(std::fs::read(directory.path().join("secret")).unwrap(), b"secret");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        done.map(|()| directory)
    }

    #[test]
    fn a_context_is_unpacked() {
        let directory = check(&[
            ("./Dockerfile", File("FROM scratch")),
            ("src/main", File("x")),
            ("src/again", Hard("src/main")),
            ("current", Symlink("src")),
            ("nowhere", Symlink("/no/such/file")),
        ])
        .unwrap();
        let root = directory.path().join("root");
        assert_eq!(read_text(&root, "Dockerfile").unwrap(), "FROM scratch");
        assert_eq!(read_text(&root, "current/again").unwrap(), "x");
        let mode = std::fs::metadata(root.join("src/main"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o755);
        assert!(read_text(&root, "../secret").is_err());
        assert!(read_text(&root, "missing").is_err());
    }

    #[test]
    fn nothing_lands_outside() {
        for members in [
            &[("../secret", File("changed"))][..],
            &[("/etc/atoll-test", File("changed"))],
            &[("a/../../secret", File("changed"))],
            &[("a", Symlink("..")), ("a/secret", File("changed"))],
            &[("a", Symlink("..")), ("a/b", Symlink("x"))],
            &[("a", Hard("../secret"))],
            &[("a", Symlink("..")), ("b", Hard("a/secret"))],
            &[("a", Device)],
        ] {
            let failure = check(members).unwrap_err();
            assert_eq!(failure.status(), 400, "{}", failure.fault().message);
        }
    }

    #[test]
    fn nothing_outside_is_read() {
        let directory = check(&[
            ("a", Symlink("../secret")),
            ("b", Symlink("/etc/passwd")),
            ("up", Symlink("..")),
            ("inner", Symlink("d/Dockerfile")),
            ("d/Dockerfile", File("FROM base")),
        ])
        .unwrap();
        let root = directory.path().join("root");
        assert_eq!(read_text(&root, "inner").unwrap(), "FROM base");
        for name in ["a", "b", "up/secret", "../secret", "/etc/passwd", "d", "missing"] {
            let failure = read_text(&root, name).unwrap_err();
            assert_eq!(failure.fault().code, Code::NoDockerfile, "{name}");
        }
    }

    /// One header of a tar archive.
    fn header(kind: tar::EntryType, size: u64) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(size);
        header.set_cksum();
        header.as_bytes().to_vec()
    }

    #[test]
    fn long_names_are_not_gathered_in_memory() {
        for kind in [
            tar::EntryType::GNULongName,
            tar::EntryType::GNULongLink,
            tar::EntryType::XHeader,
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut read = 0;
            let endless = io::repeat(b'a');
            let body = header(kind, 8 << 20).chain_with(endless, &mut read);
            let failure = unpack(body, directory.path(), 1 << 40, MAX_ENTRIES).unwrap_err();
            assert_eq!(failure.status(), 400, "{}", failure.fault().message);
            assert!(read < 2 << 20, "{read}");
        }
    }

    /// Counts what is read of something after what is given.
    trait ChainWith {
        fn chain_with<R: Read>(self, rest: R, read: &mut u64) -> impl Read;
    }

    impl ChainWith for Vec<u8> {
        fn chain_with<R: Read>(self, rest: R, read: &mut u64) -> impl Read {
            struct Counted<'a, R>(R, &'a mut u64);
            impl<R: Read> Read for Counted<'_, R> {
                fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                    let read = self.0.read(buffer)?;
                    *self.1 += read as u64;
                    Ok(read)
                }
            }
            io::Cursor::new(self).chain(Counted(rest, read))
        }
    }

    #[test]
    fn directories_count() {
        let mut builder = tar::Builder::new(Vec::new());
        for number in 0..3 {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Directory);
            header.set_mode(0o755);
            header.set_size(0);
            let path = format!("{number}/{}", "d/".repeat(200));
            builder.append_data(&mut header, path, io::empty()).unwrap();
        }
        let directory = tempfile::tempdir().unwrap();
        let failure = unpack(&builder.into_inner().unwrap()[..], directory.path(), 1 << 40, 500).unwrap_err();
        assert_eq!(failure.fault().code, Code::ContextTooLarge);
    }

    #[test]
    fn size_is_bounded() {
        const SIXTY: &str = "............................................................";
        let failure = check(&[("a", File(SIXTY)), ("b", File(SIXTY))]).unwrap_err();
        assert_eq!(failure.status(), 413);
        assert!(unpack(&b"not a tar at all"[..], Path::new("/nonexistent"), 1, 1).is_err());
    }
}

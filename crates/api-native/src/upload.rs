//! What templates are built from when it comes over the network: a build context, which is a tar archive unpacked into a
//! private directory on the server, or an image archive, kept as it is.
//!
//! What must hold:
//! - Nothing is written outside the directory. Names have no `..` and no root, and no symlink exists while files are
//!   written: symlinks are made last, below real directories only.
//! - Nothing in the directory leads outside: a symlink that resolves to something elsewhere is refused, because whoever
//!   copies from the context may follow it.
//! - Only files, directories and links; no devices. Number and size are bounded; the directory dies with its owner.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use atoll_types::{Fault, FaultKind};
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tempfile::TempDir;
use tokio_util::io::{StreamReader, SyncIoBridge};

use crate::App;
use crate::error::{Answer, Failure};

/// How many uploads are received at once.
pub(crate) const AT_ONCE: usize = 8;
const ARCHIVE: &str = "image.tar";
const MAX_ENTRIES: u64 = 200_000;
const DOCKERFILE_BYTES: u64 = 1024 * 1024;
/// An upload that stands still for so long is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory that is deleted when this is dropped.
#[derive(Debug)]
pub(crate) struct Upload(Option<TempDir>);

impl Upload {
    pub(crate) fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), TempDir::path)
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
        let directory = self.0.take();
        // Deleting a large tree takes a while, and this may be dropped on a thread that serves others.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(directory));
        }
    }
}

/// Receives and unpacks a build context.
pub(crate) async fn context(app: &App, body: Body) -> Answer<Upload> {
    receive(app, body, unpack).await
}

/// Receives an image archive into [`Upload::file`].
pub(crate) async fn archive(app: &App, body: Body) -> Answer<Upload> {
    receive(app, body, |mut body, root, limit| {
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

type Incoming = SyncIoBridge<StreamReader<stream::BoxStream<'static, io::Result<Bytes>>, Bytes>>;

/// Hands a body to `take`, with a new directory to put it into and a limit.
async fn receive(
    app: &App,
    body: Body,
    take: impl FnOnce(Incoming, &Path, u64) -> Answer<()> + Send + 'static,
) -> Answer<Upload> {
    let Ok(_permit) = app.receiving.try_acquire() else {
        return Err(Fault::new(
            FaultKind::Unavailable,
            "too_many_uploads",
            format!("{AT_ONCE} uploads are being received already"),
        )
        .hint("try again when one of them is done")
        .into());
    };
    let chunks = stream::unfold(body.into_data_stream(), |mut body| async move {
        match tokio::time::timeout(PATIENCE, body.next()).await {
            Ok(chunk) => Some((chunk?.map_err(io::Error::other), body)),
            Err(_) => Some((Err(io::ErrorKind::TimedOut.into()), body)),
        }
    });
    let incoming = SyncIoBridge::new(StreamReader::new(chunks.boxed()));
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
        take(incoming, directory.path(), limit)?;
        Ok(Upload(Some(directory)))
    })
    .await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Answer<T> + Send + 'static) -> Answer<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(Fault::internal(format!("receiving an upload: {error}")).into()),
    }
}

/// Unpacks an archive below `root`, an empty directory that nobody else writes to.
fn unpack(archive: impl Read, root: &Path, limit: u64) -> Answer<()> {
    let mut archive = tar::Archive::new(archive);
    let mut links = BTreeMap::new();
    let mut room = limit;
    let entries = archive.entries().map_err(|error| unreadable(&error))?;
    for (count, entry) in entries.enumerate() {
        if count as u64 >= MAX_ENTRIES {
            return Err(too_large(format!(
                "a build context may hold at most {MAX_ENTRIES} entries"
            )));
        }
        let mut entry = entry.map_err(|error| unreadable(&error))?;
        let name = entry.path().map_err(|error| unreadable(&error))?.into_owned();
        let Some(relative) = inside(&name)? else {
            continue;
        };
        let to = root.join(&relative);
        let doing = |error: io::Error| failed(&name, &error);
        match entry.header().entry_type() {
            tar::EntryType::Directory => std::fs::create_dir_all(&to).map_err(doing)?,
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                let mode = entry.header().mode().unwrap_or(0o644) & 0o777;
                make_parent(&to).map_err(doing)?;
                links.remove(&relative);
                let copied = write_file(&mut entry, &to, mode, room).map_err(doing)?;
                let Some(copied) = copied else {
                    return Err(too_large(format!(
                        "a build context may hold at most {limit} bytes"
                    )));
                };
                room -= copied;
            }
            tar::EntryType::Symlink => {
                let target = link_target(&entry, &name)?;
                links.insert(relative, target);
            }
            tar::EntryType::Link => {
                let target = link_target(&entry, &name)?;
                let Some(target) = inside(&target)? else {
                    return Err(refused(&name, "is a hard link to nothing"));
                };
                make_parent(&to).map_err(doing)?;
                std::fs::hard_link(root.join(target), &to).map_err(doing)?;
            }
            tar::EntryType::XGlobalHeader => {}
            _ => return Err(refused(&name, "is neither a file, a directory nor a link")),
        }
    }
    make_links(root, &links)
}

/// The name without its harmless parts; `None` for the root itself.
fn inside(name: &Path) -> Answer<Option<PathBuf>> {
    let mut relative = PathBuf::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => relative.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(refused(name, "would land outside the context"));
            }
        }
    }
    Ok((relative.as_os_str() != OsStr::new("")).then_some(relative))
}

fn link_target(entry: &tar::Entry<'_, impl Read>, name: &Path) -> Answer<PathBuf> {
    match entry.link_name() {
        Ok(Some(target)) => Ok(target.into_owned()),
        Ok(None) => Err(refused(name, "is a link to nothing")),
        Err(error) => Err(unreadable(&error)),
    }
}

fn make_parent(to: &Path) -> io::Result<()> {
    match to.parent() {
        Some(parent) => std::fs::create_dir_all(parent),
        None => Ok(()),
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

fn make_links(root: &Path, links: &BTreeMap<PathBuf, PathBuf>) -> Answer<()> {
    for (name, target) in links {
        let to = root.join(name);
        let doing = |error: io::Error| failed(name, &error);
        // An earlier link may be a parent of this one.
        let mut above = root.to_owned();
        for part in name.parent().into_iter().flat_map(Path::components) {
            above.push(part);
            match std::fs::symlink_metadata(&above) {
                Ok(metadata) if metadata.is_dir() => {}
                Ok(_) => return Err(refused(name, "lies below something that is not a directory")),
                Err(_) => std::fs::create_dir(&above).map_err(doing)?,
            }
        }
        match std::fs::remove_file(&to) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(doing(error)),
        }
        std::os::unix::fs::symlink(target, &to).map_err(doing)?;
    }
    let real_root = root.canonicalize().map_err(|error| failed(root, &error))?;
    for name in links.keys() {
        // What resolves to nothing leads nowhere.
        if let Ok(end) = root.join(name).canonicalize()
            && !end.starts_with(&real_root)
        {
            return Err(refused(name, "is a symlink that leads outside the context"));
        }
    }
    Ok(())
}

fn read_text(root: &Path, name: &str) -> Answer<String> {
    let missing = |why: String| {
        Failure::invalid(
            "no_dockerfile",
            format!("the context's `{name}` cannot be read: {why}"),
        )
        .hint("name it with `dockerfile=`, relative to the context")
    };
    let Some(relative) = inside(Path::new(name))? else {
        return Err(missing("it is a directory".into()));
    };
    // Links inside were checked to stay inside.
    let file = std::fs::File::open(root.join(relative)).map_err(|error| missing(error.to_string()))?;
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

fn refused(name: &Path, why: &str) -> Failure {
    Failure::invalid(
        "invalid_context",
        format!("`{}` in the context {why}", name.display()),
    )
}

fn unreadable(error: &io::Error) -> Failure {
    Failure::invalid(
        "invalid_context",
        format!("the body is not a readable tar archive: {error}"),
    )
}

/// Most failures come from what the archive holds (a file where a directory must be); a full disk is ours.
fn failed(name: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem => {
            Fault::internal(format!("cannot unpack `{}`: {error}", name.display())).into()
        }
        _ => Failure::invalid(
            "invalid_context",
            format!("cannot unpack `{}`: {error}", name.display()),
        ),
    }
}

fn too_large(message: String) -> Failure {
    Fault::new(FaultKind::TooLarge, "context_too_large", message).into()
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
        let done = unpack(&archive(members)[..], &root, 100);
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
    fn nothing_lands_or_leads_outside() {
        for members in [
            &[("../secret", File("changed"))][..],
            &[("/etc/atoll-test", File("changed"))],
            &[("a/../../secret", File("changed"))],
            &[("a", Symlink("..")), ("a/secret", File("changed"))],
            &[("a", Symlink("../secret"))],
            &[("a", Symlink("/etc/passwd"))],
            &[("d", Symlink(".")), ("x", Symlink("d/d/../secret"))],
            &[("a", Symlink("..")), ("a/b", Symlink("x"))],
            &[("a", Hard("../secret"))],
            &[("a", Device)],
        ] {
            let failure = check(members).unwrap_err();
            assert_eq!(failure.status(), 400, "{}", failure.fault().message);
        }
    }

    #[test]
    fn size_is_bounded() {
        const SIXTY: &str = "............................................................";
        let failure = check(&[("a", File(SIXTY)), ("b", File(SIXTY))]).unwrap_err();
        assert_eq!(failure.status(), 413);
        assert!(unpack(&b"not a tar at all"[..], Path::new("/nonexistent"), 1).is_err());
    }
}

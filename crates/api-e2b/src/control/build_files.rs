//! The files that the steps of a build copy: archives that were uploaded, unpacked within limits into directories of their
//! own.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::Path;

use atoll_archive::{Budget, Dialect, Ids, unpack_within};
use atoll_identity::Caller;
use atoll_types::GIB;

use super::recipe::{Copied, Recipe};
use super::uploads;
use crate::App;

/// What the archives of one build may hold once unpacked, all of them together.
const UNPACKED: Room = Room {
    stream: 20 * GIB,
    budget: Budget {
        bytes: 16 * GIB,
        entries: 500_000,
        // Below what the image takes, since each COPY has a directory of its own.
        depth: 250,
        private: true,
    },
};

/// What the steps copy, in a directory that goes with this.
#[derive(Debug)]
pub(super) struct Context(Option<tempfile::TempDir>);

impl Context {
    pub(super) fn path(&self) -> &Path {
        self.0.as_ref().map_or(Path::new(""), tempfile::TempDir::path)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let directory = self.0.take();
        // Deleting a large tree takes a while, and this is dropped on a thread that serves others.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(directory));
        }
    }
}

/// What may still be unpacked for a build.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// Bytes of the archives themselves, which may say much and make little.
    stream: u64,
    budget: Budget,
}

/// Lays out what the steps copy; an error names the step.
pub(super) async fn prepare(
    app: &App,
    caller: &Caller,
    recipe: &mut Recipe,
) -> Result<Context, (usize, String)> {
    let first = |error: &dyn std::fmt::Display| (0, format!("the files could not be laid out: {error}"));
    let context = tempfile::Builder::new()
        .prefix("e2b-build-")
        .tempdir_in(&app.options.scratch)
        .map_err(|error| first(&error))?;
    let context = Context(Some(context));
    let mut room = UNPACKED;
    for copied in recipe.copies.clone() {
        let index = copied
            .directory
            .rsplit('-')
            .next()
            .and_then(|digits| digits.parse().ok());
        let index = index.unwrap_or(0);
        let archive =
            uploads::path_of(app, caller, &copied.hash).map_err(|refusal| (index, refusal.message))?;
        let (root, directory) = (context.path().to_owned(), copied.directory.clone());
        let laid = tokio::task::spawn_blocking(move || {
            let done = lay_out(&archive, &root, &copied, &mut room);
            (done, room)
        })
        .await;
        let (done, left) = laid.map_err(|error| first(&error))?;
        room = left;
        match done {
            Ok(true) => recipe.goes_to_parent(&directory),
            Ok(false) => {}
            Err(error) => {
                return Err((index, format!("the files to copy could not be unpacked: {error}")));
            }
        }
    }
    Ok(context)
}

/// Unpacks an archive and puts what is copied of it into its own directory; whether that is a single file. Clients pack
/// just what the source matches, so that what lies below its fixed part is all of it.
fn lay_out(archive: &Path, root: &Path, copied: &Copied, room: &mut Room) -> std::io::Result<bool> {
    let unpacked = root.join(format!("{}.all", copied.directory));
    let target = root.join(&copied.directory);
    std::fs::create_dir(&unpacked)?;
    let mut file = std::io::BufReader::new(std::fs::File::open(archive)?);
    let packed = std::io::BufRead::fill_buf(&mut file)?.starts_with(&[0x1f, 0x8b]);
    let input: Box<dyn std::io::Read> = match packed {
        true => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        false => Box::new(file),
    };
    let directory = std::fs::File::open(&unpacked)?;
    let mut input = input.take(room.stream);
    let done = unpack_within(
        directory.as_fd(),
        Dialect::Plain,
        Ids::Own,
        &mut room.budget,
        &mut input,
    );
    room.stream = input.limit();
    match done {
        Err(_) if room.stream == 0 => {
            return Err(std::io::Error::other(
                "the archives of the build are too large together",
            ));
        }
        done => done?,
    };
    let fixed: Vec<&str> = copied
        .source
        .split('/')
        .filter(|part| !matches!(*part, "" | "."))
        .take_while(|part| !part.contains(['*', '?', '[']))
        .collect();
    if fixed.contains(&"..") {
        return Err(std::io::Error::other("the source leads outside the context"));
    }
    // No link is followed on the way: each part must be a directory itself.
    let mut found = unpacked;
    for part in &fixed {
        if !std::fs::symlink_metadata(&found)?.is_dir() {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        found.push(part);
    }
    if std::fs::symlink_metadata(&found)?.is_dir() {
        std::fs::rename(&found, &target)?;
        return Ok(false);
    }
    std::fs::create_dir(&target)?;
    let own_name = fixed.last().copied().unwrap_or("file");
    let name = copied.file_name.as_deref().unwrap_or(own_name);
    std::fs::rename(&found, target.join(name))?;
    Ok(copied.file_name.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tar archive of one entry, written by hand.
    fn archive(dir: &Path, path: &str, kind: u8, records: &str, content: &[u8]) -> std::path::PathBuf {
        let mut bytes = Vec::new();
        let mut block = |flag: u8, name: &str, size: usize, content: &[u8]| {
            let mut header = [0u8; 512];
            let short = &name.as_bytes()[..name.len().min(99)];
            header[..short.len()].copy_from_slice(short);
            header[100..107].copy_from_slice(b"0006755");
            header[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
            header[156] = flag;
            header[257..265].copy_from_slice(b"ustar\x0000");
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            bytes.extend_from_slice(&header);
            bytes.extend_from_slice(content);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        };
        let long = record("path", path) + records;
        block(b'x', "PaxHeader", long.len(), long.as_bytes());
        block(kind, path, content.len(), content);
        bytes.extend_from_slice(&[0; 1024]);
        let file = dir.join("archive.tar");
        std::fs::write(&file, bytes).unwrap();
        file
    }

    fn record(key: &str, value: &str) -> String {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        format!("{length} {key}={value}\n")
    }

    fn copied(index: usize) -> Copied {
        Copied {
            to: String::new(),
            line: 0,
            hash: "abc".into(),
            source: ".".into(),
            directory: format!("copy-{index}"),
            file_name: None,
        }
    }

    /// 16,000 levels: removing them with a recursion would take the stack of the thread, and the server with it.
    #[test]
    fn a_deep_archive_is_refused_before_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = "a/".repeat(16_000);
        let file = archive(dir.path(), &path, b'5', "", b"");
        let error = lay_out(&file, dir.path(), &copied(0), &mut { UNPACKED }).unwrap_err();
        assert!(error.to_string().contains("levels of directories"), "{error}");
        assert!(!dir.path().join("copy-0.all/a").exists());
    }

    #[test]
    fn all_archives_of_a_build_share_its_room() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let file = archive(dir.path(), "f", b'0', "", &[7; 600]);
        let mut room = UNPACKED;
        room.budget.bytes = 1000;
        assert!(!lay_out(&file, dir.path(), &copied(0), &mut room).unwrap());
        let mode = std::fs::metadata(dir.path().join("copy-0/f"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o755);
        let error = lay_out(&file, dir.path(), &copied(1), &mut room).unwrap_err();
        assert!(atoll_archive::is_too_much(&error), "{error}");

        let mut room = UNPACKED;
        room.stream = 4000;
        assert!(lay_out(&file, dir.path(), &copied(2), &mut room).is_ok());
        let error = lay_out(&file, dir.path(), &copied(3), &mut room).unwrap_err();
        assert!(error.to_string().contains("too large together"), "{error}");
    }

    #[test]
    fn holes_count() {
        let dir = tempfile::tempdir().unwrap();
        let records: String = [
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.realsize", "1099511627776"),
        ]
        .map(|(key, value)| record(key, value))
        .concat();
        let mut map = b"1\n0\n0\n".to_vec();
        map.resize(512, 0);
        let file = archive(dir.path(), "holes", b'0', &records, &map);
        let error = lay_out(&file, dir.path(), &copied(0), &mut { UNPACKED }).unwrap_err();
        assert!(atoll_archive::is_too_much(&error), "{error}");
    }
}

//! Templates as plain directories, for ordinary users, whom the kernel lets mount no image.
//!
//! Extracting takes seconds and the image's size in disk space, so it is done once per image and kept beside the state.
//! What must hold: a directory has its final name only when it is whole; one whose image is gone is removed when the
//! server starts.

use parking_lot::Mutex;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::ABANDONED;
use crate::Told;
use crate::instance_dir::age;

#[derive(Debug)]
pub(super) struct Extracted {
    dir: PathBuf,
    /// One at a time: the second of two that want the same image finds it.
    busy: Mutex<()>,
}

const SOURCE: &str = "source";
const ROOT: &str = "root";
const UNFINISHED: &str = ".unfinished-";

impl Extracted {
    pub(super) fn open(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join("jail").join("extracted");
        fs::create_dir_all(&dir)?;
        let this = Self {
            dir,
            busy: Mutex::default(),
        };
        this.sweep()?;
        Ok(this)
    }

    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let path = entry.path();
            let is_whole = !entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(UNFINISHED.as_bytes());
            let image = fs::read_to_string(path.join(SOURCE)).map(PathBuf::from);
            let is_current = image.is_ok_and(|image| self.place(&image).is_ok_and(|place| place == path));
            // A running server may be extracting right now, if we are another.
            if (is_whole && !is_current) || (!is_whole && age(&path) > ABANDONED) {
                remove(&path)?;
            }
        }
        Ok(())
    }

    fn place(&self, image: &Path) -> io::Result<PathBuf> {
        let metadata = fs::metadata(image)?;
        let name = format!("{:x}-{:x}-{:x}", metadata.dev(), metadata.ino(), metadata.mtime());
        Ok(self.dir.join(name))
    }

    /// The directory with the image's content. Blocks, for long the first time.
    pub(super) fn get(&self, files: &[PathBuf]) -> io::Result<PathBuf> {
        let Some((image, devices)) = files.split_first() else {
            return Err(io::Error::other("an image of no files"));
        };
        let place = self.place(image)?;
        let _busy = self.busy.lock();
        if !place.exists() {
            tracing::info!(image = %image.display(), "extracting a template, once, because we may not mount it");
            let unfinished = self.dir.join(format!("{UNFINISHED}{}", std::process::id()));
            remove(&unfinished)?;
            extract(image, devices, &unfinished)
                .and_then(|()| fs::rename(&unfinished, &place))
                .inspect_err(|_| {
                    let _ = remove(&unfinished);
                })?;
        }
        Ok(place.join(ROOT))
    }
}

fn extract(image: &Path, devices: &[PathBuf], to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    let source = image
        .to_str()
        .ok_or_else(|| io::Error::other("the image's path is not text"))?;
    fs::write(to.join(SOURCE), source)?;
    let mut option = std::ffi::OsString::from("--extract=");
    option.push(to.join(ROOT));
    let mut command = Command::new("fsck.erofs");
    command.args([
        option.as_os_str(),
        "--no-preserve-owner".as_ref(),
        "--preserve-perms".as_ref(),
    ]);
    for device in devices {
        let mut option = std::ffi::OsString::from("--device=");
        option.push(device);
        command.arg(option);
    }
    let output = command.arg(image).output().map_err(|error| {
        let hint = "a jail of an ordinary user needs fsck.erofs to unpack its template; install erofs-utils";
        io::Error::new(error.kind(), format!("{hint}: {error}"))
    })?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        return Err(Told::by_host(&format!(
            "fsck.erofs could not extract {source}: {}",
            complaint.trim()
        ))
        .into());
    }
    Ok(())
}

/// Also directories that their owner may not write.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            make_writable(path);
            fs::remove_dir_all(path)
        }
        Err(error) => Err(error),
    }
}

fn make_writable(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let _ = fs::set_permissions(dir, fs::Permissions::from_mode(0o700));
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            make_writable(&entry.path());
        }
    }
}

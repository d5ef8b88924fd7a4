//! The vault's directory: paths, names, its own settings file, and what is asked of the filesystem.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, SeekFrom, fallocate, flock, linkat, open,
    seek,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Error, IoContext, Result};
use crate::key::{Secrets, VaultKey, random};
use crate::pack::{PackId, file_name, parse_file_name};

const VERSION: u32 = 1;

/// Where everything lies, and the lock that makes it ours.
#[derive(Debug)]
pub(crate) struct Disk {
    dir: PathBuf,
    _lock: File,
}

/// `vault.json`. Without its secret nothing that is saved can be verified, so it says itself whether it is whole.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    version: u32,
    secret: String,
    /// Present once a key was configured: from then on it is needed.
    key_check: Option<String>,
    checksum: String,
}

impl Settings {
    fn sum(&self) -> String {
        let text = format!(
            "{}\n{}\n{}",
            self.version,
            self.secret,
            self.key_check.as_deref().unwrap_or("-")
        );
        blake3::hash(text.as_bytes()).to_string()
    }
}

impl Disk {
    /// Makes the directories as needed, takes the lock and empties `tmp`.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        for path in [
            dir.to_owned(),
            dir.join("packs"),
            dir.join("manifests"),
            dir.join("tmp"),
        ] {
            let mut builder = DirBuilder::new();
            builder
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .doing("make", &path)?;
        }
        let dir = dir.canonicalize().doing("open", dir)?;
        let path = dir.join("lock");
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(&path).doing("open", &path)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(Error::InUse { path: dir }),
            other => other.doing("lock", &path)?,
        }
        let disk = Self { dir, _lock: lock };
        for name in names(&disk.tmp_dir())? {
            remove(&disk.tmp(&name))?;
        }
        Ok(disk)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
    pub(crate) fn tmp_dir(&self) -> PathBuf {
        self.dir.join("tmp")
    }
    pub(crate) fn tmp(&self, name: &str) -> PathBuf {
        self.dir.join("tmp").join(name)
    }
    pub(crate) fn packs_dir(&self) -> PathBuf {
        self.dir.join("packs")
    }
    pub(crate) fn pack(&self, tag: [u8; 8], pack: PackId) -> PathBuf {
        self.dir.join("packs").join(file_name(tag, pack))
    }
    pub(crate) fn manifests_dir(&self) -> PathBuf {
        self.dir.join("manifests")
    }
    pub(crate) fn manifest(&self, id: &str) -> PathBuf {
        self.dir.join("manifests").join(id)
    }

    /// The ids under which something lies in `manifests`. Other files there are not ours.
    pub(crate) fn ids(&self) -> Result<Vec<String>> {
        let mut ids = names(&self.manifests_dir())?;
        ids.retain(|name| check_id(name).is_ok());
        ids.sort_unstable();
        Ok(ids)
    }

    pub(crate) fn packs(&self) -> Result<Vec<([u8; 8], PackId)>> {
        let names = names(&self.packs_dir())?;
        Ok(names.iter().filter_map(|name| parse_file_name(name)).collect())
    }

    /// Reads the settings, or makes them for a vault that is new, and compares the key with the one that is expected.
    pub(crate) fn secrets(&self, key: Option<VaultKey>) -> Result<Secrets> {
        let path = self.dir.join("vault.json");
        let damaged = || {
            Error::damaged(format!(
                "`{}`, without which nothing that is saved can be read, ",
                path.display()
            ))
        };
        let mut settings = match fs::read(&path) {
            Ok(text) => {
                let settings: Settings = serde_json::from_slice(&text).map_err(|_| damaged())?;
                if settings.checksum != settings.sum() || settings.version != VERSION {
                    return Err(damaged());
                }
                settings
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // A new secret beside old packs would only make them unreadable for good.
                if !names(&self.packs_dir())?.is_empty() || !names(&self.manifests_dir())?.is_empty() {
                    return Err(damaged());
                }
                Settings {
                    version: VERSION,
                    secret: hex::encode(random::<32>()?),
                    key_check: None,
                    checksum: String::new(),
                }
            }
            Err(error) => return Err(Error::io(error, "read", &path)),
        };
        match (&settings.key_check, &key) {
            (Some(_), None) => return Err(Error::KeyMissing),
            (Some(check), Some(key)) if *check != key.check_value() => return Err(Error::WrongKey),
            (None, Some(key)) => settings.key_check = Some(key.check_value()),
            _ => {}
        }
        let sum = settings.sum();
        if settings.checksum != sum {
            settings.checksum = sum;
            let text = serde_json::to_vec_pretty(&settings).map_err(|_| damaged())?;
            self.replace(&path, &text)?;
        }
        let mut secret = [0; 32];
        hex::decode_to_slice(&settings.secret, &mut secret).map_err(|_| damaged())?;
        Ok(Secrets::new(secret, key))
    }

    fn replace(&self, path: &Path, data: &[u8]) -> Result<()> {
        let tmp = self.tmp("vault.json");
        let file = create(&tmp)?;
        (&file).write_all(data).doing("write", &tmp)?;
        file.sync_all().doing("sync", &tmp)?;
        fs::rename(&tmp, path).doing("rename", &tmp)?;
        sync_dir(&self.dir)
    }
}

/// Makes a file that is new and nobody else's business.
pub(crate) fn create(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).doing("make", path)
}

/// Makes a file without a name in a directory, where it may get one later. `None` where the filesystem has no such files.
pub(crate) fn unnamed(dir: &Path) -> Result<Option<File>> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match open(dir, flags, Mode::RUSR | Mode::WUSR) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Ok(None),
        other => Ok(Some(other.doing("make a file in", dir)?.into())),
    }
}

/// Where an open file can be found as long as it is open.
fn itself(file: &File) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// The same file, opened once more: to be read, or to be read and written.
pub(crate) fn reopen(file: &File, write: bool) -> Result<File> {
    let path = itself(file);
    let mut options = OpenOptions::new();
    options.read(true).write(write).open(&path).doing("open", &path)
}

/// Gives a file without a name one.
pub(crate) fn give_name(file: &File, path: &Path) -> Result<()> {
    linkat(CWD, itself(file), CWD, path, AtFlags::SYMLINK_FOLLOW).doing("name", path)
}

pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).doing("list", dir)? {
        let entry = entry.doing("list", dir)?;
        // No file of ours has a name that is not text.
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// Removes a file; that there is none is fine.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(error, "remove", path)),
        _ => Ok(()),
    }
}

pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let dir = File::open(path).doing("open", path)?;
    dir.sync_all().doing("sync", path)
}

/// The bytes that a file takes on the disk, holes not counted. None when there is no such file.
pub(crate) fn allocated(path: &Path) -> Result<u64> {
    match fs::metadata(path) {
        Ok(data) => Ok(data.blocks() * 512),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(Error::io(error, "look at", path)),
    }
}

/// How many bytes of `from..to` are not holes. Where the filesystem cannot tell, all of them.
pub(crate) fn data_between(file: &File, from: u64, to: u64) -> u64 {
    let (mut at, mut data) = (from, 0);
    while at < to {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.max(at),
            Err(Errno::NXIO) => break,
            Err(_) => return to - from,
        };
        if start >= to {
            break;
        }
        let end = seek(file, SeekFrom::Hole(start))
            .unwrap_or(to)
            .clamp(start + 1, to);
        data += end - start;
        at = end;
    }
    data
}

/// Gives the bytes of `from..to` back; what lies in blocks shared with others is zeroed.
pub(crate) fn punch(file: &File, from: u64, to: u64, path: &Path) -> Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, flags, from, to - from).doing("punch a hole into", path)
}

pub(crate) fn check_id(id: &str) -> Result<()> {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    check(
        "id",
        id,
        id.len() <= 64 && id.bytes().all(fine),
        "use 1 to 64 of a-z, A-Z, 0-9, `_` and `-`",
    )
}

pub(crate) fn check_domain(domain: &str) -> Result<()> {
    check("domain", domain, domain.len() <= 255, "use 1 to 255 bytes")
}

pub(crate) fn check_stream(name: &str) -> Result<()> {
    check("stream name", name, name.len() <= 255, "use 1 to 255 bytes")
}

fn check(what: &'static str, name: &str, fine: bool, rule: &'static str) -> Result<()> {
    if fine && !name.is_empty() {
        return Ok(());
    }
    let name = name.chars().take(80).flat_map(char::escape_debug).collect();
    Err(Error::BadName { what, name, rule })
}

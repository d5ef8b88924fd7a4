//! The data directory: who owns it now, and what is where.
//!
//! ```text
//! <data>/lock            flock: one server at a time; holds that server's pid
//! <data>/server.json     where the running server listens; the CLI looks here
//! <data>/admin.key       the first key, mode 0600, so that the local CLI just works
//! <data>/atoll.db        rows and ledger
//! <data>/workflows.db    workflows and their histories
//! <data>/templates/      images and their manifests (may be shared: --templates)
//! <data>/artifacts/      what was saved by name
//! <data>/instances/      one directory per running instance
//! <data>/packages/       where Debian packages are being installed for a template
//! <data>/bin/<digest>/   the guest agent, its image and the jailer that this binary carries
//! <data>/embedded/<pid>/ data of an `atoll run` that found the directory taken by another `atoll run`
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use atoll_client::local::{ServerFile, read_admin_key};
use atoll_client::output::{Doing, Error, Result};
use atoll_helper::front::{Helper, Kept};
use rustix::fs::{FlockOperation, flock};

/// A data directory that this process owns until it drops this.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    _lock: File,
    /// Who writes into the directory itself, where this process may not.
    helper: Option<Helper>,
}

/// Why a data directory could not be had.
#[derive(Debug)]
pub(crate) enum Taken {
    /// A live process owns it.
    By {
        pid: String,
    },
    Failed(Error),
}

impl DataDir {
    /// Creates the directory if need be and takes it.
    pub(crate) fn take(path: &Path) -> std::result::Result<Self, Taken> {
        let failed = |what: &str, error: std::io::Error| {
            let hint = match error.kind() {
                std::io::ErrorKind::PermissionDenied => {
                    "run as root, or choose another directory with --data"
                }
                _ => "choose another directory with --data",
            };
            Taken::Failed(Error::new(format!("{what} {}: {error}", path.display())).hint(hint))
        };
        fs::create_dir_all(path).map_err(|e| failed("cannot create the data directory", e))?;
        let path = path
            .canonicalize()
            .map_err(|e| failed("cannot find the data directory", e))?;
        // Keys and secrets are in it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711))
            .map_err(|e| failed("cannot own the data directory", e))?;
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(|e| failed("cannot open the lock in", e))?;
        if !lock_soon(&lock) {
            let mut pid = String::new();
            let _unreadable = lock.read_to_string(&mut pid);
            return Err(Taken::By {
                pid: pid.trim().to_owned(),
            });
        }
        let write_pid = |lock: &mut File| {
            lock.set_len(0)?;
            writeln!(lock, "{}", std::process::id())
        };
        write_pid(&mut lock).map_err(|e| failed("cannot write the lock in", e))?;
        Ok(Self {
            path,
            _lock: lock,
            helper: None,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// From now on the helper writes into the directory itself.
    pub(crate) fn kept_by(&mut self, helper: Helper) {
        self.helper = Some(helper);
    }

    fn keep(&self, what: Kept, name: &str, bytes: &[u8], mode: u32) -> Result<()> {
        match &self.helper {
            Some(helper) => helper
                .keep(what, bytes.to_vec())
                .doing(format_args!("cannot write {name}")),
            None => write_whole(&self.path.join(name), bytes, mode),
        }
    }

    /// Lets the CLI find this server.
    pub(crate) fn announce(&self, server: &ServerFile) -> Result<()> {
        let text = serde_json::to_vec(server).doing("cannot write server.json")?;
        self.keep(Kept::ServerFile, "server.json", &text, 0o644)
    }

    /// Takes the announcement back.
    pub(crate) fn retire(&self) {
        match &self.helper {
            Some(helper) => helper.retire(),
            None => drop(fs::remove_file(self.path.join("server.json"))),
        }
    }

    pub(crate) fn admin_key(&self) -> Option<String> {
        read_admin_key(&self.path)
    }

    pub(crate) fn keep_admin_key(&self, secret: &str) -> Result<()> {
        self.keep(
            Kept::AdminKey,
            "admin.key",
            format!("{secret}\n").as_bytes(),
            0o600,
        )
    }
}

/// Takes the lock, waiting a moment for a server that was just killed: its helper dies with it, but not before the kernel
/// has finished what it was told last, such as to take a network apart; a child that was between fork and exec likewise.
fn lock_soon(lock: &File) -> bool {
    const TRIES: u32 = 200;
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        if flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
    }
    false
}

impl Taken {
    /// For a caller who cannot go on without the directory.
    pub(crate) fn into_error(self, path: &Path) -> Error {
        match self {
            Self::Failed(error) => error,
            Self::By { pid } => Error::new(format!(
                "the data directory {} is in use by another atoll server (pid {pid})",
                path.display()
            ))
            .hint(format!(
                "stop it (kill {pid}), or give this one its own directory with --data"
            )),
        }
    }
}

/// Writes a file so that readers see the old one or the new one, never half of it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(&part)?;
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        drop(file);
        fs::rename(&part, path)
    };
    write().doing(format_args!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use atoll_client::local::running_server;

    use super::*;

    #[test]
    fn one_owner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let first = DataDir::take(&path).unwrap();
        match DataDir::take(&path) {
            Err(Taken::By { pid }) => assert_eq!(pid, std::process::id().to_string()),
            other => panic!("{other:?}"),
        }
        drop(first);
        DataDir::take(&path).unwrap();
    }

    #[test]
    fn the_admin_key_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::take(dir.path()).unwrap();
        assert_eq!(data.admin_key(), None);
        data.keep_admin_key("secret").unwrap();
        assert_eq!(data.admin_key().as_deref(), Some("secret"));
        let mode = fs::metadata(dir.path().join("admin.key"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_dead_server_is_not_running() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::take(dir.path()).unwrap();
        let me = ServerFile {
            url: "http://127.0.0.1:1".into(),
            pid: std::process::id(),
            embedded: false,
            workflows: None,
            tls: None,
        };
        data.announce(&me).unwrap();
        assert!(running_server(dir.path()).is_some());
        data.announce(&ServerFile {
            pid: 0x7fff_fff0,
            ..me
        })
        .unwrap();
        assert!(running_server(dir.path()).is_none());
    }
}

//! A directory for the work of one build. It is locked by an open file: after a crash the lock is free, and whoever
//! opens the store next removes the directory, and ends the program that the build had started if it still runs. The
//! lock file says which: its process id and when it started, since ids are used again.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext, Result};

/// What begins the name of a file that stands for an image; its digest follows.
const HOLDS: &str = "holds-";

#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    lock_path: PathBuf,
    lock: File,
}

impl Scratch {
    /// The caller holds the store's lock.
    pub(super) fn new(parent: &Path) -> Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| Error::Invalid(format!("no randomness: {error}")))?;
        let name = hex::encode(random);
        // The lock exists and is held before the directory does, so an abandoned one is always recognized.
        let lock_path = parent.join(format!("{name}.lock"));
        let lock = File::create(&lock_path).doing("make", &lock_path)?;
        lock.lock().doing("lock", &lock_path)?;
        let path = parent.join(name);
        fs::create_dir(&path).doing("make", &path)?;
        Ok(Self {
            path,
            lock_path,
            lock,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Remembers an image that must not go before this directory does. The caller holds the store's lock.
    pub(super) fn hold(&self, digest: &str) -> Result<()> {
        let path = self.path.join(format!("{HOLDS}{digest}"));
        File::create(&path).doing("make", &path).map(drop)
    }

    /// Remembers a program, the leader of its process group, that must not outlive this directory.
    pub(crate) fn owns_process(&self, pid: u32) -> Result<()> {
        match started_at(pid) {
            Some(start) => (&self.lock)
                .write_all(format!("{pid} {start}\n").as_bytes())
                .doing("write", &self.lock_path),
            None => Ok(()), // it is gone already
        }
    }
}

/// When a process started, in ticks since boot.
fn started_at(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in the second field may hold anything, a parenthesis too.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Ends a process group. Root's programs run in namespaces of their own, which go with them: they can be killed.
/// Others must be told, since only they can remove what they made in their user namespace.
pub(crate) fn end_group(leader: u32) {
    use rustix::process::{Pid, Signal, geteuid, kill_process_group};
    let signal = if geteuid().is_root() {
        Signal::KILL
    } else {
        Signal::TERM
    };
    if let Some(group) = i32::try_from(leader).ok().and_then(Pid::from_raw) {
        let _already_gone = kill_process_group(group, signal);
    }
}

/// Removes a directory that a program being killed may still write to.
fn remove_busy_dir(path: &Path) -> std::io::Result<()> {
    let mut tries = 0;
    loop {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(_) if tries < 40 => {
                tries += 1;
                std::thread::sleep(std::time::Duration::from_millis(25));
            }
            other => return other,
        }
    }
}

/// Ends the process groups named in a lock file to end.
fn end_processes(lock_path: &Path) {
    let text = fs::read_to_string(lock_path).unwrap_or_default();
    for line in text.lines() {
        let Some((pid, start)) = line.split_once(' ') else {
            continue;
        };
        let (Ok(pid), Ok(start)) = (pid.parse::<u32>(), start.parse::<u64>()) else {
            continue;
        };
        if started_at(pid) == Some(start) {
            tracing::info!(pid, "ending a program that an interrupted build left running");
            end_group(pid);
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let removed = remove_busy_dir(&self.path).and_then(|()| fs::remove_file(&self.lock_path));
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "a build's directory stays until the store is opened again");
        }
    }
}

/// The images that builds under way hold. One that has died meanwhile still holds its own: they go a little later.
pub(super) fn held(parent: &Path) -> Result<Vec<String>> {
    let mut held = Vec::new();
    for build in fs::read_dir(parent).doing("list", parent)? {
        let build = build.doing("list", parent)?.path();
        // A build may end at any moment, without the lock.
        for file in fs::read_dir(&build).into_iter().flatten().flatten() {
            let name = file.file_name().into_string().unwrap_or_default();
            held.extend(name.strip_prefix(HOLDS).map(str::to_owned));
        }
    }
    Ok(held)
}

/// The caller holds the store's lock, under which directories are made too: so a free lock means a dead owner.
pub(super) fn remove_abandoned(parent: &Path) -> Result<()> {
    for entry in fs::read_dir(parent).doing("list", parent)? {
        let path = entry.doing("list", parent)?.path();
        let lock_path = match path.extension() {
            Some(extension) if extension == "lock" => path.clone(),
            _ => path.with_extension("lock"),
        };
        let lock = match File::options().write(true).open(&lock_path) {
            Ok(lock) => Some(lock),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).doing("open", &lock_path),
        };
        match lock.as_ref().map(File::try_lock) {
            Some(Err(TryLockError::WouldBlock)) => continue, // somebody builds there
            Some(Err(TryLockError::Error(error))) => return Err(error).doing("lock", &lock_path),
            Some(Ok(())) | None => {}
        }
        let dir = lock_path.with_extension("");
        end_processes(&lock_path);
        tracing::info!(path = %dir.display(), "removing what an interrupted build left");
        let removed = remove_busy_dir(&dir).and_then(|()| match fs::remove_file(&lock_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        });
        if let Err(error) = removed {
            tracing::warn!(path = %dir.display(), %error, "what an interrupted build left cannot be removed");
        }
    }
    Ok(())
}

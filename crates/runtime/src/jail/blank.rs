//! Files with an empty ext4 filesystem, for writable layers on disk.
//!
//! Formatting takes tens of milliseconds, so it is done once per size; an instance gets a copy of the few blocks that
//! were written. The rest is a hole: disk space is used as the guest fills it, and never beyond the file's size.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::SeekFrom;

use super::ABANDONED;
use crate::Told;
use crate::instance_dir::age;

/// The smallest that is worth formatting.
const LEAST: u64 = 8 << 20;

#[derive(Debug)]
pub(super) struct Blanks {
    dir: PathBuf,
}

impl Blanks {
    pub(super) fn open(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join("jail").join("blank");
        fs::create_dir_all(&dir)?;
        for entry in fs::read_dir(&dir)?.flatten() {
            if entry.path().extension().is_none_or(|kind| kind != "ext4") && age(&entry.path()) > ABANDONED {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(Self { dir })
    }

    /// Makes `file`. Blocks.
    pub(super) fn copy_to(&self, file: &Path, bytes: u64) -> io::Result<()> {
        let bytes = bytes.max(LEAST).next_multiple_of(4096);
        let blank = self.dir.join(format!("{bytes}.ext4"));
        if !blank.exists() {
            format(&blank, bytes)?;
        }
        copy_sparse(&blank, file)
    }
}

fn format(blank: &Path, bytes: u64) -> io::Result<()> {
    // Several may do this at once; the last one to finish wins, and all are alike.
    let unfinished = tempname(blank)?;
    let made = (|| {
        File::create_new(&unfinished)?.set_len(bytes)?;
        // No journal: nothing survives a crash of the machine anyway. Nothing reserved for root. The file reads as
        // zeros, so there is nothing to discard or initialize.
        let output = Command::new("mkfs.ext4")
            .args([
                "-q",
                "-F",
                "-b",
                "4096",
                "-m",
                "0",
                "-i",
                "8192",
                "-O",
                "^has_journal,^resize_inode",
            ])
            .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0"])
            .arg(&unfinished)
            .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
            .output()
            .map_err(|error| {
                let hint = "mkfs.ext4 is needed for a writable layer on disk; install e2fsprogs";
                io::Error::new(error.kind(), format!("{hint}: {error}"))
            })?;
        if !output.status.success() {
            let complaint = String::from_utf8_lossy(&output.stderr);
            return Err(Told::by_host(&format!("mkfs.ext4 failed: {}", complaint.trim())).into());
        }
        fs::rename(&unfinished, blank)
    })();
    if made.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    made
}

fn tempname(path: &Path) -> io::Result<PathBuf> {
    let number = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
    Ok(path.with_extension(format!("{number:016x}")))
}

fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let from = File::open(from)?;
    let to = File::create_new(to)?;
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(&from, SeekFrom::Hole(start))?;
        copy_range(&from, &to, start..at)?;
    }
    Ok(())
}

fn copy_range(from: impl AsFd, to: impl AsFd, range: std::ops::Range<u64>) -> io::Result<()> {
    let (mut read, mut write) = (range.start, range.start);
    while read < range.end {
        let wanted = usize::try_from(range.end - read).unwrap_or(usize::MAX);
        if rustix::fs::copy_file_range(&from, Some(&mut read), &to, Some(&mut write), wanted)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_copy_has_the_size_asked_for_and_hardly_any_blocks() {
        let state = tempfile::tempdir().unwrap();
        let blanks = Blanks::open(state.path()).unwrap();
        for name in ["a", "b"] {
            let file = state.path().join(name);
            blanks.copy_to(&file, 1 << 30).unwrap();
            let metadata = fs::metadata(&file).unwrap();
            assert_eq!(metadata.len(), 1 << 30);
            assert!(
                metadata.blocks() * 512 < 16 << 20,
                "{} bytes in use",
                metadata.blocks() * 512
            );
        }
        assert_eq!(fs::read_dir(&blanks.dir).unwrap().count(), 1);
    }
}

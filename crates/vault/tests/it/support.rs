//! A vault of one's own, data without a pattern, and short ways to save and read.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use atoll_vault::{Saved, Vault};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

pub(crate) struct Context {
    pub(crate) vault: Vault,
    pub(crate) directory: tempfile::TempDir,
}

impl Context {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let vault = Vault::open(directory.path(), None).unwrap();
        Self { vault, directory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Closes the vault and opens it again.
    pub(crate) fn reopen(self) -> Self {
        let Self { vault, directory } = self;
        drop(vault);
        let vault = Vault::open(directory.path(), None).unwrap();
        Self { vault, directory }
    }
}

pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for part in out.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        part.copy_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()[..part.len()]);
    }
    out
}

/// Saves one stream, `data`, from a reader.
pub(crate) fn save(vault: &Vault, id: &str, domain: &str, data: &[u8]) -> Saved {
    let save = vault.begin(id, domain).unwrap();
    save.file("data", &mut &*data).unwrap();
    save.finish(b"meta".to_vec(), false).unwrap()
}

/// For a save that makes its file itself.
pub(crate) fn nowhere() -> std::io::Result<File> {
    Err(std::io::Error::other("nobody should ask for this file"))
}

/// Saves one stream, `data`, through a file that grows.
pub(crate) fn save_grown(vault: &Vault, id: &str, domain: &str, data: &[u8]) -> Saved {
    let save = vault.begin(id, domain).unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    for piece in data.chunks(300_000) {
        file.write_all(piece).unwrap();
    }
    drop(file);
    growing.finish().unwrap();
    save.finish(b"meta".to_vec(), false).unwrap()
}

pub(crate) fn load(vault: &Vault, id: &str) -> atoll_vault::Result<Vec<u8>> {
    load_stream(vault, id, "data")
}

/// Both ways to read must agree.
pub(crate) fn load_stream(vault: &Vault, id: &str, name: &str) -> atoll_vault::Result<Vec<u8>> {
    let opened = vault.open_saved(id)?;
    let mut file = tempfile::tempfile().unwrap();
    // What was there before must not shine through.
    file.write_all(&[0xff; 100_000]).unwrap();
    let len = opened.read_to(name, &file)?;
    file.rewind().unwrap();
    let (mut one, mut other) = (Vec::new(), Vec::new());
    file.read_to_end(&mut one).unwrap();
    assert_eq!(opened.write_to(name, &mut other).unwrap(), len);
    assert_eq!(one.len() as u64, len);
    assert!(one == other, "the two ways to read differ");
    Ok(one)
}

/// The files in a directory of the vault, sorted.
pub(crate) fn files(dir: &Path, part: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir.join(part)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

pub(crate) fn write_pipe(pipe: std::os::fd::OwnedFd, data: &[u8]) -> std::io::Result<()> {
    File::from(pipe).write_all(data)
}

//! A disk that is full at any point: an error that says so, nothing half-made, everything else intact. Needs root, for a small
//! filesystem of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use atoll_vault::{Error, Vault};

use crate::support::{KIB, MIB, files, load, noise, nowhere, save, write_pipe};

/// A small tmpfs, unmounted when dropped.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn mount(bytes: usize) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={bytes},mode=0700");
        let mut mount = Command::new("mount");
        let mount = mount
            .args(["-t", "tmpfs", "-o", &size, "vault-test"])
            .arg(dir.path());
        if mount.status().is_ok_and(|status| status.success()) {
            Some(Self { dir })
        } else {
            println!("skipped: cannot mount a tmpfs here");
            None
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("vault")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}

fn used(dir: &Path) -> (Vec<PathBuf>, Vec<PathBuf>, Vec<PathBuf>) {
    (files(dir, "tmp"), files(dir, "packs"), files(dir, "manifests"))
}

#[test]
fn a_full_disk_is_said_and_costs_nothing() {
    let Some(small) = Small::mount(8 * MIB) else {
        return;
    };
    let vault = Vault::open(small.path(), None).unwrap();
    let data = noise(1, 3 * MIB);
    save(&vault, "a", "prj", &data);
    let before = used(&small.path());

    // From a pipe, whose writer learns it by EPIPE and the caller by asking.
    let big = vault.begin("big", "prj").unwrap();
    let pipe = big.stream("data").unwrap();
    let error = write_pipe(pipe, &noise(2, 32 * MIB)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    let why = big.abort();
    assert!(matches!(why, Some(Error::Full { .. })), "{why:?}");
    assert_eq!(used(&small.path()), before);
    // From a reader.
    let big = vault.begin("big", "prj").unwrap();
    let error = big.file("data", &mut &noise(2, 32 * MIB)[..]).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(big.finish(vec![], true).is_err());
    assert_eq!(used(&small.path()), before);

    // Into a file that was to become the pack: there the writer is told.
    let big = vault.begin("big", "prj").unwrap();
    let (file, growing) = big.grow("data", nowhere).unwrap();
    let error = write_pipe(file.into(), &noise(2, 32 * MIB)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    drop(growing);
    assert!(big.abort().is_none());
    assert_eq!(used(&small.path()), before);

    // At every point between nothing fits and all fits, the making of manifest and files included.
    let filler = small.dir.path().join("filler");
    let changed = noise(3, 400 * KIB);
    let (mut refused, mut done) = (0, 0);
    let free = 8 * MIB - 3 * MIB - 64 * KIB;
    for left in (0..600 * KIB).step_by(4 * KIB) {
        std::fs::remove_file(&filler).ok();
        // Fills what there is, then leaves so much.
        let mut room = free;
        while room > 0 && std::fs::write(&filler, vec![1; room]).is_err() {
            room -= 4 * KIB;
        }
        std::fs::OpenOptions::new()
            .write(true)
            .open(&filler)
            .unwrap()
            .set_len((room - left.min(room)) as u64)
            .unwrap();
        let id = format!("s{left}");
        let result = vault.begin(&id, "prj").and_then(|save| {
            save.file("data", &mut &data[..])?;
            save.file("more", &mut &changed[..])?;
            save.finish(vec![7; 20 * KIB], left % 8192 == 0)
        });
        match result {
            Ok(_) => {
                done += 1;
                vault.delete(&id).unwrap();
            }
            Err(Error::Full { .. }) => refused += 1,
            Err(error) => panic!("{left} bytes left: {error}"),
        }
        assert!(!vault.contains(&id));
        vault.gc(&|_| true, false).unwrap();
        assert_eq!(used(&small.path()), before, "{left} bytes left");
    }
    assert!(refused > 50 && done > 20, "refused {refused}, done {done}");
    std::fs::remove_file(&filler).unwrap();
    assert!(load(&vault, "a").unwrap() == data);
    drop(vault);
    let vault = Vault::open(small.path(), None).unwrap();
    assert!(vault.damaged().is_empty());
    assert!(load(&vault, "a").unwrap() == data);
}

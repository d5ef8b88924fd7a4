//! Packs that are lent to whoever reads a stream, rather than copied for it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use atoll_vault::{Error, Vault, VaultKey};

use crate::support::{Context, KIB, MIB, files, load, noise, save, save_grown};

fn lend(vault: &Vault, id: &str) -> Option<File> {
    vault.open_saved(id).unwrap().lend("data").unwrap()
}

/// As long as the stream is.
fn contents(file: &File, len: usize) -> Vec<u8> {
    let mut data = Vec::new();
    file.take(len as u64).read_to_end(&mut data).unwrap();
    data
}

#[test]
fn what_lies_as_it_was_written_is_lent_to_be_read() {
    let context = Context::new();
    let data = [noise(1, 3 * MIB + 700), vec![0; 2 * MIB], noise(2, MIB)].concat();
    save_grown(&context.vault, "a", "prj", &data);
    let lent = lend(&context.vault, "a").unwrap();
    let pack = files(context.path(), "packs").remove(0);
    assert_eq!(fs::metadata(&pack).unwrap().ino(), lent.metadata().unwrap().ino());
    assert!(contents(&lent, data.len()) == data);
    assert!((&lent).write(b"x").is_err(), "it is to be read only");

    // A copy refers to the same chunks.
    context.vault.copy("a", "b").unwrap();
    assert!(lend(&context.vault, "b").is_some());
    // What shares most, or has another order, lies elsewhere: in a pack with what is another's.
    save_grown(&context.vault, "c", "prj", &data);
    save_grown(&context.vault, "d", "prj", &[noise(3, 4 * MIB), data].concat());
    for id in ["c", "d"] {
        assert!(lend(&context.vault, id).is_none(), "{id}");
        load(&context.vault, id).unwrap();
    }
}

#[test]
fn what_little_lies_elsewhere_is_put_back_for_as_long_as_it_is_lent() {
    let context = Context::new();
    let known = noise(1, MIB);
    save(&context.vault, "a", "prj", &known);
    let data = [noise(2, 6 * MIB), known, noise(3, 6 * MIB)].concat();
    save_grown(&context.vault, "b", "prj", &data);
    let pack = files(context.path(), "packs");
    let pack = pack
        .iter()
        .max_by_key(|path| fs::metadata(path).unwrap().len())
        .unwrap();
    let size = || fs::metadata(pack).unwrap().blocks() * 512;
    let alone = size();
    assert!(
        alone < (13 * MIB - 500 * KIB) as u64,
        "what is known is not stored again"
    );

    let lent = lend(&context.vault, "b").unwrap();
    assert!(contents(&lent, data.len()) == data);
    let filled = size() - alone;
    assert!(filled > 0);
    // Of two who borrow it neither loses anything.
    let also = lend(&context.vault, "b").unwrap();
    drop(lent);
    let report = context.vault.gc(&|_| true, false).unwrap();
    assert_eq!((report.bytes, report.kept_bytes), (0, filled));
    assert!(contents(&also, data.len()) == data);
    drop(also);
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().bytes, filled);
    assert_eq!(size(), alone);
    context.vault.delete("a").unwrap();
    context.vault.gc(&|_| true, false).unwrap();
    assert!(load(&context.reopen().vault, "b").unwrap() == data);
}

#[test]
fn what_is_sealed_is_not_lent() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::open(directory.path(), Some(VaultKey::new([5; 32]))).unwrap();
    save(&vault, "a", "prj", &noise(1, 4 * MIB));
    assert!(lend(&vault, "a").is_none());
}

#[test]
fn damage_is_noticed_before_it_is_lent() {
    let context = Context::new();
    let data = [noise(1, MIB), vec![0; MIB], noise(2, MIB)].concat();
    save_grown(&context.vault, "a", "prj", &data);
    let pack = files(context.path(), "packs").remove(0);
    let pack = File::options().write(true).open(pack).unwrap();
    // Where the stream has zeros: it is not as it was written any more, and what is copied is.
    pack.write_all_at(b"x", MIB as u64 + 300_000).unwrap();
    assert!(lend(&context.vault, "a").is_none());
    assert!(load(&context.vault, "a").unwrap() == data);
    pack.write_all_at(b"damage", 2 * MIB as u64 + 300_000).unwrap();
    pack.write_all_at(&[0], MIB as u64 + 300_000).unwrap();
    let opened = context.vault.open_saved("a").unwrap();
    assert!(matches!(opened.lend("data"), Err(Error::Damaged { .. })));
    pack.set_len(MIB as u64).unwrap();
    assert!(matches!(
        opened.lend("data"),
        Ok(None) | Err(Error::Damaged { .. })
    ));
}

/// Whoever borrowed it reads on when the save is forgotten, half of it is somebody else's, and the vault was opened anew.
#[test]
fn a_collection_leaves_alone_what_somebody_reads() {
    let context = Context::new();
    let data = noise(1, 8 * MIB);
    save_grown(&context.vault, "a", "prj", &data);
    save(&context.vault, "b", "prj", &data[..2 * MIB]);
    let lent = lend(&context.vault, "a").unwrap();
    context.vault.delete("a").unwrap();
    let context = context.reopen();
    let dry = context.vault.gc(&|_| true, true).unwrap();
    let report = context.vault.gc(&|_| true, false).unwrap();
    assert_eq!(report, dry);
    assert_eq!((report.bytes, report.holes), (0, 0));
    assert!(report.kept_bytes >= (6 * MIB - 600 * KIB) as u64, "{report:?}");
    assert!(contents(&lent, data.len()) == data);
    drop(lent);
    let report = context.vault.gc(&|_| true, false).unwrap();
    assert!(report.bytes >= (6 * MIB - 600 * KIB) as u64, "{report:?}");
    assert!(load(&context.vault, "b").unwrap() == data[..2 * MIB]);

    // One that nobody refers to loses its name, and is there until it was read.
    save_grown(&context.vault, "c", "prj", &noise(3, 4 * MIB));
    let lent = lend(&context.vault, "c").unwrap();
    context.vault.delete("c").unwrap();
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().packs, 1);
    assert!(contents(&lent, 4 * MIB) == noise(3, 4 * MIB));
}

//! Encryption at rest.

use atoll_vault::{Error, Vault, VaultKey};

use crate::support::{KIB, MIB, files, load, noise, save};

fn key(byte: u8) -> Option<VaultKey> {
    Some(VaultKey::new([byte; 32]))
}

/// Whether `needle` is anywhere on the vault's disk.
fn on_disk(dir: &std::path::Path, needle: &[u8]) -> bool {
    ["packs", "manifests", "tmp"].iter().any(|part| {
        files(dir, part).iter().any(|file| {
            let data = std::fs::read(file).unwrap();
            data.windows(needle.len()).any(|window| window == needle)
        })
    })
}

#[test]
fn nothing_reaches_the_disk_in_plain_and_only_the_key_opens_it() {
    let dir = tempfile::tempdir().unwrap();
    let data = noise(1, 5 * MIB + 100);
    {
        let vault = Vault::open(dir.path(), key(1)).unwrap();
        let running = vault.begin("b", "prj").unwrap();
        running.file("data", &mut &data[..]).unwrap();
        assert!(
            !on_disk(dir.path(), &data[2 * MIB..2 * MIB + 24]),
            "while it is being written"
        );
        drop(running);
        save(&vault, "a", "prj", &data);
        assert!(load(&vault, "a").unwrap() == data);
        assert!(save(&vault, "again", "prj", &data).stored_bytes < 8 * KIB as u64);
    }
    for at in [0, 70_000, 5 * MIB] {
        assert!(!on_disk(dir.path(), &data[at..at + 24]), "plain bytes at {at}");
    }
    assert!(!on_disk(dir.path(), b"meta"));
    assert!(matches!(Vault::open(dir.path(), None), Err(Error::KeyMissing)));
    assert!(matches!(Vault::open(dir.path(), key(2)), Err(Error::WrongKey)));
    let vault = Vault::open(dir.path(), key(1)).unwrap();
    assert!(load(&vault, "a").unwrap() == data);
    assert!(vault.damaged().is_empty());
}

#[test]
fn a_plain_vault_can_be_given_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let data = noise(1, 2 * MIB);
    let marker = &data[MIB..MIB + 24];
    let vault = Vault::open(dir.path(), None).unwrap();
    save(&vault, "old", "prj", &data);
    drop(vault);
    assert!(on_disk(dir.path(), marker), "the test looks in the wrong place");
    let vault = Vault::open(dir.path(), key(1)).unwrap();
    assert!(load(&vault, "old").unwrap() == data);
    // Not shared with what is plain: otherwise the plain bytes would stay for as long as the new save does.
    assert!(save(&vault, "new", "prj", &data).stored_bytes > 2 * MIB as u64);
    assert!(save(&vault, "newer", "prj", &data).stored_bytes < 4 * KIB as u64);
    vault.delete("old").unwrap();
    vault.gc(&|_| true, false).unwrap();
    assert!(!on_disk(dir.path(), marker));
    drop(vault);
    assert!(matches!(Vault::open(dir.path(), None), Err(Error::KeyMissing)));
    let vault = Vault::open(dir.path(), key(1)).unwrap();
    assert!(load(&vault, "new").unwrap() == data);
    assert!(load(&vault, "newer").unwrap() == data);
}

#[test]
fn a_sealed_chunk_that_was_changed_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let vault = Vault::open(dir.path(), key(1)).unwrap();
    save(&vault, "a", "prj", &noise(1, 100 * KIB));
    let pack = files(dir.path(), "packs").remove(0);
    let good = std::fs::read(&pack).unwrap();
    for at in [0, 50_000, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&pack, bad).unwrap();
        assert!(
            matches!(load(&vault, "a"), Err(Error::Damaged { .. })),
            "byte {at}"
        );
    }
    std::fs::write(&pack, good).unwrap();
    load(&vault, "a").unwrap();
}

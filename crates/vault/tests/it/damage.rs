//! Disks that lie.

use std::fs;

use atoll_vault::{Error, Vault};

use crate::support::{Context, KIB, MIB, files, load, noise, save};

#[test]
fn a_changed_byte_anywhere_in_a_pack_is_noticed() {
    let context = Context::new();
    let data = noise(1, 300 * KIB);
    save(&context.vault, "a", "prj", &data);
    let pack = files(context.path(), "packs").remove(0);
    let good = fs::read(&pack).unwrap();
    for at in (0..good.len()).step_by(9973).chain([good.len() - 1]) {
        let mut bad = good.clone();
        bad[at] ^= 4;
        fs::write(&pack, bad).unwrap();
        assert!(
            matches!(load(&context.vault, "a"), Err(Error::Damaged { .. })),
            "byte {at}"
        );
        assert!(matches!(
            context.vault.open_saved("a").unwrap().verify(),
            Err(Error::Damaged { .. })
        ));
    }
    for len in [0, good.len() - 1] {
        fs::write(&pack, &good[..len]).unwrap();
        assert!(
            matches!(load(&context.vault, "a"), Err(Error::Damaged { .. })),
            "cut to {len}"
        );
    }
    fs::write(&pack, good).unwrap();
    assert!(load(&context.vault, "a").unwrap() == data);
}

#[test]
fn nobody_shares_a_chunk_that_is_known_to_be_broken() {
    let context = Context::new();
    let data = noise(1, MIB);
    save(&context.vault, "a", "prj", &data);
    let pack = files(context.path(), "packs").remove(0);
    let mut bad = fs::read(&pack).unwrap();
    bad[500_000] ^= 4;
    fs::write(&pack, &bad).unwrap();
    assert!(load(&context.vault, "a").is_err());
    save(&context.vault, "b", "prj", &data);
    assert!(
        load(&context.vault, "b").unwrap() == data,
        "the chunk that was found broken is written anew"
    );

    // A pack that lost its end, or is gone, is found when the vault is opened.
    fs::write(&pack, &bad[..100_000]).unwrap();
    let context = context.reopen();
    save(&context.vault, "c", "prj", &data);
    assert!(load(&context.vault, "c").unwrap() == data);
    fs::remove_file(&pack).unwrap();
    assert!(matches!(load(&context.vault, "a"), Err(Error::Damaged { .. })));
    let context = context.reopen();
    save(&context.vault, "d", "prj", &data);
    assert!(load(&context.vault, "d").unwrap() == data);
}

#[test]
fn a_damaged_manifest_stops_the_collection_and_nothing_else() {
    let context = Context::new();
    let (one, two) = (noise(1, MIB), noise(2, MIB));
    for (id, data) in [("a", &one), ("b", &two), ("c", &noise(3, MIB))] {
        save(&context.vault, id, "prj", data);
    }
    let path = context.path().join("manifests/b");
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[50] ^= 1;
    fs::write(&path, &bad).unwrap();
    let context = context.reopen();
    let vault = &context.vault;
    assert_eq!(vault.damaged(), ["b"]);
    assert_eq!(vault.ids().unwrap(), ["a", "b", "c"]);
    assert!(matches!(vault.open_saved("b"), Err(Error::Damaged { .. })));
    assert!(load(vault, "a").unwrap() == one);

    vault.delete("c").unwrap();
    for dry_run in [true, false] {
        let report = vault.gc(&|_| true, dry_run).unwrap();
        assert_eq!(
            (report.blocked_by, report.packs, report.holes),
            (vec!["b".to_owned()], 0, 0)
        );
    }
    assert_eq!(
        files(context.path(), "packs").len(),
        3,
        "what b needs may be in any of them"
    );
    // Brought back from a backup, nothing of it is lost.
    fs::write(&path, &good).unwrap();
    assert!(load(vault, "b").unwrap() == two);
    assert_eq!(vault.gc(&|_| true, false).unwrap().packs, 1);
    assert!(vault.damaged().is_empty());
    // Or not live any more: then nobody has to read it.
    fs::write(&path, &bad).unwrap();
    let report = vault.gc(&|id| id != "b", false).unwrap();
    assert_eq!(
        (report.saves, report.packs, report.blocked_by.len()),
        (vec!["b".to_owned()], 1, 0)
    );
    assert!(load(vault, "a").unwrap() == one);
}

#[test]
fn settings_that_are_damaged_or_lost_are_never_made_anew_over_data() {
    let context = Context::new();
    save(&context.vault, "a", "prj", b"data");
    let Context { vault, directory } = context;
    drop(vault);
    let path = directory.path().join("vault.json");
    let good = fs::read(&path).unwrap();
    for at in 0..good.len() {
        // Changed so that it stays a digit if it was one.
        let mut bad = good.clone();
        bad[at] = if bad[at] == b'1' { b'2' } else { b'1' };
        fs::write(&path, &bad).unwrap();
        assert!(Vault::open(directory.path(), None).is_err(), "byte {at}");
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        Vault::open(directory.path(), None),
        Err(Error::Damaged { .. })
    ));
    fs::write(&path, &good).unwrap();
    assert_eq!(
        load(&Vault::open(directory.path(), None).unwrap(), "a").unwrap(),
        b"data"
    );
}

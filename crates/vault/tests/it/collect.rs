//! Collections: what goes, what stays, and who may be at work meanwhile.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use atoll_vault::{Error, Vault};

use crate::support::{Context, KIB, MIB, files, load, noise, nowhere, save, write_pipe};

#[test]
fn what_is_shared_stays_and_the_rest_is_given_back() {
    let context = Context::new();
    let vault = &context.vault;
    let common = noise(1, 8 * MIB);
    let (a, b) = (
        [&common[..], &noise(2, 8 * MIB)].concat(),
        [&common[..], &noise(3, 4 * MIB)].concat(),
    );
    save(vault, "a", "prj", &a);
    save(vault, "b", "prj", &b);
    save(vault, "c", "prj", &noise(4, 2 * MIB));
    let before = vault.usage().unwrap().bytes;

    let nothing = vault.gc(&|_| true, false).unwrap();
    assert_eq!((nothing.bytes, nothing.packs, nothing.holes), (0, 0, 0));
    let live = |id: &str| id == "b";
    let dry = vault.gc(&live, true).unwrap();
    assert_eq!(vault.usage().unwrap().bytes, before, "a dry run changes nothing");
    assert!(load(vault, "a").unwrap() == a);
    let done = vault.gc(&live, false).unwrap();
    assert_eq!(done, dry, "a dry run says what would be done");
    assert_eq!(
        (done.saves.clone(), done.packs),
        (vec!["a".to_owned(), "c".to_owned()], 1)
    );
    assert!(done.holes >= 1);
    let after = vault.usage().unwrap().bytes;
    // Up to two blocks of the filesystem's own for the map of a file with holes.
    assert!(
        before - after <= done.bytes && before - after + 8192 >= done.bytes,
        "{before} {after} {done:?}"
    );
    assert!(done.bytes >= (10 * MIB - 300 * KIB) as u64, "{done:?}");
    assert!(after <= (12 * MIB + 300 * KIB) as u64, "{after}");
    assert!(load(vault, "b").unwrap() == b);
    assert_eq!(
        vault.gc(&live, false).unwrap().bytes,
        0,
        "nothing is left to collect"
    );
    // What was punched is not offered any more.
    save(vault, "a", "prj", &a);
    assert!(load(vault, "a").unwrap() == a);

    let context = context.reopen();
    context.vault.gc(&|_| false, false).unwrap();
    assert!(files(context.path(), "packs").is_empty() && files(context.path(), "manifests").is_empty());
    assert_eq!(context.vault.usage().unwrap().bytes, 0);
}

#[test]
fn a_pack_that_no_manifest_knows_is_removed() {
    let context = Context::new();
    save(&context.vault, "a", "prj", &noise(1, MIB));
    save(&context.vault, "b", "prj", &noise(2, MIB));
    std::fs::remove_file(context.path().join("manifests/a")).unwrap();
    std::fs::write(context.path().join("manifests/not-ours.bak"), "x").unwrap();
    let context = context.reopen();
    let report = context.vault.gc(&|_| true, false).unwrap();
    assert_eq!((report.packs, report.bytes), (1, MIB as u64));
    load(&context.vault, "b").unwrap();
}

#[test]
fn a_save_under_way_keeps_what_it_shares() {
    let context = Context::new();
    let vault = &context.vault;
    let data = noise(1, 4 * MIB);
    save(vault, "a", "prj", &data);
    let running = vault.begin("b", "prj").unwrap();
    running.file("data", &mut &data[..2 * MIB]).unwrap();
    running.file("own", &mut &noise(2, MIB)[..]).unwrap();
    vault.delete("a").unwrap();
    let report = vault.gc(&|_| true, false).unwrap();
    assert!(
        report.bytes >= (2 * MIB - 300 * KIB) as u64 && report.packs == 0,
        "{report:?}"
    );
    // After the collection the rest is gone, so it is written anew.
    running.file("rest", &mut &data[2 * MIB..]).unwrap();
    running.finish(vec![], false).unwrap();
    assert!(load(vault, "b").unwrap() == data[..2 * MIB]);
    let opened = vault.open_saved("b").unwrap();
    opened.verify().unwrap();
    drop(opened);

    // One that is given up keeps nothing.
    let running = vault.begin("c", "prj").unwrap();
    running.file("data", &mut &data[..]).unwrap();
    vault.delete("b").unwrap();
    drop(running);
    vault.gc(&|_| true, false).unwrap();
    assert!(files(context.path(), "packs").is_empty());
}

#[test]
fn a_reader_reads_to_the_end_what_is_deleted_meanwhile() {
    let context = Context::new();
    let data = noise(1, 4 * MIB);
    save(&context.vault, "a", "prj", &data);
    let opened = context.vault.open_saved("a").unwrap();
    context.vault.delete("a").unwrap();
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().bytes, 0);
    let mut out = Vec::new();
    opened.write_to("data", &mut out).unwrap();
    assert!(out == data);
    drop(opened);
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().packs, 1);
}

#[test]
fn a_save_that_its_owner_has_not_noted_yet_is_not_taken_away() {
    let context = Context::new();
    let saved = save(&context.vault, "a", "prj", b"data");
    assert!(context.vault.gc(&|_| false, false).unwrap().saves.is_empty());
    assert_eq!(load(&context.vault, "a").unwrap(), b"data");
    drop(saved);
    assert_eq!(context.vault.gc(&|_| false, false).unwrap().saves, ["a"]);
}

/// Savers that share much, deleters and a collector that never rests. Whatever was acknowledged and not deleted reads back.
#[test]
fn saves_deletes_and_collections_at_once() {
    const ROUNDS: u64 = 25;
    let context = Context::new();
    let vault: &Vault = &context.vault;
    let busy = AtomicBool::new(true);
    let collections = AtomicU64::new(0);
    // Many saves have the same parts, so what one deletes another is about to share.
    let content = |thread: u64, round: u64| -> Vec<u8> {
        (0..6)
            .flat_map(|part| noise((thread + round * part) % 5, 150 * KIB))
            .collect()
    };
    std::thread::scope(|scope| {
        let savers: Vec<_> = (0..3_u64)
            .map(|thread| {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let (id, data) = (format!("t{thread}-r{round}"), content(thread, round));
                        let save = vault.begin(&id, "prj").unwrap();
                        if round % 4 < 2 {
                            let pipe = save.stream("data").unwrap();
                            write_pipe(pipe, &data).unwrap();
                        } else {
                            let (file, growing) = save.grow("data", nowhere).unwrap();
                            write_pipe(file.into(), &data).unwrap();
                            growing.finish().unwrap();
                        }
                        // A durable one has its pack in place for a while before its manifest.
                        drop(save.finish(vec![], round % 2 == 0).unwrap());
                        assert!(load(vault, &id).unwrap() == data, "{id}");
                        if round % 3 != 0 {
                            vault.delete(&id).unwrap();
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while busy.load(Ordering::Relaxed) {
                vault.gc(&|_| true, false).unwrap();
                collections.fetch_add(1, Ordering::Relaxed);
            }
        });
        let results: Vec<_> = savers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        busy.store(false, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    assert!(collections.load(Ordering::Relaxed) > 1);
    vault.gc(&|_| true, false).unwrap();
    let context = context.reopen();
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().bytes, 0);
    for thread in 0..3 {
        for round in 0..ROUNDS {
            let id = format!("t{thread}-r{round}");
            match load(&context.vault, &id) {
                Ok(data) => assert!(round % 3 == 0 && data == content(thread, round), "{id}"),
                Err(Error::NotFound { .. }) => assert!(round % 3 != 0, "{id}"),
                Err(error) => panic!("{id}: {error}"),
            }
        }
    }
}

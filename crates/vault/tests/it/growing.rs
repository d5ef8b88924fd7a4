//! Streams that another program writes into what becomes the pack: shared, given up, and written by somebody hostile.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_vault::{Error, Vault, VaultKey};

use crate::support::{Context, KIB, MIB, files, load, load_stream, noise, nowhere, save, save_grown};

/// What the packs take, in bytes of the disk.
fn taken(context: &Context) -> u64 {
    context.vault.usage_of("prj").unwrap().bytes
}

#[test]
fn the_file_itself_becomes_the_pack_and_others_go_behind_it() {
    let context = Context::new();
    let pages = [noise(1, 5 * MIB + 77), vec![0; 3 * MIB], noise(2, MIB + 300)].concat();
    let save = context.vault.begin("a", "prj").unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    for piece in pages.chunks(300_000) {
        file.write_all(piece).unwrap();
    }
    let inode = file.metadata().unwrap().ino();
    assert!(taken(&context) >= 6 * MIB as u64, "space under way counts");
    let early = save.file("early", &mut &b"x"[..]);
    assert!(matches!(early, Err(Error::Growing { .. })), "{early:?}");
    drop(file);
    growing.finish().unwrap();
    let state = noise(3, 400 * KIB);
    save.file("state", &mut &state[..]).unwrap();
    for part in ["tmp", "packs", "manifests"] {
        assert!(
            files(context.path(), part).is_empty(),
            "{part} shows it too early"
        );
    }
    let saved = save.finish(vec![], true).unwrap();
    let (data, manifest) = (6 * MIB + 377 + 400 * KIB, 32 * KIB);
    assert!(
        (data..data + manifest).contains(&(saved.stored_bytes as usize)),
        "{saved:?}"
    );

    let context = context.reopen();
    let packs = files(context.path(), "packs");
    assert_eq!(packs.len(), 1);
    assert_eq!(fs::metadata(&packs[0]).unwrap().ino(), inode);
    assert!(taken(&context) <= (data + 64 * KIB) as u64, "{}", taken(&context));
    assert!(load(&context.vault, "a").unwrap() == pages);
    assert!(load_stream(&context.vault, "a", "state").unwrap() == state);
    assert_eq!(context.vault.gc(&|_| true, false).unwrap().bytes, 0);
    assert!(load(&context.vault, "a").unwrap() == pages);
    context.vault.gc(&|_| false, false).unwrap();
    assert_eq!(context.vault.usage().unwrap().bytes, 0);
}

#[test]
fn what_is_known_is_punched_out() {
    let context = Context::new();
    let old = noise(1, 4 * MIB);
    save_grown(&context.vault, "a", "prj", &old);
    let before = taken(&context);
    let fresh = noise(2, 8 * MIB);
    // Known, new, zeros, known, new twice.
    let data = [
        &old[..2 * MIB],
        &fresh[..7 * MIB],
        &vec![0; MIB],
        &old[2 * MIB..],
        &fresh[7 * MIB..],
        &fresh[7 * MIB..],
    ]
    .concat();
    let saved = save_grown(&context.vault, "b", "prj", &data);
    // Chunks over the seams are new.
    let slack = MIB as u64;
    assert!(
        saved.stored_bytes >= 8 * MIB as u64 && saved.stored_bytes <= 8 * MIB as u64 + slack,
        "{saved:?}"
    );
    let packs = files(context.path(), "packs");
    assert_eq!(packs.len(), 2);
    let grown = taken(&context) - before;
    assert!(grown <= saved.stored_bytes + slack / 4, "{grown} for {saved:?}");
    assert_eq!(
        context.vault.gc(&|_| true, false).unwrap().bytes,
        0,
        "nothing is left for a collection"
    );
    assert!(load(&context.vault, "b").unwrap() == data);
    // What it shares stays when the other goes.
    context.vault.delete("a").unwrap();
    context.vault.gc(&|_| true, false).unwrap();
    let context = context.reopen();
    assert!(load(&context.vault, "b").unwrap() == data);
    // Carried elsewhere and back it is the same.
    let mut file = Vec::new();
    context.vault.export("b", b"head", &mut file).unwrap();
    let other = Context::new();
    other.vault.import(&mut &file[..], "c", "prj", 1 << 30).unwrap();
    assert!(load(&other.vault, "c").unwrap() == data);
}

#[test]
fn of_what_is_mostly_known_only_the_new_is_written() {
    let context = Context::new();
    let mut data = noise(1, 16 * MIB);
    save_grown(&context.vault, "a", "prj", &data);
    let same = save_grown(&context.vault, "same", "prj", &data);
    assert!(same.stored_bytes < 32 * KIB as u64, "{same:?}");
    assert_eq!(files(context.path(), "packs").len(), 1, "a pack for nothing");
    data[5 * MIB..6 * MIB].copy_from_slice(&noise(2, MIB));
    let before = taken(&context);
    let saved = save_grown(&context.vault, "b", "prj", &data);
    assert!(saved.stored_bytes < 1700 * KIB as u64, "{saved:?}");
    let pack = files(context.path(), "packs")
        .into_iter()
        .map(|pack| fs::metadata(pack).unwrap().len())
        .min();
    assert!(pack.is_some_and(|len| len < 1700 * KIB as u64), "{pack:?}");
    assert!(taken(&context) - before < 1700 * KIB as u64);
    let context = context.reopen();
    assert!(load(&context.vault, "b").unwrap() == data);
}

#[test]
fn a_file_with_holes_is_a_stream_with_zeros() {
    let context = Context::new();
    let save = context.vault.begin("a", "prj").unwrap();
    let (file, growing) = save.grow("data", nowhere).unwrap();
    let island = noise(1, 300 * KIB);
    file.write_all_at(&island, 20 * MIB as u64).unwrap();
    file.write_all_at(&island[..100], 40 * MIB as u64).unwrap();
    file.set_len(48 * MIB as u64).unwrap();
    drop(file);
    growing.finish().unwrap();
    let saved = save.finish(vec![], false).unwrap();
    assert_eq!(saved.total_bytes, 48 * MIB as u64);
    assert!(saved.stored_bytes < 400 * KIB as u64, "{saved:?}");
    assert!(taken(&context) < 500 * KIB as u64);
    let mut expected = vec![0; 48 * MIB];
    expected[20 * MIB..20 * MIB + island.len()].copy_from_slice(&island);
    expected[40 * MIB..40 * MIB + 100].copy_from_slice(&island[..100]);
    assert!(load(&context.vault, "a").unwrap() == expected);
}

#[test]
fn what_somebody_can_still_write_to_is_copied() {
    let context = Context::new();
    let data = noise(1, 4 * MIB);
    let save = context.vault.begin("a", "prj").unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    file.write_all(&data).unwrap();
    growing.finish().unwrap();
    save.file("more", &mut &data[..MIB]).unwrap();
    save.finish(vec![], false).unwrap();
    file.rewind().unwrap();
    file.write_all(&vec![0xee; 4 * MIB]).unwrap();
    let pack = fs::metadata(&files(context.path(), "packs")[0]).unwrap();
    assert_ne!(pack.ino(), file.metadata().unwrap().ino());
    assert!(load(&context.vault, "a").unwrap() == data);
    assert!(load_stream(&context.vault, "a", "more").unwrap() == data[..MIB]);
}

/// A writer that never stops changing what it has written. What is saved is something that was there, or nothing is.
#[test]
fn what_changes_while_it_is_copied_is_refused_or_whole() {
    let context = Context::new();
    let done = AtomicBool::new(false);
    let (mut kept, mut refused) = (0, 0);
    for round in 0..40 {
        let id = format!("r{round}");
        let save = context.vault.begin(&id, "prj").unwrap();
        let (mut file, growing) = save.grow("data", nowhere).unwrap();
        file.write_all(&noise(round, 2 * MIB)).unwrap();
        done.store(false, Ordering::Relaxed);
        let finished = std::thread::scope(|scope| {
            scope.spawn(|| {
                for byte in (0..=255).cycle() {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    file.write_all_at(&[byte], 700_000 * (u64::from(byte) % 3))
                        .unwrap();
                }
            });
            let finished = growing.finish();
            done.store(true, Ordering::Relaxed);
            finished
        });
        if finished.is_ok() {
            drop(save.finish(vec![], false).unwrap());
            load(&context.vault, &id).unwrap();
            kept += 1;
        } else {
            let why = save.abort();
            assert!(matches!(why, Some(Error::Io { .. })), "{why:?}");
            refused += 1;
        }
    }
    println!("kept {kept}, refused {refused}");
    assert!(files(context.path(), "tmp").is_empty());
}

/// Somebody wrote what others have too, let it be hashed, and then wrote something else: that spoils its own save, and nothing
/// of those who have what it claimed to have.
#[test]
fn who_changes_what_was_hashed_spoils_only_its_own_save() {
    let mut context = Context::new();
    let data = noise(1, 4 * MIB);
    for (n, reopened) in [false, true].into_iter().enumerate() {
        let (bad, good) = (format!("bad{n}"), format!("good{n}"));
        let save = context.vault.begin(&bad, "prj").unwrap();
        let (mut file, growing) = save.grow("data", nowhere).unwrap();
        file.write_all(&data).unwrap();
        drop(file);
        growing.finish().unwrap();
        save.finish(vec![], true).unwrap();
        // As it would lie there if it had been changed between the reading and the closing.
        let pack = files(context.path(), "packs").remove(0);
        let pack = File::options().write(true).open(pack).unwrap();
        pack.write_all_at(b"something else", 2_000_000).unwrap();
        if reopened {
            context = context.reopen();
        }
        let saved = save_grown(&context.vault, &good, "prj", &data);
        assert!(
            (1..MIB as u64).contains(&saved.stored_bytes),
            "shares all but what was spoiled: {saved:?}"
        );
        assert!(matches!(load(&context.vault, &bad), Err(Error::Damaged { .. })));
        assert!(load(&context.vault, &good).unwrap() == data);
        drop(saved);
        context.vault.gc(&|_| false, false).unwrap();
    }
}

#[test]
fn what_is_given_up_half_way_leaves_nothing() {
    let context = Context::new();
    let nothing = |context: &Context| {
        for part in ["tmp", "packs", "manifests"] {
            assert!(files(context.path(), part).is_empty(), "{part}");
        }
        assert_eq!(context.vault.usage().unwrap().bytes, 0);
    };
    // By whoever writes.
    let save = context.vault.begin("a", "prj").unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    file.write_all(&noise(1, 3 * MIB)).unwrap();
    drop(growing);
    assert!(save.finish(vec![], false).is_err());
    nothing(&context);
    // By whoever saves, while it grows.
    let save = context.vault.begin("a", "prj").unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    file.write_all(&noise(1, 3 * MIB)).unwrap();
    drop(save);
    nothing(&context);
    assert!(growing.finish().is_err());
    // When all was taken in.
    let save = context.vault.begin("a", "prj").unwrap();
    let (mut file, growing) = save.grow("data", nowhere).unwrap();
    file.write_all(&noise(1, 3 * MIB)).unwrap();
    drop(file);
    growing.finish().unwrap();
    save.file("more", &mut &noise(2, MIB)[..]).unwrap();
    assert!(save.abort().is_none());
    nothing(&context);
}

#[test]
fn with_a_key_nothing_plain_reaches_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let vault = Vault::open(directory.path(), Some(VaultKey::new([5; 32]))).unwrap();
    let data = noise(1, 3 * MIB);
    let save = vault.begin("a", "prj").unwrap();
    let asked = AtomicBool::new(false);
    let (mut file, growing) = save
        .grow("data", || {
            asked.store(true, Ordering::Relaxed);
            tempfile::tempfile()
        })
        .unwrap();
    assert!(asked.into_inner(), "the file is the caller's");
    file.write_all(&data).unwrap();
    drop(file);
    growing.finish().unwrap();
    save.finish(vec![], false).unwrap();
    let mut pack = Vec::new();
    let path = files(directory.path(), "packs").remove(0);
    File::open(path).unwrap().read_to_end(&mut pack).unwrap();
    assert!(!pack.windows(64).step_by(16).any(|part| part == &data[..64]));
    assert!(load(&vault, "a").unwrap() == data);
}

#[test]
fn a_second_one_is_copied_behind_what_is_there() {
    let context = Context::new();
    let (one, two) = (noise(1, 2 * MIB), noise(2, 2 * MIB));
    let first = save(&context.vault, "known", "prj", &one).stored_bytes;
    assert!(first >= 2 * MIB as u64);
    let save = context.vault.begin("a", "prj").unwrap();
    save.file("before", &mut &two[..MIB]).unwrap();
    let (mut file, growing) = save.grow("data", tempfile::tempfile).unwrap();
    file.write_all(&[&one[..], &two].concat()).unwrap();
    save.file("beside", &mut &b"beside"[..]).unwrap();
    growing.finish().unwrap();
    let saved = save.finish(vec![], false).unwrap();
    assert!(
        saved.stored_bytes < 2 * MIB as u64 + 400 * KIB as u64,
        "{saved:?}"
    );
    assert!(load(&context.vault, "a").unwrap() == [&one[..], &two].concat());
    assert!(load_stream(&context.vault, "a", "before").unwrap() == two[..MIB]);
}

//! Saving, sharing, reading back.

use std::io::Read;
use std::os::unix::fs::MetadataExt;

use atoll_vault::{Error, Vault};

use crate::support::{Context, KIB, MIB, files, load, load_stream, noise, save, write_pipe};

#[test]
fn streams_come_back_as_they_were_written() {
    let context = Context::new();
    let save = context.vault.begin("snap_1", "prj").unwrap();
    let pages = [noise(1, 9 * MIB + 77), vec![0; 5 * MIB], noise(2, 300)].concat();
    let mut late = vec![0; 700 * KIB];
    late[699 * KIB] = 1;
    let ends: Vec<_> = ["pages", "late", "empty"]
        .map(|name| save.stream(name).unwrap())
        .into();
    // Side by side, more than a pipe holds: a reader that waited for another stream would hang here.
    std::thread::scope(|scope| {
        for (end, data) in ends.into_iter().zip([&pages[..], &late, b""]) {
            scope.spawn(move || write_pipe(end, data).unwrap());
        }
    });
    save.file("small", &mut &b"few bytes"[..]).unwrap();
    assert!(!context.vault.contains("snap_1"), "visible too early");
    assert!(matches!(
        context.vault.open_saved("snap_1"),
        Err(Error::NotFound { .. })
    ));
    let saved = save.finish(b"about".to_vec(), true).unwrap();
    assert_eq!(saved.total_bytes as usize, pages.len() + late.len() + 9);
    assert!(saved.stored_bytes as usize <= 9 * MIB + 600 * KIB, "{saved:?}");

    let context = context.reopen();
    let opened = context.vault.open_saved("snap_1").unwrap();
    assert_eq!((opened.meta(), opened.domain()), (&b"about"[..], "prj"));
    let names: Vec<_> = opened
        .streams()
        .into_iter()
        .map(|info| (info.name, info.len as usize))
        .collect();
    let expected = [
        ("pages", pages.len()),
        ("late", late.len()),
        ("empty", 0),
        ("small", 9),
    ];
    assert_eq!(names, expected.map(|(name, len)| (name.to_owned(), len)));
    for (name, data) in [
        ("pages", &pages[..]),
        ("late", &late),
        ("empty", b""),
        ("small", b"few bytes"),
    ] {
        assert!(
            load_stream(&context.vault, "snap_1", name).unwrap() == data,
            "{name}"
        );
    }
    assert!(matches!(
        opened.write_to("other", &mut Vec::new()),
        Err(Error::NoStream { .. })
    ));
}

#[test]
fn zeros_are_stored_nowhere_and_come_back_as_holes() {
    let context = Context::new();
    let data = [noise(1, 64 * KIB), vec![0; 64 * MIB], noise(2, 64 * KIB)].concat();
    let saved = save(&context.vault, "a", "prj", &data);
    assert!(saved.stored_bytes < 200 * KIB as u64, "{saved:?}");
    let file = tempfile::tempfile().unwrap();
    context
        .vault
        .open_saved("a")
        .unwrap()
        .read_to("data", &file)
        .unwrap();
    assert_eq!(file.metadata().unwrap().len() as usize, data.len());
    assert!(file.metadata().unwrap().blocks() * 512 < MIB as u64);
    assert!(load(&context.vault, "a").unwrap() == data);
    let saved = save(&context.vault, "zeros", "prj", &vec![0; 32 * MIB]);
    assert!(saved.stored_bytes < KIB as u64, "{saved:?}");
    assert_eq!(files(context.path(), "packs").len(), 1, "a pack for nothing");
}

#[test]
fn only_what_changed_is_stored_also_after_reopening() {
    let mut data = noise(1, 64 * MIB);
    let mut context = Context::new();
    assert!(save(&context.vault, "a", "prj", &data).stored_bytes > 64 * MIB as u64);
    for n in 0..2_u64 {
        data[30 * MIB..31 * MIB].copy_from_slice(&noise(5 + n, MIB));
        let saved = save(&context.vault, &format!("b{n}"), "prj", &data);
        assert!(saved.stored_bytes < 1600 * KIB as u64, "{saved:?}");
        assert!(load(&context.vault, &format!("b{n}")).unwrap() == data);
        context = context.reopen();
    }
    // The same stream twice, in one save.
    let twice = context.vault.begin("twice", "other").unwrap();
    twice.file("one", &mut &data[..]).unwrap();
    twice.file("two", &mut &data[..]).unwrap();
    let saved = twice.finish(vec![], false).unwrap();
    assert!(saved.stored_bytes < 66 * MIB as u64, "{saved:?}");
}

#[test]
fn nothing_is_shared_between_domains() {
    let context = Context::new();
    let data = noise(1, MIB);
    let one = save(&context.vault, "a", "one", &data).stored_bytes;
    let other = save(&context.vault, "b", "other", &data).stored_bytes;
    assert!(other >= MIB as u64 && one >= MIB as u64);
    assert!(save(&context.vault, "c", "one", &data).stored_bytes < 4 * KIB as u64);
    let usage = |domain| context.vault.usage_of(domain).unwrap().bytes;
    assert_eq!(
        (usage("one"), usage("other"), usage("third")),
        (MIB as u64, MIB as u64, 0)
    );
    let all = context.vault.usage().unwrap();
    assert_eq!((all.packs, all.bytes), (2, 2 * MIB as u64 + 3 * 4096));
}

#[test]
fn a_save_that_is_dropped_leaves_nothing_and_its_writer_is_told() {
    let context = Context::new();
    let save = context.vault.begin("a", "prj").unwrap();
    let (used, idle) = (save.stream("used").unwrap(), save.stream("idle").unwrap());
    let (started, begun) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        let data = noise(1, 4 * MIB);
        write_pipe(used.try_clone().unwrap(), &data).unwrap();
        started.send(()).unwrap();
        loop {
            if let Err(error) = write_pipe(used.try_clone().unwrap(), &data) {
                return error;
            }
        }
    });
    begun.recv().unwrap();
    assert!(
        context.vault.usage_of("prj").unwrap().bytes > 0,
        "space under way counts"
    );
    // Returns although both ends are open and one will never be written to.
    drop(save);
    assert_eq!(writer.join().unwrap().kind(), std::io::ErrorKind::BrokenPipe);
    assert_eq!(
        write_pipe(idle, b"x").unwrap_err().kind(),
        std::io::ErrorKind::BrokenPipe
    );
    for part in ["tmp", "packs", "manifests"] {
        assert_eq!(
            files(context.path(), part),
            [""; 0].map(std::path::PathBuf::from),
            "{part}"
        );
    }
    // And the id is free again.
    assert!(context.vault.begin("a", "prj").unwrap().abort().is_none());
}

#[test]
fn a_source_that_fails_is_not_finished_as_if_it_were_whole() {
    struct Fails(usize);
    impl Read for Fails {
        fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(std::io::Error::other("gone"))?;
            Ok(buf.len())
        }
    }
    let context = Context::new();
    let save = context.vault.begin("a", "prj").unwrap();
    assert!(matches!(save.file("x", &mut Fails(3)), Err(Error::Io { .. })));
    assert!(matches!(save.finish(vec![], false), Err(Error::Stopped)));
    assert!(!context.vault.contains("a"));
    assert!(files(context.path(), "tmp").is_empty());
}

#[test]
fn names_are_checked_and_ids_are_used_once() {
    let context = Context::new();
    let vault = &context.vault;
    for bad in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a.b",
        "a b",
        "\0",
        "ä",
        &"x".repeat(65),
    ] {
        assert!(
            matches!(vault.begin(bad, "prj"), Err(Error::BadName { .. })),
            "{bad}"
        );
        assert!(matches!(vault.open_saved(bad), Err(Error::BadName { .. })));
        assert!(matches!(vault.delete(bad), Err(Error::BadName { .. })));
    }
    let first = vault.begin("a", "prj").unwrap();
    assert!(matches!(vault.begin("a", "prj"), Err(Error::Exists { .. })));
    first.file("s", &mut &b"1"[..]).unwrap();
    assert!(matches!(first.stream("s"), Err(Error::BadName { .. })));
    first.finish(vec![], false).unwrap();
    assert!(matches!(vault.begin("a", "prj"), Err(Error::Exists { .. })));
    assert!(matches!(vault.delete("b"), Err(Error::NotFound { .. })));
    vault.delete("a").unwrap();
    assert!(matches!(vault.open_saved("a"), Err(Error::NotFound { .. })));
    vault.begin("a", "prj").unwrap();
}

#[test]
fn a_vault_is_open_once() {
    let context = Context::new();
    assert!(matches!(
        Vault::open(context.path(), None),
        Err(Error::InUse { .. })
    ));
    let save = context.vault.begin("a", "prj").unwrap();
    save.file("s", &mut &noise(1, 8 * MIB)[..]).unwrap();
    let saved = save.finish(vec![], false).unwrap();
    // What is left over of a save does not keep it open.
    let context = context.reopen();
    drop(saved);
    drop(context);
}

#[test]
fn many_saves_at_once_do_not_mix() {
    let context = Context::new();
    let common = noise(9, 3 * MIB);
    std::thread::scope(|scope| {
        for n in 0..6_u64 {
            let (vault, common) = (&context.vault, &common);
            scope.spawn(move || {
                let domain = if n % 2 == 0 { "even" } else { "odd" };
                save(
                    vault,
                    &format!("s{n}"),
                    domain,
                    &[common, &noise(n, 2 * MIB)[..]].concat(),
                );
            });
        }
    });
    let context = context.reopen();
    for n in 0..6 {
        let expected = [&common[..], &noise(n, 2 * MIB)].concat();
        assert!(load(&context.vault, &format!("s{n}")).unwrap() == expected);
    }
}

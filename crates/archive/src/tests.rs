use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode};

use super::*;

const LAYER: Dialect = Dialect::Layer {
    notes: Notes::Trusted,
    not_ours: &["proc"],
};

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: needs root");
    }
    root
}

fn packed(dir: &Path, dialect: Dialect, ids: Ids) -> (Vec<u8>, Tally) {
    let mut bytes = Vec::new();
    let tally = pack(File::open(dir).unwrap().as_fd(), dialect, ids, &mut bytes).unwrap();
    (bytes, tally)
}

fn unpacked(dir: &Path, dialect: Dialect, ids: Ids, mut bytes: &[u8]) -> io::Result<Tally> {
    let tally = unpack(File::open(dir).unwrap().as_fd(), dialect, ids, &mut bytes);
    if tally.is_ok() {
        assert!(bytes.iter().all(|byte| *byte == 0), "something after the end");
    }
    tally
}

/// Everything that should survive, one line each.
fn listing(dir: &Path) -> Vec<String> {
    fn add(root: &Path, at: &Path, lines: &mut Vec<String>) {
        let meta = fs::symlink_metadata(at).unwrap();
        let kind = meta.file_type();
        let content = if kind.is_file() {
            let mut bytes = Vec::new();
            File::open(at)
                .unwrap()
                .take(100_000)
                .read_to_end(&mut bytes)
                .unwrap();
            format!("{:?} {}", bytes.escape_ascii().to_string(), meta.nlink())
        } else if kind.is_symlink() {
            format!("{:?}", fs::read_link(at).unwrap())
        } else {
            String::new()
        };
        let name = at.strip_prefix(root).unwrap();
        lines.push(format!(
            "{name:?} {:o} {}:{} {}.{} {} {content}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.mtime(),
            meta.mtime_nsec(),
            if kind.is_dir() { 0 } else { meta.len() },
        ));
        if kind.is_dir() {
            let mut names: Vec<_> = fs::read_dir(at)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
            names.sort();
            for name in names {
                add(root, &name, lines);
            }
        }
    }
    let mut lines = Vec::new();
    add(dir, dir, &mut lines);
    lines
}

fn furnish(dir: &Path) {
    fs::create_dir(dir.join("sub")).unwrap();
    fs::write(dir.join("sub/a"), "hello").unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    fs::hard_link(dir.join("sub/a"), dir.join("sub/z")).unwrap();
    fs::hard_link(dir.join("sub/a"), dir.join("b")).unwrap();
    symlink("/etc/passwd", dir.join("link")).unwrap();
    symlink("x".repeat(300), dir.join("long link")).unwrap();
    fs::write(dir.join(std::ffi::OsStr::from_bytes(b"odd \xff\n=\x01")), "odd").unwrap();
    fs::write(dir.join("n".repeat(255)), vec![7; 700]).unwrap();
    fs::set_permissions(dir.join("sub/a"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::set_permissions(dir.join("sub"), fs::Permissions::from_mode(0o1777)).unwrap();
    let holes = File::create(dir.join("holes")).unwrap();
    holes.set_len(1 << 30).unwrap();
    holes.write_all_at(b"middle", 5 << 20).unwrap();
    fs::write(dir.join("big"), vec![9; 3_000_001]).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(dir.join("b"), Some(1000), Some(1001)).unwrap();
        fs::set_permissions(dir.join("b"), fs::Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::lchown(dir.join("link"), Some(5), Some(70_000)).unwrap();
    }
}

#[test]
fn a_tree_survives_and_gives_the_same_bytes_again() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    furnish(one.path());
    let (bytes, tally) = packed(one.path(), Dialect::Plain, Ids::Same);
    assert_eq!(tally.skipped.total(), 0);
    assert!(bytes.len() < 8 << 20, "holes were written: {}", bytes.len());
    assert_eq!(
        unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes).unwrap(),
        tally
    );
    assert_eq!(listing(one.path()), listing(two.path()));
    assert!(fs::metadata(two.path().join("holes")).unwrap().blocks() < 1000);
    assert_eq!(packed(two.path(), Dialect::Plain, Ids::Same).0, bytes);
    // Once more over what is there.
    unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes).unwrap();
    assert_eq!(listing(one.path()), listing(two.path()));
}

#[test]
fn other_programs_understand_it_and_we_them() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    furnish(one.path());
    let (bytes, _) = packed(one.path(), Dialect::Plain, Ids::Same);
    let mut child = std::process::Command::new("tar")
        .args(["-xpf", "-", "-C"])
        .arg(two.path())
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(listing(one.path()), listing(two.path()));
    for format in ["--format=pax", "--format=gnu"] {
        let three = tempfile::tempdir().unwrap();
        let output = std::process::Command::new("tar")
            .args([format, "--numeric-owner", "--sort=name", "-cf", "-", "-C"])
            .arg(one.path())
            .arg(".")
            .output()
            .unwrap();
        assert!(output.status.success());
        unpacked(three.path(), Dialect::Plain, Ids::Same, &output.stdout).unwrap();
        // GNU's own format has whole seconds only.
        if format == "--format=pax" {
            assert_eq!(listing(one.path()), listing(three.path()));
        }
        assert_eq!(
            fs::read_dir(three.path()).unwrap().count(),
            fs::read_dir(one.path()).unwrap().count()
        );
    }
}

#[test]
fn a_layer_keeps_what_overlayfs_needs_and_shifts_ids() {
    if !root() {
        return;
    }
    let (one, two) = (
        tempfile::tempdir_in("/dev/shm").unwrap(),
        tempfile::tempdir_in("/dev/shm").unwrap(),
    );
    let shift = |first| Ids::Range { first, count: 65536 };
    furnish(one.path());
    for name in ["moved", "opaque", "proc", "proc/x"] {
        fs::create_dir(one.path().join(name)).unwrap();
    }
    let set = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::setxattr(one.path().join(name), key, value, rustix::fs::XattrFlags::empty()).unwrap();
    };
    set("moved", "trusted.overlay.redirect", b"/usr/\xff");
    set("opaque", "trusted.overlay.opaque", b"y");
    set("opaque", "trusted.overlay.origin", b"whatever");
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(
            CWD,
            one.path().join(name),
            kind,
            Mode::from_raw_mode(0o600),
            device,
        )
        .unwrap();
    };
    make("gone", FileType::CharacterDevice, 0);
    make("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make("disk", FileType::BlockDevice, rustix::fs::makedev(8, 0));
    make("fifo", FileType::Fifo, 0);
    make("socket", FileType::Socket, 0);

    let (bytes, tally) = packed(one.path(), LAYER, shift(0));
    assert_eq!((tally.skipped.devices, tally.skipped.sockets), (2, 1));
    unpacked(two.path(), LAYER, shift(1 << 28), &bytes).unwrap();
    let owner = |name: &str| {
        let meta = fs::symlink_metadata(two.path().join(name)).unwrap();
        (meta.uid() - (1 << 28), meta.gid() - (1 << 28))
    };
    assert_eq!(owner("b"), (1000, 1001));
    assert_eq!(owner("link"), (5, NOBODY), "an id that the range does not have");
    assert_eq!(owner("fifo"), (0, 0));
    assert!(!two.path().join("proc").exists() && !two.path().join("null").exists());
    let whiteout = fs::symlink_metadata(two.path().join("gone")).unwrap();
    assert_eq!((whiteout.rdev(), whiteout.mode() & 0o170_000), (0, 0o020_000));
    let get = |name: &str, key: &str| {
        let mut value = vec![0; 100];
        let length = rustix::fs::getxattr(two.path().join(name), key, &mut *value).ok()?;
        Some(value[..length].to_vec())
    };
    assert_eq!(get("moved", "trusted.overlay.redirect").unwrap(), b"/usr/\xff");
    assert_eq!(get("opaque", "trusted.overlay.opaque").unwrap(), b"y");
    assert_eq!(get("opaque", "trusted.overlay.origin"), None);
    assert_eq!(get("sub", "trusted.overlay.opaque"), None);
    // The same layer under other ids gives the same stream.
    let three = tempfile::tempdir_in("/dev/shm").unwrap();
    unpacked(three.path(), LAYER, shift(1 << 29), &bytes).unwrap();
    let [two, three] =
        [(&two, 1 << 28), (&three, 1 << 29)].map(|(dir, first)| packed(dir.path(), LAYER, shift(first)).0);
    assert!(two == three);
}

#[test]
fn plain_trees_leave_special_files_out_and_do_not_hang() {
    if !root() {
        return;
    }
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(
            CWD,
            one.path().join(name),
            kind,
            Mode::from_raw_mode(0o666),
            device,
        )
        .unwrap();
    };
    make("fifo", FileType::Fifo, 0);
    make("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make("white", FileType::CharacterDevice, 0);
    make("socket", FileType::Socket, 0);
    let (bytes, tally) = packed(one.path(), Dialect::Plain, Ids::Same);
    let skipped = tally.skipped;
    assert_eq!(
        (skipped.fifos, skipped.devices, skipped.sockets, tally.entries),
        (1, 2, 1, 1)
    );
    unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes).unwrap();
    // And none comes from a stream of others.
    let output = std::process::Command::new("tar")
        .args(["-cf", "-", "-C"])
        .arg(one.path())
        .arg(".")
        .output()
        .unwrap();
    let tally = unpacked(two.path(), Dialect::Plain, Ids::Same, &output.stdout).unwrap();
    assert_eq!((tally.skipped.devices, tally.skipped.fifos), (2, 1));
    assert_eq!(fs::read_dir(two.path()).unwrap().count(), 0);
}

#[test]
fn hostile_streams_touch_nothing_outside() {
    let outside = tempfile::tempdir().unwrap();
    let (victim, inside) = (outside.path().join("victim"), outside.path().join("inside"));
    fs::write(&victim, "precious").unwrap();
    let link = |to: &Path| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        (header, to.to_owned())
    };
    let file = |builder: &mut tar::Builder<Vec<u8>>, raw: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes()[..raw.len()].copy_from_slice(raw);
        header.set_size(4);
        header.set_mode(0o6777);
        header.set_cksum();
        builder.append(&header, &b"evil"[..]).unwrap();
    };
    let hard = |builder: &mut tar::Builder<Vec<u8>>, name: &str, target: &str| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Link);
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
        header.set_size(0);
        header.set_cksum();
        builder.append(&header, &[][..]).unwrap();
    };
    type Act<'a> = Box<dyn Fn(&mut tar::Builder<Vec<u8>>) + 'a>;
    let (up, absolute) = (b"../victim".to_vec(), victim.as_os_str().as_bytes().to_vec());
    let attacks: Vec<(bool, Act<'_>)> = vec![
        (false, Box::new(|b| file(b, &up))),
        (false, Box::new(|b| file(b, &absolute))),
        (
            false,
            Box::new(|b| {
                let (mut header, to) = link(outside.path());
                b.append_link(&mut header, "d", to).unwrap();
                file(b, b"d/victim");
            }),
        ),
        // A file over a link replaces the link.
        (
            true,
            Box::new(|b| {
                let (mut header, to) = link(&victim);
                b.append_link(&mut header, "f", to).unwrap();
                file(b, b"f");
            }),
        ),
        (
            true,
            Box::new(|b| {
                let (mut header, to) = link(outside.path());
                b.append_link(&mut header, "d", to).unwrap();
                let mut header = tar::Header::new_gnu();
                header.set_entry_type(tar::EntryType::Directory);
                header.set_mode(0o777);
                header.set_size(0);
                b.append_data(&mut header, "d", &[][..]).unwrap();
                file(b, b"d/victim");
            }),
        ),
        (false, Box::new(|b| hard(b, "h", "../victim"))),
        (
            false,
            Box::new(|b| {
                let (mut header, to) = link(outside.path());
                b.append_link(&mut header, "d", to).unwrap();
                hard(b, "h", "d/victim");
            }),
        ),
    ];
    for (at, (succeeds, attack)) in attacks.iter().enumerate() {
        fs::create_dir(&inside).unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        attack(&mut builder);
        let bytes = builder.into_inner().unwrap();
        let before = fs::metadata(outside.path()).unwrap();
        let done = unpacked(&inside, Dialect::Plain, Ids::Same, &bytes);
        assert_eq!(done.is_ok(), *succeeds, "{at}: {done:?}");
        assert_eq!(fs::read(&victim).unwrap(), b"precious", "{at}");
        let after = fs::metadata(outside.path()).unwrap();
        assert_eq!(
            (after.mode(), after.uid(), after.mtime()),
            (before.mode(), before.uid(), before.mtime()),
            "{at}"
        );
        assert_eq!(fs::metadata(&victim).unwrap().nlink(), 1, "{at}");
        fs::remove_dir_all(&inside).unwrap();
    }
}

#[test]
fn a_torn_stream_is_an_error_wherever_it_is_torn() {
    let one = tempfile::tempdir().unwrap();
    fs::write(one.path().join("a"), vec![1; 2000]).unwrap();
    fs::write(one.path().join("x".repeat(200)), "b").unwrap();
    let (bytes, _) = packed(one.path(), Dialect::Plain, Ids::Same);
    for length in (0..bytes.len() - 1024).step_by(100) {
        let two = tempfile::tempdir().unwrap();
        let torn = unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes[..length]).unwrap_err();
        assert_eq!(torn.kind(), io::ErrorKind::UnexpectedEof, "{length}: {torn}");
    }
}

/// A directory deeper than there are descriptors, with something to do on the way back.
#[test]
fn depth_costs_no_descriptors() {
    const DEEP: usize = 1500;
    let dir = || tempfile::tempdir_in("/dev/shm").unwrap();
    let (one, two) = (dir(), dir());
    let mut at: std::os::fd::OwnedFd = File::open(one.path()).unwrap().into();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
    for _ in 0..DEEP {
        rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
        rustix::fs::mkdirat(&at, "e", Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, "d", flags, Mode::empty()).unwrap();
    }
    let (bytes, tally) = packed(one.path(), Dialect::Plain, Ids::Same);
    assert_eq!((tally.entries, tally.skipped.total()), (2 * DEEP as u64 + 1, 0));
    assert_eq!(
        unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes).unwrap(),
        tally
    );
    assert_eq!(packed(two.path(), Dialect::Plain, Ids::Same).0, bytes);
}

/// As `tar --format=gnu -S` writes them, and the `tar` crate.
/// As gVisor writes them: not knowing that there are any.
#[test]
fn holes_that_were_written_out_are_holes_again() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let holes = File::create(one.path().join("holes")).unwrap();
    holes.write_all_at(b"begin", 3).unwrap();
    holes.write_all_at(b"middle", 40 << 20).unwrap();
    holes.set_len((64 << 20) + 5).unwrap();
    let output = std::process::Command::new("tar")
        .args(["--format=pax", "-C"])
        .arg(one.path())
        .args(["-c", "."])
        .output()
        .unwrap();
    assert!(output.stdout.len() > 64 << 20, "tar knew of the holes");
    unpacked(two.path(), Dialect::Plain, Ids::Same, &output.stdout).unwrap();
    let read = |dir: &Path| fs::read(dir.join("holes")).unwrap();
    assert!(read(one.path()) == read(two.path()));
    let blocks = fs::metadata(two.path().join("holes")).unwrap().blocks();
    assert!(blocks * 512 < 4 << 20, "{blocks} blocks are in use");
}

#[test]
fn holes_in_gnus_old_way_are_read() {
    for pieces in [1, 40] {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let holes = File::create(one.path().join("holes")).unwrap();
        for piece in 0..pieces {
            holes.write_all_at(&[7; 5000], piece << 20).unwrap();
        }
        holes.set_len(100 << 20).unwrap();
        let mut tar = std::process::Command::new("tar");
        tar.args(["--format=gnu", "-S", "-c", "-C"])
            .arg(one.path())
            .arg(".");
        let bytes = tar.output().unwrap().stdout;
        assert!(bytes.len() < 2 << 20, "tar found no holes");
        unpacked(two.path(), Dialect::Plain, Ids::Same, &bytes).unwrap();
        let read = |dir: &Path| fs::read(dir.join("holes")).unwrap();
        assert!(read(one.path()) == read(two.path()));
        assert!(fs::metadata(two.path().join("holes")).unwrap().blocks() < 2000);
        // One whose pieces lie is refused.
        let mut lies = bytes;
        let at = lies.windows(7).position(|name| name == b"./holes").unwrap();
        let header = &mut lies[at..at + 512];
        header[398..409].copy_from_slice(b"00000000001");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let error = unpacked(two.path(), Dialect::Plain, Ids::Same, &lies).unwrap_err();
        assert!(error.to_string().contains("pieces"), "{error}");
    }
}

const SMALL: Budget = Budget {
    bytes: 1000,
    entries: 20,
    depth: 8,
    private: true,
};

fn within(budget: &mut Budget, entries: &[header::Entry]) -> (tempfile::TempDir, io::Result<Tally>) {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    for entry in entries {
        entry.write(&mut bytes).unwrap();
        let content = match entry.real_size {
            Some(_) => sparse::text_of(&vec![(0, 0)]),
            None => vec![0; usize::try_from(entry.size).unwrap()],
        };
        bytes.extend_from_slice(&content);
        bytes.extend_from_slice(format::padding(content.len() as u64));
    }
    header::write_end(&mut bytes).unwrap();
    let root = File::open(dir.path()).unwrap();
    let done = unpack_within(
        root.as_fd(),
        Dialect::Plain,
        Ids::Own,
        budget,
        &mut bytes.as_slice(),
    );
    (dir, done)
}

fn file(path: &str, size: u64) -> header::Entry {
    header::Entry {
        size,
        mode: 0o6111,
        ..header::Entry::new(path.as_bytes(), header::Kind::File)
    }
}

#[test]
fn a_budget_is_kept() {
    let mut budget = SMALL;
    let entries = [
        file("a", 100),
        file("d/e/b", 200),
        header::Entry::new(b"closed", header::Kind::Directory),
    ];
    let (dir, done) = within(&mut budget, &entries);
    done.unwrap();
    // Two directories were made on the way.
    assert_eq!((budget.bytes, budget.entries), (700, 15));
    let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("a"), mode("closed")), (0o511, 0o700));
    // What one stream used, the next one has no more.
    let (_, done) = within(&mut budget, &[file("a", 701)]);
    assert!(is_too_much(&done.unwrap_err()));

    let mut hole = file("hole", sparse::text_of(&vec![(0, 0)]).len() as u64);
    hole.real_size = Some(1 << 40);
    let far = "d/".repeat(16_000);
    let links_far = header::Entry {
        target: format!("{far}x").into_bytes(),
        ..header::Entry::new(b"link", header::Kind::HardLink)
    };
    let directory =
        |path: &str| header::Entry::new(path.trim_end_matches('/').as_bytes(), header::Kind::Directory);
    let chains: Vec<header::Entry> = (0..4).map(|n| directory(&format!("{n}/a/b/c/d/e/f/g"))).collect();
    for (too_much, entries) in [
        (true, vec![file("a", 600), file("a", 600)]),
        (true, vec![hole]),
        (true, chains),
        (true, (0..30).map(|n| file(&n.to_string(), 0)).collect()),
        (false, vec![directory(&far)]),
        (false, vec![file(&format!("{far}x"), 1)]),
        (false, vec![links_far]),
    ] {
        let (dir, done) = within(&mut { SMALL }, &entries);
        let error = done.unwrap_err();
        assert_eq!(is_too_much(&error), too_much, "{error}");
        assert!(walkable(dir.path()) <= 20, "{error}");
    }
}

/// How many names there are, if they are not deep.
fn walkable(dir: &Path) -> usize {
    let below = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    below
        .map(|entry| match entry.file_type().unwrap().is_dir() {
            true => 1 + walkable(&entry.path()),
            false => 1,
        })
        .sum()
}

#[test]
fn a_full_disk_is_told_apart() {
    assert!(is_full(&about(b"x", &rustix::io::Errno::NOSPC.into())));
    assert!(!is_full(&about(b"x", &rustix::io::Errno::PERM.into())));
}

#[test]
fn a_layer_can_be_applied_to_what_it_lay_over() {
    if !root() {
        return;
    }
    let (layer, tree) = (
        tempfile::tempdir_in("/dev/shm").unwrap(),
        tempfile::tempdir_in("/dev/shm").unwrap(),
    );
    let (upper, root) = (layer.path(), tree.path());
    for dir in ["gone/deep", "opaque/old", "merged/old", "was-dir/x", "proc"] {
        fs::create_dir_all(root.join(dir)).unwrap();
        fs::write(root.join(dir).join("file"), "old").unwrap();
    }
    for file in ["one", "two", "was-file", "same"] {
        fs::write(root.join(file), "old").unwrap();
    }
    symlink("/etc", root.join("link")).unwrap();

    for dir in ["opaque", "merged", "was-file", "link", "proc"] {
        fs::create_dir(upper.join(dir)).unwrap();
        fs::write(upper.join(dir).join("new"), "new").unwrap();
    }
    let opaque = upper.join("opaque");
    rustix::fs::setxattr(
        &opaque,
        "trusted.overlay.opaque",
        b"y",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    fs::write(upper.join("was-dir"), "new").unwrap();
    // As gVisor says it: one whiteout, and links to it.
    let whiteout = upper.join("gone");
    rustix::fs::mknodat(CWD, &whiteout, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    fs::hard_link(&whiteout, upper.join("one")).unwrap();
    fs::hard_link(&whiteout, upper.join("merged/file")).unwrap();
    fs::hard_link(upper.join("was-dir"), upper.join("two")).unwrap();

    let (bytes, _) = packed(upper, LAYER, Ids::Same);
    let applied = Dialect::Applied { not_ours: &["proc"] };
    unpacked(root, applied, Ids::Same, &bytes).unwrap();
    for gone in [
        "gone",
        "one",
        "opaque/old",
        "opaque/file",
        "merged/file",
        "proc/new",
    ] {
        assert!(!root.join(gone).exists(), "{gone}");
    }
    for (path, content) in [
        ("opaque/new", "new"),
        ("merged/new", "new"),
        ("merged/old/file", "old"),
        ("was-dir", "new"),
        ("two", "new"),
        ("was-file/new", "new"),
        ("link/new", "new"),
        ("same", "old"),
        ("proc/file", "old"),
    ] {
        assert_eq!(fs::read_to_string(root.join(path)).unwrap(), content, "{path}");
    }
    assert!(!Path::new("/etc/new").exists());
}

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;

use super::{read_tree, write_image};
use crate::content::{Backing, Content};
use crate::tree::{Entries, Kind, Limits, Meta, Mtime, Tree};

/// One node in a form that compares: path, kind and content, metadata, and the first name of its hard-link group.
type Listing = BTreeMap<Vec<u8>, (String, Vec<u8>, Meta, Vec<u8>)>;

fn listing(tree: &Tree) -> Listing {
    let mut first_names = BTreeMap::new();
    tree.walk()
        .into_iter()
        .map(|(path, id)| {
            let node = tree.node(id);
            let (kind, data) = match &node.kind {
                Kind::Directory(_) => ("dir", Vec::new()),
                Kind::File(content) => ("file", content.read_to_vec(1 << 30).unwrap()),
                Kind::Symlink(target) => ("link", target.to_vec()),
                Kind::Fifo => ("fifo", Vec::new()),
            };
            let first = first_names.entry(id).or_insert_with(|| path.clone()).clone();
            (path, (kind.to_owned(), data, node.meta.clone(), first))
        })
        .collect()
}

fn image_of(tree: &Tree) -> (Vec<u8>, String) {
    let mut bytes = Vec::new();
    let written = write_image(tree, &mut bytes, |_, _| Ok(())).unwrap();
    assert_eq!(written.size, bytes.len() as u64);
    (bytes, written.digest)
}

fn save(dir: &Path, tree: &Tree) -> std::path::PathBuf {
    let path = dir.join("image.erofs");
    std::fs::write(&path, image_of(tree).0).unwrap();
    path
}

#[derive(Debug, Clone)]
enum Op {
    Dir(Vec<Vec<u8>>, Meta),
    File(Vec<Vec<u8>>, Meta, Vec<u8>),
    Symlink(Vec<Vec<u8>>, Vec<u8>),
    Fifo(Vec<Vec<u8>>, Meta),
    Link(usize, Vec<Vec<u8>>),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => proptest::sample::select(b"ab".to_vec()),
        1 => (1u8..=255).prop_filter("no slash", |b| *b != b'/'),
    ];
    prop_oneof![8 => proptest::collection::vec(byte.clone(), 1..4), 1 => proptest::collection::vec(byte, 255)]
        .prop_filter("a name", |name| name != b"." && name != b"..")
}

fn op() -> impl Strategy<Value = Op> {
    let path = || proptest::collection::vec(name(), 1..4);
    let meta = || {
        (
            0u16..0o10000,
            any::<u32>(),
            any::<u32>(),
            any::<u32>(),
            0u32..1_000_000_000,
        )
            .prop_map(|(mode, uid, gid, secs, nanos)| Meta {
                mode,
                uid,
                gid,
                mtime: Mtime {
                    secs: secs.into(),
                    nanos,
                },
                xattrs: BTreeMap::new(),
            })
    };
    let data = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20),
        (0usize..3, 0usize..3).prop_map(|(blocks, extra)| vec![7; (blocks * 4096 + extra).saturating_sub(1)]),
    ];
    prop_oneof![
        2 => (path(), meta()).prop_map(|(p, m)| Op::Dir(p, m)),
        4 => (path(), meta(), data).prop_map(|(p, m, d)| Op::File(p, m, d)),
        1 => (path(), proptest::collection::vec(1u8..=255, 1..4096)).prop_map(|(p, t)| Op::Symlink(p, t)),
        1 => (path(), meta()).prop_map(|(p, m)| Op::Fifo(p, m)),
        2 => (any::<usize>(), path()).prop_map(|(which, p)| Op::Link(which, p)),
    ]
}

/// Applies what can be applied: random paths may lead through files or loops, which the tree refuses.
fn grow(ops: Vec<Op>) -> Tree {
    let mut tree = Tree::default();
    for op in ops {
        let join = |names: Vec<Vec<u8>>| names.join(&b'/');
        let _refused = match op {
            Op::Dir(path, meta) => tree
                .put(&join(path), meta, Kind::Directory(Entries::new()))
                .map(drop),
            Op::File(path, meta, data) => tree.put_file(&join(path), meta, Content::bytes(data)).map(drop),
            Op::Symlink(path, target) => tree.put_symlink(&join(path), &target).map(drop),
            Op::Fifo(path, meta) => tree.put(&join(path), meta, Kind::Fifo).map(drop),
            Op::Link(which, path) => {
                let files: Vec<_> = tree
                    .walk()
                    .into_iter()
                    .filter(|(_, id)| tree.entries(*id).is_none())
                    .collect();
                match files.get(which % files.len().max(1)) {
                    Some(&(_, id)) => tree.link(&join(path), id),
                    None => Ok(()),
                }
            }
        };
    }
    tree
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_tree_survives_its_image(ops in proptest::collection::vec(op(), 0..40)) {
        let tree = grow(ops);
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), &tree);
        let back = read_tree(&Backing::open(&path).unwrap(), Limits::default()).unwrap();
        prop_assert_eq!(listing(&tree), listing(&back));
        // The same tree gives the same bytes, wherever its contents lie.
        prop_assert_eq!(image_of(&tree), image_of(&back));
    }

    #[test]
    fn a_damaged_image_is_an_error_and_never_a_panic(
        ops in proptest::collection::vec(op(), 1..20),
        damage in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..40),
    ) {
        let mut bytes = image_of(&grow(ops)).0;
        for (at, value) in damage {
            let at = 4096 + at % (bytes.len() - 4096).max(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("damaged");
        std::fs::write(&path, bytes).unwrap();
        let _either = read_tree(&Backing::open(&path).unwrap(), Limits::default());
    }
}

/// A tree with everything that a template can have.
fn rich_tree() -> Tree {
    let mut tree = Tree::default();
    let at = |mode: u16, secs: u64| Meta {
        mode,
        uid: 1000,
        gid: 100_000,
        mtime: Mtime { secs, nanos: 5 },
        xattrs: BTreeMap::from([(b"user.x".to_vec(), b"y".to_vec())]),
    };
    for index in 0..12_000 {
        let path = format!("many/file-{index:05}");
        tree.put_file(
            path.as_bytes(),
            at(0o644, 3),
            Content::bytes(format!("{index}").into_bytes()),
        )
        .unwrap();
    }
    let setuid = tree
        .put_file(
            b"bin/setuid",
            at(0o4755, 1_700_000_000),
            Content::bytes(vec![1; 10_000]),
        )
        .unwrap();
    tree.link(b"bin/same", setuid).unwrap();
    tree.put_file(b"empty", at(0o600, 0), Content::bytes(Vec::new()))
        .unwrap();
    tree.put(b"empty-dir", at(0o1777, 9), Kind::Directory(Entries::new()))
        .unwrap();
    tree.put(b"fifo", at(0o600, 9), Kind::Fifo).unwrap();
    tree.put_symlink(b"short", b"bin/same").unwrap();
    tree.put_symlink(b"long", &[b'x'; 4095]).unwrap();
    tree.put_symlink(b"medium", &[b'y'; 4033]).unwrap();
    tree.put_file(b"odd\xff\nname", at(0o644, 1), Content::bytes(*b"odd"))
        .unwrap();
    tree.put_file(&[b'n'; 255], at(0o644, 1), Content::bytes(*b"n"))
        .unwrap();
    tree
}

#[test]
fn fsck_accepts_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &rich_tree());
    let Ok(out) = Command::new("fsck.erofs").arg(&path).output() else {
        eprintln!("SKIPPED: fsck.erofs is not installed (apt install erofs-utils)");
        return;
    };
    assert!(out.status.success(), "{out:?}");
}

#[test]
fn the_kernel_reads_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let tree = rich_tree();
    let path = save(dir.path(), &tree);
    let mount = dir.path().join("mnt");
    std::fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "erofs", "-o", "ro,loop"])
        .arg(&path)
        .arg(&mount)
        .output();
    if !mounted.as_ref().is_ok_and(|out| out.status.success()) {
        eprintln!("SKIPPED: cannot mount EROFS here (needs root and the kernel's erofs): {mounted:?}");
        return;
    }
    let result = std::panic::catch_unwind(|| compare_with_disk(&tree, &mount));
    assert!(Command::new("umount").arg(&mount).status().unwrap().success());
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

fn compare_with_disk(tree: &Tree, mount: &Path) {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::os::unix::fs::MetadataExt;

    let on_disk = std::fs::read_dir(mount.join("many")).unwrap().count();
    assert_eq!(on_disk, 12_000);
    let mut inodes = BTreeMap::new();
    for (path, id) in tree.walk() {
        let node = tree.node(id);
        let relative = std::ffi::OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(&path));
        let real = mount.join(relative);
        let stat = std::fs::symlink_metadata(&real).unwrap();
        assert_eq!(stat.mode() & 0o7777, u32::from(node.meta.mode), "{real:?}");
        assert_eq!((stat.uid(), stat.gid()), (node.meta.uid, node.meta.gid));
        assert_eq!(stat.mtime(), node.meta.mtime.secs as i64);
        assert_eq!(stat.mtime_nsec(), i64::from(node.meta.mtime.nanos));
        assert_eq!(
            *inodes.entry(id).or_insert(stat.ino()),
            stat.ino(),
            "hard links share an inode"
        );
        match &node.kind {
            Kind::Directory(entries) => {
                let mut names: Vec<_> = std::fs::read_dir(&real)
                    .unwrap()
                    .map(|entry| entry.unwrap().file_name().into_vec())
                    .collect();
                names.sort();
                assert!(
                    names
                        .iter()
                        .map(Vec::as_slice)
                        .eq(entries.keys().map(|name| &**name))
                );
            }
            Kind::File(content) => {
                assert_eq!(
                    std::fs::read(&real).unwrap(),
                    content.read_to_vec(1 << 20).unwrap()
                );
            }
            Kind::Symlink(target) => {
                assert_eq!(
                    std::fs::read_link(&real).unwrap().into_os_string().into_vec(),
                    target.to_vec()
                );
            }
            Kind::Fifo => assert_eq!(stat.mode() & 0o170_000, 0o010_000),
        }
    }
}

#[test]
fn images_of_mkfs_are_read_too() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("sub")).unwrap();
    std::fs::write(root.join("sub/file"), "hello").unwrap();
    std::fs::write(root.join("big"), vec![5; 9000]).unwrap();
    std::os::unix::fs::symlink("sub/file", root.join("link")).unwrap();
    let path = dir.path().join("image");
    let made = Command::new("mkfs.erofs").arg(&path).arg(&root).output();
    if !made.as_ref().is_ok_and(|out| out.status.success()) {
        eprintln!("SKIPPED: mkfs.erofs is not installed (apt install erofs-utils): {made:?}");
        return;
    }
    let tree = read_tree(&Backing::open(&path).unwrap(), Limits::default()).unwrap();
    assert_eq!(tree.read(b"link", 100).unwrap().as_deref(), Some(&b"hello"[..]));
    assert_eq!(tree.read(b"big", 10_000).unwrap(), Some(vec![5; 9000]));
}

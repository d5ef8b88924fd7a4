use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use proptest::prelude::*;

use super::{MAX_FILES, Stack, lower_of, read_stack, read_tree, write_image, write_index, write_layer};
use crate::content::{Backing, Content};
use crate::error::Result;
use crate::tree::{Entries, Kind, LastLink, Limits, Meta, Mtime, Tree};

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
    /// Of what is there: these are chosen by number.
    Remove(usize),
    Move(usize, Vec<Vec<u8>>),
    Empty(usize),
    Meta(usize, Meta),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        4 => proptest::sample::select(b"ab".to_vec()),
        1 => (1u8..=255).prop_filter("no slash", |b| *b != b'/'),
    ];
    prop_oneof![8 => proptest::collection::vec(byte.clone(), 1..4), 1 => proptest::collection::vec(byte, 255)]
        .prop_filter("a name", |name| name != b"." && name != b"..")
}

fn meta() -> impl Strategy<Value = Meta> {
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
}

/// What may happen to a tree that is there.
fn change() -> impl Strategy<Value = Op> {
    let path = || proptest::collection::vec(name(), 1..4);
    prop_oneof![
        4 => op(),
        2 => any::<usize>().prop_map(Op::Remove),
        1 => (any::<usize>(), path()).prop_map(|(which, p)| Op::Move(which, p)),
        1 => any::<usize>().prop_map(Op::Empty),
        2 => (any::<usize>(), meta()).prop_map(|(which, m)| Op::Meta(which, m)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let path = || proptest::collection::vec(name(), 1..4);
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
    edit(&mut tree, ops);
    tree
}

fn edit(tree: &mut Tree, ops: Vec<Op>) {
    for op in ops {
        let all = tree.walk();
        let chosen = |which: usize| all[which % all.len()].clone();
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
            Op::Remove(which) => tree.remove(&chosen(which).0),
            Op::Empty(which) => tree.clear(&chosen(which).0),
            Op::Meta(which, meta) => {
                *tree.meta_mut(chosen(which).1) = meta;
                Ok(())
            }
            Op::Move(which, to) => {
                let (from, id) = chosen(which);
                match tree.entries(id) {
                    Some(_) => Ok(()),
                    None => tree.remove(&from).and_then(|()| tree.link(&join(to), id)),
                }
            }
        };
    }
}

/// Images in a directory, by their digests.
struct Shelf(tempfile::TempDir);

impl Shelf {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn put(&self, bytes: &[u8]) -> String {
        use sha2::Digest;
        let digest = hex::encode(sha2::Sha256::digest(bytes));
        std::fs::write(self.0.path().join(&digest), bytes).unwrap();
        digest
    }

    fn path(&self, digest: &str) -> std::path::PathBuf {
        self.0.path().join(digest)
    }

    /// The files of an image, from the top down.
    fn files(&self, digest: &str) -> Result<Vec<(String, Arc<Backing>)>> {
        let top = Backing::open(&self.path(digest))?;
        let mut files = vec![(digest.to_owned(), Arc::clone(&top))];
        for lower in lower_of(&top)? {
            let file = Backing::open(&self.path(&lower))?;
            files.push((lower, file));
        }
        Ok(files)
    }

    fn read(&self, digest: &str) -> Result<Tree> {
        read_stack(&Arc::new(Stack::open(self.files(digest)?)?), Limits::default())
    }

    /// The tree as a layer on what it was read from: its digest, and how long it is.
    fn add(&self, tree: &Tree) -> (String, u64) {
        let below = tree.below().unwrap();
        let mut bytes = Vec::new();
        match write_layer(tree, below, &mut bytes, |_, _| Ok(())).unwrap() {
            None => (below.digest().to_owned(), 0),
            Some(written) => {
                assert_eq!(written.size, bytes.len() as u64);
                assert_eq!(written.digest, self.put(&bytes));
                (written.digest, written.size)
            }
        }
    }
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever is changed, and in however many steps: the layers are the same tree as one image of it all.
    #[test]
    fn layers_are_what_one_image_would_be(
        ops in proptest::collection::vec(op(), 0..30),
        steps in proptest::collection::vec(proptest::collection::vec(change(), 0..6), 1..5),
    ) {
        let shelf = Shelf::new();
        let mut flat = grow(ops);
        let mut top = shelf.put(&image_of(&flat).0);
        for changes in steps {
            edit(&mut flat, changes.clone());
            let mut tree = shelf.read(&top).unwrap();
            edit(&mut tree, changes);
            prop_assert_eq!(listing(&flat), listing(&tree));
            let (digest, _) = shelf.add(&tree);
            let back = shelf.read(&digest).unwrap();
            prop_assert_eq!(listing(&flat), listing(&back));
            // The same changes give the same bytes, and no changes give none.
            prop_assert_eq!(&shelf.add(&tree).0, &digest);
            prop_assert_eq!(shelf.add(&back), (digest.clone(), 0));
            // What is made of it for a kernel is written front to back in one go, and whole again it is one image.
            prop_assert_eq!(image_of(&flat), image_of(&back));
            top = digest;
        }
    }

    #[test]
    fn damaged_layers_are_an_error_and_never_a_panic(
        ops in proptest::collection::vec(op(), 1..20),
        changes in proptest::collection::vec(change(), 1..10),
        damage in proptest::collection::vec((any::<bool>(), any::<usize>(), any::<u8>()), 1..40),
        cut in any::<usize>(),
    ) {
        let shelf = Shelf::new();
        let base = shelf.put(&image_of(&grow(ops)).0);
        let mut tree = shelf.read(&base).unwrap();
        edit(&mut tree, changes);
        let (top, _) = shelf.add(&tree);
        for (below, at, value) in damage {
            let path = shelf.path(if below { &base } else { &top });
            let mut bytes = std::fs::read(&path).unwrap();
            // The superblock has a checksum, which would make this a test of that alone.
            let at = 4096 + at % (bytes.len() - 4096).max(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
            std::fs::write(&path, bytes).unwrap();
        }
        let _either = shelf.read(&top);
        // A file that is torn off is noticed before anything is read from it.
        if top != base {
            let bytes = std::fs::read(shelf.path(&base)).unwrap();
            std::fs::write(shelf.path(&base), &bytes[..cut % bytes.len()]).unwrap();
            prop_assert!(shelf.read(&top).is_err());
        }
    }
}

fn at_mode(mode: u16) -> Meta {
    Meta::root(mode)
}

/// A base with two files of which one is large, in a tree with something beside it.
fn base_of(shelf: &Shelf) -> String {
    let mut tree = Tree::default();
    tree.put_file(b"bin/large", at_mode(0o755), Content::bytes(vec![7; 1 << 20]))
        .unwrap();
    tree.put_file(b"etc/small", at_mode(0o644), Content::bytes(*b"small"))
        .unwrap();
    for index in 0..2000 {
        let path = format!("many/file-{index:05}");
        tree.put_file(path.as_bytes(), at_mode(0o644), Content::bytes(*b"x"))
            .unwrap();
    }
    shelf.put(&image_of(&tree).0)
}

#[test]
fn a_layer_holds_what_changed_and_no_more() {
    let shelf = Shelf::new();
    let base = base_of(&shelf);
    let changed = |change: &dyn Fn(&mut Tree)| {
        let mut tree = shelf.read(&base).unwrap();
        change(&mut tree);
        shelf.add(&tree).1
    };
    assert_eq!(changed(&|_| ()), 0);
    // A block for the superblock, one for inodes, and where there is one, the data.
    let small = changed(&|tree| {
        tree.put_file(b"etc/new", at_mode(0o644), Content::bytes(*b"new"))
            .unwrap();
    });
    assert_eq!(small, 3 * 4096);
    let owned = changed(&|tree| {
        let id = tree.lookup(b"bin/large", LastLink::Keep).unwrap().unwrap();
        tree.meta_mut(id).uid = 1000;
    });
    assert_eq!(owned, 2 * 4096, "its data stays where it is");
    assert_eq!(changed(&|tree| tree.remove(b"bin").unwrap()), 2 * 4096);
    let linked = changed(&|tree| {
        let id = tree.lookup(b"bin/large", LastLink::Keep).unwrap().unwrap();
        tree.link(b"etc/other", id).unwrap();
    });
    assert_eq!(linked, 2 * 4096);
}

#[test]
fn two_that_looked_the_same_stay_two() {
    let shelf = Shelf::new();
    let mut tree = Tree::default();
    let id = tree
        .put_file(b"a", at_mode(0o644), Content::bytes(*b"same"))
        .unwrap();
    tree.link(b"b", id).unwrap();
    let base = shelf.put(&image_of(&tree).0);
    let mut tree = shelf.read(&base).unwrap();
    let id = tree.lookup(b"b", LastLink::Keep).unwrap().unwrap();
    let node = tree.node(id).clone();
    tree.remove(b"b").unwrap();
    tree.link(b"c", id).unwrap();
    let other = tree.put(b"b", node.meta, node.kind).unwrap();
    tree.link(b"d", other).unwrap();
    let back = shelf.read(&shelf.add(&tree).0).unwrap();
    assert_eq!(listing(&tree), listing(&back));
}

#[test]
fn a_stack_of_other_files_is_refused() {
    let shelf = Shelf::new();
    let base = base_of(&shelf);
    let mut tree = shelf.read(&base).unwrap();
    tree.remove(b"etc").unwrap();
    let middle = shelf.add(&tree).0;
    let mut tree = shelf.read(&middle).unwrap();
    tree.remove(b"bin").unwrap();
    let top = shelf.add(&tree).0;
    let good = shelf.files(&top).unwrap();
    assert_eq!(good.len(), 3);
    Stack::open(good.clone()).unwrap();
    let refused = |files: Vec<(String, Arc<Backing>)>| assert!(Stack::open(files).is_err());
    refused(Vec::new());
    refused(good[..1].to_vec());
    refused(good[..2].to_vec());
    refused(vec![good[0].clone(), good[2].clone(), good[1].clone()]);
    refused([good.clone(), vec![good[2].clone()]].concat());
    refused(vec![good[2].clone(), good[1].clone()]);
    // A layer alone is no image, to us or to anybody.
    assert!(read_tree(&good[0].1, Limits::default()).is_err());
    // The superblock with its table has a checksum: it cannot point elsewhere by accident.
    for at in [
        1024 + 80,
        1024 + 86,
        1024 + 112,
        1152,
        1152 + 64,
        1152 + 68,
        1152 + 128,
    ] {
        let mut bytes = std::fs::read(shelf.path(&top)).unwrap();
        bytes[at] ^= 1;
        let path = shelf.path("damaged");
        std::fs::write(&path, bytes).unwrap();
        assert!(lower_of(&Backing::open(&path).unwrap()).is_err(), "{at}");
    }
}

/// Even one whose checksum is right.
#[test]
fn what_a_layer_lies_on_has_a_digest_for_a_name() {
    let shelf = Shelf::new();
    let mut tree = shelf.read(&base_of(&shelf)).unwrap();
    tree.remove(b"etc").unwrap();
    let top = shelf.add(&tree).0;
    let mut bytes = std::fs::read(shelf.path(&top)).unwrap();
    bytes[1152..1152 + 9].copy_from_slice(b"../secret");
    bytes[1024 + 4..1024 + 8].fill(0);
    let checksum = !crc32c::crc32c(&bytes[1024..4096]);
    bytes[1024 + 4..1024 + 8].copy_from_slice(&checksum.to_le_bytes());
    let path = shelf.path("hostile");
    std::fs::write(&path, bytes).unwrap();
    let error = lower_of(&Backing::open(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("no digest"), "{error}");
}

#[test]
fn an_image_has_so_many_files_and_no_more() {
    let shelf = Shelf::new();
    let mut top = base_of(&shelf);
    for index in 1..MAX_FILES {
        let mut tree = shelf.read(&top).unwrap();
        tree.put_file(
            format!("new-{index}").as_bytes(),
            at_mode(0o644),
            Content::bytes(*b"new"),
        )
        .unwrap();
        top = shelf.add(&tree).0;
    }
    let mut tree = shelf.read(&top).unwrap();
    tree.remove(b"new-1").unwrap();
    let below = Arc::clone(tree.below().unwrap());
    assert!(write_layer(&tree, &below, &mut Vec::new(), |_, _| Ok(())).is_err());
    // All of them fit into one index.
    let mut index = Vec::new();
    write_index(&tree, &below, &mut index).unwrap();
    // Those on the lowest become one.
    let mut bytes = Vec::new();
    let lowest = below.lowest().unwrap();
    write_layer(&tree, &lowest, &mut bytes, |_, _| Ok(())).unwrap();
    let back = shelf.read(&shelf.put(&bytes)).unwrap();
    assert_eq!(listing(&tree), listing(&back));
}

/// A tree with everything that a template can have, some of it in a layer.
fn rich_layers(shelf: &Shelf) -> Tree {
    let mut tree = shelf.read(&shelf.put(&image_of(&rich_tree()).0)).unwrap();
    tree.put_file(b"new/file", at_mode(0o644), Content::bytes(vec![3; 9000]))
        .unwrap();
    tree.remove(b"many/file-00007").unwrap();
    let changed = tree.lookup(b"bin/setuid", LastLink::Keep).unwrap().unwrap();
    tree.meta_mut(changed).uid = 7;
    let top = shelf.add(&tree).0;
    shelf.read(&top).unwrap()
}

#[test]
fn the_kernel_reads_an_index_with_its_files() {
    let shelf = Shelf::new();
    let tree = rich_layers(&shelf);
    let below = tree.below().unwrap();
    let index = shelf.path("index");
    let mut bytes = Vec::new();
    write_index(&tree, below, &mut bytes).unwrap();
    std::fs::write(&index, bytes).unwrap();
    let files = shelf.files(below.digest()).unwrap();
    let mut options = "ro,loop".to_owned();
    let mut devices = Vec::new();
    for (digest, _) in &files {
        let attached = Command::new("losetup")
            .args(["-rf", "--show"])
            .arg(shelf.path(digest))
            .output();
        match attached {
            Ok(out) if out.status.success() => {
                let device = String::from_utf8(out.stdout).unwrap().trim().to_owned();
                options += &format!(",device={device}");
                devices.push(device);
            }
            other => eprintln!("SKIPPED: no loop devices here: {other:?}"),
        }
    }
    let mount = shelf.path("mnt");
    std::fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "erofs", "-o", &options])
        .arg(&index)
        .arg(&mount)
        .output();
    if mounted.as_ref().is_ok_and(|out| out.status.success()) {
        let result = std::panic::catch_unwind(|| compare_many(&tree, &mount, 11_999));
        assert!(Command::new("umount").arg(&mount).status().unwrap().success());
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    } else {
        eprintln!("SKIPPED: cannot mount EROFS here (needs root and the kernel's erofs): {mounted:?}");
    }
    for device in devices {
        let _ = Command::new("losetup").args(["-d", &device]).status();
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
    compare_many(tree, mount, 12_000);
}

fn compare_many(tree: &Tree, mount: &Path, many: usize) {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::os::unix::fs::MetadataExt;

    let on_disk = std::fs::read_dir(mount.join("many")).unwrap().count();
    assert_eq!(on_disk, many);
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

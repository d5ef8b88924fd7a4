use tar::EntryType;

use super::*;
use crate::fixture::Archive;
use crate::tree::Limits;

fn apply_all(layers: Vec<Archive>) -> Result<Tree> {
    apply_limited(layers, Limits::default())
}

fn apply_limited(layers: Vec<Archive>, limits: Limits) -> Result<Tree> {
    let mut tree = Tree::new(limits);
    for layer in layers {
        apply(&mut tree, Content::bytes(layer.bytes()), Whiteouts::Oci, |_| {
            Ok(())
        })?;
    }
    Ok(tree)
}

/// Every path with what is there, in order.
fn show(tree: &Tree) -> String {
    let mut lines = Vec::new();
    for (path, id) in tree.walk().into_iter().skip(1) {
        let path = String::from_utf8_lossy(&path).into_owned();
        lines.push(match &tree.node(id).kind {
            Kind::Directory(_) => format!("{path}/"),
            Kind::File(content) => {
                let data = content.read_to_vec(100).unwrap();
                format!("{path} = {}", String::from_utf8_lossy(&data))
            }
            Kind::Symlink(target) => format!("{path} -> {}", String::from_utf8_lossy(target)),
            Kind::Fifo => format!("{path} |"),
        });
    }
    lines.join("\n")
}

#[track_caller]
fn check(layers: Vec<Archive>, expected: &[&str]) {
    assert_eq!(show(&apply_all(layers).unwrap()), expected.join("\n"));
}

#[track_caller]
fn check_refused(layer: Archive, expected: &str) {
    let error = apply_all(vec![layer]).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn later_layers_and_later_entries_win() {
    check(
        vec![
            Archive::new().file("a", "1").file("a", "2").file("d/x", "1"),
            Archive::new().file("d/x", "2").file("b", "1"),
        ],
        &["/a = 2", "/b = 1", "/d/", "/d/x = 2"],
    );
}

#[test]
fn whiteouts_hide_what_is_below_and_not_what_is_beside() {
    check(
        vec![
            Archive::new()
                .file("d/old", "1")
                .file("d/stay", "1")
                .file("gone/x", "1"),
            Archive::new()
                .file("d/.wh.old", "")
                .file(".wh.gone", "")
                .file("d/new", "2"),
        ],
        &["/d/", "/d/new = 2", "/d/stay = 1"],
    );
    // In either order within one layer, an opaque directory keeps what its own layer brought.
    for opaque_first in [true, false] {
        let mut top = Archive::new();
        if opaque_first {
            top = top.file("d/.wh..wh..opq", "");
        }
        top = top.dir("d/sub").file("d/sub/new", "2");
        if !opaque_first {
            top = top.file("d/.wh..wh..opq", "");
        }
        check(
            vec![Archive::new().file("d/old", "1").file("d/sub/old", "1"), top],
            &["/d/", "/d/sub/", "/d/sub/new = 2"],
        );
    }
    check(vec![Archive::new().file("no/such/.wh.x", "")], &[]);
}

#[test]
fn overlay_whiteouts_are_devices() {
    let below = Archive::new()
        .file("a", "1")
        .file("b", "1")
        .file("c", "1")
        .file("d/e", "1");
    let mut tree = apply_all(vec![below]).unwrap();
    // As gVisor says it: one whiteout, and links to it.
    let upper = Archive::new()
        .entry(EntryType::Char, "a", "", b"")
        .entry(EntryType::Link, "c", "a", b"")
        .entry(EntryType::Link, "d/e", "a", b"")
        .file(".wh.b", "a file");
    apply(
        &mut tree,
        Content::bytes(upper.bytes()),
        Whiteouts::Overlay,
        |_| Ok(()),
    )
    .unwrap();
    assert_eq!(show(&tree), "/.wh.b = a file\n/b = 1\n/d/");
}

#[test]
fn paths_lead_through_links_inside_the_tree_only() {
    check(
        vec![
            Archive::new()
                .dir("usr/lib")
                .symlink("lib", "usr/lib")
                .symlink("up", "../../../../usr"),
            Archive::new()
                .file("lib/x", "1")
                .file("up/y", "2")
                .file("/abs", "3"),
        ],
        &[
            "/abs = 3",
            "/lib -> usr/lib",
            "/up -> ../../../../usr",
            "/usr/",
            "/usr/lib/",
            "/usr/lib/x = 1",
            "/usr/y = 2",
        ],
    );
    // A link to the host's file is just a link; writing to it replaces the link.
    check(
        vec![
            Archive::new().symlink("passwd", "/etc/passwd"),
            Archive::new().file("passwd", "mine"),
        ],
        &["/passwd = mine"],
    );
    // A link in the middle of a path that dangles: directories are made where it points, inside.
    check(
        vec![
            Archive::new().symlink("d", "/etc"),
            Archive::new().file("d/f", "1"),
        ],
        &["/d -> /etc", "/etc/", "/etc/f = 1"],
    );
}

#[test]
fn devices_are_left_out_and_links_share_a_node() {
    let tree = apply_all(vec![
        Archive::new()
            .entry(EntryType::Char, "null", "", b"")
            .entry(EntryType::Block, "sda", "", b"")
            .entry(EntryType::Fifo, "pipe", "", b"")
            .file("a", "1")
            .hard_link("b", "a")
            .hard_link("a", "a"),
    ])
    .unwrap();
    assert_eq!(show(&tree), "/a = 1\n/b = 1\n/pipe |");
    let node = |path: &[u8]| tree.lookup(path, LastLink::Keep).unwrap();
    assert_eq!(node(b"a"), node(b"b"));
}

#[test]
fn hostile_entries_are_refused() {
    check_refused(Archive::new().file("../x", ""), "`..` in a path");
    check_refused(Archive::new().file("a/../../x", ""), "`..` in a path");
    check_refused(Archive::new().hard_link("x", "../../etc/shadow"), "hard link");
    check_refused(Archive::new().hard_link("x", "/etc/shadow"), "not in the image");
    check_refused(Archive::new().dir("d").hard_link("x", "d"), "directory");
    check_refused(Archive::new().file("f", "").file("f/x", ""), "not a directory");
    check_refused(
        Archive::new().symlink("a", "b").symlink("b", "a").file("a/x", ""),
        "too many symbolic links",
    );
    check_refused(Archive::new().file(".wh...", ""), "names nothing");
    check_refused(Archive::new().file(".wh.", ""), "names nothing");
    check_refused(Archive::new().entry(EntryType::GNUSparse, "s", "", b""), "sparse");
    check_refused(
        Archive::new().entry(EntryType::new(b'Z'), "s", "", b""),
        "not supported",
    );
    check_refused(Archive::new().symlink("s", ""), "target");
}

#[test]
fn growth_is_limited() {
    let limits = Limits {
        entries: 5,
        depth: 4,
        bytes: 10,
        memory: 10_000,
    };
    let refused = |layer: Archive| apply_limited(vec![layer], limits).unwrap_err().to_string();
    assert!(refused(Archive::new().dir("a/b/c/d/e")).contains("depth"));
    assert!(refused(Archive::new().file("a", "123456").file("a", "123456")).contains("size"));
    let many = (0..6).fold(Archive::new(), |archive, index| {
        archive.file(&format!("{index}"), "")
    });
    assert!(refused(many).contains("number of files"));
    let again = (0..100).fold(Archive::new(), |archive, _| archive.dir("d"));
    assert!(refused(again).contains("memory"));
}

#[test]
fn a_broken_archive_is_an_error() {
    let good = Archive::new().file("a", "some data").bytes();
    let read = |bytes: Vec<u8>| {
        apply(
            &mut Tree::default(),
            Content::bytes(bytes),
            Whiteouts::Oci,
            |_| Ok(()),
        )
    };
    assert!(read(good[..100].to_vec()).is_err());
    assert!(read(good[..514].to_vec()).is_err());
    let mut wrong = good;
    wrong[0] = b'b';
    assert!(read(wrong).unwrap_err().to_string().contains("checksum"));
    // A declared size of 2^60 must not be believed, nor a name of gigabytes be read.
    for kind in [EntryType::Regular, EntryType::GNULongName, EntryType::XHeader] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(1 << 60);
        header.set_cksum();
        assert!(read(header.as_bytes().to_vec()).is_err());
    }
}

/// One attribute as a PAX record.
fn attribute(name: &str, value: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder
        .append_pax_extensions([(format!("SCHILY.xattr.user.{name}").as_str(), value)])
        .unwrap();
    // Without the end mark.
    let mut bytes = builder.into_inner().unwrap();
    bytes.truncate(bytes.len() - 1024);
    bytes
}

#[test]
fn what_precedes_one_entry_is_bounded_as_a_whole() {
    let file = Archive::new().file("a", "").bytes();
    let with = |count: usize, size: usize| {
        let value = vec![0; size];
        let mut bytes: Vec<u8> = (0..count)
            .flat_map(|index| attribute(&index.to_string(), &value))
            .collect();
        bytes.extend_from_slice(&file);
        apply(
            &mut Tree::default(),
            Content::bytes(bytes),
            Whiteouts::Oci,
            |_| Ok(()),
        )
    };
    assert!(with(3, 64 << 10).is_ok());
    // A tiny layer could fill the memory otherwise: what is said about an entry is kept until it comes.
    for (count, size) in [(20, 64 << 10), (1200, 1)] {
        let error = with(count, size).unwrap_err().to_string();
        assert!(error.contains("too many extended headers"), "{error}");
    }
    let error = with(1, 2 << 20).unwrap_err().to_string();
    assert!(error.contains("an extended header of"), "{error}");
}

#[test]
fn long_names_times_and_attributes_are_read() {
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o6755);
    header.set_uid(3_000_000);
    header.set_gid(0);
    builder
        .append_pax_extensions([
            ("mtime", &b"123.25"[..]),
            ("SCHILY.xattr.security.capability", b"\x01\0"),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ])
        .unwrap();
    builder.append_data(&mut header, &long, &b"x"[..]).unwrap();
    let mut tree = Tree::default();
    apply(
        &mut tree,
        Content::bytes(builder.into_inner().unwrap()),
        Whiteouts::Oci,
        |_| Ok(()),
    )
    .unwrap();
    let id = tree.lookup(long.as_bytes(), LastLink::Keep).unwrap().unwrap();
    let meta = &tree.node(id).meta;
    assert_eq!((meta.mode, meta.uid), (0o6755, 3_000_000));
    assert_eq!((meta.mtime.secs, meta.mtime.nanos), (123, 250_000_000));
    assert_eq!(meta.xattrs.keys().collect::<Vec<_>>(), [b"security.capability"]);
}

mod random {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn random_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 512..4096), at in 0usize..600) {
            let good = Archive::new().file("a/b", "data").bytes();
            let at = at.min(bytes.len());
            bytes.splice(..at, good[..at].iter().copied());
            let _either = apply(&mut Tree::default(), Content::bytes(bytes), Whiteouts::Oci, |_| Ok(()));
        }
    }
}

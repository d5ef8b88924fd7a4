//! Trees and archives from strangers: images, layers, build contexts, exported state.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use atoll_archive::{Budget, Dialect, Ids};
use atoll_image::{Backing, Content, Kind, Limits, Meta, Stack, Tree, Whiteouts};

use super::{scratch, texts};

/// Small enough that an input which grows is seen.
const SMALL: Limits = Limits {
    entries: 4096,
    depth: 64,
    bytes: 64 << 20,
    memory: 1 << 20,
};

/// The input as a file that has no name.
fn file(input: &[u8]) -> std::fs::File {
    use std::io::Write as _;
    let mut file = tempfile::tempfile_in("/dev/shm")
        .or_else(|_| tempfile::tempfile())
        .expect("a file without a name can be made");
    file.write_all(input).expect("and be written");
    file
}

/// Paths, kinds, modes and short contents: what has to be the same after it was written and read.
fn described(tree: &Tree) -> Vec<(Vec<u8>, String)> {
    let mut all = Vec::new();
    for (path, id) in tree.walk() {
        let node = tree.node(id);
        let kind = match &node.kind {
            Kind::Directory(_) => "directory".to_owned(),
            Kind::File(content) => {
                let hash = content.read_to_vec(1 << 16).map(|bytes| blake3::hash(&bytes));
                format!("file {} {:?}", content.len(), hash.ok())
            }
            Kind::Symlink(target) => format!("link {target:?}"),
            Kind::Fifo => "fifo".to_owned(),
        };
        let (mode, uid, gid) = (node.meta.mode, node.meta.uid, node.meta.gid);
        all.push((path, format!("{kind} {mode:o} {uid} {gid}")));
    }
    all
}

/// An image that can be read can be written, and is the same when it is read again.
pub fn erofs(input: &[u8]) {
    let backing = Backing::from_file(file(input), Path::new("fuzzed")).expect("a file has a size");
    let Ok(tree) = atoll_image::read_tree(&backing, SMALL) else {
        return;
    };
    rewrite(&tree);
}

/// What is a layer on a small image, or says so, is read with it or refused; and what differs from what can be read can be
/// written as a layer on it.
pub fn erofs_layers(input: &[u8]) {
    let (digest, lowest) = &*crate::seeds::SMALL_IMAGE;
    let lowest = Backing::from_file(file(lowest), Path::new("lowest")).expect("a file has a size");
    let lowest = (digest.clone(), lowest);
    let mut top = input.to_vec();
    atoll_image::fuzzing::repair_checksum(&mut top);
    let top = Backing::from_file(file(&top), Path::new("fuzzed")).expect("a file has a size");
    let files = vec![("0".repeat(64), top), lowest.clone()];
    for files in [files, vec![lowest]] {
        let Ok(stack) = Stack::open(files).map(Arc::new) else {
            continue;
        };
        let Ok(mut tree) = atoll_image::read_stack(&stack, SMALL) else {
            continue;
        };
        rewrite(&tree);
        let _full = tree.put_file(b"new", Meta::root(0o644), Content::bytes(input));
        let _refused = atoll_image::write_layer(&tree, &stack, &mut Vec::new(), |_, _| Ok(()));
    }
}

/// Files that share their bytes, or have holes, may be far larger than what they were read from: only small trees are written.
fn rewrite(tree: &Tree) {
    let bytes = tree.walk().into_iter().map(|(_, id)| match &tree.node(id).kind {
        Kind::File(content) => content.len(),
        Kind::Directory(_) | Kind::Symlink(_) | Kind::Fifo => 0,
    });
    if bytes.fold(0, u64::saturating_add) > 1 << 20 {
        return;
    }
    let mut written = Vec::new();
    if atoll_image::write_image(tree, &mut written, |_, _| Ok(())).is_err() {
        return;
    }
    let backing = Backing::from_file(file(&written), Path::new("written")).expect("a file has a size");
    let again = atoll_image::read_tree(&backing, Limits::default()).expect("what was written can be read");
    assert_eq!(described(&again), described(tree));
}

/// Two programs read these heads, ours and the `tar` crate here. Where both read all of a stream without a complaint, they read
/// the same names and sizes.
pub fn tar_heads(input: &[u8]) {
    let (ours, end) = atoll_archive::fuzzing::heads(input);
    assert!(
        ours.len() <= input.len() / 512 + 1,
        "more heads than there is room for"
    );
    for head in &ours {
        let climbs = head.path.split(|byte| *byte == b'/').any(|part| part == b"..");
        assert!(!climbs && head.path.first() != Some(&b'/'), "{head:?} leads out");
        assert!(!head.path.contains(&0), "{head:?} ends early for others");
    }
    if end.is_err() {
        return;
    }
    let mut theirs = tar::Archive::new(input);
    let Ok(entries) = theirs.entries() else { return };
    let mut known = Vec::new();
    for entry in entries {
        let Ok(mut entry) = entry else { return };
        // Holes and other ways of saying more than the head does are their own story.
        if !entry.header().entry_type().is_file() {
            return;
        }
        let (path, size) = (entry.path_bytes().into_owned(), entry.size());
        if std::io::copy(&mut entry.by_ref().take(1 << 20), &mut std::io::sink()).is_err() {
            return;
        }
        known.push((path, size));
    }
    for ((path, size), head) in known.iter().zip(&ours) {
        let plain: Vec<&[u8]> = path
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
            .collect();
        assert_eq!(plain.join(&b'/'), head.path, "another name than tar reads");
        assert_eq!(*size, head.size, "another size than tar reads");
    }
}

/// A layer that is applied is a tree in which nothing climbs, and which can be written as an image.
pub fn tar_layer(input: &[u8]) {
    for whiteouts in [Whiteouts::Oci, Whiteouts::Overlay, Whiteouts::None] {
        let mut tree = Tree::new(SMALL);
        let content = Content::bytes(input.to_vec());
        let Ok(report) = atoll_image::apply_layer(&mut tree, content, whiteouts, |_| Ok(())) else {
            continue;
        };
        assert!(report.entries <= input.len() as u64 / 512 + 1);
        for (path, _) in tree.walk() {
            let climbs = path.split(|byte| *byte == b'/').any(|part| part == b"..");
            assert!(!climbs, "{path:?} climbs");
        }
        rewrite(&tree);
    }
}

/// Whatever a stream says, nothing beside the directory changes, the budget holds, and what was made can be packed and unpacked
/// to the same bytes.
pub fn tar_unpack(input: &[u8]) {
    let directory = scratch();
    let beside = directory.path().join("beside");
    std::fs::write(&beside, "untouched").expect("a file can be written");
    let unpacked = |name: &str, mut stream: &[u8]| -> Option<Vec<u8>> {
        let root = directory.path().join(name);
        std::fs::create_dir(&root).expect("a directory can be made");
        let open = std::fs::File::open(&root).expect("and opened");
        let mut budget = Budget {
            bytes: 1 << 20,
            entries: 200,
            depth: 20,
            private: true,
        };
        let done =
            atoll_archive::unpack_within(open.as_fd(), Dialect::Plain, Ids::Own, &mut budget, &mut stream);
        let tally = done.ok()?;
        assert!(
            tally.entries <= 200 && tally.bytes <= 1 << 20,
            "{tally:?} is beyond the budget"
        );
        let mut packed = Vec::new();
        atoll_archive::pack(open.as_fd(), Dialect::Plain, Ids::Own, &mut packed)
            .expect("a tree can be packed");
        Some(packed)
    };
    let first = unpacked("one", input);
    assert_eq!(std::fs::read(&beside).expect("it is still there"), b"untouched");
    let entries = std::fs::read_dir(directory.path())
        .expect("a directory can be read")
        .count();
    assert_eq!(entries, 2, "something was made beside the directory");
    if let Some(packed) = first {
        let again = unpacked("two", &packed).expect("what was packed can be unpacked");
        assert!(
            again == packed,
            "a tree was packed differently after it was packed and unpacked"
        );
    }
}

pub fn oci_documents(input: &[u8]) {
    let _ = atoll_image::fuzzing::oci_document(input);
}

/// The shape of a parsed file stays within its text, and words expand to what is there.
pub fn dockerfile(input: &[u8]) {
    let Some(text) = texts(input).map(|texts| texts[0]) else {
        return;
    };
    for word in text.lines().take(20) {
        let lookup = |name: &str| (name.len() < 4).then(|| "value".to_owned());
        if let Ok(expanded) = atoll_image::fuzzing::expand(word, '\\', &lookup) {
            let (before, after) = (word.len(), expanded.len());
            assert!(after <= 5 * before + 16, "a word of {before} became {after}");
        }
    }
    let Ok(parsed) = atoll_image::parse_dockerfile(text) else {
        return;
    };
    let lines = text.lines().count();
    let mut steps = 0;
    for stage in &parsed.stages {
        assert!(
            (1..=lines).contains(&stage.line),
            "a stage at line {} of {lines}",
            stage.line
        );
        for step in &stage.steps {
            assert!(
                (1..=lines).contains(&step.line),
                "a step at line {} of {lines}",
                step.line
            );
            steps += 1;
        }
    }
    assert!(steps <= lines, "{steps} steps in {lines} lines");
}

/// An ignore file and a path: the last rule decides, and a literal matches itself alone.
pub fn dockerignore(input: &[u8]) {
    use atoll_image::fuzzing::{component, leaves_out};
    let Some(texts) = texts(input) else { return };
    let ignore = texts[0];
    let path = texts.get(1).copied().unwrap_or("a/b/c");
    let parts: Vec<&[u8]> = path
        .split('/')
        .filter(|part| !part.is_empty())
        .map(str::as_bytes)
        .collect();
    if !parts.is_empty() {
        assert!(
            leaves_out(&format!("{ignore}\n**"), &parts),
            "a last rule about everything"
        );
        assert!(
            !leaves_out(&format!("{ignore}\n!**"), &parts),
            "a last exception for everything"
        );
    }
    for pattern in ignore.lines().take(4) {
        let name = parts.first().copied().unwrap_or(b"x");
        let matched = component(pattern.as_bytes(), name);
        if !pattern.contains(['*', '?', '[', '\\']) {
            assert_eq!(matched, pattern.as_bytes() == name, "{pattern:?} {name:?}");
        }
    }
}

pub fn vault_manifest(input: &[u8]) {
    let _ = atoll_vault::fuzzing::manifest(input);
}

/// An imported file is exported as one that is imported as the same; a wrong one leaves nothing behind.
pub fn snapshot_file(input: &[u8]) {
    const MOST: u64 = 1 << 20;
    let directory = scratch();
    let vault = atoll_vault::Vault::open(directory.path(), None).expect("a vault can be made");
    // As if the file were whole: whoever makes one can hash it.
    let mut file = input.to_vec();
    file.extend_from_slice(blake3::hash(input).as_bytes());
    let Ok((header, _)) = vault.import(&mut &file[..], "one", "domain", MOST) else {
        assert!(!vault.contains("one"), "something of a refused file is there");
        return;
    };
    let mut exported = Vec::new();
    vault
        .export("one", &header, &mut exported)
        .expect("what was imported can be exported");
    let (again, _) = vault
        .import(&mut &exported[..], "two", "domain", MOST)
        .expect("what was exported can be imported");
    assert_eq!(again, header);
    let mut twice = Vec::new();
    vault
        .export("two", &again, &mut twice)
        .expect("and exported again");
    assert!(exported == twice, "an export changed on its way");
}

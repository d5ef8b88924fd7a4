//! Images of several files.

use atoll_image::{Backing, Content, LastLink, Limits, Meta, Stack, Tree, read_stack, read_tree};

use super::saving::{LONG, background, output, resources};
use super::*;
use crate::SaveKind;

/// Writes the tree as a layer on what it was read from.
fn add(
    tree: &Tree,
    below: Vec<(String, Arc<Backing>)>,
    at: &Path,
) -> atoll_image::Result<Vec<(String, Arc<Backing>)>> {
    let stack = Stack::open(below.clone())?;
    let name = at.join(format!("layer-{}.erofs", below.len()));
    let mut file = fs::File::create(&name).unwrap();
    // Of what was read from these very files.
    let written =
        atoll_image::write_layer(tree, &stack, &mut file, |_, _| Ok(()))?.expect("something changed");
    let mut files = vec![(written.digest, Backing::open(&name)?)];
    files.extend(below);
    Ok(files)
}

fn read(files: &[(String, Arc<Backing>)]) -> atoll_image::Result<Tree> {
    read_stack(&Arc::new(Stack::open(files.to_vec())?), Limits::default())
}

/// The same root as a plain image, in three files: the first layer brings what the lowest lacks, and the second takes away what
/// it has too much of.
pub(super) fn split(image: &Path, at: &Path) -> atoll_image::Result<Vec<PathBuf>> {
    let whole = read_tree(&Backing::open(image)?, Limits::default())?;
    let mut lowest = whole.clone();
    lowest.remove(b"etc/passwd")?;
    lowest.remove(b"lower/moved")?;
    lowest.remove(b"lower/dir")?;
    lowest.put_file(b"etc/lowest-only", Meta::root(0o644), Content::bytes(*b"lowest"))?;
    lowest.put_file(b"lower/file", Meta::root(0o600), Content::bytes(*b"before"))?;
    let path = at.join("lowest.erofs");
    let mut file = fs::File::create(&path).unwrap();
    let written = atoll_image::write_image(&lowest, &mut file, |_, _| Ok(()))?;
    let mut files = vec![(written.digest, Backing::open(&path)?)];

    let mut tree = read(&files)?;
    for path in ["etc/passwd", "lower/moved", "lower/file", "lower/dir/file"] {
        let id = whole
            .lookup(path.as_bytes(), LastLink::Keep)?
            .expect("it is there");
        let node = whole.node(id);
        tree.put(path.as_bytes(), node.meta.clone(), node.kind.clone())?;
    }
    let old = whole
        .lookup(b"lower/dir/old", LastLink::Keep)?
        .expect("it is there");
    tree.make_dirs(b"lower/dir/old", &whole.node(old).meta)?;
    // A program of this layer, and one of the lowest that this layer gives another owner: its bytes stay there.
    let busybox = whole
        .lookup(b"bin/busybox", LastLink::Keep)?
        .expect("it is there");
    let busybox = whole.node(busybox).clone();
    tree.put(b"layer/busybox", busybox.meta, busybox.kind)?;
    let owned = tree.lookup(b"lower/same", LastLink::Keep)?.expect("it is there");
    tree.meta_mut(owned).uid = 1234;
    // Files are told apart by their sizes.
    let filler = Content::bytes(vec![b'f'; 5 * 4096]);
    tree.put_file(b"layer/filler", Meta::root(0o644), filler)?;
    files = add(&tree, files, at)?;

    let mut tree = read(&files)?;
    tree.remove(b"etc/lowest-only")?;
    tree.remove(b"layer/filler")?;
    tree.put_symlink(b"layer/echo", b"busybox")?;
    files = add(&tree, files, at)?;
    Ok(files.iter().map(|(_, file)| file.path().to_owned()).collect())
}

const LOOK: &str = "busybox ls /etc /layer; busybox cat /lower/file /lower/dir/file; echo;
    busybox stat -c '%u %s %n' /lower/same; busybox cmp /bin/busybox /layer/busybox && echo equal;
    /layer/echo run; busybox cat /etc/lowest-only || echo gone; cd /lower/dir/..; busybox pwd -P";
const SEEN: &str =
    "/etc:\ngroup\npasswd\n\n/layer:\nbusybox\necho\nfiledir/file\n1234 4 /lower/same\nequal\nrun\n";

/// Open and mapped files of every layer are there after a save, in one who goes on and in a copy of it.
#[tokio::test(flavor = "multi_thread")]
async fn files_of_all_layers_are_read_run_and_kept() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        let seen = sh(&parent.guest, LOOK).await;
        assert!(seen.starts_with(SEEN), "{seen}");
        assert!(seen.contains("\ngone\n") && seen.ends_with("/lower"), "{seen}");
        // A program of the layer, which is mapped from there, with files of both open.
        let script = "exec /layer/busybox sh -c 'exec 5</lower/same 6</lower/file; echo ready;
            until [ -e /go ]; do /bin/busybox usleep 20000; done;
            /layer/busybox cat <&5; /bin/busybox cat <&6; echo;
            until [ -e /again ]; do /layer/busybox usleep 20000; done; /layer/echo still'";
        let mut running = background(&parent.guest, "open", script).await;
        assert_eq!(output(&mut running, 6, LONG).await, b"ready\n");
        let saved = bench.save(&parent.id, SaveKind::Memory).await;
        bench.gvisor.destroy(&parent.id).await.unwrap();
        for copy in [2, 3] {
            let copy = bench.bring_back(copy, SaveKind::Memory, &saved, backing).await;
            let attach = Request::Attach {
                command: "open".into(),
                from: 6,
            };
            let mut running = copy.guest.open(&attach).await.unwrap();
            assert_eq!(sh(&copy.guest, "echo > /go").await, "");
            assert_eq!(output(&mut running, 9, LONG).await, b"samefile\n");
            assert_eq!(sh(&copy.guest, "echo > /again").await, "");
            assert_eq!(output(&mut running, 6, LONG).await, b"still\n");
            let seen = sh(&copy.guest, LOOK).await;
            assert!(seen.starts_with(SEEN), "{seen}");
            bench.gvisor.destroy(&copy.id).await.unwrap();
        }
    }
    bench.assert_clean().await;
}

/// What was saved on one image does not come back on another.
#[tokio::test(flavor = "multi_thread")]
async fn the_files_are_those_that_the_first_means() {
    let Some(bench) = Bench::new() else { return };
    let mut others = vec![bench.layers[..2].to_vec(), bench.layers[..1].to_vec()];
    let [top, middle, lowest] = &bench.layers[..] else {
        panic!("three files")
    };
    others.push(vec![top.clone(), lowest.clone(), middle.clone()]);
    others.push(vec![middle.clone(), top.clone()]);
    for (byte, image) in (10..).zip(others) {
        let spec = InstanceSpec {
            image,
            ..bench.spec(byte, resources(DiskBacking::Memory))
        };
        let error = bench.gvisor.start(spec).await;
        assert!(error.is_err(), "{byte}");
    }
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(DiskBacking::Memory)))
        .await
        .unwrap();
    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&parent.id).await.unwrap();
    let spec = InstanceSpec {
        image: vec![middle.clone(), lowest.clone()],
        ..bench.restoring(2, resources(DiskBacking::Memory), SaveKind::Memory, &saved)
    };
    assert!(bench.gvisor.start(spec).await.is_err());
    bench.assert_clean().await;
}

/// What was changed comes out as an archive, whatever the layer is kept in, and nothing else does.
#[tokio::test(flavor = "multi_thread")]
async fn changes_come_out_as_an_archive() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        let script = "echo new > /lower/new; busybox rm /lower/file; busybox rm -r /lower/dir;
            busybox mkdir /lower/dir; echo again > /lower/dir/again";
        assert_eq!(sh(&parent.guest, script).await, "");
        let parts = Arc::new(saving::Parts::default());
        bench
            .gvisor
            .save(&parent.id, SaveKind::Filesystem, parts.clone())
            .await
            .unwrap();
        bench.gvisor.destroy(&parent.id).await.unwrap();
        let archive = crate::SaveSource::file(&*parts, crate::LAYER).await.unwrap();
        assert!(archive.metadata().unwrap().len() < 64 * 1024);
        let archive = Backing::from_file(archive, Path::new("layer")).unwrap();
        let content = Content::range(&archive, 0, archive.len()).unwrap();
        let mut tree = read_tree(&Backing::open(&bench.image).unwrap(), Limits::default()).unwrap();
        atoll_image::apply_layer(&mut tree, content, atoll_image::Whiteouts::Overlay, |_| Ok(())).unwrap();
        let text = |path: &str| tree.read(path.as_bytes(), 100).unwrap();
        assert_eq!(text("lower/new").as_deref(), Some(&b"new\n"[..]));
        assert_eq!(text("lower/dir/again").as_deref(), Some(&b"again\n"[..]));
        assert_eq!(text("lower/same").as_deref(), Some(&b"same"[..]));
        assert_eq!(text("lower/file"), None);
        let old = tree.lookup(b"lower/dir/old", LastLink::Keep).unwrap();
        assert!(
            old.is_none(),
            "a directory that was removed and made again is empty"
        );
    }
    bench.assert_clean().await;
}

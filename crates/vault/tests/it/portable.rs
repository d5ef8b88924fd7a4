//! Exported files: carried over, cut short, changed, made up.

use atoll_vault::{Error, Vault, VaultKey};

use crate::support::{Context, KIB, MIB, files, load_stream, noise};

fn exported(header: &[u8]) -> (Context, Vec<u8>) {
    let context = Context::new();
    let save = context.vault.begin("a", "prj").unwrap();
    let data = [noise(1, 600 * KIB), vec![0; 3 * MIB], noise(2, 77)].concat();
    save.file("pages", &mut &data[..]).unwrap();
    save.file("empty", &mut &b""[..]).unwrap();
    save.finish(b"about".to_vec(), false).unwrap();
    let mut file = Vec::new();
    context.vault.export("a", header, &mut file).unwrap();
    (context, file)
}

fn nothing_left(context: &Context) {
    for part in ["tmp", "packs", "manifests"] {
        assert!(files(context.path(), part).is_empty(), "{part}");
    }
}

#[test]
fn is_carried_to_another_vault_with_another_key() {
    let (from, file) = exported(b"header");
    assert!(file.len() < 700 * KIB, "zeros are not written out");
    let dir = tempfile::tempdir().unwrap();
    let to = Vault::open(dir.path(), Some(VaultKey::new([5; 32]))).unwrap();
    let (header, saved) = to.import(&mut &file[..], "b", "other", 1 << 30).unwrap();
    assert_eq!(
        (&header[..], saved.total_bytes as usize),
        (&b"header"[..], 600 * KIB + 3 * MIB + 77)
    );
    assert_eq!(to.open_saved("b").unwrap().meta(), b"about");
    for name in ["pages", "empty"] {
        assert!(load_stream(&to, "b", name).unwrap() == load_stream(&from.vault, "a", name).unwrap());
    }
    let mut again = Vec::new();
    to.export("b", b"header", &mut again).unwrap();
    assert!(again == file, "an export says the same wherever it comes from");
}

#[test]
fn a_changed_or_missing_byte_anywhere_is_noticed_and_leaves_nothing() {
    let (_from, file) = exported(b"header");
    let to = Context::new();
    let ends = (0..60).chain(file.len() - 80..file.len());
    for at in ends.chain((0..file.len()).step_by(40_009)) {
        let mut bad = file.clone();
        bad[at] ^= 2;
        assert!(
            to.vault.import(&mut &bad[..], "b", "prj", 1 << 30).is_err(),
            "byte {at}"
        );
        let cut = to.vault.import(&mut &file[..at], "b", "prj", 1 << 30);
        assert!(matches!(cut, Err(Error::Damaged { .. })), "cut at {at}");
        nothing_left(&to);
    }
    let more = [&file[..], b"x"].concat();
    assert!(matches!(
        to.vault.import(&mut &more[..], "b", "prj", 1 << 30),
        Err(Error::Damaged { .. })
    ));
    nothing_left(&to);
}

/// An export that somebody made up, with a hash that is right.
fn made_up(body: &[&[u8]]) -> Vec<u8> {
    let mut file = [b"ATOLLSAV", &1_u32.to_le_bytes()[..], &body.concat()].concat();
    let hash = blake3::hash(&file);
    file.extend_from_slice(hash.as_bytes());
    file
}

#[test]
fn hostile_files_are_bounded() {
    let to = Context::new();
    let import = |file: &[u8]| to.vault.import(&mut &*file, "b", "prj", 8 * MIB as u64);
    let none = &0_u32.to_le_bytes()[..];
    let huge = &u32::MAX.to_le_bytes()[..];
    let stream: &[u8] = &[1, 1, 0, b's'];
    let zeros = |len: u64| [&[3][..], &len.to_le_bytes()].concat();
    let end = |len: u64| [&[4][..], &len.to_le_bytes()].concat();
    let last = |count: u32| [&[0][..], &count.to_le_bytes()].concat();

    let fine = made_up(&[none, none, stream, &zeros(5), &end(5), &last(1)]);
    assert_eq!(import(&fine).unwrap().1.total_bytes, 5);
    to.vault.gc(&|_| false, false).unwrap();

    let bad: Vec<(&str, Vec<u8>)> = vec![
        ("long header", made_up(&[huge])),
        ("long meta", made_up(&[none, huge])),
        ("long part", made_up(&[none, none, stream, &[2], huge])),
        (
            "zero bomb",
            made_up(&[none, none, stream, &zeros(u64::MAX), &end(u64::MAX), &last(1)]),
        ),
        (
            "many zeros",
            made_up(&[
                none,
                none,
                stream,
                &zeros(5 << 20),
                &zeros(5 << 20),
                &end(10 << 20),
                &last(1),
            ]),
        ),
        (
            "wrong length",
            made_up(&[none, none, stream, &zeros(5), &end(6), &last(1)]),
        ),
        (
            "wrong count",
            made_up(&[none, none, stream, &zeros(5), &end(5), &last(2)]),
        ),
        (
            "same name twice",
            made_up(&[none, none, stream, &end(0), stream, &end(0), &last(2)]),
        ),
        ("no name", made_up(&[none, none, &[1, 0, 0], &end(0), &last(1)])),
        (
            "no text",
            made_up(&[none, none, &[1, 1, 0, 0xff], &end(0), &last(1)]),
        ),
        ("unknown part", made_up(&[none, none, stream, &[9]])),
        ("never ends", made_up(&[none, none, stream])),
        ("too many streams", {
            let streams: Vec<u8> = (0..=64_u8)
                .flat_map(|n| [&[1, 1, 0, n][..], &end(0)].concat())
                .collect();
            made_up(&[none, none, &streams, &last(65)])
        }),
    ];
    for (what, file) in bad {
        assert!(import(&file).is_err(), "{what}");
        nothing_left(&to);
    }
    for id in ["../x", "a/b", ""] {
        let refused = to.vault.import(&mut &fine[..], id, "prj", 100);
        assert!(matches!(refused, Err(Error::BadName { .. })), "{id}");
    }
}

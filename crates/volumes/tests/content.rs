//! Files in volumes, read and changed from outside, where a guest put what it liked. Needs root, as all of volumes.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at the first thing that is not as expected"
)]

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use atoll_volumes::{Entry, EntryKind, Error, LEAST, Metadata, Volumes, WriteFile};

/// A volume `data`, mounted as for a sandbox, and a file of the host's beside it.
struct Place {
    volumes: Volumes,
    guest: PathBuf,
    dir: tempfile::TempDir,
}

impl Place {
    fn open() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED, content of volumes is NOT tested: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("host"), "the host's").unwrap();
        let volumes = Volumes::open(dir.path().join("volumes")).unwrap();
        volumes.create("data", LEAST).unwrap();
        let guest = volumes.attach("data").unwrap().path;
        Some(Self { volumes, guest, dir })
    }

    fn read(&self, path: &str) -> Result<String, Error> {
        let mut bytes = Vec::new();
        let mut size = None;
        self.volumes
            .read_file("data", path, |entry| size = Some(entry.size), &mut bytes)?;
        assert_eq!(size, Some(bytes.len() as u64));
        Ok(String::from_utf8(bytes).unwrap())
    }

    fn write(&self, path: &str, bytes: &str, replace: bool) -> Result<Entry, Error> {
        let how = WriteFile {
            replace,
            ..WriteFile::default()
        };
        self.volumes.write_file("data", path, how, &mut bytes.as_bytes())
    }

    /// Every call on this path is refused, or says that nothing is there, and the host's file is untouched.
    fn refuses(&self, path: &str) {
        let none = Metadata::default();
        let all = Metadata {
            uid: Some(1),
            gid: Some(1),
            mode: Some(0o666),
        };
        let errors = [
            self.read(path).err(),
            self.write(path, "x", false).err(),
            self.volumes.entries("data", path, 3).err(),
            self.volumes.make_dir("data", path, none, false).err(),
            self.volumes.set_metadata("data", path, all).err(),
        ];
        for (call, error) in errors.into_iter().enumerate() {
            assert!(
                matches!(
                    error,
                    Some(Error::BadPath { .. } | Error::NoEntry { .. } | Error::EntryExists { .. })
                ),
                "call {call} on {path}: {error:?}"
            );
        }
        let host = self.dir.path().join("host");
        assert_eq!(fs::read_to_string(&host).unwrap(), "the host's");
        assert_eq!(fs::metadata(&host).unwrap().mode() & 0o777, 0o644);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.volumes.detach("data");
    }
}

#[test]
fn files_are_written_whole_read_changed_and_removed() {
    let Some(place) = Place::open() else { return };
    let written = place.write("/a.txt", "hello", false).unwrap();
    assert_eq!(
        (
            written.path.as_path(),
            written.kind,
            written.size,
            written.mode,
            written.uid
        ),
        (Path::new("/a.txt"), EntryKind::File, 5, 0o644, 0)
    );
    assert_eq!(place.read("a.txt").unwrap(), "hello");
    assert!(matches!(
        place.write("a.txt", "other", false),
        Err(Error::EntryExists { .. })
    ));
    assert_eq!(place.read("a.txt").unwrap(), "hello");
    place.write("a.txt", "other", true).unwrap();
    assert_eq!(fs::read_to_string(place.guest.join("a.txt")).unwrap(), "other");
    // No name that was needed in between is left.
    assert_eq!(place.volumes.entries("data", "/", 9).unwrap().len(), 1);

    let metadata = Metadata {
        uid: Some(1000),
        gid: Some(1001),
        mode: Some(0o4750),
    };
    let changed = place.volumes.set_metadata("data", "a.txt", metadata).unwrap();
    assert_eq!((changed.uid, changed.gid, changed.mode), (1000, 1001, 0o4750));
    assert_eq!(place.volumes.entry("data", "a.txt").unwrap(), changed);

    place.volumes.remove("data", "a.txt").unwrap();
    assert!(matches!(
        place.volumes.entry("data", "a.txt"),
        Err(Error::NoEntry { .. })
    ));
    assert!(matches!(
        place.volumes.remove("data", "a.txt"),
        Err(Error::NoEntry { .. })
    ));
}

#[test]
fn directories_are_made_listed_and_removed_with_all_in_them() {
    let Some(place) = Place::open() else { return };
    let none = Metadata::default();
    let make = |path, parents| place.volumes.make_dir("data", path, none, parents);
    assert!(matches!(make("/a/b/c", false), Err(Error::NoEntry { .. })));
    assert_eq!(make("/a/b/c", true).unwrap().mode, 0o755);
    assert!(matches!(make("/a", false), Err(Error::EntryExists { .. })));
    make("/a", true).unwrap();
    make("/", true).unwrap();
    place.write("a/b/file", "x", false).unwrap();
    assert!(matches!(make("/a/b/file", true), Err(Error::BadPath { .. })));
    assert!(matches!(make("/a/b/file/d", true), Err(Error::BadPath { .. })));
    symlink("b", place.guest.join("a/link")).unwrap();

    let listed = |path, depth| -> Vec<String> {
        let entries = place.volumes.entries("data", path, depth).unwrap();
        entries
            .iter()
            .map(|entry| entry.path.display().to_string())
            .collect()
    };
    assert_eq!(listed("/", 1), ["/a"]);
    assert_eq!(listed("/a", 2), ["/a/b", "/a/b/c", "/a/b/file", "/a/link"]);
    assert_eq!(listed("/a/link", 1), ["/a/link/c", "/a/link/file"]);
    let link = place.volumes.entry("data", "a/link").unwrap();
    assert_eq!(
        (link.kind, link.target.as_deref()),
        (EntryKind::Symlink, Some(Path::new("b")))
    );

    place.volumes.remove("data", "/a").unwrap();
    assert!(listed("/", 9).is_empty());
    assert!(matches!(
        place.volumes.remove("data", "/"),
        Err(Error::BadPath { .. })
    ));
}

#[test]
fn nothing_climbs_out_of_the_volume() {
    let Some(place) = Place::open() else { return };
    for path in [
        "../../../host",
        "/..",
        "a/../../x",
        "\0",
        "",
        &"n".repeat(300),
        &"a/".repeat(4000),
    ] {
        place.refuses(path);
    }
    let out = place.dir.path();
    symlink(out, place.guest.join("absolute")).unwrap();
    symlink("../../..", place.guest.join("relative")).unwrap();
    symlink(out.join("host"), place.guest.join("file")).unwrap();
    symlink("../../../host", place.guest.join("climbs")).unwrap();
    symlink("/proc/self/root", place.guest.join("proc")).unwrap();
    symlink("circle", place.guest.join("circle")).unwrap();
    for path in [
        "absolute/host",
        "relative/host",
        "absolute",
        "relative",
        "file",
        "climbs",
        "proc",
        "proc/etc",
        "circle",
        "circle/x",
    ] {
        place.refuses(path);
    }
    for path in ["absolute/host", "relative/host", "proc/etc/hostname"] {
        assert!(
            matches!(place.volumes.remove("data", path), Err(Error::BadPath { .. })),
            "{path}"
        );
        assert!(
            matches!(place.volumes.entry("data", path), Err(Error::BadPath { .. })),
            "{path}"
        );
        assert!(
            matches!(place.write(path, "x", true), Err(Error::BadPath { .. })),
            "{path}"
        );
    }
    // Written over and removed is the link, not what it names.
    place.write("file", "mine", true).unwrap();
    assert_eq!(place.read("file").unwrap(), "mine");
    place.volumes.remove("data", "climbs").unwrap();
    place.volumes.remove("data", "absolute").unwrap();
    assert_eq!(fs::read_to_string(out.join("host")).unwrap(), "the host's");
    // A link that stays inside is followed.
    symlink("file", place.guest.join("inside")).unwrap();
    assert_eq!(place.read("inside").unwrap(), "mine");
}

#[test]
fn a_directory_that_is_swapped_for_a_link_all_the_time_leads_nowhere() {
    let Some(place) = Place::open() else { return };
    let secret = place.dir.path().join("secret");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("f"), "the host's").unwrap();
    let (real, link) = (place.guest.join("real"), place.guest.join("link"));
    fs::create_dir(&real).unwrap();
    fs::write(real.join("f"), "the guest's").unwrap();
    symlink(&secret, &link).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let here = rustix::fs::CWD;
                let swap = rustix::fs::RenameFlags::EXCHANGE;
                let _ = rustix::fs::renameat_with(here, &real, here, &link, swap);
            }
        });
        for round in 0..300 {
            if let Ok(bytes) = place.read("real/f") {
                assert_eq!(bytes, "the guest's");
            }
            let _ = place.write(&format!("real/{round}"), "x", true);
            let _ = place.volumes.remove("data", &format!("real/{round}"));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(fs::read_dir(&secret).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(secret.join("f")).unwrap(), "the host's");
}

#[test]
fn what_is_no_file_is_not_opened() {
    let Some(place) = Place::open() else { return };
    let make = |name: &str, kind, device| {
        let mode = rustix::fs::Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(rustix::fs::CWD, place.guest.join(name), kind, mode, device).unwrap();
    };
    make("fifo", rustix::fs::FileType::Fifo, 0);
    make(
        "zero",
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::makedev(1, 5),
    );
    make(
        "disk",
        rustix::fs::FileType::BlockDevice,
        rustix::fs::makedev(7, 0),
    );
    for path in ["fifo", "zero", "disk"] {
        place.refuses(path);
        assert_eq!(place.volumes.entry("data", path).unwrap().kind, EntryKind::Other);
        place.volumes.remove("data", path).unwrap();
    }
}

#[test]
fn lengths_that_lie_and_uploads_that_break_off_change_nothing() {
    let Some(place) = Place::open() else { return };
    struct Breaks(u64);
    impl Read for Breaks {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::Error::other("the line is dead"));
            }
            self.0 -= 1;
            buffer.fill(b'x');
            Ok(buffer.len())
        }
    }
    place.write("f", "before", false).unwrap();
    let how = |length| WriteFile {
        replace: true,
        length,
        ..WriteFile::default()
    };
    let write = |length, input: &mut dyn Read| place.volumes.write_file("data", "f", how(length), input);
    assert!(matches!(write(None, &mut Breaks(3)), Err(Error::BrokeOff { .. })));
    // Refused before a byte is asked for.
    assert!(matches!(
        write(Some(u64::MAX), &mut Breaks(0)),
        Err(Error::Full { .. })
    ));
    assert!(matches!(
        write(Some(LEAST), &mut Breaks(0)),
        Err(Error::Full { .. })
    ));
    assert!(matches!(write(None, &mut io::repeat(7)), Err(Error::Full { .. })));
    assert_eq!(place.read("f").unwrap(), "before");
    assert_eq!(place.volumes.entries("data", "/", 9).unwrap().len(), 1);
    // And the room is free again.
    place.write("g", &"x".repeat(1 << 20), false).unwrap();
    for mode in [0o10000, u32::MAX] {
        let metadata = Metadata {
            mode: Some(mode),
            ..Metadata::default()
        };
        let set = place.volumes.set_metadata("data", "f", metadata);
        assert!(matches!(set, Err(Error::BadPath { .. })));
    }
}

#[test]
fn a_tree_deeper_than_any_path_is_removed() {
    let Some(place) = Place::open() else { return };
    let dir = rustix::fs::OFlags::DIRECTORY;
    let mut at = rustix::fs::open(&place.guest, dir, rustix::fs::Mode::empty()).unwrap();
    for level in 0..1500 {
        rustix::fs::mkdirat(&at, "deep", rustix::fs::Mode::RWXU).unwrap();
        if level % 100 == 0 {
            rustix::fs::symlinkat(place.dir.path(), &at, "link").unwrap();
        }
        at = rustix::fs::openat(&at, "deep", dir, rustix::fs::Mode::empty()).unwrap();
    }
    drop(at);
    // What one call cannot name is left out of a listing.
    let listed = place.volumes.entries("data", "deep", u32::MAX).unwrap().len();
    assert!((500..1500).contains(&listed), "{listed}");
    place.volumes.remove("data", "deep").unwrap();
    assert_eq!(place.volumes.entries("data", "/", 1).unwrap().len(), 1);
    assert_eq!(
        fs::read_to_string(place.dir.path().join("host")).unwrap(),
        "the host's"
    );
}

#[test]
fn a_resting_volume_is_mounted_for_a_call_and_let_go_again() {
    let Some(place) = Place::open() else { return };
    place.write("f", "kept", false).unwrap();
    place.volumes.detach("data").unwrap();
    assert_eq!(place.read("f").unwrap(), "kept");
    place.write("g", "more", false).unwrap();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(place.dir.path().to_str().unwrap()));
}

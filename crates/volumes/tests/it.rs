//! Volumes on this machine: real loop devices, real mounts. Needs root; without it every test says that it was skipped.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at the first thing that is not as expected"
)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use atoll_volumes::{Error, Kind, LEAST, Mounted, Recovered, Volumes};

const MIB: u64 = 1 << 20;

struct Place {
    volumes: Volumes,
    dir: tempfile::TempDir,
}

impl Place {
    fn open() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED, volumes are NOT tested: needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        Some(Self {
            volumes: Volumes::open(dir.path().join("volumes")).unwrap(),
            dir,
        })
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.path().join("volumes").join(id)
    }

    fn devices(&self) -> Vec<String> {
        let mut found = Vec::new();
        for device in fs::read_dir("/sys/block").unwrap().flatten() {
            let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
            if Path::new(file.trim()).starts_with(self.dir.path()) {
                found.push(device.file_name().into_string().unwrap());
            }
        }
        found
    }

    fn mounts(&self) -> usize {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.matches(self.dir.path().to_str().unwrap()).count()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for (id, _) in self.volumes.list().unwrap_or_default() {
            let _ = self.volumes.detach(&id);
        }
    }
}

/// A process in a mount namespace of its own, as a sandbox is, with a copy of the mounts of one test.
struct Holder(Child);

impl Holder {
    fn new(place: &Place) -> Self {
        let others = format!(
            "awk '$5 ~ /volumes/ && index($5, \"{}\") != 1 {{ print $5 }}' /proc/self/mountinfo | xargs -r umount",
            place.dir.path().display()
        );
        let mut child = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-c"])
            .arg(format!("{others}; echo; exec sleep 600"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut word = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut word).unwrap();
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_volume_lives_through_attach_and_detach() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    volumes.create("vol_a", 64 * MIB).unwrap();
    assert!(matches!(volumes.create("vol_a", 64 * MIB), Err(Error::Exists(_))));
    let empty = volumes.usage("vol_a").unwrap();
    assert_eq!(empty.limit, 64 * MIB);
    assert!(empty.on_host < 8 * MIB && empty.used < MIB, "{empty:?}");

    let Mounted { path, kind } = volumes.attach("vol_a").unwrap();
    assert_eq!(kind, Kind::Disk);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "no lost+found");
    let root = fs::metadata(&path).unwrap();
    assert_eq!((root.uid(), root.gid(), root.mode() & 0o7777), (0, 0, 0o1777));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table
        .lines()
        .find(|line| line.contains(path.to_str().unwrap()))
        .unwrap();
    assert!(line.contains("nosuid") && line.contains("nodev"), "{line}");
    assert_eq!(volumes.attach("vol_a").unwrap().path, path);
    assert_eq!((place.devices().len(), place.mounts()), (1, 1));

    fs::write(path.join("file"), vec![1; 10 << 20]).unwrap();
    let mut full = File::create(path.join("fill")).unwrap();
    let error = (0..100).find_map(|_| {
        full.write_all(&vec![2; 1 << 20])
            .and_then(|()| full.sync_all())
            .err()
    });
    drop(full);
    assert_eq!(error.unwrap().kind(), std::io::ErrorKind::StorageFull);
    let attached = volumes.usage("vol_a").unwrap();
    assert!(
        attached.used > 40 * MIB && attached.used < 64 * MIB,
        "{attached:?}"
    );
    fs::remove_file(path.join("fill")).unwrap();
    rustix::fs::syncfs(File::open(&path).unwrap()).unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while volumes.usage("vol_a").unwrap().on_host > 30 * MIB {
        assert!(
            std::time::Instant::now() < deadline,
            "freed space is not given back"
        );
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    let open = File::open(path.join("file")).unwrap();
    assert!(matches!(volumes.detach("vol_a"), Err(Error::Busy { .. })));
    drop(open);
    volumes.detach("vol_a").unwrap();
    volumes.detach("vol_a").unwrap();
    assert_eq!((place.devices().len(), place.mounts()), (0, 0));
    let used = volumes.usage("vol_a").unwrap();
    assert!(used.used >= 10 * MIB && used.used < 12 * MIB, "{used:?}");
    let path = volumes.attach("vol_a").unwrap().path;
    assert_eq!(fs::metadata(path.join("file")).unwrap().len(), 10 << 20);
    volumes.delete("vol_a").unwrap();
    volumes.delete("vol_a").unwrap();
    assert_eq!((place.devices().len(), place.mounts()), (0, 0));
    assert_eq!(volumes.list().unwrap(), []);
}

#[test]
fn what_cannot_be_made_leaves_nothing() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    for id in ["", "..", "a/b", ".lock", ".new-x", "a.b", &"x".repeat(65)] {
        assert!(
            matches!(volumes.create(id, 64 * MIB), Err(Error::BadId(_))),
            "{id}"
        );
    }
    assert!(matches!(
        volumes.create("vol_a", LEAST - 1),
        Err(Error::Size { .. })
    ));
    for result in [
        volumes.attach("vol_a").map(drop),
        volumes.detach("vol_a"),
        volumes.usage("vol_a").map(drop),
    ] {
        assert!(matches!(result, Err(Error::NotFound(_))));
    }
    // On a disk that is too small even for what mkfs writes.
    let small = place.dir.path().join("small");
    fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k", "none"])
        .arg(&small)
        .status();
    assert!(mounted.unwrap().success());
    let full = Volumes::open(&small).unwrap().create("vol_b", 64 * MIB);
    let left: Vec<_> = fs::read_dir(&small)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(Command::new("umount").arg(&small).status().unwrap().success());
    assert!(matches!(full, Err(Error::HostFull { .. })), "{full:?}");
    assert_eq!(left, [".lock"]);
}

/// The child of the next test.
#[test]
#[ignore = "is killed by another test"]
fn attaches_and_waits() {
    let Some(dir) = std::env::var_os("ATOLL_TEST_VOLUMES") else {
        return;
    };
    let volumes = Volumes::open(dir).unwrap();
    let mounted = volumes.attach("vol_a").unwrap();
    fs::write(mounted.path.join("written"), "before the crash").unwrap();
    println!("attached");
    std::thread::sleep(std::time::Duration::from_secs(600));
}

#[test]
fn a_killed_server_is_followed_by_one_that_finds_everything() {
    let Some(place) = Place::open() else { return };
    place.volumes.create("vol_a", 64 * MIB).unwrap();
    place.volumes.create("vol_b", 64 * MIB).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "attaches_and_waits", "--nocapture"])
        .env("ATOLL_TEST_VOLUMES", place.dir.path().join("volumes"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.map_while(Result::ok).any(|line| line.contains("attached")));
    child.kill().unwrap();
    child.wait().unwrap();

    let devices = place.devices();
    assert_eq!(devices.len(), 1);
    let next = Volumes::open(place.dir.path().join("volumes")).unwrap();
    let path = next.attach("vol_a").unwrap().path;
    assert_eq!((place.devices(), place.mounts()), (devices.clone(), 1));
    assert_eq!(fs::read(path.join("written")).unwrap(), b"before the crash");

    // Unmounted on the host while a sandbox has it: the device stays, and is found.
    let holder = Holder::new(&place);
    assert!(matches!(next.detach("vol_a"), Err(Error::Busy { .. })));
    assert!(matches!(next.delete("vol_a"), Err(Error::Busy { .. })));
    assert_eq!((place.devices(), place.mounts()), (devices.clone(), 0));
    let path = next.attach("vol_a").unwrap().path;
    assert_eq!((place.devices(), place.mounts()), (devices, 1));
    fs::write(path.join("seen"), "by both").unwrap();
    let inside = format!("/proc/{}/root{}", holder.0.id(), path.join("seen").display());
    assert_eq!(fs::read(inside).unwrap(), b"by both", "one filesystem, not two");

    let place_of = |name: &str| place.dir.path().join("volumes").join(name);
    fs::create_dir(place_of(".new-vol_c")).unwrap();
    fs::create_dir_all(place_of(".deleted-vol_d/mnt")).unwrap();
    let recovered = next.recover(&["vol_a"]).unwrap();
    assert_eq!(
        recovered,
        Recovered {
            swept: 2,
            ..Recovered::default()
        }
    );
    assert_eq!(place.mounts(), 1);
    assert_eq!(next.recover(&[]).unwrap().busy, ["vol_a"]);
    drop(holder);
    assert_eq!(next.recover(&[]).unwrap().busy, [""; 0]);
    assert_eq!((place.devices().len(), place.mounts()), (0, 0));
    let names: Vec<_> = next.list().unwrap().into_iter().map(|(id, _)| id).collect();
    assert_eq!(names, ["vol_a", "vol_b"]);
}

#[test]
fn many_at_once_share_one_device() {
    let Some(place) = Place::open() else { return };
    place.volumes.create("vol_a", 64 * MIB).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let volumes = Volumes::open(place.dir.path().join("volumes")).unwrap();
                volumes.attach("vol_a").unwrap();
            });
        }
    });
    assert_eq!((place.devices().len(), place.mounts()), (1, 1));
}

#[test]
fn a_damaged_disk_is_repaired_or_refused_and_never_mounted_as_it_is() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    volumes.create("vol_a", 64 * MIB).unwrap();
    fs::write(volumes.attach("vol_a").unwrap().path.join("file"), "kept").unwrap();
    volumes.detach("vol_a").unwrap();
    let disk = File::options()
        .write(true)
        .open(place.path("vol_a").join("disk.ext4"))
        .unwrap();
    // The checksum of the first group's descriptor, which e2fsck can work out again.
    std::os::unix::fs::FileExt::write_all_at(&disk, &[0xff; 2], 4096 + 0x1e).unwrap();
    match volumes.attach("vol_a") {
        Ok(mounted) => assert_eq!(fs::read(mounted.path.join("file")).unwrap(), b"kept"),
        Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error}"),
    }
    volumes.detach("vol_a").unwrap();
    std::os::unix::fs::FileExt::write_all_at(&disk, &vec![0; 4 << 20], 0).unwrap();
    let error = volumes.attach("vol_a").unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert_eq!((place.devices().len(), place.mounts()), (0, 0));
}

#[test]
fn export_and_import_keep_everything_and_reach_nothing_else() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    let victim = place.dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    for id in ["vol_a", "vol_b"] {
        volumes.create(id, 64 * MIB).unwrap();
    }
    let path = volumes.attach("vol_a").unwrap().path;
    fs::create_dir(path.join("dir")).unwrap();
    fs::write(path.join("dir/file"), "hello").unwrap();
    fs::hard_link(path.join("dir/file"), path.join("again")).unwrap();
    std::os::unix::fs::chown(path.join("again"), Some(1000), Some(1001)).unwrap();
    symlink(&victim, path.join("link")).unwrap();
    symlink(place.dir.path(), path.join("out")).unwrap();
    Command::new("mkfifo").arg(path.join("fifo")).status().unwrap();
    let holes = File::create(path.join("holes")).unwrap();
    holes.set_len(10 << 30).unwrap();

    let mut bytes = Vec::new();
    let tally = volumes.export("vol_a", &mut bytes).unwrap();
    assert_eq!(tally.skipped.fifos, 1);
    assert!(bytes.len() < 100_000, "{}", bytes.len());
    let text = String::from_utf8_lossy(&bytes);
    assert!(!text.contains("precious"));
    assert_eq!(
        (place.devices().len(), place.mounts()),
        (1, 1),
        "attached stays attached"
    );
    assert_eq!(
        volumes.import("vol_b", &mut bytes.as_slice()).unwrap().entries,
        tally.entries
    );
    assert_eq!(
        (place.devices().len(), place.mounts()),
        (1, 1),
        "mounted only for the import"
    );
    let other = volumes.attach("vol_b").unwrap().path;
    let meta = fs::metadata(other.join("dir/file")).unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.nlink()), (1000, 1001, 2));
    assert_eq!(fs::read_link(other.join("link")).unwrap(), victim);
    assert_eq!(fs::metadata(other.join("holes")).unwrap().len(), 10 << 30);
    let mut again = Vec::new();
    volumes.export("vol_b", &mut again).unwrap();
    fs::remove_file(path.join("fifo")).unwrap();

    // A guest has put a link where the archive has a directory, or a file.
    fs::remove_dir_all(other.join("dir")).unwrap();
    symlink(place.dir.path(), other.join("dir")).unwrap();
    fs::remove_file(other.join("again")).unwrap();
    symlink(&victim, other.join("again")).unwrap();
    volumes.import("vol_b", &mut bytes.as_slice()).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(!place.dir.path().join("file").exists());
    assert_eq!(fs::read(other.join("again")).unwrap(), b"hello");

    let error = volumes
        .import(
            "vol_b",
            &mut &b"no archive at all, whatever one may say of it"[..],
        )
        .unwrap_err();
    assert!(matches!(error, Error::Archive { .. }), "{error}");
    let output = Command::new("tar")
        .args(["-cPf", "-"])
        .arg(&victim)
        .output()
        .unwrap();
    let error = volumes
        .import("vol_b", &mut output.stdout.as_slice())
        .unwrap_err();
    assert!(matches!(error, Error::Archive { .. }), "{error}");
    let large = place.dir.path().join("large");
    fs::write(&large, vec![1; 80 << 20]).unwrap();
    let output = Command::new("tar")
        .args(["-C"])
        .arg(place.dir.path())
        .args(["-cf", "-", "large"])
        .output()
        .unwrap();
    let error = volumes
        .import("vol_b", &mut output.stdout.as_slice())
        .unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
}

/// Somebody swaps directories for links all the time, while we read and write.
#[test]
fn races_lead_nowhere() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    volumes.create("vol_a", 64 * MIB).unwrap();
    let outside = place.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("f0"), "precious").unwrap();
    let path = volumes.attach("vol_a").unwrap().path;
    let tree = place.dir.path().join("tree");
    fs::create_dir_all(tree.join("d")).unwrap();
    for name in 0..50 {
        fs::write(tree.join(format!("d/f{name}")), "mine").unwrap();
    }
    let output = Command::new("tar")
        .args(["-cf", "-", "-C"])
        .arg(&tree)
        .arg("d")
        .output()
        .unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = fs::rename(path.join("d"), path.join("e"));
                let _ = symlink(&outside, path.join("d"));
                let _ = fs::remove_file(path.join("d"));
                let _ = fs::rename(path.join("e"), path.join("d"));
                let _ = fs::remove_dir_all(path.join("e"));
            }
        });
        for _ in 0..300 {
            // It may fail for all the changes; it must not leave the volume.
            let _ = volumes.import("vol_a", &mut output.stdout.as_slice());
            let mut bytes = Vec::new();
            let _ = volumes.export("vol_a", &mut bytes);
            assert!(!String::from_utf8_lossy(&bytes).contains("precious"));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(fs::read(outside.join("f0")).unwrap(), b"precious");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
}

#[test]
fn a_sealed_volume_is_an_image() {
    let Some(place) = Place::open() else { return };
    let volumes = &place.volumes;
    let tree = place.dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), "input").unwrap();
    let image = place.dir.path().join("image");
    let made = Command::new("mkfs.erofs").args([&image, &tree]).output().unwrap();
    assert!(made.status.success());
    volumes.seal("vol_s", &image).unwrap();
    assert!(!image.exists());
    let mounted = volumes.attach("vol_s").unwrap();
    assert_eq!(mounted.kind, Kind::Sealed);
    assert!(mounted.path.ends_with("vol_s/input.erofs"));
    assert!(matches!(
        volumes.import("vol_s", &mut &[][..]),
        Err(Error::Sealed(_))
    ));
    let mut bytes = Vec::new();
    assert_eq!(volumes.export("vol_s", &mut bytes).unwrap().entries, 2);
    let usage = volumes.usage("vol_s").unwrap();
    assert_eq!(usage.used, fs::metadata(&mounted.path).unwrap().len());
    assert_eq!((place.devices().len(), place.mounts()), (0, 0));
    volumes.delete("vol_s").unwrap();
    assert_eq!(volumes.list().unwrap(), []);
}

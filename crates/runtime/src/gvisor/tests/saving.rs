//! Saved, brought back, let go on: against a real `runsc`.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use async_trait::async_trait;
use atoll_guest_protocol::CommandState;
use bytes::Bytes;

use super::*;
use crate::SaveSource;
use crate::channel::Stream;

/// Keeps what is saved in files without names.
#[derive(Debug, Default)]
pub(super) struct Parts {
    files: Mutex<BTreeMap<String, File>>,
    /// And without a disk: what is encrypted at rest is written like this.
    in_memory: bool,
}

impl SaveSink for Parts {
    fn stream(&self, name: &str) -> io::Result<OwnedFd> {
        let file = self.scratch()?;
        self.part(name, file.try_clone()?)?;
        Ok(file.into())
    }

    fn scratch(&self) -> io::Result<File> {
        if self.in_memory {
            return Ok(rustix::fs::memfd_create("part", rustix::fs::MemfdFlags::CLOEXEC)?.into());
        }
        tempfile::tempfile()
    }

    fn part(&self, name: &str, whole: File) -> io::Result<()> {
        self.files.lock().insert(name.to_owned(), whole);
        Ok(())
    }
}

#[async_trait]
impl SaveSource for Parts {
    async fn file(&self, name: &str) -> io::Result<File> {
        let parts = self.files.lock();
        let part = parts.get(name).ok_or(io::ErrorKind::NotFound)?;
        File::open(format!("/proc/self/fd/{}", part.as_raw_fd()))
    }

    fn names(&self) -> Vec<String> {
        self.files.lock().keys().cloned().collect()
    }
}

/// Fails, in one of the ways in which a vault does.
#[derive(Debug)]
enum Broken {
    NoRoom,
    Full,
    Refuses,
}

impl SaveSink for Broken {
    fn stream(&self, _: &str) -> io::Result<OwnedFd> {
        match self {
            Self::NoRoom | Self::Full => self.scratch().map(OwnedFd::from),
            // Nobody reads.
            Self::Refuses => Ok(rustix::pipe::pipe()?.1),
        }
    }

    fn scratch(&self) -> io::Result<File> {
        match self {
            Self::NoRoom => Err(io::ErrorKind::StorageFull.into()),
            Self::Full => File::options().read(true).write(true).open("/dev/full"),
            Self::Refuses => tempfile::tempfile(),
        }
    }

    fn part(&self, _: &str, _: File) -> io::Result<()> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
}

pub(super) fn resources(backing: DiskBacking) -> Resources {
    Resources {
        disk_backing: backing,
        memory_bytes: 256 * MIB,
        disk_bytes: 128 * MIB,
        ..Resources::default()
    }
}

impl Bench {
    pub(super) async fn save(&self, id: &InstanceId, kind: SaveKind) -> Arc<Parts> {
        let parts = Arc::new(Parts::default());
        let began = Instant::now();
        self.gvisor.save(id, kind, parts.clone()).await.unwrap();
        eprintln!("{kind} saved in {:?}", began.elapsed());
        assert_eq!(Arc::strong_count(&parts), 1, "the runtime keeps nothing");
        parts
    }

    pub(super) fn restoring(
        &self,
        byte: u8,
        resources: Resources,
        kind: SaveKind,
        source: &Arc<Parts>,
    ) -> InstanceSpec {
        InstanceSpec {
            restore: Some(Restore {
                kind,
                source: source.clone(),
            }),
            ..self.spec(byte, resources)
        }
    }

    pub(super) async fn bring_back(
        &self,
        byte: u8,
        kind: SaveKind,
        source: &Arc<Parts>,
        backing: DiskBacking,
    ) -> Instance {
        let began = Instant::now();
        let spec = self.restoring(byte, resources(backing), kind, source);
        let instance = self.gvisor.start(spec).await.unwrap();
        eprintln!("{kind} brought back in {:?}", began.elapsed());
        instance
    }
}

/// A shell command that goes on when nobody listens.
pub(super) async fn background(guest: &Guest, command: &str, script: &str) -> Stream {
    let exec = Exec {
        command: command.to_owned(),
        argv: ["/bin/busybox", "sh", "-c", script]
            .map(|word| word.as_bytes().to_vec())
            .to_vec(),
        env: vec![("PATH".into(), "/bin".into())],
        cwd: None,
        user: Some("0".into()),
        pty: None,
        stdin: true,
        timeout_millis: None,
        log_bytes: 1024 * 1024,
        wait_for_reader: false,
        kill_on_close: false,
    };
    guest.open(&Request::Exec(exec)).await.unwrap()
}

/// What comes until it is this much, or over, or nothing comes for a while.
pub(super) async fn output(stream: &mut Stream, bytes: usize, patience: Duration) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < bytes {
        match tokio::time::timeout(patience, stream.next()).await {
            Ok(Some(Ok(Incoming::Data { bytes, .. }))) => all.extend_from_slice(&bytes),
            Ok(Some(Ok(Incoming::Message(Message::Exited(_))))) | Ok(None) | Err(_) => break,
            Ok(Some(Ok(Incoming::Message(_)))) => {}
            Ok(Some(Err(error))) => panic!("{error}"),
        }
    }
    all
}

fn numbers(text: &[u8]) -> Vec<u64> {
    let text = std::str::from_utf8(text).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

pub(super) const LONG: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread")]
async fn memory_goes_on_where_it_was() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        let mut counter = background(
            &parent.guest,
            "counter",
            "exec 5>>/open; i=0; while :; do i=$((i+1)); echo $i >&5; echo $i; busybox usleep 2000; done",
        )
        .await;
        assert_eq!(
            sh(&parent.guest, "echo kept > /kept; echo tmp > /tmp/kept").await,
            ""
        );
        background(
            &parent.guest,
            "server",
            "busybox nc -ll -p 7000 -e /bin/busybox cat /kept",
        )
        .await;
        let mut before = output(&mut counter, 50, LONG).await;

        let saved = bench.save(&parent.id, SaveKind::Memory).await;
        before.extend(output(&mut counter, 1 << 20, SHORT).await);
        assert_eq!(
            output(&mut counter, 1, SHORT).await,
            b"",
            "it is still after the save"
        );
        let mut last = before.len() as u64;
        let mut parts = saved;
        bench.gvisor.destroy(&parent.id).await.unwrap();

        // More than once: what was restored can be saved again.
        for round in 2..4 {
            let child = bench.bring_back(round, SaveKind::Memory, &parts, backing).await;
            let listed = child.guest.call(&Request::ListCommands).await.unwrap();
            let Some(Message::Commands(listed)) = listed else {
                panic!("{listed:?}")
            };
            let running: Vec<_> = listed
                .iter()
                .filter(|info| info.state == CommandState::Running)
                .map(|info| info.command.as_str())
                .collect();
            assert_eq!(running, ["counter", "server"]);
            let attach = Request::Attach {
                command: "counter".into(),
                from: last,
            };
            let mut counter = child.guest.open(&attach).await.unwrap();
            let mut after = output(&mut counter, 50, LONG).await;
            assert_eq!(sh(&child.guest, "busybox cat /kept /tmp/kept").await, "kept\ntmp");
            assert_eq!(
                sh(&child.guest, "busybox nc 127.0.0.1 7000 </dev/null").await,
                "kept"
            );
            assert_eq!(
                sh(&child.guest, "busybox tail -n 1 /open | busybox wc -l").await,
                "1"
            );
            parts = bench.save(&child.id, SaveKind::Memory).await;
            after.extend(output(&mut counter, 1 << 20, SHORT).await);
            last += after.len() as u64;
            before.extend(after);
            bench.gvisor.destroy(&child.id).await.unwrap();
        }
        let counted = numbers(&before);
        assert_eq!(counted, (1..=counted.len() as u64).collect::<Vec<_>>());
        bench.assert_clean().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_disturbs_no_stream() {
    let Some(bench) = Bench::new() else { return };
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(DiskBacking::Memory)))
        .await
        .unwrap();
    let last = 60_000;
    let script = format!("i=0; while [ $i -lt {last} ]; do i=$((i+1)); echo $i; done");
    let mut flood = background(&parent.guest, "flood", &script).await;
    let flooded = tokio::spawn(async move { output(&mut flood, usize::MAX, LONG).await });
    let (mut into, mut from) = background(&parent.guest, "cat", "busybox cat").await.split();
    let sent: Vec<u8> = (0..4_000_000_u32)
        .map(|byte| byte.wrapping_mul(7) as u8)
        .collect();
    let pieces = Bytes::from(sent.clone());
    let feeding = tokio::spawn(async move {
        for start in (0..pieces.len()).step_by(5000) {
            let piece = pieces.slice(start..(start + 5000).min(pieces.len()));
            into.send_data(piece).await.unwrap();
            if start % 50_000 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        into.send_end().await.unwrap();
    });
    let echoed = tokio::spawn(async move {
        let mut all = Vec::new();
        while let Some(incoming) = from.next().await {
            if let Incoming::Data { bytes, .. } = incoming.unwrap() {
                all.extend_from_slice(&bytes);
            }
        }
        all
    });
    for round in 0..8 {
        bench.save(&parent.id, SaveKind::Memory).await;
        // What is asked meanwhile waits.
        let asked = tokio::spawn({
            let guest = parent.guest.clone();
            async move { sh(&guest, "echo asked").await }
        });
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bench.gvisor.thaw(&parent.id).await.unwrap();
        bench.gvisor.thaw(&parent.id).await.unwrap();
        assert_eq!(asked.await.unwrap(), "asked");
    }
    feeding.await.unwrap();
    assert!(echoed.await.unwrap() == sent, "no byte lost or doubled");
    let counted = numbers(&flooded.await.unwrap());
    assert_eq!(counted, (1..=last).collect::<Vec<_>>());
    assert_eq!(parent.guest.ignored_frames(), 0);
    // The room that the sentry had for writing is taken back.
    let group = bench.gvisor.group(&parent.id).unwrap();
    let limit = || {
        let files = group.procs_files().into_iter();
        let names = ["memory.limit_in_bytes", "memory.max"];
        let mut limits =
            files.flat_map(|file| names.map(|name| fs::read_to_string(file.with_file_name(name))));
        limits.find_map(Result::ok).unwrap()
    };
    for _ in 0..100 {
        if limit().trim() == (256 * MIB).to_string() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(limit().trim(), (256 * MIB).to_string());
    bench.gvisor.destroy(&parent.id).await.unwrap();
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_from_one_save_go_their_own_ways() {
    let Some(bench) = Bench::new() else { return };
    let backing = DiskBacking::Memory;
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(backing)))
        .await
        .unwrap();
    sh(&parent.guest, "echo parent > /who").await;
    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.thaw(&parent.id).await.unwrap();
    let (one, two) = tokio::join!(
        bench.bring_back(2, SaveKind::Memory, &saved, backing),
        bench.bring_back(3, SaveKind::Memory, &saved, backing)
    );
    sh(&one.guest, "echo one > /who").await;
    sh(&two.guest, "echo two > /who").await;
    for (instance, who) in [(&parent, "parent"), (&one, "one"), (&two, "two")] {
        assert_eq!(sh(&instance.guest, "busybox cat /who").await, who);
        // As any other: it can be left and found again, and its end is noticed.
        instance.guest.close();
        let adopted = bench.gvisor.adopt(&instance.id).await.unwrap();
        assert_eq!(sh(&adopted.guest, "busybox cat /who").await, who);
        let mut end = adopted.end.clone();
        bench.gvisor.destroy(&instance.id).await.unwrap();
        let ended = tokio::time::timeout(LONG, end.wait_for(Option::is_some)).await;
        assert!(ended.unwrap().is_ok());
    }
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_save_leaves_a_running_instance() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        sh(&parent.guest, "busybox dd if=/dev/zero of=/file bs=1M count=3").await;
        for kind in [SaveKind::Memory, SaveKind::Filesystem] {
            for broken in [Broken::NoRoom, Broken::Full, Broken::Refuses] {
                let why = format!("{broken:?}");
                let full = !matches!(broken, Broken::Refuses);
                let error = bench.gvisor.save(&parent.id, kind, Arc::new(broken)).await;
                let error = error.unwrap_err();
                eprintln!("{kind} {why}: {error}");
                assert_eq!(error.kind() == Kind::HostFull, full, "{kind} {why}: {error}");
                assert_eq!(
                    sh(&parent.guest, "echo unharmed").await,
                    "unharmed",
                    "{kind} {why}"
                );
            }
        }
        bench.gvisor.destroy(&parent.id).await.unwrap();
        let gone = bench
            .gvisor
            .save(&parent.id, SaveKind::Memory, Arc::new(Parts::default()));
        assert!(matches!(gone.await, Err(Error::NotFound(_))));
        assert!(matches!(
            bench.gvisor.thaw(&parent.id).await,
            Err(Error::NotFound(_))
        ));
    }
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_state_starts_nothing() {
    let Some(bench) = Bench::new() else { return };
    let backing = DiskBacking::Memory;
    let parent = bench
        .gvisor
        .start(bench.spec(1, resources(backing)))
        .await
        .unwrap();
    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&parent.id).await.unwrap();
    type Damage = fn(&mut File);
    let damages: [(&str, Damage); 5] = [
        ("checkpoint", |file| file.set_len(100_000).unwrap()),
        ("checkpoint", |file| {
            file.write_all_at(b"nonsense", 90_000).unwrap();
        }),
        ("checkpoint", |file| file.set_len(0).unwrap()),
        ("pages_meta", |file| file.set_len(100).unwrap()),
        ("pages", |file| file.set_len(4096).unwrap()),
    ];
    for (round, (name, damage)) in damages.into_iter().enumerate() {
        let damaged = Arc::new(Parts::default());
        for part in saved.names() {
            let mut copy = tempfile::tempfile().unwrap();
            io::copy(&mut saved.file(&part).await.unwrap(), &mut copy).unwrap();
            if part == name {
                damage(&mut copy);
            }
            copy.flush().unwrap();
            copy.rewind().unwrap();
            damaged.part(&part, copy).unwrap();
        }
        let began = Instant::now();
        let spec = bench.restoring(2, resources(backing), SaveKind::Memory, &damaged);
        match bench.gvisor.start(spec).await {
            Err(error) => {
                let text: String = error.to_string().chars().take(200).collect();
                eprintln!("damage {round} to {name}: {text} after {:?}", began.elapsed());
            }
            Ok(instance) => {
                // Bytes may happen to be of no importance; what matters is that it is whole or not there.
                eprintln!("damage {round} to {name} was not noticed");
                assert_eq!(sh(&instance.guest, "echo here").await, "here");
                bench.gvisor.destroy(&instance.id).await.unwrap();
            }
        }
        bench.assert_clean().await;
    }
    // Another sort of save is refused before anything is started.
    let spec = bench.restoring(3, resources(backing), SaveKind::Filesystem, &saved);
    let error = bench.gvisor.start(spec).await.unwrap_err().to_string();
    assert!(
        error.contains("the saved state consists of checkpoint"),
        "{error}"
    );
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_still_can_be_ended_or_adopted() {
    let Some(bench) = Bench::new() else { return };
    let resources = resources(DiskBacking::Memory);
    let still = bench.gvisor.start(bench.spec(1, resources)).await.unwrap();
    bench.save(&still.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&still.id).await.unwrap();
    bench.assert_clean().await;

    let left = bench.gvisor.start(bench.spec(2, resources)).await.unwrap();
    let mark = bench.gvisor.dirs.dir(&left.id).join("still");
    let mut instance = left;
    // The server dies: while it is still; before it noted so; before it noted that it runs.
    for (paused, note) in [(true, "still"), (true, "unsure"), (false, "unsure")] {
        if paused {
            bench.save(&instance.id, SaveKind::Memory).await;
        }
        fs::write(&mark, note).unwrap();
        instance.guest.close();
        let next = Gvisor::new(Arc::clone(&bench.config), bench.gvisor.runsc.clone()).unwrap();
        let began = Instant::now();
        instance = next.adopt(&instance.id).await.unwrap();
        eprintln!("adopted in {:?}", began.elapsed());
        assert!(!mark.exists());
        assert_eq!(sh(&instance.guest, "echo here").await, "here");
        next.thaw(&instance.id).await.unwrap();
        instance.guest.close();
        instance = bench.gvisor.adopt(&instance.id).await.unwrap();
    }
    // Nobody waits for the save any more.
    let parts = Arc::new(Parts::default());
    let abandoned = bench.gvisor.save(&instance.id, SaveKind::Memory, parts);
    let _ = tokio::time::timeout(Duration::from_micros(200), abandoned).await;
    bench.gvisor.thaw(&instance.id).await.unwrap();
    assert_eq!(sh(&instance.guest, "echo here").await, "here");
    bench.gvisor.destroy(&instance.id).await.unwrap();
    bench.assert_clean().await;
}

/// `cargo test … -- --ignored timing --nocapture`, on an idle machine.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints timings"]
async fn timing_of_saves_and_restores() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        sh(
            &parent.guest,
            "busybox dd if=/dev/urandom of=/tmp/blob bs=1M count=25",
        )
        .await;
        let image = bench.state.path().join("image");
        let dir = bench.gvisor.dirs.dir(&parent.id);
        for round in 0..5 {
            fs::create_dir(&image).unwrap();
            let began = Instant::now();
            let status = Command::new(&bench.gvisor.runsc)
                .arg("--root")
                .arg(&dir)
                .args([
                    "--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
                    "--network=none",
                ])
                .args(["checkpoint", "-leave-running", "-image-path"])
                .args([image.as_os_str(), parent.id.as_str().as_ref()])
                .status()
                .unwrap();
            assert!(status.success());
            eprintln!("{backing:?} runsc checkpoint: {:?}", began.elapsed());
            fs::remove_dir_all(&image).unwrap();
            let saved = bench.save(&parent.id, SaveKind::Memory).await;
            bench.gvisor.thaw(&parent.id).await.unwrap();
            let child = bench
                .bring_back(2 + round, SaveKind::Memory, &saved, backing)
                .await;
            bench.gvisor.destroy(&child.id).await.unwrap();
        }
        let began = Instant::now();
        let fresh = bench
            .gvisor
            .start(bench.spec(9, resources(backing)))
            .await
            .unwrap();
        eprintln!("{backing:?} fresh start: {:?}", began.elapsed());
        bench.gvisor.destroy(&fresh.id).await.unwrap();
        bench.gvisor.destroy(&parent.id).await.unwrap();
    }
}

/// Everything that a layer can say about files.
const CHANGES: &str = "
    busybox mkdir -p /new/deep /etc/kept; echo one > /new/deep/file; busybox ln /new/deep/file /new/link
    busybox ln -s deep/file /new/symbolic; busybox mkfifo /new/fifo; echo two > /new/special; busybox chmod 4751 /new/special
    busybox chown 1000:1001 /new/special; busybox touch -d @1000000000 /new/special; busybox chmod 4751 /new/special
    busybox rm /etc/group; echo replaced > /etc/passwd
    busybox rm -r /lower/dir; busybox mkdir /lower/dir; echo again > /lower/dir/again
    busybox mv /lower/moved /new/moved; busybox rm -r /lower/gone
    busybox dd if=/dev/urandom of=/new/large bs=1M count=5 2>/dev/null; busybox md5sum /new/large > /new/sum
    busybox rm -r /lower/file; busybox mkdir /lower/file; echo inside > /lower/file/inside
    busybox touch -d @1000000002 /new/deep/file; busybox touch -d @1000000001 /new
    echo kept > /tmp/kept; echo lost > /dev/shm/lost";
const LOOK: &str = "cd /; busybox find new lower etc | busybox sort; busybox cat new/link etc/passwd lower/dir/again new/moved;
    busybox stat -c '%a %u %g %Y %h' new/special new/deep/file; busybox stat -c '%Y' new; busybox readlink new/symbolic;
    busybox md5sum -c new/sum; busybox ls /tmp /dev/shm";
const CHANGE_AGAIN: &str =
    "echo more > /new/more; busybox rm /new/link; busybox ln /new/more /new/link; busybox rm -r /etc/kept;
    busybox touch -d @1000000003 /new";

#[tokio::test(flavor = "multi_thread")]
async fn files_come_back_without_their_processes() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Disk, DiskBacking::Memory] {
        let parent = bench
            .gvisor
            .start(bench.spec(1, resources(backing)))
            .await
            .unwrap();
        assert_eq!(sh(&parent.guest, CHANGES).await, "");
        let seen = sh(&parent.guest, LOOK).await.replace("lost\n", "");
        eprintln!("{seen}");
        let saved = bench.save(&parent.id, SaveKind::Filesystem).await;
        bench.gvisor.thaw(&parent.id).await.unwrap();
        assert_eq!(sh(&parent.guest, "busybox cat /new/link").await, "one");
        let child = bench.bring_back(2, SaveKind::Filesystem, &saved, backing).await;
        assert_eq!(sh(&child.guest, LOOK).await.trim(), seen.trim());
        // Again, from what was brought back.
        assert_eq!(sh(&child.guest, CHANGE_AGAIN).await, "");
        let seen = sh(&child.guest, LOOK).await;
        let saved = bench.save(&child.id, SaveKind::Filesystem).await;
        bench.gvisor.destroy(&child.id).await.unwrap();
        let grandchild = bench.bring_back(3, SaveKind::Filesystem, &saved, backing).await;
        assert_eq!(sh(&grandchild.guest, LOOK).await, seen);
        bench.gvisor.destroy(&grandchild.id).await.unwrap();
        bench.gvisor.destroy(&parent.id).await.unwrap();
        bench.assert_clean().await;
    }
}

/// A filesystem of its own, mounted for as long as this lives.
struct Disk(PathBuf);

impl Disk {
    fn new(at: &Path) -> Self {
        fs::create_dir(at).unwrap();
        let image = at.with_extension("ext4");
        File::create(&image).unwrap().set_len(32 << 20).unwrap();
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-F"])
            .arg(&image)
            .status()
            .unwrap();
        assert!(made.success());
        let mounted = Command::new("mount")
            .args(["-o", "loop"])
            .args([&image, at])
            .status()
            .unwrap();
        assert!(mounted.success());
        Self(at.to_owned())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_and_inputs_are_there_and_there_again() {
    use crate::{Mount, MountSource};
    use std::os::unix::fs::MetadataExt;
    let Some(bench) = Bench::new() else { return };
    // Not below the state directory, which must hold no mount.
    let place = tempfile::tempdir().unwrap();
    let disk = Disk::new(&place.path().join("volume"));
    let mount = |source, path: &str, read_only| Mount {
        source,
        path: path.into(),
        read_only,
    };
    let mounts = vec![
        mount(MountSource::Directory(disk.0.clone()), "/data/volume", false),
        mount(MountSource::Erofs(bench.image.clone()), "/input", false),
    ];
    let spec = |byte| InstanceSpec {
        mounts: mounts.clone(),
        ..bench.spec(byte, resources(DiskBacking::Memory))
    };
    let parent = bench.gvisor.start(spec(1)).await.unwrap();
    let done = sh(
        &parent.guest,
        "cd /data/volume; echo one > one; busybox chown 1000:1001 one; busybox chmod 4755 one; busybox ls /input/bin;
         echo x > /input/x || echo refused",
    )
    .await;
    assert!(done.contains("busybox") && done.contains("refused"), "{done}");
    let one = fs::metadata(disk.0.join("one")).unwrap();
    assert_eq!((one.uid(), one.gid()), (1000, 1001), "the same ids on the volume");
    let script = "exec 5>>/data/volume/log; echo ready; while busybox usleep 2000; do echo x >&5; done";
    let mut writer = background(&parent.guest, "writer", script).await;
    assert_eq!(output(&mut writer, 6, LONG).await, b"ready\n");
    let usage = bench.gvisor.usage(&parent.id).await.unwrap();
    eprintln!("with a gofer: {} KiB", usage.memory_bytes / 1024);

    let saved = bench.save(&parent.id, SaveKind::Memory).await;
    bench.gvisor.destroy(&parent.id).await.unwrap();
    let length = fs::metadata(disk.0.join("log")).unwrap().len();
    let restoring = InstanceSpec {
        restore: Some(Restore {
            kind: SaveKind::Memory,
            source: saved,
        }),
        ..spec(2)
    };
    let child = bench.gvisor.start(restoring).await.unwrap();
    assert_eq!(
        sh(
            &child.guest,
            "busybox stat -c '%u %g' /data/volume/one; busybox ls /input/bin"
        )
        .await,
        "1000 1001\nbusybox"
    );
    assert_eq!(sh(&child.guest, "busybox sleep 1").await, "");
    assert!(
        fs::metadata(disk.0.join("log")).unwrap().len() > length,
        "the open file is still the volume's"
    );
    bench.gvisor.destroy(&child.id).await.unwrap();

    // Not mounted, so not lent; and a layer with disk backing needs no second gofer.
    fs::create_dir(place.path().join("plain")).unwrap();
    let refused = InstanceSpec {
        mounts: vec![mount(
            MountSource::Directory(place.path().join("plain")),
            "/data",
            true,
        )],
        ..spec(3)
    };
    let error = bench.gvisor.start(refused).await.unwrap_err().to_string();
    assert!(error.contains("nothing is mounted"), "{error}");
    let read_only = InstanceSpec {
        mounts: vec![mount(MountSource::Directory(disk.0.clone()), "/data", true)],
        ..bench.spec(4, resources(DiskBacking::Disk))
    };
    let reader = bench.gvisor.start(read_only).await.unwrap();
    let tried = sh(
        &reader.guest,
        "busybox cat /data/one; echo x > /data/x || echo refused",
    )
    .await;
    assert!(tried.contains("one") && tried.contains("refused"), "{tried}");
    let saved = bench.save(&reader.id, SaveKind::Filesystem).await;
    bench.gvisor.destroy(&reader.id).await.unwrap();
    assert!(!saved.names().is_empty());
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_sandbox_can_be_saved() {
    let Some(bench) = Bench::new() else { return };
    let resources = Resources {
        memory_bytes: 128 * MIB,
        disk_bytes: 90 * MIB,
        ..Resources::default()
    };
    let parent = bench.gvisor.start(bench.spec(1, resources)).await.unwrap();
    let filled = sh(
        &parent.guest,
        "busybox dd if=/dev/urandom of=/large bs=1M count=80; busybox md5sum /large",
    )
    .await;
    let sum = filled.lines().last().unwrap().to_owned();
    for kind in [SaveKind::Memory, SaveKind::Filesystem] {
        let parts = Arc::new(Parts {
            in_memory: true,
            ..Parts::default()
        });
        bench.gvisor.save(&parent.id, kind, parts.clone()).await.unwrap();
        bench.gvisor.thaw(&parent.id).await.unwrap();
        assert_eq!(sh(&parent.guest, "busybox md5sum /large").await, sum);
        let child = bench
            .gvisor
            .start(bench.restoring(2, resources, kind, &parts))
            .await
            .unwrap();
        assert_eq!(sh(&child.guest, "busybox md5sum /large").await, sum);
        bench.gvisor.destroy(&child.id).await.unwrap();
        drop(parts);
    }
    assert_eq!(bench.gvisor.usage(&parent.id).await.unwrap().oom_kills, 0);
    // What does not fit is an error.
    let parts = bench.save(&parent.id, SaveKind::Filesystem).await;
    let smaller = Resources {
        disk_bytes: 40 * MIB,
        ..resources
    };
    let spec = bench.restoring(3, smaller, SaveKind::Filesystem, &parts);
    let error = bench.gvisor.start(spec).await.unwrap_err().to_string();
    assert!(error.contains("ask for a larger one"), "{error}");
    bench.gvisor.destroy(&parent.id).await.unwrap();
    bench.assert_clean().await;
}

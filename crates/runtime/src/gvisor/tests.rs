//! Against a real `runsc`; see [`Bench::new`] for what is needed. Without it each test says loudly that it was skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use atoll_guest_protocol::{Exec, Message, Request};
use atoll_types::{DiskBacking, MIB};

use super::*;
use crate::InstanceEnd;
use crate::channel::{ChannelError, Guest, Incoming};
use crate::probe::{Verdict, probe};

mod layers;
mod ports;
mod saving;
mod walls;

struct Bench {
    state: tempfile::TempDir,
    /// A plain image of the root.
    image: PathBuf,
    /// The same as two layers on another: what sandboxes here are made of, so that whatever is tested holds for those.
    layers: Vec<PathBuf>,
    gvisor: Gvisor,
    config: Arc<Config>,
}

impl Bench {
    /// Needs root, `runsc` (`ATOLL_TEST_RUNSC` or in `PATH`), `mkfs.erofs`, the agent (`ATOLL_TEST_GUEST` or built with
    /// `--target x86_64-unknown-linux-musl --profile guest`) and busybox for a root to run things in.
    fn new() -> Option<Self> {
        Self::try_new()
            .map_err(|why| eprintln!("SKIPPED, gVisor is NOT tested here: {why}"))
            .ok()
    }

    fn try_new() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("not root".into());
        }
        let runsc = std::env::var_os("ATOLL_TEST_RUNSC")
            .map(PathBuf::from)
            .or_else(|| in_path("runsc"))
            .ok_or("no runsc; set ATOLL_TEST_RUNSC")?;
        let built = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../target/guest/x86_64-unknown-linux-musl/guest/atoll-guest");
        let agent = std::env::var_os("ATOLL_TEST_GUEST").map_or(built, PathBuf::from);
        if !agent.exists() {
            return Err(format!("no agent at {}; set ATOLL_TEST_GUEST", agent.display()));
        }
        let busybox = in_path("busybox").ok_or("no busybox")?;
        let state = tempfile::tempdir().map_err(|error| error.to_string())?;
        let at = state.path();
        let (agent_dir, root) = (at.join("agent"), at.join("root"));
        for dir in [
            "agent",
            "root/bin",
            "root/tmp",
            "root/etc",
            "root/root",
            "root/lower/dir/old",
            "root/lower/gone/old",
        ] {
            fs::create_dir_all(at.join(dir)).map_err(|error| error.to_string())?;
        }
        for file in ["moved", "file", "same", "dir/file"] {
            fs::write(root.join("lower").join(file), file).map_err(|error| error.to_string())?;
        }
        fs::copy(&agent, agent_dir.join("atoll-guest")).map_err(|error| error.to_string())?;
        fs::copy(&busybox, root.join("bin/busybox")).map_err(|error| error.to_string())?;
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")
            .map_err(|error| error.to_string())?;
        fs::write(root.join("etc/group"), "root:x:0:\n").map_err(|error| error.to_string())?;
        let images = [at.join("agent.erofs"), at.join("root.erofs")];
        for (image, dir) in images.iter().zip([&agent_dir, &root]) {
            let made = Command::new("mkfs.erofs")
                .args(["-E", "noinline_data"])
                .args([image, dir])
                .output()
                .map_err(|error| format!("no mkfs.erofs: {error}"))?;
            if !made.status.success() {
                return Err(format!("mkfs.erofs: {}", String::from_utf8_lossy(&made.stderr)));
            }
        }
        let [guest_image, image] = images;
        let config = Arc::new(Config {
            state_dir: at.to_owned(),
            guest_binary: agent,
            guest_image,
            jailer_binary: PathBuf::new(),
            runsc: Some(runsc.clone()),
            cgroup_parent: format!("atoll-test-{}", bare_name(at)),
        });
        let layers = layers::split(&image, at).map_err(|error| error.to_string())?;
        Ok(Self {
            layers,
            gvisor: Gvisor::new(Arc::clone(&config), runsc).map_err(|error| error.to_string())?,
            image,
            state,
            config,
        })
    }

    fn spec(&self, byte: u8, resources: Resources) -> InstanceSpec {
        InstanceSpec {
            id: InstanceId::from_entropy([byte; 20]),
            image: self.layers.clone(),
            resources,
            hostname: "box".into(),
            restore: None,
            mounts: Vec::new(),
            network: None,
        }
    }

    /// Asserts that nothing is left of any instance.
    async fn assert_clean(&self) {
        assert_eq!(self.gvisor.discover().await.unwrap(), []);
        assert_eq!(
            crate::cgroup::list(&self.config.cgroup_parent).unwrap(),
            Vec::<String>::new()
        );
        for dir in ["instances", "uids"] {
            let left = fs::read_dir(self.state.path().join(dir)).map_or(0, Iterator::count);
            assert_eq!(left, 0, "in {dir}");
        }
        let state = self.state.path().to_str().unwrap();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            assert!(
                !String::from_utf8_lossy(&command).contains(state),
                "{:?} still runs",
                entry.file_name()
            );
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(state), "{mounts}");
    }
}

impl Drop for Bench {
    /// Also after a failed test nothing may be left.
    fn drop(&mut self) {
        let parent = &self.config.cgroup_parent;
        for name in crate::cgroup::list(parent).unwrap_or_default() {
            let Ok(group) = Group::named(parent, &name) else {
                continue;
            };
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_time()
                        .build()
                        .unwrap();
                    runtime.block_on(async {
                        let _ = group.kill_all().await;
                        let _ = group.remove().await;
                    });
                });
            });
        }
        if let Ok(group) = Group::named(parent, "x") {
            for file in group.procs_files() {
                let _ = fs::remove_dir(file.parent().unwrap().parent().unwrap());
            }
        }
    }
}

fn bare_name(path: &Path) -> String {
    let name = path.file_name().unwrap().to_string_lossy();
    name.chars().filter(char::is_ascii_alphanumeric).collect()
}

fn in_path(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|dir| dir.join(name))
        .find(|file| file.exists())
}

/// Runs a shell command as root; its output, with `!` in front of a failure.
async fn sh(guest: &Guest, script: &str) -> String {
    let exec = Exec {
        command: format!("cmd_{}", getrandom::u64().unwrap()),
        argv: ["/bin/busybox", "sh", "-c", script]
            .map(|word| word.as_bytes().to_vec())
            .to_vec(),
        env: vec![("PATH".into(), "/bin".into())],
        cwd: None,
        user: Some("0".into()),
        pty: None,
        stdin: false,
        timeout_millis: None,
        log_bytes: 64 * 1024,
        wait_for_reader: true,
        kill_on_close: true,
    };
    let collect = async {
        let mut stream = guest.open(&Request::Exec(exec)).await?;
        let mut text = String::new();
        while let Some(incoming) = stream.next().await {
            match incoming? {
                Incoming::Data { bytes, .. } => text.push_str(&String::from_utf8_lossy(&bytes)),
                Incoming::Message(Message::Exited(state)) => {
                    if state != (atoll_guest_protocol::CommandState::Exited { code: 0 }) {
                        text = format!("!{state:?} {text}");
                    }
                }
                Incoming::Message(_) => {}
            }
        }
        Ok::<_, ChannelError>(text)
    };
    match tokio::time::timeout(Duration::from_secs(30), collect).await {
        Ok(Ok(text)) => text.trim().to_owned(),
        Ok(Err(error)) => format!("!{error}"),
        Err(_) => "!timeout".into(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_lives_is_adopted_and_goes_without_a_trace() {
    let Some(bench) = Bench::new() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let resources = Resources {
            disk_backing: backing,
            memory_bytes: 256 * MIB,
            disk_bytes: 300 * MIB,
            ..Resources::default()
        };
        let spec = bench.spec(1, resources);
        let id = spec.id.clone();
        let started = Instant::now();
        let instance = bench.gvisor.start(spec.clone()).await.unwrap();
        eprintln!("{backing:?}: started in {:?}", started.elapsed());
        assert_eq!(
            sh(&instance.guest, "busybox hostname; busybox id -u").await,
            "box\n0"
        );
        assert!(
            sh(&instance.guest, "busybox cat /proc/meminfo")
                .await
                .contains("262144 kB")
        );
        let usage = bench.gvisor.usage(&id).await.unwrap();
        assert!(
            usage.cpu_micros > 0 && usage.pids > 0 && usage.memory_bytes > 0,
            "{usage:?}"
        );
        let larger = Resources {
            cpu_millis: 2000,
            memory_bytes: 512 * MIB,
            ..resources
        };
        bench.gvisor.resize(&id, &larger).await.unwrap();

        // The server goes and comes back.
        assert_eq!(sh(&instance.guest, "echo kept > /file").await, "");
        instance.guest.close(); // two readers of one FIFO would take each other's bytes
        drop(instance);
        assert_eq!(bench.gvisor.discover().await.unwrap(), std::slice::from_ref(&id));
        let adopted = bench.gvisor.adopt(&id).await.unwrap();
        assert_eq!(sh(&adopted.guest, "busybox cat /file").await, "kept");
        assert_eq!(*adopted.end.borrow(), None);

        let mut end = adopted.end.clone();
        let destroying = Instant::now();
        bench.gvisor.destroy(&id).await.unwrap();
        eprintln!("{backing:?}: destroyed in {:?}", destroying.elapsed());
        let end = tokio::time::timeout(Duration::from_secs(5), end.wait_for(Option::is_some))
            .await
            .unwrap();
        assert!(matches!(*end.unwrap(), Some(InstanceEnd::Died(_))));
        assert!(sh(&adopted.guest, "true").await.starts_with('!'));
        bench.gvisor.destroy(&id).await.unwrap();
        bench.assert_clean().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn starting_an_id_twice_harms_nobody() {
    let Some(bench) = Bench::new() else { return };
    let spec = bench.spec(6, Resources::default());
    let instance = bench.gvisor.start(spec.clone()).await.unwrap();
    let again = bench.gvisor.start(spec).await.unwrap_err();
    assert!(matches!(again, Error::Start { .. }), "{again}");
    assert_eq!(sh(&instance.guest, "echo unharmed").await, "unharmed");
    bench.gvisor.destroy(&instance.id).await.unwrap();
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_end_in_errors_or_in_a_named_death() {
    let Some(bench) = Bench::new() else { return };
    let resources = Resources {
        memory_bytes: 192 * MIB,
        disk_bytes: 64 * MIB,
        disk_backing: DiskBacking::Memory,
        ..Resources::default()
    };
    let spec = bench.spec(2, resources);
    let id = spec.id.clone();
    let instance = bench.gvisor.start(spec).await.unwrap();
    let full = sh(
        &instance.guest,
        "busybox dd if=/dev/zero of=/big bs=1M count=100; busybox rm /big",
    )
    .await;
    assert!(full.contains("No space left"), "{full}");
    let away = sh(&instance.guest, "busybox wget -T 3 http://169.254.169.254/").await;
    assert!(away.starts_with('!'), "{away}");
    let hog = sh(&instance.guest, "x=0123456789abcdef; while :; do x=$x$x; done").await;
    assert!(hog.starts_with('!'), "{hog}");
    let mut end = instance.end.clone();
    let end = tokio::time::timeout(Duration::from_secs(30), end.wait_for(Option::is_some))
        .await
        .unwrap();
    assert_eq!(*end.unwrap(), Some(InstanceEnd::OutOfMemory));
    assert!(bench.gvisor.usage(&id).await.unwrap().oom_kills > 0);
    assert!(matches!(bench.gvisor.adopt(&id).await, Err(Error::Adopt { .. })));
    bench.gvisor.destroy(&id).await.unwrap();
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_bomb_is_contained_and_named() {
    let Some(bench) = Bench::new() else { return };
    let resources = Resources {
        pids: 64,
        ..Resources::default()
    };
    let instance = bench.gvisor.start(bench.spec(7, resources)).await.unwrap();
    sh(&instance.guest, "bomb() { bomb | bomb & }; bomb; busybox sleep 5").await;
    let mut end = instance.end.clone();
    let end = tokio::time::timeout(Duration::from_secs(30), end.wait_for(Option::is_some)).await;
    match &*end.unwrap().unwrap() {
        Some(InstanceEnd::Died(reason)) => assert!(reason.contains("processes"), "{reason}"),
        other => panic!("{other:?}"),
    }
    bench.gvisor.destroy(&instance.id).await.unwrap();
    bench.assert_clean().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_leave_nothing_and_say_why() {
    let Some(bench) = Bench::new() else { return };
    let mut spec = bench.spec(3, Resources::default());
    spec.image = vec!["/nonexistent.erofs".into()];
    let error = bench.gvisor.start(spec).await.unwrap_err().to_string();
    assert!(error.contains("nonexistent.erofs"), "{error}");
    bench.assert_clean().await;
    // Half-made things, as a crash leaves them.
    let id = InstanceId::from_entropy([4; 20]);
    fs::create_dir(bench.gvisor.dirs.dir(&id)).unwrap();
    uids::take(bench.state.path(), &id).unwrap();
    Group::create(&bench.config.cgroup_parent, id.as_str(), &Resources::default()).unwrap();
    assert_eq!(bench.gvisor.discover().await.unwrap(), std::slice::from_ref(&id));
    assert!(matches!(bench.gvisor.adopt(&id).await, Err(Error::Adopt { .. })));
    bench.gvisor.destroy(&id).await.unwrap();
    bench.assert_clean().await;
    let unknown = InstanceId::from_entropy([5; 20]);
    assert!(matches!(
        bench.gvisor.adopt(&unknown).await,
        Err(Error::NotFound(_))
    ));
    assert!(matches!(
        bench.gvisor.usage(&unknown).await,
        Err(Error::NotFound(_))
    ));
    bench.gvisor.destroy(&unknown).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_tries_what_it_praises() {
    let Some(bench) = Bench::new() else { return };
    let probes = probe(&bench.config).await;
    let verdict = |isolation| {
        &probes
            .iter()
            .find(|probe| probe.isolation == isolation)
            .unwrap()
            .verdict
    };
    assert!(
        matches!(verdict(Isolation::Gvisor), Verdict::Works { .. }),
        "{probes:?}"
    );
    assert!(matches!(verdict(Isolation::Microvm), Verdict::Unavailable { .. }));
    bench.assert_clean().await;
    let broken = Config {
        runsc: Some("/bin/false".into()),
        ..(*bench.config).clone()
    };
    assert!(!probe(&broken).await[1].works());
}

#[test]
fn only_our_own_runsc_counts_files() {
    for (version, counts) in [
        ("runsc version 20260905.5", true),
        ("runsc version 20261201.1", true),
        ("runsc version 20260905.4", false),
        ("runsc version release-20261201.0", false),
        ("runsc version VERSION_MISSING", false),
        ("", false),
    ] {
        assert_eq!(launch::counts_files(version), counts, "{version}");
    }
}

/// What is known about files is kept in memory, so there may be only so many.
#[tokio::test(flavor = "multi_thread")]
async fn too_many_files_are_an_error() {
    let Some(bench) = Bench::new() else { return };
    let resources = Resources {
        memory_bytes: 128 * MIB,
        disk_bytes: 2048 * MIB,
        ..Resources::default()
    };
    let instance = bench.gvisor.start(bench.spec(1, resources)).await.unwrap();
    let line = "busybox mkdir /many; cd /many; i=0; while echo $i > $i; do i=$((i + 1)); done; echo ended";
    let many = sh(&instance.guest, line).await;
    assert!(many.contains("No space left") && many.contains("ended"), "{many}");
    assert_eq!(
        sh(
            &instance.guest,
            "busybox rm -r /many; echo x > /x; busybox cat /x"
        )
        .await,
        "x"
    );
    assert_eq!(bench.gvisor.usage(&instance.id).await.unwrap().oom_kills, 0);
    bench.gvisor.destroy(&instance.id).await.unwrap();
    bench.assert_clean().await;
}

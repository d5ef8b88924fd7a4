//! Jails for tests: a place of their own, a shell in them, and what they must not leave behind.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_guest_protocol::{CommandState, Exec, Message, Request};
use atoll_runtime::cgroup;
use atoll_runtime::channel::{Incoming, Stream};
use atoll_runtime::jail::{self, Jail};
use atoll_runtime::{Config, Instance, InstanceSpec, Runtime};
use atoll_types::{DiskBacking, InstanceId, MIB, Resources};
use rustix::process::{Pid, Signal, kill_process};

/// A server's worth of jails in a directory of its own, gone when the test is.
pub(crate) struct House {
    pub(crate) jail: Jail,
    pub(crate) config: Arc<Config>,
    image: PathBuf,
    pub(crate) state: tempfile::TempDir,
}

impl House {
    pub(crate) fn open() -> Option<Self> {
        let skip = |why: String| eprintln!("SKIPPED, the jail is NOT tested: {why}");
        let target =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest/x86_64-unknown-linux-musl/guest");
        let image = std::env::var_os("ATOLL_TEST_IMAGE").map_or(PathBuf::new(), PathBuf::from);
        let state = tempfile::tempdir().unwrap();
        let config = Arc::new(Config {
            state_dir: state.path().join("state"),
            guest_binary: target.join("atoll-guest"),
            guest_image: state.path().join("guest.erofs"),
            jailer_binary: target.join("atoll-jailer"),
            runsc: None,
            // An ordinary user needs one that is delegated.
            cgroup_parent: std::env::var("ATOLL_TEST_CGROUP").unwrap_or(format!(
                "atoll-test-{}",
                state.path().file_name()?.to_str()?.trim_start_matches('.')
            )),
        });
        for path in [&image, &config.guest_binary] {
            if !path.exists() {
                skip(format!("{} is missing", path.display()));
                return None;
            }
        }
        if let Err(why) = jail::check(&config) {
            skip(why.to_string());
            return None;
        }
        let guest = state.path().join("guest");
        std::fs::create_dir(&guest).unwrap();
        std::fs::copy(&config.guest_binary, guest.join("atoll-guest")).unwrap();
        let made = Command::new("mkfs.erofs")
            .args(["--quiet", "-Enoinline_data"])
            .args([&config.guest_image, &guest])
            .status();
        assert!(made.unwrap().success());
        Some(Self {
            jail: Jail::new(Arc::clone(&config)).unwrap(),
            config,
            image,
            state,
        })
    }

    pub(crate) fn spec(&self) -> InstanceSpec {
        let mut entropy = [0; 20];
        getrandom::fill(&mut entropy).unwrap();
        InstanceSpec {
            id: InstanceId::from_entropy(entropy),
            image: vec![self.image.clone()],
            resources: Resources {
                cpu_millis: 2000,
                memory_bytes: 256 * MIB,
                disk_bytes: 64 * MIB,
                disk_backing: DiskBacking::Memory,
                pids: 64,
            },
            hostname: "box".into(),
            restore: None,
            mounts: Vec::new(),
            network: None,
        }
    }

    /// Whether the server is root's, and its jails have users and volumes.
    pub(crate) fn is_roots(&self) -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            eprintln!("SKIPPED: needs a server run by root");
        }
        root
    }

    pub(crate) async fn start(&self) -> Instance {
        self.start_with(|_| {}).await
    }

    pub(crate) async fn start_with(&self, change: impl FnOnce(&mut Resources)) -> Instance {
        let mut spec = self.spec();
        change(&mut spec.resources);
        self.jail.start(spec).await.unwrap()
    }
}

impl Drop for House {
    /// A test that failed leaves its jails running, as a server that died would.
    fn drop(&mut self) {
        let parent = &self.config.cgroup_parent;
        for name in cgroup::list(parent).unwrap_or_default() {
            let group = cgroup::Group::named(parent, &name).unwrap();
            let deadline = Instant::now() + Duration::from_secs(5);
            while Instant::now() < deadline {
                let processes = group.processes().unwrap_or_default();
                for pid in processes
                    .iter()
                    .filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?))
                {
                    let _ = kill_process(pid, Signal::KILL);
                }
                let _ = group.thaw();
                if processes.is_empty() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            for dir in group.procs_files().iter().filter_map(|file| file.parent()) {
                let _ = std::fs::remove_dir(dir);
            }
            let _ = std::fs::remove_dir(Path::new("/sys/fs/cgroup/freezer").join(parent).join(&name));
        }
        // Volumes, before their directory is emptied through the mount.
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = table.lines().filter_map(|line| line.split(' ').nth(4));
        for point in points.filter(|point| Path::new(point).starts_with(self.state.path())) {
            let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::empty());
        }
        for controller in ["memory", "cpu", "cpuacct", "pids", "freezer", ""] {
            let _ = std::fs::remove_dir(Path::new("/sys/fs/cgroup").join(controller).join(parent));
        }
    }
}

/// Runs a shell script in the jail as root, and gives all it said and how it ended.
pub(crate) async fn sh(instance: &Instance, script: &str) -> (String, CommandState) {
    sh_as(instance, "0", script).await
}

pub(crate) async fn sh_as(instance: &Instance, user: &str, script: &str) -> (String, CommandState) {
    finish(start_sh(instance, user, script).await).await
}

/// Starts a script; what it says comes on the stream.
pub(crate) async fn start_sh(instance: &Instance, user: &str, script: &str) -> Stream {
    let exec = Exec {
        command: format!("t{}", getrandom::u64().unwrap()),
        argv: ["/bin/sh", "-c", &format!("exec 2>&1; {script}")]
            .map(|word| word.as_bytes().to_vec())
            .to_vec(),
        env: vec![],
        cwd: Some(b"/".to_vec()),
        user: Some(user.into()),
        pty: None,
        stdin: false,
        timeout_millis: Some(30_000),
        log_bytes: 64 * 1024,
        wait_for_reader: true,
        kill_on_close: true,
    };
    instance.guest.open(&Request::Exec(exec)).await.unwrap()
}

/// Waits until a script has said something.
pub(crate) async fn first_words(stream: &mut Stream) -> String {
    loop {
        match stream.next().await {
            Some(Ok(Incoming::Data { bytes, .. })) => return String::from_utf8_lossy(&bytes).into_owned(),
            Some(Ok(Incoming::Message(Message::Started { .. }))) => {}
            other => panic!("it said nothing: {other:?}"),
        }
    }
}

async fn finish(mut stream: Stream) -> (String, CommandState) {
    let (mut said, mut state) = (Vec::new(), CommandState::Running);
    while let Some(incoming) = stream.next().await {
        match incoming {
            Ok(Incoming::Data { bytes, .. }) => said.extend_from_slice(&bytes),
            Ok(Incoming::Message(Message::Exited(how))) => state = how,
            Ok(Incoming::Message(_)) => {}
            Err(_) => break,
        }
    }
    (String::from_utf8_lossy(&said).into_owned(), state)
}

/// Runs a script that must succeed.
pub(crate) async fn ok(instance: &Instance, script: &str) -> String {
    let (said, state) = sh(instance, script).await;
    assert_eq!(state, CommandState::Exited { code: 0 }, "{script}: {said}");
    said
}

/// Runs a script that must fail, and say why.
pub(crate) async fn refused(instance: &Instance, script: &str, why: &[&str]) {
    for user in ["0", "1000"] {
        let (said, state) = sh_as(instance, user, script).await;
        assert!(
            !matches!(state, CommandState::Exited { code: 0 }),
            "{script} as {user} succeeded: {said}"
        );
        assert!(
            why.iter().any(|why| said.contains(why)),
            "{script} as {user} ended with {state:?}: {said}"
        );
    }
}

pub(crate) fn before_is_gone(house: &House, id: &InstanceId) {
    assert!(
        !house
            .config
            .state_dir
            .join("instances")
            .join(id.as_str())
            .exists()
    );
    for controller in ["memory", "cpu", "cpuacct", "pids", "freezer", ""] {
        let group = Path::new("/sys/fs/cgroup")
            .join(controller)
            .join(&house.config.cgroup_parent)
            .join(id.as_str());
        assert!(!group.exists(), "{}", group.display());
    }
}

/// What a jail could leave on the host that does not carry its name.
pub(crate) struct Traces {
    mounts: HashSet<String>,
}

impl Traces {
    pub(crate) fn take() -> Self {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        Self {
            mounts: table.lines().map(str::to_owned).collect(),
        }
    }

    /// The machine has other users, who mount things too: what counts is what only a jail would.
    pub(crate) async fn nothing_new(&self, house: &House, id: &InstanceId) {
        before_is_gone(house, id);
        let state = house.state.path().to_str().unwrap();
        for mount in Self::take().mounts.difference(&self.mounts) {
            let ours = [state, " erofs ", " overlay atoll ", "/dev/loop"];
            // Another test may have a volume mounted right now; of one's own the first mark speaks.
            let theirs = mount.contains("/volumes/") && !mount.contains(state);
            assert!(theirs || !ours.iter().any(|mark| mount.contains(mark)), "{mount}");
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            // Loop devices and namespaces go a moment after the last process.
            let devices = std::fs::read_dir("/sys/block")
                .unwrap()
                .flatten()
                .filter(|device| {
                    std::fs::read_to_string(device.path().join("loop/backing_file"))
                        .is_ok_and(|file| file.contains(id.as_str()))
                });
            let processes = std::fs::read_dir("/proc").unwrap().flatten().filter(|process| {
                std::fs::read_to_string(process.path().join("cgroup"))
                    .is_ok_and(|groups| groups.contains(id.as_str()))
                    || std::fs::read_to_string(process.path().join("cmdline"))
                        .is_ok_and(|line| line.contains(id.as_str()))
            });
            if devices.count() == 0 && processes.count() == 0 {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "a loop device or process of {id} is still there"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

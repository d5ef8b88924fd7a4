//! The jail, from outside and from inside: it boots, it holds, it leaves nothing.
//!
//! Needs root, `atoll-jailer` and `atoll-guest` built with the `guest` profile, and an EROFS image with a Debian root
//! (`ATOLL_TEST_IMAGE`). Without them every test says loudly that it was skipped.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at the first thing that is not as expected"
)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_guest_protocol::{CommandState, Exec, Message, Request};
use atoll_runtime::cgroup;
use atoll_runtime::channel::Incoming;
use atoll_runtime::jail::{self, Jail};
use atoll_runtime::{Config, Error, Instance, InstanceEnd, InstanceSpec, Runtime};
use atoll_types::{DiskBacking, GIB, InstanceId, MIB, Resources};
use rustix::process::{Pid, Signal, kill_process};

/// A server's worth of jails in a directory of its own, gone when the test is.
struct House {
    jail: Jail,
    config: Arc<Config>,
    image: PathBuf,
    state: tempfile::TempDir,
}

impl House {
    fn open() -> Option<Self> {
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
            skip(why);
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

    fn spec(&self) -> InstanceSpec {
        let mut entropy = [0; 20];
        getrandom::fill(&mut entropy).unwrap();
        InstanceSpec {
            id: InstanceId::from_entropy(entropy),
            image: self.image.clone(),
            resources: Resources {
                cpu_millis: 2000,
                memory_bytes: 256 * MIB,
                disk_bytes: 64 * MIB,
                disk_backing: DiskBacking::Memory,
                pids: 64,
            },
            hostname: "box".into(),
        }
    }

    async fn start(&self) -> Instance {
        self.start_with(|_| {}).await
    }

    async fn start_with(&self, change: impl FnOnce(&mut Resources)) -> Instance {
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
                if processes.is_empty() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            for dir in group.procs_files().iter().filter_map(|file| file.parent()) {
                let _ = std::fs::remove_dir(dir);
            }
        }
        for controller in ["memory", "cpu", "cpuacct", "pids", ""] {
            let _ = std::fs::remove_dir(Path::new("/sys/fs/cgroup").join(controller).join(parent));
        }
    }
}

/// Runs a shell script in the jail as root, and gives all it said and how it ended.
async fn sh(instance: &Instance, script: &str) -> (String, CommandState) {
    sh_as(instance, "0", script).await
}

async fn sh_as(instance: &Instance, user: &str, script: &str) -> (String, CommandState) {
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
    let mut stream = instance.guest.open(&Request::Exec(exec)).await.unwrap();
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
async fn ok(instance: &Instance, script: &str) -> String {
    let (said, state) = sh(instance, script).await;
    assert_eq!(state, CommandState::Exited { code: 0 }, "{script}: {said}");
    said
}

/// Runs a script that must fail, and say why.
async fn refused(instance: &Instance, script: &str, why: &[&str]) {
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

const DENIED: &[&str] = &[
    "ermitted",
    "ermission denied",
    "ead-only file system",
    "not permitted",
    "must be superuser",
    "must be root",
];

#[tokio::test]
async fn boots_runs_and_leaves_nothing() {
    let Some(house) = House::open() else { return };
    let before = Traces::take();
    let instance = house.start().await;
    assert_eq!(
        ok(&instance, "echo hello; hostname; id -u").await,
        "hello\nbox\n0\n"
    );
    if rustix::process::geteuid().is_root() {
        assert_eq!(
            sh_as(&instance, "1000:1000", "id -u; id -g").await.0,
            "1000\n1000\n"
        );
    }
    assert_eq!(ok(&instance, "cat /proc/1/comm").await, "atoll-guest\n");
    assert_eq!(ok(&instance, "python3 -c 'print(6*7)'").await, "42\n");
    assert_eq!(ok(&instance, "node -e 'console.log(6*7)'").await, "42\n");
    ok(
        &instance,
        "cd /tmp && git init -q r && mv /usr/lib/git-core /usr/lib/gone && test -d /usr/lib/gone",
    )
    .await;
    ok(&instance, "touch /tmp/a && ln /tmp/a /var/b && mv /var/b /srv/c").await;
    let usage = house.jail.usage(&instance.id).await.unwrap();
    assert!(
        usage.memory_bytes > 0 && usage.pids >= 1 && usage.cpu_micros > 0,
        "{usage:?}"
    );
    assert!(
        usage
            .disk_bytes
            .is_some_and(|bytes| bytes > 0 && bytes < 64 * MIB),
        "{usage:?}"
    );
    assert_eq!(
        house.jail.discover().await.unwrap(),
        std::slice::from_ref(&instance.id)
    );

    house.jail.destroy(&instance.id).await.unwrap();
    house.jail.destroy(&instance.id).await.unwrap();
    let mut end = instance.end.clone();
    end.wait_for(Option::is_some).await.unwrap();
    assert_eq!(house.jail.discover().await.unwrap(), []);
    assert!(matches!(
        house.jail.usage(&instance.id).await,
        Err(Error::NotFound(_))
    ));
    before.nothing_new(&house, &instance.id).await;
}

#[tokio::test]
async fn the_walls_hold() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let status = ok(
        &instance,
        "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status",
    )
    .await;
    for line in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line} missing in {status}");
    }
    for script in [
        "mount -t tmpfs none /mnt",
        "mount --bind /etc /mnt",
        "umount -l /proc/sys",
        "mount -o remount,rw /proc/sys",
        "unshare -U true",
        "unshare -r -m true",
        "unshare -n true",
        "nsenter -t 1 -m true",
        "chroot / true",
        "echo 1 > /proc/sys/kernel/randomize_va_space",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "mknod /tmp/disk b 254 0",
        "mknod /tmp/mem c 1 1",
        "touch /dev/x",
        "touch /sys/x",
        "echo x > /.atoll/atoll-guest",
        "cat /proc/1/fd/2 </dev/null",
        "for f in /proc/1/fd/*; do : > $f && exit 0; done; exit 1",
        "ls -l /proc/1/fd/ | grep -q -- '->' || { echo not permitted; exit 1; }",
        "ls -l /proc/1/cwd",
        "cat /proc/1/mem",
        "cat /proc/1/environ",
        "ls /proc/1/root/",
        "hostname other",
        "date -s 2020-01-01",
        "python3 -c 'import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.ptrace(16,1,0,0); raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))'",
        // bpf, keyctl, perf_event_open, userfaultfd, open_by_handle_at, kexec_load, init_module, reboot
        "for n in 321 250 298 323 304 246 175 169; do python3 -c \"import ctypes,os; l=ctypes.CDLL(None,use_errno=True); r=l.syscall($n,0,0,0,0,0); e=ctypes.get_errno(); print($n, os.strerror(e)); exit(0 if e==1 else 7)\" || exit 0; done; exit 1",
    ] {
        refused(&instance, script, DENIED).await;
    }
    // Packet, crypto, virtual machine and express data path sockets.
    for family in [17, 38, 40, 44] {
        let script = format!("python3 -c 'import socket; socket.socket({family}, socket.SOCK_RAW)'");
        refused(&instance, &script, &["not supported by protocol"]).await;
    }
    refused(
        &instance,
        "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
        DENIED,
    )
    .await;
    // What would tell of the host is empty or absent.
    let told = ok(&instance, "for f in cmdline kcore keys kallsyms interrupts iomem timer_list; do test -e /proc/$f && head -c 100 /proc/$f; done; ls /sys; true").await;
    assert_eq!(told, "devices\n");
    let mounts = ok(&instance, "cat /proc/self/mountinfo").await;
    assert!(!mounts.contains(house.state.path().to_str().unwrap()), "{mounts}");
    assert!(mounts.lines().all(|line| line.contains("nosuid")), "{mounts}");
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn setuid_files_do_nothing() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    ok(&instance, "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id").await;
    let (said, _) = sh_as(&instance, "1000", "/tmp/id -u").await;
    assert_eq!(said, "1000\n");
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn killing_everybody_does_not_kill_the_agent() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let _ = sh(&instance, "kill -9 1; kill -9 -1; kill -9 $$").await;
    assert_eq!(ok(&instance, "echo alive").await, "alive\n");
    assert_eq!(*instance.end.borrow(), None);
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn nothing_of_the_hosts_network_is_reachable() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let name = format!("atoll-test-{port}");
    let _unix = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let connect = |what: &str| format!("timeout 5 python3 -c 'import socket; {what}'");
    for (what, why) in [
        (
            format!("socket.create_connection((\"127.0.0.1\", {port}))"),
            "refused",
        ),
        (
            format!("socket.socket(socket.AF_UNIX).connect(b\"\\0{name}\")"),
            "refused",
        ),
        (
            "socket.create_connection((\"169.254.169.254\", 80))".into(),
            "unreachable",
        ),
        (
            "socket.create_connection((\"1.1.1.1\", 53))".into(),
            "unreachable",
        ),
        ("socket.getaddrinfo(\"example.com\", 80)".into(), "resolution"),
    ] {
        refused(&instance, &connect(&what), &[why]).await;
    }
    // Its own loopback works, low ports included.
    ok(&instance, "python3 -c 'import socket; s=socket.create_server((\"127.0.0.1\", 80)); c=socket.create_connection((\"127.0.0.1\", 80))'").await;
    house.jail.destroy(&instance.id).await.unwrap();
}

#[tokio::test]
async fn jails_do_not_see_each_other() {
    let Some(house) = House::open() else { return };
    let (one, two) = (house.start().await, house.start().await);
    ok(&one, "echo secret > /tmp/secret; chmod 666 /tmp/secret").await;
    ok(&two, "test ! -e /tmp/secret").await;
    let count = ok(&two, "ls -d /proc/[0-9]* | wc -l").await;
    assert!(count.trim().parse::<u32>().unwrap() <= 4, "{count}");
    let ids = |instance: &Instance| {
        let record = std::fs::read(
            house
                .config
                .state_dir
                .join("instances")
                .join(instance.id.as_str())
                .join("instance.json"),
        )
        .unwrap();
        serde_json::from_slice::<serde_json::Value>(&record).unwrap()["id_base"]
            .as_u64()
            .unwrap()
    };
    assert!(ids(&one).abs_diff(ids(&two)) >= 65536);
    for instance in [one, two] {
        house.jail.destroy(&instance.id).await.unwrap();
    }
}

#[tokio::test]
async fn a_jail_does_not_use_up_what_others_are_allowed() {
    let Some(house) = House::open() else { return };
    let (one, two) = (house.start().await, house.start().await);
    let take = "python3 -c 'import ctypes,time\nl=ctypes.CDLL(None)\nn=0\nwhile n<5000 and l.inotify_init1(0)>=0: n+=1\nprint(n, flush=True)\ntime.sleep(5)'";
    let (greedy, modest) = tokio::join!(sh(&one, take), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        ok(
            &two,
            "python3 -c 'import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)'",
        )
        .await
    });
    assert!(
        greedy.0.trim().parse::<u32>().is_ok_and(|count| count > 10),
        "{greedy:?}"
    );
    assert_eq!(modest, "True\n", "{greedy:?}");
    for instance in [one, two] {
        house.jail.destroy(&instance.id).await.unwrap();
    }
}

#[tokio::test]
async fn the_disk_is_as_large_as_agreed() {
    let Some(house) = House::open() else { return };
    for backing in [DiskBacking::Memory, DiskBacking::Disk] {
        let before = Traces::take();
        let instance = house
            .start_with(|resources| {
                resources.disk_backing = backing;
                resources.memory_bytes = GIB;
            })
            .await;
        let (said, _) = sh(
            &instance,
            "head -c 100M /dev/zero > /fill; ls -s --block-size=1M /fill",
        )
        .await;
        assert!(said.contains("No space left"), "{backing:?}: {said}");
        let megabytes: u64 = said
            .lines()
            .last()
            .and_then(|line| line.split(' ').next()?.parse().ok())
            .unwrap();
        assert!((50..=64).contains(&megabytes), "{backing:?}: {said}");
        let usage = house.jail.usage(&instance.id).await.unwrap();
        assert!(
            usage
                .disk_bytes
                .is_some_and(|bytes| bytes > 50 * MIB && bytes <= 64 * MIB),
            "{usage:?}"
        );
        let (said, _) = sh(
            &instance,
            "rm /fill; mkdir /many; cd /many; python3 -c 'import os\nfor i in range(200000): open(str(i),\"w\").close()'",
        )
        .await;
        assert!(said.contains("No space left"), "{backing:?}: {said}");
        assert_eq!(
            ok(&instance, "rm -r /many; echo alive > /tmp/x; cat /tmp/x").await,
            "alive\n"
        );
        house.jail.destroy(&instance.id).await.unwrap();
        before.nothing_new(&house, &instance.id).await;
    }
}

#[tokio::test]
async fn a_fork_bomb_stays_within_its_pids() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    let script = "python3 -c 'import os,time\nn=0\ntry:\n  while True:\n    if os.fork()==0: time.sleep(60)\n    n+=1\nexcept OSError as e: print(n, e)'";
    let (said, _) = sh(&instance, script).await;
    assert!(said.contains("Resource temporarily unavailable"), "{said}");
    assert!(house.jail.usage(&instance.id).await.unwrap().pids <= 64);
    let start = Instant::now();
    house.jail.destroy(&instance.id).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
    before_is_gone(&house, &instance.id);

    let instance = house.start().await;
    let bomb = tokio::time::timeout(Duration::from_secs(2), sh(&instance, ":(){ :|:& };:; sleep 1")).await;
    drop(bomb);
    assert!(house.jail.usage(&instance.id).await.unwrap().pids <= 64);
    house.jail.destroy(&instance.id).await.unwrap();
    before_is_gone(&house, &instance.id);
}

#[tokio::test]
async fn a_memory_hog_ends_the_jail_and_the_end_says_so() {
    let Some(house) = House::open() else { return };
    for script in [
        "python3 -c 'x = bytearray(1 << 30)'",
        // What is written in memory counts as memory.
        "head -c 500M /dev/zero > /dev/shm/x; sleep 5",
    ] {
        let instance = house
            .start_with(|resources| resources.memory_bytes = 96 * MIB)
            .await;
        let _ = sh(&instance, "python3 -c 'x=bytearray(8<<20)'").await;
        assert_eq!(*instance.end.borrow(), None);
        let start = Instant::now();
        let (said, state) = sh(&instance, script).await;
        if script.contains("shm") && said.contains("No space") {
            // Half of the memory is the limit of /dev/shm; fine too.
            house.jail.destroy(&instance.id).await.unwrap();
            continue;
        }
        let mut end = instance.end.clone();
        let end = tokio::time::timeout(Duration::from_secs(10), end.wait_for(Option::is_some)).await;
        let end = end
            .unwrap_or_else(|_| panic!("no end; {said} {state:?}"))
            .unwrap()
            .clone();
        assert_eq!(end, Some(InstanceEnd::OutOfMemory), "{said} {state:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
        house.jail.destroy(&instance.id).await.unwrap();
        before_is_gone(&house, &instance.id);
    }
}

#[tokio::test]
async fn another_server_adopts_it_with_its_commands() {
    let Some(house) = House::open() else { return };
    let instance = house.start().await;
    ok(
        &instance,
        "echo kept > /tmp/kept; (sleep 60 & echo $! > /tmp/pid)",
    )
    .await;
    let id = instance.id.clone();
    instance.guest.close();
    drop(instance);

    let next = Jail::new(Arc::clone(&house.config)).unwrap();
    assert_eq!(next.discover().await.unwrap(), std::slice::from_ref(&id));
    let instance = next.adopt(&id).await.unwrap();
    assert_eq!(ok(&instance, "cat /tmp/kept").await, "kept\n");
    next.resize(
        &id,
        &Resources {
            pids: 32,
            cpu_millis: 500,
            memory_bytes: 128 * MIB,
            ..Resources::default()
        },
    )
    .await
    .unwrap();
    assert_eq!(ok(&instance, "echo still").await, "still\n");
    next.destroy(&id).await.unwrap();
    assert!(matches!(next.adopt(&id).await, Err(Error::NotFound(_))));
    let mut end = instance.end.clone();
    end.wait_for(Option::is_some).await.unwrap();
}

#[tokio::test]
async fn what_cannot_start_leaves_nothing() {
    let Some(house) = House::open() else { return };
    let mut spec = house.spec();
    spec.image.clone_from(&house.config.guest_binary);
    let before = Traces::take();
    let error = house.jail.start(spec.clone()).await.unwrap_err();
    assert!(error.to_string().contains("is not an EROFS image"), "{error}");
    before.nothing_new(&house, &spec.id).await;
}

#[tokio::test]
async fn the_agent_alone_is_enough_for_a_trial() {
    let Some(house) = House::open() else { return };
    let before = Traces::take();
    let detail = jail::trial(&house.config).await.unwrap();
    assert!(detail.contains("not a tenant boundary"), "{detail}");
    before.nothing_new(&house, &house.spec().id).await;
    assert_eq!(house.jail.discover().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once() {
    let Some(house) = House::open() else { return };
    let house = Arc::new(house);
    let tasks: Vec<_> = (0..30)
        .map(|_| {
            let house = Arc::clone(&house);
            tokio::spawn(async move {
                let instance = house.start().await;
                assert_eq!(ok(&instance, "echo up").await, "up\n");
                instance.id
            })
        })
        .collect();
    for task in tasks {
        let id = task.await.unwrap();
        house.jail.destroy(&id).await.unwrap();
    }
    assert_eq!(house.jail.discover().await.unwrap(), []);
}

/// Not a test of speed but a look at it: `cargo test --release -- --ignored cold_start --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cold_start() {
    let Some(house) = House::open() else { return };
    let (mut ours, mut booted, mut peer, mut idle) = (vec![], vec![], vec![], 0);
    for _ in 0..60 {
        let start = Instant::now();
        let instance = house.start().await;
        booted.push(start.elapsed());
        idle = house.jail.usage(&instance.id).await.unwrap().memory_bytes;
        assert_eq!(ok(&instance, "echo hi").await, "hi\n");
        ours.push(start.elapsed());
        house.jail.destroy(&instance.id).await.unwrap();
        let start = Instant::now();
        let output = tokio::process::Command::new("bwrap")
            .args([
                "--unshare-all",
                "--ro-bind",
                "/",
                "/",
                "--proc",
                "/proc",
                "--dev",
                "/dev",
            ])
            .args(["/bin/sh", "-c", "echo hi"])
            .output()
            .await
            .unwrap();
        assert_eq!(output.stdout, b"hi\n");
        peer.push(start.elapsed());
    }
    for (name, mut times) in [
        ("jail: start", booted),
        ("jail: start + sh -c echo", ours),
        ("bwrap sh -c echo", peer),
    ] {
        times.sort();
        eprintln!(
            "{name:26} p50 {:?}  p90 {:?}  min {:?}",
            times[30], times[54], times[0]
        );
    }
    eprintln!("idle jail: {} KiB", idle / 1024);
}

fn before_is_gone(house: &House, id: &InstanceId) {
    assert!(
        !house
            .config
            .state_dir
            .join("instances")
            .join(id.as_str())
            .exists()
    );
    for controller in ["memory", "cpu", "cpuacct", "pids", ""] {
        let group = Path::new("/sys/fs/cgroup")
            .join(controller)
            .join(&house.config.cgroup_parent)
            .join(id.as_str());
        assert!(!group.exists(), "{}", group.display());
    }
}

/// What a jail could leave on the host that does not carry its name.
struct Traces {
    mounts: HashSet<String>,
}

impl Traces {
    fn take() -> Self {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        Self {
            mounts: table.lines().map(str::to_owned).collect(),
        }
    }

    /// The machine has other users, who mount things too: what counts is what only a jail would.
    async fn nothing_new(&self, house: &House, id: &InstanceId) {
        before_is_gone(house, id);
        let state = house.state.path().to_str().unwrap();
        for mount in Self::take().mounts.difference(&self.mounts) {
            let ours = [state, " erofs ", " overlay atoll ", "/dev/loop"];
            assert!(!ours.iter().any(|mark| mount.contains(mark)), "{mount}");
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

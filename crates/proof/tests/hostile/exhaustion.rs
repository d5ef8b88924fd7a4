//! Using up everything: processes, memory, disk, descriptors, inodes, CPU.

use std::time::Duration;

use atoll_proof::{MIB, Server, Tier, json, on_every_tier};

use crate::Scene;

on_every_tier!(
    fork_bomb,
    memory_hog,
    memory_hog_in_files,
    disk_filler,
    disk_filler_on_disk,
    disk_filler_beyond_memory,
    descriptor_exhaustion,
    inode_exhaustion,
    cpu_hog,
    thread_bomb,
);

async fn fork_bomb(server: &Server) {
    let scene = Scene::with(server, &json!({"resources": {"pids": 100}})).await;
    // The classic, and one that never waits.
    for line in [
        ":(){ :|:& };:; sleep 3",
        "python3 -c 'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'",
    ] {
        scene
            .attack(&json!({"argv": ["bash", "-c", line], "timeout_ms": 4000}))
            .await;
    }
    // As many as the limit allows stay; the API tells why nothing more can be started, or has cleared the way.
    let answer = scene.attacker.exec(&json!({"cmd": "true"})).await;
    if answer.status != 200 {
        answer.error();
    }
    let pids = atoll_proof::host::cgroup_processes(server.cgroup()).len();
    assert!(pids < 400, "{pids} processes on the host");
    scene.assert_unharmed().await;
}

/// Starts threads until it may not.
const THREADS: &str = r"
import threading, time
n = 0
try:
  while n < 2000:
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); n += 1
except RuntimeError: pass
print(n, flush=True)
import os; os._exit(0)
";

async fn thread_bomb(server: &Server) {
    let scene = Scene::with(server, &json!({"resources": {"pids": 100}})).await;
    if let Some(output) = scene.attack(&json!({"argv": ["python3", "-c", THREADS], "timeout_ms": 20_000})).await
        && output.code == Some(0)
        // gVisor's threads are its own; only those that run cost the host one, and those are limited.
        && server.tier == Tier::Jail
    {
        let count: u32 = output.stdout.trim().parse().unwrap();
        assert!(count < 2000, "the limit of 100 was never felt");
    }
    scene.assert_unharmed().await;
}

/// Takes memory without end.
const HOG: &str = r"
x = []
while True: x.append(bytearray(b'x' * (1 << 20)))
";

async fn memory_hog(server: &Server) {
    let scene = Scene::with(server, &json!({"resources": {"memory_bytes": 128 * MIB}})).await;
    let answer = scene
        .attacker
        .exec(&json!({"argv": ["python3", "-c", HOG], "timeout_ms": 60_000}))
        .await;
    let detail = answer.error();
    assert_eq!(
        (answer.status, detail["code"].as_str()),
        (410, Some("sandbox_out_of_memory")),
        "{answer:?}"
    );
    let record = scene.attacker.until_state("failed").await;
    assert_eq!(record["end"]["reason"], "out_of_memory");
    scene.assert_unharmed().await;
}

/// Files in memory are memory: filling every place that takes files ends in "no space" or in "out of memory".
async fn memory_hog_in_files(server: &Server) {
    let resources = json!({"memory_bytes": 128 * MIB, "disk_bytes": 1024 * MIB, "disk_backing": "memory"});
    let request = json!({ "resources": resources });
    let scene = Scene::with(server, &request).await;
    let line = "for d in /dev/shm /tmp $HOME /run /var/tmp; do head -c 400M /dev/zero > $d/fill; done; \
                df -k --output=used /tmp $HOME /dev/shm | tail -n +2";
    let output = scene
        .attack(&json!({"argv": ["bash", "-c", line], "timeout_ms": 60_000}))
        .await;
    if output.is_none() {
        let record = scene.attacker.until_state("failed").await;
        assert_eq!(record["end"]["reason"], "out_of_memory");
    }
    scene.assert_unharmed().await;
}

async fn disk_filler(server: &Server) {
    fill_disk(server, "memory").await;
}

async fn disk_filler_on_disk(server: &Server) {
    fill_disk(server, "disk").await;
}

/// Asked for more than its memory, a disk in memory is what fits beside what runs, and says so.
async fn disk_filler_beyond_memory(server: &Server) {
    let resources = json!({"memory_bytes": 256 * MIB, "disk_bytes": 1024 * MIB, "disk_backing": "memory"});
    let scene = Scene::with(server, &json!({ "resources": resources })).await;
    let attacker = &scene.attacker;
    let limit = attacker.get().await["resources"]["disk_bytes"].as_u64().unwrap();
    assert_eq!(limit, 192 * MIB);
    let output = attacker
        .sh("head -c 1G /dev/zero > ~/fill; stat -c %s ~/fill")
        .await;
    assert!(output.stderr.contains("No space left"), "{output:?}");
    let size: u64 = output.stdout.trim().parse().unwrap();
    assert!((limit / 2..=limit).contains(&size), "{size} bytes fit");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn fill_disk(server: &Server, backing: &str) {
    let resources = json!({"memory_bytes": 512 * MIB, "disk_bytes": 64 * MIB, "disk_backing": backing});
    let scene = Scene::with(server, &json!({ "resources": resources })).await;
    let attacker = &scene.attacker;
    assert_eq!(attacker.get().await["resources"]["disk_backing"], backing);
    let output = attacker
        .sh("head -c 1G /dev/zero > ~/fill; echo $?; stat -c %s ~/fill")
        .await;
    assert!(output.stderr.contains("No space left"), "{output:?}");
    let size: u64 = output.stdout.lines().nth(1).unwrap().parse().unwrap();
    assert!(
        (32 * MIB..=64 * MIB).contains(&size),
        "{size} bytes fit on a disk of 64 MiB"
    );
    let full = attacker
        .files_put("/content", "more", &[], vec![b'x'; 1 << 20])
        .await;
    let detail = full.refused(429, "disk_full");
    assert!(detail["hint"].as_str().unwrap().contains("disk"), "{detail}");
    // A full disk is no end: what can run runs, and room that is made can be used.
    scene.assert_attacker_works().await;
    attacker.sh("rm ~/fill").await.ok();
    attacker.write("more", &vec![b'x'; 1 << 20]).await;
    scene.assert_unharmed().await;
}

/// Opens files until it may not, and keeps them.
const DESCRIPTORS: &str = r"
import os, sys, time
n = 0
try:
  while True: os.open('/dev/null', 0); n += 1
except OSError as e: print(n, e.errno, flush=True)
time.sleep(1000)
";

/// Opens pipes and sockets until it may not.
const PIPES: &str = r"
import os, socket
k = []
try:
  while len(k) < 30000: k.append(os.pipe()); k.append(socket.socket())
except OSError as e: print(e.errno)
print(len(k))
";

async fn descriptor_exhaustion(server: &Server) {
    let scene = Scene::new(server).await;
    scene.attacker.write("/tmp/fds.py", DESCRIPTORS.as_bytes()).await;
    let mut holders = Vec::new();
    for _ in 0..4 {
        holders.push(scene.attacker.background("exec python3 /tmp/fds.py").await);
    }
    for holder in &holders {
        let logs = scene.attacker.until_logged(holder, "\n").await;
        let count: u64 = logs.split_whitespace().next().unwrap().parse().unwrap();
        assert!(count < 1_100_000, "{count} descriptors in one process");
    }
    // The agent has its own, and goes on.
    scene.assert_attacker_works().await;
    assert!(!scene.attacker.read("/etc/hostname").await.is_empty());
    // Sockets and pipes, too.
    scene
        .attack(&json!({"argv": ["python3", "-c", PIPES], "timeout_ms": 20_000}))
        .await;
    assert!(
        atoll_proof::host::open_files(server.pid()) < 300,
        "the server's descriptors are its own"
    );
    scene.assert_unharmed().await;
}

/// Makes empty files until it may not.
const INODES: &str = r"
import os
os.makedirs(os.path.expanduser('~/i'))
os.chdir(os.path.expanduser('~/i'))
n, errno = 0, 0
try:
  while n < 1000000:
    os.close(os.open(str(n), os.O_CREAT | os.O_WRONLY)); n += 1
except OSError as e: errno = e.errno
print(errno, n)
";

async fn inode_exhaustion(server: &Server) {
    let request = json!({"resources": {"memory_bytes": 256 * MIB, "disk_bytes": 64 * MIB}});
    let scene = Scene::with(server, &request).await;
    let output = scene
        .attack(&json!({"argv": ["python3", "-c", INODES], "timeout_ms": 40_000}))
        .await;
    // One of its limits was felt: no room for more files, or none in memory for what is known about them.
    match output {
        Some(output) if output.code == Some(0) => {
            assert!(output.stdout.starts_with("28 "), "no limit was felt: {output:?}");
            scene.assert_attacker_works().await;
            let full = scene
                .attacker
                .files_put("/content", "one-more", &[], b"x".to_vec())
                .await;
            assert_eq!(full.status, 429, "{full:?}");
        }
        // Killed alone, or with its sandbox.
        Some(output) => assert_eq!(output.signal, Some(9), "no limit was felt: {output:?}"),
        None => {
            let record = scene.attacker.get().await;
            assert_eq!(record["end"]["reason"], "out_of_memory", "{record}");
        }
    }
    scene.assert_unharmed().await;
}

/// More burning loops than there are cores, with less than one core allowed.
async fn cpu_hog(server: &Server) {
    let scene = Scene::with(server, &json!({"resources": {"cpu_millis": 200}})).await;
    let metrics = scene.attacker.path("/metrics");
    scene
        .attacker
        .background("for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait")
        .await;
    let cpu = || async {
        let metrics = scene.attacker.client.get(&metrics).await.ok();
        Duration::from_micros(metrics["cpu_micros"].as_u64().unwrap())
    };
    let (began, before) = (std::time::Instant::now(), cpu().await);
    while began.elapsed() < Duration::from_secs(3) {
        scene.neighbour.assert_works().await;
    }
    let share = (cpu().await - before).as_secs_f64() / began.elapsed().as_secs_f64();
    assert!(share < 0.35, "used {share:.2} cores of 0.2");
    scene.assert_unharmed().await;
}

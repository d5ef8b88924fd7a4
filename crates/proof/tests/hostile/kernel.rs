//! Attacks on the kernel's interfaces: devices, mounts, setuid, /proc and /sys, namespaces.

use std::collections::BTreeMap;

use atoll_proof::{Server, Tier, host, json, on_every_tier};

use crate::Scene;

on_every_tier!(
    device_nodes,
    setuid_files,
    mounts,
    proc_sys_writes,
    nobody_inside_is_anybody_outside,
    namespaces_and_modules,
    system_calls_from_thousands_of_places,
);

async fn device_nodes(server: &Server) {
    let scene = Scene::new(server).await;
    // The host's first disk, its memory, its console; by root, who might.
    let line = "cd /tmp; for n in 'b 254 0' 'b 8 0' 'b 259 0' 'c 1 1' 'c 1 2' 'c 5 1' 'c 10 200' 'b 7 0'; do \
                rm -f node; mknod node $n 2>/dev/null || continue; \
                (timeout 2 head -c 1 node || timeout 2 sh -c 'echo x > node') > /tmp/out 2>/dev/null && \
                echo opened $n; done; \
                ls /dev; true";
    let output = scene
        .attacker
        .run_with(json!({"argv": ["bash", "-c", line], "user": "root", "timeout_ms": 30_000}))
        .await;
    assert!(!output.stdout.contains("opened"), "{output:?}");
    for device in ["sda", "vda", "mem", "kmem", "kvm", "loop0", "mapper"] {
        assert!(
            !output.stdout.lines().any(|line| line == device),
            "/dev/{device} is there"
        );
    }
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn setuid_files(server: &Server) {
    let scene = Scene::new(server).await;
    let line = "for d in /usr/local/bin /tmp; do cp /usr/bin/id $d/sid && chmod 6755 $d/sid || exit; done";
    scene.attacker.root_sh(line).await.ok();
    let output = scene
        .attacker
        .sh("id -u; /usr/local/bin/sid -u; /tmp/sid -u; sudo -n id -u 2>/dev/null; true")
        .await
        .ok();
    let lines: Vec<&str> = output.lines().collect();
    if server.tier == Tier::Jail {
        assert!(
            lines.iter().all(|uid| *uid == lines[0]),
            "no_new_privs holds: {lines:?}"
        );
    }
    // Root in a sandbox is nobody outside, however it was reached.
    assert_nobody_is_root(server);
    scene.assert_unharmed().await;
}

/// Every process of an instance has ids of the instance's own range.
fn assert_nobody_is_root(server: &Server) {
    let pids = host::cgroup_processes(server.cgroup());
    assert!(!pids.is_empty());
    for pid in pids {
        let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
            continue;
        };
        for ids in ["Uid:", "Gid:"] {
            let line = status.lines().find_map(|line| line.strip_prefix(ids)).unwrap();
            let lowest = line
                .split_whitespace()
                .map(|id| id.parse::<u32>().unwrap())
                .min()
                .unwrap();
            assert!(lowest >= 65_536, "process {pid} has an id of the host:\n{status}");
        }
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        assert_eq!(
            field("Seccomp:"),
            Some("2"),
            "process {pid} has no filter:\n{status}"
        );
        // The agent changes ids and owners on behalf of the host; what it starts keeps nothing of that.
        if server.tier == Tier::Jail && field("Name:") != Some("atoll-guest") {
            assert_eq!(
                field("CapBnd:"),
                Some("0000000000000000"),
                "process {pid} may get capabilities:\n{status}"
            );
            assert_eq!(
                field("CapEff:"),
                Some("0000000000000000"),
                "process {pid} has capabilities:\n{status}"
            );
            assert_eq!(
                field("CapPrm:"),
                Some("0000000000000000"),
                "process {pid} has capabilities:\n{status}"
            );
            assert_eq!(
                field("NoNewPrivs:"),
                Some("1"),
                "process {pid} may gain privileges:\n{status}"
            );
        }
    }
}

async fn mounts(server: &Server) {
    let scene = Scene::new(server).await;
    let user = scene
        .attacker
        .sh("mkdir /tmp/u && mount -t tmpfs none /tmp/u")
        .await;
    assert_ne!(user.code, Some(0), "an ordinary user mounts nothing");
    let before = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = "mkdir -p /tmp/m; for t in tmpfs proc sysfs devtmpfs cgroup cgroup2 debugfs bpf; do \
                mount -t $t none /tmp/m 2>/dev/null && echo mounted $t && ls /tmp/m; done; \
                mount --bind / /tmp/m 2>/dev/null && echo mounted bind; \
                mount -o remount,rw /proc/sys 2>/dev/null && echo remounted; \
                umount -l /proc 2>/dev/null && echo unmounted; \
                pivot_root /tmp /tmp 2>/dev/null && echo pivoted; true";
    let output = scene.attacker.root_sh(line).await.ok();
    if server.tier == Tier::Jail {
        assert_eq!(output, "", "a jail has no mounts of its own");
    }
    assert!(
        !output.contains("kprobes") && !output.contains("release_agent"),
        "the host's kernel shows: {output}"
    );
    let after = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(
        host_mounts(&after),
        host_mounts(&before),
        "the host's mounts have changed"
    );
    scene.assert_unharmed().await;
}

/// Without what other tests on this machine mount meanwhile.
fn host_mounts(table: &str) -> Vec<&str> {
    table.lines().filter(|line| !line.contains("/tmp/")).collect()
}

async fn proc_sys_writes(server: &Server) {
    let scene = Scene::new(server).await;
    let watched = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/panic",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/panic_on_oom",
        "/proc/sys/fs/file-max",
        "/proc/sys/kernel/sysrq",
        "/proc/sys/kernel/unprivileged_userns_clone",
        "/proc/sys/kernel/randomize_va_space",
    ];
    let read_all = || -> BTreeMap<&str, Option<String>> {
        watched
            .iter()
            .map(|path| (*path, std::fs::read_to_string(path).ok()))
            .collect()
    };
    let before = read_all();
    let line = format!(
        "for f in {} /proc/sysrq-trigger /sys/kernel/uevent_helper /sys/power/state /proc/acpi/wakeup; do \
         (echo '|/tmp/evil' > $f) 2>/dev/null && echo wrote $f; (echo 1 > $f) 2>/dev/null && echo wrote $f; done; \
         sysctl -w kernel.panic=7 >/dev/null 2>&1 && echo wrote sysctl; true",
        watched.join(" ")
    );
    let output = scene.attacker.root_sh(&line).await.ok();
    assert_eq!(read_all(), before, "the host's settings have changed");
    if server.tier == Tier::Jail {
        assert_eq!(output, "");
    }
    let secrets = "for f in /proc/{kcore,kmsg,kallsyms,keys,timer_list,sched_debug} /dev/mem; do \
                   [ -n \"$(timeout 2 head -c 100 $f 2>/dev/null | tr -d '\\0')\" ] && echo readable $f; done; true";
    let output = scene.attacker.root_sh(secrets).await.ok();
    assert_eq!(output, "", "what tells of the host is hidden");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

async fn nobody_inside_is_anybody_outside(server: &Server) {
    let scene = Scene::new(server).await;
    scene
        .attacker
        .exec(&json!({"cmd": "sleep 1000", "user": "root", "background": true}))
        .await
        .expect(202);
    scene.attacker.background("sleep 1000").await;
    assert_nobody_is_root(server);
    // Two instances have two ranges.
    let mut ranges = BTreeMap::new();
    for name in host::cgroup_children(server.cgroup()) {
        let pids = host::cgroup_processes(&format!("{}/{name}", server.cgroup()));
        for pid in pids {
            let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
                continue;
            };
            let uid: u32 = status
                .lines()
                .find_map(|line| line.strip_prefix("Uid:"))
                .unwrap()
                .split_whitespace()
                .next()
                .unwrap()
                .parse()
                .unwrap();
            ranges
                .entry(uid / 65_536)
                .or_insert_with(Vec::new)
                .push(name.clone());
        }
    }
    for (range, mut names) in ranges {
        names.dedup();
        assert_eq!(names.len(), 1, "range {range} is shared by {names:?}");
    }
    scene.assert_unharmed().await;
}

/// Names the system calls that were not refused by a filter.
const SYSTEM_CALLS: &str = r"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = dict(bpf=321, userfaultfd=323, perf_event_open=298, kexec_load=246, init_module=175, keyctl=250,
             io_uring_setup=425, open_by_handle_at=304, mount=165, setns=308, move_mount=429, fsopen=430)
for name, number in calls.items():
  result = libc.syscall(number, 0, 0, 0, 0, 0)
  error = ctypes.get_errno()
  if result >= 0 or error not in (1, 13, 38):  # EPERM, EACCES, ENOSYS
    print(name, result, error)
";

async fn namespaces_and_modules(server: &Server) {
    let scene = Scene::new(server).await;
    let line = "insmod /tmp/x.ko 2>/dev/null && echo insmod; reboot -f 2>/dev/null && echo reboot; \
                swapoff -a 2>/dev/null && echo swapoff; date -s '2001-01-01' >/dev/null 2>&1 && echo date; \
                nsenter -t 1 -a true 2>/dev/null; chroot /proc/1/root true 2>/dev/null; true";
    let body = json!({"argv": ["bash", "-c", line], "user": "root", "timeout_ms": 20_000});
    let output = scene.attack(&body).await;
    if let Some(output) = output {
        assert!(
            !output.stdout.contains("insmod") && !output.stdout.contains("reboot"),
            "{output:?}"
        );
    }
    if server.tier == Tier::Jail {
        let output = scene
            .attacker
            .sh("unshare -Ur id -u; unshare -m true; unshare -n true; unshare -p -f true")
            .await;
        assert_ne!(
            output.code,
            Some(0),
            "a new namespace brings new powers over the kernel: {output:?}"
        );
        assert_eq!(output.stdout, "");
        // System calls that have no business in a jail.
        let output = scene
            .attacker
            .run_with(json!({"argv": ["python3", "-c", SYSTEM_CALLS], "user": "root"}))
            .await;
        assert_eq!(output.ok(), "", "these were not refused by the filter");
    }
    scene.assert_unharmed().await;
}

/// gVisor rewrites code that makes system calls often, with room for 256 places in an address space.
async fn system_calls_from_thousands_of_places(server: &Server) {
    let scene = Scene::new(server).await;
    let program = r"
import ctypes, mmap, os
PLACES, CALLS = 3000, 20
code = mmap.mmap(-1, 16 * PLACES, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
for place in range(PLACES):
    code[16 * place : 16 * place + 8] = b'\xb8\x27\0\0\0\x0f\x05\xc3'  # mov $getpid, %eax; syscall; ret
start = ctypes.addressof(ctypes.c_char.from_buffer(code))
calls = [ctypes.CFUNCTYPE(ctypes.c_int)(start + 16 * place) for place in range(PLACES)]
# Each once, so that many are known; then each often.
answers = {call() for call in calls} | {call() for call in calls for _ in range(CALLS)}
print(answers == {os.getpid()})
";
    let output = scene
        .attacker
        .run_with(json!({"argv": ["python3", "-c", program], "timeout_ms": 60_000}))
        .await;
    assert_eq!(output.ok(), "True\n");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

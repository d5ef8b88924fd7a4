//! What is inside does not get out, nor at its neighbours.

use atoll_runtime::{Instance, Runtime};

use crate::house::{House, ok, refused, sh, sh_as};

const DENIED: &[&str] = &[
    "ermitted",
    "ermission denied",
    "ead-only file system",
    "not permitted",
    "must be superuser",
    "must be root",
];

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
    // The same in pairs, of which the kernel makes both before it asks whether they can be one; and TIPC's, which can.
    for family in [2, 10, 17, 30, 38, 40] {
        let script = format!("python3 -c 'import socket; socket.socketpair({family}, socket.SOCK_DGRAM)'");
        refused(&instance, &script, &["not supported by protocol"]).await;
    }
    ok(&instance, "python3 -c 'import socket; socket.socketpair()'").await;
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

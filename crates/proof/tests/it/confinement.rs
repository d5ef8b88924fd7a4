//! What the part of the server that speaks with the world has, and what whoever takes it over cannot do.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;

use atoll_proof::stream::Events;
use atoll_proof::{Options, Server, Tier, Value, host, json, on_every_tier};
use rustix::io::Errno;
use rustix::process::Signal;

on_every_tier!(
    the_front_has_no_powers_and_the_helper_no_ears,
    a_helper_goes_with_its_server,
    a_server_goes_with_its_helper,
);

/// A line of `/proc/<pid>/status`.
fn status(pid: u32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {text}"))
        .trim()
        .to_owned()
}

fn capabilities(pid: u32, set: &str) -> u64 {
    u64::from_str_radix(&status(pid, set), 16).expect("a mask")
}

fn helper_of(server: u32) -> u32 {
    host::helper_of(server).expect("the server has a helper")
}

/// The inodes of the TCP sockets that a process has.
fn tcp_sockets(pid: u32) -> usize {
    let table =
        ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default());
    let inodes: Vec<String> = table
        .iter()
        .flat_map(|table| table.lines().skip(1))
        .filter_map(|line| {
            line.split_whitespace()
                .nth(9)
                .map(|inode| format!("socket:[{inode}]"))
        })
        .collect();
    let open = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("the process runs")
        .flatten();
    open.filter_map(|entry| fs::read_link(entry.path()).ok())
        .filter(|target| inodes.iter().any(|inode| target.as_os_str() == inode.as_str()))
        .count()
}

async fn the_front_has_no_powers_and_the_helper_no_ears(server: &mut Server) {
    let (front, helper) = (server.pid(), helper_of(server.pid()));
    let threads = fs::read_dir(format!("/proc/{front}/task"))
        .expect("the server runs")
        .flatten();
    for thread in threads.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
            assert_eq!(capabilities(thread, set), 0, "{set} of thread {thread}");
        }
        assert_eq!(status(thread, "NoNewPrivs"), "1");
        assert_eq!(status(thread, "Seccomp"), "2");
    }
    // SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_TIME, SYSLOG: nothing that is started from here has them.
    for capability in [16, 17, 22, 25, 34] {
        assert_eq!(
            capabilities(helper, "CapBnd") & (1 << capability),
            0,
            "{capability}"
        );
    }
    assert_eq!(status(helper, "Seccomp"), "2");
    assert!(tcp_sockets(front) > 0, "the front listens");
    assert_eq!(
        tcp_sockets(helper),
        0,
        "the helper has nothing to do with the network"
    );

    // And it is all still possible.
    let sandbox = server.sandbox().await;
    assert_eq!(sandbox.sh("echo $((6 * 7))").await.ok(), "42\n");
    let log = server.log();
    for layer in [
        "bounding set",
        "deny-list",
        "Landlock",
        "seccomp",
        "capabilities",
        "no_new_privs",
    ] {
        assert!(
            log.lines().any(|line| line.contains("confined")
                && line.contains(layer)
                && !line.contains("not confined")),
            "{layer} is not said to be in force:\n{log}"
        );
    }
}

async fn a_helper_goes_with_its_server(server: &mut Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/kept", b"content").await;
    let helper = helper_of(server.pid());
    // Waits until it is gone.
    server.kill_9();
    assert!(!host::runs(helper));
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    assert_eq!(sandbox.sh("cat /tmp/kept").await.ok(), "content");
}

async fn a_server_goes_with_its_helper(server: &mut Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/kept", b"content").await;
    host::kill(helper_of(server.pid()), Signal::KILL);
    server.until_ended();
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    assert_eq!(sandbox.sh("cat /tmp/kept").await.ok(), "content");
    server.expect_errors();
}

/// Stands for `mmdebstrap`, which would want a mirror: a root filesystem that says who made it, and where.
const INSTALLER: &str = r#"#!/bin/sh
echo "I: running apt-get update" >&2
root=$(mktemp -d)
mkdir "$root/etc"
echo "root:x:0:0::/root:/bin/sh" > "$root/etc/passwd"
echo "$TMPDIR" > "$root/etc/where"
grep -E "^(CapEff|NoNewPrivs)" /proc/self/status > "$root/etc/who"
tar -C "$root" -c .
rm -r "$root"
"#;

/// The front can start no program.
#[tokio::test]
async fn debian_packages_are_installed_by_the_helper() {
    use std::os::unix::fs::PermissionsExt as _;

    let mut server = Server::start(Tier::Jail, Options::default().own_templates()).await;
    server.stop();
    let tools = tempfile::tempdir().unwrap();
    let installer = tools.path().join("mmdebstrap");
    fs::write(&installer, INSTALLER).unwrap();
    fs::set_permissions(&installer, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    server.env("PATH", &format!("{}:{path}", tools.path().display()));
    server.start_again().await;

    let body = json!({"name": "packaged", "debian": {"packages": ["git"]}});
    let request = server
        .client()
        .request(reqwest::Method::POST, "/v1/templates/build")
        .json(&body);
    let events = Events::of(server.client().open(request).await).rest().await;
    let said = format!("{events:?}");
    assert!(
        said.contains("running apt-get update"),
        "progress is passed on: {said}"
    );
    let sandbox = server.sandbox_with(&json!({"template": "packaged"})).await;
    let read = async |path: &str| String::from_utf8(sandbox.read(path).await).unwrap();
    let place = read("/etc/where").await;
    let packages = server.data().join("packages");
    assert!(
        place.starts_with(packages.to_str().unwrap()),
        "the front cannot write there: {place}"
    );
    let who = read("/etc/who").await;
    assert!(
        !who.contains("CapEff:\t0000000000000000") && who.contains("NoNewPrivs:\t0"),
        "{who}"
    );
    server.finish().await;
}

#[tokio::test]
async fn a_server_can_be_left_whole() {
    let server = Server::start(Tier::Jail, Options::default().config("confine = \"off\"")).await;
    assert!(
        server.log().contains("this server is not confined"),
        "{}",
        server.log()
    );
    assert_ne!(capabilities(server.pid(), "CapEff"), 0);
    server.finish().await;
}

/// A machine that can do it all does all of it, or the server does not start.
#[tokio::test]
async fn a_server_may_insist() {
    let server = Server::start(Tier::Jail, Options::default().config("confine = \"required\"")).await;
    assert!(!server.log().contains("not confined"), "{}", server.log());
    server.finish().await;
}

/// From inside the confinement of the front.
#[test]
fn whoever_controls_the_front_gets_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let (own, readable, socket) = (
        dir.path().join("own"),
        dir.path().join("readable"),
        dir.path().join("socket"),
    );
    fs::create_dir(&own).unwrap();
    fs::write(&readable, "to be read").unwrap();
    let _listens = UnixListener::bind(&socket).unwrap();
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_atoll-proof-confined"))
        .args([&own, &readable])
        .arg(other.id().to_string())
        .arg(&socket)
        .output()
        .unwrap();
    let said: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let still_there = other.try_wait().unwrap().is_none();
    other.kill().unwrap();
    other.wait().unwrap();
    let layers = said["layers"].as_object().unwrap();
    assert!(layers.values().all(|stands| stands == &json!(true)), "{said}");
    assert!(still_there, "it was killed: {said}");
    assert_eq!(fs::read(&readable).unwrap(), b"to be read");

    let nothing = BTreeMap::from([
        ("change its own files", None),
        ("read what it was given", None),
        ("serve", None),
        ("have threads", None),
        ("read /etc/shadow", Some(Errno::ACCESS)),
        ("read /etc/shadow by a link", Some(Errno::ACCESS)),
        ("list /root", Some(Errno::ACCESS)),
        ("write to /etc", Some(Errno::ACCESS)),
        ("write to /tmp", Some(Errno::ACCESS)),
        ("change what it may read", Some(Errno::ACCESS)),
        ("change the kernel's settings", Some(Errno::ACCESS)),
        ("open the memory of another", Some(Errno::ACCESS)),
        ("open a namespace of another", Some(Errno::ACCESS)),
        ("start a program", Some(Errno::PERM)),
        ("make a raw socket", Some(Errno::PERM)),
        ("make a packet socket", Some(Errno::AFNOSUPPORT)),
        ("connect to a unix socket", Some(Errno::AFNOSUPPORT)),
        ("send to a unix socket", Some(Errno::AFNOSUPPORT)),
        ("mount", Some(Errno::PERM)),
        ("change its root", Some(Errno::PERM)),
        ("load a module", Some(Errno::PERM)),
        ("make a device", Some(Errno::PERM)),
        ("signal another process", Some(Errno::PERM)),
        ("signal all", Some(Errno::PERM)),
        ("signal by descriptor", Some(Errno::PERM)),
        ("enter the namespaces of the host", Some(Errno::PERM)),
        ("trace another process", Some(Errno::PERM)),
        ("become another user", Some(Errno::PERM)),
    ]);
    let tried = said["tried"].as_object().unwrap();
    assert_eq!(tried.len(), nothing.len(), "{said}");
    for (attempt, expected) in nothing {
        let expected = expected.map_or(Value::Null, |errno| json!(errno.raw_os_error()));
        assert_eq!(tried[attempt], expected, "{attempt}: {said}");
    }
}

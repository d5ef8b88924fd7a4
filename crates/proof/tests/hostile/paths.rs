//! Names and archives that try to lead elsewhere, and directories that are too large.

use std::time::Duration;

use atoll_proof::{Server, Value, json, on_every_tier, to_base64};

use crate::Scene;

on_every_tier!(
    dots_and_links_in_api_paths,
    archives_that_climb,
    a_directory_that_changes_under_the_agent,
    ten_thousand_files_in_one_directory,
    names_that_are_not_text,
    special_files,
);

/// Every operation, with paths that climb or lead through links: they end inside.
async fn dots_and_links_in_api_paths(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    let canary = tempfile::NamedTempFile::with_prefix("atoll-canary-").unwrap();
    std::fs::write(canary.path(), "host's own").unwrap();
    let outside = canary.path().to_str().unwrap();
    let line =
        "cd /tmp && ln -s /../../../../.. up; ln -s /proc/1/root procroot; ln -s /proc/self/cwd/../.. cwd";
    attacker.sh(line).await.ok();
    for prefix in [
        "",
        "/..",
        "/../../../../../../../..",
        "/tmp/up",
        "/tmp/procroot",
        "/tmp/cwd",
        "/proc/1/root",
        "/proc/self/root/..",
    ] {
        let path = format!("{prefix}{outside}");
        for route in ["/content", "/stat", "/tar"] {
            let answer = attacker.files_get(route, &path, &[]).await;
            let text = answer.text();
            assert!(!text.contains("host's own"), "{route} {path}: {text}");
        }
        attacker
            .files_put("/content", &path, &[("parents", "false")], b"evil".to_vec())
            .await;
        attacker
            .files_post("/chmod", &json!({"path": path, "mode": "0777"}))
            .await;
        attacker.files_post("/remove", &json!({"path": path})).await;
    }
    assert_eq!(std::fs::read_to_string(canary.path()).unwrap(), "host's own");
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(
        canary.path().metadata().unwrap().permissions().mode() & 0o777,
        0o600
    );
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

fn member(
    builder: &mut tar::Builder<Vec<u8>>,
    name: &[u8],
    kind: tar::EntryType,
    link: &str,
    content: &[u8],
) {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    header.set_mode(0o6777);
    // The library refuses such names; an attacker does not use the library.
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    if matches!(kind, tar::EntryType::Block | tar::EntryType::Char) {
        header.set_device_major(254).unwrap();
        header.set_device_minor(0).unwrap();
    }
    header.set_cksum();
    builder.append(&header, content).unwrap();
}

async fn archives_that_climb(server: &Server) {
    use tar::EntryType as T;
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    let single: Vec<(&[u8], T, &str)> = vec![
        (b"../escaped", T::Regular, ""),
        (b"a/../../escaped", T::Regular, ""),
        (b"/tmp/escaped", T::Regular, ""),
        (b"a/b/../../../../../../tmp/escaped", T::Regular, ""),
        (b"..", T::Symlink, "/tmp"),
    ];
    for (name, kind, link) in single {
        let mut builder = tar::Builder::new(Vec::new());
        member(
            &mut builder,
            name,
            kind,
            link,
            if kind == T::Regular { b"evil" } else { b"" },
        );
        let answer = attacker
            .files_put("/tar", "/tmp/in/deep/er", &[], builder.into_inner().unwrap())
            .await;
        assert!(
            answer.status == 204 || answer.status == 400,
            "{}: {answer:?}",
            String::from_utf8_lossy(name)
        );
    }
    // First a link, then something through it; a hard link to what is not in the archive; links to links.
    let chains: Vec<Vec<(&[u8], T, &str)>> = vec![
        vec![(b"out", T::Symlink, "/tmp"), (b"out/escaped", T::Regular, "")],
        vec![(b"out", T::Symlink, "../../.."), (b"out/escaped", T::Regular, "")],
        vec![
            (b"x", T::Symlink, ".."),
            (b"y", T::Symlink, "x/.."),
            (b"y/escaped", T::Regular, ""),
        ],
        vec![(b"hard", T::Link, "/etc/passwd"), (b"hard", T::Regular, "")],
        vec![
            (b"hard", T::Link, "../../../etc/passwd"),
            (b"hard", T::Regular, ""),
        ],
        vec![
            (b"etc", T::Symlink, "/etc"),
            (b"hard2", T::Link, "etc/passwd"),
            (b"hard2", T::Regular, ""),
        ],
        vec![
            (b"block", T::Block, ""),
            (b"char", T::Char, ""),
            (b"fifo", T::Fifo, ""),
        ],
        vec![(b"setuid", T::Regular, "")],
    ];
    let passwd = attacker.read("/etc/passwd").await;
    for chain in chains {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, link) in &chain {
            member(
                &mut builder,
                name,
                *kind,
                link,
                if *kind == T::Regular { b"evil" } else { b"" },
            );
        }
        let answer = attacker
            .files_put("/tar", "/tmp/in/deep/er", &[], builder.into_inner().unwrap())
            .await;
        assert!(answer.status < 500, "{answer:?}");
    }
    let output = attacker
        .root_sh("find / -xdev -name escaped; find /tmp/in -type b -o -type c; true")
        .await
        .ok();
    assert_eq!(output, "", "nothing landed outside, and no device was made");
    assert_eq!(
        attacker.read("/etc/passwd").await,
        passwd,
        "nothing was written through a link"
    );

    // Archives that lie about themselves.
    let mut lying = tar::Header::new_gnu();
    lying.set_path("huge").unwrap();
    lying.set_size(u64::from(u32::MAX) * 1000);
    lying.set_cksum();
    for body in [
        lying.as_bytes().to_vec(),
        vec![0xff; 20_000],
        [lying.as_bytes().to_vec(), vec![0; 10_000]].concat(),
    ] {
        let answer = attacker.files_put("/tar", "/tmp/in/lies", &[], body).await;
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    let mut bomb = tar::Builder::new(Vec::new());
    let name = format!("{}end", "d/".repeat(40));
    for _ in 0..50 {
        member(&mut bomb, name.as_bytes(), T::Directory, "", b"");
    }
    attacker
        .files_put("/tar", "/tmp/in/deep", &[], bomb.into_inner().unwrap())
        .await;
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Swaps a directory for a link to /safe and back, for six seconds.
const RACE: &str = r"
import os, time
end = time.time() + 6
while time.time() < end:
  try:
    os.makedirs('/tmp/race/d', exist_ok=True); open('/tmp/race/d/file', 'w').close()
    os.rename('/tmp/race/d', '/tmp/race/old'); os.symlink('/safe', '/tmp/race/d')
    os.unlink('/tmp/race/d'); os.unlink('/tmp/race/old/file'); os.rmdir('/tmp/race/old')
  except OSError:
    os.system('rm -rf /tmp/race/d /tmp/race/old')
";

/// Somebody swaps directories for links while the agent walks through them.
async fn a_directory_that_changes_under_the_agent(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    attacker
        .root_sh("mkdir /safe && echo precious > /safe/file && chmod 700 /safe && mkdir -m 777 /tmp/race")
        .await
        .ok();
    attacker.write("/tmp/race.py", RACE.as_bytes()).await;
    let racing = attacker.background("exec python3 /tmp/race.py").await;
    while attacker.command(&racing).await["state"] == json!("running") {
        // Recursive removal must not follow the link to /safe, however it is timed.
        attacker
            .files_post("/remove", &json!({"path": "/tmp/race/d", "recursive": true}))
            .await;
        attacker.files_get("", "/tmp/race", &[("depth", "5")]).await;
    }
    assert_eq!(attacker.root_sh("cat /safe/file").await.ok(), "precious\n");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Ten thousand of the longest names, and a path longer than any path may be.
const MANY_AND_DEEP: &str = r"
import os
os.mkdir('/tmp/many')
for i in range(10000): open(f'/tmp/many/{i:05}' + 'n' * 240, 'w').close()
d = '/tmp/deep'
os.mkdir(d)
os.chdir(d)
for i in range(300):
  os.mkdir('d' * 200); os.chdir('d' * 200)
";

async fn ten_thousand_files_in_one_directory(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    // The longest names there are.
    attacker.run(&["python3", "-c", MANY_AND_DEEP]).await.ok();
    let listing = attacker.files_get("", "/tmp/many", &[]).await.ok();
    assert_eq!(listing["items"].as_array().map(Vec::len), Some(10_000));
    let archive = attacker.files_get("/tar", "/tmp/many", &[]).await.expect(200);
    assert!(archive.body.len() > 10_000 * 512);
    // Deeper than any path may be long: an error or as much as there is, and the sandbox goes on.
    let deep = attacker.files_get("", "/tmp/deep", &[("depth", "64")]).await;
    assert!(deep.status < 500, "{deep:?}");
    attacker.files_get("/tar", "/tmp/deep", &[]).await;
    atoll_proof::wait::within("removal", Duration::from_secs(30), async {
        for path in ["/tmp/many", "/tmp/deep"] {
            let answer = attacker
                .files_post("/remove", &json!({"path": path, "recursive": true}))
                .await;
            assert_eq!(answer.status, 204, "{path}: {answer:?}");
        }
    })
    .await;
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Every byte that a name may hold, and what terminals act upon.
const ODD_NAMES: &str = r"
import os
os.mkdir(b'/tmp/odd')
for i in range(1, 256):
  if i != 47: open(b'/tmp/odd/' + bytes([i]) * 3, 'w').close()
open(b'/tmp/odd/\x1b[2J\x07title', 'w').close()
os.symlink(b'\xff\xfe', b'/tmp/odd/link\xff')
";

async fn names_that_are_not_text(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    attacker.run(&["python3", "-c", ODD_NAMES]).await.ok();
    let listed = attacker.list("/tmp/odd", 1).await;
    assert_eq!(listed.len(), 256);
    for entry in &listed {
        let path = match entry["path_base64"].as_str() {
            Some(encoded) => atoll_proof::from_base64(encoded),
            None => entry["path"].as_str().unwrap().as_bytes().to_vec(),
        };
        let stat = attacker.files_get("/stat", &path, &[]).await;
        assert_eq!(stat.status, 200, "{entry}: {stat:?}");
    }
    attacker.files_get("/tar", "/tmp/odd", &[]).await.expect(200);
    for path in [&b"/tmp/a\0b"[..], b"", b"\xff\xff\xff\xff/../x"] {
        let refused = attacker
            .files_post("/mkdir", &json!({"path_base64": to_base64(path)}))
            .await;
        assert!(refused.status < 500, "{refused:?}");
    }
    // Errors that quote a name quote it in a way that cannot speak to a terminal.
    let hostile = attacker.files_get("/content", b"/tmp/\x1b[31mred", &[]).await;
    let message = hostile.error()["message"].as_str().unwrap().to_owned();
    assert!(!message.contains('\u{1b}'), "{message:?}");
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

/// Files that block whoever opens them.
async fn special_files(server: &Server) {
    let scene = Scene::new(server).await;
    let attacker = &scene.attacker;
    let line = "mkdir /tmp/s && cd /tmp/s && mkfifo fifo && ln -s fifo link && ln -s /dev/zero zero && \
                ln -s /dev/stdin stdin && ln -s /proc/kmsg kmsg && \
                python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'";
    attacker.sh(line).await.ok();
    for name in ["fifo", "sock", "zero", "stdin", "link", "kmsg"] {
        let path = format!("/tmp/s/{name}");
        let what = format!("{name} is read");
        let read = atoll_proof::wait::within(
            &what,
            Duration::from_secs(15),
            attacker.files_get("/content", &path, &[("length", "10")]),
        )
        .await;
        assert!(read.status != 500, "{name}: {read:?}");
        let what = format!("{name} is written");
        let put = attacker.files_put("/content", &path, &[("write", "append")], b"x".to_vec());
        let written = atoll_proof::wait::within(&what, Duration::from_secs(15), put).await;
        assert!(written.status != 500, "{name}: {written:?}");
    }
    let archive = atoll_proof::wait::within(
        "an archive of all",
        Duration::from_secs(15),
        attacker.files_get("/tar", "/tmp/s", &[]),
    )
    .await;
    archive.expect(200);
    let listed: Vec<Value> = attacker.list("/tmp/s", 1).await;
    assert_eq!(listed.len(), 6);
    scene.assert_attacker_works().await;
    scene.assert_unharmed().await;
}

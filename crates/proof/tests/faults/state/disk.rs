//! The disk is full.

use std::path::{Path, PathBuf};

use atoll_proof::{Sandbox, Server, Tier, Value, json, on_every_tier};
use rustix::mount::{MountFlags, UnmountFlags};

use super::{Counter, Kind, ask, assert_no_leaks, manifests, packs, pause, resume, settled, vault};

on_every_tier!(
    a_full_vault_refuses_and_corrupts_nothing,
    full_scratch_space_refuses_and_corrupts_nothing,
);

/// A small filesystem in place of a directory; goes when dropped.
struct Small(PathBuf);

impl Small {
    /// Mounts it, with what the directory holds. The server must be down.
    fn over(dir: &Path, bytes: u64) -> Self {
        let mut files = Vec::new();
        let mut dirs = Vec::new();
        collect(dir, Path::new(""), &mut dirs, &mut files);
        let options = std::ffi::CString::new(format!("size={bytes},mode=0700")).unwrap();
        rustix::mount::mount("small", dir, "tmpfs", MountFlags::empty(), options.as_c_str()).unwrap();
        let small = Self(dir.to_owned());
        for path in dirs {
            std::fs::create_dir(dir.join(path)).unwrap();
        }
        for (path, content) in files {
            std::fs::write(dir.join(path), content).unwrap();
        }
        small
    }

    fn resize(&self, bytes: u64) {
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        rustix::mount::mount_remount(&self.0, MountFlags::empty(), options.as_c_str()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _gone = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Directories and files below a directory, the former in the order in which they can be made.
fn collect(root: &Path, below: &Path, dirs: &mut Vec<PathBuf>, files: &mut Vec<(PathBuf, Vec<u8>)>) {
    for entry in std::fs::read_dir(root.join(below)).unwrap() {
        let entry = entry.unwrap();
        let path = below.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            dirs.push(path.clone());
            collect(root, &path, dirs, files);
        } else {
            files.push((path, std::fs::read(entry.path()).unwrap()));
        }
    }
}

/// A sandbox with more in it than there is room for.
async fn large(server: &Server) -> (Sandbox, Option<Counter>) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("head -c 25165824 /dev/urandom > /home/user/random")
        .await
        .ok();
    let mut counter = None;
    if Kind::most(server.tier) == Kind::Memory {
        counter = Some(Counter::start(&sandbox, "counter").await);
    }
    (sandbox, counter)
}

/// Asserts that each wish is refused, that the sandbox runs on, and that nothing half-made stays.
async fn refuses(
    server: &Server,
    sandbox: &Sandbox,
    counter: &mut Option<Counter>,
    wishes: &[(&str, Value)],
) {
    let before = (manifests(server), packs(server));
    for (word, body) in wishes {
        eprintln!("{word} {body}");
        let answer = ask(sandbox, word, body).await;
        answer.refused(503, "server_disk_full");
        assert_eq!(sandbox.state().await, "running");
        sandbox.assert_works().await;
        if let Some(counter) = counter {
            counter.goes_on(sandbox).await;
        }
        assert_eq!(
            (manifests(server), packs(server)),
            before,
            "something half-made stays"
        );
        assert_eq!(settled(server).await.len(), 2);
    }
}

async fn a_full_vault_refuses_and_corrupts_nothing(server: &mut Server) {
    let other = server.sandbox().await;
    other.write("/home/user/note", b"kept").await;
    // Without memory: what it holds fits.
    ask(&other, "pause", &json!({"kind": "filesystem"})).await.ok();
    let (sandbox, mut counter) = large(server).await;
    server.kill_9();
    let small = Small::over(&vault(server), 6 << 20);
    server.start_again().await;
    let (sandbox, other) = (server.again(&sandbox), server.again(&other));
    let kind = Kind::most(server.tier).name();
    let wishes = [
        ("pause", json!({})),
        ("pause", json!({"kind": "filesystem"})),
        ("stop", json!({})),
        ("snapshots", json!({"name": "one", "kind": kind})),
        ("snapshots", json!({"name": "two", "kind": "filesystem"})),
    ];
    refuses(server, &sandbox, &mut counter, &wishes).await;
    // What was saved before is intact.
    resume(&other).await;
    assert_eq!(other.read("/home/user/note").await, b"kept");
    small.resize(1 << 30);
    still_works(server, &sandbox, &mut counter).await;
    other.kill().await;
    sandbox.kill().await;
    server.stop();
    drop(small);
    server.start_again().await;
}

async fn full_scratch_space_refuses_and_corrupts_nothing(server: &mut Server) {
    let other = server.sandbox().await;
    let (sandbox, mut counter) = large(server).await;
    server.kill_9();
    let small = Small::over(&server.data().join("scratch"), 64 << 10);
    server.start_again().await;
    let (sandbox, other) = (server.again(&sandbox), server.again(&other));
    if server.tier == Tier::Gvisor {
        // The state of its kernel is written there on its way into the vault. Memory goes straight there.
        let wishes = [
            ("pause", json!({})),
            ("snapshots", json!({"name": "one", "kind": "memory"})),
            ("fork", json!({"count": 2})),
        ];
        refuses(server, &sandbox, &mut counter, &wishes).await;
    }
    let wishes = [("fork", json!({"count": 2, "kind": "filesystem"}))];
    refuses(server, &sandbox, &mut counter, &wishes).await;
    // Files go straight into the vault, but there is no room to bring them back.
    let taken = ask(
        &sandbox,
        "snapshots",
        &json!({"name": "kept", "kind": "filesystem"}),
    )
    .await;
    taken.expect(201);
    let copy = server.request(&json!({"template": "kept"}));
    let refused = server.client().post("/v1/sandboxes", &copy).await;
    refused.refused(503, "server_disk_full");
    other.write("/home/user/random", &vec![7; 4 << 20]).await;
    assert_eq!(ask(&other, "stop", &json!({})).await.ok()["state"], "stopped");
    ask(&other, "start", &json!({}))
        .await
        .refused(503, "server_disk_full");
    assert_eq!(other.state().await, "stopped", "it rests on");
    small.resize(1 << 30);
    assert_eq!(ask(&other, "start", &json!({})).await.ok()["state"], "running");
    assert_eq!(other.read("/home/user/random").await.len(), 4 << 20);
    still_works(server, &sandbox, &mut counter).await;
    other.kill().await;
    sandbox.kill().await;
    server.stop();
    drop(small);
    server.start_again().await;
    assert_no_leaks(server).await;
}

/// There is room again.
async fn still_works(server: &Server, sandbox: &Sandbox, counter: &mut Option<Counter>) {
    let before = sandbox.sh("sha256sum /home/user/random").await.ok();
    pause(sandbox).await;
    resume(sandbox).await;
    assert_eq!(sandbox.sh("sha256sum /home/user/random").await.ok(), before);
    if let Some(counter) = counter {
        counter.goes_on(sandbox).await;
    }
    let copies = ask(sandbox, "fork", &json!({"kind": Kind::most(server.tier).name()})).await;
    let copies = copies.expect(201).json();
    Sandbox::of(server.client(), &copies["items"][0]).kill().await;
}

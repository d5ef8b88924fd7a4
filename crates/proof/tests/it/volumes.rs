//! Volumes: what outlives sandboxes, and is shared by them.

use atoll_proof::{MIB, Sandbox, Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    a_volume_outlives_sandboxes_and_is_shared,
    a_full_volume_is_an_error_inside,
    a_volume_in_use_cannot_be_deleted,
    a_volume_travels_as_an_archive,
    an_input_can_only_be_read,
    a_volume_is_there_after_a_pause,
);

async fn create(server: &Server, name: &str) -> Value {
    let body = json!({"name": name, "size_bytes": 64 * MIB});
    server
        .client()
        .post("/v1/volumes", &body)
        .await
        .expect(201)
        .json()
}

async fn with_volume(server: &Server, name: &str, read_only: bool) -> Sandbox {
    server
        .sandbox_with(&json!({"volumes": [{"volume": name, "path": "/data", "read_only": read_only}]}))
        .await
}

async fn delete(server: &Server, name: &str) {
    server
        .client()
        .delete(&format!("/v1/volumes/{name}"))
        .await
        .expect(204);
}

async fn a_volume_outlives_sandboxes_and_is_shared(server: &mut Server) {
    let made = create(server, "shared").await;
    assert_eq!(
        (&made["size_bytes"], &made["read_only"]),
        (&json!(64 * MIB), &json!(false))
    );
    let first = with_volume(server, "shared", false).await;
    first
        .root_sh("mkdir /data/own && chmod 1777 /data/own && test $(stat -c %a /data) = 1777")
        .await
        .ok();
    first.sh("echo from the first > /data/own/file").await.ok();
    let second = with_volume(server, "shared", false).await;
    let third = with_volume(server, "shared", true).await;
    for other in [&second, &third] {
        let seen = other
            .sh("cat /data/own/file; stat -c %U /data/own/file; df -k --output=size /data | tail -1")
            .await
            .ok();
        let lines: Vec<&str> = seen.lines().collect();
        assert_eq!(&lines[..2], ["from the first", "user"], "{seen}");
        let kib: u64 = lines[2].trim().parse().unwrap();
        assert!(kib > 40_000 && kib <= 65_536, "{seen}");
    }
    second.sh("echo from the second >> /data/own/file").await.ok();
    assert!(first.sh("cat /data/own/file").await.ok().contains("second"));
    assert_ne!(
        third.sh("echo no > /data/own/file").await.code,
        Some(0),
        "read-only is read-only"
    );
    assert_ne!(
        third
            .root_sh("echo no > /data/own/file; mount -o remount,rw /data && echo no > /data/own/file")
            .await
            .code,
        Some(0)
    );
    for sandbox in [&first, &second, &third] {
        sandbox.kill().await;
    }
    server.kill_9();
    server.start_again().await;
    let later = with_volume(server, "shared", true).await;
    assert!(later.sh("cat /data/own/file").await.ok().contains("second"));
    later.kill().await;
    delete(server, "shared").await;
    server.assert_nothing_held().await;
}

async fn a_full_volume_is_an_error_inside(server: &Server) {
    create(server, "small").await;
    let sandbox = with_volume(server, "small", false).await;
    let full = sandbox.root_sh("head -c 100M /dev/zero > /data/big").await;
    assert!(
        full.code != Some(0) && full.stderr.contains("No space left"),
        "{full:?}"
    );
    sandbox.assert_works().await;
    sandbox
        .root_sh("rm /data/big && echo fits > /data/small")
        .await
        .ok();
    sandbox.kill().await;
    delete(server, "small").await;
}

async fn a_volume_in_use_cannot_be_deleted(server: &Server) {
    create(server, "used").await;
    let sandbox = with_volume(server, "used", false).await;
    let refused = server
        .client()
        .delete("/v1/volumes/used")
        .await
        .refused(409, "volume_in_use");
    assert!(
        refused["message"].as_str().unwrap().contains(&sandbox.id),
        "{refused}"
    );
    let shown = server.client().get("/v1/volumes/used").await.ok();
    assert_eq!(shown["attached_to"], json!([sandbox.id]));
    let absent = server.request(&json!({"volumes": [{"volume": "absent", "path": "/data"}]}));
    server
        .client()
        .post("/v1/sandboxes", &absent)
        .await
        .refused(404, "volume_not_found");
    for path in ["/", "data", "/proc/x", "/../etc", "/.atoll"] {
        let bad = server.request(&json!({"volumes": [{"volume": "used", "path": path}]}));
        assert_eq!(
            server.client().post("/v1/sandboxes", &bad).await.status,
            400,
            "{path}"
        );
    }
    sandbox.kill().await;
    delete(server, "used").await;
}

fn archive(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append_data(&mut header, name, content.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

async fn a_volume_travels_as_an_archive(server: &Server) {
    create(server, "travels").await;
    let put = |body: Vec<u8>| {
        let request = server
            .client()
            .request(Method::PUT, "/v1/volumes/travels/content");
        server
            .client()
            .send(request.header("content-type", "application/x-tar").body(body))
    };
    put(archive(&[("a/b.txt", "deep"), ("c.txt", "flat")])).await.ok();
    let sandbox = with_volume(server, "travels", false).await;
    assert_eq!(sandbox.sh("cat /data/a/b.txt /data/c.txt").await.ok(), "deepflat");
    // Links that lead out of it lead nowhere.
    sandbox
        .root_sh("ln -s /etc/passwd /data/out && ln -s ../../../.. /data/up")
        .await
        .ok();
    let file = server
        .client()
        .get("/v1/volumes/travels/content")
        .await
        .expect(200)
        .body;
    let names: Vec<String> = tar::Archive::new(file.as_slice())
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert!(names.iter().any(|name| name.ends_with("a/b.txt")), "{names:?}");
    assert!(
        names.iter().any(|name| name.ends_with("out")),
        "as the link that it is: {names:?}"
    );
    put(archive(&[("up/etc/planted", "no")])).await;
    assert!(!std::path::Path::new("/etc/planted").exists());
    for bad in [vec![1, 2, 3], archive(&[("x", "y")])[..600].to_vec()] {
        let refused = put(bad).await;
        assert!((400..500).contains(&refused.status), "{refused:?}");
    }
    sandbox.kill().await;
    delete(server, "travels").await;
}

async fn an_input_can_only_be_read(server: &Server) {
    let request = server
        .client()
        .request(Method::POST, "/v1/volumes/seal")
        .query(&[("name", "input")]);
    let request = request.header("content-type", "application/x-tar");
    let sealed = server
        .client()
        .send(request.body(archive(&[("dir/file", "given")])))
        .await
        .expect(201)
        .json();
    assert_eq!(sealed["read_only"], true);
    let sandbox = with_volume(server, "input", false).await;
    assert_eq!(sandbox.sh("cat /data/dir/file").await.ok(), "given");
    assert_ne!(sandbox.root_sh("echo no > /data/dir/file").await.code, Some(0));
    sandbox.kill().await;
    delete(server, "input").await;
}

async fn a_volume_is_there_after_a_pause(server: &Server) {
    create(server, "stays").await;
    let sandbox = with_volume(server, "stays", false).await;
    sandbox.root_sh("echo one > /data/file").await.ok();
    sandbox.ask("/pause", json!({})).await.ok();
    server
        .client()
        .delete("/v1/volumes/stays")
        .await
        .refused(409, "volume_in_use");
    sandbox.ask("/resume", json!({})).await.ok();
    sandbox.root_sh("echo two >> /data/file").await.ok();
    assert_eq!(sandbox.sh("cat /data/file").await.ok(), "one\ntwo\n");
    sandbox.kill().await;
    delete(server, "stays").await;
}

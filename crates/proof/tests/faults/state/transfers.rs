//! The server is killed in the middle of a transfer.

use std::time::Duration;

use atoll_proof::random::Random;
use atoll_proof::{Sandbox, Server, host, json, on_every_tier, wait};
use futures_util::StreamExt as _;
use reqwest::{Body, Method};

use super::{Kind, assert_no_leaks, manifests, snapshot, snapshots};

on_every_tier!(
    an_export_that_is_cut_off_changes_nothing,
    an_import_is_whole_or_not_there,
    an_upload_into_a_volume_is_whole_or_not_there,
);

/// Sends the first part of a body, and then nothing more.
fn stuck(bytes: &[u8]) -> Body {
    let first: Result<_, std::convert::Infallible> = Ok(bytes.to_vec());
    Body::wrap_stream(futures_util::stream::iter([first]).chain(futures_util::stream::pending()))
}

/// Begins an upload that never ends, waits until a part of it has arrived, and kills the server.
async fn kill_in_upload(server: &mut Server, method: Method, path: &str, part: &[u8]) {
    let request = server.client().request(method, path).body(stuck(part));
    let sending = tokio::spawn(request.send());
    let scratch = server.data().join("scratch");
    wait::until_sync("the upload arrives", Duration::from_secs(30), || {
        let mut files = host::names_in(&scratch).into_iter().flat_map(|name| {
            let dir = scratch.join(name);
            host::names_in(&dir).into_iter().map(move |name| dir.join(name))
        });
        files
            .any(|file| file.metadata().is_ok_and(|found| found.len() > 0))
            .then_some(())
    })
    .await;
    server.kill_9();
    assert!(sending.await.unwrap().is_err(), "nobody could answer");
    server.start_again().await;
}

/// A snapshot of some megabytes that nothing else has, and the sum of its content.
async fn made(server: &Server, kind: Kind) -> String {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("head -c 16777216 /dev/urandom > /home/user/random")
        .await
        .ok();
    let sum = sandbox.sh("sha256sum /home/user/random").await.ok();
    snapshot(&sandbox, "made", kind).await;
    sandbox.kill().await;
    sum
}

async fn assert_whole(server: &Server, name: &str, sum: &str) {
    let copy = server.sandbox_with(&json!({"template": name})).await;
    assert_eq!(copy.sh("sha256sum /home/user/random").await.ok(), sum);
    copy.kill().await;
}

async fn an_export_that_is_cut_off_changes_nothing(server: &mut Server) {
    let sum = made(server, Kind::most(server.tier)).await;
    let before = snapshots(server).await;
    let request = server.client().request(Method::GET, "/v1/snapshots/made/export");
    let mut response = server.client().open(request).await;
    assert!(response.chunk().await.unwrap().is_some());
    server.kill_9();
    let ended = async {
        while let Some(_more) = response.chunk().await? {}
        Ok::<(), reqwest::Error>(())
    };
    assert!(ended.await.is_err(), "whoever reads is told that it is not whole");
    server.start_again().await;
    assert_eq!(snapshots(server).await, before);
    assert_whole(server, "made", &sum).await;
    assert_no_leaks(server).await;
}

async fn an_import_is_whole_or_not_there(server: &mut Server) {
    let mut random = Random::seeded();
    let sum = made(server, Kind::most(server.tier)).await;
    let file = server
        .client()
        .get("/v1/snapshots/made/export")
        .await
        .expect(200)
        .body;
    let before = (snapshots(server).await, manifests(server));
    kill_in_upload(
        server,
        Method::POST,
        "/v1/snapshots/import?name=half",
        &file[..file.len() / 2],
    )
    .await;
    assert_eq!((snapshots(server).await, manifests(server)), before);
    assert_no_leaks(server).await;
    // Without its origin there is nothing to share, so that all of it is written.
    server.client().delete("/v1/snapshots/made").await.expect(204);
    for round in 0..4 {
        let name = format!("import-{round}");
        let request = server
            .client()
            .request(Method::POST, &format!("/v1/snapshots/import?name={name}"));
        let sending = tokio::spawn(request.body(file.clone()).send());
        // Any moment is right.
        tokio::time::sleep(Duration::from_millis(random.below(700))).await;
        server.kill_9();
        let acknowledged = sending.await.unwrap().is_ok_and(|answer| answer.status() == 201);
        server.start_again().await;
        let found = snapshots(server).await;
        let there = found.iter().any(|snapshot| snapshot["name"] == json!(name));
        assert!(there || !acknowledged, "it was acknowledged");
        eprintln!("round {round}: acknowledged: {acknowledged}, there: {there}");
        if there {
            assert_whole(server, &name, &sum).await;
            server
                .client()
                .delete(&format!("/v1/snapshots/{name}"))
                .await
                .expect(204);
        }
        assert_no_leaks(server).await;
    }
    let path = "/v1/snapshots/import?name=whole";
    let request = server.client().request(Method::POST, path).body(file);
    server.client().send(request).await.expect(201);
    assert_whole(server, "whole", &sum).await;
    server.client().delete("/v1/snapshots/whole").await.expect(204);
    assert_no_leaks(server).await;
}

/// Some files of a megabyte each, with content that tells them apart.
fn archive() -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for number in 0..24_u8 {
        let mut header = tar::Header::new_ustar();
        header.set_size(1 << 20);
        header.set_mode(0o644);
        archive
            .append_data(
                &mut header,
                format!("file-{number}"),
                vec![number; 1 << 20].as_slice(),
            )
            .unwrap();
    }
    archive.into_inner().unwrap()
}

async fn files_in(server: &Server, volume: &str, read_only: bool) -> (Sandbox, String) {
    let mount = json!({"volumes": [{"volume": volume, "path": "/data", "read_only": read_only}]});
    let sandbox = server.sandbox_with(&mount).await;
    let found = sandbox
        .root_sh("ls /data | grep -v lost+found; cat /data/file-* 2>/dev/null | sha256sum")
        .await;
    (sandbox, found.ok())
}

async fn an_upload_into_a_volume_is_whole_or_not_there(server: &mut Server) {
    let mut random = Random::seeded();
    let archive = archive();
    let volume = json!({"name": "data", "size_bytes": 64 << 20});
    server.client().post("/v1/volumes", &volume).await.expect(201);
    let (sandbox, empty) = files_in(server, "data", false).await;
    sandbox.kill().await;
    // Cut off while it is sent.
    kill_in_upload(
        server,
        Method::PUT,
        "/v1/volumes/data/content",
        &archive[..archive.len() / 2],
    )
    .await;
    let (sandbox, found) = files_in(server, "data", false).await;
    assert_eq!(found, empty, "nothing of it is there");
    sandbox.kill().await;
    kill_in_upload(
        server,
        Method::POST,
        "/v1/volumes/seal?name=sealed",
        &archive[..archive.len() / 2],
    )
    .await;
    server.client().get("/v1/volumes/sealed").await.expect(404);
    assert_no_leaks(server).await;
    // Cut off while it is unpacked: a later one finds a sound volume, and completes it.
    for _ in 0..3 {
        let request = server.client().request(Method::PUT, "/v1/volumes/data/content");
        let sending = tokio::spawn(request.body(archive.clone()).send());
        tokio::time::sleep(Duration::from_millis(random.below(300))).await;
        server.kill_9();
        let _answer = sending.await.unwrap();
        server.start_again().await;
        assert_no_leaks(server).await;
    }
    let request = server
        .client()
        .request(Method::PUT, "/v1/volumes/data/content")
        .body(archive.clone());
    assert_eq!(server.client().send(request).await.ok()["entries"], 24);
    let (sandbox, whole) = files_in(server, "data", false).await;
    assert_eq!(whole.matches("file-").count(), 24, "{whole}");
    sandbox
        .root_sh("echo more > /data/more && rm /data/file-0")
        .await
        .ok();
    sandbox.kill().await;
    seal_at_any_moment(server, &mut random, &archive, &whole).await;
    server.client().delete("/v1/volumes/data").await.expect(204);
    assert_no_leaks(server).await;
}

/// A sealed volume is there as a whole, or its name is free.
async fn seal_at_any_moment(server: &mut Server, random: &mut Random, archive: &[u8], whole: &str) {
    for round in 0..4 {
        let path = format!("/v1/volumes/seal?name=sealed-{round}");
        let request = server
            .client()
            .request(Method::POST, &path)
            .body(archive.to_vec());
        let sending = tokio::spawn(request.send());
        tokio::time::sleep(Duration::from_millis(random.below(300))).await;
        server.kill_9();
        let acknowledged = sending.await.unwrap().is_ok_and(|answer| answer.status() == 201);
        server.start_again().await;
        let there = server
            .client()
            .get(&format!("/v1/volumes/sealed-{round}"))
            .await
            .status
            == 200;
        assert!(there || !acknowledged, "it was acknowledged");
        eprintln!("round {round}: acknowledged: {acknowledged}, there: {there}");
        if !there {
            let request = server
                .client()
                .request(Method::POST, &path)
                .body(archive.to_vec());
            server.client().send(request).await.expect(201);
        }
        let (sandbox, found) = files_in(server, &format!("sealed-{round}"), true).await;
        assert_eq!(found, whole);
        sandbox.kill().await;
        server
            .client()
            .delete(&format!("/v1/volumes/sealed-{round}"))
            .await
            .expect(204);
        assert_no_leaks(server).await;
    }
}

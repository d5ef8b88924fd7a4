//! How much a project may keep.

use std::time::Duration;

use atoll_proof::wait::until_sync;
use atoll_proof::{Answer, Server, json, on_every_tier};

on_every_tier!(with atoll_proof::Options::default().config("max_storage = \"8M\"");
    a_project_over_its_quota_stores_no_more,
    uploads_count_while_they_are_on_their_way,
    archives_for_builds_count_while_they_are_kept,
);

/// An archive lies in scratch before it is anything: it counts from the first byte, and not any more when it is gone.
async fn uploads_count_while_they_are_on_their_way(server: &Server) {
    let scratch = server.data().join("scratch");
    let uploads = || {
        let found = std::fs::read_dir(&scratch).expect("there is a scratch directory");
        let is_upload =
            |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("upload-");
        found.flatten().filter(is_upload).count()
    };
    let send = async |bytes: usize| {
        let client = server.client();
        let request = client.request("POST".parse().expect("a method"), "/v1/snapshots/import?name=s");
        let answer = client.send(request.body(vec![0; bytes])).await;
        until_sync("the upload to be gone", Duration::from_secs(30), || {
            (uploads() == 0).then_some(())
        })
        .await;
        answer
    };
    for _ in 0..3 {
        // One byte more than there is room for. Nothing of it is a snapshot, but that is looked at when all of it is here.
        send((8 << 20) + 1).await.refused(429, "storage_quota_exceeded");
        let whole = send(5 << 20).await;
        assert_ne!(whole.status, 429, "{}", whole.text());
    }
}

/// By E2B's wire: an archive for a build is kept after its upload, and counts until another takes its place.
async fn archives_for_builds_count_while_they_are_kept(server: &Server) {
    let client = server.client();
    let upload = async |hash: &str, bytes: usize| {
        let link = client.get(&format!("/templates/any/files/{hash}")).await;
        let link = link.expect(201).json()["url"]
            .as_str()
            .expect("a link")
            .to_owned();
        let path = link.strip_prefix(client.url()).expect("a link to this server");
        let request = client
            .with_key(None)
            .request("PUT".parse().expect("a method"), path);
        client.send(request.body(vec![0; bytes])).await
    };
    upload("one", 5 << 20).await.expect(200);
    // Of the 8 MiB there are 3 left, for whatever is stored; it is full without one byte more.
    upload("two", (3 << 20) + 1).await.expect(429);
    upload("two", 3 << 20).await.expect(200);
    let sandbox = server.sandbox().await;
    let small = json!({"name": "small", "path": "/etc/hostname"});
    let refused = sandbox.ask("/artifacts", small).await;
    refused.refused(429, "storage_quota_exceeded");
}

/// What is stored is counted, what would come on top is refused, and what runs goes on; deleting makes room.
async fn a_project_over_its_quota_stores_no_more(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("dd if=/dev/urandom of=/home/user/big bs=1M count=16 status=none")
        .await
        .ok();
    let large = json!({"name": "large", "kind": "filesystem"});
    sandbox.ask("/snapshots", large).await.expect(201);
    let again = json!({"name": "more", "kind": "filesystem"});
    let refused = |answer: Answer| answer.refused(429, "storage_quota_exceeded");
    refused(sandbox.ask("/snapshots", again.clone()).await);
    refused(sandbox.ask("/pause", json!({})).await);
    refused(
        server
            .client()
            .post("/v1/volumes", &json!({"name": "v", "size_bytes": 16 << 20}))
            .await,
    );
    let small = json!({"name": "small", "path": "/etc/hostname"});
    refused(sandbox.ask("/artifacts", small.clone()).await);
    sandbox.assert_works().await;
    server.client().get("/v1/snapshots/more").await.expect(404);
    server.client().delete("/v1/snapshots/large").await.expect(204);
    sandbox.ask("/artifacts", small).await.expect(201);
    sandbox.sh("rm /home/user/big").await.ok();
    sandbox.ask("/snapshots", again).await.expect(201);
    sandbox.assert_works().await;
}

mod at_once {
    use atoll_proof::{Answer, Server, json, on_every_tier};

    on_every_tier!(with atoll_proof::Options::default().config("max_sandboxes = 2").args(&["--pool", "base=1"]);
        a_project_has_no_more_sandboxes_than_it_may,
    );

    /// However they are asked for. What waits in a pool is nobody's and does not count.
    async fn a_project_has_no_more_sandboxes_than_it_may(server: &Server) {
        server.until_pool_is_full().await;
        let (one, other) = (server.sandbox().await, server.sandbox().await);
        server.until_pool_is_full().await;
        let refused = |answer: Answer| answer.refused(429, "too_many_sandboxes");
        let (client, plain) = (server.client(), server.request(&json!({})));
        let run = json!({"sandbox": plain, "command": {"cmd": "echo ran"}});
        refused(client.post("/v1/sandboxes", &plain).await);
        refused(client.post("/v1/run", &run).await);
        one.kill().await;
        assert_eq!(
            client.post("/v1/run", &run).await.ok()["result"]["stdout"],
            "ran\n"
        );
        other.assert_works().await;
    }
}

mod together {
    use atoll_proof::{Answer, Server, json, on_every_tier};

    on_every_tier!(with atoll_proof::Options::default().config("max_storage = \"40M\"");
        what_is_stored_at_once_counts_together,
    );

    /// Files with holes cost a sandbox nothing, and volumes are filled later: they count before they are there.
    async fn what_is_stored_at_once_counts_together(server: &Server) {
        let sandbox = server.sandbox().await;
        let refused = |answer: Answer| answer.refused(429, "storage_quota_exceeded");
        sandbox
            .sh("truncate -s 25M /home/user/half; truncate -s 41M /home/user/more")
            .await
            .ok();
        let artifact = |name: &str, path: &str| json!({"name": name, "path": path});
        refused(
            sandbox
                .ask("/artifacts", artifact("more", "/home/user/more"))
                .await,
        );
        let half = || sandbox.ask("/artifacts", artifact("half", "/home/user/half"));
        let both = futures_util::future::join_all([half(), half(), half()]).await;
        let kept = both.iter().filter(|answer| answer.status == 201).count();
        // By chance they come one after the other, and equal contents are kept once; then none has room beside the first.
        assert!(kept <= 1, "{kept} of three");
        let left = std::fs::read_dir(server.data().join("artifacts"))
            .expect("a directory")
            .count();
        assert!(left <= kept, "{left} files for {kept}");
        if kept == 1 {
            server.client().delete("/v1/artifacts/half").await.expect(204);
        }
        let volume = async |name: &str, bytes: u64| {
            server
                .client()
                .post("/v1/volumes", &json!({"name": name, "size_bytes": bytes}))
                .await
        };
        refused(volume("v", 41 << 20).await);
        volume("v", 30 << 20).await.expect(201);
        refused(half().await);
        refused(volume("w", 30 << 20).await);
        server.client().delete("/v1/volumes/v").await.expect(204);
        half().await.expect(201);
    }
}

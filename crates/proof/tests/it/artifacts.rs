//! What is kept by name after its sandbox is gone.

use std::io::Read as _;
use std::time::Duration;

use atoll_proof::{Sandbox, Server, Value, json, on_every_tier};

on_every_tier!(
    artifacts_survive_the_sandbox,
    the_newest_of_a_name_is_found,
    retention_ends,
    what_cannot_be_saved_is_refused,
);

async fn save(sandbox: &Sandbox, body: &Value) -> Value {
    sandbox
        .client
        .post(&sandbox.path("/artifacts"), body)
        .await
        .expect(201)
        .json()
}

async fn artifacts_survive_the_sandbox(server: &mut Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .sh("mkdir -p /tmp/out/sub && printf result > /tmp/out/r.txt && printf more > /tmp/out/sub/m")
        .await
        .ok();
    let file = save(&sandbox, &json!({"name": "result", "path": "/tmp/out/r.txt"})).await;
    assert_eq!(
        (&file["kind"], &file["size_bytes"], &file["name"]),
        (&json!("file"), &json!(6), &json!("result"))
    );
    assert_eq!(file["sandbox"], json!(sandbox.id));
    let tree = save(&sandbox, &json!({"name": "tree", "path": "/tmp/out"})).await;
    assert_eq!(tree["kind"], "directory");
    sandbox.kill().await;
    server.stop();
    server.start_again().await;

    let client = server.client();
    let content = client.get("/v1/artifacts/result/content").await.expect(200);
    assert_eq!(
        (content.text().as_str(), &content.headers["content-type"]),
        ("result", &"application/octet-stream".parse().unwrap())
    );
    let content = client
        .get(&format!("/v1/artifacts/{}/content", tree["id"].as_str().unwrap()))
        .await
        .expect(200);
    assert_eq!(content.headers["content-type"], "application/x-tar");
    let mut found = Vec::new();
    for entry in tar::Archive::new(content.body.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        found.push((entry.path().unwrap().display().to_string(), text));
    }
    assert!(found.contains(&("out/sub/m".into(), "more".into())), "{found:?}");
    let digest = file["digest"].as_str().unwrap();
    let hex = digest.strip_prefix("sha256:").unwrap_or(digest);
    assert_eq!(hex.len(), 64, "{digest}");

    let list = client.get("/v1/artifacts").await.ok();
    let names: Vec<_> = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["tree", "result"], "newest first");
    client.delete("/v1/artifacts/result").await.expect(204);
    assert_eq!(client.get("/v1/artifacts/result").await.status, 404);
}

async fn the_newest_of_a_name_is_found(server: &Server) {
    let sandbox = server.sandbox().await;
    let client = server.client();
    let mut ids = Vec::new();
    for content in ["first", "second"] {
        sandbox.write("/tmp/f", content.as_bytes()).await;
        ids.push(
            save(&sandbox, &json!({"name": "same", "path": "/tmp/f"})).await["id"]
                .as_str()
                .unwrap()
                .to_owned(),
        );
    }
    assert_eq!(
        client.get("/v1/artifacts/same/content").await.expect(200).text(),
        "second"
    );
    assert_eq!(
        client
            .get(&format!("/v1/artifacts/{}/content", ids[0]))
            .await
            .expect(200)
            .text(),
        "first"
    );
    let of_name = client.get("/v1/artifacts?name=same").await.ok();
    assert_eq!(of_name["items"].as_array().unwrap().len(), 2);
    // The same bytes are kept once, and as long as anybody needs them.
    let twin = save(&sandbox, &json!({"name": "twin", "path": "/tmp/f"})).await;
    assert_eq!(
        twin["digest"],
        client.get("/v1/artifacts/same").await.ok()["digest"]
    );
    client
        .delete(&format!("/v1/artifacts/{}", ids[1]))
        .await
        .expect(204);
    assert_eq!(
        client.get("/v1/artifacts/twin/content").await.expect(200).text(),
        "second"
    );
    assert_eq!(
        client.get("/v1/artifacts/same/content").await.expect(200).text(),
        "first"
    );
    let page = client.get("/v1/artifacts?limit=1").await.ok();
    let next = page["next"].as_str().unwrap();
    let rest = client
        .get(&format!("/v1/artifacts?limit=1&cursor={next}"))
        .await
        .ok();
    assert_ne!(page["items"][0]["id"], rest["items"][0]["id"]);
}

async fn retention_ends(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.write("/tmp/f", b"short-lived").await;
    let short = save(
        &sandbox,
        &json!({"name": "short", "path": "/tmp/f", "retention_ms": 1000}),
    )
    .await;
    assert!(short["expires_at"].is_string());
    let long = save(
        &sandbox,
        &json!({"name": "long", "path": "/tmp/f", "retention_ms": 3_600_000}),
    )
    .await;
    assert!(long["expires_at"].as_str() > short["expires_at"].as_str());
    atoll_proof::wait::until("the artifact expires", Duration::from_secs(20), || async {
        (server.client().get("/v1/artifacts/short").await.status == 404).then_some(())
    })
    .await;
    assert_eq!(
        server.client().get("/v1/artifacts/short/content").await.status,
        404
    );
    let listed = server.client().get("/v1/artifacts").await.ok();
    assert_eq!(listed["items"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(
        server
            .client()
            .get("/v1/artifacts/long/content")
            .await
            .expect(200)
            .text(),
        "short-lived"
    );
}

async fn what_cannot_be_saved_is_refused(server: &Server) {
    let sandbox = server.sandbox().await;
    let path = sandbox.path("/artifacts");
    for (body, status) in [
        (json!({"name": "x", "path": "/no/such"}), 404),
        (json!({"name": "x", "path": "/dev/null"}), 400),
        (json!({"name": "../../etc/passwd", "path": "/etc/hostname"}), 400),
        (json!({"name": "", "path": "/etc/hostname"}), 400),
        (
            json!({"name": "art_aaaaaaaaaaaaaaaaaaaa", "path": "/etc/hostname"}),
            400,
        ),
        (json!({"name": "x"}), 400),
    ] {
        let refused = sandbox.client.post(&path, &body).await;
        assert_eq!(refused.status, status, "{body}: {refused:?}");
        refused.error();
    }
    assert_eq!(server.client().get("/v1/artifacts/nothing").await.status, 404);
    assert_eq!(
        server
            .client()
            .get("/v1/artifacts/..%2F..%2Fatoll.db/content")
            .await
            .status,
        404
    );
}

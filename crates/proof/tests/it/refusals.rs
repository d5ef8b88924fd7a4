//! What the API refuses: in one shape, with the field named and a way out, and without touching anything.

use atoll_proof::{MIB, Server, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    unknown_fields_are_named,
    values_out_of_range_are_named,
    ids_and_routes_that_do_not_exist,
    bodies_that_are_not_json,
    request_ids_come_back,
);

async fn unknown_fields_are_named(server: &Server) {
    let client = server.client();
    for (body, field) in [
        (json!({"memory": 1}), "memory"),
        (json!({"resources": {"gpus": 1}}), "gpus"),
        (json!({"idle": {"after_ms": 5000, "then": "x"}}), "then"),
        (json!({"resources": {"memory_bytes": "512M"}}), "memory_bytes"),
        (json!({"isolation_floor": "docker"}), "docker"),
        (json!({"timeout_ms": -5}), "timeout_ms"),
        (json!({"labels": ["a"]}), "labels"),
    ] {
        let refused = client.post("/v1/sandboxes", &body).await;
        assert_eq!(refused.status, 400, "{body}: {refused:?}");
        let detail = refused.error();
        assert!(
            detail["message"].as_str().unwrap().contains(field),
            "{detail} does not name `{field}`"
        );
    }
    for path in [
        "/v1/sandboxes?page=2",
        "/v1/sandboxes?state=asleep",
        "/v1/sandboxes?limit=0",
        "/v1/facts?limit=5000",
        "/v1/artifacts?colour=red",
    ] {
        client.get(path).await.expect(400).error();
    }
    assert!(server.list(&[]).await.is_empty());
}

async fn values_out_of_range_are_named(server: &Server) {
    for (body, word) in [
        (json!({"resources": {"memory_bytes": 1}}), "memory"),
        (json!({"resources": {"cpu_millis": 1}}), "cpu"),
        (json!({"resources": {"pids": 1}}), "pids"),
        (json!({"resources": {"disk_bytes": 1}}), "disk"),
        (json!({"resources": {"memory_bytes": u64::MAX}}), "memory"),
        (json!({"timeout_ms": 1}), "timeout"),
        (json!({"timeout_ms": null}), "timeout"),
        (json!({"timeout_ms": u64::MAX}), "timeout"),
        (json!({"idle": {"after_ms": 1}}), "idle"),
        (json!({"labels": {"a=b": "c"}}), "label"),
        (json!({"labels": {"a": "x".repeat(5000)}}), "label"),
        (json!({"env": {"1A": "x"}}), "1A"),
        (json!({"env": {"A": "x\u{0}"}}), "NUL"),
        (
            json!({"env": {"A": "x".repeat(usize::try_from(MIB / 4).unwrap())}}),
            "environment",
        ),
    ] {
        let refused = server
            .client()
            .post("/v1/sandboxes", &server.request(&body))
            .await;
        assert_eq!(refused.status, 400, "{refused:?}");
        let detail = refused.error();
        assert!(
            detail["message"].as_str().unwrap().contains(word),
            "{detail} does not say `{word}`"
        );
    }
    assert!(
        server
            .list(&["starting", "running", "deleting", "deleted", "failed"])
            .await
            .is_empty()
    );
}

async fn ids_and_routes_that_do_not_exist(server: &Server) {
    let client = server.client();
    client
        .get("/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa")
        .await
        .refused(404, "sandbox_not_found");
    client
        .delete("/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa")
        .await
        .refused(404, "sandbox_not_found");
    for id in [
        "sbx_",
        "sbx_..%2F..%2Fetc%2Fpass",
        "sbx_aaaaaaaaaaaaaaaaaaa%ff",
        "%ff",
    ] {
        let refused = client.get(&format!("/v1/sandboxes/{id}")).await;
        refused.refused(400, "invalid_path_parameter");
    }
    // What does not begin like an id may be a name.
    for name in [
        "x",
        "SBX_aaaaaaaaaaaaaaaaaaaa",
        "ins_aaaaaaaaaaaaaaaaaaaa",
        "%00",
        "..%2Fx",
    ] {
        let refused = client.get(&format!("/v1/sandboxes/{name}")).await;
        refused.refused(404, "sandbox_not_found");
    }
    for path in [
        "/v1/nothing",
        "/v9/sandboxes",
        "/",
        "/v1/sandboxes/sbx_aaaaaaaaaaaaaaaaaaaa/nothing",
        "/v1/sandboxes/",
    ] {
        client.get(path).await.refused(404, "no_such_route");
    }
    let wrong = client.send(client.request(Method::PATCH, "/v1/sandboxes")).await;
    wrong.refused(405, "method_not_allowed");
    assert!(wrong.headers.contains_key("allow"), "{wrong:?}");
}

async fn bodies_that_are_not_json(server: &Server) {
    let client = server.client();
    let post = |kind: &'static str, body: &'static str| {
        let request = client
            .request(Method::POST, "/v1/sandboxes")
            .header("content-type", kind)
            .body(body);
        client.send(request)
    };
    post("text/plain", "{}")
        .await
        .refused(415, "unsupported_media_type");
    for body in ["", "{", "[]", "null", "{\"template\":", "\u{feff}{}", "{} {}"] {
        let refused = post("application/json", body).await;
        assert_eq!(refused.status, 400, "{body:?}: {refused:?}");
        refused.error();
    }
    let deep = "[".repeat(100_000);
    let request = client
        .request(Method::POST, "/v1/sandboxes")
        .header("content-type", "application/json")
        .body(deep);
    client.send(request).await.expect(400).error();
    server.assert_answers().await;
}

async fn request_ids_come_back(server: &Server) {
    let client = server.client();
    let answer = client
        .send(
            client
                .request(Method::GET, "/v1/info")
                .header("x-request-id", "mine-1"),
        )
        .await;
    assert_eq!(answer.headers["x-request-id"], "mine-1");
    let answer = client.get("/v1/nothing").await;
    assert!(answer.error()["request_id"].as_str().unwrap().starts_with("req_"));
    let injected = client
        .send(
            client
                .request(Method::GET, "/v1/nothing")
                .header("x-request-id", "<script>"),
        )
        .await;
    assert!(
        injected.error()["request_id"]
            .as_str()
            .unwrap()
            .starts_with("req_"),
        "only harmless ids are echoed"
    );
}

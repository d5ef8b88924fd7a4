//! What sandboxes are made from: list, inspect, and what a template gives its sandboxes.

use atoll_proof::{Server, json, on_every_tier};

on_every_tier!(
    templates_are_listed_and_inspected,
    base_is_a_useful_computer,
    unknown_templates_are_refused
);

async fn templates_are_listed_and_inspected(server: &Server) {
    let client = server.client();
    let list = client.get("/v1/templates").await.ok();
    let base = list["items"]
        .as_array()
        .unwrap()
        .iter()
        .find(|item| item["names"].as_array().unwrap().contains(&json!("base")));
    let base = base.expect("the template `base` is there").clone();
    assert!(
        base["id"].as_str().unwrap().starts_with("tpl_") && base["size_bytes"].as_u64().unwrap() > 1_000_000
    );
    assert_eq!(base["source"]["kind"], "debian");
    assert_eq!(client.get("/v1/templates/base").await.ok(), base);
    assert_eq!(
        client
            .get(&format!("/v1/templates/{}", base["id"].as_str().unwrap()))
            .await
            .ok(),
        base
    );
    let sandbox = server.sandbox_with(&json!({"template": base["id"]})).await;
    assert_eq!(
        sandbox.get().await["template_id"],
        base["id"],
        "an id names a template too"
    );
    sandbox.assert_works().await;
}

async fn base_is_a_useful_computer(server: &Server) {
    let sandbox = server.sandbox().await;
    for (line, expected) in [
        ("python3 -c 'print(sum(range(10)))'", "45\n"),
        ("node -p '1 + 1'", "2\n"),
        (
            "echo 'int main() { return 0; }' > /tmp/a.c && gcc -o /tmp/a /tmp/a.c && /tmp/a && echo compiled",
            "compiled\n",
        ),
        ("git --version | cut -d' ' -f1", "git\n"),
        ("curl --version | head -c 4", "curl"),
        ("python3 -m pip --version | head -c 3", "pip"),
        (
            "bash -c 'echo $BASH_VERSION' | cut -d. -f1 | xargs test 4 -lt && echo modern",
            "modern\n",
        ),
        (
            "python3 -c 'import sqlite3, ssl, ctypes, threading, multiprocessing; print(\"ok\")'",
            "ok\n",
        ),
        ("echo $LANG", "C.UTF-8\n"),
        ("touch ~/mine && ls ~/mine && test -w /tmp && test ! -w /usr", ""),
    ] {
        let output = sandbox.sh(line).await;
        assert_eq!(output.code, Some(0), "{line}: {output:?}");
        assert!(output.stdout.starts_with(expected), "{line}: {output:?}");
    }
    if server.tier.is_tenant_boundary() {
        assert_eq!(
            sandbox.sh("sudo -n id -u").await.ok(),
            "0\n",
            "sudo works where the tier allows it"
        );
    }
}

async fn unknown_templates_are_refused(server: &Server) {
    let refused = server
        .client()
        .post(
            "/v1/sandboxes",
            &server.request(&json!({"template": "no-such-thing"})),
        )
        .await;
    let detail = refused.error();
    assert_eq!(refused.status, 404, "{refused:?}");
    assert!(
        detail["message"].as_str().unwrap().contains("no-such-thing"),
        "{detail}"
    );
    assert_eq!(
        server.client().get("/v1/templates/no-such-thing").await.status,
        404
    );
    for name in ["../../etc", "a b", "a\nb"] {
        let refused = server
            .client()
            .post("/v1/sandboxes", &server.request(&json!({ "template": name })))
            .await;
        assert!([400, 404].contains(&refused.status), "{name:?}: {refused:?}");
    }
    assert!(server.list(&[]).await.is_empty());
}

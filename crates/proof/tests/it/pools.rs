//! Warm pools: kept full, claimed in one step, gone with the server.

use atoll_proof::{MIB, Sandbox, Server, Value, json, on_every_tier};

on_every_tier!(with atoll_proof::Options::default().args(&["--pool", "base=2"]);
    a_pooled_instance_becomes_a_sandbox, the_pool_is_refilled_and_leaves_with_the_server);

async fn a_pooled_instance_becomes_a_sandbox(server: &Server) {
    let pool = server.until_pool_is_full().await;
    assert_eq!((&pool["template"], &pool["target"]), (&json!("base"), &json!(2)));
    assert_eq!(
        server.list(&[]).await.len(),
        0,
        "what waits in a pool is nobody's sandbox"
    );
    let sandbox = server.sandbox_with(&json!({"env": {"MINE": "yes"}})).await;
    assert_eq!(is_warm(&sandbox).await, true);
    assert_eq!(sandbox.sh("echo $MINE").await.ok(), "yes\n");
    // Another size is booted cold, at its own size.
    let other = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 200 * MIB}}))
        .await;
    assert_eq!(is_warm(&other).await, false);
    // Each is called as it is, and finds itself.
    for sandbox in [&sandbox, &other] {
        let bare = sandbox.id.trim_start_matches("sbx_");
        let found = sandbox.sh("hostname; grep -wc $(hostname) /etc/hosts").await.ok();
        assert_eq!(found, format!("{bare}\n1\n"));
    }
}

/// What its story says of how it was started.
async fn is_warm(sandbox: &Sandbox) -> Value {
    let facts = sandbox.facts().await;
    let started = facts.iter().find(|fact| fact["kind"] == "sandbox.started");
    started.unwrap()["data"]["warm"].clone()
}

/// With room for more files than memory.
mod on_disk {
    use atoll_proof::{GIB, Server, json, on_every_tier};

    on_every_tier!(with atoll_proof::Options::default().args(&["--pool", "base=1:disk=2G,disk_backing=disk"]);
        a_pool_keeps_files_where_it_was_told);

    async fn a_pool_keeps_files_where_it_was_told(server: &Server) {
        server.until_pool_is_full().await;
        let resources = json!({"disk_bytes": 2 * GIB, "disk_backing": "disk"});
        let sandbox = server.sandbox_with(&json!({"resources": resources})).await;
        assert_eq!(super::is_warm(&sandbox).await, true);
        // More than its memory.
        let written = sandbox.sh("head -c 700M /dev/zero > big && stat -c %s big").await;
        assert_eq!(written.ok(), format!("{}\n", 700 * atoll_proof::MIB));
    }
}

async fn the_pool_is_refilled_and_leaves_with_the_server(server: &mut Server) {
    server.until_pool_is_full().await;
    let claimed = futures_util::future::join_all((0..3).map(|_| server.sandbox())).await;
    for sandbox in &claimed {
        sandbox.assert_works().await;
        sandbox.kill().await;
    }
    server.until_pool_is_full().await;
    // Killed: the next server finds them, and owns or destroys them; it never has more than it should.
    server.kill_9();
    server.start_again().await;
    server.until_pool_is_full().await;
    let instances = server.held().instances.len();
    assert!(instances <= 3, "{}", server.held());
    assert!(server.stop().success());
    server.assert_nothing_held().await;
}

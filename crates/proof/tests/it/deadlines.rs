//! Time and memory run out: limits are kept without anybody asking, and reported.

use std::time::{Duration, Instant};

use atoll_proof::{MIB, Server, json, on_every_tier};

on_every_tier!(
    a_timeout_ends_the_sandbox,
    an_idle_sandbox_ends_and_a_used_one_does_not,
    one_that_works_is_not_idle,
    out_of_memory_is_said,
    running_commands_are_told_when_their_sandbox_ends,
);

async fn a_timeout_ends_the_sandbox(server: &Server) {
    let began = Instant::now();
    let sandbox = server.sandbox_with(&json!({"timeout_ms": 1500})).await;
    sandbox.background("sleep 1000").await;
    let ended = sandbox.until_state("deleted").await;
    assert!(
        began.elapsed() >= Duration::from_millis(1400),
        "not before its time"
    );
    assert!(
        began.elapsed() < Duration::from_secs(15),
        "and soon after: {:?}",
        began.elapsed()
    );
    assert_eq!(ended["end"]["reason"], "timed_out");
    assert!(ended["end"]["message"].as_str().unwrap().contains("timeout"));
    server.assert_nothing_held().await;
    let late = sandbox.exec(&json!({"cmd": "true"})).await;
    assert!([409, 410].contains(&late.status), "{late:?}");
    assert!(
        late.error()["message"].as_str().unwrap().contains("timeout"),
        "the refusal says why it is gone: {late:?}"
    );

    // Shortening works like extending.
    let sandbox = server.sandbox().await;
    sandbox
        .client
        .post(&sandbox.path("/extend"), &json!({"timeout_ms": 1000}))
        .await
        .ok();
    assert_eq!(sandbox.until_state("deleted").await["end"]["reason"], "timed_out");
}

async fn an_idle_sandbox_ends_and_a_used_one_does_not(server: &Server) {
    let idle = json!({"idle": {"after_ms": 1500}});
    let (left, used, busy) = (
        server.sandbox_with(&idle).await,
        server.sandbox_with(&idle).await,
        server.sandbox_with(&idle).await,
    );
    // One operation that takes long is use, too.
    let long = tokio::spawn({
        let busy = busy.clone();
        async move { busy.sh("sleep 5; echo still here").await }
    });
    let ended = atoll_proof::wait::until("the idle one ends", Duration::from_secs(60), || async {
        used.assert_works().await;
        let record = left.get().await;
        (record["state"] == json!("deleted")).then_some(record)
    })
    .await;
    assert_eq!(ended["end"]["reason"], "idle", "{ended}");
    assert_eq!(used.state().await, "running");
    assert_eq!(long.await.unwrap().ok(), "still here\n");
    // Now nobody uses them.
    for sandbox in [used, busy] {
        assert_eq!(sandbox.until_state("deleted").await["end"]["reason"], "idle");
    }
}

/// Work is what runs because somebody started it through the API, and what takes CPU time; not what is merely there.
async fn one_that_works_is_not_idle(server: &Server) {
    let idle = json!({"idle": {"after_ms": 1500}});
    let left_behind =
        |line: &str| format!("setsid sh -c '{line}' </dev/null >/dev/null 2>&1 & echo left behind");
    let (computes, commanded) = (server.sandbox_with(&idle).await, server.sandbox_with(&idle).await);
    computes
        .sh(&left_behind("while [ ! -e /tmp/enough ]; do :; done"))
        .await
        .ok();
    let command = commanded.background("sleep 1000").await;
    // Each lasts for an idle time at least, in which nobody says a word to the others.
    for _ in 0..2 {
        let sleeps = server.sandbox_with(&idle).await;
        sleeps.sh(&left_behind("sleep 1000")).await.ok();
        assert_eq!(sleeps.until_state("deleted").await["end"]["reason"], "idle");
    }
    for working in [&computes, &commanded] {
        assert_eq!(working.state().await, "running");
    }
    computes.write("/tmp/enough", b"").await;
    commanded
        .client
        .post(
            &commanded.path(&format!("/commands/{command}/signal")),
            &json!({"signal": 9}),
        )
        .await
        .ok();
    for done in [&computes, &commanded] {
        assert_eq!(done.until_state("deleted").await["end"]["reason"], "idle");
    }
}

async fn out_of_memory_is_said(server: &Server) {
    let small = json!({"resources": {"memory_bytes": 96 * MIB, "disk_bytes": 32 * MIB}});
    let sandbox = server.sandbox_with(&small).await;
    let hog = sandbox
        .exec(&json!({"argv": ["python3", "-c", "x = bytearray(); \nwhile True: x += b'x' * (1 << 20)"]}))
        .await;
    let detail = hog.refused(410, "sandbox_out_of_memory");
    assert!(detail["message"].as_str().unwrap().contains("memory"), "{detail}");
    let record = sandbox.until_state("failed").await;
    assert_eq!(record["end"]["reason"], "out_of_memory", "{record}");
    assert!(record["end"]["message"].as_str().unwrap().contains("memory"));
    let facts = sandbox.facts().await;
    let failed = facts
        .iter()
        .find(|fact| fact["kind"] == "sandbox.failed")
        .expect("the ledger knows");
    assert_eq!(failed["data"]["end"]["reason"], "out_of_memory");
    server.assert_nothing_held().await;
    let late = sandbox.exec(&json!({"cmd": "true"})).await;
    assert!(
        late.error()["message"].as_str().unwrap().contains("memory"),
        "{late:?}"
    );
}

async fn running_commands_are_told_when_their_sandbox_ends(server: &Server) {
    let sandbox = server.sandbox().await;
    let waiting = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.exec(&json!({"cmd": "echo up; sleep 1000"})).await }
    });
    let mut events = sandbox
        .exec_events(&json!({"cmd": "echo here; sleep 1000"}))
        .await;
    events.find("stdout").await;
    atoll_proof::wait::until("both run", Duration::from_secs(20), || async {
        (sandbox.commands().await.len() >= 2).then_some(())
    })
    .await;
    sandbox.kill().await;
    let answer = atoll_proof::wait::within("the exec answers", Duration::from_secs(15), waiting)
        .await
        .unwrap();
    assert_eq!(answer.status, 410, "{answer:?}");
    assert!(
        answer.error()["message"].as_str().unwrap().contains("killed"),
        "{answer:?}"
    );
    let rest = events.rest().await;
    assert_eq!(
        rest.last().map(|event| event.name.as_str()),
        Some("error"),
        "{rest:?}"
    );
}

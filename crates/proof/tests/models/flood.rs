//! Calls that cost their caller nothing, made without end: they may not fill the disk, nor push out what others did.

use std::time::Duration;

use atoll_proof::{Client, MIB, Options, Server, Tier, Value, json, wait};
use futures_util::StreamExt as _;

const CALLS: usize = 4000;

#[tokio::test]
async fn a_flood_of_failing_calls_keeps_to_its_projects_share_of_the_disk() {
    let mut server = Server::start(Tier::Jail, Options::default().config("max_ledger = \"256K\"")).await;
    let (flooding, quiet) = (tenant(&server, "flooding").await, tenant(&server, "quiet").await);
    for _ in 0..3 {
        call(&quiet, "quiet").await;
    }
    let of_quiet = until_settled(&quiet, 3).await;
    // Calls with names of their own, so that nothing about them is the same.
    let flooding = &flooding;
    let one = async |n: usize| call(flooding, &format!("{n}-{}", "x".repeat(100))).await;
    let calls = futures_util::stream::iter(0..CALLS).map(one);
    calls.buffer_unordered(32).for_each(|()| async {}).await;

    let told = wait::until("the ledger says what went", Duration::from_secs(60), || async {
        let facts = flooding.get_with("/v1/facts", &[("limit", "1000")]).await.ok();
        let facts = facts["items"].as_array()?.clone();
        let told: Vec<Value> = facts
            .iter()
            .filter(|fact| fact["kind"] == "ledger.trimmed")
            .cloned()
            .collect();
        assert!(told.len() <= 1, "{told:?}");
        (facts.len() < 500).then(|| told.into_iter().next())?
    })
    .await;
    assert!(told["data"]["model_calls"].as_u64().unwrap() > 1000, "{told}");
    // Facts about decisions are there, and whoever reads on from a fact that is gone finds the next that is left.
    let facts = flooding
        .get_with("/v1/facts", &[("limit", "1000"), ("after", "1")])
        .await
        .ok();
    let kinds: Vec<_> = facts["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|fact| &fact["kind"])
        .collect();
    assert!(kinds.contains(&&json!("provider.set")), "{kinds:?}");
    let spend = flooding.get("/v1/gateway/spend").await.ok();
    assert!(spend["complete_from"].is_string(), "{spend}");
    let spend = quiet.get("/v1/gateway/spend").await.ok();
    assert!(spend["complete_from"].is_null(), "{spend}");
    assert_eq!(until_settled(&quiet, 3).await, of_quiet);

    // Its log is folded into the file when the server stops.
    assert!(server.stop().success());
    let size = std::fs::metadata(server.data().join("atoll.db")).unwrap().len();
    println!("{CALLS} calls: {size} bytes");
    assert!(size < 4 * MIB, "{size} bytes");
    server.start_again().await;
    let quiet = server.client().with_key(quiet.key());
    assert_eq!(until_settled(&quiet, 3).await, of_quiet);
    server.finish().await;
}

/// The holder of a project's key, with a provider at an address that is out of reach.
async fn tenant(server: &Server, name: &str) -> Client {
    let operator = server.client();
    let made = operator.post("/v1/projects", &json!({"name": name})).await;
    made.expect(201);
    let key = operator
        .post("/v1/keys", &json!({"name": name, "project": name}))
        .await
        .ok();
    let tenant = operator.with_key(key["secret"].as_str());
    let provider =
        json!({"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "key": "k", "serves": ["*"]});
    let request = tenant.request(reqwest::Method::PUT, "/v1/gateway/providers/p");
    tenant.send(request.json(&provider)).await.expect(200);
    tenant
}

async fn call(tenant: &Client, run: &str) {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "user": run});
    let answer = tenant.post("/v1/chat/completions", &body).await;
    assert!(answer.status >= 400, "{answer:?}");
}

/// The facts and calls of a project, when all of its calls have ended.
async fn until_settled(tenant: &Client, calls: usize) -> (Value, Value) {
    wait::until("its calls have ended", Duration::from_secs(10), || async {
        let facts = tenant.get("/v1/facts").await.ok();
        let called = facts["items"].as_array()?.iter();
        let ended = called.filter(|fact| fact["kind"] == "model.called").count();
        let rows = tenant.get("/v1/gateway/calls").await.ok();
        (ended == calls).then_some((facts, rows))
    })
    .await
}

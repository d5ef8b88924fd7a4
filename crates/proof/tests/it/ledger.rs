//! Metering and facts: what ran, how it ended, what it used.

use std::time::Duration;

use atoll_proof::stream::{Events, Session};
use atoll_proof::{MIB, Sandbox, Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    metrics_tell_what_is_used_now,
    facts_tell_the_story,
    events_come_as_they_happen_and_none_twice,
    every_command_ends_once,
    usage_is_summed,
    prometheus_counts
);

async fn metrics_tell_what_is_used_now(server: &Server) {
    let sandbox = server.sandbox().await;
    let metrics = |sandbox: Sandbox| async move { sandbox.client.get(&sandbox.path("/metrics")).await.ok() };
    let before = metrics(sandbox.clone()).await;
    assert!(before["memory_bytes"].as_u64().unwrap() > 100_000, "{before}");
    assert!(before["pids"].as_u64().unwrap() >= 1);
    assert_eq!(before["oom_kills"], 0);
    if server.tier.is_tenant_boundary() {
        assert!(
            before["guest"]["memory_total_bytes"].as_u64().unwrap() <= 1032 * MIB,
            "{before}"
        );
    }
    assert!(before["guest"]["processes"].as_u64().unwrap() >= 1, "{before}");
    // Holds 100 MiB and has used CPU.
    let hold =
        "import time\nx = b'x' * (100 << 20)\nprint(sum(range(3000000)), flush=True)\ntime.sleep(1000)";
    sandbox.write("/tmp/hold.py", hold.as_bytes()).await;
    let holder = sandbox
        .background("exec python3 -c \"$(cat /tmp/hold.py)\"")
        .await;
    sandbox.until_logged(&holder, "4499998500000").await;
    atoll_proof::wait::until("memory and CPU are seen", Duration::from_secs(20), || async {
        let after = metrics(sandbox.clone()).await;
        let grown = |name: &str| {
            after[name]
                .as_u64()
                .unwrap()
                .saturating_sub(before[name].as_u64().unwrap())
        };
        let seen = grown("memory_bytes") > 80 * MIB && grown("cpu_micros") > 10_000;
        (seen && after["memory_peak_bytes"].as_u64() >= after["memory_bytes"].as_u64()).then_some(())
    })
    .await;
    sandbox.kill().await;
    let gone = sandbox.client.get(&sandbox.path("/metrics")).await;
    assert!([409, 410].contains(&gone.status), "{gone:?}");
}

/// Waits until the ledger has a fact of this kind, and returns all of them.
async fn until_fact(sandbox: &Sandbox, kind: &str) -> Vec<Value> {
    atoll_proof::wait::until(&format!("a fact {kind}"), Duration::from_secs(20), || async {
        let facts = sandbox.facts().await;
        facts
            .iter()
            .any(|fact| fact["kind"] == json!(kind))
            .then_some(facts)
    })
    .await
}

async fn facts_tell_the_story(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox
        .run(&["sh", "-c", "echo secret-output; exit 3", "secret-argument"])
        .await;
    until_fact(&sandbox, "command.exited").await;
    sandbox
        .client
        .post(&sandbox.path("/extend"), &json!({"timeout_ms": 100_000}))
        .await
        .ok();
    sandbox.kill().await;
    let facts = until_fact(&sandbox, "usage").await;
    let kinds: Vec<&str> = facts.iter().map(|fact| fact["kind"].as_str().unwrap()).collect();
    for kind in [
        "sandbox.created",
        "sandbox.started",
        "command.started",
        "command.exited",
        "sandbox.extended",
        "sandbox.ended",
    ] {
        assert_eq!(
            kinds.iter().filter(|found| **found == kind).count(),
            1,
            "{kind} in {kinds:?}"
        );
    }
    assert_eq!(kinds[0], "sandbox.created");
    let of = |kind: &str| &facts.iter().find(|fact| fact["kind"] == json!(kind)).unwrap()["data"];
    assert_eq!(of("command.exited")["state"], "exited");
    assert_eq!(of("command.exited")["exit_code"], 3);
    assert_eq!(of("command.exited")["bytes_out"], 14);
    assert_eq!(of("command.started")["program"], "sh");
    assert_eq!(of("sandbox.ended")["end"]["reason"], "killed");
    let text = serde_json::to_string(&facts).unwrap();
    assert!(
        !text.contains("secret-"),
        "facts carry sizes and names, never contents: {text}"
    );

    // The whole project's ledger, a page at a time: the same facts, in order, none twice.
    let mut after = 0;
    let mut seen = Vec::new();
    loop {
        let page = server
            .client()
            .get(&format!("/v1/facts?after={after}&limit=3"))
            .await
            .ok();
        let items = page["items"].as_array().unwrap().clone();
        assert!(items.len() <= 3);
        seen.extend(items);
        match page["next"].as_i64() {
            Some(next) => after = next,
            None => break,
        }
    }
    let sequence: Vec<i64> = seen.iter().map(|fact| fact["seq"].as_i64().unwrap()).collect();
    assert!(sequence.is_sorted_by(|a, b| a < b), "{sequence:?}");
    assert!(
        seen.iter()
            .filter(|fact| fact["sandbox"] == json!(sandbox.id))
            .count()
            >= facts.len()
    );
}

async fn follow(server: &Server, query: &str, last: Option<&str>) -> Events {
    let mut request = server
        .client()
        .request(Method::GET, &format!("/v1/events{query}"));
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    Events::of(server.client().open(request).await)
}

async fn events_come_as_they_happen_and_none_twice(server: &Server) {
    let mut all = follow(server, "?kinds=sandbox.*,command.exited", None).await;
    let sandbox = server.sandbox().await;
    let created = all.find("sandbox.created").await;
    assert_eq!(created.data["sandbox"], json!(sandbox.id));
    assert_eq!(created.id, Some(created.data["seq"].to_string()));
    sandbox.run(&["true"]).await;
    let exited = all.find("command.exited").await;
    assert_eq!(exited.data["sandbox"], json!(sandbox.id));

    // Who comes back with the last one that was seen hears of the next, and of none before it.
    let sandbox_only = format!("?sandbox={}&kinds=sandbox.*,command.*", sandbox.id);
    let mut again = follow(server, &sandbox_only, created.id.as_deref()).await;
    let mut names = Vec::new();
    while names.last().is_none_or(|name| name != "command.exited") {
        let event = again.next().await.unwrap();
        assert!(event.data["seq"].as_i64() > created.data["seq"].as_i64());
        names.push(event.name);
    }
    assert_eq!(names.iter().filter(|name| *name == "command.exited").count(), 1);
    assert!(!names.contains(&"sandbox.created".to_owned()), "{names:?}");

    // One that reads from the first on gets the same as the pages of the ledger.
    sandbox.kill().await;
    let mut first = follow(server, &format!("?sandbox={}&after=0", sandbox.id), None).await;
    let mut told = Vec::new();
    while told
        .last()
        .is_none_or(|fact: &Value| fact["kind"] != "sandbox.ended")
    {
        told.push(first.next().await.unwrap().data);
    }
    let facts = sandbox.facts().await;
    assert_eq!(told[..], facts[..told.len()]);

    for query in ["?after=-1", "?sandbox=sbx_nobody", "?kind=usage", "?after=soon"] {
        let refused = server.client().get(&format!("/v1/events{query}")).await;
        assert_eq!(refused.status, 400, "{query}: {refused:?}");
    }
}

/// However a command ends, and whether or not anybody listens, the ledger says so: once.
async fn every_command_ends_once(server: &Server) {
    let sandbox = server.sandbox().await;
    let fed = sandbox
        .run_with(json!({"argv": ["cat"], "stdin": "hello", "timeout_ms": 60_000}))
        .await;
    let fed = fed.json["command"].as_str().unwrap().to_owned();
    let slow = sandbox
        .run_with(json!({"argv": ["sleep", "1000"], "timeout_ms": 100}))
        .await;
    let slow = slow.json["command"].as_str().unwrap().to_owned();
    // Nobody is attached when it ends.
    let alone = sandbox.background("printf 12345; exit 4").await;
    let exits = sandbox.until_exits(3).await;
    assert_eq!(
        exits[&fed],
        json!({"state": "exited", "exit_code": 0, "signal": null, "bytes_in": 5, "bytes_out": 5})
    );
    assert_eq!(
        exits[&slow],
        json!({"state": "timed_out", "exit_code": null, "signal": null, "bytes_in": 0, "bytes_out": 0})
    );
    assert_eq!(
        exits[&alone],
        json!({"state": "exited", "exit_code": 4, "signal": null, "bytes_in": 0, "bytes_out": 5})
    );

    // Somebody else feeds it than who started it.
    let (mut session, shared) = sandbox
        .started(&json!({"cmd": "read a; echo $a; read b; echo $b", "background": true}))
        .await;
    session.stdin(b"one\n").await;
    session.until_stdout("one\n").await;
    drop(session);
    let mut second = Session::attach(&sandbox.client, &sandbox.id, &shared, 0).await;
    second.stdin(b"three\n").await;
    second.until("exited").await;
    // A foreground command whose caller hangs up is killed.
    let mut left = sandbox
        .exec_events(&json!({"cmd": "echo up; exec sleep 1000"}))
        .await;
    let abandoned = left.find("started").await.data["command"]
        .as_str()
        .unwrap()
        .to_owned();
    left.find("stdout").await;
    drop(left);
    // And one that its sandbox takes along.
    let orphan = sandbox.background("exec sleep 1000").await;
    let exits = sandbox.until_exits(5).await;
    assert_eq!(exits[&shared]["bytes_in"], 10);
    assert_eq!(exits[&abandoned]["signal"], 9);
    assert!(!exits.contains_key(&orphan));
    // What was never started never ends.
    assert_eq!(
        sandbox.exec(&json!({"argv": ["no-such-program"]})).await.status,
        404
    );
    sandbox.kill().await;
    let exits = sandbox.until_exits(6).await;
    assert_eq!(exits[&orphan]["state"], "lost");
    let started = sandbox.facts().await;
    let started = started
        .iter()
        .filter(|fact| fact["kind"] == "command.started")
        .count();
    assert_eq!(started, exits.len());
}

async fn usage_is_summed(server: &Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"disk_backing": "disk"}}))
        .await;
    sandbox.run(&["python3", "-c", "sum(range(5000000))"]).await.ok();
    sandbox.sh("head -c 20M /dev/urandom > ~/kept; sync").await.ok();
    let metrics = sandbox.client.get(&sandbox.path("/metrics")).await.ok();
    assert!(metrics["disk_bytes"].as_u64().unwrap() >= 20 << 20, "{metrics}");
    sandbox.kill().await;
    until_fact(&sandbox, "usage").await;
    let usage = sandbox.client.get(&sandbox.path("/usage")).await.ok();
    let record = sandbox.get().await;
    assert!(usage["cpu_micros"].as_u64().unwrap() > 20_000, "{usage}");
    assert!(usage["wall_ms"].as_u64().unwrap() > 10, "{usage} of {record}");
    assert!(usage["memory_byte_seconds"].as_u64().unwrap() > 0, "{usage}");
    assert!(usage["disk_byte_seconds"].as_u64().unwrap() > 0, "{usage}");
    let whole = server.client().get("/v1/usage").await.ok();
    assert_eq!(whole, usage, "the project has used what its one sandbox has");
}

async fn prometheus_counts(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.assert_works().await;
    let answer = server.client().get("/metrics").await.expect(200);
    assert!(
        answer.headers["content-type"]
            .to_str()
            .unwrap()
            .starts_with("application/openmetrics-text; version=1.0.0")
    );
    let text = answer.text();
    assert!(text.contains("\natoll_sandboxes_running 1\n"), "{text}");
    let available = format!("atoll_tier_available{{isolation=\"{}\"}} 1", server.tier.name());
    assert!(text.contains(&available), "{text}");
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        let (_, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "not a sample: {line}");
    }
    assert!(
        !text.contains(&sandbox.id),
        "labels stay few: no sandbox is named"
    );
}

//! One command in a sandbox of its own, by one request: from a pool, and where there is none to take from.

use std::time::Duration;

use atoll_proof::stream::{Events, chunk_bytes};
use atoll_proof::{Answer, MIB, Sandbox, Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(with atoll_proof::Options::default().args(&["--pool", "base=2"]);
    it_runs_and_leaves_nothing_but_its_story,
    its_events_begin_with_the_sandbox_and_it_stays_if_asked,
    hooks_and_other_sizes_come_before_the_command,
    what_cannot_be_started_leaves_no_sandbox,
    hanging_up_ends_the_sandbox,
    a_long_command_and_its_input_arrive_whole,
    more_at_once_than_the_pool_holds,
);

async fn run(server: &Server, sandbox: &Value, command: Value) -> Answer {
    let body = json!({"sandbox": server.request(sandbox), "command": command});
    server.client().post("/v1/run", &body).await
}

async fn events(server: &Server, sandbox: &Value, command: Value, keep: bool) -> Events {
    let body = json!({"sandbox": server.request(sandbox), "command": command, "keep": keep});
    let request = server
        .client()
        .request(Method::POST, "/v1/run")
        .header("accept", "text/event-stream")
        .json(&body);
    Events::of(server.client().open(request).await)
}

/// Whether it was taken from a pool, by its ledger.
async fn was_warm(sandbox: &Sandbox) -> Value {
    let facts = sandbox.facts().await;
    let started = facts.iter().find(|fact| fact["kind"] == "sandbox.started");
    started.unwrap()["data"]["warm"].clone()
}

async fn it_runs_and_leaves_nothing_but_its_story(server: &Server) {
    server.until_pool_is_full().await;
    let command = json!({"cmd": "echo $MINE; cat; hostname >&2; exit 3", "stdin": "in\n"});
    let ran = run(server, &json!({"env": {"MINE": "yes"}}), command).await.ok();
    let (sandbox, result) = (Sandbox::of(server.client(), &ran["sandbox"]), &ran["result"]);
    assert_eq!(
        (&result["exit_code"], &result["stdout"]),
        (&json!(3), &json!("yes\nin\n")),
        "{ran}"
    );
    assert_eq!(result["stderr"], json!(format!("{}\n", sandbox.bare())));
    assert_eq!(
        (&ran["sandbox"]["isolation"], &ran["sandbox"]["state"]),
        (&json!(server.tier.name()), &json!("running"))
    );
    sandbox.until_state("deleted").await;
    assert_eq!(was_warm(&sandbox).await, true);
    let exits = sandbox.until_exits(1).await;
    let exit = &exits[result["command"].as_str().unwrap()];
    assert_eq!(
        (&exit["exit_code"], &exit["bytes_in"]),
        (&json!(3), &json!(3)),
        "{exit}"
    );
    let kinds = ["command.started", "sandbox.created", "sandbox.ended"];
    let facts = sandbox.facts().await;
    for kind in kinds {
        let count = facts.iter().filter(|fact| fact["kind"] == kind).count();
        assert_eq!(count, 1, "{kind}: {facts:#?}");
    }
}

async fn its_events_begin_with_the_sandbox_and_it_stays_if_asked(server: &Server) {
    server.until_pool_is_full().await;
    let command = json!({"cmd": "echo out; echo kept > ~/file"});
    let all = events(server, &json!({}), command, true).await.rest().await;
    let names: Vec<&str> = all.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["created", "started", "stdout", "exited"]);
    assert_eq!(chunk_bytes(&all[2].data), b"out\n");
    assert_eq!(all[3].data["exit_code"], 0);
    let sandbox = Sandbox::of(server.client(), &all[0].data);
    assert_eq!(was_warm(&sandbox).await, true);
    assert_eq!(sandbox.sh("cat ~/file").await.ok(), "kept\n");
    // The next command's end is told as the first one's is.
    assert_eq!(sandbox.until_exits(2).await.len(), 2);
    sandbox.kill().await;
}

async fn hooks_and_other_sizes_come_before_the_command(server: &Server) {
    server.until_pool_is_full().await;
    let hook = json!([{"argv": ["sh", "-c", "echo hooked > ~/told"]}]);
    let command = json!({"cmd": "cat ~/told; echo $?"});
    let hooked = json!({"hooks": {"on_create": hook}});
    let ran = run(server, &hooked, command.clone()).await.ok();
    assert_eq!(ran["result"]["stdout"], "hooked\n0\n", "{ran}");
    let sandbox = Sandbox::of(server.client(), &ran["sandbox"]);
    assert_eq!(was_warm(&sandbox).await, true);
    let larger = json!({"hooks": {"on_create": hook}, "resources": {"memory_bytes": 200 * MIB}});
    let ran = run(server, &larger, command).await.ok();
    assert_eq!(ran["result"]["stdout"], "hooked\n0\n", "{ran}");
    let other = Sandbox::of(server.client(), &ran["sandbox"]);
    assert_eq!(was_warm(&other).await, false);
    sandbox.until_state("deleted").await;
    other.until_state("deleted").await;
}

async fn what_cannot_be_started_leaves_no_sandbox(server: &Server) {
    server.until_pool_is_full().await;
    let cold = json!({"resources": {"memory_bytes": 200 * MIB}});
    for sandbox in [json!({}), cold] {
        let missing = run(server, &sandbox, json!({"argv": ["no-such-program"]})).await;
        assert_eq!(missing.status, 404, "{missing:?}");
        assert!(missing.text().contains("no-such-program"), "{missing:?}");
        let nobody = run(server, &sandbox, json!({"cmd": "true", "user": "nosuchuser"})).await;
        assert!((400..500).contains(&nobody.status), "{nobody:?}");
    }
    for (command, code) in [
        (json!({}), "missing_field"),
        (json!({"argv": [""]}), "argv_empty"),
        (json!({"cmd": "true", "background": true}), "contradicting_fields"),
    ] {
        run(server, &json!({}), command).await.refused(400, code);
    }
    let unknown = run(server, &json!({"template": "nonesuch"}), json!({"cmd": "true"})).await;
    unknown.refused(404, "template_not_found");
    none_live(server).await;
}

async fn hanging_up_ends_the_sandbox(server: &Server) {
    server.until_pool_is_full().await;
    let mut all = events(
        server,
        &json!({}),
        json!({"cmd": "echo on; exec sleep 1000"}),
        false,
    )
    .await;
    let sandbox = Sandbox::of(server.client(), &all.find("created").await.data);
    all.find("stdout").await;
    assert_eq!(sandbox.state().await, "running");
    drop(all);
    sandbox.until_state("deleted").await;
    assert_eq!(sandbox.until_exits(1).await.len(), 1);
}

async fn a_long_command_and_its_input_arrive_whole(server: &Server) {
    server.until_pool_is_full().await;
    // More than one message to the agent holds, and more than a stream's window.
    let argument = "x".repeat(100_000);
    let script = "printf %s \"$#\" \"$5\" | wc -c; wc -c";
    let argv = [&["sh", "-c", script, "sh"][..], &[argument.as_str(); 5]].concat();
    let command = json!({"argv": argv, "stdin": "y".repeat(400_000)});
    let ran = run(server, &json!({}), command).await.ok();
    assert_eq!(ran["result"]["stdout"], "100001\n400000\n", "{}", ran["sandbox"]);
}

async fn more_at_once_than_the_pool_holds(server: &Server) {
    server.until_pool_is_full().await;
    let one = |number: usize| async move {
        let command = json!({"cmd": format!("echo {number}")});
        run(server, &json!({}), command).await
    };
    let ran = futures_util::future::join_all((0..6).map(one));
    for (number, ran) in ran.await.into_iter().enumerate() {
        assert_eq!(ran.ok()["result"]["stdout"], json!(format!("{number}\n")));
    }
    none_live(server).await;
}

async fn none_live(server: &Server) {
    atoll_proof::wait::until("no sandbox is left", Duration::from_secs(30), || async {
        server.list(&[]).await.is_empty().then_some(())
    })
    .await;
}

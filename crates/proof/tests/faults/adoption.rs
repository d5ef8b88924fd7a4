//! Killed or stopped, the next server takes over what runs.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_proof::stream::{Events, Session};
use atoll_proof::{Sandbox, Server, Value, host, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    a_killed_server_is_succeeded,
    again_and_again,
    a_stopped_server_is_succeeded,
    foreground_commands_end_with_their_server,
    a_run_whose_server_dies_is_a_sandbox_like_any_other,
    commands_that_end_without_a_server_are_recorded,
    a_command_with_a_key_is_found_by_the_next_server,
    the_channel_survives_a_torn_message,
    one_server_at_a_time,
);

/// A command that counts without end, and has begun.
async fn counting(sandbox: &Sandbox) -> String {
    let command = sandbox
        .background("i=0; while :; do i=$((i + 1)); echo $i; sleep 0.02; done")
        .await;
    sandbox.until_logged(&command, "3\n").await;
    command
}

/// Asserts that what it wrote is one count from 1 without a gap, and that it goes on.
async fn assert_still_counting(sandbox: &Sandbox, command: &str) {
    let before = sandbox.logs(command).await;
    let numbers: Vec<u64> = before.lines().map(|line| line.parse().unwrap()).collect();
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, expected, "nothing was lost and nothing came twice");
    let next = format!("\n{}\n", numbers.len() + 3);
    sandbox.until_logged(command, &next).await;
}

async fn a_killed_server_is_succeeded(server: &mut Server) {
    let sandbox = server
        .sandbox_with(&json!({"labels": {"keep": "me"}, "env": {"KEPT": "yes"}}))
        .await;
    sandbox.write("/tmp/kept", b"content").await;
    let command = counting(&sandbox).await;
    sandbox
        .sh("mkdir -p /tmp/www && echo hello > /tmp/www/index.html")
        .await
        .ok();
    sandbox
        .background("cd /tmp/www && exec python3 -m http.server 8000 --bind 127.0.0.1")
        .await;
    let listening = "until curl -so /dev/null http://127.0.0.1:8000/; do sleep 0.05; done";
    sandbox.sh(listening).await.ok();
    let access = sandbox.client.get(&sandbox.path("/ports/8000")).await.ok();
    let (before, listed) = (sandbox.get().await, sandbox.command(&command).await);
    let held = server.held();
    server.kill_9();
    let (held_by, left) = (&held.cgroups, server.held());
    assert!(
        left.cgroups == *held_by && !left.processes.is_empty(),
        "instances do not depend on the server"
    );
    server.start_again().await;

    let sandbox = server.again(&sandbox);
    assert_eq!(
        sandbox.get().await,
        before,
        "the same instance, the same deadline"
    );
    assert_eq!(server.held().instances, held.instances);
    let adopted = sandbox.command(&command).await;
    assert_eq!(
        (&adopted["pid"], &adopted["state"]),
        (&listed["pid"], &json!("running"))
    );
    assert_still_counting(&sandbox, &command).await;
    assert_eq!(sandbox.read("/tmp/kept").await, b"content");
    assert_eq!(sandbox.sh("echo $KEPT").await.ok(), "yes\n");
    // A port's token is as good as before.
    let own = sandbox.client.authority().rsplit_once(':').unwrap().1.to_owned();
    let client = sandbox.client.with_key(None);
    let request = client
        .request(Method::GET, "/")
        .header("host", format!("8000-{}.localhost:{own}", sandbox.bare()))
        .header("x-atoll-token", access["token"].as_str().unwrap());
    assert_eq!(client.send(request).await.expect(200).text(), "hello\n");
    // And stdin, and signals.
    sandbox
        .client
        .post(
            &sandbox.path(&format!("/commands/{command}/signal")),
            &json!({"signal": 15}),
        )
        .await
        .expect(204);
    assert_eq!(sandbox.until_ended(&command).await["signal"], 15);
}

async fn again_and_again(server: &mut Server) {
    let first = server.sandbox().await;
    let (_session, cat) = first.started(&json!({"argv": ["cat"], "background": true})).await;
    let command = counting(&first).await;
    for round in 0..5 {
        server.kill_9();
        server.start_again().await;
        let sandbox = server.again(&first);
        assert_still_counting(&sandbox, &command).await;
        let mut session = Session::attach(&sandbox.client, &sandbox.id, &cat, 0).await;
        session.stdin(format!("round {round}\n").as_bytes()).await;
        session.until_stdout(&format!("round {round}\n")).await;
    }
    let sandbox = server.again(&first);
    assert_eq!(
        sandbox.logs(&cat).await,
        "round 0\nround 1\nround 2\nround 3\nround 4\n"
    );
    let started = sandbox
        .facts()
        .await
        .iter()
        .filter(|fact| fact["kind"] == "sandbox.started")
        .count();
    assert_eq!(started, 1, "adoption is not a start");
}

async fn a_stopped_server_is_succeeded(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let command = counting(&sandbox).await;
    let before = sandbox.get().await;
    let status = server.stop();
    assert!(status.success(), "{status}");
    assert!(
        !server.held().is_nothing(),
        "stopping the server does not stop its sandboxes"
    );
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    assert_eq!(sandbox.get().await, before);
    assert_still_counting(&sandbox, &command).await;
    // A request that is under way when the server stops gets an answer or an error, and does not keep it from stopping.
    let waiting = tokio::spawn({
        let sandbox = sandbox.clone();
        async move {
            let request = sandbox.client.request(Method::POST, &sandbox.path("/exec"));
            sandbox
                .client
                .try_send(request.json(&json!({"cmd": "sleep 1000"})))
                .await
        }
    });
    atoll_proof::wait::until("it runs", Duration::from_secs(20), || async {
        (sandbox.commands().await.len() >= 2).then_some(())
    })
    .await;
    let began = std::time::Instant::now();
    assert!(server.stop().success());
    assert!(began.elapsed() < Duration::from_secs(20));
    let _answer_or_error = waiting.await.unwrap();
    server.start_again().await;
    server.again(&sandbox).assert_works().await;
}

/// Nobody can attach to a foreground command, so nobody must pay for one whose caller is gone.
async fn foreground_commands_end_with_their_server(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let mut events = sandbox
        .exec_events(&json!({"cmd": "echo up; exec sleep 7531"}))
        .await;
    events.find("stdout").await;
    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    sandbox.until_no_process("sleep 7531").await;
    sandbox.assert_works().await;
}

/// Its sandbox was to go with its command, and whoever saw to that is gone: what is left is its timeout.
async fn a_run_whose_server_dies_is_a_sandbox_like_any_other(server: &mut Server) {
    let body = json!({
        "sandbox": server.request(&json!({"timeout_ms": 60_000})),
        "command": {"cmd": "echo up; exec sleep 8642"},
    });
    let request = server.client().request(Method::POST, "/v1/run");
    let request = request.header("accept", "text/event-stream").json(&body);
    let mut events = Events::of(server.client().open(request).await);
    let sandbox = Sandbox::of(server.client(), &events.find("created").await.data);
    events.find("stdout").await;
    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    sandbox.until_no_process("sleep 8642").await;
    assert_eq!(sandbox.until_exits(1).await.len(), 1);
    assert!(sandbox.get().await["deadline"].is_string());
    sandbox.assert_works().await;
    sandbox.kill().await;
}

/// Some commands end before the server is killed, some while there is none, some after: each gets one end in the ledger.
async fn commands_that_end_without_a_server_are_recorded(server: &mut Server) {
    let first = server.sandbox().await;
    let mut events = first
        .exec_events(&json!({"cmd": "echo up; exec sleep 1000"}))
        .await;
    let foreground = events.find("started").await.data["command"]
        .as_str()
        .unwrap()
        .to_owned();
    events.find("stdout").await;
    atoll_proof::wait::until("its start is on record", Duration::from_secs(20), || async {
        let facts = first.facts().await;
        let of_it = |fact: &&Value| fact["data"]["command"] == json!(foreground);
        facts.iter().find(of_it).map(|_| ())
    })
    .await;
    let mut expected = BTreeMap::new();
    for number in 1..=20 {
        let line = format!("sleep {}.{}; exit {number}", number / 10, number % 10);
        expected.insert(first.background(&line).await, number);
    }
    let endless = first.background("exec sleep 1000").await;
    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&first);
    let exits = sandbox.until_exits(21).await;
    for (command, code) in &expected {
        assert_eq!(exits[command]["state"], "exited");
        assert_eq!(exits[command]["exit_code"], json!(code));
    }
    assert_eq!(exits[&foreground]["signal"], 9, "it ends with its server");

    // Another server finds the same commands in the sandbox, and their ends in the ledger.
    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&first);
    let later = sandbox.background("exit 21").await;
    let exits = sandbox.until_exits(22).await;
    assert_eq!(exits[&later]["exit_code"], 21);
    assert!(!exits.contains_key(&endless), "it runs");
    // Its sandbox goes while there is no server.
    server.kill_9();
    host::cgroup_kill(server.cgroup());
    server.start_again().await;
    let sandbox = server.again(&first);
    sandbox.until_state("failed").await;
    let exits = sandbox.until_exits(23).await;
    assert_eq!(exits[&endless]["state"], "lost");
}

/// Killed in the middle of moving bytes both ways: the next server finds the thread again.
async fn the_channel_survives_a_torn_message(server: &mut Server) {
    let first = server.sandbox().await;
    first.sh("head -c 30M /dev/zero > /tmp/big").await.ok();
    for _ in 0..3 {
        let sandbox = server.again(&first);
        let mut busy = Vec::new();
        for number in 0..4 {
            let sandbox = sandbox.clone();
            busy.push(tokio::spawn(async move {
                let upload = sandbox.client.request(
                    Method::PUT,
                    &sandbox.path(&format!("/files/content?path=/tmp/up{number}")),
                );
                let _broken = sandbox.client.try_send(upload.body(vec![b'x'; 40 << 20])).await;
            }));
        }
        for _ in 0..4 {
            let sandbox = sandbox.clone();
            busy.push(tokio::spawn(async move {
                let download = sandbox
                    .client
                    .request(Method::GET, &sandbox.path("/files/content?path=/tmp/big"));
                let _broken = sandbox.client.try_send(download).await;
            }));
        }
        // All of it is under way when the first bytes of an upload have arrived.
        atoll_proof::wait::until("bytes flow", Duration::from_secs(20), || async {
            let listed = sandbox.sh("ls -A /tmp | grep -c up").await.stdout;
            (listed.trim().parse::<u32>().unwrap_or(0) >= 1).then_some(())
        })
        .await;
        server.kill_9();
        for task in busy {
            task.await.unwrap();
        }
        server.start_again().await;
        let sandbox = server.again(&first);
        sandbox.assert_works().await;
        assert_eq!(sandbox.stat("/tmp/big").await["size_bytes"], 30 << 20);
        // Each upload is there as a whole or not at all.
        for entry in sandbox.list("/tmp", 1).await {
            if entry["path"].as_str().unwrap().starts_with("/tmp/up") {
                assert_eq!(entry["size_bytes"], 40 << 20, "{entry}");
            }
        }
        sandbox.sh("rm -f /tmp/up*").await.ok();
    }
}

async fn one_server_at_a_time(server: &mut Server) {
    let second = std::process::Command::new(atoll_proof::binary())
        .arg("--data")
        .arg(server.data())
        .args(["server", "--listen", "127.0.0.1:0"])
        .output()
        .unwrap();
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(
        text.contains("in use") && text.contains(&server.pid().to_string()),
        "{text}"
    );
    server.sandbox().await.assert_works().await;
}

/// As a step of a durable workflow does it: asked again, it is not done again.
async fn a_command_with_a_key_is_found_by_the_next_server(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let body = json!({"cmd": "echo ran | tee -a /tmp/times; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo over"});
    let ask = |sandbox: &Sandbox| {
        let request = sandbox
            .client
            .request(Method::POST, &sandbox.path("/exec"))
            .header("idempotency-key", "run/3")
            .json(&body);
        let client = sandbox.client.clone();
        async move { client.try_send(request).await }
    };
    let first = tokio::spawn(ask(&sandbox));
    sandbox
        .sh("while [ ! -e /tmp/times ]; do sleep 0.01; done")
        .await
        .ok();
    server.kill_9();
    assert!(first.await.unwrap().is_err(), "its connection is gone");
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    sandbox.write("/tmp/go", b"").await;
    let found = ask(&sandbox).await.unwrap().ok();
    assert_eq!(
        (&found["stdout"], &found["exit_code"]),
        (&json!("ran\nover\n"), &json!(0))
    );
    assert_eq!(sandbox.read("/tmp/times").await, b"ran\n");
}

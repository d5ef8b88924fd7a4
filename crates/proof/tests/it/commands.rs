//! Commands that go on by themselves: listed, followed, replayed, signalled.

use atoll_proof::stream::{Events, Session, chunk_bytes};
use atoll_proof::{Server, Value, json, on_every_tier};

on_every_tier!(
    a_background_command_is_listed_and_read,
    output_is_replayed_from_any_offset,
    following_ends_with_the_command,
    attaching_reaches_stdin,
    signals_reach_the_whole_group,
    the_log_keeps_the_latest,
    unknown_commands_are_refused,
    an_idempotency_key_finds_the_first_command,
);

async fn a_background_command_is_listed_and_read(server: &Server) {
    let sandbox = server.sandbox().await;
    let command = sandbox
        .background("echo begun; echo oops >&2; while [ ! -e /tmp/go ]; do sleep 0.01; done; exit 7")
        .await;
    let logs = sandbox.until_logged(&command, "oops").await;
    assert_eq!(logs, "begun\noops\n");
    let listed = sandbox.command(&command).await;
    assert_eq!(
        (&listed["state"], &listed["pty"]),
        (&json!("running"), &json!(false))
    );
    assert_eq!(listed["argv"][0], "/bin/bash");
    assert_eq!(listed["output_bytes"], 11);
    assert!(listed["ended_at"].is_null() && listed["started_at"].is_string());

    sandbox.write("/tmp/go", b"").await;
    let ended = sandbox.until_ended(&command).await;
    assert_eq!(
        (&ended["state"], &ended["exit_code"]),
        (&json!("exited"), &json!(7)),
        "{ended}"
    );
    assert!(ended["ended_at"].is_string());
    assert_eq!(
        sandbox.logs(&command).await,
        "begun\noops\n",
        "what it wrote stays readable"
    );
}

async fn output_is_replayed_from_any_offset(server: &Server) {
    let sandbox = server.sandbox().await;
    let command = sandbox.background("printf 0123456789; printf abc >&2").await;
    sandbox.until_ended(&command).await;
    let path = sandbox.path(&format!("/commands/{command}/logs"));
    for (from, expected) in [(0, "0123456789abc"), (4, "456789abc"), (11, "bc"), (13, "")] {
        let answer = sandbox
            .client
            .get(&format!("{path}?from={from}"))
            .await
            .expect(200);
        assert_eq!(answer.text(), expected, "from {from}");
    }
    let mut session = Session::attach(&sandbox.client, &sandbox.id, &command, 8).await;
    assert_eq!(session.until("attached").await["command"], json!(command));
    assert_eq!(session.until("exited").await["exit_code"], 0);
    assert_eq!(
        (session.stdout.as_slice(), session.stderr.as_slice()),
        (&b"89"[..], &b"abc"[..])
    );
}

async fn following_ends_with_the_command(server: &Server) {
    let sandbox = server.sandbox().await;
    let line = "for i in 1 2 3; do echo line $i; while [ ! -e /tmp/go$i ]; do sleep 0.01; done; done";
    let command = sandbox.background(line).await;
    let path = sandbox.path(&format!("/commands/{command}/logs?follow=true"));
    let request = sandbox
        .client
        .request(reqwest::Method::GET, &path)
        .header("accept", "text/event-stream");
    let mut events = Events::of(sandbox.client.open(request).await);
    for number in 1..=3 {
        let event = events.find("stdout").await;
        assert_eq!(chunk_bytes(&event.data), format!("line {number}\n").as_bytes());
        sandbox.write(format!("/tmp/go{number}"), b"").await;
    }
    let exited = events.next().await.unwrap();
    assert_eq!(
        (exited.name.as_str(), &exited.data["exit_code"]),
        ("exited", &json!(0))
    );
    assert_eq!(events.next().await, None, "after the exit nothing follows");
}

async fn attaching_reaches_stdin(server: &Server) {
    let sandbox = server.sandbox().await;
    let (mut first, command) = sandbox
        .started(&json!({"argv": ["cat"], "background": true}))
        .await;
    first.stdin(b"one\n").await;
    first.until_stdout("one\n").await;
    drop(first);
    assert_eq!(
        sandbox.command(&command).await["state"],
        "running",
        "hanging up leaves a background command alone"
    );

    let mut second = Session::attach(&sandbox.client, &sandbox.id, &command, 0).await;
    second.until_stdout("one\n").await;
    second.stdin(b"two\n").await;
    second.until_stdout("one\ntwo\n").await;
    second.close_stdin().await;
    assert_eq!(second.until("exited").await["exit_code"], 0);
    assert_eq!(second.text(), "one\ntwo\n");
}

async fn signals_reach_the_whole_group(server: &Server) {
    let sandbox = server.sandbox().await;
    let command = sandbox.background("sleep 5432109 & echo up; wait").await;
    sandbox.until_logged(&command, "up").await;
    let path = sandbox.path(&format!("/commands/{command}/signal"));
    sandbox
        .client
        .post(&path, &json!({"signal": "SIGTERM"}))
        .await
        .expect(204);
    let ended = sandbox.until_ended(&command).await;
    assert_eq!(
        (&ended["state"], &ended["signal"]),
        (&json!("signaled"), &json!(15)),
        "{ended}"
    );
    sandbox.until_no_process("sleep 5432109").await;

    let trapping = sandbox
        .background("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.01; done")
        .await;
    sandbox.until_logged(&trapping, "ready").await;
    let path = sandbox.path(&format!("/commands/{trapping}/signal"));
    sandbox
        .client
        .post(&path, &json!({"signal": 10}))
        .await
        .expect(204);
    assert_eq!(sandbox.until_ended(&trapping).await["exit_code"], 5);
    assert!(sandbox.logs(&trapping).await.contains("caught"));
    for signal in [json!(0), json!(65), json!(-9), json!("SIGNOPE")] {
        sandbox
            .client
            .post(&path, &json!({ "signal": signal }))
            .await
            .expect(400)
            .error();
    }
}

/// The log is a ring: a command that nobody reads never blocks, and a late reader is told what it missed.
async fn the_log_keeps_the_latest(server: &Server) {
    let sandbox = server.sandbox().await;
    let command = sandbox.background("seq 1 1000000; echo the-end").await;
    let ended = sandbox.until_ended(&command).await;
    let written = ended["output_bytes"].as_u64().unwrap();
    assert_eq!(written, 6_888_896 + 8);
    let path = sandbox.path(&format!("/commands/{command}/logs"));
    let request = sandbox
        .client
        .request(reqwest::Method::GET, &path)
        .header("accept", "text/event-stream");
    let events = Events::of(sandbox.client.open(request).await).rest().await;
    let dropped: u64 = events
        .iter()
        .filter_map(|event| event.data["bytes"].as_u64())
        .sum();
    let mut kept = Vec::new();
    for event in events.iter().filter(|event| event.name == "stdout") {
        kept.extend(chunk_bytes(&event.data));
    }
    assert_eq!(
        dropped + kept.len() as u64,
        written,
        "what is not there is counted"
    );
    assert!(
        kept.len() >= 512 * 1024,
        "the log holds a fair amount: {}",
        kept.len()
    );
    assert!(kept.ends_with(b"1000000\nthe-end\n"));
}

async fn unknown_commands_are_refused(server: &Server) {
    let sandbox = server.sandbox().await;
    let unknown = "cmd_aaaaaaaaaaaaaaaaaaaa";
    let logs = sandbox
        .client
        .get(&sandbox.path(&format!("/commands/{unknown}/logs")))
        .await;
    logs.refused(404, "command_not_found");
    let signal = sandbox
        .client
        .post(
            &sandbox.path(&format!("/commands/{unknown}/signal")),
            &json!({"signal": 9}),
        )
        .await;
    assert_eq!(signal.status, 404, "{signal:?}");
    sandbox
        .client
        .get(&sandbox.path("/commands/nonsense/logs"))
        .await
        .expect(400)
        .error();
}

async fn an_idempotency_key_finds_the_first_command(server: &Server) {
    let sandbox = server.sandbox().await;
    let exec = |key: &'static str, body: Value| {
        let request = sandbox
            .client
            .request(reqwest::Method::POST, &sandbox.path("/exec"))
            .header("idempotency-key", key)
            .json(&body);
        sandbox.client.send(request)
    };
    // Who comes while it is being started is asked to come again.
    let once = || async {
        loop {
            let answer = exec(
                "once",
                json!({"cmd": "echo ran | tee -a /tmp/times; echo oops >&2; exit 3"}),
            )
            .await;
            match answer.status {
                429 => assert_eq!(answer.error()["code"], "command_begins"),
                _ => return answer.expect(200).json(),
            }
        }
    };
    let mut answers = futures_util::future::join_all((0..4).map(|_| once())).await;
    answers.push(once().await);
    for answer in &answers {
        assert_eq!(answer["command"], answers[0]["command"]);
        assert_eq!(
            (&answer["stdout"], &answer["stderr"], &answer["exit_code"]),
            (&json!("ran\n"), &json!("oops\n"), &json!(3))
        );
    }
    assert_eq!(sandbox.read("/tmp/times").await, b"ran\n");

    exec("once", json!({"cmd": "echo something else"}))
        .await
        .refused(409, "idempotency_conflict");
    let second = exec("twice", json!({"cmd": "echo ran"})).await.ok();
    assert_ne!(second["command"], answers[0]["command"]);
    exec("thrice", json!({"cmd": "cat", "stdin": "x"}))
        .await
        .refused(400, "idempotency_key_with_input");

    // Hanging up does not end it: who comes again wants its end.
    let line = "echo begun; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo over";
    let body = json!({"cmd": line});
    let request = sandbox
        .client
        .request(reqwest::Method::POST, &sandbox.path("/exec"))
        .header("idempotency-key", "held")
        .header("accept", "text/event-stream")
        .json(&body);
    let mut events = Events::of(sandbox.client.open(request).await);
    events.find("stdout").await;
    drop(events);
    sandbox.write("/tmp/go", b"").await;
    assert_eq!(exec("held", body).await.ok()["stdout"], "begun\nover\n");
}

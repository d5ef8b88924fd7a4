//! Commands that are run to their end, or followed as they go.

use std::time::{Duration, Instant};

use atoll_proof::stream::chunk_bytes;
use atoll_proof::{Server, from_base64, json, on_every_tier, to_base64};

on_every_tier!(
    output_and_errors_come_apart,
    exit_codes_and_signals_are_told,
    stdin_is_read_to_its_end,
    directory_environment_and_user_are_chosen,
    output_that_is_not_text_survives,
    what_cannot_be_started_says_why,
    a_slow_command_is_killed_with_its_children,
    events_come_as_they_happen,
    hanging_up_ends_a_foreground_command,
    large_output_is_cut_and_counted,
    many_commands_run_side_by_side,
);

async fn output_and_errors_come_apart(server: &Server) {
    let sandbox = server.sandbox().await;
    let output = sandbox.sh("echo out; echo err >&2; printf tail").await;
    assert_eq!(
        (output.stdout.as_str(), output.stderr.as_str()),
        ("out\ntail", "err\n")
    );
    assert_eq!(output.code, Some(0));
    let json = &output.json;
    assert!(
        json["command"].as_str().unwrap().starts_with("cmd_") && json["pid"].as_u64().unwrap() > 1,
        "{json}"
    );
    assert_eq!(
        (json["stdout_bytes"].as_u64(), json["stdout_truncated"].as_bool()),
        (Some(8), Some(false))
    );
    assert_eq!(json["stderr_bytes"], 4);
    assert!(json["duration_ms"].is_u64());

    let python = sandbox
        .run(&[
            "python3",
            "-c",
            "import sys; print(6 * 7); print('no', file=sys.stderr)",
        ])
        .await;
    assert_eq!((python.stdout.as_str(), python.stderr.as_str()), ("42\n", "no\n"));
    let node = sandbox
        .run(&["node", "-e", "console.log([1,2,3].map(x => x * x).join())"])
        .await;
    assert_eq!(node.ok(), "1,4,9\n");
}

async fn exit_codes_and_signals_are_told(server: &Server) {
    let sandbox = server.sandbox().await;
    for code in [0, 1, 42, 255] {
        let output = sandbox.sh(&format!("exit {code}")).await;
        assert_eq!((output.code, output.signal), (Some(code), None));
    }
    for signal in [9, 15, 11] {
        let output = sandbox.sh(&format!("kill -{signal} $$")).await;
        assert_eq!(
            (output.code, output.signal, output.timed_out),
            (None, Some(signal), false),
            "{output:?}"
        );
    }
    // Background children that outlive the shell do not keep the answer waiting once they let go of the output.
    let began = Instant::now();
    assert_eq!(
        sandbox.sh("sleep 100 >/dev/null 2>&1 & echo done").await.ok(),
        "done\n"
    );
    assert!(began.elapsed() < Duration::from_secs(20));
}

async fn stdin_is_read_to_its_end(server: &Server) {
    let sandbox = server.sandbox().await;
    let upper = sandbox
        .run_with(json!({"argv": ["tr", "a-z", "A-Z"], "stdin": "hello\nwörld"}))
        .await;
    assert_eq!(upper.ok(), "HELLO\nWöRLD");
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let body = json!({"argv": ["sha256sum"], "stdin_base64": to_base64(&bytes)});
    let same =
        "python3 -c 'import sys; sys.stdout.buffer.write((bytes(range(256)) * 1172)[:300000])' | sha256sum";
    let expected = sandbox.sh(same);
    assert_eq!(sandbox.run_with(body).await.ok(), expected.await.ok());
    assert_eq!(
        sandbox.sh("cat | wc -c").await.ok().trim(),
        "0",
        "without stdin there is nothing to read"
    );
    let unread = json!({"argv": ["true"], "stdin_base64": to_base64(&vec![b'x'; 500_000])});
    assert_eq!(
        sandbox.run_with(unread).await.code,
        Some(0),
        "a command need not read its stdin"
    );
}

async fn directory_environment_and_user_are_chosen(server: &Server) {
    let sandbox = server.sandbox().await;
    let home = sandbox.sh("pwd; echo $HOME; id -un").await.ok();
    let home: Vec<&str> = home.lines().collect();
    assert_eq!(home[0], home[1], "commands start in the user's home");
    assert_ne!(home[2], "root", "and as an ordinary user");

    let body = json!({"cmd": "pwd; echo $COLOUR; id -u", "cwd": "/usr/share", "env": {"COLOUR": "blue"}, "user": "root"});
    assert_eq!(sandbox.run_with(body).await.ok(), "/usr/share\nblue\n0\n");
    let numeric = sandbox
        .run_with(json!({"cmd": "id -u; id -g", "user": "12345:23456"}))
        .await;
    assert_eq!(numeric.ok(), "12345\n23456\n");
    let by_name = sandbox.run_with(json!({"cmd": "id -un", "user": "nobody"})).await;
    assert_eq!(by_name.ok(), "nobody\n");
    sandbox
        .exec(&json!({"cmd": "true", "user": "nosuchuser"}))
        .await
        .error();
    sandbox
        .exec(&json!({"cmd": "true", "cwd": "/no/such/place"}))
        .await
        .error();
    sandbox.assert_works().await;
}

async fn output_that_is_not_text_survives(server: &Server) {
    let sandbox = server.sandbox().await;
    let output = sandbox.sh(r"printf '\xff\x00\xfeend'").await;
    assert_eq!(
        from_base64(output.json["stdout_base64"].as_str().unwrap()),
        b"\xff\x00\xfeend"
    );
    let mut events = sandbox
        .exec_events(&json!({"cmd": r"printf '\377\000'; printf 'grün'"}))
        .await;
    let mut bytes = Vec::new();
    loop {
        let event = events.next().await.unwrap();
        match event.name.as_str() {
            "stdout" => bytes.extend(chunk_bytes(&event.data)),
            "exited" => break,
            _ => {}
        }
    }
    assert_eq!(bytes, [&[0xff, 0][..], "grün".as_bytes()].concat());
}

async fn what_cannot_be_started_says_why(server: &Server) {
    let sandbox = server.sandbox().await;
    let missing = sandbox.exec(&json!({"argv": ["no-such-program"]})).await;
    let detail = missing.error();
    assert_eq!(missing.status, 404, "{missing:?}");
    assert!(
        detail["message"].as_str().unwrap().contains("no-such-program"),
        "{detail}"
    );
    sandbox.write("/tmp/data", b"not a program").await;
    let denied = sandbox.exec(&json!({"argv": ["/tmp/data"]})).await;
    assert_eq!(denied.status, 403, "{denied:?}");
    for body in [
        json!({}),
        json!({"argv": []}),
        json!({"argv": ["a"], "cmd": "b"}),
        json!({"argv": [""]}),
    ] {
        let refused = sandbox.exec(&body).await;
        assert_eq!(refused.status, 400, "{body}: {refused:?}");
        refused.error();
    }
    sandbox.assert_works().await;
}

async fn a_slow_command_is_killed_with_its_children(server: &Server) {
    let sandbox = server.sandbox().await;
    let began = Instant::now();
    // The marker is an argument, so that it can be found in the list of processes.
    let body = json!({"cmd": "echo begun; sleep 7654321 & sleep 7654321", "timeout_ms": 300});
    let output = sandbox.run_with(body).await;
    assert!(output.timed_out, "{output:?}");
    assert_eq!((output.code, output.stdout.as_str()), (None, "begun\n"));
    assert!(began.elapsed() < Duration::from_secs(20));
    let left = sandbox.count_processes("sleep 7654321").await;
    assert_eq!(left, 0, "the whole process group is gone");
}

async fn events_come_as_they_happen(server: &Server) {
    let sandbox = server.sandbox().await;
    let line = "echo one; while [ ! -e /tmp/go ]; do sleep 0.01; done; echo two >&2; exit 3";
    let mut events = sandbox.exec_events(&json!({ "cmd": line })).await;
    let started = events.next().await.unwrap();
    assert_eq!(started.name, "started");
    assert!(started.data["command"].as_str().unwrap().starts_with("cmd_"));
    let first = events.find("stdout").await;
    assert_eq!(chunk_bytes(&first.data), b"one\n");
    assert_eq!(
        first.id.as_deref(),
        Some("4"),
        "the id of an event is where to go on in the log"
    );
    // The command waits for this: its first output came before its end.
    sandbox.write("/tmp/go", b"").await;
    let rest = events.rest().await;
    let names: Vec<_> = rest.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["stderr", "exited"], "{rest:?}");
    assert_eq!(chunk_bytes(&rest[0].data), b"two\n");
    assert_eq!(rest[1].data["exit_code"], 3);
}

async fn hanging_up_ends_a_foreground_command(server: &Server) {
    let sandbox = server.sandbox().await;
    let mut events = sandbox
        .exec_events(&json!({"cmd": "echo here; exec sleep 8765432"}))
        .await;
    events.find("stdout").await;
    assert_eq!(sandbox.count_processes("sleep 8765432").await, 1);
    drop(events);
    sandbox.until_no_process("sleep 8765432").await;
}

async fn large_output_is_cut_and_counted(server: &Server) {
    let sandbox = server.sandbox().await;
    let size = 20 * 1024 * 1024;
    let output = sandbox
        .sh(&format!("head -c {size} /dev/zero | tr '\\0' x"))
        .await;
    assert_eq!(output.json["stdout_bytes"], size);
    assert_eq!(output.json["stdout_truncated"], true);
    assert_eq!(output.stdout.len(), 4 * 1024 * 1024);
    assert_eq!(output.code, Some(0));
    // As a stream, all of it arrives.
    let body = json!({"cmd": format!("head -c {size} /dev/zero | tr '\\0' x")});
    let mut events = sandbox.exec_events(&body).await;
    let mut total = 0;
    while let Some(event) = events.next().await {
        if event.name == "stdout" {
            total += chunk_bytes(&event.data).len();
        }
    }
    assert_eq!(total, size);
}

async fn many_commands_run_side_by_side(server: &Server) {
    let sandbox = server.sandbox().await;
    let began = Instant::now();
    let runs = (0..16).map(|number| {
        let sandbox = &sandbox;
        async move { sandbox.sh(&format!("sleep 1; echo {number}")).await.ok() }
    });
    let outputs = futures_util::future::join_all(runs).await;
    for (number, output) in outputs.iter().enumerate() {
        assert_eq!(output.trim(), number.to_string());
    }
    assert!(
        began.elapsed() < Duration::from_secs(14),
        "they ran at the same time: {:?}",
        began.elapsed()
    );
}

//! Commands over a WebSocket: streams both ways, terminals, control messages.

use atoll_proof::stream::Received;
use atoll_proof::{Server, json, on_every_tier};

on_every_tier!(
    streams_flow_both_ways,
    a_terminal_has_a_size_that_changes,
    a_terminal_passes_on_keys,
    leaving_a_terminal_hangs_up_on_the_shell,
    signals_can_be_sent_in_the_middle,
    nonsense_is_answered_and_closed,
);

async fn streams_flow_both_ways(server: &Server) {
    let sandbox = server.sandbox().await;
    let (mut session, command) = sandbox
        .started(&json!({"cmd": "echo first; cat; echo last >&2; exit 4"}))
        .await;
    assert!(command.starts_with("cmd_"), "{command}");
    session.until_stdout("first\n").await;
    session.stdin(b"to you\n").await;
    session.until_stdout("to you\n").await;
    session.close_stdin().await;
    let exited = session.until("exited").await;
    assert_eq!(
        exited,
        json!({"exit_code": 4, "signal": null, "timed_out": false})
    );
    assert_eq!(
        (session.text().as_str(), session.stderr.as_slice()),
        ("first\nto you\n", &b"last\n"[..])
    );
    assert_eq!(session.next().await, Received::Closed);
}

async fn a_terminal_has_a_size_that_changes(server: &Server) {
    let sandbox = server.sandbox().await;
    let mut session = sandbox.terminal(30, 100, "$ ").await;
    session.stdin(b"tty; stty size\n").await;
    session.until_stdout("30 100").await;
    assert!(session.text().contains("/dev/pts/"), "{}", session.text());
    // Before each prompt the shell reads the size and writes it back, which would undo a change in between.
    session.until_stdout_times("$ ", 2).await;
    session
        .control(&json!({"resize": {"rows": 41, "cols": 132}}))
        .await;
    // The shell runs this after the size has changed, because both travel on one stream.
    session.stdin(b"stty size\n").await;
    session.until_stdout("41 132").await;
    session.stdin(b"exit 6\n").await;
    assert_eq!(session.until("exited").await["exit_code"], 6);
    assert!(session.stderr.is_empty(), "all output of a terminal is stdout");
}

async fn a_terminal_passes_on_keys(server: &Server) {
    let sandbox = server.sandbox().await;
    let mut session = sandbox.terminal(24, 80, "<prompt>").await;
    // What announces itself is in the foreground by then; the quotes keep the echo of the line from saying the same.
    session
        .stdin(b"sh -c 'echo sleep\"\"ing; exec sleep 4321098'\n")
        .await;
    session.until_stdout("sleeping\r\n").await;
    // A terminal forgets what was typed when it is interrupted, so the next line waits for the next prompt.
    session.stdin(b"\x03").await;
    session.until_stdout_times("<prompt>", 2).await;
    session.stdin(b"echo code $?\n").await;
    session.until_stdout("code 130").await;
    session.until_stdout_times("<prompt>", 3).await;
    session
        .stdin(b"sh -c 'echo read\"\"ing; exec cat'; echo after\n")
        .await;
    session.until_stdout("reading\r\n").await;
    session.stdin(b"\x04").await;
    session.until_stdout("after\r\n").await;
    session.until_stdout_times("<prompt>", 4).await;
    session.stdin(b"\x04").await;
    session.until("exited").await;
}

async fn leaving_a_terminal_hangs_up_on_the_shell(server: &Server) {
    let sandbox = server.sandbox().await;
    let request = json!({"cmd": "echo here; exec sleep 6543210", "pty": {"rows": 24, "cols": 80}});
    let mut session = sandbox.session(&request).await;
    session.until_stdout("here").await;
    drop(session);
    sandbox.until_no_process("sleep 6543210").await;
}

async fn signals_can_be_sent_in_the_middle(server: &Server) {
    let sandbox = server.sandbox().await;
    let mut session = sandbox
        .session(&json!({"cmd": "trap 'echo got; exit 9' INT; echo ready; while :; do sleep 0.01; done"}))
        .await;
    session.until_stdout("ready").await;
    session.control(&json!({"signal": "INT"})).await;
    assert_eq!(session.until("exited").await["exit_code"], 9);
    assert!(session.text().contains("got"));
}

async fn nonsense_is_answered_and_closed(server: &Server) {
    let sandbox = server.sandbox().await;
    for first in [
        json!({"colour": "red"}),
        json!({"cmd": "true", "argv": ["x"]}),
        json!([1]),
        json!("{"),
    ] {
        let mut session = sandbox.session(&first).await;
        match session.next().await {
            Received::Control(value) => assert!(value["error"]["code"].is_string(), "{first}: {value}"),
            other => panic!("{first}: {other:?}"),
        }
        assert_eq!(session.next().await, Received::Closed);
    }
    let (mut session, _) = sandbox.started(&json!({"cmd": "exec cat"})).await;
    session.control(&json!({"dance": true})).await;
    match session.next().await {
        Received::Control(value) => assert!(
            value["error"]["message"].as_str().unwrap().contains("dance"),
            "{value}"
        ),
        other => panic!("{other:?}"),
    }
    // Not a WebSocket at all.
    let plain = sandbox.client.get(&sandbox.path("/exec/ws")).await;
    plain.refused(400, "websocket_required");
    sandbox.assert_works().await;
}

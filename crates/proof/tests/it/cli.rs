//! The command line against the same server: what people type works, and `--json` is JSON.

use std::process::{Command, Output, Stdio};

use atoll_proof::{Server, Value, binary, on_every_tier};

on_every_tier!(a_day_at_the_command_line, errors_help, a_run_needs_no_server);

fn atoll(server: &Server, args: &[&str]) -> Output {
    Command::new(binary())
        .env("ATOLL_URL", server.client().url())
        .env("ATOLL_API_KEY", server.client().key().unwrap())
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the program runs")
}

#[track_caller]
fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

async fn a_day_at_the_command_line(server: &Server) {
    let created = ok(&atoll(
        server,
        &[
            "create",
            "--isolation",
            server.tier.name(),
            "--label",
            "a=b",
            "--json",
        ],
    ));
    let created: Value = serde_json::from_str(&created).unwrap();
    let id = created["id"].as_str().unwrap();
    assert_eq!(
        ok(&atoll(server, &["exec", id, "--", "sh", "-c", "echo $((6 * 7))"])),
        "42\n"
    );
    let failed = atoll(server, &["exec", id, "--", "sh", "-c", "echo oops >&2; exit 3"]);
    assert_eq!(failed.status.code(), Some(3));
    assert_eq!(failed.stderr, b"oops\n");

    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("hello.txt");
    std::fs::write(&local, "from the host").unwrap();
    ok(&atoll(
        server,
        &["cp", local.to_str().unwrap(), &format!("{id}:/tmp/hello.txt")],
    ));
    assert_eq!(
        ok(&atoll(server, &["exec", id, "--", "cat", "/tmp/hello.txt"])),
        "from the host"
    );
    let back = dir.path().join("back.txt");
    ok(&atoll(
        server,
        &["cp", &format!("{id}:/tmp/hello.txt"), back.to_str().unwrap()],
    ));
    assert_eq!(std::fs::read_to_string(back).unwrap(), "from the host");
    let listed = ok(&atoll(server, &["ls", &format!("{id}:/tmp")]));
    assert!(listed.contains("hello.txt") && listed.contains("13"), "{listed}");

    let detached = ok(&atoll(
        server,
        &[
            "exec",
            id,
            "--detach",
            "--",
            "sh",
            "-c",
            "echo logged; sleep 1000",
        ],
    ));
    assert!(detached.trim().starts_with("cmd_"), "{detached}");
    assert!(ok(&atoll(server, &["ps", id])).contains(detached.trim()));
    let sandbox = atoll_proof::Sandbox::of(server.client(), &created);
    sandbox.until_logged(detached.trim(), "logged").await;
    assert_eq!(ok(&atoll(server, &["logs", id, detached.trim()])), "logged\n");
    assert!(ok(&atoll(server, &["stats", id])).contains("memory"));
    ok(&atoll(server, &["extend", id, "30m"]));

    ok(&atoll(
        server,
        &["artifact", "save", &format!("{id}:/tmp/hello.txt"), "greeting"],
    ));
    assert!(ok(&atoll(server, &["artifact", "list"])).contains("greeting"));
    assert!(ok(&atoll(server, &["template", "list"])).contains("base"));
    let all: Value = serde_json::from_str(&ok(&atoll(server, &["ls", "--json"]))).unwrap();
    assert_eq!(all[0]["id"], created["id"]);
    assert!(ok(&atoll(server, &["ls", "--label", "a=b"])).contains(id));
    ok(&atoll(server, &["kill", id]));
    assert_eq!(
        ok(&atoll(server, &["artifact", "get", "greeting", "-"])),
        "from the host"
    );
    assert!(!ok(&atoll(server, &["ls"])).contains(id));
}

async fn errors_help(server: &Server) {
    let unknown = atoll(server, &["exec", "sbx_aaaaaaaaaaaaaaaaaaaa", "--", "true"]);
    assert!(!unknown.status.success());
    let text = String::from_utf8(unknown.stderr).unwrap();
    assert!(text.contains("sbx_aaaaaaaaaaaaaaaaaaaa"), "{text}");
    let refused = atoll(server, &["create", "--isolation", "microvm"]);
    assert!(
        !refused.status.success() && refused.stdout.is_empty(),
        "{refused:?}"
    );
    let nowhere = Command::new(binary())
        .args(["--url", "http://127.0.0.1:1", "ls"])
        .output()
        .unwrap();
    let text = String::from_utf8(nowhere.stderr).unwrap();
    assert!(
        !nowhere.status.success() && text.contains("127.0.0.1:1"),
        "{text}"
    );
}

/// `atoll run` beside the server, on data of its own.
async fn a_run_needs_no_server(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary());
    command
        .env_remove("ATOLL_URL")
        .env("ATOLL_TEMPLATES", atoll_proof::templates())
        .arg("--data")
        .arg(dir.path().join("data"))
        .args([
            "run",
            "--isolation",
            server.tier.name(),
            "--",
            "python3",
            "-c",
            "import sys; print(sys.stdin.read().upper())",
        ]);
    if server.tier == atoll_proof::Tier::Jail {
        command.env("ATOLL_RUNSC", "none");
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    {
        use std::io::Write as _;
        child.stdin.take().unwrap().write_all(b"hello").unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(ok(&output), "HELLO\n");
    assert!(
        atoll_proof::host::names_in(&dir.path().join("data/instances")).is_empty(),
        "it leaves no instance"
    );
}

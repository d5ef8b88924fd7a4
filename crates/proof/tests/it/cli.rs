//! The command line against the same server: what people type works, and `--json` is JSON.

use std::io::Write as _;
use std::process::{Command, Stdio};

use atoll_proof::{Server, Terminal, Value, binary, on_every_tier, printed};

on_every_tier!(
    a_day_at_the_command_line,
    a_shell_in_a_terminal,
    keys_are_made_and_revoked,
    errors_help,
    a_run_needs_no_server
);

async fn a_day_at_the_command_line(server: &Server) {
    let created = printed(&server.atoll(&[
        "create",
        "--isolation",
        server.tier.name(),
        "--label",
        "a=b",
        "--json",
    ]));
    let created: Value = serde_json::from_str(&created).unwrap();
    let id = created["id"].as_str().unwrap();
    assert_eq!(
        printed(&server.atoll(&["exec", id, "--", "sh", "-c", "echo $((6 * 7))"])),
        "42\n"
    );
    let failed = server.atoll(&["exec", id, "--", "sh", "-c", "echo oops >&2; exit 3"]);
    assert_eq!(failed.status.code(), Some(3));
    assert_eq!(failed.stderr, b"oops\n");

    let dir = tempfile::tempdir().unwrap();
    let local = dir.path().join("hello.txt");
    std::fs::write(&local, "from the host").unwrap();
    printed(&server.atoll(&["cp", local.to_str().unwrap(), &format!("{id}:/tmp/hello.txt")]));
    assert_eq!(
        printed(&server.atoll(&["exec", id, "--", "cat", "/tmp/hello.txt"])),
        "from the host"
    );
    let back = dir.path().join("back.txt");
    printed(&server.atoll(&["cp", &format!("{id}:/tmp/hello.txt"), back.to_str().unwrap()]));
    assert_eq!(std::fs::read_to_string(back).unwrap(), "from the host");
    let listed = printed(&server.atoll(&["ls", &format!("{id}:/tmp")]));
    assert!(listed.contains("hello.txt") && listed.contains("13"), "{listed}");

    let detached = printed(&server.atoll(&[
        "exec",
        id,
        "--detach",
        "--",
        "sh",
        "-c",
        "echo logged; sleep 1000",
    ]));
    assert!(detached.trim().starts_with("cmd_"), "{detached}");
    assert!(printed(&server.atoll(&["ps", id])).contains(detached.trim()));
    let sandbox = atoll_proof::Sandbox::of(server.client(), &created);
    sandbox.until_logged(detached.trim(), "logged").await;
    assert_eq!(printed(&server.atoll(&["logs", id, detached.trim()])), "logged\n");
    assert!(printed(&server.atoll(&["stats", id])).contains("memory"));
    printed(&server.atoll(&["extend", id, "30m"]));

    printed(&server.atoll(&["artifact", "save", &format!("{id}:/tmp/hello.txt"), "greeting"]));
    assert!(printed(&server.atoll(&["artifact", "list"])).contains("greeting"));
    assert!(printed(&server.atoll(&["template", "list"])).contains("base"));
    let all: Value = serde_json::from_str(&printed(&server.atoll(&["ls", "--json"]))).unwrap();
    assert_eq!(all[0]["id"], created["id"]);
    assert!(printed(&server.atoll(&["ls", "--label", "a=b"])).contains(id));
    printed(&server.atoll(&["kill", id]));
    assert_eq!(
        printed(&server.atoll(&["artifact", "get", "greeting", "-"])),
        "from the host"
    );
    assert!(!printed(&server.atoll(&["ls"])).contains(id));
}

async fn a_shell_in_a_terminal(server: &Server) {
    let sandbox = server.sandbox().await;
    let mut shell = server.cli();
    shell.args(["shell", &sandbox.id]).env("TERM", "xterm");
    let mut terminal = Terminal::start(shell, 33, 111);
    // Typed ahead of the prompt; the quotes keep the echo of the line from saying the same.
    terminal.press("PS1='<pro''mpt>'; echo here: $(stty size) $TERM on $(ho''stname)\r");
    terminal
        .until(&format!("here: 33 111 xterm on {}", sandbox.bare()))
        .await;
    assert!(terminal.is_raw(), "keys are the shell's own to interpret");
    terminal.until_times("<prompt>", 1).await;
    terminal.press("sh -c 'echo sleep\"\"ing; exec sleep 3210987'\r");
    terminal.until("sleeping\r\n").await;
    terminal.press("\x03");
    terminal.until_times("<prompt>", 2).await;
    sandbox.until_no_process("sleep 3210987").await;
    terminal.press("exit 7\r");
    assert_eq!(terminal.ended().await.code(), Some(7), "{}", terminal.shown());
    assert!(!terminal.is_raw(), "the terminal is as it was");

    let refused = server.atoll(&["shell", &sandbox.id]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && text.contains("terminal"), "{text}");
}

async fn keys_are_made_and_revoked(server: &Server) {
    let made = printed(&server.atoll(&["key", "create", "ci"]));
    let secret = made.trim_end();
    assert!(
        secret.starts_with("atl_") && !secret.contains('\n'),
        "only the secret: {made}"
    );
    let with_it = || {
        server
            .cli()
            .env("ATOLL_API_KEY", secret)
            .args(["ls", "--json"])
            .output()
            .unwrap()
    };
    assert_eq!(printed(&with_it()).trim(), "[]");

    let listed = printed(&server.atoll(&["key", "list"]));
    assert!(listed.contains("ci") && !listed.contains(secret), "{listed}");
    let keys: Value = serde_json::from_str(&printed(&server.atoll(&["key", "list", "--json"]))).unwrap();
    let key = keys
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["name"] == "ci")
        .unwrap();
    assert!(key["revoked_at"].is_null(), "{key}");
    printed(&server.atoll(&["key", "revoke", key["id"].as_str().unwrap()]));

    let refused = with_it();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{text}");
    assert!(text.contains("key"), "{text}");
    let keys: Value = serde_json::from_str(&printed(&server.atoll(&["key", "list", "--json"]))).unwrap();
    let key = keys
        .as_array()
        .unwrap()
        .iter()
        .find(|key| key["name"] == "ci")
        .unwrap();
    assert!(key["revoked_at"].is_string(), "{key}");
    let unknown = server.atoll(&["key", "revoke", "key_aaaaaaaaaaaaaaaaaaaa"]);
    assert!(!unknown.status.success());
}

/// What each shell itself says to its completions. One that is not installed cannot be asked.
#[test]
fn completions_are_accepted_by_their_shells() {
    for (shell, check) in [
        ("bash", ["bash", "-c", "source /dev/stdin && complete -p atoll"]),
        ("zsh", ["zsh", "-c", "source /dev/stdin; whence -w _atoll"]),
        (
            "fish",
            [
                "fish",
                "-c",
                "source - && complete --do-complete 'atoll template '",
            ],
        ),
    ] {
        let output = Command::new(binary())
            .args(["completions", shell])
            .output()
            .unwrap();
        let script = printed(&output);
        for word in ["template", "artifact", "isolation"] {
            assert!(script.contains(word), "{shell}: no {word}");
        }
        let mut checking = Command::new(check[0]);
        checking
            .args(&check[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let Ok(mut checking) = checking.spawn() else {
            eprintln!("SKIPPED: there is no {shell} here to read its completions");
            continue;
        };
        checking
            .stdin
            .take()
            .unwrap()
            .write_all(script.as_bytes())
            .unwrap();
        let accepted = checking.wait_with_output().unwrap();
        assert!(
            !printed(&accepted).is_empty() && accepted.stderr.is_empty(),
            "{shell}: {accepted:?}"
        );
    }
    let unknown = Command::new(binary())
        .args(["completions", "cmd.exe"])
        .output()
        .unwrap();
    assert!(!unknown.status.success());
}

async fn errors_help(server: &Server) {
    let unknown = server.atoll(&["exec", "sbx_aaaaaaaaaaaaaaaaaaaa", "--", "true"]);
    assert!(!unknown.status.success());
    let text = String::from_utf8(unknown.stderr).unwrap();
    assert!(text.contains("sbx_aaaaaaaaaaaaaaaaaaaa"), "{text}");
    let refused = server.atoll(&["create", "--isolation", "microvm"]);
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
    child.stdin.take().unwrap().write_all(b"hello").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(printed(&output), "HELLO\n");
    assert!(
        atoll_proof::host::names_in(&dir.path().join("data/instances")).is_empty(),
        "it leaves no instance"
    );
}

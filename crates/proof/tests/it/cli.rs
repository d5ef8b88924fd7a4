//! The command line against the same server: what people type works, and `--json` is JSON.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use atoll_proof::{Server, Terminal, Value, binary, on_every_tier, printed, wait};

on_every_tier!(
    a_day_at_the_command_line,
    a_shell_in_a_terminal,
    keys_are_made_and_revoked,
    errors_help,
    a_run_needs_no_server,
    a_run_says_which_wall_it_got,
    names_do_not_move_the_terminal,
    programs_read_every_answer,
    a_link_is_copied_as_what_it_leads_to,
    the_ledger_is_read_at_the_command_line,
    several_are_killed_although_one_is_not
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
        secret.starts_with("e2b_") && !secret.contains('\n'),
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

/// What the server would use is what is looked at.
#[test]
fn doctor_looks_at_a_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("atoll.toml");
    let data = dir.path().join("data");
    let text = format!("data = {data:?}\nrunsc = \"none\"\n[network]\nenabled = false\n");
    std::fs::write(&config, text).unwrap();
    let doctor = Command::new(binary())
        .args(["doctor", "--json", "--config", config.to_str().unwrap()])
        .env_remove("ATOLL_DATA")
        .output()
        .unwrap();
    let found: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let about = |list: &str, what: &str| {
        let mut all = found[list].as_array().unwrap().iter();
        all.find(|check| check["what"] == what).unwrap().clone()
    };
    let network = about("checks", "network");
    assert!(
        network["found"]
            .as_str()
            .unwrap()
            .contains("switched off in the configuration"),
        "{network}"
    );
    assert_eq!(about("checks", "data")["found"], data.to_str().unwrap());
    let gvisor = about("isolation", "gvisor");
    assert_eq!(
        (&gvisor["ok"], &gvisor["found"]),
        (&false.into(), &"no runsc was found".into())
    );
    let jail = about("isolation", "jail");
    assert!(
        jail["ok"] == true || !jail["todo"].as_str().unwrap().contains("nothing can be done"),
        "{jail}"
    );
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
fn run_alone(server: &Server, data: &std::path::Path) -> Command {
    let mut command = Command::new(binary());
    command
        .env_remove("ATOLL_URL")
        .env("ATOLL_TEMPLATES", atoll_proof::templates())
        .arg("--data")
        .arg(data)
        .arg("run");
    if server.tier == atoll_proof::Tier::Jail {
        command.env("ATOLL_RUNSC", "none");
    }
    command
}

fn fed(mut command: Command, input: &[u8]) -> std::process::Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

async fn a_run_needs_no_server(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let mut command = run_alone(server, &dir.path().join("data"));
    command.args(["--isolation", server.tier.name(), "--"]);
    command.args(["python3", "-c", "import sys; print(sys.stdin.read().upper())"]);
    let output = fed(command, b"hello");
    assert_eq!(printed(&output), "HELLO\n");
    assert!(
        atoll_proof::host::names_in(&dir.path().join("data/instances")).is_empty(),
        "it leaves no instance"
    );
}

/// Nobody named a floor and there is no server: the machine's best wall, and a word about it where it is the weaker one.
async fn a_run_says_which_wall_it_got(server: &Server) {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let output = run_alone(server, &data).args(["--", "true"]).output().unwrap();
    let said = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(printed(&output), "");
    assert_eq!(
        said.contains("not a tenant boundary"),
        !server.tier.is_tenant_boundary(),
        "{said}"
    );
    let mut command = run_alone(server, &data);
    command.args(["--json", "--", "python3", "-c"]);
    command.arg("import sys; print(sys.stdin.read().upper()); sys.exit(3)");
    let output = fed(command, b"hello");
    assert_eq!(output.status.code(), Some(3));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["isolation"], server.tier.name(), "{answer}");
    assert_eq!(answer["tenant_boundary"], server.tier.is_tenant_boundary());
    assert_eq!(answer["stdout"], "HELLO\n", "what it is fed reaches it: {answer}");
    assert_eq!(answer["exit_code"], 3);
    // The steps of a build run behind the same wall. Whether this one can be built does not matter here.
    std::fs::write(dir.path().join("Dockerfile"), "FROM scratch\n").unwrap();
    let mut build = Command::new(binary());
    build.env_remove("ATOLL_URL").env_remove("ATOLL_TEMPLATES");
    if server.tier == atoll_proof::Tier::Jail {
        build.env("ATOLL_RUNSC", "none");
    }
    build
        .arg("--data")
        .arg(&data)
        .args(["template", "build", "w", "--dockerfile"]);
    let said = String::from_utf8(build.arg(dir.path()).output().unwrap().stderr).unwrap();
    assert_eq!(
        said.contains("not a tenant boundary"),
        !server.tier.is_tenant_boundary(),
        "{said}"
    );
    assert!(
        answer["command"].is_string() && answer["stdout_truncated"] == false,
        "{answer}"
    );
}

async fn names_do_not_move_the_terminal(server: &Server) {
    let sandbox = server.sandbox().await;
    let line = "mkdir d && cd d && touch \"$(printf 'a\\033]0;owned\\007b')\" && ln -s \"$(printf '\\033[2J')\" link";
    assert_eq!(sandbox.sh(line).await.code, Some(0));
    let listed = printed(&server.atoll(&["ls", &format!("{}:d", sandbox.id)]));
    assert!(
        listed.contains("\\u{1b}]0;owned\\u{7}b") && listed.contains("-> \\u{1b}[2J"),
        "{listed}"
    );
    assert!(!listed.contains(['\x1b', '\x07']), "{listed:?}");
    let inspected = printed(&server.atoll(&["inspect", &sandbox.id]));
    assert_eq!(
        inspected.contains("not a tenant boundary"),
        !server.tier.is_tenant_boundary(),
        "{inspected}"
    );
}

/// What `--json` prints: a list is an array, whatever it is a list of, and nothing is left out.
async fn programs_read_every_answer(server: &Server) {
    let sandbox = server.sandbox().await;
    let id = sandbox.id.as_str();
    let json = |args: &[&str]| -> Value {
        let output = printed(&server.atoll(&[args, &["--json"]].concat()));
        serde_json::from_str(&output).unwrap_or_else(|error| panic!("{args:?}: {error} in {output:?}"))
    };
    sandbox.sh("mkdir -p d && echo x > d/f").await;
    for args in [
        &["ls"][..],
        &["ls", &format!("{id}:d")],
        &["ps", id],
        &["port", id],
        &["artifact", "list"],
        &["key", "list"],
        &["template", "list"],
        &["ledger"],
        &["bench", "sandbox", "--list"],
    ] {
        assert!(json(args).is_array(), "{args:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let (into, anew) = (dir.path().to_str().unwrap(), dir.path().join("new"));
    let copied = json(&["cp", &format!("{id}:d"), into]);
    assert_eq!(copied["path"], format!("{into}/d"));
    let copied = json(&["cp", &format!("{id}:d"), anew.to_str().unwrap()]);
    assert_eq!(copied["path"], anew.to_str().unwrap());
    assert_eq!(std::fs::read(anew.join("f")).unwrap(), b"x\n");

    // A command that does not end by itself: each event is there as soon as it happens.
    let command = sandbox.background("echo one; exec sleep 3210988").await;
    let mut following = server.cli();
    following.args(["logs", "--follow", "--json", id, &command]);
    let mut following = following.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(following.stdout.take().unwrap()));
    let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(
        (&first["event"], &first["data"]["text"]),
        (&"stdout".into(), &"one\n".into())
    );
    following.kill().unwrap();
    following.wait().unwrap();

    let mut exec = server.cli();
    exec.args(["exec", "--json", id, "--", "wc", "-c"]);
    let answer: Value = serde_json::from_slice(&fed(exec, &[0xff; 100_000]).stdout).unwrap();
    assert_eq!(answer["stdout"], "100000\n", "{answer}");
}

async fn a_link_is_copied_as_what_it_leads_to(server: &Server) {
    use std::os::unix::fs::PermissionsExt as _;
    let sandbox = server.sandbox().await;
    sandbox
        .sh("mkdir -p a b && echo secret > a/file && chmod 640 a/file && ln -s ../a/file b/one && ln -s one b/two")
        .await;
    let dir = tempfile::tempdir().unwrap();
    for name in ["one", "two"] {
        printed(&server.atoll(&[
            "cp",
            &format!("{}:b/{name}", sandbox.id),
            dir.path().to_str().unwrap(),
        ]));
        let copy = dir.path().join(name);
        assert_eq!(std::fs::read(&copy).unwrap(), b"secret\n");
        let mode = std::fs::metadata(&copy).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o640, "{name} has mode {mode:o}");
    }
    sandbox.sh("ln -s ../a b/dir && ln -s nowhere b/dead").await;
    let (into, anew) = (dir.path().to_str().unwrap(), dir.path().join("new"));
    let linked = format!("{}:b/dir", sandbox.id);
    printed(&server.atoll(&["cp", &linked, into]));
    printed(&server.atoll(&["cp", &linked, anew.to_str().unwrap()]));
    for copy in [dir.path().join("dir"), anew] {
        assert_eq!(std::fs::read(copy.join("file")).unwrap(), b"secret\n");
    }
    assert!(
        !server
            .atoll(&["cp", &format!("{}:b/dead", sandbox.id), into])
            .status
            .success()
    );
}

async fn the_ledger_is_read_at_the_command_line(server: &Server) {
    let sandbox = server.sandbox().await;
    sandbox.sh("true").await;
    sandbox.kill().await;
    let shown = printed(&server.atoll(&["ledger", &sandbox.id]));
    assert!(
        shown.contains(&sandbox.id) && shown.lines().count() > 2,
        "{shown}"
    );
    let json = |args: &[&str]| -> Value { serde_json::from_str(&printed(&server.atoll(args))).unwrap() };
    let all = json(&["ledger", &sandbox.id, "--json"]);
    let all = all.as_array().unwrap();
    let shown = printed(&server.atoll(&["ledger", &sandbox.id]));
    // More may have come meanwhile.
    assert!(all.len() > 2 && shown.lines().count() >= all.len(), "{shown}");
    for (line, fact) in shown.lines().zip(all) {
        assert!(
            line.contains(fact["kind"].as_str().unwrap()) && line.contains(&sandbox.id),
            "{line}: {fact}"
        );
    }
    let after = all[0]["seq"].to_string();
    let next = json(&["ledger", &sandbox.id, "--after", &after, "--limit", "1", "--json"]);
    assert_eq!(next, Value::Array(vec![all[1].clone()]));
    // What it used at last is written down after its end.
    wait::until("its usage is known", Duration::from_secs(60), || async {
        let usage = json(&["usage", &sandbox.id, "--json"]);
        usage["wall_ms"].as_u64().filter(|wall| *wall > 0)
    })
    .await;
    for line in ["time", "cpu", "memory", "disk"] {
        assert!(printed(&server.atoll(&["usage"])).contains(line));
    }
}

async fn several_are_killed_although_one_is_not(server: &Server) {
    let (first, last) = (server.sandbox().await, server.sandbox().await);
    let output = server.atoll(&["kill", &first.id, "sbx_aaaaaaaaaaaaaaaaaaaa", "no-such", &last.id]);
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(!output.status.success(), "{out}{err}");
    assert!(out.contains(&first.id) && out.contains(&last.id), "{out}");
    assert!(
        err.contains("sbx_aaaaaaaaaaaaaaaaaaaa") && err.contains("no-such"),
        "{err}"
    );
}

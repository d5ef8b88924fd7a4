//! To rest and back: what a sandbox was doing goes on, as far as its tier can keep it.

use std::time::Duration;

use atoll_proof::{Options, Sandbox, Server, Tier, Value, json, on_every_tier, wait};

on_every_tier!(
    what_runs_goes_on_after_a_pause,
    a_stopped_sandbox_keeps_its_files_only,
    a_resting_sandbox_is_woken_by_use_if_it_asks_for_that,
    deadlines_put_to_rest_instead_of_killing,
    rest_does_not_consume_the_lifetime,
    rest_is_over_when_its_time_is,
    each_time_that_it_ran_is_listed,
    hooks_run_when_they_should,
    a_pause_is_told_to_those_in_the_middle_of_something,
    resting_twice_and_waking_twice_are_one,
);

/// Counts in memory, holds 100 MB, has a file open, and serves its count on port 8000.
const COUNTER: &str = r#"
import http.server, os, threading, time
ballast = os.urandom(1 << 20) * 100
log = open(os.path.expanduser("~/log"), "w", buffering=1)
count = 0
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.getpid()} {count} {len(ballast)}".encode())
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
while True:
    count += 1
    log.write(f"{count}\n")
    time.sleep(0.02)
"#;

/// Starts the counter and returns its command.
async fn start_counter(sandbox: &Sandbox) -> String {
    sandbox.write("/home/user/counter.py", COUNTER.as_bytes()).await;
    let command = sandbox.background("exec python3 /home/user/counter.py").await;
    sandbox.until_logged(&command, "ready").await;
    command
}

/// Its process, its count, and how much it holds.
async fn ask_counter(sandbox: &Sandbox) -> (u64, u64, u64) {
    let answer = sandbox.sh("curl -s http://127.0.0.1:8000/").await.ok();
    let numbers: Vec<u64> = answer.split(' ').map(|word| word.parse().unwrap()).collect();
    (numbers[0], numbers[1], numbers[2])
}

async fn post(sandbox: &Sandbox, what: &str, body: Value) -> Value {
    sandbox.ask(what, body).await.ok()
}

fn keeps_memory(server: &Server) -> bool {
    server.tier == Tier::Gvisor
}

async fn what_runs_goes_on_after_a_pause(server: &mut Server) {
    let sandbox = server
        .sandbox_with(&json!({"resources": {"memory_bytes": 536_870_912}}))
        .await;
    if !keeps_memory(server) {
        let refused = sandbox.ask("/pause", json!({"kind": "memory"})).await;
        refused.refused(422, "memory_not_supported");
        sandbox.assert_works().await;
        sandbox.write("/home/user/kept", b"kept").await;
        let paused = post(&sandbox, "/pause", json!({})).await;
        assert_eq!(
            (&paused["state"], &paused["saved"]["kind"]),
            (&json!("paused"), &json!("filesystem"))
        );
        server.assert_nothing_held().await;
        post(&sandbox, "/resume", json!({})).await;
        assert_eq!(sandbox.read("/home/user/kept").await, b"kept");
        return;
    }
    let command = start_counter(&sandbox).await;
    let shell = sandbox
        .background(
            "x=kept; while read -r line; do echo $x $line; done < <(while :; do echo tick; sleep 0.1; done)",
        )
        .await;
    sandbox.until_logged(&shell, "kept tick").await;
    let (pid, before, _) = ask_counter(&sandbox).await;

    let paused = post(&sandbox, "/pause", json!({"kind": "memory"})).await;
    assert_eq!(
        (&paused["state"], &paused["saved"]["kind"]),
        (&json!("paused"), &json!("memory"))
    );
    assert!(paused["deadline"].is_null(), "at rest nothing ends it: {paused}");
    server.assert_nothing_held().await;
    let refused = sandbox.exec(&json!({"cmd": "true"})).await;
    assert!(refused.refused(409, "sandbox_paused")["hint"].is_string());

    server.kill_9();
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    assert_eq!(sandbox.state().await, "paused");
    let resumed = post(&sandbox, "/resume", json!({"timeout_ms": 600_000})).await;
    assert_eq!(resumed["state"], "running");
    assert_ne!(resumed["instance"], paused["instance"]);

    let (same, after, ballast) = ask_counter(&sandbox).await;
    assert_eq!(
        (same, ballast),
        (pid, 100 << 20),
        "the very same process, with all it held"
    );
    assert!(after >= before, "it counts on: {before}, then {after}");
    wait::until("it counts on", Duration::from_secs(30), || async {
        (ask_counter(&sandbox).await.1 > after + 5).then_some(())
    })
    .await;
    let log = String::from_utf8(sandbox.read("/home/user/log").await).unwrap();
    let lines: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert!(
        lines.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "its open file has no gap"
    );
    assert_eq!(sandbox.command(&command).await["state"], "running");
    let said = sandbox.logs(&shell).await.matches("kept tick").count();
    wait::until("the shell goes on", Duration::from_secs(30), || async {
        (sandbox.logs(&shell).await.matches("kept tick").count() > said).then_some(())
    })
    .await;

    // And once more, from what was restored.
    post(&sandbox, "/pause", json!({})).await;
    post(&sandbox, "/resume", json!({})).await;
    let (same, later, _) = ask_counter(&sandbox).await;
    assert!(same == pid && later > after, "{same} {later}");
}

async fn a_stopped_sandbox_keeps_its_files_only(server: &mut Server) {
    for backing in ["memory", "disk"] {
        let sandbox = server
            .sandbox_with(&json!({"resources": {"disk_backing": backing, "disk_bytes": 268_435_456}}))
            .await;
        sandbox.root_sh("rm /usr/bin/git && mkdir -p /srv/data && chmod 1777 /srv/data && echo hello > /srv/data/file && ln /srv/data/file /srv/data/link && ln -s file /srv/data/soft && chmod 4755 /srv/data/file && mv /etc/skel /srv/skel && touch '/srv/data/odd \u{fc}\n name'").await.ok();
        sandbox.sh("echo mine > /srv/data/mine").await.ok();
        sandbox.background("exec sleep 4242").await;
        let stopped = post(&sandbox, "/stop", json!({})).await;
        assert_eq!(
            (&stopped["state"], &stopped["saved"]["kind"]),
            (&json!("stopped"), &json!("filesystem"))
        );
        server.assert_nothing_held().await;
        sandbox
            .exec(&json!({"cmd": "true"}))
            .await
            .refused(409, "sandbox_stopped");

        server.kill_9();
        server.start_again().await;
        let sandbox = server.again(&sandbox);
        let started = post(&sandbox, "/start", json!({})).await;
        assert_eq!(started["state"], "running");
        let seen = sandbox
            .root_sh("cat /srv/data/soft; stat -c '%U %a %h' /srv/data/file; stat -c '%U' /srv/data/mine; ls /usr/bin/git 2>&1; ls -d /etc/skel 2>&1; ls -A /srv/skel | head -1; ls /srv/data | wc -l")
            .await;
        let lines: Vec<&str> = seen.stdout.lines().collect();
        assert_eq!(&lines[..3], ["hello", "root 4755 2", "user"], "{seen:?}");
        assert!(
            lines[3].contains("No such file") && lines[4].contains("No such file"),
            "{seen:?}"
        );
        assert!(
            lines[5].starts_with('.'),
            "what was moved is where it was moved to: {seen:?}"
        );
        assert_eq!(sandbox.count_processes("sleep 4242").await, 0);
        sandbox.kill().await;
    }
}

async fn a_resting_sandbox_is_woken_by_use_if_it_asks_for_that(server: &Server) {
    let sandbox = server.sandbox_with(&json!({"auto_resume": true})).await;
    sandbox.write("/home/user/kept", b"kept").await;
    post(&sandbox, "/pause", json!({})).await;
    // Many at once wake it once.
    let uses = (0..8).map(|_| sandbox.sh("cat /home/user/kept"));
    for used in futures_util::future::join_all(uses).await {
        assert_eq!(used.ok(), "kept");
    }
    let record = sandbox.get().await;
    assert_eq!(record["state"], "running");
    assert!(
        record["deadline"].is_string() && record["saved"].is_null(),
        "{record}"
    );
    post(&sandbox, "/stop", json!({})).await;
    assert_eq!(sandbox.read("/home/user/kept").await, b"kept");
}

async fn deadlines_put_to_rest_instead_of_killing(server: &Server) {
    let idle = server
        .sandbox_with(&json!({"idle": {"after_ms": 1000, "action": "pause"}}))
        .await;
    let timed = server
        .sandbox_with(&json!({"timeout_ms": 1500, "on_timeout": "stop"}))
        .await;
    timed.write("/home/user/kept", b"kept").await;
    idle.until_state("paused").await;
    timed.until_state("stopped").await;
    server.assert_nothing_held().await;
    post(&timed, "/start", json!({"timeout_ms": 60_000})).await;
    assert_eq!(timed.read("/home/user/kept").await, b"kept");
}

async fn rest_does_not_consume_the_lifetime(server: &Server) {
    let sandbox = server.sandbox_with(&json!({"timeout_ms": 3_600_000})).await;
    let whole = sandbox.get().await["deadline"].as_str().unwrap().to_owned();
    let extended = post(&sandbox, "/extend", json!({"timeout_ms": 600_000})).await;
    post(&sandbox, "/pause", json!({})).await;
    // What was left, later by the time that it rested; not a whole lifetime again.
    let resumed = post(&sandbox, "/resume", json!({})).await;
    let deadline = resumed["deadline"].as_str().unwrap();
    assert!(deadline > extended["deadline"].as_str().unwrap(), "{resumed}");
    assert!(deadline < whole.as_str(), "{resumed}");
    post(&sandbox, "/pause", json!({})).await;
    let resumed = post(&sandbox, "/resume", json!({"timeout_ms": 7_200_000})).await;
    assert!(
        resumed["deadline"].as_str().unwrap() > whole.as_str(),
        "{resumed}"
    );
}

async fn rest_is_over_when_its_time_is(server: &Server) {
    let sandbox = server.sandbox_with(&json!({"retention_ms": 1000})).await;
    post(&sandbox, "/pause", json!({})).await;
    let ended = sandbox.until_state("deleted").await;
    assert_eq!(ended["end"]["reason"], "expired");
    let left = server.client().post("/v1/gc", &json!({})).await.ok();
    assert_eq!(left["unreadable"], json!([]), "{left}");
    let left = server
        .client()
        .post("/v1/gc", &json!({"dry_run": true}))
        .await
        .ok();
    assert_eq!(
        (&left["bytes"], &left["snapshots"]),
        (&json!(0), &json!([])),
        "{left}"
    );
}

async fn each_time_that_it_ran_is_listed(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let first = sandbox.get().await["instance"].clone();
    sandbox
        .sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
        .await
        .ok();
    post(&sandbox, "/pause", json!({})).await;
    let second = post(&sandbox, "/resume", json!({})).await["instance"].clone();
    let list = async |server: &Server| {
        let answer = server.client().get(&sandbox.path("/instances")).await.ok();
        answer["items"].as_array().unwrap().clone()
    };
    // What the first one used last is told a moment after its end.
    wait::until("its use is metered", Duration::from_secs(30), || async {
        (list(server).await[1]["cpu_micros"].as_u64().unwrap() > 0).then_some(())
    })
    .await;
    server.kill_9();
    server.start_again().await;
    // The second was taken over, and goes on.
    let listed = list(server).await;
    assert_eq!((&listed[0]["id"], &listed[1]["id"]), (&second, &first));
    assert_eq!(
        (&listed[0]["ended_at"], &listed[0]["reason"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!(listed[1]["reason"], "paused");
    assert!(listed[1]["ended_at"].as_str() >= listed[1]["started_at"].as_str());
    assert!(listed[0]["started_at"].as_str() >= listed[1]["ended_at"].as_str());
    assert!(listed[1]["wall_ms"].as_u64().unwrap() > 0, "{listed:?}");
    assert_eq!(listed[1]["isolation"], server.tier.name());
    server.again(&sandbox).kill().await;
    let listed = list(server).await;
    assert_eq!((listed.len(), &listed[0]["reason"]), (2, &json!("killed")));
    assert!(listed[0]["ended_at"].is_string());
}

async fn hooks_run_when_they_should(server: &Server) {
    let hook = |line: &str| json!([{"argv": ["/bin/sh", "-c", line]}]);
    let sandbox = server
        .sandbox_with(&json!({"hooks": {
            "on_create": hook("echo created >> ~/told"),
            "on_resume": hook("echo resumed >> ~/told"),
        }}))
        .await;
    assert_eq!(sandbox.read("/home/user/told").await, b"created\n");
    post(&sandbox, "/pause", json!({})).await;
    post(&sandbox, "/resume", json!({})).await;
    post(&sandbox, "/stop", json!({})).await;
    post(&sandbox, "/start", json!({})).await;
    assert_eq!(
        sandbox.read("/home/user/told").await,
        b"created\nresumed\nresumed\n"
    );

    let failing = server.request(&json!({"hooks": {"on_create": hook("echo no such luck; exit 3")}}));
    let refused = server.client().post("/v1/sandboxes", &failing).await;
    let message = refused.error()["message"].as_str().unwrap().to_owned();
    assert!(
        message.contains("exited with 3") && message.contains("no such luck"),
        "{refused:?}"
    );
    sandbox.kill().await;
    server.assert_nothing_held().await;
}

async fn a_pause_is_told_to_those_in_the_middle_of_something(server: &Server) {
    let sandbox = server.sandbox().await;
    let (mut session, command) = sandbox
        .started(&json!({"argv": ["/bin/sh", "-c", "echo begun; exec sleep 1000"]}))
        .await;
    session.until_stdout("begun").await;
    post(&sandbox, "/pause", json!({})).await;
    let error = session.until("error").await;
    assert!(error.to_string().contains("sandbox_paused"), "{error}");
    post(&sandbox, "/resume", json!({})).await;
    if keeps_memory(server) {
        assert_eq!(
            sandbox.command(&command).await["state"],
            "running",
            "it outlived its stream"
        );
    }
}

async fn resting_twice_and_waking_twice_are_one(server: &Server) {
    let sandbox = server.sandbox().await;
    let pauses = (0..4).map(|_| sandbox.ask("/pause", json!({})));
    for paused in futures_util::future::join_all(pauses).await {
        assert!([200, 409].contains(&paused.status), "{paused:?}");
    }
    assert_eq!(sandbox.until_state("paused").await["state"], "paused");
    let wakes = (0..4).map(|_| post(&sandbox, "/resume", json!({})));
    for woken in futures_util::future::join_all(wakes).await {
        assert_eq!(woken["state"], "running");
    }
    sandbox.assert_works().await;
    let facts = sandbox.client.get(&sandbox.path("/facts")).await.ok();
    let kinds: Vec<&str> = facts["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|fact| fact["kind"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds.iter().filter(|kind| **kind == "sandbox.paused").count(),
        1,
        "{kinds:?}"
    );
    assert_eq!(
        kinds.iter().filter(|kind| **kind == "sandbox.resumed").count(),
        1,
        "{kinds:?}"
    );
}

/// What the version of the other runtime is made of.
const OTHER: &str = "9";

/// A runtime of its own in this directory; `other` is one that calls itself another version. A script in front of the
/// real one would not do: it is executed where there is no shell.
fn put_runtime(dir: &std::path::Path, other: bool) -> Option<std::path::PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let real = std::env::var("ATOLL_RUNSC").ok().filter(|path| path != "none")?;
    let said = std::process::Command::new(&real)
        .arg("--version")
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let version = said.split_whitespace().nth(2).unwrap();
    let renamed = OTHER.repeat(version.len());
    let expression = match other {
        true => format!("s/{}/{renamed}/g", version.replace('.', "[.]")),
        false => String::new(),
    };
    let (new, runsc) = (dir.join("new"), dir.join("runsc"));
    let sed = std::process::Command::new("sed")
        .env("LC_ALL", "C")
        .args([&expression, &real])
        .stdout(std::fs::File::create(&new).unwrap())
        .status();
    assert!(sed.unwrap().success());
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(&new, &runsc).unwrap();
    Some(runsc)
}

#[tokio::test]
async fn memory_of_another_runtime_is_refused_or_left_for_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let Some(runsc) = put_runtime(dir.path(), false) else {
        eprintln!("SKIPPED: there is no runsc");
        return;
    };
    let options = Options::default().args(&["--runsc", runsc.to_str().unwrap()]);
    atoll_proof::on(Tier::Gvisor, options, async |server: &mut Server| {
        let strict = server.sandbox().await;
        let lenient = server.sandbox_with(&json!({"fallback_to_files": true})).await;
        let lasting = server.sandbox().await;
        for sandbox in [&strict, &lenient, &lasting] {
            sandbox.write("/home/user/kept", b"kept").await;
            sandbox.background("exec sleep 4242").await;
        }
        for sandbox in [&strict, &lenient] {
            post(sandbox, "/pause", json!({"kind": "memory"})).await;
        }
        post(&lasting, "/stop", json!({})).await;

        server.stop();
        put_runtime(dir.path(), true);
        server.start_again().await;
        let [strict, lenient, lasting] = [&strict, &lenient, &lasting].map(|sandbox| server.again(sandbox));
        let refused = strict
            .ask("/resume", json!({}))
            .await
            .refused(409, "snapshot_runtime_mismatch");
        let message = refused["message"].as_str().unwrap();
        assert!(
            message.contains("version 20") && message.contains(&format!("version {}", OTHER.repeat(8))),
            "{message}"
        );
        assert_eq!(strict.state().await, "paused", "what it rests on is still there");
        for sandbox in [&lenient, &lasting] {
            post(sandbox, "/resume", json!({})).await;
            assert_eq!(sandbox.read("/home/user/kept").await, b"kept");
            assert_eq!(sandbox.count_processes("sleep 4242").await, 0);
        }
        server.stop();
        put_runtime(dir.path(), false);
        server.start_again().await;
        let strict = server.again(&strict);
        post(&strict, "/resume", json!({})).await;
        assert_eq!(
            strict.count_processes("sleep 4242").await,
            1,
            "its own runtime brings all of it back"
        );
    })
    .await;
}

/// Whether a file below this directory holds these bytes.
fn anywhere_below(dir: &std::path::Path, needle: &[u8]) -> bool {
    std::fs::read_dir(dir).unwrap().flatten().any(|entry| {
        let path = entry.path();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            return anywhere_below(&path, needle);
        }
        kind.is_file()
            && std::fs::read(&path)
                .is_ok_and(|bytes| bytes.windows(needle.len()).any(|window| window == needle))
    })
}

#[tokio::test]
async fn with_a_key_nothing_plain_reaches_the_disk() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    let write_key = |byte: u8| {
        std::fs::write(&key, [byte; 32]).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    };
    write_key(7);
    for tier in [Tier::Gvisor, Tier::Jail] {
        let options = Options::default().config(&format!("vault_key = \"{}\"", key.display()));
        atoll_proof::on(tier, options, async |server: &mut Server| {
            let sandbox = server.sandbox().await;
            // Put together inside, so that it stands nowhere else.
            sandbox
                .sh("printf '%s-%s' plain 'text that must not be seen' > ~/secret")
                .await
                .ok();
            post(&sandbox, "/pause", json!({})).await;
            server.assert_nothing_held().await;
            assert!(!anywhere_below(
                &server.data().join("vault"),
                b"plain-text that must"
            ));
            server.kill_9();
            server.start_again().await;
            let sandbox = server.again(&sandbox);
            post(&sandbox, "/resume", json!({})).await;
            assert_eq!(
                sandbox.read("/home/user/secret").await,
                b"plain-text that must not be seen"
            );
        })
        .await;
    }
}

//! The examples of durable workflows, as people run them: in Python and in TypeScript.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use atoll_proof::{Server, Value, binary};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::temporal::{interpreters, server};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// How the examples of one language are started.
struct Language {
    words: Vec<PathBuf>,
    directory: PathBuf,
    ending: &'static str,
    /// What the pipeline calls what it delivers.
    change: &'static str,
}

fn languages() -> Vec<Language> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut found: Vec<Language> = interpreters()
        .into_iter()
        .take(1)
        .map(|python| Language {
            words: vec![python],
            directory: examples.join("python"),
            ending: "py",
            change: "change",
        })
        .collect();
    match std::env::var_os("ATOLL_TEST_TEMPORAL_NODE") {
        Some(directory) if !directory.is_empty() => {
            let directory = PathBuf::from(directory);
            found.push(Language {
                // Without the wrapper, which would leave its child behind when it is killed.
                words: ["node", "--import", "tsx"].map(PathBuf::from).to_vec(),
                directory: directory.join("src"),
                ending: "ts",
                change: "change-ts",
            });
        }
        _ => eprintln!("SKIPPED: ATOLL_TEST_TEMPORAL_NODE names no SDK; ./test installs it"),
    }
    found
}

fn start(language: &Language, name: &str, server: &Server, port: u16, more: &[&str]) -> Child {
    Command::new(&language.words[0])
        .args(&language.words[1..])
        .current_dir(&language.directory)
        .arg(language.directory.join(format!("{name}.{}", language.ending)))
        .args(more)
        .env("TEMPORAL_ADDRESS", format!("127.0.0.1:{port}"))
        .env("ATOLL_KEY_FILE", server.data().join("admin.key"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn said(child: Child) -> String {
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("the example is stuck")
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr),
    );
    // Temporal's SDK for Python sometimes crashes when its interpreter ends (PyGILState_Release while finalizing), after
    // everything was said.
    let crashed_at_the_end = matches!(output.status.signal(), Some(6 | 11)) && !out.is_empty();
    assert!(
        output.status.success() || crashed_at_the_end,
        "{}: {out}\n{err}",
        output.status
    );
    out
}

#[tokio::test]
async fn a_saga_takes_back_what_it_did() {
    for language in languages() {
        let (server, port) = server().await;
        let out = said(start(&language, "saga", &server, port, &[])).await;
        let undone: Vec<&str> = out
            .lines()
            .filter_map(|line| line.trim().strip_prefix("undone"))
            .map(|booking| booking.trim().split('-').next().unwrap_or_default())
            .collect();
        assert_eq!(undone, ["car", "hotel", "flight"], "{out}");
        assert!(out.contains("nothing is booked: the card was declined"), "{out}");
        let out = said(start(&language, "saga", &server, port, &["--paid"])).await;
        assert!(out.contains("receipt-1") && !out.contains("undone"), "{out}");
        server.finish().await;
    }
}

#[tokio::test]
async fn an_agent_uses_tools_in_a_sandbox() {
    let mut provider = Command::new(binary())
        .args(["scripted-provider", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(provider.stdout.take().unwrap()).lines();
    let first = lines.next_line().await.unwrap().unwrap();
    let url = first.rsplit(' ').next().unwrap().to_owned();
    for language in languages() {
        let (server, port) = server().await;
        let base = format!("{url}/v1");
        for words in [
            vec![
                "provider",
                "set",
                "scripted",
                "--kind",
                "openai",
                "--base-url",
                &base,
                "--no-key",
            ],
            vec!["model", "set", "helper", "--to", "scripted/scripted-tool"],
            vec![
                "model",
                "price",
                "set",
                "scripted/scripted-tool",
                "--input",
                "1",
                "--output",
                "2",
            ],
            vec!["budget", "set", "agents", "0.50", "--scope", "workflow"],
        ] {
            let done = server.atoll(&words);
            assert!(done.status.success(), "{words:?}: {done:?}");
        }
        let out = said(start(&language, "agent", &server, port, &[])).await;
        assert!(out.contains("in Bern"), "the tool's answer came back: {out}");
        let spent = server.atoll(&["spend", "--by", "workflow", "--json"]);
        let spent: Value = serde_json::from_slice(&spent.stdout).unwrap();
        assert_eq!(spent["items"][0]["calls"], 2, "{spent}");
        assert!(
            spent["items"][0]["group"].as_str().unwrap().starts_with("agent-"),
            "{spent}"
        );
        server.finish().await;
    }
}

/// Killed half way, both the program and the server, and resumed.
#[tokio::test]
async fn a_pipeline_goes_on_where_it_was() {
    for language in languages() {
        let (mut server, port) = server().await;
        let mut first = start(&language, "pipeline", &server, port, &[]);
        let question = until_asked(&server).await;
        first.kill().await.unwrap();
        server.kill_9();
        server.start_again().await;
        assert_eq!(until_asked(&server).await["id"], question["id"]);
        let second = start(&language, "pipeline", &server, port, &[]);
        let id = question["id"].as_str().unwrap();
        let granted = server.atoll(&["approval", "grant", id, "--by", "Ada"]);
        assert!(granted.status.success(), "{granted:?}");
        let out = said(second).await;
        assert!(
            out.contains("delivered, as Ada said") && out.contains("+"),
            "{out}"
        );
        let change = server.atoll(&["artifact", "get", language.change, "-"]);
        let change = String::from_utf8_lossy(&change.stdout).into_owned();
        assert!(change.contains("Hello") && change.contains("-"), "{change}");
        server.finish().await;
    }
}

async fn until_asked(server: &Server) -> Value {
    let began = std::time::Instant::now();
    loop {
        let asked = server.client().get("/v1/approvals").await.ok();
        if let Some(question) = asked["items"].as_array().and_then(|items| items.first()) {
            return question.clone();
        }
        assert!(began.elapsed() < PATIENCE, "nobody was asked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

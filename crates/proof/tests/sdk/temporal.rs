//! Temporal's SDK for Python: through every kind of call, and under fire.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use atoll_proof::random::Random;
use atoll_proof::{Options, Server, Tier};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

/// How often the server is killed; `ATOLL_TEST_KILLS` says otherwise.
const KILLS: u64 = 12;
/// Longer than anything takes on a busy machine, so that a run that is stuck is told from a slow one.
const PATIENCE: Duration = Duration::from_secs(600);

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk").join(name)
}

/// The interpreters that the environment names, or none, loudly.
pub(crate) fn interpreters() -> Vec<PathBuf> {
    const VARIABLE: &str = "ATOLL_TEST_TEMPORAL_PYTHONS";
    let named = std::env::var_os(VARIABLE).unwrap_or_default();
    let found: Vec<PathBuf> = std::env::split_paths(&named)
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    if found.is_empty() {
        eprintln!("SKIPPED: {VARIABLE} names no SDK; ./test installs it");
    }
    found
}

/// A server whose workflows stay where they are when it is started again: SDKs do not look for another port. The tier does
/// not matter here; the jail works everywhere.
pub(crate) async fn server() -> (Server, u16) {
    // Nobody else takes it: the kernel hands out ports round about.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .unwrap()
        .port();
    let options = Options::default().config(&format!("workflows_listen = \"127.0.0.1:{port}\""));
    (Server::start(Tier::Jail, options).await, port)
}

fn command(python: &Path, name: &str, server: &Server, port: u16) -> Command {
    let mut command = Command::new(python);
    command
        .arg(script(name))
        .env("TEMPORAL_ADDRESS", format!("127.0.0.1:{port}"))
        .env("TEMPORAL_API_KEY", server.client().key().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

fn assert_all_ok(output: &std::process::Output) {
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    assert!(out.trim_end().ends_with("all ok"), "{out}\n{err}");
    eprintln!("{out}");
}

#[tokio::test]
async fn python_goes_through_every_kind_of_call() {
    for python in interpreters() {
        let (server, port) = server().await;
        let child = command(&python, "through_temporal.py", &server, port)
            .spawn()
            .unwrap();
        let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
            .await
            .expect("the script is stuck")
            .unwrap();
        assert_all_ok(&output);
        server.finish().await;
    }
}

/// Kills the server at moments that nobody chose, while workflows of every kind run. The script notes what was acknowledged
/// and what it was shown; at the end every workflow must have ended, with all of it, and every history must replay.
#[tokio::test]
async fn workflows_survive_kills() {
    let kills = std::env::var("ATOLL_TEST_KILLS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(KILLS);
    for python in interpreters().into_iter().take(1) {
        let (mut server, port) = server().await;
        let mut random = Random::seeded();
        let mut child = command(&python, "workflows_under_fire.py", &server, port)
            .spawn()
            .unwrap();
        let mut said = child.stdin.take().unwrap();
        let mut told = BufReader::new(child.stdout.take().unwrap());
        // Whoever is not connected yet has nothing to lose.
        let mut first = String::new();
        tokio::time::timeout(PATIENCE, told.read_line(&mut first))
            .await
            .expect("the script does not begin")
            .unwrap();
        // Read all the while: a script that nobody reads stands still.
        let ending = tokio::spawn(async move {
            let mut stdout = first.into_bytes();
            let (read, ended) = tokio::join!(told.read_to_end(&mut stdout), child.wait_with_output());
            read?;
            Ok::<_, std::io::Error>(std::process::Output { stdout, ..ended? })
        });
        for _ in 0..kills {
            // Any moment is right.
            tokio::time::sleep(Duration::from_millis(100 + random.below(3_000))).await;
            server.kill_9();
            server.start_again().await;
            if ending.is_finished() {
                break;
            }
        }
        // It stops starting new ones, and waits for those that are open.
        let _ended = said.write_all(b"enough\n").await;
        drop(said);
        let output = tokio::time::timeout(PATIENCE, ending)
            .await
            .expect("a workflow is stuck")
            .unwrap()
            .unwrap();
        assert_all_ok(&output);
        server.finish().await;
    }
}

/// What the server carries out itself, with a person at the command line; and a kill while the person thinks.
#[tokio::test]
async fn steps_and_approvals_work_from_any_workflow() {
    for python in interpreters().into_iter().take(1) {
        let (mut server, port) = server().await;
        let mut child = command(&python, "through_steps.py", &server, port)
            .env("ATOLL_CLI", atoll_proof::binary())
            .env("ATOLL_DATA", server.data())
            .env(
                "SANDBOX_SPEC",
                server.request(&atoll_proof::json!({})).to_string(),
            )
            .spawn()
            .unwrap();
        let mut said = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut last = String::new();
        let ended = tokio::time::timeout(PATIENCE, async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line == "kill" {
                    server.kill_9();
                    server.start_again().await;
                    said.write_all(b"go\n").await.unwrap();
                }
                last = line;
            }
            child.wait_with_output().await.unwrap()
        })
        .await
        .expect("the script is stuck");
        let err = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && last == "all ok", "{last}\n{err}");
        server.finish().await;
    }
}

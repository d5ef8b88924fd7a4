//! The server killed with -9 while it writes: whatever was acknowledged is there, whole.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use atoll_store::{FactQuery, Inserted, NewSandbox, sqlite};

use crate::support::{Context, T0, project_id, sandbox_id};

const DATABASE: &str = "ATOLL_STORE_CRASH_TEST_DATABASE";

#[tokio::test]
async fn what_was_acknowledged_survives_kill_9() {
    let context = Context::new().await;
    context.store.database.close().await;
    for round in 0..3u32 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["crash::write_until_killed", "--exact", "--ignored", "--nocapture"])
            .env(DATABASE, context.path())
            .env("ATOLL_STORE_CRASH_TEST_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let acknowledged: Vec<u32> = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .filter_map(|line| line.unwrap().strip_prefix("written ")?.parse().ok())
            .take(200)
            .collect();
        // The child is in the middle of its next writes.
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(acknowledged.len(), 200);

        let store = sqlite::open(&context.path()).unwrap();
        for n in &acknowledged {
            let row = store
                .sandboxes
                .sandbox_of_any_project(&sandbox_id(*n))
                .await
                .unwrap();
            assert!(row.is_some(), "sandbox {n} was acknowledged and is gone");
        }
        // A row and its fact share a fate.
        let rows = store
            .sandboxes
            .count_live_sandboxes(&context.project.id)
            .await
            .unwrap();
        assert_eq!(
            u64::try_from(store.ledger.last_seq().await.unwrap()).unwrap(),
            rows
        );
        let facts = store
            .ledger
            .facts(FactQuery {
                project: context.project.id.clone(),
                sandbox: None,
                kinds: vec![],
                after_seq: 0,
                limit: 10,
            })
            .await
            .unwrap();
        assert_eq!(facts.len(), 10);
        store.database.close().await;
    }
}

/// Not a test: the process that the test above kills.
#[tokio::test]
#[ignore = "started by what_was_acknowledged_survives_kill_9"]
async fn write_until_killed() {
    let (Ok(database), Ok(round)) = (
        std::env::var(DATABASE),
        std::env::var("ATOLL_STORE_CRASH_TEST_ROUND"),
    ) else {
        return;
    };
    let first = round.parse::<u32>().unwrap() * 1_000_000;
    let store = sqlite::open(database.as_ref()).unwrap();
    let project = store
        .identity
        .ensure_project("default", project_id(1), T0)
        .await
        .unwrap();
    let writers: Vec<_> = (0..8u32)
        .map(|writer| {
            let (store, project) = (store.clone(), project.clone());
            tokio::spawn(async move {
                for n in (first + writer..first + 1_000_000).step_by(8) {
                    let new = NewSandbox {
                        row: crate::support::sandbox_row(&project.id, n, T0),
                        idempotency: None,
                        max_live: None,
                        facts: vec![atoll_store::NewFact {
                            at: T0,
                            project: project.id.clone(),
                            sandbox: Some(sandbox_id(n)),
                            fact: atoll_store::Fact::Other {
                                kind: "test".into(),
                                data: n.into(),
                            },
                        }],
                    };
                    let inserted = store.sandboxes.insert_sandbox(new).await.unwrap();
                    assert!(matches!(inserted, Inserted::New(_)));
                    let mut out = std::io::stdout().lock();
                    // The parent stops reading before it kills.
                    if writeln!(out, "\nwritten {n}").and_then(|()| out.flush()).is_err() {
                        return;
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

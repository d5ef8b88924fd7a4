//! Killed at moments that nobody chose.
//!
//! The moments come from a seed that is printed; `ATOLL_SEED` repeats them. What must hold afterwards, whatever the
//! moment: what was acknowledged is there, what was not is there as a whole or gone, and nothing runs that no row names.

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use atoll_proof::random::Random;
use atoll_proof::{Client, Sandbox, Server, Value, json, on_every_tier};
use reqwest::Method;

on_every_tier!(
    half_made_creations_are_cleaned_up,
    a_mixed_load_survives_kills,
    half_done_deletions_are_finished
);

const ALL_STATES: [&str; 5] = ["starting", "running", "deleting", "deleted", "failed"];

/// Lets a moment of chance pass. Not a synchronization: any moment is right.
async fn a_moment(random: &mut Random, at_most_millis: u64) {
    tokio::time::sleep(Duration::from_millis(random.below(at_most_millis))).await;
}

/// Waits until no sandbox is on its way from one state to another.
async fn settled(server: &Server) -> BTreeMap<String, Value> {
    atoll_proof::wait::until("every sandbox has settled", Duration::from_secs(30), || async {
        let all = server.list(&ALL_STATES).await;
        let moving = all
            .iter()
            .any(|sandbox| sandbox["state"] == "starting" || sandbox["state"] == "deleting");
        (!moving).then(|| {
            all.into_iter()
                .map(|sandbox| (sandbox["id"].as_str().unwrap().to_owned(), sandbox))
                .collect()
        })
    })
    .await
}

/// Asserts that exactly the running sandboxes hold something on the machine.
async fn assert_rows_and_instances_agree(server: &Server, rows: &BTreeMap<String, Value>) {
    let running: BTreeSet<String> = rows
        .values()
        .filter(|row| row["state"] == "running")
        .map(|row| row["instance"].as_str().unwrap().to_owned())
        .collect();
    let mut held = BTreeSet::new();
    atoll_proof::wait::becomes_true(Duration::from_secs(10), || {
        held = server.held().instances.into_iter().collect();
        held == running
    });
    assert_eq!(held, running, "rows and directories disagree");
    let cgroups: BTreeSet<String> = server.held().cgroups.into_iter().collect();
    assert_eq!(
        cgroups.len(),
        running.len(),
        "rows and cgroups disagree: {cgroups:?}"
    );
    // The files of a jail are on a device each.
    let jails = rows
        .values()
        .filter(|row| row["state"] == "running" && row["isolation"] == "jail");
    let held = server.held();
    assert!(held.mounts.is_empty(), "{held}");
    assert_eq!(held.loop_devices.len(), jails.count(), "{held}");
}

async fn half_made_creations_are_cleaned_up(server: &mut Server) {
    let mut random = Random::seeded();
    let mut total = 0;
    for _ in 0..6 {
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let creating: Vec<_> = (0..6)
            .map(|_| {
                let (client, body, acknowledged) = (
                    server.client().clone(),
                    server.request(&json!({})),
                    Arc::clone(&acknowledged),
                );
                tokio::spawn(async move {
                    let request = client.request(Method::POST, "/v1/sandboxes").json(&body);
                    if let Ok(answer) = client.try_send(request).await
                        && answer.status == 201
                    {
                        acknowledged
                            .lock()
                            .push(answer.json()["id"].as_str().unwrap().to_owned());
                    }
                })
            })
            .collect();
        a_moment(&mut random, 500).await;
        server.kill_9();
        for task in creating {
            task.await.unwrap();
        }
        server.start_again().await;
        let rows = settled(server).await;
        let acknowledged = std::mem::take(&mut *acknowledged.lock());
        total += rows.len();
        for id in &acknowledged {
            assert_eq!(rows[id]["state"], "running", "acknowledged, and now {}", rows[id]);
            Sandbox {
                client: server.client().clone(),
                id: id.clone(),
            }
            .assert_works()
            .await;
        }
        for row in rows.values().filter(|row| row["state"] == "failed") {
            assert!(row["end"]["message"].as_str().unwrap().len() > 10, "{row}");
        }
        assert_rows_and_instances_agree(server, &rows).await;
        for row in rows.values().filter(|row| row["state"] == "running") {
            Sandbox::of(server.client(), row).kill().await;
        }
    }
    assert!(
        total > 0,
        "the server was always killed before it had begun anything"
    );
}

async fn half_done_deletions_are_finished(server: &mut Server) {
    let mut random = Random::seeded();
    for _ in 0..4 {
        let sandboxes = futures_util::future::join_all((0..5).map(|_| server.sandbox())).await;
        let deleting: Vec<_> = sandboxes
            .iter()
            .map(|sandbox| {
                let sandbox = sandbox.clone();
                tokio::spawn(async move {
                    let request = sandbox.client.request(Method::DELETE, &sandbox.path(""));
                    sandbox
                        .client
                        .try_send(request)
                        .await
                        .is_ok_and(|answer| answer.status == 200)
                })
            })
            .collect();
        a_moment(&mut random, 120).await;
        server.kill_9();
        let mut acknowledged = Vec::new();
        for (task, sandbox) in deleting.into_iter().zip(&sandboxes) {
            if task.await.unwrap() {
                acknowledged.push(sandbox.id.clone());
            }
        }
        server.start_again().await;
        let rows = settled(server).await;
        for id in acknowledged {
            assert_eq!(
                rows[&id]["state"], "deleted",
                "acknowledged, and now {}",
                rows[&id]
            );
        }
        assert_rows_and_instances_agree(server, &rows).await;
        for row in server.list(&[]).await {
            let sandbox = Sandbox::of(server.client(), &row);
            sandbox.assert_works().await;
            sandbox.kill().await;
        }
        server.assert_nothing_held().await;
    }
}

/// What a worker was told, and therefore may rely on.
#[derive(Debug, Default)]
struct Told {
    created: BTreeSet<String>,
    /// Asked to be deleted, acknowledged or not.
    condemned: BTreeSet<String>,
    deleted: BTreeSet<String>,
    /// Sandbox, path, content.
    files: Vec<(String, String, String)>,
    /// Sandbox and command.
    background: Vec<(String, String)>,
    artifacts: BTreeMap<String, String>,
}

/// Creates, uses and deletes until the server is gone.
async fn work(client: Client, create: Value, mut random: Random, worker: usize, told: Arc<Mutex<Told>>) {
    let mut own: Vec<String> = Vec::new();
    for step in 0.. {
        let choice = random.below(10);
        let sandbox = own.first().map(|id| Sandbox {
            client: client.clone(),
            id: id.clone(),
        });
        let outcome = match (choice, sandbox) {
            (0..=2, _) | (_, None) if own.len() < 3 => {
                let request = client.request(Method::POST, "/v1/sandboxes").json(&create);
                client.try_send(request).await.map(|answer| {
                    if answer.status == 201 {
                        let id = answer.json()["id"].as_str().unwrap().to_owned();
                        told.lock().created.insert(id.clone());
                        own.push(id);
                    }
                })
            }
            (3, Some(sandbox)) => {
                told.lock().condemned.insert(sandbox.id.clone());
                own.remove(0);
                let request = client.request(Method::DELETE, &sandbox.path(""));
                client.try_send(request).await.map(|answer| {
                    if answer.status == 200 {
                        told.lock().deleted.insert(sandbox.id);
                    }
                })
            }
            (4..=5, Some(sandbox)) => {
                let (path, content) = (
                    format!("/tmp/{worker}-{step}"),
                    format!("content {worker} {step}"),
                );
                let request = client
                    .request(Method::PUT, &sandbox.path("/files/content"))
                    .query(&[("path", &path)]);
                client
                    .try_send(request.body(content.clone()))
                    .await
                    .map(|answer| {
                        if answer.status == 200 {
                            told.lock().files.push((sandbox.id, path, content));
                        }
                    })
            }
            (6, Some(sandbox)) => {
                let body = json!({"cmd": "while :; do sleep 0.1; done", "background": true});
                let request = client.request(Method::POST, &sandbox.path("/exec")).json(&body);
                client.try_send(request).await.map(|answer| {
                    if answer.status == 202 {
                        let command = answer.json()["command"].as_str().unwrap().to_owned();
                        told.lock().background.push((sandbox.id, command));
                    }
                })
            }
            (7, Some(sandbox)) => {
                let name = format!("artifact-{worker}-{step}");
                let request = client.request(Method::POST, &sandbox.path("/artifacts"));
                client
                    .try_send(request.json(&json!({"name": name, "path": "/etc/passwd"})))
                    .await
                    .map(|answer| {
                        if answer.status == 201 {
                            let digest = answer.json()["digest"].as_str().unwrap().to_owned();
                            told.lock().artifacts.insert(name, digest);
                        }
                    })
            }
            (_, Some(sandbox)) => {
                let request = client
                    .request(Method::POST, &sandbox.path("/exec"))
                    .json(&json!({"cmd": "echo hi"}));
                client.try_send(request).await.map(|_| ())
            }
            (_, None) => Ok(()),
        };
        if outcome.is_err() {
            return;
        }
    }
}

async fn a_mixed_load_survives_kills(server: &mut Server) {
    let mut random = Random::seeded();
    let told = Arc::new(Mutex::new(Told::default()));
    let mut created = 0;
    for round in 0..5 {
        let create = server.request(&json!({"labels": {"round": round.to_string()}}));
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let random = Random::from_seed(random.next());
                tokio::spawn(work(
                    server.client().clone(),
                    create.clone(),
                    random,
                    worker + round * 10,
                    Arc::clone(&told),
                ))
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(200)).await;
        a_moment(&mut random, 1500).await;
        server.kill_9();
        for task in workers {
            task.await.unwrap();
        }
        server.start_again().await;
        let rows = settled(server).await;
        assert_rows_and_instances_agree(server, &rows).await;
        let seen = std::mem::take(&mut *told.lock());
        eprintln!(
            "round {round}: {} created, {} deleted, {} files, {} commands, {} artifacts",
            seen.created.len(),
            seen.deleted.len(),
            seen.files.len(),
            seen.background.len(),
            seen.artifacts.len()
        );
        assert_promises(server, &rows, &seen).await;
        created += seen.created.len();
        for row in server.list(&[]).await {
            Sandbox::of(server.client(), &row).kill().await;
        }
    }
    assert!(
        created > 0,
        "the server was always killed before it had acknowledged anything"
    );
}

async fn assert_promises(server: &Server, rows: &BTreeMap<String, Value>, told: &Told) {
    for id in &told.created {
        let state = &rows[id]["state"];
        let deleted = told.deleted.contains(id);
        let condemned = told.condemned.contains(id);
        let right = if deleted {
            state == "deleted"
        } else {
            state == "running" || (condemned && state == "deleted")
        };
        assert!(
            right,
            "created {id}, deleted: {deleted}, condemned: {condemned}, and now {}",
            rows[id]
        );
    }
    let alive = |id: &str| rows[id]["state"] == "running";
    for (id, path, content) in told.files.iter().filter(|(id, ..)| alive(id)) {
        let sandbox = Sandbox {
            client: server.client().clone(),
            id: id.clone(),
        };
        assert_eq!(sandbox.read(path).await, content.as_bytes(), "{id} {path}");
    }
    for (id, command) in told.background.iter().filter(|(id, _)| alive(id)) {
        let sandbox = Sandbox {
            client: server.client().clone(),
            id: id.clone(),
        };
        assert_eq!(sandbox.command(command).await["state"], "running");
    }
    for (name, digest) in &told.artifacts {
        let artifact = server.client().get(&format!("/v1/artifacts/{name}")).await.ok();
        assert_eq!(artifact["digest"].as_str(), Some(digest.as_str()));
        let content = server
            .client()
            .get(&format!("/v1/artifacts/{name}/content"))
            .await
            .expect(200);
        assert_eq!(
            content.body.len() as u64,
            artifact["size_bytes"].as_u64().unwrap()
        );
    }
}

//! The server is killed at many moments in the middle of everything that changes state.
//!
//! `ATOLL_CRASH_POINTS` says at how many; `ATOLL_SEED` repeats the choices. Workers remember what was acknowledged. After
//! each restart every sandbox is in a state that was acknowledged or asked for, holds what it held, and what nobody knows
//! of is not there.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_proof::random::Random;
use atoll_proof::{Sandbox, Server, Value, json, on_every_tier};
use futures_util::future::join_all;

use super::load::{Content, Found, Known, Promise, State, VOLUME, Worker};
use super::{assert_no_leaks, manifests, packs, settled, snapshots};

on_every_tier!(state_survives_kills_at_any_moment);

const WORKERS: usize = 3;
/// How many sandboxes and snapshots of one worker go on into the next round.
const CARRIED: usize = 2;

#[derive(Debug, Default)]
struct Tally {
    points: usize,
    states: usize,
    files: usize,
    memories: usize,
    snapshots: usize,
    forks: usize,
    strays: usize,
}

fn points() -> usize {
    let given = std::env::var("ATOLL_CRASH_POINTS").ok();
    given.map_or(6, |text| text.parse().expect("ATOLL_CRASH_POINTS is a number"))
}

async fn state_survives_kills_at_any_moment(server: &mut Server) {
    let mut random = Random::seeded();
    let volume = json!({"name": VOLUME, "size_bytes": 64 << 20});
    server.client().post("/v1/volumes", &volume).await.expect(201);
    let mut workers: Vec<Worker> = (0..WORKERS)
        .map(|number| Worker::new(number, server, Random::from_seed(random.next())))
        .collect();
    let mut tally = Tally::default();
    while tally.points < points() {
        let working: Vec<_> = workers
            .into_iter()
            .map(|worker| tokio::spawn(worker.work()))
            .collect();
        // Any moment is right.
        tokio::time::sleep(Duration::from_millis(50 + random.below(2500))).await;
        server.kill_9();
        workers = Vec::new();
        for worker in working {
            workers.push(worker.await.unwrap());
        }
        tally.points += 1;
        // Now and then also while it recovers.
        while random.below(4) == 0 {
            let moment = Duration::from_millis(random.below(400));
            server.start_and_kill(moment).await;
            tally.points += 1;
        }
        server.start_again().await;
        check(server, &mut workers, &mut tally).await;
        eprintln!("{tally:?}");
    }
    let mut told: BTreeMap<&str, usize> = BTreeMap::new();
    for (what, count) in workers.iter().flat_map(|worker| &worker.told) {
        *told.entry(what).or_default() += count;
    }
    assert!(
        told.len() > 3 || points() < 6,
        "the server was always killed too early: {told:?}"
    );
    end_everything(server).await;
    eprintln!("acknowledged: {told:?}");
    eprintln!(
        "crash test on {}: {} points killed, {} states checked ({} files, {} memories, {} snapshots, {} forks, {} \
         unacknowledged), leaks 0",
        server.tier.name(),
        tally.points,
        tally.states,
        tally.files,
        tally.memories,
        tally.snapshots,
        tally.forks,
        tally.strays,
    );
}

/// Compares the server with what the workers know, and makes them know what it has become.
async fn check(server: &Server, workers: &mut [Worker], tally: &mut Tally) {
    let rows = settled(server).await;
    for worker in workers.iter_mut() {
        worker.client = server.client().clone();
        check_fork(&rows, worker, tally);
    }
    end_strays(server, &rows, workers, tally).await;
    let checked = join_all(workers.iter_mut().map(|worker| check_worker(server, worker)));
    for part in checked.await {
        tally.states += part.states;
        tally.files += part.files;
        tally.memories += part.memories;
        tally.snapshots += part.snapshots;
    }
    check_volume(server, workers, tally).await;
    assert_no_leaks(server).await;
}

/// All copies of a fork that nobody was told of, or none.
fn check_fork(rows: &[Value], worker: &mut Worker, tally: &mut Tally) {
    let Some((tag, count)) = worker.fork.take() else {
        return;
    };
    let copies: Vec<&Value> = rows
        .iter()
        .filter(|row| row["labels"]["fork"] == json!(tag))
        .collect();
    assert!(
        [0, count].contains(&copies.len()) && copies.iter().all(|copy| copy["state"] == "running"),
        "{} of {count} copies of a fork: {copies:?}",
        copies.len()
    );
    tally.forks += 1;
}

/// Sandboxes whose creation was not acknowledged may be there; they work, and are ended. Those that failed say why.
async fn end_strays(server: &Server, rows: &[Value], workers: &[Worker], tally: &mut Tally) {
    let known = |id: &Value| {
        let mut all = workers.iter().flat_map(|worker| &worker.sandboxes);
        all.any(|known| *id == json!(known.id))
    };
    for row in rows.iter().filter(|row| !known(&row["id"])) {
        assert_eq!(row["state"], "running", "nobody asked for more: {row}");
        let sandbox = Sandbox::of(server.client(), row);
        sandbox.assert_works().await;
        sandbox.kill().await;
        tally.strays += 1;
    }
    for row in server.list(&["failed"]).await {
        assert_eq!(row["end"]["reason"], "start_failed", "{row}");
        assert!(!known(&row["id"]), "it was acknowledged, and failed: {row}");
        Sandbox::of(server.client(), &row).kill().await;
        tally.strays += 1;
    }
}

async fn check_worker(server: &Server, worker: &mut Worker) -> Tally {
    let mut tally = Tally::default();
    for id in std::mem::take(&mut worker.ended) {
        assert_eq!(worker.sandbox(&id).state().await, "deleted");
        tally.states += 1;
    }
    for mut known in std::mem::take(&mut worker.sandboxes) {
        tally.states += 1;
        let sandbox = worker.sandbox(&known.id);
        let row = sandbox.get().await;
        let Some(found) = known.explain(&row) else {
            panic!("{known:?} is now {row}, after {:?}", sandbox.facts().await);
        };
        match found {
            Found::Ended => continue,
            Found::Lives(State::Running) => known.runs(),
            Found::Lives(state) => known.rests(state),
        }
        check_sandbox(worker, &sandbox, &mut known, &mut tally).await;
        if worker.sandboxes.len() < CARRIED {
            worker.sandboxes.push(known);
        } else {
            sandbox.kill().await;
        }
    }
    check_snapshots(server, worker, &mut tally).await;
    tally
}

/// Everything that it holds for sure is there; one that rests is woken to look, mostly.
async fn check_sandbox(worker: &mut Worker, sandbox: &Sandbox, known: &mut Known, tally: &mut Tally) {
    if known.state != State::Running {
        let refused = sandbox.exec(&json!({"cmd": "true"})).await;
        assert_eq!(refused.status, 409, "{refused:?}");
        if worker.chance(3) {
            return;
        }
        let woken = super::ask(sandbox, "resume", &json!({})).await.ok();
        assert_eq!(woken["state"], "running");
        known.runs();
    }
    check_content(sandbox, &mut known.content, tally).await;
}

async fn check_content(sandbox: &Sandbox, content: &mut Content, tally: &mut Tally) {
    for (path, text) in &content.files {
        let found = sandbox.read(path).await;
        assert!(
            found == text.as_bytes(),
            "{path} in {} has other content",
            sandbox.id
        );
        tally.files += 1;
    }
    if let Some(counter) = &mut content.counter {
        counter.goes_on(sandbox).await;
        tally.memories += 1;
    }
    sandbox.assert_works().await;
}

async fn check_snapshots(server: &Server, worker: &mut Worker, tally: &mut Tally) {
    for name in std::mem::take(&mut worker.forgotten) {
        let gone = server.client().get(&format!("/v1/snapshots/{name}")).await;
        gone.refused(404, "snapshot_not_found");
        tally.states += 1;
    }
    for mut kept in std::mem::take(&mut worker.snapshots) {
        tally.states += 1;
        let found = server.client().get(&format!("/v1/snapshots/{}", kept.name)).await;
        if found.status == 404 {
            assert_ne!(kept.promise, Promise::Kept, "{} was acknowledged", kept.name);
            continue;
        }
        found.ok();
        // Whole, also if nobody was told. Old ones now and then.
        if !kept.checked || worker.chance(4) {
            let mut create = json!({"template": kept.name});
            if kept.content.volume {
                create["volumes"] = json!([{"volume": VOLUME, "path": "/data"}]);
            }
            let copy = server.sandbox_with(&create).await;
            check_content(&copy, &mut kept.content.clone(), tally).await;
            copy.kill().await;
            tally.snapshots += 1;
        }
        if worker.snapshots.len() < CARRIED {
            (kept.promise, kept.checked) = (Promise::Kept, true);
            worker.snapshots.push(kept);
        } else {
            let path = format!("/v1/snapshots/{}", kept.name);
            server.client().delete(&path).await.expect(204);
        }
    }
}

/// What was written into the volume is in it, however the sandboxes that wrote it ended.
async fn check_volume(server: &Server, workers: &[Worker], tally: &mut Tally) {
    let content = server
        .client()
        .get(&format!("/v1/volumes/{VOLUME}/content"))
        .await
        .expect(200);
    let mut found = BTreeMap::new();
    for entry in tar::Archive::new(content.body.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry
            .path()
            .unwrap()
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        let mut text = String::new();
        std::io::Read::read_to_string(&mut entry, &mut text).unwrap();
        found.insert(name.unwrap_or_default(), text);
    }
    for (name, text) in workers.iter().flat_map(|worker| &worker.volume_files) {
        let (is, was) = (found.get(name).map(String::len), text.len());
        assert!(
            found.get(name) == Some(text),
            "{name} is not in the volume as it was written: {is:?} instead of {was} bytes, among {:?}",
            found.keys()
        );
        tally.files += 1;
    }
}

/// When everything is ended and deleted, nothing is left of it.
async fn end_everything(server: &Server) {
    for row in server.list(&[]).await {
        Sandbox::of(server.client(), &row).kill().await;
    }
    for snapshot in snapshots(server).await {
        let path = format!("/v1/snapshots/{}", snapshot["id"].as_str().unwrap());
        server.client().delete(&path).await.expect(204);
    }
    server
        .client()
        .delete(&format!("/v1/volumes/{VOLUME}"))
        .await
        .expect(204);
    assert_no_leaks(server).await;
    assert!(
        manifests(server).is_empty() && packs(server).is_empty(),
        "{:?}",
        packs(server)
    );
    assert_eq!(
        atoll_proof::host::names_in(&server.data().join("volumes")).len(),
        1,
        "only its lock is left"
    );
    server.assert_nothing_held().await;
}

//! What happens while nobody serves: deadlines pass, instances die, leftovers appear.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use atoll_guest_protocol::{Decoder, FrameKind, GENERATION, Hello, Welcome, decode, encode, encode_into};
use atoll_proof::stream::Events;
use atoll_proof::{Server, host, json, on_every_tier};

on_every_tier!(
    deadlines_that_passed_are_kept,
    what_died_meanwhile_is_lost,
    an_agent_of_another_generation_is_named,
    what_nobody_owns_is_destroyed,
    usage_survives,
);

mod building {
    use super::a_build_that_was_cut_off_leaves_nothing;

    atoll_proof::on_every_tier!(
        with atoll_proof::Options::default().own_templates();
        a_build_that_was_cut_off_leaves_nothing,
    );
}

/// In the middle of a `RUN`: no template, no sandbox, no file stays, and the same can be built again.
async fn a_build_that_was_cut_off_leaves_nothing(server: &mut Server) {
    let files = |server: &Server| {
        let mut all: Vec<_> = [server.templates(), server.data().join("scratch")]
            .iter()
            .flat_map(|dir| walkdir(dir))
            .collect();
        all.sort();
        all
    };
    let before = files(server);
    let _events = build(server, "sleep 1000").await;
    let minute = Duration::from_secs(60);
    atoll_proof::wait::until_sync("a step runs", minute, || {
        (!server.held().instances.is_empty()).then_some(())
    })
    .await;
    server.kill_9();
    server.start_again().await;
    server.client().get("/v1/templates/half").await.expect(404);
    server.assert_nothing_held().await;
    assert_eq!(files(server), before);
    let done = build(server, "echo whole > /etc/half").await.rest().await;
    assert_eq!(done.last().unwrap().name, "done", "{done:?}");
    let sandbox = server.sandbox_with(&json!({"template": "half"})).await;
    assert_eq!(sandbox.read("/etc/half").await, b"whole\n");
    sandbox.kill().await;
}

/// Has a template `half` built, of `base` and one step.
async fn build(server: &Server, step: &str) -> Events {
    let dockerfile = format!("FROM base\nRUN {step}\n");
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(dockerfile.len() as u64);
    header.set_mode(0o644);
    archive
        .append_data(&mut header, "Dockerfile", dockerfile.as_bytes())
        .unwrap();
    let client = server.client();
    let request = client
        .request(reqwest::Method::POST, "/v1/templates/build-context?name=half")
        .header("content-type", "application/octet-stream")
        .body(archive.into_inner().unwrap());
    Events::of(client.open(request).await)
}

/// All files below.
fn walkdir(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .map(|entry| entry.unwrap())
        .flat_map(|entry| match entry.file_type().unwrap().is_dir() {
            true => walkdir(&entry.path()),
            false => vec![entry.path()],
        })
        .collect()
}

/// Until this much time has passed since `began`: a deadline is about time, so time is the condition.
async fn until_elapsed(began: Instant, limit: Duration) {
    atoll_proof::wait::until_sync("time passes", limit * 2, || {
        (began.elapsed() > limit).then_some(())
    })
    .await;
}

async fn deadlines_that_passed_are_kept(server: &mut Server) {
    let began = Instant::now();
    let timed = server.sandbox_with(&json!({"timeout_ms": 2000})).await;
    let idle = server.sandbox_with(&json!({"idle": {"after_ms": 2000}})).await;
    let long = server.sandbox().await;
    server.kill_9();
    until_elapsed(began, Duration::from_millis(2500)).await;
    assert_eq!(server.held().instances.len(), 3, "nobody was there to end them");
    server.start_again().await;
    let ended = server.again(&timed).until_state("deleted").await;
    assert_eq!(ended["end"]["reason"], "timed_out");
    let ended = server.again(&idle).until_state("deleted").await;
    assert_eq!(ended["end"]["reason"], "idle");
    server.again(&long).assert_works().await;
    // And those that come later are kept by the new server.
    let sandbox = server.again(&long);
    sandbox
        .client
        .post(&sandbox.path("/extend"), &json!({"timeout_ms": 1500}))
        .await
        .ok();
    server.kill_9();
    server.start_again().await;
    assert_eq!(
        server.again(&long).until_state("deleted").await["end"]["reason"],
        "timed_out"
    );
}

/// As after an upgrade: the instance is there and answers, but not in words that this server knows.
async fn an_agent_of_another_generation_is_named(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let instance = sandbox.get().await["instance"].as_str().unwrap().to_owned();
    server.kill_9();
    // The agent of this build cannot be made to speak otherwise; so this test answers in its place.
    let dir = server.data().join("instances").join(&instance);
    for name in ["in", "out"] {
        let fifo = dir.join(name);
        std::fs::rename(&fifo, dir.join(format!("{name}.agent"))).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
    }
    let open = |name: &str| {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).open(dir.join(name)).unwrap()
    };
    let (mut from_host, mut to_host) = (open("in"), open("out"));
    let agent = std::thread::spawn(move || {
        let mut decoder = Decoder::new();
        loop {
            let count = from_host.read(decoder.space()).unwrap();
            decoder.filled(count);
            while let Some(frame) = decoder.next_frame() {
                if frame.kind != FrameKind::Hello {
                    continue;
                }
                let welcome = Welcome {
                    generation: GENERATION + 5,
                    nonce: decode::<Hello>(frame.payload).unwrap().nonce,
                };
                let mut answer = Vec::new();
                encode_into(&mut answer, FrameKind::Welcome, 0, 0, &encode(&welcome));
                to_host.write_all(&answer).unwrap();
                return;
            }
        }
    });
    server.start_again().await;
    agent.join().unwrap();
    let record = server.again(&sandbox).until_state("failed").await;
    assert_eq!(record["end"]["reason"], "incompatible", "{record}");
    let expected = format!(
        "generation {} of the guest protocol, this server {GENERATION}",
        GENERATION + 5
    );
    assert!(
        record["end"]["message"].as_str().unwrap().contains(&expected),
        "{record}"
    );
    server.assert_nothing_held().await;
}

/// As after a reboot: the rows are there, the instances are not.
async fn what_died_meanwhile_is_lost(server: &mut Server) {
    let sandboxes = [server.sandbox().await, server.sandbox().await];
    sandboxes[0].background("sleep 1000").await;
    server.kill_9();
    host::cgroup_kill(server.cgroup());
    server.start_again().await;
    for sandbox in &sandboxes {
        let record = server.again(sandbox).until_state("failed").await;
        assert_eq!(record["end"]["reason"], "lost", "{record}");
        assert!(record["instance"].is_null() && record["ended_at"].is_string());
        let refused = server.again(sandbox).exec(&json!({"cmd": "true"})).await;
        assert!([409, 410].contains(&refused.status), "{refused:?}");
    }
    server.assert_nothing_held().await;
    // One instance dies, the other lives.
    let (dead, alive) = (server.sandbox().await, server.sandbox().await);
    let instance = dead.get().await["instance"].as_str().unwrap().to_owned();
    server.kill_9();
    host::cgroup_kill(&format!("{}/{instance}", server.cgroup()));
    server.start_again().await;
    assert_eq!(
        server.again(&dead).until_state("failed").await["end"]["reason"],
        "lost"
    );
    server.again(&alive).assert_works().await;
    assert_eq!(
        server.again(&dead).kill().await["state"],
        "deleted",
        "a failed sandbox can be cleared away"
    );
    server.again(&sandboxes[0]).kill().await;
}

/// Instances, and pieces of them, that no row names: what a crash in the middle of a start leaves.
async fn what_nobody_owns_is_destroyed(server: &mut Server) {
    let sandbox = server.sandbox().await;
    server.kill_9();
    let instances = server.data().join("instances");
    let empty = instances.join("ins_aaaaaaaaaaaaaaaaaaaa");
    std::fs::create_dir(&empty).unwrap();
    let torn = instances.join("ins_bbbbbbbbbbbbbbbbbbbb");
    std::fs::create_dir(&torn).unwrap();
    std::fs::write(torn.join("instance.json"), "{\"id\": \"ins_").unwrap();
    let unnamed = instances.join(".new-ins_cccccccccccccccccccc");
    std::fs::create_dir(&unnamed).unwrap();
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(24 * 3600);
    std::fs::File::open(&unnamed)
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    for dir in host::cgroup_dirs(server.cgroup()) {
        std::fs::create_dir(dir.join("ins_dddddddddddddddddddd")).unwrap();
    }
    server.start_again().await;
    server.again(&sandbox).assert_works().await;
    let instance = sandbox_instance(server, &sandbox.id).await;
    let only = std::collections::BTreeSet::from([instance]);
    let removed =
        atoll_proof::wait::becomes_true(Duration::from_secs(15), || host::names_in(&instances) == only);
    assert!(removed, "leftovers stay: {:?}", host::names_in(&instances));
    for dir in host::cgroup_dirs(server.cgroup()) {
        let _gone = std::fs::remove_dir(dir.join("ins_dddddddddddddddddddd"));
    }
}

async fn sandbox_instance(server: &Server, id: &str) -> String {
    let record = server.client().get(&format!("/v1/sandboxes/{id}")).await.ok();
    record["instance"].as_str().unwrap().to_owned()
}

/// What was used before and after a crash is counted once.
async fn usage_survives(server: &mut Server) {
    let sandbox = server.sandbox().await;
    let began = Instant::now();
    sandbox.run(&["python3", "-c", "sum(range(3000000))"]).await.ok();
    server.kill_9();
    until_elapsed(began, Duration::from_millis(1000)).await;
    server.start_again().await;
    let sandbox = server.again(&sandbox);
    sandbox.run(&["python3", "-c", "sum(range(3000000))"]).await.ok();
    sandbox.kill().await;
    let lived = u64::try_from(began.elapsed().as_millis()).unwrap();
    let usage = atoll_proof::wait::until("usage is recorded", Duration::from_secs(20), || async {
        let usage = sandbox.client.get(&sandbox.path("/usage")).await.ok();
        (usage["wall_ms"].as_u64() > Some(0)).then_some(usage)
    })
    .await;
    let wall = usage["wall_ms"].as_u64().unwrap();
    assert!(
        (900..=lived + 1000).contains(&wall),
        "{usage} of about {lived} ms"
    );
    assert!(usage["cpu_micros"].as_u64().unwrap() > 20_000, "{usage}");
    let ended: Vec<_> = sandbox
        .facts()
        .await
        .into_iter()
        .filter(|fact| fact["kind"] == "sandbox.ended")
        .collect();
    assert_eq!(ended.len(), 1, "a sandbox ends once");
}

//! The machine goes down, or time passes, while nobody serves.

use std::time::{Duration, Instant};

use atoll_proof::{Sandbox, Server, host, json, on_every_tier, wait};

use super::{Counter, Kind, ask, assert_no_leaks, pause, resume, snapshot};

on_every_tier!(
    what_rests_survives_a_reboot,
    retention_that_passed_meanwhile_is_kept,
    a_deadline_that_passed_meanwhile_puts_to_rest,
);

/// Everything that a reboot ends has ended: processes, mounts, devices.
fn reboot(server: &mut Server, with_state: bool) {
    server.kill_9();
    host::cgroup_kill(server.cgroup());
    for (pid, _) in host::processes_naming(&server.data()) {
        host::kill(pid, rustix::process::Signal::KILL);
    }
    let unmounted = wait::becomes_true(Duration::from_secs(10), || {
        for mount in host::mounts_below(&server.data()) {
            let _busy = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::empty());
        }
        let held = server.held();
        held.mounts.is_empty() && held.loop_devices.is_empty() && held.processes.is_empty()
    });
    assert!(unmounted, "{}", server.held());
    host::cgroup_remove(server.cgroup());
    if !with_state {
        // As where it lies in memory.
        for dir in ["instances", "uids"] {
            std::fs::remove_dir_all(server.data().join(dir)).unwrap();
        }
    }
}

async fn what_rests_survives_a_reboot(server: &mut Server) {
    let volume = json!({"name": "data", "size_bytes": 32 << 20});
    server.client().post("/v1/volumes", &volume).await.expect(201);
    let with_volume = json!({"volumes": [{"volume": "data", "path": "/data"}]});
    let (mut paused, mut stopped) = (server.sandbox_with(&with_volume).await, server.sandbox().await);
    paused.write("/data/note", b"in the volume").await;
    let kind = Kind::most(server.tier);
    let mut counter = None;
    if kind == Kind::Memory {
        counter = Some(Counter::start(&paused, "counter").await);
    }
    for sandbox in [&paused, &stopped] {
        sandbox.write("/home/user/note", b"kept").await;
    }
    snapshot(&paused, "whole", kind).await;
    snapshot(&paused, "files", Kind::Files).await;
    for with_state in [true, false] {
        let running = server.sandbox_with(&with_volume).await;
        running.background("sleep 1000").await;
        pause(&paused).await;
        assert_eq!(ask(&stopped, "stop", &json!({})).await.ok()["state"], "stopped");
        reboot(server, with_state);
        server.start_again().await;
        let lost = server.again(&running).until_state("failed").await;
        assert_eq!(lost["end"]["reason"], "lost", "{lost}");
        assert!(lost["end"]["message"].as_str().unwrap().len() > 10, "{lost}");
        server.again(&running).kill().await;
        (paused, stopped) = (server.again(&paused), server.again(&stopped));
        assert_eq!(
            (paused.state().await, stopped.state().await),
            ("paused".into(), "stopped".into())
        );
        server.assert_nothing_held().await;
        resume(&paused).await;
        assert_eq!(ask(&stopped, "start", &json!({})).await.ok()["state"], "running");
        for sandbox in [&paused, &stopped] {
            assert_eq!(sandbox.read("/home/user/note").await, b"kept");
        }
        assert_eq!(paused.read("/data/note").await, b"in the volume");
        if let Some(counter) = &mut counter {
            counter.goes_on(&paused).await;
        }
        for name in ["whole", "files"] {
            let mut create = with_volume.clone();
            create["template"] = json!(name);
            let copy = server.sandbox_with(&create).await;
            assert_eq!(copy.read("/home/user/note").await, b"kept");
            assert_eq!(copy.read("/data/note").await, b"in the volume");
            copy.kill().await;
        }
        assert_no_leaks(server).await;
    }
}

/// Until this much time has passed since `began`: this is about time, so time is the condition.
async fn until_elapsed(began: Instant, limit: Duration) {
    wait::until_sync("time passes", limit * 3, || {
        (began.elapsed() > limit).then_some(())
    })
    .await;
}

async fn retention_that_passed_meanwhile_is_kept(server: &mut Server) {
    let (short, long) = (
        server.sandbox_with(&json!({"retention_ms": 2000})).await,
        server.sandbox_with(&json!({"retention_ms": 3_600_000})).await,
    );
    let stopped = server.sandbox_with(&json!({"retention_ms": 2000})).await;
    long.write("/home/user/note", b"kept").await;
    pause(&short).await;
    pause(&long).await;
    assert_eq!(ask(&stopped, "stop", &json!({})).await.ok()["state"], "stopped");
    server.kill_9();
    until_elapsed(Instant::now(), Duration::from_millis(2500)).await;
    server.start_again().await;
    for sandbox in [&short, &stopped] {
        let ended = server.again(sandbox).until_state("deleted").await;
        assert_eq!(ended["end"]["reason"], "expired", "{ended}");
    }
    let long = server.again(&long);
    assert_eq!(long.state().await, "paused");
    resume(&long).await;
    assert_eq!(long.read("/home/user/note").await, b"kept");
    assert_no_leaks(server).await;
}

async fn a_deadline_that_passed_meanwhile_puts_to_rest(server: &mut Server) {
    let made = |action: &str| json!({"timeout_ms": 10_000, "on_timeout": action});
    let (pauses, stops, dies) = (
        server.sandbox_with(&made("pause")).await,
        server.sandbox_with(&made("stop")).await,
        server.sandbox_with(&made("kill")).await,
    );
    let mut counter = None;
    if Kind::most(server.tier) == Kind::Memory {
        counter = Some(Counter::start(&pauses, "counter").await);
    }
    for sandbox in [&pauses, &stops] {
        sandbox.write("/home/user/note", b"kept").await;
    }
    let soon = json!({"timeout_ms": 1500});
    for sandbox in [&pauses, &stops, &dies] {
        ask(sandbox, "extend", &soon).await.ok();
    }
    server.kill_9();
    until_elapsed(Instant::now(), Duration::from_millis(2000)).await;
    assert_eq!(server.held().instances.len(), 3, "nobody was there to end them");
    server.start_again().await;
    let ended = server.again(&dies).until_state("deleted").await;
    assert_eq!(ended["end"]["reason"], "timed_out", "{ended}");
    let again = |sandbox: &Sandbox| server.again(sandbox);
    let (pauses, stops) = (again(&pauses), again(&stops));
    let paused = pauses.until_state("paused").await;
    assert_eq!(
        paused["saved"]["kind"],
        Kind::most(server.tier).name(),
        "{paused}"
    );
    stops.until_state("stopped").await;
    for sandbox in [&pauses, &stops] {
        ask(sandbox, "resume", &json!({"timeout_ms": 300_000})).await.ok();
        assert_eq!(sandbox.read("/home/user/note").await, b"kept");
    }
    if let Some(counter) = &mut counter {
        counter.goes_on(&pauses).await;
    }
    assert_no_leaks(server).await;
}

//! The wall clock jumps while the server runs, and while it does not.

use std::path::Path;
use std::process::Command;

use atoll_proof::{Sandbox, Server, json, on_every_tier};
use tempfile::TempDir;

use super::{Counter, Kind, ask, assert_no_leaks, pause, resume, snapshot};

on_every_tier!(a_clock_that_jumps_ends_only_what_is_due);

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// Adds what stands in a file to the wall clock of whoever loads it.
const SHIM: &str = include_str!("../../../../bench/src/soak/clock.c");

/// The clock of a server.
struct Clock {
    dir: TempDir,
}

impl Clock {
    /// Gives a server that is down a clock that can be set.
    fn of(server: &mut Server) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(dir.path().join("clock.c"), SHIM).unwrap();
        let made = Command::new("cc")
            .args([
                "-shared",
                "-fPIC",
                "-O1",
                "-o",
                &path("clock.so"),
                &path("clock.c"),
                "-ldl",
            ])
            .status();
        assert!(
            made.is_ok_and(|status| status.success()),
            "this test needs a C compiler"
        );
        let clock = Self { dir };
        clock.set(0);
        server.env("LD_PRELOAD", &path_of(&clock.dir, "clock.so"));
        server.env("ATOLL_TEST_CLOCK", &path_of(&clock.dir, "offset"));
        clock
    }

    /// So many seconds ahead of everybody else.
    fn set(&self, seconds: i64) {
        use std::os::unix::fs::FileExt as _;
        let mut options = std::fs::OpenOptions::new();
        let options = options.create(true).truncate(false).write(true);
        let file = options.open(self.dir.path().join("offset")).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }
}

fn path_of(dir: &TempDir, name: &str) -> String {
    Path::new(dir.path()).join(name).display().to_string()
}

async fn a_clock_that_jumps_ends_only_what_is_due(server: &mut Server) {
    server.stop();
    let clock = Clock::of(server);
    server.start_again().await;
    let lasts = |millis: i64, more: atoll_proof::Value| {
        let mut request = json!({"timeout_ms": millis * 1000});
        for (name, value) in more.as_object().unwrap() {
            request[name] = value.clone();
        }
        request
    };
    let (mut long, pauses, dies) = (
        server.sandbox_with(&lasts(12 * HOUR, json!({}))).await,
        server
            .sandbox_with(&lasts(HOUR, json!({"on_timeout": "pause"})))
            .await,
        server.sandbox_with(&lasts(HOUR, json!({}))).await,
    );
    let (mut rests, expires) = (
        server.sandbox().await,
        server.sandbox_with(&json!({"retention_ms": HOUR * 1000})).await,
    );
    let mut counter = None;
    if Kind::most(server.tier) == Kind::Memory {
        counter = Some(Counter::start(&pauses, "counter").await);
    }
    for sandbox in [&rests, &pauses] {
        sandbox.write("/home/user/note", b"kept").await;
    }
    pause(&rests).await;
    pause(&expires).await;

    // Ahead, while it runs.
    clock.set(2 * HOUR);
    // Somebody comes by; otherwise it would take half a minute until this is noticed.
    ask(&long, "extend", &json!({"timeout_ms": 12 * HOUR * 1000}))
        .await
        .ok();
    assert_eq!(dies.until_state("deleted").await["end"]["reason"], "timed_out");
    assert_eq!(expires.until_state("deleted").await["end"]["reason"], "expired");
    pauses.until_state("paused").await;
    assert_eq!(rests.state().await, "paused", "until somebody deletes it");
    long.assert_works().await;
    resume(&pauses).await;
    if let Some(counter) = &mut counter {
        counter.goes_on(&pauses).await;
    }

    // Back, while it runs: everything goes on, and everything works.
    clock.set(-DAY);
    works(server, &[&long, &pauses]).await;
    assert_eq!(rests.state().await, "paused");
    resume(&rests).await;
    assert_eq!(rests.read("/home/user/note").await, b"kept");
    pause(&rests).await;

    // Back further, while it is down.
    server.kill_9();
    clock.set(-30 * DAY);
    server.start_again().await;
    (long, rests) = (server.again(&long), server.again(&rests));
    let pauses = server.again(&pauses);
    works(server, &[&long, &pauses]).await;
    resume(&rests).await;
    assert_eq!(rests.read("/home/user/note").await, b"kept");
    assert_eq!(pauses.read("/home/user/note").await, b"kept");
    if let Some(counter) = &mut counter {
        counter.goes_on(&pauses).await;
    }
    clock.set(0);
    assert_no_leaks(server).await;
}

/// What was there works, and something new can be made, kept, put to rest and woken.
async fn works(server: &Server, old: &[&Sandbox]) {
    for sandbox in old {
        sandbox.assert_works().await;
    }
    let new = server.sandbox().await;
    new.write("/home/user/note", b"new").await;
    let id = snapshot(&new, "now", Kind::most(server.tier)).await;
    pause(&new).await;
    resume(&new).await;
    assert_eq!(new.read("/home/user/note").await, b"new");
    new.kill().await;
    server
        .client()
        .delete(&format!("/v1/snapshots/{id}"))
        .await
        .expect(204);
}

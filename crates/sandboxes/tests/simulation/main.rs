//! The whole service without a machine: seeded interleavings of everything that can happen to sandboxes.
//!
//! ```text
//!   seed ──┬── plan: what callers ask for, and when; who dies; when the server is killed, or stops and starts again
//!          └── script: how long each step of the runtime takes, and how it ends
//!
//!   one thread, one task at a time, time that passes only when nobody has anything to do: same seed, same trace
//! ```
//! What must hold, at every step and when all has settled: see `check`. A seed that fails is printed with the command that
//! plays it again, and goes into `KNOWN`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chance;
mod check;
mod plan;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How many there are to play.
const SEEDS: u64 = 10_000;
/// Of these, how many are played twice.
const TWICE: u64 = 100;
/// Those that failed once.
const KNOWN: &[u64] = &[];
/// More than that do not tell more.
const MOST_FAILURES: usize = 5;
/// Of the real clock: a seed takes milliseconds.
const STUCK_AFTER: Duration = Duration::from_secs(60);

#[test]
fn nothing_that_happens_breaks_what_must_hold() {
    let seeds: Vec<u64> = match std::env::var("ATOLL_SEED") {
        Ok(seed) => vec![seed.parse().expect("ATOLL_SEED is a number")],
        Err(_) => KNOWN.iter().copied().chain(0..seeds()).collect(),
    };
    let next = AtomicU64::new(0);
    let steps = AtomicU64::new(0);
    let (tell, told) = mpsc::channel();
    let failed = std::thread::scope(|scope| {
        for worker in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let (tell, seeds, next, steps) = (tell.clone(), &seeds, &next, &steps);
            scope.spawn(move || {
                let home = world::Home::new();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&seed) = seeds.get(usize::try_from(index).unwrap()) else {
                        return;
                    };
                    let _ = tell.send((worker, Told::Plays(seed)));
                    match play(&home, seed) {
                        Ok(trace) => drop(steps.fetch_add(trace.len() as u64, Ordering::Relaxed)),
                        Err(why) => drop(tell.send((worker, Told::Failed(seed, why)))),
                    }
                }
            });
        }
        drop(tell);
        watch(&told, &next)
    });
    println!("{} seeds, {} steps", seeds.len(), steps.into_inner());
    assert!(failed.is_empty(), "these seeds failed: {failed:?}");
}

enum Told {
    Plays(u64),
    Failed(u64, String),
}

/// Says which seeds fail, and stops after a few. One that never ends fails as well, and ends the test.
fn watch(told: &mpsc::Receiver<(usize, Told)>, next: &AtomicU64) -> Vec<u64> {
    let mut failed = Vec::new();
    let mut playing = BTreeMap::new();
    loop {
        match told.recv_timeout(Duration::from_secs(1)) {
            Ok((worker, Told::Plays(seed))) => drop(playing.insert(worker, (seed, Instant::now()))),
            Ok((_, Told::Failed(seed, why))) => {
                println!("seed {seed}: {why}\n{}", again(seed));
                failed.push(seed);
                if failed.len() == MOST_FAILURES {
                    next.store(u64::MAX / 2, Ordering::Relaxed);
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if let Some((seed, _)) = playing.values().find(|(_, since)| since.elapsed() > STUCK_AFTER) {
                    println!("seed {seed} does not end\n{}", again(*seed));
                    std::process::exit(1);
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return failed,
        }
    }
}

fn again(seed: u64) -> String {
    format!(
        "play it again: ATOLL_SEED={seed} cargo nextest run -p atoll-sandboxes --test simulation --no-capture"
    )
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let (first, second) = (world::Home::new(), world::Home::new());
    for seed in 0..TWICE {
        let (one, other) = (play(&first, seed), play(&second, seed));
        if let Some((one, other)) = one.as_ref().ok().zip(other.as_ref().ok()) {
            for (at, (one, other)) in one.iter().zip(other).enumerate() {
                assert_eq!(one, other, "seed {seed} differs at step {at}");
            }
        }
        assert_eq!(one, other, "seed {seed}");
    }
}

fn seeds() -> u64 {
    match std::env::var("ATOLL_SEEDS") {
        Ok(seeds) => seeds.parse().expect("ATOLL_SEEDS is a number"),
        Err(_) => SEEDS,
    }
}

/// The trace, or what broke and the trace until then.
fn play(home: &world::Home, seed: u64) -> Result<Vec<String>, String> {
    let trace = world::Trace::default();
    let played = catch_unwind(AssertUnwindSafe(|| plan::play(home, seed, &trace)));
    let trace = trace.take();
    match played {
        Ok(Ok(())) => Ok(trace),
        Ok(Err(why)) => Err(format!("{why}\n  {}", trace.join("\n  "))),
        Err(_) => Err(format!("it panicked\n  {}", trace.join("\n  "))),
    }
}

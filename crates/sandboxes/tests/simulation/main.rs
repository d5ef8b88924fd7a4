//! The whole service without a machine: seeded interleavings of everything that can happen to sandboxes.
//!
//! ```text
//!   seed ──┬── plan: what callers ask for, and when; who dies; when the disk is full; when the server
//!          │         is killed, or stops and starts again
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
mod stories;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// How many there are to play: in `./test`, and by hand. Without optimization a seed takes up to 20 ms of a processor, spread
/// evenly over everything that a server does.
const SEEDS_OF_CI: u64 = 10_000;
const SEEDS: u64 = 4_000;
/// In how many parts, each a test of its own, so that they run side by side.
const PARTS: u64 = 8;
/// Of these, how many are played twice.
const TWICE: u64 = 100;
/// Those that failed once.
const KNOWN: &[u64] = &[656, 5138, 5792];
/// More failures than that do not tell more.
const MOST_FAILURES: usize = 5;
/// Of the real clock: a seed takes milliseconds.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// Nothing that happens breaks what must hold.
mod seeds {
    #[test]
    fn part_0() {
        super::play_part(0);
    }

    #[test]
    fn part_1() {
        super::play_part(1);
    }

    #[test]
    fn part_2() {
        super::play_part(2);
    }

    #[test]
    fn part_3() {
        super::play_part(3);
    }

    #[test]
    fn part_4() {
        super::play_part(4);
    }

    #[test]
    fn part_5() {
        super::play_part(5);
    }

    #[test]
    fn part_6() {
        super::play_part(6);
    }

    #[test]
    fn part_7() {
        super::play_part(7);
    }
}

fn play_part(part: u64) {
    let given = |name: &str| {
        let value = std::env::var(name).ok();
        value.map(|value| value.parse::<u64>().expect("a number"))
    };
    let all: Vec<u64> = match given("ATOLL_SEED") {
        Some(seed) => vec![seed],
        None => {
            let ci = std::env::var("NEXTEST_PROFILE").is_ok_and(|profile| profile == "ci");
            let count = given("ATOLL_SEEDS").unwrap_or(if ci { SEEDS_OF_CI } else { SEEDS });
            KNOWN.iter().copied().chain(0..count).collect()
        }
    };
    let seeds: Vec<u64> = all.into_iter().filter(|seed| seed % PARTS == part).collect();
    let (tell, told) = mpsc::channel();
    let player = std::thread::spawn({
        let seeds = seeds.clone();
        move || {
            let home = world::Home::new();
            let (mut steps, mut failures) = (0, 0);
            for seed in seeds {
                let _ = tell.send(Told::Plays(seed));
                match play(&home, seed) {
                    Ok(trace) => steps += trace.len(),
                    Err(why) => {
                        failures += 1;
                        let _ = tell.send(Told::Failed(seed, why));
                    }
                }
                if failures == MOST_FAILURES {
                    break;
                }
            }
            steps
        }
    });
    let failed = watch(&told).expect("every seed ends");
    let steps = player.join().unwrap();
    println!("{} seeds, {steps} steps", seeds.len());
    assert!(failed.is_empty(), "these seeds failed: {failed:?}");
}

enum Told {
    Plays(u64),
    Failed(u64, String),
}

/// Says which seeds fail; the error is one that never ends.
fn watch(told: &mpsc::Receiver<Told>) -> Result<Vec<u64>, u64> {
    let mut failed = Vec::new();
    let mut playing = None;
    loop {
        match told.recv_timeout(STUCK_AFTER) {
            Ok(Told::Plays(seed)) => playing = Some(seed),
            Ok(Told::Failed(seed, why)) => {
                println!("seed {seed}: {why}\n{}", again(seed));
                failed.push(seed);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let seed = playing.unwrap_or_default();
                println!("seed {seed} does not end\n{}", again(seed));
                return Err(seed);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(failed),
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

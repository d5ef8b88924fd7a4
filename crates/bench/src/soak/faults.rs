//! What happens to the server from outside: killed, without room on its disk, with a clock that jumps. And whoever watches
//! that it is alive, names what it choked on if it is not, and brings it back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use atoll_client::output::Result;
use tokio::sync::Mutex;

use super::random::Random;
use super::world::World;
use crate::host;

/// A server that says nothing for so long is stuck, on whatever machine.
const STUCK_AFTER: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(500);
const HOUR: i64 = 3600;

pub(super) const KILL: &str = "kill -9";
pub(super) const FULL: &str = "full disk";
pub(super) const CLOCK: &str = "clock jump";

/// Held by whoever takes the server down, so that nobody else judges it meanwhile.
pub(super) type Control = Arc<Mutex<()>>;

/// Faults at random moments, each kind at least once, until the time is up.
pub(super) async fn run(world: &Arc<World>, control: &Control, time: Duration) -> Result<()> {
    let mut random = Random::of(world.seed, "faults");
    let home = &world.server.home;
    let mut kinds = vec![KILL];
    kinds.extend(home.own_disk.then_some(FULL));
    kinds.extend(home.own_clock.then_some(CLOCK));
    let mut first: Vec<&'static str> = Vec::new();
    let mut left = kinds.clone();
    while !left.is_empty() {
        first.push(left.swap_remove(random.index(left.len())));
    }
    let began = Instant::now();
    let mut first = first.into_iter();
    while began.elapsed() < time && !world.is_over() {
        let next = first.next().or_else(|| random.one(&kinds).copied());
        match next {
            Some(FULL) => full(world, control, &mut random).await?,
            Some(CLOCK) => clock(world, &mut random).await?,
            _ => kill(world, control, &mut random).await?,
        }
        let rest = 500
            + random.below(if time > Duration::from_secs(60) {
                12_000
            } else {
                2500
            });
        world.rest(rest).await;
    }
    Ok(())
}

async fn kill(world: &Arc<World>, control: &Control, random: &mut Random) -> Result<()> {
    let _held = control.lock().await;
    world.tally.fault(KILL);
    world.goes_down();
    world.server.kill().await;
    tokio::time::sleep(Duration::from_millis(random.below(400))).await;
    // Now and then it does not even come to answer.
    if random.chance(4) {
        let starting = tokio::time::timeout(Duration::from_millis(random.below(300)), world.server.start());
        let _cut = starting.await;
        world.server.kill().await;
    }
    world.server.start().await?;
    world.is_back();
    Ok(())
}

async fn full(world: &Arc<World>, control: &Control, random: &mut Random) -> Result<()> {
    let held = control.lock().await;
    let home = &world.server.home;
    world.tally.fault(FULL);
    world.set_full(true);
    home.fill(random.below(256 * 1024))?;
    let killed = random.chance(3);
    if killed {
        world.goes_down();
        world.server.kill().await;
    }
    drop(held);
    tokio::time::sleep(Duration::from_millis(1000 + random.below(3000))).await;
    let _held = control.lock().await;
    home.free()?;
    if killed {
        world.server.start().await?;
        world.is_back();
    }
    // Whatever was refused meanwhile may be told a moment later.
    tokio::time::sleep(Duration::from_millis(500)).await;
    world.set_full(false);
    Ok(())
}

async fn clock(world: &Arc<World>, random: &mut Random) -> Result<()> {
    world.tally.fault(CLOCK);
    let ahead = i64::try_from(random.below(5 * 3600)).unwrap_or_default() - 3 * HOUR;
    world.server.home.set_clock(ahead)?;
    world.jumps.fetch_add(1, Ordering::Relaxed);
    world.rest(1000 + random.below(3000)).await;
    world.server.home.set_clock(0)?;
    world.jumps.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Looks whether the server lives and answers, until it is dropped.
pub(super) async fn watch(world: Arc<World>, control: Control) {
    let mut heard = Instant::now();
    let mut epoch = world.epoch();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Ok(held) = control.try_lock() else {
            heard = Instant::now();
            continue;
        };
        if !world.is_up() {
            heard = Instant::now();
            continue;
        }
        if world.epoch() != epoch {
            (epoch, heard) = (world.epoch(), Instant::now());
        }
        note_memory(&world);
        if let Some(status) = world.server.died().await {
            let log = world.server.home.log();
            let last = log.lines().last().unwrap_or_default();
            let words = format!(
                "{status}, beside {}; its last words: {last}",
                world.attacks_under_way()
            );
            let what = match world.is_full() {
                true => "the server died while the disk was full",
                false => "the server died",
            };
            world.tally.found(what, "the watch", words);
            bring_back(&world).await;
            heard = Instant::now();
            continue;
        }
        // Others may ask for control meanwhile.
        drop(held);
        if answers(&world).await {
            heard = Instant::now();
        } else if heard.elapsed() > STUCK_AFTER && world.is_up() && world.epoch() == epoch {
            let Ok(_held) = control.try_lock() else {
                continue;
            };
            let words = format!(
                "no answer for {:.0} s, beside {}",
                heard.elapsed().as_secs_f64(),
                world.attacks_under_way()
            );
            world.tally.found("the server froze", "the watch", words);
            bring_back(&world).await;
            heard = Instant::now();
        }
    }
}

fn note_memory(world: &World) {
    let now = host::resident(world.server.pid()).unwrap_or_default();
    let mut sums = world.tally.lock();
    sums.peak_memory = sums.peak_memory.max(now);
}

/// Asks on a connection of its own, as a load balancer does.
async fn answers(world: &World) -> bool {
    let client = reqwest::Client::builder().no_proxy().timeout(STUCK_AFTER).build();
    let Ok(client) = client else {
        return false;
    };
    let asked = Instant::now();
    let answer = client.get(format!("{}/healthz", world.server.url())).send().await;
    let answered = answer.is_ok_and(|answer| answer.status().is_success());
    if answered {
        let millis = asked.elapsed().as_secs_f64() * 1000.0;
        world.tally.lock().health.push(millis);
    }
    answered
}

/// Starts the server again: on its data, or, where it is stuck on those too, on none.
async fn bring_back(world: &Arc<World>) {
    world.goes_down();
    world.server.kill().await;
    let back = world.server.start().await;
    let stuck = match &back {
        Ok(()) => !tokio::time::timeout(STUCK_AFTER, answers(world))
            .await
            .unwrap_or(false),
        Err(_) => true,
    };
    if stuck {
        let why = back
            .err()
            .map_or("it does not answer".to_owned(), |error| error.to_string());
        world
            .tally
            .found("the server does not come back on its data", "the watch", why);
        world.server.kill().await;
        let renewed = async {
            world.server.home.forget()?;
            world.server.start().await?;
            world.settle().await
        };
        if let Err(error) = renewed.await {
            world.tally.found(
                "the server does not start on empty data",
                "the watch",
                error.to_string(),
            );
            world.interrupted.cancel();
            return;
        }
        world.tally.fault("begun anew on empty data");
    }
    world.is_back();
}

//! `atoll bench soak`: a mixed load on all APIs by three projects, one of them hostile, on a server that is killed, finds no
//! room on its disk and has its clock set, and what is left of it afterwards.
//!
//! ```text
//!   warm-up   every feature once           ─> what is there
//!   calm      honest callers alone         ─> how long they wait
//!   faults    beside attacks; kill -9, full disk, clock jumps
//!   beside    beside attacks               ─> how long they wait; half of the time, so that a leak has time to show
//!   end       everything is deleted, collected, settled  ─> what is there now; then the server is stopped: nothing
//! ```
//!
//! What must hold: the server is a process of its own, asked through its public APIs and looked at from outside. All traffic
//! is on loopback. The run ends by itself, and leaves nothing, also when it is interrupted or something fails.

mod caller;
mod canary;
mod faults;
mod honest;
mod hostile;
mod inventory;
mod machine;
mod money;
mod random;
mod report;
mod server;
mod tally;
mod world;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Output, Result, duration, stderr};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::interrupt::Interrupt;
use crate::{Place, host};

pub use hostile::{Attack, parse as parse_attacks};
use inventory::Inventory;
use report::{Check, Report};
use server::{Home, Server};
use world::World;

/// How long everything may take to come back.
const SETTLE: Duration = Duration::from_secs(90);
/// How long stories that are under way may take to end.
const LAST_STORIES: Duration = Duration::from_secs(150);
/// How long whoever is interrupted may take to notice.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The most memory that the server may ever take: what it buffers for callers has a bound.
const PEAK: u64 = 1 << 30;

/// What a run is made of.
#[derive(Debug, Clone)]
pub struct SoakOptions {
    /// How long the load lasts, in milliseconds; warming up and settling come on top.
    pub time_millis: u64,
    /// Repeats the choices of another run.
    pub seed: Option<u64>,
    /// Of the hostile project.
    pub attacks: Vec<Attack>,
    /// Where to write the server's log if something was found.
    pub keep_log: Option<PathBuf>,
}

/// Exit code 0 when everything came back and nothing was found, else 1.
pub async fn run(place: &Place, output: Output, options: &SoakOptions) -> Result<u8> {
    crate::base(place)?;
    let seed = options.seed.unwrap_or_else(|| {
        let now = jiff::Timestamp::now().as_nanosecond();
        u64::try_from(now & i128::from(u32::MAX)).unwrap_or_default()
    });
    // From before there is anything that would be left behind.
    let interrupt = Interrupt::listen()?;
    let home = Home::make()?;
    let mut left_out = Vec::new();
    if !home.own_disk {
        left_out.push("full disks: only root mounts a filesystem".to_owned());
    }
    if !home.own_clock {
        left_out.push("clock jumps: there is no C compiler (cc)".to_owned());
    }
    if options.attacks.len() < Attack::ALL.len() {
        let missing: Vec<&str> = Attack::ALL
            .iter()
            .filter(|attack| !options.attacks.contains(attack))
            .map(|attack| attack.name())
            .collect();
        left_out.push(format!("attacks: {}", missing.join(", ")));
    }
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .doing("cannot listen for the scripted provider")?;
    let address = listener
        .local_addr()
        .doing("cannot listen for the scripted provider")?;
    let provider = atoll_scripted::serve(listener, CancellationToken::new());
    let _provider = AbortOnDropHandle::new(tokio::spawn(provider));
    let server = Server::new(home, &place.templates)?;
    let world = Arc::new(World::new(seed, server, format!("http://{address}")));
    let _ear = end_when_told(&world, interrupt);
    let progress = Progress::begin(&world, output, options.time_millis);
    let began = Instant::now();
    let mut soak = Soak {
        world: Arc::clone(&world),
        progress,
        checks: Vec::new(),
        attacks: options.attacks.clone(),
        time: Duration::from_millis(options.time_millis),
    };
    let interrupted = async {
        world.interrupted.cancelled().await;
        tokio::time::sleep(LAST_WORDS).await;
    };
    let outcome = tokio::select! {
        outcome = Box::pin(soak.all()) => outcome,
        () = interrupted => Err(Error::new("interrupted")),
    };
    let (checks, progress) = (soak.checks, soak.progress);
    progress.end();
    let interrupted = world.interrupted.is_cancelled();
    if let Err(error) = outcome {
        let what = if interrupted {
            "interrupted"
        } else {
            "the run could not go on"
        };
        world.tally.found(what, "the soak", error.to_string());
    } else if interrupted {
        world.tally.found("interrupted", "the soak", "before its end");
    }
    world.server.kill().await;
    let sums = std::mem::take(&mut *world.tally.lock());
    let report = Report {
        seed,
        seconds: began.elapsed().as_secs_f64(),
        left_out: &left_out,
        checks: &checks,
        sums: &sums,
    };
    report.print(output);
    let kept = match (&options.keep_log, report.met()) {
        (Some(file), false) => std::fs::write(file, world.server.home.log())
            .doing(format_args!("cannot write {}", file.display())),
        _ => Ok(()),
    };
    // Not left to the last who holds it: a task that was told to end may still.
    world.server.home.clear();
    kept?;
    Ok(u8::from(!report.met()))
}

/// Ctrl-C and SIGTERM end the run in order.
fn end_when_told(world: &Arc<World>, mut interrupt: Interrupt) -> AbortOnDropHandle<()> {
    let world = Arc::clone(world);
    AbortOnDropHandle::new(tokio::spawn(async move {
        interrupt.heard().await;
        world.interrupted.cancel();
    }))
}

struct Soak {
    world: Arc<World>,
    progress: Progress,
    checks: Vec<Check>,
    attacks: Vec<Attack>,
    time: Duration,
}

impl Soak {
    async fn all(&mut self) -> Result<()> {
        let world = Arc::clone(&self.world);
        self.progress.phase("starting");
        world.server.start().await?;
        world.is_back();
        world.settle().await?;
        self.progress.phase("warm-up");
        Box::pin(honest::warm_up(&world, 2)).await;
        self.stop_if_interrupted()?;
        inventory::clear_out(&world).await;
        world.collect().await?;
        let before = Inventory::settled(&world, None, SETTLE).await;
        let warm = world
            .tally
            .lock()
            .asked
            .values()
            .map(|asked| asked.failed)
            .sum::<u64>();
        if warm > 0 {
            return Err(Error::new("the warm-up failed: the load would say nothing"));
        }
        self.load().await?;
        self.stop_if_interrupted()?;
        self.progress.phase("settling");
        inventory::clear_out(&world).await;
        let collected = world.collect().await;
        if let Err(error) = collected {
            let what = "what is not needed could not be collected";
            world.tally.found(what, "the soak", error.to_string());
        }
        let after = Inventory::settled(&world, Some(&before), SETTLE).await;
        self.checks.extend(report::compare(&before, &after));
        self.figures().await?;
        self.progress.phase("stopping");
        let stopped = world.server.stop().await;
        let nothing = self.left_after_stop().await;
        self.checks.push(Check::new(
            "the server stops when asked",
            "",
            if stopped { "yes" } else { "no" },
            "",
            stopped,
        ));
        self.checks.push(nothing);
        Ok(())
    }

    fn stop_if_interrupted(&self) -> Result<()> {
        match self.world.interrupted.is_cancelled() {
            true => Err(Error::new("interrupted")),
            false => Ok(()),
        }
    }

    /// Calm, faults, beside.
    async fn load(&mut self) -> Result<()> {
        let world = Arc::clone(&self.world);
        let control = faults::Control::default();
        let mut players = JoinSet::new();
        honest::play_workflows(&world, &mut players);
        let watching = AbortOnDropHandle::new(tokio::spawn(faults::watch(
            Arc::clone(&world),
            Arc::clone(&control),
        )));
        let mut actors = JoinSet::new();
        honest::load(&world, &mut actors);
        self.progress.phase("calm");
        world.rest(millis(self.time.mul_f64(0.2))).await;
        world.beside.store(!self.attacks.is_empty(), Ordering::Relaxed);
        hostile::load(&world, &self.attacks, &mut actors);
        self.progress.phase("faults");
        let faults = self.time.mul_f64(0.3);
        faults::run(&world, &control, faults).await?;
        self.progress.phase("beside");
        world.rest(millis(self.time.mul_f64(0.5))).await;
        world.over.cancel();
        self.progress.phase("last stories");
        let ends = async { while actors.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_STORIES, ends).await.is_err() {
            world.tally.found(
                "a story does not end",
                "the soak",
                format!("{} actors are stuck", actors.len()),
            );
        }
        actors.shutdown().await;
        players.shutdown().await;
        drop(watching);
        // Whoever brought it back last is done with it.
        let _held = control.lock().await;
        Ok(())
    }

    /// What is held against numbers rather than against the beginning.
    async fn figures(&mut self) -> Result<()> {
        let world = &self.world;
        if !world.tally.lock().faults.contains_key("begun anew on empty data") {
            self.checks.extend(money::checks(world).await?);
        }
        let sums = world.tally.lock();
        let (requests, failed) = sums.asked.values().fold((0, 0), |(requests, failed), asked| {
            (requests + asked.requests, failed + asked.failed)
        });
        let figures = [
            Check::new(
                "honest requests that failed",
                requests.to_string(),
                failed.to_string(),
                "none",
                failed == 0,
            ),
            Check::new(
                "answers with words of others",
                sums.searched.to_string(),
                sums.found
                    .iter()
                    .filter(|((what, _), _)| *what == "words crossed projects")
                    .map(|(_, count)| count)
                    .sum::<u64>()
                    .to_string(),
                "none",
                !sums
                    .found
                    .keys()
                    .any(|(what, _)| *what == "words crossed projects"),
            ),
            Check::new(
                "memory of the server at its peak",
                "",
                report::amount(sums.peak_memory, "bytes"),
                "at most 1024 MiB",
                sums.peak_memory <= PEAK,
            ),
            Check::new(
                "health checks, p50 and p99",
                "",
                format!(
                    "{:.1} and {:.1} ms",
                    sums.health.median().unwrap_or_default(),
                    sums.health.p99().unwrap_or_default()
                ),
                "only shown",
                true,
            ),
        ];
        drop(sums);
        self.checks.extend(figures);
        let log = world.server.home.log();
        let panics = log.lines().filter(|line| line.contains("panicked")).count();
        let errors = log.lines().filter(|line| line.contains(" ERROR ")).count();
        self.checks.push(Check::new(
            "panics in the log",
            "",
            panics.to_string(),
            "none",
            panics == 0,
        ));
        self.checks.push(Check::new(
            "errors in the log",
            "",
            errors.to_string(),
            "only shown",
            true,
        ));
        Ok(())
    }

    /// The server is gone: so must be all that it held, its other half last.
    async fn left_after_stop(&self) -> Check {
        let home = &self.world.server.home;
        let began = Instant::now();
        let mut left = machine::left(&home.data(), &home.cgroup);
        while !left.is_empty() && began.elapsed() < machine::GONE_WITHIN {
            tokio::time::sleep(Duration::from_millis(20)).await;
            left = machine::left(&home.data(), &home.cgroup);
        }
        let met = left.is_empty();
        let words = if met {
            "nothing".to_owned()
        } else {
            left.join(", ")
        };
        Check::new("left when the server has stopped", "", words, "nothing", met)
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What is going on: one line that moves on a terminal, a line for each phase elsewhere.
struct Progress {
    bar: ProgressBar,
    quiet: bool,
    began: Instant,
    ticking: Option<AbortOnDropHandle<()>>,
    world: Arc<World>,
    total: u64,
}

impl Progress {
    fn begin(world: &Arc<World>, output: Output, total: u64) -> Self {
        let quiet = output.json || !std::io::stderr().is_terminal();
        let bar = if quiet {
            ProgressBar::hidden()
        } else {
            ProgressBar::new_spinner()
        };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        stderr(format_args!(
            "soak for {}, seed {}\n",
            duration(total),
            world.seed
        ));
        Self {
            bar,
            quiet,
            began: Instant::now(),
            ticking: None,
            world: Arc::clone(world),
            total,
        }
    }

    fn phase(&mut self, name: &'static str) {
        self.bar.set_prefix(name);
        if self.quiet {
            stderr(format_args!("{name}: {}\n", line(&self.world, self.began)));
        }
        let (bar, world, began, quiet) = (self.bar.clone(), Arc::clone(&self.world), self.began, self.quiet);
        // A line each minute is enough for a log; a terminal gets two in a second.
        let each = if quiet { 60_000.min(self.total) } else { 500 };
        self.ticking = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(each)).await;
                let line = line(&world, began);
                match quiet {
                    true => stderr(format_args!("{name}: {line}\n")),
                    false => bar.set_message(line),
                }
            }
        })));
    }

    fn end(self) {
        drop(self.ticking);
        self.bar.finish_and_clear();
    }
}

fn line(world: &World, began: Instant) -> String {
    let memory = host::resident(world.server.pid()).unwrap_or_default();
    let sums = world.tally.lock();
    let requests: u64 = sums.asked.values().map(|asked| asked.requests).sum();
    let failed: u64 = sums.asked.values().map(|asked| asked.failed).sum();
    let attacks: u64 = sums.attacks.values().map(|attack| attack.times).sum();
    let faults: u64 = sums.faults.values().sum();
    format!(
        "{} · {requests} requests, {failed} failed · {attacks} attacks · {faults} faults · {} found · server {:.0} MiB",
        duration(millis(began.elapsed())),
        sums.found.values().sum::<u64>(),
        memory as f64 / 1_048_576.0
    )
}

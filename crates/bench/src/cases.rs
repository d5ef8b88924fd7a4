//! The rows of the speed table. Ours and the peer take turns, so that both meet the same machine.

use std::time::{Duration, Instant};

use atoll_client::output::{Doing, Error, Result};
use atoll_client::{Client, transfer};
use atoll_types::{GIB, MIB};
use futures_util::{StreamExt, TryStreamExt};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::host::{MemoryGroup, cpu_millis, resident};
use super::peers::{Bwrap, Containers, Runsc, millis};
use super::row::{Bar, Row, Samples};
use super::subject::{Subject, create, create_to_first_byte, exec, kill, run_to_first_byte};
use super::{Measured, Setting};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    Warm,
    ColdGvisor,
    ColdJail,
    Containers,
    Exec,
    Burst,
    IdleMemory,
    Transfer(Wall),
    Thousand,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wall {
    Gvisor,
    Jail,
}

impl Wall {
    /// What makes the server choose it, and nothing else.
    fn server(self) -> &'static [&'static str] {
        match self {
            Self::Gvisor => &["--isolation", "gvisor"],
            Self::Jail => &["--isolation", "jail", "--runsc", "none"],
        }
    }
}

/// In one request, and in two.
const WARM: [&str; 2] = [
    "create_to_first_byte_warm_gvisor",
    "create_then_exec_to_first_byte_warm_gvisor",
];
const COLD_GVISOR: &str = "create_to_first_byte_cold_gvisor";
const COLD_JAIL: &str = "create_to_first_byte_cold_jail";
const CONTAINERS: &str = "create_to_first_byte_cold_vs_containers";
const EXEC_INSIDE: &str = "exec_true_gvisor_vs_inside";
const EXEC_RUNSC: &str = "exec_true_gvisor_vs_runsc_exec";
const BURST: &str = "50_creates_at_once";
const IDLE_MEMORY: &str = "idle_memory_gvisor";
const THOUSAND: [&str; 3] = [
    "1000_idle_answering",
    "1000_idle_server_memory",
    "1000_idle_server_cpu",
];
const TRANSFER_GVISOR: [&str; 3] = [
    "upload_1gib_gvisor",
    "download_1gib_gvisor",
    "transfer_server_memory_gvisor",
];
const TRANSFER_JAIL: [&str; 3] = [
    "upload_1gib_jail",
    "download_1gib_jail",
    "transfer_server_memory_jail",
];

impl Case {
    pub(crate) const ALL: [Self; 10] = [
        Self::Warm,
        Self::ColdGvisor,
        Self::ColdJail,
        Self::Containers,
        Self::Exec,
        Self::Burst,
        Self::IdleMemory,
        Self::Transfer(Wall::Gvisor),
        Self::Transfer(Wall::Jail),
        Self::Thousand,
    ];

    /// What the server under test is started with.
    fn server(self) -> Vec<&'static str> {
        match self {
            Self::Warm => [Wall::Gvisor.server(), &["--pool", "base=4"]].concat(),
            Self::ColdJail => Wall::Jail.server().to_vec(),
            Self::Transfer(wall) => wall.server().to_vec(),
            Self::ColdGvisor
            | Self::Containers
            | Self::Exec
            | Self::Burst
            | Self::IdleMemory
            | Self::Thousand => Wall::Gvisor.server().to_vec(),
        }
    }

    async fn measure_on(self, setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
        match self {
            Self::Warm => warm(setting, subject).await,
            Self::ColdGvisor => cold_gvisor(setting, subject).await,
            Self::ColdJail => cold_jail(setting, subject).await,
            Self::Containers => containers(setting, subject).await,
            Self::Exec => exec_true(setting, subject).await,
            Self::Burst => burst(setting, subject).await,
            Self::IdleMemory => idle_memory(setting, subject).await,
            Self::Transfer(wall) => transfer(setting, subject, wall).await,
            Self::Thousand => thousand(setting, subject).await,
        }
    }
}

impl Measured for Case {
    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Warm => &WARM,
            Self::ColdGvisor => &[COLD_GVISOR],
            Self::ColdJail => &[COLD_JAIL],
            Self::Containers => &[CONTAINERS],
            Self::Exec => &[EXEC_INSIDE, EXEC_RUNSC],
            Self::Burst => &[BURST],
            Self::IdleMemory => &[IDLE_MEMORY],
            Self::Transfer(Wall::Gvisor) => &TRANSFER_GVISOR,
            Self::Transfer(Wall::Jail) => &TRANSFER_JAIL,
            Self::Thousand => &THOUSAND,
        }
    }

    fn is_slow(self) -> bool {
        self == Self::Thousand
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let subject = Subject::start(&setting.templates, &self.server()).await?;
        let measured = self.measure_on(setting, &subject).await;
        subject.stop().await;
        measured
    }
}

/// The sandbox that most cases create: the defaults.
fn plain() -> Value {
    json!({"template": "base"})
}

async fn warm(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Runsc::new(setting.runsc()?, &setting.image, setting.dir())?;
    let (mut in_one, mut in_two, mut theirs) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..=setting.rounds(100) {
        subject.pools_full().await?;
        let (one, id) = run_to_first_byte(&subject.client, &plain()).await?;
        kill(&subject.client, &id).await?;
        subject.pools_full().await?;
        let (two, id) = create_to_first_byte(&subject.client, &plain()).await?;
        kill(&subject.client, &id).await?;
        let peer_elapsed = peer.first_byte().await?;
        // The first round warms caches on both sides.
        if round > 0 {
            in_one.push(one);
            in_two.push(two);
            theirs.push(peer_elapsed);
        }
    }
    let row = |name, ours, bar| Row::compare(name, "ms", ours, "runsc run", &theirs, bar);
    Ok(vec![
        row(WARM[0], &in_one, Bar::AtMost(10.0)),
        row(WARM[1], &in_two, Bar::Shown),
    ])
}

async fn cold_gvisor(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Runsc::new(setting.runsc()?, &setting.image, setting.dir())?;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 0..=setting.rounds(100) {
        let (elapsed, id) = create_to_first_byte(&subject.client, &plain()).await?;
        kill(&subject.client, &id).await?;
        let peer_elapsed = peer.first_byte().await?;
        if round > 0 {
            ours.push(elapsed);
            theirs.push(peer_elapsed);
        }
    }
    Ok(vec![Row::compare(
        COLD_GVISOR,
        "ms",
        &ours,
        "runsc run",
        &theirs,
        Bar::RatioAtMost(1.25),
    )])
}

async fn cold_jail(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Bwrap::new(&setting.image, setting.dir()).await;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 0..=setting.rounds(100) {
        let (elapsed, id) = create_to_first_byte(&subject.client, &plain()).await?;
        kill(&subject.client, &id).await?;
        let peer_elapsed = match &peer {
            Some(peer) => Some(peer.first_byte().await?),
            None => None,
        };
        if round > 0 {
            ours.push(elapsed);
            theirs.0.extend(peer_elapsed);
        }
    }
    Ok(vec![Row::compare(
        COLD_JAIL,
        "ms",
        &ours,
        "bwrap",
        &theirs,
        Bar::RatioAndAtMost(2.0, 25.0),
    )])
}

/// What people use today where there is one: beside a gVisor sandbox, which is a stronger wall than theirs.
async fn containers(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Containers::new(&setting.image, setting.dir()).await;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 0..=setting.rounds(50) {
        let (elapsed, id) = create_to_first_byte(&subject.client, &plain()).await?;
        kill(&subject.client, &id).await?;
        let peer_elapsed = match &peer {
            Some(peer) => Some(peer.first_byte().await?),
            None => None,
        };
        if round > 0 {
            ours.push(elapsed);
            theirs.0.extend(peer_elapsed);
        }
    }
    let name = peer.as_ref().map_or("podman or docker", |peer| peer.name);
    Ok(vec![Row::compare(
        CONTAINERS,
        "ms",
        &ours,
        name,
        &theirs,
        Bar::Shown,
    )])
}

/// Prints the milliseconds of each of twenty fork+exec of `true`, measured inside.
const SPAWN_INSIDE: &str = "
import os, time
for _ in range(20):
    t = time.perf_counter()
    pid = os.posix_spawn('/bin/true', ['true'], os.environ)
    os.waitpid(pid, 0)
    print((time.perf_counter() - t) * 1000)
";

async fn exec_true(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Runsc::new(setting.runsc()?, &setting.image, setting.dir())?;
    let peer_id = peer.sleeper(None).await?;
    let client = &subject.client;
    let id = create(client, &plain()).await?;
    let (mut ours, mut inside, mut theirs) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..=setting.rounds(20) {
        for _ in 0..20 {
            let began = Instant::now();
            exec(client, &id, &["/bin/true"]).await?;
            if round > 0 {
                ours.push(millis(began.elapsed()));
            }
        }
        let printed = exec(client, &id, &["python3", "-c", SPAWN_INSIDE]).await?;
        let measured = printed.lines().filter_map(|line| line.trim().parse::<f64>().ok());
        if round > 0 {
            inside.0.extend(measured);
        }
        for _ in 0..5 {
            let elapsed = peer.exec(&peer_id).await?;
            if round > 0 {
                theirs.push(elapsed);
            }
        }
    }
    peer.kill(&peer_id).await;
    Ok(vec![
        Row::compare(
            EXEC_INSIDE,
            "ms",
            &ours,
            "fork+exec inside",
            &inside,
            Bar::RatioAtMost(1.5),
        ),
        // 2.5 times faster: at most 0.4 of its time.
        Row::compare(
            EXEC_RUNSC,
            "ms",
            &ours,
            "runsc exec",
            &theirs,
            Bar::RatioAtMost(0.4),
        ),
    ])
}

async fn burst(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    const COUNT: usize = 50;
    let peer = Runsc::new(setting.runsc()?, &setting.image, setting.dir())?;
    let client = &subject.client;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    let mut failures = 0;
    for _ in 0..setting.rounds(5) {
        let began = Instant::now();
        let made =
            futures_util::future::join_all((0..COUNT).map(|_| create_to_first_byte(client, plain_owned())))
                .await;
        ours.push(COUNT as f64 / began.elapsed().as_secs_f64());
        failures += made.iter().filter(|outcome| outcome.is_err()).count();
        for (_, id) in made.into_iter().flatten() {
            kill(client, &id).await?;
        }
        let began = Instant::now();
        let run = futures_util::future::join_all((0..COUNT).map(|_| peer.first_byte())).await;
        let elapsed = began.elapsed();
        let good = run.iter().filter(|outcome| outcome.is_ok()).count();
        theirs.push(good as f64 / elapsed.as_secs_f64());
    }
    let mut row = Row::compare(BURST, "/s", &ours, "runsc run", &theirs, Bar::RatioAtLeast(1.0));
    if failures > 0 {
        row.met = false;
        row = row.note(format!("{failures} creates failed"));
    }
    Ok(vec![row])
}

fn plain_owned() -> &'static Value {
    static PLAIN: std::sync::LazyLock<Value> = std::sync::LazyLock::new(plain);
    &PLAIN
}

async fn idle_memory(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let peer = Runsc::new(setting.runsc()?, &setting.image, setting.dir())?;
    let client = &subject.client;
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for _ in 0..setting.rounds(10) {
        let id = create(client, &plain()).await?;
        exec(client, &id, &["/bin/true"]).await?;
        let group = MemoryGroup::new();
        let sleeper = match &group {
            Some(group) => Some(peer.sleeper(Some(group.path())).await?),
            None => None,
        };
        tokio::time::sleep(Duration::from_secs(2)).await;
        let metrics = client.get(&format!("/v1/sandboxes/{id}/metrics")).await?;
        if let Some(bytes) = metrics["memory_bytes"].as_f64() {
            ours.push(bytes / 1e6);
        }
        theirs.0.extend(
            group
                .as_ref()
                .and_then(MemoryGroup::bytes)
                .map(|bytes| bytes as f64 / 1e6),
        );
        kill(client, &id).await?;
        if let Some(sleeper) = sleeper {
            peer.kill(&sleeper).await;
        }
    }
    Ok(vec![Row::compare(
        IDLE_MEMORY,
        "MB",
        &ours,
        "runsc run sleep",
        &theirs,
        Bar::AtMost(13.0),
    )])
}

async fn thousand(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let client = &subject.client;
    let count = setting.many;
    let body = json!({"template": "base", "resources": {"memory_bytes": 64 * MIB}, "timeout_ms": 3_600_000});
    let began = Instant::now();
    let body = &body;
    let made: Vec<String> = futures_util::stream::iter(0..count)
        .map(|_| create(client, body))
        .buffer_unordered(8)
        .try_collect()
        .await?;
    let created = began.elapsed();
    // Let the machine come to rest before looking at it.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (before, window) = (
        cpu_millis(subject.pid),
        Duration::from_secs(if setting.quick { 5 } else { 20 }),
    );
    tokio::time::sleep(window).await;
    let after = cpu_millis(subject.pid);
    let cpu = before
        .zip(after)
        .map(|(before, after)| (after - before) / window.as_secs_f64() / 10.0);
    let answers: Vec<bool> = futures_util::stream::iter(&made)
        .map(|id| async move { exec(client, id, &["/bin/true"]).await.is_ok() })
        .buffer_unordered(16)
        .collect()
        .await;
    let answering = answers.iter().filter(|answered| **answered).count();
    let memory = resident(subject.pid).map(|bytes| bytes as f64 / 1e6);
    Ok(vec![
        Row::single(
            THOUSAND[0],
            "sandboxes",
            Some(answering as f64),
            Bar::AtLeast(count as f64),
        )
        .note(format!("{count} created in {:.1} s", created.as_secs_f64())),
        Row::single(THOUSAND[1], "MB", memory, Bar::AtMost(150.0)),
        Row::single(THOUSAND[2], "% of a core", cpu, Bar::AtMost(5.0)),
    ])
}

const FILE: u64 = GIB;

async fn transfer(setting: &Setting, subject: &Subject, wall: Wall) -> Result<Vec<Row>> {
    let names = match wall {
        Wall::Gvisor => TRANSFER_GVISOR,
        Wall::Jail => TRANSFER_JAIL,
    };
    let client = &subject.client;
    let dir = tempfile::Builder::new()
        .prefix("atoll-bench-")
        .tempdir_in("/var/tmp")
        .doing("cannot make a directory")?;
    let (source, copy, back) = (
        dir.path().join("source"),
        dir.path().join("copy"),
        dir.path().join("back"),
    );
    write_source(&source).await?;
    // As roomy as it must be; in memory for gvisor as by default, on disk for the jail as `cp` is.
    let backing = if wall == Wall::Jail { "disk" } else { "memory" };
    let body = json!({"template": "base", "resources": {
        "cpu_millis": 2000, "memory_bytes": 4 * GIB, "disk_bytes": 3 * GIB, "disk_backing": backing,
    }});
    let id = create(client, &body).await?;
    let at_rest = resident(subject.pid).unwrap_or_default();
    let mut most = at_rest;
    let (mut up, mut down, mut cp) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..setting.rounds(5) {
        up.push(speed(upload(client, &id, &source), subject.pid, &mut most).await?);
        cp.push(speed(plain_copy(&source, &copy), subject.pid, &mut 0).await?);
        down.push(speed(download(client, &id, &back), subject.pid, &mut most).await?);
        let size = std::fs::metadata(&back)
            .doing("cannot look at the download")?
            .len();
        if size != FILE {
            return Err(Error::new(format!(
                "the download has {size} bytes instead of {FILE}"
            )));
        }
    }
    let growth = most.saturating_sub(at_rest) as f64 / 1e6;
    let bar = match wall {
        Wall::Gvisor => Bar::AtLeast(400.0),
        Wall::Jail => Bar::RatioAtLeast(0.5),
    };
    Ok(vec![
        Row::compare(names[0], "MB/s", &up, "cp", &cp, bar),
        Row::compare(names[1], "MB/s", &down, "cp", &cp, bar),
        Row::single(names[2], "MB", Some(growth), Bar::AtMost(64.0))
            .note("growth of the server while moving 1 GiB files"),
    ])
}

/// Megabytes per second of moving the file; watches the server's memory meanwhile.
///
/// Begins with nothing left to be written to the disk: else each would pay for what the one before it left behind.
async fn speed(work: impl Future<Output = Result<()>>, pid: u32, most: &mut u64) -> Result<f64> {
    tokio::task::spawn_blocking(rustix::fs::sync)
        .await
        .doing("cannot write out the last test's files")?;
    let began = Instant::now();
    let mut work = std::pin::pin!(work);
    let mut tick = tokio::time::interval(Duration::from_millis(50));
    loop {
        tokio::select! {
            done = &mut work => {
                done?;
                return Ok(FILE as f64 / 1e6 / began.elapsed().as_secs_f64());
            }
            _ = tick.tick() => *most = (*most).max(resident(pid).unwrap_or_default()),
        }
    }
}

/// Bytes that no one can compress or skip.
async fn write_source(path: &std::path::Path) -> Result<()> {
    let mut block = vec![0; 4 * 1024 * 1024];
    getrandom::fill(&mut block).doing("no randomness")?;
    let mut file = tokio::fs::File::create(path)
        .await
        .doing("cannot write the test file")?;
    for _ in 0..FILE / block.len() as u64 {
        file.write_all(&block).await.doing("cannot write the test file")?;
    }
    file.sync_all().await.doing("cannot write the test file")
}

async fn upload(client: &Client, id: &str, source: &std::path::Path) -> Result<()> {
    let file = std::fs::File::open(source).doing("cannot read the test file")?;
    let request = client
        .request(Method::PUT, &format!("/v1/sandboxes/{id}/files/content"))
        .query(&[("path", "/tmp/file")])
        .header("content-length", FILE)
        .body(transfer::body_from(file, indicatif::ProgressBar::hidden()));
    client.send(request).await.map(|_| ())
}

async fn download(client: &Client, id: &str, to: &std::path::Path) -> Result<()> {
    let request = client
        .request(Method::GET, &format!("/v1/sandboxes/{id}/files/content"))
        .query(&[("path", "/tmp/file")]);
    transfer::save(client.send(request).await?, to, &indicatif::ProgressBar::hidden()).await
}

async fn plain_copy(from: &std::path::Path, to: &std::path::Path) -> Result<()> {
    let status = tokio::process::Command::new("cp")
        .arg(from)
        .arg(to)
        .status()
        .await
        .doing("cannot run cp")?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::new("cp failed"))
    }
}

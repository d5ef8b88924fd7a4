//! The rows of `atoll bench workflow`: durable workflows, ours and those of Temporal's development server on its SQLite file,
//! in turn, by one load generator that speaks the wire itself. Both wait for the disk at each commit.

mod lane;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use atoll_client::local;
use atoll_client::output::{Doing, Error, Result};
use futures_util::future::try_join_all;
use tokio::process::{Child, Command};

use super::peers::millis;
use super::row::{Bar, Row, Samples};
use super::subject::Subject;
use super::{Measured, Setting};

use lane::Lane;

const PEER: &str = "temporal server start-dev";
/// How many workflows are under way at once where throughput is measured.
const LANES: usize = 64;
/// How many workflows lie idle where memory is measured.
const IDLE: usize = 100_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkflowCase {
    Throughput,
    Latency,
    Memory,
}

impl WorkflowCase {
    pub(crate) const ALL: [Self; 3] = [Self::Throughput, Self::Latency, Self::Memory];
}

/// A case, and the peer's program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WithPeer<'a> {
    pub(crate) case: WorkflowCase,
    pub(crate) temporal: Option<&'a Path>,
}

impl Measured for WithPeer<'_> {
    fn rows(self) -> &'static [&'static str] {
        match self.case {
            WorkflowCase::Throughput => &["workflows_per_second"],
            WorkflowCase::Latency => &["workflow_one_lane"],
            WorkflowCase::Memory => &["memory_100k_idle_workflows"],
        }
    }

    fn is_slow(self) -> bool {
        self.case == WorkflowCase::Memory
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let subject = Subject::start(&setting.templates, &[]).await?;
        let measured = self.measure_on(setting, &subject).await;
        subject.stop().await;
        measured
    }
}

impl WithPeer<'_> {
    async fn measure_on(self, setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
        let key = local::read_admin_key(&subject.data).unwrap_or_default();
        let url = local::running_server(&subject.data)
            .and_then(|server| server.workflows)
            .ok_or_else(|| Error::new("the server under test serves no workflows"))?;
        let ours = Target { url, key: Some(key) };
        if self.case == WorkflowCase::Memory {
            return Ok(vec![memory(&ours, subject.pid).await?]);
        }
        let peer = match self.temporal {
            Some(program) => Some(Peer::start(program, setting.dir()).await?),
            None => None,
        };
        let theirs = peer.as_ref().map(|peer| &peer.target);
        Ok(vec![match self.case {
            WorkflowCase::Throughput => throughput(setting, &ours, theirs).await?,
            _ => latency(setting, &ours, theirs).await?,
        }])
    }
}

/// Where a server is.
#[derive(Debug, Clone)]
struct Target {
    url: String,
    key: Option<String>,
}

/// Ended when it is dropped.
struct Peer {
    _process: Child,
    target: Target,
}

impl Peer {
    async fn start(program: &Path, dir: &Path) -> Result<Self> {
        let port = free_port()?;
        let file = tempfile::Builder::new()
            .prefix("temporal-")
            .tempdir_in(dir)
            .doing("cannot make a directory")?
            .keep();
        let process = Command::new(program)
            .args([
                "server",
                "start-dev",
                "--headless",
                "--log-level",
                "error",
                "--port",
            ])
            .arg(port.to_string())
            .arg("--db-filename")
            .arg(file.join("temporal.db"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .doing(format_args!("cannot start {}", program.display()))?;
        let target = Target {
            url: format!("http://{}", SocketAddr::from(([127, 0, 0, 1], port))),
            key: None,
        };
        let began = Instant::now();
        // It is there when a workflow goes through.
        while let Err(error) = one(&target).await {
            if began.elapsed() > Duration::from_secs(60) {
                return Err(Error::new(format!("the peer did not start: {error}")));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(Self {
            _process: process,
            target,
        })
    }
}

async fn one(target: &Target) -> Result<()> {
    Lane::open(target, "ready").await?.workflow().await.map(drop)
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").doing("cannot find a port")?;
    Ok(listener.local_addr().doing("cannot find a port")?.port())
}

/// Whole workflows with one activity each, so many at once.
async fn throughput(setting: &Setting, ours: &Target, theirs: Option<&Target>) -> Result<Row> {
    let (mut mine, mut peer) = (Samples::default(), Samples::default());
    let length = Duration::from_secs(if setting.quick { 3 } else { 10 });
    for round in 0..4 {
        let rate = rate(ours, length).await?;
        let their_rate = match theirs {
            Some(theirs) => Some(self::rate(theirs, length).await?),
            None => None,
        };
        // The first round warms up.
        if round > 0 {
            mine.push(rate);
            their_rate.into_iter().for_each(|rate| peer.push(rate));
        }
    }
    let bar = Bar::RatioAtLeast(20.0);
    Ok(
        Row::compare("workflows_per_second", "/s", &mine, PEER, &peer, bar).note(format!(
            "{LANES} lanes, one activity each, load generator on the same machine"
        )),
    )
}

async fn rate(target: &Target, length: Duration) -> Result<f64> {
    let lanes = try_join_all((0..LANES).map(|lane| Lane::open(target, format!("lane-{lane}")))).await?;
    let began = Instant::now();
    let counts = try_join_all(lanes.into_iter().map(|mut lane| async move {
        let mut count = 0_u32;
        while began.elapsed() < length {
            lane.workflow().await?;
            count += 1;
        }
        Ok::<_, Error>(count)
    }))
    .await?;
    Ok(f64::from(counts.into_iter().sum::<u32>()) / began.elapsed().as_secs_f64())
}

/// One workflow after the other.
async fn latency(setting: &Setting, ours: &Target, theirs: Option<&Target>) -> Result<Row> {
    let (mut mine, mut peer) = (Samples::default(), Samples::default());
    let mut lane = Lane::open(ours, "alone").await?;
    let mut their_lane = match theirs {
        Some(theirs) => Some(Lane::open(theirs, "alone").await?),
        None => None,
    };
    for round in 0..=setting.rounds(200) {
        let took = millis(lane.workflow().await?);
        let their_time = match &mut their_lane {
            Some(lane) => Some(millis(lane.workflow().await?)),
            None => None,
        };
        if round > 0 {
            mine.push(took);
            their_time.into_iter().for_each(|time| peer.push(time));
        }
    }
    Ok(Row::compare(
        "workflow_one_lane",
        "ms",
        &mine,
        PEER,
        &peer,
        Bar::RatioAtMost(0.2),
    ))
}

/// Workflows that have begun and wait for a timer in a month.
async fn memory(target: &Target, pid: u32) -> Result<Row> {
    let lanes = try_join_all((0..LANES).map(|lane| Lane::open(target, format!("idle-{lane}")))).await?;
    try_join_all(lanes.into_iter().map(|mut lane| async move {
        for _ in 0..IDLE.div_ceil(LANES) {
            lane.sleeping_workflow().await?;
        }
        Ok::<_, Error>(())
    }))
    .await?;
    // Long enough for what is idle to leave the memory.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let megabytes = resident(pid)?;
    Ok(Row::single(
        "memory_100k_idle_workflows",
        "MB",
        Some(megabytes),
        Bar::AtMost(300.0),
    ))
}

fn resident(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).doing("cannot look at the server")?;
    status
        .lines()
        .find_map(|line| {
            line.strip_prefix("VmRSS:")?
                .trim()
                .strip_suffix(" kB")?
                .trim()
                .parse::<f64>()
                .ok()
        })
        .map(|kilobytes| kilobytes * 1024.0 / 1_000_000.0)
        .ok_or_else(|| Error::new("the server says nothing about its memory"))
}

//! The rows of `atoll bench state`: what it costs to put a process to rest, to bring it back, to copy it and to keep it.
//!
//! The process is the same on both sides: a Python that holds random bytes and does nothing. Each round has a fresh one,
//! so that nothing of it is known from the round before.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use atoll_client::Client;
use atoll_client::output::{Doing, Error, Result};
use atoll_types::{GIB, MIB};
use futures_util::{StreamExt, TryStreamExt};
use serde_json::{Value, json};

use super::host::{SandboxGroup, allocated, resident};
use super::peers::{Runsc, millis};
use super::raw::Held;
use super::row::{Bar, Row, Samples};
use super::subject::{Subject, create, exec, first_byte, kill};
use super::{Measured, Setting};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StateCase {
    /// Pause and resume, with every save brought to the disk.
    Rest,
    /// Pause without that.
    Unsynced,
    Fork,
    Snapshot,
    Limit,
    InUse,
    Paused,
}

const REST: [&str; 2] = ["pause_idle_python", "resume_to_first_output"];
const UNSYNCED: &str = "pause_idle_python_without_fsync";
const FORK: &str = "fork_into_8";
const SNAPSHOT: [&str; 2] = [
    "filesystem_snapshot_1gib_1mb_changed",
    "filesystem_snapshot_1gib_1mb_changed_storage",
];
const LIMIT: &str = "pause_limit_4g_vs_512m";
const IN_USE: &str = "pause_256mb_vs_20mb_in_use";
const PAUSED: [&str; 3] = [
    "100_paused_processes",
    "100_paused_memory",
    "100_paused_disk_per_sandbox",
];

impl StateCase {
    pub(crate) const ALL: [Self; 7] = [
        Self::Rest,
        Self::Unsynced,
        Self::Fork,
        Self::Snapshot,
        Self::Limit,
        Self::InUse,
        Self::Paused,
    ];

    async fn measure_on(
        self,
        setting: &Setting,
        subject: &Subject,
        group: &SandboxGroup,
    ) -> Result<Vec<Row>> {
        match self {
            Self::Rest => rest(setting, subject).await,
            Self::Unsynced => unsynced(setting, subject).await,
            Self::Fork => fork(setting, subject).await,
            Self::Snapshot => snapshot(setting, subject).await,
            Self::Limit => limit(setting, subject).await,
            Self::InUse => in_use(setting, subject).await,
            Self::Paused => paused(setting, subject, group).await,
        }
    }
}

impl Measured for StateCase {
    fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Rest => &REST,
            Self::Unsynced => &[UNSYNCED],
            Self::Fork => &[FORK],
            Self::Snapshot => &SNAPSHOT,
            Self::Limit => &[LIMIT],
            Self::InUse => &[IN_USE],
            Self::Paused => &PAUSED,
        }
    }

    fn is_slow(self) -> bool {
        false
    }

    async fn measure(self, setting: &Setting) -> Result<Vec<Row>> {
        let group = SandboxGroup::new();
        let durable = self != Self::Unsynced;
        let config = setting.dir().join("server.toml");
        let text = format!("durable_saves = {durable}\ncgroup = \"{}\"\n", group.name());
        std::fs::write(&config, text).doing("cannot write a configuration")?;
        let config = config.to_string_lossy();
        let subject = Subject::start(
            &setting.templates,
            &["--isolation", "gvisor", "--config", &config],
        )
        .await?;
        let measured = self.measure_on(setting, &subject, &group).await;
        subject.stop().await;
        measured
    }
}

/// How much the process holds, unless a row is about that.
const HOLDS: usize = 20;

/// Its first argument is how many MB it holds.
const HOLD: &str = "
import os, sys, time
blob = os.urandom(int(sys.argv[1]) * 1000 * 1000)
open('/tmp/ready', 'w').close()
time.sleep(1000000)
";

/// A sandbox with that process in it, at rest but not put to rest.
async fn holding(client: &Client, resources: Value, megabytes: usize) -> Result<String> {
    let body = json!({"template": "base", "resources": resources});
    let id = create(client, &body).await?;
    let argv = json!(["/usr/bin/python3", "-c", HOLD, megabytes.to_string()]);
    client
        .post(
            &format!("/v1/sandboxes/{id}/exec"),
            &json!({"argv": argv, "background": true}),
        )
        .await?;
    let wait = "until [ -e /tmp/ready ]; do sleep 0.02; done";
    exec(client, &id, &["/bin/sh", "-c", wait]).await?;
    Ok(id)
}

/// Milliseconds of a pause, which must have kept memory.
async fn pause(client: &Client, id: &str) -> Result<f64> {
    let began = Instant::now();
    let body = json!({"kind": "memory"});
    client.post(&format!("/v1/sandboxes/{id}/pause"), &body).await?;
    Ok(millis(began.elapsed()))
}

/// Raw runsc, and a place for one checkpoint after the other.
struct Peer {
    runsc: Runsc,
    images: PathBuf,
}

impl Peer {
    /// With a directory of its own: its containers of one row must not meet those of another.
    fn new(setting: &Setting, row: &str) -> Result<Self> {
        let dir = setting.dir().join(row);
        Ok(Self {
            runsc: Runsc::new(setting.runsc()?, &setting.image, &dir)?,
            images: dir.join("images"),
        })
    }

    /// An empty directory.
    fn image(&self) -> Result<&Path> {
        let _absent = std::fs::remove_dir_all(&self.images);
        std::fs::create_dir_all(&self.images).doing("cannot make a directory")?;
        Ok(&self.images)
    }
}

async fn rest(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let (client, peer) = (&subject.client, Peer::new(setting, REST[0])?);
    let (mut paused, mut checkpoint) = (Samples::default(), Samples::default());
    let (mut resumed, mut answered, mut returned) =
        (Samples::default(), Samples::default(), Samples::default());
    for round in 0..=setting.rounds(30) {
        let id = holding(client, json!({}), HOLDS).await?;
        let our_pause = pause(client, &id).await?;
        // A pause is answered when it is durable; its processes go a moment later. As with raw runsc, nothing of them is
        // there when the resume begins.
        while !client.get(&format!("/v1/sandboxes/{id}")).await?["instance"].is_null() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let began = Instant::now();
        client
            .post(&format!("/v1/sandboxes/{id}/resume"), &json!({}))
            .await?;
        let our_resume = first_byte(client, &id, began).await?;
        kill(client, &id).await?;

        let held = Held::start(&peer.runsc, HOLDS).await?;
        let image = peer.image()?;
        let their_pause = held.checkpoint(&peer.runsc, image, true, false).await?;
        let (_back, their_resume) = held.restore(&peer.runsc, image).await?;
        // The first round warms caches on both sides.
        if round > 0 {
            paused.push(our_pause);
            checkpoint.push(their_pause);
            resumed.push(our_resume);
            answered.push(their_resume.answered);
            returned.push(their_resume.returned);
        }
    }
    let note = returned.median().zip(resumed.median()).map(|(theirs, ours)| {
        format!(
            "`runsc restore` returns after {theirs:.1} ms, before its process does anything: {:.2} x that",
            ours / theirs
        )
    });
    let resume_row = Row::compare(
        REST[1],
        "ms",
        &resumed,
        "runsc restore to first output",
        &answered,
        Bar::RatioAndAtMost(1.3, 100.0),
    );
    Ok(vec![
        Row::compare(
            REST[0],
            "ms",
            &paused,
            "runsc checkpoint, then fsync",
            &checkpoint,
            Bar::RatioAtMost(1.3),
        ),
        resume_row.note(note.unwrap_or_default()),
    ])
}

async fn unsynced(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let (client, peer) = (&subject.client, Peer::new(setting, UNSYNCED)?);
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 0..=setting.rounds(30) {
        let id = holding(client, json!({}), HOLDS).await?;
        let our_pause = pause(client, &id).await?;
        kill(client, &id).await?;
        let held = Held::start(&peer.runsc, HOLDS).await?;
        let their_pause = held.checkpoint(&peer.runsc, peer.image()?, false, false).await?;
        if round > 0 {
            ours.push(our_pause);
            theirs.push(their_pause);
        }
    }
    Ok(vec![Row::compare(
        UNSYNCED,
        "ms",
        &ours,
        "runsc checkpoint",
        &theirs,
        Bar::RatioAtMost(1.3),
    )])
}

async fn fork(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    const COPIES: usize = 8;
    let (client, peer) = (&subject.client, Peer::new(setting, FORK)?);
    let (mut ours, mut theirs, mut returned) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..=setting.rounds(10) {
        let id = holding(client, json!({}), HOLDS).await?;
        let began = Instant::now();
        let path = format!("/v1/sandboxes/{id}/fork");
        let answer = client.post(&path, &json!({"count": COPIES})).await?;
        let our_time = millis(began.elapsed());
        let copies = answer["items"].as_array().cloned().unwrap_or_default();
        let copies = copies.iter().filter_map(|copy| copy["id"].as_str());
        let all: Vec<&str> = copies.chain([id.as_str()]).collect();
        for id in &all {
            // A copy that does not answer is none.
            exec(client, id, &["/bin/true"]).await?;
            kill(client, id).await?;
        }
        if all.len() != COPIES + 1 {
            return Err(Error::new(format!("a fork made {} copies", all.len() - 1)));
        }

        let held = Held::start(&peer.runsc, HOLDS).await?;
        let image = peer.image()?;
        held.checkpoint(&peer.runsc, image, false, true).await?;
        let began = Instant::now();
        let restores = (0..COPIES).map(|_| held.restore(&peer.runsc, image));
        let restored = futures_util::future::try_join_all(restores).await?;
        let their_time = millis(began.elapsed());
        let last = restored
            .iter()
            .map(|(_, times)| times.returned)
            .fold(0.0, f64::max);
        if round > 0 {
            ours.push(our_time);
            theirs.push(their_time);
            returned.push(last);
        }
    }
    let row = Row::compare(
        FORK,
        "ms",
        &ours,
        "8 x runsc restore at once, to first output",
        &theirs,
        Bar::RatioAtMost(1.3),
    );
    let note = returned.median().map(|last| {
        format!("ours includes the checkpoint; the last of their commands returns after {last:.0} ms")
    });
    Ok(vec![row.note(note.unwrap_or_default())])
}

const WRITE_GIB: &str = "
import os
with open('/var/tmp/big', 'wb') as f:
    for _ in range(256):
        f.write(os.urandom(4 << 20))
";

/// Not on a border of a page: what lies around it must not be stored anew.
const CHANGE_MB: &str = "
import os, sys
with open('/var/tmp/big', 'r+b') as f:
    f.seek(int(sys.argv[1]) * 97_000_000 + 12_345)
    f.write(os.urandom(1_000_000))
";

async fn snapshot(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let client = &subject.client;
    let body = json!({"template": "base", "resources": {
        "cpu_millis": 2000, "memory_bytes": GIB, "disk_bytes": 3 * GIB, "disk_backing": "disk",
    }});
    let id = create(client, &body).await?;
    exec(client, &id, &["python3", "-c", WRITE_GIB]).await?;
    let path = format!("/v1/sandboxes/{id}/snapshots");
    let request = json!({"kind": "filesystem"});
    let first = client.post(&path, &request).await?;
    let megabytes = |snapshot: &Value, field: &str| snapshot[field].as_f64().unwrap_or(f64::MAX) / 1e6;
    let (mut seconds, mut stored) = (Samples::default(), Samples::default());
    for round in 0..setting.rounds(8) {
        exec(client, &id, &["python3", "-c", CHANGE_MB, &round.to_string()]).await?;
        let began = Instant::now();
        let taken = client.post(&path, &request).await?;
        seconds.push(began.elapsed().as_secs_f64());
        stored.push(megabytes(&taken, "stored_bytes"));
    }
    let most = stored.0.iter().copied().fold(0.0, f64::max);
    let mut time = Row::single(SNAPSHOT[0], "s", seconds.median(), Bar::AtMost(1.0));
    time.ours_p99 = seconds.p99();
    time.samples = Some(seconds.0.len());
    Ok(vec![
        time,
        Row::single(SNAPSHOT[1], "MB", Some(most), Bar::AtMost(5.0)).note(format!(
            "the most of any; the first snapshot stored {:.0} MB",
            megabytes(&first, "stored_bytes")
        )),
    ])
}

/// Pauses two kinds of sandboxes in turn.
async fn two_kinds(
    setting: &Setting,
    client: &Client,
    kinds: [(u64, usize); 2],
) -> Result<(Samples, Samples)> {
    let mut times = (Samples::default(), Samples::default());
    for round in 0..=setting.rounds(20) {
        for (which, (memory, megabytes)) in kinds.into_iter().enumerate() {
            let id = holding(client, json!({"memory_bytes": memory}), megabytes).await?;
            let elapsed = pause(client, &id).await?;
            kill(client, &id).await?;
            match (round, which) {
                (0, _) => {}
                (_, 0) => times.0.push(elapsed),
                _ => times.1.push(elapsed),
            }
        }
    }
    Ok(times)
}

async fn limit(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let kinds = [(4 * GIB, HOLDS), (512 * MIB, HOLDS)];
    let (large, small) = two_kinds(setting, &subject.client, kinds).await?;
    Ok(vec![Row::compare(
        LIMIT,
        "ms",
        &large,
        "ours with a limit of 512 MiB",
        &small,
        Bar::RatioAtMost(1.25),
    )])
}

async fn in_use(setting: &Setting, subject: &Subject) -> Result<Vec<Row>> {
    let kinds = [(GIB, 256), (GIB, HOLDS)];
    let (much, little) = two_kinds(setting, &subject.client, kinds).await?;
    Ok(vec![Row::compare(
        IN_USE,
        "ms",
        &much,
        "ours with 20 MB in use",
        &little,
        Bar::Shown,
    )])
}

async fn paused(setting: &Setting, subject: &Subject, group: &SandboxGroup) -> Result<Vec<Row>> {
    // Small, so that a hundred of them run at once on a small machine.
    const DIRTIED: usize = 5;
    let (client, peer) = (&subject.client, Peer::new(setting, PAUSED[0])?);
    let count = if setting.quick {
        setting.many.min(20)
    } else {
        setting.many
    };
    let ids: Vec<String> = futures_util::stream::iter(0..count)
        .map(|_| holding(client, json!({"memory_bytes": 128 * MIB}), DIRTIED))
        .buffer_unordered(4)
        .try_collect()
        .await?;
    let (processes, memory) = (group.processes(), group.memory());
    let server = resident(subject.pid).unwrap_or_default();
    futures_util::stream::iter(&ids)
        .map(|id| pause(client, id))
        .buffer_unordered(2)
        .try_collect::<Vec<f64>>()
        .await?;
    // An instance is destroyed right after its pause is answered.
    let began = Instant::now();
    while group.processes() > 0 && began.elapsed() < Duration::from_secs(5) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let growth = resident(subject.pid).unwrap_or_default() as f64 - server as f64;
    let ours = allocated(&subject.data.join("vault")) as f64 / count as f64 / 1e6;
    let held = Held::start(&peer.runsc, DIRTIED).await?;
    let image = peer.image()?;
    held.checkpoint(&peer.runsc, image, true, false).await?;
    let theirs = allocated(image) as f64 / 1e6;
    let bar = Bar::RatioAtMost(1.0);
    Ok(vec![
        Row::single(
            PAUSED[0],
            "processes",
            Some(group.processes() as f64),
            Bar::AtMost(0.0),
        )
        .note(format!("{count} paused; {processes} while they ran")),
        Row::single(
            PAUSED[1],
            "MB",
            Some(group.memory() as f64 / 1e6),
            Bar::AtMost(0.0),
        )
        .note(format!(
            "{:.0} MB while they ran; the server itself grew by {:.1} MB over {count} pauses",
            memory as f64 / 1e6,
            growth / 1e6
        )),
        Row::single(PAUSED[2], "MB", Some(ours), bar).against("a runsc checkpoint", Some(theirs), bar),
    ])
}

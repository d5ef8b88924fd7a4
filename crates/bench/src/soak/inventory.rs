//! What is there: on the machine, on the disk, in the rows of every project. Taken after the warm-up and again at the end;
//! what does not come back is named.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_client::output::{Error, Result};
use atoll_client::{Client, WorkflowClient, segment};
use serde::Serialize;
use serde_json::Value;
use temporalio_protos::temporal::api::workflowservice::v1 as service;

use super::machine;
use super::world::{PROJECTS, World};
use crate::host;

const MIB: u64 = 1 << 20;
/// Allocators keep some of what was freed, and tables that grew once stay large.
const MEMORY: u64 = 96 * MIB;
/// Connections of others that are being closed, and of the store.
const DESCRIPTORS: u64 = 24;
const THREADS: u64 = 16;
/// Loops that look after things.
const CPU: u64 = 300;
/// A server at rest tells its rows within this time.
const ROWS_WITHIN: Duration = Duration::from_secs(40);
/// How long projects take to be emptied, at most.
const CLEAR_WITHIN: Duration = Duration::from_secs(90);
const DISK: u64 = 4 * MIB;
/// Rows that stay by design (facts, closed workflows, calls), for each request, and room that a database keeps.
const ROW: u64 = 32 * 1024;
const DATABASE: u64 = 32 * MIB;

/// How much of one thing there is.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Item {
    pub(super) name: &'static str,
    pub(super) count: u64,
    pub(super) unit: &'static str,
    /// How much more there may be at the end.
    pub(super) allowed: u64,
}

/// The count of what the server did not tell.
pub(super) const UNTOLD: u64 = u64::MAX;

impl Item {
    pub(super) fn is_back_at(&self, before: &Self) -> bool {
        self.count <= before.count.saturating_add(self.allowed)
    }
}

/// Items of one moment, in the order of the report.
#[derive(Debug, Clone, Default)]
pub(super) struct Inventory(pub(super) Vec<Item>);

impl Inventory {
    fn put(&mut self, name: &'static str, count: u64, unit: &'static str, allowed: u64) {
        self.0.push(Item {
            name,
            count,
            unit,
            allowed,
        });
    }

    /// Whether all that is counted exactly is no more than it was.
    fn is_back_at(&self, before: &Self) -> bool {
        self.0
            .iter()
            .zip(&before.0)
            .all(|(now, then)| now.is_back_at(then))
    }

    /// Looks until everything is back where it was, or the patience is over. Without a before: until nothing changes.
    pub(super) async fn settled(world: &Arc<World>, before: Option<&Self>, patience: Duration) -> Self {
        let began = Instant::now();
        let mut last: Option<Self> = None;
        loop {
            let now = Self::take(world).await;
            let done = match (before, &last) {
                (Some(before), _) => now.is_back_at(before),
                (None, Some(last)) => now
                    .0
                    .iter()
                    .zip(&last.0)
                    .all(|(now, then)| now.count <= then.count || now.allowed > 0),
                (None, None) => false,
            };
            if done || began.elapsed() > patience || world.interrupted.is_cancelled() {
                return now;
            }
            last = Some(now);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    pub(super) async fn take(world: &Arc<World>) -> Self {
        let mut all = Self::default();
        let (pid, home) = (world.server.pid(), &world.server.home);
        let data = home.data();
        all.put(
            "memory of the server",
            host::resident(pid).unwrap_or_default(),
            "bytes",
            MEMORY,
        );
        all.put("milliseconds of CPU in a second", at_rest(pid).await, "", CPU);
        all.put("descriptors", machine::count(pid, "fd"), "", DESCRIPTORS);
        all.put("threads", machine::count(pid, "task"), "", THREADS);
        let processes = machine::processes(&data, &home.cgroup, pid);
        all.put("processes of sandboxes", processes.len() as u64, "", 0);
        all.put("cgroups", machine::cgroups(&home.cgroup).len() as u64, "", 0);
        all.put("mounts", machine::mounts_below(&data).len() as u64, "", 0);
        all.put("loop devices", machine::loops_below(&data), "", 0);
        let (namespaces, links) = machine::links(pid);
        all.put("network namespaces", namespaces, "", 0);
        all.put("links", links, "", 0);
        all.put("instances", named(&data.join("instances")), "", 0);
        all.put("ranges of user ids", named(&data.join("uids")), "", 0);
        let temporary = files(&home.path("tmp")) + files(&data.join("scratch"));
        all.put("temporary files", temporary, "", 0);
        let told = tokio::time::timeout(ROWS_WITHIN, rows(world)).await;
        let told = told.unwrap_or_else(|_| Err(Error::new("it took too long")));
        for name in ROWS {
            let count = match &told {
                Ok(rows) => rows.get(name).copied().unwrap_or_default(),
                Err(_) => UNTOLD,
            };
            all.put(name, count, "", 0);
        }
        let (databases, others) = disk(&data);
        all.put("disk, without databases", others, "bytes", DISK);
        let requests: u64 = world
            .tally
            .lock()
            .asked
            .values()
            .map(|asked| asked.requests)
            .sum();
        let moves: u64 = world
            .tally
            .lock()
            .attacks
            .values()
            .map(|attack| attack.moves.min(1000))
            .sum();
        all.put(
            "databases",
            databases,
            "bytes",
            DATABASE + (requests + moves) * ROW,
        );
        all
    }
}

/// What the server does while nobody asks for anything: a task that never ends shows here.
async fn at_rest(pid: u32) -> u64 {
    let before = host::cpu_millis(pid).unwrap_or_default();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let spent = host::cpu_millis(pid).unwrap_or_default() - before;
    spent.max(0.0) as u64
}

const ROWS: [&str; 10] = [
    "sandboxes",
    "snapshots",
    "volumes",
    "artifacts",
    "secrets",
    "workflows that run",
    "schedules",
    "questions to people",
    "model calls under way",
    "budgets with something reserved",
];

/// Rows that say that something is there, of all projects together.
async fn rows(world: &Arc<World>) -> Result<BTreeMap<&'static str, u64>> {
    let mut rows = BTreeMap::new();
    for index in 0..PROJECTS.len() {
        let client = world.client(index)?;
        let mut add = |name: &'static str, count: usize| {
            *rows.entry(name).or_insert(0) += count as u64;
        };
        add("sandboxes", client.list("/v1/sandboxes", &[]).await?.len());
        add("snapshots", client.list("/v1/snapshots", &[]).await?.len());
        add("volumes", client.list("/v1/volumes", &[]).await?.len());
        add("artifacts", client.list("/v1/artifacts", &[]).await?.len());
        add("secrets", client.list("/v1/secrets", &[]).await?.len());
        add("workflows that run", running(world, &client, index).await?.len());
        add("schedules", schedules(world, index).await?.len());
        let asked = client.get("/v1/approvals").await?;
        add(
            "questions to people",
            asked["items"].as_array().map_or(0, Vec::len),
        );
        add("model calls under way", open_calls(&client).await?);
        let budgets = client.get("/v1/gateway/budgets").await?;
        let standing = budgets["items"].as_array().into_iter().flatten();
        let standing = standing.flat_map(|budget| budget["standing"].as_array().into_iter().flatten());
        add(
            "budgets with something reserved",
            standing.filter(|one| is_reserved(one)).count(),
        );
    }
    Ok(rows)
}

/// Among the newest: an hour has tens of thousands.
async fn open_calls(client: &Client) -> Result<usize> {
    let (mut open, mut cursor) = (0, None::<String>);
    for _ in 0..10 {
        let mut request = client
            .request(reqwest::Method::GET, "/v1/gateway/calls")
            .query(&[("limit", "100")]);
        if let Some(cursor) = &cursor {
            request = request.query(&[("cursor", cursor)]);
        }
        let page = client.json(request).await?;
        let calls = page["items"].as_array().into_iter().flatten();
        open += calls.filter(|call| call["outcome"] == "open").count();
        match page["next"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    Ok(open)
}

fn is_reserved(standing: &Value) -> bool {
    let reserved = standing["reserved"].as_str().unwrap_or_default();
    reserved.parse::<f64>().is_ok_and(|dollars| dollars > 0.0)
}

async fn running(world: &Arc<World>, client: &Client, index: usize) -> Result<Vec<String>> {
    let namespace = world.project(index).map(|project| project.namespace);
    let request = client.request(reqwest::Method::GET, "/v1/workflows").query(&[
        ("namespace", namespace.unwrap_or_default().as_str()),
        ("query", "ExecutionStatus = 'Running'"),
        ("limit", "1000"),
    ]);
    let found = client.json(request).await?;
    let found = found["items"].as_array().into_iter().flatten();
    Ok(found
        .filter_map(|workflow| workflow["id"].as_str().map(str::to_owned))
        .collect())
}

async fn schedules(world: &Arc<World>, index: usize) -> Result<Vec<String>> {
    let Some(project) = world.project(index) else {
        return Ok(Vec::new());
    };
    let mut wire = WorkflowClient::open(&world.server.workflows_url(), Some(&project.key)).await?;
    let request = service::ListSchedulesRequest {
        namespace: project.namespace,
        maximum_page_size: 1000,
        ..Default::default()
    };
    let listed: service::ListSchedulesResponse = wire.call("ListSchedules", request).await?;
    let listed = listed.schedules.into_iter();
    Ok(listed.map(|schedule| schedule.schedule_id).collect())
}

/// Takes away what the projects have. What refuses to go is found by the inventory.
pub(super) async fn clear_out(world: &Arc<World>) {
    // Whoever hangs is not waited for: it is found.
    let _late = tokio::time::timeout(CLEAR_WITHIN, clear_projects(world)).await;
}

async fn clear_projects(world: &Arc<World>) {
    for round in 0..30 {
        let mut left = 0;
        for index in 0..PROJECTS.len() {
            left += clear_project(world, index).await.unwrap_or(1);
        }
        if left == 0 || world.interrupted.is_cancelled() {
            return;
        }
        // What is on its way from one state to another goes when it has arrived.
        tokio::time::sleep(Duration::from_millis(if round == 0 { 200 } else { 1000 })).await;
    }
}

/// How much was there.
async fn clear_project(world: &Arc<World>, index: usize) -> Result<usize> {
    let client = world.client(index)?;
    let mut found = 0;
    for path in [
        "/v1/sandboxes",
        "/v1/snapshots",
        "/v1/volumes",
        "/v1/artifacts",
        "/v1/secrets",
    ] {
        let items = client.list(path, &[]).await?;
        found += items.len();
        let gone = items.iter().map(|item| {
            let name = if path == "/v1/secrets" { "name" } else { "id" };
            let path = format!("{path}/{}", item[name].as_str().unwrap_or_default());
            let client = client.clone();
            async move { client.delete(&path).await.map(drop) }
        });
        let _later = futures_util::future::join_all(gone).await;
    }
    for id in schedules(world, index).await? {
        found += 1;
        let Some(project) = world.project(index) else {
            continue;
        };
        let mut wire = WorkflowClient::open(&world.server.workflows_url(), Some(&project.key)).await?;
        let request = service::DeleteScheduleRequest {
            namespace: project.namespace,
            schedule_id: id,
            ..Default::default()
        };
        let _later = wire
            .call::<_, service::DeleteScheduleResponse>("DeleteSchedule", request)
            .await;
    }
    let namespace = world.project(index).map(|project| project.namespace);
    let namespace = namespace.unwrap_or_default();
    for id in running(world, &client, index).await? {
        found += 1;
        let path = format!("/v1/workflows/{}/terminate", segment(&id));
        let request = client
            .request(reqwest::Method::POST, &path)
            .query(&[("namespace", &namespace)]);
        let _later = client.json(request).await;
    }
    Ok(found)
}

/// What a directory holds, but for what a killed server had not named yet, which a later one removes.
fn named(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with(".new-"));
    names.count() as u64
}

/// Files at any depth.
fn files(dir: &Path) -> u64 {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        count += match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => files(&entry.path()),
            false => 1,
        };
    }
    count
}

/// Bytes of databases, and of everything else.
fn disk(data: &Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    let mut databases = 0;
    for entry in std::fs::read_dir(data).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains(".db") {
            databases += entry.metadata().map_or(0, |found| found.blocks() * 512);
        }
    }
    (databases, host::allocated(data).saturating_sub(databases))
}

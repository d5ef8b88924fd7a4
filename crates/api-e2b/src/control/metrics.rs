//! What sandboxes consume. There is no history: an answer is a sample of now, if now is within what was asked for.

use parking_lot::Mutex;
use std::collections::HashMap;

use atoll_identity::Caller;
use atoll_sandboxes::Sandbox;
use atoll_types::{SandboxId, SandboxState, Timestamp};
use axum::extract::{Json, State};
use serde_json::{Value, json};

use super::read::{Id, Query};
use super::{life, view};
use crate::App;
use crate::auth::Auth;
use crate::edge::parse_id;
use crate::error::{Answer, Refusal};

/// How exactly the ends of a time range are meant, in seconds: E2B collects every five.
const BUCKET: i64 = 5;
const MOST: usize = 100;
/// Samples that are remembered; beyond, all are forgotten, which costs the next answers some precision.
const REMEMBERED: usize = 10_000;

/// The last sample of each sandbox, so that the next one tells how busy it was since.
#[derive(Debug, Default)]
pub(crate) struct Samples(Mutex<HashMap<SandboxId, (i64, u64)>>);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    at: i64,
    cpus: u32,
    cpu_percent: f64,
    memory_used: u64,
    memory_total: u64,
    disk_used: u64,
    disk_total: u64,
}

pub(crate) async fn sample(app: &App, caller: &Caller, sandbox: &Sandbox) -> Answer<Sample> {
    let metrics = app.sandboxes.metrics(caller, &sandbox.id).await?;
    let (at, spent) = (metrics.at.0, metrics.usage.cpu_micros);
    let (then, before) = {
        let mut samples = app.samples.0.lock();
        if samples.len() >= REMEMBERED {
            samples.clear();
        }
        let started = sandbox.started_at.unwrap_or(sandbox.created_at).0;
        samples
            .insert(sandbox.id.clone(), (at, spent))
            .unwrap_or((started, 0))
    };
    let elapsed_micros = (at - then).max(1).unsigned_abs().saturating_mul(1000);
    #[allow(clippy::cast_precision_loss, reason = "a percentage for people")]
    let cpu_percent = spent.saturating_sub(before) as f64 * 100.0 / elapsed_micros as f64;
    let resources = &sandbox.spec.resources;
    let guest = metrics.guest.unwrap_or_default();
    Ok(Sample {
        at,
        cpus: resources.cpu_millis.div_ceil(1000),
        cpu_percent: (cpu_percent * 100.0).round() / 100.0,
        memory_used: metrics.usage.memory_bytes,
        memory_total: resources.memory_bytes,
        disk_used: metrics.usage.disk_bytes.unwrap_or(guest.disk_used_bytes),
        disk_total: resources.disk_bytes,
    })
}

impl Sample {
    fn view(&self) -> Value {
        json!({
            "timestamp": view::time(Timestamp(self.at)),
            "timestampUnix": self.at / 1000,
            "cpuCount": self.cpus,
            "cpuUsedPct": self.cpu_percent,
            "memUsed": self.memory_used,
            "memTotal": self.memory_total,
            "memCache": 0,
            "diskUsed": self.disk_used,
            "diskTotal": self.disk_total,
        })
    }

    /// As the agent in a sandbox tells it.
    pub(crate) fn for_agent(&self) -> Value {
        const MIB: u64 = atoll_types::MIB;
        json!({
            "ts": self.at / 1000,
            "cpu_count": self.cpus,
            "cpu_used_pct": self.cpu_percent,
            "mem_total": self.memory_total,
            "mem_used": self.memory_used,
            "mem_cache": 0,
            "mem_total_mib": self.memory_total / MIB,
            "mem_used_mib": self.memory_used / MIB,
            "disk_used": self.disk_used,
            "disk_total": self.disk_total,
        })
    }
}

pub(crate) async fn of_one(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    query: Query,
) -> Answer<Json<Vec<Value>>> {
    let query = query.only(&["start", "end"])?;
    let (start, end) = (query.number("start")?, query.number("end")?);
    let sandbox = life::known(&app, &caller, &id).await?;
    let now = view::now_seconds();
    let asked_for = start.is_none_or(|start| start <= now) && end.is_none_or(|end| now <= end + BUCKET);
    if !asked_for || sandbox.state != SandboxState::Running {
        return Ok(Json(Vec::new()));
    }
    let sample = sample(&app, &caller, &sandbox).await?;
    Ok(Json(vec![sample.view()]))
}

pub(crate) async fn of_many(State(app): State<App>, Auth(caller): Auth, query: Query) -> Answer<Json<Value>> {
    let query = query.only(&["sandbox_ids"])?;
    let ids: Vec<&str> = query.text("sandbox_ids").unwrap_or_default().split(',').collect();
    if ids.len() > MOST {
        return Err(Refusal::invalid(format!("`sandbox_ids` names more than {MOST}")));
    }
    let mut views = serde_json::Map::new();
    for text in ids.into_iter().filter(|text| !text.is_empty()) {
        let Some(id) = parse_id(text) else { continue };
        let Ok(sandbox) = life::known(&app, &caller, &id).await else {
            continue;
        };
        if sandbox.state == SandboxState::Running {
            let sample = sample(&app, &caller, &sandbox).await?;
            views.insert(text.to_owned(), sample.view());
        }
    }
    Ok(Json(json!({ "sandboxes": views })))
}

//! What a sandbox uses at this moment.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::error::Answer;
use crate::extract::As;
use crate::named::Named;
use crate::{App, wire};

/// What a sandbox uses now, as the host sees it; `guest` is what it says of itself.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MetricsView {
    #[schema(format = DateTime)]
    at: String,
    cpu_micros: u64,
    memory_bytes: u64,
    memory_peak_bytes: u64,
    pids: u64,
    disk_bytes: Option<u64>,
    oom_kills: u64,
    guest: Option<GuestMetricsView>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GuestMetricsView {
    memory_total_bytes: u64,
    memory_available_bytes: u64,
    disk_total_bytes: u64,
    disk_used_bytes: u64,
    processes: u32,
    /// One-minute load average in thousandths.
    load_1m_milli: u32,
}

/// Tells what a sandbox uses at this moment.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/metrics", tag = "sandboxes",
    security(("key" = ["sandbox.read"])),
    responses((status = 200, description = "Its use of the host.", body = MetricsView))
)]
pub(crate) async fn sandbox_metrics(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
) -> Answer<axum::Json<MetricsView>> {
    let metrics = app.sandboxes.metrics(&caller, &id).await?;
    Ok(axum::Json(MetricsView {
        at: wire::time(metrics.at),
        cpu_micros: metrics.usage.cpu_micros,
        memory_bytes: metrics.usage.memory_bytes,
        memory_peak_bytes: metrics.usage.memory_peak_bytes,
        pids: metrics.usage.pids,
        disk_bytes: metrics.usage.disk_bytes,
        oom_kills: metrics.usage.oom_kills,
        guest: metrics.guest.map(|guest| GuestMetricsView {
            memory_total_bytes: guest.memory_total_bytes,
            memory_available_bytes: guest.memory_available_bytes,
            disk_total_bytes: guest.disk_total_bytes,
            disk_used_bytes: guest.disk_used_bytes,
            processes: guest.processes,
            load_1m_milli: guest.load_1m_milli,
        }),
    }))
}

//! Each time that a sandbox ran.

use atoll_store::InstanceRow;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::error::Answer;
use crate::extract::{Args, As};
use crate::named::Named;
use crate::{App, wire};
use atoll_actions::words::IsolationName;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct InstancesQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

/// One time that a sandbox ran: from its creation or resume until it rested or was gone.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Instance)]
pub(crate) struct InstanceView {
    id: String,
    isolation: IsolationName,
    #[schema(format = DateTime)]
    started_at: String,
    /// Absent while it runs.
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    /// Why it ended: `paused`, `stopped`, or the `reason` of the sandbox's `end`, such as `killed`, `timed_out` or `lost`.
    reason: Option<String>,
    /// What it used, as far as that was metered by now.
    wall_ms: u64,
    cpu_micros: u64,
    memory_byte_seconds: u64,
    disk_byte_seconds: u64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InstancePage {
    items: Vec<InstanceView>,
    /// Pass it as `cursor` to get what follows; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

impl InstanceView {
    fn of(row: InstanceRow) -> Self {
        Self {
            id: row.id.to_string(),
            isolation: IsolationName::of(row.isolation),
            started_at: wire::time(row.started_at),
            ended_at: row.ended_at.map(wire::time),
            reason: row.reason,
            wall_ms: row.usage.wall_millis,
            cpu_micros: row.usage.cpu_micros,
            memory_byte_seconds: row.usage.memory_byte_seconds,
            disk_byte_seconds: row.usage.disk_byte_seconds,
        }
    }
}

/// Lists each time that a sandbox ran, newest first. They are kept as long as the ledger is.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/instances", tag = "sandboxes",
    security(("key" = ["sandbox.read"])), params(InstancesQuery),
    responses((status = 200, description = "A page of them.", body = InstancePage))
)]
pub(crate) async fn sandbox_instances(
    State(app): State<App>,
    As(caller): As,
    Named(id): Named,
    Args(query): Args<InstancesQuery>,
) -> Answer<axum::Json<InstancePage>> {
    let limit = wire::within("limit", query.limit.unwrap_or(50), 1..=100)?;
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let page = app.sandboxes.instances(&caller, &id, query.cursor, limit).await?;
    Ok(axum::Json(InstancePage {
        items: page.items.into_iter().map(InstanceView::of).collect(),
        next: page.next,
    }))
}

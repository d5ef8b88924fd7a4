//! A sandbox as it is shown.

use std::collections::BTreeMap;

use atoll_sandboxes::Sandbox;
use atoll_types::Resources;
use serde::Serialize;
use utoipa::ToSchema;

use super::life::{
    ActionName, BackingName, HooksWords, Idle, IsolationName, SaveKindName, StateName, VolumeMountWords,
};
use super::network::{PolicyWords, SecretUseWords};
use crate::spelling;

#[derive(Debug, Serialize, ToSchema)]
pub struct ResourcesView {
    cpu_millis: u32,
    memory_bytes: u64,
    disk_bytes: u64,
    disk_backing: BackingName,
    pids: u32,
}

impl ResourcesView {
    pub fn of(resources: Resources) -> Self {
        Self {
            cpu_millis: resources.cpu_millis,
            memory_bytes: resources.memory_bytes,
            disk_bytes: resources.disk_bytes,
            disk_backing: BackingName::of(resources.disk_backing),
            pids: resources.pids,
        }
    }
}

/// Why a sandbox ended.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EndView {
    /// `killed`, `timed_out`, `idle`, `expired`, `out_of_memory`, `guest_died`, `start_failed`, `lost` or `incompatible`.
    #[schema(examples("out_of_memory"))]
    reason: String,
    message: String,
}

/// What a sandbox that rests comes back from.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SavedView {
    kind: SaveKindName,
    /// When it went to rest.
    #[schema(format = DateTime)]
    at: String,
    /// When it will be deleted if it still rests then.
    #[schema(format = DateTime)]
    expires_at: Option<String>,
}

/// A sandbox. Its environment is not shown: people put secrets there.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Sandbox)]
pub struct SandboxView {
    id: String,
    /// What it is called; of one that is over, what it was called.
    name: Option<String>,
    project: String,
    /// Whom it belongs to: `key:ID`, `sandbox:ID` or `workflow:NAMESPACE:RUN:WORKFLOW`. Absent where the server made it for
    /// nobody.
    owner: Option<String>,
    /// As the request named it.
    template: String,
    template_id: String,
    isolation: IsolationName,
    /// Whether hostile tenants may share a machine behind this isolation.
    tenant_boundary: bool,
    isolation_floor: Option<IsolationName>,
    state: StateName,
    resources: ResourcesView,
    timeout_ms: Option<u64>,
    /// What happens at its deadline.
    on_timeout: ActionName,
    idle: Option<Idle>,
    auto_resume: bool,
    fallback_to_files: bool,
    retention_ms: Option<u64>,
    hooks: HooksWords,
    volumes: Vec<VolumeMountWords>,
    /// What it may reach, where that was said of itself. What holds is found under its `network`.
    network: Option<PolicyWords>,
    secrets: Vec<SecretUseWords>,
    labels: BTreeMap<String, String>,
    instance: Option<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    started_at: Option<String>,
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    /// When its lifetime is over, unless extended. None while it rests.
    #[schema(format = DateTime)]
    deadline: Option<String>,
    /// Present while it rests, paused or stopped, and until it is back.
    saved: Option<SavedView>,
    end: Option<EndView>,
}

impl SandboxView {
    pub fn of(sandbox: Sandbox) -> Self {
        let Sandbox {
            id,
            project,
            spec,
            template,
            isolation,
            state,
            instance,
            created_at,
            started_at,
            ended_at,
            deadline,
            saved,
            end,
        } = sandbox;
        let retention = spec.retention_millis;
        Self {
            id: id.to_string(),
            name: spec.name.map(|name| name.to_string()),
            project: project.to_string(),
            owner: spec.owner.map(|owner| owner.to_string()),
            template: spec.template,
            template_id: template.to_string(),
            isolation: IsolationName::of(isolation),
            tenant_boundary: isolation.is_tenant_boundary(),
            isolation_floor: spec.isolation_floor.map(IsolationName::of),
            state: StateName::of(state),
            resources: ResourcesView::of(spec.resources),
            timeout_ms: spec.timeout_millis,
            idle: spec.idle.map(|idle| Idle {
                after_ms: idle.after_millis,
                action: ActionName::of_idle(idle.action),
            }),
            on_timeout: ActionName::of_timeout(spec.on_timeout),
            auto_resume: spec.auto_resume,
            fallback_to_files: spec.fallback_to_files,
            retention_ms: retention,
            hooks: HooksWords::of(spec.hooks),
            volumes: spec.volumes.into_iter().map(VolumeMountWords::of).collect(),
            network: spec.network.map(PolicyWords::of),
            secrets: SecretUseWords::of(spec.secrets),
            labels: spec.labels,
            instance: instance.map(|id| id.to_string()),
            created_at: spelling::time(created_at),
            started_at: started_at.map(spelling::time),
            ended_at: ended_at.map(spelling::time),
            deadline: deadline.map(spelling::time),
            saved: saved.map(|saved| SavedView {
                kind: SaveKindName::of(saved.kind),
                at: spelling::time(saved.at),
                expires_at: retention.map(|millis| spelling::time(saved.at.plus_millis(millis))),
            }),
            end: end.map(|end| EndView {
                reason: end.name().into(),
                message: end.explain(),
            }),
        }
    }
}

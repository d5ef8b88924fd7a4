//! `/v1/sandboxes`: create, look, list, extend, end, and what a sandbox uses at this moment.

use std::collections::BTreeMap;

use atoll_sandboxes::{CreateSandbox, ListSandboxes, Sandbox};
use atoll_types::{
    DiskBacking, IdleAction, IdlePolicy, Isolation, Resources, SandboxId, SandboxSpec, SandboxState,
};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, Failure};
use crate::extract::{Args, As, At, Json};
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create_sandbox, list_sandboxes))
        .routes(routes!(get_sandbox, delete_sandbox))
        .routes(routes!(extend_sandbox))
        .routes(routes!(sandbox_metrics))
}

// ---- words

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Isolation)]
pub(crate) enum IsolationName {
    Jail,
    Gvisor,
    Microvm,
}

impl IsolationName {
    pub(crate) fn of(isolation: Isolation) -> Self {
        match isolation {
            Isolation::Jail => Self::Jail,
            Isolation::Gvisor => Self::Gvisor,
            Isolation::Microvm => Self::Microvm,
        }
    }

    fn into_isolation(self) -> Isolation {
        match self {
            Self::Jail => Isolation::Jail,
            Self::Gvisor => Isolation::Gvisor,
            Self::Microvm => Isolation::Microvm,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = SandboxState)]
pub(crate) enum StateName {
    Starting,
    Running,
    Deleting,
    Deleted,
    Failed,
}

impl StateName {
    fn of(state: SandboxState) -> Self {
        match state {
            SandboxState::Starting => Self::Starting,
            SandboxState::Running => Self::Running,
            SandboxState::Deleting => Self::Deleting,
            SandboxState::Deleted => Self::Deleted,
            SandboxState::Failed => Self::Failed,
        }
    }
}

/// Where the private writable layer lives: in memory (counted against the memory limit) or on the host's disk.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = DiskBacking)]
pub(crate) enum BackingName {
    Memory,
    Disk,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum IdleActionName {
    Kill,
}

/// What happens to a sandbox that nobody has used for a while.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Idle {
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    after_ms: u64,
    #[serde(default = "IdleActionName::default_action")]
    action: IdleActionName,
}

impl IdleActionName {
    fn default_action() -> Self {
        Self::Kill
    }
}

// ---- requests

/// Hard limits; what is absent has the server's default.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResourcesRequest {
    /// Thousandths of a CPU core.
    #[schema(minimum = 1, examples(1000))]
    cpu_millis: Option<u32>,
    #[schema(minimum = 1, examples(536_870_912))]
    memory_bytes: Option<u64>,
    #[schema(minimum = 1)]
    disk_bytes: Option<u64>,
    disk_backing: Option<BackingName>,
    /// Processes and threads.
    #[schema(minimum = 1)]
    pids: Option<u32>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateSandboxRequest {
    /// Name or id of a template; `base` if absent.
    #[schema(examples("base"), min_length = 1, max_length = 255)]
    template: Option<String>,
    resources: Option<ResourcesRequest>,
    /// Lifetime from now. Absent: the server's default. `null`: none, where the operator allows that.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: Option<Option<u64>>,
    idle: Option<Idle>,
    /// Environment of every command.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Your own names for it, to find it again.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// The weakest isolation that you accept; the server refuses rather than go below it.
    isolation_floor: Option<IsolationName>,
}

/// Tells `null` from absent.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl CreateSandboxRequest {
    fn into_spec(self, default_timeout_millis: u64) -> Answer<SandboxSpec> {
        let asked = self.resources.unwrap_or_default();
        let default = Resources::default();
        let template = self.template.unwrap_or_else(|| "base".into());
        let timeout_millis = match self.timeout_ms {
            None => Some(default_timeout_millis),
            Some(asked) => asked
                .map(|millis| wire::duration("timeout_ms", millis))
                .transpose()?,
        };
        let idle = match self.idle {
            None => None,
            Some(Idle {
                after_ms,
                action: IdleActionName::Kill,
            }) => Some(IdlePolicy {
                after_millis: wire::duration("idle.after_ms", after_ms)?,
                action: IdleAction::Kill,
            }),
        };
        Ok(SandboxSpec {
            template: wire::name("template", template)?,
            resources: Resources {
                cpu_millis: asked.cpu_millis.unwrap_or(default.cpu_millis),
                memory_bytes: asked.memory_bytes.unwrap_or(default.memory_bytes),
                disk_bytes: asked.disk_bytes.unwrap_or(default.disk_bytes),
                disk_backing: match asked.disk_backing {
                    Some(BackingName::Memory) => DiskBacking::Memory,
                    Some(BackingName::Disk) => DiskBacking::Disk,
                    None => default.disk_backing,
                },
                pids: asked.pids.unwrap_or(default.pids),
            },
            timeout_millis,
            idle,
            env: self.env,
            labels: self.labels,
            isolation_floor: self.isolation_floor.map(IsolationName::into_isolation),
        })
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExtendRequest {
    /// The new lifetime, from now.
    #[schema(minimum = 1, maximum = 9_007_199_254_740_991_i64)]
    timeout_ms: u64,
}

/// Only documents the query; `label` and `state` repeat, which no struct can say to the decoder.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "read by the OpenAPI generator only")]
pub(crate) struct ListQuery {
    /// `NAME=VALUE`; repeat it to require several.
    #[param(style = Form, explode)]
    label: Option<Vec<String>>,
    /// Repeat it to accept several; absent: every live state.
    #[param(style = Form, explode)]
    state: Option<Vec<StateName>>,
    /// `next` of the page before.
    cursor: Option<String>,
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

fn read_list(pairs: Vec<(String, String)>) -> Answer<ListSandboxes> {
    let mut list = ListSandboxes {
        limit: 50,
        ..ListSandboxes::default()
    };
    let mut limit = None;
    for (name, value) in pairs {
        match name.as_str() {
            "label" => {
                let (label, value) = wire::pair("label", &value)?;
                if list.labels.insert(label.clone(), value).is_some() {
                    let message = format!("`label` names `{label}` twice");
                    return Err(Failure::invalid("invalid_query", message));
                }
            }
            "state" => {
                let state = value
                    .parse()
                    .map_err(|message: String| Failure::invalid("invalid_query", message))?;
                if !list.states.contains(&state) {
                    list.states.push(state);
                }
            }
            "cursor" if list.cursor.is_none() => list.cursor = Some(value),
            "limit" if limit.is_none() => {
                let number = value.parse().map_err(|_| {
                    Failure::invalid("invalid_query", format!("`limit` is `{value}`, not a number"))
                })?;
                let number = wire::within("limit", number, 1..=100)?;
                limit = usize::try_from(number).ok();
            }
            "cursor" | "limit" => {
                let message = format!("`{name}` is given twice");
                return Err(Failure::invalid("invalid_query", message));
            }
            _ => {
                let message = format!(
                    "unknown query parameter `{name}`, expected one of `label`, `state`, `cursor`, `limit`"
                );
                return Err(Failure::invalid("invalid_query", message));
            }
        }
    }
    list.limit = limit.unwrap_or(list.limit);
    Ok(list)
}

// ---- answers

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResourcesView {
    cpu_millis: u32,
    memory_bytes: u64,
    disk_bytes: u64,
    disk_backing: BackingName,
    pids: u32,
}

/// Why a sandbox ended.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EndView {
    /// `killed`, `timed_out`, `idle`, `out_of_memory`, `guest_died`, `start_failed` or `lost`.
    #[schema(examples("out_of_memory"))]
    reason: String,
    message: String,
}

/// A sandbox. Its environment is not shown: people put secrets there.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Sandbox)]
pub(crate) struct SandboxView {
    id: String,
    project: String,
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
    idle: Option<Idle>,
    labels: BTreeMap<String, String>,
    instance: Option<String>,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    started_at: Option<String>,
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    /// When it will be killed, unless extended.
    #[schema(format = DateTime)]
    deadline: Option<String>,
    end: Option<EndView>,
}

impl SandboxView {
    fn of(sandbox: Sandbox) -> Self {
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
            end,
        } = sandbox;
        Self {
            id: id.to_string(),
            project: project.to_string(),
            template: spec.template,
            template_id: template.to_string(),
            isolation: IsolationName::of(isolation),
            tenant_boundary: isolation.is_tenant_boundary(),
            isolation_floor: spec.isolation_floor.map(IsolationName::of),
            state: StateName::of(state),
            resources: ResourcesView {
                cpu_millis: spec.resources.cpu_millis,
                memory_bytes: spec.resources.memory_bytes,
                disk_bytes: spec.resources.disk_bytes,
                disk_backing: match spec.resources.disk_backing {
                    DiskBacking::Memory => BackingName::Memory,
                    DiskBacking::Disk => BackingName::Disk,
                },
                pids: spec.resources.pids,
            },
            timeout_ms: spec.timeout_millis,
            idle: spec.idle.map(|idle| Idle {
                after_ms: idle.after_millis,
                action: match idle.action {
                    IdleAction::Kill => IdleActionName::Kill,
                },
            }),
            labels: spec.labels,
            instance: instance.map(|id| id.to_string()),
            created_at: wire::time(created_at),
            started_at: started_at.map(wire::time),
            ended_at: ended_at.map(wire::time),
            deadline: deadline.map(wire::time),
            end: end.map(|end| EndView {
                reason: end.name().into(),
                message: end.explain(),
            }),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SandboxPage {
    items: Vec<SandboxView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

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

// ---- handlers

/// Creates a sandbox and answers when it runs.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "sandboxes",
    request_body = CreateSandboxRequest,
    params(("Idempotency-Key" = Option<String>, Header, min_length = 1, max_length = 255,
        description = "The same key with the same request finds the sandbox that was already made.")),
    responses((status = 201, description = "It runs.", body = SandboxView,
        headers(("Location" = String, description = "Where it is found."))))
)]
pub(crate) async fn create_sandbox(
    State(app): State<App>,
    As(caller): As,
    headers: HeaderMap,
    Json(body): Json<CreateSandboxRequest>,
) -> Answer<Response> {
    let request = CreateSandbox {
        idempotency_key: idempotency_key(&headers)?,
        spec: body.into_spec(app.options.default_timeout_millis)?,
    };
    let sandbox = app.sandboxes.create(&caller, request).await?;
    let location = format!("/v1/sandboxes/{}", sandbox.id);
    let mut response = (StatusCode::CREATED, axum::Json(SandboxView::of(sandbox))).into_response();
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn idempotency_key(headers: &HeaderMap) -> Answer<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(key) if (1..=255).contains(&key.len()) => Ok(Some(key.into())),
        _ => Err(Failure::invalid(
            "invalid_idempotency_key",
            "`Idempotency-Key` must be 1 to 255 visible ASCII characters",
        )),
    }
}

/// Lists sandboxes, newest first.
#[utoipa::path(
    get, path = "/v1/sandboxes", tag = "sandboxes", params(ListQuery),
    responses((status = 200, description = "A page of them.", body = SandboxPage))
)]
pub(crate) async fn list_sandboxes(
    State(app): State<App>,
    As(caller): As,
    Args(pairs): Args<Vec<(String, String)>>,
) -> Answer<axum::Json<SandboxPage>> {
    let page = app.sandboxes.list(&caller, read_list(pairs)?).await?;
    Ok(axum::Json(SandboxPage {
        items: page.items.into_iter().map(SandboxView::of).collect(),
        next: page.next,
    }))
}

/// Shows a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    responses((status = 200, description = "The sandbox.", body = SandboxView))
)]
pub(crate) async fn get_sandbox(
    State(app): State<App>,
    As(caller): As,
    At(id): At<SandboxId>,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.get(&caller, &id).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Ends a sandbox and answers when nothing of it is left. Ending what is already gone succeeds.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    responses((status = 200, description = "It is gone; this is its record.", body = SandboxView))
)]
pub(crate) async fn delete_sandbox(
    State(app): State<App>,
    As(caller): As,
    At(id): At<SandboxId>,
) -> Answer<axum::Json<SandboxView>> {
    let sandbox = app.sandboxes.kill(&caller, &id).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Sets the deadline of a sandbox anew, counted from now.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/extend", tag = "sandboxes", request_body = ExtendRequest,
    responses((status = 200, description = "The sandbox with its new deadline.", body = SandboxView))
)]
pub(crate) async fn extend_sandbox(
    State(app): State<App>,
    As(caller): As,
    At(id): At<SandboxId>,
    Json(body): Json<ExtendRequest>,
) -> Answer<axum::Json<SandboxView>> {
    let timeout_millis = wire::duration("timeout_ms", body.timeout_ms)?;
    let sandbox = app.sandboxes.extend(&caller, &id, timeout_millis).await?;
    Ok(axum::Json(SandboxView::of(sandbox)))
}

/// Tells what a sandbox uses at this moment.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/metrics", tag = "sandboxes",
    responses((status = 200, description = "Its use of the host.", body = MetricsView))
)]
pub(crate) async fn sandbox_metrics(
    State(app): State<App>,
    As(caller): As,
    At(id): At<SandboxId>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;

    fn spec(json: &str) -> SandboxSpec {
        parse_json::<CreateSandboxRequest>(json.as_bytes())
            .unwrap()
            .into_spec(300_000)
            .unwrap()
    }

    #[test]
    fn an_empty_request_means_the_defaults() {
        let spec = spec("{}");
        assert_eq!(spec.template, "base");
        assert_eq!(spec.resources, Resources::default());
        assert_eq!(spec.timeout_millis, Some(300_000));
        assert_eq!(spec.isolation_floor, None);
    }

    #[test]
    fn null_asks_for_no_timeout() {
        assert_eq!(spec(r#"{"timeout_ms":null}"#).timeout_millis, None);
        assert_eq!(spec(r#"{"timeout_ms":7}"#).timeout_millis, Some(7));
    }

    #[test]
    fn every_field_arrives() {
        let spec = spec(
            r#"{"template":"py","resources":{"cpu_millis":500,"memory_bytes":1,"disk_bytes":2,"disk_backing":"disk",
                "pids":3},"idle":{"after_ms":4},"env":{"A":"b"},"labels":{"c":"d"},"isolation_floor":"gvisor"}"#,
        );
        assert_eq!(spec.template, "py");
        assert_eq!(
            spec.resources,
            Resources {
                cpu_millis: 500,
                memory_bytes: 1,
                disk_bytes: 2,
                disk_backing: DiskBacking::Disk,
                pids: 3
            }
        );
        assert_eq!(
            spec.idle,
            Some(IdlePolicy {
                after_millis: 4,
                action: IdleAction::Kill
            })
        );
        assert_eq!(spec.env["A"], "b");
        assert_eq!(spec.labels["c"], "d");
        assert_eq!(spec.isolation_floor, Some(Isolation::Gvisor));
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        for (json, named) in [
            (r#"{"memory":1}"#, "memory"),
            (r#"{"resources":{"gpus":1}}"#, "gpus"),
            (
                r#"{"resources":{"memory_bytes":"512M"}}"#,
                "resources.memory_bytes",
            ),
            (r#"{"isolation_floor":"docker"}"#, "docker"),
        ] {
            let failure = parse_json::<CreateSandboxRequest>(json.as_bytes()).unwrap_err();
            assert!(
                failure.fault().message.contains(named),
                "{}",
                failure.fault().message
            );
        }
    }

    #[test]
    fn list_filters_repeat() {
        let read = |text: &str| read_list(crate::extract::query(text)?);
        let list = read("label=a=1&label=b=x=y&state=running&state=failed&limit=7&cursor=c").unwrap();
        assert_eq!(list.labels["a"], "1");
        assert_eq!(list.labels["b"], "x=y");
        assert_eq!(list.states, [SandboxState::Running, SandboxState::Failed]);
        assert_eq!((list.limit, list.cursor.as_deref()), (7, Some("c")));
        assert_eq!(read("").unwrap().limit, 50);
        for bad in [
            "label=a",
            "label=a=1&label=a=2",
            "state=asleep",
            "limit=0",
            "limit=101",
            "limit=1&limit=2",
            "page=2",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}

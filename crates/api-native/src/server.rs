//! The server about itself: health, metrics, what it can do, and its own documentation.

use std::fmt::Write as _;
use std::sync::atomic::AtomicU64;

use atoll_actions::words::IsolationName;
use atoll_front::meter::exposition;
use atoll_sandboxes::PoolView;
use atoll_types::{Code, Fault, Isolation};
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::response::{Html, IntoResponse, Response};
use bytes::Bytes;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::{Answer, Failure};
use crate::extract::As;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(info))
        .routes(routes!(healthz))
        .routes(routes!(metrics))
        .routes(routes!(model_metrics))
        .routes(routes!(openapi_json))
        .routes(routes!(docs))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InfoView {
    version: String,
    tiers: Vec<TierInfo>,
    /// Of templates that the caller may use.
    pools: Vec<PoolInfo>,
    /// Sandboxes that run now: of all projects for operators whose key is not restricted, otherwise of the caller's own.
    running: usize,
}

/// A kind of isolation, and whether this machine offers it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TierInfo {
    isolation: IsolationName,
    available: bool,
    tenant_boundary: bool,
    detail: String,
    /// What to do so that it becomes available.
    fix: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PoolInfo {
    template: String,
    /// Known once the first instance was booted.
    isolation: Option<IsolationName>,
    ready: usize,
    target: usize,
}

/// Tells what this server is and which isolation it offers.
#[utoipa::path(
    get, path = "/v1/info", tag = "server",
    security(("key" = ["server.read"])),
    responses((status = 200, description = "The server.", body = InfoView))
)]
pub(crate) async fn info(State(app): State<App>, As(caller): As) -> Answer<axum::Json<InfoView>> {
    let overview = app.sandboxes.overview().await;
    let tiers = overview.tiers.into_iter().map(|tier| TierInfo {
        isolation: IsolationName::of(tier.isolation),
        available: tier.available,
        tenant_boundary: tier.isolation.is_tenant_boundary(),
        detail: tier.detail,
        fix: tier.fix,
    });
    let seen = overview.pools.into_iter();
    let seen = seen.filter(|pool| app.sandboxes.sees_pool(&caller, pool));
    let pools = seen.map(|pool| PoolInfo {
        template: pool.template,
        isolation: pool.isolation.map(IsolationName::of),
        ready: pool.ready,
        target: pool.target,
    });
    Ok(axum::Json(InfoView {
        version: env!("CARGO_PKG_VERSION").into(),
        tiers: tiers.collect(),
        pools: pools.collect(),
        running: match caller.sees_all_projects() {
            true => overview.running,
            false => app.sandboxes.running_of(caller.project()),
        },
    }))
}

/// Answers if the server does.
#[utoipa::path(
    get, path = "/healthz", tag = "server", security(()),
    responses((status = 200, description = "It does.", body = String, content_type = "text/plain"))
)]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Metrics of model calls in OpenMetrics' text form, for the same readers as `/metrics`.
#[utoipa::path(
    get, path = "/metrics/models", tag = "server",
    security(("key" = ["server.run"])),
    responses((status = 200, description = "The metrics.", body = String, content_type = "application/openmetrics-text"))
)]
pub(crate) async fn model_metrics(State(app): State<App>) -> Response {
    let mut registry = Registry::default();
    app.models.metrics().register(&mut registry);
    exposition(&registry)
}

/// Metrics in OpenMetrics' text form (Prometheus), for those who run the server, and for holders of its `metrics_key`.
#[utoipa::path(
    get, path = "/metrics", tag = "server",
    security(("key" = ["server.run"])),
    responses((status = 200, description = "The metrics.", body = String, content_type = "application/openmetrics-text"))
)]
pub(crate) async fn metrics(State(app): State<App>) -> Response {
    let overview = app.sandboxes.overview().await;
    let mut registry = Registry::default();
    registry.register(
        "atoll_build",
        "Always 1; the label is the version",
        Info::new([("version", env!("CARGO_PKG_VERSION"))]),
    );
    let (open, strangers) = app.front.connections.count();
    let known = open.saturating_sub(strangers);
    for (name, help, value) in [
        (
            "atoll_sandboxes_running",
            "Sandboxes that run now",
            overview.running as u64,
        ),
        (
            "atoll_instances_pooled",
            "Instances booted ahead of use",
            overview.pooled as u64,
        ),
        (
            "atoll_buffered_bytes",
            "Bytes of requests that are held in memory now",
            app.front.memory.held(),
        ),
    ] {
        registry.register(name, help, ConstGauge::new(value));
    }
    registry.register(
        "atoll_connections",
        "Connections that are open now",
        gauges([
            ([("kind", "known")], known as u64),
            ([("kind", "stranger")], strangers as u64),
        ]),
    );
    let tiers = overview.tiers.iter();
    registry.register(
        "atoll_tier_available",
        "Whether this machine offers the isolation",
        gauges(tiers.map(|tier| ([("isolation", tier.isolation.name())], u64::from(tier.available)))),
    );
    let pools = overview.pools.iter();
    registry.register(
        "atoll_pool_ready",
        "Instances ready in the pool",
        gauges(pools.clone().map(|pool| (pool_labels(pool), pool.ready as u64))),
    );
    registry.register(
        "atoll_pool_target",
        "Instances that the pool should hold",
        gauges(pools.map(|pool| (pool_labels(pool), pool.target as u64))),
    );
    app.front.meter.register(&mut registry);
    exposition(&registry)
}

type Labels<const N: usize> = [(&'static str, String); N];

/// Series of one gauge, as they are now.
fn gauges<'a, const N: usize>(
    series: impl IntoIterator<Item = ([(&'static str, &'a str); N], u64)>,
) -> Family<Labels<N>, Gauge<u64, AtomicU64>> {
    let family = Family::default();
    for (labels, value) in series {
        let labels: Labels<N> = labels.map(|(name, value)| (name, value.to_owned()));
        let gauge: &Gauge<u64, AtomicU64> = &family.get_or_create(&labels);
        gauge.set(value);
    }
    family
}

fn pool_labels(pool: &PoolView) -> [(&'static str, &str); 2] {
    let isolation = pool.isolation.map_or("unknown", Isolation::name);
    [("template", pool.template.as_str()), ("isolation", isolation)]
}

/// This document.
#[utoipa::path(
    get, path = "/openapi.json", tag = "server", security(()),
    responses((status = 200, description = "OpenAPI 3.1.", body = serde_json::Value, content_type = "application/json"))
)]
pub(crate) async fn openapi_json(State(app): State<App>) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "application/json")],
        app.document.json.clone(),
    )
}

/// The same for people: every operation in a table.
#[utoipa::path(
    get, path = "/docs", tag = "server", security(()),
    responses((status = 200, description = "A page.", body = String, content_type = "text/html"))
)]
pub(crate) async fn docs(State(app): State<App>) -> impl IntoResponse {
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    (
        [(header::CONTENT_SECURITY_POLICY, policy)],
        Html(app.document.page.clone()),
    )
}

/// What is served, described once.
#[derive(Debug)]
pub(crate) struct Document {
    json: Bytes,
    page: Bytes,
}

impl Document {
    pub(crate) fn of(api: &OpenApi) -> Self {
        Self {
            json: serde_json::to_vec(api).unwrap_or_default().into(),
            page: page(api).into(),
        }
    }
}

fn page(api: &OpenApi) -> String {
    let mut page = String::from(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Atoll API</title><style>body{font:16px/1.5 \
         system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}td{padding:.15rem .8rem .15rem 0;\
         vertical-align:top}code{white-space:nowrap}</style><h1>Atoll API</h1><p>Send <code>Authorization: Bearer \
         e2b_…</code> with everything below <code>/v1</code>. The machine-readable description is \
         <a href=\"/openapi.json\">openapi.json</a>.<table>",
    );
    for (path, item) in &api.paths.paths {
        for (method, operation) in crate::openapi::operations(item) {
            let summary = operation.summary.as_deref().unwrap_or_default();
            // Both come from our source, not from requests.
            let _ = write!(
                page,
                "<tr><td>{method}<td><code>{path}</code><td>{}",
                summary.replace('&', "&amp;").replace('<', "&lt;")
            );
        }
    }
    page.push_str("</table></html>\n");
    page
}

/// Answers what no route matches.
pub(crate) async fn no_such_route(request: Request) -> Failure {
    Failure::from(Fault::new(
        Code::NoSuchRoute,
        format!("there is nothing at `{}`", request.uri().path()),
    ))
    .hint("/docs lists what there is")
}

/// Answers a method that a route does not have; `Allow` comes with it.
pub(crate) fn wrong_method(path: &str, method: &Method) -> Failure {
    Failure::new(
        Code::MethodNotAllowed,
        format!("`{path}` cannot be asked to {method}"),
    )
    .hint("the `Allow` header lists the methods that it knows")
}

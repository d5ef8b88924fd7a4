//! The control plane: sandboxes, snapshots, templates, volumes, as REST.

pub(crate) mod actions;
mod build_files;
pub(crate) mod builds;
pub(crate) mod create;
mod domain;
pub(crate) mod life;
mod list;
mod logs;
mod metrics;
mod names;
pub(crate) mod network;
mod read;
pub(crate) mod recipe;
pub(crate) mod snapshots;
pub(crate) mod tags;
mod teams;
pub(crate) mod templates;
mod uploads;
mod view;
pub(crate) mod volume_content;
pub(crate) mod volumes;

use axum::Router;
use axum::routing::{any, delete, get, patch, post, put};

use crate::App;
use crate::error::Refusal;

pub(crate) use metrics::{Samples, sample};
pub(crate) use uploads::Uploads;
pub(crate) use view::{now_seconds, template_id};

/// Whether a path is, or begins like, one of [`routes`].
pub(crate) fn is_ours(path: &str) -> bool {
    let mut parts = path.trim_start_matches('/').split('/');
    let first = parts.next().unwrap_or_default();
    match first {
        "v2" | "v3" => matches!(parts.next(), Some("sandboxes" | "templates")),
        _ => matches!(
            first,
            "health"
                | "sandboxes"
                | "snapshots"
                | "templates"
                | "volumes"
                | "volumecontent"
                | "teams"
                | "secrets"
        ),
    }
}

pub(crate) fn routes() -> Router<App> {
    Router::new()
        .route("/health", get(|| async { "Health check successful" }))
        .route("/sandboxes", post(create::v1).get(list::running))
        .route("/v2/sandboxes", post(create::v2).get(list::list))
        .route("/sandboxes/metrics", get(metrics::of_many))
        .route("/sandboxes/{id}", get(life::get).delete(life::kill))
        .route("/sandboxes/{id}/connect", post(life::connect))
        .route("/v2/sandboxes/{id}/connect", post(life::connect))
        .route("/sandboxes/{id}/resume", post(life::resume))
        .route("/sandboxes/{id}/pause", post(life::pause))
        .route("/sandboxes/{id}/timeout", post(life::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(life::refresh))
        .route("/sandboxes/{id}/network", put(network::update))
        .route("/sandboxes/{id}/metrics", get(metrics::of_one))
        .route("/sandboxes/{id}/logs", get(logs::v1))
        .route("/v2/sandboxes/{id}/logs", get(logs::v2))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/fork", post(snapshots::fork))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list_all))
        .route("/v2/templates", get(templates::list))
        .route("/templates/{id}", get(templates::get).delete(templates::delete))
        .route("/templates/aliases/{alias}", get(templates::exists))
        .route("/v3/templates", post(builds::request))
        .route("/v2/templates/{id}", patch(templates::publish))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .route(
            "/templates/{id}/files/{hash}",
            get(uploads::link).put(uploads::receive),
        )
        .route("/templates/tags", post(tags::assign).delete(tags::remove))
        .route("/templates/{id}/tags", get(tags::list))
        .route("/volumes", post(volumes::create).get(volumes::list))
        .route("/volumes/{id}", get(volumes::get).delete(volumes::delete))
        .route(
            "/volumecontent/{id}/path",
            get(volume_content::stat)
                .patch(volume_content::change)
                .delete(volume_content::remove),
        )
        .route(
            "/volumecontent/{id}/dir",
            get(volume_content::list).post(volume_content::make_dir),
        )
        .route(
            "/volumecontent/{id}/file",
            get(volume_content::read).put(volume_content::write),
        )
        .route("/teams", get(teams::list))
        .route("/secrets", any(secrets))
        .route("/secrets/{name}", delete(secrets).get(secrets).post(secrets))
        .route_layer(axum::middleware::from_fn(read::no_query))
}

async fn secrets() -> Refusal {
    Refusal::unsupported(
        "secrets",
        "they are managed by the native API, which binds them to the hosts that may get them",
    )
}

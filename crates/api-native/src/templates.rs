//! `/v1/templates`: what sandboxes are made from, and the making of it.

pub(crate) mod request;

use std::collections::BTreeMap;

use atoll_actions::words::{PolicyWords, ResourcesView};
use atoll_identity::Caller;
use atoll_sandboxes::{BuildEvent, BuildFrom, BuildStream, BuildTemplate, Template};
use atoll_types::{Code, TemplateSource};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{Answer, ErrorDetail, Failure};
use crate::exec::{event, sse};
use crate::extract::{Args, Arriving, As, At, Json, MaybeJson, Paying};
use crate::upload::{self, Upload};
use crate::{App, wire};

use request::{
    ArchiveQuery, BuildRequest, ContextQuery, StartRequest, read_context_query, read_login, read_network,
    read_resources, read_start,
};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_templates))
        .routes(routes!(get_template, delete_template))
        .routes(routes!(share_template))
        .routes(routes!(unshare_template))
        .routes(routes!(prune_templates))
        .routes(routes!(build_template))
        .routes(routes!(build_from_context))
        .routes(routes!(build_from_archive))
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum SourceView {
    Debian { suite: String, packages: Vec<String> },
    Image { reference: String, digest: String },
    Dockerfile { digest: String, base: String },
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Template)]
pub(crate) struct TemplateView {
    id: String,
    /// What it may be called by whoever asks.
    names: Vec<String>,
    /// The project that it belongs to, if that is the one that asks; null: it is only shared with it.
    project: Option<String>,
    /// Whether every project may use it.
    shared: bool,
    /// Of its image. Where that is a layer on others, it stands for them too.
    digest: String,
    /// Of its image, with all that it lies on.
    size_bytes: u64,
    /// What it has for itself; null: all of it.
    layer_bytes: Option<u64>,
    #[schema(format = DateTime)]
    created_at: String,
    source: SourceView,
    env: BTreeMap<String, String>,
    workdir: String,
    user: String,
    start: Option<StartRequest>,
    /// What its image was made to run, started only by those built with `start`.
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    exposed_ports: Vec<u16>,
    /// What sandboxes made from it may reach, unless they say so themselves; null: what the operator says.
    network: Option<PolicyWords>,
    /// What sandboxes made from it get, unless they say so themselves; null: the server's defaults.
    resources: Option<ResourcesView>,
}

impl TemplateView {
    fn of(caller: &Caller, template: Template) -> Self {
        let Template {
            names,
            manifest,
            shared,
            own,
        } = template;
        let command = manifest.command.unwrap_or_default();
        Self {
            id: manifest.id.to_string(),
            names,
            project: own.then(|| caller.project().to_string()),
            shared,
            digest: manifest.digest,
            size_bytes: manifest.size_bytes,
            layer_bytes: manifest.layer_bytes,
            created_at: wire::time(manifest.created_at),
            source: match manifest.source {
                TemplateSource::Debian { suite, packages } => SourceView::Debian { suite, packages },
                TemplateSource::Image { reference, digest } => SourceView::Image { reference, digest },
                TemplateSource::Dockerfile { digest, base } => SourceView::Dockerfile { digest, base },
            },
            env: manifest.env,
            workdir: manifest.workdir,
            user: manifest.user,
            start: manifest.start.map(StartRequest::of),
            entrypoint: command.entrypoint,
            cmd: command.cmd,
            exposed_ports: manifest.exposed_ports,
            network: manifest.network.map(PolicyWords::of),
            resources: manifest.resources.map(ResourcesView::of),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplatePage {
    items: Vec<TemplateView>,
    /// Pass it as `cursor` to get what follows; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TemplatesQuery {
    /// `next` of the page before.
    cursor: Option<String>,
    /// A page of templates with long descriptions has fewer.
    #[param(minimum = 1, maximum = 100, default = 50)]
    limit: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PruneResult {
    freed_bytes: u64,
}

// ---- handlers

/// Lists templates, newest first: those of the caller's project, and those that every project may use.
#[utoipa::path(
    get, path = "/v1/templates", tag = "templates",
    security(("key" = ["templates.read"])), params(TemplatesQuery),
    responses((status = 200, description = "A page of them.", body = TemplatePage))
)]
pub(crate) async fn list_templates(
    State(app): State<App>,
    As(caller): As,
    Paying(visit): Paying,
    Args(query): Args<TemplatesQuery>,
) -> Answer<axum::Json<TemplatePage>> {
    let (after, limit) = wire::page(query.cursor, query.limit)?;
    let (page, bytes) = app.sandboxes.template_page(&caller, after, limit).await?;
    // As text, and as what is read of it.
    let mut permit = visit.permit()?;
    permit.grow(bytes.saturating_mul(2))?;
    let asking = caller.clone();
    let items = app
        .sandboxes
        .gather_templates(&caller, Some(page.items), move |template| {
            Ok(Some(TemplateView::of(&asking, template)))
        })
        .await?;
    visit.keep(permit);
    Ok(axum::Json(TemplatePage {
        items,
        next: page.next.map(|next| next.to_string()),
    }))
}

/// Shows a template, by name or id. A name of one's own project stands before one that is shared.
#[utoipa::path(
    get, path = "/v1/templates/{template}", tag = "templates",
    security(("key" = ["templates.read"])),
    responses((status = 200, description = "The template.", body = TemplateView))
)]
pub(crate) async fn get_template(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<axum::Json<TemplateView>> {
    let template = app.sandboxes.template(&caller, &which).await?;
    Ok(axum::Json(TemplateView::of(&caller, template)))
}

/// Deletes a template, by name or id: one of the caller's project, or, where it has none, a shared one, which takes
/// `templates.share`.
#[utoipa::path(
    delete, path = "/v1/templates/{template}", tag = "templates",
    security(("key" = ["templates.manage"])),
    responses((status = 204, description = "It is gone."))
)]
pub(crate) async fn delete_template(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_template(&caller, &which).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShareRequest {
    /// Whose template it is; the caller's own project unless said.
    #[schema(min_length = 1)]
    project: Option<String>,
}

/// Lets every project use a template: by name under that name, whatever that stood for before; by id under all its names. It
/// stays its project's as well, so that a later build under its name is not shared until that is shared too.
#[utoipa::path(
    post, path = "/v1/templates/{template}/share", tag = "templates",
    security(("key" = ["templates.share"])), request_body = Option<ShareRequest>,
    responses((status = 200, description = "It is shared.", body = TemplateView))
)]
pub(crate) async fn share_template(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
    MaybeJson(body): MaybeJson<ShareRequest>,
) -> Answer<axum::Json<TemplateView>> {
    let project = app.identity.project_named(&caller, body.project.as_deref());
    let shared = app
        .sandboxes
        .share_template(&caller, &project.await?, &which)
        .await?;
    Ok(axum::Json(TemplateView::of(&caller, shared)))
}

/// Takes a shared template back, with all its shared names: it is that of the caller's project then. What other projects have made
/// of it goes on; what they named themselves they keep.
#[utoipa::path(
    post, path = "/v1/templates/{template}/unshare", tag = "templates",
    security(("key" = ["templates.share"])),
    responses((status = 200, description = "It is not shared any more.", body = TemplateView))
)]
pub(crate) async fn unshare_template(
    State(app): State<App>,
    As(caller): As,
    At(which): At<String>,
) -> Answer<axum::Json<TemplateView>> {
    let template = app.sandboxes.unshare_template(&caller, &which).await?;
    Ok(axum::Json(TemplateView::of(&caller, template)))
}

/// Removes templates of the caller's project that no name and no sandbox uses, and what its builds have cached; for who has
/// `templates.share`, those that are shared too.
#[utoipa::path(
    post, path = "/v1/templates/prune", tag = "templates",
    security(("key" = ["templates.manage"])),
    responses((status = 200, description = "What that freed.", body = PruneResult))
)]
pub(crate) async fn prune_templates(
    State(app): State<App>,
    As(caller): As,
) -> Answer<axum::Json<PruneResult>> {
    let freed_bytes = app.sandboxes.prune_templates(&caller).await?;
    Ok(axum::Json(PruneResult { freed_bytes }))
}

/// Builds a template from an image, or from Debian packages, which takes `templates.share`. It belongs to the caller's project.
///
/// The answer is a stream of events: `progress` with `{"stage","done","total"}` (total 0: unknown), `log` with
/// `{"text"}`, and last `done` with the template or `error`. Hanging up cancels the build.
#[utoipa::path(
    post, path = "/v1/templates/build", tag = "templates",
    security(("key" = ["templates.manage"])), request_body = BuildRequest,
    params(("X-Registry-Auth" = Option<String>, Header,
        description = "Who to be for the registry: `Basic`, then `user:password` in base64."),
        ("X-Registry" = Option<String>, Header,
        description = "Which registry that is for, as references name it; of an image, its own unless said.")),
    responses((status = 200, description = "How it goes.", body = String, content_type = "text/event-stream"))
)]
pub(crate) async fn build_template(
    State(app): State<App>,
    As(caller): As,
    headers: HeaderMap,
    Json(body): Json<BuildRequest>,
) -> Answer<Response> {
    let build = body.into_build(read_login(&headers)?, app.sandboxes.usual_resources())?;
    let progress = app.sandboxes.build_template(&caller, build).await?;
    Ok(follow(caller, progress, None))
}

/// Builds a template from a Dockerfile; the body is a tar archive of its context. Answers as `build` does.
#[utoipa::path(
    post, path = "/v1/templates/build-context", tag = "templates",
    security(("key" = ["templates.manage"])),
    params(ContextQuery, ("X-Registry-Auth" = Option<String>, Header,
        description = "Who to be for the registry: `Basic`, then `user:password` in base64."),
        ("X-Registry" = Option<String>, Header,
        description = "Which registry that is for, as references name it; of an image, its own unless said.")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "A tar archive."),
    responses((status = 200, description = "How it goes.", body = String, content_type = "text/event-stream"))
)]
pub(crate) async fn build_from_context(
    State(app): State<App>,
    As(caller): As,
    Args(pairs): Args<Vec<(String, String)>>,
    headers: HeaderMap,
    Arriving(body): Arriving,
) -> Answer<Response> {
    let build = read_context_query(pairs, app.sandboxes.usual_resources())?;
    let login = read_login(&headers)?;
    if login.as_ref().is_some_and(|login| login.registry.is_none()) {
        return Err(Failure::new(
            Code::MissingRegistry,
            "`X-Registry` does not say which registry the login is for",
        )
        .hint(
            "the Dockerfile names registries itself; without this any of them would be told the password",
        ));
    }
    let upload = upload::context(&app, &caller, body).await?;
    let (upload, dockerfile) = upload.read_text(build.dockerfile).await?;
    let request = BuildTemplate {
        name: build.name,
        shared: build.shared,
        from: BuildFrom::Dockerfile {
            context: upload.path().to_owned(),
            dockerfile,
            args: build.args,
            target: build.target,
            login,
            no_cache: build.no_cache,
            network: build.build_network,
        },
        start: build.start,
        network: build.network,
        resources: build.resources,
    };
    let progress = app.sandboxes.build_template(&caller, request).await?;
    Ok(follow(caller, progress, Some(upload)))
}

/// Builds a template from an image archive (`docker save` or a tar of an OCI layout), which is the body. Answers as
/// `build` does.
#[utoipa::path(
    post, path = "/v1/templates/build-archive", tag = "templates",
    security(("key" = ["templates.manage"])), params(ArchiveQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "A tar archive."),
    responses((status = 200, description = "How it goes.", body = String, content_type = "text/event-stream"))
)]
pub(crate) async fn build_from_archive(
    State(app): State<App>,
    As(caller): As,
    Args(query): Args<ArchiveQuery>,
    Arriving(body): Arriving,
) -> Answer<Response> {
    let name = wire::name("name", query.name)?;
    let start = read_start(query.start.as_deref())?;
    let network = read_network("network", query.network)?;
    let resources = read_resources(query.resources, app.sandboxes.usual_resources())?;
    let upload = upload::archive(&app, &caller, body).await?;
    let request = BuildTemplate {
        name,
        shared: query.shared.unwrap_or(false),
        from: BuildFrom::Archive { file: upload.file() },
        start,
        network,
        resources,
    };
    let progress = app.sandboxes.build_template(&caller, request).await?;
    Ok(follow(caller, progress, Some(upload)))
}

/// Passes progress on. What was uploaded lives as long as the build.
fn follow(caller: Caller, progress: BuildStream, upload: Option<Upload>) -> Response {
    sse(progress.map(move |step| {
        let _lives = &upload;
        match step {
            Ok(BuildEvent::Progress { stage, done, total }) => event(
                "progress",
                &serde_json::json!({ "stage": stage, "done": done, "total": total }),
            ),
            Ok(BuildEvent::Log(text)) => event("log", &serde_json::json!({ "text": text })),
            Ok(BuildEvent::Done(template)) => event("done", &TemplateView::of(&caller, *template)),
            Err(fault) => event("error", &ErrorDetail::new(&fault, None)),
        }
    }))
}

//! `/v1/projects`: whose everything is.

use atoll_identity::Project;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::Answer;
use crate::extract::{As, Json};
use crate::{App, wire};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list_projects, create_project))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateProjectRequest {
    #[schema(min_length = 1, max_length = 63, pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    name: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Project)]
pub(crate) struct ProjectView {
    id: String,
    name: String,
    #[schema(format = DateTime)]
    created_at: String,
}

impl ProjectView {
    fn of(project: Project) -> Self {
        Self {
            id: project.id.to_string(),
            name: project.name,
            created_at: wire::time(project.created_at),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProjectList {
    items: Vec<ProjectView>,
}

/// Lists projects: all of them with an operator's key that is not restricted, otherwise the caller's own.
#[utoipa::path(
    get, path = "/v1/projects", tag = "projects",
    security(("key" = ["projects.read"])),
    responses((status = 200, description = "The projects, by name.", body = ProjectList))
)]
pub(crate) async fn list_projects(State(app): State<App>, As(caller): As) -> Answer<axum::Json<ProjectList>> {
    let projects = app.identity.projects(&caller).await?;
    Ok(axum::Json(ProjectList {
        items: projects.into_iter().map(ProjectView::of).collect(),
    }))
}

/// Makes a project, with a key of `default`. `POST /v1/keys` with its name makes its first key.
#[utoipa::path(
    post, path = "/v1/projects", tag = "projects",
    security(("key" = ["projects.manage"])), request_body = CreateProjectRequest,
    responses((status = 201, description = "The project.", body = ProjectView))
)]
pub(crate) async fn create_project(
    State(app): State<App>,
    As(caller): As,
    Json(body): Json<CreateProjectRequest>,
) -> Answer<(StatusCode, axum::Json<ProjectView>)> {
    let project = app.identity.create_project(&caller, &body.name).await?;
    Ok((StatusCode::CREATED, axum::Json(ProjectView::of(project))))
}

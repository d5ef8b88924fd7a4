//! Volumes: made and listed here, mounted by sandboxes; their files are in [`super::volume_content`].

use atoll_front::extract::At;
use atoll_identity::Opens;
use atoll_sandboxes::{CreateVolume, Volume};
use atoll_types::{Code, GIB};
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::App;
use crate::auth::Auth;
use crate::control::domain::Domain;
use crate::control::read::Read;
use crate::error::{Answer, Refusal};

/// E2B's volumes have no size; ours are files with holes, so this costs nothing until it is used.
const BYTES: u64 = 10 * GIB;
const PAGE: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewVolume {
    name: String,
}

fn info(volume: &Volume) -> Value {
    json!({"volumeID": volume.id, "name": volume.name})
}

/// With the token for its files.
fn with_token(app: &App, domain: &Domain, volume: &Volume) -> Value {
    let mut view = info(volume);
    view["token"] = app.identity.token(&Opens::Volume { volume: &volume.id }).into();
    view["domain"] = json!(domain.0);
    view
}

pub(crate) async fn create(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    Read(request): Read<NewVolume>,
) -> Answer<Response> {
    let request = CreateVolume {
        name: request.name,
        bytes: BYTES,
    };
    let created = app.sandboxes.create_volume(&caller, request).await;
    let volume = created.map_err(|fault| match fault.code {
        // As there, where it is no conflict.
        Code::NameTaken => Refusal::invalid(fault.to_string()),
        _ => fault.into(),
    })?;
    Ok((StatusCode::CREATED, Json(with_token(&app, &domain, &volume))).into_response())
}

pub(crate) async fn list(State(app): State<App>, Auth(caller): Auth) -> Answer<Json<Vec<Value>>> {
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let page = app.sandboxes.volumes(&caller, cursor, PAGE).await?;
        found.extend(page.items.iter().map(info));
        cursor = page.next;
        if cursor.is_none() {
            return Ok(Json(found));
        }
    }
}

pub(crate) async fn get(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    At(id): At<String>,
) -> Answer<Json<Value>> {
    let volume = app.sandboxes.volume(&caller, &id).await?;
    Ok(Json(with_token(&app, &domain, &volume)))
}

pub(crate) async fn delete(
    State(app): State<App>,
    Auth(caller): Auth,
    At(id): At<String>,
) -> Answer<StatusCode> {
    app.sandboxes.delete_volume(&caller, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

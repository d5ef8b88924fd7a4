//! Templates: listed, looked up, deleted.

use atoll_front::extract::At;
use atoll_identity::{Action, Caller};
use atoll_sandboxes::Template;
use atoll_types::{FaultKind, MIB};
use axum::extract::{Json, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::names::Name;
use super::read::{Query, Read};
use super::{snapshots, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};
use crate::options::ENVD_VERSION;

fn info(template: &Template) -> Value {
    let resources = template.manifest.resources.unwrap_or_default();
    let names: Vec<String> = template
        .names
        .iter()
        .map(|name| Name::of_stored(name).name)
        .collect();
    let created = view::time(template.manifest.created_at);
    json!({
        "templateID": template.manifest.id,
        "buildID": build_id(&template.manifest.digest),
        "cpuCount": resources.cpu_millis.div_ceil(1000),
        "memoryMB": resources.memory_bytes / MIB,
        "diskSizeMB": resources.disk_bytes / MIB,
        "public": template.shared,
        "aliases": names,
        "names": names,
        "createdAt": created,
        "updatedAt": created,
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "buildCount": 1,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    })
}

/// Clients want a UUID; the content's digest is as good a source of one as any.
pub(crate) fn build_id(digest: &str) -> String {
    let digits: String = digest.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    let digits = format!("{digits:0<32}");
    format!(
        "{}-{}-4{}-8{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[13..16],
        &digits[17..20],
        &digits[20..32]
    )
}

pub(crate) async fn list(
    State(app): State<App>,
    Auth(caller): Auth,
    query: Query,
) -> Answer<Json<Vec<Value>>> {
    query.only(&["teamID", "limit", "nextToken"])?;
    let templates = app.sandboxes.templates(&caller).await?;
    Ok(Json(templates.iter().map(info).collect()))
}

/// One that the caller may use.
pub(crate) async fn find(app: &App, caller: &Caller, given: &str) -> Answer<Template> {
    let name = Name::parse(given)?;
    let found = app.sandboxes.template(caller, &name.stored()).await;
    found.map_err(|fault| match fault.kind() {
        FaultKind::NotFound => Refusal::not_found(format!("Template \"{given}\" not found")),
        _ => fault.into(),
    })
}

pub(crate) async fn get(
    State(app): State<App>,
    Auth(caller): Auth,
    At(id): At<String>,
) -> Answer<Json<Value>> {
    let template = find(&app, &caller, &id).await?;
    Ok(Json(info(&template)))
}

pub(crate) async fn exists(
    State(app): State<App>,
    Auth(caller): Auth,
    At(alias): At<String>,
) -> Answer<Json<Value>> {
    let template = find(&app, &caller, &alias).await?;
    Ok(Json(
        json!({"templateID": template.manifest.id, "public": template.shared}),
    ))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Publish {
    public: Option<bool>,
}

/// Public is what all projects of this server share, and nobody else. Only its operators change that.
pub(crate) async fn publish(
    State(app): State<App>,
    Auth(caller): Auth,
    At(id): At<String>,
    Read(request): Read<Publish>,
) -> Answer<Json<Value>> {
    let mut template = find(&app, &caller, &id).await?;
    let which = Name::parse(&id)?.stored();
    match request.public {
        Some(true) if !template.shared => {
            let project = caller.project();
            template = app.sandboxes.share_template(&caller, project, &which).await?;
        }
        Some(false) if template.shared => {
            let which = template.manifest.id.as_str();
            template = app.sandboxes.unshare_template(&caller, which).await?;
        }
        _ => {}
    }
    Ok(Json(json!({ "names": template.names })))
}

/// Deletes a template or a snapshot.
pub(crate) async fn delete(
    State(app): State<App>,
    Auth(caller): Auth,
    At(id): At<String>,
) -> Answer<StatusCode> {
    let of_storage = caller.may(Action::ManageStorage, None);
    if of_storage.is_ok() && snapshots::delete(&app, &caller, &id).await? {
        return Ok(StatusCode::NO_CONTENT);
    }
    caller.may(Action::ManageTemplates, None)?;
    let template = find(&app, &caller, &id).await?;
    let id = template.manifest.id.as_str();
    app.sandboxes.delete_template(&caller, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_have_uuids() {
        let id = build_id("sha256:0123456789abcdef0123456789abcdef0123");
        assert_eq!(id.len(), 36);
        assert_eq!(id.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
    }
}

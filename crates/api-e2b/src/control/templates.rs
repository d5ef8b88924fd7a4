//! Templates: listed, looked up, deleted.

use atoll_front::extract::At;
use atoll_identity::{Action, Caller};
use atoll_sandboxes::Template;
use atoll_types::{FaultKind, MIB, TemplateManifest};
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

fn info(app: &App, caller: &Caller, template: &Template) -> Value {
    let resources = template.manifest.resources.unwrap_or_default();
    let names: Vec<String> = template
        .names
        .iter()
        .map(|name| Name::of_stored(name).name)
        .collect();
    let created = view::time(template.manifest.created_at);
    json!({
        "templateID": template.manifest.id,
        "buildID": build_of(app, caller, names.first().map_or("", String::as_str), &template.manifest),
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

/// Whether a text has the form of a build's id.
pub(crate) fn is_build_id(text: &str) -> bool {
    let mut lengths = text.split('-').map(str::len);
    [8, 4, 4, 4, 12]
        .into_iter()
        .all(|length| lengths.next() == Some(length))
        && lengths.next().is_none()
        && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// The build of a name that a template came of, as it was called when it was asked for. Those that the server does not remember,
/// because it was started since or others made them, are called after their content.
pub(crate) fn build_of(app: &App, caller: &Caller, name: &str, template: &TemplateManifest) -> String {
    let is_name = |stored: &str| Name::of_stored(stored).name == name;
    let known = app.builds.that_made(caller, &template.id, is_name);
    known.unwrap_or_else(|| build_id(&template.digest))
}

/// What our store calls what a client names: `name`, `name:tag`, or `name:build`, which has to be there.
pub(crate) async fn stored(app: &App, caller: &Caller, given: &str) -> Answer<String> {
    let name = Name::parse(given)?;
    let Some(build) = name.tag.as_deref().filter(|tag| is_build_id(tag)) else {
        return Ok(name.stored());
    };
    let job = app.builds.find(caller, build);
    let job = job.filter(|job| Name::of_stored(&job.request().name).name == name.name);
    if let Some(made) = job.and_then(|job| job.made()) {
        return Ok(made.to_string());
    }
    let is_it = |template: &Template| {
        build_id(&template.manifest.digest) == build
            && template
                .names
                .iter()
                .any(|known| Name::of_stored(known).name == name.name)
    };
    let found = app.sandboxes.templates(caller).await?.into_iter().find(is_it);
    let missing = || Refusal::not_found(format!("Template \"{given}\" not found"));
    Ok(found.ok_or_else(missing)?.manifest.id.to_string())
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
    let query = query.only(&["teamID", "limit", "nextToken"])?;
    if query
        .text("teamID")
        .is_some_and(|team| team != caller.project().as_str())
    {
        return Err(Refusal::invalid("`teamID` is not the team of this API key"));
    }
    let templates = app.sandboxes.templates(&caller).await?;
    Ok(Json(
        templates
            .iter()
            .map(|template| info(&app, &caller, template))
            .collect(),
    ))
}

/// One that the caller may use.
pub(crate) async fn find(app: &App, caller: &Caller, given: &str) -> Answer<Template> {
    let stored = stored(app, caller, given).await?;
    let found = app.sandboxes.template(caller, &stored).await;
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
    Ok(Json(info(&app, &caller, &template)))
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
    let which = stored(&app, &caller, &id).await?;
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
        assert!(is_build_id(&id));
        for tag in [
            "",
            "default",
            "v1.2",
            "also-non-existing",
            &id[1..],
            &format!("{id}-"),
            &id.replace('0', "x"),
        ] {
            assert!(!is_build_id(tag), "{tag}");
        }
    }
}

//! Templates: listed, looked up, deleted.

use std::sync::Arc;

use atoll_front::Visit;
use atoll_front::extract::{At, Paying};
use atoll_identity::{Action, Caller};
use atoll_sandboxes::Template;
use atoll_types::{FaultKind, MIB, TemplateId, TemplateManifest};
use axum::extract::{Json, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::list::NEXT_TOKEN;
use super::names::Name;
use super::read::{Query, Read};
use super::{snapshots, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};
use crate::options::ENVD_VERSION;

fn info(app: &App, caller: &Caller, template: &Template) -> Value {
    let usual = || app.sandboxes.usual_resources();
    let resources = template.manifest.resources.unwrap_or_else(usual);
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
    let (build, named) = (build.to_owned(), name.name.clone());
    let is_it = move |template: Template| {
        let is_it = build_id(&template.manifest.digest) == build
            && template
                .names
                .iter()
                .any(|known| Name::of_stored(known).name == named);
        Ok(is_it.then_some(template.manifest.id))
    };
    let found = app.sandboxes.gather_templates(caller, None, is_it).await?;
    let missing = || Refusal::not_found(format!("Template \"{given}\" not found"));
    Ok(found.first().ok_or_else(missing)?.to_string())
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

/// The first version: all of them, unless a page is asked for.
pub(crate) async fn list_all(
    State(app): State<App>,
    Auth(caller): Auth,
    Paying(visit): Paying,
    query: Query,
) -> Answer<Response> {
    let query = query.only(&["teamID", "limit", "nextToken"])?;
    if query.text("limit").is_some() || query.text("nextToken").is_some() {
        return page(&app, &caller, &visit, &query).await;
    }
    check_team(&query, &caller)?;
    written(&app, &caller, &visit, None).await
}

pub(crate) async fn list(
    State(app): State<App>,
    Auth(caller): Auth,
    Paying(visit): Paying,
    query: Query,
) -> Answer<Response> {
    let query = query.only(&["teamID", "limit", "nextToken"])?;
    page(&app, &caller, &visit, &query).await
}

fn check_team(query: &Query, caller: &Caller) -> Answer<()> {
    match query.text("teamID") {
        Some(team) if team != caller.project().as_str() => {
            Err(Refusal::invalid("`teamID` is not the team of this API key"))
        }
        _ => Ok(()),
    }
}

async fn page(app: &App, caller: &Caller, visit: &Visit, query: &Query) -> Answer<Response> {
    check_team(query, caller)?;
    let after = query.text("nextToken").map(str::parse).transpose();
    let after = after.map_err(|_| Refusal::invalid("`nextToken` is not valid any more; list anew"))?;
    let (page, _) = app.sandboxes.template_page(caller, after, query.limit()?).await?;
    let mut response = written(app, caller, visit, Some(page.items)).await?;
    let next = page
        .next
        .and_then(|next| HeaderValue::from_str(&next.to_string()).ok());
    if let Some(next) = next {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    Ok(response)
}

/// These, or all, newest first. One by one, and as text: as a tree of JSON they would take many times what they are.
async fn written(
    app: &App,
    caller: &Caller,
    visit: &Visit,
    ids: Option<Vec<TemplateId>>,
) -> Answer<Response> {
    let permit = Arc::new(Mutex::new(visit.permit()?));
    let (of, asking, paid) = (app.clone(), caller.clone(), Arc::clone(&permit));
    let one = move |template: Template| {
        let text = info(&of, &asking, &template).to_string();
        // Alone, and with all others.
        paid.lock().grow(2 * text.len() as u64)?;
        Ok(Some(text))
    };
    let all = app.sandboxes.gather_templates(caller, ids, one).await?;
    let text = format!("[{}]", all.join(","));
    if let Some(permit) = Arc::into_inner(permit) {
        visit.keep(permit.into_inner());
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
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

//! Tags of templates: other names for what one name stands for.

use std::sync::Arc;

use atoll_front::extract::{At, Paying};
use atoll_sandboxes::Template;
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::names::{DEFAULT_TAG, Name};
use super::read::Read;
use super::{snapshots, templates, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

/// What a tag takes while it is told, about.
const TAG_BYTES: u64 = 512;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Assign {
    target: String,
    tags: Vec<String>,
}

/// A tag alone, or with the name that it belongs to.
fn tagged(name: &Name, tag: &str) -> Answer<Name> {
    let text = match tag.contains(':') {
        true => tag.to_owned(),
        false => format!("{}:{tag}", name.name),
    };
    let tagged = Name::parse(&text)?;
    match tagged.name == name.name {
        true => Ok(tagged),
        false => Err(Refusal::invalid(format!("`{tag}` is a tag of another template"))),
    }
}

pub(crate) async fn assign(
    State(app): State<App>,
    Auth(caller): Auth,
    Read(request): Read<Assign>,
) -> Answer<Response> {
    let target = Name::parse(&request.target)?;
    let template = templates::find(&app, &caller, &request.target).await?;
    let names: Vec<Name> = request
        .tags
        .iter()
        .map(|tag| tagged(&target, tag))
        .collect::<Answer<_>>()?;
    for name in &names {
        app.sandboxes
            .name_template(&caller, template.manifest.id.as_str(), &name.stored())
            .await?;
    }
    let tags: Vec<&str> = names
        .iter()
        .map(|name| name.tag.as_deref().unwrap_or(DEFAULT_TAG))
        .collect();
    let build = templates::build_of(&app, &caller, &target.name, &template.manifest);
    Ok((StatusCode::CREATED, Json(json!({"tags": tags, "buildID": build}))).into_response())
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Remove {
    name: String,
    tags: Vec<String>,
}

pub(crate) async fn remove(
    State(app): State<App>,
    Auth(caller): Auth,
    Read(request): Read<Remove>,
) -> Answer<StatusCode> {
    let target = Name::parse(&request.name)?;
    let names: Vec<Name> = request
        .tags
        .iter()
        .map(|tag| tagged(&target, tag))
        .collect::<Answer<_>>()?;
    if names.iter().any(|name| name.tag.is_none()) {
        return Err(Refusal::invalid(format!(
            "the tag `{DEFAULT_TAG}` cannot be deleted"
        )));
    }
    for name in names {
        // It must be there, and it is the name that goes.
        templates::find(
            &app,
            &caller,
            &format!("{}:{}", name.name, name.tag.as_deref().unwrap_or(DEFAULT_TAG)),
        )
        .await?;
        app.sandboxes.delete_template(&caller, &name.stored()).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn list(
    State(app): State<App>,
    Auth(caller): Auth,
    At(id): At<String>,
    Paying(visit): Paying,
) -> Answer<Json<Vec<Value>>> {
    let wanted = Name::parse(&id)?.name;
    let permit = Arc::new(Mutex::new(visit.permit()?));
    let (of, asking, called, paid) = (app.clone(), caller.clone(), wanted.clone(), Arc::clone(&permit));
    let tags = move |template: Template| {
        let names = template.names.iter().map(|name| Name::of_stored(name));
        let names = names.filter(|name| name.name == called || template.manifest.id.as_str() == called);
        let tags: Vec<Value> = names
            .map(|name| {
                json!({
                    "tag": name.tag.as_deref().unwrap_or(DEFAULT_TAG),
                    "buildID": templates::build_of(&of, &asking, &name.name, &template.manifest),
                    "createdAt": view::time(template.manifest.created_at),
                })
            })
            .collect();
        paid.lock().grow(tags.len() as u64 * TAG_BYTES)?;
        Ok(Some(tags))
    };
    let found = app.sandboxes.gather_templates(&caller, None, tags).await?;
    let mut found: Vec<Value> = found.into_iter().flatten().collect();
    if let Some(permit) = Arc::into_inner(permit) {
        visit.keep(permit.into_inner());
    }
    if found.is_empty() {
        let snapshots = snapshots::named(&app, &caller, &wanted).await?;
        found.extend(snapshots.iter().map(snapshots::tag));
    }
    match found.is_empty() {
        true => Err(Refusal::not_found(format!("Template \"{id}\" not found"))),
        false => Ok(Json(found)),
    }
}

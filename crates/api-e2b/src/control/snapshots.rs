//! Snapshots and forks. A snapshot stands where a template may stand, and is deleted like one.

use atoll_identity::Caller;
use atoll_sandboxes::{ForkSandbox, MAX_COPIES, Snapshot, TakeSnapshot};
use atoll_types::{Code, FaultKind, SaveKind, SnapshotId};
use axum::extract::{Json, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::create::millis;
use super::domain::Domain;
use super::list::NEXT_TOKEN;
use super::names::Name;
use super::read::{Id, Query, Read};
use super::{life, view};
use crate::App;
use crate::auth::Auth;
use crate::edge::parse_id;
use crate::error::{Answer, Refusal};

/// What a request to create names, as our store knows it: a template, or a snapshot by id or name.
pub(crate) async fn origin(app: &App, caller: &Caller, given: &str) -> Answer<String> {
    let which = without_tag(given);
    if which.parse::<SnapshotId>().is_ok() {
        return Ok(which.to_owned());
    }
    let name = Name::parse(given);
    if let Ok(name) = &name
        && app.sandboxes.template(caller, &name.stored()).await.is_ok()
    {
        return Ok(name.stored());
    }
    if app.sandboxes.snapshot(caller, which).await.is_ok() {
        return Ok(which.to_owned());
    }
    let name = name?;
    Err(Refusal::not_found(format!(
        "Template \"{}\" not found",
        name.stored()
    )))
}

/// Snapshots have no tags; the default one may be named.
fn without_tag(given: &str) -> &str {
    let bare = given.rsplit_once('/').map_or(given, |(_, bare)| bare);
    bare.strip_suffix(":default").unwrap_or(bare)
}

/// Deletes a snapshot, if the name or id is one's.
pub(crate) async fn delete(app: &App, caller: &Caller, given: &str) -> Answer<bool> {
    match app.sandboxes.delete_snapshot(caller, without_tag(given)).await {
        Ok(()) => Ok(true),
        Err(fault) if matches!(fault.kind(), FaultKind::NotFound | FaultKind::Gone) => Ok(false),
        Err(fault) => Err(fault.into()),
    }
}

fn info(snapshot: &Snapshot) -> Value {
    let (id, names) = match &snapshot.name {
        Some(name) => (format!("{name}:default"), vec![format!("{name}:default")]),
        None => (format!("{}:default", snapshot.id), Vec::new()),
    };
    json!({"snapshotID": id, "names": names})
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSnapshot {
    name: Option<String>,
    memory: Option<bool>,
}

pub(crate) async fn create(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<NewSnapshot>,
) -> Answer<Response> {
    life::known(&app, &caller, &id).await?;
    let taken = TakeSnapshot {
        name: request.name.map(|name| without_tag(&name).to_owned()),
        kind: (request.memory == Some(false)).then_some(SaveKind::Filesystem),
        idempotency_key: None,
    };
    // A name that is taken moves to the new one, as a tag does.
    if let Some(name) = &taken.name {
        delete(&app, &caller, name).await?;
    }
    let snapshot = app.sandboxes.take_snapshot(&caller, &id, taken).await?;
    Ok((StatusCode::CREATED, Json(info(&snapshot))).into_response())
}

pub(crate) async fn list(State(app): State<App>, Auth(caller): Auth, query: Query) -> Answer<Response> {
    let query = query.only(&["sandboxID", "name", "limit", "nextToken"])?;
    let limit = query.limit()?;
    let of = query.text("sandboxID").map(parse_id);
    let name = query.text("name").map(without_tag);
    let mut cursor = query.text("nextToken").map(str::to_owned);
    let mut found = Vec::new();
    // Pages of the store until one of ours is full: filters may leave little of each.
    loop {
        let page = app
            .sandboxes
            .snapshots(&caller, cursor, limit - found.len())
            .await?;
        found.extend(
            page.items
                .iter()
                .filter(|snapshot| {
                    of.as_ref()
                        .is_none_or(|of| of.is_some() && snapshot.sandbox == *of)
                        && name.is_none_or(|name| snapshot.name.as_deref() == Some(name))
                })
                .map(info),
        );
        cursor = page.next;
        if cursor.is_none() || found.len() >= limit {
            break;
        }
    }
    let mut response = Json(found).into_response();
    if let Some(next) = cursor.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    Ok(response)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fork {
    timeout: Option<i64>,
    count: Option<usize>,
}

/// Lifetime of the copies of those who name none, in seconds.
const FORK_TIMEOUT: i64 = 15;

pub(crate) async fn fork(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    Id(id): Id,
    Read(request): Read<Fork>,
) -> Answer<Response> {
    let sandbox = life::known(&app, &caller, &id).await?;
    if view::state(sandbox.state) == Some("paused") {
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("Sandbox {} is paused", id.bare()),
        ));
    }
    let count = request.count.unwrap_or(1);
    if !(1..=MAX_COPIES).contains(&count) {
        return Err(Refusal::invalid(format!(
            "`count` must be from 1 to {MAX_COPIES}"
        )));
    }
    let timeout_millis = Some(millis("timeout", request.timeout.unwrap_or(FORK_TIMEOUT))?);
    let with = |kind| ForkSandbox {
        count,
        kind,
        timeout_millis,
        labels: std::collections::BTreeMap::new(),
    };
    let copies = match app.sandboxes.fork(&caller, &id, with(None)).await {
        // As with pauses: what the tier can keep.
        Err(fault) if fault.code == Code::MemoryNotSupported => {
            app.sandboxes
                .fork(&caller, &id, with(Some(SaveKind::Filesystem)))
                .await?
        }
        outcome => outcome?,
    };
    let views: Vec<Value> = copies
        .iter()
        .map(|copy| json!({"sandbox": view::created(&app, &domain, copy)}))
        .collect();
    Ok((StatusCode::CREATED, Json(views)).into_response())
}

//! Snapshots and forks. A snapshot stands where a template may stand, and is deleted like one.

use atoll_identity::Caller;
use atoll_sandboxes::{ForkSandbox, MAX_COPIES, Snapshot, TakeSnapshot};
use atoll_types::{Code, FaultKind, SandboxId, SaveKind, SnapshotId};
use axum::extract::{Json, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::create::millis;
use super::domain::Domain;
use super::list::NEXT_TOKEN;
use super::names::{DEFAULT_TAG, Name};
use super::read::{Id, Query, Read};
use super::{life, templates, view};
use crate::App;
use crate::auth::Auth;
use crate::edge::parse_id;
use crate::error::{Answer, Refusal};

/// What a request to create names, as our store knows it: a template, or a snapshot by id or name.
pub(crate) async fn origin(app: &App, caller: &Caller, given: &str) -> Answer<String> {
    let which = Wanted::of(given).stored();
    if which.parse::<SnapshotId>().is_ok() {
        return Ok(which);
    }
    let template = templates::stored(app, caller, given).await;
    if let Ok(stored) = &template
        && app.sandboxes.template(caller, stored).await.is_ok()
    {
        return Ok(stored.clone());
    }
    if let Ok(snapshot) = app.sandboxes.snapshot(caller, &which).await {
        // By its id, so that the sandbox says what it was made of.
        return Ok(snapshot.id.to_string());
    }
    let stored = template?;
    Err(Refusal::not_found(format!("Template \"{stored}\" not found")))
}

/// What a client calls a snapshot: an id or a name, with a tag or without. A tag is part of the name in our store, as those of
/// templates are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wanted<'a> {
    name: &'a str,
    tag: Option<&'a str>,
}

impl<'a> Wanted<'a> {
    fn of(given: &'a str) -> Self {
        let bare = given.rsplit_once('/').map_or(given, |(_, bare)| bare);
        match bare.split_once(':') {
            Some((name, tag)) => Self { name, tag: Some(tag) },
            None => Self {
                name: bare,
                tag: None,
            },
        }
    }

    fn stored(&self) -> String {
        match self.tag.filter(|tag| *tag != DEFAULT_TAG) {
            Some(tag) => format!("{}.{tag}", self.name),
            None => self.name.to_owned(),
        }
    }

    fn is(&self, snapshot: &Snapshot) -> bool {
        let known = name_of(snapshot);
        let tag = known.tag.as_deref().unwrap_or(DEFAULT_TAG);
        known.name == self.name && self.tag.is_none_or(|wanted| wanted == tag)
    }
}

/// A snapshot that nobody named is called by its id.
fn name_of(snapshot: &Snapshot) -> Name {
    match &snapshot.name {
        Some(stored) => Name::of_stored(stored),
        None => Name {
            name: snapshot.id.to_string(),
            tag: None,
        },
    }
}

/// All of a name, whatever their tags, or the one of an id.
pub(crate) async fn named(app: &App, caller: &Caller, name: &str) -> Answer<Vec<Snapshot>> {
    matching(app, caller, None, Wanted::of(name)).await
}

/// Those that a client may mean.
async fn matching(
    app: &App,
    caller: &Caller,
    of: Option<&SandboxId>,
    wanted: Wanted<'_>,
) -> Answer<Vec<Snapshot>> {
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let page = app.sandboxes.snapshots(caller, cursor, PAGE).await?;
        let meant = |snapshot: &Snapshot| {
            wanted.is(snapshot) && of.is_none_or(|of| snapshot.sandbox.as_ref() == Some(of))
        };
        found.extend(page.items.into_iter().filter(meant));
        cursor = page.next;
        if cursor.is_none() {
            return Ok(found);
        }
    }
}

/// What stands for a snapshot among the tags of its name.
pub(crate) fn tag(snapshot: &Snapshot) -> Value {
    let digest = hex::encode(Sha256::digest(snapshot.id.as_str()));
    json!({
        "tag": name_of(snapshot).tag.as_deref().unwrap_or(DEFAULT_TAG),
        "buildID": templates::build_id(&digest),
        "createdAt": view::time(snapshot.created_at),
    })
}

/// Deletes a snapshot, if the name or id is one's; all of a name that comes without a tag.
pub(crate) async fn delete(app: &App, caller: &Caller, given: &str) -> Answer<bool> {
    let wanted = Wanted::of(given);
    let mut any = delete_one(app, caller, &wanted.stored()).await?;
    if wanted.tag.is_none() {
        for snapshot in matching(app, caller, None, wanted).await? {
            any |= delete_one(app, caller, snapshot.id.as_str()).await?;
        }
    }
    Ok(any)
}

async fn delete_one(app: &App, caller: &Caller, which: &str) -> Answer<bool> {
    match app.sandboxes.delete_snapshot(caller, which).await {
        Ok(()) => Ok(true),
        Err(fault) if matches!(fault.kind(), FaultKind::NotFound | FaultKind::Gone) => Ok(false),
        Err(fault) => Err(fault.into()),
    }
}

/// The id has the tag, the names do not.
fn info(snapshot: &Snapshot) -> Value {
    let Name { name, tag } = name_of(snapshot);
    let names: Vec<&String> = snapshot.name.iter().map(|_| &name).collect();
    let tag = tag.as_deref().unwrap_or(DEFAULT_TAG);
    json!({"snapshotID": format!("{name}:{tag}"), "names": names})
}

/// How many are looked at at once.
const PAGE: usize = 100;

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
        name: request.name.as_deref().map(|name| Wanted::of(name).stored()),
        kind: (request.memory == Some(false)).then_some(SaveKind::Filesystem),
        idempotency_key: None,
    };
    // A name that is taken moves to the new one, as a tag does.
    if let Some(name) = &taken.name {
        delete_one(&app, &caller, name).await?;
    }
    let snapshot = app.sandboxes.take_snapshot(&caller, &id, taken).await?;
    Ok((StatusCode::CREATED, Json(info(&snapshot))).into_response())
}

pub(crate) async fn list(State(app): State<App>, Auth(caller): Auth, query: Query) -> Answer<Response> {
    let query = query.only(&["sandboxID", "name", "limit", "nextToken"])?;
    let limit = query.limit()?;
    let of = query.text("sandboxID").map(parse_id);
    if let Some(name) = query.text("name") {
        let found = match of {
            // It names no sandbox that there could be.
            Some(None) => None,
            of => by_name(&app, &caller, of.flatten().as_ref(), Wanted::of(name)).await?,
        };
        return Ok(Json(Vec::from_iter(found)).into_response());
    }
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

/// What a name stands for. Without a tag that is the newest of them, as there.
async fn by_name(
    app: &App,
    caller: &Caller,
    of: Option<&SandboxId>,
    wanted: Wanted<'_>,
) -> Answer<Option<Value>> {
    let found = matching(app, caller, of, wanted).await?;
    Ok(found.iter().max_by_key(|snapshot| snapshot.created_at).map(info))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_kept_in_the_name() {
        for (given, stored) in [
            ("x", "x"),
            ("x:default", "x"),
            ("x:v1", "x.v1"),
            ("team/x:v1.2", "x.v1.2"),
            ("snap_abcdefghijkmnpqrstuv:default", "snap_abcdefghijkmnpqrstuv"),
        ] {
            assert_eq!(Wanted::of(given).stored(), stored, "{given}");
        }
    }
}

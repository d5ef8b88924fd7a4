//! Sandboxes as E2B's clients see them.

use std::time::{SystemTime, UNIX_EPOCH};

use atoll_identity::{Caller, Opens};
use atoll_sandboxes::Sandbox;
use atoll_types::{MIB, SandboxState, SaveKind, SnapshotId, TimeoutAction, Timestamp};
use serde_json::{Value, json};

use super::domain::Domain;
use super::names::Name;
use super::network;
use crate::App;
use crate::extras::{Extras, LABEL};
use crate::options::ENVD_VERSION;

/// Where a sandbox lives has no meaning here, but clients insist on it.
const CLIENT: &str = "atoll";
/// The end of what never ends.
const NEVER: &str = "9999-12-31T23:59:59Z";

pub(crate) fn now_seconds() -> i64 {
    now_millis().div_euclid(1000)
}

pub(crate) fn now_millis() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

pub(crate) fn time(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(at.0).map_or_else(|_| NEVER.to_owned(), |time| time.to_string())
}

/// Whether clients may know of it, and as what.
pub(crate) fn state(state: SandboxState) -> Option<&'static str> {
    match state {
        SandboxState::Starting | SandboxState::Running | SandboxState::Resuming => Some("running"),
        SandboxState::Pausing | SandboxState::Paused | SandboxState::Stopping | SandboxState::Stopped => {
            Some("paused")
        }
        SandboxState::Deleting | SandboxState::Deleted | SandboxState::Failed => None,
    }
}

/// The answer of create, connect, resume and fork.
pub(crate) fn created(app: &App, domain: &Domain, sandbox: &Sandbox) -> Value {
    let mut view = json!({
        "templateID": template_id(sandbox),
        "sandboxID": sandbox.id.bare(),
        "clientID": CLIENT,
        "envdVersion": ENVD_VERSION,
        "domain": domain.0,
        "trafficAccessToken": null,
    });
    if let Some(alias) = alias(sandbox) {
        view["alias"] = alias.into();
    }
    let extras = Extras::of(&sandbox.spec.labels).unwrap_or_default();
    let id = &sandbox.id;
    if extras.private_ports {
        view["trafficAccessToken"] = app.identity.token(&Opens::Traffic { sandbox: id }).into();
    }
    if !extras.open {
        view["envdAccessToken"] = app.identity.token(&Opens::Agent { sandbox: id }).into();
    }
    view
}

/// What it was made of: a snapshot, by its id, or a template.
pub(crate) fn template_id(sandbox: &Sandbox) -> &str {
    let given = sandbox.spec.template.as_str();
    match given.parse::<SnapshotId>() {
        Ok(_) => given,
        Err(_) => sandbox.template.as_str(),
    }
}

/// The name of its template, if it was created by name. Tags are no part of it.
fn alias(sandbox: &Sandbox) -> Option<String> {
    let given = sandbox.spec.template.as_str();
    (given != template_id(sandbox)).then(|| Name::of_stored(given).name)
}

/// The same, of one that was created by id: what else that is called now.
pub(crate) async fn name_of_template(app: &App, caller: &Caller, sandbox: &Sandbox) -> Option<String> {
    if let Some(alias) = alias(sandbox) {
        return Some(alias);
    }
    let given = template_id(sandbox);
    if given.parse::<SnapshotId>().is_ok() {
        let snapshot = app.sandboxes.snapshot(caller, given).await.ok()?;
        return snapshot.name.map(|name| Name::of_stored(&name).name);
    }
    let template = app.sandboxes.template(caller, given).await.ok()?;
    let mut names = template.names.iter().map(|name| Name::of_stored(name));
    let first = names
        .clone()
        .find(|name| name.tag.is_none())
        .or_else(|| names.next());
    first.map(|name| name.name)
}

/// One of a list.
pub(crate) fn listed(sandbox: &Sandbox) -> Value {
    let resources = &sandbox.spec.resources;
    let mut metadata = sandbox.spec.labels.clone();
    metadata.remove(LABEL);
    let mounts: Vec<Value> = sandbox
        .spec
        .volumes
        .iter()
        .map(|mount| json!({"name": mount.volume, "path": mount.path}))
        .collect();
    let ends = match (&sandbox.saved, sandbox.deadline) {
        (Some(saved), _) => time(saved.at),
        (None, Some(deadline)) => time(deadline),
        (None, None) => NEVER.to_owned(),
    };
    let mut view = json!({
        "templateID": template_id(sandbox),
        "sandboxID": sandbox.id.bare(),
        "clientID": CLIENT,
        "startedAt": time(sandbox.created_at),
        "endAt": ends,
        "cpuCount": resources.cpu_millis.div_ceil(1000),
        "memoryMB": resources.memory_bytes / MIB,
        "diskSizeMB": resources.disk_bytes / MIB,
        "state": state(sandbox.state).unwrap_or("running"),
        "envdVersion": ENVD_VERSION,
        "metadata": metadata,
        "volumeMounts": mounts,
    });
    if let Some(alias) = alias(sandbox) {
        view["alias"] = alias.into();
    }
    view
}

/// All that is told of one.
pub(crate) fn detail(app: &App, domain: &Domain, sandbox: &Sandbox, alias: Option<String>) -> Value {
    let mut view = listed(sandbox);
    if let Some(alias) = alias {
        view["alias"] = alias.into();
    }
    let extras = Extras::of(&sandbox.spec.labels).unwrap_or_default();
    view["domain"] = json!(domain.0);
    let (internet, allowed, denied) = network::shown(sandbox.spec.network.as_ref());
    view["allowInternetAccess"] = json!(internet);
    let mut network = json!({
        "allowPublicTraffic": !extras.private_ports,
        "allowOut": allowed,
        "denyOut": denied,
    });
    if let Some(mask) = &extras.mask_host {
        network["maskRequestHost"] = json!(mask);
    }
    view["network"] = network;
    view["lifecycle"] = json!({
        "autoResume": sandbox.spec.auto_resume,
        "onTimeout": match sandbox.spec.on_timeout {
            TimeoutAction::Kill => "kill",
            TimeoutAction::Pause | TimeoutAction::Stop => "pause",
        },
    });
    if let Some(saved) = &sandbox.saved {
        view["pauseMode"] = json!(match saved.kind {
            SaveKind::Memory => "full",
            SaveKind::Filesystem => "filesystem",
        });
    }
    if !extras.open {
        let opens = Opens::Agent { sandbox: &sandbox.id };
        view["envdAccessToken"] = app.identity.token(&opens).into();
    }
    view
}

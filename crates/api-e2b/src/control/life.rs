//! The life of a sandbox after its creation.

use atoll_identity::Caller;
use atoll_sandboxes::Sandbox;
use atoll_types::{Fault, SandboxId, SandboxState, SaveKind};
use axum::extract::{Json, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;

use super::create::millis;
use super::domain::Domain;
use super::read::{Id, Read};
use super::view;
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

/// A sandbox that has not ended.
pub(crate) async fn known(app: &App, caller: &Caller, id: &SandboxId) -> Answer<Sandbox> {
    let missing = || Refusal::no_sandbox(id.bare());
    let sandbox = app
        .sandboxes
        .get(caller, id)
        .await
        .map_err(|fault| gone(id, fault))?;
    view::state(sandbox.state).map(|_| sandbox).ok_or_else(missing)
}

/// A fault about a sandbox that is not there any more, in the words that clients know.
fn gone(id: &SandboxId, fault: Fault) -> Refusal {
    let refusal = Refusal::from(fault);
    match refusal.status {
        StatusCode::NOT_FOUND => Refusal::no_sandbox(id.bare()),
        _ => refusal,
    }
}

pub(crate) async fn get(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    Id(id): Id,
) -> Answer<Json<Value>> {
    let sandbox = known(&app, &caller, &id).await?;
    let alias = view::name_of_template(&app, &caller, &sandbox).await;
    Ok(Json(view::detail(&app, &domain, &sandbox, alias)))
}

pub(crate) async fn kill(State(app): State<App>, Auth(caller): Auth, Id(id): Id) -> Answer<StatusCode> {
    known(&app, &caller, &id).await?;
    app.sandboxes
        .kill(&caller, &id)
        .await
        .map_err(|fault| gone(&id, fault))?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Connect {
    timeout: Option<i64>,
    memory: Option<bool>,
    /// Of the oldest clients: what happened at the timeout was decided at the creation.
    #[serde(rename = "autoPause")]
    auto_pause: Option<bool>,
}

/// Lifetime of those who name none, in seconds.
const CONNECT_TIMEOUT: i64 = 300;

/// One that this server grants, whatever it is for.
fn lifetime(app: &App, seconds: i64) -> Answer<u64> {
    let asked = millis("timeout", seconds)?;
    match app.sandboxes.longest_lifetime() {
        Some(most) if asked > most => Err(Refusal::invalid(format!(
            "Timeout cannot be greater than {} seconds",
            most / 1000
        ))),
        _ => Ok(asked),
    }
}

pub(crate) async fn connect(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    Id(id): Id,
    Read(request): Read<Connect>,
) -> Answer<Response> {
    let timeout = lifetime(&app, request.timeout.unwrap_or(CONNECT_TIMEOUT))?;
    let sandbox = known(&app, &caller, &id).await?;
    if sandbox.state == SandboxState::Running {
        let until = view::now_millis().saturating_add(i64::try_from(timeout).unwrap_or(i64::MAX));
        // It is made to live longer, never shorter.
        let sandbox = match sandbox.deadline {
            Some(deadline) if deadline.0 < until => app
                .sandboxes
                .extend(&caller, &id, timeout)
                .await
                .map_err(|fault| gone(&id, fault))?,
            _ => sandbox,
        };
        return Ok(Json(view::created(&app, &domain, &sandbox)).into_response());
    }
    let resumed = wake(&app, &caller, &sandbox, timeout, request).await?;
    Ok((StatusCode::CREATED, Json(view::created(&app, &domain, &resumed))).into_response())
}

pub(crate) async fn resume(
    State(app): State<App>,
    Auth(caller): Auth,
    domain: Domain,
    Id(id): Id,
    Read(request): Read<Connect>,
) -> Answer<Response> {
    let timeout = lifetime(&app, request.timeout.unwrap_or(CONNECT_TIMEOUT))?;
    let sandbox = known(&app, &caller, &id).await?;
    if sandbox.state == SandboxState::Running {
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("Sandbox {} is already running", id.bare()),
        ));
    }
    let resumed = wake(&app, &caller, &sandbox, timeout, request).await?;
    Ok((StatusCode::CREATED, Json(view::created(&app, &domain, &resumed))).into_response())
}

async fn wake(
    app: &App,
    caller: &Caller,
    sandbox: &Sandbox,
    timeout: u64,
    request: Connect,
) -> Answer<Sandbox> {
    let with_memory = sandbox
        .saved
        .as_ref()
        .is_some_and(|saved| saved.kind == SaveKind::Memory);
    if request.memory == Some(false) && with_memory {
        return Err(Refusal::unsupported(
            "memory",
            "what was paused with its memory resumes with it; pause with `memory: false` instead",
        ));
    }
    if request.auto_pause == Some(true) && sandbox.spec.on_timeout == atoll_types::TimeoutAction::Kill {
        return Err(Refusal::unsupported(
            "autoPause",
            "it is decided when the sandbox is created",
        ));
    }
    let resumed = app.sandboxes.resume(caller, &sandbox.id, Some(timeout)).await;
    resumed.map_err(|fault| gone(&sandbox.id, fault))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pause {
    memory: Option<bool>,
    /// A guest that does not answer cannot be saved here at all, so this asks for nothing more.
    #[serde(rename = "requireHealthyGuest")]
    _require_healthy_guest: Option<bool>,
}

/// With its memory where the tier can keep it, with its files alone where it cannot (`pauseMode` tells).
pub(crate) async fn pause(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<Pause>,
) -> Answer<StatusCode> {
    let sandbox = known(&app, &caller, &id).await?;
    // Who comes while it is being paused waits with the others for that.
    if matches!(sandbox.state, SandboxState::Paused | SandboxState::Stopped) {
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("Sandbox {} is already paused", id.bare()),
        ));
    }
    let kind = (request.memory == Some(false)).then_some(SaveKind::Filesystem);
    app.sandboxes
        .pause(&caller, &id, kind)
        .await
        .map_err(|fault| gone(&id, fault))?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Timeout {
    timeout: i64,
}

/// Zero means now, which is as soon as a lifetime can be.
const SOONEST_MILLIS: u64 = 1000;

pub(crate) async fn set_timeout(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<Timeout>,
) -> Answer<StatusCode> {
    let sandbox = known(&app, &caller, &id).await?;
    if view::state(sandbox.state) != Some("running") {
        return Err(Refusal::no_sandbox(id.bare()));
    }
    let timeout = match request.timeout {
        0 => SOONEST_MILLIS,
        seconds => millis("timeout", seconds)?,
    };
    app.sandboxes
        .extend(&caller, &id, timeout)
        .await
        .map_err(|fault| gone(&id, fault))?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Refresh {
    duration: Option<i64>,
}

/// The shortest and the longest that a refresh asks for, in seconds.
const REFRESH: std::ops::RangeInclusive<i64> = 15..=3600;

pub(crate) async fn refresh(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    Read(request): Read<Refresh>,
) -> Answer<StatusCode> {
    let sandbox = known(&app, &caller, &id).await?;
    let seconds = request.duration.unwrap_or(*REFRESH.start()).max(*REFRESH.start());
    if seconds > *REFRESH.end() {
        return Err(Refusal::invalid("`duration` must be from 0 to 3600"));
    }
    let timeout = millis("duration", seconds)?;
    let until = view::now_millis().saturating_add(i64::try_from(timeout).unwrap_or(i64::MAX));
    if sandbox.deadline.is_some_and(|deadline| deadline.0 < until) {
        app.sandboxes
            .extend(&caller, &id, timeout)
            .await
            .map_err(|fault| gone(&id, fault))?;
    }
    Ok(StatusCode::NO_CONTENT)
}

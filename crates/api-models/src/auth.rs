//! Who asks: a project with its key, a holder of a virtual key, or a sandbox.
//!
//! What must hold: a sandbox speaks for itself alone. It cannot name a workflow or a run of others: those come from the
//! labels that it was created with.

use atoll_front::Visit;
use atoll_front::extract::bearer;
use atoll_gateway_core::Spender;
use atoll_identity::{Action, Caller, Opens};
use atoll_models::{Refusal, Who};
use atoll_types::{Code, Fault};
use axum::http::HeaderMap;
use axum::http::request::Parts;

use crate::App;

/// What labels of a sandbox say on whose behalf it works.
const WORKFLOW: &str = "workflow";
const RUN: &str = "run";

/// Who asks, and pays for what the request holds.
pub(crate) async fn payer(app: &App, parts: &Parts) -> Result<(Who, Visit), Refusal> {
    let (caller, who) = known(app, &parts.headers).await?;
    let visit = Visit::of(&parts.extensions)?;
    visit.admit_caller(&caller)?;
    Ok((who, visit))
}

pub(crate) async fn who(app: &App, headers: &HeaderMap) -> Result<Who, Refusal> {
    let (_, who) = known(app, headers).await?;
    Ok(who)
}

async fn known(app: &App, headers: &HeaderMap) -> Result<(Caller, Who), Refusal> {
    let unknown = |message: &str| {
        Fault::new(Code::InvalidKey, message)
            .hint("send `Authorization: Bearer atm_…` or `x-api-key`; `atoll model key create` makes a key")
    };
    let Some(secret) = secret(headers) else {
        return Err(unknown("this request carries no key").into());
    };
    if secret.starts_with("ats_") {
        return sandbox(app, secret).ok_or_else(|| unknown("this token is of no sandbox that lives").into());
    }
    if app.for_sandboxes {
        return Err(unknown("from inside a sandbox only its own token is accepted").into());
    }
    let of_models = app.identity.authenticate_for_models(secret).await?;
    let (caller, key) = match of_models {
        // One that is being revoked has no limits any more, and opens nothing.
        Some(caller) => {
            let limits = caller.key().and_then(|id| app.models.key(id));
            (limits.is_some().then_some(caller), limits)
        }
        None => (app.identity.authenticate(secret).await?, None),
    };
    let Some(caller) = caller else {
        return Err(unknown("this key is unknown, was revoked or has expired").into());
    };
    caller.may(Action::CallModels, None)?;
    let who = Who {
        spender: Spender {
            project: caller.project().clone(),
            key: caller.key().cloned(),
            sandbox: None,
            workflow: label(headers, "x-atoll-workflow")?,
            run: label(headers, "x-atoll-run")?,
        },
        key,
        tags: tags(headers),
    };
    Ok((caller, who))
}

/// The sandbox whose token this is, if it lives.
fn sandbox(app: &App, token: &str) -> Option<(Caller, Who)> {
    let sandbox = app.identity.sandbox_of_model_token(token)?;
    let proof = app.identity.prove(&Opens::Models { sandbox: &sandbox }, token)?;
    let found = app.sandboxes.labelled(&sandbox)?;
    let label = |name: &str| found.labels.get(name).cloned();
    let who = Who {
        spender: Spender {
            project: found.project.clone(),
            key: None,
            workflow: label(WORKFLOW),
            run: label(RUN),
            sandbox: Some(sandbox),
        },
        key: None,
        tags: Vec::new(),
    };
    Some((proof.acting_for(found.project), who))
}

/// The secret where either wire puts it; a key of one's own wins over what else is there.
fn secret(headers: &HeaderMap) -> Option<&str> {
    let key = headers.get("x-api-key").and_then(|value| value.to_str().ok());
    key.map(str::trim)
        .filter(|key| !key.is_empty())
        .or_else(|| bearer(headers))
}

fn label(headers: &HeaderMap, name: &'static str) -> Result<Option<String>, Refusal> {
    let Some(value) = headers.get(name) else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(text) if (1..=200).contains(&text.len()) => Ok(Some(text.to_owned())),
        _ => Err(Fault::new(
            Code::InvalidHeader,
            format!("`{name}` has 1 to 200 printable characters"),
        )
        .into()),
    }
}

fn tags(headers: &HeaderMap) -> Vec<String> {
    let value = headers
        .get("x-atoll-tags")
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let tags = value
        .split(',')
        .map(str::trim)
        .filter(|tag| !tag.is_empty() && tag.len() <= 100);
    tags.map(str::to_owned).take(20).collect()
}

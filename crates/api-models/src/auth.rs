//! Who asks: a project with its key, a holder of a virtual key, or a sandbox.
//!
//! What must hold: a sandbox speaks for itself alone. Which one it is follows from the cable that it comes by; its token has to
//! be the right one as well, and opens nothing anywhere else. It cannot name a workflow or a run of others: those come from
//! its owner.

use atoll_front::Visit;
use atoll_front::extract::bearer;
use atoll_gateway_core::Spender;
use atoll_identity::{Action, Caller};
use atoll_models::{Refusal, Who};
use atoll_types::{Code, Fault, SandboxId};
use axum::http::HeaderMap;

use crate::App;

/// Who asks, and pays for what the request holds and what is answered.
pub(crate) async fn payer(app: &App, headers: &HeaderMap, visit: &Visit) -> Result<Who, Refusal> {
    let (caller, who) = known(app, headers, visit).await?;
    visit.admit_caller(&caller)?;
    Ok(who)
}

fn unknown(message: &str) -> Refusal {
    Fault::new(Code::InvalidKey, message)
        .hint("send `Authorization: Bearer atm_…` or `x-api-key`; `atoll model key create` makes a key")
        .into()
}

async fn known(app: &App, headers: &HeaderMap, visit: &Visit) -> Result<(Caller, Who), Refusal> {
    let Some(secret) = secret(headers) else {
        return Err(unknown("this request carries no key"));
    };
    if secret.starts_with("ats_") {
        return sandbox(app, visit, secret);
    }
    if app.for_sandboxes {
        return Err(unknown("from inside a sandbox only its own token is accepted"));
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
        return Err(unknown("this key is unknown, was revoked or has expired"));
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

/// The sandbox by whose cable the request came, if the token is its own. Programs that ran on in a copy hold the token of the
/// sandbox that they began in: it is good for the copy, which spends in its own name.
fn sandbox(app: &App, visit: &Visit, token: &str) -> Result<(Caller, Who), Refusal> {
    let nobodys = || unknown("this token is of no sandbox that lives");
    let of = app.identity.sandbox_of_model_token(token).ok_or_else(nobodys)?;
    let speaks = |id: &SandboxId| {
        let found = app.sandboxes.belongs(id)?;
        let (workflow, run) = found.workflow.map(|owner| (owner.workflow, owner.run)).unzip();
        let who = Who {
            spender: Spender {
                project: found.project,
                key: None,
                workflow,
                run,
                sandbox: Some(id.clone()),
            },
            key: None,
            tags: Vec::new(),
        };
        Some((found.family, who))
    };
    let Some(cable) = visit.cable() else {
        let (_, who) = speaks(&of).ok_or_else(nobodys)?;
        app.models
            .note_stray_token(&who, "its token was used from outside of it");
        return Err(unknown("a sandbox's token is good inside that sandbox alone"));
    };
    let (family, who) = speaks(cable).ok_or_else(nobodys)?;
    let is_own = of == *cable || of == family || speaks(&of).is_some_and(|(others, _)| others == family);
    if !is_own {
        let reason = format!("the token of {of} was used from this sandbox");
        app.models.note_stray_token(&who, &reason);
        return Err(unknown("this token is of another sandbox"));
    }
    let project = who.spender.project.clone();
    Ok((app.identity.visitor(project, cable.clone()), who))
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

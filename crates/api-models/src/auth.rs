//! Who asks: a project with its key, a holder of a virtual key, or a sandbox.
//!
//! What must hold: a sandbox speaks for itself alone. It cannot name a workflow or a run of others: those come from the
//! labels that it was created with.

use atoll_front::{Refused, Visit};
use atoll_gateway_core::Spender;
use atoll_models::{Refusal, Who};
use atoll_types::{Code, Fault, ProjectId};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};

use crate::App;

/// What labels of a sandbox say on whose behalf it works.
const WORKFLOW: &str = "workflow";
const RUN: &str = "run";

/// Who asks, and pays for what the request holds.
pub(crate) async fn payer(app: &App, parts: &Parts) -> Result<(Who, Visit), Refusal> {
    let who = who(app, &parts.headers).await?;
    let spender = &who.spender;
    let visit = visit(parts)?;
    match &spender.key {
        Some(key) => visit.admit_key(&spender.project, key.as_str())?,
        None => visit.admit(&spender.project, spender.sandbox.as_ref())?,
    }
    Ok((who, visit))
}

fn visit(parts: &Parts) -> Result<Visit, Refusal> {
    let visit = parts.extensions.get::<Visit>().cloned();
    Ok(visit.ok_or_else(|| Refused::Unpaid.fault())?)
}

pub(crate) async fn who(app: &App, headers: &HeaderMap) -> Result<Who, Refusal> {
    let unknown = |message: &str| {
        Fault::new(Code::InvalidKey, message)
            .hint("send `Authorization: Bearer atm_…` or `x-api-key`; `atoll model key create` makes a key")
    };
    let Some(secret) = secret(headers) else {
        return Err(unknown("this request carries no key").into());
    };
    if secret.starts_with("ats_") {
        let Some(found) = app.sandboxes.check_model_token(secret) else {
            return Err(unknown("this token is of no sandbox that lives").into());
        };
        let label = |name: &str| found.labels.get(name).cloned();
        return Ok(Who {
            spender: Spender {
                project: found.project,
                key: None,
                sandbox: Some(found.sandbox),
                workflow: label(WORKFLOW),
                run: label(RUN),
            },
            key: None,
            tags: Vec::new(),
        });
    }
    if app.for_sandboxes {
        return Err(unknown("from inside a sandbox only its own token is accepted").into());
    }
    if let Some(key) = app.models.authenticate(secret) {
        let spender = spender(key.row.project.clone(), headers)?;
        let spender = Spender {
            key: Some(key.row.id.clone()),
            ..spender
        };
        return Ok(Who {
            spender,
            tags: tags(headers),
            key: Some(key),
        });
    }
    match app.sandboxes.find_key(secret).await? {
        Some((key, project)) => Ok(Who {
            spender: Spender {
                key: Some(key),
                ..spender(project, headers)?
            },
            key: None,
            tags: tags(headers),
        }),
        None => Err(unknown("this key is unknown, was revoked or has expired").into()),
    }
}

/// The secret where either wire puts it; a key of one's own wins over what else is there.
fn secret(headers: &HeaderMap) -> Option<&str> {
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION)
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim());
    let key = text(header::HeaderName::from_static("x-api-key")).map(str::trim);
    key.filter(|key| !key.is_empty())
        .or(bearer)
        .filter(|secret| !secret.is_empty())
}

fn spender(project: ProjectId, headers: &HeaderMap) -> Result<Spender, Refusal> {
    Ok(Spender {
        project,
        key: None,
        sandbox: None,
        workflow: label(headers, "x-atoll-workflow")?,
        run: label(headers, "x-atoll-run")?,
    })
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

//! Which sandbox a path means: `/v1/sandboxes/{id}` has its id, or its name.
//!
//! What must hold: it is looked up once, before it is decided whether the caller may; the route then acts on the very
//! sandbox that was decided about.

use atoll_identity::Caller;
use atoll_types::{Code, Fault, SandboxId};
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;

use crate::App;
use crate::error::Failure;

/// The sandbox that the path means.
#[derive(Debug)]
pub(crate) struct Named(pub(crate) SandboxId);

/// What was found for it.
#[derive(Debug, Clone)]
struct Found(Result<SandboxId, Fault>);

impl FromRequestParts<App> for Named {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        match parts.extensions.get::<Found>().cloned() {
            Some(Found(found)) => Ok(Self(found?)),
            None => Err(Fault::internal("this route names no sandbox").into()),
        }
    }
}

/// Looks up the sandbox that a path means, if the route has one. What is not found is refused where it is wanted.
pub(crate) async fn find(app: &App, caller: &Caller, route: &str, parts: &mut Parts) -> Option<SandboxId> {
    if !route.starts_with("/v1/sandboxes/{id}") {
        return None;
    }
    let found = match RawPathParams::from_request_parts(parts, &()).await {
        Ok(given) => {
            let mut ids = given.iter().filter(|(name, _)| *name == "id");
            sandbox(app, caller, ids.next()?.1, Code::InvalidPathParameter).await
        }
        // What is not UTF-8 is nobody's id or name.
        Err(wrong) => Err(Fault::new(Code::InvalidPathParameter, wrong.body_text())),
    };
    let id = found.as_ref().ok().cloned();
    parts.extensions.insert(Found(found));
    id
}

/// A sandbox by its id, or by the name that it has now; `wrong` is what is said of what begins like an id and is none.
pub(crate) async fn sandbox(app: &App, caller: &Caller, text: &str, wrong: Code) -> Result<SandboxId, Fault> {
    if text.starts_with("sbx_") {
        let id = text.parse::<SandboxId>();
        return id.map_err(|error| Fault::new(wrong, error.to_string()));
    }
    app.sandboxes.named(caller, text).await
}

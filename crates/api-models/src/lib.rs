//! The wires of model clients: OpenAI's, Anthropic's and the AI SDK's. What manages the gateway (`/v1/gateway`) is part of the
//! native API.
//!
//! ```text
//!   /v1/chat/completions  /v1/responses  /v1/embeddings  /v1/models      OpenAI     base URL: {origin}/v1
//!   /v1/messages  /v1/messages/count_tokens  /v1/models                  Anthropic  base URL: {origin}
//!   /v4/ai/*  /v3/ai/*  /v1/credits  /v1/generation  /v1/report          AI SDK     base URL: {origin}/v4/ai
//! ```
//! They lie beside Atoll's own `/v1` on one port, because the AI SDK asks for some of them at the origin whatever its base
//! URL is; none of the names is also one of ours.
//!
//! What must hold:
//! - **Thin.** A handler finds out who asks, hands bytes to one use case and writes bytes. No rule about money is here.
//! - Every error is in the shape of the wire that it is told on.
//! - **Known before read.** No byte of a body is read before it is known who pays for it (`atoll_front`).
//! - Who hangs up drops the answer, and with it the call to the provider.

mod ai_sdk;
mod auth;
mod calls;
mod error;
mod listing;
mod parameters;

use std::sync::Arc;

use atoll_front::host::Target;
use atoll_front::{Api, Asked};
use atoll_identity::Identity;
use atoll_models::Models;
use atoll_sandboxes::Sandboxes;
use axum::Router;
use axum::response::IntoResponse as _;
use axum::routing::{get, post};

use error::Wire;

#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) identity: Identity,
    pub(crate) models: Models,
    pub(crate) sandboxes: Sandboxes,
    /// Nobody but sandboxes comes by this way.
    pub(crate) for_sandboxes: bool,
}

/// The wires of model clients.
pub fn api(identity: Identity, models: Models, sandboxes: Sandboxes) -> Api {
    let app = App {
        identity,
        models,
        sandboxes,
        for_sandboxes: false,
    };
    wires(
        app,
        Arc::new(|asked| *asked.target == Target::Api && is_ours(asked.head.uri.path())),
    )
}

/// What programs inside sandboxes find: calls, with the sandbox's own token, and nothing else of any API.
pub fn sandbox_api(identity: Identity, models: Models, sandboxes: Sandboxes) -> Api {
    let app = App {
        identity,
        models,
        sandboxes,
        for_sandboxes: true,
    };
    wires(app, Arc::new(|_| true))
}

fn wires(app: App, claims: Arc<dyn Fn(&Asked<'_>) -> bool + Send + Sync>) -> Api {
    let router = calling()
        .fallback(error::no_such_route)
        .method_not_allowed_fallback(error::wrong_method)
        .with_state(app);
    Api {
        name: "models",
        claims,
        router,
        write: |_, fault, _| Wire::Openai.refuse(fault.clone()).into_response(),
    }
}

/// Whether a path is, or begins like, one of [`calling`].
fn is_ours(path: &str) -> bool {
    let below = |root: &str| {
        path.strip_prefix(root)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/models",
        "/v1/credits",
        "/v1/generation",
        "/v1/report",
        "/v3/ai",
        "/v4/ai",
    ]
    .into_iter()
    .any(below)
}

/// The routes of model clients.
fn calling() -> Router<App> {
    let mut routes = Router::new()
        .route("/v1/chat/completions", post(calls::chat))
        .route("/v1/responses", post(calls::responses))
        .route("/v1/embeddings", post(calls::embeddings))
        .route("/v1/messages", post(calls::messages))
        .route("/v1/messages/count_tokens", post(calls::count_tokens))
        .route("/v1/models", get(listing::list))
        .route("/v1/models/{*id}", get(listing::one))
        .route("/v1/credits", get(ai_sdk::credits))
        .route("/v1/generation", get(ai_sdk::generation))
        .route("/v1/report", get(ai_sdk::report));
    for version in ["v3", "v4"] {
        routes = routes
            .route(
                &format!("/{version}/ai/language-model"),
                post(ai_sdk::language_model),
            )
            .route(
                &format!("/{version}/ai/embedding-model"),
                post(ai_sdk::embedding_model),
            )
            .route(&format!("/{version}/ai/config"), get(ai_sdk::config));
    }
    routes.route_layer(axum::middleware::from_fn(parameters::check))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_apart_from_those_of_other_apis() {
        for ours in [
            "/v1/chat/completions",
            "/v1/models/a/b",
            "/v4/ai/config",
            "/v1/messages/count_tokens",
        ] {
            assert!(is_ours(ours), "{ours}");
        }
        for other in [
            "/v1/sandboxes",
            "/v1/gateway/models",
            "/v3/templates",
            "/v1/reports",
            "/v1/modelsx",
        ] {
            assert!(!is_ours(other), "{other}");
        }
    }
}

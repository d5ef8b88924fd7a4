//! The wires of model clients: OpenAI's, Anthropic's and the AI SDK's, and the routes that manage the gateway.
//!
//! ```text
//!   /v1/chat/completions  /v1/responses  /v1/embeddings  /v1/models      OpenAI     base URL: {origin}/v1
//!   /v1/messages  /v1/messages/count_tokens  /v1/models                  Anthropic  base URL: {origin}
//!   /v4/ai/*  /v3/ai/*  /v1/credits  /v1/generation  /v1/report          AI SDK     base URL: {origin}/v4/ai
//!   /v1/gateway/*                                                        ours: providers, models, budgets, keys, spend
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
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod listing;
mod manage;
mod parameters;

use atoll_models::Models;
use atoll_sandboxes::Sandboxes;
use axum::Router;
use axum::routing::{get, post};
use utoipa_axum::router::OpenApiRouter;

/// The most that a request may hold; conversations with images are large.
const LARGEST_REQUEST: usize = 32 * 1024 * 1024;

#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) models: Models,
    pub(crate) sandboxes: Sandboxes,
    /// Nobody but sandboxes comes by this way.
    pub(crate) for_sandboxes: bool,
}

/// All routes, to be merged into those of the server; what is managed is documented.
pub fn router(models: Models, sandboxes: Sandboxes) -> OpenApiRouter {
    let app = App {
        models,
        sandboxes,
        for_sandboxes: false,
    };
    let routes = manage::routes().route("/metrics/models", get(manage::metrics));
    let (managing, document) = routes.split_for_parts();
    OpenApiRouter::with_openapi(document).merge(finish(calling().merge(managing), app).into())
}

/// What programs inside sandboxes find: calls, with the sandbox's own token, and nothing to manage.
pub fn sandbox_router(models: Models, sandboxes: Sandboxes) -> Router {
    finish(
        calling(),
        App {
            models,
            sandboxes,
            for_sandboxes: true,
        },
    )
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

fn finish(routes: Router<App>, app: App) -> Router {
    routes.with_state(app)
}

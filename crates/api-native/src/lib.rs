//! Atoll's own API: `/v1`, JSON over HTTP, with server-sent events and WebSockets where bytes flow.
//!
//! ```text
//!   request ── front ── entrance ──┬─ Host is `{port}-{sandbox}.localhost` ──> proxy ──> a port inside the sandbox
//!                                  └─ otherwise ──> routes ──> Sandboxes (the application)
//! ```
//!
//! What must hold:
//! - **Thin.** A handler reads a wire type, calls one use case, and writes a wire type. No rule about sandboxes lives
//!   here, and no wire type leaves. Words that are not of this API alone come from below (`atoll_actions::words`).
//! - **Decided once.** Who asks, and whether they may, is found out before a route is entered ([`entrance`]); a route names the
//!   action that it is, and nothing else about rights.
//! - **Nothing is ignored.** Unknown fields, parameters, methods and routes are refused by name, in one error shape.
//! - **One mapping** from faults to statuses: [`error`].
//! - **Bytes pass through.** File, port and output streams are handed on chunk by chunk with back-pressure; what is
//!   captured is bounded. Whoever hangs up cancels the work done for them.
//! - **What is served is documented.** The OpenAPI document is generated from the handlers that are routed.

mod actions;
mod approvals;
mod artifacts;
mod browser;
mod commands;
mod entrance;
mod error;
mod events;
mod exec;
mod extract;
mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gateway;
mod keys;
mod ledger;
mod named;
mod network;
mod openapi;
mod parameters;
mod ports;
mod projects;
mod proxy;
mod run;
mod sandboxes;
mod secrets;
mod server;
mod session;
mod snapshots;
mod templates;
mod transfer;
mod upload;
mod volumes;
mod wire;
mod workflows;

use std::path::PathBuf;
use std::sync::Arc;

use atoll_front::{Api, Front, Slots};
use atoll_identity::Identity;
use atoll_models::Models;
use atoll_sandboxes::Sandboxes;
use atoll_workflows::Engine;
use subtle::ConstantTimeEq as _;

/// How the API presents itself. The defaults serve one machine over plain HTTP.
#[derive(Debug, Clone)]
pub struct Options {
    /// Domains under which sandbox ports appear as `{port}-{sandbox}.{domain}`; the first is used in URLs.
    pub port_domains: Vec<String>,
    /// `https` where a TLS terminator stands in front; it is what clients are told.
    pub public_scheme: String,
    /// The TCP port in URLs; `None`: the one that the request came to.
    pub public_port: Option<u16>,
    /// The lifetime of a sandbox whose request says nothing about one.
    pub default_timeout_millis: u64,
    /// Where uploads for templates are received and unpacked. What a killed server left there may be deleted at the next
    /// start.
    pub scratch: PathBuf,
    /// The most that such an upload may hold.
    pub upload_bytes: u64,
    /// What opens the metrics beside an operator's key, and nothing else.
    pub metrics_key: Option<MetricsKey>,
}

/// A secret for whoever collects metrics. It has no printable form.
#[derive(Clone)]
pub struct MetricsKey(Arc<str>);

impl MetricsKey {
    pub fn new(secret: &str) -> Self {
        Self(secret.into())
    }

    pub(crate) fn is(&self, given: &str) -> bool {
        self.0.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

impl std::fmt::Debug for MetricsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MetricsKey")
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port_domains: vec!["localhost".into()],
            public_scheme: "http".into(),
            public_port: None,
            default_timeout_millis: 5 * 60 * 1000,
            scratch: std::env::temp_dir(),
            upload_bytes: 8 * atoll_types::GIB,
            metrics_key: None,
        }
    }
}

/// The whole API, ports of its sandboxes included. It takes every request that no other API claims.
pub fn api(
    identity: Identity,
    sandboxes: Sandboxes,
    models: Models,
    workflows: Option<Engine>,
    options: Options,
    front: Front,
) -> Api {
    let (routes, document) = openapi::documented().split_for_parts();
    let document = openapi::complete(document);
    let app = App(Arc::new(Inner {
        identity,
        sandboxes,
        models,
        workflows,
        options,
        front,
        receiving: Slots::new("uploads", upload::AT_ONCE, upload::OF_A_PROJECT),
        actions: actions::Actions::of(&document),
        parameters: parameters::Parameters::of(&document),
        document: server::Document::of(&document),
    }));
    let router = routes
        .fallback(server::no_such_route)
        .layer(axum::middleware::from_fn_with_state(app.clone(), entrance::enter))
        .with_state(app);
    Api {
        name: "native",
        claims: Arc::new(|_| true),
        router,
        write: error::write,
    }
}

/// The document that the server serves at `/openapi.json`, as text with a line for each part.
pub fn document() -> serde_json::Result<String> {
    let document = openapi::documented().into_openapi();
    serde_json::to_string_pretty(&openapi::complete(document))
}

/// What every handler may use; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct App(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) identity: Identity,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) models: Models,
    /// Nothing where workflows are not served.
    pub(crate) workflows: Option<Engine>,
    pub(crate) options: Options,
    pub(crate) front: Front,
    /// Uploads that are being received; each holds a blocking thread and room on the disk.
    pub(crate) receiving: Slots,
    pub(crate) document: server::Document,
    pub(crate) actions: actions::Actions,
    pub(crate) parameters: parameters::Parameters,
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

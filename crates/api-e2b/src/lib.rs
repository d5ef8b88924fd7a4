//! E2B's wire: its SDKs and its CLI work against Atoll unchanged.
//!
//! ```text
//!   request ── edge ──┬─ for port 49983 of a sandbox ──> envd: processes, files     (headers, `{port}-{id}.{domain}`,
//!                     ├─ for another port of one made here ──> that port              or a signed link)
//!                     └─ `/sandboxes`, `/templates`, … ──> control
//! ```
//!
//! What must hold:
//! - **Thin.** A handler reads a wire type, calls use cases, and writes a wire type. What E2B does inside the sandbox
//!   (its agent `envd`) is done here, in front of our own agent; nothing of E2B's runs in a sandbox.
//! - **Nothing is ignored.** What is not supported is refused with a 400 that names the field.
//! - **Words matter.** The SDKs look for statuses, numbers in bodies and parts of sentences; those are theirs, not ours.
//! - What a sandbox needs to be remembered by on this wire is in one label of it ([`extras`]), so it survives a restart.

mod auth;
mod closed;
mod control;
mod edge;
mod envd;
mod error;
mod extras;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod options;

use std::sync::Arc;

use atoll_front::Api;
use atoll_identity::Identity;
use atoll_sandboxes::{BuildJobs, Processes, Sandboxes};
use axum::response::IntoResponse as _;

pub use options::Options;

/// The whole wire. It claims what E2B's clients ask for, and ports of the sandboxes that were made through it.
pub fn api(
    identity: Identity,
    sandboxes: Sandboxes,
    processes: Processes,
    builds: BuildJobs,
    options: Options,
) -> Api {
    let app = App(Arc::new(Inner {
        identity,
        sandboxes,
        options,
        processes,
        builds,
        uploads: control::Uploads::default(),
        watchers: envd::Watchers::default(),
        searches: envd::Searches::default(),
        samples: control::Samples::default(),
    }));
    let claiming = app.clone();
    let router = control::routes()
        .fallback(error::no_such_route)
        .method_not_allowed_fallback(error::wrong_method)
        .with_state(app.clone())
        .layer(axum::middleware::from_fn_with_state(app, edge::edge));
    Api {
        name: "e2b",
        claims: Arc::new(move |asked| edge::claims(&claiming, asked)),
        router,
        write: |_, fault, _| error::Refusal::from(fault.clone()).into_response(),
    }
}

/// What every handler may use; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct App(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) identity: Identity,
    pub(crate) sandboxes: Sandboxes,
    pub(crate) options: Options,
    pub(crate) processes: Processes,
    pub(crate) builds: BuildJobs,
    pub(crate) uploads: control::Uploads,
    pub(crate) watchers: envd::Watchers,
    pub(crate) searches: envd::Searches,
    pub(crate) samples: control::Samples,
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

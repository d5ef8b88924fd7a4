//! E2B's wire: its SDKs and its CLI work against Atoll unchanged.
//!
//! ```text
//!   request ── edge ──┬─ for port 49983 of a sandbox ──> envd: processes, files     (headers, `{port}-{id}.{domain}`,
//!                     ├─ for another port of one made here ──> native port proxy      or a signed link)
//!                     └─ otherwise ──┬─ `/sandboxes`, `/templates`, … ──> control
//!                                    └─ anything else ──> the native API
//! ```
//!
//! What must hold:
//! - **Thin.** A handler reads a wire type, calls use cases, and writes a wire type. What E2B does inside the sandbox
//!   (its agent `envd`) is done here, in front of our own agent; nothing of E2B's runs in a sandbox.
//! - **Nothing is ignored.** What is not supported is refused with a 400 that names the field.
//! - **Words matter.** The SDKs look for statuses, numbers in bodies and parts of sentences; those are theirs, not ours.
//! - What a sandbox needs to be remembered by on this wire is in one label of it ([`extras`]), so it survives a restart.

mod auth;
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

use atoll_sandboxes::Sandboxes;
use axum::Router;

pub use options::{Options, Secured};

/// The whole wire in front of the native API, which gets what is not E2B's. It decides by headers and `Host` before any
/// route is looked at, so this router must not be nested below a path.
pub fn router(sandboxes: Sandboxes, options: Options, native: Router) -> Router {
    let app = App(Arc::new(Inner {
        sandboxes,
        options,
        native: native.clone(),
        processes: envd::Processes::default(),
        watchers: envd::Watchers::default(),
        samples: control::Samples::default(),
        builds: control::Builds::default(),
    }));
    control::routes()
        .with_state(app.clone())
        .fallback_service(native)
        .layer(axum::middleware::from_fn_with_state(app, edge::edge))
}

/// What every handler may use; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct App(Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) sandboxes: Sandboxes,
    pub(crate) options: Options,
    pub(crate) native: Router,
    pub(crate) processes: envd::Processes,
    pub(crate) watchers: envd::Watchers,
    pub(crate) samples: control::Samples,
    pub(crate) builds: control::Builds,
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

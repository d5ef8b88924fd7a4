//! Who asks, and what they may do: projects, keys with roles and scopes, and tokens that open one thing each.
//!
//! ```text
//!   secret ──> Identity ──> Caller: which key, of which project, in which role, restricted to which scopes
//!                                ├──> an API names the action that a route is: Caller::may decides
//!                                └──> an application acts on its behalf
//! ```
//!
//! What must hold:
//! - **Nobody else makes a [`Caller`].** Whoever holds one was let in here: by a key, by a token, as a step of a workflow, or
//!   because the server itself has something to do for a project. How, nobody below an API needs to know.
//! - **One function decides** what a caller may do, [`Caller::may`], about one [`Action`] that each route names.
//! - Nobody makes a key that may do more, or works for longer, than their own.
//! - What acts in a sandbox, a step or a workflow never answers an approval.
//! - Keys are stored hashed, and secrets are compared in constant time or by their hash.
//! - One kind of token for each purpose ([`Opens`]).
//! - A key that was revoked lets nobody in from the moment at which its revocation is answered. What is open with it is ended
//!   by the API that was asked (`atoll_front::Visit::revoke`); when a key expires, by the server ([`Identity::take_expired`]).
//! - Nothing here knows a wire, or how rows are kept ([`IdentityStore`]).

mod action;
mod caller;
mod entropy;
mod keys;
mod projects;
mod rights;
mod sessions;
mod store;
mod tokens;

use std::path::Path;
use std::sync::Arc;

use atoll_types::{Fault, ProjectId, Timestamp};

pub use action::Action;
pub use caller::Caller;
pub use keys::{CreateKey, Key, ModelKey, NewKey, NewSecret, looks_like_key};
pub use projects::Project;
pub use rights::{Role, Scope};
pub use sessions::{NewSession, Session, SessionWord};
pub use store::{IdentityStore, StoreError};
pub use tokens::{Opens, Proof, kind_of_secret};

use keys::KnownKeys;
use tokens::TokenSecret;

/// The service. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Identity {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Arc<dyn IdentityStore>,
    token_secret: TokenSecret,
    known_keys: KnownKeys,
    default_project: ProjectId,
    now: fn() -> Timestamp,
}

impl Identity {
    /// `data_dir` holds the secret that tokens follow from; `now` is the wall clock.
    pub async fn open(
        store: Arc<dyn IdentityStore>,
        data_dir: &Path,
        now: fn() -> Timestamp,
    ) -> Result<Self, Fault> {
        let token_secret = TokenSecret::open(data_dir)?;
        let project = store
            .ensure_project(projects::DEFAULT, entropy::id(), now())
            .await?;
        Ok(Self {
            inner: Arc::new(Inner {
                store,
                token_secret,
                known_keys: KnownKeys::default(),
                default_project: project.id,
                now,
            }),
        })
    }

    /// The project of the first key, whose keys run the server.
    pub fn default_project(&self) -> &ProjectId {
        &self.inner.default_project
    }

    /// The server itself, which has something to do for a project.
    pub fn server(&self, project: ProjectId) -> Caller {
        Caller::server(project)
    }

    /// A step of a workflow, on behalf of the project that its namespace belongs to; it may do no more than what
    /// [`Caller::rights`] said of whoever started the workflow. Nothing said: it was started before that was kept.
    pub fn step(&self, project: ProjectId, rights: &str) -> Result<Caller, Fault> {
        Caller::step(project, rights)
    }

    fn store(&self) -> &dyn IdentityStore {
        &*self.inner.store
    }

    fn now(&self) -> Timestamp {
        (self.inner.now)()
    }
}

/// Makes what [`Identity::open`] finds in the data directory, for a server that may not make it itself.
pub fn prepare(data_dir: &Path) -> Result<(), Fault> {
    TokenSecret::open(data_dir).map(drop)
}

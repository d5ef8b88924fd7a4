//! Secrets, sealed: what is here is useless without a key that is kept elsewhere.
//!
//! What must hold:
//! - A name belongs to one secret of its project.
//! - A secret keeps its id for as long as it exists, whatever its value and its binding become: what was sealed for one
//!   id is never found under another.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{ProjectId, SecretBinding, SecretId, Timestamp};

use crate::{Cursor, Error, NewFact, Page};

#[derive(Clone, PartialEq, Eq)]
pub struct SecretRow {
    pub id: SecretId,
    pub project: ProjectId,
    pub name: String,
    /// The value, encrypted.
    pub sealed: Vec<u8>,
    pub binding: SecretBinding,
    /// It is not put into requests any more from then on.
    pub expires_at: Option<Timestamp>,
    pub created_at: Timestamp,
    /// When its value was last replaced.
    pub rotated_at: Option<Timestamp>,
}

/// Even sealed, a value has no business in a log.
impl fmt::Debug for SecretRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretRow")
            .field("id", &self.id)
            .field("project", &self.project)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[async_trait]
pub trait SecretStore: fmt::Debug + Send + Sync + 'static {
    /// Refused with [`Error::NameTaken`] if the project has a secret of that name.
    async fn insert_secret(&self, secret: SecretRow, facts: Vec<NewFact>) -> Result<(), Error>;

    /// Writes what may change of a secret: its value, its binding and its times.
    async fn update_secret(&self, secret: SecretRow, facts: Vec<NewFact>) -> Result<(), Error>;

    async fn secret_by_name(&self, project: &ProjectId, name: &str) -> Result<Option<SecretRow>, Error>;

    async fn secret_by_id(&self, id: &SecretId) -> Result<Option<SecretRow>, Error>;

    /// Newest first.
    async fn secrets(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<SecretRow>, Error>;

    /// How many secrets a project has, and how many sealed bytes.
    async fn secrets_kept(&self, project: &ProjectId) -> Result<(u64, u64), Error>;

    /// Every secret of every project: what a starting server has to know.
    async fn all_secrets(&self) -> Result<Vec<SecretRow>, Error>;

    /// Forgets a secret and gives back what it was; `None`, and no facts, when there is none. Sandboxes that were given
    /// its name go on without it.
    async fn delete_secret(
        &self,
        project: &ProjectId,
        id: &SecretId,
        facts: Vec<NewFact>,
    ) -> Result<Option<SecretRow>, Error>;
}

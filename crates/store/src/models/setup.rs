//! What the operator sets: providers with their sealed keys, routes, prices, virtual keys, budgets and guards.
//!
//! What must hold: a provider keeps its id, for which its key was sealed, for as long as it exists. A virtual key's secret
//! never comes here, only its SHA-256.

use std::fmt;

use async_trait::async_trait;
use atoll_types::{
    BudgetId, BudgetScope, BudgetWindow, KeyId, ProjectId, ProviderKind, SecretId, Timestamp, Usd,
};
use serde::{Deserialize, Serialize};

use crate::{Cursor, Error, NewFact, Page};

#[derive(Clone, PartialEq, Eq)]
pub struct ModelProviderRow {
    pub id: SecretId,
    pub project: ProjectId,
    pub name: String,
    pub kind: ProviderKind,
    pub base_url: String,
    /// The provider's key, encrypted.
    pub sealed: Option<Vec<u8>>,
    pub serves: Vec<String>,
    /// Whether it speaks OpenAI's Responses beside Chat Completions.
    pub responses: bool,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// Even sealed, a key has no business in a log.
impl fmt::Debug for ModelProviderRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelProviderRow")
            .field("id", &self.id)
            .field("project", &self.project)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRouteRow {
    pub project: ProjectId,
    pub name: String,
    pub targets: Vec<ModelTarget>,
    pub fallbacks: Vec<String>,
    pub updated_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelTarget {
    pub provider: String,
    pub model: String,
    pub weight: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPriceRow {
    pub project: ProjectId,
    pub model: String,
    pub rates: ModelRates,
    pub updated_at: Timestamp,
}

/// Dollars per million tokens as decimal text; a search is dollars each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelRates {
    pub input: Option<String>,
    pub output: Option<String>,
    pub cache_read: Option<String>,
    pub cache_write: Option<String>,
    pub cache_write_1h: Option<String>,
    pub audio_input: Option<String>,
    pub audio_output: Option<String>,
    pub search: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelKeyRow {
    pub id: KeyId,
    pub project: ProjectId,
    pub name: String,
    /// SHA-256 of the secret.
    pub hash: [u8; 32],
    pub prefix: String,
    pub models: Vec<String>,
    pub requests_per_minute: Option<u64>,
    pub tokens_per_minute: Option<u64>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelBudgetRow {
    pub id: BudgetId,
    pub project: ProjectId,
    pub name: String,
    pub scope: BudgetScope,
    pub subject: Option<String>,
    pub window: BudgetWindow,
    pub limit: Usd,
    pub alert_percent: Option<u8>,
    pub created_at: Timestamp,
}

/// Everything of every project that a starting gateway has to know.
#[derive(Debug, Clone, Default)]
pub struct ModelSetup {
    pub providers: Vec<ModelProviderRow>,
    pub routes: Vec<ModelRouteRow>,
    pub prices: Vec<ModelPriceRow>,
    /// Those that were not revoked.
    pub keys: Vec<ModelKeyRow>,
    pub budgets: Vec<ModelBudgetRow>,
    pub guards: Vec<ModelGuardsRow>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelGuardsRow {
    pub project: ProjectId,
    pub guards: ModelGuards,
    pub updated_at: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelGuards {
    /// Larger requests are refused; by our own estimate.
    pub max_input_tokens: Option<u64>,
    /// Names of models that nobody may call, with wildcards.
    pub blocked: Vec<String>,
    /// Personal data that is looked for.
    pub screen: Vec<ScreenRule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScreenRule {
    pub name: String,
    /// `None`: the name is that of a rule which is built in.
    pub pattern: Option<String>,
    /// Put its name in place of what is found, instead of refusing the request.
    pub redact: bool,
}

#[async_trait]
pub trait ModelSetupStore: fmt::Debug + Send + Sync + 'static {
    async fn model_setup(&self) -> Result<ModelSetup, Error>;

    /// Makes a provider, or changes the one with its id; the name of another is refused with [`Error::NameTaken`].
    async fn put_model_provider(&self, provider: ModelProviderRow, facts: Vec<NewFact>) -> Result<(), Error>;

    /// Whether there was one.
    async fn delete_model_provider(
        &self,
        project: &ProjectId,
        name: &str,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error>;

    async fn put_model_route(&self, route: ModelRouteRow) -> Result<(), Error>;

    async fn delete_model_route(&self, project: &ProjectId, name: &str) -> Result<bool, Error>;

    async fn put_model_price(&self, price: ModelPriceRow) -> Result<(), Error>;

    async fn delete_model_price(&self, project: &ProjectId, model: &str) -> Result<bool, Error>;

    /// Whether it was made; not where the project has `most` that work already. Of those that do not work any more, as many of
    /// the latest are kept.
    async fn insert_model_key(
        &self,
        key: ModelKeyRow,
        most: usize,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error>;

    /// Of a project, revoked ones too, newest first.
    async fn model_keys(
        &self,
        project: &ProjectId,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<Page<ModelKeyRow>, Error>;

    /// Those of a project that have this id, or this name and were not revoked; of many, two.
    async fn model_keys_called(&self, project: &ProjectId, called: &str) -> Result<Vec<KeyId>, Error>;

    /// The time of an earlier revocation stays, and its facts are not repeated.
    async fn revoke_model_key(
        &self,
        project: &ProjectId,
        id: &KeyId,
        now: Timestamp,
        facts: Vec<NewFact>,
    ) -> Result<ModelKeyRow, Error>;

    /// Makes a budget, or changes the one with its id; the name of another is refused with [`Error::NameTaken`].
    async fn put_model_budget(&self, budget: ModelBudgetRow, facts: Vec<NewFact>) -> Result<(), Error>;

    async fn delete_model_budget(
        &self,
        project: &ProjectId,
        name: &str,
        facts: Vec<NewFact>,
    ) -> Result<bool, Error>;

    async fn put_model_guards(&self, row: ModelGuardsRow) -> Result<(), Error>;
}

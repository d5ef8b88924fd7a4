//! The model gateway's memory: what the operator sets, every call and what it cost, what was asked and answered.
//!
//! What is committed together:
//! - A provider, a virtual key or a budget and its facts. Routes, prices and guards are written alone.
//! - The end of a call and its facts, once: whoever comes second changes nothing and tells nothing.
//!
//! What is kept in front of it, and how that stays true (all in `atoll-models`):
//! - The setup of each project, ready to plan calls with, read as a whole at the start ([`ModelSetupStore::model_setup`]) and
//!   changed after each commit by whoever made it. Other servers would learn of a change from the ledger (`provider.set`,
//!   `budget.set`, `model_key.created` and their opposites); routes, prices and guards tell it nothing yet.
//! - Virtual keys with their rates, in the same way. Who holds one is asked of identity for each call, and a revoked key is
//!   not found there.
//! - What each budget has spent and reserved, summed from calls when it is first needed and added to by each call. It is the
//!   one place that is exact for one server only: several would each allow as much as is left.
//! - [`ModelCallStore::open_model_calls`] is read when a server starts, which takes all of them for its predecessor's: rows do not
//!   say yet which server serves a call.
//!
//! What the locks of callers protect:
//! - `setup_lock` orders a commit and the change of the setup in memory, so that of two changes the later one stays in both.
//! - `settling` is held by each call from when the books know what it cost until its row says so, and alone while what was
//!   spent is read, so that no call is in neither.

mod bodies;
mod calls;
mod setup;

pub use bodies::{ModelBodies, ModelBodyStore};
pub use calls::{ModelCallRow, ModelCallStore, SpendBy, SpendQuery, SpendRow};
pub use setup::{
    ModelBudgetRow, ModelGuards, ModelGuardsRow, ModelKeyRow, ModelPriceRow, ModelProviderRow, ModelRates,
    ModelRouteRow, ModelSetup, ModelSetupStore, ModelTarget, ScreenRule,
};

/// All that is remembered of models.
pub trait ModelStore: ModelSetupStore + ModelCallStore + ModelBodyStore {}

impl<T: ModelSetupStore + ModelCallStore + ModelBodyStore> ModelStore for T {}

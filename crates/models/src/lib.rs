//! The model gateway's use cases: who may call which model, within which budget, through which provider; and what it cost.
//!
//! ```text
//!   request ── peek ── plan ── estimate ── reserve ──┬── open row (durable while the provider thinks)
//!                                                    └── attempts ── pass through, or translate ──> client
//!                                                                        └── settle: budgets, row, fact
//! ```
//! What must hold:
//! - What a call may cost at most is reserved in every budget before a provider hears of it, and again before another
//!   hears of it while the first may still charge. However it ends, it is settled exactly once: by its end, by whoever
//!   hears it out when the caller hangs up, or by the next server after a crash. Where a budget applies and nobody has told
//!   what was used, that is what was reserved.
//! - The first byte of an answer goes out when the row of its call is durable.
//! - An answer that has begun is never begun again elsewhere.
//! - A provider's key is lent by the broker for the moment in which a request is made ready.
//! - Nothing that was asked or answered is written down unless the operator wants it: rows and facts carry names, numbers and
//!   sizes. Answers are kept in memory for callers who ask for it.

mod admission;
mod attempts;
mod bodies;
mod cache;
mod conduct;
mod counting;
mod faults;
mod guards;
mod health;
mod keys;
mod lending;
mod listening;
mod outgoing;
mod reach;
mod refusals;
mod relay;
mod reports;
mod settlement;
mod settling;
mod setup;
mod spans;
mod whole;
mod wishes;
mod work;

use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_broker::Broker;
use atoll_gateway_core::{Books, Budget, MOST_SUBJECTS, Window};
use atoll_identity::Identity;
use atoll_policy::Floor;
use atoll_providers::{Providers, Reach, Timeouts};
use atoll_store::{ModelBudgetRow, Stores};
use atoll_turns::Turns;
use atoll_types::{CallOutcome, Fault, Id, ProjectId, Timestamp};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use admission::{Request, Who};
pub use attempts::Upstream;
pub use faults::Refusal;
pub use keys::{CreateModelKey, ModelKey};
pub use relay::{AnswerStream, Served};
pub use reports::{Metrics, Spend};
pub use setup::{BudgetView, ModelView, ProviderView, SetBudget, SetPrice, SetProvider, SetRoute};

use bodies::Bodies;
use cache::Cache;
use conduct::Unheard;
use faults::from_store;
use health::{Healths, Retries};
use keys::Keys;
use refusals::Refusals;
use settling::Settling;
use setup::ProjectSetup;

/// How long a starting server waits until what was spent is summed.
const SUMMED_AT_START: Duration = Duration::from_secs(10);
/// How long until a budget is summed again whose spending could not be read.
const SUMMED_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub struct Settings {
    pub timeouts: Timeouts,
    /// Where nobody else's may be.
    pub floor: Floor,
    /// Which addresses are this machine's own: nobody else's may be there either.
    pub is_own: fn(IpAddr) -> bool,
    /// For how long what was asked and answered is kept; `None`: not at all.
    pub keep_bodies: Option<Duration>,
    /// The wall clock; tests bring their own.
    pub now: fn() -> Timestamp,
}

/// The service. Cheap to clone; every clone is the same.
#[derive(Debug, Clone)]
pub struct Models {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    beyond_floor: Arc<dyn Reach>,
    runtime: tokio::runtime::Handle,
    store: Stores,
    identity: Identity,
    broker: Arc<Broker>,
    providers: Providers,
    setups: RwLock<HashMap<ProjectId, Arc<ProjectSetup>>>,
    keys: Keys,
    books: Mutex<Books>,
    settling: Settling,
    healths: Healths,
    cache: Cache,
    bodies: Option<Bodies>,
    retries: Retries,
    places: Turns<ProjectId>,
    /// Held while a project's setup changes, so that of two changes the later one stays.
    changing: Turns<ProjectId>,
    metrics: Metrics,
    refusals: Refusals,
    tasks: TaskTracker,
    unheard: Unheard,
    /// Nobody is heard out from now on.
    stopping: CancellationToken,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Models").finish_non_exhaustive()
    }
}

impl Models {
    /// Settles what an earlier server left open, and reads the setup.
    pub async fn start(
        settings: Settings,
        store: Stores,
        identity: Identity,
        broker: Arc<Broker>,
    ) -> Result<Self, Fault> {
        let providers =
            Providers::new(settings.timeouts).map_err(|error| Fault::internal(error.to_string()))?;
        let bodies = settings.keep_bodies.map(Bodies::new);
        let models = Self {
            inner: Arc::new(Inner {
                beyond_floor: Arc::new(reach::BeyondFloor::new(&settings)),
                runtime: tokio::runtime::Handle::current(),
                settings,
                store,
                identity,
                broker,
                providers,
                setups: RwLock::default(),
                keys: Keys::default(),
                books: Mutex::default(),
                settling: Settling::default(),
                healths: Healths::default(),
                cache: Cache::default(),
                bodies: bodies.transpose().map_err(Fault::internal)?,
                retries: Retries::default(),
                places: work::places(),
                changing: Turns::each(1),
                metrics: Metrics::default(),
                refusals: Refusals::default(),
                tasks: TaskTracker::new(),
                unheard: Unheard::default(),
                stopping: CancellationToken::new(),
            }),
        };
        models.settle_what_was_lost().await?;
        models.load().await?;
        Ok(models)
    }

    /// Waits until every call that has ended is written down. What nobody listens to any more ends now.
    pub async fn shutdown(&self) {
        self.inner.stopping.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    fn store(&self) -> &Stores {
        &self.inner.store
    }

    fn now(&self) -> Timestamp {
        (self.inner.settings.now)()
    }

    /// Does something that the shutdown waits for. Works from anywhere, also where something is dropped.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.inner.tasks.spawn_on(work, &self.inner.runtime);
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.inner.books.lock()
    }

    /// A killed server's calls may have cost something that nobody counted: what was reserved for them, at most. Where
    /// nothing was, what was sent is known, and what came back is not.
    async fn settle_what_was_lost(&self) -> Result<(), Fault> {
        let now = self.now();
        for mut call in self
            .store()
            .models
            .open_model_calls()
            .await
            .map_err(|e| from_store(&e))?
        {
            call.outcome = CallOutcome::Lost;
            call.ended_at = Some(now);
            call.estimated = true;
            call.cost = call.cost.max(call.reserved);
            call.error = Some("the server was killed meanwhile".into());
            let fact = settlement::fact(&call);
            self.store()
                .models
                .close_model_call(call, vec![fact])
                .await
                .map_err(|e| from_store(&e))?;
        }
        Ok(())
    }

    /// On start, with all of them closed. A server with very many calls does not wait for the last of their budgets.
    async fn sum_budgets(&self, rows: Vec<ModelBudgetRow>) {
        let models = self.clone();
        let summing = async move {
            for row in rows {
                let _one_at_a_time = models.inner.changing.take(&row.project).await;
                if models.inner.stopping.is_cancelled() {
                    return;
                }
                if models.setup(&row.project).has_budget(&row) {
                    models.enter_budget(row).await;
                }
            }
        };
        let summing = self.inner.tasks.spawn_on(summing, &self.inner.runtime);
        if tokio::time::timeout(SUMMED_AT_START, summing).await.is_err() {
            tracing::warn!(
                "budgets are still being summed; calls under those that are not are refused until they are"
            );
        }
    }

    /// Reads a budget's spending. One whose spending cannot be read lets nothing through until it can: that is its own
    /// project's trouble, not the server's.
    async fn enter_budget(&self, row: ModelBudgetRow) {
        let Err(fault) = self.sum_budget(&row).await else {
            return;
        };
        tracing::error!(budget = %row.id, %fault, "what was spent of a budget cannot be read; calls under it are refused until it can");
        self.books().close(budget_of(&row));
        let models = self.clone();
        self.spawn(async move {
            loop {
                tokio::select! {
                    () = models.inner.stopping.cancelled() => return,
                    () = tokio::time::sleep(SUMMED_AGAIN) => {}
                }
                let _one_at_a_time = models.inner.changing.take(&row.project).await;
                // Whoever changed or deleted it meanwhile has seen to it.
                if !models.setup(&row.project).has_budget(&row) || models.sum_budget(&row).await.is_ok() {
                    return;
                }
            }
        });
    }

    /// From the rows of the calls in its present window. Those under way the books know.
    async fn sum_budget(&self, row: &ModelBudgetRow) -> Result<(), Fault> {
        let gate = self.inner.settling.of(&row.project);
        let _none_in_between = gate.write().await;
        let now = self.now();
        let from = Window::containing(row.window, now).start;
        let spent = self
            .store()
            .models
            .model_spent(
                &row.project,
                row.scope,
                row.subject.as_deref(),
                row.window,
                from,
                MOST_SUBJECTS,
            )
            .await;
        let spent = spent.map_err(|e| from_store(&e))?;
        self.books().set(budget_of(row), spent, now);
        Ok(())
    }
}

fn budget_of(row: &ModelBudgetRow) -> Budget {
    Budget {
        id: row.id.clone(),
        project: row.project.clone(),
        name: row.name.clone(),
        scope: row.scope,
        subject: row.subject.clone(),
        window: row.window,
        limit: row.limit,
        alert_percent: row.alert_percent,
    }
}

/// A fresh id.
fn fresh<K: atoll_types::Kind>() -> Id<K> {
    Id::from_entropy(random())
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel's random source works, or nothing here is safe");
    bytes
}

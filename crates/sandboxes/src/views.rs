//! What callers see of rows, facts and the server.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

use atoll_node::{PoolView, Verdict};
use atoll_store::{FactQuery, SandboxRow, Scope};
use atoll_types::{Fault, Isolation, ProjectId, SandboxId, Timestamp};

use crate::faults::{from_channel, from_store, unexpected};
use crate::{Caller, Metrics, Sandbox, Sandboxes};

#[derive(Debug, Clone)]
pub struct FactView {
    pub seq: i64,
    pub at: Timestamp,
    pub kind: String,
    pub sandbox: Option<SandboxId>,
    /// The fact's own data, as JSON.
    pub data: String,
}

pub use atoll_store::UsageTotal;

/// How long a sum may tell of facts that are gone: summing all of a long ledger takes seconds, and some go all the time.
const SUMS_STAND: u64 = 60 * 60 * 1000;

/// What each project has used, and up to which fact that was summed; since when it is.
pub(crate) type Summed = Mutex<HashMap<ProjectId, (Timestamp, Arc<tokio::sync::Mutex<(UsageTotal, i64)>>)>>;

#[derive(Debug, Clone)]
pub struct Overview {
    pub tiers: Vec<TierView>,
    pub running: usize,
    pub pooled: usize,
    pub pools: Vec<PoolView>,
}

#[derive(Debug, Clone)]
pub struct TierView {
    pub isolation: Isolation,
    pub available: bool,
    pub detail: String,
    pub fix: Option<String>,
}

impl Sandboxes {
    /// What it consumes now: as the host counts it and, if it answers, as the guest sees itself.
    pub async fn metrics(&self, caller: &Caller, id: &SandboxId) -> Result<Metrics, Fault> {
        let (cell, guest, _in_use) = self.enter(caller, id).await?;
        let isolation = cell.seen.borrow().isolation;
        let instance = cell
            .instance()
            .ok_or_else(|| Fault::internal("a running sandbox has no instance"))?;
        let usage = self.node().usage(isolation, &instance.id).await?;
        let asked = guest.call(&atoll_guest_protocol::Request::Usage);
        let guest = match tokio::time::timeout(std::time::Duration::from_secs(2), asked).await {
            Ok(Ok(Some(atoll_guest_protocol::Message::Usage(guest)))) => Some(guest),
            Ok(Ok(_)) => return Err(unexpected()),
            Ok(Err(error)) => return Err(from_channel(&cell, error).await),
            Err(_) => None,
        };
        Ok(Metrics {
            usage,
            guest,
            at: self.now(),
        })
    }

    /// Changes when there are facts that the caller may see, to the number of the ledger's last one.
    pub fn ledger_growth(&self, caller: &Caller) -> tokio::sync::watch::Receiver<i64> {
        self.store().ledger.ledger_growth(Some(caller.project()))
    }

    /// Facts after `after_seq` of these kinds (none named: of all), oldest first; and after which to ask on, unless all of
    /// them have been looked at. One answer looks at a bounded number, so that it may have less than was asked for, or none.
    pub async fn facts(
        &self,
        caller: &Caller,
        sandbox: Option<&SandboxId>,
        kinds: &[&str],
        after_seq: i64,
        limit: usize,
    ) -> Result<(Vec<FactView>, Option<i64>), Fault> {
        let query = FactQuery {
            project: caller.project().clone(),
            sandbox: sandbox.cloned(),
            kinds: kinds.iter().map(|&kind| kind.to_owned()).collect(),
            after_seq,
            limit,
        };
        let page = self.store().ledger.facts_page(query).await;
        let page = page.map_err(|e| from_store(&e))?;
        let views = page
            .rows
            .into_iter()
            .map(|row| {
                Ok(FactView {
                    seq: row.seq,
                    at: row.at,
                    kind: row.fact.kind().to_owned(),
                    data: row.fact.data().map_err(|e| from_store(&e))?.to_string(),
                    sandbox: row.sandbox,
                })
            })
            .collect::<Result<_, Fault>>()?;
        Ok((views, page.next))
    }

    /// All that was metered, for the project or one sandbox of it.
    pub async fn usage_total(
        &self,
        caller: &Caller,
        sandbox: Option<&SandboxId>,
    ) -> Result<UsageTotal, Fault> {
        let project = caller.project();
        let Some(sandbox) = sandbox else {
            return self.usage_of_project(project).await;
        };
        let scope = Scope::Sandbox(project.clone(), sandbox.clone());
        self.store()
            .ledger
            .usage_total(scope, Timestamp(0), Timestamp(i64::MAX))
            .await
            .map_err(|e| from_store(&e))
    }

    /// A project's ledger is long, so what was summed once is remembered, and facts that came since are added.
    async fn usage_of_project(&self, project: &ProjectId) -> Result<UsageTotal, Fault> {
        let known = {
            let mut all = self.inner.usage.lock();
            let begun = all.entry(project.clone());
            Arc::clone(&begun.or_insert_with(|| (self.now(), Arc::default())).1)
        };
        // One at a time for each project: who waits finds the sum.
        let mut known = known.lock().await;
        *known = self
            .store()
            .ledger
            .usage_since(project, *known)
            .await
            .map_err(|e| from_store(&e))?;
        Ok(known.0)
    }

    /// Facts are gone: what was summed a while ago is summed anew when somebody asks.
    pub(crate) fn forget_usage(&self) {
        let now = self.now();
        let mut all = self.inner.usage.lock();
        all.retain(|_, (since, _)| now.millis_since(*since) < SUMS_STAND);
    }

    /// How many sandboxes of a project run now.
    pub fn running_of(&self, project: &ProjectId) -> usize {
        self.live()
            .values()
            .filter(|cell| cell.project == *project && cell.seen.borrow().record.state.holds_instance())
            .count()
    }

    /// Whether a caller may know of a pool: by its name it finds the template that is in there.
    pub fn sees_pool(&self, caller: &Caller, pool: &PoolView) -> bool {
        let operators = self.identity().default_project();
        let found = |project: &ProjectId| self.usable_template(project, &pool.template);
        caller.project() == operators
            || found(operators).is_ok_and(|held| found(caller.project()).is_ok_and(|own| own.id == held.id))
    }

    /// For metrics, the info page and people.
    pub async fn overview(&self) -> Overview {
        let pools = self.node().pools().await;
        Overview {
            tiers: self
                .node()
                .offer()
                .tiers
                .iter()
                .map(|probe| {
                    let (detail, fix) = match &probe.verdict {
                        Verdict::Works { detail, .. } => (detail.clone(), None),
                        Verdict::Unavailable { reason, remedy } => (reason.clone(), remedy.clone()),
                    };
                    TierView {
                        isolation: probe.isolation,
                        available: probe.works(),
                        detail,
                        fix,
                    }
                })
                .collect(),
            running: self
                .live()
                .values()
                .filter(|cell| cell.seen.borrow().record.state.holds_instance())
                .count(),
            pooled: pools.iter().map(|pool| pool.ready).sum(),
            pools,
        }
    }
}

pub(crate) fn sandbox(row: SandboxRow) -> Sandbox {
    Sandbox {
        id: row.id,
        project: row.project,
        spec: row.spec,
        template: row.template,
        isolation: row.isolation,
        state: row.record.state,
        instance: row.record.instance,
        created_at: row.record.created_at,
        started_at: row.record.started_at,
        ended_at: row.record.ended_at,
        deadline: row.record.deadline,
        saved: row.record.saved,
        end: row.record.end,
    }
}

//! What calls were made and what they cost: rows, sums, and counters for Prometheus.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use atoll_store::{Cursor, ModelCallRow, Page, SpendQuery, SpendRow, UsageTotal};
use atoll_types::{Code, Fault, ModelCallId, ProjectId, SandboxId, Usd};

use crate::Models;
use crate::faults::from_store;

/// Spending, and what was sent to whom.
pub type Spend = Vec<SpendRow>;

impl Models {
    pub async fn model_call(&self, project: &ProjectId, id: &ModelCallId) -> Result<ModelCallRow, Fault> {
        let found = self
            .store()
            .models
            .model_call(project, id)
            .await
            .map_err(|e| from_store(&e))?;
        found.ok_or_else(|| Fault::new(Code::CallNotFound, format!("there is no model call {id}")))
    }

    /// Newest first.
    pub async fn model_calls(
        &self,
        project: &ProjectId,
        sandbox: Option<&SandboxId>,
        cursor: Option<String>,
        limit: usize,
    ) -> Result<Page<ModelCallRow>, Fault> {
        let after: Option<Cursor> = cursor
            .map(|text| text.parse())
            .transpose()
            .map_err(|why: String| Fault::new(Code::InvalidCursor, why))?;
        self.store()
            .models
            .model_calls(project, sandbox, after, limit)
            .await
            .map_err(|e| from_store(&e))
    }

    pub async fn spend(&self, query: SpendQuery) -> Result<Spend, Fault> {
        self.store()
            .models
            .model_spend(query)
            .await
            .map_err(|e| from_store(&e))
    }

    /// The same, with what sandboxes used in each group; groups that called no model come last.
    pub async fn spend_beside_compute(
        &self,
        query: SpendQuery,
    ) -> Result<Vec<(SpendRow, UsageTotal)>, Fault> {
        let compute = self
            .store()
            .ledger
            .compute_beside(query.clone())
            .await
            .map_err(|e| from_store(&e))?;
        let mut compute: BTreeMap<String, UsageTotal> = compute.into_iter().collect();
        let spend = self.spend(query).await?;
        let mut rows: Vec<(SpendRow, UsageTotal)> = spend
            .into_iter()
            .map(|row| {
                let used = compute.remove(&row.group).unwrap_or_default();
                (row, used)
            })
            .collect();
        rows.extend(compute.into_iter().map(|(group, used)| {
            (
                SpendRow {
                    group,
                    ..SpendRow::default()
                },
                used,
            )
        }));
        Ok(rows)
    }
}

/// Counters since the start. Labels are names of the operator's choosing: providers and models, never callers.
#[derive(Debug, Default)]
pub struct Metrics {
    calls: Mutex<BTreeMap<(String, String, &'static str), Counted>>,
    refused_by_budget: AtomicU64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    calls: u64,
    input: u64,
    output: u64,
    cost: Usd,
    unpriced: u64,
}

/// Names of models come from callers; beyond this many they are counted together.
const MOST_SERIES: usize = 500;

impl Metrics {
    pub(crate) fn settled(&self, row: &ModelCallRow) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let known = calls.len() < MOST_SERIES;
        let model = if known {
            row.model.clone()
        } else {
            "other".to_owned()
        };
        let counted = calls
            .entry((row.provider.clone(), model, row.outcome.name()))
            .or_default();
        counted.calls += 1;
        counted.input += row.usage.total_input();
        counted.output += row.usage.total_output();
        counted.cost += row.cost;
        counted.unpriced += u64::from(row.price_version.is_none());
    }

    pub(crate) fn refused_by_budget(&self) {
        self.refused_by_budget.fetch_add(1, Ordering::Relaxed);
    }

    /// In Prometheus' text form.
    pub fn write(&self, out: &mut String) {
        use std::fmt::Write as _;
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let mut family = |name: &str, help: &str, value: fn(&Counted) -> String| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
            for ((provider, model, outcome), counted) in calls.iter() {
                let model = model.replace(['\\', '"', '\n'], "_");
                let _ = writeln!(
                    out,
                    "{name}{{provider=\"{provider}\",model=\"{model}\",outcome=\"{outcome}\"}} {}",
                    value(counted)
                );
            }
        };
        family(
            "atoll_model_calls_total",
            "Calls of models that have ended.",
            |c| c.calls.to_string(),
        );
        family(
            "atoll_model_input_tokens_total",
            "Tokens that models have read.",
            |c| c.input.to_string(),
        );
        family(
            "atoll_model_output_tokens_total",
            "Tokens that models have written.",
            |c| c.output.to_string(),
        );
        family(
            "atoll_model_cost_usd_total",
            "What calls of models have cost.",
            |c| c.cost.to_string(),
        );
        family(
            "atoll_model_unpriced_total",
            "Calls of models without a price.",
            |c| c.unpriced.to_string(),
        );
        drop(calls);
        let _ = writeln!(
            out,
            "# HELP atoll_model_budget_refusals_total Calls that a budget refused.\n\
             # TYPE atoll_model_budget_refusals_total counter\natoll_model_budget_refusals_total {}",
            self.refused_by_budget.load(Ordering::Relaxed)
        );
    }
}

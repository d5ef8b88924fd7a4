//! What calls were made and what they cost: rows, sums, and counters for Prometheus.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use atoll_store::{Cursor, ModelCallRow, Page, SpendQuery, SpendRow, UsageTotal};
use atoll_types::{Code, Fault, ModelCallId, ProjectId, SandboxId, Timestamp, Usd};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

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

    /// Calls and usage from before this time may be missing in what is summed; `None`: none are.
    pub async fn complete_from(&self, project: &ProjectId) -> Result<Option<Timestamp>, Fault> {
        let from = self.store().ledger.complete_from(project).await;
        from.map_err(|e| from_store(&e))
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

/// Counters since the start. Labels are names that projects choose: providers and models, never callers.
#[derive(Debug, Default)]
pub struct Metrics {
    calls: Mutex<BTreeMap<Labels, Counted>>,
    refused_by_budget: Counter,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct Labels {
    provider: String,
    model: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    calls: u64,
    input: u64,
    output: u64,
    cost: Usd,
    unpriced: u64,
}

/// Names of models come from callers, and those of providers from projects; beyond this many they are counted together.
const MOST_SERIES: usize = 500;

impl Metrics {
    pub(crate) fn settled(&self, row: &ModelCallRow) {
        let counted = Counted {
            calls: 1,
            input: row.usage.total_input(),
            output: row.usage.total_output(),
            cost: row.cost,
            unpriced: u64::from(row.price_version.is_none()),
        };
        self.settle(&row.provider, &row.model, row.outcome.name(), counted);
    }

    fn settle(&self, provider: &str, model: &str, outcome: &'static str, more: Counted) {
        let mut calls = self.calls.lock();
        let mut labels = Labels {
            provider: provider.to_owned(),
            model: model.to_owned(),
            outcome,
        };
        if calls.len() >= MOST_SERIES && !calls.contains_key(&labels) {
            "other".clone_into(&mut labels.provider);
            "other".clone_into(&mut labels.model);
        }
        let counted = calls.entry(labels).or_default();
        counted.calls += more.calls;
        counted.input += more.input;
        counted.output += more.output;
        counted.cost += more.cost;
        counted.unpriced += more.unpriced;
    }

    pub(crate) fn refused_by_budget(&self) {
        self.refused_by_budget.inc();
    }

    /// Adds what was counted to what is about to be told.
    pub fn register(&self, registry: &mut Registry) {
        let calls = self.calls.lock();
        let mut family = |name: &str, help: &str, value: fn(&Counted) -> u64| {
            let counters = Family::<Labels, Counter>::default();
            for (labels, counted) in calls.iter() {
                counters.get_or_create(labels).inc_by(value(counted));
            }
            registry.register(name, help, counters);
        };
        family("atoll_model_calls", "Calls of models that have ended", |c| {
            c.calls
        });
        family("atoll_model_input_tokens", "Tokens that models have read", |c| {
            c.input
        });
        family(
            "atoll_model_output_tokens",
            "Tokens that models have written",
            |c| c.output,
        );
        family("atoll_model_unpriced", "Calls of models without a price", |c| {
            c.unpriced
        });
        let costs = Family::<Labels, Counter<f64, AtomicU64>>::default();
        for (labels, counted) in calls.iter() {
            // Summed as it is booked; only what is told is rounded.
            let dollars = counted.cost.pico() as f64 / 1e12;
            costs.get_or_create(labels).inc_by(dollars);
        }
        drop(calls);
        registry.register("atoll_model_cost_usd", "What calls of models have cost", costs);
        registry.register(
            "atoll_model_budget_refusals",
            "Calls that a budget refused",
            self.refused_by_budget.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Metrics {
        fn count(&self, model: &str, cost: Usd) {
            self.count_of("acme", model, cost);
        }

        fn count_of(&self, provider: &str, model: &str, cost: Usd) {
            self.settle(
                provider,
                model,
                "ok",
                Counted {
                    calls: 1,
                    input: 10,
                    output: 5,
                    cost,
                    unpriced: 0,
                },
            );
        }

        fn text(&self) -> String {
            let mut registry = Registry::default();
            self.register(&mut registry);
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        }
    }

    #[test]
    fn calls_are_told_by_provider_model_and_outcome() {
        let metrics = Metrics::default();
        metrics.count("small", Usd::from_pico(100_000_000_000));
        metrics.count("small", Usd::from_pico(200_000_000_000));
        metrics.refused_by_budget();
        let text = metrics.text();
        let labels = "{provider=\"acme\",model=\"small\",outcome=\"ok\"}";
        for expected in [
            "# TYPE atoll_model_calls counter".to_owned(),
            format!("atoll_model_calls_total{labels} 2"),
            format!("atoll_model_input_tokens_total{labels} 20"),
            format!("atoll_model_output_tokens_total{labels} 10"),
            format!("atoll_model_cost_usd_total{labels} 0.3"),
            format!("atoll_model_unpriced_total{labels} 0"),
            "atoll_model_budget_refusals_total 1".to_owned(),
        ] {
            assert!(
                text.lines().any(|line| line == expected),
                "{expected} not in\n{text}"
            );
        }
    }

    /// A caller names models; nothing that they write may pass for a series of its own.
    #[test]
    fn a_name_stays_one_label() {
        let metrics = Metrics::default();
        metrics.count("a\"} 1\natoll_forged 1\n\\", Usd::ZERO);
        let text = metrics.text();
        assert!(
            !text.lines().any(|line| line.starts_with("atoll_forged")),
            "{text}"
        );
        assert!(text.contains(r#"model="a\"} 1\natoll_forged 1\n\\","#), "{text}");
    }

    #[test]
    fn beyond_so_many_names_they_are_counted_together_and_those_that_are_known_go_on() {
        let metrics = Metrics::default();
        for number in 0..MOST_SERIES + 10 {
            metrics.count(&format!("model-{number}"), Usd::ZERO);
        }
        for number in 0..MOST_SERIES {
            metrics.count_of(&format!("provider-{number}"), "m", Usd::ZERO);
        }
        metrics.count("model-0", Usd::ZERO);
        let text = metrics.text();
        let calls = |provider: &str, model: &str| {
            let start = format!(
                "atoll_model_calls_total{{provider=\"{provider}\",model=\"{model}\",outcome=\"ok\"}} "
            );
            text.lines()
                .find_map(|line| line.strip_prefix(&start)?.parse::<u64>().ok())
        };
        assert_eq!(calls("acme", "model-0"), Some(2));
        assert_eq!(calls("other", "other"), Some(MOST_SERIES as u64 + 10));
        assert_eq!(calls("acme", &format!("model-{MOST_SERIES}")), None);
        let series = text
            .lines()
            .filter(|line| line.starts_with("atoll_model_calls_total{"));
        assert_eq!(series.count(), MOST_SERIES + 1);
    }
}

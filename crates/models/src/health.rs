//! How targets fare: a breaker and a mean of their latency for each.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use atoll_gateway_core::{Breaker, Price, Target, TargetHealth};
use atoll_types::{ProjectId, Timestamp};

#[derive(Debug, Default)]
pub(crate) struct Healths(Mutex<HashMap<(ProjectId, Target), Health>>);

#[derive(Debug, Default)]
struct Health {
    breaker: Breaker,
    millis: Option<u64>,
}

/// Names come from callers; beyond this many, those that work are forgotten.
const MOST: usize = 10_000;

impl Healths {
    pub(crate) fn of(
        &self,
        project: &ProjectId,
        target: &Target,
        price: Option<&Price>,
        now: Timestamp,
    ) -> TargetHealth {
        let table = self.table();
        let health = table.get(&(project.clone(), target.clone()));
        TargetHealth {
            out: health.is_some_and(|health| !health.breaker.would_allow(now)),
            millis: health.and_then(|health| health.millis),
            pico: price.map(|price| {
                let rates = price.rates(0);
                (rates.input + rates.output).pico()
            }),
        }
    }

    pub(crate) fn enter(&self, project: &ProjectId, target: &Target, now: Timestamp) -> bool {
        let mut table = self.table();
        if table.len() > MOST {
            table.retain(|_, health| health.breaker != Breaker::default());
        }
        table
            .entry((project.clone(), target.clone()))
            .or_default()
            .breaker
            .enter(now)
    }

    pub(crate) fn record(
        &self,
        project: &ProjectId,
        target: &Target,
        worked: bool,
        millis: u64,
        now: Timestamp,
    ) {
        let mut table = self.table();
        let health = table.entry((project.clone(), target.clone())).or_default();
        health.breaker.record(worked, now);
        if worked {
            // A fifth of the newest, so that a slow spell is noticed within some calls and forgotten within some more.
            health.millis = Some(health.millis.map_or(millis, |mean| (mean * 4 + millis) / 5));
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<(ProjectId, Target), Health>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

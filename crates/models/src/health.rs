//! How targets fare: a breaker and a mean of their latency for each, on each wire; and how many calls may be tried again.
//!
//! What must hold: what one project asks for changes nothing for another, and what a caller can bring about alone, a request
//! that a provider refuses, changes nothing for anybody. Names come from callers, so what is kept is bounded: for each
//! project, and for all.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;

use atoll_dialects::Dialect;
use atoll_gateway_core::{Breaker, Price, RetryBudget, Target, TargetHealth};
use atoll_types::{ProjectId, Timestamp};

/// Targets of one project.
const MOST_OF_ONE: usize = 256;
/// Targets of all together.
const MOST: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Healths(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    projects: HashMap<ProjectId, OfOne>,
    /// How many there are in all.
    count: usize,
    /// Moves on with every call.
    clock: u64,
}

type OfOne = HashMap<(Target, Dialect), Health>;

#[derive(Debug, Default)]
struct Health {
    breaker: Breaker,
    millis: Option<u64>,
    /// When something was last recorded of it.
    used: u64,
}

/// What a call told about who answered it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    Works { millis: u64 },
    Fails,
}

/// A target, for a project, on the wire on which it is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) project: &'a ProjectId,
    pub(crate) target: &'a Target,
    pub(crate) speaks: Dialect,
}

impl Healths {
    pub(crate) fn of(&self, asked: Asked<'_>, price: Option<&Price>, now: Timestamp) -> TargetHealth {
        let table = self.table();
        let health = table.get(asked);
        TargetHealth {
            out: health.is_some_and(|health| !health.breaker.would_allow(now)),
            millis: health.and_then(|health| health.millis),
            pico: price.map(|price| {
                let rates = price.rates(0);
                (rates.input + rates.output).pico()
            }),
        }
    }

    pub(crate) fn enter(&self, asked: Asked<'_>, now: Timestamp) -> bool {
        let mut table = self.table();
        let of_one = table.projects.get_mut(asked.project);
        let health = of_one.and_then(|of_one| of_one.get_mut(&(asked.target.clone(), asked.speaks)));
        // Of whom nothing is known, nothing bad is.
        health.is_none_or(|health| health.breaker.enter(now))
    }

    pub(crate) fn record(&self, asked: Asked<'_>, sign: Sign, now: Timestamp) {
        let mut table = self.table();
        table.clock += 1;
        let used = table.clock;
        let health = table.entry(asked);
        health.used = used;
        health.breaker.record(sign != Sign::Fails, now);
        if let Sign::Works { millis } = sign {
            // A fifth of the newest, so that a slow spell is noticed within some calls and forgotten within some more.
            health.millis = Some(health.millis.map_or(millis, |mean| (mean * 4 + millis) / 5));
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }
}

impl Table {
    fn get(&self, asked: Asked<'_>) -> Option<&Health> {
        self.projects
            .get(asked.project)?
            .get(&(asked.target.clone(), asked.speaks))
    }

    fn entry(&mut self, asked: Asked<'_>) -> &mut Health {
        if self.get(asked).is_none() {
            let own = self.projects.get(asked.project).map_or(0, HashMap::len);
            if own >= MOST_OF_ONE {
                self.forget_one_of(&asked.project.clone());
            } else if self.count >= MOST {
                let most = self.projects.iter().max_by_key(|(_, of_one)| of_one.len());
                if let Some(most) = most.map(|(project, _)| project.clone()) {
                    self.forget_one_of(&most);
                }
            }
            self.count += 1;
        }
        self.projects
            .entry(asked.project.clone())
            .or_default()
            .entry((asked.target.clone(), asked.speaks))
            .or_default()
    }

    /// Rather one that works than one that does not, and rather one that was not used for long.
    fn forget_one_of(&mut self, project: &ProjectId) {
        let Some(of_one) = self.projects.get_mut(project) else {
            return;
        };
        let oldest = of_one
            .iter()
            .min_by_key(|(_, health)| (health.breaker != Breaker::default(), health.used))
            .map(|(key, _)| key.clone());
        if oldest.is_some_and(|key| of_one.remove(&key).is_some()) {
            self.count -= 1;
        }
        if of_one.is_empty() {
            self.projects.remove(project);
        }
    }
}

/// How many calls may be tried again, for each project.
#[derive(Debug, Default)]
pub(crate) struct Retries(Mutex<HashMap<ProjectId, RetryBudget>>);

impl Retries {
    /// A call has begun.
    pub(crate) fn deposit(&self, project: &ProjectId) {
        let mut budgets = self.budgets();
        // Most projects retry nothing, and one of which nothing is known has a full budget.
        if let Some(budget) = budgets.get_mut(project) {
            budget.deposit();
            if *budget == RetryBudget::default() {
                budgets.remove(project);
            }
        }
    }

    /// Whether one more attempt may be made.
    pub(crate) fn withdraw(&self, project: &ProjectId) -> bool {
        self.budgets().entry(project.clone()).or_default().withdraw()
    }

    fn budgets(&self) -> MutexGuard<'_, HashMap<ProjectId, RetryBudget>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(0);

    fn project(n: usize) -> ProjectId {
        // Not all bits of a byte find their way into an id.
        let bytes = std::array::from_fn(|at| u8::try_from((n >> (4 * at.min(8))) & 15).unwrap());
        ProjectId::from_entropy(bytes)
    }

    fn target(n: usize) -> Target {
        Target {
            provider: "p".into(),
            model: n.to_string(),
        }
    }

    fn asked<'a>(project: &'a ProjectId, target: &'a Target) -> Asked<'a> {
        Asked {
            project,
            target,
            speaks: Dialect::Chat,
        }
    }

    #[test]
    fn names_that_callers_think_of_take_bounded_room() {
        let healths = Healths::default();
        let (one, broken) = (project(0), target(usize::MAX));
        for _ in 0..5 {
            healths.record(asked(&one, &broken), Sign::Fails, NOW);
        }
        let newest = 20 * MOST_OF_ONE;
        for n in 0..=newest {
            assert!(healths.enter(asked(&one, &target(n)), NOW));
            healths.record(asked(&one, &target(n)), Sign::Works { millis: 1 }, NOW);
        }
        assert_eq!(healths.table().count, MOST_OF_ONE);
        assert!(!healths.enter(asked(&one, &broken), NOW), "it is remembered");
        assert!(
            healths
                .of(asked(&one, &target(newest)), None, NOW)
                .millis
                .is_some()
        );
        assert!(healths.of(asked(&one, &target(0)), None, NOW).millis.is_none());
        for n in 1..2 * MOST {
            healths.record(asked(&project(n), &target(0)), Sign::Fails, NOW);
        }
        let table = healths.table();
        let counted: usize = table.projects.values().map(HashMap::len).sum();
        assert_eq!((table.count, counted), (MOST, MOST));
    }

    #[test]
    fn a_target_is_left_alone_on_the_wire_on_which_it_fails() {
        let healths = Healths::default();
        let (one, other, target) = (project(1), project(2), target(1));
        for _ in 0..5 {
            healths.record(asked(&one, &target), Sign::Fails, NOW);
        }
        assert!(!healths.enter(asked(&one, &target), NOW));
        let elsewhere = Asked {
            speaks: Dialect::Responses,
            ..asked(&one, &target)
        };
        assert!(healths.enter(elsewhere, NOW));
        assert!(healths.enter(asked(&other, &target), NOW));
    }

    #[test]
    fn each_project_has_retries_of_its_own() {
        let retries = Retries::default();
        let (one, other) = (project(1), project(2));
        while retries.withdraw(&one) {}
        assert!(retries.withdraw(&other));
        for _ in 0..1000 {
            retries.deposit(&one);
            retries.deposit(&other);
        }
        assert!(retries.budgets().is_empty(), "whole ones take no room");
    }
}

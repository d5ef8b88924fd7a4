//! From the reservation of a call to what it cost: whatever happens in between, exactly once.

use std::sync::Arc;
use std::time::Instant;

use atoll_gateway_core::{Reservation, Target, output_tokens};
use atoll_store::{Fact, ModelCallFact, ModelCallRow, NewFact};
use atoll_types::{CallOutcome, Fault, ModelUsage, Timestamp, Usd};
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};

use crate::admission::{Admitted, Who};
use crate::keys::ModelKey;
use crate::setup::ProjectSetup;
use crate::{Models, Request, fresh, spans};

/// A call under way. Dropping it settles it as what the caller gave up.
pub(crate) struct Open {
    models: Models,
    pub(crate) row: ModelCallRow,
    pub(crate) setup: Arc<ProjectSetup>,
    key: Option<Arc<ModelKey>>,
    estimated_input: u64,
    began: Instant,
    reservation: Option<Reservation>,
    /// Whether the row is durable.
    written: Shared<BoxFuture<'static, bool>>,
    span: tracing::Span,
    /// What passed by so far, for when it is given up.
    pub(crate) seen: Progress,
}

/// How far an answer has come.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// A provider may charge for it: it was asked, and has neither refused nor said what it used.
    pub(crate) owed: bool,
    pub(crate) usage: Option<ModelUsage>,
    pub(crate) finished: bool,
    pub(crate) written: u64,
    pub(crate) finish: Option<String>,
}

impl Open {
    /// Begins a call: its row is on its way to the disk.
    pub(crate) fn begin(
        models: &Models,
        who: &Who,
        request: &Request,
        admitted: Admitted,
    ) -> (Self, Vec<Target>) {
        let Admitted {
            setup,
            asked,
            stream,
            targets,
            estimated_input,
            reservation,
            tags,
            user,
            ..
        } = admitted;
        let first = &targets[0];
        let row = ModelCallRow {
            id: fresh(),
            project: who.spender.project.clone(),
            key: who.spender.key.clone(),
            sandbox: who.spender.sandbox.clone(),
            workflow: who.spender.workflow.clone(),
            run: who.spender.run.clone(),
            end_user: user,
            tags,
            dialect: request.dialect.name().into(),
            asked,
            provider: first.provider.clone(),
            model: first.model.clone(),
            streamed: stream,
            started_at: models.now(),
            ended_at: None,
            outcome: CallOutcome::Open,
            attempts: 0,
            first_byte_millis: None,
            finish: None,
            error: None,
            // What it will have been if nobody ever counts: see `settle_what_was_lost`.
            usage: ModelUsage {
                input: estimated_input,
                ..ModelUsage::default()
            },
            estimated: true,
            price_version: setup.price_of(first).map(|_| setup.prices().version().to_owned()),
            reserved: reservation.amount(),
            cost: Usd::ZERO,
        };
        let span = spans::begin(&row, request.dialect);
        let mut stored = row.clone();
        stored.cost = cost(&setup, &row);
        let (store, id) = (models.store().clone(), row.id.clone());
        let writing = models.inner.tasks.spawn(async move {
            let written = store.open_model_call(stored).await;
            if let Err(error) = &written {
                tracing::error!(%error, call = %id, "a model call could not be written down");
            }
            written.is_ok()
        });
        models.retries().deposit();
        let open = Self {
            models: models.clone(),
            row,
            setup,
            key: who.key.clone(),
            estimated_input,
            began: Instant::now(),
            reservation: Some(reservation),
            written: writing.map(|written| written.unwrap_or(false)).boxed().shared(),
            span,
            seen: Progress::default(),
        };
        (open, targets)
    }

    /// Waits until the row is durable.
    pub(crate) async fn durable(&self) -> Result<(), Fault> {
        if self.written.clone().await {
            return Ok(());
        }
        Err(Fault::internal(
            "the call could not be written down, so it is not made",
        ))
    }

    pub(crate) fn elapsed_millis(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Who answers.
    pub(crate) fn answered_by(&mut self, target: &Target) {
        self.row.provider.clone_from(&target.provider);
        self.row.model.clone_from(&target.model);
        self.row.first_byte_millis = Some(self.elapsed_millis());
    }

    pub(crate) fn done(mut self) -> ModelCallRow {
        self.settle(CallOutcome::Done, None)
    }

    pub(crate) fn failed(mut self, why: &str) -> ModelCallRow {
        self.settle(CallOutcome::Failed, Some(why))
    }

    fn settle(&mut self, outcome: CallOutcome, why: Option<&str>) -> ModelCallRow {
        let Some(reservation) = self.reservation.take() else {
            return self.row.clone();
        };
        let now = self.models.now();
        let target = Target {
            provider: self.row.provider.clone(),
            model: self.row.model.clone(),
        };
        let seen = &self.seen;
        // Streams tell what was read at their beginning, and what was written at their end.
        let (usage, estimated) = match seen.usage {
            Some(usage) if seen.finished => (usage, false),
            Some(usage) => {
                let output = usage.output.max(output_tokens(seen.written));
                (ModelUsage { output, ..usage }, true)
            }
            None if seen.owed => {
                let output = output_tokens(seen.written);
                let usage = ModelUsage {
                    input: self.estimated_input,
                    output,
                    ..ModelUsage::default()
                };
                (usage, true)
            }
            None => (ModelUsage::default(), false),
        };
        let row = &mut self.row;
        row.outcome = outcome;
        row.ended_at = Some(now);
        row.usage = usage;
        row.estimated = estimated;
        row.finish.clone_from(&seen.finish);
        row.error = why.map(|why| why.chars().take(300).collect());
        row.price_version = self
            .setup
            .price_of(&target)
            .map(|_| self.setup.prices().version().to_owned());
        row.cost = cost(&self.setup, row);
        if let Some(key) = &self.key {
            key.correct(self.estimated_input, usage.total());
        }
        let alerts = self.models.books().settle(&reservation, row.cost, now);
        self.models.inner.metrics.settled(row);
        spans::end(&self.span, row, &self.setup);
        let mut facts = vec![fact(row)];
        facts.extend(alerts.into_iter().map(|alert| {
            tracing::warn!(budget = %alert.budget.name, subject = %alert.subject, spent = %alert.spent, "a budget is nearly spent");
            NewFact {
                at: now,
                project: row.project.clone(),
                sandbox: None,
                fact: Fact::BudgetAlert {
                    budget: alert.budget.name,
                    subject: alert.subject,
                    spent: alert.spent,
                    limit: alert.budget.limit,
                },
            }
        }));
        let (store, written, row) = (self.models.store().clone(), self.written.clone(), row.clone());
        let settled = row.clone();
        self.models.inner.tasks.spawn(async move {
            // What was never begun in the store cannot be completed there.
            if !written.await {
                return;
            }
            let id = row.id.clone();
            if let Err(error) = store.close_model_call(row, facts).await {
                tracing::error!(%error, call = %id, "a model call could not be settled; the next start will");
            }
        });
        settled
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // Some hang up as soon as they have heard the end.
        let heard_all = self.seen.finished && self.seen.usage.is_some();
        self.settle(
            if heard_all {
                CallOutcome::Done
            } else {
                CallOutcome::Cancelled
            },
            None,
        );
    }
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open")
            .field("call", &self.row.id)
            .finish_non_exhaustive()
    }
}

fn cost(setup: &ProjectSetup, row: &ModelCallRow) -> Usd {
    let target = Target {
        provider: row.provider.clone(),
        model: row.model.clone(),
    };
    setup
        .price_of(&target)
        .map_or(Usd::ZERO, |price| price.cost(&row.usage))
}

/// A call that has ended, for the ledger.
pub(crate) fn fact(row: &ModelCallRow) -> NewFact {
    let at = row.ended_at.unwrap_or(row.started_at);
    NewFact {
        at,
        project: row.project.clone(),
        sandbox: row.sandbox.clone(),
        fact: Fact::ModelCalled(ModelCallFact {
            call: row.id.clone(),
            asked: row.asked.clone(),
            provider: row.provider.clone(),
            model: row.model.clone(),
            outcome: row.outcome,
            usage: row.usage,
            estimated: row.estimated,
            cost: row.cost,
            price_version: row.price_version.clone(),
            duration_millis: Timestamp::millis_since(at, row.started_at),
            key: row.key.clone(),
            workflow: row.workflow.clone(),
            run: row.run.clone(),
        }),
    }
}

//! From the reservation of a call to what it cost: whatever happens in between, exactly once.
//!
//! What must hold: where a budget applies, a call is booked at what its provider says that it used, once it has said so for all
//! of it, and else at what was reserved. Every attempt counts that a provider may charge for, not only the last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use atoll_gateway_core::{Reservation, Spender, Target, output_tokens};
use atoll_store::{Fact, ModelCallFact, ModelCallRow, NewFact};
use atoll_types::{CallOutcome, Fault, ModelUsage, Timestamp, Usd};
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};

use crate::admission::{Admitted, Money, Who};
use crate::faults::from_store;
use crate::keys::ModelKey;
use crate::setup::ProjectSetup;
use crate::{Models, Refusal, Request, fresh, spans};

/// How long until a call is settled again that could not be written down.
const SETTLED_AGAIN: Duration = Duration::from_secs(1);

/// A call under way. Dropping it settles it as what the caller gave up.
pub(crate) struct Open {
    pub(crate) models: Models,
    spender: Spender,
    pub(crate) row: ModelCallRow,
    pub(crate) setup: Arc<ProjectSetup>,
    key: Option<Arc<ModelKey>>,
    estimated_input: u64,
    began: Instant,
    /// The first is for the attempt under way, the others for those before it; empty once it is settled.
    reservations: Vec<Reservation>,
    /// What one attempt may cost.
    most: Usd,
    /// A budget applies.
    pub(crate) is_capped: bool,
    /// The limit that providers are to be given where there is none.
    pub(crate) limit: Option<u64>,
    /// What earlier attempts may have cost, of which nobody has told.
    lost: Usd,
    unpriced: bool,
    /// The caller has hung up.
    pub(crate) gone: Arc<AtomicBool>,
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
    /// The model has stopped.
    pub(crate) finished: bool,
    /// The answer is over, and so the usage is that of all of it.
    pub(crate) complete: bool,
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
            money: Money { reservation, limit },
            unpriced,
            tags,
            user,
            ..
        } = admitted;
        let first = &targets[0];
        // Where no budget applied, what is known of it is a guess, which nobody is charged.
        let is_capped = reservation.is_capped();
        let most = if is_capped {
            reservation.amount()
        } else {
            Usd::ZERO
        };
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
            reserved: most,
            cost: Usd::ZERO,
        };
        let span = spans::begin(&row, request.dialect);
        let mut stored = row.clone();
        stored.cost = cost(&setup, &row);
        let (store, id) = (models.store().clone(), row.id.clone());
        let writing = async move {
            let written = store.models.open_model_call(stored).await;
            if let Err(error) = &written {
                tracing::error!(%error, call = %id, "a model call could not be written down");
            }
            written.is_ok()
        };
        let writing = models.inner.tasks.spawn_on(writing, &models.inner.runtime);
        models.inner.retries.deposit(&who.spender.project);
        let open = Self {
            models: models.clone(),
            spender: who.spender.clone(),
            row,
            setup,
            key: who.key.clone(),
            estimated_input,
            began: Instant::now(),
            most,
            is_capped,
            reservations: vec![reservation],
            limit,
            lost: Usd::ZERO,
            unpriced,
            gone: Arc::default(),
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

    pub(crate) fn is_abandoned(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// An attempt has failed that its provider may charge for.
    pub(crate) fn lost(&mut self, target: &Target) {
        let sent = ModelUsage {
            input: self.estimated_input,
            ..ModelUsage::default()
        };
        let sent = self.setup.price_of(target).map(|price| price.cost(&sent));
        self.lost += sent.unwrap_or_default().max(self.most);
        self.seen.owed = false;
    }

    /// Sets aside what another attempt may cost, beside what the lost ones may have cost; durable before it is made.
    pub(crate) async fn reserve_again(&mut self) -> Result<(), Fault> {
        if !self.is_capped || self.lost == Usd::ZERO {
            return Ok(());
        }
        let have: Usd = self.reservations.iter().map(Reservation::amount).sum();
        if have >= self.lost + self.most {
            return Ok(());
        }
        let more = self
            .models
            .books()
            .reserve(&self.spender, self.most, self.models.now())
            .map_err(|exhausted| *Refusal::from(exhausted).fault)?;
        self.reservations.push(more);
        self.row.reserved = have + self.most;
        self.durable().await?;
        let (id, reserved) = (self.row.id.clone(), self.row.reserved);
        let raised = self.models.store().models.raise_model_call(id, reserved).await;
        raised.map_err(|e| from_store(&e))
    }

    pub(crate) fn done(mut self) -> ModelCallRow {
        self.settle(CallOutcome::Done, None)
    }

    pub(crate) fn failed(mut self, why: &str) -> ModelCallRow {
        self.settle(CallOutcome::Failed, Some(why))
    }

    fn settle(&mut self, outcome: CallOutcome, why: Option<&str>) -> ModelCallRow {
        let reservations = std::mem::take(&mut self.reservations);
        if reservations.is_empty() {
            return self.row.clone();
        }
        let now = self.models.now();
        let target = Target {
            provider: self.row.provider.clone(),
            model: self.row.model.clone(),
        };
        let seen = &self.seen;
        let (usage, estimated) = match seen.usage {
            // Some say zero where they have not counted; whoever was asked has read something.
            Some(usage) if seen.complete && usage.total() > 0 => (usage, false),
            // Streams tell what was read at their beginning, and what was written at their end.
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
        row.outcome = match outcome {
            // It came to its end, but not for the caller.
            CallOutcome::Done if self.gone.load(Ordering::Relaxed) => CallOutcome::Cancelled,
            outcome => outcome,
        };
        row.ended_at = Some(now);
        row.usage = usage;
        row.estimated = estimated || self.unpriced || self.lost > Usd::ZERO;
        row.finish.clone_from(&seen.finish);
        row.error = why.map(|why| why.chars().take(300).collect());
        row.price_version = self
            .setup
            .price_of(&target)
            .map(|_| self.setup.prices().version().to_owned());
        let known = cost(&self.setup, row);
        row.cost = if estimated { known.max(self.most) } else { known } + self.lost;
        if let Some(key) = &self.key {
            key.correct(self.estimated_input, usage.total());
        }
        self.models.inner.metrics.settled(row);
        spans::end(&self.span, row, &self.setup);
        let (models, written, row) = (self.models.clone(), self.written.clone(), row.clone());
        let settled = row.clone();
        // At once, unless a budget is being set that may not know of it yet.
        let gate = models.inner.settling.of(&row.project);
        let now_settled = gate
            .clone()
            .try_read_owned()
            .ok()
            .map(|held| (held, models.book(&reservations, &row)));
        self.models.spawn(async move {
            let (_held, facts) = match now_settled {
                Some(done) => done,
                None => {
                    let held = gate.read_owned().await;
                    (held, models.book(&reservations, &row))
                }
            };
            // What was never begun in the store cannot be completed there.
            if !written.await {
                return;
            }
            models.close(row, facts).await;
        });
        settled
    }
}

impl Models {
    /// Writes down how a call ended, however often it takes: until then it would count as under way.
    async fn close(&self, row: ModelCallRow, facts: Vec<NewFact>) {
        while let Err(error) = self
            .store()
            .models
            .close_model_call(row.clone(), facts.clone())
            .await
        {
            tracing::error!(%error, call = %row.id, "a model call could not be settled; trying again, or the next start will");
            if matches!(error, atoll_store::Error::Closed) {
                return;
            }
            tokio::select! {
                () = self.inner.stopping.cancelled() => return,
                () = tokio::time::sleep(SETTLED_AGAIN) => {}
            }
        }
    }

    /// Tells the books what a call cost; what there is to write down about it.
    fn book(&self, reservations: &[Reservation], row: &ModelCallRow) -> Vec<NewFact> {
        let now = row.ended_at.unwrap_or(row.started_at);
        let mut alerts = Vec::new();
        {
            let mut books = self.books();
            let mut cost = row.cost;
            for reservation in reservations {
                alerts.extend(books.settle(reservation, cost, now));
                // Once; the others only give back what they hold.
                cost = Usd::ZERO;
            }
        }
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
        facts
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.settle(CallOutcome::Cancelled, None);
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

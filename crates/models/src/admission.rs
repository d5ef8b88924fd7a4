//! Whether a call may be made, and with what money.

use std::sync::Arc;
use std::time::Duration;

use atoll_dialects::{Dialect, Peek};
use atoll_gateway_core::{Reservation, Spender, Target, input_tokens};
use atoll_types::{Fault, FaultKind, Usd};
use bytes::Bytes;

use crate::faults::Refusal;
use crate::keys::ModelKey;
use crate::setup::ProjectSetup;
use crate::{Models, random, wishes};

/// What is reserved for an answer whose length neither the caller nor the price table limits.
const UNKNOWN_OUTPUT: u64 = 8192;

/// On whose behalf a call is made.
#[derive(Debug, Clone)]
pub struct Who {
    pub spender: Spender,
    /// The virtual key that it came with.
    pub key: Option<Arc<ModelKey>>,
    pub tags: Vec<String>,
}

/// A call as a front end hands it in.
#[derive(Debug)]
pub struct Request {
    pub dialect: Dialect,
    pub body: Bytes,
    /// Where the wire says it outside of the body.
    pub model: Option<String>,
    pub stream: Option<bool>,
    /// What the provider should hear, if it speaks the same wire.
    pub headers: Vec<(String, String)>,
    /// The answer may be one that was given to the same request before, and is kept for so long.
    pub keep: Option<Duration>,
}

/// A call that may be made.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub(crate) setup: Arc<ProjectSetup>,
    pub(crate) asked: String,
    pub(crate) stream: bool,
    /// A Chat Completions client wants to be told the usage at the end of the stream.
    pub(crate) wants_usage: bool,
    pub(crate) targets: Vec<Target>,
    pub(crate) estimated_input: u64,
    pub(crate) reservation: Reservation,
    pub(crate) tags: Vec<String>,
    pub(crate) user: Option<String>,
}

impl Models {
    /// `is_free`: no provider will be asked.
    pub(crate) fn admit(&self, who: &Who, request: &Request, is_free: bool) -> Result<Admitted, Refusal> {
        let peek = Peek::at(&request.body)?;
        let asked = request.model.clone().or_else(|| peek.model.clone());
        let Some(asked) = asked.filter(|model| !model.is_empty() && model.len() <= 200) else {
            let fault = Fault::invalid("model_missing", "the request names no model");
            return Err(Refusal {
                field: Some("model".into()),
                ..fault.into()
            });
        };
        let wished = wishes::read(&peek)?;
        refuse_other_prices(&peek)?;
        for model in std::iter::once(&asked).chain(&wished.wishes.fallbacks) {
            self.refuse_unlisted(who, model)?;
        }
        let now = self.now();
        let setup = self.setup(&who.spender.project);
        let project = &who.spender.project;
        let health = |target: &Target| {
            self.inner
                .healths
                .of(project, target, setup.price_of(target), now)
        };
        let targets = setup
            .catalogue
            .plan(&asked, &wished.wishes, health, u64::from_le_bytes(random()))?;

        self.refuse_blocked(who, &setup, &asked, &targets)?;
        let estimated_input = input_tokens(&request.body);
        if let Some(key) = &who.key
            && let Err(wait) = key.take(estimated_input, now)
        {
            let reason = format!("the key `{}` has used up its rate", key.row.name);
            self.note_refusal(who, &asked, "rate", &reason);
            let fault = Fault::new(FaultKind::LimitExceeded, "rate_limited", reason);
            let retry_after = Some(Duration::from_millis(wait));
            return Err(Refusal {
                retry_after,
                ..fault.hint("wait as long as `Retry-After` says").into()
            });
        }
        let reservation = if is_free {
            Ok(Reservation::default())
        } else {
            self.reserve(
                who,
                &setup,
                &asked,
                &targets,
                estimated_input,
                &peek,
                request.dialect,
            )
        };
        let reservation = reservation.inspect_err(|_| {
            // Nothing was used after all.
            if let Some(key) = &who.key {
                key.correct(estimated_input, 0);
            }
        })?;
        let mut tags = who.tags.clone();
        tags.extend(wished.tags);
        tags.truncate(32);
        Ok(Admitted {
            asked,
            stream: request.stream.unwrap_or(peek.stream),
            wants_usage: peek.wants_usage,
            targets,
            estimated_input,
            reservation,
            tags,
            user: wished.user,
            setup,
        })
    }

    /// A key may ask for the models that it names.
    pub(crate) fn refuse_unlisted(&self, who: &Who, model: &str) -> Result<(), Refusal> {
        let Some(key) = who.key.as_ref().filter(|key| !key.allows(model)) else {
            return Ok(());
        };
        let reason = format!("the key `{}` may not ask for `{model}`", key.row.name);
        self.note_refusal(who, model, "not_allowed", &reason);
        let fault = Fault::new(FaultKind::Forbidden, "model_not_allowed", reason);
        Err(fault
            .hint(format!("it may ask for {}", key.row.models.join(", ")))
            .into())
    }

    /// Sets aside what the dearest of the targets may cost.
    #[expect(
        clippy::too_many_arguments,
        reason = "all of them say how much; a struct would be built for this call alone"
    )]
    fn reserve(
        &self,
        who: &Who,
        setup: &ProjectSetup,
        asked: &str,
        targets: &[Target],
        input: u64,
        peek: &Peek,
        dialect: Dialect,
    ) -> Result<Reservation, Refusal> {
        let mut books = self.books();
        if !books.caps(&who.spender) {
            return Ok(Reservation::default());
        }
        let mut amount = Usd::ZERO;
        for target in targets {
            let Some(price) = setup.price_of(target) else {
                drop(books);
                let reason = format!(
                    "`{}` of provider `{}` has no price, so no budget can hold against it",
                    target.model, target.provider
                );
                self.note_refusal(who, asked, "budget", &reason);
                let fault = Fault::new(FaultKind::Forbidden, "model_unpriced", reason);
                return Err(fault
                    .hint("`atoll model price set` gives it one; 0 is a price")
                    .into());
            };
            let output = match dialect {
                Dialect::Embeddings | Dialect::AiSdkEmbeddings => 0,
                _ => {
                    let most = price.max_output.unwrap_or(UNKNOWN_OUTPUT);
                    let each = peek.max_output.map_or(most, |asked| {
                        price.max_output.map_or(asked, |most| asked.min(most))
                    });
                    each.saturating_mul(peek.choices)
                }
            };
            amount = amount.max(price.at_most(input, output));
        }
        books
            .reserve(&who.spender, amount, self.now())
            .map_err(|exhausted| {
                drop(books);
                self.inner.metrics.refused_by_budget();
                let refusal = Refusal::from(exhausted);
                self.note_refusal(who, asked, "budget", &refusal.fault.message);
                refusal
            })
    }
}

/// What costs more or less than the table says would make every sum wrong, so it is not passed on.
fn refuse_other_prices(peek: &Peek) -> Result<(), Refusal> {
    match peek.service_tier.as_deref() {
        None | Some("auto" | "default" | "standard" | "standard_only") => Ok(()),
        Some(tier) => {
            let reason = format!(
                "the service tier `{}` has prices of its own, which this gateway does not know",
                tier.escape_default()
            );
            let fault = Fault::invalid("service_tier_unsupported", reason);
            Err(Refusal {
                field: Some("service_tier".into()),
                ..fault.hint("leave `service_tier` out").into()
            })
        }
    }
}

//! Whether a call may be made, and with what money.
//!
//! What must hold: where a budget applies, what is reserved is the most that the call can cost, whatever the caller wrote into
//! it; that is read from what the provider will get. What has no price is refused then, by the name of its field; where none
//! applies it passes, and is booked as what is known of it.

use std::sync::Arc;
use std::time::Duration;

use atoll_dialects::{Demand, Dialect, Peek, Unpriced};
use atoll_gateway_core::{Most, Price, Reading, Reservation, Spender, Target, most_input_tokens};
use atoll_types::{Code, Fault, Usd};
use bytes::Bytes;

use crate::faults::Refusal;
use crate::health::Asked;
use crate::keys::ModelKey;
use crate::outgoing::{Outgoing, wire_between};
use crate::setup::ProjectSetup;
use crate::{Models, faults, outgoing, random, wishes};

/// The limit that a provider is given where neither the caller nor the price table has one and a budget applies.
const OWN_LIMIT: u64 = 8192;

/// On whose behalf a call is made.
#[derive(Debug, Clone)]
pub struct Who {
    pub spender: Spender,
    /// The virtual key that it came with.
    pub key: Option<Arc<ModelKey>>,
    pub tags: Vec<String>,
}

impl Who {
    /// Whether it is the project itself that asks, with a key of its own: it knows how all of its budgets stand.
    pub(crate) fn manages(&self) -> bool {
        self.key.is_none() && self.spender.sandbox.is_none()
    }
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
    pub(crate) money: Money,
    /// What the first of the targets will get, where it was made already to be counted.
    pub(crate) made: Option<Outgoing>,
    /// It asks for something that has no price.
    pub(crate) unpriced: bool,
    pub(crate) tags: Vec<String>,
    pub(crate) user: Option<String>,
}

/// What is set aside for a call.
#[derive(Debug, Default)]
pub(crate) struct Money {
    pub(crate) reservation: Reservation,
    /// Tokens to which every answer is to be limited that nothing else limits.
    pub(crate) limit: Option<u64>,
}

impl Models {
    /// Counts a request against the rate of the key that it came with: whatever it asks for, and before anything else is
    /// looked at.
    pub fn take_rate(&self, who: &Who, tokens: u64) -> Result<(), Refusal> {
        let Some(key) = &who.key else { return Ok(()) };
        let Err(wait) = key.take(tokens, self.now()) else {
            return Ok(());
        };
        let reason = format!("the key `{}` has used up its rate", key.row.name);
        self.note_refusal(who, "", "rate", &reason);
        let fault = Fault::new(Code::RateLimited, reason);
        Err(Refusal {
            retry_after: Some(Duration::from_millis(wait)),
            ..fault.hint("wait as long as `Retry-After` says").into()
        })
    }

    /// `is_free`: no provider will be asked.
    pub(crate) fn admit(
        &self,
        who: &Who,
        request: &Request,
        is_free: bool,
        estimated_input: u64,
    ) -> Result<Admitted, Refusal> {
        let peek = Peek::at(request.dialect, &request.body)?;
        let asked = request.model.clone().or_else(|| peek.model.clone());
        let Some(asked) = asked.filter(|model| !model.is_empty() && model.len() <= 200) else {
            let fault = Fault::new(Code::ModelMissing, "the request names no model");
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
            let provider = setup.providers.get(&target.provider);
            let speaks = provider.and_then(|provider| wire_between(request.dialect, &provider.row).ok());
            let asked = Asked {
                project,
                target,
                // Who speaks no wire for it is not asked.
                speaks: speaks.unwrap_or(request.dialect),
            };
            self.inner.healths.of(asked, setup.price_of(target), now)
        };
        let targets = setup
            .catalogue
            .plan(&asked, &wished.wishes, health, u64::from_le_bytes(random()))?;

        self.refuse_blocked(who, &setup, &asked, &targets)?;
        let stream = request.stream.unwrap_or(peek.stream)
            && !matches!(request.dialect, Dialect::Embeddings | Dialect::AiSdkEmbeddings);
        let (money, made) = if is_free {
            (Money::default(), None)
        } else {
            let asked = Reserving {
                asked: &asked,
                stream,
                demand: &peek.demand,
            };
            self.reserve(who, request, &setup, &targets, asked)?
        };
        let mut tags = who.tags.clone();
        tags.extend(wished.tags);
        tags.truncate(32);
        Ok(Admitted {
            asked,
            stream,
            wants_usage: peek.wants_usage,
            targets,
            estimated_input,
            money,
            made,
            unpriced: peek.demand.unpriced.is_some(),
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
        let fault = Fault::new(Code::ModelNotAllowed, reason);
        Err(fault
            .hint(format!("it may ask for {}", key.row.models.join(", ")))
            .into())
    }

    /// Sets aside what the dearest of the targets may cost. With it what the first of them will get, where a budget applies and
    /// it speaks another wire: then that was made to be counted.
    fn reserve(
        &self,
        who: &Who,
        request: &Request,
        setup: &ProjectSetup,
        targets: &[Target],
        reserving: Reserving<'_>,
    ) -> Result<(Money, Option<Outgoing>), Refusal> {
        let Reserving {
            asked,
            stream,
            demand,
        } = reserving;
        {
            let mut books = self.books();
            if !books.caps(&who.spender) {
                // A budget that is set meanwhile knows of the call, and as well as can be what it may cost.
                let guesses = targets.iter().filter_map(|target| {
                    let price = setup.price_of(target)?;
                    price.at_most(&most(demand, price, &target.model))
                });
                let guess = guesses.max().unwrap_or_default();
                let reserved = books.reserve(&who.spender, guess, self.now());
                let money = Money {
                    reservation: reserved?,
                    limit: None,
                };
                return Ok((money, None));
            }
        }
        let refuse = |code: Code, reason: String, hint: &'static str, field: Option<String>| {
            self.note_refusal(who, asked, "budget", &reason);
            let fault = Fault::new(code, reason).hint(hint);
            Refusal {
                field,
                ..fault.into()
            }
        };
        let (mut amount, mut first) = (Usd::ZERO, None);
        for (at, target) in targets.iter().enumerate() {
            let name = format!("`{}` of provider `{}`", target.model, target.provider);
            let Some(price) = setup.price_of(target) else {
                return Err(refuse(
                    Code::ModelUnpriced,
                    format!("{name} has no price, so no budget can hold against it"),
                    "`atoll model price set` gives it one; 0 is a price",
                    None,
                ));
            };
            if searches_by_itself(&target.model) && !price.is_free() {
                return Err(refuse(
                    Code::ModelUnpriced,
                    format!(
                        "{name} searches by itself, which has a price of its own, so no budget can hold against it"
                    ),
                    "ask another model, or where no budget applies",
                    None,
                ));
            }
            let counted;
            let demand = match setup.providers.get(&target.provider) {
                Some(provider) => {
                    let row = &provider.row;
                    let made = outgoing::demand(request, demand, row, target, price, stream, OWN_LIMIT)?;
                    counted = made.0;
                    if at == 0 {
                        first = made.1;
                    }
                    &counted
                }
                None => demand,
            };
            if let Some(Unpriced { field, why }) = demand.unpriced.as_ref().filter(|_| !price.is_free()) {
                return Err(refuse(
                    Code::FieldUnpriced,
                    format!("`{field}` has no price, so no budget can hold against it: {why}"),
                    "leave it out, or ask where no budget applies",
                    Some(field.clone()),
                ));
            }
            let Some(most) = price.at_most(&most(demand, price, &target.model)) else {
                return Err(refuse(
                    Code::ModelUnpriced,
                    format!("{name} has no price for sound, so no budget can hold against it"),
                    "`atoll model price set` gives it one; 0 is a price",
                    None,
                ));
            };
            amount = amount.max(most);
        }
        let reserved = self.books().reserve(&who.spender, amount, self.now());
        let reservation = reserved.map_err(|exhausted| {
            self.inner.metrics.refused_by_budget();
            self.note_refusal(who, asked, "budget", &faults::standing(&exhausted));
            Refusal::exhausted(exhausted, who)
        })?;
        let is_capped = reservation.is_capped();
        let money = Money {
            limit: is_capped.then_some(OWN_LIMIT),
            reservation,
        };
        // It was made with the limit, which is of no concern where the budget has gone meanwhile.
        Ok((money, first.filter(|_| is_capped)))
    }
}

/// What money is set aside for.
#[derive(Clone, Copy)]
struct Reserving<'a> {
    asked: &'a str,
    stream: bool,
    demand: &'a Demand,
}

/// Models that look things up unasked, for which their providers charge by the search and say nothing of it.
fn searches_by_itself(model: &str) -> bool {
    let plain = model.rsplit('/').next().unwrap_or(model);
    plain.contains("-search") || plain.contains("deep-research") || plain.starts_with("sonar")
}

/// The most that a model can be made to read and write.
fn most(demand: &Demand, price: &Price, model: &str) -> Most {
    let reading = Reading {
        text: demand.text,
        images: demand.images,
        documents: demand.documents,
        audio: demand.audio,
        tools: demand.tools,
    };
    // What a caller asks for is taken at its word, also where the table knows less: tables grow old.
    let each = demand.max_output.or(price.max_output).unwrap_or(OWN_LIMIT);
    Most {
        input: most_input_tokens(&reading, model, price.max_input),
        output: each
            .saturating_mul(demand.choices)
            .saturating_add(demand.predicted),
        hears: demand.audio > 0,
        speaks: demand.speaks,
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
            let fault = Fault::new(Code::ServiceTierUnsupported, reason);
            Err(Refusal {
                field: Some("service_tier".into()),
                ..fault.hint("leave `service_tier` out").into()
            })
        }
    }
}

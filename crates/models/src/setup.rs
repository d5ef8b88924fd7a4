//! What the operator sets: providers, routes and prices, and below budgets; and the form of it that calls are planned with.

mod budgets;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use atoll_broker::Secret;
use atoll_gateway_core::{
    Catalogue, Pattern, Price, Prices, Provider, Rates, Route, Target, TargetHealth, Wishes,
};
use atoll_store::{
    Fact, ModelBudgetRow, ModelPriceRow, ModelProviderRow, ModelRates, ModelRouteRow, ModelTarget, NewFact,
};
use atoll_types::{Code, Fault, ProjectId, ProviderKind, SecretId, Timestamp, Usd};
use zeroize::Zeroizing;

pub use budgets::{BudgetView, SetBudget};

use crate::admission::Request;
use crate::faults::{Refusal, from_store};
use crate::guards::Guards;
use crate::outgoing::Outgoing;
use crate::work::LONG;
use crate::{Models, budget_of, fresh};

/// What a project may have: each change copies all of it, and each call looks through it.
const MOST_PROVIDERS: usize = 100;
/// Patterns of models, of one provider and of all together.
const MOST_SERVES: usize = 100;
const MOST_SERVED: usize = 1_000;
/// In one pattern.
const MOST_STARS: usize = 8;
const MOST_ROUTES: usize = 1_000;
const MOST_PRICES: usize = 1_000;
/// Each is summed when the server starts.
const MOST_BUDGETS: usize = 100;

/// A provider, and which key is lent to calls that know it so. A call that began before a change knows it as it was, and is
/// lent nothing that came later.
#[derive(Debug)]
pub(crate) struct KnownProvider {
    pub(crate) row: ModelProviderRow,
    /// The version of its key; `None` where it has none, or one that cannot be opened.
    pub(crate) key: Option<u64>,
}

/// One project's setup, ready to plan calls with. Replaced whole when something changes.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProjectSetup {
    pub(crate) catalogue: Catalogue,
    pub(crate) providers: HashMap<String, Arc<KnownProvider>>,
    pub(crate) prices: Option<Arc<Prices>>,
    own_prices: BTreeMap<String, ModelPriceRow>,
    routes: BTreeMap<String, ModelRouteRow>,
    budgets: BTreeMap<String, ModelBudgetRow>,
    pub(crate) guards: Option<Arc<Guards>>,
}

impl ProjectSetup {
    pub(crate) fn prices(&self) -> &Prices {
        self.prices.as_deref().unwrap_or_else(|| Prices::built_in())
    }

    pub(crate) fn price_of(&self, target: &Target) -> Option<&Price> {
        self.prices().of(&target.provider, &target.model)
    }

    /// What a target will get; `None` where there is no such provider.
    pub(crate) fn outgoing(
        &self,
        request: &Request,
        target: &Target,
        stream: bool,
        limit: Option<u64>,
    ) -> Option<Result<Outgoing, Refusal>> {
        let provider = &self.providers.get(&target.provider)?.row;
        let price = self.price_of(target);
        Some(Outgoing::prepare(request, provider, target, price, stream, limit))
    }

    pub(crate) fn has_budget(&self, row: &ModelBudgetRow) -> bool {
        self.budgets.get(&row.name) == Some(row)
    }

    /// Brings what calls are planned with in line with the rows.
    fn compile(&mut self) {
        self.catalogue = Catalogue {
            routes: self
                .routes
                .values()
                .map(|row| {
                    let targets = row.targets.iter().map(|target| {
                        let ModelTarget {
                            provider,
                            model,
                            weight,
                        } = target.clone();
                        (Target { provider, model }, weight)
                    });
                    (
                        row.name.clone(),
                        Route {
                            targets: targets.collect(),
                            fallbacks: row.fallbacks.clone(),
                        },
                    )
                })
                .collect(),
            providers: self
                .providers
                .iter()
                .map(|(name, provider)| {
                    let serves = provider
                        .row
                        .serves
                        .iter()
                        .filter_map(|pattern| pattern.parse().ok())
                        .collect();
                    (name.clone(), Provider { serves })
                })
                .collect(),
        };
        let own = self
            .own_prices
            .values()
            .filter_map(|row| Some((row.model.clone(), price(&row.rates).ok()?)));
        let newest = self.own_prices.values().map(|row| row.updated_at).max();
        self.prices =
            newest.map(|newest| Arc::new(Prices::built_in().with(own, &format!("own.{}", newest.0))));
    }
}

pub struct SetProvider {
    pub name: String,
    pub kind: ProviderKind,
    /// `None`: the provider's own address.
    pub base_url: Option<String>,
    /// `None`: the key that it has stays, as long as it goes to the same place.
    pub key: Option<Zeroizing<Vec<u8>>>,
    /// Names of models that it serves, with wildcards; `None`: what providers of its kind serve at their own address.
    pub serves: Option<Vec<String>>,
    /// Whether it speaks Responses; `None`: as known of its address.
    pub responses: Option<bool>,
}

impl std::fmt::Debug for SetProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SetProvider")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A provider as callers see it: all but its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderView {
    pub name: String,
    pub kind: ProviderKind,
    pub base_url: String,
    pub has_key: bool,
    pub serves: Vec<String>,
    pub responses: bool,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Debug, Clone)]
pub struct SetRoute {
    pub name: String,
    pub targets: Vec<(Target, u32)>,
    pub fallbacks: Vec<String>,
}

/// A name that can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelView {
    pub name: String,
    /// Where calls of it go, with weights.
    pub targets: Vec<(Target, u32)>,
    pub fallbacks: Vec<String>,
    /// Dollars per million tokens read and written, of the first target.
    pub price: Option<(Usd, Usd)>,
    pub cache_read: Option<Usd>,
    pub cache_write: Option<Usd>,
}

#[derive(Debug, Clone)]
pub struct SetPrice {
    pub model: String,
    pub rates: ModelRates,
}

impl Models {
    /// On start: everything of every project.
    pub(crate) async fn load(&self) -> Result<(), Fault> {
        let setup = self
            .store()
            .models
            .model_setup()
            .await
            .map_err(|e| from_store(&e))?;
        let mut projects: HashMap<ProjectId, ProjectSetup> = HashMap::new();
        for row in setup.providers {
            let loaded = row
                .sealed
                .as_ref()
                .map(|sealed| self.inner.broker.load(&row.project, &row.id, sealed, None));
            let key = loaded.transpose().unwrap_or_else(|error| {
                // The others still work, and calls that need this one are refused.
                tracing::error!(provider = %row.name, %error, "the key of a provider cannot be used");
                None
            });
            let of = projects.entry(row.project.clone()).or_default();
            of.providers
                .insert(row.name.clone(), Arc::new(KnownProvider { row, key }));
        }
        for row in setup.routes {
            projects
                .entry(row.project.clone())
                .or_default()
                .routes
                .insert(row.name.clone(), row);
        }
        for row in setup.prices {
            projects
                .entry(row.project.clone())
                .or_default()
                .own_prices
                .insert(row.model.clone(), row);
        }
        for row in &setup.budgets {
            self.books().close(budget_of(row));
            projects
                .entry(row.project.clone())
                .or_default()
                .budgets
                .insert(row.name.clone(), row.clone());
        }
        for row in setup.guards {
            let kept = row.guards;
            let guards = self.apart(&row.project, LONG, || Guards::kept(kept)).await?;
            if let Some(why) = guards.unusable() {
                tracing::error!(project = %row.project, %why, "the guards of a project cannot be used; its calls are refused");
            }
            projects.entry(row.project).or_default().guards = Some(Arc::new(guards));
        }
        let now = self.now();
        for row in setup.keys {
            self.inner.keys.remember(row, now);
        }
        for (project, mut setup) in projects {
            setup.compile();
            self.replace(project, setup);
        }
        self.sum_budgets(setup.budgets).await;
        Ok(())
    }

    pub(crate) fn setup(&self, project: &ProjectId) -> Arc<ProjectSetup> {
        let setups = self.inner.setups.read();
        setups.get(project).cloned().unwrap_or_default()
    }

    fn replace(&self, project: ProjectId, setup: ProjectSetup) {
        let mut setups = self.inner.setups.write();
        setups.insert(project, Arc::new(setup));
    }

    /// Changes a project's setup. Whatever is durable has been written before.
    pub(crate) fn change(&self, project: &ProjectId, change: impl FnOnce(&mut ProjectSetup)) {
        let mut setup = (*self.setup(project)).clone();
        change(&mut setup);
        setup.compile();
        self.replace(project.clone(), setup);
    }

    /// Makes a provider, or changes the one of this name.
    pub async fn set_provider(
        &self,
        project: &ProjectId,
        request: SetProvider,
    ) -> Result<ProviderView, Fault> {
        check_name("provider", &request.name)?;
        let base_url = match &request.base_url {
            Some(url) => check_url(url)?,
            None => default_url(request.kind)
                .ok_or_else(|| {
                    Fault::new(
                        Code::BaseUrlMissing,
                        "a provider of this kind has no address of its own",
                    )
                })?
                .to_owned(),
        };
        let at_home = Some(base_url.as_str()) == default_url(request.kind);
        let serves = request.serves.unwrap_or_else(|| {
            let known = if at_home {
                default_models(request.kind)
            } else {
                &[]
            };
            known.iter().map(|pattern| (*pattern).to_owned()).collect()
        });
        for pattern in &serves {
            pattern
                .parse::<Pattern>()
                .map_err(|why| Fault::new(Code::ModelNameInvalid, why))?;
            if pattern.matches('*').count() > MOST_STARS {
                let why = format!("a pattern of models has at most {MOST_STARS} `*`");
                return Err(Fault::new(Code::ModelNameInvalid, why));
            }
        }
        let _one_at_a_time = self.inner.changing.take(project).await;
        let setup = self.setup(project);
        let others = || setup.providers.iter().filter(|(name, _)| **name != request.name);
        has_room("providers", others().count(), MOST_PROVIDERS)?;
        let served: usize = others().map(|(_, other)| other.row.serves.len()).sum();
        if serves.len() > MOST_SERVES || served + serves.len() > MOST_SERVED {
            let message = format!(
                "a provider serves at most {MOST_SERVES} patterns of models, and all of a project's together {MOST_SERVED}"
            );
            return Err(Fault::new(Code::SetupTooLarge, message).hint("one with `*` stands for many models"));
        }
        let before = setup.providers.get(&request.name).cloned();
        let before = before.as_ref().map(|provider| &provider.row);
        let id: SecretId = before.map_or_else(fresh, |row| row.id.clone());
        let sealed = match request.key {
            Some(mut key) => {
                let secret = Secret::from_input(std::mem::take(&mut *key))
                    .map_err(|error| Fault::new(Code::ProviderKeyInvalid, error.to_string()))?;
                let sealed = self.inner.broker.seal(project, &id, &secret);
                Some(sealed.map_err(|error| Fault::internal(error.to_string()))?)
            }
            None => {
                refuse_moving(before, request.kind, &base_url)?;
                before.and_then(|row| row.sealed.clone())
            }
        };
        let now = self.now();
        let row = ModelProviderRow {
            id,
            project: project.clone(),
            name: request.name,
            kind: request.kind,
            responses: request.responses.unwrap_or(
                request.kind == ProviderKind::Azure || (request.kind == ProviderKind::Openai && at_home),
            ),
            base_url,
            sealed,
            serves,
            created_at: before.map_or(now, |row| row.created_at),
            updated_at: now,
        };
        let fact = self.fact(
            project,
            Fact::ProviderSet {
                provider: row.name.clone(),
            },
        );
        self.store()
            .models
            .put_model_provider(row.clone(), vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        // From here on calls that know the provider as it was are lent nothing: its new key is not for its old address.
        let loaded = row
            .sealed
            .as_ref()
            .map(|sealed| self.inner.broker.load(project, &row.id, sealed, None));
        let key = loaded
            .transpose()
            .map_err(|error| Fault::internal(error.to_string()))?;
        let view = provider_view(&row);
        self.change(project, |setup| {
            setup
                .providers
                .insert(row.name.clone(), Arc::new(KnownProvider { row, key }));
        });
        Ok(view)
    }

    pub fn list_providers(&self, project: &ProjectId) -> Vec<ProviderView> {
        let mut views: Vec<_> = self
            .setup(project)
            .providers
            .values()
            .map(|provider| provider_view(&provider.row))
            .collect();
        views.sort_by(|a, b| a.name.cmp(&b.name));
        views
    }

    pub async fn delete_provider(&self, project: &ProjectId, name: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.changing.take(project).await;
        let Some(provider) = self.setup(project).providers.get(name).cloned() else {
            return Err(missing("provider", name));
        };
        let fact = self.fact(
            project,
            Fact::ProviderDeleted {
                provider: name.to_owned(),
            },
        );
        self.store()
            .models
            .delete_model_provider(project, name, vec![fact])
            .await
            .map_err(|e| from_store(&e))?;
        self.inner.broker.forget(&provider.row.id);
        self.change(project, |setup| {
            setup.providers.remove(name);
        });
        Ok(())
    }

    /// Gives models a name, or changes what a name stands for.
    pub async fn set_route(&self, project: &ProjectId, request: SetRoute) -> Result<(), Fault> {
        request
            .name
            .parse::<Pattern>()
            .map_err(|why| Fault::new(Code::ModelNameInvalid, why))?;
        if request.name.contains('*') {
            return Err(Fault::new(
                Code::ModelNameInvalid,
                "a name of your own has no `*` in it",
            ));
        }
        if request.targets.is_empty() && request.fallbacks.is_empty() {
            return Err(Fault::new(
                Code::RouteEmpty,
                "a name stands for at least one model",
            ));
        }
        if request.targets.len() > 16 || request.fallbacks.len() > 16 {
            return Err(Fault::new(
                Code::RouteTooLong,
                "a name stands for at most 16 models and 16 fallbacks",
            ));
        }
        let _one_at_a_time = self.inner.changing.take(project).await;
        let setup = self.setup(project);
        let others = setup.routes.keys().filter(|name| **name != request.name);
        has_room("names of models", others.count(), MOST_ROUTES)?;
        for (target, _) in &request.targets {
            if !setup.providers.contains_key(&target.provider) {
                return Err(missing("provider", &target.provider));
            }
        }
        for fallback in &request.fallbacks {
            let (catalogue, wishes) = (&setup.catalogue, Wishes::default());
            let known = catalogue.plan(fallback, &wishes, |_| TargetHealth::default(), 0);
            // One that leads back to the name itself adds nothing, and does no harm.
            if known.is_err() && *fallback != request.name {
                return Err(missing("model", fallback));
            }
        }
        let row = ModelRouteRow {
            project: project.clone(),
            name: request.name,
            targets: request
                .targets
                .into_iter()
                .map(|(Target { provider, model }, weight)| ModelTarget {
                    provider,
                    model,
                    weight,
                })
                .collect(),
            fallbacks: request.fallbacks,
            updated_at: self.now(),
        };
        self.store()
            .models
            .put_model_route(row.clone())
            .await
            .map_err(|e| from_store(&e))?;
        self.change(project, |setup| {
            setup.routes.insert(row.name.clone(), row);
        });
        Ok(())
    }

    pub async fn delete_route(&self, project: &ProjectId, name: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.changing.take(project).await;
        if !self
            .store()
            .models
            .delete_model_route(project, name)
            .await
            .map_err(|e| from_store(&e))?
        {
            return Err(missing("model", name));
        }
        self.change(project, |setup| {
            setup.routes.remove(name);
        });
        Ok(())
    }

    /// Everything that has a name here: the operator's own names, and the priced models that providers say they serve.
    pub fn list_models(&self, project: &ProjectId) -> Vec<ModelView> {
        let setup = self.setup(project);
        let mut views: BTreeMap<String, ModelView> = BTreeMap::new();
        for (name, route) in &setup.catalogue.routes {
            views.insert(
                name.clone(),
                setup.model_view(name, route.targets.clone(), route.fallbacks.clone()),
            );
        }
        for (provider, entry) in &setup.catalogue.providers {
            for model in setup.prices().names() {
                if !views.contains_key(model) && entry.serves.iter().any(|pattern| pattern.matches(model)) {
                    let target = Target {
                        provider: provider.clone(),
                        model: model.to_owned(),
                    };
                    views.insert(
                        model.to_owned(),
                        setup.model_view(model, vec![(target, 1)], Vec::new()),
                    );
                }
            }
            // One that is served by its exact name needs no price to be known.
            for pattern in entry
                .serves
                .iter()
                .filter(|pattern| !pattern.as_str().contains('*'))
            {
                let name = pattern.as_str();
                if !views.contains_key(name) {
                    let target = Target {
                        provider: provider.clone(),
                        model: name.to_owned(),
                    };
                    views.insert(
                        name.to_owned(),
                        setup.model_view(name, vec![(target, 1)], Vec::new()),
                    );
                }
            }
        }
        views.into_values().collect()
    }

    /// Those of them that a caller may ask for.
    pub fn models_for(&self, who: &crate::Who) -> Vec<ModelView> {
        let mut views = self.list_models(&who.spender.project);
        if let Some(key) = &who.key {
            views.retain(|view| key.allows(&view.name));
        }
        views
    }

    pub async fn set_price(&self, project: &ProjectId, request: SetPrice) -> Result<(), Fault> {
        if request.model.contains('*') {
            let message = format!("`{}`: a price is of one model, not of a pattern", request.model);
            return Err(Fault::new(Code::ModelNameInvalid, message)
                .hint("name the model as its provider does; `atoll model list` shows what can be called"));
        }
        request
            .model
            .parse::<Pattern>()
            .map_err(|why| Fault::new(Code::ModelNameInvalid, why))?;
        price(&request.rates).map_err(|why| Fault::new(Code::PriceInvalid, why))?;
        let _one_at_a_time = self.inner.changing.take(project).await;
        let setup = self.setup(project);
        let others = setup.own_prices.keys().filter(|model| **model != request.model);
        has_room("prices", others.count(), MOST_PRICES)?;
        let row = ModelPriceRow {
            project: project.clone(),
            model: request.model,
            rates: request.rates,
            updated_at: self.now(),
        };
        self.store()
            .models
            .put_model_price(row.clone())
            .await
            .map_err(|e| from_store(&e))?;
        self.change(project, |setup| {
            setup.own_prices.insert(row.model.clone(), row);
        });
        Ok(())
    }

    pub fn list_prices(&self, project: &ProjectId) -> (String, Vec<SetPrice>) {
        let setup = self.setup(project);
        let own = setup.own_prices.values();
        let prices = own
            .map(|row| SetPrice {
                model: row.model.clone(),
                rates: row.rates.clone(),
            })
            .collect();
        (setup.prices().version().to_owned(), prices)
    }

    pub async fn delete_price(&self, project: &ProjectId, model: &str) -> Result<(), Fault> {
        let _one_at_a_time = self.inner.changing.take(project).await;
        if !self
            .store()
            .models
            .delete_model_price(project, model)
            .await
            .map_err(|e| from_store(&e))?
        {
            return Err(missing("price", model));
        }
        self.change(project, |setup| {
            setup.own_prices.remove(model);
        });
        Ok(())
    }

    pub(crate) fn fact(&self, project: &ProjectId, fact: Fact) -> NewFact {
        NewFact {
            at: self.now(),
            project: project.clone(),
            sandbox: None,
            fact,
        }
    }
}

impl ProjectSetup {
    fn model_view(&self, name: &str, targets: Vec<(Target, u32)>, fallbacks: Vec<String>) -> ModelView {
        let rates = targets
            .first()
            .and_then(|(target, _)| self.price_of(target))
            .map(|price| price.rates(0));
        let million = |rate: Usd| rate.times(1_000_000);
        ModelView {
            name: name.to_owned(),
            price: rates.map(|rates| (million(rates.input), million(rates.output))),
            cache_read: rates.map(|rates| million(rates.cache_read)),
            cache_write: rates.map(|rates| million(rates.cache_write)),
            targets,
            fallbacks,
        }
    }
}

fn provider_view(row: &ModelProviderRow) -> ProviderView {
    ProviderView {
        name: row.name.clone(),
        kind: row.kind,
        base_url: row.base_url.clone(),
        has_key: row.sealed.is_some(),
        serves: row.serves.clone(),
        responses: row.responses,
        created_at: row.created_at,
        updated_at: row.updated_at,
    }
}

fn price(rates: &ModelRates) -> Result<Price, String> {
    let columns = [
        &rates.input,
        &rates.output,
        &rates.cache_read,
        &rates.cache_write,
        &rates.cache_write_1h,
        &rates.audio_input,
        &rates.audio_output,
        &rates.search,
    ];
    Rates::parse(columns.map(Option::as_deref)).map(Price::flat)
}

fn default_url(kind: ProviderKind) -> Option<&'static str> {
    match kind {
        ProviderKind::Openai => Some("https://api.openai.com/v1"),
        ProviderKind::Anthropic => Some("https://api.anthropic.com"),
        ProviderKind::Gemini => Some("https://generativelanguage.googleapis.com/v1beta"),
        // Both are where the operator has an account.
        ProviderKind::Azure | ProviderKind::Bedrock => None,
    }
}

fn default_models(kind: ProviderKind) -> &'static [&'static str] {
    match kind {
        ProviderKind::Openai => &[
            "gpt-*",
            "chatgpt-*",
            "codex-*",
            "o1*",
            "o3*",
            "o4*",
            "text-embedding-*",
        ],
        ProviderKind::Anthropic => &["claude-*"],
        ProviderKind::Gemini => &["gemini-*", "gemma-*"],
        ProviderKind::Azure | ProviderKind::Bedrock => &[],
    }
}

/// A key goes where whoever knew it has sent it. Who does not know it cannot have it sent elsewhere, or shown to somebody who
/// speaks another wire.
fn refuse_moving(before: Option<&ModelProviderRow>, kind: ProviderKind, base_url: &str) -> Result<(), Fault> {
    let moves = before
        .is_some_and(|row| row.sealed.is_some() && (row.base_url.as_str(), row.kind) != (base_url, kind));
    if !moves {
        return Ok(());
    }
    Err(Fault::new(
        Code::ProviderKeyNeeded,
        "the address or the kind of this provider changes, and its key does not go to another place unseen",
    )
    .hint("give the key again, or delete the provider first if it needs none"))
}

/// Any host will do here: where calls may go is asked when they are made, about the address that they go to.
fn check_url(url: &str) -> Result<String, Fault> {
    let url = url.trim_end_matches('/');
    let rest = url
        .strip_prefix("https://")
        .or_else(|| url.strip_prefix("http://"));
    let fine = rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && rest.len() < 500
            && rest
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && !b"?#@\"\\".contains(&byte))
    });
    if !fine {
        return Err(Fault::new(
            Code::BaseUrlInvalid,
            "the address of a provider is http:// or https://, without a query",
        )
        .hint("for example https://openrouter.ai/api/v1 or http://127.0.0.1:11434/v1"));
    }
    Ok(url.to_owned())
}

/// Whether one more fits beside the others.
fn has_room(what: &str, others: usize, most: usize) -> Result<(), Fault> {
    if others < most {
        return Ok(());
    }
    let message = format!("a project has at most {most} {what}");
    Err(Fault::new(Code::SetupTooLarge, message).hint("delete those that nobody uses"))
}

fn check_name(what: &str, name: &str) -> Result<(), Fault> {
    let fine = (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if fine {
        return Ok(());
    }
    Err(Fault::new(
        Code::NameInvalid,
        format!("the name of a {what} has 1 to 64 letters, digits, `-`, `_` and `.`"),
    ))
}

/// A name that somebody made up, as far as it fits into a message.
fn shown(name: &str) -> String {
    name.chars().take(64).collect()
}

fn missing(what: &'static str, name: &str) -> Fault {
    Fault::new(Code::NotFound, format!("there is no {what} `{}`", shown(name))).hint(format!(
        "`atoll {} list` shows those that exist",
        if what == "price" { "model price" } else { what }
    ))
}

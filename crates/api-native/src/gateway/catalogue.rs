//! `/v1/gateway/models` and `/v1/gateway/prices`: names that can be called, where calls of them go, and what they cost.

use atoll_gateway_core::Target;
use atoll_models::{ModelView, SetPrice, SetRoute};
use atoll_store::ModelRates;
use atoll_types::{Code, Fault};
use axum::extract::State;
use axum::routing::put;
use serde::{Deserialize, Serialize};
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Deleted;
use crate::App;
use crate::error::Answer;
use crate::extract::{As, At, Json};

/// Names of models have slashes in them, for which the router and the document have different spellings.
#[derive(OpenApi)]
#[openapi(paths(set_price, delete_price))]
struct WithSlashes;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(WithSlashes::openapi())
        .routes(routes!(list_callable_models))
        .routes(routes!(set_model, delete_model))
        .routes(routes!(list_prices))
        .route("/v1/gateway/prices/{*model}", put(set_price).delete(delete_price))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetModelRequest {
    /// Where calls go, by weight.
    #[serde(default)]
    targets: Vec<ModelTarget>,
    /// Other names, tried in this order when no target answers.
    #[serde(default)]
    fallbacks: Vec<String>,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelTarget {
    provider: String,
    model: String,
    #[serde(default = "one")]
    weight: u32,
}

fn one() -> u32 {
    1
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CallableModel {
    name: String,
    targets: Vec<ModelTarget>,
    fallbacks: Vec<String>,
    /// Dollars per million tokens read, of the first target; null where nobody knows.
    input_per_million: Option<String>,
    output_per_million: Option<String>,
}

impl CallableModel {
    fn of(view: ModelView) -> Self {
        let targets = view.targets.into_iter().map(|(target, weight)| ModelTarget {
            provider: target.provider,
            model: target.model,
            weight,
        });
        Self {
            name: view.name,
            targets: targets.collect(),
            fallbacks: view.fallbacks,
            input_per_million: view.price.map(|(input, _)| input.to_string()),
            output_per_million: view.price.map(|(_, output)| output.to_string()),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CallableModelList {
    items: Vec<CallableModel>,
}

/// Lists the names that can be called.
#[utoipa::path(
    get, path = "/v1/gateway/models", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The names, and where calls of them go.", body = CallableModelList))
)]
pub(crate) async fn list_callable_models(
    State(app): State<App>,
    As(caller): As,
) -> Answer<axum::Json<CallableModelList>> {
    let items = app.models.list_models(caller.project());
    Ok(axum::Json(CallableModelList {
        items: items.into_iter().map(CallableModel::of).collect(),
    }))
}

/// Sets a name that can be called, with where its calls go.
#[utoipa::path(
    put, path = "/v1/gateway/models/{alias}", tag = "models",
    security(("key" = ["models.manage"])), request_body = SetModelRequest,
    responses((status = 200, description = "The name.", body = CallableModel))
)]
pub(crate) async fn set_model(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
    Json(body): Json<SetModelRequest>,
) -> Answer<axum::Json<CallableModel>> {
    let targets = body.targets.into_iter().map(|target| {
        let ModelTarget {
            provider,
            model,
            weight,
        } = target;
        (Target { provider, model }, weight)
    });
    let request = SetRoute {
        name: name.clone(),
        targets: targets.collect(),
        fallbacks: body.fallbacks,
    };
    app.models.set_route(caller.project(), request).await?;
    let mut models = app.models.list_models(caller.project()).into_iter();
    let view = models.find(|view| view.name == name);
    // Somebody may have deleted it since.
    let view = view.ok_or_else(|| Fault::new(Code::ModelNotFound, format!("there is no `{name}`")))?;
    Ok(axum::Json(CallableModel::of(view)))
}

/// Forgets a name.
#[utoipa::path(
    delete, path = "/v1/gateway/models/{alias}", tag = "models",
    security(("key" = ["models.manage"])),
    responses((status = 200, description = "It is gone.", body = Deleted))
)]
pub(crate) async fn delete_model(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
) -> Answer<axum::Json<Deleted>> {
    app.models.delete_route(caller.project(), &name).await?;
    Ok(axum::Json(Deleted { deleted: name }))
}

/// Dollars per million tokens, and per search; decimal numbers in text. What is left out is as in the price table.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rates {
    input: Option<String>,
    output: Option<String>,
    cache_read: Option<String>,
    cache_write: Option<String>,
    cache_write_1h: Option<String>,
    audio_input: Option<String>,
    audio_output: Option<String>,
    search: Option<String>,
}

impl Rates {
    fn of(rates: ModelRates) -> Self {
        Self {
            input: rates.input,
            output: rates.output,
            cache_read: rates.cache_read,
            cache_write: rates.cache_write,
            cache_write_1h: rates.cache_write_1h,
            audio_input: rates.audio_input,
            audio_output: rates.audio_output,
            search: rates.search,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Price {
    model: String,
    rates: Rates,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PriceList {
    /// Of the price table that these are set over.
    version: String,
    items: Vec<Price>,
}

/// Lists the prices that were set here.
#[utoipa::path(
    get, path = "/v1/gateway/prices", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The prices, and the version of the table below them.", body = PriceList))
)]
pub(crate) async fn list_prices(State(app): State<App>, As(caller): As) -> Answer<axum::Json<PriceList>> {
    let (version, prices) = app.models.list_prices(caller.project());
    let items = prices.into_iter().map(|price| Price {
        model: price.model,
        rates: Rates::of(price.rates),
    });
    Ok(axum::Json(PriceList {
        version,
        items: items.collect(),
    }))
}

/// Sets what a model costs.
#[utoipa::path(
    put, path = "/v1/gateway/prices/{model}", tag = "models",
    security(("key" = ["models.manage"])), request_body = Rates,
    responses((status = 200, description = "The price.", body = Price))
)]
pub(crate) async fn set_price(
    State(app): State<App>,
    As(caller): As,
    At(model): At<String>,
    Json(body): Json<Rates>,
) -> Answer<axum::Json<Price>> {
    let rates = ModelRates {
        input: body.input,
        output: body.output,
        cache_read: body.cache_read,
        cache_write: body.cache_write,
        cache_write_1h: body.cache_write_1h,
        audio_input: body.audio_input,
        audio_output: body.audio_output,
        search: body.search,
    };
    let request = SetPrice {
        model: model.clone(),
        rates: rates.clone(),
    };
    app.models.set_price(caller.project(), request).await?;
    Ok(axum::Json(Price {
        model,
        rates: Rates::of(rates),
    }))
}

/// Goes back to the price table for a model.
#[utoipa::path(
    delete, path = "/v1/gateway/prices/{model}", tag = "models",
    security(("key" = ["models.manage"])),
    responses((status = 200, description = "It is gone.", body = Deleted))
)]
pub(crate) async fn delete_price(
    State(app): State<App>,
    As(caller): As,
    At(model): At<String>,
) -> Answer<axum::Json<Deleted>> {
    app.models.delete_price(caller.project(), &model).await?;
    Ok(axum::Json(Deleted { deleted: model }))
}

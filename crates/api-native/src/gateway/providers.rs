//! `/v1/gateway/providers`: who serves models, and with which key.

use atoll_identity::{Caller, Role};
use atoll_models::{ProviderView, SetProvider};
use atoll_types::{Code, Fault, ProviderKind};
use axum::extract::State;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use zeroize::Zeroizing;

use super::Deleted;
use crate::App;
use crate::error::Answer;
use crate::extract::{As, At, PrivateJson};
use crate::wire::time;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list_providers))
        .routes(routes!(set_provider, delete_provider))
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetProviderRequest {
    /// Which wire it speaks.
    #[schema(value_type = String, pattern = "^(openai|azure|anthropic|gemini|bedrock)$")]
    kind: ProviderKind,
    /// Default: the provider's own address.
    base_url: Option<String>,
    /// Its key, which is sealed and never shown. Default: the one that it has stays, as long as kind and address do.
    #[serde(default, deserialize_with = "private")]
    #[schema(value_type = Option<String>, write_only)]
    key: Option<Zeroizing<String>>,
    /// Names of models that it serves, with `*`. Default: what providers of its kind serve at their own address.
    serves: Option<Vec<String>>,
    /// Whether it speaks Responses. Default: as known of its address.
    responses: Option<bool>,
}

/// Wiped when dropped, as soon as it is ours.
fn private<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Zeroizing<String>>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.map(Zeroizing::new))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Provider {
    name: String,
    #[schema(value_type = String)]
    kind: ProviderKind,
    base_url: String,
    has_key: bool,
    serves: Vec<String>,
    responses: bool,
    #[schema(format = DateTime)]
    created_at: String,
    #[schema(format = DateTime)]
    updated_at: String,
}

impl Provider {
    fn of(view: ProviderView) -> Self {
        Self {
            name: view.name,
            kind: view.kind,
            base_url: view.base_url,
            has_key: view.has_key,
            serves: view.serves,
            responses: view.responses,
            created_at: time(view.created_at),
            updated_at: time(view.updated_at),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ProviderList {
    items: Vec<Provider>,
}

/// Lists those who serve models.
#[utoipa::path(
    get, path = "/v1/gateway/providers", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The providers, without their keys.", body = ProviderList))
)]
pub(crate) async fn list_providers(
    State(app): State<App>,
    As(caller): As,
) -> Answer<axum::Json<ProviderList>> {
    let items = app.models.list_providers(caller.project());
    Ok(axum::Json(ProviderList {
        items: items.into_iter().map(Provider::of).collect(),
    }))
}

/// Sets one who serves models, or changes it.
#[utoipa::path(
    put, path = "/v1/gateway/providers/{provider}", tag = "models",
    security(("key" = ["models.manage"])), request_body = SetProviderRequest,
    responses((status = 200, description = "The provider.", body = Provider))
)]
pub(crate) async fn set_provider(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
    PrivateJson(body): PrivateJson<SetProviderRequest>,
) -> Answer<axum::Json<Provider>> {
    check_place(&app, &caller)?;
    let request = SetProvider {
        name,
        kind: body.kind,
        base_url: body.base_url,
        key: body.key.map(|key| Zeroizing::new(key.as_bytes().to_vec())),
        serves: body.serves,
        responses: body.responses,
    };
    let view = app.models.set_provider(caller.project(), request).await?;
    Ok(axum::Json(Provider::of(view)))
}

/// Providers of `default` may be anywhere, also on this machine: where, is for those to say who run it.
fn check_place(app: &App, caller: &Caller) -> Result<(), Fault> {
    if caller.project() != app.identity.default_project() || caller.role() == Role::Operator {
        return Ok(());
    }
    Err(Fault::new(
        Code::OperatorsOnly,
        "providers of the project `default` may be anywhere, and are set by keys with the role operator alone",
    )
    .hint("ask whoever runs this server, or set it in a project of your own"))
}

/// Forgets a provider and its key.
#[utoipa::path(
    delete, path = "/v1/gateway/providers/{provider}", tag = "models",
    security(("key" = ["models.manage"])),
    responses((status = 200, description = "It is gone.", body = Deleted))
)]
pub(crate) async fn delete_provider(
    State(app): State<App>,
    As(caller): As,
    At(name): At<String>,
) -> Answer<axum::Json<Deleted>> {
    app.models.delete_provider(caller.project(), &name).await?;
    Ok(axum::Json(Deleted { deleted: name }))
}

//! `/v1/gateway/guards`: what may not leave for a provider.

use atoll_store::{ModelGuards, ScreenRule};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::Answer;
use crate::extract::{As, Json};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(get_guards, set_guards))
}

#[derive(Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Guards {
    /// The largest input.
    max_input_tokens: Option<u64>,
    /// Models that nobody may call, with `*`.
    #[serde(default)]
    blocked: Vec<String>,
    /// What is looked for in requests.
    #[serde(default)]
    screen: Vec<GuardRule>,
}

#[derive(Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuardRule {
    /// One that is known by its name, such as `email`, or a name for a pattern.
    name: String,
    /// A regular expression.
    pattern: Option<String>,
    action: GuardAction,
}

#[derive(Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum GuardAction {
    Refuse,
    Redact,
}

impl Guards {
    fn of(guards: ModelGuards) -> Self {
        let screen = guards.screen.into_iter().map(|rule| GuardRule {
            name: rule.name,
            pattern: rule.pattern,
            action: if rule.redact {
                GuardAction::Redact
            } else {
                GuardAction::Refuse
            },
        });
        Self {
            max_input_tokens: guards.max_input_tokens,
            blocked: guards.blocked,
            screen: screen.collect(),
        }
    }
}

/// Shows what may not leave for a provider.
#[utoipa::path(
    get, path = "/v1/gateway/guards", tag = "models",
    security(("key" = ["models.read"])),
    responses((status = 200, description = "The guards.", body = Guards))
)]
pub(crate) async fn get_guards(State(app): State<App>, As(caller): As) -> Answer<axum::Json<Guards>> {
    Ok(axum::Json(Guards::of(app.models.guards(caller.project()))))
}

/// Sets what may not leave for a provider, all of it.
#[utoipa::path(
    put, path = "/v1/gateway/guards", tag = "models",
    security(("key" = ["models.manage"])), request_body = Guards,
    responses((status = 200, description = "The guards.", body = Guards))
)]
pub(crate) async fn set_guards(
    State(app): State<App>,
    As(caller): As,
    Json(body): Json<Guards>,
) -> Answer<axum::Json<Guards>> {
    let screen = body.screen.into_iter().map(|rule| ScreenRule {
        name: rule.name,
        pattern: rule.pattern,
        redact: matches!(rule.action, GuardAction::Redact),
    });
    let guards = ModelGuards {
        max_input_tokens: body.max_input_tokens,
        blocked: body.blocked,
        screen: screen.collect(),
    };
    app.models.set_guards(caller.project(), guards.clone()).await?;
    Ok(axum::Json(Guards::of(guards)))
}

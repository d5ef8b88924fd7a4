//! `/v1/gateway/guards`: what may not leave for a provider.

use atoll_store::{ModelGuards, ScreenRule};
use axum::extract::State;
use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::calls::Read;
use crate::manage::{Answer, ok, own, parse};
use crate::{App, auth};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuardsBody {
    max_input_tokens: Option<u64>,
    #[serde(default)]
    blocked: Vec<String>,
    #[serde(default)]
    screen: Vec<RuleBody>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleBody {
    name: String,
    pattern: Option<String>,
    action: ActionBody,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum ActionBody {
    Refuse,
    Redact,
}

pub(crate) async fn get(State(app): State<App>, headers: HeaderMap) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    ok(shown(&app.models.guards(&project)))
}

pub(crate) async fn set(State(app): State<App>, headers: HeaderMap, body: Read) -> Answer {
    let project = auth::project(&app, &headers).await.map_err(own)?;
    let body: GuardsBody = parse(body)?;
    let guards = ModelGuards {
        max_input_tokens: body.max_input_tokens,
        blocked: body.blocked,
        screen: body
            .screen
            .into_iter()
            .map(|rule| ScreenRule {
                name: rule.name,
                pattern: rule.pattern,
                redact: matches!(rule.action, ActionBody::Redact),
            })
            .collect(),
    };
    app.models
        .set_guards(&project, guards.clone())
        .await
        .map_err(own)?;
    ok(shown(&guards))
}

fn shown(guards: &ModelGuards) -> Value {
    let rules: Vec<Value> = guards
        .screen
        .iter()
        .map(|rule| {
            let action = if rule.redact { "redact" } else { "refuse" };
            json!({"name": rule.name, "pattern": rule.pattern, "action": action})
        })
        .collect();
    json!({"max_input_tokens": guards.max_input_tokens, "blocked": guards.blocked, "screen": rules})
}

//! `/v1/models`: one path, two wires. Anthropic's clients say who they are in a header.

use atoll_front::Visit;
use atoll_models::ModelView;
use atoll_types::{Code, Fault};
use axum::extract::{Extension, Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::error::{Failure, Wire};
use crate::{App, auth};

fn wire(headers: &HeaderMap) -> Wire {
    if headers.contains_key("anthropic-version") {
        Wire::Anthropic
    } else {
        Wire::Openai
    }
}

pub(crate) async fn list(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let wire = wire(&headers);
    let models: Vec<Value> = allowed(&app, &headers, &visit, wire)
        .await?
        .iter()
        .map(|view| write(view, wire))
        .collect();
    let body = match wire {
        Wire::Anthropic => json!({
            "first_id": models.first().map(|model| model["id"].clone()),
            "last_id": models.last().map(|model| model["id"].clone()),
            "has_more": false,
            "data": models,
        }),
        _ => json!({"object": "list", "data": models}),
    };
    Ok(axum::Json(body).into_response())
}

pub(crate) async fn one(
    State(app): State<App>,
    Extension(visit): Extension<Visit>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let wire = wire(&headers);
    let models = allowed(&app, &headers, &visit, wire).await?;
    match models.iter().find(|view| view.name == id) {
        Some(view) => Ok(axum::Json(write(view, wire)).into_response()),
        None => {
            let shown: String = id.chars().take(100).collect();
            Err(wire.refuse(Fault::new(
                Code::ModelNotFound,
                format!("there is no model `{shown}`"),
            )))
        }
    }
}

async fn allowed(
    app: &App,
    headers: &HeaderMap,
    visit: &Visit,
    wire: Wire,
) -> Result<Vec<ModelView>, Failure> {
    let who = auth::payer(app, headers, visit)
        .await
        .map_err(|refusal| wire.refuse(refusal))?;
    let taken = app.models.take_rate(&who, 0);
    taken.map_err(|refusal| wire.refuse(refusal))?;
    Ok(app.models.models_for(&who))
}

fn write(view: &ModelView, wire: Wire) -> Value {
    let owner = view
        .targets
        .first()
        .map_or("atoll", |(target, _)| target.provider.as_str());
    match wire {
        Wire::Anthropic => json!({
            "type": "model", "id": view.name, "display_name": view.name, "created_at": "1970-01-01T00:00:00Z",
        }),
        _ => json!({"id": view.name, "object": "model", "created": 0, "owned_by": owner}),
    }
}

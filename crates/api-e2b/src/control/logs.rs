//! What happened to a sandbox, from the ledger, as log lines.

use axum::extract::{Json, State};
use serde_json::{Value, json};

use super::read::{Id, Query};
use super::{life, view};
use crate::App;
use crate::auth::Auth;
use crate::error::{Answer, Refusal};

const MOST: i64 = 1000;
/// Facts that are looked through.
const LOOKED_AT: usize = 10_000;

async fn lines(
    app: &App,
    caller: &atoll_identity::Caller,
    id: &atoll_types::SandboxId,
) -> Answer<Vec<Value>> {
    life::known(app, caller, id).await?;
    let (facts, _) = app.sandboxes.facts(caller, Some(id), &[], 0, LOOKED_AT).await?;
    Ok(facts
        .into_iter()
        .map(|fact| {
            let data: Value = serde_json::from_str(&fact.data).unwrap_or_default();
            let fields: serde_json::Map<String, Value> = match data {
                Value::Object(data) => data
                    .into_iter()
                    .map(|(name, value)| {
                        (
                            name,
                            value
                                .as_str()
                                .map_or_else(|| value.to_string(), str::to_owned)
                                .into(),
                        )
                    })
                    .collect(),
                _ => serde_json::Map::new(),
            };
            json!({
                "timestamp": view::time(fact.at),
                "millis": fact.at.0,
                "message": fact.kind,
                "level": "info",
                "fields": fields,
            })
        })
        .collect())
}

fn without_millis(mut entry: Value) -> Value {
    if let Some(entry) = entry.as_object_mut() {
        entry.remove("millis");
    }
    entry
}

fn count(query: &Query) -> Answer<usize> {
    match query.number("limit")? {
        None => Ok(1000),
        Some(limit) if (0..=MOST).contains(&limit) => Ok(usize::try_from(limit).unwrap_or(0)),
        Some(_) => Err(Refusal::invalid(format!("`limit` must be from 0 to {MOST}"))),
    }
}

pub(crate) async fn v1(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    query: Query,
) -> Answer<Json<Value>> {
    let query = query.only(&["start", "limit"])?;
    let start = query.number("start")?.unwrap_or(0);
    let entries: Vec<Value> = lines(&app, &caller, &id)
        .await?
        .into_iter()
        .filter(|entry| entry["millis"].as_i64().unwrap_or(0) >= start)
        .take(count(&query)?)
        .map(without_millis)
        .collect();
    let logs: Vec<Value> = entries
        .iter()
        .map(|entry| json!({"timestamp": entry["timestamp"], "line": entry.to_string()}))
        .collect();
    Ok(Json(json!({"logs": logs, "logEntries": entries})))
}

pub(crate) async fn v2(
    State(app): State<App>,
    Auth(caller): Auth,
    Id(id): Id,
    query: Query,
) -> Answer<Json<Value>> {
    let query = query.only(&["cursor", "limit", "direction", "level", "search"])?;
    let backward = match query.text("direction") {
        None | Some("forward") => false,
        Some("backward") => true,
        Some(other) => {
            return Err(Refusal::invalid(format!(
                "`direction` is `{other}`; use forward or backward"
            )));
        }
    };
    let cursor = query.number("cursor")?;
    let search = query.text("search").map(str::to_lowercase);
    // All of ours are of one level.
    let none_of_level = !matches!(query.text("level"), None | Some("info" | "debug"));
    let mut entries = lines(&app, &caller, &id).await?;
    if backward {
        entries.reverse();
    }
    let entries: Vec<Value> = entries
        .into_iter()
        .filter(|entry| {
            let at = entry["millis"].as_i64().unwrap_or(0);
            !none_of_level
                && cursor.is_none_or(|cursor| if backward { at <= cursor } else { at >= cursor })
                && search
                    .as_ref()
                    .is_none_or(|text| entry.to_string().to_lowercase().contains(text))
        })
        .take(count(&query)?)
        .map(without_millis)
        .collect();
    Ok(Json(json!({ "logs": entries })))
}

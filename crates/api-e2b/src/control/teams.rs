//! Teams, as far as the CLI asks: a key's project is the one team it knows.

use axum::extract::{Json, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};

use crate::App;
use crate::auth::{self, Auth};

pub(crate) async fn list(State(_): State<App>, Auth(caller): Auth, headers: HeaderMap) -> Json<Value> {
    // The key came with the request; nothing is told that the caller does not know.
    Json(json!([{
        "teamID": caller.project(),
        "name": "default",
        "apiKey": auth::key(&headers),
        "isDefault": true,
    }]))
}

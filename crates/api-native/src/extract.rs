//! How requests are read: who asks, and by which rules the rest is (`atoll_front::extract`).

use atoll_front::Visit;
use atoll_front::extract::{Declared, JsonRules, Wire};
use atoll_identity::{Caller, looks_like_key};
use atoll_types::{Code, Fault};
use axum::extract::FromRequestParts;
use axum::http::Extensions;
use axum::http::request::Parts;

use crate::error::Failure;
use crate::{App, browser};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use atoll_front::extract::parse_private_json;
pub(crate) use atoll_front::extract::{
    Arriving, At, Json, MaybeJson, Paying, PrivateJson, bearer, parse_json, wants_events,
};
pub(crate) use atoll_front::query::Args;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use atoll_front::query::parse as query;

impl Wire for App {
    type Refusal = Failure;
    const JSON: JsonRules = JsonRules {
        bytes: 1024 * 1024,
        declared: Declared::Always,
        may_be_empty: false,
    };
}

/// Who asks, and may: put there before the route was entered.
#[derive(Debug)]
pub(crate) struct As(pub(crate) Caller);

impl FromRequestParts<App> for As {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Failure> {
        let caller = parts.extensions.get::<Caller>().cloned();
        let unnamed = || Fault::internal("this route names no action that it is").into();
        caller.map(Self).ok_or_else(unnamed)
    }
}

/// Finds out who asks, by their key, or in a browser by their cookie.
pub(crate) async fn authenticate(app: &App, parts: &Parts) -> Result<Caller, Failure> {
    const HINT: &str = "send `Authorization: Bearer e2b_…`; `atoll key create` makes a key";
    let Some(secret) = bearer(&parts.headers) else {
        if let Some(caller) = browser::by_cookie(app, parts).await? {
            admit(&parts.extensions, &caller)?;
            return Ok(caller);
        }
        return Err(Fault::new(Code::MissingKey, "this request carries no API key")
            .hint(HINT)
            .into());
    };
    match app.identity.authenticate(secret).await? {
        Some(caller) => {
            admit(&parts.extensions, &caller)?;
            Ok(caller)
        }
        None => Err(Fault::new(
            Code::InvalidKey,
            match atoll_identity::kind_of_secret(secret) {
                Some(kind) if !looks_like_key(secret) => {
                    format!("this is {kind}, not an API key of this server")
                }
                _ => "this API key is unknown, was revoked or has expired".to_owned(),
            },
        )
        .hint(HINT)
        .into()),
    }
}

/// Says who pays for what a request holds, now that it is known who asks.
pub(crate) fn admit(extensions: &Extensions, caller: &Caller) -> Result<(), Failure> {
    Ok(Visit::of(extensions)?.admit_caller(caller)?)
}

//! `/v1/gateway`: providers, models, prices, budgets, keys for models, guards, calls and spend.
//!
//! Only a project's own key manages its gateway. What calls models is another API (`atoll-api-models`).

pub(crate) mod budgets;
pub(crate) mod calls;
pub(crate) mod catalogue;
pub(crate) mod guards;
pub(crate) mod keys;
pub(crate) mod providers;

use atoll_types::Timestamp;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;

use crate::App;
use crate::error::{Answer, Failure};

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(providers::routes())
        .merge(catalogue::routes())
        .merge(budgets::routes())
        .merge(keys::routes())
        .merge(guards::routes())
        .merge(calls::routes())
}

/// What is left of something that was deleted: its name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    deleted: String,
}

fn word<T: std::str::FromStr>(field: &str, text: &str) -> Answer<T>
where
    T::Err: std::fmt::Display,
{
    text.parse()
        .map_err(|why| Failure::invalid("invalid_body", format!("`{field}`: {why}")))
}

fn instant(field: &str, text: &str) -> Answer<Timestamp> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(|at| Timestamp(at.as_millisecond())).map_err(|_| {
        let message = format!("`{field}` is not a time; write RFC 3339, such as 2030-01-31T12:00:00Z");
        Failure::invalid("invalid_time", message)
    })
}

/// What a call used, in buckets that never overlap: tokens, and searches.
#[derive(Debug, Serialize, ToSchema)]
struct Usage {
    /// Read by the model, and not from a cache.
    input: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_1h: u64,
    audio_input: u64,
    /// Written by the model for the caller.
    output: u64,
    /// Written by the model for itself; billed as output.
    reasoning: u64,
    audio_output: u64,
    searches: u64,
}

impl Usage {
    fn of(usage: &atoll_types::ModelUsage) -> Self {
        Self {
            input: usage.input,
            cache_read: usage.cache_read,
            cache_write: usage.cache_write,
            cache_write_1h: usage.cache_write_1h,
            audio_input: usage.audio_input,
            output: usage.output,
            reasoning: usage.reasoning,
            audio_output: usage.audio_output,
            searches: usage.searches,
        }
    }
}

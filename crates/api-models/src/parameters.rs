//! Which parameters the queries of model clients may have. Those that nobody reads are refused, except where a client sends
//! them always: what they ask for is then what it gets anyway.

use atoll_front::query;
use atoll_types::Fault;
use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::error::Wire;

/// Whose wire a path is of, and what its query may hold.
fn known(path: &str) -> (Wire, &'static [&'static str]) {
    match path {
        // Its clients say so with everything that is new; versions are told by headers.
        "/v1/messages" | "/v1/messages/count_tokens" => (Wire::Anthropic, &["beta"]),
        // There is always one page.
        "/v1/models" => (Wire::Openai, &["limit", "after_id", "before_id", "beta"]),
        "/v1/models/{*id}" => (Wire::Openai, &["beta"]),
        "/v1/generation" => (Wire::AiSdk, &["id"]),
        "/v1/report" => (
            Wire::AiSdk,
            &[
                "start_date",
                "end_date",
                "group_by",
                "date_part",
                "user_id",
                "model",
                "provider",
                "tags",
                "credential_type",
            ],
        ),
        "/v1/credits" => (Wire::AiSdk, &[]),
        other if other.starts_with("/v3/") || other.starts_with("/v4/") => (Wire::AiSdk, &[]),
        _ => (Wire::Openai, &[]),
    }
}

pub(crate) async fn check(path: MatchedPath, request: Request, next: Next) -> Response {
    let (wire, names) = known(path.as_str());
    match only(request.uri().query().unwrap_or_default(), names) {
        Ok(()) => next.run(request).await,
        Err(fault) => wire.refuse(fault).into_response(),
    }
}

fn only(text: &str, known: &[&str]) -> Result<(), Fault> {
    query::only(query::pairs(text).map(|(name, _)| name), known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_refused() {
        only("beta=true", known("/v1/messages").1).unwrap();
        only("", known("/v1/chat/completions").1).unwrap();
        for (path, query, named) in [
            ("/v1/chat/completions", "model=x", "`model`"),
            ("/v1/messages", "beta=true&beta=false", "`beta`"),
            ("/v4/ai/config", "x", "`x`"),
            ("/v1/generation", "id=1&project=2", "`project`"),
        ] {
            let fault = only(query, known(path).1).unwrap_err();
            assert!(fault.message.contains(named), "{fault}");
        }
    }
}

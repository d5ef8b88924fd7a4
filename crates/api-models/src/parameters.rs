//! Which parameters the queries of model clients may have. Those that nobody reads are refused, except where a client sends
//! them always: what they ask for is then what it gets anyway.

use atoll_types::{Code, Fault};
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
    match unknown(request.uri().query().unwrap_or_default(), names) {
        Some(message) => wire
            .refuse(Fault::new(Code::InvalidQuery, message))
            .into_response(),
        None => next.run(request).await,
    }
}

fn unknown(query: &str, known: &[&str]) -> Option<String> {
    let mut seen = Vec::new();
    for (name, _) in form_urlencoded::parse(query.as_bytes()) {
        let shown: String = name.chars().take(100).collect();
        if !known.contains(&&*name) {
            return Some(format!("unknown query parameter `{}`", shown.escape_default()));
        }
        if seen.contains(&name) {
            return Some(format!("the query parameter `{shown}` is given twice"));
        }
        seen.push(name);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_refused() {
        assert_eq!(unknown("beta=true", known("/v1/messages").1), None);
        assert_eq!(unknown("", known("/v1/chat/completions").1), None);
        for (path, query, named) in [
            ("/v1/chat/completions", "model=x", "`model`"),
            ("/v1/messages", "beta=true&beta=false", "`beta`"),
            ("/v4/ai/config", "x", "`x`"),
            ("/v1/generation", "id=1&project=2", "`project`"),
        ] {
            let message = unknown(query, known(path).1).unwrap();
            assert!(message.contains(named), "{message}");
        }
    }
}

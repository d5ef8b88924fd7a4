//! Answers that Atoll gives itself, instead of the server.

use atoll_policy::Decision;
use atoll_types::Code;
use bytes::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::body::Answer;

/// Names the rule, so that a person who sees the answer can tell it from one of the server.
pub(super) const DENIED: HeaderName = HeaderName::from_static("x-atoll-denied");
/// Names what failed.
pub(super) const FAILED: HeaderName = HeaderName::from_static("x-atoll-failed");

pub(super) fn denied(decision: &Decision, status: StatusCode, hint: &str) -> Response<Answer> {
    let body = json!({ "error": {
        "code": Code::EgressDenied.text(),
        "message": decision.reason,
        "rule": decision.rule.as_str(),
        "hint": hint,
    }});
    reply(status, DENIED, decision.rule.as_str(), &body)
}

/// `why` must not hold anything of the request or the answer but names and addresses.
pub(super) fn failed(code: Code, why: &str) -> Response<Answer> {
    let body = json!({ "error": {
        "code": code.text(),
        "message": why,
        "hint": "the request was allowed; this is about the server or the way to it",
    }});
    reply(StatusCode::BAD_GATEWAY, FAILED, code.text(), &body)
}

/// To a request whose body cannot be read to its end. Seldom of use: most who send such a thing do not listen.
pub(super) fn broken() -> Response<Answer> {
    let body = json!({ "error": {
        "code": Code::RequestBroken.text(),
        "message": "the body of the request broke off, or is not what its head says",
        "hint": "send the body as it is, with a length or in chunks",
    }});
    reply(StatusCode::BAD_REQUEST, FAILED, Code::RequestBroken.text(), &body)
}

fn reply(status: StatusCode, header: HeaderName, value: &str, body: &serde_json::Value) -> Response<Answer> {
    let mut response = Response::new(Answer::from(Bytes::from(format!("{body}\n"))));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header, printable(value));
    response
}

/// Rules are named by people, in any script.
fn printable(text: &str) -> HeaderValue {
    let text: String = text
        .chars()
        .map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' })
        .collect();
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("?"))
}

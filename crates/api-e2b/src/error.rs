//! Refusals as E2B's clients read them: `{"code": <status>, "message": <sentence>}`. Some of them compare `code` rather
//! than the status, so the two are always the same number.

use atoll_front::Refused;
use atoll_types::{Code, Fault, FaultKind};
use axum::extract::Json;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::json;

pub(crate) type Answer<T> = Result<T, Refusal>;

/// What was refused, with its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    /// A field that this server does not support.
    pub(crate) fn unsupported(field: &str, why: &str) -> Self {
        Self::invalid(format!("`{field}` is not supported by this server: {why}"))
    }

    pub(crate) fn no_sandbox(id: &str) -> Self {
        Self::not_found(format!(
            "Sandbox \"{id}\" doesn't exist or you don't have access to it"
        ))
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        Self::new(status_of(&fault), fault.to_string())
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        refused.fault().into()
    }
}

fn status_of(fault: &Fault) -> StatusCode {
    match fault.kind() {
        // It was the client that took too long.
        FaultKind::TimedOut if fault.code == Code::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
        FaultKind::Invalid | FaultKind::Unsupported => StatusCode::BAD_REQUEST,
        FaultKind::Unauthenticated => StatusCode::UNAUTHORIZED,
        FaultKind::Forbidden => StatusCode::FORBIDDEN,
        FaultKind::NotFound | FaultKind::Gone => StatusCode::NOT_FOUND,
        FaultKind::Conflict => StatusCode::CONFLICT,
        _ if matches!(fault.code, Code::DiskFull | Code::ServerDiskFull) => StatusCode::INSUFFICIENT_STORAGE,
        FaultKind::LimitExceeded => StatusCode::TOO_MANY_REQUESTS,
        FaultKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        FaultKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        FaultKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        FaultKind::GuestFailed | FaultKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A path that begins like one of E2B's.
pub(crate) async fn no_such_route(method: Method, uri: Uri) -> Refusal {
    Refusal::not_found(format!("there is no {method} {} in E2B's API", uri.path()))
}

pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let message = format!("{method} is not a method of {}", uri.path());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// Clients repeat what failed with 429 or 5xx unless told not to; only a server that is starting or stopping is worth it.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({"code": self.status.as_u16(), "message": self.message});
        let mut response = (self.status, Json(body)).into_response();
        let pointless = self.status == StatusCode::TOO_MANY_REQUESTS
            || (self.status.is_server_error() && self.status != StatusCode::SERVICE_UNAVAILABLE);
        if pointless {
            response
                .headers_mut()
                .insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_number_in_the_body_is_the_status() {
        let response = Refusal::from(Fault::new(Code::SandboxDeleted, "it is gone")).into_response();
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        assert_eq!(&body[..], br#"{"code":404,"message":"it is gone"}"#);
    }
}

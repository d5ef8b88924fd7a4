//! The one mapping from faults to statuses and to each wire's shape of an error.

use atoll_front::Refused;
use atoll_models::Refusal;
use atoll_types::{Fault, FaultKind};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Whose shape an error takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    Openai,
    Anthropic,
    AiSdk,
}

/// A refusal on its way out.
#[derive(Debug)]
pub(crate) struct Failure {
    wire: Wire,
    refusal: Box<Refusal>,
}

impl Wire {
    pub(crate) fn refuse(self, refusal: impl Into<Refusal>) -> Failure {
        Failure {
            wire: self,
            refusal: Box::new(refusal.into()),
        }
    }
}

pub(crate) async fn no_such_route(method: Method, uri: Uri) -> Failure {
    let message = format!("there is no {method} {}", uri.path());
    Wire::Openai.refuse(Fault::not_found("no_such_route", message))
}

pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{method} is not a method of {}", uri.path());
    let mut response = Wire::Openai
        .refuse(Fault::invalid("method_not_allowed", message))
        .into_response();
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response
}

fn status_of(refusal: &Refusal) -> StatusCode {
    // What the provider said to this very request is the best answer, where it was about the request.
    if let Some(upstream) = &refusal.upstream
        && let Ok(status) = StatusCode::from_u16(upstream.status)
        && (400..=599).contains(&upstream.status)
    {
        return status;
    }
    match (refusal.fault.kind, refusal.fault.code) {
        // Clients try again after 429; money does not come back by waiting a second.
        (_, "budget_exhausted") => StatusCode::PAYMENT_REQUIRED,
        // It is we who are busy, or the client that is slow, and no provider.
        (_, "server_busy") => StatusCode::SERVICE_UNAVAILABLE,
        (_, Refused::SLOW) => StatusCode::REQUEST_TIMEOUT,
        (FaultKind::Unavailable, _) => StatusCode::BAD_GATEWAY,
        (FaultKind::Invalid, _) => StatusCode::BAD_REQUEST,
        (FaultKind::Unauthenticated, _) => StatusCode::UNAUTHORIZED,
        (FaultKind::Forbidden, _) => StatusCode::FORBIDDEN,
        (FaultKind::NotFound, _) => StatusCode::NOT_FOUND,
        (FaultKind::Conflict, _) => StatusCode::CONFLICT,
        (FaultKind::Gone, _) => StatusCode::GONE,
        (FaultKind::LimitExceeded, _) => StatusCode::TOO_MANY_REQUESTS,
        (FaultKind::TooLarge, _) => StatusCode::PAYLOAD_TOO_LARGE,
        (FaultKind::Unsupported, _) => StatusCode::UNPROCESSABLE_ENTITY,
        (FaultKind::GuestFailed, _) => StatusCode::BAD_GATEWAY,
        (FaultKind::TimedOut, _) => StatusCode::GATEWAY_TIMEOUT,
        (FaultKind::Internal, _) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn openai_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "insufficient_quota",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        500..=599 => "server_error",
        _ => "invalid_request_error",
    }
}

fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        529 => "overloaded_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    }
}

fn ai_sdk_type(status: StatusCode, code: &str) -> &'static str {
    match (status.as_u16(), code) {
        (_, "model_not_found") => "model_not_found",
        (401, _) => "authentication_error",
        (402 | 403, _) => "forbidden",
        (404, _) => "not_found",
        (429, _) => "rate_limit_exceeded",
        (424, _) => "failed_dependency",
        (500..=599, _) => "internal_server_error",
        _ => "invalid_request_error",
    }
}

fn message(fault: &Fault) -> String {
    match &fault.hint {
        Some(hint) => format!("{} ({hint})", fault.message),
        None => fault.message.clone(),
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Self { wire, refusal } = self;
        let status = status_of(&refusal);
        let fault = &refusal.fault;
        let mut response = match &refusal.upstream {
            // It is in the client's own shape already.
            Some(upstream)
                if upstream.same_wire && serde_json::from_slice::<Value>(&upstream.body).is_ok() =>
            {
                (
                    status,
                    [(header::CONTENT_TYPE, "application/json")],
                    upstream.body.clone(),
                )
                    .into_response()
            }
            _ => {
                let body = match wire {
                    Wire::Openai => json!({"error": {
                        "message": message(fault), "type": openai_type(status), "param": refusal.field, "code": fault.code,
                    }}),
                    Wire::Anthropic => json!({"type": "error", "error": {
                        "type": anthropic_type(status), "message": message(fault),
                    }, "request_id": refusal.call.as_ref().map(|call| call.as_str())}),
                    Wire::AiSdk => json!({"error": {
                        "message": message(fault), "type": ai_sdk_type(status, fault.code), "code": fault.code,
                        "param": refusal.field,
                    }, "generationId": refusal.call.as_ref().map(|call| call.as_str())}),
                };
                (status, axum::Json(body)).into_response()
            }
        };
        let headers = response.headers_mut();
        if let Some(wait) = refusal.retry_after {
            let seconds = wait.as_secs_f64().ceil();
            if let Ok(value) = HeaderValue::from_str(&format!("{seconds:.0}")) {
                headers.insert(header::RETRY_AFTER, value);
            }
        }
        if let Some(value) = refusal
            .call
            .as_ref()
            .and_then(|call| HeaderValue::from_str(call.as_str()).ok())
        {
            headers.insert("x-atoll-call", value);
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

//! The one error shape, and the one mapping from faults to statuses.
//!
//! A handler returns a [`Failure`]; its body is written by `observe`, which knows the request's id. A response that carries a
//! [`Fault`] among its extensions is one whose body is still to be written, whichever front end made it.

use atoll_front::Refused;
use atoll_types::{Fault, FaultKind};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

pub(crate) type Answer<T> = Result<T, Failure>;

/// A fault on its way out, with its status.
#[derive(Debug)]
pub(crate) struct Failure(Box<Refusal>);

/// Boxed, because results that carry it are returned everywhere.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    fault: Fault,
    header: Option<(header::HeaderName, HeaderValue)>,
}

impl Failure {
    pub(crate) fn invalid(code: &'static str, message: impl Into<String>) -> Self {
        Fault::invalid(code, message).into()
    }

    /// For the few answers that HTTP has a status for and our faults have no kind.
    pub(crate) fn with_status(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(Refusal {
            status,
            fault: Fault::invalid(code, message),
            header: None,
        }))
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.fault.hint = Some(hint.into());
        self
    }

    pub(crate) fn header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.0.header = Some((name, value));
        self
    }

    #[cfg(test)]
    pub(crate) fn status(&self) -> StatusCode {
        self.0.status
    }

    pub(crate) fn fault(&self) -> &Fault {
        &self.0.fault
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        let status = status_of(fault.kind);
        let header = (status == StatusCode::UNAUTHORIZED)
            .then(|| (header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        Self(Box::new(Refusal {
            status,
            fault,
            header,
        }))
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        let mut failure = Self::from(refused.fault());
        // It was the client that took too long, and not what it asked for.
        if failure.0.fault.code == Refused::SLOW {
            failure.0.status = StatusCode::REQUEST_TIMEOUT;
        }
        failure
    }
}

/// What each kind of fault means on this wire. `Unsupported` is 422: the request is well formed and understood, and
/// this machine cannot carry it out (a retry will not help, another machine may).
pub(crate) fn status_of(kind: FaultKind) -> StatusCode {
    match kind {
        FaultKind::Invalid => StatusCode::BAD_REQUEST,
        FaultKind::Unauthenticated => StatusCode::UNAUTHORIZED,
        FaultKind::Forbidden => StatusCode::FORBIDDEN,
        FaultKind::NotFound => StatusCode::NOT_FOUND,
        FaultKind::Conflict => StatusCode::CONFLICT,
        FaultKind::Gone => StatusCode::GONE,
        FaultKind::LimitExceeded => StatusCode::TOO_MANY_REQUESTS,
        FaultKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        FaultKind::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        FaultKind::GuestFailed => StatusCode::BAD_GATEWAY,
        FaultKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        FaultKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        FaultKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let Refusal {
            status,
            fault,
            header,
        } = *self.0;
        let mut response = status.into_response();
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(fault);
        response
    }
}

/// Writes the body of a response that carries a [`Fault`]; hands back any other as it is.
pub(crate) fn write_body(mut response: Response, request_id: &str) -> Response {
    let Some(fault) = response.extensions_mut().remove::<Fault>() else {
        return response;
    };
    match fault.kind {
        FaultKind::Internal => {
            tracing::error!(code = fault.code, message = %fault.message, "request failed");
        }
        FaultKind::GuestFailed | FaultKind::Unavailable => {
            tracing::warn!(code = fault.code, message = %fault.message, "request failed");
        }
        _ => tracing::debug!(code = fault.code, message = %fault.message, "request refused"),
    }
    let body = axum::Json(ErrorBody {
        error: ErrorDetail::new(&fault, Some(request_id)),
    });
    let (mut parts, _) = response.into_parts();
    let (written, body) = body.into_response().into_parts();
    // the empty body that is replaced may have left its length
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.extend(written.headers);
    Response::from_parts(parts, body)
}

/// What every refused or failed request is answered with.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorDetail,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// A stable name for programs.
    #[schema(examples("sandbox_not_found"))]
    pub(crate) code: String,
    /// One sentence for people: what was refused or failed, and why.
    pub(crate) message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
    /// Also in the `X-Request-Id` header and in the server's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) request_id: Option<String>,
}

impl ErrorDetail {
    pub(crate) fn new(fault: &Fault, request_id: Option<&str>) -> Self {
        Self {
            code: fault.code.into(),
            message: fault.message.clone(),
            hint: fault.hint.clone(),
            request_id: request_id.map(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_status() {
        for (kind, status) in [
            (FaultKind::Invalid, 400),
            (FaultKind::Unauthenticated, 401),
            (FaultKind::Forbidden, 403),
            (FaultKind::NotFound, 404),
            (FaultKind::Conflict, 409),
            (FaultKind::Gone, 410),
            (FaultKind::TooLarge, 413),
            (FaultKind::Unsupported, 422),
            (FaultKind::LimitExceeded, 429),
            (FaultKind::Internal, 500),
            (FaultKind::GuestFailed, 502),
            (FaultKind::Unavailable, 503),
            (FaultKind::TimedOut, 504),
        ] {
            assert_eq!(status_of(kind).as_u16(), status, "{kind:?}");
        }
    }

    #[tokio::test]
    async fn a_failure_is_written_with_code_hint_and_request_id() {
        let failure =
            Failure::from(Fault::new(FaultKind::Unauthenticated, "missing_key", "no key").hint("send one"));
        let response = write_body(failure.into_response(), "req_1");
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(response.headers()[header::WWW_AUTHENTICATE], "Bearer");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        let body = axum::body::to_bytes(response.into_body(), 1000).await.unwrap();
        assert_eq!(
            std::str::from_utf8(&body).unwrap(),
            r#"{"error":{"code":"missing_key","message":"no key","hint":"send one","request_id":"req_1"}}"#
        );
    }
}

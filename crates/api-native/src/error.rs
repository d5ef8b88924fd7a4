//! The one error shape.
//!
//! A handler returns a [`Failure`], which is a response that carries a [`Fault`] among its extensions; its body is written when
//! the request's id is known ([`write`]).

use atoll_front::{Refused, status};
use atoll_types::{Code, Fault};
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
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Fault::new(code, message).into()
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
        let status = status::http(fault.code);
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
        refused.fault().into()
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

/// Writes a fault as the body of a response that has none yet.
pub(crate) fn write(response: Response, fault: &Fault, request_id: &str) -> Response {
    let body = axum::Json(ErrorBody {
        error: ErrorDetail::new(fault, Some(request_id)),
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
            code: fault.code.text().into(),
            message: fault.message.clone(),
            hint: fault.hint.clone(),
            request_id: request_id.map(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failure_is_written_with_code_hint_and_request_id() {
        let failure = Failure::from(Fault::new(Code::MissingKey, "no key").hint("send one"));
        let fault = failure.fault().clone();
        let response = write(failure.into_response(), &fault, "req_1");
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

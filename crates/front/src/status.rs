//! What a fault is in HTTP and in gRPC: the one table, from which every API starts.
//!
//! APIs that were made by others keep their own words for a few codes (E2B's, the wires of model clients); they say so where
//! they do.

use atoll_types::{Code, FaultKind};
use axum::http::StatusCode;

/// A status of gRPC, as its specification numbers and names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grpc {
    pub number: i32,
    pub name: &'static str,
}

/// `Unsupported` is 422: the request is well formed and understood, and this machine cannot carry it out (a retry will not
/// help, another machine may).
const fn of(kind: FaultKind) -> (StatusCode, Grpc) {
    let (http, number, name) = match kind {
        FaultKind::Invalid => (StatusCode::BAD_REQUEST, 3, "INVALID_ARGUMENT"),
        FaultKind::Unauthenticated => (StatusCode::UNAUTHORIZED, 16, "UNAUTHENTICATED"),
        FaultKind::Forbidden => (StatusCode::FORBIDDEN, 7, "PERMISSION_DENIED"),
        FaultKind::NotFound => (StatusCode::NOT_FOUND, 5, "NOT_FOUND"),
        FaultKind::Conflict => (StatusCode::CONFLICT, 9, "FAILED_PRECONDITION"),
        FaultKind::Gone => (StatusCode::GONE, 5, "NOT_FOUND"),
        FaultKind::LimitExceeded => (StatusCode::TOO_MANY_REQUESTS, 8, "RESOURCE_EXHAUSTED"),
        FaultKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, 8, "RESOURCE_EXHAUSTED"),
        FaultKind::Unsupported => (StatusCode::UNPROCESSABLE_ENTITY, 12, "UNIMPLEMENTED"),
        FaultKind::GuestFailed => (StatusCode::BAD_GATEWAY, 13, "INTERNAL"),
        FaultKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, 14, "UNAVAILABLE"),
        FaultKind::TimedOut => (StatusCode::GATEWAY_TIMEOUT, 4, "DEADLINE_EXCEEDED"),
        FaultKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, 13, "INTERNAL"),
    };
    (http, Grpc { number, name })
}

/// The kind's status, but for the few codes that HTTP has a status of its own for.
pub const fn http(code: Code) -> StatusCode {
    match code {
        Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        // It was the client that took too long, and not what it asked for.
        Code::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
        Code::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Code::RangeNotSatisfiable => StatusCode::RANGE_NOT_SATISFIABLE,
        // Told by the proxy on a sandbox's way out, about the server behind it.
        Code::RequestTooLong
        | Code::UpstreamUnreachable
        | Code::UpstreamTlsFailed
        | Code::UpstreamFailed
        | Code::UpstreamEncoded => StatusCode::BAD_GATEWAY,
        code => of(code.kind()).0,
    }
}

pub const fn grpc(code: Code) -> Grpc {
    of(code.kind()).1
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
            assert_eq!(of(kind).0.as_u16(), status, "{kind:?}");
        }
    }
}

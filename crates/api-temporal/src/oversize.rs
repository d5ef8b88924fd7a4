//! Messages that are larger than this server reads. SDKs know them by the words of gRPC's implementation for Go: a worker
//! whose answer is too large then fails its task, where any other error would make it send the same again.

use tonic::body::Body;
use tonic::codegen::http::Response;
use tonic::{Code, Status};

/// What one request may carry: Temporal's number, so that what fits here fits there.
pub(crate) const MAX_REQUEST: usize = 4 * 1024 * 1024;

pub(crate) fn retell(response: Response<Body>) -> Response<Body> {
    let too_large = Status::from_header_map(response.headers()).is_some_and(|status| {
        let text = status.message();
        match status.code() {
            Code::OutOfRange => text.starts_with("Error, decoded message length too large"),
            Code::ResourceExhausted => text.starts_with("Error decompressing: size limit"),
            _ => false,
        }
    });
    if !too_large {
        return response;
    }
    Status::resource_exhausted(words()).into_http()
}

/// What SDKs look for.
pub(crate) fn words() -> String {
    format!("grpc: received message larger than max {MAX_REQUEST}")
}

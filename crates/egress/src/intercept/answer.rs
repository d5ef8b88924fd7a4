//! A server's answer on its way to the guest: without what concerns its connection only, and without echoes of secrets.
//!
//! Nothing else of an answer gets to the guest: interim answers (100, 103) are not passed on, pushes are refused, and the
//! words behind the status are the library's own.

use atoll_broker::Redactor;
use atoll_http_rules::strip_hop_by_hop;
use hyper::body::{Body, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{ALT_SVC, CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderName, TRANSFER_ENCODING};
use hyper::http::response::Parts;
use hyper::{Response, StatusCode};

use super::body::Answer;
use super::open::Ticket;
use super::reply;

/// What a server cannot say to a guest: that it also answers over QUIC, where it cannot be reached, and what only Atoll
/// says.
const KEPT_BACK: [HeaderName; 3] = [ALT_SVC, reply::DENIED, reply::FAILED];

pub(super) fn pass(
    response: Response<Incoming>,
    redactor: &Redactor,
    bodies: bool,
    ticket: &Ticket,
) -> Response<Answer> {
    let (mut parts, body) = response.into_parts();
    if parts.headers.contains_key(TRANSFER_ENCODING) {
        parts.headers.remove(CONTENT_LENGTH);
    }
    let searched = bodies && !redactor.is_empty() && !body.is_end_stream();
    if searched && !is_whole(&parts) {
        return reply::failed(
            atoll_types::Code::UpstreamEncoded,
            "the server answered in an encoding or in parts in which echoes of secrets cannot be looked for, though it was asked not to",
        );
    }
    clean(&mut parts, redactor);
    let answer = Answer::passed(body, redactor.clone(), searched, ticket.watched());
    Response::from_parts(parts, answer)
}

/// The head, whatever follows it.
pub(super) fn clean(parts: &mut Parts, redactor: &Redactor) {
    // Free text of the server, which nobody needs and which is not looked at for echoes.
    parts.extensions.remove::<ReasonPhrase>();
    clean_fields(&mut parts.headers, redactor);
}

/// Headers or trailers.
pub(super) fn clean_fields(fields: &mut HeaderMap, redactor: &Redactor) {
    strip_hop_by_hop(fields);
    for name in KEPT_BACK {
        fields.remove(name);
    }
    redactor.headers(fields);
}

/// Whether a body can be searched: not encoded, and not in parts between which a value may be cut.
fn is_whole(parts: &Parts) -> bool {
    let identity = parts
        .headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    identity && parts.status != StatusCode::PARTIAL_CONTENT
}

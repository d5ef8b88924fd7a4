//! WebSockets over HTTP/1.1: the request that asks for one is checked like any other, then bytes go through.
//!
//! What must hold: bytes go through only when the server really agreed to a WebSocket, by the key that the client sent.
//! Else a client could have some server answer "101" for another reason, and speak HTTP past the policy from then on.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{
    CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Version};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

use super::check::has_token;
use super::open::Ticket;

/// With which the key of a client is hashed (RFC 6455).
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// A well-formed wish for a WebSocket.
#[derive(Debug)]
pub(super) struct Asked {
    /// How a server says that it agrees.
    accept: String,
}

impl Asked {
    /// `None` for other requests, also for those that want to become something else: those stay what they are, which a
    /// server may always decide.
    pub(super) fn of(parts: &Parts) -> Option<Self> {
        let headers = &parts.headers;
        let key = headers.get(SEC_WEBSOCKET_KEY)?.to_str().ok()?;
        let wanted = parts.version == Version::HTTP_11
            && parts.method == Method::GET
            && has_token(headers, &CONNECTION, "upgrade")
            && is_websocket(headers)
            && headers
                .get(SEC_WEBSOCKET_VERSION)
                .is_some_and(|version| version == "13");
        wanted.then(|| Self {
            accept: STANDARD.encode(digest(
                &SHA1_FOR_LEGACY_USE_ONLY,
                format!("{key}{GUID}").as_bytes(),
            )),
        })
    }

    pub(super) fn agreed(&self, headers: &HeaderMap) -> bool {
        has_token(headers, &CONNECTION, "upgrade")
            && is_websocket(headers)
            && headers
                .get(SEC_WEBSOCKET_ACCEPT)
                .is_some_and(|accept| accept.as_bytes() == self.accept.as_bytes())
    }
}

fn is_websocket(headers: &HeaderMap) -> bool {
    headers
        .get(UPGRADE)
        .is_some_and(|upgrade| upgrade.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Says so to the next one, whose connection it now is about.
pub(super) fn mark(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

/// Passes bytes both ways until both sides are done, one breaks, or whoever watches the request breaks off the connection.
pub(super) async fn tunnel(guest: OnUpgrade, server: OnUpgrade, _ticket: Ticket) {
    let Ok((guest, server)) = tokio::try_join!(guest, server) else {
        return;
    };
    // How it ends is between the two.
    let _ = copy_bidirectional(&mut TokioIo::new(guest), &mut TokioIo::new(server)).await;
}

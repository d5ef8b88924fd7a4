//! What the fuzzer may see: both planes of this wire, read as their routes read them.

use atoll_front::multipart;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Request};
use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;

use crate::control::{
    builds, create, life, network, recipe, snapshots, tags, templates, volume_content, volumes,
};
use crate::envd::connect::{self, Codec, Frame};
use crate::envd::{files, messages};
use crate::extras::Extras;

fn reads<T: DeserializeOwned>(body: &[u8], more: Option<&[u8]>) -> bool {
    let read = serde_json::from_slice::<T>(body).is_ok();
    if let (true, Some(more)) = (read, more) {
        assert!(
            serde_json::from_slice::<T>(more).is_err(),
            "{} takes fields that it does not know",
            std::any::type_name::<T>()
        );
    }
    read
}

/// Whether any route of the control plane can do something with a body. `more` is the same object with an unknown field,
/// which must be refused.
pub fn bodies(body: &[u8], more: Option<&[u8]>) -> bool {
    let read = [
        reads::<builds::NewTemplate>(body, more),
        reads::<builds::Start>(body, more),
        reads::<create::NewSandbox>(body, more),
        reads::<life::Connect>(body, more),
        reads::<life::Pause>(body, more),
        reads::<life::Timeout>(body, more),
        reads::<life::Refresh>(body, more),
        reads::<network::NetworkConfig>(body, more),
        reads::<network::NetworkUpdate>(body, more),
        reads::<snapshots::NewSnapshot>(body, more),
        reads::<snapshots::Fork>(body, more),
        reads::<tags::Assign>(body, more),
        reads::<tags::Remove>(body, more),
        reads::<templates::Publish>(body, more),
        reads::<volume_content::Change>(body, more),
        reads::<volumes::NewVolume>(body, more),
    ];
    // A label of ours, but one that a client of the native API may set.
    let _ = serde_json::from_slice::<Extras>(body);
    read.contains(&true)
}

/// The Dockerfile of a build's steps; `None` where they are refused.
pub fn recipe(from: &str, steps: &[u8]) -> Option<String> {
    let steps: Vec<recipe::Step> = serde_json::from_slice(steps).ok()?;
    let mut made = recipe::Recipe::new(&recipe::Origin::Image(from.to_owned()), &steps).ok()?;
    let lines = made.dockerfile.lines().count();
    for copied in made.copies.clone() {
        made.goes_to_parent(&copied.directory);
    }
    assert_eq!(
        made.dockerfile.lines().count(),
        lines,
        "a copy changed the number of lines"
    );
    Some(made.dockerfile)
}

/// The payloads of a client stream, whatever it is cut into; `None` at the end where it is refused.
pub fn frames(bytes: &[u8], piece: usize) -> Vec<Option<Bytes>> {
    let (mut buffer, mut found) = (BytesMut::new(), Vec::new());
    for piece in bytes.chunks(piece.max(1)) {
        buffer.extend_from_slice(piece);
        loop {
            let taken = match connect::take_frame(&buffer, connect::INPUT_BYTES) {
                Ok(Some((Frame::Message(payload), taken))) => {
                    found.push(Some(Bytes::copy_from_slice(payload)));
                    taken
                }
                Ok(Some((Frame::End, _))) => return found,
                Ok(None) => break,
                Err(_) => {
                    found.push(None);
                    return found;
                }
            };
            buffer.advance(taken);
        }
    }
    found
}

/// Reads a message in one of the two codecs; what is read is written and read again in both, and must be the same.
fn message<T: connect::Wire + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> bool {
    let mut read = false;
    for codec in [Codec::Json, Codec::Proto] {
        let Ok(message) = codec.decode::<T>(bytes) else {
            continue;
        };
        let weighed = codec.weigh::<T>(bytes);
        assert!(
            weighed.is_ok_and(|weight| weight >= bytes.len() as u64),
            "what is read was not weighed"
        );
        read = true;
        for other in [Codec::Json, Codec::Proto] {
            let again = other.decode::<T>(&other.encode(&message));
            assert!(
                again.as_ref().is_ok_and(|again| *again == message),
                "{message:?} is read again from {other:?} as something else: {again:?}"
            );
        }
    }
    read
}

/// Whether any method of the services in a sandbox can do something with a message.
pub fn envd(bytes: &[u8]) -> bool {
    let read = [
        message::<messages::StartRequest>(bytes),
        message::<messages::UpdateRequest>(bytes),
        message::<messages::SelectRequest>(bytes),
        message::<messages::SendInputRequest>(bytes),
        message::<messages::SendSignalRequest>(bytes),
        message::<messages::StreamInputRequest>(bytes),
        message::<messages::PathRequest>(bytes),
        message::<messages::MoveRequest>(bytes),
        message::<messages::ListDirRequest>(bytes),
        message::<messages::WatchRequest>(bytes),
        message::<messages::Watcher>(bytes),
    ];
    read.contains(&true)
}

/// Whether a link to a file opens it for whoever has this token.
pub fn link(query: &str, token: &str, writes: bool) -> Option<bool> {
    let request = Request::builder()
        .uri(format!("/files?{query}"))
        .body(Body::empty())
        .ok()?;
    let query = files::FileQuery::of(&request).ok()?;
    let signed = query.signed(writes);
    let opens = signed.check(token, 0).is_ok();
    assert!(
        !opens || signed.matches(token),
        "a link opens without its signature"
    );
    assert!(
        !(opens && signed.check("another", 0).is_ok()),
        "a link opens for two tokens"
    );
    Some(opens)
}

/// The user of a `Basic` header.
pub fn user(header: &[u8]) -> Option<String> {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", HeaderValue::from_bytes(header).ok()?);
    crate::auth::user(&headers)
}

/// How many bytes of files a `multipart/form-data` body holds; `None` where it is refused.
pub async fn parts(body: Vec<Bytes>, media: &str) -> Option<usize> {
    let body = futures_util::stream::iter(body.into_iter().map(Ok::<_, std::io::Error>));
    let mut parts = multipart::Parts::new(body, media).ok()?;
    let mut count = 0;
    while let Some(mut part) = parts.next().await.ok()? {
        while let Some(piece) = part.content.next().await {
            count += piece.ok()?.len();
        }
    }
    Some(count)
}

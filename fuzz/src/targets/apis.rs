//! Requests of clients, as the routes of every API read them.

use atoll_api_e2b::fuzzing as e2b;
use atoll_api_native::fuzzing as native;
use bytes::Bytes;

use super::{block_on, texts, with_unknown_field};

/// Every type that a route of ours reads; none takes a field that it does not know.
pub fn native_bodies(input: &[u8]) {
    let more = with_unknown_field(input);
    let _ = native::bodies(input, more.as_deref());
}

/// A query as every route reads it; none takes a parameter that it does not know. What a range asks for is there.
pub fn native_queries(input: &[u8]) {
    let Some(text) = texts(input).map(|texts| texts[0]) else {
        return;
    };
    // No query has one: it ends there.
    if !text.contains('#') {
        let _ = native::queries(text);
    }
    for size in [0, 1, 1000, u64::MAX] {
        if let Some((first, length)) = native::range(text, size) {
            let end = first.checked_add(length);
            assert!(
                length > 0 && end.is_some_and(|end| end <= size),
                "{length} bytes from {first} of {size}"
            );
        }
    }
}

/// Every type of the control plane; and what steps of a build become is a Dockerfile with just these steps.
pub fn e2b_bodies(input: &[u8]) {
    let _ = e2b::bodies(input, with_unknown_field(input).as_deref());
    if let Some(dockerfile) = e2b::recipe("base", input) {
        let parsed = atoll_image::parse_dockerfile(&dockerfile).expect("our own Dockerfiles can be read");
        assert_eq!(parsed.stages.len(), 1, "a step became a stage");
        let steps = parsed.stages[0].steps.len() + 1;
        assert_eq!(
            steps,
            dockerfile.lines().count(),
            "a step became another: {dockerfile}"
        );
    }
}

/// Frames are the same however they are cut, and messages in both codecs say the same.
pub fn e2b_messages(input: &[u8]) {
    let whole = e2b::frames(input, usize::MAX);
    for piece in [1, 5, 64] {
        assert_eq!(
            e2b::frames(input, piece),
            whole,
            "other frames in pieces of {piece}"
        );
    }
    for payload in whole.into_iter().flatten() {
        let _ = e2b::envd(&payload);
    }
    let _ = e2b::envd(input);
}

/// A boundary or link, then a body.
pub fn e2b_uploads(input: &[u8]) {
    let split = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (first, rest) = (&input[..split], input.get(split + 1..).unwrap_or_default());
    if let Ok(first) = std::str::from_utf8(first) {
        let _ = e2b::link(first, "token", rest.len() % 2 == 0);
        for piece in [7, 4096] {
            let body = rest.chunks(piece).map(Bytes::copy_from_slice).collect();
            if let Some(count) = block_on(e2b::parts(body, first)) {
                assert!(count <= rest.len(), "{count} bytes of files in {}", rest.len());
            }
        }
    }
    if let Some(user) = e2b::user(first) {
        assert!(!user.is_empty() && !user.contains(':'));
    }
}

//! Attacks on money and keys: hang-ups, limits that contradict each other, what has no price, providers that move.
//!
//! Whether they paid off is told at the end, when what the provider bills is held against what was booked; only the keys of
//! providers are looked for here.

use std::time::Duration;

use futures_util::StreamExt as _;
use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::Hand;
use crate::soak::random::Random;
use crate::soak::world::PROVIDER_KEY;

/// Reads so much of a stream and leaves: at the head, in the middle, before the usage comes.
pub(super) async fn hangups(hand: &Hand, random: &mut Random) -> u64 {
    let caller = &hand.caller;
    let model = caller.project.streams();
    let mut moves = 0;
    for _ in 0..12 {
        let (path, body) = match random.below(3) {
            0 => (
                "/v1/chat/completions",
                json!({"model": model, "stream": true, "max_tokens": 100,
                    "messages": [{"role": "user", "content": "go"}], "stream_options": {"include_usage": random.chance(2)}}),
            ),
            1 => (
                "/v1/messages",
                json!({"model": format!("claude/{model}"), "stream": true, "max_tokens": 100,
                    "messages": [{"role": "user", "content": "go"}]}),
            ),
            _ => (
                "/v1/responses",
                json!({"model": model, "stream": true, "max_output_tokens": 100, "input": "go"}),
            ),
        };
        let request = caller
            .bare(Method::POST, path)
            .bearer_auth(&caller.project.model_key)
            .json(&body);
        let (pieces, millis) = (random.below(26), random.below(30));
        moves += 1;
        let Ok(Ok(answer)) = tokio::time::timeout(Duration::from_secs(10), request.send()).await else {
            continue;
        };
        let mut stream = answer.bytes_stream();
        for _ in 0..pieces {
            let Ok(Some(Ok(piece))) = tokio::time::timeout(Duration::from_secs(5), stream.next()).await
            else {
                break;
            };
            hand.world().search(caller.project.index, "hangups", &piece);
            // At its last word, before what it used is told.
            let text = String::from_utf8_lossy(&piece);
            if random.chance(2) && (text.contains("finish_reason\":\"") || text.contains("output_item.done"))
            {
                break;
            }
        }
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }
    moves
}

/// Asks for much while it says little.
pub(super) async fn limits(hand: &Hand, random: &mut Random) -> u64 {
    let caller = &hand.caller;
    let many = 2000 + random.below(2000);
    let said = json!([{"role": "user", "content": "go"}]);
    let model = "scripted-full";
    let calls = [
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": many, "max_completion_tokens": 1, "messages": said}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": 1, "max_completion_tokens": many, "messages": said}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_output_tokens": 1, "max_tokens": many, "messages": said, "n": 3}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "max_output_tokens": 1, "max_tokens": many, "input": "go"}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "max_output_tokens": many, "input": "go", "background": true}),
        ),
        (
            "/v1/responses",
            json!({"model": model, "max_output_tokens": many, "input": "go", "tools": [{"type": "web_search"}]}),
        ),
        (
            "/v1/messages",
            json!({"model": format!("claude/{model}"), "max_tokens": 1, "max_completion_tokens": many, "messages": said}),
        ),
        (
            "/v1/messages",
            json!({"model": format!("claude/{model}"), "max_tokens": many, "messages": said, "service_tier": "priority",
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 50}]}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": many, "messages": said, "service_tier": "priority"}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": -1, "messages": said}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": model, "max_tokens": u64::MAX, "max_completion_tokens": 1, "messages": said}),
        ),
    ];
    let mut moves = 0;
    for (path, body) in calls {
        let request = caller
            .bare(Method::POST, path)
            .bearer_auth(&caller.project.model_key)
            .timeout(Duration::from_secs(10))
            .json(&body);
        moves += 1;
        let _whatever = caller.attempt("limits", request).await;
    }
    moves
}

/// A provider that is moved without its key being given again must not be sent the old one.
pub(super) async fn providers(hand: &Hand, random: &mut Random) -> u64 {
    let caller = &hand.caller;
    let Ok(sink) = TcpListener::bind("127.0.0.1:0").await else {
        return 0;
    };
    let Ok(address) = sink.local_addr() else {
        return 0;
    };
    let name = format!("moving-{}", random.word());
    let secret = format!("{PROVIDER_KEY}{}", random.word());
    let path = format!("/v1/gateway/providers/{name}");
    let first = json!({"kind": "openai", "base_url": format!("{}/v1", hand.world().provider), "key": secret});
    let _set = caller.attempt("providers", caller.put(&path, &first)).await;
    let moved = json!({"kind": "openai", "base_url": format!("http://{address}/v1")});
    let _moved = caller.attempt("providers", caller.put(&path, &moved)).await;
    let catching = async {
        let mut heard = Vec::new();
        if let Ok((mut stream, _)) = sink.accept().await {
            let mut buffer = [0; 16 * 1024];
            let read = tokio::time::timeout(Duration::from_secs(2), stream.read(&mut buffer)).await;
            if let Ok(Ok(count)) = read {
                heard.extend_from_slice(&buffer[..count]);
            }
            let _sent = stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                .await;
        }
        heard
    };
    let body = json!({"model": format!("{name}/scripted-echo"), "max_tokens": 5,
        "messages": [{"role": "user", "content": "go"}]});
    let request = caller
        .post("/v1/chat/completions", &body)
        .timeout(Duration::from_secs(4));
    let asking = caller.attempt("providers", request);
    let (heard, _) = tokio::join!(tokio::time::timeout(Duration::from_secs(5), catching), asking);
    let heard = heard.unwrap_or_default();
    if String::from_utf8_lossy(&heard).contains(&secret) {
        hand.got(
            "a provider's key was read back",
            "its address was changed, and the key went to the new one",
        );
    }
    let _gone = caller.attempt("providers", caller.delete(&path)).await;
    4
}

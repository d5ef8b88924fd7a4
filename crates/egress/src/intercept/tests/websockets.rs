//! WebSockets: asked for, agreed to, refused.

use atoll_types::{Injection, NetworkRule, RuleAction, SecretBinding};
use futures_util::{SinkExt, StreamExt};
use hyper::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{accept_hdr_async, client_async};

use super::world::{Behaviour, HOST, Setup, binding, echo, exchange, raw};

const VALUE: &str = "ws-0123456789abcdefghij";

/// Answers each message; the first one is what the request said about itself.
#[allow(clippy::result_large_err, reason = "the library's type")]
fn answering() -> Behaviour {
    raw(|stream| async move {
        let mut authorization = String::new();
        let look = |request: &Request, response: Response| {
            if let Some(value) = request.headers().get("authorization") {
                authorization = value.to_str().unwrap().to_owned();
            }
            Ok(response)
        };
        let Ok(mut socket) = accept_hdr_async(stream, look).await else {
            return;
        };
        socket.send(Message::text(authorization)).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if !message.is_text() && !message.is_binary() {
                continue;
            }
            socket.send(message).await.unwrap();
        }
    })
}

#[tokio::test]
async fn a_websocket_goes_through_after_its_request_was_allowed() {
    for tls in [true, false] {
        let bound = SecretBinding {
            plain_http: true,
            ports: vec!["80".parse().unwrap(), "443".parse().unwrap()],
            ..binding(Injection::Bearer)
        };
        let setup = match tls {
            true => Setup::new(answering()),
            false => Setup::plain(answering()),
        };
        let mut world = setup.bound("token", VALUE, bound).start();
        let stream = world.bytes(&["http/1.1"]).await;
        let url = if tls {
            "wss://api.test/ws"
        } else {
            "ws://api.test/ws"
        };
        let (mut socket, _) = client_async(url, stream).await.unwrap();
        let first = socket.next().await.unwrap().unwrap();
        assert_eq!(first.into_text().unwrap(), format!("Bearer {VALUE}"));
        for message in [Message::text("hello"), Message::binary(vec![7u8; 300_000])] {
            socket.send(message.clone()).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), message);
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
        drop(socket);
        world.ended().await.unwrap();
    }
}

#[tokio::test]
async fn a_websocket_that_is_not_allowed_is_refused() {
    let mut setup = Setup::new(answering());
    setup.rules = vec![NetworkRule {
        paths: vec!["/allowed".to_owned()],
        ..NetworkRule::new(RuleAction::Allow, HOST)
    }];
    let mut world = setup.start();
    let stream = world.bytes(&["http/1.1"]).await;
    match client_async("wss://api.test/ws", stream).await {
        Err(Error::Http(response)) => assert_eq!(response.status(), StatusCode::FORBIDDEN),
        other => panic!("{other:?}"),
    }
    let stream = world.bytes(&["http/1.1"]).await;
    client_async("wss://api.test/allowed", stream).await.unwrap();
}

#[tokio::test]
async fn echoes_cannot_be_blotted_out_of_a_websocket_so_it_is_refused() {
    let bound = SecretBinding {
        redact: true,
        ..binding(Injection::Bearer)
    };
    let mut world = Setup::new(answering()).bound("token", VALUE, bound).start();
    let stream = world.bytes(&["http/1.1"]).await;
    match client_async("wss://api.test/ws", stream).await {
        Err(Error::Http(response)) => {
            assert_eq!(response.status(), StatusCode::FORBIDDEN);
            assert_eq!(response.headers()["x-atoll-denied"], "secret: redact");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_server_that_does_not_agree_gets_no_tunnel() {
    // Answers with another accept key: somebody made it say 101 for another reason.
    let lying = || {
        raw(|mut stream| async move {
            let mut seen = Vec::new();
            while !seen.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => seen.push(byte),
                    Err(_) => return,
                }
            }
            let _ = stream
                .write_all(
                    b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                      sec-websocket-accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\n",
                )
                .await;
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            assert!(rest.is_empty(), "bytes went through");
        })
    };
    let mut world = Setup::new(lying()).start();
    let stream = world.bytes(&["http/1.1"]).await;
    let request = "wss://api.test/ws".into_client_request().unwrap();
    match client_async(request, stream).await {
        Err(Error::Http(response)) => assert_eq!(response.status(), StatusCode::BAD_GATEWAY),
        other => panic!("{other:?}"),
    }
    // Nor does one that was not asked.
    let mut world = Setup::new(lying()).start();
    let (response, _) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn only_a_proper_wish_for_a_websocket_is_passed_on() {
    let mut world = Setup::new(echo()).start();
    let mut sender = world.http1().await;
    let proper = [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-version", "13"),
    ];
    let (_, body) = exchange(&mut sender, "GET", "/", &proper, "").await;
    assert!(body.contains("upgrade: websocket\n"), "{body}");
    for spoil in 0..4 {
        let mut headers = proper;
        headers[spoil].1 = "other";
        // Any key will do.
        let expected = spoil == 2;
        let (_, body) = exchange(&mut sender, "GET", "/", &headers, "").await;
        assert_eq!(body.contains("upgrade:"), expected, "{body}");
        let (_, body) = exchange(&mut sender, "POST", "/", &proper, "").await;
        assert!(!body.contains("upgrade:"), "{body}");
    }
}

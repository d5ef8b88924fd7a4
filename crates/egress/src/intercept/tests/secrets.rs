//! Secrets on their way out, and their echoes on the way in.

use parking_lot::Mutex;
use std::sync::Arc;

use atoll_broker::TrustId;
use atoll_types::{Injection, NetworkRule, RuleAction, SecretBinding, Timestamp};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::{HOST, Setup, Told, binding, echo, exchange, full, http};

const VALUE: &str = "ghp_0123456789abcdefABCDEF0123456789abcd";

#[tokio::test]
async fn a_secret_goes_out_in_the_shape_of_its_binding() {
    let header = Injection::Header {
        name: "X-Api-Key".to_owned(),
    };
    let basic = Injection::Basic {
        username: "me".to_owned(),
    };
    let query = Injection::Query {
        name: "key".to_owned(),
    };
    let pair = STANDARD.encode(format!("me:{VALUE}"));
    for (inject, sent, expected) in [
        (header, "/", format!("x-api-key: {VALUE}\n")),
        (Injection::Bearer, "/", format!("authorization: Bearer {VALUE}\n")),
        (basic, "/", format!("authorization: Basic {pair}\n")),
        (query.clone(), "/p", format!("GET /p?key={VALUE}\n")),
        (
            query,
            "/p?a=%20b&key=mine&k%65y=too&z",
            format!("GET /p?a=%20b&z&key={VALUE}\n"),
        ),
    ] {
        let mut world = Setup::new(echo()).secret("token", VALUE, inject).start();
        // What the guest sends in its place does not get through.
        let headers = [
            ("authorization", "Bearer mine"),
            ("x-api-key", "mine"),
            ("x-api-key", "mine too"),
            ("x-other", "kept"),
        ];
        let (response, body) = world.get(sent, &headers).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(
            body.contains(&expected) && body.contains("x-other: kept\n"),
            "{body}"
        );
        assert_eq!(
            body.matches(VALUE).count() + body.matches(&pair).count(),
            1,
            "{body}"
        );
        assert_eq!(world.told()[1..], [Told::Used("token".to_owned())]);
    }
}

#[tokio::test]
async fn a_placeholder_is_replaced_wherever_it_stands() {
    let mut world = Setup::new(echo())
        .secret("token", VALUE, Injection::Placeholder)
        .start();
    let placeholder = world.placeholder("token");
    assert!(placeholder.starts_with("ghp_") && placeholder.len() == VALUE.len());
    let basic = |text: &str| format!("Basic {}", STANDARD.encode(format!("user:{text}")));
    for (path, headers, expected) in [
        (
            "/".to_owned(),
            vec![("authorization", format!("token {placeholder}"))],
            format!("authorization: token {VALUE}\n"),
        ),
        (
            "/".to_owned(),
            vec![("authorization", basic(&placeholder))],
            format!("authorization: {}\n", basic(VALUE)),
        ),
        (
            "/".to_owned(),
            vec![("x-any", format!("a={placeholder};b={placeholder}"))],
            format!("x-any: a={VALUE};b={VALUE}\n"),
        ),
        (
            format!("/?a=1&key={placeholder}&b"),
            vec![],
            format!("GET /?a=1&key={VALUE}&b\n"),
        ),
        (
            format!("/?key=%67{}", &placeholder[1..]),
            vec![],
            format!("GET /?key={VALUE}\n"),
        ),
    ] {
        let headers: Vec<_> = headers
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        let (response, body) = world.get(&path, &headers).await;
        assert_eq!(response.status(), StatusCode::OK, "{body}");
        assert!(body.contains(&expected), "{body}");
        assert!(!body.contains(&placeholder));
    }
    // Without it, nothing goes out.
    let before = world.told().len();
    let (_, body) = world.get("/", &[]).await;
    assert!(!body.contains(VALUE));
    assert_eq!(world.told().len(), before + 1);
}

#[tokio::test]
async fn a_placeholder_goes_nowhere_else() {
    let elsewhere = SecretBinding {
        hosts: vec!["other.test".to_owned()],
        ..binding(Injection::Placeholder)
    };
    let scoped = SecretBinding {
        methods: vec!["POST".to_owned()],
        paths: vec!["/upload/**".to_owned()],
        ..binding(Injection::Placeholder)
    };
    let mut setup = Setup::new(echo()).bound("elsewhere", VALUE, elsewhere).bound(
        "scoped",
        "xoxb-0123456789-abcdefghijklmnop",
        scoped,
    );
    setup.rules[0].paths = vec!["/**".to_owned()];
    let mut world = setup.start();
    let mut sender = world.http1().await;
    for secret in ["elsewhere", "scoped"] {
        let placeholder = world.placeholder(secret);
        let basic = format!("basic {}", STANDARD.encode(format!("{placeholder}:")));
        for (path, headers) in [
            (
                "/".to_owned(),
                vec![("authorization", format!("Bearer {placeholder}"))],
            ),
            ("/".to_owned(), vec![("authorization", basic.clone())]),
            ("/".to_owned(), vec![("cookie", format!("a=b; c={placeholder}"))]),
            (format!("/?q={placeholder}"), vec![]),
            (format!("/?{placeholder}"), vec![]),
            (format!("/{placeholder}"), vec![]),
            (
                format!(
                    "/?q={}%{:02x}{}",
                    &placeholder[..4],
                    placeholder.as_bytes()[4],
                    &placeholder[5..]
                ),
                vec![],
            ),
        ] {
            let headers: Vec<_> = headers
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            let (response, body) = exchange(&mut sender, "GET", &path, &headers, "").await;
            assert_eq!(response.status(), StatusCode::FORBIDDEN, "{path} {body}");
            assert_eq!(response.headers()["x-atoll-denied"], format!("secret: {secret}"));
            assert!(
                body.contains("is not bound to this host") && !body.contains(&placeholder),
                "{body}"
            );
        }
    }
    assert_eq!(world.denials().len(), 14);
    assert!(!world.told().iter().any(|told| matches!(told, Told::Used(_))));
    // Where it is bound, it works; in the path it cannot be replaced, and does not go out.
    let placeholder = world.placeholder("scoped");
    let header = format!("Bearer {placeholder}");
    let (response, body) = exchange(
        &mut sender,
        "POST",
        "/upload/x",
        &[("authorization", &header)],
        "",
    )
    .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(
        body.contains("Bearer xoxb-0123456789-abcdefghijklmnop\n"),
        "{body}"
    );
    let (response, body) = exchange(&mut sender, "POST", &format!("/upload/{placeholder}"), &[], "").await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert!(body.contains("where it is not replaced"), "{body}");
}

#[tokio::test]
async fn the_placeholder_of_another_sandbox_is_worth_nothing() {
    let mut world = Setup::new(echo())
        .secret("token", VALUE, Injection::Placeholder)
        .start();
    let id = world.grants[0].secret.id.clone();
    let theirs = world.broker.placeholder(&TrustId::new("another"), &id).unwrap();
    assert_ne!(theirs, world.placeholder("token"));
    let (_, body) = world
        .get("/", &[("authorization", &format!("Bearer {theirs}"))])
        .await;
    assert!(!body.contains(VALUE) && body.contains(&theirs), "{body}");
}

#[tokio::test]
async fn a_header_that_is_overwritten_may_hold_the_placeholder() {
    // As clients do that read their key from a variable.
    let mut world = Setup::new(echo())
        .secret("token", VALUE, Injection::Bearer)
        .start();
    let placeholder = world.placeholder("token");
    let (response, body) = world
        .get("/", &[("authorization", &format!("Bearer {placeholder}"))])
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(
        body.contains(&format!("authorization: Bearer {VALUE}\n")),
        "{body}"
    );
    let (response, body) = world.get("/", &[("x-api-key", &placeholder)]).await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert!(body.contains("where it is not replaced"), "{body}");
}

#[tokio::test]
async fn a_new_value_is_used_by_the_next_request() {
    let mut world = Setup::new(echo())
        .secret("token", VALUE, Injection::Bearer)
        .start();
    let mut sender = world.http1().await;
    let (_, body) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert!(body.contains(VALUE));
    world.rotate("token", "the-second-value", None);
    let (_, body) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert!(
        body.contains("Bearer the-second-value\n") && !body.contains(VALUE),
        "{body}"
    );
    // Expired: nothing goes out, neither the value nor the request without it.
    world.rotate("token", "the-third-value", Some(Timestamp(1)));
    let (response, body) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert!(body.contains("secret `token` has expired"), "{body}");
    world.broker.forget(&world.grants[0].secret.id);
    let (response, _) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert_eq!(world.denials(), ["secret: token"; 2]);
}

#[tokio::test]
async fn a_value_that_would_break_a_head_stays_here() {
    for inject in [Injection::Bearer, Injection::Placeholder] {
        let mut world = Setup::new(echo())
            .secret("token", "line one\r\nx-evil: line two, and more", inject)
            .start();
        let placeholder = world.placeholder("token");
        let (response, body) = world
            .get("/", &[("authorization", &format!("Bearer {placeholder}"))])
            .await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        assert!(
            body.contains("cannot stand in a header") && !body.contains("evil"),
            "{body}"
        );
    }
}

#[tokio::test]
async fn over_plain_http_a_secret_needs_the_owners_word() {
    for plain_http in [false, true] {
        let binding = SecretBinding {
            plain_http,
            ports: vec!["80".parse().unwrap()],
            ..binding(Injection::Bearer)
        };
        let mut world = Setup::plain(echo()).bound("token", VALUE, binding).start();
        let (response, body) = world.get("/", &[]).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(body.contains(VALUE), plain_http);
    }
}

fn redacting(inject: Injection) -> SecretBinding {
    SecretBinding {
        redact: true,
        ..binding(inject)
    }
}

#[tokio::test]
async fn echoes_are_blotted_out_of_headers_always_and_of_bodies_when_asked() {
    for redact in [false, true] {
        let binding = SecretBinding {
            redact,
            ..binding(Injection::Bearer)
        };
        let mut world = Setup::new(http(|request: Request<Incoming>| async move {
            let sent = request.headers()["authorization"].to_str().unwrap().to_owned();
            let encoded = STANDARD.encode(&sent);
            let mut response = Response::new(full(format!("you said {sent}, that is {encoded}")));
            response.headers_mut().insert("x-echo", sent.parse().unwrap());
            response
        }))
        .bound("token", VALUE, binding)
        .start();
        let (response, body) = world.get("/", &[]).await;
        let stars = "*".repeat(VALUE.len());
        assert_eq!(response.headers()["x-echo"], format!("Bearer {stars}"));
        assert_eq!(body.contains(VALUE), !redact);
        if redact {
            assert!(
                body.starts_with(&format!("you said Bearer {stars}, that is ")),
                "{body}"
            );
            assert!(
                !body.contains(&STANDARD.encode(format!("Bearer {VALUE}"))[12..40]),
                "{body}"
            );
        }
    }
}

#[tokio::test]
async fn an_echo_that_comes_in_pieces_is_found() {
    let mut world = Setup::new(http(|_| async {
        let text = format!("data: {VALUE}\n\ndata: ghp_0123 and on\n\n{VALUE}");
        let frames: Vec<_> = text
            .as_bytes()
            .chunks(3)
            .map(|piece| Ok(Frame::data(bytes::Bytes::copy_from_slice(piece))))
            .collect();
        Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed())
    }))
    .bound("token", VALUE, redacting(Injection::Bearer))
    .start();
    let stars = "*".repeat(VALUE.len());
    let expected = format!("data: {stars}\n\ndata: ghp_0123 and on\n\n{stars}");
    let (_, body) = world.get("/", &[]).await;
    assert_eq!(body, expected);
    let mut sender = world.http2().await;
    let request = Request::get("https://api.test/").body(full("")).unwrap();
    let (_, body) = super::world::read(sender.send_request(request).await.unwrap()).await;
    assert_eq!(body, expected);
}

#[tokio::test]
async fn an_answer_that_is_to_be_redacted_is_asked_for_whole_and_plain() {
    let mut world = Setup::new(echo())
        .bound("token", VALUE, redacting(Injection::Bearer))
        .start();
    let headers = [
        ("accept-encoding", "gzip, br"),
        ("range", "bytes=0-3"),
        ("if-range", "x"),
    ];
    let (_, body) = world.get("/", &headers).await;
    assert!(
        body.contains("accept-encoding: identity\n") && !body.contains("range"),
        "{body}"
    );

    // A server that compresses all the same gets an error in its place.
    let mut world = Setup::new(http(|_| async {
        let mut response = Response::new(full("not really gzip"));
        response
            .headers_mut()
            .insert("content-encoding", "gzip".parse().unwrap());
        response
    }))
    .bound("token", VALUE, redacting(Injection::Bearer))
    .start();
    let (response, body) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(response.headers()["x-atoll-failed"], "upstream_encoded");
    assert!(!body.contains("gzip"), "{body}");
}

#[tokio::test]
async fn what_went_out_before_is_found_in_a_later_answer_to_another_request() {
    let stored = Arc::new(Mutex::new(String::new()));
    let mut world = Setup::new(http(move |request: Request<Incoming>| {
        let stored = stored.clone();
        async move {
            if let Some(value) = request.headers().get("authorization") {
                *stored.lock() = value.to_str().unwrap().to_owned();
            }
            Response::new(full(stored.lock().clone()))
        }
    }))
    .bound(
        "token",
        VALUE,
        SecretBinding {
            paths: vec!["/login".to_owned()],
            ..redacting(Injection::Bearer)
        },
    )
    .start();
    let mut sender = world.http1().await;
    for path in ["/login", "/show"] {
        let (_, body) = exchange(&mut sender, "GET", path, &[], "").await;
        assert_eq!(body, format!("Bearer {}", "*".repeat(VALUE.len())), "{path}");
    }
    assert_eq!(
        world
            .told()
            .iter()
            .filter(|told| matches!(told, Told::Used(_)))
            .count(),
        1
    );
}

#[tokio::test]
async fn a_request_that_is_answered_with_itself_is_refused() {
    let mut setup = Setup::new(echo()).secret("token", VALUE, Injection::Bearer);
    setup.rules = vec![NetworkRule::new(RuleAction::Allow, HOST)];
    let mut world = setup.start();
    let mut sender = world.http1().await;
    let (response, _) = exchange(&mut sender, "TRACE", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
}

/// An answer has more places than headers and body.
#[tokio::test]
async fn no_part_of_an_answer_repeats_a_secret() {
    let stars = "*".repeat(VALUE.len());
    // Trailers, over both versions, whether or not the body is searched.
    for redact in [false, true] {
        for http2 in [false, true] {
            let bound = SecretBinding {
                redact,
                ..binding(Injection::Bearer)
            };
            let mut world = Setup::new(http(|_| async {
                let mut trailers = hyper::HeaderMap::new();
                trailers.insert("x-echo", VALUE.parse().unwrap());
                trailers.insert("alt-svc", "h3".parse().unwrap());
                let frames = [Ok(Frame::data("data".into())), Ok(Frame::trailers(trailers))];
                let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed());
                response
                    .headers_mut()
                    .insert("trailer", "x-echo, alt-svc".parse().unwrap());
                response
            }))
            .bound("token", VALUE, bound)
            .start();
            let response = match http2 {
                true => {
                    let request = Request::get("https://api.test/").header("te", "trailers");
                    let mut sender = world.http2().await;
                    sender.send_request(request.body(full("")).unwrap()).await
                }
                false => {
                    let request = Request::get("/").header("host", HOST).header("te", "trailers");
                    let mut sender = world.http1().await;
                    sender.send_request(request.body(full("")).unwrap()).await
                }
            };
            let whole = response.unwrap().into_body().collect().await.unwrap();
            let trailers = whole.trailers().unwrap();
            assert_eq!(trailers["x-echo"], stars, "redact {redact}, http2 {http2}");
            assert!(!trailers.contains_key("alt-svc"));
        }
    }
    // The words behind the status, an early hint, cookies and redirects.
    let script = format!(
        "HTTP/1.1 103 Early {VALUE}\r\nLink: <{VALUE}>\r\n\r\nHTTP/1.1 302 Moved to {VALUE}\r\nSet-Cookie: a={VALUE}\r\n\
         Location: /{VALUE}\r\nContent-Length: 0\r\n\r\n"
    );
    let answers = said(&script, "").await;
    assert!(answers.starts_with("HTTP/1.1 302 "), "{answers}");
    assert!(answers.contains(&format!("a={stars}")) && answers.contains(&format!("/{stars}")));
    assert!(
        !answers.contains(VALUE) && !answers.contains("Early"),
        "{answers}"
    );
    // The same of an answer that becomes a WebSocket.
    let script = format!(
        "HTTP/1.1 101 {VALUE}\r\nUpgrade: websocket\r\nConnection: upgrade\r\nAlt-Svc: h3\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\nSec-WebSocket-Protocol: {VALUE}\r\n\r\n"
    );
    let wish = "Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n\
                Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let answers = said(&script, wish).await;
    assert!(answers.starts_with("HTTP/1.1 101 "), "{answers}");
    assert!(answers.contains(&stars) && !answers.contains(VALUE), "{answers}");
    assert!(!answers.to_lowercase().contains("alt-svc"), "{answers}");
}

/// What the guest reads, to the byte, when the server says this.
async fn said(script: &str, headers: &str) -> String {
    let script = script.to_owned();
    let mut world = Setup::new(super::world::raw(move |mut stream| {
        let script = script.clone();
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(script.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
        }
    }))
    .secret("token", VALUE, Injection::Bearer)
    .start();
    let mut stream = world.bytes(&["http/1.1"]).await;
    let request = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => answer.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(answer).unwrap()
}

/// Parts that nobody asked for may cut a value in two.
#[tokio::test]
async fn an_answer_in_parts_is_not_searched_but_refused() {
    let mut world = Setup::new(http(|_| async {
        let mut response = Response::new(full("half a value"));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        response
    }))
    .bound("token", VALUE, redacting(Injection::Bearer))
    .start();
    let (response, body) = world.get("/", &[]).await;
    assert_eq!(response.headers()["x-atoll-failed"], "upstream_encoded");
    assert!(!body.contains("half"), "{body}");
}

/// A value that may no longer be sent is still one that the server was sent before.
#[tokio::test]
async fn an_expired_secret_is_still_blotted_out() {
    let mut world = Setup::new(http(|_| async { Response::new(full(VALUE)) }))
        .bound(
            "token",
            VALUE,
            SecretBinding {
                paths: vec!["/login".to_owned()],
                ..redacting(Injection::Bearer)
            },
        )
        .start();
    world.rotate("token", VALUE, Some(Timestamp(1)));
    let (_, body) = world.get("/", &[]).await;
    assert_eq!(body, "*".repeat(VALUE.len()));
}

/// Behind a body, nothing is replaced; so a placeholder there does not go out.
#[tokio::test]
async fn a_placeholder_behind_a_body_is_not_forwarded() {
    let mut world = Setup::new(echo())
        .secret("token", VALUE, Injection::Placeholder)
        .start();
    let placeholder = world.placeholder("token");
    let mut trailers = hyper::HeaderMap::new();
    trailers.insert("x-key", placeholder.parse().unwrap());
    let frames = [Ok(Frame::data("data".into())), Ok(Frame::trailers(trailers))];
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed();
    let request = Request::post("https://api.test/").body(body).unwrap();
    let mut sender = world.http2().await;
    match sender.send_request(request).await {
        Ok(response) => assert_ne!(response.status(), StatusCode::OK),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

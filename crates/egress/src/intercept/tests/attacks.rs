//! What hostile guests and servers try at the point where connections are read.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

use atoll_types::{Injection, NetworkRule, RuleAction};
use hyper::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::{Behaviour, HOST, Setup, full, http, raw};

/// Writes down which requests reach the server, and nothing but.
fn noting() -> (Behaviour, Arc<Mutex<Vec<String>>>) {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let notes = seen.clone();
    let behaviour = http(move |request: Request<hyper::body::Incoming>| {
        let notes = notes.clone();
        async move {
            let host = request
                .headers()
                .get("host")
                .map_or("", |host| host.to_str().unwrap());
            let note = format!("{} {host}{}", request.method(), request.uri());
            notes.lock().push(note);
            let _ = http_body_util::BodyExt::collect(request.into_body()).await;
            Response::new(full("ok"))
        }
    });
    (behaviour, seen)
}

#[tokio::test]
async fn what_two_servers_may_read_differently_does_not_get_past_the_policy() {
    // Each tries to have `/hidden` reach the server within, behind or instead of something that is allowed.
    let hidden = "GET /hidden HTTP/1.1\r\nHost: api.test\r\n\r\n";
    let corpus = [
        // A length and chunks.
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: {}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
            hidden.len() + 5
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG{hidden}"
        ),
        // Two lengths.
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\nContent-Length: {}\r\n\r\n{hidden}",
            hidden.len()
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0, {}\r\n\r\n{hidden}",
            hidden.len()
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: +{}\r\n\r\n{hidden}",
            hidden.len()
        ),
        format!("POST /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0x5\r\n\r\n{hidden}"),
        // Chunks in disguise.
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding\r\n : chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.0\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"
        ),
        // Chunks of odd sizes.
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n1ffffffffffffffff\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabX\r\n0\r\n\r\n{hidden}"
        ),
        format!(
            "POST /open HTTP/1.1\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n0;a\nb\r\n\r\n{hidden}"
        ),
        // Lines that end in odd ways, and what is not a line.
        format!("GET /open HTTP/1.1\r\nHost: api.test\r\nX: a\rContent-Length: 9\r\n\r\n{hidden}"),
        format!("GET /open HTTP/1.1\r\nHost: api.test\r\nX: a\0b\r\n\r\n{hidden}"),
        format!("GET /open HTTP/1.1\nHost: api.test\n\n{hidden}"),
        format!("GET /open\r\n{hidden}"),
        format!("GET /open HTTP/1.1 HTTP/1.1\r\nHost: api.test\r\n\r\n{hidden}"),
        format!("GET /open HTTP/3.7\r\nHost: api.test\r\n\r\n{hidden}"),
        format!("GET /open HTTP/1.1\r\n: empty\r\nHost: api.test\r\n\r\n{hidden}"),
        // Another host.
        "GET http://evil.test/open HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open HTTP/1.1\r\nHost: evil.test\r\n\r\n".to_owned(),
        "GET /open HTTP/1.1\r\nHost: api.test\r\nHost: evil.test\r\n\r\n".to_owned(),
        "GET /open HTTP/1.1\r\nHost: evil.test\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open HTTP/1.1\r\nHost: api.test\r\nX: y\r\nhOsT: evil.test\r\n\r\n".to_owned(),
        "GET /open HTTP/1.1\r\n\r\n".to_owned(),
        "GET /open HTTP/1.0\r\n\r\n".to_owned(),
        "GET http://api.test@evil.test/open HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        // A way through.
        "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n".to_owned(),
        format!("CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\n{hidden}"),
        "TRACE /open HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        // Something else from now on.
        format!(
            "GET /open HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade\r\nUpgrade: anything\r\n\r\n{hidden}"
        ),
        format!(
            "GET /open HTTP/1.1\r\nHost: api.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n{hidden}"
        ),
        format!("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{hidden}"),
        // Paths that change their meaning on the way.
        "GET /open/../hidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open/%2e%2e/hidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open/..%2fhidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open\\..\\hidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /open;/../hidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET //hidden HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /hidden#/open HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET /hidden?/open HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        "GET * HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned(),
        // Whether the allowed one comes first, and another by its side on the same connection, does not matter.
        format!("GET /open HTTP/1.1\r\nHost: api.test\r\n\r\n{hidden}"),
        format!(
            "GET /open HTTP/1.1\r\nHost: api.test\r\nContent-Length: {}\r\n\r\n{hidden}",
            hidden.len()
        ),
    ];
    for attack in corpus {
        let (behaviour, seen) = noting();
        let mut setup = Setup::plain(behaviour);
        setup.rules = vec![NetworkRule {
            paths: vec!["/open".to_owned()],
            ..NetworkRule::new(RuleAction::Allow, HOST)
        }];
        let mut world = setup.start();
        let mut stream = world.bytes(&[]).await;
        // Some are refused before all was written.
        let _ = stream.write_all(attack.as_bytes()).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        for request in seen.lock().iter() {
            assert!(
                ["GET api.test/open", "POST api.test/open"].contains(&request.as_str()),
                "{attack:?} got through as {request}, and was answered {answer}"
            );
        }
        for status in answer.lines().filter(|line| line.starts_with("HTTP/1.1 ")) {
            assert!(
                status.starts_with("HTTP/1.1 4")
                    || status.starts_with("HTTP/1.1 200")
                    || status.starts_with("HTTP/1.1 501"),
                "{attack:?} was answered {answer}"
            );
        }
    }
}

#[tokio::test]
async fn a_head_without_end_is_refused_early() {
    let (behaviour, seen) = noting();
    let mut world = Setup::plain(behaviour).start();
    let mut stream = world.bytes(&[]).await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\nX-Long: ")
        .await
        .unwrap();
    // A gigabyte, if anybody took it.
    let piece = [b'a'; 64 * 1024];
    let mut taken = 0;
    let (mut reading, mut writing) = tokio::io::split(stream);
    let answer = tokio::spawn(async move {
        let mut answer = Vec::new();
        let _ = reading.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    });
    while taken < 1 << 30 && writing.write_all(&piece).await.is_ok() {
        taken += piece.len();
    }
    assert!(taken < 1 << 20, "{taken} bytes were taken");
    let answer = answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn too_many_headers_are_refused() {
    let (behaviour, seen) = noting();
    let mut world = Setup::plain(behaviour).start();
    let mut stream = world.bytes(&[]).await;
    let mut head = "GET / HTTP/1.1\r\nHost: api.test\r\n".to_owned();
    for number in 0..200 {
        head.push_str(&format!("x-{number}: y\r\n"));
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn long_heads_are_refused_over_http2_too() {
    let (behaviour, seen) = noting();
    let mut world = Setup::new(behaviour).start();
    let mut sender = world.http2().await;
    let request = Request::get("https://api.test/")
        .header("x-long", "a".repeat(100_000))
        .body(full(""))
        .unwrap();
    // The limit is announced, so a client may refuse it itself.
    if let Ok(response) = sender.send_request(request).await {
        assert_eq!(response.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    }
    assert!(seen.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_sends_its_head_slowly_is_let_go() {
    let (behaviour, seen) = noting();
    let mut world = Setup::plain(behaviour).start();
    let mut stream = world.bytes(&[]).await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: api.test\r\n")
        .await
        .unwrap();
    // A header every ten seconds, for ever. The clock is the runtime's: it does not take ten seconds.
    let mut headers = 0;
    while stream.write_all(b"x: y\r\n").await.is_ok() {
        headers += 1;
        assert!(headers < 100, "it is still being listened to");
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert!(world.ended().await.is_err());
    assert!(seen.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_finish_its_handshake_is_let_go() {
    let (behaviour, _) = noting();
    let mut world = Setup::new(behaviour).start();
    let mut stream = world.raw();
    // The beginning of a ClientHello.
    stream.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252]).await.unwrap();
    assert!(world.ended().await.is_err());
    assert_eq!(world.dialled(), 0);
}

#[tokio::test]
async fn requests_that_are_taken_back_at_once_do_not_pile_up() {
    let (behaviour, _) = noting();
    let mut world = Setup::new(behaviour).start();
    let mut sender = world.http2().await;
    for _ in 0..2000 {
        let request = Request::get("https://api.test/").body(full("")).unwrap();
        let Ok(()) = sender.ready().await else { break };
        let mut call = Box::pin(sender.send_request(request));
        // Begun, then dropped: it is reset.
        let _ = futures_util::poll!(&mut call);
        drop(call);
        tokio::task::yield_now().await;
    }
    // The connection may have been ended for it; others go on.
    let mut sender = world.http2().await;
    let request = Request::get("https://api.test/").body(full("")).unwrap();
    assert_eq!(
        sender.send_request(request).await.unwrap().status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_server_with_a_bomb_of_certificates_is_not_listened_to() {
    let (behaviour, seen) = noting();
    let mut setup = Setup::new(behaviour);
    setup.padding = 400;
    let mut world = setup.start();
    let (response, body) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(body.contains("upstream_tls_failed"), "{body}");
    assert!(seen.lock().is_empty());
}

#[tokio::test]
async fn a_server_with_a_head_without_end_is_not_listened_to() {
    let mut world = Setup::new(raw(|mut stream| async move {
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nx-long: ").await;
        while stream.write_all(&[b'a'; 4096]).await.is_ok() {}
    }))
    .start();
    let (response, _) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn another_name_than_the_flow_was_let_through_for_gets_no_handshake() {
    let (behaviour, _) = noting();
    let mut world = Setup::new(behaviour).start();
    let stream = world.raw();
    let connector = tokio_rustls::TlsConnector::from(world.client_config(&[]));
    let other = rustls::pki_types::ServerName::try_from("evil.test").unwrap();
    assert!(connector.connect(other, stream).await.is_err());
    assert!(world.ended().await.is_err());
    assert_eq!(world.dialled(), 0);
}

#[tokio::test]
async fn an_error_says_nothing_of_the_secret_that_the_request_carried() {
    const VALUE: &str = "0123456789-very-secret";
    let query = Injection::Query {
        name: "key".to_owned(),
    };
    let mut world = Setup::new(raw(|mut stream| async move {
        let mut head = vec![0; 4096];
        let size = stream.read(&mut head).await.unwrap_or(0);
        // Throws everything back at the parser.
        let _ = stream.write_all(&head[..size]).await;
        let _ = stream.shutdown().await;
    }))
    .secret("bearer", VALUE, Injection::Bearer)
    .secret("query", VALUE, query)
    .start();
    let (response, body) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(
        !body.contains("secret") && !format!("{response:?}").contains(VALUE),
        "{body}"
    );
    assert!(!format!("{:?}", world.told()).contains(VALUE));
}

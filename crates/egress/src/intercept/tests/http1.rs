//! HTTP/1.1 through the interceptor: connections, decisions, failures, bodies that wait.

use std::sync::atomic::Ordering;

use atoll_policy::Decision;
use atoll_types::{EgressVerdict, NetworkRule, RuleAction};
use hyper::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::{HOST, Setup, Told, echo, exchange, full, http, policy, raw};
use crate::intercept::route::Undialled;

#[tokio::test]
async fn requests_share_a_connection_to_the_server() {
    for setup in [Setup::new(echo()), Setup::plain(echo())] {
        let mut world = setup.start();
        let mut sender = world.http1().await;
        for path in ["/a?x=1", "/b", "/c%20d//e?"] {
            let (response, body) = exchange(&mut sender, "POST", path, &[("x-mine", "yes")], "hello").await;
            assert_eq!(response.status(), StatusCode::OK);
            assert!(body.starts_with(&format!("POST {path}\n")), "{body}");
            assert!(
                body.contains("host: api.test\n") && body.contains("x-mine: yes\n"),
                "{body}"
            );
            assert!(
                body.contains("content-length: 5\n") && body.ends_with("body: 5\n"),
                "{body}"
            );
        }
        assert_eq!(world.dialled(), 1);
        let allowed = Told::Decided {
            allowed: true,
            rule: "rules[0]".to_owned(),
            method: "POST".to_owned(),
        };
        assert_eq!(world.told(), vec![allowed; 3]);
    }
}

#[tokio::test]
async fn a_port_that_is_not_the_usual_one_is_said_to_the_server() {
    let mut setup = Setup::new(echo());
    setup.port = 8443;
    setup.rules[0].ports = vec!["8443".parse().unwrap()];
    let mut world = setup.start();
    let (_, body) = world.get("/", &[("host", "API.test")]).await;
    assert!(body.contains("host: api.test:8443\n"), "{body}");
}

#[tokio::test]
async fn a_server_that_closes_is_dialled_again() {
    let mut world = Setup::new(http(|_| async {
        let mut response = Response::new(full("bye"));
        response
            .headers_mut()
            .insert("connection", "close".parse().unwrap());
        response
    }))
    .start();
    let mut sender = world.http1().await;
    for _ in 0..3 {
        let (response, body) = exchange(&mut sender, "GET", "/", &[], "").await;
        assert_eq!((response.status(), body.as_str()), (StatusCode::OK, "bye"));
        assert!(!response.headers().contains_key("connection"));
    }
    assert_eq!(world.dialled(), 3);
}

#[tokio::test]
async fn requests_are_allowed_and_denied_by_method_and_path() {
    let mut setup = Setup::new(echo());
    setup.rules = vec![NetworkRule {
        name: Some("read only".to_owned()),
        methods: vec!["GET".to_owned()],
        paths: vec!["/v1/**".to_owned()],
        ..NetworkRule::new(RuleAction::Allow, HOST)
    }];
    let mut world = setup.start();
    let mut sender = world.http1().await;
    let (response, _) = exchange(&mut sender, "GET", "/v1/models", &[], "").await;
    assert_eq!(response.status(), StatusCode::OK);
    for (method, path) in [
        ("POST", "/v1/models"),
        ("GET", "/v2/models"),
        ("GET", "/v1/../v2/x"),
        ("GET", "/v1/%2e%2e/v2"),
    ] {
        let (response, body) = exchange(&mut sender, method, path, &[], "some body").await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{method} {path}");
        assert!(response.headers().contains_key("x-atoll-denied"));
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["error"]["code"], "egress_denied");
        for field in ["message", "rule", "hint"] {
            assert!(
                body["error"][field].as_str().is_some_and(|text| !text.is_empty()),
                "{body}"
            );
        }
    }
    // The connection is still good.
    let (response, _) = exchange(&mut sender, "GET", "/v1/again", &[], "").await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(world.denials().len(), 4);
    assert!(!format!("{:?}", world.told()).contains("v1"));
}

#[tokio::test]
async fn a_change_of_policy_counts_for_the_next_request() {
    let mut world = Setup::new(echo()).start();
    let mut sender = world.http1().await;
    let (response, _) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::OK);
    world.change(|tenant| tenant.policy = policy(Vec::new(), &[]));
    let (response, _) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    assert_eq!(response.headers()["x-atoll-denied"], "default");
}

#[tokio::test]
async fn rules_about_addresses_count_for_what_was_dialled() {
    for tls in [true, false] {
        let mut setup = match tls {
            true => Setup::new(echo()),
            false => Setup::plain(echo()),
        };
        setup.rules = vec![NetworkRule::new(RuleAction::Allow, "192.0.2.0/24")];
        let (response, _) = setup.start().get("/", &[]).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_server_that_cannot_be_had_is_told_apart_from_a_refusal() {
    let mut world = Setup::new(echo()).start();
    let refuse = |why: &str| Undialled::Failed(why.to_owned());
    world
        .server()
        .refuses
        .lock()
        .extend([refuse("cannot connect: nobody is there"), refuse("again")]);
    let mut sender = world.http1().await;
    let (response, body) = exchange(&mut sender, "GET", "/secret-path?q=secret-query", &[], "").await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(response.headers()["x-atoll-failed"], "upstream_unreachable");
    assert!(
        body.contains("nobody is there") && !body.contains("secret"),
        "{body}"
    );
    // Each request tries anew.
    let (response, body) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(body.contains("again"), "{body}");
    let (response, _) = exchange(&mut sender, "GET", "/", &[], "").await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(world.server().dialled.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_refusal_of_the_address_is_a_refusal_and_no_secret_goes_out() {
    for setup in [Setup::new(echo()), Setup::plain(echo())] {
        let binding = atoll_types::SecretBinding {
            plain_http: true,
            ports: vec!["80".parse().unwrap(), "443".parse().unwrap()],
            ..super::world::binding(atoll_types::Injection::Bearer)
        };
        let mut world = setup.bound("token", "0123456789abcdef", binding).start();
        world
            .server()
            .refuses
            .lock()
            .push_back(Undialled::Denied(Decision {
                verdict: EgressVerdict::Denied,
                rule: "floor: private".into(),
                reason: "api.test is at 10.0.0.1, which is private".to_owned(),
            }));
        let (response, body) = world.get("/", &[]).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        assert_eq!(response.headers()["x-atoll-denied"], "floor: private");
        assert!(body.contains("which is private"), "{body}");
        // The one who dials has told the log.
        assert_eq!(world.told(), []);
    }
}

#[tokio::test]
async fn a_server_cannot_speak_for_atoll_nor_send_the_guest_to_quic() {
    let mut world = Setup::new(http(|_| async {
        let mut response = Response::new(full("hello"));
        for (name, value) in [
            ("x-atoll-denied", "default"),
            ("x-atoll-failed", "x"),
            ("alt-svc", "h3=\":443\""),
        ] {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
        response
    }))
    .start();
    let (response, _) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::OK);
    let names: Vec<_> = response.headers().keys().map(|name| name.as_str()).collect();
    assert_eq!(names, ["content-length", "date"]);
}

#[tokio::test]
async fn a_server_without_a_valid_certificate_gets_nothing() {
    let mut setup = Setup::new(echo());
    setup.names = vec!["other.test"];
    let mut world = setup.start();
    let (response, body) = world.get("/", &[]).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert_eq!(response.headers()["x-atoll-failed"], "upstream_tls_failed");
    assert!(body.contains("certificate"), "{body}");
}

#[tokio::test]
async fn a_server_that_talks_nonsense_is_a_failure() {
    for nonsense in [
        "HTTP/1.1 banana\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "",
    ] {
        let mut world = Setup::new(raw(move |mut stream| async move {
            let mut head = [0; 1024];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(nonsense.as_bytes()).await;
            let _ = stream.shutdown().await;
        }))
        .start();
        let (response, _) = world.get("/", &[]).await;
        assert_eq!(response.status(), StatusCode::BAD_GATEWAY, "{nonsense}");
    }
}

#[tokio::test]
async fn a_client_may_ask_before_it_sends_a_body() {
    // The server decides after it has seen the head; what the client sends before would be lost.
    let mut world = Setup::new(raw(|mut stream| async move {
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            seen.push(stream.read_u8().await.unwrap());
        }
        assert!(String::from_utf8_lossy(&seen).contains("Expect: 100-Continue"));
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
        let mut body = [0; 5];
        stream.read_exact(&mut body).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
            .await
            .unwrap();
        stream.write_all(&body).await.unwrap();
    }))
    .start();
    let mut stream = world.bytes(&[]).await;
    stream
        .write_all(b"PUT / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\r\n")
        .await
        .unwrap();
    let mut answer = vec![0; b"HTTP/1.1 100 Continue\r\n\r\n".len()];
    stream.read_exact(&mut answer).await.unwrap();
    assert!(
        answer.starts_with(b"HTTP/1.1 100 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    stream.write_all(b"hello").await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"hello") {
        answer.push(stream.read_u8().await.unwrap());
    }
    assert!(
        answer.starts_with(b"HTTP/1.1 200 OK"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
}

#[tokio::test]
async fn a_server_may_refuse_before_the_body_is_sent() {
    let mut world = Setup::new(raw(|mut stream| async move {
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            seen.push(stream.read_u8().await.unwrap());
        }
        stream
            .write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
            .await
            .unwrap();
        // Whatever comes now would be a body that was not wanted.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }))
    .start();
    let mut stream = world.bytes(&[]).await;
    stream
        .write_all(b"PUT / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    assert!(
        answer.starts_with("HTTP/1.1 413 ") && answer.ends_with("no"),
        "{answer}"
    );
}

#[tokio::test]
async fn what_concerns_one_connection_is_not_passed_on() {
    let mut world = Setup::plain(echo()).start();
    let (response, body) = world
        .get(
            "/",
            &[
                ("connection", "upgrade, http2-settings, x-private"),
                ("upgrade", "h2c"),
                ("http2-settings", "AAMAAABkAAQCAAAAAAIAAAAA"),
                ("x-private", "1"),
                ("proxy-authorization", "Basic eDp5"),
                ("keep-alive", "timeout=9"),
            ],
        )
        .await;
    // Not upgraded, and not refused either: many clients ask for it by habit.
    assert_eq!(response.status(), StatusCode::OK);
    for gone in [
        "upgrade",
        "http2",
        "x-private",
        "proxy-",
        "keep-alive",
        "connection",
    ] {
        assert!(!body.contains(gone), "{gone}: {body}");
    }
}

#[tokio::test]
async fn trailers_go_both_ways() {
    use http_body_util::{BodyExt, StreamBody};
    use hyper::body::Frame;
    let mut world = Setup::new(http(|request: Request<hyper::body::Incoming>| async move {
        let sent = request.into_body().collect().await.unwrap();
        let mut trailers = sent.trailers().cloned().unwrap_or_default();
        trailers.insert("x-server", "s".parse().unwrap());
        let frames = [Ok(Frame::data("data".into())), Ok(Frame::trailers(trailers))];
        let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed());
        response
            .headers_mut()
            .insert("trailer", "x-server, x-client".parse().unwrap());
        response
    }))
    .start();
    let mut stream = world.bytes(&[]).await;
    stream
        .write_all(
            b"POST / HTTP/1.1\r\nHost: api.test\r\nTE: trailers\r\nConnection: te, close\r\nTrailer: x-client\r\n\
              Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-client: c\r\n\r\n",
        )
        .await
        .unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    let answer = answer.to_ascii_lowercase();
    assert!(
        answer.contains("x-client: c") && answer.contains("x-server: s"),
        "{answer}"
    );
}

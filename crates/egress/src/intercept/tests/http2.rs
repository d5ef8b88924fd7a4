//! HTTP/2 through the interceptor: what is spoken, streams both ways, refusals one by one.

use atoll_types::{Injection, NetworkRule, RuleAction};
use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{HeaderMap, Request, Response, StatusCode, Version};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::world::{HOST, Setup, echo, full, http, read};
use crate::intercept::route::Undialled;

fn request(method: &str, uri: &str) -> Request<super::world::Payload> {
    Request::builder()
        .method(method)
        .uri(uri)
        .version(Version::HTTP_2)
        .body(full(""))
        .unwrap()
}

#[tokio::test]
async fn both_sides_speak_what_the_server_chose() {
    let mut world = Setup::new(echo())
        .secret("key", "s3cr3t-value", Injection::Bearer)
        .start();
    let mut sender = world.http2().await;
    let (response, body) = read(
        sender
            .send_request(request("GET", "https://api.test/a?b=c"))
            .await
            .unwrap(),
    )
    .await;
    assert_eq!(
        (response.status(), response.version()),
        (StatusCode::OK, Version::HTTP_2)
    );
    assert!(body.starts_with("GET https://api.test/a?b=c\n"), "{body}");
    assert!(body.contains("authorization: Bearer s3cr3t-value\n"), "{body}");

    // A server that knows HTTP/1.1 only: a client that offers both gets that.
    let mut setup = Setup::new(echo());
    setup.alpn = vec!["http/1.1"];
    let mut world = setup.start();
    let stream = world.raw();
    let connector = tokio_rustls::TlsConnector::from(world.client_config(&["h2", "http/1.1"]));
    let server = rustls::pki_types::ServerName::try_from(HOST).unwrap();
    let stream = connector.connect(server, stream).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
}

#[tokio::test]
async fn a_client_that_speaks_http2_only_is_told_in_it_that_the_server_does_not() {
    let mut setup = Setup::new(echo());
    setup.alpn = vec!["http/1.1"];
    let mut world = setup.start();
    let mut sender = world.http2().await;
    let response = sender
        .send_request(request("GET", "https://api.test/"))
        .await
        .unwrap();
    let (response, body) = read(response).await;
    assert_eq!(response.status(), StatusCode::BAD_GATEWAY);
    assert!(body.contains("upstream_tls_failed"), "{body}");
}

#[tokio::test]
async fn every_request_names_the_same_host() {
    let mut world = Setup::new(echo()).start();
    let mut sender = world.http2().await;
    for (uri, host, status) in [
        ("https://api.test/", None, StatusCode::OK),
        ("https://evil.test/", None, StatusCode::FORBIDDEN),
        ("https://api.test/", Some("evil.test"), StatusCode::FORBIDDEN),
        ("https://api.test:444/", None, StatusCode::FORBIDDEN),
        ("http://api.test/", None, StatusCode::OK),
        ("https://api.test/", Some("api.test"), StatusCode::OK),
    ] {
        let mut request = request("GET", uri);
        if let Some(host) = host {
            request.headers_mut().insert("host", host.parse().unwrap());
        }
        let (response, body) = read(sender.send_request(request).await.unwrap()).await;
        assert_eq!(response.status(), status, "{uri} {host:?} {body}");
        if status == StatusCode::OK {
            assert!(
                body.starts_with("GET https://api.test/\n") && !body.contains("host:"),
                "{body}"
            );
        }
    }
    assert_eq!(world.denials(), ["name_mismatch"; 3]);
}

#[tokio::test]
async fn there_is_nothing_to_connect_through() {
    let mut world = Setup::new(echo()).start();
    let mut sender = world.http2().await;
    let response = sender
        .send_request(request("CONNECT", "api.test:443"))
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(world.denials(), ["protocol"]);
}

#[tokio::test]
async fn a_call_streams_both_ways_and_ends_with_trailers() {
    // As gRPC does it: each message is answered before the next one is sent.
    let mut world = Setup::new(http(|request: Request<Incoming>| async move {
        assert_eq!(request.headers()["te"], "trailers");
        let (send, frames) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                let data = frame.into_data().unwrap_or_default();
                if send.send(Ok(Frame::data(data))).await.is_err() {
                    return;
                }
            }
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            let _ = send.send(Ok(Frame::trailers(trailers))).await;
        });
        Response::new(StreamBody::new(ReceiverStream::new(frames)).boxed())
    }))
    .start();
    let mut sender = world.http2().await;
    let (send, frames) = mpsc::channel(1);
    let request = Request::builder()
        .method("POST")
        .uri("https://api.test/service/Call")
        .header("te", "trailers")
        .header("content-type", "application/grpc")
        .body(StreamBody::new(ReceiverStream::new(frames)).boxed())
        .unwrap();
    let mut answer = sender.send_request(request).await.unwrap().into_body();
    for number in 0..5u8 {
        send.send(Ok(Frame::data(Bytes::from(vec![number]))))
            .await
            .unwrap();
        let frame = answer.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), vec![number]);
    }
    drop(send);
    let last = answer.frame().await.unwrap().unwrap();
    assert_eq!(last.into_trailers().unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn requests_run_side_by_side_over_one_connection_to_the_server() {
    let (started, mut all) = mpsc::channel(8);
    let (release, _) = tokio::sync::broadcast::channel::<()>(1);
    let released = release.clone();
    let mut world = Setup::new(http(move |_| {
        let (started, mut released) = (started.clone(), released.subscribe());
        async move {
            started.send(()).await.unwrap();
            let _ = released.recv().await;
            Response::new(full("done"))
        }
    }))
    .start();
    let sender = world.http2().await;
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let mut sender = sender.clone();
            tokio::spawn(async move { sender.send_request(request("GET", "https://api.test/")).await })
        })
        .collect();
    for _ in 0..8 {
        all.recv().await.unwrap();
    }
    release.send(()).unwrap();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    assert_eq!(world.dialled(), 1);
}

#[tokio::test]
async fn requests_are_denied_one_by_one() {
    let mut setup = Setup::new(echo());
    setup.rules = vec![NetworkRule {
        paths: vec!["/v1/*".to_owned()],
        ..NetworkRule::new(RuleAction::Allow, HOST)
    }];
    let mut world = setup.start();
    let mut sender = world.http2().await;
    for (path, status) in [("/v1/a", 200), ("/v2/a", 403), ("/v1/b", 200)] {
        let request = request("GET", &format!("https://api.test{path}"));
        assert_eq!(
            sender.send_request(request).await.unwrap().status(),
            status,
            "{path}"
        );
    }
}

#[tokio::test]
async fn an_unreachable_server_is_told_to_a_client_that_speaks_http2_only() {
    let mut world = Setup::new(echo()).start();
    world
        .server()
        .refuses
        .lock()
        .push_back(Undialled::Failed("nobody".to_owned()));
    let mut sender = world.http2().await;
    for status in [StatusCode::BAD_GATEWAY, StatusCode::OK] {
        let response = sender
            .send_request(request("GET", "https://api.test/"))
            .await
            .unwrap();
        assert_eq!(response.status(), status);
    }
}

#[tokio::test]
async fn http2_without_tls_works_by_prior_knowledge() {
    use super::world::raw;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    let mut world = Setup::plain(raw(|stream| async move {
        let service = hyper::service::service_fn(|request: Request<Incoming>| async move {
            Ok::<_, std::convert::Infallible>(Response::new(full(request.uri().to_string())))
        });
        let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service)
            .await;
    }))
    .start();
    let address = world.listen().await;
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);
    let response = sender
        .send_request(request("GET", "http://api.test/x"))
        .await
        .unwrap();
    assert_eq!(read(response).await.1, "http://api.test/x");
}

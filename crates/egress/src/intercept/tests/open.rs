//! Requests that are under way when something changes.

use std::sync::Arc;
use std::time::Duration;

use atoll_types::{Injection, NetworkRule, RuleAction, SecretBinding, Timestamp};
use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{accept_async, client_async};

use super::world::{Behaviour, HOST, Payload, Setup, World, binding, full, http, policy, raw};
use crate::events::now;

const VALUE: &str = "ghp_0123456789abcdefABCDEF0123456789abcd";
const OTHER: &str = "ghp_other-value-0123456789abcdef";

fn all() -> NetworkRule {
    NetworkRule::new(RuleAction::Allow, HOST)
}

fn paths(path: &str) -> Vec<NetworkRule> {
    vec![NetworkRule {
        paths: vec![path.to_owned()],
        ..all()
    }]
}

/// Says "begun" and then nothing. The channel tells when the server has lost the connection or the stream.
fn endless() -> (Behaviour, mpsc::Receiver<()>) {
    let (ended, ends) = mpsc::channel(8);
    let behaviour = http(move |request: Request<Incoming>| {
        let ended = ended.clone();
        async move {
            let (send, frames) = mpsc::channel::<Result<Frame<Bytes>, hyper::Error>>(1);
            tokio::spawn(async move {
                let _ = send.send(Ok(Frame::data("begun".into()))).await;
                // A body that is still coming, if there is one, breaks; the answer is dropped.
                let mut body = request.into_body();
                tokio::select! {
                    () = send.closed() => {}
                    () = async { while let Some(Ok(_)) = body.frame().await {} std::future::pending().await } => {}
                }
                let _ = ended.send(()).await;
            });
            Response::new(BodyExt::boxed(StreamBody::new(ReceiverStream::new(frames))))
        }
    });
    (behaviour, ends)
}

async fn begin(world: &mut World, http2: bool, path: &str) -> Incoming {
    let request = |uri: String| Request::get(uri).header("host", HOST);
    let response = match http2 {
        true => {
            let request = Request::get(format!("https://{HOST}{path}"))
                .body(full(""))
                .unwrap();
            world.http2().await.send_request(request).await
        }
        false => {
            let request = request(path.to_owned()).body(full("")).unwrap();
            world.http1().await.send_request(request).await
        }
    };
    let mut body = response.unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "begun");
    body
}

/// Broken off, not finished.
async fn is_cut(body: &mut Incoming) -> bool {
    let next = tokio::time::timeout(Duration::from_secs(20), body.frame()).await;
    matches!(next.expect("it is cut"), Some(Err(_)))
}

#[tokio::test]
async fn a_streamed_answer_is_cut_when_the_policy_no_longer_allows_its_path() {
    for http2 in [false, true] {
        let (behaviour, mut ended) = endless();
        let mut world = Setup::new(behaviour).start();
        let mut body = begin(&mut world, http2, "/stream").await;
        // What leaves it allowed leaves it alone.
        world.set_policy(paths("/stream"), &[]);
        world.set_policy(paths("/other"), &[]);
        assert!(is_cut(&mut body).await, "http2: {http2}");
        ended.recv().await.unwrap();
        assert_eq!(world.denials(), ["default"]);
    }
}

#[tokio::test]
async fn on_one_connection_only_what_is_no_longer_allowed_is_cut() {
    let (behaviour, mut ended) = endless();
    let mut world = Setup::new(behaviour).start();
    let mut sender = world.http2().await;
    let mut bodies = Vec::new();
    for path in ["/cut", "/kept"] {
        let request = Request::get(format!("https://{HOST}{path}"))
            .body(full(""))
            .unwrap();
        let mut body = sender.send_request(request).await.unwrap().into_body();
        body.frame().await.unwrap().unwrap();
        bodies.push(body);
    }
    world.set_policy(paths("/kept"), &[]);
    assert!(is_cut(&mut bodies[0]).await);
    ended.recv().await.unwrap();
    // Longer than one that does not let go may take.
    let silent = tokio::time::timeout(Duration::from_millis(1500), bodies[1].frame()).await;
    assert!(silent.is_err(), "{silent:?}");
    let request = Request::get(format!("https://{HOST}/kept"))
        .body(full(""))
        .unwrap();
    assert_eq!(
        sender.send_request(request).await.unwrap().status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_websocket_is_cut_in_both_directions() {
    for tls in [true, false] {
        let (ended, mut ends) = mpsc::channel(1);
        let behaviour = raw(move |stream| {
            let ended = ended.clone();
            async move {
                let mut socket = accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if message.is_text() {
                        socket.send(message).await.unwrap();
                    }
                }
                let _ = ended.send(()).await;
            }
        });
        let setup = match tls {
            true => Setup::new(behaviour),
            false => Setup::plain(behaviour),
        };
        let mut world = setup.start();
        let stream = world.bytes(&["http/1.1"]).await;
        let (mut socket, _) = client_async(format!("ws://{HOST}/ws"), stream).await.unwrap();
        socket.send(Message::text("hello")).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("hello"));
        world.set_policy(paths("/other"), &[]);
        assert!(!matches!(socket.next().await, Some(Ok(_))));
        ends.recv().await.unwrap();
        assert!(world.ended().await.is_err());
        assert_eq!(world.denials(), ["default"]);
    }
}

#[tokio::test]
async fn a_request_ends_with_the_secret_that_it_was_sent_with() {
    type Change = fn(&World);
    let changes: [(&str, Change); 6] = [
        ("deleted", |world| world.broker.forget(&world.grants[0].secret.id)),
        ("another value", |world| world.rotate("token", OTHER, None)),
        ("expired", |world| {
            world.rotate("token", VALUE, Some(Timestamp(1)));
        }),
        ("no longer bound", |world| world.set_policy(vec![all()], &[])),
        ("no longer bound", |world| {
            let mut narrower = world.grants[0].clone();
            narrower.binding.paths = vec!["/other".to_owned()];
            world.set_policy(vec![all()], &[narrower]);
        }),
        ("no longer bound", |world| {
            let mut over = world.grants[0].clone();
            over.expires = Some(Timestamp(1));
            world.set_policy(vec![all()], &[over]);
        }),
    ];
    for (why, change) in changes {
        for http2 in [false, true] {
            let (behaviour, mut ended) = endless();
            let mut world = Setup::new(behaviour)
                .secret("token", VALUE, Injection::Bearer)
                .start();
            let mut body = begin(&mut world, http2, "/").await;
            // The same value again changes nothing.
            world.rotate("token", VALUE, None);
            change(&world);
            assert!(is_cut(&mut body).await, "{why}");
            ended.recv().await.unwrap();
            assert_eq!(world.denials(), ["secret: token"], "{why}");
        }
    }
}

#[tokio::test]
async fn a_secret_ends_at_its_time_also_in_a_request_that_is_open() {
    for http2 in [false, true] {
        let (behaviour, mut ended) = endless();
        let mut world = Setup::new(behaviour)
            .secret("token", VALUE, Injection::Bearer)
            .start();
        // Known before, put off, and known only now.
        world.rotate("token", VALUE, Some(Timestamp(now().0 + 1000)));
        let mut body = begin(&mut world, http2, "/").await;
        world.rotate("token", VALUE, Some(Timestamp(now().0 + 600_000)));
        let silent = tokio::time::timeout(Duration::from_millis(1500), body.frame()).await;
        assert!(silent.is_err(), "{silent:?}");
        world.rotate("token", VALUE, Some(Timestamp(now().0 + 1000)));
        assert!(is_cut(&mut body).await);
        ended.recv().await.unwrap();
        assert_eq!(world.denials(), ["secret: token"]);
    }
}

#[tokio::test]
async fn others_secrets_and_new_ones_cut_nothing() {
    let (behaviour, _ended) = endless();
    let bound = SecretBinding {
        paths: vec!["/other".to_owned()],
        ..binding(Injection::Bearer)
    };
    let mut world = Setup::new(behaviour).bound("token", VALUE, bound).start();
    let mut body = begin(&mut world, false, "/").await;
    world.rotate("token", OTHER, None);
    world.broker.forget(&world.grants[0].secret.id);
    world.set_policy(vec![all()], &[]);
    let silent = tokio::time::timeout(Duration::from_millis(300), body.frame()).await;
    assert!(silent.is_err(), "{silent:?}");
}

#[tokio::test]
async fn an_answer_that_is_not_searched_is_cut_when_it_has_to_be() {
    let (behaviour, mut ended) = endless();
    let elsewhere = SecretBinding {
        paths: vec!["/login".to_owned()],
        ..binding(Injection::Bearer)
    };
    let mut world = Setup::new(behaviour).bound("token", VALUE, elsewhere).start();
    let mut body = begin(&mut world, false, "/").await;
    let mut searching = world.grants[0].clone();
    searching.binding.redact = true;
    world.set_policy(vec![all()], &[searching]);
    assert!(is_cut(&mut body).await);
    ended.recv().await.unwrap();
    assert_eq!(world.denials(), ["secret: redact"]);
}

/// An upload that the server reads and does not answer.
#[tokio::test]
async fn an_upload_is_cut_before_there_is_an_answer() {
    for http2 in [false, true] {
        let (seen, mut sees) = mpsc::channel(8);
        let mut world = Setup::new(http(move |request: Request<Incoming>| {
            let seen = seen.clone();
            async move {
                let mut body = request.into_body();
                while let Some(Ok(_)) = body.frame().await {
                    seen.send("piece").await.unwrap();
                }
                let _ = seen.send("broken").await;
                Response::new(full("never"))
            }
        }))
        .start();
        let (send, frames) = mpsc::channel::<Result<Frame<Bytes>, hyper::Error>>(1);
        let body: Payload = BodyExt::boxed(StreamBody::new(ReceiverStream::new(frames)));
        let answer = match http2 {
            true => {
                let mut sender = world.http2().await;
                let request = Request::put(format!("https://{HOST}/up")).body(body).unwrap();
                tokio::spawn(async move { sender.send_request(request).await.map(|answer| answer.status()) })
            }
            false => {
                let mut sender = world.http1().await;
                let request = Request::put("/up").header("host", HOST).body(body).unwrap();
                tokio::spawn(async move { sender.send_request(request).await.map(|answer| answer.status()) })
            }
        };
        send.send(Ok(Frame::data("piece".into()))).await.unwrap();
        assert_eq!(sees.recv().await, Some("piece"));
        world.set_policy(vec![], &[]);
        // Over HTTP/1.1 the handler is dropped with its connection and says nothing more.
        assert!(matches!(sees.recv().await, Some("broken") | None));
        let status = answer.await.unwrap();
        assert!(matches!(status, Err(_) | Ok(StatusCode::FORBIDDEN)), "{status:?}");
        assert_eq!(world.denials(), ["default"]);
    }
}

/// Between the decision and the opening lies a dial, which takes its time.
#[tokio::test]
async fn what_changes_while_the_server_is_dialled_is_not_missed() {
    type Change = Box<dyn FnOnce() + Send>;
    let narrowed: Vec<fn(&World) -> Change> = vec![
        |world| {
            let route = world.route.clone();
            Box::new(move || route.change(|tenant| tenant.policy = policy(paths("/other"), &[])))
        },
        |world| {
            let (broker, id) = (Arc::clone(&world.broker), world.grants[0].secret.id.clone());
            Box::new(move || broker.forget(&id))
        },
    ];
    for narrow in narrowed {
        let bound = SecretBinding {
            plain_http: true,
            ports: vec!["80".parse().unwrap()],
            ..binding(Injection::Bearer)
        };
        let (behaviour, _ended) = endless();
        let mut world = Setup::plain(behaviour).bound("token", VALUE, bound).start();
        *world.server().meanwhile.lock() = Some(narrow(&world));
        let (response, _) = world.get("/", &[]).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        assert_eq!(world.denials().len(), 1);
    }
}

/// A stream that its reader stalls is not looked at by the library; it takes the connection with it.
#[tokio::test]
async fn a_request_that_is_stalled_is_cut_all_the_same() {
    let (ended, mut ends) = mpsc::channel(1);
    let mut world = Setup::new(http(move |_| {
        let ended = ended.clone();
        async move {
            let (send, frames) = mpsc::channel::<Result<Frame<Bytes>, hyper::Error>>(1);
            tokio::spawn(async move {
                while send.send(Ok(Frame::data(vec![0; 65536].into()))).await.is_ok() {}
                let _ = ended.send(()).await;
            });
            Response::new(BodyExt::boxed(StreamBody::new(ReceiverStream::new(frames))))
        }
    }))
    .start();
    let mut sender = world.http2().await;
    let request = Request::get(format!("https://{HOST}/")).body(full("")).unwrap();
    // Nobody reads it.
    let _answer = sender.send_request(request).await.unwrap();
    world.set_policy(vec![], &[]);
    ends.recv().await.unwrap();
}

//! Bodies without end: nothing is held, and nothing goes on after the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::world::{Payload, Setup, full, http, raw};

const MIB: u64 = 1024 * 1024;
/// What may be on its way through one connection: windows, buffers of TLS and HTTP on both legs, the test's own pipes.
const ON_THE_WAY: u64 = 5 * MIB;

/// `pieces` of 64 KiB, counted as they are taken.
fn counted(pieces: usize, taken: Arc<AtomicU64>) -> Payload {
    let piece = Bytes::from(vec![b'x'; 64 * 1024]);
    let frames = futures_util::StreamExt::map(futures_util::stream::iter(0..pieces), move |_| {
        taken.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Ok(Frame::data(piece.clone()))
    });
    StreamBody::new(frames).boxed()
}

async fn size(mut body: Incoming, mut each: impl FnMut(u64)) -> u64 {
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        size += frame.unwrap().data_ref().map_or(0, |data| data.len() as u64);
        each(size);
    }
    size
}

#[tokio::test]
async fn a_large_upload_streams_and_is_never_far_ahead_of_the_server() {
    for http2 in [false, true] {
        let sent = Arc::new(AtomicU64::new(0));
        let seen = sent.clone();
        let mut world = Setup::new(http(move |request: Request<Incoming>| {
            let seen = seen.clone();
            async move {
                let size = size(request.into_body(), |size| {
                    let ahead = seen.load(Ordering::Relaxed) - size;
                    assert!(ahead < ON_THE_WAY, "{ahead} bytes were held");
                })
                .await;
                Response::new(full(size.to_string()))
            }
        }))
        .start();
        let request = Request::put("https://api.test/large")
            .body(counted(512, sent.clone()))
            .unwrap();
        let response = if http2 {
            world.http2().await.send_request(request).await.unwrap()
        } else {
            let mut sender = world.http1().await;
            let (mut parts, body) = request.into_parts();
            parts.uri = "/large".parse().unwrap();
            parts.headers.insert("host", "api.test".parse().unwrap());
            sender
                .send_request(Request::from_parts(parts, body))
                .await
                .unwrap()
        };
        let (_, body) = super::world::read(response).await;
        assert_eq!(body, (32 * MIB).to_string());
    }
}

#[tokio::test]
async fn a_large_answer_waits_for_a_guest_that_does_not_read() {
    for http2 in [false, true] {
        let sent = Arc::new(AtomicU64::new(0));
        let taken = sent.clone();
        let mut world = Setup::new(http(move |_| {
            let taken = taken.clone();
            async move { Response::new(counted(512, taken)) }
        }))
        .start();
        let response = if http2 {
            let request = Request::get("https://api.test/").body(full("")).unwrap();
            world.http2().await.send_request(request).await.unwrap()
        } else {
            let request = Request::get("/")
                .header("host", "api.test")
                .body(full(""))
                .unwrap();
            world.http1().await.send_request(request).await.unwrap()
        };
        let size = size(response.into_body(), |size| {
            let ahead = sent.load(Ordering::Relaxed) - size;
            assert!(ahead < ON_THE_WAY, "{ahead} bytes were held");
        })
        .await;
        assert_eq!(size, 32 * MIB);
    }
}

#[tokio::test]
async fn events_arrive_as_they_are_sent() {
    // The server says the next only when the guest has heard the one before.
    let (heard, mut hears) = tokio::sync::mpsc::channel::<()>(1);
    let (say, said) = tokio::sync::mpsc::channel(1);
    let said = Arc::new(tokio::sync::Mutex::new(Some(said)));
    let mut world = Setup::new(http(move |_| {
        let said = said.clone();
        async move {
            let said = said.lock().await.take().unwrap();
            let frames = tokio_stream::wrappers::ReceiverStream::new(said);
            Response::new(StreamBody::new(frames).boxed())
        }
    }))
    .start();
    tokio::spawn(async move {
        for number in 0..3 {
            let event = Bytes::from(format!("data: {number}\n\n"));
            say.send(Ok(Frame::data(event))).await.unwrap();
            hears.recv().await.unwrap();
        }
    });
    let request = Request::get("/")
        .header("host", "api.test")
        .body(full(""))
        .unwrap();
    let mut body = world
        .http1()
        .await
        .send_request(request)
        .await
        .unwrap()
        .into_body();
    for number in 0..3 {
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), format!("data: {number}\n\n"));
        heard.send(()).await.unwrap();
    }
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_body_that_breaks_off_breaks_off_for_the_guest_too() {
    let mut world = Setup::new(raw(|mut stream| async move {
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
            .await;
        let _ = stream.shutdown().await;
    }))
    .start();
    let request = Request::get("/")
        .header("host", "api.test")
        .body(full(""))
        .unwrap();
    let response = world.http1().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.into_body().collect().await.is_err());
}

#[tokio::test]
async fn nothing_goes_on_after_a_connection_was_cut() {
    for http2 in [false, true] {
        let (gone, is_gone) = oneshot::channel();
        let gone = Arc::new(parking_lot::Mutex::new(Some(gone)));
        let mut world = Setup::new(http(move |_| {
            let gone = gone.lock().take();
            async move {
                let (say, said) = tokio::sync::mpsc::channel(1);
                tokio::spawn(async move {
                    // An answer that never ends by itself.
                    while say
                        .send(Ok(Frame::data(Bytes::from_static(b"more"))))
                        .await
                        .is_ok()
                    {}
                    let _ = gone.unwrap().send(());
                });
                Response::new(StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(said)).boxed())
            }
        }))
        .start();
        let request = Request::get("https://api.test/")
            .header("host", "api.test")
            .body(full(""))
            .unwrap();
        let mut body = if http2 {
            world
                .http2()
                .await
                .send_request(request)
                .await
                .unwrap()
                .into_body()
        } else {
            let mut request = request;
            *request.uri_mut() = "/".parse().unwrap();
            world
                .http1()
                .await
                .send_request(request)
                .await
                .unwrap()
                .into_body()
        };
        body.frame().await.unwrap().unwrap();
        world.cut().await;
        is_gone.await.unwrap();
    }
}

//! Answers are paid for, too: whoever does not read what was made for them holds it.
//!
//! ```text
//!   router ── whole? ── paid for at once, or refused ──┐
//!                └─ a stream: each large piece ────────┴── Bytes with their permit ── hyper, h2 ── written, dropped
//! ```
//!
//! What must hold: a permit lies with the bytes themselves, since hyper and h2 hold these long after the body is at its end.
//! A stream for which there is no room waits for some, and not for ever.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use atoll_types::Fault;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::visit::Visit;

/// Fewer bytes than these cost about as much as the connection that they are for, which has a place of its own.
const SMALL: usize = 16 * 1024;
/// How soon somebody who waits for room looks again.
const AGAIN: Duration = Duration::from_millis(50);

impl Visit {
    /// The same bytes, paid for until the last copy of them is dropped. Small ones are free, and so are those of whom nobody
    /// knows: what strangers are told is short.
    pub fn pay(&self, bytes: Bytes) -> Result<Bytes, Fault> {
        let Ok(mut permit) = self.permit() else {
            return Ok(bytes);
        };
        if bytes.len() <= SMALL {
            return Ok(bytes);
        }
        permit.grow_for_answer(bytes.len() as u64)?;
        Ok(permit.over(bytes))
    }
}

/// The response with a body that is paid for until it is written; or why not, if there is no room for it.
pub(crate) fn paid(visit: &Visit, response: Response) -> Result<Response, Fault> {
    let (parts, mut body) = response.into_parts();
    let mut paying = Paying {
        ready: None,
        due: None,
        rest: Body::empty(),
        visit: visit.clone(),
        waiting: None,
    };
    let mut is_whole = body.is_end_stream();
    if let Some(length) = body.size_hint().exact() {
        // A body that is there is there at once; one that is passed on may announce its length, too.
        match next(&mut body).now_or_never() {
            Some(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) if data.len() as u64 == length => {
                    is_whole = true;
                    // What it was made of is gone.
                    visit.answered();
                    paying.ready = Some(Ok(Frame::data(visit.pay(data)?)));
                }
                Ok(data) => paying.due = Some(data),
                Err(frame) => paying.ready = Some(Ok(frame)),
            },
            Some(Some(Err(error))) => paying.ready = Some(Err(error)),
            Some(None) | None => {}
        }
    }
    if is_whole {
        visit.answered();
    }
    paying.rest = body;
    Ok(Response::from_parts(parts, Body::new(paying)))
}

async fn next(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

struct Paying {
    /// What was paid for, or costs nothing.
    ready: Option<Result<Frame<Bytes>, axum::Error>>,
    /// What is to be paid for.
    due: Option<Bytes>,
    rest: Body,
    visit: Visit,
    /// Since when there is no room for what is due, and when to look again.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl HttpBody for Paying {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Some(frame) = this.ready.take() {
            return Poll::Ready(Some(frame));
        }
        let data = match this.due.take() {
            Some(data) => data,
            None => match ready!(Pin::new(&mut this.rest).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => data,
                    Err(frame) => return Poll::Ready(Some(Ok(frame))),
                },
                other => return Poll::Ready(other),
            },
        };
        loop {
            let fault = match this.visit.pay(data.clone()) {
                Ok(data) => {
                    this.waiting = None;
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Err(fault) => fault,
            };
            let (since, timer) = this
                .waiting
                .get_or_insert_with(|| (Instant::now(), Box::pin(tokio::time::sleep(AGAIN))));
            if since.elapsed() >= this.visit.patience().stream {
                return Poll::Ready(Some(Err(axum::Error::new(fault))));
            }
            if timer.as_mut().poll(context).is_pending() {
                this.due = Some(data);
                return Poll::Pending;
            }
            timer.as_mut().reset(Instant::now() + AGAIN);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ready.is_none() && self.due.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let ready = match &self.ready {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            Some(Err(_)) | None => 0,
        };
        let taken = (ready + self.due.as_ref().map_or(0, Bytes::len)) as u64;
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(taken + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(taken + upper);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use atoll_types::ProjectId;
    use axum::Router;
    use axum::extract::Request;
    use axum::response::IntoResponse as _;
    use axum::routing::get;
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::{Api, Apis, Front, Limits, memory};

    const MIB: usize = 1 << 20;

    /// Nine MiB and a bit for all answers, one of four, and a stream of pieces of one.
    fn apis() -> Apis {
        let mut limits = Limits::for_machine(1 << 30, 1000);
        limits.memory = memory::Limits {
            server: (8 << 20) + 1000,
            project: (8 << 20) + 1000,
            sandbox: (8 << 20) + 1000,
        };
        let stream = || async {
            let pieces = (0..4).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b's'; MIB])));
            Body::from_stream(futures_util::stream::iter(pieces))
        };
        let router = Router::new()
            .route("/whole", get(|| async { vec![b'w'; 4 * MIB] }))
            .route("/small", get(|| async { vec![b's'; SMALL] }))
            .route("/stream", get(stream));
        let api = Api {
            name: "test",
            claims: Arc::new(|_| true),
            router,
            write: |response, fault, _| (response.status(), fault.code.text()).into_response(),
        };
        Apis::new(Front::new(limits), Vec::new(), [api])
    }

    async fn ask(apis: &Apis, path: &str) -> Response {
        let visit = apis.front().visit(None);
        visit.admit(&ProjectId::from_entropy([1; 20]), None).unwrap();
        let mut kept = visit.permit().unwrap();
        kept.grow(100).unwrap();
        visit.keep(kept);
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = path.parse().unwrap();
        request.extensions_mut().insert(visit);
        apis.answer(request).await
    }

    #[tokio::test]
    async fn a_whole_answer_is_paid_for_as_long_as_anybody_has_its_bytes() {
        let apis = apis();
        let first = ask(&apis, "/whole").await;
        let second = ask(&apis, "/whole").await;
        assert_eq!(apis.front().memory.held(), 8 * MIB as u64);
        assert_eq!(first.body().size_hint().exact(), Some(4 * MIB as u64));
        let third = ask(&apis, "/whole").await;
        assert_eq!(third.status(), 429);
        let told = third.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(told, "too_much_buffered");
        assert_eq!(ask(&apis, "/small").await.status(), 200);

        // As when the last frame is with the connection and its body is dropped.
        let mut body = first.into_body();
        let bytes = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(body.frame().await.is_none());
        drop(body);
        assert_eq!(bytes.len(), 4 * MIB);
        assert_eq!(apis.front().memory.held(), 8 * MIB as u64);
        drop(bytes);
        assert_eq!(apis.front().memory.held(), 4 * MIB as u64);
        drop(second);
        assert_eq!(apis.front().memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_waits_for_room_and_not_for_ever() {
        let apis = apis();
        let unread = (ask(&apis, "/whole").await, ask(&apis, "/whole").await);
        let mut body = ask(&apis, "/stream").await.into_body();
        // What it came with is held while it goes on.
        assert_eq!(apis.front().memory.held(), 8 * MIB as u64 + 100);
        let first = body.frame().await.unwrap().unwrap();
        // There is no room for a second one.
        let refused = tokio::time::timeout(Duration::from_secs(60), body.frame()).await;
        assert!(refused.is_err(), "{refused:?}");
        drop(first);
        let second = body.frame().await.unwrap().unwrap();
        let started = Instant::now();
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(started.elapsed().as_secs(), 600);
        assert!(error.to_string().contains("buffer"), "{error}");
        drop((body, second, unread));
        assert_eq!(apis.front().memory.held(), 0);
    }
}

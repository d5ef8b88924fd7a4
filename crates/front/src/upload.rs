//! Bodies that are kept as they come, piece by piece, for as long as they keep coming.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use atoll_types::Fault;
use axum::body::Body;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use http_body::Body as _;

use crate::body::{Refused, Upload};
use crate::visit::Visit;

/// How much of a refused upload is read and thrown away, so that the client is still there to hear why.
const DISCARD: usize = 256 << 20;
const DISCARD_WITHIN: Duration = Duration::from_secs(10);
/// An upload that is kept on the server's disk is given up once it stands still for so long.
const STANDS_STILL: Duration = Duration::from_secs(60);

/// A body of somebody who is known. An error is the last that comes of it.
#[derive(Debug)]
pub struct Incoming {
    body: Option<Upload<Body>>,
}

impl Incoming {
    pub fn new(visit: &Visit, body: Body) -> Self {
        Self {
            body: Some(visit.upload(body)),
        }
    }

    /// For what is kept on the server's disk: the sender may not stand still, and every piece is paid for before it is handed
    /// on.
    pub fn kept(
        self,
        pay: impl FnMut(u64) -> Result<(), Fault> + Send + 'static,
    ) -> impl Stream<Item = Result<Bytes, Fault>> + Send {
        futures_util::stream::unfold(Some((self, pay)), |state| async move {
            let (mut pieces, mut pay) = state?;
            let piece = match tokio::time::timeout(STANDS_STILL, pieces.next()).await {
                Ok(piece) => piece?,
                Err(_) => Err(Refused::Silent { after: STANDS_STILL }.fault()),
            };
            let paid = piece.and_then(|piece| pay(piece.len() as u64).map(|()| piece));
            let rest = paid.is_ok().then_some((pieces, pay));
            Some((paid, rest))
        })
    }
}

impl Stream for Incoming {
    type Item = Result<Bytes, Fault>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(body) = &mut self.body else {
                return Poll::Ready(None);
            };
            let next = match ready!(Pin::new(body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => return Poll::Ready(Some(Ok(data))),
                    // Trailers: nobody reads them.
                    Err(_) => continue,
                },
                Some(Err(refused)) => Some(Err(refused.fault())),
                None => None,
            };
            self.body = None;
            return Poll::Ready(next);
        }
    }
}

impl Drop for Incoming {
    /// A connection that is closed with unread bytes is reset, and takes an answer on its way with it.
    fn drop(&mut self) {
        let (Some(body), Ok(runtime)) = (self.body.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        let mut body = Body::new(body).into_data_stream();
        runtime.spawn(tokio::time::timeout(DISCARD_WITHIN, async move {
            let mut discarded = 0;
            while let Some(Ok(piece)) = body.next().await {
                discarded += piece.len();
                if discarded > DISCARD {
                    break;
                }
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use atoll_types::Code;
    use futures_util::stream;

    use super::*;
    use crate::{Front, Limits};

    type Piece = Result<Vec<u8>, std::io::Error>;

    fn incoming(pieces: impl Stream<Item = Piece> + Send + 'static) -> Incoming {
        let front = Front::new(Limits::for_machine(1 << 30, 1000));
        Incoming::new(&front.visit(None), Body::from_stream(pieces))
    }

    fn codes(outcome: &[Result<Bytes, Fault>]) -> Vec<Result<usize, Code>> {
        let code = |piece: &Result<Bytes, Fault>| match piece {
            Ok(bytes) => Ok(bytes.len()),
            Err(fault) => Err(fault.code),
        };
        outcome.iter().map(code).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn why_nothing_more_comes_is_the_last_that_comes() {
        let good = || stream::iter([Ok(vec![0; 3])]);
        let broken = good().chain(stream::iter([Err(std::io::Error::other("reset"))]));
        let outcome: Vec<_> = incoming(broken).collect().await;
        assert_eq!(codes(&outcome), [Ok(3), Err(Code::IncompleteBody)]);
        let silent = || good().chain(stream::pending());
        let outcome: Vec<_> = incoming(silent()).collect().await;
        assert_eq!(codes(&outcome), [Ok(3), Err(Code::BodyTooSlow)]);

        let started = tokio::time::Instant::now();
        let outcome: Vec<_> = incoming(silent()).kept(|_| Ok(())).collect().await;
        assert_eq!(codes(&outcome), [Ok(3), Err(Code::BodyTooSlow)]);
        assert_eq!(started.elapsed().as_secs(), STANDS_STILL.as_secs());
        let outcome: Vec<_> = incoming(good()).kept(|_| Ok(())).collect().await;
        assert_eq!(codes(&outcome), [Ok(3)]);
    }

    #[tokio::test]
    async fn a_piece_that_is_not_paid_for_is_not_handed_on() {
        let mut room = 5;
        let pay = move |bytes| {
            room =
                u64::checked_sub(room, bytes).ok_or_else(|| Fault::new(Code::ServerDiskFull, "no room"))?;
            Ok(())
        };
        let pieces = stream::iter((0..10).map(|_| Ok(vec![0; 2])));
        let outcome: Vec<_> = incoming(pieces).kept(pay).collect().await;
        assert_eq!(codes(&outcome), [Ok(2), Ok(2), Err(Code::ServerDiskFull)]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_is_read_on_for_a_while() {
        let taken = Arc::new(AtomicUsize::new(0));
        let counting = Arc::clone(&taken);
        let endless = stream::repeat_with(move || {
            counting.fetch_add(1, Ordering::Relaxed);
            Ok(vec![0; 1 << 20])
        });
        // With a wait each, so that who reads on does not do so without end in one go.
        let endless = endless.then(|piece| async {
            tokio::task::yield_now().await;
            piece
        });
        let mut body = incoming(endless);
        assert!(body.next().await.is_some());
        drop(body);
        tokio::time::sleep(DISCARD_WITHIN * 2).await;
        let taken = taken.load(Ordering::Relaxed);
        assert!((DISCARD >> 20..=(DISCARD >> 20) + 4).contains(&taken), "{taken}");
    }
}

//! Answers over HTTP/2 for which there is no room. Each has a window of its own, which a client opens as it likes while it
//! reads all else and says that it is there: so no wait for the connection ends, and the answer would be held for ever.
//!
//! What must hold: for every answer under way it is known since when nobody has asked for its next piece. Whoever serves the
//! connection ends it when that is too long.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::{Body, Frame, SizeHint};
use hyper::body::Bytes;
use tokio::time::Instant;

/// Answers go out in such pieces: what h2 has taken is out of sight, and nobody knows whether it is read.
const PIECE: usize = 64 * 1024;

/// The answers of a connection of HTTP/2 for which there is no room, by number, and since when.
#[derive(Debug, Clone, Default)]
pub struct Unread(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    last: u64,
    since: BTreeMap<u64, Instant>,
}

impl Unread {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock()
    }

    /// The same answer, of which it is known from here on whether there is room for it.
    pub fn watch<B>(&self, body: B) -> Watched<B> {
        Watched {
            body,
            rest: None,
            reading: self.begin(),
        }
    }

    fn begin(&self) -> Reading {
        let mut waiting = self.lock();
        waiting.last += 1;
        let number = waiting.last;
        waiting.since.insert(number, Instant::now());
        drop(waiting);
        let of = self.clone();
        Reading { of, number }
    }

    /// Done once there was no room for one of them for so long.
    pub async fn for_long(&self, time: Duration) {
        loop {
            let oldest = self.lock().since.values().min().copied();
            let until = oldest.unwrap_or_else(Instant::now) + time;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// Whether somebody reads an answer: the next piece is asked for when there is room for it.
#[derive(Debug)]
struct Reading {
    of: Unread,
    number: u64,
}

impl Reading {
    fn asked(&self) {
        self.of.lock().since.remove(&self.number);
    }

    fn given(&self) {
        self.of.lock().since.insert(self.number, Instant::now());
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.asked();
    }
}

/// The body of an answer that is watched.
#[derive(Debug)]
pub struct Watched<B> {
    body: B,
    /// Of a piece that was too large.
    rest: Option<Bytes>,
    reading: Reading,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        this.reading.asked();
        let frame = match this.rest.take() {
            Some(rest) => Frame::data(rest),
            None => match ready!(Pin::new(&mut this.body).poll_frame(context)) {
                Some(Ok(frame)) => frame,
                other => return Poll::Ready(other),
            },
        };
        this.reading.given();
        let frame = match frame.into_data() {
            Ok(mut data) if data.len() > PIECE => {
                let piece = data.split_to(PIECE);
                this.rest = Some(data);
                Frame::data(piece)
            }
            Ok(data) => Frame::data(data),
            Err(frame) => frame,
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let rest = self.rest.as_ref().map_or(0, |rest| rest.len() as u64);
        let upper = hint.upper().map(|upper| upper + rest);
        hint.set_lower(hint.lower() + rest);
        if let Some(upper) = upper {
            hint.set_upper(upper);
        }
        hint
    }
}

//! Bodies on their way through: piece by piece, never held.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::broker::Scanner;

/// How long a server may stay silent about a body that the client asks leave to send. Some never say anything.
const LEAVE: Duration = Duration::from_secs(1);

/// A body from the guest to the server.
pub(super) struct Upload {
    /// `None` once it is known that it will never be sent.
    body: Option<Incoming>,
    waiting: Option<Pin<Box<dyn Future<Output = bool> + Send + Sync>>>,
}

/// Whether a body may be sent for which the client asked leave.
#[derive(Debug, Default)]
pub(super) struct Leave {
    state: AtomicU8,
    changed: Notify,
}

const ASKED: u8 = 0;
const GIVEN: u8 = 1;
/// The server has answered instead.
const MOOT: u8 = 2;

impl Leave {
    pub(super) fn give(&self) {
        self.settle(GIVEN);
    }

    /// Whether leave had been given before.
    pub(super) fn end(&self) -> bool {
        self.settle(MOOT) == GIVEN
    }

    fn settle(&self, to: u8) -> u8 {
        let before = self
            .state
            .compare_exchange(ASKED, to, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|before| before);
        self.changed.notify_one();
        before
    }

    async fn wait(self: Arc<Self>) -> bool {
        let changed = async {
            while self.state.load(Ordering::Acquire) == ASKED {
                self.changed.notified().await;
            }
        };
        if timeout(LEAVE, changed).await.is_err() {
            self.give();
        }
        self.state.load(Ordering::Acquire) == GIVEN
    }
}

impl Upload {
    pub(super) fn new(body: Incoming) -> Self {
        Self {
            body: Some(body),
            waiting: None,
        }
    }

    /// Asks the guest for nothing before leave is given.
    pub(super) fn wait_for(mut self, leave: &Arc<Leave>) -> Self {
        self.waiting = Some(Box::pin(leave.clone().wait()));
        self
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(waiting) = &mut self.waiting {
            if !ready!(waiting.as_mut().poll(cx)) {
                // Given up, so that the guest's connection can be closed; neither ended nor broken, because the server's
                // answer may still be on its way. The connection to the server is not used again.
                self.body = None;
            }
            self.waiting = None;
        }
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_some_and(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Incoming::size_hint).unwrap_or_default()
    }
}

/// A body from the server, or from Atoll itself, to the guest.
pub(super) enum Answer {
    Own(Bytes),
    Passed(Incoming),
    Redacted(Box<Redacted>),
}

pub(super) struct Redacted {
    body: Incoming,
    scanner: Scanner,
    /// What comes once the scanner has let go of everything.
    last: Option<Frame<Bytes>>,
    ended: bool,
}

impl From<Bytes> for Answer {
    fn from(bytes: Bytes) -> Self {
        Self::Own(bytes)
    }
}

impl Answer {
    pub(super) fn redacted(body: Incoming, scanner: Scanner) -> Self {
        Self::Redacted(Box::new(Redacted {
            body,
            scanner,
            last: None,
            ended: false,
        }))
    }
}

impl Redacted {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        loop {
            if self.ended {
                return Poll::Ready(self.last.take().map(Ok));
            }
            let frame = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => frame.into_data().map_err(Some),
                None => Err(None),
            };
            let data = match frame {
                Ok(data) => self.scanner.push(data),
                Err(last) => {
                    self.ended = true;
                    self.last = last.map(|mut frame| {
                        if let Some(trailers) = frame.trailers_mut() {
                            self.scanner.trailers(trailers);
                        }
                        frame
                    });
                    self.scanner.finish()
                }
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut *self {
            Self::Own(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Own(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Passed(body) => Pin::new(body).poll_frame(cx),
            Self::Redacted(redacted) => redacted.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_empty(),
            Self::Passed(body) => body.is_end_stream(),
            Self::Redacted(it) => {
                it.last.is_none() && !it.scanner.holds() && (it.ended || it.body.is_end_stream())
            }
        }
    }

    /// Only asked for at the beginning, when nothing is held; nothing becomes longer or shorter on the way.
    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Passed(body) => body.size_hint(),
            Self::Redacted(it) => it.body.size_hint(),
        }
    }
}

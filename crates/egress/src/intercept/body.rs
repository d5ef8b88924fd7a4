//! Bodies on their way through: piece by piece, never held.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use atoll_broker::{Redactor, Scanner, carries};
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::answer::clean_fields;
use super::check;
use super::open::Watched;
use crate::Tenant;

/// How long a server may stay silent about a body that the client asks leave to send. Some never say anything.
const LEAVE: Duration = Duration::from_secs(1);

/// A body from the guest to the server.
pub(super) struct Upload {
    /// `None` once it is known that it will never be sent.
    body: Option<Incoming>,
    waiting: Option<Pin<Box<dyn Future<Output = bool> + Send + Sync>>>,
    /// Whose placeholders may not stand behind the body.
    tenant: Arc<Tenant>,
    open: Watched,
}

/// Why a body does not come to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error("the request is no longer allowed")]
    Cut,
    #[error("behind the body is the placeholder of a secret, which is not replaced there")]
    Placeholder,
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
    pub(super) fn new(body: Incoming, tenant: Arc<Tenant>, open: Watched) -> Self {
        Self {
            body: Some(body),
            waiting: None,
            tenant,
            open,
        }
    }

    /// Asks the guest for nothing before leave is given.
    pub(super) fn wait_for(mut self, leave: &Arc<Leave>) -> Self {
        self.waiting = Some(Box::pin(leave.clone().wait()));
        self
    }

    /// What may stand behind a body: nothing that says where a request goes, where it ends or who sends it.
    fn behind(&self, mut frame: Frame<Bytes>) -> Result<Frame<Bytes>, Broken> {
        if let Some(trailers) = frame.trailers_mut() {
            check::strip_from_trailers(trailers);
            if carries(trailers, &self.tenant.placeholders) {
                return Err(Broken::Placeholder);
            }
        }
        Ok(frame)
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.open.poll_cut(cx).is_ready() {
            return Poll::Ready(Some(Err(Broken::Cut)));
        }
        if let Some(waiting) = &mut self.waiting {
            if !ready!(waiting.as_mut().poll(cx)) {
                // Given up, so that the guest's connection can be closed; neither ended nor broken, because the server's
                // answer may still be on its way. The connection to the server is not used again.
                self.body = None;
            }
            self.waiting = None;
        }
        let frame = match &mut self.body {
            Some(body) => ready!(Pin::new(body).poll_frame(cx)),
            None => return Poll::Pending,
        };
        Poll::Ready(frame.map(|frame| self.behind(frame?)))
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
    Passed(Box<Passed>),
}

pub(super) struct Passed {
    body: Incoming,
    redactor: Redactor,
    /// Where the body is searched too.
    scanner: Option<Scanner>,
    /// What comes once the scanner has let go of everything.
    last: Option<Frame<Bytes>>,
    ended: bool,
    open: Watched,
}

impl From<Bytes> for Answer {
    fn from(bytes: Bytes) -> Self {
        Self::Own(bytes)
    }
}

impl Answer {
    /// What stands behind the body is always cleaned, the body itself where it is to be `searched`.
    pub(super) fn passed(body: Incoming, redactor: Redactor, searched: bool, open: Watched) -> Self {
        let scanner = searched.then(|| redactor.clone().scanner());
        Self::Passed(Box::new(Passed {
            body,
            redactor,
            scanner,
            last: None,
            ended: false,
            open,
        }))
    }
}

impl Passed {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            if self.open.poll_cut(cx).is_ready() {
                return Poll::Ready(Some(Err(Broken::Cut)));
            }
            if self.ended {
                return Poll::Ready(self.last.take().map(Ok));
            }
            let mut frame = ready!(Pin::new(&mut self.body).poll_frame(cx)).transpose()?;
            if let Some(trailers) = frame.as_mut().and_then(Frame::trailers_mut) {
                clean_fields(trailers, &self.redactor);
            }
            let Some(scanner) = &mut self.scanner else {
                return Poll::Ready(frame.map(Ok));
            };
            let data = match frame.map(Frame::into_data) {
                Some(Ok(data)) => scanner.push(data),
                last => {
                    self.ended = true;
                    self.last = last.and_then(Result::err);
                    scanner.finish()
                }
            };
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let holds = self.scanner.as_ref().is_some_and(Scanner::holds);
        self.last.is_none() && !holds && (self.ended || self.body.is_end_stream())
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match &mut *self {
            Self::Own(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Own(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Passed(passed) => passed.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(bytes) => bytes.is_empty(),
            Self::Passed(passed) => passed.is_end_stream(),
        }
    }

    /// Only asked for at the beginning, when nothing is held; nothing becomes longer or shorter on the way.
    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Passed(passed) => passed.body.size_hint(),
        }
    }
}

//! One logical stream to the guest: what the reader task and the two halves of a [`Stream`] share.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use atoll_guest_protocol::{
    FRAME_COST, FrameKind, INITIAL_CREDIT, MAX_PAYLOAD, Message, SUB_MAIN, decode, encode,
};
use bytes::Bytes;

use super::{ChannelError, Guest};

/// The window of a stream of bulk data: so much may be queued here for a consumer that is slow.
const WIDE_WINDOW: u32 = 2 * INITIAL_CREDIT;
/// Credit goes back to the guest when this part of its window was taken by the consumer: few frames, never a stall.
const RETURN_CREDIT_AT: u32 = 4;
/// A guest may grant as much as it likes; more than this means nothing.
const SEND_CREDIT_CAP: u32 = 64 << 20;
/// Rather than send crumbs, wait until the guest has room for this much.
const SMALLEST_PIECE: usize = 16 * 1024;

/// What the guest says on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    Data { sub: u8, bytes: Bytes },
    Message(Message),
}

/// A frame that nobody took yet. Messages are decoded by the consumer, so that what is queued is never larger than
/// what was paid for.
#[derive(Debug)]
struct Unread {
    message: bool,
    sub: u8,
    payload: Bytes,
}

impl Unread {
    fn cost(&self) -> u32 {
        cost(self.payload.len())
    }
}

/// What a `Data` or `Message` frame of this length costs.
pub(super) fn cost(length: usize) -> u32 {
    u32::try_from(length)
        .unwrap_or(u32::MAX)
        .saturating_add(FRAME_COST)
}

#[derive(Debug)]
struct Inner {
    unread: VecDeque<Unread>,
    /// What the guest may still send.
    credit: u32,
    /// What it may send ahead of the consumer.
    window: u32,
    /// Taken by the consumer, not yet given back as credit.
    taken: u32,
    /// What we may still send.
    send_credit: u32,
    /// Set once: how the stream ended.
    end: Option<Result<(), ChannelError>>,
    receiver: Option<Waker>,
    sender: Option<Waker>,
}

#[derive(Debug)]
pub(super) struct State(Mutex<Inner>);

/// Whether a frame could be accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    Yes,
    /// The guest sent more than it was allowed to; the stream is over.
    Overspent,
}

impl State {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Inner {
            unread: VecDeque::new(),
            credit: INITIAL_CREDIT,
            window: INITIAL_CREDIT,
            taken: 0,
            send_credit: INITIAL_CREDIT,
            end: None,
            receiver: None,
            sender: None,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }

    /// A `Data` or `Message` frame arrived.
    pub(super) fn accept(&self, kind: FrameKind, sub: u8, payload: &[u8]) -> Accepted {
        let mut inner = self.lock();
        if inner.end.is_some() {
            return Accepted::Yes;
        }
        let Some(left) = inner.credit.checked_sub(cost(payload.len())) else {
            drop(inner);
            self.finish(Err(ChannelError::Protocol(
                "the guest sent more than it had credit for",
            )));
            return Accepted::Overspent;
        };
        inner.credit = left;
        inner.unread.push_back(Unread {
            message: kind == FrameKind::Message,
            sub,
            payload: Bytes::copy_from_slice(payload),
        });
        let waker = inner.receiver.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
        Accepted::Yes
    }

    pub(super) fn add_send_credit(&self, amount: u32) {
        let mut inner = self.lock();
        inner.send_credit = inner.send_credit.saturating_add(amount).min(SEND_CREDIT_CAP);
        let waker = inner.sender.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Ends the stream, unless it has ended. What arrived before can still be read.
    pub(super) fn finish(&self, end: Result<(), ChannelError>) {
        let mut inner = self.lock();
        if inner.end.is_some() {
            return;
        }
        inner.end = Some(end);
        let wakers = [inner.receiver.take(), inner.sender.take()];
        drop(inner);
        for waker in wakers.into_iter().flatten() {
            waker.wake();
        }
    }
}

/// An open stream. Dropping it tells the guest that nobody is interested any more.
#[derive(Debug)]
pub struct Stream {
    sender: StreamSender,
    receiver: StreamReceiver,
}

impl Stream {
    pub(super) fn new(guest: Guest, id: u32, state: Arc<State>) -> Self {
        Self {
            sender: StreamSender {
                guest: guest.clone(),
                id,
                state: Arc::clone(&state),
            },
            receiver: StreamReceiver {
                guest,
                id,
                state,
                done: false,
            },
        }
    }

    /// See [`StreamReceiver::next`].
    pub async fn next(&mut self) -> Option<Result<Incoming, ChannelError>> {
        self.receiver.next().await
    }

    /// The answer to a request that has at most one message for an answer.
    pub async fn answer(mut self) -> Result<Option<Message>, ChannelError> {
        let mut answer = None;
        while let Some(incoming) = self.next().await {
            match incoming? {
                Incoming::Message(message) if answer.is_none() => answer = Some(message),
                _ => return Err(ChannelError::Protocol("the guest said more than was asked")),
            }
        }
        Ok(answer)
    }

    /// Lets the guest send further ahead than usual, for bulk data: it then works in larger pieces.
    pub fn widen(&mut self) {
        let mut inner = self.receiver.state.lock();
        let more = WIDE_WINDOW - inner.window;
        if more == 0 || inner.end.is_some() {
            return;
        }
        inner.window = WIDE_WINDOW;
        inner.credit += more;
        drop(inner);
        self.receiver.guest.return_credit(self.receiver.id, more);
    }

    /// See [`StreamSender::send_data`].
    pub async fn send_data(&mut self, bytes: Bytes) -> Result<(), ChannelError> {
        self.sender.send_data(bytes).await
    }

    /// See [`StreamSender::send_end`].
    pub async fn send_end(&mut self) -> Result<(), ChannelError> {
        self.sender.send_end().await
    }

    /// See [`StreamSender::send_message`].
    pub async fn send_message(&mut self, message: &Message) -> Result<(), ChannelError> {
        self.sender.send_message(message).await
    }

    /// Two halves for two tasks. The stream lives as long as the receiver does.
    pub fn split(self) -> (StreamSender, StreamReceiver) {
        (self.sender, self.receiver)
    }
}

/// The half that receives. Dropping it closes the stream.
#[derive(Debug)]
pub struct StreamReceiver {
    guest: Guest,
    id: u32,
    state: Arc<State>,
    done: bool,
}

impl StreamReceiver {
    /// What comes next; `None` when the guest ended the stream with success. After an error or the end: `None`.
    ///
    /// Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Incoming, ChannelError>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Incoming, ChannelError>>> {
        if self.done {
            return Poll::Ready(None);
        }
        let mut inner = self.state.lock();
        let Some(unread) = inner.unread.pop_front() else {
            return match inner.end.clone() {
                None => {
                    inner.receiver = Some(context.waker().clone());
                    Poll::Pending
                }
                Some(end) => {
                    drop(inner);
                    self.done = true;
                    Poll::Ready(end.err().map(Err))
                }
            };
        };
        inner.taken += unread.cost();
        let mut back = 0;
        if inner.taken >= inner.window / RETURN_CREDIT_AT && inner.end.is_none() {
            back = std::mem::take(&mut inner.taken);
            inner.credit += back;
        }
        if inner.unread.is_empty() && inner.unread.capacity() > 64 {
            inner.unread = VecDeque::new();
        }
        drop(inner);
        if back > 0 {
            self.guest.return_credit(self.id, back);
        }
        if !unread.message {
            return Poll::Ready(Some(Ok(Incoming::Data {
                sub: unread.sub,
                bytes: unread.payload,
            })));
        }
        match decode(&unread.payload) {
            Ok(message) => Poll::Ready(Some(Ok(Incoming::Message(message)))),
            Err(_) => {
                self.done = true;
                let error = ChannelError::Protocol("the guest sent a message that cannot be read");
                self.guest.close_stream(self.id, Err(error.clone()));
                Poll::Ready(Some(Err(error)))
            }
        }
    }
}

impl Drop for StreamReceiver {
    fn drop(&mut self) {
        self.guest.close_stream(self.id, Err(ChannelError::Ended));
    }
}

/// The half that sends. Dropping it says nothing to the guest: call [`StreamSender::send_end`] when all is sent.
#[derive(Debug)]
pub struct StreamSender {
    guest: Guest,
    id: u32,
    state: Arc<State>,
}

impl StreamSender {
    /// Sends bytes on the main sub-channel, in as many frames as the guest has room for; waits while it has none.
    ///
    /// Fails with the guest's own [`Failure`](atoll_guest_protocol::Failure) when it ended the stream with one (a full
    /// disk during an upload, say). Not cancel-safe: a part may have been sent, though never part of a frame.
    pub async fn send_data(&mut self, mut bytes: Bytes) -> Result<(), ChannelError> {
        while !bytes.is_empty() {
            let wanted = bytes.len().min(MAX_PAYLOAD);
            let room = self.wait_for_credit(wanted.min(SMALLEST_PIECE)).await?;
            let piece = bytes.split_to(wanted.min(room));
            self.send(FrameKind::Data, piece).await?;
        }
        Ok(())
    }

    /// Says that no more data will follow. Cancel-safe.
    pub async fn send_end(&mut self) -> Result<(), ChannelError> {
        self.wait_for_credit(0).await?;
        self.send(FrameKind::Data, Bytes::new()).await
    }

    /// Cancel-safe: sent whole or not at all.
    pub async fn send_message(&mut self, message: &Message) -> Result<(), ChannelError> {
        let payload = encode(message);
        if payload.len() > MAX_PAYLOAD {
            return Err(ChannelError::TooLarge {
                length: payload.len(),
            });
        }
        self.wait_for_credit(payload.len()).await?;
        self.send(FrameKind::Message, payload.into()).await
    }

    /// Waits until a payload of `least` bytes may be sent and returns how long it may be at most.
    async fn wait_for_credit(&mut self, least: usize) -> Result<usize, ChannelError> {
        poll_fn(|context| {
            let mut inner = self.state.lock();
            if let Some(end) = &inner.end {
                return Poll::Ready(Err(end.clone().err().unwrap_or(ChannelError::Ended)));
            }
            if inner.send_credit >= cost(least) {
                let room = inner.send_credit - FRAME_COST;
                return Poll::Ready(Ok(usize::try_from(room).unwrap_or(usize::MAX)));
            }
            inner.sender = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// The credit is there (only this half spends it); waits for room in the outbox.
    async fn send(&mut self, kind: FrameKind, payload: Bytes) -> Result<(), ChannelError> {
        let room = self.guest.room(payload.len()).await?;
        let mut inner = self.state.lock();
        if let Some(end) = &inner.end {
            return Err(end.clone().err().unwrap_or(ChannelError::Ended));
        }
        inner.send_credit = inner.send_credit.saturating_sub(cost(payload.len()));
        drop(inner);
        self.guest.push(kind, SUB_MAIN, self.id, payload, Some(room));
        Ok(())
    }
}

//! The host's end of a guest channel: one pair of FIFOs per instance, many streams over it.
//!
//! ```text
//!   Stream, Stream, ...            to_guest FIFO
//!     └─ frames ──> Outbox ──────────────────────────────> guest agent
//!     <── queue per stream ── reader task <── from_guest FIFO ──┘
//! ```
//! Senders write into the pipe themselves, without waking a task; only when the pipe is full does a task exist that
//! waits for room. One task per instance reads. An idle instance costs about 10 KiB and no wake-up.
//!
//! What must hold, whatever the guest does:
//! - The reader never waits for a consumer. It need not: what may be queued on a stream is bounded by the credit that
//!   was granted, and a guest that sends more loses that stream.
//! - What waits to be written is bounded ([`OUT_LIMIT`] plus a `Close` and a `Credit` per stream), and admitted in the
//!   order in which streams asked, one frame at a time, so none starves.
//! - A frame for a stream that does not exist, or of a kind that guests do not send, is counted and forgotten.
//! - The FIFOs are open for reading and writing at both ends, so neither side sees an end of file when the other dies:
//!   the host may come back. That an instance is over is found out elsewhere and told with [`Guest::finish`].

mod fifo;
#[cfg(feature = "testing")]
pub mod line;
mod outbox;
mod still;
mod stream;
#[cfg(test)]
mod tests;
mod wire;

pub use fifo::Fifos;
pub use still::WeakGuest;
pub use stream::{Incoming, Stream, StreamReceiver, StreamSender};

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_guest_protocol::{
    Decoder, FILLER_LEN, Failure, Frame, FrameKind, GENERATION, HEADER_LEN, Hello, MAX_PAYLOAD, MAX_REQUEST,
    Message, Request, Welcome, decode, encode,
};
use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use outbox::Outbox;
use stream::{Accepted, State};
use wire::Wire;

/// Streams that may be open to one guest at a time.
pub const MAX_STREAMS: usize = 256;
/// A guest that works answers within milliseconds; one whose agent was stopped by its own root never does.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Bytes that may wait to be written to one guest.
const OUT_LIMIT: usize = 512 * 1024;
/// How much is read before other tasks get a turn; also what a pipe holds, so the most that a dead guest leaves.
const READ_TURN: usize = 1 << 20;
/// After this long without bytes the reader gives its large buffer back.
const SHRINK_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, thiserror::Error)]
pub enum ChannelError {
    #[error("the instance is gone")]
    Closed,
    #[error("{MAX_STREAMS} operations are in progress in this instance already; wait for one to end")]
    Busy,
    #[error("the request is {length} bytes long; the most that fits is {MAX_REQUEST}")]
    TooLarge { length: usize },
    /// The guest broke the protocol; its stream was closed.
    #[error("protocol violation: {0}")]
    Protocol(&'static str),
    /// The guest refused or failed.
    #[error("{}", .0.message)]
    Failed(Failure),
    /// Used after its end.
    #[error("the stream has ended")]
    Ended,
    #[error("the guest agent did not answer within {} ms", .0.as_millis())]
    TimedOut(Duration),
    #[error("the guest agent speaks protocol generation {guest}, this server {host}")]
    Generation { host: u32, guest: u32 },
    #[error("{what}: {source}")]
    Io {
        what: String,
        #[source]
        source: Arc<io::Error>,
    },
}

impl ChannelError {
    fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: Arc::new(source.into()),
        }
    }
}

/// How to greet a guest.
#[derive(Debug, Clone, Copy)]
pub struct Connect {
    pub agent: AgentState,
    /// How long to wait for its answer.
    pub within: Duration,
}

/// What the agent was doing before we greet it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentState {
    /// Nobody spoke to it before, so there is no torn frame to complete.
    Booting,
    /// An earlier server spoke to it, and may have died in the middle of a frame.
    Running,
    /// It was saved in the middle of a conversation over other FIFOs.
    Restored,
}

/// A handle to the agent in one instance. Clones are cheap; when the last one and the last stream are dropped, the
/// reader task ends. The instance does not notice.
#[derive(Debug, Clone)]
pub struct Guest {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    reader: AbortHandle,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.close();
        self.reader.abort();
    }
}

/// What the handles and the reader task share. Holds no handle, so that dropping the last one is noticed.
#[derive(Debug)]
struct Shared {
    wire: Wire,
    outbox: Mutex<Outbox>,
    room: Arc<Semaphore>,
    streams: Mutex<Streams>,
    finish: Notify,
    ignored: AtomicU64,
    /// How many pings were sent, each with its number, and the last that was answered.
    pings: AtomicU64,
    ponged: AtomicU64,
    runtime: tokio::runtime::Handle,
}

#[derive(Debug)]
struct Streams {
    open: HashMap<u32, Arc<State>>,
    next: u32,
    closed: bool,
}

/// What a guest is waited for no longer than [`ANSWER_WITHIN`].
pub async fn in_time<T>(work: impl Future<Output = Result<T, ChannelError>>) -> Result<T, ChannelError> {
    tokio::time::timeout(ANSWER_WITHIN, work)
        .await
        .unwrap_or(Err(ChannelError::TimedOut(ANSWER_WITHIN)))
}

impl Guest {
    /// Opens the FIFOs and greets the agent, which may still be booting; everything it said to an earlier host is
    /// skipped.
    pub async fn connect(to_guest: &Path, from_guest: &Path, how: Connect) -> Result<Self, ChannelError> {
        Self::over(fifo::open_named(to_guest)?, fifo::open_named(from_guest)?, how).await
    }

    /// The same over FIFOs that somebody else has opened ([`Fifos::open_for_host`]).
    pub async fn over(to_guest: OwnedFd, from_guest: OwnedFd, how: Connect) -> Result<Self, ChannelError> {
        Self::on(Wire::fifos(to_guest, from_guest)?, how).await
    }

    /// The same with an agent in this process.
    #[cfg(feature = "testing")]
    pub async fn on_line(line: Arc<line::Line>, how: Connect) -> Result<Self, ChannelError> {
        Self::on(Wire::Line(line), how).await
    }

    async fn on(wire: Wire, how: Connect) -> Result<Self, ChannelError> {
        let shared = Arc::new(Shared {
            wire,
            outbox: Mutex::default(),
            room: Arc::new(Semaphore::new(OUT_LIMIT)),
            streams: Mutex::new(Streams {
                open: HashMap::new(),
                next: 1,
                closed: false,
            }),
            finish: Notify::new(),
            ignored: AtomicU64::new(0),
            pings: AtomicU64::new(0),
            ponged: AtomicU64::new(0),
            runtime: tokio::runtime::Handle::current(),
        });
        let nonce = getrandom::u64()
            .map_err(|error| ChannelError::io("getting random bytes", io::Error::other(error.to_string())))?;
        let hello = Hello {
            generation: GENERATION,
            nonce,
            restored: how.agent == AgentState::Restored,
        };
        {
            let mut outbox = shared.lock_outbox();
            // What is saved is saved between two frames.
            if how.agent == AgentState::Running {
                static ZEROS: [u8; FILLER_LEN] = [0; FILLER_LEN];
                outbox.push_filler(Bytes::from_static(&ZEROS));
            }
            outbox.push(FrameKind::Hello, 0, 0, encode(&hello).into(), None);
            shared.flush(&mut outbox);
        }
        let mut decoder = Decoder::new();
        let welcomed = tokio::time::timeout(how.within, shared.await_welcome(&mut decoder, nonce)).await;
        match welcomed {
            Ok(Ok(())) => {}
            failed => {
                shared.close();
                return Err(match failed {
                    Ok(Err(error)) => error,
                    _ => ChannelError::TimedOut(how.within),
                });
            }
        }
        let reader = tokio::spawn(Arc::clone(&shared).read(decoder)).abort_handle();
        Ok(Self {
            inner: Arc::new(Inner { shared, reader }),
        })
    }

    /// Opens a stream. Waits while the guest does not read; cancel-safe.
    pub async fn open(&self, request: &Request) -> Result<Stream, ChannelError> {
        let payload = encode(request);
        if payload.len() <= MAX_PAYLOAD {
            return self.open_encoded(payload).await;
        }
        let length = match u32::try_from(payload.len()) {
            Ok(length) if payload.len() <= MAX_REQUEST => length,
            _ => {
                return Err(ChannelError::TooLarge {
                    length: payload.len(),
                });
            }
        };
        let mut stream = self.open_encoded(encode(&Request::Long { length })).await?;
        stream.send_data(payload.into()).await?;
        Ok(stream)
    }

    async fn open_encoded(&self, payload: Vec<u8>) -> Result<Stream, ChannelError> {
        let room = self.room(payload.len()).await?;
        let state = State::new();
        let id = self.inner.shared.register(&state)?;
        let stream = Stream::new(self.clone(), id, state);
        self.push(FrameKind::Open, 0, id, payload.into(), Some(room));
        Ok(stream)
    }

    /// A request that is answered at once, with at most one message. A guest that does not answer within [`ANSWER_WITHIN`]
    /// is not waited for: whoever calls may hold what others need. Cancel-safe: the guest is told that nobody waits.
    pub async fn call(&self, request: &Request) -> Result<Option<Message>, ChannelError> {
        in_time(async { self.open(request).await?.answer().await }).await
    }

    /// Whether the channel is over.
    pub fn is_closed(&self) -> bool {
        self.inner.shared.lock_streams().closed
    }

    /// Frames that were ignored because nobody asked for them; for metrics and tests.
    pub fn ignored_frames(&self) -> u64 {
        self.inner.shared.ignored.load(Ordering::Relaxed)
    }

    /// Fails every stream with [`ChannelError::Closed`], now.
    pub fn close(&self) {
        self.inner.shared.close();
        self.inner.reader.abort();
    }

    /// The instance is over: delivers what is still in the pipe, then closes.
    pub fn finish(&self) {
        self.inner.shared.finish.notify_one();
    }

    /// Waits for room for a payload of this length, in the order of asking.
    async fn room(&self, payload: usize) -> Result<OwnedSemaphorePermit, ChannelError> {
        let bytes = u32::try_from(payload + HEADER_LEN).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.inner.shared.room);
        room.acquire_many_owned(bytes)
            .await
            .map_err(|_| ChannelError::Closed)
    }

    fn push(
        &self,
        kind: FrameKind,
        sub: u8,
        stream: u32,
        payload: Bytes,
        room: Option<OwnedSemaphorePermit>,
    ) {
        let shared = &self.inner.shared;
        let mut outbox = shared.lock_outbox();
        outbox.push(kind, sub, stream, payload, room);
        shared.flush(&mut outbox);
    }

    fn return_credit(&self, stream: u32, amount: u32) {
        let shared = &self.inner.shared;
        let mut outbox = shared.lock_outbox();
        outbox.push_credit(stream, amount);
        shared.flush(&mut outbox);
    }

    /// Ends a stream from our side and tells the guest, if it does not know.
    fn close_stream(&self, id: u32, end: Result<(), ChannelError>) {
        self.inner.shared.close_stream(id, end);
    }
}

impl Shared {
    fn lock_outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock()
    }

    fn lock_streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock()
    }

    /// Writes what can be written now; the rest is left to a task that waits for room in the pipe.
    fn flush(self: &Arc<Self>, outbox: &mut Outbox) {
        if outbox.flusher.is_some() {
            return;
        }
        match outbox.flush(|slices| self.wire.write(slices)) {
            Ok(true) => {}
            Ok(false) => {
                let flusher = self.runtime.spawn(Arc::clone(self).flush_later());
                outbox.flusher = Some(flusher.abort_handle());
            }
            Err(error) => {
                tracing::warn!(%error, "cannot write to a guest");
                outbox.clear();
                self.finish.notify_one();
            }
        }
    }

    /// Lives while the pipe is full; closing the channel aborts it.
    async fn flush_later(self: Arc<Self>) {
        loop {
            let Ok(mut ready) = self.wire.writable().await else {
                return;
            };
            let mut outbox = self.lock_outbox();
            match outbox.flush(|slices| self.wire.write(slices)) {
                Ok(false) => ready.clear(),
                Ok(true) => {
                    outbox.flusher = None;
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot write to a guest");
                    outbox.clear();
                    self.finish.notify_one();
                    return;
                }
            }
        }
    }

    fn register(&self, state: &Arc<State>) -> Result<u32, ChannelError> {
        let mut streams = self.lock_streams();
        if streams.closed {
            return Err(ChannelError::Closed);
        }
        if streams.open.len() >= MAX_STREAMS {
            return Err(ChannelError::Busy);
        }
        loop {
            let id = streams.next;
            streams.next = streams.next.checked_add(1).unwrap_or(1);
            if let std::collections::hash_map::Entry::Vacant(vacant) = streams.open.entry(id) {
                vacant.insert(Arc::clone(state));
                return Ok(id);
            }
        }
    }

    fn close_stream(self: &Arc<Self>, id: u32, end: Result<(), ChannelError>) {
        let Some(state) = self.lock_streams().open.remove(&id) else {
            return;
        };
        state.finish(end);
        let mut outbox = self.lock_outbox();
        outbox.push(FrameKind::Close, 0, id, Bytes::new(), None);
        self.flush(&mut outbox);
    }

    fn close(&self) {
        let open = {
            let mut streams = self.lock_streams();
            streams.closed = true;
            std::mem::take(&mut streams.open)
        };
        self.room.close();
        self.lock_outbox().clear();
        // In the order in which they were opened.
        let mut open: Vec<_> = open.into_iter().collect();
        open.sort_unstable_by_key(|(id, _)| *id);
        for (_, state) in open {
            state.finish(Err(ChannelError::Closed));
        }
    }

    async fn await_welcome(&self, decoder: &mut Decoder, nonce: u64) -> Result<(), ChannelError> {
        let fail = |error: io::Error| ChannelError::io("reading from the guest", error);
        loop {
            while let Some(frame) = decoder.next_frame() {
                if frame.kind != FrameKind::Welcome {
                    continue;
                }
                let Ok(welcome) = decode::<Welcome>(frame.payload) else {
                    continue;
                };
                if welcome.nonce != nonce {
                    continue;
                }
                if welcome.generation != GENERATION {
                    return Err(ChannelError::Generation {
                        host: GENERATION,
                        guest: welcome.generation,
                    });
                }
                return Ok(());
            }
            let mut ready = self.wire.readable().await.map_err(fail)?;
            match self.wire.read(decoder.space()) {
                Ok(count) => decoder.filled(count),
                Err(rustix::io::Errno::AGAIN) => ready.clear(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(fail(error.into())),
            }
        }
    }

    /// The reader task: ends with the channel.
    async fn read(self: Arc<Self>, mut decoder: Decoder) {
        while let Some(frame) = decoder.next_frame() {
            self.receive(&frame); // what came together with the welcome
        }
        let mut large = false;
        let ended = loop {
            tokio::select! {
                biased;
                ready = self.wire.readable() => {
                    let mut ready = match ready {
                        Ok(ready) => ready,
                        Err(error) => break Err(error),
                    };
                    match self.read_some(&mut decoder) {
                        Ok(Turn::Emptied { bytes }) => {
                            ready.clear();
                            large |= bytes > 4096;
                        }
                        Ok(Turn::Over) => {
                            large = true;
                            tokio::task::yield_now().await;
                        }
                        Err(error) => break Err(error),
                    }
                }
                () = self.finish.notified() => break self.read_some(&mut decoder).map(drop),
                () = tokio::time::sleep(SHRINK_AFTER), if large => {
                    large = false;
                    decoder.shrink();
                }
            }
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "cannot read from a guest");
        }
        self.close();
    }

    /// Reads until the pipe is empty or this turn is over.
    fn read_some(self: &Arc<Self>, decoder: &mut Decoder) -> io::Result<Turn> {
        let mut bytes = 0;
        while bytes < READ_TURN {
            let space = decoder.space();
            let offered = space.len();
            match self.wire.read(space) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    bytes += count;
                    decoder.filled(count);
                    while let Some(frame) = decoder.next_frame() {
                        self.receive(&frame);
                    }
                    if count < offered {
                        return Ok(Turn::Emptied { bytes });
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(Turn::Emptied { bytes }),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Turn::Over)
    }

    fn receive(self: &Arc<Self>, frame: &Frame<'_>) {
        let ignore = || {
            self.ignored.fetch_add(1, Ordering::Relaxed);
        };
        let find = || self.lock_streams().open.get(&frame.stream).cloned();
        match frame.kind {
            FrameKind::Data | FrameKind::Message => match find() {
                Some(state) => {
                    if state.accept(frame.kind, frame.sub, frame.payload) == Accepted::Overspent {
                        self.close_stream(frame.stream, Err(ChannelError::Ended));
                    }
                }
                None => ignore(),
            },
            FrameKind::Credit => match (find(), frame.payload.try_into()) {
                (Some(state), Ok(amount)) => state.add_send_credit(u32::from_le_bytes(amount)),
                _ => ignore(),
            },
            FrameKind::End => match self.lock_streams().open.remove(&frame.stream) {
                Some(state) => state.finish(match decode::<Result<(), Failure>>(frame.payload) {
                    Ok(end) => end.map_err(ChannelError::Failed),
                    Err(_) => Err(ChannelError::Protocol(
                        "the guest sent an end that cannot be read",
                    )),
                }),
                None => ignore(),
            },
            FrameKind::Ping if frame.payload.len() <= 64 => {
                let mut outbox = self.lock_outbox();
                outbox.set_pong(frame.payload);
                self.flush(&mut outbox);
            }
            FrameKind::Pong => match frame.payload.try_into().map(u64::from_le_bytes) {
                Ok(number) if number <= self.pings.load(Ordering::Relaxed) => {
                    self.ponged.store(number, Ordering::Relaxed);
                }
                _ => ignore(),
            },
            FrameKind::Ping | FrameKind::Welcome | FrameKind::Hello | FrameKind::Open | FrameKind::Close => {
                ignore();
            }
        }
    }
}

enum Turn {
    /// Nothing more was in the pipe. (A short read says so, too: the next byte raises a new edge.)
    Emptied {
        bytes: usize,
    },
    Over,
}

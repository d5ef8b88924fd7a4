//! Bodies that come at a pace, and are paid for as they come.
//!
//! A body is waited for only while it is asked for: who sends faster than we take is not slow. What must hold: no wait for a
//! piece is longer than [`Patience::body`], and no body as a whole takes longer than that and the time that its bytes take at
//! [`Patience::body_rate`].

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use atoll_types::{Code, Fault};
use bytes::{Buf as _, Bytes};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};

use crate::Patience;
use crate::memory::{Account, Permit, json_weight};

/// The least that is allocated for a body.
const FIRST: usize = 8 * 1024;

/// Why a body was not read.
#[derive(Debug)]
pub enum Refused {
    TooLarge {
        limit: usize,
    },
    /// It came too slowly, or not at all.
    TooSlow {
        /// For each piece, and for all of it beside what it earned.
        wait: Duration,
        rate: u64,
    },
    /// Nothing of it came for so long.
    Silent {
        after: Duration,
    },
    /// The connection broke, or what came was not what its head promised.
    Broken(String),
    /// It would have been more than may be held.
    Full(Fault),
    /// Nobody was admitted who could pay for it.
    Unpaid,
    /// The route reads JSON, and the body is declared as something else, or as nothing where it must be.
    NotJson,
}

impl Refused {
    /// In words, for an API that has no others.
    pub fn fault(self) -> Fault {
        match self {
            Self::TooLarge { limit } => Fault::new(
                Code::BodyTooLarge,
                format!("the body may hold at most {limit} bytes"),
            ),
            Self::TooSlow { wait, rate } => Fault::new(
                Code::BodyTooSlow,
                format!(
                    "the body came too slowly: each piece has {} seconds to come, and after those the body has to bring {} \
                     bytes a second",
                    wait.as_secs(),
                    rate
                ),
            )
            .hint("send the whole body at once"),
            Self::Silent { after } => Fault::new(
                Code::BodyTooSlow,
                format!("nothing of the body came for {} seconds", after.as_secs()),
            )
            .hint("send it without such pauses"),
            Self::Broken(why) => {
                Fault::new(Code::IncompleteBody, format!("the body could not be read: {why}"))
            }
            Self::Full(fault) => fault,
            Self::Unpaid => Fault::internal("a body was to be read before it was known whose it is"),
            Self::NotJson => Fault::new(
                Code::UnsupportedMediaType,
                "this route reads JSON, and the body is not declared as such",
            )
            .hint("send `Content-Type: application/json`"),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { limit } => write!(f, "the body has more than {limit} bytes"),
            Self::TooSlow { .. } => f.write_str("the body came too slowly"),
            Self::Silent { after } => write!(f, "nothing of the body came for {} seconds", after.as_secs()),
            Self::Broken(why) => f.write_str(why),
            Self::Full(fault) => fault.fmt(f),
            Self::Unpaid => f.write_str("nobody pays for the body"),
            Self::NotJson => f.write_str("the body is not declared as JSON"),
        }
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        refused.fault()
    }
}

impl std::error::Error for Refused {}

/// Measures how long somebody is waited for.
#[derive(Debug)]
pub(crate) struct Pace {
    wait: Duration,
    rate: u64,
    waited: Duration,
    came: u64,
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Pace {
    pub(crate) fn new(wait: Duration, rate: u64) -> Self {
        Self {
            wait,
            rate,
            waited: Duration::ZERO,
            came: 0,
            waiting: None,
        }
    }

    pub(crate) fn arrived(&mut self, bytes: usize) {
        if let Some((since, _)) = self.waiting.take() {
            self.waited += since.elapsed();
        }
        self.came += bytes as u64;
    }

    /// Ready once nothing more is waited for.
    pub(crate) fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<Refused> {
        let (_, timer) = self.waiting.get_or_insert_with(|| {
            let earned = Duration::from_secs_f64(self.came as f64 / self.rate.max(1) as f64);
            let in_all = (self.wait + earned).saturating_sub(self.waited);
            let now = Instant::now();
            let until = now + in_all.min(self.wait);
            (now, Box::pin(tokio::time::sleep_until(until)))
        });
        let (wait, rate) = (self.wait, self.rate);
        timer
            .as_mut()
            .poll(context)
            .map(|()| Refused::TooSlow { wait, rate })
    }
}

/// A body that is kept as it comes, so that whoever sends it holds a place where only some fit: it must keep coming.
#[derive(Debug)]
pub struct Upload<B> {
    inner: B,
    pace: Pace,
}

impl<B> Upload<B> {
    pub fn new(inner: B, patience: Patience) -> Self {
        Self {
            inner,
            pace: Pace::new(patience.stream, patience.body_rate),
        }
    }
}

impl<B> Body for Upload<B>
where
    B: Body + Unpin,
    B::Error: fmt::Display,
{
    type Data = B::Data;
    type Error = Refused;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Refused>>> {
        let this = &mut *self;
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                this.pace
                    .arrived(frame.data_ref().map_or(0, bytes::Buf::remaining));
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(Refused::Broken(error.to_string())))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Ready(Some(Err(ready!(this.pace.poll_over(context))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A body that must keep coming, and whose bytes are counted against an account for as long as this lives: for readers that
/// gather a message of it, such as those of gRPC.
#[derive(Debug)]
pub struct Metered<B> {
    inner: B,
    pace: Pace,
    permit: Permit,
    weigh: fn(u64) -> u64,
}

impl<B> Metered<B> {
    /// `weigh` says what so many bytes cost their reader.
    pub fn new(inner: B, patience: Patience, account: &Account, weigh: fn(u64) -> u64) -> Self {
        Self {
            inner,
            pace: Pace::new(patience.body, patience.body_rate),
            permit: account.open(),
            weigh,
        }
    }
}

impl<B> Body for Metered<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: fmt::Display,
{
    type Data = Bytes;
    type Error = Refused;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Refused>>> {
        let this = &mut *self;
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                this.pace.arrived(bytes);
                let weight = (this.weigh)(this.pace.came);
                Poll::Ready(Some(match this.permit.set(weight) {
                    Ok(()) => Ok(frame),
                    Err(fault) => Err(Refused::Full(fault)),
                }))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(Refused::Broken(error.to_string())))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => Poll::Ready(Some(Err(ready!(this.pace.poll_over(context))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A body that is passed on as it comes, and may not fall silent for ever.
#[derive(Debug)]
pub struct Awaited<B> {
    inner: B,
    silence: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<B> Awaited<B> {
    pub fn new(inner: B, silence: Duration) -> Self {
        Self {
            inner,
            silence,
            timer: None,
        }
    }
}

impl<B> Body for Awaited<B>
where
    B: Body + Unpin,
    B::Error: fmt::Display,
{
    type Data = B::Data;
    type Error = Refused;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Refused>>> {
        let this = &mut *self;
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(frame) => {
                this.timer = None;
                Poll::Ready(frame.map(|frame| frame.map_err(|error| Refused::Broken(error.to_string()))))
            }
            Poll::Pending => {
                let silence = this.silence;
                let timer = this
                    .timer
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(silence)));
                ready!(timer.as_mut().poll(context));
                Poll::Ready(Some(Err(Refused::Silent { after: silence })))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A body that was read, with the permit to hold it.
#[derive(Debug)]
pub struct Held {
    bytes: Vec<u8>,
    permit: Permit,
}

impl Held {
    /// Counts what reading it as JSON may take: a short text can stand for many values.
    pub fn weigh_json(&mut self) -> Result<(), Refused> {
        let weight = json_weight(&self.bytes);
        self.permit.grow(weight).map_err(Refused::Full)
    }

    /// As bytes that are paid for until the last copy of them is dropped.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    /// To be overwritten, where nobody may read it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// The permit alone, for as long as what was made of the bytes is there.
    pub fn into_permit(self) -> Permit {
        self.permit
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a body of at most `limit` bytes.
pub async fn read<B>(body: B, limit: usize, patience: Patience, account: &Account) -> Result<Held, Refused>
where
    B: Body,
    B::Error: fmt::Display,
{
    let mut body = pin!(body);
    let too_large = || Refused::TooLarge { limit };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let expected = body
        .size_hint()
        .upper()
        .map_or(limit, |most| usize::try_from(most).unwrap_or(limit).min(limit));
    let mut pace = Pace::new(patience.body, patience.body_rate);
    let mut held = Held {
        bytes: Vec::new(),
        permit: account.open(),
    };
    loop {
        let frame = poll_fn(|context| match body.as_mut().poll_frame(context) {
            Poll::Ready(frame) => Poll::Ready(Ok(frame)),
            Poll::Pending => pace.poll_over(context).map(Err),
        })
        .await?;
        let Some(frame) = frame else { return Ok(held) };
        let frame = frame.map_err(|error| Refused::Broken(error.to_string()))?;
        let Ok(mut data) = frame.into_data() else {
            pace.arrived(0);
            continue;
        };
        pace.arrived(data.remaining());
        let length = held.bytes.len() + data.remaining();
        if length > limit {
            return Err(too_large());
        }
        if length > held.bytes.capacity() {
            // By doubling, so that a long body is not copied often, and no further than it can get.
            let room = (held.bytes.capacity() * 2).max(FIRST).min(expected).max(length);
            held.permit.set(room as u64).map_err(Refused::Full)?;
            held.bytes.reserve_exact(room - held.bytes.len());
        }
        while data.has_remaining() {
            let piece = data.chunk();
            held.bytes.extend_from_slice(piece);
            let taken = piece.len();
            data.advance(taken);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;
    use crate::memory::{Limits, Memory};
    use atoll_types::ProjectId;

    fn memory(project: u64) -> (Memory, Account) {
        let memory = Memory::new(Limits {
            server: project,
            project,
            sandbox: project,
        });
        let account = memory.account(&ProjectId::from_entropy([1; 20]), None);
        (memory, account)
    }

    /// Pieces, each after a time.
    fn pieces(pieces: Vec<(Duration, usize)>) -> impl Body<Data = Bytes, Error = std::io::Error> + Unpin {
        let stream = stream::unfold(pieces.into_iter(), |mut pieces| async move {
            let (after, bytes) = pieces.next()?;
            tokio::time::sleep(after).await;
            Some((Ok(Frame::data(Bytes::from(vec![b'x'; bytes]))), pieces))
        });
        StreamBody::new(Box::pin(stream))
    }

    const PATIENCE: Patience = Patience {
        head: Duration::from_secs(1),
        idle: Duration::from_secs(1),
        body: Duration::from_secs(10),
        stream: Duration::from_secs(100),
        body_rate: 100,
    };

    #[tokio::test(start_paused = true)]
    async fn what_comes_is_paid_for_until_the_last_copy_is_dropped() {
        let (memory, account) = memory(1 << 20);
        let body = pieces(vec![(Duration::ZERO, 100_000), (Duration::ZERO, 100)]);
        let held = read(body, 200_000, PATIENCE, &account).await.unwrap();
        assert_eq!(held.as_ref().len(), 100_100);
        let bytes = held.into_bytes();
        let part = bytes.slice(5..10);
        drop(bytes);
        assert!(memory.held() >= 100_100);
        drop(part);
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_much_is_refused_before_it_is_there() {
        let (memory, account) = memory(50_000);
        let body = pieces(vec![(Duration::ZERO, 30_000); 3]);
        let refused = read(body, 1 << 20, PATIENCE, &account).await.unwrap_err();
        assert!(matches!(refused, Refused::Full(_)), "{refused}");
        assert_eq!(memory.held(), 0);
        let body = pieces(vec![(Duration::ZERO, 100); 3]);
        let refused = read(body, 250, PATIENCE, &account).await.unwrap_err();
        assert!(matches!(refused, Refused::TooLarge { limit: 250 }), "{refused}");
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_and_dribbling_end() {
        let (memory, account) = memory(1 << 20);
        let started = Instant::now();
        let silent = pieces(vec![(Duration::from_secs(1_000_000), 1)]);
        let refused = read(silent, 1000, PATIENCE, &account).await.unwrap_err();
        assert!(matches!(refused, Refused::TooSlow { .. }), "{refused}");
        assert_eq!(started.elapsed(), Duration::from_secs(10));

        // A byte a second is always in time for the next piece, and too slow as a whole.
        let dribbling = pieces(vec![(Duration::from_secs(1), 1); 100_000]);
        let started = Instant::now();
        let refused = read(dribbling, 1 << 20, PATIENCE, &account).await.unwrap_err();
        assert!(matches!(refused, Refused::TooSlow { .. }), "{refused}");
        assert!(started.elapsed() < Duration::from_secs(12));

        // Slow, but at the pace that is asked for.
        let steady = pieces(vec![(Duration::from_secs(5), 600); 100]);
        let held = read(steady, 1 << 20, PATIENCE, &account).await.unwrap();
        assert_eq!(held.as_ref().len(), 60_000);
        drop(held);
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn who_takes_slowly_does_not_make_the_sender_slow() {
        let (_, account) = memory(1 << 20);
        let body = pieces(vec![(Duration::ZERO, 1); 5]);
        let mut body = Metered::new(body, PATIENCE, &account, |bytes| bytes);
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(60)).await;
            body.frame().await.unwrap().unwrap();
        }
        assert!(body.frame().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_metered_body_holds_what_passed_until_it_is_dropped() {
        let (memory, account) = memory(1000);
        let body = pieces(vec![(Duration::ZERO, 100); 8]);
        let mut body = Metered::new(body, PATIENCE, &account, |bytes| bytes * 2);
        for _ in 0..5 {
            body.frame().await.unwrap().unwrap();
        }
        assert_eq!(memory.held(), 1000);
        let refused = body.frame().await.unwrap().unwrap_err();
        assert!(matches!(refused, Refused::Full(_)), "{refused}");
        drop(body);
        assert_eq!(memory.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_passed_on_may_pause_and_not_for_ever() {
        let body = pieces(vec![(Duration::from_secs(90), 1), (Duration::from_secs(90), 1)]);
        let mut body = Awaited::new(body, PATIENCE.stream);
        body.frame().await.unwrap().unwrap();
        body.frame().await.unwrap().unwrap();
        let mut body = Awaited::new(pieces(vec![(Duration::from_secs(101), 1)]), PATIENCE.stream);
        let refused = body.frame().await.unwrap().unwrap_err();
        assert!(matches!(refused, Refused::Silent { .. }), "{refused}");

        // What is kept has to come at some pace.
        let mut body = Upload::new(pieces(vec![(Duration::from_secs(50), 1); 9]), PATIENCE);
        body.frame().await.unwrap().unwrap();
        body.frame().await.unwrap().unwrap();
        let refused = body.frame().await.unwrap().unwrap_err();
        assert!(matches!(refused, Refused::TooSlow { .. }), "{refused}");
    }

    #[tokio::test]
    async fn many_values_in_a_short_text_weigh_more() {
        let (memory, account) = memory(80_000);
        let text = format!("[{}]", vec!["1"; 1000].join(","));
        let mut held = read(text, 10_000, PATIENCE, &account).await.unwrap();
        held.weigh_json().unwrap();
        assert!(memory.held() >= 64_000, "{}", memory.held());
        let mut second = read("[1,2,3,4,5,6,7,8,9]".repeat(30), 10_000, PATIENCE, &account)
            .await
            .unwrap();
        assert!(matches!(second.weigh_json(), Err(Refused::Full(_))));
    }
}

//! A stream that somebody listens to, and that nobody may hold up for ever.
//!
//! ```text
//!   asked for a piece ── out of the seat ──> next ──> piece ── back into the seat ── asked again …
//!                                                                   └─ nobody asks for long: taken away
//! ```
//! What must hold: while a piece is waited for, the source is with whoever waits; in between it is in the seat, from which it
//! is taken when the stream is dropped, or when nobody has asked for [`LONGEST`]. Either way it is dropped, and knows what to
//! do then.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// For how long nobody may come for the next piece.
const LONGEST: Duration = Duration::from_secs(30);

/// Where pieces come from.
pub(crate) trait Source: Send + 'static {
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

struct Seat<S> {
    place: Arc<Mutex<Place<S>>>,
    watcher: Option<AbortHandle>,
}

enum Place<S> {
    /// Since when.
    Here(S, Instant),
    /// With whoever waits for a piece.
    Out,
    /// Nobody came for it.
    TakenAway,
}

impl<S: Source> Seat<S> {
    fn change(&self, place: Place<S>) -> Place<S> {
        let mut here = self.place.lock();
        std::mem::replace(&mut *here, place)
    }
}

impl<S> Drop for Seat<S> {
    fn drop(&mut self) {
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
        let mut here = self.place.lock();
        let left = std::mem::replace(&mut *here, Place::Out);
        drop(here);
        drop(left);
    }
}

/// The pieces of a source. Where it `is_awaited`, it is taken away from whoever does not come for them, who then hears
/// `too_late` as the last.
pub(crate) fn listen<S: Source, L: FnOnce() -> Bytes + Send>(
    source: S,
    runtime: &Handle,
    is_awaited: bool,
    too_late: L,
) -> impl Stream<Item = Bytes> + Send + use<S, L> {
    let place = Arc::new(Mutex::new(Place::Here(source, Instant::now())));
    let watcher = is_awaited.then(|| runtime.spawn(watch(Arc::clone(&place))).abort_handle());
    let seat = Seat { place, watcher };
    futures_util::stream::unfold((seat, Some(too_late)), |(seat, mut too_late)| async move {
        match seat.change(Place::Out) {
            Place::Here(mut source, _) => {
                let piece = source.next().await?;
                seat.change(Place::Here(source, Instant::now()));
                Some((piece, (seat, too_late)))
            }
            Place::Out => None,
            Place::TakenAway => {
                let last = too_late.take()?();
                Some((last, (seat, None)))
            }
        }
    })
}

async fn watch<S: Source>(place: Arc<Mutex<Place<S>>>) {
    let mut due = Instant::now() + LONGEST;
    loop {
        tokio::time::sleep_until(due).await;
        let taken = {
            let mut here = place.lock();
            match &*here {
                Place::Here(_, since) if since.elapsed() >= LONGEST => {
                    std::mem::replace(&mut *here, Place::TakenAway)
                }
                Place::Here(_, since) => {
                    due = *since + LONGEST;
                    continue;
                }
                Place::Out => {
                    due = Instant::now() + LONGEST;
                    continue;
                }
                Place::TakenAway => return,
            }
        };
        // Behind the lock: what is dropped may have much to do.
        drop(taken);
        return;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};

    use futures_util::StreamExt as _;

    use super::*;

    /// Numbers, each after so long; tells when it is dropped.
    struct Numbers(u8, Duration, Arc<AtomicBool>);

    impl Source for Numbers {
        async fn next(&mut self) -> Option<Bytes> {
            tokio::time::sleep(self.1).await;
            self.0 += 1;
            (self.0 <= 3).then(|| Bytes::from(vec![self.0]))
        }
    }

    impl Drop for Numbers {
        fn drop(&mut self) {
            self.2.store(true, Ordering::SeqCst);
        }
    }

    fn numbers(pause: Duration, is_awaited: bool) -> (impl Stream<Item = Bytes> + Send, Arc<AtomicBool>) {
        let dropped = Arc::new(AtomicBool::new(false));
        let source = Numbers(0, pause, Arc::clone(&dropped));
        let late = || Bytes::from_static(b"late");
        (listen(source, &Handle::current(), is_awaited, late), dropped)
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_come_for_a_piece_holds_nothing_up() {
        let (stream, dropped) = numbers(Duration::ZERO, true);
        let mut stream = pin!(stream);
        assert_eq!(stream.next().await.unwrap(), [1][..]);
        tokio::time::sleep(LONGEST - Duration::from_secs(1)).await;
        assert_eq!(stream.next().await.unwrap(), [2][..]);
        tokio::time::sleep(LONGEST - Duration::from_secs(1)).await;
        assert!(!dropped.load(Ordering::SeqCst), "it was in time");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(dropped.load(Ordering::SeqCst));
        assert_eq!(stream.next().await.unwrap(), "late");
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_may_take_its_time() {
        let (stream, dropped) = numbers(LONGEST * 10, true);
        let all: Vec<Bytes> = stream.collect().await;
        assert_eq!(all.concat(), [1, 2, 3]);
        assert!(dropped.load(Ordering::SeqCst));
        // And nobody minds where nothing depends on it.
        let (stream, dropped) = numbers(Duration::ZERO, false);
        let mut stream = Box::pin(stream);
        stream.next().await.unwrap();
        tokio::time::sleep(LONGEST * 10).await;
        assert_eq!(stream.next().await.unwrap(), [2][..]);
        assert!(!dropped.load(Ordering::SeqCst));
        drop(stream);
        assert!(dropped.load(Ordering::SeqCst), "at once");
    }

    #[tokio::test(start_paused = true)]
    async fn who_leaves_while_waiting_takes_it_along() {
        let (stream, dropped) = numbers(LONGEST * 10, true);
        let mut stream = Box::pin(stream);
        assert!(futures_util::poll!(stream.next()).is_pending());
        drop(stream);
        assert!(dropped.load(Ordering::SeqCst));
    }
}

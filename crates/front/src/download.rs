//! Answers whose maker holds a place where only some fit, such as a thread: whoever reads one must keep reading.
//!
//! What must hold: reading takes no longer, in all, than [`Patience::stream`] and the time that the bytes take at
//! [`Patience::body_rate`], as an upload may take. What is not read at all ends by itself, with its connection; one that is
//! read too slowly ends when its next piece is asked for.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use atoll_types::{Code, Fault};
use bytes::Bytes;
use futures_util::Stream;
use tokio::time::Instant;

use crate::Patience;

/// The same bytes, for as long as somebody reads them.
#[derive(Debug)]
pub struct Download<S> {
    bytes: S,
    patience: Patience,
    given: u64,
    /// How long the reader has taken for what was given before.
    taken: Duration,
    /// When the last piece was given.
    since: Option<Instant>,
}

impl<S> Download<S> {
    pub(crate) fn new(bytes: S, patience: Patience) -> Self {
        Self {
            bytes,
            patience,
            given: 0,
            taken: Duration::ZERO,
            since: None,
        }
    }

    fn is_too_slow(&mut self) -> bool {
        if let Some(since) = self.since.take() {
            self.taken += since.elapsed();
        }
        let earned = Duration::from_secs_f64(self.given as f64 / self.patience.body_rate.max(1) as f64);
        self.taken > self.patience.stream + earned
    }
}

impl<S: Stream<Item = Result<Bytes, Fault>> + Unpin> Stream for Download<S> {
    type Item = Result<Bytes, Fault>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.is_too_slow() {
            let slow = format!(
                "it was read at less than {} bytes a second",
                this.patience.body_rate
            );
            return Poll::Ready(Some(Err(Fault::new(Code::BodyTooSlow, slow))));
        }
        let piece = ready!(Pin::new(&mut this.bytes).poll_next(context));
        if let Some(Ok(bytes)) = &piece {
            this.given += bytes.len() as u64;
            this.since = Some(Instant::now());
        }
        Poll::Ready(piece)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt as _, stream};

    use super::*;

    const KIB: usize = 1024;

    /// How many pieces of so many KiB are read by one who takes so long for each.
    async fn read(piece: usize, pause: Duration) -> usize {
        let pieces = stream::repeat_with(move || Ok(Bytes::from(vec![0; piece * KIB]))).take(1000);
        let mut download = Download::new(pieces, Patience::default());
        let mut read = 0;
        while let Some(Ok(_)) = download.next().await {
            read += 1;
            tokio::time::sleep(pause).await;
        }
        read
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_reads_too_slowly_is_cut_and_others_are_not() {
        // 16 KiB a second is the least, after ten minutes that are anybody's.
        assert_eq!(read(64, Duration::from_secs(4)).await, 1000);
        assert_eq!(read(64, Duration::ZERO).await, 1000);
        // A kilobyte every four seconds: ten minutes, and what they have earned.
        let read_slowly = read(1, Duration::from_secs(4)).await;
        assert!((150..160).contains(&read_slowly), "{read_slowly}");
        let read_slowly = read(64, Duration::from_secs(256)).await;
        assert!(read_slowly < 5, "{read_slowly}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_slowly_is_not_read_slowly() {
        let pieces = stream::iter(0..10).then(|_| async {
            tokio::time::sleep(Duration::from_secs(300)).await;
            Ok(Bytes::from_static(b"piece"))
        });
        let read = Download::new(Box::pin(pieces), Patience::default());
        assert_eq!(
            read.filter(|piece| std::future::ready(piece.is_ok()))
                .count()
                .await,
            10
        );
    }
}

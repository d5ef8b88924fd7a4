//! A guest's stream that counts what passes and slows down or stops when it must.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::{Direction, Exhausted, Meter};

/// What is read counts as sent by the guest, what is written as received.
#[derive(Debug)]
pub(crate) struct Metered<S> {
    stream: S,
    meter: Meter,
    /// One for each direction: a stream that is split may be waited for from two tasks.
    read_pause: Pause,
    write_pause: Pause,
}

impl<S> Metered<S> {
    pub(crate) fn new(stream: S, meter: Meter) -> Self {
        Self {
            stream,
            meter,
            read_pause: Pause::default(),
            write_pause: Pause::default(),
        }
    }
}

/// A wait that is forced on one direction.
#[derive(Debug, Default)]
struct Pause(Option<Pin<Box<Sleep>>>);

impl Pause {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(sleep) = &mut self.0 {
            ready!(sleep.as_mut().poll(context));
            self.0 = None;
        }
        Poll::Ready(())
    }

    fn begin(&mut self, until: Result<Option<Instant>, Exhausted>) -> io::Result<()> {
        match until {
            Ok(until) => {
                self.0 = until.map(|until| Box::pin(sleep_until(until)));
                Ok(())
            }
            Err(exhausted) => Err(io::Error::new(io::ErrorKind::QuotaExceeded, exhausted.reason())),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.read_pause.poll(context));
        let before = buffer.filled().len();
        let turn = this.meter.turn();
        if turn < buffer.remaining() {
            let mut part = ReadBuf::new(buffer.initialize_unfilled_to(turn));
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut part))?;
            let read = part.filled().len();
            buffer.advance(read);
        } else {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        }
        let read = buffer.filled().len() - before;
        Poll::Ready(this.read_pause.begin(this.meter.count(Direction::Up, read)))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.write_pause.poll(context));
        let data = &data[..data.len().min(this.meter.turn())];
        let written = ready!(Pin::new(&mut this.stream).poll_write(context, data))?;
        this.write_pause
            .begin(this.meter.count(Direction::Down, written))?;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.meter.turn() < usize::MAX {
            let first = parts.iter().find(|part| !part.is_empty());
            return Pin::new(this).poll_write(context, first.map_or(&[], |part| &part[..]));
        }
        ready!(this.write_pause.poll(context));
        let written = ready!(Pin::new(&mut this.stream).poll_write_vectored(context, parts))?;
        this.write_pause
            .begin(this.meter.count(Direction::Down, written))?;
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use atoll_types::NetworkLimits;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::{Allowance, Used};
    use super::*;

    fn meter(limits: NetworkLimits) -> Meter {
        Meter::new(Arc::new(Allowance::new(limits, Used::default(), 1)))
    }

    #[tokio::test(start_paused = true)]
    async fn both_directions_are_counted_and_share_the_bandwidth() {
        let (guest, mut proxy) = tokio::io::duplex(1 << 20);
        let meter = meter(NetworkLimits {
            bytes_per_second: Some(100_000),
            ..NetworkLimits::default()
        });
        let mut metered = meter.wrap(guest);
        let start = Instant::now();
        proxy.write_all(&[1; 500_000]).await.unwrap();
        let mut read = vec![0; 500_000];
        metered.read_exact(&mut read).await.unwrap();
        metered.write_all(&[2; 500_000]).await.unwrap();
        assert_eq!((meter.up(), meter.down()), (500_000, 500_000));
        // Simulated time: a million bytes at a hundred thousand a second, less what may come at once.
        let took = start.elapsed().as_millis();
        assert!((9_000..10_500).contains(&took), "{took}");
    }

    #[tokio::test]
    async fn a_spent_budget_ends_the_stream() {
        let (guest, mut proxy) = tokio::io::duplex(1 << 20);
        let meter = meter(NetworkLimits {
            total_bytes: Some(1000),
            ..NetworkLimits::default()
        });
        let mut metered = meter.wrap(guest);
        proxy.write_all(&[1; 1000]).await.unwrap();
        let mut read = vec![0; 1000];
        metered.read_exact(&mut read).await.unwrap();
        let error = metered.write_all(b"x").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
    }
}

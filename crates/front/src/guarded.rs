//! A stream that ends when its connection is cut, when a head does not come in time, and when nobody takes what is written.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::connections::Line;

/// Holds the place of its connection until it is dropped.
#[derive(Debug)]
pub struct Guarded<S> {
    inner: S,
    line: Line,
    is_http1: bool,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    timer: Option<(Instant, Pin<Box<Sleep>>)>,
    /// Runs while what is written finds no room.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Guarded<S> {
    /// `is_http1`: whether every byte that comes between two requests begins the next.
    pub fn new(inner: S, line: Line, is_http1: bool) -> Self {
        let cut = Box::pin(line.cut().clone().cancelled_owned());
        Self {
            inner,
            line,
            is_http1,
            cut,
            timer: None,
            stalled: None,
        }
    }

    pub fn line(&self) -> &Line {
        &self.line
    }

    pub fn is_http1(&self) -> bool {
        self.is_http1
    }

    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        if self.cut.as_mut().poll(context).is_ready() {
            let why = "the connection was given up for others";
            return Poll::Ready(io::Error::new(io::ErrorKind::ConnectionAborted, why));
        }
        let Some(deadline) = self.line.head_deadline(self.is_http1) else {
            self.timer = None;
            return Poll::Pending;
        };
        if self.timer.as_ref().is_none_or(|(until, _)| *until != deadline) {
            self.timer = Some((deadline, Box::pin(tokio::time::sleep_until(deadline))));
        }
        match &mut self.timer {
            Some((_, timer)) => timer.as_mut().poll(context).map(|()| {
                let why = "the head of a request did not come in time";
                io::Error::new(io::ErrorKind::TimedOut, why)
            }),
            None => Poll::Pending,
        }
    }
}

impl<S> Guarded<S> {
    /// What came of writing: whoever does not read is not waited for without end.
    fn poll_written<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        if let Poll::Ready(error) = self.poll_over(context) {
            return Poll::Ready(Err(error));
        }
        let patience = self.line.write_patience();
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        stalled.as_mut().poll(context).map(|()| {
            let why = "what was written was not read in time";
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        })
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.inner).poll_read(context, buffer) {
            Poll::Ready(Ok(())) if buffer.filled().len() > before => {
                self.line.bytes_came();
                // Whoever always has something to say is not waited for any longer than the silent.
                match self.poll_over(context) {
                    Poll::Ready(error) => Poll::Ready(Err(error)),
                    Poll::Pending => Poll::Ready(Ok(())),
                }
            }
            Poll::Pending => self.poll_over(context).map(Err),
            ended @ Poll::Ready(_) => ended,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.poll_written(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        self.poll_written(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.poll_written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;
    use crate::connections::{Connections, Limits, Peer};
    use crate::{Patience, connections};

    fn line(limits: connections::Limits) -> (Connections, Line) {
        let connections = Connections::new(limits, Patience::default());
        let line = connections
            .admit(Peer::Address(IpAddr::from([127, 0, 0, 1])))
            .unwrap();
        (connections, line)
    }

    #[tokio::test(start_paused = true)]
    async fn silence_and_a_slow_head_end() {
        for dribbles in [false, true] {
            let (mut client, server) = duplex(100);
            let (_connections, line) = line(Limits::within(100));
            let mut server = Guarded::new(server, line, true);
            let dribbling = tokio::spawn(async move {
                while dribbles && client.write_all(b"x").await.is_ok() {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                std::future::pending::<()>().await;
            });
            let started = Instant::now();
            let error = loop {
                match server.read(&mut [0; 10]).await {
                    Ok(count) => assert!(count > 0),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert_eq!(started.elapsed().as_secs(), 15);
            dribbling.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_is_given_up() {
        let (mut client, server) = duplex(100);
        let (_connections, line) = line(Limits::within(100));
        line.request_begins();
        let mut server = Guarded::new(server, line, true);
        let started = Instant::now();
        // Somebody slow is waited for, as long as there is anything that they take.
        let reading = tokio::spawn(async move {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_secs(500)).await;
                client.read_exact(&mut [0; 50]).await.unwrap();
            }
            std::future::pending::<()>().await;
        });
        let error = server.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), 5000 + 600);
        reading.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_cut_notices_while_waiting() {
        let (_client, server) = duplex(10);
        let (connections, line) = line(Limits {
            address: 1,
            ..Limits::within(100)
        });
        let mut server = Guarded::new(server, line, true);
        let reading = tokio::spawn(async move { server.read(&mut [0; 10]).await });
        tokio::task::yield_now().await;
        let _second = connections.admit(Peer::Address(IpAddr::from([127, 0, 0, 1])));
        let error = reading.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(connections.count(), (1, 1));
    }
}

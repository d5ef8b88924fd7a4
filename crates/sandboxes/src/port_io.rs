//! A port's byte stream as something that anybody can read from and write to.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::{fmt, io};

use atoll_types::Fault;
use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::StreamReader;

use crate::{PortReader, PortStream, PortWriter};

/// How much one write takes at most; more waits for the next.
const WRITE_BYTES: usize = 64 * 1024;

type Doing<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Chunks = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// What the pipe needs of a port's writing half; a seam for tests.
pub trait Write: Send + 'static {
    fn write(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), Fault>> + Send;
    fn finish(&mut self) -> impl Future<Output = Result<(), Fault>> + Send;
}

impl Write for PortWriter {
    fn write(&mut self, bytes: Bytes) -> impl Future<Output = Result<(), Fault>> + Send {
        Self::write(self, bytes)
    }

    fn finish(&mut self) -> impl Future<Output = Result<(), Fault>> + Send {
        Self::finish(self)
    }
}

/// See [`PortStream::into_io`].
pub struct PortIo<W = PortWriter> {
    reader: StreamReader<Chunks, Bytes>,
    writer: Writer<W>,
}

impl<W> fmt::Debug for PortIo<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PortIo")
    }
}

impl PortStream {
    /// As something that an HTTP client can read from and write to.
    pub fn into_io(self) -> PortIo {
        PortIo {
            reader: StreamReader::new(chunks(self.reader)),
            writer: Writer::Idle(self.writer),
        }
    }
}

fn chunks(reader: PortReader) -> Chunks {
    Box::pin(stream::unfold(reader, |mut reader| async move {
        let chunk = reader.read().await?.map_err(io::Error::other);
        Some((chunk, reader))
    }))
}

/// ```text
///   Idle ── write ──> Busy ── done ──> Idle ── shutdown ──> Finishing ──> Finished
///                       └─── error ──> Broken
/// ```
enum Writer<W> {
    Idle(W),
    Busy(Doing<(W, Result<(), Fault>)>),
    Finishing(Doing<Result<(), Fault>>),
    Finished,
    Broken,
}

impl<W: Write> Writer<W> {
    /// Waits until nothing is being written.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Idle(_) | Self::Finished => Poll::Ready(Ok(())),
            Self::Busy(writing) => {
                let (writer, written) = ready!(writing.as_mut().poll(cx));
                match written {
                    Ok(()) => {
                        *self = Self::Idle(writer);
                        Poll::Ready(Ok(()))
                    }
                    Err(fault) => {
                        *self = Self::Broken;
                        Poll::Ready(Err(io::Error::other(fault)))
                    }
                }
            }
            Self::Finishing(finishing) => {
                let finished = ready!(finishing.as_mut().poll(cx));
                *self = Self::Finished;
                Poll::Ready(finished.map_err(io::Error::other))
            }
            Self::Broken => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_idle(cx))?;
        let mut writer = match std::mem::replace(self, Self::Broken) {
            Self::Idle(writer) => writer,
            other => {
                *self = other;
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
        };
        let taken = bytes.len().min(WRITE_BYTES);
        let piece = Bytes::copy_from_slice(&bytes[..taken]);
        *self = Self::Busy(Box::pin(async move {
            let written = writer.write(piece).await;
            (writer, written)
        }));
        // Once, so that it is under way even if nobody flushes.
        match self.poll_idle(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(taken)),
        }
    }

    fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_idle(cx))?;
        match std::mem::replace(self, Self::Finished) {
            Self::Idle(mut writer) => {
                *self = Self::Finishing(Box::pin(async move { writer.finish().await }));
                self.poll_idle(cx)
            }
            other => {
                *self = other;
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl<W: Unpin> AsyncRead for PortIo<W> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().reader).poll_read(cx, into)
    }
}

impl<W: Write + Unpin> AsyncWrite for PortIo<W> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().writer.poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer.poll_idle(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::sync::mpsc;

    /// Hands what is written to a channel of one place: writing waits for the reader.
    struct Channel(mpsc::Sender<Option<Bytes>>);

    impl Write for Channel {
        async fn write(&mut self, bytes: Bytes) -> Result<(), Fault> {
            self.0
                .send(Some(bytes))
                .await
                .map_err(|_| Fault::internal("gone"))
        }

        async fn finish(&mut self) -> Result<(), Fault> {
            self.0.send(None).await.map_err(|_| Fault::internal("gone"))
        }
    }

    fn pipe(incoming: Vec<&'static [u8]>) -> (PortIo<Channel>, mpsc::Receiver<Option<Bytes>>) {
        let (sender, receiver) = mpsc::channel(1);
        let chunks = stream::iter(incoming.into_iter().map(|chunk| Ok(Bytes::from_static(chunk))));
        let pipe = PortIo {
            reader: StreamReader::new(Box::pin(chunks) as Chunks),
            writer: Writer::Idle(Channel(sender)),
        };
        (pipe, receiver)
    }

    #[tokio::test]
    async fn bytes_go_both_ways_and_the_end_is_told() {
        let (mut pipe, mut written) = pipe(vec![b"ab", b"c"]);
        let payload = vec![7; 3 * WRITE_BYTES + 5];
        let expected = payload.len();
        let reading = tokio::spawn(async move {
            let mut total = 0;
            while let Some(Some(bytes)) = written.recv().await {
                assert!(bytes.len() <= WRITE_BYTES);
                total += bytes.len();
            }
            total
        });
        pipe.write_all(&payload).await.unwrap();
        pipe.shutdown().await.unwrap();
        assert_eq!(reading.await.unwrap(), expected);
        let mut text = String::new();
        pipe.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "abc");
        assert!(pipe.write_all(b"late").await.is_err());
    }

    #[tokio::test]
    async fn a_broken_stream_is_an_error_for_good() {
        let (mut pipe, written) = pipe(vec![]);
        drop(written);
        assert!(pipe.write_all(b"x").await.is_err());
        assert!(pipe.flush().await.is_err());
    }
}

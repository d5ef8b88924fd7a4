//! A connection as the gRPC server wants it: bytes in, bytes out, and its place among all connections.
//!
//! What must hold: a connection ends when there was no room for one of its answers for so long as anybody is waited for.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use atoll_front::{Guarded, Line, Patience, Unread};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tonic::transport::server::Connected;

#[derive(Debug)]
pub(crate) struct Connection<C> {
    stream: Guarded<C>,
    unread: Unread,
    health: Arc<Semaphore>,
    watching: AbortHandle,
}

/// What every request on a connection finds of it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) line: Line,
    /// Its answers for which there is no room.
    pub(crate) unread: Unread,
    /// Room for calls that nobody pays for.
    pub(crate) health: Arc<Semaphore>,
}

/// Health checks on one connection at a time: whoever they are, they need no more than one.
const HEALTH_CHECKS: usize = 8;

impl<C> Connection<C> {
    pub(crate) fn new(stream: Guarded<C>, patience: Patience) -> Self {
        let unread = Unread::default();
        let (watched, cut) = (unread.clone(), stream.line().cut().clone());
        let watching = tokio::spawn(async move {
            watched.for_long(patience.stream).await;
            tracing::debug!("an answer was not read in time");
            cut.cancel();
        });
        Self {
            stream,
            unread,
            health: Arc::new(Semaphore::new(HEALTH_CHECKS)),
            watching: watching.abort_handle(),
        }
    }
}

impl<C> Drop for Connection<C> {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl<C> Connected for Connection<C> {
    type ConnectInfo = Place;

    fn connect_info(&self) -> Place {
        Place {
            line: self.stream.line().clone(),
            unread: self.unread.clone(),
            health: Arc::clone(&self.health),
        }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Connection<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Connection<C> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_front::{Front, Limits, Peer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;

    /// A client of HTTP/2 that leaves room for so much of each answer.
    async fn client(mut to: DuplexStream, room: u32) -> DuplexStream {
        let literal = |name: &str, value: &str| {
            let mut text = vec![0];
            for part in [name, value] {
                text.push(u8::try_from(part.len()).unwrap());
                text.extend(part.as_bytes());
            }
            text
        };
        let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
            let length = u8::try_from(payload.len()).unwrap();
            [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
        };
        let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        hello.extend(frame(4, 0, 0, &[&[0, 4][..], &room.to_be_bytes()].concat()));
        let head = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/grpc.health.v1.Health/Check"),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        let head: Vec<u8> = head
            .iter()
            .flat_map(|(name, value)| literal(name, value))
            .collect();
        hello.extend(frame(1, 4, 1, &head));
        // One empty message, and the end.
        hello.extend(frame(0, 1, 1, &[0; 5]));
        to.write_all(&hello).await.unwrap();
        to
    }

    /// Reads until the connection ends; `true`: an answer came.
    async fn is_answered(mut from: DuplexStream) -> bool {
        let mut answered = false;
        let mut head = [0; 9];
        while from.read_exact(&mut head).await.is_ok() {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut payload = vec![0; length];
            if from.read_exact(&mut payload).await.is_err() {
                break;
            }
            answered |= head[3] == 0;
            // The end of an answer that there was room for.
            if head[3] == 1 && head[4] & 1 == 1 {
                break;
            }
        }
        answered
    }

    #[tokio::test]
    async fn an_answer_for_which_there_is_no_room_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let store = atoll_store::sqlite::open_workflows(&dir.path().join("workflows.db")).unwrap();
        let engine = atoll_workflows::Engine::open(store.clone(), atoll_workflows::Options::default());
        let engine = engine.await.unwrap();
        let mut limits = Limits::for_machine(1 << 30, 1000);
        limits.patience.stream = Duration::from_millis(200);
        let front = Front::new(limits);
        let (send, incoming) = tokio::sync::mpsc::unbounded_channel();
        let incoming = futures_util::stream::unfold(incoming, async |mut incoming| {
            Some((incoming.recv().await?, incoming))
        });
        let serving = crate::serve(
            engine.clone(),
            crate::Access::Open,
            front.clone(),
            incoming,
            std::future::pending(),
        );
        let serving = tokio::spawn(serving);
        for (room, is_whole) in [(65_535, true), (0, false)] {
            let (near, far) = tokio::io::duplex(1 << 16);
            let line = front.connections.admit(Peer::Address([127, 0, 0, 1].into()));
            send.send(Guarded::new(far, line.unwrap(), false)).unwrap();
            let near = client(near, room).await;
            let ended = tokio::time::timeout(Duration::from_secs(60), is_answered(near)).await;
            assert_eq!(ended, Ok(is_whole), "room for {room} bytes");
        }
        serving.abort();
        engine.close();
        store.close().await;
    }
}

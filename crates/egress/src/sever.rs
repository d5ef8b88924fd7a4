//! Connections that can be ended at once: dropped as usual they still deliver what was written to them, which is wrong where
//! they are dropped because they are no longer allowed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use crate::tenants::TenantState;

/// Lets a connection be broken off when it is dropped, so that the other end notices at once.
pub(crate) fn reset(stream: &TcpStream) {
    // Where this fails the other end sees an ordinary end.
    let _ = stream.set_zero_linger();
}

/// Whether the ends of a flow are to be broken off. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Severed {
    now: Arc<AtomicBool>,
    tenant: Arc<TenantState>,
}

impl Severed {
    pub(crate) fn new(tenant: Arc<TenantState>) -> Self {
        Self {
            now: Arc::default(),
            tenant,
        }
    }

    pub(crate) fn sever(&self) {
        self.now.store(true, Ordering::Release);
    }

    fn is_severed(&self) -> bool {
        self.now.load(Ordering::Acquire) || self.tenant.is_gone()
    }
}

/// One end of a flow that is read.
#[derive(Debug)]
pub(crate) struct Severable {
    stream: TcpStream,
    severed: Severed,
    /// Given back with the connection.
    _room: Option<OwnedSemaphorePermit>,
}

impl Severable {
    pub(crate) fn new(stream: TcpStream, severed: Severed, room: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            stream,
            severed,
            _room: room,
        }
    }
}

impl Drop for Severable {
    fn drop(&mut self) {
        if self.severed.is_severed() {
            reset(&self.stream);
        }
    }
}

impl AsyncRead for Severable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Severable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // An orderly end would say that what was sent is all there is; dropped, it is reset.
        if self.severed.is_severed() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

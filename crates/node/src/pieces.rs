//! From writes that block to a stream of bytes.

use std::time::Duration;

use atoll_types::Fault;
use bytes::Bytes;
use tokio::sync::mpsc;

/// The largest piece.
pub(crate) const PIECE: usize = 256 * 1024;
/// How long a reader may take nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Turns writes into pieces of a stream; a reader that went away, or that takes nothing for long, ends the writing, for
/// whoever writes holds a thread. Only for threads of the runtime that may block.
pub(crate) struct Pieces(mpsc::Sender<Result<Bytes, Fault>>);

impl Pieces {
    pub(crate) fn new(to: mpsc::Sender<Result<Bytes, Fault>>) -> Self {
        Self(to)
    }
}

impl std::io::Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let piece = Bytes::copy_from_slice(&bytes[..bytes.len().min(PIECE)]);
        let length = piece.len();
        let sent = self.0.send_timeout(Ok(piece), PATIENCE);
        tokio::runtime::Handle::current()
            .block_on(sent)
            .map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        Ok(length)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

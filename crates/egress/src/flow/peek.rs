//! The first bytes of a guest's connection, kept so that whoever goes on with it sees them too.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::limits::{Direction, Meter};

/// What a guest may send before it is known what it is. A ClientHello has about two kilobytes.
const MOST: usize = 16 * 1024;

#[derive(Debug)]
pub(super) struct Opening {
    pub stream: TcpStream,
    /// What was read and not used up.
    pub bytes: BytesMut,
    pub meter: Meter,
    deadline: Instant,
}

/// Why no more can be had.
#[derive(Debug)]
pub(super) enum PeekError {
    /// The guest has sent as much as it may.
    Full,
    /// It took too long.
    Late,
    /// It has finished sending.
    Finished,
    /// The connection broke.
    Broken,
}

impl Opening {
    pub(super) fn new(stream: TcpStream, meter: Meter, patience: Duration) -> Self {
        Self {
            stream,
            bytes: BytesMut::new(),
            meter,
            deadline: Instant::now() + patience,
        }
    }

    /// Begins again with what came meanwhile, and was counted.
    pub(super) fn again(mut self, bytes: BytesMut, patience: Duration) -> Self {
        self.bytes = bytes;
        self.deadline = Instant::now() + patience;
        self
    }

    /// Reads once more. What arrives later than the deadline of the whole opening is not waited for.
    pub(super) async fn more(&mut self) -> Result<(), PeekError> {
        self.more_until(self.deadline).await
    }

    /// Whether something comes within `patience`.
    pub(super) async fn speaks_within(&mut self, patience: Duration) -> Result<bool, PeekError> {
        match self.more_until(Instant::now() + patience).await {
            Ok(()) => Ok(true),
            Err(PeekError::Late) => Ok(false),
            Err(other) => Err(other),
        }
    }

    async fn more_until(&mut self, deadline: Instant) -> Result<(), PeekError> {
        let room = MOST - self.bytes.len().min(MOST);
        if room == 0 {
            return Err(PeekError::Full);
        }
        let deadline = deadline.min(self.deadline);
        let read = loop {
            timeout_at(deadline, self.stream.readable())
                .await
                .map_err(|_| PeekError::Late)?
                .map_err(|_| PeekError::Broken)?;
            // Memory is taken only when there is something to put into it, and no more than that needs.
            let mut part = [0; 4096];
            let len = room.min(part.len());
            match self.stream.try_read(&mut part[..len]) {
                Ok(0) => return Err(PeekError::Finished),
                Ok(read) => {
                    self.bytes.extend_from_slice(&part[..read]);
                    break read;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(PeekError::Broken),
            }
        };
        // So few bytes need not be slowed down; a spent budget ends the flow as soon as it goes on.
        let _ = self.meter.count(Direction::Up, read);
        Ok(())
    }
}

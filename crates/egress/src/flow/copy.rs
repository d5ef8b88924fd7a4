//! Moves bytes between a guest and a server, untouched.
//!
//! What must hold: each direction ends by itself, so a half-closed connection stays useful; a reset is passed on as one;
//! a flow that moves nothing holds no buffer, and all flows of a sandbox together hold a bounded number of large ones.
//! Where those are used up a small one does, so no flow ever waits for another.
//!
//! `splice(2)` was tried: with buffers of this size it gained a fifth to a third for one stream, nothing for eight, and
//! it takes two more descriptors for each direction.

use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};

use super::classify::{First, Gate};
use crate::config::Timeouts;
use crate::limits::{Direction, Exhausted, Meter};

const LARGE: usize = 128 * 1024;
const SMALL: usize = 4 * 1024;
/// Large ones that are kept for the next turn.
const KEPT: usize = 32;

/// How a flow ended.
#[derive(Debug)]
pub(super) enum End {
    /// Both sides had finished.
    Finished,
    /// One of the two broke it off.
    Broken(io::Error),
    Idle,
    Exhausted(Exhausted),
    /// The guest says what it is after all. These bytes were not passed on.
    Spoke {
        bytes: BytesMut,
        /// Nothing else was passed on either, in any direction.
        fresh: bool,
    },
}

/// What bounds a flow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms<'a> {
    pub meter: &'a Meter,
    /// How many large buffers the flows of its sandbox may hold.
    pub buffers: &'a Arc<Semaphore>,
    pub pool: &'a Pool,
    pub timeouts: &'a Timeouts,
}

impl<'a> Terms<'a> {
    fn way(self, direction: Direction, activity: &'a Activity) -> Way<'a> {
        Way {
            direction,
            terms: self,
            activity,
        }
    }
}

/// Copies both ways until it is over. `first` is what the guest sent already, and was counted; `gate` is there where that
/// did not tell what it is.
pub(super) async fn copy(
    guest: &mut TcpStream,
    server: &mut TcpStream,
    mut first: BytesMut,
    gate: Option<Gate>,
    terms: Terms<'_>,
) -> End {
    let activity = Activity::new();
    let (guest_read, guest_write) = guest.split();
    let (server_read, mut server_write) = server.split();
    let up = async {
        server_write.write_all_buf(&mut first).await?;
        drop(first);
        terms
            .way(Direction::Up, &activity)
            .run(guest_read, server_write, gate)
            .await
    };
    let down = terms
        .way(Direction::Down, &activity)
        .run(server_read, guest_write, None);
    tokio::select! {
        outcome = async { tokio::try_join!(up, down) } => match outcome {
            Ok(_) => End::Finished,
            Err(Stop::Io(error)) => End::Broken(error),
            Err(Stop::Exhausted(exhausted)) => End::Exhausted(exhausted),
            Err(Stop::Spoke { bytes, fresh }) => End::Spoke {
                bytes,
                fresh: fresh && terms.meter.down() == 0,
            },
        },
        () = activity.lapse(terms.timeouts) => End::Idle,
    }
}

enum Stop {
    Io(io::Error),
    Exhausted(Exhausted),
    Spoke { bytes: BytesMut, fresh: bool },
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// One direction of a flow.
struct Way<'a> {
    direction: Direction,
    terms: Terms<'a>,
    activity: &'a Activity,
}

impl Way<'_> {
    async fn run(
        self,
        from: ReadHalf<'_>,
        mut to: WriteHalf<'_>,
        mut gate: Option<Gate>,
    ) -> Result<(), Stop> {
        loop {
            from.readable().await?;
            if !self.turn(&from, &mut to, &mut gate).await? {
                break;
            }
        }
        self.activity.half();
        // The other side may have gone already; then there is nobody to tell.
        let _ = to.shutdown().await;
        Ok(())
    }

    /// Moves what is there, until nothing is. `false` when no more will come.
    async fn turn(
        &self,
        from: &ReadHalf<'_>,
        to: &mut WriteHalf<'_>,
        gate: &mut Option<Gate>,
    ) -> Result<bool, Stop> {
        let mut buffer = Buffer::get(self.terms.pool, self.terms.buffers);
        loop {
            let len = buffer.bytes.len().min(self.terms.meter.turn());
            let read = match from.try_read(&mut buffer.bytes[..len]) {
                Ok(0) => {
                    pass_gate(gate, &[])?;
                    return Ok(false);
                }
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error.into()),
            };
            self.activity.note();
            let pause = self
                .terms
                .meter
                .count(self.direction, read)
                .map_err(Stop::Exhausted)?;
            pass_gate(gate, &buffer.bytes[..read])?;
            to.write_all(&buffer.bytes[..read]).await?;
            self.activity.note();
            if let Some(until) = pause {
                // Not with a buffer in hand.
                drop(buffer);
                sleep_until(until).await;
                return Ok(true);
            }
        }
    }
}

/// Holds what is about to be passed on against what it may turn out to be; no bytes are the end.
fn pass_gate(gate: &mut Option<Gate>, bytes: &[u8]) -> Result<(), Stop> {
    let Some(looking) = gate else { return Ok(()) };
    let fresh = looking.is_fresh();
    let first = match bytes {
        [] => looking.finish(),
        _ => looking.feed(bytes),
    };
    match first {
        First::More => Ok(()),
        First::Opaque => {
            *gate = None;
            Ok(())
        }
        _ => Err(Stop::Spoke {
            bytes: bytes.into(),
            fresh,
        }),
    }
}

/// Large buffers that nobody uses at the moment; more than a few are not worth keeping.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Box<[u8]>>>);

/// Memory for one turn. A large one counts against what its sandbox may hold.
struct Buffer<'a> {
    bytes: Box<[u8]>,
    large: Option<(&'a Pool, OwnedSemaphorePermit)>,
}

impl<'a> Buffer<'a> {
    fn get(pool: &'a Pool, allowed: &Arc<Semaphore>) -> Self {
        match Arc::clone(allowed).try_acquire_owned() {
            Ok(permit) => {
                let kept = pool.0.lock().pop();
                Self {
                    bytes: kept.unwrap_or_else(|| vec![0; LARGE].into()),
                    large: Some((pool, permit)),
                }
            }
            Err(_) => Self {
                bytes: vec![0; SMALL].into(),
                large: None,
            },
        }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let Some((pool, _)) = &self.large {
            let mut kept = pool.0.lock();
            if kept.len() < KEPT {
                kept.push(std::mem::take(&mut self.bytes));
            }
        }
    }
}

/// When something moved last.
struct Activity {
    start: Instant,
    /// Milliseconds from the start.
    last: AtomicU64,
    halves: AtomicU64,
}

impl Activity {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            last: AtomicU64::new(0),
            halves: AtomicU64::new(0),
        }
    }

    fn note(&self) {
        let since = self.start.elapsed().as_millis();
        self.last
            .store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// One direction is finished.
    fn half(&self) {
        self.note();
        self.halves.fetch_add(1, Ordering::Relaxed);
    }

    /// Completes when nothing has moved for too long.
    async fn lapse(&self, timeouts: &Timeouts) {
        loop {
            let patience = match self.halves.load(Ordering::Relaxed) {
                0 => timeouts.idle,
                _ => timeouts.half_closed.min(timeouts.idle),
            };
            let last = self.start + Duration::from_millis(self.last.load(Ordering::Relaxed));
            if last.elapsed() >= patience {
                return;
            }
            // Looks again at least this often, so that a half that finishes meanwhile is noticed.
            let again = (last + patience).min(Instant::now() + timeouts.half_closed);
            sleep_until(again).await;
        }
    }
}

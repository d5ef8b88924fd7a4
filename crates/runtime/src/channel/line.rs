//! A channel to an agent within this process, for tests: no pipe, no descriptor, no task of its own.
//!
//! What must hold: bytes arrive in the order in which they were sent and nothing is reordered by a kernel, so that the same
//! test sees the same conversation each time.

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io::IoSlice;
use std::sync::Arc;
use std::task::{Poll, Waker};

use atoll_guest_protocol::{FrameKind, encode_into};
use rustix::io::Errno;

/// An agent at the other end.
pub trait Hears: Send + Sync {
    /// Bytes of the host. It may answer at once: nothing that it needs is locked.
    fn hears(&self, line: &Arc<Line>, bytes: &[u8]);
}

pub struct Line {
    agent: Arc<dyn Hears>,
    this: std::sync::Weak<Self>,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    bytes: VecDeque<u8>,
    reader: Option<Waker>,
}

impl Line {
    pub fn to(agent: Arc<dyn Hears>) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            agent,
            this: this.clone(),
            said: Mutex::default(),
        })
    }

    /// The agent says something to the host.
    pub fn say(&self, kind: FrameKind, stream: u32, payload: &[u8]) {
        let mut frame = Vec::new();
        encode_into(&mut frame, kind, 0, stream, payload);
        let mut said = self.said();
        said.bytes.extend(frame);
        let reader = said.reader.take();
        drop(said);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock()
    }

    pub(super) fn write(&self, slices: &[IoSlice<'_>]) -> usize {
        let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        if let Some(this) = self.this.upgrade() {
            self.agent.hears(&this, &bytes);
        }
        bytes.len()
    }

    pub(super) fn read(&self, space: &mut [u8]) -> Result<usize, Errno> {
        let mut said = self.said();
        let count = said.bytes.len().min(space.len());
        if count == 0 {
            return Err(Errno::AGAIN);
        }
        for (to, from) in space.iter_mut().zip(said.bytes.drain(..count)) {
            *to = from;
        }
        Ok(count)
    }

    pub(super) async fn readable(&self) {
        poll_fn(|context| {
            let mut said = self.said();
            if said.bytes.is_empty() {
                said.reader = Some(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.said().bytes.is_empty()
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}

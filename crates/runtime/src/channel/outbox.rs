//! What waits to be written to a guest, in order, and how it gets into the pipe.
//!
//! What must hold:
//! - A frame is queued whole or not at all, so a caller that is cancelled never leaves half of one behind; only a dying
//!   server can, and its successor's filler repairs that.
//! - `Credit` overtakes data (it unblocks the guest) and is summed up per stream while it waits; pongs collapse into the
//!   last one. A guest that never reads therefore cannot make this grow: data is admitted by [`super::Shared`]'s
//!   semaphore, everything else is bounded by the number of streams.
//! - `Close` does *not* overtake: it must never reach the guest before its stream's `Open`.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use atoll_guest_protocol::{FrameKind, HEADER_LEN, encode_header, encode_into};
use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;

/// How many pieces one `writev` carries.
const BATCH: usize = 32;

#[derive(Debug)]
struct Queued {
    /// Empty for the filler, which is no frame.
    header: [u8; HEADER_LEN],
    header_len: usize,
    payload: Bytes,
    /// Gives the room back once the frame is in the pipe.
    _room: Option<OwnedSemaphorePermit>,
}

impl Queued {
    fn len(&self) -> usize {
        self.header_len + self.payload.len()
    }

    /// Adds what is left behind the first `skip` bytes.
    fn slices<'a>(&'a self, skip: usize, out: &mut Vec<IoSlice<'a>>) {
        let header = &self.header[..self.header_len];
        if skip < header.len() {
            out.push(IoSlice::new(&header[skip..]));
        }
        let payload = &self.payload[skip.saturating_sub(header.len()).min(self.payload.len())..];
        if !payload.is_empty() {
            out.push(IoSlice::new(payload));
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: VecDeque<Queued>,
    /// How much of the front of `queue` is in the pipe already.
    written: usize,
    /// Credits and pong, encoded; goes out at the next frame border. Never refilled before it is all written.
    urgent: Vec<u8>,
    urgent_written: usize,
    credits: Vec<(u32, u32)>,
    pong: Option<Vec<u8>>,
    /// Nothing new is begun; see [`super::Guest::hold`].
    pub(super) held: bool,
    /// The task that waits for room in the pipe and will flush, while there is one.
    pub(super) flusher: Option<AbortHandle>,
}

impl Outbox {
    pub(super) fn push_filler(&mut self, zeros: Bytes) {
        self.queue.push_back(Queued {
            header: [0; HEADER_LEN],
            header_len: 0,
            payload: zeros,
            _room: None,
        });
    }

    pub(super) fn push(
        &mut self,
        kind: FrameKind,
        sub: u8,
        stream: u32,
        payload: Bytes,
        room: Option<OwnedSemaphorePermit>,
    ) {
        self.queue.push_back(Queued {
            header: encode_header(kind, sub, stream, &payload),
            header_len: HEADER_LEN,
            payload,
            _room: room,
        });
    }

    pub(super) fn push_credit(&mut self, stream: u32, amount: u32) {
        match self.credits.iter_mut().find(|(id, _)| *id == stream) {
            Some((_, sum)) => *sum = sum.saturating_add(amount),
            None => self.credits.push((stream, amount)),
        }
    }

    pub(super) fn set_pong(&mut self, payload: &[u8]) {
        self.pong = Some(payload.to_vec());
    }

    /// Forgets everything, also whoever waits to write it.
    pub(super) fn clear(&mut self) {
        if let Some(flusher) = std::mem::take(self).flusher {
            flusher.abort();
        }
    }

    /// Whether the last bytes in the pipe are the end of a frame.
    pub(super) fn is_at_border(&self) -> bool {
        self.written == 0 && self.urgent_written == 0
    }

    /// Writes until nothing is left that may be written (`true`) or the pipe is full (`false`). Never blocks.
    pub(super) fn flush(
        &mut self,
        write: impl Fn(&[IoSlice<'_>]) -> Result<usize, rustix::io::Errno>,
    ) -> io::Result<bool> {
        loop {
            if self.held && self.is_at_border() {
                return Ok(true);
            }
            self.collect_urgent();
            if self.urgent.is_empty() && self.queue.is_empty() {
                if self.queue.capacity() > 64 {
                    self.queue = VecDeque::new();
                }
                return Ok(true);
            }
            let mut slices = Vec::with_capacity(BATCH + 2);
            let mut frames = self.queue.iter();
            if self.written > 0
                && let Some(front) = frames.next()
            {
                front.slices(self.written, &mut slices);
            }
            // Of what is held back only the frame that was begun goes out.
            let border = self.held && self.written > 0;
            if !self.urgent.is_empty() && !border {
                slices.push(IoSlice::new(&self.urgent[self.urgent_written..]));
            }
            for frame in frames {
                if self.held || slices.len() >= BATCH {
                    break;
                }
                frame.slices(0, &mut slices);
            }
            match write(&slices) {
                Ok(count) => self.advance(count),
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn collect_urgent(&mut self) {
        if !self.urgent.is_empty() || (self.credits.is_empty() && self.pong.is_none()) {
            return;
        }
        for (stream, amount) in self.credits.drain(..) {
            encode_into(
                &mut self.urgent,
                FrameKind::Credit,
                0,
                stream,
                &amount.to_le_bytes(),
            );
        }
        if let Some(payload) = self.pong.take() {
            encode_into(&mut self.urgent, FrameKind::Pong, 0, 0, &payload);
        }
    }

    /// Accounts for `count` written bytes, in the order in which [`Outbox::flush`] lays them out.
    fn advance(&mut self, mut count: usize) {
        if self.written > 0 {
            count = self.advance_front(count);
        }
        if !self.urgent.is_empty() {
            let step = count.min(self.urgent.len() - self.urgent_written);
            self.urgent_written += step;
            count -= step;
            if self.urgent_written == self.urgent.len() {
                self.urgent.clear();
                self.urgent_written = 0;
            }
        }
        while count > 0 {
            count = self.advance_front(count);
        }
    }

    fn advance_front(&mut self, count: usize) -> usize {
        let Some(front) = self.queue.front() else { return 0 };
        let step = count.min(front.len() - self.written);
        self.written += step;
        if self.written == front.len() {
            self.queue.pop_front();
            self.written = 0;
        }
        count - step
    }
}

#[cfg(test)]
mod tests {
    use atoll_guest_protocol::Decoder;
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn what_is_held_back_stops_at_the_border_of_a_frame() {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).unwrap();
        let mut outbox = Outbox::default();
        // More than the pipe takes, so that a frame is torn.
        for stream in 1..=3 {
            outbox.push(FrameKind::Data, 0, stream, vec![7; 60_000].into(), None);
        }
        assert!(!outbox.flush(|slices| rustix::io::writev(&write, slices)).unwrap());
        assert!(!outbox.is_at_border());
        outbox.held = true;
        outbox.push_credit(9, 1000);
        let mut decoder = Decoder::new();
        let mut seen = Vec::new();
        let mut read_all = |outbox: &mut Outbox| loop {
            let full = !outbox.flush(|slices| rustix::io::writev(&write, slices)).unwrap();
            while let Ok(count) = rustix::io::read(&read, decoder.space()) {
                decoder.filled(count);
                while let Some(frame) = decoder.next_frame() {
                    seen.push((frame.kind, frame.stream));
                }
            }
            if !full {
                break seen.clone();
            }
        };
        let data = |stream| (FrameKind::Data, stream);
        assert_eq!(read_all(&mut outbox), [data(1), data(2)]);
        assert!(outbox.is_at_border());
        outbox.held = false;
        assert_eq!(
            read_all(&mut outbox),
            [data(1), data(2), (FrameKind::Credit, 9), data(3)]
        );
        assert_eq!(decoder.skipped(), 0);
    }

    #[test]
    fn urgent_frames_overtake_at_frame_borders_and_never_pile_up() {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let mut outbox = Outbox::default();
        for stream in 1..=4 {
            outbox.push(FrameKind::Data, 0, stream, vec![7; 60_000].into(), None);
        }
        let mut decoder = Decoder::new();
        let (mut seen, mut credit) = (Vec::new(), 0);
        loop {
            let drained = outbox.flush(|slices| rustix::io::writev(&write, slices)).unwrap();
            if !drained {
                // The guest consumes slowly and we keep returning credit.
                for _ in 0..1000 {
                    outbox.push_credit(9, 1);
                    outbox.set_pong(b"pong");
                }
                assert!(outbox.urgent.len() + outbox.credits.len() < 200);
            }
            let space = decoder.space();
            let some = space.len().min(5000);
            if let Ok(count) = rustix::io::read(&read, &mut space[..some]) {
                decoder.filled(count);
            }
            while let Some(frame) = decoder.next_frame() {
                seen.push((frame.kind, frame.stream));
                if frame.kind == FrameKind::Credit {
                    credit += u32::from_le_bytes(frame.payload.try_into().unwrap());
                }
            }
            if drained && seen.iter().filter(|(kind, _)| *kind == FrameKind::Data).count() == 4 {
                break;
            }
        }
        assert_eq!(decoder.skipped(), 0, "a frame was torn");
        assert!(credit >= 1000 && credit.is_multiple_of(1000), "{credit}");
        let data: Vec<_> = seen
            .iter()
            .filter(|(kind, _)| *kind == FrameKind::Data)
            .map(|(_, stream)| *stream)
            .collect();
        assert_eq!(data, [1, 2, 3, 4]);
    }
}

//! The two ends of the channel as the rest of the agent sees them: a bounded output queue, and per stream a [`Port`]
//! that keeps the accounts of credit in both directions.
//!
//! What must hold:
//! - Streams produce their next frame only while [`Output::full`] is false, so the queue stays near `HIGH_WATER`.
//! - Frames without credit of their own (`Credit`, `End`, `Pong`, `Welcome`) answer a frame that was read; reading stops
//!   at [`Output::overflowing`], so they are bounded too.
//! - Bytes of a frame once begun are always completed, also for a host that is gone: its successor finds the border.

use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;

use atoll_guest_protocol::{
    FRAME_COST, Failure, FrameKind, HEADER_LEN, INITIAL_CREDIT, MAX_PAYLOAD, Message, encode, encode_header,
};

use crate::failure::{Outcome, invalid};

const HIGH_WATER: usize = 256 * 1024;
/// How many frames of one file are read at once: as many as make the queue full.
const RUN_FRAMES: usize = HIGH_WATER / MAX_PAYLOAD;
/// An idle agent keeps no more than this.
const IDLE_BUFFER: usize = 16 * 1024;
/// Consumed bytes are granted back in lumps of a quarter of the window: few `Credit` frames, and the host never waits
/// while it could fit the longest frame.
const GRANT_LUMP: u32 = INITIAL_CREDIT / 4;
/// The window of a stream whose bytes are dealt with as they are read: what bounds those is the pipe.
const WIDE_WINDOW: u32 = 4 * INITIAL_CREDIT;
/// A host that grants more than this at once is taken to mean this.
const MOST_CREDIT: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Output {
    fd: OwnedFd,
    /// `buffer[start..end]` waits to be written; the rest is room, zeroed once and reused.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Output {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            buffer: vec![0; IDLE_BUFFER],
            start: 0,
            end: 0,
        }
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub(crate) fn full(&self) -> bool {
        self.end - self.start >= HIGH_WATER
    }

    pub(crate) fn overflowing(&self) -> bool {
        self.end - self.start >= 3 * HIGH_WATER // a run may be queued just below the first
    }

    pub(crate) fn frame(&mut self, kind: FrameKind, sub: u8, stream: u32, payload: &[u8]) {
        let header = encode_header(kind, sub, stream, payload);
        let space = self.space(HEADER_LEN + payload.len());
        space[..HEADER_LEN].copy_from_slice(&header);
        space[HEADER_LEN..].copy_from_slice(payload);
        self.end += HEADER_LEN + payload.len();
    }

    pub(crate) fn end_stream(&mut self, stream: u32, result: &Result<(), Failure>) {
        let payload = match result {
            Err(failure) if failure.message.len() > 4096 => {
                let mut cut = failure.clone();
                cut.message = cut.message.chars().take(1000).collect();
                encode(&Err::<(), _>(cut))
            }
            result => encode(result),
        };
        self.frame(FrameKind::End, 0, stream, &payload);
    }

    /// `Data` frames for at most `most` bytes, which `fill` reads straight into their places in the queue with one call.
    /// Nothing is queued for an error or zero bytes. Returns how many bytes there were.
    fn data_run_with(
        &mut self,
        stream: u32,
        sub: u8,
        most: usize,
        fill: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        const FRAME: usize = HEADER_LEN + MAX_PAYLOAD;
        let space = self.space(most + most.div_ceil(MAX_PAYLOAD) * HEADER_LEN);
        let mut payloads: Vec<_> = space
            .chunks_mut(FRAME)
            .map(|frame| IoSliceMut::new(&mut frame[HEADER_LEN..]))
            .collect();
        let count = fill(&mut payloads)?;
        let (mut left, mut queued) = (count, 0);
        for frame in space.chunks_mut(FRAME) {
            if left == 0 {
                break;
            }
            let (header, payload) = frame.split_at_mut(HEADER_LEN);
            let length = left.min(payload.len());
            header.copy_from_slice(&encode_header(FrameKind::Data, sub, stream, &payload[..length]));
            left -= length;
            queued += HEADER_LEN + length;
        }
        self.end += queued;
        Ok(count)
    }

    /// A `Data` frame whose payload `fill` reads straight into the queue, without a copy. Nothing is queued for an error
    /// or zero bytes.
    fn data_with(
        &mut self,
        stream: u32,
        sub: u8,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let space = self.space(HEADER_LEN + most);
        let (header, payload) = space.split_at_mut(HEADER_LEN);
        let count = fill(payload)?;
        if count > 0 {
            header.copy_from_slice(&encode_header(FrameKind::Data, sub, stream, &payload[..count]));
            self.end += HEADER_LEN + count;
        }
        Ok(count)
    }

    fn space(&mut self, length: usize) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        if self.buffer.len() - self.end < length && self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.buffer.len() - self.end < length {
            let grown = (self.buffer.len() * 2).max(self.end + length);
            self.buffer.resize(grown, 0);
        }
        &mut self.buffer[self.end..self.end + length]
    }

    /// Writes until all is out (`true`) or the pipe is full (`false`).
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        while self.start < self.end {
            match rustix::io::write(&self.fd, &self.buffer[self.start..self.end]) {
                Ok(count) => self.start += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    pub(crate) fn is_large(&self) -> bool {
        self.buffer.len() > IDLE_BUFFER
    }

    /// Gives back the memory of a burst.
    pub(crate) fn shrink(&mut self) {
        if self.is_empty() && self.is_large() {
            self.buffer = vec![0; IDLE_BUFFER];
            self.start = 0;
            self.end = 0;
        }
    }
}

/// One stream's accounts.
#[derive(Debug)]
pub(crate) struct Port {
    id: u32,
    /// What we may still send.
    credit: u64,
    /// What the host may still send.
    window: u32,
    /// What was consumed and not yet granted back.
    owed: u32,
}

impl Port {
    pub(crate) fn new(id: u32) -> Self {
        Self {
            id,
            credit: u64::from(INITIAL_CREDIT),
            window: INITIAL_CREDIT,
            owed: 0,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn granted(&mut self, more: u32) {
        self.credit = (self.credit + u64::from(more)).min(MOST_CREDIT);
    }

    /// The longest `Data` payload that may be sent now; 0 means wait.
    pub(crate) fn data_room(&self) -> usize {
        usize::try_from(self.credit.saturating_sub(u64::from(FRAME_COST)))
            .unwrap_or(MAX_PAYLOAD)
            .min(MAX_PAYLOAD)
    }

    /// Sends at most [`Port::data_room`] bytes.
    pub(crate) fn data(&mut self, out: &mut Output, sub: u8, bytes: &[u8]) {
        self.spend(bytes.len());
        out.frame(FrameKind::Data, sub, self.id, bytes);
    }

    /// Sends what `fill` produces, at most `most` and [`Port::data_room`] bytes.
    pub(crate) fn data_with(
        &mut self,
        out: &mut Output,
        sub: u8,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let count = out.data_with(self.id, sub, most.min(self.data_room()), fill)?;
        if count > 0 {
            self.spend(count);
        }
        Ok(count)
    }

    /// As [`Port::data_with`] for bulk data: several frames at once, if there is credit for them.
    pub(crate) fn data_run_with(
        &mut self,
        out: &mut Output,
        sub: u8,
        most: usize,
        fill: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let frame = MAX_PAYLOAD as u64 + u64::from(FRAME_COST);
        let frames = usize::try_from(self.credit / frame).unwrap_or(RUN_FRAMES);
        let room = match frames.min(RUN_FRAMES) {
            0 => self.data_room(),
            frames => frames * MAX_PAYLOAD,
        };
        let count = out.data_run_with(self.id, sub, most.min(room), fill)?;
        if count > 0 {
            let frames = count.div_ceil(MAX_PAYLOAD) as u64;
            let cost = count as u64 + frames * u64::from(FRAME_COST);
            self.credit = self.credit.saturating_sub(cost);
        }
        Ok(count)
    }

    /// `false` when there is not enough credit yet; nothing was sent then.
    #[must_use]
    pub(crate) fn message(&mut self, out: &mut Output, message: &Message) -> bool {
        let payload = encode(message);
        self.encoded_message(out, &payload)
    }

    #[must_use]
    pub(crate) fn encoded_message(&mut self, out: &mut Output, payload: &[u8]) -> bool {
        debug_assert!(payload.len() <= MAX_PAYLOAD, "callers batch");
        if payload.len() > self.data_room() {
            return false;
        }
        self.spend(payload.len());
        out.frame(FrameKind::Message, 0, self.id, payload);
        true
    }

    fn spend(&mut self, payload: usize) {
        self.credit = self.credit.saturating_sub(payload as u64 + u64::from(FRAME_COST));
    }

    /// A frame of the host arrived: it must be within its window.
    pub(crate) fn received(&mut self, payload: usize) -> Outcome {
        let cost = u32::try_from(payload)
            .unwrap_or(u32::MAX)
            .saturating_add(FRAME_COST);
        match self.window.checked_sub(cost) {
            Some(left) => {
                self.window = left;
                Ok(())
            }
            None => Err(invalid("the host sent more than its credit on this stream")),
        }
    }

    /// Gives the host a wide window instead of the initial one; for once, at the beginning.
    pub(crate) fn widen(&mut self, out: &mut Output) {
        self.grant(out, WIDE_WINDOW - INITIAL_CREDIT);
    }

    fn grant(&mut self, out: &mut Output, more: u32) {
        self.window = self.window.saturating_add(more);
        out.frame(FrameKind::Credit, 0, self.id, &more.to_le_bytes());
    }

    /// The bytes of the host (and the fixed cost of a frame) that are dealt with and need no memory any more.
    pub(crate) fn consumed(&mut self, out: &mut Output, cost: usize) {
        self.owed = self.owed.saturating_add(u32::try_from(cost).unwrap_or(u32::MAX));
        if self.owed >= GRANT_LUMP {
            let more = std::mem::take(&mut self.owed);
            self.grant(out, more);
        }
    }
}

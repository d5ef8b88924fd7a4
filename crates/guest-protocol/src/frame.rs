//! Frames: the unit that is written, checked and, when torn, skipped.
//!
//! ```text
//!   0      4      5      6      8          12         16         20
//!   │magic │ kind │ sub  │ zero │ stream   │ length   │ crc32c   │ payload ...
//! ```
//! Integers are little-endian. The checksum covers bytes 4..16 and the payload.

/// The longest payload of one frame. Small enough to share a pipe fairly, large enough to move files fast.
pub const MAX_PAYLOAD: usize = 64 * 1024;
pub const HEADER_LEN: usize = 20;
/// What a `Data` or `Message` frame costs in credit beyond its payload, so that empty frames are not free.
pub const FRAME_COST: u32 = 32;
/// How many zero bytes a new host writes first: enough to complete any half-written frame.
pub const FILLER_LEN: usize = MAX_PAYLOAD + HEADER_LEN;

/// Sub-channels of a stream's `Data`.
pub const SUB_MAIN: u8 = 0;
pub const SUB_STDOUT: u8 = 1;
pub const SUB_STDERR: u8 = 2;

const MAGIC: [u8; 4] = [0xA7, 0x01, 0x11, 0x0F];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Host to guest, stream 0: `Hello`.
    Hello = 1,
    /// Guest to host, stream 0: `Welcome`.
    Welcome = 2,
    /// Host to guest: opens a stream with a `Request`.
    Open = 3,
    /// Raw bytes of a stream, on the sub-channel in the header. An empty one on `SUB_MAIN` from the host means that
    /// no more will follow (end of stdin, end of an uploaded file).
    Data = 4,
    /// A `Message` of a stream.
    Message = 5,
    /// Four bytes, little-endian: how much more the receiver of this frame may send on the stream.
    Credit = 6,
    /// Guest to host: the stream is over; `Result<(), Failure>`. Nothing follows on it.
    End = 7,
    /// Host to guest: the host is no longer interested. Empty. The guest stops and answers nothing more.
    Close = 8,
    /// Either way, stream 0: answered with `Pong` carrying the same payload (at most 64 bytes).
    Ping = 9,
    Pong = 10,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Open,
            4 => Self::Data,
            5 => Self::Message,
            6 => Self::Credit,
            7 => Self::End,
            8 => Self::Close,
            9 => Self::Ping,
            10 => Self::Pong,
            _ => return None,
        })
    }
}

/// A frame that passed its checksum; the payload borrows the decoder's buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub kind: FrameKind,
    pub sub: u8,
    pub stream: u32,
    pub payload: &'a [u8],
}

/// The header for a payload that the caller writes behind it (one `writev`, no copy).
///
/// The payload must not be longer than [`MAX_PAYLOAD`]; callers split.
pub fn encode_header(kind: FrameKind, sub: u8, stream: u32, payload: &[u8]) -> [u8; HEADER_LEN] {
    assert!(
        payload.len() <= MAX_PAYLOAD,
        "payload of {} bytes was not split",
        payload.len()
    );
    let mut header = [0; HEADER_LEN];
    header[..4].copy_from_slice(&MAGIC);
    header[4] = kind as u8;
    header[5] = sub;
    header[8..12].copy_from_slice(&stream.to_le_bytes());
    header[12..16].copy_from_slice(&u32::try_from(payload.len()).expect("checked above").to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header[4..16]), payload);
    header[16..].copy_from_slice(&crc.to_le_bytes());
    header
}

/// Appends a whole frame to `out`.
pub fn encode_into(out: &mut Vec<u8>, kind: FrameKind, sub: u8, stream: u32, payload: &[u8]) {
    out.extend_from_slice(&encode_header(kind, sub, stream, payload));
    out.extend_from_slice(payload);
}

/// Finds frames in a byte stream that may begin, break off or continue anywhere.
///
/// Holds at most one frame's worth of unread bytes beyond what a single [`Decoder::space`] call offers, whatever the
/// other side sends.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes thrown away while looking for a frame, since the beginning.
    skipped: u64,
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            buffer: vec![0; 8 * 1024],
            start: 0,
            end: 0,
            skipped: 0,
        }
    }
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Where to read the next bytes into; report how many with [`Decoder::filled`].
    ///
    /// Grows towards four times the longest frame while bytes keep coming, so that an idle instance costs 8 KiB.
    pub fn space(&mut self) -> &mut [u8] {
        const FULL: usize = 4 * (MAX_PAYLOAD + HEADER_LEN);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        if self.end == self.buffer.len() && self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            let grown = (self.buffer.len() * 4).min(FULL);
            self.buffer.resize(grown, 0);
        }
        &mut self.buffer[self.end..]
    }

    pub fn filled(&mut self, count: usize) {
        self.end += count;
        assert!(
            self.end <= self.buffer.len(),
            "more bytes reported than there was space for"
        );
    }

    /// Gives back the memory of a burst; call it when the stream falls idle.
    pub fn shrink(&mut self) {
        if self.start == self.end && self.buffer.len() > 8 * 1024 {
            *self = Self {
                skipped: self.skipped,
                ..Self::default()
            };
        }
    }

    /// The next whole, valid frame, or `None` when more bytes are needed. Never returns a frame whose checksum failed.
    pub fn next_frame(&mut self) -> Option<Frame<'_>> {
        loop {
            self.seek_magic();
            let available = &self.buffer[self.start..self.end];
            if available.len() < HEADER_LEN {
                return None;
            }
            let word = |at: usize| {
                u32::from_le_bytes([
                    available[at],
                    available[at + 1],
                    available[at + 2],
                    available[at + 3],
                ])
            };
            let (stream, length, crc) = (word(8), word(12) as usize, word(16));
            let kind = FrameKind::from_byte(available[4]);
            let (Some(kind), true) = (kind, length <= MAX_PAYLOAD) else {
                self.skip_one();
                continue;
            };
            if available.len() < HEADER_LEN + length {
                return None;
            }
            let payload = &available[HEADER_LEN..HEADER_LEN + length];
            if crc32c::crc32c_append(crc32c::crc32c(&available[4..16]), payload) != crc {
                self.skip_one();
                continue;
            }
            let at = self.start + HEADER_LEN;
            let sub = self.buffer[self.start + 5];
            self.start = at + length;
            return Some(Frame {
                kind,
                sub,
                stream,
                payload: &self.buffer[at..at + length],
            });
        }
    }

    fn skip_one(&mut self) {
        self.start += 1;
        self.skipped += 1;
    }

    /// Moves `start` to the next place where the magic stands or may begin.
    fn seek_magic(&mut self) {
        let available = &self.buffer[self.start..self.end];
        let at = (0..available.len())
            .find(|&at| {
                let rest = &available[at..];
                let known = rest.len().min(MAGIC.len());
                rest[..known] == MAGIC[..known]
            })
            .unwrap_or(available.len());
        self.start += at;
        self.skipped += at as u64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds bytes in pieces and returns the (kind, stream, payload) of every frame found.
    fn decode_all(bytes: &[u8], piece: usize) -> Vec<(FrameKind, u32, Vec<u8>)> {
        let mut decoder = Decoder::new();
        let mut found = Vec::new();
        for chunk in bytes.chunks(piece.max(1)) {
            let mut rest = chunk;
            while !rest.is_empty() {
                let space = decoder.space();
                let count = space.len().min(rest.len());
                space[..count].copy_from_slice(&rest[..count]);
                decoder.filled(count);
                rest = &rest[count..];
                while let Some(frame) = decoder.next_frame() {
                    found.push((frame.kind, frame.stream, frame.payload.to_vec()));
                }
            }
        }
        found
    }

    #[test]
    fn a_torn_frame_costs_only_itself() {
        let mut bytes = Vec::new();
        encode_into(&mut bytes, FrameKind::Data, 0, 1, &[7; 50_000]);
        bytes.truncate(20_000); // the writer died here
        bytes.extend_from_slice(&vec![0; FILLER_LEN]); // its successor's filler
        encode_into(&mut bytes, FrameKind::Hello, 0, 0, b"hi");
        for piece in [1, 13, 4096, 1 << 20] {
            assert_eq!(
                decode_all(&bytes, piece),
                vec![(FrameKind::Hello, 0, b"hi".to_vec())],
                "piece {piece}"
            );
        }
    }

    #[test]
    fn a_lying_length_is_skipped() {
        let mut bytes = encode_header(FrameKind::Data, 0, 1, b"").to_vec();
        bytes[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        encode_into(&mut bytes, FrameKind::End, 0, 1, b"");
        assert_eq!(decode_all(&bytes, 7), vec![(FrameKind::End, 1, vec![])]);
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..8),
            piece in 1usize..5000,
        ) {
            let mut bytes = Vec::new();
            for (stream, payload) in payloads.iter().enumerate() {
                encode_into(&mut bytes, FrameKind::Data, SUB_STDOUT, stream as u32, payload);
            }
            let expected: Vec<_> = payloads
                .iter()
                .enumerate()
                .map(|(stream, payload)| (FrameKind::Data, stream as u32, payload.clone()))
                .collect();
            prop_assert_eq!(decode_all(&bytes, piece), expected);
        }

        #[test]
        fn garbage_neither_panics_nor_grows(bytes in prop::collection::vec(any::<u8>(), 0..200_000)) {
            decode_all(&bytes, 4096);
        }

        #[test]
        fn a_frame_behind_garbage_is_found(garbage in prop::collection::vec(any::<u8>(), 0..5000)) {
            let mut bytes = garbage;
            bytes.extend_from_slice(&vec![0; FILLER_LEN]);
            encode_into(&mut bytes, FrameKind::Pong, 0, 0, b"here");
            let found = decode_all(&bytes, 1000);
            prop_assert_eq!(found.last(), Some(&(FrameKind::Pong, 0, b"here".to_vec())));
        }
    }
}

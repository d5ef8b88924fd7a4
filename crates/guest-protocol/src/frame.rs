//! Frames: the unit that is written, checked and, when torn, skipped.
//!
//! ```text
//!   0      4      5      6      8          12         16         20
//!   │magic │ kind │ sub  │ zero │ stream   │ length   │ crc32c   │ payload ...
//! ```
//! Integers are little-endian. The checksum covers bytes 4..16 and the payload.

use std::ops::Range;

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

/// A frame and the payloads of the data frames of the same stream and sub-channel right behind it.
#[derive(Debug, PartialEq, Eq)]
pub struct Run<'a> {
    pub first: Frame<'a>,
    /// Never empty ones: those mean something.
    pub more: Vec<&'a [u8]>,
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
    /// How large the buffer may become.
    limit: usize,
    /// Whether the last read filled all the space that it was offered: more is waiting.
    filled_up: bool,
    /// Bytes thrown away while looking for a frame, since the beginning.
    skipped: u64,
    /// Bytes hashed for frames that were none, less what was valid since; see [`PATIENCE`].
    vain: usize,
    #[cfg(test)]
    vain_ever: usize,
}

const FRAME_LEN: usize = HEADER_LEN + MAX_PAYLOAD;
const IDLE_BUFFER: usize = 8 * 1024;
/// So many times what arrives is hashed in vain at most, and so many of the longest frames before that counts.
const PATIENCE: usize = 4;
/// How many frames a [`Run`] holds at most.
const LONGEST_RUN: usize = 16;

impl Default for Decoder {
    fn default() -> Self {
        Self::with_frames(4)
    }
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// One whose buffer grows to so many of the longest frames while bytes keep coming.
    pub fn with_frames(frames: usize) -> Self {
        Self {
            buffer: vec![0; IDLE_BUFFER],
            start: 0,
            end: 0,
            limit: frames.max(2) * FRAME_LEN,
            filled_up: false,
            skipped: 0,
            vain: 0,
            #[cfg(test)]
            vain_ever: 0,
        }
    }

    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Where to read the next bytes into; report how many with [`Decoder::filled`].
    ///
    /// Grows while reads fill it, so that bulk data takes few calls and an idle instance costs 8 KiB.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        // Never a scrap at the end: it would cost a read of its own. What moves is less than a frame.
        if self.start > 0 && self.buffer.len() - self.end < FRAME_LEN {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.filled_up && self.buffer.len() < self.limit {
            let grown = (self.buffer.len() * 4).min(self.limit);
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
        self.filled_up = self.end == self.buffer.len();
    }

    /// Gives back the memory of a burst; call it when the stream falls idle.
    pub fn shrink(&mut self) {
        if self.start == self.end && self.buffer.len() > IDLE_BUFFER {
            self.buffer = vec![0; IDLE_BUFFER];
            self.start = 0;
            self.end = 0;
            self.filled_up = false;
        }
    }

    /// The next whole, valid frame, or `None` when more bytes are needed. Never returns a frame whose checksum failed.
    pub fn next_frame(&mut self) -> Option<Frame<'_>> {
        let found = self.find()?;
        Some(found.in_buffer(&self.buffer))
    }

    /// As [`Decoder::next_frame`]; where data follows data of the same stream, all that is here, so that it can be
    /// handed on with one call.
    pub fn next_run(&mut self) -> Option<Run<'_>> {
        let first = self.find()?;
        let mut more = [const { 0..0 }; LONGEST_RUN - 1];
        let mut count = 0;
        if first.kind == FrameKind::Data && !first.payload.is_empty() {
            while count < more.len()
                && let Some(payload) = self.find_another(&first)
            {
                more[count] = payload;
                count += 1;
            }
        }
        Some(Run {
            first: first.in_buffer(&self.buffer),
            more: more[..count]
                .iter()
                .map(|payload| &self.buffer[payload.clone()])
                .collect(),
        })
    }

    fn find(&mut self) -> Option<Found> {
        loop {
            self.seek_magic();
            match self.look() {
                Look::Found(found) => {
                    self.start = found.payload.end;
                    self.vain = self.vain.saturating_sub(PATIENCE * found.payload.len());
                    return Some(found);
                }
                Look::Short => return None,
                Look::Broken { hashed } => {
                    self.vain += hashed;
                    #[cfg(test)]
                    {
                        self.vain_ever += hashed;
                    }
                    // The next frame may begin anywhere after the magic; but who sends nothing except beginnings would have
                    // all that follows hashed again for each of them.
                    let past = if self.vain > PATIENCE * FRAME_LEN {
                        hashed
                    } else {
                        0
                    };
                    self.start += past.max(1);
                    self.skipped += past.max(1) as u64;
                }
            }
        }
    }

    /// The payload of the frame that begins right here, if it is valid and continues `first`. Anything else is left for
    /// [`Decoder::find`].
    fn find_another(&mut self, first: &Found) -> Option<Range<usize>> {
        let header = self.buffer[self.start..self.end].get(..HEADER_LEN)?;
        // Looked at before the checksum is, which takes much longer.
        let continues = header[..4] == MAGIC
            && header[4] == FrameKind::Data as u8
            && header[5] == first.sub
            && word(header, 8) == first.stream
            && word(header, 12) > 0;
        match continues.then(|| self.look())? {
            Look::Found(found) => {
                self.start = found.payload.end;
                Some(found.payload)
            }
            Look::Short | Look::Broken { .. } => None,
        }
    }

    /// Examines what begins at `start`, where the magic stands.
    fn look(&self) -> Look {
        let available = &self.buffer[self.start..self.end];
        if available.len() < HEADER_LEN {
            return Look::Short;
        }
        let length = word(available, 12) as usize;
        let kind = FrameKind::from_byte(available[4]);
        let (Some(kind), true) = (kind, length <= MAX_PAYLOAD) else {
            return Look::Broken { hashed: 0 };
        };
        let Some(payload) = available.get(HEADER_LEN..HEADER_LEN + length) else {
            return Look::Short;
        };
        if crc32c::crc32c_append(crc32c::crc32c(&available[4..16]), payload) != word(available, 16) {
            return Look::Broken {
                hashed: HEADER_LEN + length,
            };
        }
        let at = self.start + HEADER_LEN;
        Look::Found(Found {
            kind,
            sub: available[5],
            stream: word(available, 8),
            payload: at..at + length,
        })
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

/// A valid frame's place in the buffer.
struct Found {
    kind: FrameKind,
    sub: u8,
    stream: u32,
    payload: Range<usize>,
}

impl Found {
    fn in_buffer(self, buffer: &[u8]) -> Frame<'_> {
        Frame {
            kind: self.kind,
            sub: self.sub,
            stream: self.stream,
            payload: &buffer[self.payload],
        }
    }
}

enum Look {
    Found(Found),
    /// More bytes are needed.
    Short,
    /// No frame begins here; so many bytes were hashed to find out.
    Broken {
        hashed: usize,
    },
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn beginnings_without_end_are_not_hashed_again_and_again() {
        // Every eight bytes begin a frame of 65,281 bytes whose checksum is wrong, and every so often there is a real one.
        let mut bytes: Vec<u8> = [&MAGIC[..], &[1, 0xFF, 0, 0]].concat().repeat(1 << 17);
        for at in (0..bytes.len() - 64).step_by(4096) {
            let mut real = Vec::new();
            encode_into(&mut real, FrameKind::Ping, 0, 0, b"here");
            bytes[at..at + real.len()].copy_from_slice(&real);
        }
        let mut decoder = Decoder::new();
        feed(&mut decoder, &bytes, 4096, |_| {});
        assert!(
            decoder.vain_ever <= 2 * PATIENCE * FRAME_LEN + PATIENCE * bytes.len(),
            "{} bytes were hashed for {} that arrived",
            decoder.vain_ever,
            bytes.len()
        );
    }

    /// Feeds bytes in pieces; `each` is given every frame found.
    fn feed(decoder: &mut Decoder, bytes: &[u8], piece: usize, mut each: impl FnMut(Frame<'_>)) {
        for chunk in bytes.chunks(piece.max(1)) {
            let mut rest = chunk;
            while !rest.is_empty() {
                let space = decoder.space();
                let count = space.len().min(rest.len());
                space[..count].copy_from_slice(&rest[..count]);
                decoder.filled(count);
                rest = &rest[count..];
                while let Some(frame) = decoder.next_frame() {
                    each(frame);
                }
            }
        }
    }

    /// Feeds bytes in pieces and returns the (kind, stream, payload) of every frame found.
    fn decode_all(bytes: &[u8], piece: usize) -> Vec<(FrameKind, u32, Vec<u8>)> {
        let mut decoder = Decoder::new();
        let mut found = Vec::new();
        feed(&mut decoder, bytes, piece, |frame| {
            found.push((frame.kind, frame.stream, frame.payload.to_vec()));
        });
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
    fn a_run_is_data_of_one_stream() {
        let mut bytes = Vec::new();
        for (kind, stream, payload) in [
            (FrameKind::Data, 1, b"a".as_slice()),
            (FrameKind::Data, 1, b"b"),
            (FrameKind::Data, 1, b""), // the end of a file is a frame of its own
            (FrameKind::Data, 1, b"c"),
            (FrameKind::Data, 2, b"d"),
            (FrameKind::Data, 2, b"e"),
            (FrameKind::Message, 2, b"f"),
            (FrameKind::Message, 2, b"g"),
        ] {
            encode_into(&mut bytes, kind, SUB_MAIN, stream, payload);
        }
        let torn = bytes.len() - 1;
        bytes[torn] ^= 1;
        encode_into(&mut bytes, FrameKind::Data, SUB_MAIN, 3, b"h");
        let mut decoder = Decoder::new();
        decoder.space()[..bytes.len()].copy_from_slice(&bytes);
        decoder.filled(bytes.len());
        let mut runs = Vec::new();
        while let Some(run) = decoder.next_run() {
            let mut text = run.first.payload.to_vec();
            for payload in run.more {
                text.extend_from_slice(payload);
            }
            runs.push((run.first.stream, String::from_utf8(text).unwrap()));
        }
        let expected = [(1, "ab"), (1, ""), (1, "c"), (2, "de"), (2, "f"), (3, "h")];
        assert_eq!(runs, expected.map(|(stream, text)| (stream, text.to_owned())));
    }

    #[test]
    fn the_buffer_grows_only_while_it_is_filled() {
        let mut decoder = Decoder::with_frames(16);
        let idle = decoder.space().len();
        for _ in 0..8 {
            let offered = decoder.space().len();
            decoder.filled(offered);
            while decoder.next_run().is_some() {}
        }
        let burst = decoder.space().len();
        assert!((15 * FRAME_LEN..=16 * FRAME_LEN).contains(&burst), "{burst}");
        decoder.shrink();
        assert_eq!(decoder.space().len(), idle);
        decoder.filled(idle - 1);
        assert!(decoder.next_frame().is_none());
        assert_eq!(decoder.space().len(), idle);
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

//! What the host and the guest agent say to each other.
//!
//! One duplex byte stream per instance (a pair of FIFOs that are PID 1's stdin and stdout) carries many logical
//! streams. Only the host opens streams; the guest answers on them.
//!
//! ```text
//!   host                                            guest (PID 1)
//!    │  filler, then Hello{generation, nonce}  ──────> │  forgets every stream of an earlier host
//!    │ <──────────────────  Welcome{generation, nonce} │
//!    │  Open(stream, Request)                  ──────> │
//!    │ <──────>  Data / Message, paid for with Credit  │
//!    │ <────────────────────────────  End(stream, ...) │  or host: Close(stream)
//! ```
//!
//! What must hold:
//! - **Neither side trusts the other's lengths.** A frame is at most [`MAX_PAYLOAD`] long; anything else is skipped.
//! - **Nothing is buffered without credit.** `Data` and `Message` on a stream cost their payload plus
//!   [`FRAME_COST`]; the sender may spend only what the receiver granted. A guest that overspends has broken the
//!   protocol and its stream is closed. `End` is free: one per stream.
//! - **A torn frame costs that frame only.** Either side may die between two bytes. The reader finds the next frame by
//!   its magic and checksum; a new host first writes [`FILLER_LEN`] zero bytes (unless the guest was just booted or restored,
//!   which happens between two frames) so that a half-read frame completes,
//!   fails its checksum, and is skipped.
//! - [`GENERATION`] changes when a message changes meaning; host and guest of different generations refuse each other.

mod frame;
mod message;

/// The command id of what a template starts ([`Configure::start`]).
pub const START: &str = "start";

pub use frame::{
    Decoder, FILLER_LEN, FRAME_COST, Frame, FrameKind, HEADER_LEN, MAX_PAYLOAD, Run, SUB_MAIN, SUB_STDERR,
    SUB_STDOUT, encode_header, encode_into,
};
pub use message::{
    Attributes, CommandInfo, CommandState, Configure, EntryKind, Exec, Failure, FailureKind, FileEntry,
    FileStat, GuestUsage, Hello, ListeningPort, Message, Network, PtySize, Request, Start, WatchEvent,
    WatchKind, Welcome, WriteFile, WriteMode,
};

/// The generation of this protocol. Both sides send it; they must be equal.
pub const GENERATION: u32 = 5;

/// How much a stream's sender may send before the first `Credit` arrives, in each direction.
pub const INITIAL_CREDIT: u32 = 512 * 1024;

/// The longest encoded [`Request`]; one that does not fit into a frame is sent as [`Request::Long`]. Linux takes argument
/// lists of at most 2 MiB.
pub const MAX_REQUEST: usize = 4 * 1024 * 1024;

/// Encodes a control message for a frame's payload.
pub fn encode<T: serde::Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("control messages are plain data, which postcard always encodes")
}

/// Decodes a control message; the bytes come from the other side and may be anything.
pub fn decode<'a, T: serde::Deserialize<'a>>(payload: &'a [u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(payload)
}

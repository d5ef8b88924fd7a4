//! Server-sent events, cut out of a byte stream.
//!
//! What must hold: an event comes out with exactly the bytes that it had, including the empty line behind it, so that whoever
//! relays all of them relays the stream untouched. An event that is longer than the limit is refused before it is held.

use bytes::{Bytes, BytesMut};

/// The longest event that is put up with. Providers put whole answers into their last one.
pub const LONGEST: usize = 4 * 1024 * 1024;

/// An event with nothing taken away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw(pub Bytes);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the provider sent an event of more than {LONGEST} bytes")]
pub struct TooLong;

#[derive(Debug, Default)]
pub struct Splitter {
    buffer: BytesMut,
    /// Up to where the buffer was searched.
    searched: usize,
}

impl Splitter {
    pub fn push(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
    }

    /// Takes the next whole event out.
    pub fn take(&mut self) -> Result<Option<Raw>, TooLong> {
        match self.find_end() {
            Some(end) => {
                self.searched = 0;
                Ok(Some(Raw(self.buffer.split_to(end).freeze())))
            }
            None if self.buffer.len() > LONGEST => Err(TooLong),
            None => Ok(None),
        }
    }

    /// What is left when the stream has ended: an event that was never finished.
    pub fn rest(&mut self) -> Option<Raw> {
        self.searched = 0;
        let rest = self.buffer.split().freeze();
        (!rest.is_empty()).then_some(Raw(rest))
    }

    /// The end of the first empty line; lines end with LF, CR or both.
    fn find_end(&mut self) -> Option<usize> {
        let bytes = &self.buffer[..];
        // Two bytes back: the line end that was last before may be the first of two.
        let from = self.searched.saturating_sub(3);
        for at in memchr::memchr2_iter(b'\n', b'\r', &bytes[from..]).map(|at| at + from) {
            let rest = &bytes[at..];
            for ending in [b"\r\n\r\n".as_slice(), b"\n\r\n", b"\r\n\n", b"\n\n", b"\r\r"] {
                if rest.starts_with(ending) {
                    return Some(at + ending.len());
                }
            }
        }
        self.searched = bytes.len();
        None
    }
}

impl Raw {
    /// The data of the event, its lines joined; `None` where it has none (a comment, say).
    pub fn data(&self) -> Option<Bytes> {
        let mut found: Option<Bytes> = None;
        let mut joined: Option<Vec<u8>> = None;
        for line in self.lines() {
            let Some(value) = line.strip_prefix(b"data:") else {
                continue;
            };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match (&found, &mut joined) {
                (None, _) => found = Some(self.0.slice_ref(value)),
                (Some(first), None) => {
                    let mut all = first.to_vec();
                    all.push(b'\n');
                    all.extend_from_slice(value);
                    joined = Some(all);
                }
                (_, Some(all)) => {
                    all.push(b'\n');
                    all.extend_from_slice(value);
                }
            }
        }
        joined.map(Bytes::from).or(found)
    }

    fn lines(&self) -> impl Iterator<Item = &[u8]> {
        self.0
            .split(|byte| matches!(byte, b'\n' | b'\r'))
            .filter(|line| !line.is_empty())
    }
}

/// Writes an event with a name and data of one line.
pub fn write(out: &mut Vec<u8>, name: Option<&str>, data: &serde_json::Value) {
    if let Some(name) = name {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.push(b'\n');
    }
    out.extend_from_slice(b"data: ");
    // A value of ours always has a text form.
    let _ = serde_json::to_writer(&mut *out, data);
    out.extend_from_slice(b"\n\n");
}

/// How OpenAI's streams end.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(chunks: &[&[u8]]) -> Vec<Raw> {
        let mut splitter = Splitter::default();
        let mut events = Vec::new();
        for chunk in chunks {
            splitter.push(chunk);
            while let Some(event) = splitter.take().unwrap() {
                events.push(event);
            }
        }
        events.extend(splitter.rest());
        events
    }

    #[test]
    fn events_end_with_an_empty_line_of_any_kind() {
        for text in [
            "data: a\n\ndata: b\n\n",
            "data: a\r\n\r\ndata: b\r\n\r\n",
            "data: a\r\rdata: b\r\r",
        ] {
            let events = split(&[text.as_bytes()]);
            let data: Vec<_> = events.iter().filter_map(Raw::data).collect();
            assert_eq!(data, ["a", "b"], "{text:?}");
        }
    }

    #[test]
    fn data_of_several_lines_is_joined_and_the_rest_is_skipped() {
        let events = split(&[b": hello\n\nevent: x\ndata: {\"a\":\ndata:1}\nid: 3\n\n"]);
        assert_eq!(events[0].data(), None);
        assert_eq!(events[1].data().unwrap(), "{\"a\":\n1}");
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let mut splitter = Splitter::default();
        let chunk = vec![b'x'; 64 * 1024];
        let mut pushed = 0;
        let refused = loop {
            splitter.push(&chunk);
            pushed += chunk.len();
            if splitter.take().is_err() {
                break pushed;
            }
        };
        assert!(refused <= LONGEST + 2 * chunk.len());
    }

    proptest! {
        /// However a stream is cut into chunks, the same events come out, and together they are the stream.
        #[test]
        fn nothing_is_lost_or_changed(text in "(data: [a-z]{0,5}(\n|\r\n)|:c\n|\n|\r\n){0,20}", cuts in prop::collection::vec(1_usize..7, 0..40)) {
            let bytes = text.as_bytes();
            let whole = split(&[bytes]);
            let mut chunks = Vec::new();
            let mut rest = bytes;
            for cut in cuts {
                let (chunk, left) = rest.split_at(cut.min(rest.len()));
                chunks.push(chunk);
                rest = left;
            }
            chunks.push(rest);
            let pieces = split(&chunks);
            let join = |events: &[Raw]| events.iter().flat_map(|event| event.0.to_vec()).collect::<Vec<_>>();
            prop_assert_eq!(join(&whole), bytes);
            prop_assert_eq!(join(&pieces), bytes);
            let data = |events: &[Raw]| events.iter().filter_map(Raw::data).collect::<Vec<_>>();
            prop_assert_eq!(data(&pieces), data(&whole));
        }
    }
}

//! Amazon's binary event streams (`application/vnd.amazon.eventstream`), made into server-sent events.
//!
//! ```text
//!   length of all: 4 │ length of headers: 4 │ CRC of these: 4 │ headers │ payload │ CRC of all before: 4
//! ```
//! An event comes out as `data: {"NAME":PAYLOAD}`, where the name is that of the event or of the exception.
//!
//! What must hold: a message is believed only if both checksums are right, and refused before it is held if it is longer than
//! the limit.

use bytes::{Buf as _, BytesMut};

use crate::sse::{LONGEST, Raw};

/// Lengths and their checksum.
const PRELUDE: usize = 12;
const CHECKSUM: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("the provider sent an event of more than {LONGEST} bytes")]
    TooLong,
    #[error("the provider's stream is damaged: {0}")]
    Damaged(&'static str),
}

#[derive(Debug, Default)]
pub struct Splitter {
    buffer: BytesMut,
}

impl Splitter {
    pub fn push(&mut self, chunk: &[u8]) {
        self.buffer.extend_from_slice(chunk);
    }

    /// Takes the next whole event out.
    pub fn take(&mut self) -> Result<Option<Raw>, Broken> {
        let Some(prelude) = self.buffer.get(..PRELUDE) else {
            return Ok(None);
        };
        let number = |at: usize| {
            let bytes = [prelude[at], prelude[at + 1], prelude[at + 2], prelude[at + 3]];
            u32::from_be_bytes(bytes) as usize
        };
        let (length, headers) = (number(0), number(4));
        if crc32fast::hash(&prelude[..8]) as usize != number(8) {
            return Err(Broken::Damaged("the lengths do not fit their checksum"));
        }
        if length > LONGEST {
            return Err(Broken::TooLong);
        }
        if length < PRELUDE + headers + CHECKSUM {
            return Err(Broken::Damaged("a message is shorter than its headers"));
        }
        if self.buffer.len() < length {
            return Ok(None);
        }
        let message = self.buffer.split_to(length);
        let (checked, mut sum) = message.split_at(length - CHECKSUM);
        if crc32fast::hash(checked) != sum.get_u32() {
            return Err(Broken::Damaged("a message does not fit its checksum"));
        }
        let (headers, payload) = checked[PRELUDE..].split_at(headers);
        let name = name(headers)?.ok_or(Broken::Damaged("a message has no name"))?;
        Ok(Some(written(name, payload)))
    }
}

fn written(name: &str, payload: &[u8]) -> Raw {
    let mut out = b"data: {".to_vec();
    // A name of ours or of theirs always has a text form.
    let _ = serde_json::to_writer(&mut out, name);
    out.push(b':');
    // In JSON a line break is nothing but space, and here it would end the line.
    let payload = if payload.is_empty() { b"{}" } else { payload };
    out.extend(payload.iter().map(|byte| match byte {
        b'\n' | b'\r' => b' ',
        other => *other,
    }));
    out.extend_from_slice(b"}\n\n");
    Raw(out.into())
}

/// The name of the event or of the exception.
fn name(mut headers: &[u8]) -> Result<Option<&str>, Broken> {
    const SHORT: Broken = Broken::Damaged("a header is cut off");
    let mut found = None;
    while !headers.is_empty() {
        let length = usize::from(headers.get_u8());
        let (key, rest) = headers.split_at_checked(length).ok_or(SHORT)?;
        let (kind, rest) = rest.split_first().ok_or(SHORT)?;
        let (value, rest) = match kind {
            0 | 1 => (&rest[..0], rest),
            2 => rest.split_at_checked(1).ok_or(SHORT)?,
            3 => rest.split_at_checked(2).ok_or(SHORT)?,
            4 => rest.split_at_checked(4).ok_or(SHORT)?,
            5 | 8 => rest.split_at_checked(8).ok_or(SHORT)?,
            6 | 7 => {
                let (length, rest) = rest.split_at_checked(2).ok_or(SHORT)?;
                let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
                rest.split_at_checked(length).ok_or(SHORT)?
            }
            9 => rest.split_at_checked(16).ok_or(SHORT)?,
            _ => return Err(Broken::Damaged("a header is of an unknown kind")),
        };
        if matches!(key, b":event-type" | b":exception-type" | b":error-code") && *kind == 7 {
            found = std::str::from_utf8(value).ok();
        }
        headers = rest;
    }
    Ok(found)
}

/// Writes a message, for providers in tests and demos.
pub fn write(out: &mut Vec<u8>, name: &str, payload: &[u8]) {
    let kind = if name.ends_with("Exception") {
        ["exception", ":exception-type"]
    } else {
        ["event", ":event-type"]
    };
    let mut headers = Vec::new();
    for (key, value) in [
        (kind[1], name),
        (":content-type", "application/json"),
        (":message-type", kind[0]),
    ] {
        headers.push(u8::try_from(key.len()).unwrap_or(u8::MAX));
        headers.extend_from_slice(key.as_bytes());
        headers.push(7);
        headers.extend_from_slice(&u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
        headers.extend_from_slice(value.as_bytes());
    }
    let start = out.len();
    let number = |length: usize| u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&number(PRELUDE + headers.len() + payload.len() + CHECKSUM));
    out.extend_from_slice(&number(headers.len()));
    out.extend_from_slice(&crc32fast::hash(&out[start..]).to_be_bytes());
    out.extend_from_slice(&headers);
    out.extend_from_slice(payload);
    out.extend_from_slice(&crc32fast::hash(&out[start..]).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(wire: &[u8], size: usize) -> Result<Vec<Raw>, Broken> {
        let mut splitter = Splitter::default();
        let mut events = Vec::new();
        for chunk in wire.chunks(size) {
            splitter.push(chunk);
            while let Some(event) = splitter.take()? {
                events.push(event);
            }
        }
        Ok(events)
    }

    /// A message of the format's own test vectors: one header of every kind is skipped, the checksums are right.
    #[test]
    fn a_message_as_the_format_describes_it_is_read() {
        // `{'foo':'bar'}` with the headers `content-type` and `:event-type`.
        let mut headers = Vec::new();
        headers.extend_from_slice(b"\x0ccontent-type\x07\x00\x10application/json");
        headers.extend_from_slice(b"\x04flag\x00\x05short\x03\x00\x01\x02id\x09\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f");
        headers.extend_from_slice(b"\x0b:event-type\x07\x00\x05chunk");
        let payload = b"{\"foo\":\n\"bar\"}";
        let mut wire = Vec::new();
        wire.extend_from_slice(
            &u32::try_from(16 + headers.len() + payload.len())
                .unwrap()
                .to_be_bytes(),
        );
        wire.extend_from_slice(&u32::try_from(headers.len()).unwrap().to_be_bytes());
        wire.extend_from_slice(&crc32fast::hash(&wire).to_be_bytes());
        wire.extend_from_slice(&headers);
        wire.extend_from_slice(payload);
        wire.extend_from_slice(&crc32fast::hash(&wire).to_be_bytes());
        let events = split(&wire, 3).unwrap();
        assert_eq!(events[0].data().unwrap(), r#"{"chunk":{"foo": "bar"}}"#);
    }

    /// From the format's published vectors: an empty message.
    #[test]
    fn checksums_are_those_of_the_format() {
        let empty = [
            0, 0, 0, 0x10, 0, 0, 0, 0, 0x05, 0xc2, 0x48, 0xeb, 0x7d, 0x98, 0xc8, 0xff,
        ];
        assert_eq!(split(&empty, 16), Err(Broken::Damaged("a message has no name")));
        let mut wrong = empty;
        wrong[15] ^= 1;
        assert_eq!(
            split(&wrong, 16),
            Err(Broken::Damaged("a message does not fit its checksum"))
        );
    }

    #[test]
    fn what_is_damaged_or_too_long_is_refused() {
        let mut wire = Vec::new();
        write(&mut wire, "messageStop", b"{}");
        for at in 0..wire.len() {
            let mut broken = wire.clone();
            broken[at] ^= 0x40;
            assert!(split(&broken, 1000).is_err(), "byte {at}");
        }
        let mut long = u32::try_from(LONGEST + 1).unwrap().to_be_bytes().to_vec();
        long.extend_from_slice(&[0; 4]);
        long.extend_from_slice(&crc32fast::hash(&long).to_be_bytes());
        assert_eq!(split(&long, 12), Err(Broken::TooLong));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = split(&bytes, 17);
            let _ = name(&bytes);
        }

        #[test]
        fn what_is_written_is_read(names in prop::collection::vec("[a-zA-Z]{1,20}", 1..5), size in 1_usize..50) {
            let mut wire = Vec::new();
            for name in &names {
                write(&mut wire, name, b"{\"a\":1}");
            }
            let read: Vec<String> = split(&wire, size).unwrap().iter()
                .map(|raw| String::from_utf8(raw.data().unwrap().to_vec()).unwrap()).collect();
            let expected: Vec<String> = names.iter().map(|name| format!("{{\"{name}\":{{\"a\":1}}}}")).collect();
            prop_assert_eq!(read, expected);
        }
    }
}

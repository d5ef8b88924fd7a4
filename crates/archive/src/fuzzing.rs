//! What the fuzzer may see: the heads of a stream, without anything being made of them.

use std::io::{self, Read};

use crate::{format, header};

/// A head, as far as other readers of the format know the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub path: Vec<u8>,
    /// Bytes that follow in the stream.
    pub size: u64,
    pub target: Vec<u8>,
}

/// The heads of a stream, up to its end or to what is wrong with it. Each is written and read again, and must be the same.
pub fn heads(stream: &[u8]) -> (Vec<Head>, io::Result<()>) {
    let mut rest = stream;
    let mut found = Vec::new();
    loop {
        let entry = match header::read(&mut rest) {
            Ok(Some(entry)) => entry,
            Ok(None) => return (found, Ok(())),
            Err(error) => return (found, Err(error)),
        };
        let mut again = Vec::new();
        // What only other programs write (devices, GNU's old maps of holes) has no form of ours.
        if entry.map.is_none() && entry.kind != header::Kind::Device && entry.write(&mut again).is_ok() {
            let read = header::read(&mut &again[..]).ok().flatten();
            assert_eq!(
                read.as_ref(),
                Some(&entry),
                "an entry that was written is not what is read"
            );
        }
        let skipped = entry.size + format::padding(entry.size).len() as u64;
        found.push(Head {
            path: entry.path,
            size: entry.size,
            target: entry.target,
        });
        match io::copy(&mut rest.by_ref().take(skipped), &mut io::sink()) {
            Ok(count) if count == skipped => {}
            _ => return (found, Err(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

//! What is saved as one file that can be carried elsewhere.
//!
//! ```text
//!   "ATOLLSAV"  version: 4  header: 4 + n  meta: 4 + n
//!   1  name: 2 + n                          a stream begins
//!      2  length: 4, bytes                  at most 1 MiB
//!      3  length: 8                         zeros
//!      4  length of the stream: 8           a stream ends
//!   0  number of streams: 4                 the end
//!   BLAKE3 of all before: 32 bytes          numbers are little-endian
//! ```
//! It holds everything in plain and refers to nothing, so it can be read by any vault with any key.
//!
//! What must hold: nothing of an import is visible before the last byte was read and the hash was right; no length in the file
//! makes us reserve more than a fixed amount, nor store more than the caller allows.

use std::io::{Read, Write};
use std::path::Path;

use crate::Vault;
use crate::disk::check_stream;
use crate::error::{Error, IoContext, Result};
use crate::opened::Part;
use crate::save::{MAX_META, Saved};

const MAGIC: &[u8; 8] = b"ATOLLSAV";
const VERSION: u32 = 1;
const MAX_HEADER: usize = 1 << 20;
const MAX_PART: usize = 1 << 20;

const END: u8 = 0;
const STREAM: u8 = 1;
const DATA: u8 = 2;
const ZERO: u8 = 3;
const STREAM_END: u8 = 4;

impl Vault {
    /// Writes what is saved under `id` as one file. `header` is whatever the caller wants to find there again.
    pub fn export(&self, id: &str, header: &[u8], out: &mut dyn Write) -> Result<()> {
        if header.len() > MAX_HEADER {
            return Err(Error::Limit {
                what: "the header of an export",
                limit: MAX_HEADER as u64,
            });
        }
        let opened = self.open_saved(id)?;
        let mut out = Hashed::new(out);
        out.put(MAGIC)?;
        out.put(&VERSION.to_le_bytes())?;
        for part in [header, opened.meta()] {
            out.put(&short(part.len()).to_le_bytes())?;
            out.put(part)?;
        }
        let streams = opened.streams();
        for stream in &streams {
            // Names have at most 255 bytes.
            let len = u16::try_from(stream.name.len()).unwrap_or(u16::MAX);
            out.put(&[STREAM])?;
            out.put(&len.to_le_bytes())?;
            out.put(stream.name.as_bytes())?;
            opened.walk(&stream.name, &mut |part| match part {
                Part::Zero(len) => {
                    out.put(&[ZERO])?;
                    out.put(&len.to_le_bytes())
                }
                Part::Data(data) => data.chunks(MAX_PART).try_for_each(|data| {
                    out.put(&[DATA])?;
                    out.put(&short(data.len()).to_le_bytes())?;
                    out.put(data)
                }),
            })?;
            out.put(&[STREAM_END])?;
            out.put(&stream.len.to_le_bytes())?;
        }
        out.put(&[END])?;
        out.put(&short(streams.len()).to_le_bytes())?;
        let hash = out.hash.finalize();
        out.put(hash.as_bytes())?;
        out.inner.flush().doing("write", Path::new("export"))
    }

    /// Saves what [`Vault::export`] wrote, durably, and gives back its header. Refused, and nothing kept, when the file is not
    /// whole or its streams have more than `max_bytes` together.
    pub fn import(
        &self,
        from: &mut dyn Read,
        id: &str,
        domain: &str,
        max_bytes: u64,
    ) -> Result<(Vec<u8>, Saved)> {
        let save = self.begin(id, domain)?;
        let mut from = Hashed::new(from);
        if from.array()? != *MAGIC {
            return Err(broken("it does not begin like one"));
        }
        let version = u32::from_le_bytes(from.array()?);
        if version != VERSION {
            return Err(broken(&format!("version {version} is not known")));
        }
        let header = from.bytes(MAX_HEADER)?;
        let meta = from.bytes(MAX_META)?;
        let (mut left, mut streams) = (max_bytes, 0_u32);
        loop {
            match from.array()? {
                [STREAM] => {
                    let name = from.name()?;
                    let mut parts = Parts {
                        from: &mut from,
                        part: Some(Rest::Data(0)),
                        len: 0,
                        left: &mut left,
                        max_bytes,
                        failed: None,
                    };
                    let taken = save.file(&name, &mut parts);
                    if let Some(error) = parts.failed {
                        return Err(error);
                    }
                    taken?;
                    streams += 1;
                }
                [END] => break,
                _ => return Err(broken("a stream was expected")),
            }
        }
        if u32::from_le_bytes(from.array()?) != streams {
            return Err(broken("streams are missing"));
        }
        let hash = from.hash.finalize();
        if from.array()? != *hash.as_bytes() {
            return Err(broken("its contents do not match its hash"));
        }
        if from.some(&mut [0])? != 0 {
            return Err(broken("more follows after its end"));
        }
        Ok((header, save.finish(meta, true)?))
    }
}

fn broken(why: &str) -> Error {
    Error::damaged(format!("the exported file ({why})"))
}

/// For lengths that were checked to be small.
fn short(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Hashes what passes through.
struct Hashed<T> {
    inner: T,
    hash: blake3::Hasher,
}

impl<T> Hashed<T> {
    fn new(inner: T) -> Self {
        let hash = blake3::Hasher::new();
        Self { inner, hash }
    }
}

impl Hashed<&mut dyn Write> {
    fn put(&mut self, data: &[u8]) -> Result<()> {
        self.hash.update(data);
        self.inner.write_all(data).doing("write", Path::new("export"))
    }
}

impl Hashed<&mut dyn Read> {
    fn some(&mut self, buf: &mut [u8]) -> Result<usize> {
        loop {
            match self.inner.read(buf) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                other => {
                    let n = other.doing("read", Path::new("export"))?;
                    self.hash.update(&buf[..n]);
                    return Ok(n);
                }
            }
        }
    }

    fn fill(&mut self, mut buf: &mut [u8]) -> Result<()> {
        while !buf.is_empty() {
            let n = self.some(buf)?;
            if n == 0 {
                return Err(broken("it ends too early"));
            }
            buf = &mut buf[n..];
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn bytes(&mut self, most: usize) -> Result<Vec<u8>> {
        let len = u32::from_le_bytes(self.array()?) as usize;
        if len > most {
            return Err(broken("a part of it is too long"));
        }
        let mut bytes = vec![0; len];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn name(&mut self) -> Result<String> {
        let mut bytes = vec![0; usize::from(u16::from_le_bytes(self.array()?))];
        self.fill(&mut bytes)?;
        let name = String::from_utf8(bytes).map_err(|_| broken("a name is not text"))?;
        check_stream(&name)?;
        Ok(name)
    }
}

/// One stream of an export, as a reader.
struct Parts<'p, 'r> {
    from: &'p mut Hashed<&'r mut dyn Read>,
    /// The part that is being read; `None` at the end of the stream.
    part: Option<Rest>,
    len: u64,
    left: &'p mut u64,
    max_bytes: u64,
    /// What a `std::io::Error` would not say.
    failed: Option<Error>,
}

#[derive(Clone, Copy)]
enum Rest {
    Data(u64),
    Zero(u64),
}

impl Parts<'_, '_> {
    fn next(&mut self, buf: &mut [u8]) -> Result<usize> {
        loop {
            match &mut self.part {
                None => return Ok(0),
                Some(Rest::Data(0) | Rest::Zero(0)) => self.part = self.head()?,
                Some(Rest::Data(left)) => {
                    let most = usize::try_from(*left).unwrap_or(usize::MAX).min(buf.len());
                    let n = self.from.some(&mut buf[..most])?;
                    if n == 0 {
                        return Err(broken("it ends too early"));
                    }
                    *left -= n as u64;
                    return Ok(n);
                }
                Some(Rest::Zero(left)) => {
                    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(buf.len());
                    buf[..n].fill(0);
                    *left -= n as u64;
                    return Ok(n);
                }
            }
        }
    }

    fn head(&mut self) -> Result<Option<Rest>> {
        let (len, rest): (_, fn(u64) -> Rest) = match self.from.array()? {
            [DATA] => {
                let len = u32::from_le_bytes(self.from.array()?);
                if len as usize > MAX_PART {
                    return Err(broken("a part of it is too long"));
                }
                (u64::from(len), Rest::Data)
            }
            [ZERO] => (u64::from_le_bytes(self.from.array()?), Rest::Zero),
            [STREAM_END] if u64::from_le_bytes(self.from.array()?) == self.len => return Ok(None),
            [STREAM_END] => return Err(broken("a stream has not the length that it says")),
            _ => return Err(broken("a part of a stream was expected")),
        };
        *self.left = self.left.checked_sub(len).ok_or(Error::Limit {
            what: "the size of the import",
            limit: self.max_bytes,
        })?;
        self.len += len;
        Ok(Some(rest(len)))
    }
}

impl Read for Parts<'_, '_> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        self.next(buf).map_err(|error| {
            let text = std::io::Error::other(error.to_string());
            self.failed.get_or_insert(error);
            text
        })
    }
}

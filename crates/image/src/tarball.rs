//! Reads a plain tar archive that lies on disk: ustar, GNU long names and PAX, as layers of images use them.
//!
//! Our own reader, because contents are kept as ranges of the archive (so offsets are needed) and because a hostile
//! archive may declare a name of gigabytes: no field is read into memory beyond a fixed bound.

use std::collections::BTreeMap;

use crate::content::Content;
use crate::error::{Error, Result, show};
use crate::tree::{Meta, Mtime};

const BLOCK: u64 = 512;
/// All PAX headers and GNU long names before one entry, together: far more than any honest archive has. What they say is
/// kept until the entry comes, so that their number must not be the archive's to choose.
const MAX_EXTENSION: u64 = 1 << 20;
const MAX_PATH: usize = 4096;
/// Larger than any file that could be stored anyway; keeps all sums far from overflow.
const MAX_SIZE: u64 = 1 << 50;

#[derive(Debug)]
pub(crate) struct Entry {
    /// As written in the archive: may be hostile.
    pub(crate) path: Vec<u8>,
    pub(crate) meta: Meta,
    pub(crate) kind: EntryKind,
}

#[derive(Debug)]
pub(crate) enum EntryKind {
    File(Content),
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Fifo,
    CharDevice { major: u32, minor: u32 },
    BlockDevice,
}

#[derive(Debug)]
pub(crate) struct Tarball {
    archive: Content,
    at: u64,
}

impl Tarball {
    pub(crate) fn new(archive: Content) -> Self {
        Self { archive, at: 0 }
    }

    /// How far into the archive the next entry begins, for progress.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut extension = Extension::default();
        let first = self.at;
        loop {
            let start = self.at;
            if start - first > MAX_EXTENSION {
                return Err(self.bad(start, "too many extended headers before one entry"));
            }
            let Some(header) = self.read_header()? else {
                return Ok(None);
            };
            let header_size = header
                .number(124, 12)
                .ok_or_else(|| self.bad(start, "unreadable size"))?;
            match header.kind() {
                kind @ (b'x' | b'X' | b'L' | b'K') => {
                    let body = self.read_extension(start, header_size)?;
                    match kind {
                        b'L' => extension.path = Some(until_nul(&body).to_vec()),
                        b'K' => extension.link = Some(until_nul(&body).to_vec()),
                        _ => extension.read_pax(&body).map_err(|why| self.bad(start, why))?,
                    }
                }
                // A global header speaks about entries to come; nothing in images uses it for anything but comments.
                b'g' => drop(self.read_extension(start, header_size)?),
                kind => return self.entry(start, kind, &header, header_size, extension).map(Some),
            }
        }
    }

    fn entry(&mut self, start: u64, kind: u8, header: &Header, size: u64, ext: Extension) -> Result<Entry> {
        let path = ext.path.unwrap_or_else(|| header.path());
        let link = ext
            .link
            .unwrap_or_else(|| until_nul(&header.0[157..257]).to_vec());
        if path.len() > MAX_PATH || link.len() > MAX_PATH {
            return Err(Error::layer(&path, "a path of more than 4096 bytes"));
        }
        if path.contains(&0) || link.contains(&0) {
            return Err(Error::layer(&path, "a path with a NUL byte"));
        }
        let field = |at, what| header.number(at, 8).ok_or_else(|| self.bad(start, what));
        let meta = Meta {
            mode: (field(100, "unreadable mode")? & 0o7777) as u16,
            uid: ext.uid.map_or_else(|| field(108, "unreadable uid"), Ok)? as u32,
            gid: ext.gid.map_or_else(|| field(116, "unreadable gid"), Ok)? as u32,
            mtime: ext.mtime.unwrap_or_else(|| Mtime {
                secs: header.number(136, 12).unwrap_or(0),
                nanos: 0,
            }),
            xattrs: ext.xattrs,
        };
        let kind = match kind {
            b'0' | 0 if path.ends_with(b"/") => EntryKind::Directory,
            b'0' | 0 | b'7' => {
                let size = ext.size.unwrap_or(size);
                if size > MAX_SIZE || self.at.saturating_add(size) > self.archive.len() {
                    return Err(self.bad(
                        start,
                        format!("`{}` declares {size} bytes, the archive ends before", show(&path)),
                    ));
                }
                let content = self.archive.slice(self.at, size)?;
                self.at += size.next_multiple_of(BLOCK);
                EntryKind::File(content)
            }
            b'1' => EntryKind::HardLink(link),
            b'2' => EntryKind::Symlink(link),
            b'3' => EntryKind::CharDevice {
                major: header.number(329, 8).unwrap_or(0) as u32,
                minor: header.number(337, 8).unwrap_or(0) as u32,
            },
            b'4' => EntryKind::BlockDevice,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            b'S' => {
                return Err(Error::layer(
                    &path,
                    "sparse files are not supported; write the archive without them",
                ));
            }
            other => {
                return Err(Error::layer(
                    &path,
                    format!("entry type {:?} is not supported", char::from(other)),
                ));
            }
        };
        Ok(Entry { path, meta, kind })
    }

    /// The next header; `None` at the end. An archive may end with zeros or just end.
    fn read_header(&mut self) -> Result<Option<Header>> {
        if self.at >= self.archive.len() {
            return Ok(None);
        }
        if self.at + BLOCK > self.archive.len() {
            return Err(self.bad(self.at, "cut short in a header"));
        }
        let mut header = Header([0; 512]);
        self.archive.read_at(&mut header.0, self.at)?;
        if header.0.iter().all(|&b| b == 0) {
            return Ok(None);
        }
        if !header.checksum_matches() {
            return Err(self.bad(self.at, "wrong header checksum"));
        }
        self.at += BLOCK;
        Ok(Some(header))
    }

    fn read_extension(&mut self, start: u64, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENSION - BLOCK {
            return Err(self.bad(start, format!("an extended header of {size} bytes")));
        }
        if self.at + size > self.archive.len() {
            return Err(self.bad(start, "cut short in an extended header"));
        }
        let mut body = vec![0; size as usize];
        self.archive.read_at(&mut body, self.at)?;
        self.at += size.next_multiple_of(BLOCK);
        Ok(body)
    }

    fn bad(&self, offset: u64, why: impl Into<String>) -> Error {
        Error::Tar {
            path: self.archive.path().to_owned(),
            offset,
            why: why.into(),
        }
    }
}

/// What PAX and GNU headers say about the entry that follows them.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<Mtime>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Extension {
    fn read_pax(&mut self, mut rest: &[u8]) -> Result<(), String> {
        while !rest.is_empty() {
            let space = rest
                .iter()
                .take(20)
                .position(|&b| b == b' ')
                .ok_or("a PAX record without a length")?;
            let len: usize = text(&rest[..space])
                .and_then(|len| len.parse().ok())
                .filter(|&len| len > space + 1 && len <= rest.len())
                .ok_or("a PAX record with a wrong length")?;
            let record = rest[space + 1..len]
                .strip_suffix(b"\n")
                .ok_or("a PAX record without an end")?;
            let equals = record
                .iter()
                .position(|&b| b == b'=')
                .ok_or("a PAX record without a value")?;
            self.set(&record[..equals], &record[equals + 1..])?;
            rest = &rest[len..];
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let number = || {
            text(value)
                .and_then(|value| value.parse::<u64>().ok())
                .ok_or_else(|| format!("PAX {} is not a number", show(key)))
        };
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(number()?.min(u64::from(u32::MAX))),
            b"gid" => self.gid = Some(number()?.min(u64::from(u32::MAX))),
            b"mtime" => self.mtime = text(value).and_then(parse_mtime),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if name.starts_with(b"user.") || name == b"security.capability" {
                        self.xattrs.insert(name.to_vec(), value.to_vec());
                    }
                } else if key.starts_with(b"GNU.sparse.") {
                    return Err("sparse files are not supported; write the archive without them".into());
                }
            }
        }
        Ok(())
    }
}

fn parse_mtime(value: &str) -> Option<Mtime> {
    let (secs, fraction) = value.split_once('.').unwrap_or((value, ""));
    if secs.starts_with('-') {
        return Some(Mtime::default());
    }
    let mut digits: String = fraction.chars().take(9).collect();
    while digits.len() < 9 {
        digits.push('0');
    }
    Some(Mtime {
        secs: secs.parse().ok()?,
        nanos: digits.parse().ok()?,
    })
}

struct Header([u8; 512]);

impl Header {
    fn kind(&self) -> u8 {
        self.0[156]
    }

    fn path(&self) -> Vec<u8> {
        let name = until_nul(&self.0[..100]);
        // POSIX ustar only: GNU uses the same bytes for other things.
        let prefix = match &self.0[257..263] {
            b"ustar\0" => until_nul(&self.0[345..500]),
            _ => b"",
        };
        if prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, name].join(&b'/')
    }

    /// An octal or base-256 field. Negative numbers become zero, since only times can be negative.
    fn number(&self, at: usize, len: usize) -> Option<u64> {
        let field = &self.0[at..at + len];
        if field[0] & 0x80 != 0 {
            if field[0] & 0x40 != 0 {
                return Some(0);
            }
            return field[1..]
                .iter()
                .try_fold(u64::from(field[0] & 0x3f), |sum, &byte| {
                    sum.checked_mul(256)?.checked_add(u64::from(byte))
                });
        }
        let digits = text(until_nul(field))?.trim();
        if digits.is_empty() {
            return Some(0);
        }
        u64::from_str_radix(digits, 8).ok()
    }

    fn checksum_matches(&self) -> bool {
        let Some(expected) = self.number(148, 8) else {
            return false;
        };
        let (mut unsigned, mut signed) = (0u64, 0i64);
        for (at, &byte) in self.0.iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { byte };
            unsigned += u64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        expected == unsigned || i64::try_from(expected).ok() == Some(signed)
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&b| b == 0).next().unwrap_or_default()
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

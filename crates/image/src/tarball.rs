//! Reads a plain tar archive that lies on disk: ustar, GNU long names and PAX, as layers of images use them.
//!
//! Contents are kept as ranges of the archive, so this walks from header to header by offsets. A hostile archive may declare
//! a name of gigabytes: nothing is read into memory beyond a fixed bound. What stands in a header is read by
//! [`atoll_archive::format`].

use std::collections::BTreeMap;

use atoll_archive::format::{self, BadNumber, Header, TypeFlag};

use crate::content::Content;
use crate::error::{Error, Result, show};
use crate::tree::{Meta, Mtime};

const BLOCK: u64 = format::BLOCK as u64;
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
    /// A directory that hides what lies below it, as overlayfs says so.
    pub(crate) opaque: bool,
    /// Of a directory: where what lies below it is, as overlayfs says so. It was renamed.
    pub(crate) redirect: Option<Vec<u8>>,
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

#[derive(Debug, Clone)]
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
            let Some(block) = self.read_block()? else {
                return Ok(None);
            };
            let header = Header::parse(&block).map_err(|_| self.bad(start, "wrong header checksum"))?;
            // An archive may end with zeros or just end.
            let Some(header) = header else {
                return Ok(None);
            };
            self.at += BLOCK;
            let size = number(header.size()).ok_or_else(|| self.bad(start, "unreadable size"))?;
            match header.flag() {
                // `X` is how Solaris wrote PAX headers.
                TypeFlag::Pax | TypeFlag::Other(b'X') => {
                    let body = self.read_extension(start, size)?;
                    extension.read_pax(&body).map_err(|why| self.bad(start, why))?;
                }
                TypeFlag::LongName => {
                    let body = self.read_extension(start, size)?;
                    extension.path = Some(format::text(&body).to_vec());
                }
                TypeFlag::LongLink => {
                    let body = self.read_extension(start, size)?;
                    extension.link = Some(format::text(&body).to_vec());
                }
                // A global header speaks about entries to come; nothing in images uses it for anything but comments.
                TypeFlag::PaxGlobal => drop(self.read_extension(start, size)?),
                _ => return self.entry(start, &header, size, extension).map(Some),
            }
        }
    }

    fn entry(&mut self, start: u64, header: &Header<'_>, size: u64, ext: Extension) -> Result<Entry> {
        let path = ext.sparse_name.or(ext.path).unwrap_or_else(|| header.name());
        let link = ext.link.unwrap_or_else(|| header.link().to_vec());
        if path.len() > MAX_PATH || link.len() > MAX_PATH {
            return Err(Error::layer(&path, "a path of more than 4096 bytes"));
        }
        if path.contains(&0) || link.contains(&0) {
            return Err(Error::layer(&path, "a path with a NUL byte"));
        }
        let field = |read, what| number(read).ok_or_else(|| self.bad(start, what));
        let meta = Meta {
            mode: (field(header.mode(), "unreadable mode")? & 0o7777) as u16,
            uid: ext
                .uid
                .map_or_else(|| field(header.uid(), "unreadable uid"), Ok)? as u32,
            gid: ext
                .gid
                .map_or_else(|| field(header.gid(), "unreadable gid"), Ok)? as u32,
            mtime: ext.mtime.unwrap_or_else(|| Mtime {
                secs: header.mtime().unwrap_or(0),
                nanos: 0,
            }),
            xattrs: ext.xattrs,
        };
        let kind = match header.flag().of_name(&path) {
            TypeFlag::File => {
                let size = ext.size.unwrap_or(size);
                if size > MAX_SIZE || self.at.saturating_add(size) > self.archive.len() {
                    return Err(self.bad(
                        start,
                        format!("`{}` declares {size} bytes, the archive ends before", show(&path)),
                    ));
                }
                let mut content = self.archive.slice(self.at, size)?;
                if ext.sparse {
                    content = self.with_holes(start, &content, ext.real_size)?;
                }
                self.at += size.next_multiple_of(BLOCK);
                EntryKind::File(content)
            }
            TypeFlag::HardLink => EntryKind::HardLink(link),
            TypeFlag::Symlink => EntryKind::Symlink(link),
            TypeFlag::CharDevice => {
                let (major, minor) = header.device();
                EntryKind::CharDevice {
                    major: major.unwrap_or(0) as u32,
                    minor: minor.unwrap_or(0) as u32,
                }
            }
            TypeFlag::BlockDevice => EntryKind::BlockDevice,
            TypeFlag::Directory => EntryKind::Directory,
            TypeFlag::Fifo => EntryKind::Fifo,
            TypeFlag::OldSparse => {
                return Err(Error::layer(
                    &path,
                    "sparse files are not supported; write the archive without them",
                ));
            }
            other => {
                return Err(Error::layer(
                    &path,
                    format!("entry type {:?} is not supported", char::from(other.byte())),
                ));
            }
        };
        Ok(Entry {
            path,
            meta,
            kind,
            opaque: ext.opaque,
            redirect: ext.redirect,
        })
    }

    /// A file whose content begins with a list of where there is data (GNU's PAX format 1.0).
    fn with_holes(&self, start: u64, content: &Content, real_size: Option<u64>) -> Result<Content> {
        let real_size = real_size.filter(|size| *size <= MAX_SIZE);
        let real_size = real_size.ok_or_else(|| self.bad(start, "a file with holes and without a size"))?;
        let map = atoll_archive::read_sparse_map(&mut content.reader(), content.len(), real_size);
        let (map, taken) = map.map_err(|error| self.bad(start, error.to_string()))?;
        let data = content.slice(taken, content.len() - taken)?;
        Ok(Content::sparse(data, &map, real_size))
    }

    /// The block that lies here; `None` at the end of the archive.
    fn read_block(&self) -> Result<Option<[u8; format::BLOCK]>> {
        if self.at >= self.archive.len() {
            return Ok(None);
        }
        if self.at + BLOCK > self.archive.len() {
            return Err(self.bad(self.at, "cut short in a header"));
        }
        let mut block = [0; format::BLOCK];
        self.archive.read_at(&mut block, self.at)?;
        Ok(Some(block))
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
    opaque: bool,
    redirect: Option<Vec<u8>>,
    sparse: bool,
    sparse_name: Option<Vec<u8>>,
    real_size: Option<u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Extension {
    fn read_pax(&mut self, body: &[u8]) -> Result<(), String> {
        for record in format::records(body) {
            let (key, value) = record.map_err(|bad| bad.0)?;
            self.set(key, value)?;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let number = || format::decimal(value).ok_or_else(|| format!("PAX {} is not a number", show(key)));
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(number()?.min(u64::from(u32::MAX))),
            b"gid" => self.gid = Some(number()?.min(u64::from(u32::MAX))),
            b"mtime" => self.mtime = format::time(value).map(mtime),
            b"SCHILY.xattr.trusted.overlay.opaque" => self.opaque = value == b"y",
            b"SCHILY.xattr.trusted.overlay.redirect" => self.redirect = Some(value.to_vec()),
            b"GNU.sparse.major" if value == b"1" => self.sparse = true,
            b"GNU.sparse.minor" if value == b"0" => {}
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" => self.real_size = Some(number()?),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    if name.starts_with(b"user.") || name == b"security.capability" {
                        self.xattrs.insert(name.to_vec(), value.to_vec());
                    }
                } else if key.starts_with(b"GNU.sparse.") {
                    return Err(
                        "holes are written in a way that is not read here; write the archive without them"
                            .into(),
                    );
                }
            }
        }
        Ok(())
    }
}

/// Images have no times before 1970.
fn mtime((secs, nanos): (i64, u32)) -> Mtime {
    u64::try_from(secs).map_or_else(|_| Mtime::default(), |secs| Mtime { secs, nanos })
}

/// Negative numbers become zero, since only times can be negative.
fn number(read: Result<u64, BadNumber>) -> Option<u64> {
    match read {
        Err(BadNumber::Negative) => Some(0),
        read => read.ok(),
    }
}

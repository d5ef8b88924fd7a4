//! One entry of the stream: 512 bytes as POSIX has them, preceded by a PAX header for what does not fit in there.
//!
//! ```text
//!   [x header][key=value records, padded]   only if needed: long or odd names, fractions of a second, large numbers, notes
//!   [header][content, padded to 512]
//!   ...
//!   [zeros][zeros]                          the end; without it the stream is torn
//! ```

use std::io::{self, Read, Write};

use crate::format::{self, BLOCK, Header, TypeFlag, padding};
use crate::sparse::{self, Map};
use crate::{LARGEST_FILE, LONGEST_NAME, LONGEST_PATH, LONGEST_TARGET, invalid, shown};

/// Of all records before one entry.
const LONGEST_RECORDS: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    Directory,
    Fifo,
    Whiteout,
    /// A device that is none of the above; only ever read.
    Device,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Relative, plain names between single slashes; empty for the root of the tree.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    /// Of a symlink whatever it says, of a hard link a path like `path`.
    pub(crate) target: Vec<u8>,
    /// Bytes that follow in the stream.
    pub(crate) size: u64,
    /// The size of a file with holes; its content begins with a map, unless `map` has it.
    pub(crate) real_size: Option<u64>,
    /// Where a file with holes has data, if it was written in GNU's old way; only ever read.
    pub(crate) map: Option<Map>,
    pub(crate) opaque: bool,
    pub(crate) redirect: Option<Vec<u8>>,
}

impl Entry {
    pub(crate) fn new(path: &[u8], kind: Kind) -> Self {
        Self {
            path: path.to_vec(),
            kind,
            mode: 0,
            uid: 0,
            gid: 0,
            mtime: (0, 0),
            target: Vec::new(),
            size: 0,
            real_size: None,
            map: None,
            opaque: false,
            redirect: None,
        }
    }

    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut name = self.path.clone();
        if name.is_empty() {
            name.push(b'.');
        }
        if self.kind == Kind::Directory {
            name.push(b'/');
        }
        let records = self.records(&name);
        if !records.is_empty() {
            let header = Raw {
                name: b"PaxHeader",
                link: b"",
                flag: TypeFlag::Pax,
                mode: 0o644,
                ids: (0, 0),
                size: records.len() as u64,
                mtime: 0,
            };
            out.write_all(&header.block())?;
            out.write_all(&records)?;
            out.write_all(padding(records.len() as u64))?;
        }
        let header = Raw {
            name: &name,
            link: &self.target,
            flag: match self.kind {
                Kind::File => TypeFlag::File,
                Kind::HardLink => TypeFlag::HardLink,
                Kind::Symlink => TypeFlag::Symlink,
                Kind::Whiteout | Kind::Device => TypeFlag::CharDevice,
                Kind::Directory => TypeFlag::Directory,
                Kind::Fifo => TypeFlag::Fifo,
            },
            mode: self.mode,
            ids: (self.uid, self.gid),
            size: self.size,
            mtime: self.mtime.0,
        };
        out.write_all(&header.block())
    }

    fn records(&self, name: &[u8]) -> Vec<u8> {
        let mut records = Vec::new();
        let odd = |bytes: &[u8]| std::str::from_utf8(bytes).is_err();
        let (long_name, long_target) = (
            name.len() > 100 || odd(name),
            self.target.len() > 100 || odd(&self.target),
        );
        if odd(name) || odd(&self.target) {
            record(&mut records, "hdrcharset", b"BINARY");
        }
        if let Some(real) = self.real_size {
            record(&mut records, "GNU.sparse.major", b"1");
            record(&mut records, "GNU.sparse.minor", b"0");
            record(&mut records, "GNU.sparse.name", name);
            record(&mut records, "GNU.sparse.realsize", real.to_string().as_bytes());
        }
        if long_name {
            record(&mut records, "path", name);
        }
        if long_target {
            record(&mut records, "linkpath", &self.target);
        }
        for (key, id) in [("uid", self.uid), ("gid", self.gid)] {
            if u64::from(id) > octal_limit(8) {
                record(&mut records, key, id.to_string().as_bytes());
            }
        }
        if self.size > octal_limit(12) {
            record(&mut records, "size", self.size.to_string().as_bytes());
        }
        let (seconds, nanos) = self.mtime;
        if nanos != 0 || u64::try_from(seconds).map_or(true, |seconds| seconds > octal_limit(12)) {
            record(&mut records, "mtime", time_text(seconds, nanos).as_bytes());
        }
        if self.opaque {
            record(&mut records, OPAQUE, b"y");
        }
        if let Some(redirect) = &self.redirect {
            record(&mut records, REDIRECT, redirect);
        }
        records
    }
}

const OPAQUE: &str = "SCHILY.xattr.trusted.overlay.opaque";
const REDIRECT: &str = "SCHILY.xattr.trusted.overlay.redirect";

/// `<length> <key>=<value>\n`, where the length counts itself.
fn record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Before 1970 the fraction still counts forward: -1.25 s are 2 seconds less and 750 million nanoseconds more.
fn time_text(seconds: i64, nanos: u32) -> String {
    match (seconds, nanos) {
        (seconds, 0) => seconds.to_string(),
        (seconds @ 0.., nanos) => format!("{seconds}.{nanos:09}"),
        (seconds, nanos) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
    }
}

fn octal_limit(width: u32) -> u64 {
    (1 << (3 * (width - 1))) - 1
}

struct Raw<'a> {
    name: &'a [u8],
    link: &'a [u8],
    flag: TypeFlag,
    mode: u32,
    ids: (u32, u32),
    size: u64,
    mtime: i64,
}

impl Raw<'_> {
    fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        // What does not fit stands in a record before; a reader that knows none gets the beginning.
        let text = |block: &mut [u8; BLOCK], at: usize, width: usize, bytes: &[u8]| {
            let length = bytes.len().min(width);
            block[at..at + length].copy_from_slice(&bytes[..length]);
        };
        let octal = |block: &mut [u8; BLOCK], at: usize, width: usize, value: u64| {
            let value = value.min((1 << (3 * (width - 1))) - 1);
            let digits = format!("{value:0>width$o}", width = width - 1);
            block[at..at + width - 1].copy_from_slice(digits.as_bytes());
        };
        text(&mut block, 0, 100, self.name);
        octal(&mut block, 100, 8, u64::from(self.mode & 0o7777));
        octal(&mut block, 108, 8, u64::from(self.ids.0));
        octal(&mut block, 116, 8, u64::from(self.ids.1));
        octal(&mut block, 124, 12, self.size);
        octal(&mut block, 136, 12, u64::try_from(self.mtime).unwrap_or(0));
        block[156] = self.flag.byte();
        text(&mut block, 157, 100, self.link);
        text(&mut block, 257, 8, b"ustar\x0000");
        octal(&mut block, 329, 8, 0);
        octal(&mut block, 337, 8, 0);
        format::seal(&mut block);
        block
    }
}

pub(crate) fn write_end(out: &mut dyn Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK])?;
    out.flush()
}

/// What records and GNU's own entries say about the entry that follows.
#[derive(Debug, Default)]
struct Extra {
    path: Option<Vec<u8>>,
    sparse_name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    sparse: (Option<u64>, Option<u64>),
    real_size: Option<u64>,
    opaque: bool,
    redirect: Option<Vec<u8>>,
}

/// The next entry; `None` at the proper end of the stream.
pub(crate) fn read(input: &mut dyn Read) -> io::Result<Option<Entry>> {
    let mut extra = Extra::default();
    let mut block = [0; BLOCK];
    loop {
        read_whole(input, &mut block)?;
        let header = Header::parse(&block)
            .map_err(|_| invalid("this is not a tar stream, or it is damaged: a header's sum is wrong"))?;
        let Some(header) = header else {
            return Ok(None);
        };
        let size = header
            .size()
            .map_err(|_| invalid("a header's size is no number"))?;
        match header.flag() {
            TypeFlag::Pax => extra.take_records(&read_text(input, size, LONGEST_RECORDS)?)?,
            TypeFlag::PaxGlobal => drop(read_text(input, size, LONGEST_RECORDS)?),
            TypeFlag::LongName => extra.path = Some(read_long(input, size)?),
            TypeFlag::LongLink => extra.target = Some(read_long(input, size)?),
            TypeFlag::OldSparse => {
                let (map, real_size) = old_map(input, &block)?;
                let mut entry = entry(&header, size, extra)?;
                sparse::check(&map, entry.size, real_size)?;
                (entry.map, entry.real_size) = (Some(map), Some(real_size));
                return Ok(Some(entry));
            }
            _ => return entry(&header, size, extra).map(Some),
        }
    }
}

/// A name, or the target of a link, that stands before its entry.
fn read_long(input: &mut dyn Read, size: u64) -> io::Result<Vec<u8>> {
    let text = read_text(input, size, LONGEST_PATH as u64 + 2)?;
    Ok(format::text(&text).to_vec())
}

/// GNU's old way to write holes: four pieces in the header, 21 in each block that follows it, and the size of the whole.
fn old_map(input: &mut dyn Read, block: &[u8; BLOCK]) -> io::Result<(Map, u64)> {
    let damaged = || invalid("the list of a file's pieces is damaged");
    let real_size = format::number(&block[483..495])
        .ok()
        .filter(|size| *size <= LARGEST_FILE)
        .ok_or_else(damaged)?;
    let mut map = Map::new();
    let mut take = |list: &[u8]| {
        for piece in list.chunks_exact(24).take_while(|piece| piece[0] != 0) {
            let number = |field: &[u8]| format::number(field).map_err(|_| damaged());
            map.push((number(&piece[..12])?, number(&piece[12..])?));
        }
        match map.len() as u64 > sparse::MOST_PIECES {
            true => Err(damaged()),
            false => Ok(()),
        }
    };
    take(&block[386..482])?;
    let mut more = block[482] != 0;
    while more {
        let mut block = [0; BLOCK];
        read_whole(input, &mut block)?;
        take(&block[..504])?;
        more = block[504] != 0;
    }
    Ok((map, real_size))
}

fn entry(header: &Header<'_>, size: u64, extra: Extra) -> io::Result<Entry> {
    let name = extra.sparse_name.or(extra.path).unwrap_or_else(|| header.name());
    let kind = match header.flag().of_name(&name) {
        TypeFlag::File | TypeFlag::OldSparse => Kind::File,
        TypeFlag::HardLink => Kind::HardLink,
        TypeFlag::Symlink => Kind::Symlink,
        TypeFlag::CharDevice => match header.device() {
            // What is no number there is no device.
            (major, minor) if major.unwrap_or(0) == 0 && minor.unwrap_or(0) == 0 => Kind::Whiteout,
            _ => Kind::Device,
        },
        TypeFlag::BlockDevice => Kind::Device,
        TypeFlag::Directory => Kind::Directory,
        TypeFlag::Fifo => Kind::Fifo,
        other => {
            return Err(invalid(format!(
                "{}: entries of type {:?} are not known here",
                shown(&name),
                char::from(other.byte())
            )));
        }
    };
    let path = clean(&name)?;
    let target = extra.target.unwrap_or_else(|| header.link().to_vec());
    let target = match kind {
        Kind::HardLink => clean(&target)?,
        Kind::Symlink if target.is_empty() || target.len() > LONGEST_TARGET || target.contains(&0) => {
            return Err(invalid(format!("{}: a symlink to nowhere", shown(&path))));
        }
        Kind::Symlink => target,
        _ => Vec::new(),
    };
    let real_size = match extra.sparse {
        (None, None) => None,
        (Some(1), Some(0)) if extra.real_size.is_some() && kind == Kind::File => extra.real_size,
        _ => return Err(old_sparse(&path)),
    };
    let size = match kind {
        Kind::File => extra.size.unwrap_or(size),
        _ => 0,
    };
    if size.max(real_size.unwrap_or(0)) > LARGEST_FILE {
        return Err(invalid(format!("{}: no file is that large", shown(&path))));
    }
    Ok(Entry {
        size,
        mode: (header.mode().unwrap_or(0) & 0o7777) as u32,
        uid: extra.uid.unwrap_or_else(|| id_of(header.uid().unwrap_or(0))),
        gid: extra.gid.unwrap_or_else(|| id_of(header.gid().unwrap_or(0))),
        mtime: extra
            .mtime
            .unwrap_or((i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0), 0)),
        path,
        kind,
        target,
        real_size,
        map: None,
        opaque: extra.opaque,
        redirect: extra.redirect,
    })
}

fn old_sparse(path: &[u8]) -> io::Error {
    invalid(format!(
        "{}: holes are written in a way that is not read here; use tar --format=pax --sparse-version=1.0",
        shown(path)
    ))
}

/// One that does not fit is nobody's.
fn id_of(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(crate::NOBODY)
}

impl Extra {
    fn take_records(&mut self, records: &[u8]) -> io::Result<()> {
        for record in format::records(records) {
            let (key, value) = record.map_err(|_| invalid("a PAX record is damaged"))?;
            self.take(key, value).ok_or_else(|| {
                let record = [key, b"=", value].concat();
                invalid(format!("the PAX record {} makes no sense", shown(&record)))
            })?;
        }
        Ok(())
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let number = || format::decimal(value);
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.target = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(id_of(number()?)),
            b"gid" => self.gid = Some(id_of(number()?)),
            b"mtime" => self.mtime = Some(format::time(value)?),
            b"GNU.sparse.major" => self.sparse.0 = Some(number()?),
            b"GNU.sparse.minor" => self.sparse.1 = Some(number()?),
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" => self.real_size = Some(number()?),
            // Older ways to write holes, which without this would look like plain files with the wrong content.
            b"GNU.sparse.map" | b"GNU.sparse.numblocks" | b"GNU.sparse.size" => self.sparse.0 = Some(0),
            _ if key == OPAQUE.as_bytes() => self.opaque = value == b"y",
            _ if key == REDIRECT.as_bytes() => self.redirect = Some(value.to_vec()),
            // Times nobody keeps, attributes, comments.
            _ => {}
        }
        Some(())
    }
}

/// A path from the stream as [`Entry::path`] has it; refuses what could lead elsewhere.
fn clean(name: &[u8]) -> io::Result<Vec<u8>> {
    let refuse = |why: &str| Err(invalid(format!("{}: {why}", shown(name))));
    if name.starts_with(b"/") {
        return refuse("absolute names are not taken");
    }
    let mut path = Vec::with_capacity(name.len());
    for part in name.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => continue,
            b".." => return refuse("names that climb are not taken"),
            part if part.len() > LONGEST_NAME => return refuse("a name longer than 255 bytes"),
            part if part.contains(&0) => return refuse("a name with a zero byte"),
            part => {
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(part);
            }
        }
    }
    if path.len() > LONGEST_PATH {
        return refuse("the path is too long");
    }
    Ok(path)
}

fn read_text(input: &mut dyn Read, size: u64, most: u64) -> io::Result<Vec<u8>> {
    if size > most {
        return Err(invalid(format!(
            "a header of {size} bytes; at most {most} are read"
        )));
    }
    let mut text = vec![0; size as usize];
    read_whole(input, &mut text)?;
    let mut rest = [0; BLOCK];
    read_whole(input, &mut rest[..padding(size).len()])?;
    Ok(text)
}

pub(crate) fn read_whole(input: &mut dyn Read, bytes: &mut [u8]) -> io::Result<()> {
    input.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the stream ends early"),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(entry: &Entry) -> Entry {
        let mut bytes = Vec::new();
        entry.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() % BLOCK, 0);
        read(&mut bytes.as_slice()).unwrap().unwrap()
    }

    #[test]
    fn an_entry_survives() {
        for path in [&b"a"[..], b"", b"d/\xff\n=", &b"x/".repeat(400)[..799]] {
            for mtime in [
                (0, 0),
                (-1, 750_000_000),
                (-2, 1),
                (1 << 40, 5),
                (1_700_000_000, 0),
            ] {
                let entry = Entry {
                    mode: 0o4751,
                    uid: 1000,
                    gid: u32::MAX - 1,
                    mtime,
                    size: 1 << 40,
                    real_size: Some(1 << 50),
                    ..Entry::new(path, Kind::File)
                };
                assert_eq!(through(&entry), entry);
            }
        }
        let moved = Entry {
            opaque: true,
            redirect: Some(b"/a/\xff".to_vec()),
            ..Entry::new(b"moved", Kind::Directory)
        };
        assert_eq!(through(&moved), moved);
        for kind in [Kind::Symlink, Kind::HardLink] {
            let link = Entry {
                target: vec![b'\xfe'; 250],
                ..Entry::new(b"l", kind)
            };
            assert_eq!(through(&link), link);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in [
            &b"/etc/passwd"[..],
            b"../x",
            b"a/../../x",
            b"a/..",
            &[b'n'; 256],
            b"a\0b",
        ] {
            assert!(clean(name).is_err(), "{}", shown(name));
        }
        assert!(clean(&b"ab/".repeat(LONGEST_PATH / 2)).is_err());
        assert_eq!(clean(b"./a//b/./").unwrap(), b"a/b");
        assert_eq!(clean(b"./").unwrap(), b"");
    }

    #[test]
    fn sizes_stay_far_from_the_end_of_numbers() {
        for (size, real_size) in [(u64::MAX, None), ((1 << 50) + 1, None), (512, Some(u64::MAX))] {
            let entry = Entry {
                size,
                real_size,
                ..Entry::new(b"a", Kind::File)
            };
            let mut bytes = Vec::new();
            entry.write(&mut bytes).unwrap();
            let error = read(&mut bytes.as_slice()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn lengths_are_not_believed() {
        let mut bytes = Vec::new();
        let header = Raw {
            name: b"PaxHeader",
            link: b"",
            flag: TypeFlag::Pax,
            mode: 0,
            ids: (0, 0),
            size: 1 << 32,
            mtime: 0,
        };
        bytes.extend_from_slice(&header.block());
        assert!(read(&mut bytes.as_slice()).is_err());
        for records in [
            &b"99 a=b\n"[..],
            b"0 a=b\n",
            b"6 a=bX",
            b"x a=b\n",
            b"5 ab\n",
            b"12 size=12a3\n",
        ] {
            assert!(
                Extra::default().take_records(records).is_err(),
                "{}",
                shown(records)
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..4096), fix in proptest::bool::ANY) {
            if fix && bytes.len() >= BLOCK {
                let mut block: [u8; BLOCK] = bytes[..BLOCK].try_into().unwrap();
                format::seal(&mut block);
                bytes[..BLOCK].copy_from_slice(&block);
            }
            let _ = read(&mut bytes.as_slice());
        }
    }
}

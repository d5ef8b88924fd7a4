//! One entry of the stream: 512 bytes as POSIX has them, preceded by a PAX header for what does not fit in there.
//!
//! ```text
//!   [x header][key=value records, padded]   only if needed: long or odd names, fractions of a second, large numbers, notes
//!   [header][content, padded to 512]
//!   ...
//!   [zeros][zeros]                          the end; without it the stream is torn
//! ```

use std::io::{self, Read, Write};

use crate::sparse::{self, Map};
use crate::{LARGEST_FILE, LONGEST_NAME, LONGEST_PATH, LONGEST_TARGET, invalid, shown};

pub(crate) const BLOCK: usize = 512;
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
                flag: b'x',
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
                Kind::File => b'0',
                Kind::HardLink => b'1',
                Kind::Symlink => b'2',
                Kind::Whiteout | Kind::Device => b'3',
                Kind::Directory => b'5',
                Kind::Fifo => b'6',
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

fn time_of(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let mut nanos = 0;
    for digit in fraction.chars().chain(std::iter::repeat('0')).take(9) {
        nanos = nanos * 10 + digit.to_digit(10)?;
    }
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

fn octal_limit(width: u32) -> u64 {
    (1 << (3 * (width - 1))) - 1
}

struct Raw<'a> {
    name: &'a [u8],
    link: &'a [u8],
    flag: u8,
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
        block[156] = self.flag;
        text(&mut block, 157, 100, self.link);
        text(&mut block, 257, 8, b"ustar\x0000");
        octal(&mut block, 329, 8, 0);
        octal(&mut block, 337, 8, 0);
        let sum = format!("{:06o}\0 ", checksum(&block));
        block[148..156].copy_from_slice(sum.as_bytes());
        block
    }
}

/// The sum of all bytes, with blanks in place of the sum itself.
fn checksum(block: &[u8; BLOCK]) -> u32 {
    let bytes = block.iter().enumerate();
    bytes
        .map(|(at, byte)| {
            if (148..156).contains(&at) {
                32
            } else {
                u32::from(*byte)
            }
        })
        .sum()
}

/// The zeros after content of this length.
pub(crate) fn padding(length: u64) -> &'static [u8] {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    &ZEROS[..(length.next_multiple_of(BLOCK as u64) - length) as usize]
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
        if block == [0; BLOCK] {
            return Ok(None);
        }
        if parse_number(&block[148..156]) != Some(u64::from(checksum(&block))) {
            return Err(invalid(
                "this is not a tar stream, or it is damaged: a header's sum is wrong",
            ));
        }
        let size = parse_number(&block[124..136]).ok_or_else(|| invalid("a header's size is no number"))?;
        match block[156] {
            b'x' => extra.take_records(&read_text(input, size, LONGEST_RECORDS)?)?,
            // For all entries: programs put comments there.
            b'g' => drop(read_text(input, size, LONGEST_RECORDS)?),
            b'L' => extra.path = Some(c_text(&read_text(input, size, LONGEST_PATH as u64 + 2)?).to_vec()),
            b'K' => extra.target = Some(c_text(&read_text(input, size, LONGEST_PATH as u64 + 2)?).to_vec()),
            b'S' => {
                let (map, real_size) = old_map(input, &block)?;
                let mut entry = entry(&block, size, extra)?;
                sparse::check(&map, entry.size, real_size)?;
                (entry.map, entry.real_size) = (Some(map), Some(real_size));
                return Ok(Some(entry));
            }
            _ => return entry(&block, size, extra).map(Some),
        }
    }
}

/// GNU's old way to write holes: four pieces in the header, 21 in each block that follows it, and the size of the whole.
fn old_map(input: &mut dyn Read, block: &[u8; BLOCK]) -> io::Result<(Map, u64)> {
    let damaged = || invalid("the list of a file's pieces is damaged");
    let real_size = parse_number(&block[483..495])
        .filter(|size| *size <= LARGEST_FILE)
        .ok_or_else(damaged)?;
    let mut map = Map::new();
    let mut take = |list: &[u8]| {
        for piece in list.chunks_exact(24).take_while(|piece| piece[0] != 0) {
            let number = |field: &[u8]| parse_number(field).ok_or_else(damaged);
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

fn entry(block: &[u8; BLOCK], size: u64, extra: Extra) -> io::Result<Entry> {
    let number = |from: usize, to: usize| parse_number(&block[from..to]).unwrap_or(0);
    let name = match extra.sparse_name.or(extra.path) {
        Some(name) => name,
        None => {
            let (prefix, name) = (c_text(&block[345..500]), c_text(&block[..100]));
            // Only in POSIX headers; GNU's have other things there.
            if prefix.is_empty() || &block[257..263] != b"ustar\0" {
                name.to_vec()
            } else {
                [prefix, b"/", name].concat()
            }
        }
    };
    let kind = match block[156] {
        // Before POSIX a directory was a file whose name ends with a slash.
        b'0' | 0 | b'7' if name.ends_with(b"/") => Kind::Directory,
        b'0' | 0 | b'7' | b'S' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' if number(329, 337) == 0 && number(337, 345) == 0 => Kind::Whiteout,
        b'3' | b'4' => Kind::Device,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        other => {
            return Err(invalid(format!(
                "{}: entries of type {:?} are not known here",
                shown(&name),
                char::from(other)
            )));
        }
    };
    let path = clean(&name)?;
    let target = extra.target.unwrap_or_else(|| c_text(&block[157..257]).to_vec());
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
        mode: (number(100, 108) & 0o7777) as u32,
        uid: extra.uid.unwrap_or_else(|| id_of(number(108, 116))),
        gid: extra.gid.unwrap_or_else(|| id_of(number(116, 124))),
        mtime: extra
            .mtime
            .unwrap_or((i64::try_from(number(136, 148)).unwrap_or(0), 0)),
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
    fn take_records(&mut self, mut records: &[u8]) -> io::Result<()> {
        let torn = || invalid("a PAX record is damaged");
        while !records.is_empty() {
            let blank = records
                .iter()
                .take(8)
                .position(|byte| *byte == b' ')
                .ok_or_else(torn)?;
            let length: usize = ascii(&records[..blank])
                .and_then(|text| text.parse().ok())
                .ok_or_else(torn)?;
            if length > records.len() || length < blank + 3 || records[length - 1] != b'\n' {
                return Err(torn());
            }
            let body = &records[blank + 1..length - 1];
            let equals = body.iter().position(|byte| *byte == b'=').ok_or_else(torn)?;
            self.take(&body[..equals], &body[equals + 1..])
                .ok_or_else(|| invalid(format!("the PAX record {} makes no sense", shown(body))))?;
            records = &records[length..];
        }
        Ok(())
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let number = || ascii(value)?.parse::<u64>().ok();
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.target = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(id_of(number()?)),
            b"gid" => self.gid = Some(id_of(number()?)),
            b"mtime" => self.mtime = Some(time_of(ascii(value)?)?),
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

/// Octal digits, or as GNU has it for large numbers: a set bit and big-endian bytes.
fn parse_number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (first, rest) = field.split_first()?;
        let (high, low) = rest.split_at(rest.len().saturating_sub(8));
        // Negative, or too large for anything.
        if *first != 0x80 || high.iter().any(|byte| *byte != 0) {
            return None;
        }
        return Some(low.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
    }
    let text = ascii(c_text(field))?.trim_matches(' ');
    if text.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(text, 8).ok()
}

fn ascii(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// Up to the first zero.
fn c_text(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
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
            flag: b'x',
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
                let sum = format!("{:06o}\0 ", checksum(&block));
                block[148..156].copy_from_slice(sum.as_bytes());
                bytes[..BLOCK].copy_from_slice(&block);
            }
            let _ = read(&mut bytes.as_slice());
        }
    }
}

//! The tar format, as GNU tar, Python and everyone else read it: 512-byte headers, long names and numbers the GNU way
//! when written, both GNU's and pax's when read.

use crate::failure::{Outcome, invalid, show};

pub(crate) const BLOCK: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    Directory,
    /// GNU: the next member's name, or link target, is this member's content.
    LongName,
    LongLink,
    /// Attributes of the next member.
    Pax,
    /// Attributes of all; nothing that we need.
    PaxGlobal,
    /// Devices, FIFOs, sparse files and what may come.
    Other(u8),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) modified: i64,
}

/// How many zero bytes follow content of this size.
pub(crate) fn padding(size: u64) -> usize {
    let over = usize::try_from(size % BLOCK as u64).unwrap_or(0);
    (BLOCK - over) % BLOCK
}

impl Header {
    /// Appends the header, with the members for long names before it.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        for (kind, long) in [(b'L', &self.name), (b'K', &self.link)] {
            if long.len() > 100 {
                let carrier = Self {
                    name: b"././@LongLink".to_vec(),
                    link: Vec::new(),
                    kind: Kind::Other(kind),
                    mode: 0o644,
                    uid: 0,
                    gid: 0,
                    size: long.len() as u64 + 1,
                    modified: 0,
                };
                carrier.write_block(out);
                out.extend_from_slice(long);
                let padding = 1 + padding(carrier.size);
                out.resize(out.len() + padding, 0);
            }
        }
        self.write_block(out);
    }

    fn write_block(&self, out: &mut Vec<u8>) {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8], most: usize| {
            let length = bytes.len().min(most);
            block[at..at + length].copy_from_slice(&bytes[..length]);
        };
        put(0, &self.name, 100);
        put(100, &number(u64::from(self.mode), 8), 8);
        put(108, &number(u64::from(self.uid), 8), 8);
        put(116, &number(u64::from(self.gid), 8), 8);
        put(124, &number(self.size, 12), 12);
        put(136, &number(self.modified.max(0).unsigned_abs(), 12), 12);
        put(148, b"        ", 8);
        let kind = match self.kind {
            Kind::File => b'0',
            Kind::HardLink => b'1',
            Kind::Symlink => b'2',
            Kind::Directory => b'5',
            Kind::LongName => b'L',
            Kind::LongLink => b'K',
            Kind::Pax => b'x',
            Kind::PaxGlobal => b'g',
            Kind::Other(kind) => kind,
        };
        put(156, &[kind], 1);
        put(157, &self.link, 100);
        put(257, b"ustar  \0", 8);
        let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend_from_slice(&block);
    }

    /// `None` for a block of zeros, which ends the archive.
    pub(crate) fn parse(block: &[u8; BLOCK]) -> Outcome<Option<Self>> {
        if block.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        let claimed = parse_number(&block[148..156])?;
        let sum: u64 = block
            .iter()
            .enumerate()
            .map(|(at, &byte)| u64::from(if (148..156).contains(&at) { b' ' } else { byte }))
            .sum();
        if sum != claimed {
            return Err(invalid("not a tar stream: a header's checksum is wrong"));
        }
        let mut name = text(&block[..100]).to_vec();
        let prefix = text(&block[345..500]);
        // GNU's own headers use the prefix's place for other things.
        if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
            name = [prefix, b"/", &name].concat();
        }
        let kind = match block[156] {
            b'0' | b'\0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'5' => Kind::Directory,
            b'L' => Kind::LongName,
            b'K' => Kind::LongLink,
            b'x' => Kind::Pax,
            b'g' => Kind::PaxGlobal,
            other => Kind::Other(other),
        };
        let small = |at: usize| -> Outcome<u32> {
            let number = parse_number(&block[at..at + 8])?;
            Ok(u32::try_from(number).unwrap_or(0))
        };
        Ok(Some(Self {
            name,
            link: text(&block[157..257]).to_vec(),
            kind,
            mode: small(100)?,
            uid: small(108)?,
            gid: small(116)?,
            size: parse_number(&block[124..136])?,
            modified: i64::try_from(parse_number(&block[136..148]).unwrap_or(0)).unwrap_or(0),
        }))
    }
}

/// Octal, or GNU's binary form where that is too short.
fn number(value: u64, width: usize) -> Vec<u8> {
    let digits = width - 1;
    let octal = format!("{value:0digits$o}\0");
    if octal.len() <= width {
        return octal.into_bytes();
    }
    let mut binary = vec![0; width];
    binary[width - 8..].copy_from_slice(&value.to_be_bytes());
    binary[0] |= 0x80;
    binary
}

fn parse_number(field: &[u8]) -> Outcome<u64> {
    if field[0] & 0x80 != 0 {
        // Negative numbers (0xff...) and those beyond 63 bits are nobody's size.
        let low = &field[field.len().saturating_sub(8).max(1)..];
        let high = &field[1..field.len() - low.len()];
        if field[0] != 0x80 || high.iter().any(|&byte| byte != 0) {
            return Err(invalid("a tar header carries an impossible number"));
        }
        return Ok(low.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)));
    }
    let mut value = 0u64;
    for &byte in field.iter().skip_while(|&&byte| byte == b' ') {
        match byte {
            b'0'..=b'7' => value = (value & (u64::MAX >> 3)) << 3 | u64::from(byte - b'0'),
            b' ' | b'\0' => break,
            _ => return Err(invalid("not a tar stream: a header's number is malformed")),
        }
    }
    Ok(value)
}

fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// What a pax record says about the next member, as far as it matters here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
}

impl Attributes {
    pub(crate) fn take_pax(&mut self, mut records: &[u8]) -> Outcome {
        let malformed = || invalid("not a tar stream: a pax record is malformed");
        while !records.is_empty() {
            let space = records
                .iter()
                .position(|&byte| byte == b' ')
                .ok_or_else(malformed)?;
            let length: usize = std::str::from_utf8(&records[..space])
                .ok()
                .and_then(|digits| digits.parse().ok())
                .filter(|&length| length > space + 1 && length <= records.len())
                .ok_or_else(malformed)?;
            let record = &records[space + 1..length - 1];
            records = &records[length..];
            let equals = record
                .iter()
                .position(|&byte| byte == b'=')
                .ok_or_else(malformed)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.name = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => {
                    let size = std::str::from_utf8(value)
                        .ok()
                        .and_then(|digits| digits.parse().ok());
                    self.size = Some(size.ok_or_else(malformed)?);
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(crate) fn apply(self, header: &mut Header) {
        if let Some(name) = self.name {
            header.name = name;
        }
        if let Some(link) = self.link {
            header.link = link;
        }
        if let Some(size) = self.size {
            header.size = size;
        }
    }
}

/// The components of a member's name, none of which leads outside. Empty for the directory itself.
pub(crate) fn safe_components(name: &[u8]) -> Outcome<Vec<&[u8]>> {
    if name.first() == Some(&b'/') {
        return Err(invalid(format!("the member {} has an absolute name", show(name))));
    }
    if name.contains(&0) || name.len() > 4095 {
        return Err(invalid("a member's name is not a name"));
    }
    let components: Vec<&[u8]> = name
        .split(|&byte| byte == b'/')
        .filter(|component| !component.is_empty() && *component != b".")
        .collect();
    if components.contains(&&b".."[..]) {
        return Err(invalid(format!("the member {} would land outside", show(name))));
    }
    Ok(components)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &[u8], size: u64) -> Header {
        Header {
            name: name.to_vec(),
            link: Vec::new(),
            kind: Kind::File,
            mode: 0o640,
            uid: 1000,
            gid: 3_000_000,
            size,
            modified: 1_700_000_000,
        }
    }

    fn parse(bytes: &[u8]) -> Outcome<Option<Header>> {
        Header::parse(bytes.try_into().expect("a block"))
    }

    #[test]
    fn headers_survive_the_round_trip() {
        for size in [0, 1, 511, 1 << 40] {
            let written = header(b"a/\xff", size);
            let mut block = Vec::new();
            written.write(&mut block);
            assert_eq!(parse(&block), Ok(Some(written)));
        }
    }

    #[test]
    fn long_names_go_before_their_member() {
        let name = [b'n'; 300];
        let mut bytes = Vec::new();
        header(&name, 5).write(&mut bytes);
        assert_eq!(bytes.len(), 3 * BLOCK);
        let carrier = parse(&bytes[..BLOCK]).expect("valid").expect("a header");
        assert_eq!((carrier.kind, carrier.size), (Kind::LongName, 301));
        assert_eq!(&bytes[BLOCK..BLOCK + 300], &name);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let mut block = Vec::new();
        header(b"x", 5).write(&mut block);
        block[0] = b'y';
        assert!(parse(&block).is_err(), "wrong checksum");
        assert_eq!(parse(&[0; BLOCK]), Ok(None));
        assert!(parse(&[b'z'; BLOCK]).is_err());
        assert!(parse_number(&[0xff; 12]).is_err());
        assert!(parse_number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }

    #[test]
    fn pax_records() {
        let mut attributes = Attributes::default();
        attributes
            .take_pax(b"12 path=a/b\n11 size=42\n21 mtime=123456789.5\n")
            .expect("valid");
        assert_eq!(
            (attributes.name, attributes.size),
            (Some(b"a/b".to_vec()), Some(42))
        );
        for bad in [
            &b"x path=a\n"[..],
            b"99 path=a\n",
            b"0 path=a\n",
            b"1 ",
            b"5 abc\n",
            b"12 size=nan!\n",
        ] {
            assert!(Attributes::default().take_pax(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_stay_inside() {
        assert_eq!(safe_components(b"./a//b/").expect("fine"), [b"a", b"b"]);
        assert_eq!(safe_components(b".").expect("fine"), [b"" as &[u8]; 0]);
        for bad in [&b"/etc/passwd"[..], b"../x", b"a/../../x", b"a/..", b"a\0b"] {
            assert!(safe_components(bad).is_err(), "{bad:?}");
        }
        assert!(safe_components(b"..a/b..").is_ok());
    }
}
